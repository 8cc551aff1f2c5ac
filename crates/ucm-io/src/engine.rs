//! The seam between a backend and files: what does one operation.

use std::path::PathBuf;

use ucm_core::Result;

use crate::op::{IoDone, IoOp};

/// Whether the result of an operation is still wanted; asked between its steps and before what cannot be undone.
pub type StillWanted<'a> = &'a dyn Fn() -> bool;

/// Does operations on files, each to its end on the thread that calls.
pub trait IoEngine: Send + Sync {
    /// Does `op` for whoever asks in that lane (0 load, 1 prefetch and lookup, 2 dump, 3 space). What is no longer wanted
    /// has no effect any more: it fails with `Timeout`.
    fn run(&self, lane: usize, op: &mut IoOp<'_>, wanted: StillWanted<'_>) -> Result<IoDone>;

    /// Closes the descriptors that are kept ([`IoJob::read_into`](crate::IoJob::read_into)) of these files, which are gone, and with `unused` also
    /// those that were not used since this was last asked.
    fn close_kept(&self, _gone: &[PathBuf], _unused: bool) {}

    /// Closes every descriptor that is kept.
    fn close_all(&self) {}

    /// Descriptors kept open now.
    fn kept(&self) -> usize {
        0
    }
}
