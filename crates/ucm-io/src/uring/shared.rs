//! What the engine's handle, the ring's thread, the watch and the pool's threads share.
//!
//! No callback is called and no system call but the wake-up is made with the state locked.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Bell, Clock, Mono, begin_thread};

use super::state::{Orders, Overdue, Phase, State};
use super::work::Work;
use crate::op::IoDone;
use crate::psync::PsyncEngine;

/// What is counted.
#[derive(Default)]
pub(super) struct Counters {
    /// How often the ring's thread woke up.
    pub(super) wakeups: AtomicU64,
    /// Calls given to the kernel, its wake-ups not counted.
    pub(super) calls: AtomicU64,
    /// Bytes registered with the kernel.
    pub(super) registered: AtomicU64,
}

/// What a test has the kernel answer, as an error number; nothing: what it does.
#[cfg(test)]
type Fault = Box<dyn FnMut(bool) -> Option<i32> + Send>;

pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Threads of the pool that are replaced when they hang.
    pub(super) replaced: usize,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) psync: Arc<PsyncEngine>,
    /// Read by the ring; written to wake its thread.
    pub(super) wake: OwnedFd,
    /// Wakes the watch.
    pub(super) alarm: Bell,
    /// Rung whenever an operation has ended.
    pub(super) ends: Bell,
    pub(super) counters: Counters,
    /// Asked before each call of the kernel, with whether it is to sleep without an operation: an error in its place.
    #[cfg(test)]
    pub(super) faults: Mutex<Option<Fault>>,
}

impl Shared {
    #[cfg(test)]
    pub(super) fn fault(&self, idle: bool) -> Option<i32> {
        self.faults.lock().as_mut().and_then(|fault| fault(idle))
    }

    /// Changes the state, then wakes the ring's thread if it sleeps and has something to do now.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state);
        let wake = state.asleep && state.has_news();
        if wake {
            state.asleep = false;
        }
        drop(state);
        if wake {
            // Fails only when the counter is full of wake-ups nobody has read: then it is awake.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
        result
    }

    /// What the ring's thread is to do; it counts as asleep from here on.
    pub(super) fn orders(&self) -> Orders {
        let now = self.clock.now();
        self.state.lock().orders(now)
    }

    /// Runs a foreign callback; a panic in it is counted and goes no further.
    pub(super) fn tell(&self, callback: impl FnOnce()) {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(callback)).is_err() {
            self.state.lock().callback_panics += 1;
        }
    }

    /// Answers operations that were given up. Who waits for the last one hears of it, whoever found it.
    pub(super) fn report(&self, given_up: Vec<Overdue>, error: impl Fn() -> Error) {
        if given_up.is_empty() {
            return;
        }
        for Overdue { done, work, lane } in given_up {
            let was = if work.is_some() { "queued" } else { "running" };
            let error = error().with("lane", lane).with("was", was);
            self.tell(|| {
                // The buffer is free again before its owner hears of it.
                drop(work);
                done(Err(error));
            });
        }
        self.ends.ring();
    }

    /// Answers what is past its deadline.
    pub(super) fn report_late(&self, late: Vec<Overdue>) {
        self.report(late, || {
            Error::new(
                ErrorKind::Timeout,
                "the operation did not end before its deadline",
            )
            .with("engine", "io_uring")
        });
    }

    /// Starts the thread that answers what is late: a ring whose thread is stuck delays no answer.
    pub(super) fn start_watch(self: &Arc<Self>) -> Result<()> {
        let shared = Arc::clone(self);
        begin_thread("ucm-ring-watch", move || shared.watch())
            .map(drop)
            .map_err(|error| Error::from_io(error, "cannot start the watch of the ring"))
    }

    fn watch(&self) {
        loop {
            let seen = self.alarm.seen();
            let now = self.clock.now();
            let decided = self.change(|state| {
                if state.phase == Phase::Stopped {
                    return None;
                }
                let late = state.overdue(now);
                state.watch_wakes = state.next_deadline();
                Some((late, state.watch_wakes))
            });
            let Some((late, wakes)) = decided else { return };
            self.report_late(late);
            self.clock
                .sleep(&self.alarm, seen, (wakes != Mono::NEVER).then_some(wakes));
        }
    }

    /// Gives what is left of an operation to the pool: the ring's thread runs no callback, for they may take their time
    /// (the bytes of a load are verified and copied to the device in them). Gives it back if nobody waits for it any
    /// more. A work that the pool does not take, or drops undone, comes back to the ring with its orders.
    pub(super) fn hand_over(self: &Arc<Self>, place: usize, left: Left) -> Option<Left> {
        let Some((done, deadline, lane)) = self.state.lock().hand_out(place) else {
            return Some(left);
        };
        let guard = Guard {
            shared: Arc::clone(self),
            place,
            left: Some(left),
        };
        let clock = Arc::clone(&self.clock);
        let run = move || {
            let mut guard = guard;
            match guard.left.take() {
                Some(Left::Answer(result)) => result,
                Some(Left::Work(work)) => work.run(&|| clock.now() < deadline),
                None => Err(Error::internal("an operation ended twice")),
            }
        };
        let shared = Arc::clone(self);
        let tell = move |result: Result<Result<_>>| {
            shared.tell(|| done(result.and_then(|inner| inner)));
            shared.change(|state| state.leave_lane(lane));
            shared.ends.ring();
        };
        if let Err(refused) = self.psync.pool().offer(left_lane(lane), deadline, run, tell) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
        None
    }

    /// One more of something.
    pub(super) fn count(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// The lane of the pool for operations of a lane that it runs whole.
pub(super) fn whole_lane(lane: usize) -> usize {
    2 * lane + 1
}

/// The lane of the pool for what the ring has left of operations of a lane: before the others of the same lane.
fn left_lane(lane: usize) -> usize {
    2 * lane
}

/// What the ring has left of an operation.
pub(super) enum Left {
    /// To tell the answer.
    Answer(Result<IoDone>),
    /// To run the end.
    Work(Box<Work>),
}

/// Holds an operation's place while something of it is in the pool.
struct Guard {
    shared: Arc<Shared>,
    place: usize,
    left: Option<Left>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let undone = match self.left.take() {
            Some(Left::Work(work)) => Some(work),
            // The bytes first, then the place.
            Some(Left::Answer(_)) | None => None,
        };
        self.shared.change(|state| state.back(self.place, undone));
    }
}
