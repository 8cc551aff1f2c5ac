//! The concurrency parts of ucm: everything that passes work or signals between threads.
//!
//! * [`Clock`] ([`SystemClock`]; in tests `ManualClock`): every wait in ucm sleeps on one, so that
//!   tests control time;
//! * [`Notify`]: the one way in which a thread sleeps until it is signalled; [`Clock::sleep`] adds
//!   the deadline;
//! * [`WorkerPool`]: named threads with lanes, bounded queues, deadlines and a monitor that writes
//!   stuck threads off;
//! * [`begin_thread`]: starts a thread of ucm, on the processors of [`run_threads_on`], with the
//!   hooks of [`threads_begin_with`];
//! * [`Completion`]: one result for many waiters;
//! * [`SpscRing`]: a bounded ring between two threads, whose ends spin, yield, then park;
//! * [`IdSet`]: a concurrent set;
//! * [`log`]: keeps the core's log records until Python takes them;
//! * `Runtime` (feature `runtime`): the one tokio runtime of the process, and how threads wait for
//!   its futures;
//! * [`random_u64`]: a random number that forked processes do not share;
//! * [`seqlock`]: bytes that one process writes while others read them, without a lock;
//! * [`LoadState`]: the states of the blocks of one load, so that no byte is written late and the
//!   end is reported once.
//!
//! # Concurrency models
//!
//! Loom checks the hand-written atomics: it runs every interleaving of a small model. The locks and
//! atomics of [`Notify`], `ManualClock`, [`Completion`], [`LoadState`], [`seqlock`] and the ends
//! of the ring come from one shim module, which `--cfg loom` switches to loom's types. In that
//! build a stand-in with the same memory order replaces the ring's queue (rtrb). The worker pool is
//! not part of that build: its jobs pass through crossbeam's queue, and one lock protects the rest
//! of its state. A property test runs random histories of the pool under a `ManualClock`; another
//! test submits from many threads, also during a shutdown.
//!
//! The models run for about 15 seconds. Give them a target directory of their own; otherwise every
//! switch rebuilds:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p ucm-infra --test loom
//! ```
#![forbid(unsafe_code)]

mod clock;
mod completion;
#[cfg(not(loom))]
mod lanes;
mod load_state;
#[cfg(not(loom))]
pub mod log;
mod notify;
#[cfg(not(loom))]
mod per_process;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
mod random;
mod ring;
#[cfg(all(feature = "runtime", not(loom)))]
mod runtime;
pub mod seqlock;
mod sync;
#[cfg(any(test, loom, feature = "test-utils"))]
mod tests_clock;
#[cfg(not(loom))]
mod threads;
mod ticket;

pub use clock::{Clock, MonotonicTime, SystemClock};
pub use completion::Completion;
#[cfg(not(loom))]
pub use lanes::{LANE_DUMP, LANE_LOAD, LANE_LOOKUP, LANE_SPACE};
pub use load_state::{BlockState, LoadState};
pub use notify::Notify;
/// A set that many threads use at once, whose readers never wait.
pub use papaya::HashSet as IdSet;
#[cfg(not(loom))]
pub use pool::{
    Lane, LaneStats, MAX_LANES, MAX_QUEUE, MAX_WORKERS, PoolStats, Refused, WorkerPool,
    WorkerPoolBuilder,
};
#[cfg(not(loom))]
pub use random::random_u64;
pub use ring::{PushError, RingConsumer, RingProducer, SpscRing};
#[cfg(all(feature = "runtime", not(loom)))]
pub use runtime::Runtime;
#[cfg(any(test, loom, feature = "test-utils"))]
pub use tests_clock::ManualClock;
#[cfg(not(loom))]
pub use threads::{begin_thread, is_own_thread, run_threads_on, threads_begin_with};
pub use ticket::{Ticket, Visit};
