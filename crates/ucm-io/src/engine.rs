//! The seam between backends and the way bytes reach files.

use std::path::PathBuf;
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

    /// How many operations of a lane run at once, as far as is known: by this callers divide what they ask for.
    fn width(&self, _lane: usize) -> usize {
        1
    }

    /// Closes the descriptors that are kept ([`IoOp::ReadInto`]) of these files, which are gone, and with `unused` also
    /// those that were not used since this was last asked. Never blocks: the engine's threads close them.
    fn close_kept(&self, _gone: &[PathBuf], _unused: bool) {}

    /// Descriptors kept open now.
    fn kept(&self) -> usize {
        0
    }

    /// Operations reported as timed out whose system call has not returned yet; each still owns its buffer.
    fn stuck(&self) -> usize;

    /// How many workers that is, by which a breaker judges: an engine that has several places for operations where a
    /// pool has one thread counts as many stuck places as one.
    fn lost_workers(&self) -> usize {
        self.stuck()
    }

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
