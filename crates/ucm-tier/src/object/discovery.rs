//! The segments of others: which there are is seen by listing their names, what is in them by reading their footers.
//!
//! A name begins with the time at which its segment was sealed, so a look lists only what is younger than what it has seen,
//! and some minutes more, for clocks differ. Now and then all are listed: what has gone leaves the index, and what came with a
//! clock that is far behind is found. Nobody looks while nobody asks for anything.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::StreamExt;
use object_store::ObjectMeta;
use parking_lot::Mutex;
use ucm_core::{ErrorKind, MissReason, Part, Result};
use ucm_infra::{MonotonicTime, Notify};
use ucm_quota::layout::SegmentName;

use super::Objects;
use super::bucket::Bucket;
use super::names::SegmentObject;
use crate::backend::Done;
use crate::pending_looks::PendingLooks;
use crate::segment::format::{Entry, TRAILER_LEN, Trailer};
use crate::segment::index::Known;

/// Time between two listings of all.
const LIST_ALL: Duration = Duration::from_secs(300);
/// How far clocks of writers may differ for their segments to be found with the next look.
const APART_NS: u64 = 300_000_000_000;
/// How long after somebody asked the next looks are made.
const WANTED_FOR: Duration = Duration::from_secs(300);
/// Footers that are read at once, and in one turn.
const AT_ONCE: usize = 16;
const PER_TURN: usize = 256;
/// Bytes read of a segment's end at first: the footer of a thousand records.
const TAIL: u64 = 32 << 10;
/// Longest footer that is read, bytes.
const LONGEST_FOOTER: u64 = 64 << 20;
/// How often a segment whose footer cannot be used is looked at.
const TRIES: u8 = 3;
/// How long one look may take.
pub(super) const TURN: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Default)]
pub(super) struct Discovery {
    state: Mutex<State>,
    /// Who waits for a look.
    pub(super) looks: PendingLooks,
    /// When somebody last asked for anything.
    wanted: Mutex<MonotonicTime>,
    /// Rung when others' segments should be looked for.
    pub(super) notify: Notify,
}

#[derive(Default)]
struct State {
    /// When all were listed, and when any.
    listed_all: Option<MonotonicTime>,
    listed: Option<MonotonicTime>,
    /// The youngest segment that was seen, by its own time.
    youngest_ns: u64,
    /// Segments whose footers are to be read, by time.
    queue: BTreeMap<SegmentObject, u64>,
    /// Segments that cannot be used, and how often that was seen.
    odd: HashMap<SegmentName, u8>,
}

/// What a footer says.
struct Footer {
    sealed_ns: u64,
    part: Part,
    entries: Vec<Entry>,
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

    /// Calls back after the next look: with an error when it could not be made by the deadline, or too many wait for it.
    pub(super) fn after_look(&self, deadline: MonotonicTime, done: Done<()>) {
        if self.discovery.looks.add(deadline, done, || self.is_closing()) {
            self.discovery.notify.notify();
            self.upkeep.timer.notify(); // whoever keeps the time
        }
    }

    /// When the next look is due; none while nobody asks.
    pub(super) fn next_look(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let asked = self.discovery.looks.is_asked();
        let wanted = now.since(*self.discovery.wanted.lock()) < WANTED_FOR;
        let state = self.discovery.state.lock();
        let due = state.listed.map_or(now, |at| at.after(self.config.refresh));
        match (asked || !state.queue.is_empty(), wanted) {
            (true, _) => Some(now),
            (false, true) => Some(due),
            (false, false) => None,
        }
    }

    /// One look around; whether there is more to read at once.
    pub(super) fn find(&self, deadline: MonotonicTime) -> bool {
        let mut state = self.discovery.state.lock(); // one look at a time
        self.discovery.looks.begin();
        let listed = self.list(&mut state, deadline);
        let read = listed.and_then(|()| self.read_footers(&mut state, deadline));
        let more = !state.queue.is_empty() && read.is_ok();
        let looked = self.discovery.looks.looked();
        drop(state);
        looked.tell(&read);
        self.index.sweep_if_due();
        more
    }

    /// Lists what is younger than what was seen, or all of it when it is time for that.
    fn list(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        let now = self.clock.now();
        let all = state.listed_all.is_none_or(|at| now.since(at) >= LIST_ALL);
        let before = self.index.public();
        let (bucket, prefix) = (Arc::clone(&self.bucket), self.names.segments());
        let from = (!all).then(|| {
            self.names
                .segments_from(state.youngest_ns.saturating_sub(APART_NS))
        });
        let listed = self.call(deadline, async move { bucket.list(&prefix, from.as_ref()).await })?;
        state.listed = Some(now);
        let ours = |meta: ObjectMeta| Some((self.names.parse_segment(&meta.location)?, meta.size));
        let there: BTreeMap<SegmentObject, u64> = listed.into_iter().filter_map(ours).collect();
        if all {
            state.listed_all = Some(now);
            let names: HashMap<SegmentName, u64> =
                there.iter().map(|(object, size)| (object.name, *size)).collect();
            state.odd.retain(|name, _| names.contains_key(name));
            for (name, number) in before {
                if names.get(&name).copied() != self.index.file_len(number) {
                    self.index.vanished(number);
                }
            }
        }
        let youngest = there.last_key_value().map_or(0, |(object, _)| object.sealed_ns);
        // A clock that is far ahead must not hide what comes after it.
        state.youngest_ns = state.youngest_ns.max(youngest.min(self.now_ns()));
        let is_new = |object: &SegmentObject| {
            !self.index.knows(object.name) && state.odd.get(&object.name).is_none_or(|tries| *tries < TRIES)
        };
        if all {
            state.queue.clear(); // what went meanwhile is not asked for
        }
        // Of a look at the younger ones alone the older ones still wait for their turn.
        state
            .queue
            .extend(there.into_iter().filter(|(object, _)| is_new(object)));
        Ok(())
    }

    /// Reads footers of segments that are new, the youngest first.
    fn read_footers(&self, state: &mut State, deadline: MonotonicTime) -> Result<()> {
        let mut left = PER_TURN;
        while left > 0 && !state.queue.is_empty() {
            let batch = state
                .queue
                .iter()
                .rev()
                .take(AT_ONCE.min(left))
                .map(|(object, size)| (*object, *size));
            let batch: Vec<(SegmentObject, u64)> = batch.collect();
            left -= batch.len();
            let (bucket, names, identity) = (
                Arc::clone(&self.bucket),
                self.names.clone(),
                *self.config.scope.identity.digest(),
            );
            let asked = batch.clone();
            let read = self.call(deadline, async move {
                let one = |(object, size): (SegmentObject, u64)| {
                    let (bucket, path) = (Arc::clone(&bucket), names.segment(object));
                    async move {
                        (
                            object,
                            size,
                            footer(&bucket, &path, object, size, &identity).await,
                        )
                    }
                };
                let reads = futures_util::stream::iter(asked.into_iter().map(one));
                Ok(reads.buffer_unordered(AT_ONCE).collect::<Vec<_>>().await)
            })?;
            let mut failed = None;
            for (object, size, found) in read {
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
                    }
                    Ok(Err(MissReason::NewerVersion)) => _ = state.odd.insert(object.name, TRIES),
                    Ok(Err(_)) => *state.odd.entry(object.name).or_default() += 1,
                    Err(error) if error.kind() == ErrorKind::NotFound => {} // removed meanwhile
                    // The server does not answer now, which says nothing of the segment.
                    Err(error) => failed = Some(error),
                }
                state.queue.remove(&object);
            }
            if let Some(error) = failed {
                return Err(error);
            }
        }
        Ok(())
    }
}

/// The footer of a segment. Two kinds of failure: of the server, and of what lies there.
async fn footer(
    bucket: &Bucket,
    path: &object_store::path::Path,
    object: SegmentObject,
    size: u64,
    identity: &[u8; 32],
) -> Result<Result<Footer, MissReason>> {
    if size < TRAILER_LEN as u64 {
        return Ok(Err(MissReason::Truncated));
    }
    let tail = bucket.range(path, size.saturating_sub(TAIL)..size).await?;
    let trailer = match Trailer::decode(&tail, size) {
        Ok(trailer) => trailer,
        Err(reason) => return Ok(Err(reason)),
    };
    let owner = &trailer.owner;
    if owner.namespace != *identity {
        return Ok(Err(MissReason::ForeignIdentity));
    }
    if (owner.name, owner.time_ns) != (object.name, object.sealed_ns) {
        return Ok(Err(MissReason::ForeignId));
    }
    let len = trailer.footer.end - trailer.footer.start;
    let entries = if len <= tail.len() as u64 {
        trailer.entries(&tail[tail.len() - len as usize..])
    } else if len <= LONGEST_FOOTER {
        trailer.entries(&bucket.range(path, trailer.footer.clone()).await?)
    } else {
        Err(MissReason::BadHeader)
    };
    Ok(entries.map(|entries| Footer {
        sealed_ns: owner.time_ns,
        part: owner.part,
        entries,
    }))
}
