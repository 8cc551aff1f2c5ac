//! The moving parts of ucm: everything that hands work or news from one thread to another.
//!
//! * [`Clock`] ([`SystemClock`], [`ManualClock`]): every wait in ucm sleeps on one, so that tests
//!   move time themselves;
//! * [`Notify`]: the one way a thread sleeps until there is news; [`Clock::sleep`] adds the
//!   deadline;
//! * [`WorkerPool`]: named threads with lanes, bounded queues, deadlines and a monitor that writes
//!   stuck threads off;
//! * [`begin_thread`]: how a thread of ucm begins, on processors that [`run_threads_on`] names,
//!   with what [`threads_begin_with`] names;
//! * [`Completion`]: one result, waited for by many;
//! * [`SpscRing`]: a bounded ring between two threads, whose ends spin, yield, then park;
//! * [`IdSet`]: a concurrent set;
//! * [`log`]: what the core logs, until somebody takes it to the log;
//! * `Runtime` (feature `runtime`): the one tokio runtime of the process, and how threads wait for
//!   what runs there;
//! * [`random_u64`]: a number that no other process has;
//! * [`seqlock`]: bytes that one process writes while others read them, without a lock;
//! * [`LoadState`]: the states of the blocks of one load, so that no byte arrives late and the end
//!   is told once.
//!
//! # Concurrency models
//!
//! What is written by hand here is checked by loom, which runs every interleaving of a small model.
//! The locks and atomics of [`Notify`], [`ManualClock`], [`Completion`], [`LoadState`], [`seqlock`]
//! and the ends of the ring come from one shim module, which `--cfg loom` switches to loom's; the
//! ring's queue itself (rtrb) is a stand-in of the same memory order there. The worker pool is not
//! part of that build: its jobs go through crossbeam's queue, and everything else of it is under
//! one lock. A property test runs random histories of it under a [`ManualClock`], and another test
//! submits from many threads, also while the pool is shut down.
//!
//! The models run for some 15 seconds. They want a target directory of their own, or every switch
//! builds anew:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p ucm-infra --test loom
//! ```
#![forbid(unsafe_code)]

mod clock;
mod completion;
mod ids;
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
#[cfg(not(loom))]
mod threads;
mod ticket;

pub use clock::{Clock, ManualClock, MonotonicTime, SystemClock};
pub use completion::Completion;
pub use ids::IdSet;
#[cfg(not(loom))]
pub use lanes::{LANE_DUMP, LANE_LOAD, LANE_LOOKUP, LANE_SPACE};
pub use load_state::{BlockState, Cancelled, LoadState};
pub use notify::Notify;
#[cfg(not(loom))]
pub use pool::{
    Lane, LaneStats, MAX_LANES, MAX_QUEUE, MAX_WORKERS, PoolStats, Refused, WorkerPool,
    WorkerPoolBuilder,
};
#[cfg(not(loom))]
pub use random::random_u64;
pub use ring::{PopError, PushError, RingConsumer, RingProducer, SpscRing};
#[cfg(all(feature = "runtime", not(loom)))]
pub use runtime::Runtime;
#[cfg(not(loom))]
pub use threads::{begin_thread, is_own_thread, run_threads_on, threads_begin_with};
pub use ticket::Ticket;
