//! The seam between backends and the way bytes reach files.

use std::time::Duration;

use ucm_core::Result;
use ucm_infra::Mono;

use crate::op::{IoDone, IoOp};

/// What is called with the answer of an operation.
pub type Done = Box<dyn FnOnce(Result<IoDone>) + Send>;

/// Runs file operations. Nothing here blocks the caller on a file system.
pub trait IoEngine: Send + Sync {
    /// Starts `op` in a lane (0 load, 1 prefetch and lookup, 2 dump, 3 space). `done` is called exactly once, on any
    /// thread, possibly before this returns: with the answer; with `Busy` when the lane is full (nothing was started);
    /// with `Timeout` when `deadline` passed first; with `Closed` after shutdown; else with what went wrong. After any
    /// error the buffer is dropped once no system call can touch it any more, which for a stuck call is when that call
    /// returns.
    fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: Done);

    /// Operations reported as timed out whose system call has not returned yet; each still owns its buffer.
    fn stuck(&self) -> usize;

    /// Name in logs and `doctor`.
    fn name(&self) -> &'static str;

    /// What it is and why, in words for the log.
    fn describe(&self) -> String {
        format!("{} engine", self.name())
    }

    /// What the configuration asks for and could not be had, for a warning in the log; only once.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Finishes what is queued for at most `drain`, then fails the rest with `Closed`. Never waits for a stuck call.
    fn shutdown(&self, drain: Duration);
}
