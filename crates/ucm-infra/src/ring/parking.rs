//! Lets one end of the ring sleep and the other wake it, without a lock on the path of items.
//!
//! The sleeper announces itself, then checks the ring once more, then sleeps. The waker changes the
//! ring, then reads the announcement. With a full fence between the two steps on each side, the
//! sleeper sees the change or the waker sees the announcement.

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use crate::sync::{AtomicBool, Ordering, fence};

/// Where one thread sleeps until another wakes it.
pub(super) struct Parking {
    /// Every write is a swap, never a store. So the writes of both threads have one order, and a
    /// waker's late `false` cannot hide a newer announcement.
    announced: AtomicBool,
    notify: Notify,
}

impl Parking {
    pub(super) fn new() -> Self {
        Self {
            announced: AtomicBool::new(false),
            notify: Notify::new(),
        }
    }

    /// Sleeps until `look` returns something; `None` if it returned nothing by `until`.
    pub(super) fn park<R>(
        &self,
        clock: &dyn Clock,
        until: Option<MonotonicTime>,
        mut look: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        loop {
            // Read before the announcement: a thread that sees the announcement rings later than
            // this.
            let seen = self.notify.seen();
            self.announced.swap(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let found = look();
            if found.is_some() || until.is_some_and(|until| clock.now() >= until) {
                self.announced.swap(false, Ordering::Relaxed);
                return found;
            }
            clock.sleep(&self.notify, seen, until);
        }
    }

    /// Wakes the sleeper, if there is one. Called after each change that `look` can find.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        // The load alone is nearly always enough, and leaves the cache line shared.
        if self.announced.load(Ordering::Relaxed) && self.announced.swap(false, Ordering::Relaxed) {
            self.notify.notify();
        }
    }
}
