//! The threads for file I/O. A job is straight-line code on one of them. It makes every file-system
//! call, including open, close and rename, through its [`IoJob`]. If a job does not end by its
//! deadline, its thread is written off together with the job's buffers, and another thread replaces
//! it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{
    Clock, Completion, LANE_LOAD, LANE_SPACE, Lane, MonotonicTime, PoolStats, SystemClock, Ticket,
    WorkerPool,
};

use crate::engine::{Close, IoEngine};
use crate::fd_cache::KeptFile;
use crate::job::IoJob;
use crate::psync::PsyncEngine;

/// Fewest threads: while a write waits for its first grant, another thread reads what grants it.
const FEWEST: usize = 2;
/// How long after its deadline a waiter still waits for the pool's report.
const GRACE: Duration = Duration::from_millis(100);
/// Deadline for closing read-only files.
const CLOSE: Duration = Duration::from_secs(5);

/// Configuration of an [`IoPool`].
#[derive(Clone, Debug)]
pub struct IoOptions {
    /// Prefix of the threads' names.
    pub name: &'static str,
    /// Worker threads, two at least.
    pub workers: usize,
    /// Most replacements of stuck workers.
    pub max_replacements: usize,
    /// The lanes, most urgent first: [`LANE_LOAD`], [`LANE_LOOKUP`](ucm_infra::LANE_LOOKUP),
    /// [`LANE_DUMP`](ucm_infra::LANE_DUMP), [`LANE_SPACE`].
    pub lanes: Vec<Lane>,
    /// The clock of all deadlines.
    pub clock: Arc<dyn Clock>,
}

impl IoOptions {
    /// The usual lanes for a number of workers: loads and lookups may use all, dumps half, space a
    /// quarter.
    pub fn with_workers(workers: usize) -> Self {
        let lane = |name, capacity, max_running: usize| Lane {
            name,
            capacity,
            max_running: max_running.max(1),
        };
        Self {
            name: "ucm-io",
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

/// Threads for file I/O.
pub struct IoPool {
    engine: Arc<dyn IoEngine>,
    workers: Arc<WorkerPool>,
    /// Jobs of each lane that run at once.
    widths: Vec<usize>,
    clock: Arc<dyn Clock>,
    /// Number of threads of other pools that were written off while they worked here.
    stuck_guests: Arc<AtomicUsize>,
    /// Descriptors for which no thread was free in time; the next close includes them.
    unclosed: Arc<Mutex<Vec<Arc<KeptFile>>>>,
}

impl IoPool {
    /// Threads over an engine, started on demand. Errors as of `WorkerPool`: numbers out of range.
    pub fn new(engine: Arc<dyn IoEngine>, options: &IoOptions) -> Result<Arc<Self>> {
        let workers = WorkerPool::builder(options.name)
            .size(options.workers.max(FEWEST))
            .lanes(&options.lanes)
            .max_replacements(options.max_replacements)
            .clock(Arc::clone(&options.clock))
            .build()?;
        let width = |lane: &Lane| lane.max_running.min(options.workers);
        let widths = options.lanes.iter().map(width);
        Ok(Arc::new(Self {
            engine,
            workers,
            widths: widths.collect(),
            clock: Arc::clone(&options.clock),
            stuck_guests: Arc::default(),
            unclosed: Arc::default(),
        }))
    }

    /// Threads with plain system calls; with `direct` past the page cache if the file system
    /// supports it.
    pub fn psync(direct: bool, options: &IoOptions) -> Result<Arc<Self>> {
        Self::new(PsyncEngine::new(direct), options)
    }

    /// From now on no symbolic link below this directory is followed: [`IoEngine::keep_below`].
    pub fn keep_below(&self, root: &Path) {
        self.engine.keep_below(root);
    }

    /// Runs `work` on a thread of that lane. `done` is called exactly once, on any thread, possibly
    /// before this returns: with the result of `work`; with `Busy` if the lane is full (nothing was
    /// started); with `Timeout` if `deadline` passed first; with `Closed` after shutdown. Values
    /// that `work` captures are dropped before `done` runs, or, if it is stuck, when its call
    /// returns.
    pub fn job<T: Send + 'static>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
        done: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let ticket = Arc::new(Ticket::default());
        let until = (Arc::clone(&self.clock), deadline, Arc::clone(&ticket));
        let job = IoJob::new(&self.engine, lane, Some(until), None);
        let work = move || work(&job);
        let tell = move |result: Result<Result<T>>| {
            ticket.end();
            done(result.and_then(|inner| inner));
        };
        if let Err(refused) = self.workers.offer(lane, deadline, work, tell) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
    }

    /// [`IoPool::job`] with an outcome to wait for.
    pub fn begin<T: Send + 'static>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let ended = Completion::new();
        let end = Arc::clone(&ended);
        self.job(lane, deadline, work, move |result| {
            end.complete(Arc::new(Mutex::new(Some(result))));
        });
        Pending {
            ended,
            clock: Arc::clone(&self.clock),
            deadline,
        }
    }

    /// [`IoPool::begin`] and a wait. The caller's own thread never hangs, whatever the file system
    /// does.
    pub fn call<T: Send + 'static>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.begin(lane, deadline, work).wait()
    }

    /// A job on the calling thread, which is never written off: for work without file-system calls.
    pub fn here(&self, lane: usize, deadline: MonotonicTime) -> IoJob {
        let until = (Arc::clone(&self.clock), deadline, Arc::default());
        IoJob::new(&self.engine, lane, Some(until), None)
    }

    /// A job on the thread that calls, which is another pool's: that pool keeps the time, by
    /// `ticket`. Where it writes the thread off, the thread counts as stuck here until the job is
    /// dropped.
    pub fn visit(&self, lane: usize, deadline: MonotonicTime, ticket: &Arc<Ticket>) -> IoJob {
        let until = (Arc::clone(&self.clock), deadline, Arc::clone(ticket));
        let visit = ticket.visit(&self.stuck_guests);
        IoJob::new(&self.engine, lane, Some(until), Some(visit))
    }

    /// Number of jobs of a lane that run at once; callers split their work by it.
    pub fn width(&self, lane: usize) -> usize {
        self.widths.get(lane).copied().unwrap_or(1)
    }

    /// Closes kept descriptors ([`IoJob::read_into`]) on a thread. Blocks only if the pool has
    /// ended.
    pub fn close_kept(&self, which: Close<'_>) {
        self.close(LANE_SPACE, which);
    }

    fn close(&self, lane: usize, which: Close<'_>) {
        let mut closed = self.engine.close(which).0;
        closed.append(&mut self.unclosed.lock());
        if closed.is_empty() {
            return;
        }
        let closed = Arc::new(Mutex::new(closed));
        let (late, unclosed) = (Arc::clone(&closed), Arc::clone(&self.unclosed));
        let close = move || {
            let taken = std::mem::take(&mut *closed.lock());
            drop(taken); // with no lock held: it may hang
        };
        let ended = move |result: Result<()>| {
            // The thread that reports the timeout must not hang in a close.
            if result.is_err_and(|error| error.kind() == ErrorKind::Timeout) {
                unclosed.lock().append(&mut late.lock());
            }
        };
        let deadline = self.clock.now().after(CLOSE);
        // A pool that is full or has ended returns them; they are closed here.
        let _ = self.workers.submit(lane, deadline, close, ended);
    }

    /// Descriptors kept open now.
    pub fn kept(&self) -> usize {
        self.engine.kept()
    }

    /// Number of threads whose job timed out and has not returned. Each still owns its job's
    /// buffers. Threads of other pools count too ([`IoPool::visit`]).
    pub fn stuck(&self) -> usize {
        self.workers.stuck() + self.stuck_guests()
    }

    /// Number of threads of other pools that hang in a job of this one.
    pub fn stuck_guests(&self) -> usize {
        self.stuck_guests.load(Ordering::Acquire)
    }

    /// The threads' counters.
    pub fn stats(&self) -> PoolStats {
        self.workers.stats()
    }

    /// Runs queued jobs for at most `drain`, then fails the rest with `Closed`. Never waits for a
    /// stuck call.
    pub fn shutdown(&self, drain: Duration) {
        self.close(LANE_LOAD, Close::All);
        self.workers.shutdown(drain);
    }
}

/// An outcome that is taken once, although completions are shared.
type Outcome<T> = Arc<Mutex<Option<Result<T>>>>;

/// A job with an outcome to wait for.
pub struct Pending<T> {
    ended: Arc<Completion<Outcome<T>>>,
    clock: Arc<dyn Clock>,
    deadline: MonotonicTime,
}

impl<T> Pending<T> {
    /// Waits for it, by its deadline.
    pub fn wait(self) -> Result<T> {
        self.wait_for(GRACE)
    }

    /// The same, with the time after the deadline within which the pool must report.
    pub fn wait_for(self, grace: Duration) -> Result<T> {
        let until = self.deadline.after(grace);
        let ended = self.ended.wait(&*self.clock, Some(until));
        let result = ended.ok_or_else(|| {
            let late = "the file system did not respond in time";
            Error::new(ErrorKind::Timeout, late)
        })?;
        let result = result.lock().take();
        result.unwrap_or_else(|| Err(Error::internal("an outcome was taken twice")))
    }
}
