//! What the product is: records, backends and the one engine over them, space and health.
//!
//! A block's way: device → (gather, checksum) → slot → [`backend`] → published record; and back: record → slot →
//! verified → (scatter) → device. See `docs/format.md` for the bytes and `ARCHITECTURE.md` for the house.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod auto;
pub mod backend;
mod bytes;
#[cfg(feature = "compress")]
pub mod compress;
pub mod deviation;
pub mod engine;
pub mod events;
pub mod evidence;
pub mod health;
mod kind;
pub mod layout;
pub mod memory;
pub mod posix;
mod quarantine;
mod reading;
pub mod recency;
pub mod record;
pub mod registry;
mod root;
pub mod segment;
pub mod space;
mod stages;
pub mod stats;
pub mod tiers;
mod writing;

pub use ucm_infra::random_u64;

/// 128 random bits as 32 hex digits.
pub(crate) fn random_hex() -> String {
    format!("{:016x}{:016x}", random_u64(), random_u64())
}
