//! The segments of others: which there are is seen by listing their directory, what is in them by
//! reading their footers.
//!
//! A segment never changes under its name, so its footer is read once (and now and then again, see
//! [`super::recheck`]: a medium forgets). The directory is listed when its time has changed,
//! once more when it has changed no further (two changes may share one time), when somebody misses
//! what should be there, and every half minute whatever its time says (a network file system may
//! show an old one).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;
use ucm_core::{Error, ErrorKind, MissReason, Result};
use ucm_infra::{LANE_LOOKUP, MonotonicTime, Notify};
use ucm_io::{Close, FileMeta, IoJob, MAX_LIST, Pending, ReadMode};
use ucm_quota::layout::SegmentName;

use super::Segments;
use super::footer::{Footer, TAIL, TRIES, Tail};
use super::format::TRAILER_LEN;
use super::index::Known;
use super::recheck::Rechecked;
use super::timer::TURN;
use crate::backend::Done;
use crate::pending_looks::PendingLooks;
use crate::shared::is_link;

/// Longest time between two listings.
const LIST_AGAIN: Duration = Duration::from_secs(30);
/// How long after a segment got its name everybody who looks for those of others has found it: the
/// longest time between two listings, and a few looks more.
pub(super) const FOUND_BY: Duration = LIST_AGAIN.saturating_add(Duration::from_secs(5));
/// A segment that was not read for this long, and at most twice as long, is closed.
const CLOSE_UNUSED: Duration = Duration::from_secs(10);
/// Footers read in one turn, and how many of them at once.
const PER_TURN: usize = 256;
const AT_ONCE: usize = 16;
/// Time between two messages that the index is full, or that segments cannot be read.
const TELL_AGAIN: Duration = Duration::from_secs(600);

/// What discovery remembers between two turns.
#[derive(Default)]
pub(crate) struct SegmentDiscovery {
    state: Mutex<State>,
    /// Who waits for a look.
    pub(super) looks: PendingLooks,
    /// When the log was last told that the index is full, and how many records had found no room by
    /// then.
    told_full: Mutex<Option<(MonotonicTime, u64)>>,
    /// When the log was last told that the end of a segment cannot be read.
    told_unreadable: Mutex<Option<MonotonicTime>>,
    /// When segments that no one reads were last closed.
    closed: Mutex<Option<MonotonicTime>>,
    /// Which footers were last read again.
    pub(super) rechecked: Mutex<Rechecked>,
    /// Rung when others' segments should be looked for.
    pub(super) notify: Notify,
    /// When the segments of dead writers were last looked for.
    pub(super) recovered_at: Mutex<Option<MonotonicTime>>,
}

#[derive(Default)]
struct State {
    /// The directory before it was last listed, and whether it was the same before.
    seen: Option<FileMeta>,
    settled: bool,
    listed: Option<MonotonicTime>,
    /// Segments whose footers are to be read, the newest last.
    queue: VecDeque<(SegmentName, FileMeta)>,
    /// Segments that cannot be used, as they were seen, and how often.
    odd: HashMap<SegmentName, (FileMeta, u8)>,
}

impl Segments {
    /// Looks until every segment that is there is known, or the deadline has passed.
    pub(super) fn find_all(&self, deadline: MonotonicTime) {
        while self.find(deadline) && self.shared.clock.now() < deadline {}
    }

    /// Calls back after the next look: with an error when it could not be made by the deadline, or
    /// too many wait for it.
    pub(super) fn after_look(&self, deadline: MonotonicTime, done: Done<()>) {
        let closing = || self.closing.load(Ordering::Acquire);
        if self.discovery.looks.add(deadline, done, closing) {
            self.discovery.notify.notify();
            self.seal_notify.notify(); // the thread that keeps the time
        }
    }

    /// Looks around for those who wait for that: between two steps of something that keeps the
    /// discovery thread.
    pub(super) fn look_if_asked(&self) {
        if self.discovery.looks.is_asked() {
            self.find(self.shared.clock.now().after(TURN));
        }
    }

    /// One look around; whether there is more to read at once.
    pub(super) fn find(&self, deadline: MonotonicTime) -> bool {
        let mut state = self.discovery.state.lock(); // one look at a time
        let asked = self.discovery.looks.begin();
        // What fails is looked at again with the next turn; until then everything is as it was.
        let listed = self.list_if_changed(&mut state, asked, deadline);
        self.read_footers(&mut state, deadline);
        self.learn_lengths(deadline);
        let more = !state.queue.is_empty();
        let looked = self.discovery.looks.looked();
        drop(state);
        looked.tell(&listed);
        self.close_unused();
        self.recheck_footers(deadline);
        self.index.sweep_if_due();
        self.tell_if_full();
        more
    }

    /// Asks the manifest about records whose lengths are not known: those of writers that keep
    /// other side shards.
    fn learn_lengths(&self, deadline: MonotonicTime) {
        if self.shared.has_lengths_to_learn() {
            let shared = Arc::clone(&self.shared);
            let learn = move |io: &IoJob| {
                shared.learn_lengths(io);
                Ok(())
            };
            let _ = self.shared.call(deadline, learn); // late: with the next record that is met
        }
    }

    /// Says in the log, once in a while, that the index is full.
    fn tell_if_full(&self) {
        let (no_room, most) = self.index.no_room();
        let now = self.shared.clock.now();
        let mut told = self.discovery.told_full.lock();
        let again = told.is_none_or(|(at, count)| no_room > count && now.since(at) >= TELL_AGAIN);
        if no_room == 0 || !again {
            return;
        }
        *told = Some((now, no_room));
        let root = self.shared.layout.root().display();
        warn!(
            store = self.shared.config.writer,
            path = %root,
            most,
            no_room,
            "the index of {root} is full: it has room for {most} blocks, {no_room} more that are \
             stored there are misses for \
             this process; lower storage_capacity, or store larger blocks"
        );
    }

    /// Says in the log, once in a while, that what a segment holds is a miss because its end cannot
    /// be read.
    fn tell_unreadable(&self, name: SegmentName, error: &Error) {
        if error.kind() != ErrorKind::Io && !is_link(error) {
            return;
        }
        let now = self.shared.clock.now();
        let mut told = self.discovery.told_unreadable.lock();
        if told.is_some_and(|at| now.since(at) < TELL_AGAIN) {
            return;
        }
        *told = Some(now);
        let path = self.shared.layout.segment(name);
        warn!(
            store = self.shared.config.writer,
            path = %path.display(),
            error = %error,
            "a segment cannot be read, so its blocks are misses here: {error}"
        );
    }

    /// Closes segments that no one has read for a while: one that was removed elsewhere must not
    /// hold its space, and a share can be unmounted then.
    fn close_unused(&self) {
        let now = self.shared.clock.now();
        let mut closed = self.discovery.closed.lock();
        let due = closed.is_none_or(|at| now.since(at) >= CLOSE_UNUSED);
        if due {
            *closed = Some(now);
            drop(closed);
            self.shared.io.close_kept(Close::Unused);
        }
    }

    /// What was found, or nothing behind a symbolic link: what it leads to is not ours to read.
    fn unless_linked<T: Default>(&self, found: Result<T>) -> Result<T> {
        match found {
            Err(error) if is_link(&error) => {
                self.shared.log_link(&error);
                Ok(T::default())
            }
            found => found,
        }
    }

    fn list_if_changed(
        &self,
        state: &mut State,
        asked: bool,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let now = self.shared.clock.now();
        let dir = self.shared.layout.segments();
        let looked = dir.clone();
        let meta = self.unless_linked(self.shared.call(deadline, move |io| io.look(looked)))?;
        let same = state.seen == meta;
        let recent = state.listed.is_some_and(|at| now.since(at) < LIST_AGAIN);
        if same && state.settled && recent && !asked {
            return Ok(());
        }
        let before = self.index.public();
        let listed =
            self.unless_linked(self.shared.call(deadline, move |io| io.list_if_there(&dir)))?;
        (state.seen, state.settled, state.listed) = (meta, same, Some(now));
        let whole = listed.len() < MAX_LIST;
        let files = listed.into_iter().filter(|(_, meta)| !meta.is_dir);
        let there: HashMap<SegmentName, FileMeta> = files
            .filter_map(|(name, meta)| Some((SegmentName::parse(&name)?, meta)))
            .collect();
        if whole {
            state.odd.retain(|name, _| there.contains_key(name));
        }
        let mut gone = Vec::new();
        for (name, number) in before {
            match there.get(&name) {
                // A segment never changes. One that has another length than it had is not that
                // segment any more: others, who read its footer, have none of its records, and so
                // must we, or no one would store them again.
                Some(meta) if self.index.file_len(number) != Some(meta.len) => {
                    self.index.vanished(number)
                }
                None if whole => {
                    self.index.vanished(number);
                    gone.push(self.shared.layout.segment(name));
                }
                _ => {}
            }
        }
        self.shared.io.close_kept(Close::Gone(&gone));
        let mut fresh: Vec<_> = there
            .into_iter()
            .filter(|(name, meta)| !self.index.knows(*name) && !state.is_hopeless(*name, meta))
            .collect();
        fresh.sort_unstable_by_key(|(name, meta)| (meta.mtime_ns, *name));
        state.queue = fresh.into();
        Ok(())
    }

    /// Reads footers of segments that are new, the newest first.
    fn read_footers(&self, state: &mut State, deadline: MonotonicTime) {
        let mut left = PER_TURN;
        while left > 0 && !state.queue.is_empty() && self.shared.clock.now() < deadline {
            let some = state.queue.len().min(AT_ONCE).min(left);
            let batch = state.queue.split_off(state.queue.len() - some);
            left -= some;
            let reads: Vec<_> = batch
                .into_iter()
                .map(|(name, meta)| {
                    let len = meta.len.min(TAIL);
                    let mode = ReadMode::Default;
                    (
                        name,
                        meta,
                        self.begin_read(name, meta.len - len, len, mode, deadline),
                    )
                })
                .collect();
            for (name, meta, read) in reads.into_iter().rev() {
                let found = read
                    .wait()
                    .and_then(|(tail, file_len)| self.footer(name, &tail, file_len, deadline));
                match found {
                    Ok(Ok(footer)) => {
                        let known = Known {
                            name,
                            part: footer.part,
                            private: false,
                            sealed_ns: footer.sealed_ns,
                            used_ns: meta.mtime_ns,
                            len: meta.len,
                        };
                        if let Some(number) = self.index.begin(known) {
                            self.index.add(number, &footer.entries);
                            footer.entries.iter().for_each(|entry| {
                                self.is_ours(entry.len); // or the manifest is asked about it
                            });
                        }
                    }
                    // It was removed meanwhile, belongs to another listing, or the medium does not
                    // answer now, which says nothing of the segment: it is looked at again after
                    // the next listing.
                    Err(error) => self.tell_unreadable(name, &error),
                    Ok(Err(MissReason::NewerVersion)) => {
                        state.odd.insert(name, (meta, TRIES));
                    }
                    Ok(Err(_)) => {
                        let tries = state.odd.get(&name).map_or(0, |(_, tries)| *tries);
                        state.odd.insert(name, (meta, tries + 1));
                    }
                }
            }
        }
    }

    /// The footer of a segment, of whose end `tail` was read. Two kinds of failure: of the medium,
    /// and of what it holds.
    pub(super) fn footer(
        &self,
        name: SegmentName,
        tail: &[u8],
        file_len: u64,
        deadline: MonotonicTime,
    ) -> Result<Result<Footer, MissReason>> {
        let namespace = self.shared.config.identity.digest();
        let lengths = &self.shared.lengths;
        Ok(
            match Footer::in_tail(tail, file_len, name, namespace, lengths) {
                Ok(Tail::Whole(footer)) => Ok(footer),
                Ok(Tail::Longer(trailer)) => {
                    let (start, end) = (trailer.footer.start, trailer.footer.end);
                    let read =
                        self.begin_read(name, start, end - start, ReadMode::Default, deadline);
                    Footer::of(&trailer, &read.wait()?.0, lengths)
                }
                Err(reason) => Err(reason),
            },
        )
    }

    /// Starts reading a piece of a segment: its bytes, and the file's length.
    pub(super) fn begin_read(
        &self,
        name: SegmentName,
        offset: u64,
        len: u64,
        mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Pending<(Vec<u8>, u64)> {
        let (path, len) = (
            self.shared.layout.segment(name),
            (len as usize).max(TRAILER_LEN),
        );
        let read = move |io: &IoJob| {
            let gone = || Error::new(ErrorKind::NotFound, "this segment is gone");
            io.read_piece(&path, offset, len, mode)?.ok_or_else(gone)
        };
        self.shared.io.begin(LANE_LOOKUP, deadline, read)
    }
}

impl State {
    /// Whether a segment was looked at often enough and is as it was.
    fn is_hopeless(&self, name: SegmentName, meta: &FileMeta) -> bool {
        let same = |seen: &FileMeta| (seen.len, seen.ino) == (meta.len, meta.ino);
        self.odd
            .get(&name)
            .is_some_and(|(seen, tries)| same(seen) && *tries >= TRIES)
    }
}
