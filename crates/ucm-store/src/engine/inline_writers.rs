//! Which threads that copy from the device also write what they copied.
//!
//! A record is written at half the cost while it is in the cache of the core that gathered it. But
//! a thread that writes waits for the medium, and the device must not wait. So all threads but one
//! write *inline*: they gather a block and write it. The last thread only gathers. Where writes
//! fill only the page cache, its blocks would replace in the processor's cache those that the
//! others are about to write; there it is idle as long as the others are fast.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ucm_infra::Notify;

/// Bytes a second of one thread that gathers and writes inline, below which it counts as waiting
/// for a device: a tenth of what memory takes.
const QUICK: u64 = 256 << 20;
/// Least time for one block: a busy processor gives a thread its turn within it.
const LEAST: Duration = Duration::from_millis(25);
/// Longest time that a thread is idle, in times that one block may take: other dumps may keep the
/// others busy for long.
const LONGEST: u32 = 8;

/// The threads of an engine that write inline. Their times are the system's, not those of a test's
/// clock: these decide which thread works, not what comes of it.
pub(super) struct InlineWriters {
    most: usize,
    now: AtomicUsize,
    /// How long a block may take.
    patience: Duration,
    /// Blocks that took no longer.
    quick: AtomicU64,
    /// `quick` when last none was added for that long.
    stalled_at: AtomicU64,
    /// Rung when one of them ends.
    ended: Notify,
}

impl InlineWriters {
    /// At most `most` of them, for records of `record_len` bytes.
    pub(super) fn new(most: usize, record_len: u64) -> Self {
        Self {
            most,
            now: AtomicUsize::new(0),
            patience: Duration::from_micros(record_len.saturating_mul(1_000_000) / QUICK)
                .max(LEAST),
            quick: AtomicU64::new(0),
            stalled_at: AtomicU64::new(u64::MAX),
            ended: Notify::new(),
        }
    }

    /// The calling thread writes inline as long as it keeps what it gets; `None`: there are enough.
    pub(super) fn begin(&self) -> Option<InlineWriter<'_>> {
        let one_more = |now: usize| (now < self.most).then_some(now + 1);
        let began = self
            .now
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        began.is_ok().then(|| InlineWriter(self))
    }

    /// Waits for a while, as long as there is work left and the others are quick. Returns as one of
    /// them once one has ended.
    pub(super) fn stand_by(&self, is_work_left: impl Fn() -> bool) -> Option<InlineWriter<'_>> {
        let longest = Instant::now() + self.patience * LONGEST;
        loop {
            let (ended, quick) = (self.ended.seen(), self.quick.load(Ordering::Acquire));
            if self.most == 0 || !is_work_left() {
                return None;
            }
            let (writer, now) = (self.begin(), Instant::now());
            if writer.is_some()
                || now >= longest
                || self.stalled_at.load(Ordering::Acquire) == quick
            {
                return writer;
            }
            let until = now + self.patience;
            self.ended.wait_until(ended, until);
            if Instant::now() >= until && self.quick.load(Ordering::Acquire) == quick {
                self.stalled_at.store(quick, Ordering::Release);
            }
        }
    }
}

/// A thread writes inline for as long as this is there.
pub(super) struct InlineWriter<'a>(&'a InlineWriters);

impl InlineWriter<'_> {
    /// It has brought a block to the medium, which took so long.
    pub(super) fn wrote(&self, took: Duration) {
        if took <= self.0.patience {
            self.0.quick.fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl Drop for InlineWriter<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(most: usize) -> InlineWriters {
        InlineWriters::new(most, 1 << 20)
    }

    #[test]
    fn all_but_one_write() {
        let writers = writers(2);
        let (one, two) = (writers.begin(), writers.begin());
        assert!(one.is_some() && two.is_some() && writers.begin().is_none());
        drop(one);
        assert!(writers.begin().is_some());
    }

    #[test]
    fn a_thread_that_stands_by_takes_the_place_of_one_that_ends() {
        let writers = writers(1);
        let one = writers.begin().unwrap();
        std::thread::scope(|scope| {
            let stands_by = scope.spawn(|| {
                while writers.stand_by(|| true).is_none() {
                    // as if they were quick all the time
                    writers.quick.fetch_add(1, Ordering::AcqRel);
                }
            });
            drop(one);
            stands_by.join().unwrap();
        });
        assert!(writers.begin().is_some(), "and left it again");
    }

    #[test]
    fn no_thread_stands_by_for_those_that_are_slow() {
        let writers = writers(1);
        let one = writers.begin().unwrap();
        assert!(writers.stand_by(|| true).is_none(), "it has waited once");
        assert_eq!(writers.stalled_at.load(Ordering::Acquire), 0);
        one.wrote(Duration::from_secs(1));
        assert!(writers.stand_by(|| true).is_none());
        assert_eq!(
            writers.stalled_at.load(Ordering::Acquire),
            0,
            "that was not quick"
        );
        one.wrote(Duration::ZERO);
        assert!(writers.stand_by(|| true).is_none());
        assert_eq!(writers.stalled_at.load(Ordering::Acquire), 1);
    }

    #[test]
    fn no_thread_stands_by_for_ever() {
        let writers = writers(1);
        let one = writers.begin().unwrap();
        std::thread::scope(|scope| {
            let stands_by = scope.spawn(|| writers.stand_by(|| true).is_none());
            while !stands_by.is_finished() {
                one.wrote(Duration::ZERO);
                std::thread::yield_now();
            }
            assert!(stands_by.join().unwrap());
        });
    }

    #[test]
    fn no_thread_stands_by_for_nothing() {
        let (none, one) = (writers(0), writers(1));
        assert!(none.stand_by(|| true).is_none());
        assert!(one.stand_by(|| false).is_none());
        let _writer = one.begin();
        assert!(one.stand_by(|| false).is_none());
        assert_eq!(one.stalled_at.load(Ordering::Acquire), u64::MAX);
    }
}
