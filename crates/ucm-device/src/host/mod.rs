//! The host platform: KV in ordinary memory of this process, as vLLM keeps it on a CPU.
#![allow(
    unsafe_code,
    reason = "reads and writes the memory that device spans name; their maker vouched for it"
)]

use std::any::Any;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use ucm_core::Result;

use crate::arena::{ArenaOptions, HostArena};
use crate::copy::{check_host_pairs, check_pieces, check_registered};
use crate::device::{Copied, Device, Event, Stream};
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
    /// The host with these settings.
    pub fn with(options: QueueOptions) -> Self {
        Self { options }
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
        let options = self.options.clone();
        Ok(Box::new(QueuedStream::new(HostCopier, options)))
    }

    fn make_stream_by(&self, _transfer: Transfer) -> Result<Box<dyn Stream>> {
        self.make_stream()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        let arena = HostArena::new(bytes)?;
        let address = arena.at(0).expose_provenance() as u64;
        Ok(DeviceMemory::new(address, bytes, arena))
    }

    /// The processor reaches all memory directly.
    fn register(&self, host: HostSpan) -> Result<Box<dyn Any + Send + Sync>> {
        check_registered(host)?;
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
    /// Copies device pieces into the host buffer and reports each at once.
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], copied: &mut Copied<'_>) -> Result<()> {
        check_pieces(src, dst.len())?;
        for (piece, count) in src.iter().zip(1..) {
            let to = &mut dst[piece.at..piece.at + piece.span.len() as usize];
            // SAFETY: the maker of the span promised that it can be read until this operation ends;
            // `to` is a slice of exactly that length; `copy` allows overlap, should the span name
            // memory of the same arena.
            unsafe {
                let from = with_exposed_provenance::<u8>(piece.span.addr() as usize);
                std::ptr::copy(from, to.as_mut_ptr(), to.len());
            }
            copied(dst, count);
        }
        Ok(())
    }

    /// Copies the host buffer into device pieces.
    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        check_pieces(dst, src.len())?;
        for piece in dst {
            let from = &src[piece.at..piece.at + piece.span.len() as usize];
            // SAFETY: the maker of the span promised that it can be written until this operation
            // ends and that no reference to it is in use; `from` has exactly its length.
            unsafe {
                let to = with_exposed_provenance_mut::<u8>(piece.span.addr() as usize);
                std::ptr::copy(from.as_ptr(), to, from.len());
            }
        }
        Ok(())
    }

    /// Copies pairs of device and host in one direction.
    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
        check_host_pairs(pairs)?;
        for (device, host) in pairs {
            let (from, to) = match direction {
                Direction::ToDevice => (host.addr(), device.addr()),
                Direction::ToHost => (device.addr(), host.addr()),
            };
            // SAFETY: the makers of both spans promised that they can be read and written until
            // this operation ends, without interference; the lengths are equal; `copy` allows
            // overlap, should both lie in one buffer.
            unsafe {
                let from = with_exposed_provenance::<u8>(from as usize);
                let to = with_exposed_provenance_mut::<u8>(to as usize);
                std::ptr::copy(from, to, device.len() as usize);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
