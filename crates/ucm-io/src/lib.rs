//! File I/O: the engine that executes operations and the threads on which it runs.
//!
//! [`IoEngine`] executes one operation on the calling thread. [`PsyncEngine`] does so by plain
//! system calls, and by the rings of 3FS for slots. [`IoPool`] has the threads and bounds the time
//! that a caller waits for them. A job is straight-line code there; the methods of its [`IoJob`]
//! are the file operations. The fault-injecting twin for tests is in `ucm-testkit`.

mod append;
mod below;
mod bounce_buffer;
mod engine;
mod fd_cache;
mod file;
mod job;
mod meta;
mod op;
mod policy;
mod pool;
mod probe;
mod process;
mod psync;
mod quiet;
mod sys;
mod usrbio;
mod vectored;
mod writeback;

/// The error number of a read-only file system, the same on every Linux.
pub const EROFS: i32 = 30;
/// The error number of a symbolic link that was not followed, the same on every Linux.
pub const ELOOP: i32 = 40;

pub use engine::{Caller, Close, Closed, IoEngine};
pub use job::{IoJob, JobWatch};
pub use op::{
    FileMeta, Finish, MAX_LIST, Publish, Read, ReadMode, ReadPiece, SpaceInfo, StillWanted,
};
pub use policy::use_batch_policy;
pub use pool::{IoOptions, IoPool, Pending};
pub use probe::{DirectAlign, FsType, Probe};
pub use process::Process;
pub use psync::PsyncEngine;
pub use quiet::QuietSha256;
pub use usrbio::UsrbioOptions;
