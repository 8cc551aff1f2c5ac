//! Locks that a forked child can use: std's, without poisoning.
//!
//! Those of parking_lot keep one table of waiting threads in a process. A child of a fork inherits
//! the entries of threads that it does not have; its own new threads may lie where these were, and
//! then a wake-up is lost.

use std::sync::{LockResult, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// The guard, although another thread panicked with it.
pub fn unpoisoned<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// A mutex that a panic does not poison.
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Not locked.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Waits for it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        unpoisoned(self.0.lock())
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits for it for so long.
    pub fn try_lock_for(&self, span: Duration) -> Option<MutexGuard<'_, T>> {
        let began = Instant::now();
        loop {
            let guard = self.try_lock();
            if guard.is_some() || began.elapsed() >= span {
                return guard;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The value; `&mut self` proves that no other thread uses it.
    pub fn get_mut(&mut self) -> &mut T {
        unpoisoned(self.0.get_mut())
    }
}

/// A lock of several readers or one writer that a panic does not poison.
#[derive(Debug, Default)]
pub struct RwLock<T>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Not locked.
    pub const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    /// Waits for it, to read.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        unpoisoned(self.0.read())
    }

    /// Waits for it, to write.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        unpoisoned(self.0.write())
    }
}

/// A condition variable over a [`Mutex`]; it takes the guard and returns it.
#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    /// A variable without waiters.
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    /// Wakes one that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits to be woken, or returns without a reason.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        unpoisoned(self.0.wait(guard))
    }

    /// The same, until then.
    pub fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, until: Instant) -> MutexGuard<'a, T> {
        let span = until.saturating_duration_since(Instant::now());
        unpoisoned(self.0.wait_timeout(guard, span)).0
    }
}
