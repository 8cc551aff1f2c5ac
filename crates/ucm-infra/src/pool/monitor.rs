//! The monitor thread: it reports what is overdue and replaces the workers that hang.

use std::sync::Arc;

use ucm_core::{Error, Result};

use super::Shared;
use super::state::{Phase, State};
use crate::clock::MonotonicTime;
use crate::threads::begin_thread;

impl Shared {
    /// Starts the monitor thread. The caller's lock lets no one else see a pool that has none.
    pub(super) fn start_monitor(self: &Arc<Self>, state: &mut State) -> Result<()> {
        let shared = Arc::clone(self);
        let started = begin_thread(format!("{}-watch", self.name), move || {
            shared.monitor();
            shared.state.lock().monitored = false;
            shared.roll_call.notify();
        });
        state.monitored = started.is_ok();
        started.map(drop).map_err(|error| {
            Error::from_io(error, "cannot start the monitor thread").with("pool", &self.name)
        })
    }

    fn monitor(self: &Arc<Self>) {
        loop {
            let seen = self.alarm.seen();
            let now = self.clock.now();
            let (overdue, missing, wake) = {
                let mut state = self.state.lock();
                if state.phase == Phase::Stopped {
                    return;
                }
                let overdue = state.overdue(now);
                let missing = state.claim_missing(now, now.after(self.start_within), true);
                let wake = state.next_event(now);
                state.monitor_wakes = wake;
                (overdue, missing, wake)
            };
            if !overdue.is_empty() {
                // Shutdown looks again: it does not wait for a worker that is written off. And the
                // workers: a place in a lane may be free, or the last queued job gone.
                self.roll_call.notify();
                self.work.notify_all();
            }
            self.report_overdue(overdue);
            for slot in missing {
                self.start_worker(slot);
            }
            // Rung meanwhile or not: news since `seen` makes this return at once.
            self.clock.sleep(
                &self.alarm,
                seen,
                (wake != MonotonicTime::NEVER).then_some(wake),
            );
        }
    }
}
