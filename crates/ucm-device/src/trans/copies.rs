//! A stream whose asynchronous copies tell of their failures when it is synchronized.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::{Error, Result};
use ucm_infra::MonotonicTime;

use crate::device::Stream;
use crate::span::{DeviceSpan, HostSpan};
use crate::transfer::Direction;

/// Copies in order, between a device and places of this process's memory.
pub struct Copies {
    stream: Box<dyn Stream>,
    /// The first failure of an asynchronous copy that no one was told of yet.
    failed: Arc<Mutex<Option<Error>>>,
}

impl Copies {
    /// Over a stream of its own.
    pub fn new(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            failed: Arc::default(),
        }
    }

    /// Copies, and returns when the bytes have moved; what was submitted before ends first. Errors
    /// as of [`Stream::transfer`].
    pub fn transfer(
        &mut self,
        direction: Direction,
        pairs: &[(DeviceSpan, HostSpan)],
    ) -> Result<()> {
        self.stream.transfer(direction, pairs)
    }

    /// Begins to copy; `kept` is let go of when that is over. `Busy` when the queue is full; how
    /// the copy ended is told by [`Copies::synchronize`] and [`Copies::callback`].
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

    /// Calls `call` on the stream's thread when everything submitted before has ended, with whether
    /// no copy has failed since the stream was last synchronized. It must not block. `Busy` when
    /// the queue is full; then it is dropped without a call.
    pub fn callback(&mut self, call: impl FnOnce(bool) + Send + 'static) -> Result<()> {
        let failed = Arc::clone(&self.failed);
        self.stream.callback(Box::new(move || {
            let well = failed.lock().is_none();
            call(well);
        }))
    }

    /// Waits until everything submitted has ended, and gives the first failure of an asynchronous
    /// copy since the last time; `Timeout` when `deadline` comes first (`None`: for ever).
    pub fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()> {
        self.stream.synchronize(deadline)?;
        self.failed.lock().take().map_or(Ok(()), Err)
    }
}

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copies")
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}
