//! The host platform: KV in ordinary memory of this process, as vLLM keeps it on a CPU.
//!
//! Synchronous copies run on the caller's thread. A stream's first asynchronous operation starts a thread of its own,
//! fed by a bounded ring.

mod event;
mod thread;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, PushError, RingProducer, SystemClock};

use crate::arena::{ArenaOptions, HostArena};
use crate::copy;
use crate::device::{CopyDone, Device, Event, HostDone, Landed, Stream};
use crate::slots::HostBuf;
use crate::span::{DeviceSpan, Piece};
use event::HostEvent;
use thread::{Progress, Task};

/// How a [`HostDevice`] is set up.
#[derive(Clone, Debug)]
pub struct HostDeviceOptions {
    /// Most operations that wait in one stream; one more is refused with `Busy`.
    pub queue: usize,
    /// How long a synchronous copy waits for asynchronous ones before it on the same stream.
    pub drain: Duration,
    /// What waits are measured on.
    pub clock: Arc<dyn Clock>,
}

impl Default for HostDeviceOptions {
    fn default() -> Self {
        Self {
            queue: 1024,
            drain: Duration::from_secs(30),
            clock: Arc::new(SystemClock),
        }
    }
}

/// The memory of this process as a device.
#[derive(Clone, Debug, Default)]
pub struct HostDevice {
    options: HostDeviceOptions,
}

impl HostDevice {
    /// The host with its usual settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// The host with these settings; `InvalidInput` for a queue of length 0.
    pub fn with(options: HostDeviceOptions) -> Result<Self> {
        if options.queue == 0 {
            return Err(Error::invalid(
                "the queue of a stream has room for at least one operation",
            ));
        }
        Ok(Self { options })
    }
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        "host"
    }

    fn make_stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(HostStream {
            options: self.options.clone(),
            feed: None,
            submitted: 0,
            waited: 0,
            events_until: MonotonicTime::default(),
            progress: Arc::default(),
        }))
    }

    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>> {
        HostArena::with(bytes, options)
    }

    fn make_event(&self) -> Result<Arc<dyn Event>> {
        Ok(HostEvent::new(Arc::clone(&self.options.clock)))
    }
}

/// A stream of the host. When it is dropped its thread finishes what was submitted, calls back and ends; nobody
/// waits for that.
struct HostStream {
    options: HostDeviceOptions,
    /// To the stream's thread, once there is one.
    feed: Option<RingProducer<Task>>,
    submitted: u64,
    /// How many of them a wait has seen the end of. The thread counts a task after its event is set, so that a count
    /// read right after a wait may still be one short.
    waited: u64,
    /// When the last event that the thread may wait for is done, or late.
    events_until: MonotonicTime,
    progress: Arc<Progress>,
}

impl HostStream {
    /// Hands a task to the stream's thread; a refused task comes back with the reason.
    fn give(&mut self, task: Task) -> Result<(), (Task, Error)> {
        let feed = match &mut self.feed {
            Some(feed) => feed,
            none => match thread::start(self.options.queue, Arc::clone(&self.progress)) {
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

    /// Whether nothing submitted is left to do.
    fn is_idle(&self) -> bool {
        // Acquire: what the thread wrote before it counted is seen by what the caller does next.
        self.waited == self.submitted || self.progress.ended.load(Ordering::Acquire) == self.submitted
    }

    /// Starts a task, or tells its owner why not.
    fn start(&mut self, task: Task) {
        if let Err((task, error)) = self.give(task) {
            task.refuse(error);
        }
    }

    /// Lets what was submitted before a synchronous copy end first.
    fn drain(&mut self) -> Result<()> {
        if !self.is_idle() {
            let drained = self.options.clock.now().after(self.options.drain);
            self.synchronize(Some(drained.max(self.events_until)))?;
        }
        self.progress.check()
    }
}

impl Stream for HostStream {
    fn batch(&mut self, pairs: &[(DeviceSpan, DeviceSpan)]) -> Result<()> {
        self.drain()?;
        copy::batch(pairs)
    }

    fn gather(&mut self, src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()> {
        self.drain()?;
        copy::gather(src, dst, landed)
    }

    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        self.drain()?;
        copy::scatter(src, dst)
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
        self.give(Task::Wait(event, deadline)).map_err(|(_, error)| error)
    }

    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()> {
        let event = HostEvent::new(Arc::clone(&self.options.clock));
        // The queue may be full of what we want to wait for: then the mark waits for its place too.
        let Some(feed) = &mut self.feed else {
            return Ok(());
        };
        feed.push(Task::Record(Arc::clone(&event)), &*self.options.clock, deadline)
            .map_err(|e| Error::from(e).with("stream", "host"))?;
        self.submitted += 1;
        event.wait(deadline)?;
        self.waited = self.submitted;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
