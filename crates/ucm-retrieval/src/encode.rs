//! Hash codes: the signs of a vector's products with fixed directions, one bit each.
//!
//! `code(x)` has bit `j` where `Σ_d x[d]·W[d, j] > 0`; bit `j` is bit `j % 8` of byte `j / 8`. The
//! angle between two vectors is near `π` times the share of bits in which their codes differ. Each
//! sum is taken in the order of `d` with one rounding a step, so a code is the same on every
//! instruction set, in every batch and on every machine: codes may be stored and compared later.
#![allow(
    unsafe_code,
    reason = "kernels that read and write by address and are compiled for instruction sets"
)]

use std::marker::PhantomData;
use std::ops::Range;

use ucm_core::{Error, Result};

use crate::isa::Isa;
use crate::lanes::{Lanes, Scalar, kernel};
use crate::rows::Ints;
use crate::team::Team;
use crate::vectors::Vectors;

/// The directions of the codes.
#[derive(Debug, Clone, Copy)]
pub struct Encoder<'a> {
    weights: &'a [f32],
    heads: usize,
    dim: usize,
    bits: usize,
}

impl<'a> Encoder<'a> {
    /// Directions `W [dim, bits]` shared by all heads (`heads` is 1), or `[heads, dim, bits]`.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the sizes do not fit or `bits` is no multiple of 8.
    pub fn new(weights: &'a [f32], heads: usize, dim: usize, bits: usize) -> Result<Self> {
        let size = heads
            .checked_mul(dim)
            .and_then(|size| size.checked_mul(bits));
        if size != Some(weights.len()) || weights.is_empty() || !bits.is_multiple_of(8) {
            let error = Error::invalid(
                "hash weights are heads * dim * bits numbers, the bits in whole bytes",
            );
            let error = error.with("numbers", weights.len()).with("heads", heads);
            return Err(error.with("dim", dim).with("bits", bits));
        }
        Ok(Self {
            weights,
            heads,
            dim,
            bits,
        })
    }

    /// Bytes of a code.
    pub fn code_len(&self) -> usize {
        self.bits / 8
    }
}

/// The output of codes: `[block, slot, head, bytes]`, the last two dimensions without gaps.
#[derive(Debug)]
pub struct Codes<'a> {
    base: *mut u8,
    blocks: usize,
    block_size: usize,
    block_stride: usize,
    slot_stride: usize,
    slots: Option<Ints<'a>>,
    held: PhantomData<&'a mut [u8]>,
}

impl<'a> Codes<'a> {
    /// Contiguous codes in `bytes`, `token_len` bytes for each token.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `bytes` is no whole number of tokens.
    pub fn new(bytes: &'a mut [u8], token_len: usize) -> Result<Self> {
        if token_len == 0 || !bytes.len().is_multiple_of(token_len) {
            let error = Error::invalid("these bytes hold no whole number of codes")
                .with("bytes", bytes.len());
            return Err(error.with("token", token_len));
        }
        let tokens = bytes.len() / token_len;
        // SAFETY: all of it lies in `bytes`.
        Ok(unsafe { Self::from_raw(bytes.as_mut_ptr(), [1, tokens], [0, token_len], None) })
    }

    /// Codes at an address: `shape` is blocks and the tokens of one, `strides` are the bytes from
    /// one block, and from one slot, to the next. `slots` has the slot of each token's code: its
    /// block times the block size plus its position in it; tokens with a negative slot are skipped.
    /// `None`: token `i` uses slot `i`.
    ///
    /// # Safety
    ///
    /// For `'a` the codes of all slots can be written, nothing else accesses those in use, and
    /// `slots` has no duplicates.
    pub unsafe fn from_raw(
        base: *mut u8,
        shape: [usize; 2],
        strides: [usize; 2],
        slots: Option<Ints<'a>>,
    ) -> Self {
        let ([blocks, block_size], [block_stride, slot_stride]) = (shape, strides);
        Self {
            base,
            blocks,
            block_size,
            block_stride,
            slot_stride,
            slots,
            held: PhantomData,
        }
    }
}

/// Vectors multiplied together, so that a weight is read once for all of them.
const TILE: usize = 4;
/// Vectors of one item of a thread.
const CHUNK: usize = 64;

/// Encodes vectors and writes their codes.
///
/// ```
/// use ucm_retrieval::*;
///
/// // Two directions along each axis of a plane, and their opposites, twice: eight bits.
/// let weights = [1.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0];
/// let encoder = Encoder::new(&weights, 1, 2, 8).unwrap();
/// let vector: Vec<u8> = [3.0f32, -2.0].iter().flat_map(|x| x.to_ne_bytes()).collect();
/// let vectors = Vectors::new(&vector, Element::F32, [1, 1, 2]).unwrap();
/// let mut code = [0];
/// encode(&encoder, &vectors, &mut Codes::new(&mut code, 1).unwrap(), Isa::best(), Team::ONE).unwrap();
/// assert_eq!(code, [0b1001_1001]);
/// ```
///
/// # Errors
///
/// `InvalidInput` for inconsistent sizes or a slot beyond the last block; nothing is written then.
/// `Unsupported` for instructions that this processor lacks.
pub fn encode(
    encoder: &Encoder<'_>,
    vectors: &Vectors<'_>,
    codes: &mut Codes<'_>,
    isa: Isa,
    team: Team,
) -> Result<()> {
    let kernel = kernel(isa.checked()?);
    check(encoder, vectors, codes)?;
    let codes = &*codes;
    let job = EncodeJob {
        encoder,
        vectors,
        codes,
    };
    // With shared directions all heads are encoded together; otherwise one head after the other.
    let per_head = match encoder.heads {
        1 => vectors.tokens() * vectors.heads(),
        _ => vectors.tokens(),
    };
    let chunks = per_head.div_ceil(CHUNK);
    team.run(chunks * encoder.heads, |item| {
        let (head, first) = (item / chunks, item % chunks * CHUNK);
        // SAFETY: the sizes were compared, the processor was checked, and each code is written by
        // one thread.
        unsafe { kernel(&job, head, first..per_head.min(first + CHUNK)) };
    })
}

fn check(encoder: &Encoder<'_>, vectors: &Vectors<'_>, codes: &Codes<'_>) -> Result<()> {
    let code = encoder.code_len() * vectors.heads();
    if encoder.heads != 1 && encoder.heads != vectors.heads() {
        let error =
            Error::invalid("hash weights are for one head, or for each of the vectors' heads");
        return Err(error
            .with("weights", encoder.heads)
            .with("heads", vectors.heads()));
    }
    if encoder.dim != vectors.dim() {
        let error = Error::invalid("hash weights are for vectors of another length")
            .with("dim", vectors.dim());
        return Err(error.with("weights", encoder.dim));
    }
    let block = codes.slot_stride.checked_mul(codes.block_size);
    if codes.slot_stride < code
        || block.is_none_or(|block| codes.blocks > 1 && codes.block_stride < block)
    {
        let error = Error::invalid("the places for codes overlap").with("code", code);
        let error = error.with("slot_stride", codes.slot_stride);
        return Err(error.with("block_stride", codes.block_stride));
    }
    let room = codes.blocks.saturating_mul(codes.block_size);
    let Some(slots) = codes.slots else {
        if vectors.tokens() > room {
            let error = Error::invalid("there are more tokens than places for codes");
            return Err(error.with("tokens", vectors.tokens()).with("places", room));
        }
        return Ok(());
    };
    if slots.len() != vectors.tokens() {
        let error = Error::invalid("every token has one slot").with("tokens", vectors.tokens());
        return Err(error.with("slots", slots.len()));
    }
    for token in 0..slots.len() {
        let slot = slots.get(token);
        if usize::try_from(slot).is_ok_and(|slot| slot >= room) {
            let error = Error::invalid("a slot lies beyond the last block").with("token", token);
            return Err(error.with("slot", slot).with("slots", room));
        }
    }
    Ok(())
}

struct EncodeJob<'a> {
    encoder: &'a Encoder<'a>,
    vectors: &'a Vectors<'a>,
    codes: &'a Codes<'a>,
}

// SAFETY: every thread may read its memory, and each code is written by one thread.
unsafe impl Sync for EncodeJob<'_> {}

impl EncodeJob<'_> {
    /// Token and head of a vector.
    fn place(&self, head: usize, vector: usize) -> (usize, usize) {
        match self.encoder.heads {
            1 => (vector / self.vectors.heads(), vector % self.vectors.heads()),
            _ => (vector, head),
        }
    }

    /// The address of the code of a token's head, if it has a slot.
    fn target(&self, token: usize, head: usize) -> Option<*mut u8> {
        let codes = self.codes;
        let slot = match codes.slots {
            Some(slots) => usize::try_from(slots.get(token)).ok()?,
            None => token,
        };
        let (block, slot) = (slot / codes.block_size, slot % codes.block_size);
        let at =
            block * codes.block_stride + slot * codes.slot_stride + head * self.encoder.code_len();
        // SAFETY: the slot exists.
        Some(unsafe { codes.base.add(at) })
    }
}

/// Encodes a range of the vectors of a head, or of all heads with shared directions.
///
/// # Safety
///
/// The sizes were checked, the processor has the instructions, and nothing else writes these codes.
type Kernel = unsafe fn(&EncodeJob<'_>, usize, Range<usize>);

fn kernel(isa: Isa) -> Kernel {
    kernel!(isa, by_columns(job: &EncodeJob<'_>, head: usize, vectors: Range<usize>))
}

/// See [`Kernel`]; as many columns at a time as fit the registers.
#[inline(always)]
unsafe fn by_columns<L: Lanes>(job: &EncodeJob<'_>, head: usize, vectors: Range<usize>) {
    // SAFETY: as the caller vouches.
    unsafe {
        match L::REGISTERS {
            1 => range::<L, 8>(job, head, vectors),
            16 => range::<L, 1>(job, head, vectors),
            _ => range::<L, 4>(job, head, vectors),
        }
    }
}

/// See [`Kernel`]; processes `COLUMNS` lanes of bits at a time.
#[inline(always)]
unsafe fn range<L: Lanes, const COLUMNS: usize>(
    job: &EncodeJob<'_>,
    head: usize,
    vectors: Range<usize>,
) {
    let (dim, bits) = (job.encoder.dim, job.encoder.bits);
    let mut values = vec![0.0; TILE * dim];
    let weights = match job.encoder.heads {
        1 => job.encoder.weights,
        _ => &job.encoder.weights[head * dim * bits..(head + 1) * dim * bits],
    };
    let mut first = vectors.start;
    while first < vectors.end {
        let tile = TILE.min(vectors.end - first);
        let mut targets = [None; TILE];
        for (row, values) in values.chunks_exact_mut(dim).take(tile).enumerate() {
            let (token, head) = job.place(head, first + row);
            targets[row] = job.target(token, head);
            // SAFETY: the vector exists.
            unsafe { job.vectors.read(token, head, values) };
        }
        let mut bit = 0;
        while bit < bits {
            // SAFETY: that many bits are left; the processor has the instructions.
            let (count, signs) = unsafe {
                if bit + COLUMNS * L::WIDTH <= bits {
                    (
                        COLUMNS * L::WIDTH,
                        signs::<L, COLUMNS>(&values, weights, dim, bits, bit),
                    )
                } else if L::WIDTH >= 8 && bit + L::WIDTH <= bits {
                    (L::WIDTH, signs::<L, 1>(&values, weights, dim, bits, bit))
                } else {
                    (8, signs::<Scalar, 8>(&values, weights, dim, bits, bit))
                }
            };
            for (signs, target) in signs.into_iter().zip(targets) {
                if let Some(target) = target {
                    let bytes = signs.to_le_bytes();
                    // SAFETY: a code has room for all bits.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            bytes.as_ptr(),
                            target.add(bit / 8),
                            count / 8,
                        )
                    };
                }
            }
            bit += count;
        }
        first += tile;
    }
}

/// The signs of a tile's products with `COLUMNS * WIDTH` directions from `first` on, the first one
/// lowest.
///
/// # Safety
///
/// The processor has the instructions, that many directions exist, and `values` holds a tile.
#[inline(always)]
unsafe fn signs<L: Lanes, const COLUMNS: usize>(
    values: &[f32],
    weights: &[f32],
    dim: usize,
    bits: usize,
    first: usize,
) -> [u64; TILE] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[L::splat(0.0); COLUMNS]; TILE];
        for at in 0..dim {
            let row = weights.as_ptr().add(at * bits + first);
            let mut columns = [L::splat(0.0); COLUMNS];
            for (i, column) in columns.iter_mut().enumerate() {
                *column = L::load_f32(row.add(i * L::WIDTH));
            }
            for (vector, sums) in sums.iter_mut().enumerate() {
                let value = L::splat(*values.as_ptr().add(vector * dim + at));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = sum.add_product_exact(value, column);
                }
            }
        }
        sums.map(|sums| {
            let mut signs = 0;
            for (i, sum) in sums.into_iter().enumerate() {
                signs |= u64::from(sum.positive()) << (i * L::WIDTH);
            }
            signs
        })
    }
}
