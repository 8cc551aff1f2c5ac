//! The clock that tests move by hand; a build of the product has none.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use crate::sync::{Condvar, Mutex};

/// A clock that stands still until [`advance`](Self::advance) moves it.
pub struct ManualClock {
    state: Mutex<ManualState>,
    /// Rung whenever a thread starts to sleep here.
    arrived: Condvar,
}

struct ManualState {
    now: MonotonicTime,
    wall_ns: u64,
    sleepers: Vec<Sleeper>,
}

struct Sleeper {
    notify: Notify,
    seen: u64,
    until: MonotonicTime,
}

impl ManualClock {
    /// A clock at monotonic zero, whose unix time is 2020-09-13 12:26:40 UTC.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(ManualState {
                now: MonotonicTime::default(),
                wall_ns: 1_600_000_000_000_000_000,
                sleepers: Vec::new(),
            }),
            arrived: Condvar::new(),
        })
    }

    /// Moves both axes forward by `span` and wakes every sleeper whose deadline is then reached.
    pub fn advance(&self, span: Duration) {
        let mut state = self.state.lock();
        state.now = state.now.after(span);
        state.wall_ns = MonotonicTime(state.wall_ns).after(span).0;
        let now = state.now;
        let (due, still) = std::mem::take(&mut state.sleepers)
            .into_iter()
            .partition::<Vec<_>, _>(|sleeper| sleeper.until <= now);
        state.sleepers = still;
        drop(state);
        for sleeper in due {
            sleeper.notify.notify();
        }
    }

    /// Sets the unix time only, as when a wrong clock is corrected.
    pub fn set_wall_ns(&self, wall_ns: u64) {
        self.state.lock().wall_ns = wall_ns;
    }

    /// Waits until at least `count` threads sleep on this clock, with or without a deadline. Each
    /// of them has then checked its condition and found it false.
    pub fn await_sleepers(&self, count: usize) {
        let mut state = self.state.lock();
        // A sleeper whose notify was rung does not count, even if it has not woken up yet.
        while state
            .sleepers
            .iter()
            .filter(|sleeper| sleeper.notify.seen() == sleeper.seen)
            .count()
            < count
        {
            state = self.arrived.wait(state);
        }
    }

    /// The earliest deadline of all sleepers, `None` without sleepers; [`MonotonicTime::NEVER`] if
    /// none of them has a deadline.
    pub fn next_deadline(&self) -> Option<MonotonicTime> {
        self.state
            .lock()
            .sleepers
            .iter()
            .map(|sleeper| sleeper.until)
            .min()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> MonotonicTime {
        self.state.lock().now
    }

    fn wall_ns(&self) -> u64 {
        self.state.lock().wall_ns
    }

    fn sleep(&self, notify: &Notify, seen: u64, until: Option<MonotonicTime>) {
        let until = until.unwrap_or(MonotonicTime::NEVER);
        {
            let mut state = self.state.lock();
            if until <= state.now {
                return;
            }
            // Registered under the lock that `advance` takes: either `advance` sees this sleeper,
            // or the sleeper has seen the new time.
            state.sleepers.push(Sleeper {
                notify: notify.clone(),
                seen,
                until,
            });
        }
        self.arrived.notify_all();
        notify.wait(seen);
        let mut state = self.state.lock();
        let mine = |sleeper: &Sleeper| {
            sleeper.notify.is(notify) && sleeper.seen == seen && sleeper.until == until
        };
        if let Some(index) = state.sleepers.iter().position(mine) {
            state.sleepers.swap_remove(index);
        }
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.now()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn advancing_wakes_only_those_it_reaches() {
        let clock = ManualClock::new();
        let (near, far) = (Notify::new(), Notify::new());
        std::thread::scope(|scope| {
            scope.spawn(|| clock.sleep(&near, 0, Some(MonotonicTime(10))));
            let late = scope.spawn(|| clock.sleep(&far, 0, Some(MonotonicTime(20))));
            clock.await_sleepers(2);
            assert_eq!(clock.next_deadline(), Some(MonotonicTime(10)));
            clock.advance(Duration::from_nanos(10));
            assert_eq!((near.seen(), far.seen()), (1, 0));
            assert!(!late.is_finished());
            clock.advance(Duration::from_nanos(10));
        });
        assert_eq!(far.seen(), 1);
        assert_eq!(clock.next_deadline(), None);
    }

    #[test]
    fn news_wakes_a_sleeper_before_its_deadline() {
        let clock = ManualClock::new();
        let notify = Notify::new();
        std::thread::scope(|scope| {
            scope.spawn(|| clock.sleep(&notify, 0, Some(MonotonicTime(10))));
            clock.await_sleepers(1);
            notify.notify();
        });
        assert_eq!(clock.now(), MonotonicTime(0));
        assert_eq!(clock.next_deadline(), None);
    }

    #[test]
    fn the_wall_moves_along_and_can_be_set() {
        let clock = ManualClock::new();
        let before = clock.wall_ns();
        clock.advance(Duration::from_secs(1));
        assert_eq!(clock.wall_ns(), before + 1_000_000_000);
        clock.set_wall_ns(7);
        assert_eq!(
            (clock.wall_ns(), clock.now()),
            (7, MonotonicTime(1_000_000_000))
        );
    }
}
