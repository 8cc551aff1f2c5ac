//! The queue under the ring: rtrb, or under loom a stand-in with the same memory order.

#[cfg(not(loom))]
pub(super) use rtrb::{Consumer as Head, Producer as Tail};

#[cfg(loom)]
pub(super) use modelled::{Head, Tail, queue};

/// The end that gives, and the one that takes.
#[cfg(not(loom))]
pub(super) fn queue<T>(capacity: usize) -> (Tail<T>, Head<T>) {
    rtrb::RingBuffer::new(capacity)
}

#[cfg(loom)]
mod modelled {
    use std::sync::Arc;

    use rtrb::{PopError, PushError};

    use crate::sync::{AtomicUsize, Mutex, Ordering};

    struct Ring<T> {
        places: Vec<Mutex<Option<T>>>,
        popped: AtomicUsize,
        pushed: AtomicUsize,
    }

    impl<T> Ring<T> {
        /// Each end reads its own counter relaxed and the other's with acquire, as in rtrb.
        fn len(&self) -> usize {
            self.pushed.load(Ordering::Acquire) - self.popped.load(Ordering::Acquire)
        }

        fn place(&self, count: usize) -> &Mutex<Option<T>> {
            &self.places[count % self.places.len()]
        }
    }

    pub(in crate::ring) struct Head<T>(Arc<Ring<T>>);

    pub(in crate::ring) struct Tail<T>(Arc<Ring<T>>);

    pub(in crate::ring) fn queue<T>(capacity: usize) -> (Tail<T>, Head<T>) {
        let ring = Arc::new(Ring {
            places: (0..capacity).map(|_| Mutex::new(None)).collect(),
            popped: AtomicUsize::new(0),
            pushed: AtomicUsize::new(0),
        });
        (Tail(Arc::clone(&ring)), Head(ring))
    }

    impl<T> Head<T> {
        pub(in crate::ring) fn pop(&mut self) -> Result<T, PopError> {
            let popped = self.0.popped.load(Ordering::Relaxed);
            if self.0.pushed.load(Ordering::Acquire) == popped {
                return Err(PopError::Empty);
            }
            let item = self.0.place(popped).lock().take();
            self.0.popped.store(popped + 1, Ordering::Release);
            item.ok_or(PopError::Empty)
        }
    }

    impl<T> Tail<T> {
        pub(in crate::ring) fn push(&mut self, item: T) -> Result<(), PushError<T>> {
            let pushed = self.0.pushed.load(Ordering::Relaxed);
            if self.is_full() {
                return Err(PushError::Full(item));
            }
            *self.0.place(pushed).lock() = Some(item);
            self.0.pushed.store(pushed + 1, Ordering::Release);
            Ok(())
        }

        pub(in crate::ring) fn is_full(&self) -> bool {
            self.0.len() == self.0.places.len()
        }
    }
}
