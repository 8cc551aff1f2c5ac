//! How one end of the ring goes to sleep and the other wakes it, without a lock on the way of
//! items.
//!
//! The sleeper announces itself, then looks once more, then sleeps; the waker changes the ring,
//! then looks for the announcement. A full fence between the two steps on each side makes it
//! impossible that both look too early: the sleeper sees the change or the waker sees the
//! announcement.

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use crate::sync::{AtomicBool, Ordering, fence};

/// Where one thread sleeps until another wakes it.
pub(super) struct Parking {
    /// Every write is a swap, never a store: so the writes of both threads have one order, in which
    /// each builds on the one before, and a waker's late `false` cannot hide a newer announcement.
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

    /// Sleeps until `look` finds something; `None` if it found nothing by `until`.
    pub(super) fn park<R>(
        &self,
        clock: &dyn Clock,
        until: Option<MonotonicTime>,
        mut look: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        loop {
            // Read before the announcement: who sees that rings later than this.
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

    /// Wakes the sleeper, if there is one; called after each change that `look` might find.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        // The load alone is enough nearly always, and leaves the line shared.
        if self.announced.load(Ordering::Relaxed) && self.announced.swap(false, Ordering::Relaxed) {
            self.notify.notify();
        }
    }
}
