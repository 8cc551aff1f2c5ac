//! The threads that work on files. A job is straight-line code on one of them: every call on a file system, open and close
//! and rename too, is made there, by the [`IoJob`] that the code is given. A thread whose job does not end by its deadline
//! is written off with whatever its job holds, and another takes its place.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, Lane, Mono, PoolStats, SystemClock, WorkerPool};

use crate::engine::IoEngine;
use crate::op::{IoDone, IoOp};
use crate::psync::PsyncEngine;

/// The lane of housekeeping.
const HOUSEKEEPING: usize = 3;
/// How long closing files that nobody writes may take.
const CLOSE: Duration = Duration::from_secs(5);

/// Called exactly once with the outcome.
pub type Done<T = IoDone> = Box<dyn FnOnce(Result<T>) + Send>;

/// How an [`IoPool`] is set up.
#[derive(Clone, Debug)]
pub struct IoOptions {
    /// Worker threads.
    pub workers: usize,
    /// Most workers started in the place of stuck ones.
    pub max_replacements: usize,
    /// The lanes, most urgent first: 0 load, 1 prefetch and lookup, 2 dump, 3 space.
    pub lanes: Vec<Lane>,
    /// What deadlines are measured on.
    pub clock: Arc<dyn Clock>,
}

impl IoOptions {
    /// The usual lanes for a number of workers: loads and lookups may use all, dumps half, space a quarter.
    pub fn with_workers(workers: usize) -> Self {
        let lane = |name, capacity, max_running: usize| Lane {
            name,
            capacity,
            max_running: max_running.max(1),
        };
        Self {
            workers,
            max_replacements: workers.max(2),
            lanes: vec![
                lane("load", 4096, workers),
                lane("lookup", 4096, workers),
                lane("dump", 4096, workers / 2),
                lane("space", 4096, workers / 4),
            ],
            clock: Arc::new(SystemClock),
        }
    }
}

impl Default for IoOptions {
    fn default() -> Self {
        Self::with_workers(8)
    }
}

/// Threads that work on files.
pub struct IoPool {
    engine: Arc<dyn IoEngine>,
    workers: Arc<WorkerPool>,
    /// Jobs of each lane that run at once.
    widths: Vec<usize>,
    clock: Arc<dyn Clock>,
}

impl IoPool {
    /// Threads over an engine, started when they are first wanted. Errors as of `WorkerPool`: wrong numbers.
    pub fn new(engine: Arc<dyn IoEngine>, options: &IoOptions) -> Result<Arc<Self>> {
        let workers = WorkerPool::builder("ucm-io")
            .on_demand()
            .size(options.workers)
            .lanes(&options.lanes)
            .max_replacements(options.max_replacements)
            .clock(Arc::clone(&options.clock))
            .build()?;
        let widths = options
            .lanes
            .iter()
            .map(|lane| lane.max_running.min(options.workers));
        Ok(Arc::new(Self {
            engine,
            workers,
            widths: widths.collect(),
            clock: Arc::clone(&options.clock),
        }))
    }

    /// Threads that make plain system calls; with `direct` past the page cache where the file system can.
    pub fn psync(direct: bool, options: &IoOptions) -> Result<Arc<Self>> {
        Self::new(PsyncEngine::new(direct), options)
    }

    /// Runs `work` on a thread of that lane. `done` is called exactly once, on any thread, possibly before this returns:
    /// with what `work` returned; with `Busy` when the lane is full (nothing was started); with `Timeout` when `deadline`
    /// passed first; with `Closed` after shutdown. What `work` holds is dropped before `done` hears, or, where it is stuck,
    /// when its call returns.
    pub fn job<T: Send + 'static>(
        &self,
        lane: usize,
        deadline: Mono,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
        done: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let over = Arc::new(AtomicBool::new(false));
        let job = IoJob {
            engine: Arc::clone(&self.engine),
            clock: Arc::clone(&self.clock),
            lane,
            deadline,
            over: Arc::clone(&over),
        };
        let work = move || work(&job);
        let tell = move |result: Result<Result<T>>| {
            over.store(true, Ordering::Release);
            done(result.and_then(|inner| inner));
        };
        if let Err(refused) = self.workers.offer(lane, deadline, work, tell) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
    }

    /// [`IoPool::job`] of one operation.
    pub fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        self.job(lane, deadline, move |job| job.run(op), done);
    }

    /// How many jobs of a lane run at once: by this callers divide what they ask for.
    pub fn width(&self, lane: usize) -> usize {
        self.widths.get(lane).copied().unwrap_or(1)
    }

    /// Closes the descriptors that are kept ([`IoOp::ReadInto`]) of these files, which are gone, and with `unused` also
    /// those that were not used since this was last asked. Never blocks.
    pub fn close_kept(&self, gone: Vec<PathBuf>, unused: bool) {
        let engine = Arc::clone(&self.engine);
        self.close(HOUSEKEEPING, move || engine.close_kept(&gone, unused));
    }

    fn close(&self, lane: usize, close: impl FnOnce() + Send + 'static) {
        if self.engine.kept() == 0 {
            return;
        }
        let deadline = self.clock.now().after(CLOSE);
        if let Err(refused) = self.workers.offer(lane, deadline, close, |_| {}) {
            (refused.work)(); // full, or it ends: here, then
        }
    }

    /// Descriptors kept open now.
    pub fn kept(&self) -> usize {
        self.engine.kept()
    }

    /// Threads whose job has timed out and has not returned yet; each still owns what its job holds.
    pub fn stuck(&self) -> usize {
        self.workers.stuck()
    }

    /// The threads' counters.
    pub fn stats(&self) -> PoolStats {
        self.workers.stats()
    }

    /// Finishes what is queued for at most `drain`, then fails the rest with `Closed`. Never waits for a stuck call.
    pub fn shutdown(&self, drain: Duration) {
        let engine = Arc::clone(&self.engine);
        self.close(0, move || engine.close_all());
        self.workers.shutdown(drain);
    }
}

/// One job on a thread of an [`IoPool`]: what it does to files, it does with this.
pub struct IoJob {
    engine: Arc<dyn IoEngine>,
    clock: Arc<dyn Clock>,
    lane: usize,
    deadline: Mono,
    /// Its end was told: whoever waited for it does not any more.
    over: Arc<AtomicBool>,
}

impl IoJob {
    /// Whether somebody still waits for this job. What it does after that has no effect any more.
    pub fn is_wanted(&self) -> bool {
        !self.over.load(Ordering::Acquire) && self.clock.now() < self.deadline
    }

    /// Does one operation, on this thread; `Timeout`, and nothing is done, where nobody waits for it any more.
    pub fn run(&self, op: IoOp) -> Result<IoDone> {
        if self.is_wanted() {
            return self.engine.run(self.lane, op, &|| self.is_wanted());
        }
        let late = "the job ran past its deadline, and nothing more is done for it";
        Err(Error::new(ErrorKind::Timeout, late))
    }
}
