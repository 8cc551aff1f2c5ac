//! What keeps records: the media behind one trait, and the kinds there are.
//!
//! A [`backend::Backend`] moves named records between slots and one medium, and knows nothing of
//! other media or of engines. A medium is a directory of files ([`posix`]), one of the two shapes
//! `blobs` (named immutable bytes, which keep [`segment`]s) and [`values`] (a map from ids to
//! bytes), or [`memory`]. [`layout`] has the names below a root, [`quota`] the space that its
//! writers share. [`registry`] lists every kind by name, with its options and what makes it; a new
//! one is a file in `builtin/` and a line there, or a call of [`registry::register`] from another
//! crate.
#![forbid(unsafe_code)]

pub mod backend;
mod blobs;
mod builtin;
pub mod directory;
mod kind;
pub mod layout;
pub mod layout_kind;
pub mod lengths;
mod locally_visible;
pub mod memory;
#[cfg(feature = "network")]
mod network;
#[cfg(feature = "object")]
pub mod object;
mod pending_looks;
pub mod place;
pub mod posix;
pub mod quota;
pub mod recency;
#[cfg(feature = "redis")]
pub mod redis;
pub mod registry;
mod root;
mod root_layout;
pub mod scope;
pub mod secret_file;
pub mod segment;
mod shared;
pub mod spread;
mod turns;
pub mod values;

/// 128 random bits as 32 hex digits.
fn random_hex() -> String {
    let random = ucm_infra::random_u64;
    format!("{:016x}{:016x}", random(), random())
}
