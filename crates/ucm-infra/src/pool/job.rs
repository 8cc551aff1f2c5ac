//! One job: its work and its single report.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use ucm_core::sync::Mutex;
use ucm_core::{Error, Result};

use super::stats::{LaneCounters, count};

/// Reasons to report a job without its own result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    TimedOut,
    Closed,
}

/// A type-erased job. The first thread that takes `done` reports; other threads find it taken and
/// do nothing.
pub(super) trait Job: Send + Sync {
    /// Does the work and reports it. If the job was failed before the work ended, the late result
    /// is dropped here.
    fn run(&self);

    /// Reports `error`; `false` if the job was reported already. Work that was not begun is dropped
    /// first, so that its buffers are free when `done` runs. A panic of that drop is resumed after
    /// the report.
    fn fail(&self, verdict: Verdict, error: Error) -> bool;
}

pub(super) struct JobCell<W, D> {
    work: Mutex<Option<W>>,
    done: Mutex<Option<D>>,
    counters: Arc<LaneCounters>,
}

impl<W, D> JobCell<W, D> {
    pub(super) fn new(work: W, done: D, counters: Arc<LaneCounters>) -> Self {
        Self {
            work: Mutex::new(Some(work)),
            done: Mutex::new(Some(done)),
            counters,
        }
    }
}

impl<T, W, D> Job for JobCell<W, D>
where
    W: FnOnce() -> T + Send,
    D: FnOnce(Result<T>) + Send,
{
    fn run(&self) {
        let Some(work) = self.work.lock().take() else {
            return;
        };
        let result = catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
            count(&self.counters.panicked);
            Error::internal("a job of the worker pool panicked; please report")
                .with("panic", panic_text(&*payload))
        });
        let done = self.done.lock().take();
        match done {
            Some(done) => {
                count(&self.counters.completed);
                done(result);
            }
            None => {
                // First the buffers, then the count: a reader of the count may rely on the buffers
                // being free.
                drop(result);
                count(&self.counters.late);
            }
        }
    }

    fn fail(&self, verdict: Verdict, error: Error) -> bool {
        let Some(done) = self.done.lock().take() else {
            return false;
        };
        let work = self.work.lock().take();
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(work)));
        match verdict {
            Verdict::TimedOut => count(&self.counters.timed_out),
            Verdict::Closed => count(&self.counters.closed),
        }
        done(Err(error));
        if let Err(payload) = dropped {
            resume_unwind(payload);
        }
        true
    }
}

/// The message of a panic, if it has one.
fn panic_text(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "no text".to_owned()
    }
}
