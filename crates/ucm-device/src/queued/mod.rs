//! Streams over any copier: synchronous copies run on the caller's thread. A stream's first
//! asynchronous operation starts a thread of its own, fed by a bounded ring, which makes the same
//! copies in order. So a device implements only its copies; queues, order, callbacks and events are
//! common to all.

mod event;
mod thread;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, PushError, RingProducer, SystemClock};

use crate::device::{CopyDone, Event, HostDone, Landed, Stream};
use crate::slots::HostBuf;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::Direction;
pub(crate) use event::HostEvent;
use thread::{Progress, Task};

/// The synchronous copies of a device: each has succeeded, or failed and ended, when its call
/// returns. They keep the contract of [`Stream`].
pub(crate) trait Copier: Send + 'static {
    fn batch(&mut self, pairs: &[(DeviceSpan, DeviceSpan)]) -> Result<()>;
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()>;
    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()>;
    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()>;
}

/// Settings of the queues of a device's streams.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// Most queued operations of one stream; further ones are refused with `Busy`.
    pub queue: usize,
    /// How long a synchronous copy waits for earlier asynchronous ones of the same stream.
    pub drain: Duration,
    /// The clock of all waits.
    pub clock: Arc<dyn Clock>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            queue: 1024,
            drain: Duration::from_secs(30),
            clock: Arc::new(SystemClock),
        }
    }
}

impl QueueOptions {
    /// The default settings on this clock.
    pub(crate) fn on(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            ..Self::default()
        }
    }
}

/// A stream over a copier. On drop its thread finishes submitted work, calls back and ends; the
/// drop does not wait for that.
pub(crate) struct QueuedStream<C> {
    options: QueueOptions,
    /// Used by the thread or, when that is idle, by the caller.
    copier: Arc<Mutex<C>>,
    /// To the stream's thread, if it exists.
    feed: Option<RingProducer<Task>>,
    submitted: u64,
    /// Number of tasks known to have ended by a wait. The thread counts a task after it sets its
    /// event, so a count read right after a wait may be one short.
    waited: u64,
    /// The latest deadline of the events that the thread may wait for.
    events_until: MonotonicTime,
    progress: Arc<Progress>,
}

impl<C: Copier> QueuedStream<C> {
    pub(crate) fn new(copier: C, options: QueueOptions) -> Self {
        Self {
            options,
            copier: Arc::new(Mutex::new(copier)),
            feed: None,
            submitted: 0,
            waited: 0,
            events_until: MonotonicTime::default(),
            progress: Arc::default(),
        }
    }

    /// Passes a task to the stream's thread. Returns a refused task with the reason.
    fn give(&mut self, task: Task) -> Result<(), (Task, Error)> {
        let feed = match &mut self.feed {
            Some(feed) => feed,
            none => match thread::start(
                self.options.queue,
                Arc::clone(&self.copier),
                Arc::clone(&self.progress),
            ) {
                Ok(feed) => none.insert(feed),
                Err(error) => return Err((task, error)),
            },
        };
        match feed.try_push(task) {
            Ok(()) => {
                self.submitted += 1;
                Ok(())
            }
            Err(PushError::Full(task)) => {
                let busy = Error::new(ErrorKind::Busy, "the queue of the stream is full")
                    .with("queue", self.options.queue);
                Err((task, busy))
            }
            Err(refused) => Err((
                refused.into_inner(),
                Error::internal("the thread of a stream has ended"),
            )),
        }
    }

    /// True if no submitted work is left.
    fn is_idle(&self) -> bool {
        // Acquire: the caller's next operation sees the thread's writes before its count.
        self.waited == self.submitted
            || self.progress.ended.load(Ordering::Acquire) == self.submitted
    }

    /// Starts a task, or reports the reason of a failure to its owner.
    fn start(&mut self, task: Task) {
        if let Err((task, error)) = self.give(task) {
            task.refuse(error);
        }
    }

    /// Waits for earlier work before a synchronous copy.
    fn drain(&mut self) -> Result<()> {
        if !self.is_idle() {
            let drained = self.options.clock.now().after(self.options.drain);
            self.synchronize(Some(drained.max(self.events_until)))?;
        }
        self.progress.check()
    }
}

impl<C: Copier> Stream for QueuedStream<C> {
    fn batch(&mut self, pairs: &[(DeviceSpan, DeviceSpan)]) -> Result<()> {
        self.drain()?;
        self.copier.lock().batch(pairs)
    }

    fn gather(&mut self, src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()> {
        self.drain()?;
        self.copier.lock().gather(src, dst, landed)
    }

    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        self.drain()?;
        self.copier.lock().scatter(src, dst)
    }

    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
        self.drain()?;
        self.copier.lock().transfer(direction, pairs)
    }

    fn transfer_async(
        &mut self,
        direction: Direction,
        pairs: Vec<(DeviceSpan, HostSpan)>,
        done: CopyDone,
    ) -> Result<()> {
        let task = Task::Transfer {
            direction,
            pairs,
            done,
        };
        self.give(task).map_err(|(_, error)| error)
    }

    fn batch_async(&mut self, pairs: Vec<(DeviceSpan, DeviceSpan)>, done: CopyDone) {
        self.start(Task::Batch { pairs, done });
    }

    fn gather_async(&mut self, src: Vec<Piece>, dst: HostBuf, done: HostDone) {
        self.start(Task::Gather { src, dst, done });
    }

    fn scatter_async(&mut self, src: HostBuf, dst: Vec<Piece>, done: HostDone) {
        self.start(Task::Scatter { src, dst, done });
    }

    fn callback(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.give(Task::Call(call)).map_err(|(_, error)| error)
    }

    fn record(&mut self) -> Result<Arc<dyn Event>> {
        let event = HostEvent::new(Arc::clone(&self.options.clock));
        if self.is_idle() {
            event.record();
        } else {
            self.give(Task::Record(Arc::clone(&event)))
                .map_err(|(_, error)| error)?;
        }
        Ok(event)
    }

    fn wait_event(&mut self, event: Arc<dyn Event>, deadline: MonotonicTime) -> Result<()> {
        if event.done() {
            return Ok(());
        }
        self.events_until = self.events_until.max(deadline);
        self.give(Task::Wait(event, deadline))
            .map_err(|(_, error)| error)
    }

    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()> {
        let event = HostEvent::new(Arc::clone(&self.options.clock));
        // The queue may be full of the work to wait for: then the marker also waits for its place.
        let Some(feed) = &mut self.feed else {
            return Ok(());
        };
        feed.push(
            Task::Record(Arc::clone(&event)),
            &*self.options.clock,
            deadline,
        )
        .map_err(|e| Error::from(e).with("stream", "synchronize"))?;
        self.submitted += 1;
        event.wait(deadline)?;
        self.waited = self.submitted;
        Ok(())
    }
}
