//! Inputs of a call: rows of a batch, each with the physical blocks of its tokens, and the data of
//! every physical block.
#![allow(
    unsafe_code,
    reason = "blocks are read by address, because other blocks of the memory may be written"
)]

use std::marker::PhantomData;
use std::ops::Range;

use ucm_core::{Error, Result};

use crate::team::Team;

/// Integers of 32 or 64 bits, as in tensors.
#[derive(Debug, Clone, Copy)]
pub enum Ints<'a> {
    /// 32 bits.
    I32(&'a [i32]),
    /// 64 bits.
    I64(&'a [i64]),
}

impl Ints<'_> {
    /// How many.
    #[allow(clippy::len_without_is_empty, reason = "no caller compares with zero")]
    pub fn len(&self) -> usize {
        match self {
            Self::I32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    /// The integer at an index below [`Ints::len`].
    #[inline]
    pub fn get(&self, at: usize) -> i64 {
        match self {
            Self::I32(values) => i64::from(values[at]),
            Self::I64(values) => values[at],
        }
    }
}

/// Rows of a batch: the physical blocks of each, in the order of its tokens, and its number of
/// tokens.
///
/// ```
/// use ucm_retrieval::{Ints, Rows};
///
/// // Two requests with blocks of 16 tokens: 20 tokens in blocks 7 and 3, 16 tokens in block 5.
/// let rows = Rows::new(Ints::I32(&[7, 3, 5, -1]), 2, Ints::I32(&[20, 16]), 16).unwrap();
/// assert_eq!((rows.blocks(0), rows.blocks(1)), (2, 1));
/// assert_eq!(rows.last_len(0), 4, "tokens of the last block");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    table: Ints<'a>,
    stride: usize,
    tokens: Ints<'a>,
    block_size: usize,
}

impl<'a> Rows<'a> {
    /// `table` has a row of `stride` ids for each entry of `tokens`; the first `ceil(tokens /
    /// block_size)` ids of a row are used. A row without tokens has no blocks.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the table is too short, or a number of tokens is negative or needs more
    /// blocks than a row has.
    pub fn new(
        table: Ints<'a>,
        stride: usize,
        tokens: Ints<'a>,
        block_size: usize,
    ) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::invalid("a block has at least one token"));
        }
        let rows = tokens.len();
        // The last row may end with its last block, before the full stride.
        if rows > 0
            && stride
                .checked_mul(rows - 1)
                .is_none_or(|before| before > table.len())
        {
            let error = Error::invalid("the block table has too few rows").with("ids", table.len());
            return Err(error.with("rows", rows).with("stride", stride));
        }
        let made = Self {
            table,
            stride,
            tokens,
            block_size,
        };
        for row in 0..rows {
            let tokens = made.tokens.get(row);
            let fits = |tokens: usize| {
                let blocks = tokens.div_ceil(block_size);
                blocks <= stride && row * stride + blocks <= made.table.len()
            };
            if !usize::try_from(tokens).is_ok_and(fits) {
                let error = Error::invalid("a row of the block table has no room for its tokens");
                let error = error.with("row", row).with("tokens", tokens);
                return Err(error.with("stride", stride).with("block_size", block_size));
            }
        }
        Ok(made)
    }

    /// How many rows.
    #[allow(clippy::len_without_is_empty, reason = "no caller compares with zero")]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of a whole block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens of a row.
    pub fn tokens(&self, row: usize) -> usize {
        self.tokens.get(row) as usize // not negative: checked in `new`
    }

    /// Blocks of a row.
    pub fn blocks(&self, row: usize) -> usize {
        self.tokens(row).div_ceil(self.block_size)
    }

    /// Most blocks of any row.
    pub fn most_blocks(&self) -> usize {
        (0..self.len())
            .map(|row| self.blocks(row))
            .max()
            .unwrap_or(0)
    }

    /// Tokens of the last block of a row; 0 if it has none.
    pub fn last_len(&self, row: usize) -> usize {
        match self.tokens(row) {
            0 => 0,
            tokens => (tokens - 1) % self.block_size + 1,
        }
    }

    /// The physical id of a block of a row; negative if it is missing.
    #[inline]
    pub fn id(&self, row: usize, block: usize) -> i64 {
        self.table.get(row * self.stride + block)
    }

    /// Checks that every id is below `count`. A negative id denotes a missing block.
    ///
    /// # Errors
    ///
    /// `InvalidInput` with the position of the first one that is not.
    pub fn check_ids(&self, count: usize) -> Result<()> {
        for row in 0..self.len() {
            for block in 0..self.blocks(row) {
                let id = self.id(row, block);
                if usize::try_from(id).is_ok_and(|id| id >= count) {
                    let error = Error::invalid("the block table names a block beyond the last");
                    let error = error.with("row", row).with("place", block);
                    return Err(error.with("block", id).with("blocks", count));
                }
            }
        }
        Ok(())
    }
}

/// The data of every physical block: `count` ranges of `len` bytes, `stride` bytes apart.
///
/// A call reads only its blocks, so other blocks may be written at the same time (for example by
/// the load of another request's KV).
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    base: *const u8,
    count: usize,
    stride: usize,
    len: usize,
    held: PhantomData<&'a [u8]>,
}

// SAFETY: it is a shared borrow of the read blocks.
unsafe impl Send for Blocks<'_> {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Blocks<'_> {}

impl<'a> Blocks<'a> {
    /// Contiguous blocks in `bytes`.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `bytes` is no whole number of blocks of `len` bytes.
    ///
    /// ```
    /// use ucm_retrieval::Blocks;
    ///
    /// assert_eq!(Blocks::new(&[0; 64], 16).unwrap().count(), 4);
    /// assert!(Blocks::new(&[0; 65], 16).is_err());
    /// ```
    pub fn new(bytes: &'a [u8], len: usize) -> Result<Self> {
        if len == 0 || !bytes.len().is_multiple_of(len) {
            let error = Error::invalid("these bytes are no whole number of blocks");
            return Err(error.with("bytes", bytes.len()).with("block", len));
        }
        // SAFETY: all of it lies in `bytes`.
        Ok(unsafe { Self::from_raw(bytes.as_ptr(), bytes.len() / len, len, len) })
    }

    /// Blocks at an address.
    ///
    /// # Safety
    ///
    /// For `'a` the `len` bytes at `base + i * stride` can be read for each `i` below `count`, and
    /// the blocks in the block table of a call are not written.
    pub unsafe fn from_raw(base: *const u8, count: usize, stride: usize, len: usize) -> Self {
        Self {
            base,
            count,
            stride,
            len,
            held: PhantomData,
        }
    }

    /// How many blocks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of one.
    #[allow(clippy::len_without_is_empty, reason = "no caller compares with zero")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where a block begins.
    ///
    /// # Safety
    ///
    /// `block` is below [`Blocks::count`].
    #[inline(always)]
    pub(crate) unsafe fn at(&self, block: usize) -> *const u8 {
        debug_assert!(block < self.count);
        // SAFETY: the maker vouched for the block.
        unsafe { self.base.add(block * self.stride) }
    }
}

/// Blocks that are always kept and not scored: the first and the last ones of every row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Windows {
    /// First blocks.
    pub init: usize,
    /// Last blocks.
    pub local: usize,
}

impl Windows {
    /// The blocks between the windows, out of `blocks`. Empty if the windows meet.
    pub(crate) fn middle(self, blocks: usize) -> Range<usize> {
        let end = blocks.saturating_sub(self.local);
        self.init.min(end)..end
    }
}

/// The output of scores: rows of `stride` numbers, `per_row` of them for each row of the batch.
///
/// Blocks inside [`Windows`] get the largest number, above every score. Missing blocks, and places
/// behind the last block of a row, get the smallest, which [`select`](crate::select()) never
/// selects.
pub(crate) struct ScoreRows<T> {
    base: *mut T,
    per_row: usize,
    stride: usize,
}

// SAFETY: threads write to different places of it.
unsafe impl<T: Send> Sync for ScoreRows<T> {}

impl<T: Copy> ScoreRows<T> {
    /// # Errors
    ///
    /// `InvalidInput` if `out` has the wrong length or a row has more blocks than `stride`.
    pub(crate) fn new(
        out: &mut [T],
        rows: &Rows<'_>,
        per_row: usize,
        stride: usize,
    ) -> Result<Self> {
        let needed = rows
            .len()
            .checked_mul(per_row)
            .and_then(|all| all.checked_mul(stride));
        if needed != Some(out.len()) || rows.most_blocks() > stride {
            let error = Error::invalid("the place for the scores has the wrong size");
            let error = error.with("numbers", out.len()).with("rows", rows.len());
            let error = error.with("scores_per_row", per_row).with("stride", stride);
            return Err(error.with("most_blocks", rows.most_blocks()));
        }
        Ok(Self {
            base: out.as_mut_ptr(),
            per_row,
            stride,
        })
    }

    /// The address of the scores of a block of a row: one for each of `per_row`, `stride` apart.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, block: usize) -> *mut T {
        debug_assert!(block < self.stride);
        // SAFETY: `new` has compared the length with the rows and the stride.
        unsafe { self.base.add(row * self.per_row * self.stride + block) }
    }

    /// Distance of one block's scores.
    #[inline(always)]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Calls `score` on the threads of a team for the blocks of each row between the windows, at
    /// most `chunk` at a time, and fills all other places with the largest or the least score.
    pub(crate) fn each_part(
        &self,
        rows: &Rows<'_>,
        windows: Windows,
        chunk: usize,
        [most, least]: [T; 2],
        team: Team,
        score: impl Fn(usize, Range<usize>) + Sync,
    ) -> Result<()>
    where
        T: Send + Sync,
    {
        let chunks = rows.most_blocks().div_ceil(chunk).max(1);
        team.run(rows.len() * chunks, |item| {
            let (row, first) = (item / chunks, item % chunks * chunk);
            let blocks = rows.blocks(row);
            let middle = windows.middle(blocks);
            if first == 0 {
                self.frame(row, blocks, &middle, most, least);
            }
            let part = middle.start.max(first)..middle.end.min(first + chunk);
            if !part.is_empty() {
                score(row, part);
            }
        })
    }

    /// Fills the places of a row that no kernel writes: the windows with `most`, those behind the
    /// end with `least`.
    fn frame(&self, row: usize, blocks: usize, middle: &Range<usize>, most: T, least: T) {
        for head in 0..self.per_row {
            for block in (0..middle.start).chain(middle.end..self.stride) {
                let value = if block < blocks { most } else { least };
                // SAFETY: as in `at`; one thread fills a row's frame, and no other writes to these
                // places.
                unsafe { self.at(row, 0).add(head * self.stride + block).write(value) };
            }
        }
    }
}
