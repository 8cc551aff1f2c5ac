//! Submission of jobs: a bounded lock-free queue for each lane.
//!
//! A submitter reserves a place and pushes. Every thread that locks the pool's state (a worker
//! without a job, the monitor, a shutdown) first moves the pushed jobs into the lane, so that all
//! decisions are made under the lock. A submitter takes the lock only to wake a sleeping worker, or
//! to make room in the queue, which is shorter than the lane.
//!
//! No job is missed, because each side writes, passes a full fence and then reads: a submitter
//! pushes and then reads the number of sleepers; a worker or the monitor announces its sleep and
//! then reads the queue. At least one of the two sees the other's write.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;

use super::job::Job;
use super::stats::{Lane, LaneCounters};
use crate::clock::MonotonicTime;

/// Most submitted jobs of a lane that are not collected yet. Their memory is allocated at once.
const MOST_PUSHED: usize = 256;

pub(super) struct Queued {
    pub(super) job: Arc<dyn Job>,
    pub(super) deadline: MonotonicTime,
}

pub(super) struct Inbox {
    pub(super) spec: Lane,
    pub(super) counters: Arc<LaneCounters>,
    pushed: ArrayQueue<Queued>,
    /// Jobs that wait here or in the lane: at most the lane's capacity.
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

    /// Reserves a place for one job; false if the lane is full.
    pub(super) fn reserve(&self) -> bool {
        let more = |waiting| (waiting < self.spec.capacity).then_some(waiting + 1);
        self.waiting
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, more)
            .is_ok()
    }

    /// Releases the places of `jobs` jobs that wait no longer.
    pub(super) fn release(&self, jobs: usize) {
        self.waiting.fetch_sub(jobs, Ordering::AcqRel);
    }

    /// Pushes a job that has a place. Returns the job if the queue is full.
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
