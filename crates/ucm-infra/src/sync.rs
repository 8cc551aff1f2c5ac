//! Locks and atomics: those of ucm-core and std, or loom's under `--cfg loom`.
//!
//! Only types that loom must model stand here. Reference counts are std's in both builds.

#[cfg(loom)]
pub use loom::sync::atomic::AtomicU64;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::AtomicU64;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};

#[cfg(not(loom))]
pub(crate) use ucm_core::sync::{Condvar, Mutex};

#[cfg(loom)]
pub(crate) use modelled::{LoomCondvar as Condvar, LoomMutex as Mutex};

#[cfg(loom)]
mod modelled {
    use std::time::Instant;

    use loom::sync::MutexGuard;
    use ucm_core::sync::unpoisoned;

    /// loom's mutex without poisoning.
    pub(crate) struct LoomMutex<T>(loom::sync::Mutex<T>);

    impl<T> LoomMutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            unpoisoned(self.0.lock())
        }
    }

    /// loom's condition variable without poisoning. loom has no time: a timed wait ends only by a
    /// notification.
    pub(crate) struct LoomCondvar(loom::sync::Condvar);

    impl LoomCondvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            unpoisoned(self.0.wait(guard))
        }

        pub(crate) fn wait_until<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _until: Instant,
        ) -> MutexGuard<'a, T> {
            self.wait(guard)
        }
    }
}
