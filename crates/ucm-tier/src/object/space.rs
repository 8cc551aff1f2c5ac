//! What may be written: one document that writers change by compare-and-swap
//! ([`ucm_quota::space_document`]).
//!
//! A segment is opened only for bytes that were granted. Who counts makes room
//! ([`super::collector`]). A server without conditional writes ([`super::conditions`]) cannot keep
//! a limit that several share: there segments go by their age alone, and the log says so.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::{info, warn};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::IoJob;
use ucm_quota::space_document::{HOLDS, Silence, SpaceDocument, Use};
use ucm_quota::{Pause, Usage, patience};

use super::uses::Told;
use super::{DOCUMENT, Objects};
use crate::backend::MediumStats;

/// The limit where no one names one.
pub(super) const DEFAULT_CAPACITY: u64 = 100 << 30;
/// Age at which segments go where nothing else bounds what lies there.
const DEFAULT_EXPIRY: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often a change of the document that others overtook is tried again, and the longest pause
/// before that.
const RACES: u32 = 8;
const PAUSE: Duration = Duration::from_millis(40);

/// See the module.
#[derive(Default)]
pub(super) struct Space {
    pub(super) state: Mutex<State>,
    /// Whether the server has conditional writes.
    pub(super) conditions: AtomicBool,
    /// What a writer needs is there. False as well where the keys may only read.
    pub(super) may_write: AtomicBool,
    /// Rung when something was granted, or room was made.
    pub(super) changed: Notify,
    /// Rung when somebody is to count, and make room.
    pub(super) wanted: Notify,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) grant: Grant,
    pub(super) limit: u64,
    /// Nothing could be granted, and no one has counted since.
    pub(super) short: bool,
    pub(super) silence: Silence,
    pub(super) pause: Pause,
    /// When it was last counted here, and last told what is used.
    pub(super) counted: Option<MonotonicTime>,
    pub(super) spoke: Option<MonotonicTime>,
    pub(super) uses: Told,
    /// Segments that were removed here, and their bytes.
    pub(super) removed: (u64, u64),
    /// Why nothing can be granted: the document is damaged, or one of a newer version.
    pub(super) unusable: Option<Error>,
    /// It was said that there is too much to count, and that something cannot be removed.
    pub(super) said_too_much: bool,
    pub(super) said_stuck: bool,
}

/// What this writer may write.
#[derive(Default)]
pub(super) struct Grant {
    /// The id under which it asks; another one after a silence in which it was dropped.
    pub(super) writer: u64,
    pub(super) used: Use,
    /// Until when it holds.
    pub(super) holds_until: MonotonicTime,
    /// What was last seen of the document, and what this writer had begun to write when it was.
    pub(super) seen: SpaceDocument,
    pub(super) seen_at: u64,
    /// Somebody asks for more.
    pub(super) asking: bool,
}

impl Objects {
    /// Asks what is used of this limit.
    pub(super) fn open_space(&self, limit: u64, deadline: MonotonicTime) -> Result<()> {
        self.check_limit(limit)?;
        {
            let mut state = self.space.state.lock();
            state.limit = limit;
            if state.grant.writer == 0 {
                state.grant.writer = ucm_infra::random_u64();
            }
        }
        if !self.has_conditions() {
            return Ok(());
        }
        match self.ask(0, deadline) {
            // Nothing is written then, and what is stored is read.
            Err(_) if self.space.state.lock().unusable.is_some() => Ok(()),
            asked => asked.map(|_| ()),
        }
    }

    /// Has somebody count now.
    pub(super) fn wake_space(&self) {
        self.space.wanted.notify();
    }

    /// What the one who counts sleeps on.
    pub(super) fn space_notify(&self) -> Notify {
        self.space.wanted.clone()
    }

    /// The limit, where it is kept to.
    pub(super) fn limit(&self) -> Option<u64> {
        let limit = self.space.state.lock().limit;
        (self.has_conditions() && limit > 0).then_some(limit)
    }

    /// The age at which segments go.
    pub(super) fn expiry(&self) -> Option<Duration> {
        let needed = (!self.has_conditions()).then_some(DEFAULT_EXPIRY);
        self.config.expire_after.or(needed)
    }

    /// How much is kept, in words.
    pub(super) fn bound(&self) -> String {
        let expiry = self
            .expiry()
            .map(|age| format!("segments go when not used for {} s", age.as_secs()));
        let limit = self
            .limit()
            .map(|limit| format!("at most {limit} bytes stored"));
        let both: Vec<String> = limit.into_iter().chain(expiry).collect();
        both.join(", ")
    }

    /// False where the store was opened by keys that may only read.
    pub(super) fn may_write(&self) -> bool {
        self.space.may_write.load(Ordering::Acquire)
    }

    /// Room for `bytes`; `NoSpace` where there is none in time, `Config` or `Foreign` where the
    /// document that grants it cannot be used, `Unhealthy` where the keys may not write.
    pub(super) fn take_room(&self, io: &IoJob, bytes: u64) -> Result<()> {
        let granted = self.space.state.lock().grant.used.granted;
        let until = self.clock.now().after(patience(granted)).min(io.deadline());
        loop {
            io.still_wanted()?;
            let seen = self.space.changed.seen();
            let now = self.clock.now();
            let ask = {
                let mut state = self.space.state.lock();
                if let Some(error) = &state.unusable {
                    return Err(error.clone()); // the thread that looks after the space tries again
                }
                state.pause.check(now)?;
                let holds = !self.has_conditions() || now < state.grant.holds_until;
                let left = state
                    .grant
                    .used
                    .granted
                    .saturating_sub(state.grant.used.reserved);
                if holds && (!self.has_conditions() || left >= bytes) {
                    state.grant.used.reserved += bytes;
                    return Ok(());
                }
                !state.short && !std::mem::replace(&mut state.grant.asking, true)
            };
            if ask {
                let asked = self.ask(bytes, io.deadline());
                self.space.state.lock().grant.asking = false;
                self.space.changed.notify();
                if asked? {
                    continue;
                }
                self.space.state.lock().short = true;
                self.wake_space();
            }
            if self.clock.now() >= until {
                let state = self.space.state.lock();
                let text = "the configured storage_capacity is used up, or nobody grants more of \
                            it; making room";
                let error = Error::new(ErrorKind::NoSpace, text).with("limit", state.limit);
                return Err(error.with("used", self.used(&state)));
            }
            self.clock.sleep(&self.space.changed, seen, Some(until));
        }
    }

    /// A segment for which there was room ended: `kept` bytes of it are there, or may be.
    pub(super) fn commit_room(&self, room: u64, kept: u64, error: Option<&Error>) {
        let now = self.clock.now();
        let mut state = self.space.state.lock();
        state.grant.used.reserved = state
            .grant
            .used
            .reserved
            .saturating_sub(room.saturating_sub(kept));
        state.grant.used.committed = state
            .grant
            .used
            .committed
            .saturating_add(kept)
            .min(state.grant.used.reserved);
        if state.pause.record(error, now) {
            state.short = true; // the process that counts may make room
        }
    }

    /// Asks for `bytes`, and says what was used; whether there is so much now.
    pub(super) fn ask(&self, bytes: u64, deadline: MonotonicTime) -> Result<bool> {
        let (writer, used, limit, lapsed) = {
            let state = self.space.state.lock();
            let lapsed = state.grant.holds_until != MonotonicTime::default()
                && self.clock.now() >= state.grant.holds_until;
            (
                state.grant.writer,
                Use {
                    wanted: bytes,
                    ..state.grant.used
                },
                state.limit,
                lapsed,
            )
        };
        let fresh = ucm_infra::random_u64();
        let ask = move |document: &mut SpaceDocument| {
            // Who was dropped meanwhile has nothing any more, and comes back as another one.
            let dropped = lapsed && !document.knows(writer);
            let (writer, used) = match dropped {
                true => (
                    fresh,
                    Use {
                        wanted: bytes,
                        ..Use::default()
                    },
                ),
                false => (writer, used),
            };
            let granted = document.ask(writer, used, limit);
            Some((writer, used, granted))
        };
        let Some(((writer, used, granted), document)) = self.change(deadline, ask)? else {
            return Ok(false);
        };
        let now = self.clock.now();
        let mut state = self.space.state.lock();
        if state.grant.writer != writer {
            (state.grant.writer, state.grant.used) = (writer, Use::default());
        }
        state.grant.used.granted = granted.max(state.grant.used.granted);
        (state.grant.holds_until, state.spoke) = (now.after(HOLDS), Some(now));
        (state.grant.seen, state.grant.seen_at) = (document, used.reserved);
        Ok(state
            .grant
            .used
            .granted
            .saturating_sub(state.grant.used.reserved)
            >= bytes)
    }

    /// Changes the document, as long as others do not overtake; nothing where there is nothing to
    /// change.
    pub(super) fn change<T>(
        &self,
        deadline: MonotonicTime,
        mut change: impl FnMut(&mut SpaceDocument) -> Option<T>,
    ) -> Result<Option<(T, SpaceDocument)>> {
        let (bucket, path) = (&self.bucket, self.names.space());
        let changed = self.call(deadline, async {
            for race in 0..RACES {
                let found = bucket.get(&path, DOCUMENT).await?;
                let mut document = match &found {
                    Some((bytes, _)) => SpaceDocument::parse(bytes)?,
                    None => SpaceDocument::default(),
                };
                let Some(answer) = change(&mut document) else {
                    return Ok(None);
                };
                let bytes = document.to_bytes().into();
                let done = match found {
                    Some((_, version)) => bucket.replace(&path, bytes, version).await?,
                    None => bucket.put_new(&path, bytes).await?,
                };
                if done {
                    return Ok(Some((answer, document)));
                }
                let share = ucm_infra::random_u64() % 1000;
                let pause = PAUSE * (race + 1) * u32::try_from(share).unwrap_or(0) / 1000;
                tokio::time::sleep(pause).await;
            }
            let text = "others changed the document of the space again and again";
            Err(Error::new(ErrorKind::Busy, text))
        });
        self.note_document(changed.as_ref().err());
        changed
    }

    /// The document of the space could be read, or not for this reason. Where it cannot be used
    /// nothing is written, which is said once; reading goes on.
    fn note_document(&self, error: Option<&Error>) {
        let unusable = match error {
            Some(error) if !matches!(error.kind(), ErrorKind::Config | ErrorKind::Foreign) => {
                return;
            }
            error => error.cloned(),
        };
        let (store, at) = (self.config.scope.writer, self.names.space());
        let before = std::mem::replace(&mut self.space.state.lock().unusable, unusable.clone());
        match (before, unusable) {
            (None, Some(error)) => {
                let url = &self.config.place.url;
                warn!(
                    store,
                    "nothing is written to {url} until {at} can be used again; blocks are read: \
                     {error}"
                );
            }
            (Some(_), None) => info!(store, "{at} can be used again, and blocks are written"),
            _ => {}
        }
    }

    /// This writer writes no more.
    pub(super) fn leave_space(&self, deadline: MonotonicTime) {
        let (writer, used) = {
            let state = self.space.state.lock();
            (state.grant.writer, state.grant.used)
        };
        if !self.may_write() || writer == 0 {
            return;
        }
        let _ = self.tell_uses(deadline); // best effort, both: others find out by themselves
        if self.has_conditions() {
            let leave = move |document: &mut SpaceDocument| {
                document.leave(writer, used);
                Some(())
            };
            let _ = self.change(deadline, leave);
        }
    }

    /// Bytes used, as far as is known here.
    pub(super) fn used(&self, state: &State) -> u64 {
        let since = state
            .grant
            .used
            .reserved
            .saturating_sub(state.grant.seen_at);
        state.grant.seen.usage().0.saturating_add(since)
    }

    pub(super) fn stats(&self) -> MediumStats {
        let (open, putting) = self.writing();
        let state = self.space.state.lock();
        let conditional = self.has_conditions();
        MediumStats {
            usage: Usage {
                used: self.used(&state),
                capacity: if conditional { state.limit } else { 0 },
                records: self.index.blocks() as u64,
                counted: !conditional || state.grant.seen.usage().2,
                paused: state.pause.check(self.clock.now()).is_err(),
                ..Usage::default()
            },
            records_removed: state.removed.0,
            bytes_removed: state.removed.1,
            blocks_touched: state.uses.count,
            more: vec![("segments_open", open), ("segments_uploading", putting)],
        }
    }
}
