//! Lets a thread sleep until it is signalled, without missing a signal.
//!
//! A notify counts how often it was rung. A waiter reads the count, checks its condition, and
//! sleeps only if the count is still the same: a signal between check and sleep has changed the
//! count.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::sync::{Condvar, Mutex};

/// A counter that threads sleep on. Clones share one counter.
///
/// Use it in this order, or a signal can be missed: read [`seen`](Self::seen), check the condition,
/// then sleep with the count that was read, normally through [`Clock::sleep`](crate::Clock::sleep).
/// A thread that changes the condition rings *after* the change.
#[derive(Clone)]
pub struct Notify(Arc<Inner>);

struct Inner {
    rung: Mutex<u64>,
    news: Condvar,
}

impl Notify {
    /// A new notify with count zero.
    pub fn new() -> Self {
        Self(Arc::new(Inner {
            rung: Mutex::new(0),
            news: Condvar::new(),
        }))
    }

    /// The number of rings so far.
    pub fn seen(&self) -> u64 {
        *self.0.rung.lock()
    }

    /// Wakes every sleeper; a thread about to sleep returns at once.
    pub fn notify(&self) {
        *self.0.rung.lock() += 1;
        self.0.news.notify_all();
    }

    /// Sleeps until the count differs from `seen`; returns at once if it already does.
    pub fn wait(&self, seen: u64) {
        let mut rung = self.0.rung.lock();
        while *rung == seen {
            rung = self.0.news.wait(rung);
        }
    }

    /// Like [`wait`](Self::wait), but at most until `deadline`.
    pub fn wait_until(&self, seen: u64, deadline: Instant) {
        let mut rung = self.0.rung.lock();
        while *rung == seen && Instant::now() < deadline {
            rung = self.0.news.wait_until(rung, deadline);
        }
    }

    /// True if both share one counter.
    #[cfg(any(test, loom, feature = "test-utils"))]
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for Notify {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Notify").field(&self.seen()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn news_before_sleeping_is_not_lost() {
        let notify = Notify::new();
        let seen = notify.seen();
        notify.notify();
        notify.wait(seen);
        assert_eq!(notify.seen(), seen + 1);
    }

    #[test]
    fn a_deadline_in_the_past_returns_without_news() {
        let notify = Notify::new();
        notify.wait_until(notify.seen(), Instant::now());
        assert_eq!(notify.seen(), 0);
    }

    #[test]
    fn one_ring_wakes_every_sleeper() {
        let notify = Notify::new();
        let seen = notify.seen();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| notify.wait(seen));
            }
            notify.notify();
        });
    }
}
