//! One result for many waiters: set once, then returned by a wait with a deadline or passed to a
//! callback.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use crate::sync::Mutex;

type Callback<T> = Box<dyn FnOnce(&T) + Send>;

/// A value that is set once. The first [`complete`](Self::complete) wins; every waiter and every
/// callback gets that value exactly once.
pub struct Completion<T> {
    state: Mutex<State<T>>,
    notify: Notify,
}

enum State<T> {
    Open(Vec<Callback<T>>),
    Done(T),
}

impl<T: Clone> Completion<T> {
    /// Nothing has arrived yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::Open(Vec::new())),
            notify: Notify::new(),
        })
    }

    /// Sets the value, wakes the waiters and runs the callbacks on this thread, in no defined
    /// order. Returns `false` if a value was set before: then nothing changes and `value` is
    /// dropped.
    ///
    /// Callbacks must not block. If one panics, the others still run; then the first panic is
    /// resumed here.
    pub fn complete(&self, value: T) -> bool {
        let callbacks = {
            let mut state = self.state.lock();
            let State::Open(callbacks) = &mut *state else {
                return false;
            };
            let callbacks = std::mem::take(callbacks);
            *state = State::Done(value.clone());
            callbacks
        };
        self.notify.notify();
        let mut panicked = None;
        for callback in callbacks {
            let result = catch_unwind(AssertUnwindSafe(|| callback(&value)));
            panicked = panicked.or(result.err());
        }
        if let Some(payload) = panicked {
            resume_unwind(payload);
        }
        true
    }

    /// Waits for the value until `deadline` on `clock` (`None`: for ever). Returns `None` if it was
    /// not set in time; a later wait may still get it. An existing value is returned even if the
    /// deadline has passed.
    pub fn wait(&self, clock: &dyn Clock, deadline: Option<MonotonicTime>) -> Option<T> {
        loop {
            let seen = self.notify.seen();
            if let Some(value) = self.peek() {
                return Some(value);
            }
            if deadline.is_some_and(|deadline| clock.now() >= deadline) {
                return None;
            }
            clock.sleep(&self.notify, seen, deadline);
        }
    }

    /// The value, if it is set.
    pub fn peek(&self) -> Option<T> {
        match &*self.state.lock() {
            State::Open(_) => None,
            State::Done(value) => Some(value.clone()),
        }
    }

    /// Runs `callback` with the value: at once on this thread if it is set, else on the thread that
    /// sets it. If the completion is dropped without a value, the callback is dropped without a
    /// call.
    pub fn on_complete(&self, callback: impl FnOnce(&T) + Send + 'static) {
        let value = match &mut *self.state.lock() {
            State::Open(callbacks) => {
                callbacks.push(Box::new(callback));
                return;
            }
            State::Done(value) => value.clone(),
        };
        callback(&value);
    }
}

impl<T> fmt::Debug for Completion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = matches!(&*self.state.lock(), State::Done(_));
        f.debug_struct("Completion").field("done", &done).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::tests_clock::ManualClock;

    #[test]
    fn the_first_value_wins() {
        let done = Completion::new();
        assert_eq!(done.peek(), None);
        assert!(done.complete(1));
        assert!(!done.complete(2));
        assert_eq!(done.peek(), Some(1));
        assert_eq!(
            done.wait(&*ManualClock::new(), Some(MonotonicTime(0))),
            Some(1)
        );
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_can_be_repeated() {
        let clock = ManualClock::new();
        let done = Completion::new();
        std::thread::scope(|scope| {
            let late = scope.spawn(|| done.wait(&*clock, Some(MonotonicTime(10))));
            clock.await_sleepers(1);
            clock.advance(Duration::from_nanos(10));
            assert_eq!(late.join().unwrap(), None);
            let again = scope.spawn(|| done.wait(&*clock, Some(MonotonicTime(20))));
            clock.await_sleepers(1);
            done.complete("late");
            assert_eq!(again.join().unwrap(), Some("late"));
        });
    }

    #[test]
    fn many_waiters_and_callbacks_all_see_it_once() {
        let clock = ManualClock::new();
        let done = Completion::new();
        let calls = Arc::new(AtomicUsize::new(0));
        for _ in 0..3 {
            let calls = Arc::clone(&calls);
            done.on_complete(move |value| {
                calls.fetch_add(*value, Ordering::Relaxed);
            });
        }
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| done.wait(&*clock, None)))
                .collect();
            clock.await_sleepers(3);
            done.complete(5);
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), Some(5));
            }
        });
        assert_eq!(calls.load(Ordering::Relaxed), 15);
        let late = Arc::clone(&calls);
        done.on_complete(move |_| {
            late.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 16);
    }

    #[test]
    fn a_callback_may_use_the_completion() {
        let done: Arc<Completion<u32>> = Completion::new();
        let seen = Completion::new();
        let (inner, out) = (Arc::clone(&done), Arc::clone(&seen));
        done.on_complete(move |_| {
            out.complete(inner.peek());
        });
        done.complete(3);
        assert_eq!(seen.peek(), Some(Some(3)));
    }

    #[test]
    fn a_panicking_callback_does_not_rob_the_others() {
        let done = Completion::new();
        let calls = Arc::new(AtomicUsize::new(0));
        done.on_complete(|_| panic!("meant"));
        let counted = Arc::clone(&calls);
        done.on_complete(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        assert!(catch_unwind(AssertUnwindSafe(|| done.complete(1))).is_err());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(done.peek(), Some(1));
    }
}
