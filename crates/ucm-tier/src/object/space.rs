//! What may be written, and what goes: one document that writers change by compare-and-swap
//! ([`ucm_quota::space_document`]), and the removal of the segments that were used longest ago.
//!
//! A segment is opened only for bytes that were granted. Whoever counts lists everything below the prefix, removes the oldest
//! use down to the low watermark and what is older than `expire_after`, and writes down what is left. Uses are told by each
//! writer in a small object of its own, once a minute at most. A server without conditional writes cannot keep a limit that
//! several share: there segments go by their age alone, and the log says so.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::stream::StreamExt;
use object_store::ObjectMeta;
use object_store::path::Path;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::IoJob;
use ucm_quota::layout::FORMAT;
use ucm_quota::space_document::{HOLDS, Silence, SpaceDocument, Use};
use ucm_quota::{Pause, Snapshot, Usage};

use super::bucket::Bucket;
use super::names::{Names, SegmentObject};
use super::{DOCUMENT, Objects};
use crate::backend::MediumStats;

/// The limit where nobody names one.
pub(super) const DEFAULT_CAPACITY: u64 = 100 << 30;
/// Age at which segments go where nothing else bounds what lies there.
const DEFAULT_EXPIRY: Duration = Duration::from_secs(7 * 24 * 3600);
/// Use of the limit above which the oldest goes, and down to which.
const HIGH: u64 = 95;
const LOW: u64 = 85;
/// How long a write waits for room to be made.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two counts where nothing is short, and between two words of a writer.
const COUNT_AGAIN: Duration = Duration::from_secs(600);
const SPEAK_AGAIN: Duration = Duration::from_secs(60);
/// How long a count may take.
const COUNT: Duration = Duration::from_secs(90);
/// How often a change of the document that others overtook is tried again, and the longest pause before that.
const RACES: u32 = 8;
const PAUSE: Duration = Duration::from_millis(40);
/// How often one count looks for others in place of what it could not remove.
const ROUNDS: usize = 8;
/// Objects that are removed, or read, at once.
const AT_ONCE: usize = 16;
/// Writers whose uses are read, those heard of last; what one tells of at most; and how long it is kept.
const MOST_WRITERS: usize = 256;
const MOST_USES: usize = 1 << 16;
const USES_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// See the module.
#[derive(Default)]
pub(super) struct Space {
    state: Mutex<State>,
    /// Whether the server has conditional writes.
    conditions: AtomicBool,
    /// Rung when something was granted, or room was made.
    changed: Notify,
    /// Rung when somebody is to count, and make room.
    wanted: Notify,
}

#[derive(Default)]
struct State {
    grant: Grant,
    limit: u64,
    /// Nothing could be granted, and nobody has counted since.
    short: bool,
    silence: Silence,
    pause: Pause,
    /// When it was last counted here, and last told what is used.
    counted: Option<MonotonicTime>,
    spoke: Option<MonotonicTime>,
    uses: Told,
    /// Segments that were removed here, and their bytes.
    removed: (u64, u64),
    /// It was said that there is too much to count, and that something cannot be removed.
    said_too_much: bool,
    said_stuck: bool,
}

/// What this writer may write.
#[derive(Default)]
struct Grant {
    /// The id under which it asks; another one after a silence in which it was dropped.
    writer: u64,
    used: Use,
    /// Until when it holds.
    holds_until: MonotonicTime,
    /// What was last seen of the document, and what this writer had begun to write when it was.
    seen: SpaceDocument,
    seen_at: u64,
    /// Somebody asks for more.
    asking: bool,
}

/// What was used here.
#[derive(Default)]
struct Told {
    /// Segments, and when.
    of: HashMap<SegmentObject, u64>,
    /// All of that is told.
    all: bool,
    /// Records.
    count: u64,
}

/// What one writer tells of its uses: names of segments, and when, ns of Unix time.
#[derive(Serialize, Deserialize, Default)]
struct Uses {
    format: u32,
    used: BTreeMap<String, u64>,
}

/// What is below the prefix.
struct Contents {
    segments: Vec<(SegmentObject, Path, u64)>,
    /// Bytes of everything, and how many segments.
    total: u64,
    /// When each was last used, as its writers tell.
    used: HashMap<SegmentObject, u64>,
    /// Old words about uses.
    stale: Vec<Path>,
    /// The time of the server.
    now_ns: u64,
}

impl Objects {
    /// Looks whether the server has conditional writes, unless it was seen to: then the limit is kept to from there on.
    pub(super) fn look_for_conditions(&self, deadline: MonotonicTime) -> Result<()> {
        if self.has_conditions() {
            return Ok(());
        }
        let (bucket, path) = (Arc::clone(&self.bucket), self.names.probe());
        let conditions = self.call(deadline, async move { has_conditions(&bucket, &path).await })?;
        self.space.conditions.store(conditions, Ordering::Release);
        if !conditions {
            let after = self.expiry().unwrap_or_default().as_secs();
            warn!(
                store = self.config.scope.writer,
                "{} has no conditional writes, so storage_capacity is not kept to: segments go when they were not used for \
                 {after} s (expire_after)",
                self.config.place.url
            );
        }
        Ok(())
    }

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
        if self.has_conditions() {
            self.ask(0, deadline)?;
        }
        Ok(())
    }

    /// Has somebody count now.
    pub(super) fn wake_space(&self) {
        self.space.wanted.notify();
    }

    /// What the one who counts sleeps on.
    pub(super) fn space_notify(&self) -> Notify {
        self.space.wanted.clone()
    }

    /// Whether the server has conditional writes.
    pub(super) fn has_conditions(&self) -> bool {
        self.space.conditions.load(Ordering::Acquire)
    }

    /// The limit, where it is kept to.
    pub(super) fn limit(&self) -> Option<u64> {
        let limit = self.space.state.lock().limit;
        (self.has_conditions() && limit > 0).then_some(limit)
    }

    /// The age at which segments go.
    fn expiry(&self) -> Option<Duration> {
        let needed = (!self.has_conditions()).then_some(DEFAULT_EXPIRY);
        self.config.expire_after.or(needed)
    }

    /// How much is kept, in words.
    pub(super) fn bound(&self) -> String {
        let expiry = self
            .expiry()
            .map(|age| format!("segments go when not used for {} s", age.as_secs()));
        let limit = self.limit().map(|limit| format!("at most {limit} bytes stored"));
        let both: Vec<String> = limit.into_iter().chain(expiry).collect();
        both.join(", ")
    }

    /// Room for `bytes`; `NoSpace` where there is none in time.
    pub(super) fn take_room(&self, io: &IoJob, bytes: u64) -> Result<()> {
        let until = self.clock.now().after(PATIENCE).min(io.deadline());
        loop {
            io.still_wanted()?;
            let seen = self.space.changed.seen();
            let now = self.clock.now();
            let ask = {
                let mut state = self.space.state.lock();
                state.pause.check(now)?;
                let holds = !self.has_conditions() || now < state.grant.holds_until;
                let left = state.grant.used.granted.saturating_sub(state.grant.used.admitted);
                if holds && (!self.has_conditions() || left >= bytes) {
                    state.grant.used.admitted += bytes;
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
                let text =
                    "the configured storage_capacity is used up, or nobody grants more of it; making room";
                let error = Error::new(ErrorKind::NoSpace, text).with("limit", state.limit);
                return Err(error.with("used", self.used(&state)));
            }
            self.clock.sleep(&self.space.changed, seen, Some(until));
        }
    }

    /// A segment for which there was room ended: `kept` bytes of it are there, or may be.
    pub(super) fn settle_room(&self, room: u64, kept: u64, error: Option<&Error>) {
        let now = self.clock.now();
        let mut state = self.space.state.lock();
        state.grant.used.admitted = state
            .grant
            .used
            .admitted
            .saturating_sub(room.saturating_sub(kept));
        state.grant.used.settled = state
            .grant
            .used
            .settled
            .saturating_add(kept)
            .min(state.grant.used.admitted);
        if state.pause.judge(error, now) {
            state.short = true; // whoever counts may make room
        }
    }

    /// Asks for `bytes`, and says what was used; whether there is so much now.
    fn ask(&self, bytes: u64, deadline: MonotonicTime) -> Result<bool> {
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
        (state.grant.seen, state.grant.seen_at) = (document, used.admitted);
        Ok(state.grant.used.granted.saturating_sub(state.grant.used.admitted) >= bytes)
    }

    /// Changes the document, as long as others do not overtake; nothing where there is nothing to change.
    fn change<T: Send + 'static>(
        &self,
        deadline: MonotonicTime,
        mut change: impl FnMut(&mut SpaceDocument) -> Option<T> + Send + 'static,
    ) -> Result<Option<(T, SpaceDocument)>> {
        let (bucket, path) = (Arc::clone(&self.bucket), self.names.space());
        self.call(deadline, async move {
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
        })
    }

    /// Uses of records are uses of their segments.
    pub(super) fn touch(&self, ids: &[(BlockId, u32)]) {
        let now = self.now_ns();
        let mut state = self.space.state.lock();
        for hit in ids
            .iter()
            .filter_map(|(id, _)| self.index.find(*id))
            .filter(|hit| !hit.private)
        {
            let segment = SegmentObject {
                sealed_ns: hit.sealed_ns,
                name: hit.name,
            };
            state.uses.of.insert(segment, now);
            self.index
                .used(hit.segment, i64::try_from(now).unwrap_or(i64::MAX));
        }
        state.uses.count += ids.len() as u64;
        state.uses.all = false;
        if state.uses.of.len() > MOST_USES {
            let mut times: Vec<u64> = state.uses.of.values().copied().collect();
            times.sort_unstable();
            let oldest = times[times.len() / 2];
            state.uses.of.retain(|_, used| *used > oldest);
        }
    }

    /// What is to be done now and then: says what was used, counts and makes room. When it is to be done again.
    pub(super) fn tend_space(&self) -> MonotonicTime {
        let now = self.clock.now();
        let deadline = now.after(COUNT);
        let (speak, short, due) = {
            let state = self.space.state.lock();
            let speak = state.spoke.is_none_or(|at| now.since(at) >= SPEAK_AGAIN);
            let due = state.counted.is_none_or(|at| now.since(at) >= COUNT_AGAIN);
            (speak, state.short, due)
        };
        if speak {
            let told = self.tell_uses(deadline);
            let asked = if self.has_conditions() {
                self.ask(0, deadline).map(|_| ())
            } else {
                Ok(())
            };
            let mut state = self.space.state.lock();
            state.spoke = Some(now);
            state.uses.all |= told.is_ok() && asked.is_ok();
        }
        let high = self.is_high();
        let counted = if short || due || high {
            self.count(deadline)
        } else {
            Ok(())
        };
        let too_much = counted.as_ref().err();
        let too_much = too_much.filter(|error| error.kind() == ErrorKind::NoSpace);
        let said = {
            let mut state = self.space.state.lock();
            state.counted = Some(now).filter(|_| counted.is_ok()).or(state.counted);
            state.short = false;
            too_much.is_some() && std::mem::replace(&mut state.said_too_much, true)
        };
        if let Some(error) = too_much.filter(|_| !said) {
            warn!(
                store = self.config.scope.writer,
                "nothing can be counted or removed, and nothing more is stored once the grants are used up: {error}"
            );
        }
        self.space.changed.notify();
        match counted {
            Ok(()) => now.after(SPEAK_AGAIN),
            Err(_) => now.after(SPEAK_AGAIN / 12), // the server does not answer, or another one counts
        }
    }

    fn is_high(&self) -> bool {
        let state = self.space.state.lock();
        let bound = state.grant.seen.bound().unwrap_or(0);
        self.has_conditions() && bound > state.limit / 100 * HIGH
    }

    /// Tells which segments this writer has used.
    fn tell_uses(&self, deadline: MonotonicTime) -> Result<()> {
        let (writer, uses) = {
            let state = self.space.state.lock();
            if state.uses.all || state.uses.of.is_empty() {
                return Ok(());
            }
            let used = state
                .uses
                .of
                .iter()
                .map(|(segment, at)| (segment.file_name(), *at))
                .collect();
            (self.config.scope.writer, Uses { format: FORMAT, used })
        };
        let bytes = serde_json::to_vec(&uses).unwrap_or_default();
        let (bucket, path) = (Arc::clone(&self.bucket), self.names.uses(writer));
        self.call(deadline, async move { bucket.put(&path, bytes.into()).await })
    }

    /// Counts what lies below the prefix and removes what has to go. An error where another writer does.
    fn count(&self, deadline: MonotonicTime) -> Result<()> {
        let before = if self.has_conditions() {
            Some(self.begin_count(deadline)?)
        } else {
            None
        };
        let (bucket, names) = (Arc::clone(&self.bucket), self.names.clone());
        let mut contents = self.call(deadline, async move { look(&bucket, &names).await })?;
        let found = contents.segments.len() as u64;
        let (mut removed, mut freed) = (0, 0);
        for _ in 0..ROUNDS {
            let gone = self.choose(&contents);
            let stale = std::mem::take(&mut contents.stale);
            if gone.is_empty() && stale.is_empty() {
                break;
            }
            let tried: HashSet<Path> = gone.iter().map(|(path, _)| path.clone()).collect();
            contents.segments.retain(|(_, path, _)| !tried.contains(path));
            let (count, bytes) = self.remove(gone, stale, deadline)?;
            (removed, freed) = (removed + count, freed + bytes);
            contents.total -= bytes;
        }
        let (total, left) = (contents.total, found - removed);
        if let Some(before) = before {
            let end = move |document: &mut SpaceDocument| {
                document.end_count(&before, total, left);
                Some(())
            };
            if let Some(((), document)) = self.change(deadline, end)? {
                let mut state = self.space.state.lock();
                (state.grant.seen, state.grant.seen_at) = (document, state.grant.used.admitted);
            }
        }
        let mut state = self.space.state.lock();
        state.removed.0 += removed;
        state.removed.1 += freed;
        Ok(())
    }

    /// Removes these segments, and what is stale: how many went, and their bytes. One that cannot be removed (a lock on it, no
    /// right) stays, counts on, and others go in its place.
    fn remove(
        &self,
        segments: Vec<(Path, u64)>,
        stale: Vec<Path>,
        deadline: MonotonicTime,
    ) -> Result<(u64, u64)> {
        let bucket = Arc::clone(&self.bucket);
        let segments = segments.into_iter().map(|(path, size)| (path, 1, size));
        let all: Vec<(Path, u64, u64)> = segments
            .chain(stale.into_iter().map(|path| (path, 0, 0)))
            .collect();
        let (gone, error) = self.call(deadline, async move {
            let removals = all.into_iter().map(|(path, count, size)| {
                let bucket = Arc::clone(&bucket);
                async move { bucket.delete(&path).await.map(|()| (count, size)) }
            });
            let removals = futures_util::stream::iter(removals).buffer_unordered(AT_ONCE);
            let add = |(gone, failed): ((u64, u64), Option<Error>), removed: Result<(u64, u64)>| {
                let sum = match removed {
                    Ok((count, size)) => ((gone.0 + count, gone.1 + size), failed),
                    Err(error) => (gone, Some(error)),
                };
                std::future::ready(sum)
            };
            Ok(removals.fold(((0, 0), None), add).await)
        })?;
        let said = error.is_some() && std::mem::replace(&mut self.space.state.lock().said_stuck, true);
        if let Some(error) = error.filter(|_| !said) {
            let store = self.config.scope.writer;
            warn!(
                store,
                "some of what should go cannot be removed, and others go in its place: {error}"
            );
        }
        Ok(gone)
    }

    fn begin_count(&self, deadline: MonotonicTime) -> Result<Snapshot> {
        let (writer, limit, used, now) = {
            let state = self.space.state.lock();
            (
                state.grant.writer,
                state.limit,
                state.grant.used,
                self.clock.now(),
            )
        };
        // The silence of others is kept here, by our own clock.
        let silence = std::mem::take(&mut self.space.state.lock().silence);
        let kept = Arc::new(Mutex::new(silence));
        let heard = Arc::clone(&kept);
        let begun = self.change(deadline, move |document| {
            document.ask(writer, Use { wanted: 0, ..used }, limit);
            document.begin_count(writer, &mut heard.lock(), now)
        });
        self.space.state.lock().silence = std::mem::take(&mut kept.lock());
        let other = || Error::new(ErrorKind::Busy, "another writer counts what is stored");
        begun?.map(|(before, _)| before).ok_or_else(other)
    }

    /// Which segments have to go: what was not used for too long, then the oldest use above the limit.
    fn choose(&self, contents: &Contents) -> Vec<(Path, u64)> {
        let used = |segment: &SegmentObject| {
            let told = contents.used.get(segment).copied().unwrap_or(0);
            told.max(segment.sealed_ns).min(contents.now_ns) // a clock that is ahead makes nothing last
        };
        let mut oldest: Vec<_> = contents.segments.iter().collect();
        oldest.sort_unstable_by_key(|(segment, ..)| (used(segment), *segment));
        let expiry = self
            .expiry()
            .map(|age| u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
        let before = expiry.map_or(0, |age| contents.now_ns.saturating_sub(age));
        let mut left = contents.total;
        let short = self.space.state.lock().short;
        let limit = self.limit();
        let too_much = |left: u64| limit.is_some_and(|limit| left > limit / 100 * LOW);
        let makes_room = limit.is_some_and(|limit| short || left > limit / 100 * HIGH) || self.is_high();
        let mut gone = Vec::new();
        for (segment, path, size) in oldest {
            if used(segment) < before || (makes_room && too_much(left)) {
                left -= size;
                gone.push((path.clone(), *size));
            }
        }
        gone
    }

    /// This writer writes no more.
    pub(super) fn leave_space(&self, deadline: MonotonicTime) {
        let (writer, used) = {
            let state = self.space.state.lock();
            (state.grant.writer, state.grant.used)
        };
        if self.config.scope.lookup_only || writer == 0 {
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
    fn used(&self, state: &State) -> u64 {
        let since = state.grant.used.admitted.saturating_sub(state.grant.seen_at);
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
            ..MediumStats::default()
        }
    }
}

/// Whether the server keeps to `If-None-Match` and `If-Match`. Only its own answer says that it does not: an error that may
/// pass is an error here.
async fn has_conditions(bucket: &Bucket, path: &Path) -> Result<bool> {
    let conditions = try_conditions(bucket, path).await;
    let removed = bucket.delete(path).await;
    match conditions {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(false),
        Err(error) => Err(error),
        Ok(conditions) => removed.map(|()| conditions),
    }
}

/// The same; what it puts may be left behind, and `Unsupported` is a refusal.
async fn try_conditions(bucket: &Bucket, path: &Path) -> Result<bool> {
    let word = |text: &'static str| bytes::Bytes::from_static(text.as_bytes());
    // False only where an answer was lost and the client has put it twice: it is read below.
    let _first = bucket.put_new(path, word("first")).await?;
    if bucket.put_new(path, word("again")).await? {
        return Ok(false);
    }
    let Some((found, version)) = bucket.get(path, DOCUMENT).await? else {
        return Err(Error::new(
            ErrorKind::Io,
            "the object store does not have what was put there just now",
        ));
    };
    if found != "first" || (version.e_tag.is_none() && version.version.is_none()) {
        return Ok(false);
    }
    if !bucket.replace(path, word("second"), version.clone()).await? {
        let found = bucket.get(path, DOCUMENT).await?;
        if found.is_none_or(|(found, _)| found != "second") {
            return Ok(false);
        }
    }
    Ok(!bucket.replace(path, word("third"), version).await?)
}

/// Lists what lies below the prefix, and reads what writers tell of their uses.
async fn look(bucket: &Arc<Bucket>, names: &Names) -> Result<Contents> {
    // The server says what time it is: by when something was put there just now.
    let clock = names.probe();
    bucket.put(&clock, bytes::Bytes::new()).await?;
    let now = bucket.head(&clock).await?;
    bucket.delete(&clock).await?;
    let now_ns = now.as_ref().map_or(0, time_of);
    let listed = bucket.list(names.prefix()).await?;
    let kept = u64::try_from(USES_KEPT.as_nanos()).unwrap_or(u64::MAX);
    let before = now_ns.saturating_sub(kept);
    let mut contents = Contents {
        segments: Vec::new(),
        total: 0,
        used: uses_told(bucket, names, &listed).await,
        stale: Vec::new(),
        now_ns,
    };
    for meta in listed {
        if let Some(segment) = names.parse_segment(&meta.location) {
            contents.total += meta.size;
            contents.segments.push((segment, meta.location, meta.size));
        } else if meta.location.prefix_matches(&names.all_uses()) {
            contents.total += meta.size;
            contents
                .stale
                .extend((time_of(&meta) < before).then_some(meta.location));
        }
    }
    Ok(contents)
}

/// When segments were last used, as writers tell; one that cannot be read tells nothing.
pub(super) async fn uses_told(
    bucket: &Arc<Bucket>,
    names: &Names,
    listed: &[ObjectMeta],
) -> HashMap<SegmentObject, u64> {
    let uses = names.all_uses();
    let mut told: Vec<&ObjectMeta> = listed
        .iter()
        .filter(|meta| meta.location.prefix_matches(&uses))
        .collect();
    told.sort_unstable_by_key(|meta| std::cmp::Reverse(meta.last_modified));
    let reads = told.into_iter().take(MOST_WRITERS).map(|meta| {
        let (bucket, path) = (Arc::clone(bucket), meta.location.clone());
        async move { bucket.get(&path, DOCUMENT).await }
    });
    let read: Vec<_> = futures_util::stream::iter(reads.collect::<Vec<_>>())
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let mut used = HashMap::new();
    for (bytes, _) in read.into_iter().filter_map(|read| read.ok().flatten()) {
        let uses: Uses = serde_json::from_slice(&bytes).unwrap_or_default();
        for (name, at) in uses.used.into_iter().filter(|_| uses.format <= FORMAT) {
            if let Some(segment) = SegmentObject::parse(&name) {
                let known: &mut u64 = used.entry(segment).or_default();
                *known = at.max(*known);
            }
        }
    }
    used
}

/// When an object was put, ns of Unix time by the server's clock.
pub(super) fn time_of(meta: &ObjectMeta) -> u64 {
    let nanos = meta.last_modified.timestamp_nanos_opt().unwrap_or(0);
    u64::try_from(nanos).unwrap_or(0)
}
