//! The device of an engine, and its streams: all pieces of a block are one transfer.

use std::any::Any;
use std::sync::Arc;

use ucm_core::Result;
use ucm_core::sync::Mutex;
use ucm_device::{Device, Event, SlotPool, Stream};
use ucm_infra::{MonotonicTime, WorkerPool};

/// The device of an engine, the memory on the way to it, and the threads that copy from it.
pub(super) struct DeviceSide {
    pub(super) streams: Streams,
    pub(super) slots: Arc<SlotPool>,
    /// How many of these are never given to dumps.
    pub(super) reserved_slots: usize,
    pub(super) copies: Arc<WorkerPool>,
    /// The device's mappings of the memory that tiers lend records from, until the engine ends.
    pub(super) _attached: Vec<Arc<dyn Any + Send + Sync>>,
}

/// The device, and its idle streams: as many as there were transfers at a time, at most as many as
/// threads that make them. The memory that they take on the device is bounded there.
pub(super) struct Streams {
    device: Arc<dyn Device>,
    idle: Mutex<Vec<Box<dyn Stream>>>,
}

impl Streams {
    pub(super) fn of(device: Arc<dyn Device>) -> Self {
        Self {
            device,
            idle: Mutex::default(),
        }
    }

    pub(super) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Runs a transfer on a stream of its own, once the events of `ready` are done; `Timeout` where
    /// they are not by `deadline`.
    pub(super) fn with(
        &self,
        ready: &[Arc<dyn Event>],
        deadline: MonotonicTime,
        transfer: impl FnOnce(&mut dyn Stream) -> Result<()>,
    ) -> Result<()> {
        // This thread waits and not the stream: work given to a device cannot be cancelled at a
        // deadline, when the caller may drop its events.
        for event in ready {
            event.wait(Some(deadline))?;
        }
        let idle = self.idle.lock().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => self.device.make_stream()?,
        };
        transfer(&mut *stream)?; // a stream that failed is not used again
        self.idle.lock().push(stream);
        Ok(())
    }
}
