//! A stream that reports failures of its asynchronous copies when it is synchronized.

use std::any::Any;
use std::sync::Arc;

use ucm_core::sync::Mutex;
use ucm_core::{Error, Result};
use ucm_infra::MonotonicTime;

use crate::device::Stream;
use crate::span::{DeviceSpan, HostSpan};
use crate::transfer::Direction;

/// Copies in order, between a device and memory of this process.
pub struct Copies {
    stream: Box<dyn Stream>,
    /// The first unreported failure of an asynchronous copy.
    failed: Arc<Mutex<Option<Error>>>,
}

impl Copies {
    /// Copies over a stream of their own.
    pub fn new(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            failed: Arc::default(),
        }
    }

    /// Copies, and returns when the bytes have moved, after all earlier work. Errors as of
    /// [`Stream::transfer`].
    pub fn transfer(
        &mut self,
        direction: Direction,
        pairs: &[(DeviceSpan, HostSpan)],
    ) -> Result<()> {
        self.stream.transfer(direction, pairs)
    }

    /// Begins to copy; `kept` is dropped when that is over. `Busy` if the queue is full;
    /// [`Copies::synchronize`] and [`Copies::callback`] report the result of the copy.
    pub fn transfer_async(
        &mut self,
        direction: Direction,
        pairs: Vec<(DeviceSpan, HostSpan)>,
        kept: impl Any + Send,
    ) -> Result<()> {
        let failed = Arc::clone(&self.failed);
        let done = move |result: Result<()>| {
            if let Err(error) = result {
                failed.lock().get_or_insert(error);
            }
            drop(kept);
        };
        self.stream.transfer_async(direction, pairs, Box::new(done))
    }

    /// Calls `call` on the stream's thread when all earlier work has ended, with true if no copy
    /// has failed since the last synchronization. It must not block. `Busy` if the queue is full;
    /// then it is dropped without a call.
    pub fn callback(&mut self, call: impl FnOnce(bool) + Send + 'static) -> Result<()> {
        let failed = Arc::clone(&self.failed);
        self.stream.callback(Box::new(move || {
            let well = failed.lock().is_none();
            call(well);
        }))
    }

    /// Waits until all submitted work has ended, and returns the first failure of an asynchronous
    /// copy since the last call; `Timeout` at `deadline` (`None`: for ever).
    pub fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()> {
        self.stream.synchronize(deadline)?;
        self.failed.lock().take().map_or(Ok(()), Err)
    }
}
