//! The state of one load: which of its blocks may touch device memory, and when the load is over. A
//! block here is the unit that is copied by itself; where blocks are split into shards, it is one
//! shard.
//!
//! A load reads its blocks into slots and then scatters them to device memory. After the report,
//! the load must not touch that memory again, because its owner may reuse it. So each block leaves
//! *reading* by one compare-and-swap, to *scattering* or to *cancelled*; only the winner of
//! scattering touches device memory; and the counter of blocks that are reading or scattering
//! reaches zero in exactly one caller. A block whose read failed stays open in the same way until
//! its failure is recorded, so the report contains every reason.

use crate::sync::{AtomicU8, AtomicUsize, Ordering};

/// State of a block of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockState {
    /// It is being read into its slot and verified. Device memory is untouched.
    Reading = 0,
    /// It is being copied to device memory, or its read failed and the reason is being recorded.
    Scattering = 1,
    /// It was cancelled while reading; it will never touch device memory.
    Cancelled = 2,
    /// Its copy to device memory ended, well or not, or its failure is recorded.
    Done = 3,
}

/// The states of a load's blocks and the count of those reading or scattering.
///
/// The caller that ends the load (`true` from [`finish`](Self::finish) or
/// [`cancel_from`](Self::cancel_from)) sees every write of every scatter, and no block can begin to
/// scatter any more.
pub struct LoadState {
    states: Box<[AtomicU8]>,
    /// Blocks that are reading or scattering.
    open: AtomicUsize,
}

const READING: u8 = BlockState::Reading as u8;
const SCATTERING: u8 = BlockState::Scattering as u8;
const CANCELLED: u8 = BlockState::Cancelled as u8;
const DONE: u8 = BlockState::Done as u8;

impl LoadState {
    /// The state of `blocks` blocks, all reading. A load without blocks is over from the start; no
    /// call returns `true` for it.
    pub fn new(blocks: usize) -> Self {
        Self {
            states: (0..blocks).map(|_| AtomicU8::new(READING)).collect(),
            open: AtomicUsize::new(blocks),
        }
    }

    /// Takes a block from reading to scattering. Returns `true` to at most one caller. That caller
    /// alone may now touch the block's device memory and must call [`finish`](Self::finish)
    /// afterwards in every case. Returns `false` if the block is cancelled, already scattering or
    /// done, or not of this load: then that memory must not be touched.
    #[must_use = "device memory may be touched only if this is true"]
    pub fn begin_scatter(&self, block: usize) -> bool {
        self.step(block, READING, SCATTERING)
    }

    /// The same for a block whose read failed. The one caller that gets `true` records the reason
    /// and must call [`finish`](Self::finish) afterwards. Until then the load is not over, so its
    /// report contains every reason.
    #[must_use = "the failure belongs to this block only if this is true"]
    pub fn begin_fail(&self, block: usize) -> bool {
        self.step(block, READING, SCATTERING)
    }

    /// Takes a block from scattering to done: its device memory is not touched any more. Returns
    /// `true` if this ended the load: the caller must report it. Does nothing for a block that is
    /// not scattering (`false`).
    #[must_use = "if this is true, the caller must report the load"]
    pub fn finish(&self, block: usize) -> bool {
        self.step(block, SCATTERING, DONE) && self.close(1)
    }

    /// Cancels every block from `first` on that is still reading: after a failure the blocks behind
    /// it, after an abort or a deadline all (`0`). Blocks that are scattering continue; their
    /// [`finish`](Self::finish) ends the load. Returns `true` if this ended the load: the caller
    /// must report it.
    #[must_use = "if this is true, the caller must report the load"]
    pub fn cancel_from(&self, first: usize) -> bool {
        let count = (first..self.states.len())
            .filter(|&block| self.step(block, READING, CANCELLED))
            .count();
        // Subtracted in one step at the end, so the count cannot reach zero before this call ends.
        self.close(count)
    }

    /// The current state of a block; `None` if it is not of this load.
    pub fn state(&self, block: usize) -> Option<BlockState> {
        let state = self.states.get(block)?.load(Ordering::Acquire);
        Some(match state {
            READING => BlockState::Reading,
            SCATTERING => BlockState::Scattering,
            CANCELLED => BlockState::Cancelled,
            _ => BlockState::Done,
        })
    }

    /// True if no block is reading or scattering.
    pub fn is_over(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    fn step(&self, block: usize, from: u8, to: u8) -> bool {
        self.states.get(block).is_some_and(|state| {
            state
                .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
        })
    }

    /// Subtracts `count` from the open blocks; `true` if none is left. Each decrement releases its
    /// caller's writes and acquires those of all earlier decrements, so the last one sees every
    /// scatter.
    fn close(&self, count: usize) -> bool {
        count > 0 && self.open.fetch_sub(count, Ordering::AcqRel) == count
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_good_load_ends_with_its_last_block() {
        let load = LoadState::new(2);
        assert!(load.begin_scatter(1));
        assert!(!load.begin_scatter(1));
        assert!(load.begin_scatter(0));
        assert!(!load.finish(1));
        assert!(load.finish(0));
        assert!(load.is_over());
        assert!(!load.finish(0), "a second finish changes nothing");
    }

    #[test]
    fn the_dead_never_scatter_and_the_scattering_end_the_load() {
        let load = LoadState::new(3);
        assert!(load.begin_scatter(0));
        assert!(!load.cancel_from(0));
        assert!(!load.begin_scatter(1));
        assert_eq!(load.state(1), Some(BlockState::Cancelled));
        assert!(!load.cancel_from(0));
        assert!(load.finish(0));
        assert_eq!(load.state(0), Some(BlockState::Done));
    }

    #[test]
    fn a_kill_of_the_last_readers_ends_the_load_once() {
        let load = LoadState::new(2);
        assert!(!load.cancel_from(1));
        assert!(load.cancel_from(0));
        assert!(!load.cancel_from(0));
    }

    #[test]
    fn a_failure_kills_those_behind_it_and_those_before_it_end_the_load() {
        let load = LoadState::new(4);
        assert!(load.begin_fail(2));
        assert!(
            !load.begin_fail(2) && !load.begin_scatter(2),
            "it has failed"
        );
        assert!(!load.cancel_from(3));
        assert!(!load.finish(2));
        assert!(load.begin_scatter(0));
        assert!(!load.finish(0));
        // The next failure is of an earlier block and ends the load.
        assert!(load.begin_fail(1));
        assert!(!load.cancel_from(2));
        assert!(load.finish(1));
        assert!(!load.begin_fail(3), "cancelled before its failure");
    }

    #[test]
    fn a_finish_without_a_begin_changes_nothing() {
        let load = LoadState::new(1);
        assert!(!load.finish(0));
        assert_eq!(load.state(0), Some(BlockState::Reading));
    }

    #[test]
    fn blocks_of_another_load_are_refused() {
        let load = LoadState::new(0);
        assert!(load.is_over());
        assert!(!load.begin_scatter(0) && !load.finish(0));
        assert!(!load.begin_fail(0));
        assert!(!load.cancel_from(0));
        assert_eq!(load.state(0), None);
    }
}
