//! The threads of a pool: workers, and the monitor that reports overdue jobs and replaces workers
//! that hang.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};

use super::Shared;
use super::job::{Job, Verdict};
use super::state::{Next, Overdue, Phase, State};
use crate::clock::MonotonicTime;
use crate::threads::begin_thread;

/// Pause after a failed start of a thread.
const START_RETRY: Duration = Duration::from_secs(1);

impl Shared {
    /// Starts the thread of a claimed place. A failure frees it, and the monitor tries again.
    pub(super) fn start_worker(self: &Arc<Self>, slot: usize) {
        let shared = Arc::clone(self);
        let body = move || shared.worker(slot);
        if begin_thread(format!("{}-{slot}", self.name), body).is_err() {
            let retry = self.clock.now().after(START_RETRY);
            self.state.lock().start_failed(slot, retry);
            self.roll_call.notify();
            self.alarm.notify();
        }
    }

    fn worker(&self, slot: usize) {
        self.roll_call.notify();
        let mut next = Next::Stay;
        while next != Next::Leave {
            let Some(job) = self.next_job(slot) else {
                break;
            };
            self.tell(|| job.run());
            next = self.state.lock().ready(slot);
            if next == Next::Rejoin {
                self.roll_call.notify();
            }
        }
        self.state.lock().left(slot);
        self.roll_call.notify();
        // A place is free again, perhaps for a replacement that the cap had prevented. Other
        // workers may also have waited for this one's job before they end.
        self.alarm.notify();
        self.work.notify_all();
    }

    /// Waits for a job; `None` when the worker must end.
    fn next_job(&self, slot: usize) -> Option<Arc<dyn Job>> {
        let mut state = self.state.lock();
        loop {
            state.collect();
            let mut late = Vec::new();
            let job = state.take(slot, self.clock.now(), &mut late);
            if job.is_some() || !late.is_empty() {
                // One job wakes one worker; if more jobs may run, wake the next.
                let more = state.has_work();
                drop(state);
                if more {
                    self.work.notify_one();
                }
                self.report_overdue(late);
                if job.is_some() {
                    return job;
                }
                state = self.state.lock();
                continue;
            }
            let leave = match state.phase {
                Phase::Open => false,
                Phase::Draining => state.queued() == 0,
                Phase::Stopped => true,
            };
            if leave {
                return None;
            }
            self.handover.sleepers.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst); // see `inbox`
            if self.handover.inboxes.iter().all(|inbox| inbox.is_empty()) {
                state = self.work.wait(state);
            }
            self.handover.sleepers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Reports jobs that passed their deadline.
    pub(super) fn report_overdue(&self, overdue: Vec<Overdue>) {
        for Overdue { job, lane, was } in overdue {
            let error = Error::new(
                ErrorKind::Timeout,
                "the job did not end before its deadline",
            )
            .with("pool", &self.name)
            .with("lane", lane)
            .with("was", was);
            self.tell(|| job.fail(Verdict::TimedOut, error));
        }
    }

    /// Starts the monitor thread, unless there is one.
    pub(super) fn start_monitor(self: &Arc<Self>, state: &mut State) -> Result<()> {
        if state.monitored {
            return Ok(());
        }
        let shared = Arc::clone(self);
        let started = begin_thread(format!("{}-watch", self.name), move || {
            shared.monitor();
            shared.state.lock().monitored = false;
            shared.roll_call.notify();
        });
        state.monitored = started.is_ok();
        self.handover
            .monitored
            .store(state.monitored, Ordering::Release);
        started.map(drop).map_err(|error| {
            Error::from_io(error, "cannot start the monitor thread").with("pool", &self.name)
        })
    }

    fn monitor(self: &Arc<Self>) {
        loop {
            let seen = self.alarm.seen();
            let now = self.clock.now();
            let (overdue, missing, wake) = {
                let mut state = self.collected();
                if state.phase == Phase::Stopped {
                    return;
                }
                let overdue = state.overdue(now);
                let missing = state.claim_missing(now, true);
                let wake = state.next_event(now);
                self.handover.monitor_wakes.store(wake.0, Ordering::Release);
                (overdue, missing, wake)
            };
            fence(Ordering::SeqCst); // see `inbox`
            let missed = !self.handover.inboxes.iter().all(|inbox| inbox.is_empty());
            if !overdue.is_empty() {
                // Shutdown checks again, because it does not wait for a worker that is written off.
                // The workers check again, because a lane may have room or no queued job may be
                // left.
                self.roll_call.notify();
                self.work.notify_all();
            }
            self.report_overdue(overdue);
            for slot in missing {
                self.start_worker(slot);
            }
            if missed {
                continue; // it was pushed before `monitor_wakes` was known
            }
            // A ring since `seen` makes this return at once.
            self.clock.sleep(
                &self.alarm,
                seen,
                (wake != MonotonicTime::NEVER).then_some(wake),
            );
        }
    }
}
