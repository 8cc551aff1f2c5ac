//! Statistics of a pool.

use std::sync::atomic::{AtomicU64, Ordering};

/// A queue of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lane {
    /// Its name, in errors and statistics.
    pub name: &'static str,
    /// Most jobs that wait in it; at least 1.
    pub capacity: usize,
    /// Most of its jobs that run at once; at least 1. If this is less than the pool's size, the
    /// lane also never gets the last worker while others are stuck and not replaced.
    pub max_running: usize,
}

/// One lane, now and since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneStats {
    /// The lane's configuration.
    pub lane: Lane,
    /// Jobs waiting now.
    pub queued: usize,
    /// Jobs running now on workers that are not written off.
    pub running: usize,
    /// Jobs accepted.
    pub submitted: u64,
    /// Jobs refused because the queue was full.
    pub refused: u64,
    /// Jobs whose own result was reported.
    pub completed: u64,
    /// Jobs reported as `Timeout`.
    pub timed_out: u64,
    /// Jobs reported as `Closed`.
    pub closed: u64,
    /// Jobs that ended after they had been reported as `Timeout` or `Closed`; their results were
    /// dropped.
    pub late: u64,
    /// Jobs whose work panicked.
    pub panicked: u64,
}

/// The pool, now and since its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStats {
    /// Configured number of workers.
    pub size: usize,
    /// Workers that take jobs, idle or busy.
    pub live: usize,
    /// Idle workers.
    pub idle: usize,
    /// Workers written off: hanging past a deadline.
    pub stuck: usize,
    /// Replacements started since the start.
    pub replaced: u64,
    /// Threads that could not be started.
    pub failed_starts: u64,
    /// Panics in `done` or while a job's captured values were dropped.
    pub callback_panics: u64,
    /// The lanes in their order.
    pub lanes: Vec<LaneStats>,
}

/// A lane's counts. Monotonic and independent of each other, hence relaxed.
#[derive(Debug, Default)]
pub(super) struct LaneCounters {
    pub(super) submitted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) completed: AtomicU64,
    pub(super) timed_out: AtomicU64,
    pub(super) closed: AtomicU64,
    pub(super) late: AtomicU64,
    pub(super) panicked: AtomicU64,
}

impl LaneCounters {
    pub(super) fn stats(&self, lane: Lane, queued: usize, running: usize) -> LaneStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LaneStats {
            lane,
            queued,
            running,
            submitted: get(&self.submitted),
            refused: get(&self.refused),
            completed: get(&self.completed),
            timed_out: get(&self.timed_out),
            closed: get(&self.closed),
            late: get(&self.late),
            panicked: get(&self.panicked),
        }
    }
}

/// Counts one job.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
