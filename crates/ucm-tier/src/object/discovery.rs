//! The segments of others: which there are is seen by listing their names, what is in them by
//! reading their footers.
//!
//! A name begins with the time at which its segment was sealed, so a look lists only what is
//! younger than what it has seen, and some minutes more, for clocks differ. Now and then all are
//! listed: what has gone leaves the index, and what came with a clock that is far behind is found.
//! No one looks while no one asks for anything.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use futures_util::stream::StreamExt;
use object_store::ObjectMeta;
use object_store::path::Path;
use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, MissReason, Result};
use ucm_infra::{MonotonicTime, Notify};
use ucm_quota::layout::SegmentName;

use super::bucket::MOST_LISTED;
use super::names::SegmentObject;
use super::{AT_ONCE, Objects};
use crate::backend::Done;
use crate::pending_looks::PendingLooks;
use crate::segment::footer::{Footer, TAIL, TRIES, Tail};
use crate::segment::format::TRAILER_LEN;
use crate::segment::index::{Known, SegmentNumber};

/// Time between two listings of all.
const LIST_ALL: Duration = Duration::from_secs(300);
/// How far clocks of writers may differ for their segments to be found with the next look.
const APART_NS: u64 = 300_000_000_000;
/// How long after somebody asked the next looks are made.
const WANTED_FOR: Duration = Duration::from_secs(300);
/// Footers that are read in one turn.
const PER_TURN: usize = 256;
/// Longest pause after looks that failed one after the other.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Segments that wait for their footers to be read, above which no more are listed.
const MOST_QUEUED: usize = 1 << 20;
/// How long one look may take.
pub(super) const TURN: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Default)]
pub(super) struct Discovery {
    state: Mutex<State>,
    pace: Mutex<Pace>,
    /// Who waits for a look.
    pub(super) looks: PendingLooks,
    /// When somebody last asked for anything.
    wanted: Mutex<MonotonicTime>,
    /// Rung when others' segments should be looked for.
    pub(super) notify: Notify,
}

#[derive(Default)]
struct State {
    /// When all were last listed to the end.
    listed_all: Option<MonotonicTime>,
    /// A listing of all that goes on with the next turn.
    all: Option<ListingAll>,
    /// The youngest segment that was seen, by its own time.
    youngest_ns: u64,
    /// Segments whose footers are to be read, by time.
    queue: BTreeMap<SegmentObject, u64>,
    /// Segments that cannot be used, and how often that was seen.
    odd: HashMap<SegmentName, u8>,
}

/// How far a listing of all has come.
struct ListingAll {
    /// The last name that was listed, and how many were.
    behind: Option<Path>,
    listed: usize,
    /// Segments of the index at its beginning that were not listed yet.
    missing: HashMap<SegmentName, SegmentNumber>,
    /// Segments that cannot be used and are still there.
    odd: HashSet<SegmentName>,
}

/// When the last look was made, and how it ended.
#[derive(Default)]
struct Pace {
    began: Option<MonotonicTime>,
    /// Why it failed, and how many have, one after the other.
    failed: Option<(Error, u32)>,
    /// There is more to list or to read.
    more: bool,
}

impl Pace {
    /// When the next look is due by itself: later and later as long as they fail.
    fn due(&self, now: MonotonicTime, refresh: Duration) -> MonotonicTime {
        let failed = self.failed.as_ref().map_or(0, |(_, times)| times - 1);
        let pause = refresh.saturating_mul(1 << failed.min(6));
        let pause = pause.min(LONGEST_PAUSE.max(refresh));
        self.began.map_or(now, |began| began.after(pause))
    }

    /// Notes how a look ended: whether there is more to look at.
    fn ended(&mut self, result: &Result<bool>) {
        self.more = result.as_ref().is_ok_and(|more| *more);
        self.failed = result.as_ref().err().map(|error| {
            let before = self.failed.as_ref().map_or(0, |(_, times)| *times);
            (error.clone(), before.saturating_add(1))
        });
    }
}

impl Discovery {
    /// Somebody asks for something.
    pub(super) fn wanted(&self, now: MonotonicTime) {
        let first = {
            let mut wanted = self.wanted.lock();
            let first = now.since(*wanted) >= WANTED_FOR;
            *wanted = now;
            first
        };
        if first {
            self.notify.notify();
        }
    }
}

impl Objects {
    /// Looks until every segment that is there is known, or the deadline has passed.
    pub(super) fn find_all(&self, deadline: MonotonicTime) {
        self.discovery.wanted(self.clock.now());
        while self.find(deadline) && self.clock.now() < deadline {}
    }

    /// Calls back after the next look: with an error when it could not be made by the deadline, or
    /// too many wait for it; with that of the last look where that failed and the next one is not
    /// due yet.
    pub(super) fn after_look(&self, deadline: MonotonicTime, done: Done<()>) {
        let failed = {
            let pace = self.discovery.pace.lock();
            let now = self.clock.now();
            let pauses = pace.due(now, self.config.refresh) > now;
            pace.failed
                .as_ref()
                .filter(|_| pauses)
                .map(|(error, _)| error.clone())
        };
        if let Some(error) = failed {
            return done(Err(error));
        }
        if self
            .discovery
            .looks
            .add(deadline, done, || self.is_closing())
        {
            self.discovery.notify.notify();
            self.upkeep.timer.notify(); // the thread that keeps the time
        }
    }

    /// When the next look is due; none while no one asks.
    pub(super) fn next_look(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let asked = self.discovery.looks.is_asked();
        let wanted = now.since(*self.discovery.wanted.lock()) < WANTED_FOR;
        let pace = self.discovery.pace.lock();
        match (asked || pace.more, &pace.failed) {
            (true, None) => Some(now),
            (false, _) if !wanted => None,
            _ => Some(pace.due(now, self.config.refresh)),
        }
    }

    /// One look around; whether there is more to look at at once.
    pub(super) fn find(&self, deadline: MonotonicTime) -> bool {
        let now = self.clock.now();
        // One look at a time.
        let Some(mut state) = self.discovery.state.try_lock_for(deadline.since(now)) else {
            return false;
        };
        self.discovery.pace.lock().began = Some(now);
        self.discovery.looks.begin();
        let listed = self.list(&mut state, deadline);
        let read = listed.and_then(|()| self.read_footers(&mut state, deadline));
        self.learn_lengths(deadline);
        let read = read.map(|()| !state.queue.is_empty() || state.all.is_some());
        self.discovery.pace.lock().ended(&read);
        let looked = self.discovery.looks.looked();
        drop(state);
        let more = read.as_ref().is_ok_and(|more| *more);
        let read = read.map(|_| ());
        looked.tell(&read);
        if read.is_err() {
            self.discovery.looks.begin(); // there will be no look for a while
            self.discovery.looks.looked().tell(&read);
        }
        self.index.sweep_if_due();
        more
    }

    /// Lists what is younger than what was seen, and all of it when it is time for that.
    fn list(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        if state.listed_all.is_some() {
            let from = state.youngest_ns.saturating_sub(APART_NS);
            let from = self.names.segments_from(from);
            let (listed, ended) = self.names_behind(Some(from), deadline);
            let came_on = !listed.is_empty();
            self.take_up(state, listed);
            if !came_on {
                ended?; // else the rest comes with the next look
            }
        }
        let now = self.clock.now();
        let due = state.listed_all.is_none_or(|at| now.since(at) >= LIST_ALL);
        if due && state.queue.len() < MOST_QUEUED {
            // The other half of the time is for footers.
            self.list_all(state, now.after(deadline.since(now) / 2))?;
        }
        Ok(())
    }

    /// Lists all, from where the last turn ended. Of one that fails half-way the rest comes with
    /// the next turn; where a bucket lists in no order, the next turn lists from the beginning.
    fn list_all(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        let mut all = state.all.take().unwrap_or_else(|| ListingAll {
            behind: None,
            listed: 0,
            missing: self.index.public().into_iter().collect(),
            odd: HashSet::new(),
        });
        let (listed, ended) = self.names_behind(all.behind.clone(), deadline);
        let further = listed.last().map(|meta| meta.location.clone());
        all.listed += listed.len();
        for (object, size) in listed.iter().filter_map(|meta| self.segment_of(meta)) {
            let known = all.missing.remove(&object.name);
            if let Some(number) = known.filter(|number| self.index.file_len(*number) != Some(size))
            {
                self.index.vanished(number);
            }
            if state.odd.contains_key(&object.name) {
                all.odd.insert(object.name);
            }
        }
        self.take_up(state, listed);
        match (ended, further) {
            (Ok(true), _) => {
                let ListingAll { missing, odd, .. } = all;
                missing
                    .into_values()
                    .for_each(|number| self.index.vanished(number));
                state.odd.retain(|name, _| odd.contains(name));
                state.listed_all = Some(self.clock.now());
                Ok(())
            }
            // What was listed is taken up all the same: its footers are read before the next turn.
            (Err(error), Some(_))
                if !self.bucket.is_ordered() && error.kind() == ErrorKind::Timeout =>
            {
                Ok(())
            }
            (Err(error), _) if !self.bucket.is_ordered() => Err(error),
            (ended, None) => {
                state.all = Some(all);
                ended.map(|_| ())
            }
            _ if all.listed > MOST_LISTED || !self.bucket.is_ordered() => {
                state.listed_all = Some(self.clock.now());
                let text = "there are more objects in this namespace than can be listed; give the \
                            store a prefix of its own, \
                            or a larger object_size";
                Err(Error::new(ErrorKind::NoSpace, text).with("most", MOST_LISTED))
            }
            (_, further) => {
                all.behind = further;
                state.all = Some(all);
                Ok(())
            }
        }
    }

    /// The objects behind a name that were listed by the deadline, and how that ended: whether
    /// there were no more.
    fn names_behind(
        &self,
        behind: Option<Path>,
        deadline: MonotonicTime,
    ) -> (Vec<ObjectMeta>, Result<bool>) {
        let (prefix, mut found) = (self.names.segments(), Vec::new());
        let list = self
            .bucket
            .list_into(&prefix, behind.as_ref(), MOST_LISTED, &mut found);
        let ended = self.call(deadline, list);
        (found, ended)
    }

    fn segment_of(&self, meta: &ObjectMeta) -> Option<(SegmentObject, u64)> {
        Some((self.names.parse_segment(&meta.location)?, meta.size))
    }

    /// Has the footers of those read that are new. Others that wait for that wait on.
    fn take_up(&self, state: &mut State, listed: Vec<ObjectMeta>) {
        let now_ns = self.now_ns();
        for (object, size) in listed.iter().filter_map(|meta| self.segment_of(meta)) {
            // A clock that is far ahead must not hide what comes after it.
            state.youngest_ns = state.youngest_ns.max(object.sealed_ns.min(now_ns));
            let usable = state
                .odd
                .get(&object.name)
                .is_none_or(|tries| *tries < TRIES);
            // What finds no place here is found by the next listing of all.
            if usable && state.queue.len() < MOST_QUEUED && !self.index.knows(object.name) {
                state.queue.insert(object, size);
            }
        }
    }

    /// Reads footers of segments that are new, the youngest first.
    fn read_footers(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        let (mut left, mut unread, mut failed) = (PER_TURN, BTreeMap::new(), None);
        let mut came_on = false;
        while left > 0 && !state.queue.is_empty() {
            let batch = state
                .queue
                .iter()
                .rev()
                .take(AT_ONCE.min(left))
                .map(|(object, size)| (*object, *size));
            let batch: Vec<(SegmentObject, u64)> = batch.collect();
            left -= batch.len();
            let one = |&(object, size): &(SegmentObject, u64)| async move {
                let path = self.names.segment(object);
                (object, size, self.footer(&path, object, size).await)
            };
            let reads = futures_util::stream::iter(batch.iter().map(one)).buffer_unordered(AT_ONCE);
            let read = match self.call(deadline, async { Ok(reads.collect::<Vec<_>>().await) }) {
                Ok(read) => read,
                // The time of this turn is over, and the rest comes with the next one.
                Err(error) if came_on && error.kind() == ErrorKind::Timeout => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            let asked = read.len();
            let before = unread.len();
            for (object, size, found) in read {
                state.queue.remove(&object);
                match found {
                    Ok(Ok(footer)) => {
                        let known = Known {
                            name: object.name,
                            part: footer.part,
                            private: false,
                            sealed_ns: footer.sealed_ns,
                            used_ns: i64::try_from(footer.sealed_ns).unwrap_or(i64::MAX),
                            len: size,
                        };
                        if let Some(number) = self.index.begin(known) {
                            self.index.add(number, &footer.entries);
                        }
                        if footer.part == self.config.scope.part {
                            // The first whose length is not known has the lengths learned before
                            // anybody asks.
                            let _ = footer.entries.iter().all(|entry| self.is_ours(entry.len));
                        }
                    }
                    Ok(Err(_)) if state.odd.len() >= MOST_QUEUED => {}
                    Ok(Err(MissReason::NewerVersion)) => _ = state.odd.insert(object.name, TRIES),
                    Ok(Err(_)) => *state.odd.entry(object.name).or_default() += 1,
                    Err(error) if error.kind() == ErrorKind::NotFound => {} // removed meanwhile
                    // The server does not answer now, which says nothing of the segment.
                    Err(error) => {
                        failed = Some(error);
                        unread.insert(object, size);
                    }
                }
            }
            if unread.len() - before == asked {
                break;
            }
            came_on = true;
        }
        state.queue.append(&mut unread);
        failed.map_or(Ok(()), Err)
    }

    /// The footer of a segment. Two kinds of failure: of the server, and of what lies there.
    async fn footer(
        &self,
        path: &Path,
        object: SegmentObject,
        size: u64,
    ) -> Result<Result<Footer, MissReason>> {
        if size < TRAILER_LEN as u64 {
            return Ok(Err(MissReason::Truncated));
        }
        let (bucket, lengths) = (&self.bucket, &self.lengths);
        let identity = self.config.scope.identity.digest();
        let tail = bucket.range(path, size.saturating_sub(TAIL)..size).await?;
        let found = match Footer::in_tail(&tail, size, object.name, identity, lengths) {
            Ok(Tail::Whole(footer)) => Ok(footer),
            Ok(Tail::Longer(trailer)) => {
                let footer = bucket.range(path, trailer.footer.clone()).await?;
                Footer::of(&trailer, &footer, lengths)
            }
            Err(reason) => Err(reason),
        };
        Ok(match found {
            // Its name says when it was sealed, too.
            Ok(footer) if footer.sealed_ns != object.sealed_ns => Err(MissReason::ForeignId),
            found => found,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_fail_come_later_and_later() {
        let second = Duration::from_secs(1);
        let failed = || Err(Error::new(ErrorKind::Io, "the server does not answer"));
        let mut pace = Pace {
            began: Some(MonotonicTime::default()),
            ..Pace::default()
        };
        let pause = |pace: &Pace| {
            let due = pace.due(MonotonicTime::default(), second);
            due.since(MonotonicTime::default()).as_secs()
        };
        assert_eq!(pause(&pace), 1);
        let pauses = [(); 8].map(|()| {
            pace.ended(&failed());
            pause(&pace)
        });
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        pace.ended(&Ok(false));
        assert_eq!(pause(&pace), 1);
        pace.ended(&failed());
        assert_eq!(
            pace.due(MonotonicTime::default(), 100 * second),
            MonotonicTime::default().after(100 * second)
        );
    }
}
