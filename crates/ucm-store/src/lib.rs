//! What the product is: the engine over its tiers.
//!
//! A block's way: device → (gather, checksum) → slot → a [`Backend`](ucm_media::backend::Backend) →
//! published record; and back: record → slot → verified → (scatter) → device. See `docs/format.md`
//! for the bytes and `ARCHITECTURE.md` for the house.
#![forbid(unsafe_code)]

pub mod breaker;
pub mod builder;
pub mod engine;
mod records;
mod rejected;
pub mod stats;
pub mod tiers;
