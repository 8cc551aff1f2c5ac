//! A bounded lock-free ring between two threads. An end that has nothing to do spins briefly,
//! yields, then parks until the other end wakes it.

mod parking;
mod queue;
#[cfg(all(test, not(loom)))]
mod tests;

use std::iter::repeat_n;
use std::marker::PhantomData;
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};

use crate::clock::{Clock, MonotonicTime};
use crate::sync::{AtomicBool, Ordering};
use parking::Parking;
use queue::{Head, Tail, queue};

/// Attempts without a yield, while the other end is probably in the middle of its step. (None under
/// loom, where they would only multiply the interleavings.)
const SPINS: usize = if cfg!(loom) { 0 } else { 64 };
/// Attempts with a yield in between, before parking.
const YIELDS: usize = if cfg!(loom) { 0 } else { 8 };
/// Most items of a ring.
const MAX_CAPACITY: usize = 1 << 24;

/// Makes rings; see [`bounded`](Self::bounded).
pub struct SpscRing<T>(PhantomData<T>);

/// The sending end. Dropping it closes the ring: the consumer takes the remaining items and then
/// sees the end.
pub struct RingProducer<T> {
    tail: Tail<T>,
    shared: Arc<RingState>,
}

/// The receiving end. Dropping it closes the ring and drops the items in it: the producer's next
/// push fails, and an item whose push overlaps with the drop may be accepted and dropped.
pub struct RingConsumer<T> {
    head: Head<T>,
    shared: Arc<RingState>,
}

struct RingState {
    closed: AtomicBool,
    /// Where the consumer sleeps while the ring is empty.
    consumer: Parking,
    /// Where the producer sleeps while the ring is full.
    producer: Parking,
}

impl RingState {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.consumer.wake();
        self.producer.wake();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Why an item was not pushed, with the item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushError<T> {
    /// The ring is full.
    Full(T),
    /// One of the ends closed the ring.
    Closed(T),
    /// The ring was still full at the deadline.
    TimedOut(T),
}

impl<T> SpscRing<T> {
    /// A ring that holds up to `capacity` items, as its two ends.
    ///
    /// # Errors
    /// `Config` if `capacity` is zero or above 16777216.
    pub fn bounded(capacity: usize) -> Result<(RingProducer<T>, RingConsumer<T>)> {
        if capacity == 0 || capacity > MAX_CAPACITY {
            return Err(Error::new(
                ErrorKind::Config,
                "a ring holds between 1 and 16777216 items",
            )
            .with("got", capacity));
        }
        let (tail, head) = queue(capacity);
        let shared = Arc::new(RingState {
            closed: AtomicBool::new(false),
            consumer: Parking::new(),
            producer: Parking::new(),
        });
        let producer = RingProducer {
            tail,
            shared: Arc::clone(&shared),
        };
        Ok((producer, RingConsumer { head, shared }))
    }
}

impl<T> RingProducer<T> {
    /// Puts `item` into the ring without waiting.
    ///
    /// # Errors
    /// `Full` or `Closed`, with the item.
    pub fn try_push(&mut self, item: T) -> Result<(), PushError<T>> {
        if self.shared.is_closed() {
            return Err(PushError::Closed(item));
        }
        let full = |rtrb::PushError::Full(item)| PushError::Full(item);
        self.tail.push(item).map_err(full)?;
        self.shared.consumer.wake();
        Ok(())
    }

    /// Puts `item` into the ring, waiting for room until `deadline` on `clock` (`None`: for ever).
    ///
    /// # Errors
    /// `Closed` or `TimedOut`, with the item.
    pub fn push(
        &mut self,
        item: T,
        clock: &dyn Clock,
        deadline: Option<MonotonicTime>,
    ) -> Result<(), PushError<T>> {
        let mut item = item;
        loop {
            match self.try_push(item) {
                Err(PushError::Full(back)) => item = back,
                other => return other,
            }
            let look = || (self.shared.is_closed() || !self.tail.is_full()).then_some(());
            if wait(&self.shared.producer, clock, deadline, look).is_none() {
                return Err(PushError::TimedOut(item));
            }
        }
    }
}

impl<T> Drop for RingProducer<T> {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl<T> RingConsumer<T> {
    /// Takes the oldest item, waiting for one: spins, yields, parks. `None` if the ring is closed
    /// and empty.
    pub fn recv(&mut self, clock: &dyn Clock) -> Option<T> {
        let look = || {
            // Read before the ring is found empty, so items pushed before the close are seen.
            let closed = self.shared.is_closed();
            let item = self.head.pop().ok();
            if item.is_some() {
                self.shared.producer.wake();
            }
            (closed || item.is_some()).then_some(item)
        };
        wait(&self.shared.consumer, clock, None, look).flatten()
    }

    /// The consumer loop: passes every item to `take`, in order, until the ring is closed and
    /// empty.
    pub fn run(&mut self, clock: &dyn Clock, mut take: impl FnMut(T)) {
        while let Some(item) = self.recv(clock) {
            take(item);
        }
    }
}

impl<T> Drop for RingConsumer<T> {
    fn drop(&mut self) {
        self.shared.close();
        // Values in the items must be dropped now, not when the producer ends.
        while self.head.pop().is_ok() {}
    }
}

/// Tries until something is found: spinning, then yielding, then parked. `None` at the deadline.
fn wait<R>(
    parking: &Parking,
    clock: &dyn Clock,
    deadline: Option<MonotonicTime>,
    mut look: impl FnMut() -> Option<R>,
) -> Option<R> {
    let spins = repeat_n(std::hint::spin_loop as fn(), SPINS);
    let yields = repeat_n(std::thread::yield_now as fn(), YIELDS);
    for pause in spins.chain(yields) {
        if let Some(found) = look() {
            return Some(found);
        }
        pause();
    }
    parking.park(clock, deadline, look)
}

impl<T> From<PushError<T>> for Error {
    /// The same without the item: `Busy`, `Closed` or `Timeout`.
    fn from(error: PushError<T>) -> Self {
        let (kind, text) = match error {
            PushError::Full(_) => (ErrorKind::Busy, "the ring is full"),
            PushError::Closed(_) => (ErrorKind::Closed, "the ring is closed"),
            PushError::TimedOut(_) => (
                ErrorKind::Timeout,
                "the ring stayed full until the deadline",
            ),
        };
        Self::new(kind, text)
    }
}
