//! Time as a dependency: the real clock, and one that tests move by hand.
//!
//! Deadlines are points on the clock's monotonic axis ([`MonotonicTime`]). Nothing in ucm sleeps
//! except through [`Clock::sleep`], so a test with a [`ManualClock`] never waits for real time and
//! decides every timeout itself.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::notify::Notify;
use crate::sync::{Condvar, Mutex};

/// A point in time: nanoseconds on a clock's monotonic axis. Only points of the same clock compare;
/// all [`SystemClock`]s of a process are the same clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MonotonicTime(pub u64);

impl MonotonicTime {
    /// A deadline that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// This point plus `span`; [`MonotonicTime::NEVER`] if that is out of range.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        let span = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(span))
    }

    /// The time from `earlier` to this point; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// The source of time; every wait sleeps on one.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now, on the monotonic axis.
    fn now(&self) -> MonotonicTime;

    /// Now as unix time in nanoseconds, for timestamps on media. May jump.
    fn wall_ns(&self) -> u64;

    /// Sleeps until `notify` is rung after its count `seen` was read, or until this clock reaches
    /// `until` (`None`: no limit). May return early; callers check their condition and sleep again.
    fn sleep(&self, notify: &Notify, seen: u64, until: Option<MonotonicTime>);
}

/// The real clock: `Instant` and the system's unix time.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl SystemClock {
    /// The real clock as a trait object.
    pub fn shared() -> Arc<dyn Clock> {
        Arc::new(Self)
    }

    /// The point that every `SystemClock` of the process counts from.
    fn origin() -> Instant {
        static ORIGIN: OnceLock<Instant> = OnceLock::new();
        *ORIGIN.get_or_init(Instant::now)
    }
}

impl Clock for SystemClock {
    fn now(&self) -> MonotonicTime {
        MonotonicTime::default().after(Self::origin().elapsed())
    }

    fn wall_ns(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |span| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }

    fn sleep(&self, notify: &Notify, seen: u64, until: Option<MonotonicTime>) {
        // A deadline beyond the range of `Instant` counts as none.
        let until = until
            .filter(|&until| until != MonotonicTime::NEVER)
            .and_then(|until| Self::origin().checked_add(Duration::from_nanos(until.0)));
        match until {
            Some(instant) => notify.wait_until(seen, instant),
            None => notify.wait(seen),
        }
    }
}

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
    fn points_saturate() {
        assert_eq!(
            MonotonicTime(5).after(Duration::from_nanos(7)),
            MonotonicTime(12)
        );
        assert_eq!(MonotonicTime(5).after(Duration::MAX), MonotonicTime::NEVER);
        assert_eq!(MonotonicTime(5).since(MonotonicTime(7)), Duration::ZERO);
        assert_eq!(
            MonotonicTime(7).since(MonotonicTime(5)),
            Duration::from_nanos(2)
        );
    }

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

    #[test]
    fn the_real_clock_goes_forward_and_never_sleeps_past_a_passed_deadline() {
        let clock = SystemClock::shared();
        let before = clock.now();
        let notify = Notify::new();
        clock.sleep(&notify, notify.seen(), Some(before));
        assert!(clock.now() >= before);
        assert!(clock.wall_ns() > 1_600_000_000_000_000_000);
    }
}
