//! The layout of a model's KV, registered once, so that a block is named by its number and not by
//! its addresses.
#![allow(
    unsafe_code,
    reason = "the constructor is where a caller vouches for the addresses; everything after it is \
              safe"
)]

use std::ops::Range;

use ucm_core::{Error, Result};

use crate::span::DeviceSpan;

/// One piece of every block: that of block `n` begins at `first + n * stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvPiece {
    /// Address in block 0.
    pub first: u64,
    /// Bytes from block to block.
    pub stride: u64,
    /// Bytes of the piece.
    pub len: u64,
}

/// The pieces of a block, layer by layer in the order of a layer's tensors, and the number of
/// blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvLayout {
    pieces: Vec<KvPiece>,
    blocks: u64,
}

impl KvLayout {
    /// Checks that every piece of every block has an address.
    ///
    /// # Errors
    /// `InvalidInput` for a null address, a piece past the end of the address space, and pieces of
    /// neighbours that overlap.
    ///
    /// # Safety
    /// The conditions of [`DeviceSpan::new`] hold for every piece of a block from the
    /// moment a task names that block until the task has ended.
    pub unsafe fn new(pieces: Vec<KvPiece>, blocks: u64) -> Result<Self> {
        for (number, piece) in pieces.iter().enumerate() {
            let last = piece.stride.checked_mul(blocks.saturating_sub(1));
            let end = last.and_then(|last| piece.first.checked_add(last)?.checked_add(piece.len));
            if piece.first == 0 || end.is_none() || blocks > 1 && piece.stride < piece.len {
                return Err(Error::invalid(
                    "a piece of the KV has no address of its own in every block",
                )
                .with("piece", number)
                .with("first", format_args!("{:#x}", piece.first))
                .with("stride", piece.stride)
                .with("len", piece.len)
                .with("blocks", blocks));
            }
        }
        Ok(Self { pieces, blocks })
    }

    /// Number of pieces of a block.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Some pieces of a block; `None` if the block or a piece does not exist.
    pub fn spans(&self, block: u64, pieces: Range<usize>) -> impl Iterator<Item = DeviceSpan> {
        let some = self.pieces.get(pieces).filter(|_| block < self.blocks);
        some.unwrap_or_default().iter().map(move |piece| {
            // SAFETY: the constructor's caller vouches for every piece of every block, and this
            // block is one of them.
            unsafe { DeviceSpan::new(piece.first + block * piece.stride, piece.len) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(first: u64, stride: u64, len: u64, blocks: u64) -> Result<KvLayout> {
        // SAFETY: no task names its spans.
        unsafe { KvLayout::new(vec![KvPiece { first, stride, len }; 2], blocks) }
    }

    #[test]
    fn a_block_is_found_by_its_number() {
        let layout = layout(4096, 100, 60, 3).unwrap();
        let all: Vec<_> = layout
            .spans(2, 0..2)
            .map(|span| (span.addr(), span.len()))
            .collect();
        assert_eq!(all, [(4296, 60); 2]);
        assert_eq!(layout.spans(0, 1..2).count(), 1);
        assert_eq!(layout.spans(3, 0..2).count(), 0);
        assert_eq!(layout.spans(0, 1..3).count(), 0);
    }

    #[test]
    fn pieces_without_an_address_in_every_block_are_refused() {
        assert!(layout(0, 100, 60, 3).is_err());
        assert!(layout(4096, 59, 60, 3).is_err());
        assert!(layout(4096, 0, 60, 1).is_ok());
        assert!(layout(4096, u64::MAX / 2, 60, 4).is_err());
        assert!(layout(u64::MAX - 50, 100, 60, 1).is_err());
    }
}
