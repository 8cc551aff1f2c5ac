//! The limit of a bucket: one document that writers change by compare-and-swap
//! ([`crate::quota::space_document`]).
//!
//! A segment is opened only for bytes that were granted. The writer that counts makes room
//! ([`super::collector`]). A server without conditional writes cannot keep a limit of several
//! writers: there segments are removed by their age alone, and the log says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::{info, warn};
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result, in_units};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::IoJob;

use super::bucket::DOCUMENT;
use super::remote::Remote;
use super::uses::SegmentUses;
use crate::quota::space_document::{HOLDS, Silence, SpaceDocument, Use};
use crate::quota::{FIRST, Pause, Usage};

/// Age at which segments are removed where no limit can be kept.
const DEFAULT_EXPIRY: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most attempts to change the document while others change it first, and the longest pause between
/// two of them.
const RACES: u32 = 8;
const PAUSE: Duration = Duration::from_millis(40);

/// See the module.
pub(super) struct Space {
    pub(super) remote: Arc<Remote>,
    pub(super) uses: SegmentUses,
    pub(super) state: Mutex<State>,
    /// The documents that a writer needs exist. False if the keys may only read.
    pub(super) may_write: AtomicBool,
    /// Notified after a grant, and after room was made.
    pub(super) changed: Notify,
    /// Notified when the collector's thread should count and make room.
    pub(super) wanted: Notify,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) grant: Grant,
    pub(super) limit: u64,
    /// A request was refused, and there was no count since.
    pub(super) short: bool,
    pub(super) silence: Silence,
    pub(super) pause: Pause,
    /// When this process last began a count, last completed one, and last wrote its use.
    pub(super) began: Option<MonotonicTime>,
    pub(super) counted: Option<MonotonicTime>,
    pub(super) spoke: Option<MonotonicTime>,
    /// Segments that were removed here, and their bytes.
    pub(super) removed: (u64, u64),
    /// Why nothing can be granted: the document is damaged, or of a newer version.
    pub(super) unusable: Option<Error>,
    /// Already logged: there is too much to count; a segment cannot be removed.
    pub(super) logged_too_much: bool,
    pub(super) logged_stuck: bool,
}

/// The bytes that this writer may write.
#[derive(Default)]
pub(super) struct Grant {
    /// Its id in the document; a new one after a silence in which it was dropped.
    pub(super) writer: u64,
    pub(super) used: Use,
    /// End of its validity.
    pub(super) holds_until: MonotonicTime,
    /// The use in the document when it was last read, and what this writer had begun to write by
    /// then.
    pub(super) seen: SpaceDocument,
    pub(super) seen_at: u64,
}

impl Space {
    pub(super) fn new(remote: &Arc<Remote>) -> Self {
        Self {
            remote: Arc::clone(remote),
            uses: SegmentUses::new(remote),
            state: Mutex::default(),
            may_write: AtomicBool::new(false),
            changed: Notify::new(),
            wanted: Notify::new(),
        }
    }

    /// Enters this writer, and the limit, in the document.
    pub(super) fn open(&self, limit: u64, deadline: MonotonicTime) -> Result<()> {
        {
            let mut state = self.state.lock();
            state.limit = limit;
            if state.grant.writer == 0 {
                state.grant.writer = ucm_infra::random_u64();
            }
        }
        if !self.remote.has_conditions() {
            return Ok(());
        }
        match self.ask(0, deadline) {
            // Then nothing is written, and stored records are still read.
            Err(_) if self.state.lock().unusable.is_some() => Ok(()),
            asked => asked.map(|_| ()),
        }
    }

    /// The limit, if it can be kept.
    pub(super) fn limit(&self) -> Option<u64> {
        let limit = self.state.lock().limit;
        (self.remote.has_conditions() && limit > 0).then_some(limit)
    }

    /// The age at which segments are removed.
    pub(super) fn expiry(&self) -> Option<Duration> {
        let needed = (!self.remote.has_conditions()).then_some(DEFAULT_EXPIRY);
        self.remote.config.expire_after.or(needed)
    }

    /// The limit as a text for the log.
    pub(super) fn bound(&self) -> String {
        let expiry = |age: Duration| format!("segments go when not used for {} s", age.as_secs());
        let limit = |limit| format!("at most {} stored", in_units(limit));
        let both = self.limit().map(limit).into_iter();
        let both: Vec<String> = both.chain(self.expiry().map(expiry)).collect();
        both.join(", ")
    }

    /// False if the store was opened with keys that may only read.
    pub(super) fn may_write(&self) -> bool {
        self.may_write.load(Ordering::Acquire)
    }

    /// Takes `bytes` of the grant, or of a new one from the document. `Busy` if there is too
    /// little; room is then made in the background. Only before its first grant a writer waits for
    /// that, and finally gets `NoSpace`. `Config` or `Foreign`: the document cannot be used.
    pub(super) fn take_room(&self, io: &IoJob, bytes: u64) -> Result<()> {
        let until = self.remote.clock.now().after(FIRST).min(io.deadline());
        loop {
            io.still_wanted()?;
            let seen = self.changed.seen();
            if self.take_granted(bytes)? {
                return Ok(());
            }
            if self.ask(bytes, io.deadline())? {
                continue;
            }
            let (first, error) = {
                let mut state = self.state.lock();
                state.short = true;
                let first = state.grant.used.reserved == 0;
                let text = "the configured storage_capacity is used up, or no more of it is \
                            granted yet; making room";
                let kind = match first {
                    true => ErrorKind::NoSpace,
                    false => ErrorKind::Busy,
                };
                let error = Error::new(kind, text).with("limit", state.limit);
                (first, error.with("used", self.used(&state)))
            };
            self.wanted.notify();
            if !first || self.remote.clock.now() >= until {
                return Err(error);
            }
            self.remote.clock.sleep(&self.changed, seen, Some(until));
        }
    }

    /// Takes `bytes` of the grant, if it is large enough.
    fn take_granted(&self, bytes: u64) -> Result<bool> {
        let now = self.remote.clock.now();
        let mut state = self.state.lock();
        if let Some(error) = &state.unusable {
            return Err(error.clone()); // the collector's thread tries again
        }
        state.pause.check(now)?;
        let used = &state.grant.used;
        let left = used.granted.saturating_sub(used.reserved);
        let granted = now < state.grant.holds_until && left >= bytes;
        if granted || !self.remote.has_conditions() {
            state.grant.used.reserved += bytes;
            return Ok(true);
        }
        Ok(false)
    }

    /// Ends the reservation of a segment: `kept` bytes of it are stored, or may be.
    pub(super) fn commit_room(&self, room: u64, kept: u64, error: Option<&Error>) {
        let now = self.remote.clock.now();
        let mut state = self.state.lock();
        let used = &mut state.grant.used;
        used.reserved = used.reserved.saturating_sub(room.saturating_sub(kept));
        used.committed = used.committed.saturating_add(kept).min(used.reserved);
        if state.pause.record(error, now) {
            state.short = true; // the process that counts may make room
        }
    }

    /// Requests `bytes` and records what was used; whether that much is granted.
    pub(super) fn ask(&self, bytes: u64, deadline: MonotonicTime) -> Result<bool> {
        let (writer, used, limit, until) = {
            let state = self.state.lock();
            let Grant { writer, used, .. } = state.grant;
            (writer, used, state.limit, state.grant.holds_until)
        };
        let lapsed = until != MonotonicTime::default() && self.remote.clock.now() >= until;
        let fresh = (ucm_infra::random_u64(), Use::default());
        let ask = move |document: &mut SpaceDocument| {
            // A writer that was dropped since then has no grant, and returns with a new id.
            let dropped = lapsed && !document.knows(writer);
            let (writer, used) = if dropped { fresh } else { (writer, used) };
            let asked = Use {
                wanted: bytes,
                ..used
            };
            Some((writer, used, document.ask(writer, asked, limit)))
        };
        let Some(((writer, used, granted), document)) = self.change(deadline, ask)? else {
            return Ok(false);
        };
        let now = self.remote.clock.now();
        let mut state = self.state.lock();
        if state.grant.writer != writer {
            (state.grant.writer, state.grant.used) = (writer, Use::default());
        }
        state.grant.used.granted = granted.max(state.grant.used.granted);
        (state.grant.holds_until, state.spoke) = (now.after(HOLDS), Some(now));
        (state.grant.seen, state.grant.seen_at) = (document, used.reserved);
        let used = state.grant.used;
        Ok(used.granted.saturating_sub(used.reserved) >= bytes)
    }

    /// Changes the document, again if another writer changes it first. Writes nothing if there is
    /// nothing to change.
    pub(super) fn change<T>(
        &self,
        deadline: MonotonicTime,
        mut change: impl FnMut(&mut SpaceDocument) -> Option<T>,
    ) -> Result<Option<(T, SpaceDocument)>> {
        let (bucket, path) = (&self.remote.bucket, self.remote.names.space());
        let changed = self.remote.call(deadline, async {
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

    /// Notes whether the document could be read, or why not. If it cannot be used nothing is
    /// written, which is logged once; reading continues.
    fn note_document(&self, error: Option<&Error>) {
        let unusable = match error {
            Some(error) if !matches!(error.kind(), ErrorKind::Config | ErrorKind::Foreign) => {
                return;
            }
            error => error.cloned(),
        };
        let (config, at) = (&self.remote.config, self.remote.names.space());
        let store = config.scope.writer;
        let before = std::mem::replace(&mut self.state.lock().unusable, unusable.clone());
        match (before, unusable) {
            (None, Some(error)) => {
                let url = &config.place.url;
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

    /// Removes this writer from the document.
    pub(super) fn leave(&self, deadline: MonotonicTime) {
        let (writer, used) = {
            let state = self.state.lock();
            (state.grant.writer, state.grant.used)
        };
        if !self.may_write() || writer == 0 {
            return;
        }
        let _ = self.uses.write(deadline); // best effort, both: others notice the missing heartbeat
        if self.remote.has_conditions() {
            let leave = move |document: &mut SpaceDocument| {
                document.leave(writer, used);
                Some(())
            };
            let _ = self.change(deadline, leave);
        }
    }

    /// Bytes used, by the document that was last read.
    pub(super) fn used(&self, state: &State) -> u64 {
        let grant = &state.grant;
        let since = grant.used.reserved.saturating_sub(grant.seen_at);
        grant.seen.usage().0.saturating_add(since)
    }

    /// Bytes used and allowed, by the document that was last read.
    pub(super) fn usage(&self, records: u64) -> Usage {
        let state = self.state.lock();
        let conditional = self.remote.has_conditions();
        Usage {
            used: self.used(&state),
            capacity: if conditional { state.limit } else { 0 },
            records,
            counted: !conditional || state.grant.seen.usage().2,
            paused: state.pause.check(self.remote.clock.now()).is_err(),
            ..Usage::default()
        }
    }

    /// Segments that were removed here, and their bytes.
    pub(super) fn removed(&self) -> (u64, u64) {
        self.state.lock().removed
    }
}
