//! The memory of a run: slots to load into and dump from, and the memory of a caller.

use std::sync::Arc;

use ucm_core::BlockId;
use ucm_device::{ArenaOptions, DeviceSpan, HostArena, HugePages, Slot, SlotPool};
use ucm_store::engine::{Pieces, Row, RowSides};

use super::Result;
use super::rig::Shape;

/// Alignment of a caller's memory, in bytes.
const ALIGN: usize = 64;

/// One slot, and as many bytes of a caller's memory, for every block of a turn.
pub(super) struct Stock {
    pool: Arc<SlotPool>,
    caller: Vec<u8>,
    /// Where the caller's memory begins in it: aligned as tensors are. Some processors copy to
    /// memory that lies a few bytes off at a quarter of the speed.
    start: usize,
    block: usize,
    tensor: u64,
    count: usize,
    next: u64,
}

impl Stock {
    /// For `count` blocks; every page of it was written before.
    pub(super) fn new(shape: &Shape, count: usize) -> Result<Self> {
        let options = ArenaOptions {
            huge: HugePages::Try,
            prefault: true,
            node: None,
        };
        let len = shape.layout.record_len();
        let arena = HostArena::with(len * count, options)?;
        let caller = vec![0x5a; shape.block * count + ALIGN];
        let stock = Self {
            pool: SlotPool::with_slots(arena, len, count)?,
            start: caller.as_ptr().align_offset(ALIGN),
            caller,
            block: shape.block,
            tensor: shape.geometry.tensors()[0],
            count,
            next: 0,
        };
        for (number, slot) in stock.slots().iter_mut().enumerate() {
            slot.as_mut_slice().fill(number as u8);
        }
        Ok(stock)
    }

    /// Blocks of a turn.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Bytes of KV of a turn.
    pub(super) fn bytes(&self) -> usize {
        self.block * self.count
    }

    /// All slots that are free, which is all of them between turns. Their bytes are whatever was
    /// left there.
    pub(super) fn slots(&self) -> Vec<Slot> {
        std::iter::from_fn(|| self.pool.try_acquire()).collect()
    }

    /// The caller's memory, one piece for each block.
    pub(super) fn caller(&mut self) -> std::slice::ChunksExactMut<'_, u8> {
        self.caller[self.start..].chunks_exact_mut(self.block)
    }

    /// Rows of a load or dump of whole blocks, layer by layer, in the caller's memory.
    pub(super) fn rows(&mut self, ids: &[BlockId]) -> Vec<Row> {
        let tensor = self.tensor;
        let memory = self.caller[self.start..].chunks_exact_mut(self.block);
        let row = |(&id, memory): (&BlockId, &mut [u8])| Row {
            id,
            shard: 0,
            pieces: Pieces::Listed(
                (memory.as_mut_ptr() as u64..)
                    .step_by(tensor as usize)
                    .take(memory.len() / tensor as usize)
                    .map(|at| span(at, tensor))
                    .collect(),
            ),
            ready: None,
            sides: RowSides::None,
        };
        ids.iter().zip(memory).map(row).collect()
    }

    /// Ids never used before, for all blocks of a turn, spread like hashes.
    pub(super) fn fresh_ids(&mut self) -> Vec<BlockId> {
        let first = self.next;
        self.next += self.count as u64;
        ids(first, self.count)
    }
}

#[allow(unsafe_code, reason = "device addresses of the bench's own memory")]
fn span(at: u64, len: u64) -> DeviceSpan {
    // SAFETY: inside the caller's memory, which lives as long as the stock; a turn waits for the
    // end of its task before anything else touches it.
    unsafe { DeviceSpan::new(at, len) }
}

/// `count` ids from number `first` on, spread like hashes.
pub(super) fn ids(first: u64, count: usize) -> Vec<BlockId> {
    let id = |number: u64| {
        let hash = blake3::hash(&number.to_le_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.as_bytes()[..16]);
        BlockId(bytes)
    };
    (first..first + count as u64).map(id).collect()
}
