//! A pool of named threads for calls that may hang.
//!
//! Jobs wait in *lanes*: bounded queues served in order, lane 0 first, each with a limit on how
//! many of its jobs run at once, so that background work never takes the whole pool. Every job has
//! a deadline. A monitor thread reports a job that passed it as timed out, queued or running. The
//! worker that runs it is then *written off* (no thread waits for it or joins it) and replaced, up
//! to a cap. That worker drops the late result itself; buffers passed to the call stay with it
//! until then.
//!
//! Every accepted job is reported exactly once, through its `done`.

mod builder;
mod inbox;
mod job;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod threads;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use ucm_core::sync::{Condvar, Mutex, MutexGuard};
use ucm_core::{Error, ErrorKind, Result};

pub use builder::{MAX_LANES, MAX_QUEUE, MAX_WORKERS, WorkerPoolBuilder};
pub use stats::{Lane, LaneStats, PoolStats};

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use inbox::{Inbox, Queued};
use job::{JobCell, Verdict};
use state::{Phase, State};
use stats::count;

/// The pool. Dropping it is [`shutdown`](Self::shutdown) without draining.
pub struct WorkerPool {
    shared: Arc<Shared>,
}

/// A job that was not accepted, returned whole: neither closure was called.
pub struct Refused<W, D> {
    /// The reason: `Busy` (the lane's queue is full), `Closed` or `InvalidInput` (no such lane).
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
    /// A builder; `name` is the prefix of the threads' names (the system keeps 15 bytes).
    pub fn builder(name: impl Into<String>) -> WorkerPoolBuilder {
        WorkerPoolBuilder::new(name.into())
    }

    /// Queues `work` in `lane`; `done` gets its result, exactly once:
    /// * on the worker, the result of `work`, or `Internal` if it panicked;
    /// * on the monitor (or on a worker that found the job too late), `Timeout` once `deadline` has
    ///   passed: `work` was never called, or its worker drops the late result;
    /// * on the thread that shuts the pool down, `Closed`.
    ///
    /// `done` must not block: the monitor waits for it. [`MonotonicTime::NEVER`] is no deadline;
    /// use it only for work that cannot hang.
    ///
    /// # Errors
    /// `Busy` if the lane's queue is full, `Closed` after shutdown began, `InvalidInput`
    /// if there is no such lane, `Io` if the monitor thread cannot be started. Neither closure is
    /// called then; [`offer`](Self::offer) returns them.
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

    /// Like [`submit`](Self::submit), but returns both closures if the job is not accepted.
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
        let inbox = match shared.place_for_job(lane) {
            Ok(inbox) => inbox,
            Err(error) => {
                let error = error.with("pool", &shared.name);
                return Err(Refused { error, work, done });
            }
        };
        count(&inbox.counters.submitted);
        let job = Arc::new(JobCell::new(work, done, Arc::clone(&inbox.counters)));
        let mut queued = Queued { job, deadline };
        while let Err(full) = inbox.push(queued) {
            queued = full;
            drop(shared.collected());
        }
        fence(Ordering::SeqCst); // see `inbox`
        // The monitor sleeps until the earliest known deadline; only an earlier one must wake it.
        let known = shared
            .handover
            .monitor_wakes
            .fetch_min(deadline.0, Ordering::AcqRel);
        if deadline.0 < known {
            shared.alarm.notify();
        }
        if shared.handover.growing.load(Ordering::Acquire) {
            shared.grow();
        }
        if shared.handover.sleepers.load(Ordering::Relaxed) > 0 {
            // If the lane is at its limit, the worker that ends one of its jobs takes this one:
            // workers check their lanes before they sleep.
            let runnable = shared.collected().has_work();
            if runnable {
                shared.work.notify_one();
            }
        }
        if shared.phase() == Phase::Stopped {
            shared.close_left(); // the shutdown may not have seen it
        }
        Ok(())
    }

    /// Number of workers that are written off now: they hang in a call whose deadline has passed.
    pub fn stuck(&self) -> usize {
        self.shared.state.lock().stuck()
    }

    /// The current state and the counters of the pool.
    pub fn stats(&self) -> PoolStats {
        self.shared.collected().stats()
    }

    /// Refuses new jobs, waits up to `drain` for the accepted ones, then reports the rest as
    /// `Closed` and returns their number. Deadlines hold while draining.
    ///
    /// A thread that hangs is never joined. Repeatable. Called from a job's `done` it waits for
    /// that very job, so pass no drain there.
    pub fn shutdown(&self, drain: Duration) -> usize {
        let shared = &*self.shared;
        let until = shared.clock.now().after(drain);
        {
            let mut state = shared.state.lock();
            if state.phase == Phase::Open {
                shared.set_phase(&mut state, Phase::Draining);
            }
        }
        shared.work.notify_all();
        shared.wait_until(until, |state| state.queued() == 0 && state.active() == 0);
        shared.set_phase(&mut shared.state.lock(), Phase::Stopped);
        let closed = shared.close_left();
        shared.work.notify_all();
        shared.alarm.notify();
        // The monitor may be running a callback.
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

/// Fields that are used without the lock of the state.
struct Handover {
    /// One for each lane, in their order.
    inboxes: Vec<Arc<Inbox>>,
    /// [`State::phase`].
    phase: AtomicU8,
    /// Whether the monitor thread exists; the first job starts it.
    monitored: AtomicBool,
    /// Whether more workers are started as more jobs wait.
    growing: AtomicBool,
    /// Number of workers that sleep or are about to.
    sleepers: AtomicUsize,
    /// The time at which the monitor wakes by itself, as a [`MonotonicTime`].
    monitor_wakes: AtomicU64,
}

/// Shared by the handle, the workers and the monitor. No callback is ever called with `state`
/// locked.
struct Shared {
    name: String,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    handover: Handover,
    /// Workers wait here for jobs.
    work: Condvar,
    /// Wakes the monitor.
    alarm: Notify,
    /// Rung when a worker or the monitor starts or ends.
    roll_call: Notify,
}

impl Shared {
    /// Locks the state and moves every submitted job into its lane.
    fn collected(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.collect();
        state
    }

    fn phase(&self) -> Phase {
        match self.handover.phase.load(Ordering::SeqCst) {
            open if open == Phase::Open as u8 => Phase::Open,
            draining if draining == Phase::Draining as u8 => Phase::Draining,
            _ => Phase::Stopped,
        }
    }

    fn set_phase(&self, state: &mut State, phase: Phase) {
        state.phase = phase;
        self.handover.phase.store(phase as u8, Ordering::SeqCst);
        fence(Ordering::SeqCst); // see `inbox`: no job is missed from here on
    }

    /// The inbox of a lane that has a place for one more job.
    fn place_for_job(self: &Arc<Self>, lane: usize) -> Result<&Inbox> {
        let Some(inbox) = self.handover.inboxes.get(lane) else {
            return Err(Error::invalid("the pool has no such lane").with("lane", lane));
        };
        if self.phase() != Phase::Open {
            return Err(Error::new(ErrorKind::Closed, "the pool is shut down"));
        }
        if !inbox.reserve() {
            count(&inbox.counters.refused);
            let full = Error::new(ErrorKind::Busy, "the lane's queue is full");
            return Err(full.with("lane", inbox.spec.name));
        }
        if !self.handover.monitored.load(Ordering::Acquire)
            && let Err(error) = self.start_monitor(&mut self.state.lock())
        {
            inbox.release(1);
            return Err(error);
        }
        Ok(inbox)
    }

    /// Starts another worker if a job may run and no idle worker is left for it.
    fn grow(self: &Arc<Self>) {
        let claimed = {
            let mut state = self.collected();
            if !state.grow() {
                return;
            }
            self.handover
                .growing
                .store(state.is_growing(), Ordering::Release);
            state.claim_missing(self.clock.now(), false)
        };
        for slot in claimed {
            self.start_worker(slot);
        }
    }

    /// Reports every remaining job as `Closed`; returns their number.
    fn close_left(&self) -> usize {
        let left = self.collected().abandon();
        let mut closed = 0;
        for job in left {
            let text = "the pool was shut down before the job ended";
            let error = Error::new(ErrorKind::Closed, text).with("pool", &self.name);
            closed += usize::from(self.tell(|| job.fail(Verdict::Closed, error)) == Some(true));
        }
        closed
    }

    /// Waits until `enough` holds; `false` if it does not by `until`.
    fn wait_until(&self, until: MonotonicTime, enough: impl Fn(&State) -> bool) -> bool {
        loop {
            let seen = self.roll_call.seen();
            if enough(&self.collected()) {
                return true;
            }
            if self.clock.now() >= until {
                return false;
            }
            self.clock.sleep(&self.roll_call, seen, Some(until));
        }
    }

    /// Runs a callback of the caller. A panic in it is counted and not passed on, so that no thread
    /// of the pool ends by it.
    fn tell<R>(&self, callback: impl FnOnce() -> R) -> Option<R> {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(callback));
        if result.is_err() {
            self.state.lock().callback_panics += 1;
        }
        result.ok()
    }
}
