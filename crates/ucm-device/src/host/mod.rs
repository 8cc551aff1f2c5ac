//! The host platform: KV in ordinary memory of this process, as vLLM keeps it on a CPU.

use std::any::Any;
use std::sync::Arc;

use ucm_core::{Error, Result};

use crate::arena::{ArenaOptions, HostArena};
use crate::copy;
use crate::device::{Device, Event, Landed, Stream};
use crate::memory::DeviceMemory;
use crate::queued::{Copier, HostEvent, QueueOptions, QueuedStream};
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::{Direction, Transfer};

/// The memory of this process as a device.
#[derive(Clone, Debug, Default)]
pub struct HostDevice {
    options: QueueOptions,
}

impl HostDevice {
    /// The host with default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// The host with these settings; `InvalidInput` for a queue of length 0.
    pub fn with(options: QueueOptions) -> Result<Self> {
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

    fn reaches_all_memory(&self) -> bool {
        true
    }

    fn make_stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(QueuedStream::new(
            HostCopier,
            self.options.clone(),
        )))
    }

    fn make_stream_by(&self, _transfer: Transfer) -> Result<Box<dyn Stream>> {
        self.make_stream()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        let arena = HostArena::new(bytes)?;
        Ok(DeviceMemory::new(
            arena.at(0).expose_provenance() as u64,
            bytes,
            arena,
        ))
    }

    /// The processor reaches all memory directly.
    fn register(&self, host: HostSpan) -> Result<Box<dyn Any + Send + Sync>> {
        copy::check_registered(host)?;
        Ok(Box::new(()))
    }

    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>> {
        HostArena::with(bytes, options)
    }

    fn make_event(&self) -> Result<Arc<dyn Event>> {
        Ok(HostEvent::new(Arc::clone(&self.options.clock)))
    }
}

/// Copies by the processor.
struct HostCopier;

impl Copier for HostCopier {
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()> {
        copy::gather(src, dst, landed)
    }

    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        copy::scatter(src, dst)
    }

    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
        copy::transfer(direction, pairs)
    }
}

#[cfg(test)]
mod tests;
