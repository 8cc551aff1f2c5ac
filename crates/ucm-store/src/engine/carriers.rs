//! Which threads that copy from the device also write what they copied.
//!
//! A record is written at half the cost while it is in the cache of the core that gathered it. But who writes waits for a
//! medium, and the device must not: so all threads but one are *carriers*, that take each block all the way, and the one that
//! is left gathers on. Where writes fill nothing but memory, the page cache, it would only bring more into the caches than
//! they hold; there it stands by until no carrier moves on.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ucm_infra::Notify;

/// How long carriers may be at their blocks before somebody gathers on for them: some pieces of a busy processor's time, and
/// little beside what a write takes that waits for a disk. Of the system's time, for it decides nothing but who works.
const PATIENCE: Duration = Duration::from_millis(5);

/// The threads of an engine that carry blocks to the media.
pub(super) struct Carriers {
    most: usize,
    now: AtomicUsize,
    /// Blocks that they have brought all the way.
    carried: AtomicU64,
    /// Rung when one of them ends.
    left: Notify,
}

impl Carriers {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            now: AtomicUsize::new(0),
            carried: AtomicU64::new(0),
            left: Notify::new(),
        }
    }

    /// The calling thread is one of them as long as it keeps what it gets; `None`: there are enough.
    pub(super) fn join(&self) -> Option<Carries<'_>> {
        let one_more = |now: usize| (now < self.most).then_some(now + 1);
        let joined = self
            .now
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        joined.is_ok().then(|| Carries(self))
    }

    /// Waits as long as they move on. Returns as one of them when one has left, and without when they have stalled;
    /// `stalled_at` keeps where, so that nobody waits for them again before they have moved.
    pub(super) fn stand_by(&self, stalled_at: &mut Option<u64>) -> Option<Carries<'_>> {
        loop {
            let (left, carried) = (self.left.seen(), self.carried.load(Ordering::Acquire));
            let carries = self.join();
            if carries.is_some() || self.most == 0 || *stalled_at == Some(carried) {
                return carries;
            }
            self.left.wait_until(left, Instant::now() + PATIENCE);
            if self.carried.load(Ordering::Acquire) == carried {
                *stalled_at = Some(carried);
            }
        }
    }
}

/// A thread is a carrier for as long as this is there.
pub(super) struct Carries<'a>(&'a Carriers);

impl Carries<'_> {
    /// It has brought a block all the way.
    pub(super) fn moved_on(&self) {
        self.0.carried.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for Carries<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::AcqRel);
        self.0.left.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_one_carry() {
        let carriers = Carriers::new(2);
        let (one, two) = (carriers.join(), carriers.join());
        assert!(one.is_some() && two.is_some() && carriers.join().is_none());
        drop(one);
        assert!(carriers.join().is_some());
    }

    #[test]
    fn who_stands_by_takes_the_place_of_one_that_leaves() {
        let carriers = Carriers::new(1);
        let one = carriers.join().unwrap();
        std::thread::scope(|scope| {
            let stands_by = scope.spawn(|| {
                let mut stalled_at = None;
                // Stalled or not: it looks again until the place is free.
                while carriers.stand_by(&mut stalled_at).is_none() {
                    stalled_at = None;
                }
            });
            one.moved_on();
            drop(one);
            stands_by.join().unwrap();
        });
        assert!(carriers.join().is_some(), "and leaves it again");
    }

    #[test]
    fn nobody_stands_by_for_those_that_stalled_until_they_move() {
        let carriers = Carriers::new(1);
        let one = carriers.join().unwrap();
        let mut stalled_at = None;
        assert!(carriers.stand_by(&mut stalled_at).is_none());
        assert_eq!(stalled_at, Some(0));
        assert!(carriers.stand_by(&mut stalled_at).is_none());
        one.moved_on();
        assert!(carriers.stand_by(&mut stalled_at).is_none());
        assert_eq!(stalled_at, Some(1));
        let mut none = None;
        assert!(Carriers::new(0).stand_by(&mut none).is_none());
        assert_eq!(none, None, "nobody to wait for");
    }
}
