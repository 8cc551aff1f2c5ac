//! Time as a dependency.
//!
//! Deadlines are points on the clock's monotonic axis ([`MonotonicTime`]). Nothing in ucm sleeps
//! except through [`Clock::sleep`], so a test with a clock of its own (`ManualClock`) never waits
//! for real time and decides every timeout itself.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::notify::Notify;

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
    fn the_real_clock_goes_forward_and_never_sleeps_past_a_passed_deadline() {
        let clock = SystemClock::shared();
        let before = clock.now();
        let notify = Notify::new();
        clock.sleep(&notify, notify.seen(), Some(before));
        assert!(clock.now() >= before);
        assert!(clock.wall_ns() > 1_600_000_000_000_000_000);
    }
}
