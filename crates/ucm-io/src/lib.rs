//! How bytes reach files: the engine that does operations and the threads that it works on.
//!
//! [`IoEngine`] does one operation on the thread that calls; [`PsyncEngine`] with plain system
//! calls, or what moves slots through the rings of 3FS. [`IoPool`]
//! has the threads, and bounds how long anybody waits for them: a job is straight-line code there,
//! which does to files what its [`IoJob`] has a method for. The twin that fails by script in tests
//! is in `ucm-testkit`.

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
pub use job::IoJob;
pub use op::{FileMeta, Finish, MAX_LIST, Publish, Read, ReadMode, SpaceInfo, StillWanted};
pub use policy::use_batch_policy;
pub use pool::{IoOptions, IoPool, Pending};
pub use probe::{DirectAlign, FsType, Probe};
pub use process::Process;
pub use psync::PsyncEngine;
pub use quiet::QuietSha256;
pub use usrbio::UsrbioOptions;
