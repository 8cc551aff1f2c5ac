//! The memory of KV: devices, streams, the host arena and its slots.
//!
//! `Device` hands out streams and arenas; a `Stream` moves bytes between device pieces
//! ([`DeviceSpan`]) and slots of host memory. A [`SharedRegion`] is memory that other processes
//! read. [`HostDevice`] is the platform of vLLM on a CPU, a real one and not a mock.

mod accelerator;
mod arena;
mod copy;
mod crc;
mod device;
mod devices;
mod fork;
mod host;
mod kv;
mod machine;
mod memory;
mod numa;
mod queued;
mod region;
mod slots;
mod span;
pub mod trans;
mod transfer;

pub use arena::{ArenaOptions, HostArena, HugePages, Paging};
pub use crc::crc32c;
pub use device::{Copied, CopyDone, Device, Event, Stream};
pub use devices::{DEFAULT_DEVICE, PLATFORMS, Platform, open_device};
pub use fork::OwnFd;
pub use host::HostDevice;
pub use kv::{KvLayout, KvPiece};
pub use machine::MachineMemory;
pub use memory::DeviceMemory;
pub use queued::QueueOptions;
pub use region::{
    Pinned, RegionOptions, RegionView, Registry, Scan, SharedRegion, Wanted, WriteLease,
};
pub use slots::{Slot, SlotPool};
pub use span::{DeviceSpan, HostSpan, Piece, Span};
pub use transfer::{Direction, Transfer};
