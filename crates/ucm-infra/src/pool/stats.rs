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
    /// Threads that could not be started, or whose `on_start` failed.
    pub failed_starts: u64,
    /// Panics in `done`, in `on_exit` or while a job's captured values were dropped.
    pub callback_panics: u64,
    /// The lanes in their order.
    pub lanes: Vec<LaneStats>,
}

/// A lane's counts. Monotonic and independent of each other, hence relaxed.
#[derive(Debug, Default)]
pub(super) struct LaneCounters {
    submitted: AtomicU64,
    refused: AtomicU64,
    completed: AtomicU64,
    timed_out: AtomicU64,
    closed: AtomicU64,
    late: AtomicU64,
    panicked: AtomicU64,
}

impl LaneCounters {
    pub(super) fn submitted(&self) {
        self.submitted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn completed(&self) {
        self.completed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn timed_out(&self) {
        self.timed_out.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn closed(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn late(&self) {
        self.late.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn panicked(&self) {
        self.panicked.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stats(&self, lane: Lane, queued: usize, running: usize) -> LaneStats {
        LaneStats {
            lane,
            queued,
            running,
            submitted: self.submitted.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            completed: self.completed.load(Ordering::Relaxed),
            timed_out: self.timed_out.load(Ordering::Relaxed),
            closed: self.closed.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            panicked: self.panicked.load(Ordering::Relaxed),
        }
    }
}
