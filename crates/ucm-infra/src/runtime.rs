//! The one tokio runtime of the process, on which the clients of network media run.
//!
//! It runs only the connections of clients. A thread that needs a result drives its request itself
//! and sleeps until it ends, with the deadline of its job ([`Runtime::wait`]); a late request is
//! dropped. The runtime starts with the first store that needs it and ends with the last. A forked
//! child has none of its parent's threads, so it gets a runtime of its own; clients opened before
//! the fork return `Forked`.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};

use crate::clock::{Clock, MonotonicTime};
use crate::notify::Notify;
use crate::per_process::PerProcess;
use crate::threads::start_thread;

/// Threads that drive clients, for any number of stores. They handle sockets and TLS only.
const THREADS: usize = 2;
/// Threads for blocking calls of clients, such as resolving a host name.
const BLOCKING: usize = 2;
/// How long the end of the last store waits for the current work of these threads.
const SHUTDOWN: Duration = Duration::from_millis(500);

/// The runtime of a process as long as a store uses it.
static RUNTIME: OnceLock<PerProcess<Mutex<Weak<Runtime>>>> = OnceLock::new();

/// See the module.
pub struct Runtime {
    pid: u32,
    /// `Some` until the drop.
    tokio: Option<tokio::runtime::Runtime>,
}

impl Runtime {
    /// The runtime of this process, started if there is none. `Io` if the system cannot start its
    /// threads.
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
            .map_err(|error| {
                Error::from_io(error, "the threads for network media cannot be started")
            })?;
        let runtime = Arc::new(Self {
            pid: std::process::id(),
            tokio: Some(tokio),
        });
        *used = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    /// `Forked` in a child of the process that it belongs to.
    fn handle(&self) -> Result<&Handle> {
        let here = self
            .tokio
            .as_ref()
            .filter(|_| self.pid == std::process::id());
        here.map(tokio::runtime::Runtime::handle).ok_or_else(|| {
            let text =
                "this store was opened before a fork, and the child has none of its threads; open \
                 it there";
            Error::new(ErrorKind::Forked, text)
        })
    }

    /// Runs `work` on the calling thread, as a future of this runtime, until it ends or the
    /// deadline on this clock passes. Late work is dropped with everything it owns and returns
    /// `Timeout`; a panic returns `Internal`.
    pub fn wait<T>(
        &self,
        clock: &dyn Clock,
        until: MonotonicTime,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let _here = self.handle()?.enter(); // its timers and sockets
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let (mut context, mut work) = (Context::from_waker(&waker), pin!(work));
        loop {
            let seen = woken.0.seen();
            match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(&mut context))) {
                Ok(Poll::Ready(result)) => return result,
                Ok(Poll::Pending) => {}
                Err(_) => {
                    return Err(Error::internal(
                        "work for a network medium panicked; please report",
                    ));
                }
            }
            if clock.now() >= until {
                let late = "the server did not reply in time; the request was dropped";
                return Err(Error::new(ErrorKind::Timeout, late));
            }
            clock.sleep(&woken.0, seen, Some(until));
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let Some(tokio) = self.tokio.take() else {
            return;
        };
        if self.pid != std::process::id() {
            // its threads are the parent's: a thread that joined them would wait for ever
            Box::leak(Box::new(tokio));
        } else if Handle::try_current().is_ok() {
            // the last owner may be a thread of the runtime, which cannot wait for itself
            tokio.shutdown_background();
        } else {
            tokio.shutdown_timeout(SHUTDOWN);
        }
    }
}

/// Rung when a future can make progress.
#[derive(Default)]
struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::clock::SystemClock;
    use crate::tests_clock::ManualClock;

    /// Records its drop.
    struct Owned(Arc<AtomicBool>);

    impl Drop for Owned {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
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
        let dropped = Arc::new(AtomicBool::new(false));
        let owned = Owned(Arc::clone(&dropped));
        let work = async move {
            let _owned = owned;
            std::future::pending::<Result<()>>().await
        };
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| runtime.wait(&*clock, MonotonicTime(10), work));
            clock.await_sleepers(1);
            assert!(!dropped.load(Ordering::Acquire));
            clock.advance(Duration::from_nanos(10));
            assert_eq!(
                waits.join().unwrap().unwrap_err().kind(),
                ErrorKind::Timeout
            );
        });
        assert!(dropped.load(Ordering::Acquire));
    }

    #[test]
    fn it_goes_on_when_something_of_the_runtime_comes() {
        let runtime = Runtime::of_this_process().unwrap();
        let (tell, told) = tokio::sync::oneshot::channel();
        let work = async {
            let telling = tokio::spawn(async move { tell.send(7).map_err(drop) });
            let number = told
                .await
                .map_err(|_| Error::internal("the sender was dropped"))?;
            telling.await.unwrap().unwrap();
            Ok(number)
        };
        let answer = runtime.wait(&SystemClock, MonotonicTime::NEVER, work);
        assert_eq!(answer.unwrap(), 7);
    }

    #[test]
    fn a_panic_is_told_to_the_caller_that_waits() {
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
