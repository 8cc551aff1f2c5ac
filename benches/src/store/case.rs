//! What the rows of loads and of dumps have in common: five contenders that make three rows.

use super::contest::Times;
use super::report::{Direction, Mode, Row, Side};

/// Turns of a round in which the store moves the blocks, and not the loop.
pub(super) const TURNS_OF_OURS: usize = 3;

/// One block size, mode and number of threads.
pub(super) struct Case {
    pub(super) direction: Direction,
    /// Bytes of KV of a block.
    pub(super) block: usize,
    pub(super) workers: usize,
    pub(super) mode: Mode,
}

impl Case {
    /// The rows of the times of: the loop at the slot, ours there with and without checksums, the
    /// loop at the caller's memory, ours there. Each turn moved so many bytes.
    pub(super) fn rows(&self, times: &[Times; 5], bytes: usize) -> Vec<Row> {
        let [slot, checked, unchecked, memory, engine] = times;
        let row = |side, checksums| {
            Row::new(
                self.direction,
                side,
                self.block,
                self.workers,
                self.mode,
                checksums,
            )
        };
        vec![
            row(Side::Slot, true).with(checked, slot, bytes),
            row(Side::Slot, false).with(unchecked, slot, bytes),
            row(Side::Memory, true).with(engine, memory, bytes),
        ]
    }
}
