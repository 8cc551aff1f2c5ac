//! The one tokio runtime of the process, on which the clients of network media run.
//!
//! Nothing of ours lives in it but futures of clients: a thread of a pool hands one over and waits for its end with the
//! deadline of its job ([`Runtime::wait`]). What is late is aborted, and what it owns is free when the runtime has really
//! let go of it. The runtime begins with the first store that wants one and ends with the last; a forked child has none of
//! its parent's threads, so it gets one of its own, and what was opened before the fork says so.

use std::future::Future;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use ucm_core::{Error, ErrorKind, Result};

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use crate::per_process::PerProcess;
use crate::threads::start_thread;

/// Threads that drive clients, whatever the number of stores: sockets and checksums of TLS are all they do.
const THREADS: usize = 2;
/// Threads for what clients do that blocks, such as looking up a host's name.
const BLOCKING: usize = 2;
/// How long the end of the last store waits for what these threads are at.
const SHUTDOWN: Duration = Duration::from_millis(500);

/// The runtime of a process while somebody uses it.
static RUNTIME: OnceLock<PerProcess<Mutex<Weak<Runtime>>>> = OnceLock::new();

/// See the module.
pub struct Runtime {
    pid: u32,
    /// There until it is dropped.
    tokio: Option<tokio::runtime::Runtime>,
}

impl Runtime {
    /// That of this process; begun where nobody uses one. `Io` when the system gives no threads.
    pub fn of_this_process() -> Result<Arc<Self>> {
        let mut used = RUNTIME.get_or_init(PerProcess::new).here().lock();
        if let Some(runtime) = used.upgrade() {
            return Ok(runtime);
        }
        let tokio = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING)
            .thread_name("ucm-net")
            .on_thread_start(start_thread)
            .enable_all()
            .build()
            .map_err(|error| Error::from_io(error, "the threads for network media cannot be started"))?;
        let runtime = Arc::new(Self {
            pid: std::process::id(),
            tokio: Some(tokio),
        });
        *used = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    /// Where futures are handed over. `Forked` in a child of the process that it belongs to.
    pub fn handle(&self) -> Result<&Handle> {
        let here = self.tokio.as_ref().filter(|_| self.pid == std::process::id());
        here.map(tokio::runtime::Runtime::handle).ok_or_else(|| {
            let text =
                "this store was opened before a fork, and the child has none of its threads; open it there";
            Error::new(ErrorKind::Forked, text)
        })
    }

    /// Does `work` on the runtime and waits for its end, on this clock until then. What is late is aborted and is `Timeout`
    /// here; `work` is dropped, with all that it owns, as soon as the runtime has let go of it.
    pub fn wait<T: Send + 'static>(
        &self,
        clock: &dyn Clock,
        until: MonotonicTime,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let answer = Arc::new(Answer::default());
        let told = Teller(Arc::clone(&answer));
        let task = self.handle()?.spawn(async move { told.tell(work.await) });
        loop {
            let seen = answer.told.seen();
            if let Some(result) = answer.result.lock().take() {
                return result;
            }
            if clock.now() >= until {
                task.abort();
                let late = "the server did not answer in time, and nothing more is done for it";
                return Err(Error::new(ErrorKind::Timeout, late));
            }
            clock.sleep(&answer.told, seen, Some(until));
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let Some(tokio) = self.tokio.take() else { return };
        if self.pid != std::process::id() {
            Box::leak(Box::new(tokio)); // its threads are the parent's: whoever joined them would wait for ever
        } else if Handle::try_current().is_ok() {
            tokio.shutdown_background(); // a client's own thread let go of it last, and cannot wait for itself
        } else {
            tokio.shutdown_timeout(SHUTDOWN);
        }
    }
}

/// What became of a future that somebody waits for.
struct Answer<T> {
    result: Mutex<Option<Result<T>>>,
    told: Notify,
}

impl<T> Default for Answer<T> {
    fn default() -> Self {
        Self {
            result: Mutex::new(None),
            told: Notify::new(),
        }
    }
}

/// Tells it, also when the future ends without a word.
struct Teller<T>(Arc<Answer<T>>);

impl<T> Teller<T> {
    fn tell(self, result: Result<T>) {
        *self.0.result.lock() = Some(result);
    }
}

impl<T> Drop for Teller<T> {
    fn drop(&mut self) {
        let silent = || {
            Err(Error::internal(
                "work for a network medium panicked or was given up; please report",
            ))
        };
        self.0.result.lock().get_or_insert_with(silent);
        self.0.told.notify();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::clock::{ManualClock, SystemClock};

    /// Says when it is dropped.
    struct Owned(Arc<(AtomicBool, Notify)>);

    impl Drop for Owned {
        fn drop(&mut self) {
            self.0.0.store(true, Ordering::Release);
            self.0.1.notify();
        }
    }

    #[test]
    fn one_for_the_process_as_long_as_somebody_uses_it() {
        let runtime = Runtime::of_this_process().unwrap();
        assert!(Arc::ptr_eq(&runtime, &Runtime::of_this_process().unwrap()));
        let answer = runtime.wait(&SystemClock, MonotonicTime::NEVER, async { Ok(7) });
        assert_eq!(answer.unwrap(), 7);
    }

    #[test]
    fn what_is_late_is_a_timeout_and_lets_go_of_what_it_owns() {
        let (clock, runtime) = (ManualClock::new(), Runtime::of_this_process().unwrap());
        let dropped = Arc::new((AtomicBool::new(false), Notify::new()));
        let owned = Owned(Arc::clone(&dropped));
        let work = async move {
            let _owned = owned;
            std::future::pending::<Result<()>>().await
        };
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| runtime.wait(&*clock, MonotonicTime(10), work));
            clock.await_sleepers(1);
            assert!(!dropped.0.load(Ordering::Acquire));
            clock.advance(Duration::from_nanos(10));
            assert_eq!(waits.join().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
        });
        while !dropped.0.load(Ordering::Acquire) {
            let seen = dropped.1.seen();
            if !dropped.0.load(Ordering::Acquire) {
                dropped.1.wait(seen);
            }
        }
    }

    #[test]
    fn a_panic_is_told_to_whoever_waits() {
        let runtime = Runtime::of_this_process().unwrap();
        let panics = async { panic!("meant") };
        let result: Result<()> = runtime.wait(&SystemClock, MonotonicTime::NEVER, panics);
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Internal);
    }

    #[test]
    fn one_of_another_process_is_not_used() {
        let runtime = Runtime::of_this_process().unwrap();
        let parents = Runtime {
            pid: runtime.pid ^ 1,
            tokio: None,
        };
        let result = parents.wait(&SystemClock, MonotonicTime::NEVER, async { Ok(()) });
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Forked);
    }
}
