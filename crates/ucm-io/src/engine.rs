//! The seam between a backend and files: what does one operation.

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::Result;

use crate::fd_cache::KeptFile;
use crate::op::{IoDone, IoOp};

/// Whether the result of an operation is still wanted; asked between its steps and before what cannot be undone.
pub type StillWanted<'a> = &'a dyn Fn() -> bool;

/// Which of the descriptors that are kept ([`IoJob::read_into`](crate::IoJob::read_into)) are closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close<'a> {
    /// Those of these files, which are gone.
    Gone(&'a [PathBuf]),
    /// Those that were not used since this was last asked.
    Unused,
    /// All.
    All,
}

/// Descriptors that nobody finds any more. They are closed when this is dropped, which may hang.
#[derive(Default)]
pub struct Closed(pub(crate) Vec<Arc<KeptFile>>);

/// Does operations on files, each to its end on the thread that calls.
pub trait IoEngine: Send + Sync {
    /// Does `op` for whoever asks in that lane (0 load, 1 prefetch and lookup, 2 dump, 3 space). What is no longer wanted
    /// gets no name and is removed nowhere: it fails with `Timeout`.
    fn run(&self, lane: usize, op: &mut IoOp<'_>, wanted: StillWanted<'_>) -> Result<IoDone>;

    /// Keeps these descriptors no longer. Never blocks.
    fn close(&self, _which: Close<'_>) -> Closed {
        Closed::default()
    }

    /// Descriptors kept open now.
    fn kept(&self) -> usize {
        0
    }
}
