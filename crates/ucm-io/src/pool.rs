//! The threads that work on files. A job is straight-line code on one of them: every call on a file
//! system, open and close and rename too, is made there, by the [`IoJob`] that the code is given. A
//! thread whose job does not end by its deadline is written off with whatever its job holds, and
//! another takes its place.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{
    Clock, Completion, LANE_LOAD, LANE_SPACE, Lane, MonotonicTime, PoolStats, SystemClock, Ticket,
    WorkerPool,
};

use crate::engine::{Close, IoEngine};
use crate::fd_cache::KeptFile;
use crate::job::IoJob;
use crate::psync::PsyncEngine;

/// Fewest threads: a write that waits for a record to be moved aside must leave one to the thread
/// that moves it.
const FEWEST: usize = 2;
/// How long after its deadline a job that is waited for has to say so.
const GRACE: Duration = Duration::from_millis(100);
/// How long closing files that no one writes may take.
const CLOSE: Duration = Duration::from_secs(5);

/// How an [`IoPool`] is set up.
#[derive(Clone, Debug)]
pub struct IoOptions {
    /// What the threads are called.
    pub name: &'static str,
    /// Worker threads, two at least.
    pub workers: usize,
    /// Most workers started in the place of stuck ones.
    pub max_replacements: usize,
    /// The lanes, most urgent first: [`LANE_LOAD`], [`LANE_LOOKUP`](ucm_infra::LANE_LOOKUP),
    /// [`LANE_DUMP`](ucm_infra::LANE_DUMP), [`LANE_SPACE`].
    pub lanes: Vec<Lane>,
    /// What deadlines are measured on.
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
    /// Threads of others that were written off in a job lent to them.
    lost: Arc<AtomicIsize>,
    /// Descriptors for which there was no thread in time; the next that are closed take them along.
    unclosed: Arc<Mutex<Vec<Arc<KeptFile>>>>,
}

impl IoPool {
    /// Threads over an engine, started when they are first wanted. Errors as of `WorkerPool`: wrong
    /// numbers.
    pub fn new(engine: Arc<dyn IoEngine>, options: &IoOptions) -> Result<Arc<Self>> {
        let workers = WorkerPool::builder(options.name)
            .on_demand()
            .size(options.workers.max(FEWEST))
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
            lost: Arc::default(),
            unclosed: Arc::default(),
        }))
    }

    /// Threads that make plain system calls; with `direct` past the page cache where the file
    /// system can.
    pub fn psync(direct: bool, options: &IoOptions) -> Result<Arc<Self>> {
        Self::new(PsyncEngine::new(direct), options)
    }

    /// From now on no symbolic link below this directory is followed: [`IoEngine::keep_below`].
    pub fn keep_below(&self, root: &Path) {
        self.engine.keep_below(root);
    }

    /// Runs `work` on a thread of that lane. `done` is called exactly once, on any thread, possibly
    /// before this returns: with what `work` returned; with `Busy` when the lane is full (nothing
    /// was started); with `Timeout` when `deadline` passed first; with `Closed` after shutdown.
    /// What `work` holds is dropped before `done` hears, or, where it is stuck, when its call
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
        let job = IoJob::new(Arc::clone(&self.engine), lane, Some(until));
        let work = move || work(&job);
        let tell = move |result: Result<Result<T>>| {
            match &result {
                Ok(_) => ticket.end(),
                Err(error) => ticket.write_off(error),
            }
            done(result.and_then(|inner| inner));
        };
        if let Err(refused) = self.workers.offer(lane, deadline, work, tell) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
    }

    /// [`IoPool::job`] whose outcome somebody waits for.
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

    /// [`IoPool::begin`], and waits: how a caller that has a thread of its own keeps it, whatever
    /// the file system does.
    pub fn call<T: Send + 'static>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.begin(lane, deadline, work).wait()
    }

    /// A job on the thread that calls, which no one writes off: for what asks no file system.
    pub fn here(&self, lane: usize, deadline: MonotonicTime) -> IoJob {
        let until = (Arc::clone(&self.clock), deadline, Arc::default());
        IoJob::new(Arc::clone(&self.engine), lane, Some(until))
    }

    /// Runs `work` on the thread that calls, which is another pool's: that one keeps the time, by
    /// `ticket`.
    pub fn lend<T>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        ticket: &Arc<Ticket>,
        work: impl FnOnce(&IoJob) -> T,
    ) -> T {
        let until = (Arc::clone(&self.clock), deadline, Arc::clone(ticket));
        let job = IoJob::new(Arc::clone(&self.engine), lane, Some(until)).lent();
        let lost = Arc::clone(&self.lost);
        let watched = ticket.watch(Box::new(move |error: Error| {
            if error.kind() != ErrorKind::Internal {
                lost.fetch_add(1, Ordering::AcqRel); // else it panicked, and is back
            }
        }));
        let result = work(&job);
        if watched.is_ok() && !ticket.unwatch() {
            self.lost.fetch_sub(1, Ordering::AcqRel); // it came back
        }
        result
    }

    /// How many jobs of a lane run at once: by this callers divide what they ask for.
    pub fn width(&self, lane: usize) -> usize {
        self.widths.get(lane).copied().unwrap_or(1)
    }

    /// Closes descriptors that are kept ([`IoJob::read_into`]), on a thread. Never blocks, but
    /// where there is no thread any more.
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
            // The thread that tells that there was no thread in time must not hang in it.
            if result.is_err_and(|error| error.kind() == ErrorKind::Timeout) {
                unclosed.lock().append(&mut late.lock());
            }
        };
        let deadline = self.clock.now().after(CLOSE);
        // A pool that is full or ends gives them back, to be closed here.
        let _ = self.workers.submit(lane, deadline, close, ended);
    }

    /// Descriptors kept open now.
    pub fn kept(&self) -> usize {
        self.engine.kept()
    }

    /// Threads whose job has timed out and has not returned yet; each still owns what its job
    /// holds. Those of others count too ([`IoPool::lent_stuck`]).
    pub fn stuck(&self) -> usize {
        self.workers.stuck() + self.lent_stuck()
    }

    /// Threads of other pools that hang in a job lent to them.
    pub fn lent_stuck(&self) -> usize {
        // The thread that comes back may be seen before the one that wrote it off.
        usize::try_from(self.lost.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// The threads' counters.
    pub fn stats(&self) -> PoolStats {
        self.workers.stats()
    }

    /// Finishes what is queued for at most `drain`, then fails the rest with `Closed`. Never waits
    /// for a stuck call.
    pub fn shutdown(&self, drain: Duration) {
        self.close(LANE_LOAD, Close::All);
        self.workers.shutdown(drain);
    }
}

/// An outcome that is handed on once although completions are shared.
type Outcome<T> = Arc<Mutex<Option<Result<T>>>>;

/// A job whose outcome somebody waits for.
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

    /// The same; how long after its deadline the pool has to say that it is over.
    pub fn wait_for(self, grace: Duration) -> Result<T> {
        let late = || Error::new(ErrorKind::Timeout, "the file system did not answer in time");
        let until = self.deadline.after(grace);
        let result = self
            .ended
            .wait(&*self.clock, Some(until))
            .ok_or_else(late)?;
        let result = result.lock().take();
        result.unwrap_or_else(|| Err(Error::internal("an answer was taken twice")))
    }
}
