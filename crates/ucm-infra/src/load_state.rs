//! The state of one load: which of its blocks may touch device memory, and when the load is over.
//! What is a block here is what is copied by itself: where blocks are split into shards, each
//! shard.
//!
//! A load reads its blocks into slots and then scatters them to device memory. Once it was
//! reported, nothing of it may touch that memory again, because its owner uses it for something
//! else. So each block leaves *reading* by one compare-and-swap, to *scattering* or to *cancelled*;
//! only the winner of scattering touches device memory; and a counter of the blocks that are
//! reading or scattering tells exactly one caller that the load is over. A block whose read failed
//! is held open the same way until its failure is recorded, so the report knows every reason.

use crate::sync::{AtomicU8, AtomicUsize, Ordering};

/// Where a block of a load stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockState {
    /// It is read into its slot and verified there. Device memory is untouched.
    Reading = 0,
    /// It is being copied to device memory, or its read failed and the reason is being recorded.
    Scattering = 1,
    /// It was cancelled while reading; it will never touch device memory.
    Cancelled = 2,
    /// Its copy to device memory ended, well or not, or its failure is recorded.
    Done = 3,
}

/// What [`LoadState::cancel_from`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "who is told `last` must report the load"]
pub struct Cancelled {
    /// How many blocks this call took from reading to cancelled.
    pub count: usize,
    /// Whether this call ended the load: the caller must report it. True for one call at most.
    pub last: bool,
}

/// The states of a load's blocks and the count of those reading or scattering.
///
/// A caller that is told that the load is over (`true` from [`finish`](Self::finish),
/// [`Cancelled::last`]) sees every write that the scattering of any block made, and no block can
/// begin to scatter any more.
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
    /// The state of `blocks` blocks, all reading. A load of no blocks is over from the start, and
    /// no caller is told so.
    pub fn new(blocks: usize) -> Self {
        Self {
            states: (0..blocks).map(|_| AtomicU8::new(READING)).collect(),
            open: AtomicUsize::new(blocks),
        }
    }

    /// Takes a block from reading to scattering. `true` for one caller at most, who alone may now
    /// touch the block's device memory and must call [`finish`](Self::finish) afterwards, whatever
    /// happens. `false` if it is cancelled, already scattering or done, or not of this load: then
    /// that memory must not be touched.
    #[must_use = "device memory may be touched only if this is true"]
    pub fn begin_scatter(&self, block: usize) -> bool {
        self.step(block, READING, SCATTERING)
    }

    /// The same for a block whose read failed: the caller, who alone is told `true`, records why
    /// and must call [`finish`](Self::finish) afterwards. Until then the load is not over, so its
    /// report misses no reason.
    #[must_use = "only if this is true the failure is this block's own"]
    pub fn begin_fail(&self, block: usize) -> bool {
        self.step(block, READING, SCATTERING)
    }

    /// Takes a block from scattering to done: its device memory is not touched any more. `true` if
    /// this ended the load: the caller must report it. For a block that is not scattering nothing
    /// changes (`false`).
    #[must_use = "who is told `true` must report the load"]
    pub fn finish(&self, block: usize) -> bool {
        self.step(block, SCATTERING, DONE) && self.close(1)
    }

    /// Cancels every block from `first` on that is still reading: after a failure those behind it,
    /// after an abort or a deadline all (`0`). Those scattering go on and end the load with their
    /// [`finish`](Self::finish).
    pub fn cancel_from(&self, first: usize) -> Cancelled {
        let count = (first..self.states.len())
            .filter(|&block| self.step(block, READING, CANCELLED))
            .count();
        // In one step at the end: while this call is on its way the count cannot reach zero without
        // it.
        Cancelled {
            count,
            last: self.close(count),
        }
    }

    /// Where a block stands at this moment; `None` if it is not of this load.
    pub fn state(&self, block: usize) -> Option<BlockState> {
        let state = self.states.get(block)?.load(Ordering::Acquire);
        Some(match state {
            READING => BlockState::Reading,
            SCATTERING => BlockState::Scattering,
            CANCELLED => BlockState::Cancelled,
            _ => BlockState::Done,
        })
    }

    /// How many blocks are reading or scattering.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// Whether none is reading or scattering any more.
    pub fn is_over(&self) -> bool {
        self.open() == 0
    }

    fn step(&self, block: usize, from: u8, to: u8) -> bool {
        self.states.get(block).is_some_and(|state| {
            state
                .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
        })
    }

    /// Takes `count` blocks from the open ones; `true` if they were the last. Each decrement
    /// releases what its caller wrote and acquires what all before it wrote, so the last one sees
    /// every scatter.
    fn close(&self, count: usize) -> bool {
        count > 0 && self.open.fetch_sub(count, Ordering::AcqRel) == count
    }
}

impl std::fmt::Debug for LoadState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let states: Vec<_> = (0..self.states.len())
            .filter_map(|block| self.state(block))
            .collect();
        f.debug_struct("LoadState")
            .field("open", &self.open())
            .field("states", &states)
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn cancelled(count: usize, last: bool) -> Cancelled {
        Cancelled { count, last }
    }

    #[test]
    fn a_good_load_ends_with_its_last_block() {
        let load = LoadState::new(2);
        assert!(load.begin_scatter(1));
        assert!(!load.begin_scatter(1));
        assert!(load.begin_scatter(0));
        assert!(!load.finish(1));
        assert_eq!(load.open(), 1);
        assert!(load.finish(0));
        assert!(load.is_over());
        assert!(!load.finish(0), "a second finish changes nothing");
    }

    #[test]
    fn the_dead_never_scatter_and_the_scattering_end_the_load() {
        let load = LoadState::new(3);
        assert!(load.begin_scatter(0));
        assert_eq!(load.cancel_from(0), cancelled(2, false));
        assert!(!load.begin_scatter(1));
        assert_eq!(load.state(1), Some(BlockState::Cancelled));
        assert_eq!(load.cancel_from(0), cancelled(0, false));
        assert!(load.finish(0));
        assert_eq!(load.state(0), Some(BlockState::Done));
    }

    #[test]
    fn a_kill_of_the_last_readers_ends_the_load_once() {
        let load = LoadState::new(2);
        assert_eq!(load.cancel_from(1), cancelled(1, false));
        assert_eq!(load.cancel_from(0), cancelled(1, true));
        assert_eq!(load.cancel_from(0), cancelled(0, false));
    }

    #[test]
    fn a_failure_kills_those_behind_it_and_those_before_it_end_the_load() {
        let load = LoadState::new(4);
        assert!(load.begin_fail(2));
        assert!(
            !load.begin_fail(2) && !load.begin_scatter(2),
            "it has failed"
        );
        assert_eq!(load.cancel_from(3), cancelled(1, false));
        assert!(!load.finish(2));
        assert!(load.begin_scatter(0));
        assert!(!load.finish(0));
        // The next failure lies before it, and is the end.
        assert!(load.begin_fail(1));
        assert_eq!(load.cancel_from(2), cancelled(0, false));
        assert!(load.finish(1));
        assert!(!load.begin_fail(3), "cancelled before it failed");
    }

    #[test]
    fn a_finish_without_a_begin_changes_nothing() {
        let load = LoadState::new(1);
        assert!(!load.finish(0));
        assert_eq!((load.open(), load.state(0)), (1, Some(BlockState::Reading)));
    }

    #[test]
    fn blocks_of_another_load_are_refused() {
        let load = LoadState::new(0);
        assert!(load.is_over());
        assert!(!load.begin_scatter(0) && !load.finish(0));
        assert!(!load.begin_fail(0));
        assert_eq!(load.cancel_from(0), cancelled(0, false));
        assert_eq!(load.state(0), None);
    }
}
