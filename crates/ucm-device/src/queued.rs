//! Streams over any copier: synchronous copies run on the caller's thread. A stream's first
//! asynchronous operation starts a thread of its own, fed by a bounded ring, which makes the same
//! copies in order. So a device implements only its copies; queues, order, callbacks and events are
//! common to all.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{
    Clock, Completion, MonotonicTime, PushError, RingProducer, SpscRing, SystemClock, begin_thread,
};

use crate::device::{Copied, CopyDone, Event, Stream};
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::Direction;

/// The synchronous copies of a device: each has succeeded, or failed and ended, when its call
/// returns. They keep the contract of [`Stream`].
pub(crate) trait Copier: Send + 'static {
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], copied: &mut Copied<'_>) -> Result<()>;
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
        Self::on(Arc::new(SystemClock))
    }
}

impl QueueOptions {
    /// The default settings on this clock.
    pub(crate) fn on(clock: Arc<dyn Clock>) -> Self {
        Self {
            queue: 1024,
            drain: Duration::from_secs(30),
            clock,
        }
    }
}

/// An event that the host records.
pub(crate) struct HostEvent {
    reached: Arc<Completion<()>>,
    clock: Arc<dyn Clock>,
}

impl HostEvent {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            reached: Completion::new(),
            clock,
        })
    }
}

impl Event for HostEvent {
    fn done(&self) -> bool {
        self.reached.peek().is_some()
    }

    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()> {
        self.reached
            .wait(&*self.clock, deadline)
            .ok_or_else(|| Error::new(ErrorKind::Timeout, "the event was not done in time"))
    }

    fn record(&self) {
        self.reached.complete(());
    }
}

/// An operation that was submitted.
type Task = Box<dyn FnOnce() + Send>;

/// A stream over a copier. When it is dropped its thread finishes what was submitted, calls back
/// and ends, and the caller does not wait for that.
pub(crate) struct QueuedStream<C> {
    options: QueueOptions,
    /// Used by the thread or, when that is idle, by the caller.
    copier: Arc<Mutex<C>>,
    /// To the stream's thread, if it exists.
    feed: Option<RingProducer<Task>>,
    submitted: u64,
    /// How many of them a wait has seen the end of. The thread counts a task after it has run, so
    /// that a count read right after a wait may still be one short.
    waited: u64,
    /// Tasks that the thread has ended, callbacks included.
    ended: Arc<AtomicU64>,
}

impl<C: Copier> QueuedStream<C> {
    pub(crate) fn new(copier: C, options: QueueOptions) -> Self {
        Self {
            options,
            copier: Arc::new(Mutex::new(copier)),
            feed: None,
            submitted: 0,
            waited: 0,
            ended: Arc::default(),
        }
    }

    /// Hands a task to the stream's thread.
    fn give(&mut self, task: Task) -> Result<()> {
        let feed = match &mut self.feed {
            Some(feed) => feed,
            none => none.insert(start(self.options.queue, Arc::clone(&self.ended))?),
        };
        match feed.try_push(task) {
            Ok(()) => {
                self.submitted += 1;
                Ok(())
            }
            Err(PushError::Full(_)) => {
                let busy = Error::new(ErrorKind::Busy, "the queue of the stream is full");
                Err(busy.with("queue", self.options.queue))
            }
            Err(_) => Err(Error::internal("the thread of a stream has ended")),
        }
    }

    /// Waits for earlier work before a synchronous copy.
    fn drain(&mut self) -> Result<()> {
        // Acquire: the caller's next operation sees the thread's writes before its count.
        if self.waited == self.submitted || self.ended.load(Ordering::Acquire) == self.submitted {
            return Ok(());
        }
        let drained = self.options.clock.now().after(self.options.drain);
        self.synchronize(Some(drained))
    }
}

impl<C: Copier> Stream for QueuedStream<C> {
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], copied: &mut Copied<'_>) -> Result<()> {
        self.drain()?;
        self.copier.lock().gather(src, dst, copied)
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
        let copier = Arc::clone(&self.copier);
        self.give(Box::new(move || {
            let result = copier.lock().transfer(direction, &pairs);
            done(result);
        }))
    }

    fn callback(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.give(call)
    }

    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()> {
        // The queue may be full of the work to wait for: then the marker also waits for its place.
        let Some(feed) = &mut self.feed else {
            return Ok(());
        };
        let event = HostEvent::new(Arc::clone(&self.options.clock));
        let mark = Arc::clone(&event);
        feed.push(
            Box::new(move || mark.record()),
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

/// Starts a stream's thread, which runs what was submitted, in order; it ends when the ring is
/// closed and empty.
fn start(queue: usize, ended: Arc<AtomicU64>) -> Result<RingProducer<Task>> {
    let (feed, mut tasks) = SpscRing::bounded(queue)?;
    let serve = move || {
        // The real clock whatever the device has: this wait has no deadline, only news end it.
        tasks.run(&SystemClock, |task: Task| {
            // A panic of a callback is its owner's: the stream and the caller that waits for it go
            // on.
            let _ = catch_unwind(AssertUnwindSafe(task));
            ended.fetch_add(1, Ordering::Release);
        });
    };
    begin_thread("ucm-stream", serve)
        .map_err(|e| Error::from_io(e, "cannot start the thread of a stream"))?;
    Ok(feed)
}
