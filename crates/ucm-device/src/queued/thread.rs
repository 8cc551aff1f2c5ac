//! The thread of a stream: runs submitted work in order and calls back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, RingProducer, SpscRing, SystemClock, begin_thread};

use super::Copier;
use super::event::HostEvent;
use crate::device::{CopyDone, Event, HostDone};
use crate::slots::HostBuf;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::Direction;

/// One submitted operation with its arguments.
pub(super) enum Task {
    Batch {
        pairs: Vec<(DeviceSpan, DeviceSpan)>,
        done: CopyDone,
    },
    Gather {
        src: Vec<Piece>,
        dst: HostBuf,
        done: HostDone,
    },
    Scatter {
        src: HostBuf,
        dst: Vec<Piece>,
        done: HostDone,
    },
    Transfer {
        direction: Direction,
        pairs: Vec<(DeviceSpan, HostSpan)>,
        done: CopyDone,
    },
    Call(Box<dyn FnOnce() + Send>),
    Record(Arc<HostEvent>),
    Wait(Arc<dyn Event>, MonotonicTime),
}

/// Progress of a stream's thread.
#[derive(Default)]
pub(super) struct Progress {
    /// Number of ended tasks, callbacks included.
    pub(super) ended: AtomicU64,
    /// True after an event was not done in time: no further copy runs.
    late: AtomicBool,
}

impl Progress {
    /// Fails after an event was not done in time.
    pub(super) fn check(&self) -> Result<()> {
        if !self.late.load(Ordering::Acquire) {
            return Ok(());
        }
        let late = "an event that this stream waits for was not done in time";
        Err(Error::new(ErrorKind::Timeout, late))
    }
}

impl Task {
    /// Reports to its owner that it was not started.
    pub(super) fn refuse(self, error: Error) {
        match self {
            Self::Batch { done, .. } | Self::Transfer { done, .. } => done(Err(error)),
            Self::Gather { dst: buf, done, .. } | Self::Scatter { src: buf, done, .. } => {
                done(buf, Err(error))
            }
            Self::Call(_) | Self::Record(_) | Self::Wait(..) => {}
        }
    }

    /// Whether it moves bytes.
    fn copies(&self) -> bool {
        matches!(
            self,
            Self::Batch { .. } | Self::Gather { .. } | Self::Scatter { .. } | Self::Transfer { .. }
        )
    }

    fn run(self, copier: &Mutex<impl Copier>, progress: &Progress) {
        if let (true, Err(late)) = (self.copies(), progress.check()) {
            return self.refuse(late);
        }
        match self {
            Self::Batch { pairs, done } => {
                let result = copier.lock().batch(&pairs);
                done(result);
            }
            Self::Gather { src, mut dst, done } => {
                let result = copier.lock().gather(&src, &mut dst, &mut |_, _| {});
                done(dst, result);
            }
            Self::Scatter { src, dst, done } => {
                let result = copier.lock().scatter(&src, &dst);
                done(src, result);
            }
            Self::Transfer {
                direction,
                pairs,
                done,
            } => {
                let result = copier.lock().transfer(direction, &pairs);
                done(result);
            }
            Self::Call(call) => call(),
            Self::Record(event) => event.record(),
            Self::Wait(event, deadline) => {
                let late = event.wait(Some(deadline)).is_err();
                progress.late.fetch_or(late, Ordering::AcqRel);
            }
        }
    }
}

/// Starts a stream's thread; it ends when the ring is closed and empty.
pub(super) fn start<C: Copier>(
    queue: usize,
    copier: Arc<Mutex<C>>,
    progress: Arc<Progress>,
) -> Result<RingProducer<Task>> {
    let (feed, mut tasks) = SpscRing::bounded(queue)?;
    let serve = move || {
        // Always the real clock: this wait has no deadline and ends only by a signal.
        tasks.run(&SystemClock, |task: Task| {
            // A panic of a callback does not end the stream or a caller that waits for it.
            let _ = catch_unwind(AssertUnwindSafe(|| task.run(&copier, &progress)));
            progress.ended.fetch_add(1, Ordering::Release);
        });
    };
    begin_thread("ucm-stream", serve)
        .map_err(|e| Error::from_io(e, "cannot start the thread of a stream"))?;
    Ok(feed)
}
