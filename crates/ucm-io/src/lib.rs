//! How bytes reach files: the I/O engine seam, its two engines and their fault-injecting twin.
//!
//! [`IoEngine`] is what a backend sees: operations that own their buffer, each answered exactly once. [`PsyncEngine`]
//! runs them as plain system calls on a pool of threads; [`UringEngine`] gives reads and publishes on local file systems
//! to the kernel many at once; [`ChosenEngine`] is the one or the other, by what a root lies on; [`FaultyEngine`] stands
//! before any engine in tests and makes it fail, stall, tear and lie by script.

mod append;
mod choice;
mod dirty;
mod engine;
mod fault;
mod file;
mod into;
mod kept;
mod meta;
mod op;
mod probe;
mod process;
mod psync;
mod quiet;
mod sys;
mod uring;
mod window;

pub use choice::{ChosenEngine, IoChoice};
pub use engine::{Done, IoEngine};
pub use fault::{Fault, FaultyEngine, Gate, Rule, RuleId, Seen, Tail, errno};
pub use op::{FileMeta, IoBuf, IoDone, IoOp, MAX_LIST, OpKind, ReadMode, SpaceInfo};
pub use probe::{DirectAlign, FsType, Probe};
pub use process::Process;
pub use psync::{PsyncEngine, PsyncOptions};
pub use quiet::QuietSha256;
pub use uring::{UringEngine, UringOptions, UringStats};
