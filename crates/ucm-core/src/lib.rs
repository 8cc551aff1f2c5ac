//! The words of ucm: identifiers, sizes, errors, reasons, hashing and checksums.
//!
//! No I/O, no threads, no `unsafe`. Every other crate speaks in these terms.
#![forbid(unsafe_code)]

mod error;
mod geometry;
mod id;
pub mod limits;
mod miss;

pub use error::{Error, ErrorKind, Result};
pub use geometry::{Geometry, LAYER_ALIGN, PAGE, round_up};
pub use id::{BlockId, Part, PartMask};
pub use miss::MissReason;
