//! Where jobs are handed over: a bounded queue without a lock for each lane.
//!
//! A submitter takes a place and pushes. Whoever holds the pool's state (a worker that wants a job,
//! the monitor, a shutdown) first moves what was pushed into the lane, so that all decisions are
//! made under the lock. A submitter takes the lock only to wake a sleeping worker, or to make room
//! in the queue, which is shorter than the lane.
//!
//! Nothing is missed, because each side writes, passes a full fence and then reads: a submitter
//! pushes and then reads whether someone sleeps; a worker or the monitor announces its sleep and
//! then reads whether something was pushed. One of the two sees the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;

use super::job::Job;
use super::stats::{Lane, LaneCounters};
use crate::clock::MonotonicTime;

/// Most jobs of a lane that are handed over and not collected; the memory for them is taken at
/// once.
const MOST_PUSHED: usize = 256;

pub(super) struct Queued {
    pub(super) job: Arc<dyn Job>,
    pub(super) deadline: MonotonicTime,
}

pub(super) struct Inbox {
    pub(super) spec: Lane,
    pub(super) counters: Arc<LaneCounters>,
    pushed: ArrayQueue<Queued>,
    /// Jobs that wait, here or in the lane: at most the lane's capacity.
    waiting: AtomicUsize,
}

impl Inbox {
    pub(super) fn new(spec: Lane) -> Self {
        Self {
            spec,
            counters: Arc::default(),
            pushed: ArrayQueue::new(spec.capacity.min(MOST_PUSHED)),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Takes a place for one job; false if the lane is full.
    pub(super) fn reserve(&self) -> bool {
        let more = |waiting| (waiting < self.spec.capacity).then_some(waiting + 1);
        self.waiting
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, more)
            .is_ok()
    }

    /// Gives back the places of `jobs` that wait no longer.
    pub(super) fn release(&self, jobs: usize) {
        self.waiting.fetch_sub(jobs, Ordering::AcqRel);
    }

    /// Hands over a job that has a place; the job itself if as many as fit were not collected yet.
    pub(super) fn push(&self, queued: Queued) -> Result<(), Queued> {
        self.pushed.push(queued)
    }

    pub(super) fn pop(&self) -> Option<Queued> {
        self.pushed.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pushed.is_empty()
    }
}
