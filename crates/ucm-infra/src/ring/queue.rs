//! The queue under the ring: rtrb, or under loom a stand-in with the same memory order.

#[cfg(not(loom))]
pub(super) use plain::{Head, Tail, queue};

#[cfg(loom)]
pub(super) use modelled::{Head, Tail, queue};

#[cfg(not(loom))]
mod plain {
    /// The end that takes.
    pub(in crate::ring) struct Head<T>(rtrb::Consumer<T>);

    /// The end that gives.
    pub(in crate::ring) struct Tail<T>(rtrb::Producer<T>);

    pub(in crate::ring) fn queue<T>(capacity: usize) -> (Tail<T>, Head<T>) {
        let (tail, head) = rtrb::RingBuffer::new(capacity);
        (Tail(tail), Head(head))
    }

    impl<T> Head<T> {
        pub(in crate::ring) fn pop(&mut self) -> Option<T> {
            self.0.pop().ok()
        }
    }

    impl<T> Tail<T> {
        /// Returns the item if the queue is full.
        pub(in crate::ring) fn push(&mut self, item: T) -> Result<(), T> {
            self.0
                .push(item)
                .map_err(|rtrb::PushError::Full(item)| item)
        }

        pub(in crate::ring) fn is_full(&self) -> bool {
            self.0.is_full()
        }
    }
}

#[cfg(loom)]
mod modelled {
    use std::sync::Arc;

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
        pub(in crate::ring) fn pop(&mut self) -> Option<T> {
            let popped = self.0.popped.load(Ordering::Relaxed);
            if self.0.pushed.load(Ordering::Acquire) == popped {
                return None;
            }
            let item = self.0.place(popped).lock().take();
            self.0.popped.store(popped + 1, Ordering::Release);
            item
        }
    }

    impl<T> Tail<T> {
        pub(in crate::ring) fn push(&mut self, item: T) -> Result<(), T> {
            let pushed = self.0.pushed.load(Ordering::Relaxed);
            if self.is_full() {
                return Err(item);
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
