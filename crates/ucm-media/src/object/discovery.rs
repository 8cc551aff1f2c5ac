//! The segments of others in a bucket: their names are listed, and their footers are read.
//!
//! A name begins with the time at which its segment was sealed, so a turn lists only names younger
//! than those it has seen, and some minutes more, for clocks differ. Now and then all are listed:
//! segments that were removed leave the index, and those of a clock that is far behind are found.
//! Nothing is listed while nothing is looked up.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::blobs::BucketBlobs;
use super::bucket::MOST_LISTED;
use super::remote::Remote;
use crate::blobs::BlobMeta;
use crate::segment::cache::SegmentCache;
use crate::segment::unread::{ListingAll, UnreadSegments};

/// Time between two listings of all.
const LIST_ALL: Duration = Duration::from_secs(300);
/// How far clocks of writers may differ for their segments to be found with the next turn.
const APART_NS: u64 = 300_000_000_000;
/// How long after a lookup the next turns are made.
const WANTED_FOR: Duration = Duration::from_secs(300);
/// Longest pause after turns that failed one after the other.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long one turn may take.
pub(super) const TURN: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Discovery {
    remote: Arc<Remote>,
    cache: Arc<SegmentCache<BucketBlobs>>,
    state: Mutex<State>,
    pace: Mutex<Pace>,
    /// When the last lookup was.
    wanted: Mutex<MonotonicTime>,
}

#[derive(Default)]
struct State {
    /// When all were last listed to the end.
    listed_all: Option<MonotonicTime>,
    /// A listing of all that goes on with the next turn, behind this name.
    all: Option<(ListingAll, Option<Path>)>,
    /// The youngest segment that was listed, by its own time.
    youngest_ns: u64,
    unread: UnreadSegments,
}

/// When the last turn began, and how it ended.
#[derive(Default)]
struct Pace {
    began: Option<MonotonicTime>,
    /// Why it failed, and how many have, one after the other.
    failed: Option<(Error, u32)>,
    /// There is more to list or to read.
    more: bool,
}

impl Pace {
    /// When the next turn is due by itself: later and later as long as they fail.
    fn due(&self, now: MonotonicTime, refresh: Duration) -> MonotonicTime {
        let failed = self.failed.as_ref().map_or(0, |(_, times)| times - 1);
        let pause = refresh.saturating_mul(1 << failed.min(6));
        let pause = pause.min(LONGEST_PAUSE.max(refresh));
        self.began.map_or(now, |began| began.after(pause))
    }

    /// Records how a turn ended: whether there is more to list or to read.
    fn ended(&mut self, result: &Result<bool>) {
        self.more = result.as_ref().is_ok_and(|more| *more);
        self.failed = result.as_ref().err().map(|error| {
            let before = self.failed.as_ref().map_or(0, |(_, times)| *times);
            (error.clone(), before.saturating_add(1))
        });
    }
}

impl Discovery {
    pub(super) fn new(cache: &Arc<SegmentCache<BucketBlobs>>) -> Self {
        Self {
            remote: Arc::clone(&cache.blobs.remote),
            cache: Arc::clone(cache),
            state: Mutex::default(),
            pace: Mutex::default(),
            wanted: Mutex::default(),
        }
    }

    /// Something is looked up.
    pub(super) fn wanted(&self) {
        let now = self.remote.clock.now();
        let last = std::mem::replace(&mut *self.wanted.lock(), now);
        if now.since(last) >= WANTED_FOR {
            self.cache.looks.due.notify();
        }
    }

    /// Lists until every segment that is there is known, or the deadline has passed.
    pub(super) fn find_all(&self, deadline: MonotonicTime) {
        self.wanted();
        while self.find(deadline) && self.remote.clock.now() < deadline {}
    }

    /// When the next turn is due; none while nothing is looked up.
    pub(super) fn next_turn(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let asked = self.cache.looks.is_asked();
        let wanted = now.since(*self.wanted.lock()) < WANTED_FOR;
        let pace = self.pace.lock();
        match (asked || pace.more, &pace.failed) {
            (true, None) => Some(now),
            (false, _) if !wanted => None,
            _ => Some(pace.due(now, self.remote.config.refresh)),
        }
    }

    /// One turn; whether there is more to list or to read at once.
    pub(super) fn find(&self, deadline: MonotonicTime) -> bool {
        let now = self.remote.clock.now();
        // One turn at a time.
        let Some(mut state) = self.state.try_lock_for(deadline.since(now)) else {
            return false;
        };
        self.pace.lock().began = Some(now);
        self.cache.looks.begin();
        let listed = self.list(&mut state, deadline);
        let read = listed.and_then(|()| self.read_footers(&mut state, deadline));
        self.remote.learn_lengths(&self.cache.lengths, deadline);
        let read = read.map(|()| !state.unread.queue.is_empty() || state.all.is_some());
        let next = {
            let mut pace = self.pace.lock();
            pace.ended(&read);
            pace.due(now, self.remote.config.refresh)
        };
        let looked = match &read {
            Ok(_) => self.cache.looks.looked(),
            Err(error) => self.cache.looks.failed(error.clone(), next),
        };
        drop(state);
        let more = matches!(read, Ok(true));
        looked.tell(&read.map(|_| ()));
        let (store, place) = (self.remote.config.scope.writer, &self.remote.config.place);
        self.cache.after_listing(store, &place.url);
        more
    }

    /// Lists names younger than those that were seen, and all of them when it is time for that.
    fn list(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        if state.listed_all.is_some() {
            let from = state.youngest_ns.saturating_sub(APART_NS);
            let from = self.remote.names.segments_from(from);
            let (listed, _, ended) = self.names_behind(state, Some(from), deadline);
            for meta in &listed {
                state.unread.offer(&self.cache, *meta);
            }
            if listed.is_empty() {
                ended?; // else the rest is listed by the next turn
            }
        }
        let now = self.remote.clock.now();
        let due = state.listed_all.is_none_or(|at| now.since(at) >= LIST_ALL);
        if due && !state.unread.is_full() {
            // The other half of the time is for footers.
            self.list_all(state, now.after(deadline.since(now) / 2))?;
        }
        Ok(())
    }

    /// Lists all, from where the last turn ended. After a failure half-way the next turn lists the
    /// rest; where a bucket lists in no order, the next turn lists from the beginning.
    fn list_all(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        let begin = || (ListingAll::begin(&self.cache), None);
        let (mut all, behind) = state.all.take().unwrap_or_else(begin);
        let (listed, further, ended) = self.names_behind(state, behind.clone(), deadline);
        all.take(&self.cache, &mut state.unread, &listed);
        let is_ordered = self.remote.bucket.is_ordered();
        match (ended, further) {
            (Ok(true), _) => {
                let _ = all.end(&self.cache, &mut state.unread);
                state.listed_all = Some(self.remote.clock.now());
                Ok(())
            }
            // The footers of those that were listed are read before the next turn.
            (Err(error), Some(_)) if !is_ordered && error.kind() == ErrorKind::Timeout => Ok(()),
            (Err(error), _) if !is_ordered => Err(error),
            (ended, None) => {
                state.all = Some((all, behind));
                ended.map(|_| ())
            }
            _ if all.listed > MOST_LISTED || !is_ordered => {
                state.listed_all = Some(self.remote.clock.now());
                let text = "there are more objects in this namespace than can be listed; give the \
                            store a prefix of its own, or a larger object_size";
                Err(Error::new(ErrorKind::NoSpace, text).with("most", MOST_LISTED))
            }
            (_, further) => {
                state.all = Some((all, further));
                Ok(())
            }
        }
    }

    /// The segments behind a name that were listed by the deadline, the last name, and how that
    /// ended: whether there were no more.
    fn names_behind(
        &self,
        state: &mut State,
        behind: Option<Path>,
        deadline: MonotonicTime,
    ) -> (Vec<BlobMeta>, Option<Path>, Result<bool>) {
        let Remote { names, bucket, .. } = &*self.remote;
        let (prefix, mut found) = (names.segments(), Vec::new());
        let list = bucket.list_into(&prefix, behind.as_ref(), MOST_LISTED, &mut found);
        let ended = self.remote.call(deadline, list);
        let now_ns = self.remote.now_ns();
        let mut segments = Vec::new();
        for meta in &found {
            let Some(blob) = names.parse_segment(&meta.location) else {
                continue;
            };
            // A clock that is far ahead must not hide segments that are sealed after it.
            state.youngest_ns = state.youngest_ns.max(blob.sealed_ns.min(now_ns));
            segments.push(BlobMeta::of_object(blob, meta.size));
        }
        (segments, found.pop().map(|meta| meta.location), ended)
    }

    /// Reads footers of new segments. Those of which the server fails wait for the next turn.
    fn read_footers(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        let before = state.unread.queue.len();
        let clock = &*self.remote.clock;
        let failed = state.unread.read(&self.cache, clock, deadline);
        let answered = before > state.unread.queue.len() + failed.len();
        let mut first = None;
        for (meta, error) in failed {
            state.unread.offer(&self.cache, meta);
            // The time of this turn is over, and the next one reads the rest.
            if first.is_none() && !(answered && error.kind() == ErrorKind::Timeout) {
                first = Some(error);
            }
        }
        first.map_or(Ok(()), Err)
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
