//! A pool of named threads for calls that may hang.
//!
//! Jobs wait in *lanes*: bounded queues served in order, lane 0 first, each with a limit on how
//! many of its jobs run at once, so that background work never takes the whole pool. Every job has
//! a deadline. A monitor thread reports a job that passed it as timed out, whether it was still
//! queued or is running; the worker that runs it is then *written off* (no one waits for it or
//! joins it) and replaced, up to a cap. What such a worker's call returns in the end is dropped
//! there, by that worker: buffers that the call was given stay with it until then.
//!
//! Every accepted job is reported exactly once, through its `done`.

mod builder;
mod job;
mod monitor;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ucm_core::{Error, ErrorKind, Result};

pub use builder::{MAX_LANES, MAX_QUEUE, MAX_WORKERS, WorkerPoolBuilder};
pub use stats::{Lane, LaneStats, PoolStats};

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use job::{JobCell, Verdict};
use state::{Phase, Queued, State};

/// The pool. Dropping it is [`shutdown`](Self::shutdown) without draining.
pub struct WorkerPool {
    shared: Arc<Shared>,
}

/// A job that was not accepted, given back whole: neither closure was called.
pub struct Refused<W, D> {
    /// Why: `Busy` (the lane's queue is full), `Closed` or `InvalidInput` (no such lane).
    pub error: Error,
    /// The work, not done.
    pub work: W,
    /// Whom to tell.
    pub done: D,
}

impl<W, D> fmt::Debug for Refused<W, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Refused").field(&self.error).finish()
    }
}

impl WorkerPool {
    /// Starts describing a pool; `name` is the prefix of its threads' names (the system keeps 15
    /// bytes of those).
    pub fn builder(name: impl Into<String>) -> WorkerPoolBuilder {
        WorkerPoolBuilder::new(name.into())
    }

    /// Queues `work` in `lane`; `done` gets its result, exactly once:
    /// * on the worker, what `work` returned, or `Internal` if it panicked;
    /// * on the monitor (or on a worker that found the job too late), `Timeout` once `deadline` has
    ///   passed: `work` was then never called, or its late result is dropped by its worker;
    /// * on the thread that shuts the pool down, `Closed`.
    ///
    /// `done` must not block: the monitor waits for it. [`MonotonicTime::NEVER`] is no deadline;
    /// use it only for work that cannot hang.
    ///
    /// # Errors
    /// `Busy` if the lane's queue is full, `Closed` after shutdown began, `InvalidInput` if there
    /// is no such lane. A pool [on demand](WorkerPoolBuilder::on_demand) that gets no monitor
    /// thread refuses with `Io`. Neither closure is called then; to have them back use
    /// [`offer`](Self::offer).
    pub fn submit<T, W, D>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        work: W,
        done: D,
    ) -> Result<()>
    where
        W: FnOnce() -> T + Send + 'static,
        D: FnOnce(Result<T>) + Send + 'static,
    {
        self.offer(lane, deadline, work, done)
            .map_err(|refused| refused.error)
    }

    /// [`submit`](Self::submit), giving both closures back if the job is not accepted.
    ///
    /// # Errors
    /// As `submit`, in [`Refused::error`].
    pub fn offer<T, W, D>(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        work: W,
        done: D,
    ) -> Result<(), Refused<W, D>>
    where
        W: FnOnce() -> T + Send + 'static,
        D: FnOnce(Result<T>) + Send + 'static,
    {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let refusal = match state.lanes.get(lane) {
            None => Some(Error::invalid("the pool has no such lane").with("lane", lane)),
            Some(_) if state.phase != Phase::Open => {
                Some(Error::new(ErrorKind::Closed, "the pool is shut down"))
            }
            Some(full) if full.queue.len() >= full.spec.capacity => {
                full.counters.refused();
                Some(
                    Error::new(ErrorKind::Busy, "the lane's queue is full")
                        .with("lane", full.spec.name),
                )
            }
            Some(_) if !state.monitored => shared.start_monitor(&mut state).err(),
            Some(_) => None,
        };
        if let Some(error) = refusal {
            drop(state);
            let error = error.with("pool", &shared.name);
            return Err(Refused { error, work, done });
        }
        let Some(open) = state.lanes.get_mut(lane) else {
            let error = Error::internal("a lane vanished");
            return Err(Refused { error, work, done });
        };
        open.counters.submitted();
        let job = Arc::new(JobCell::new(work, done, Arc::clone(&open.counters)));
        open.queue.push_back(Queued { job, deadline });
        // The monitor sleeps until the earliest deadline it knew; only an earlier one has to wake
        // it.
        let wake_monitor = deadline < state.monitor_wakes;
        if wake_monitor {
            state.monitor_wakes = deadline;
        }
        // A job whose lane is at its limit is taken by the worker that makes room: it looks again
        // before it sleeps.
        let runnable = state.has_work();
        let claimed = if state.grow() {
            let now = shared.clock.now();
            let start_by = now.after(shared.start_within);
            state.monitor_wakes = state.monitor_wakes.min(start_by);
            state.claim_missing(now, start_by, false)
        } else {
            Vec::new()
        };
        let wake_monitor = wake_monitor || !claimed.is_empty();
        drop(state);
        for slot in claimed {
            shared.start_worker(slot);
        }
        if runnable {
            shared.work.notify_one();
        }
        if wake_monitor {
            shared.alarm.notify();
        }
        Ok(())
    }

    /// How many workers are written off right now: hanging in a call whose deadline has passed.
    pub fn stuck(&self) -> usize {
        self.shared.state.lock().stuck()
    }

    /// What the pool looks like right now, and what it has counted.
    pub fn stats(&self) -> PoolStats {
        self.shared.state.lock().stats()
    }

    /// Refuses new jobs, gives those accepted up to `drain` to end, then reports the rest as
    /// `Closed` and returns. Deadlines hold while draining. Returns how many were reported as
    /// `Closed`.
    ///
    /// A thread that hangs is left behind, never joined. Repeatable; called from a job's `done` it
    /// waits for that very job, so give it no drain there.
    pub fn shutdown(&self, drain: Duration) -> usize {
        let shared = &*self.shared;
        let until = shared.clock.now().after(drain);
        {
            let mut state = shared.state.lock();
            if state.phase == Phase::Open {
                state.phase = Phase::Draining;
            }
        }
        shared.work.notify_all();
        shared.wait_until(until, |state| state.queued() == 0 && state.active() == 0);
        let left = {
            let mut state = shared.state.lock();
            state.phase = Phase::Stopped;
            state.abandon()
        };
        shared.work.notify_all();
        shared.alarm.notify();
        let mut closed = 0;
        for job in left {
            let error = Error::new(
                ErrorKind::Closed,
                "the pool was shut down before the job ended",
            )
            .with("pool", &shared.name);
            closed += usize::from(shared.tell(|| job.fail(Verdict::Closed, error)) == Some(true));
        }
        // The monitor may be in the middle of telling someone.
        shared.wait_until(until, |state| !state.monitored);
        closed
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

impl fmt::Debug for WorkerPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerPool")
            .field("name", &self.shared.name)
            .field("stats", &self.stats())
            .finish()
    }
}

type StartHook = Box<dyn Fn(usize) -> Result<()> + Send + Sync>;
type ExitHook = Box<dyn Fn(usize) + Send + Sync>;

/// What the handle, the workers and the monitor share. No callback is ever called with `state`
/// locked.
struct Shared {
    name: String,
    clock: Arc<dyn Clock>,
    start_within: Duration,
    on_start: Option<StartHook>,
    on_exit: Option<ExitHook>,
    state: Mutex<State>,
    /// Workers wait here for jobs.
    work: Condvar,
    /// Wakes the monitor.
    alarm: Notify,
    /// Rung when a worker or the monitor starts or ends.
    roll_call: Notify,
}

impl Shared {
    /// Waits until `enough` holds; `false` if it did not by `until`.
    fn wait_until(&self, until: MonotonicTime, enough: impl Fn(&State) -> bool) -> bool {
        loop {
            let seen = self.roll_call.seen();
            if enough(&self.state.lock()) {
                return true;
            }
            if self.clock.now() >= until {
                return false;
            }
            self.clock.sleep(&self.roll_call, seen, Some(until));
        }
    }

    /// Runs a foreign callback; a panic in it is counted, not passed on, so that no thread of the
    /// pool dies of it.
    fn tell<R>(&self, callback: impl FnOnce() -> R) -> Option<R> {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(callback));
        if result.is_err() {
            self.state.lock().callback_panics += 1;
        }
        result.ok()
    }
}
