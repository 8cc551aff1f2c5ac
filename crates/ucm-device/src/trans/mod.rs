//! Copies by address: streams whose copies need no slot, and buffers from pools. The basis of
//! Python's `ucm.trans`.
//!
//! ```
//! use ucm_device::trans::{Copies, MemoryKind, Pools, Sides, pairs};
//! use ucm_device::{Direction, Transfer, open_device};
//! use ucm_infra::SystemClock;
//!
//! let device = open_device("host", Transfer::Auto, SystemClock::shared()).unwrap();
//! let pools = Pools::new(device.clone(), SystemClock::shared());
//! pools.fill(MemoryKind::Device, 4096, 2).unwrap();
//! let page = pools.get(MemoryKind::Device, 4096, None).unwrap();
//! let host = [7u8; 4096];
//! let mut copies = Copies::new(device.make_stream().unwrap());
//! // SAFETY: both outlive the copy, and nothing else uses them during it.
//! let pair = unsafe { pairs(&[page.address()], Sides::Each(&[host.as_ptr() as u64]), 4096) };
//! copies.transfer(Direction::ToDevice, &pair.unwrap()).unwrap();
//! ```

mod addresses;
mod copies;
mod pools;

pub use addresses::{Sides, addresses_at, pairs};
pub use copies::Copies;
pub use pools::{Buffer, MemoryKind, Pools};
