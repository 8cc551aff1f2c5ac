//! The basic types of ucm: identifiers, sizes, errors, reasons, hashing and checksums.
//!
//! No I/O, no threads, no `unsafe`. Every other crate uses these types.
#![forbid(unsafe_code)]

mod crc;
mod dtype;
mod error;
mod geometry;
mod hasher;
mod id;
mod identity;
pub mod limits;
mod miss;
mod named;
pub mod sync;
mod units;

pub use crc::{CRC_PIECE, Crc32c, crc32c};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use geometry::{Geometry, LAYER_ALIGN, PAGE, round_up};
pub use hasher::{BlockHasher, ExtraKey, HashMethod};
pub use id::{BlockId, IdMask, Part};
pub use identity::{IDENTITY_KEYS, Identity, namespace_of};
pub use miss::MissReason;
pub use units::{from_hex, hex, in_units};
