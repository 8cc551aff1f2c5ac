//! Scores from hash codes: the least number of bits in which a key's code of a block differs from
//! the query's.
//!
//! ```text
//! dist[t, h] = Σ over the queries of head h ( popcount( code(query) xor code(key[t, h]) ) )
//! score[b]   = - min over tokens t of the block, and over heads h ( dist[t, h] )
//! ```
//!
//! With grouped heads there is one query for each KV head, the group's mean. With latent attention
//! there is one head of keys, and the distances of several queries to it add up. Everything is an
//! integer, and exact.
#![allow(unsafe_code, reason = "kernels that read blocks by address")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod stream;
#[cfg(target_arch = "x86_64")]
mod words;

use std::ops::Range;

use ucm_core::{Error, Result};

use crate::isa::Isa;
use crate::rows::{Blocks, Rows, ScoreRows, Windows};
use crate::team::Team;

/// Arguments of [`hamming_scores`].
#[derive(Debug, Clone, Copy)]
pub struct HammingScores<'a> {
    /// The rows to score; their ids are indices in `codes`. In a last block only the slots of its
    /// tokens count.
    pub rows: Rows<'a>,
    /// Codes of keys, `[block, slot, heads, code_len]` without gaps within a block.
    pub codes: Blocks<'a>,
    /// KV heads.
    pub heads: usize,
    /// Bytes of a code.
    pub code_len: usize,
    /// Codes of queries, `[row, heads, queries, code_len]`.
    pub queries: &'a [u8],
    /// Queries of each head, whose distances add up.
    pub queries_per_head: usize,
    /// True if each head has scores of its own, instead of the least distance of all.
    pub heads_apart: bool,
    /// Blocks that need no score.
    pub windows: Windows,
}

/// Blocks that one thread scores at a time.
const CHUNK: usize = 32;

/// Scores of every block of every row, into `out [row, 1, stride]`, or `[row, heads, stride]` if
/// heads are not combined.
///
/// Blocks of the windows get [`i32::MAX`]; missing blocks (a negative id) and places behind a row's
/// end get [`i32::MIN`].
///
/// ```
/// use ucm_retrieval::*;
///
/// // Two blocks of two tokens, one head, codes of one byte.
/// let codes = [0b1111_0000, 0b0000_0001, 0b0000_0111, 0b1111_1111];
/// let spec = HammingScores {
///     rows: Rows::new(Ints::I32(&[0, 1]), 2, Ints::I32(&[4]), 2).unwrap(),
///     codes: Blocks::new(&codes, 2).unwrap(),
///     heads: 1,
///     code_len: 1,
///     queries: &[0],
///     queries_per_head: 1,
///     heads_apart: false,
///     windows: Windows::default(),
/// };
/// let mut scores = [0; 2];
/// hamming_scores(&spec, &mut scores, 2, Isa::best(), Team::ONE).unwrap();
/// assert_eq!(scores, [-1, -3]);
/// ```
///
/// # Errors
///
/// `InvalidInput` for inconsistent sizes or an id beyond the last block, `Unsupported` for
/// instructions that this processor lacks.
pub fn hamming_scores(
    spec: &HammingScores<'_>,
    out: &mut [i32],
    stride: usize,
    isa: Isa,
    team: Team,
) -> Result<()> {
    let kernel = kernel(isa.checked()?);
    check(spec)?;
    let per_row = if spec.heads_apart { spec.heads } else { 1 };
    let out = ScoreRows::new(out, &spec.rows, per_row, stride)?;
    let ends = [i32::MAX, i32::MIN];
    out.each_part(
        &spec.rows,
        spec.windows,
        CHUNK,
        ends,
        team,
        |row, blocks| {
            let out = &out;
            let job = HammingJob {
                spec,
                out,
                row,
                blocks,
            };
            // SAFETY: `check` has compared the sizes and the ids, `checked` the processor; only
            // this thread writes to these places.
            unsafe { kernel(job) };
        },
    )
}

fn check(spec: &HammingScores<'_>) -> Result<()> {
    let wrong = |message: &'static str| {
        let error = Error::invalid(message)
            .with("heads", spec.heads)
            .with("code_len", spec.code_len);
        error.with("queries_per_head", spec.queries_per_head)
    };
    if spec.heads == 0 || spec.code_len == 0 || spec.queries_per_head == 0 {
        return Err(wrong("a code has at least one byte, and a head one query"));
    }
    let token = spec.heads.checked_mul(spec.code_len);
    let block = token.and_then(|token| token.checked_mul(spec.rows.block_size()));
    if block != Some(spec.codes.len()) {
        let error =
            wrong("a block has other bytes than its codes need").with("bytes", spec.codes.len());
        return Err(error.with("block_size", spec.rows.block_size()));
    }
    let queries =
        token.and_then(|token| token.checked_mul(spec.queries_per_head * spec.rows.len()));
    if queries != Some(spec.queries.len()) {
        return Err(wrong("there are not as many codes of queries as rows")
            .with("bytes", spec.queries.len()));
    }
    // Larger sums would not fit the score or the weights of a vector kernel.
    if spec.queries_per_head > MAX_QUERIES || spec.code_len > MAX_CODE_LEN {
        return Err(
            wrong("a code is too long, or a head has too many queries").with("limit", MAX_QUERIES)
        );
    }
    spec.rows.check_ids(spec.codes.count())
}

/// Most queries of a head.
const MAX_QUERIES: usize = 127;
/// Most bytes of a code.
const MAX_CODE_LEN: usize = 4096;

/// A range of blocks of a row, to be scored.
#[derive(Clone)]
struct HammingJob<'a> {
    spec: &'a HammingScores<'a>,
    out: &'a ScoreRows<i32>,
    row: usize,
    blocks: Range<usize>,
}

/// Scores blocks.
///
/// # Safety
///
/// The specification was checked, the processor has the instructions, and nothing else writes to
/// these places.
type Kernel = unsafe fn(HammingJob<'_>);

fn kernel(isa: Isa) -> Kernel {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::score,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::score,
        _ => scalar,
    }
}

/// See [`Kernel`]; byte by byte.
unsafe fn scalar(job: HammingJob<'_>) {
    let HammingScores {
        heads,
        code_len: len,
        queries_per_head: per_head,
        ..
    } = *job.spec;
    let queries = job.queries();
    job.each_block(|codes, slots, _, least| {
        for (head, (queries, least)) in queries.chunks_exact(per_head * len).zip(least).enumerate()
        {
            for slot in 0..slots {
                // SAFETY: the slot and the head are within the block.
                let code = unsafe { codes.add((slot * heads + head) * len) };
                let mut distance = 0;
                for query in queries.chunks_exact(len) {
                    for (at, query) in query.iter().enumerate() {
                        // SAFETY: as above.
                        distance += (query ^ unsafe { *code.add(at) }).count_ones();
                    }
                }
                *least = distance.min(*least);
            }
        }
    });
}

/// Initial value of the least distance.
const NONE: u32 = u32::MAX;

impl<'a> HammingJob<'a> {
    /// Codes of the row's queries, `[heads, queries, code_len]`.
    fn queries(&self) -> &'a [u8] {
        let len = self.spec.heads * self.spec.queries_per_head * self.spec.code_len;
        &self.spec.queries[self.row * len..(self.row + 1) * len]
    }

    /// Scores the blocks: `find` lowers the least distance of each head, given the codes of the
    /// block, the number of its valid slots, and the address of the next block's codes.
    #[inline(always)]
    fn each_block(&self, mut find: impl FnMut(*const u8, usize, *const u8, &mut [u32])) {
        let mut least = vec![NONE; self.spec.heads];
        let mut next = self.slots(self.blocks.start);
        for block in self.blocks.clone() {
            least.fill(NONE);
            let this = next;
            let more = block + 1 < self.blocks.end;
            next = if more { self.slots(block + 1) } else { None };
            if let Some((codes, slots)) = this {
                let following = next.map_or(codes, |(codes, _)| codes);
                find(codes, slots, following, &mut least);
            }
            let scores = least.iter().map(|&least| match least {
                NONE => i32::MIN,
                least => -(least as i32),
            });
            let to = self.out.at(self.row, block);
            if self.spec.heads_apart {
                for (head, score) in scores.enumerate() {
                    // SAFETY: each head has its place, and only this thread writes to those of this
                    // block.
                    unsafe { to.add(head * self.out.stride()).write(score) };
                }
            } else {
                // SAFETY: as above.
                unsafe { to.write(scores.max().unwrap_or(i32::MIN)) };
            }
        }
    }

    /// The codes of a block and the number of its valid slots; `None` for a missing block.
    #[inline(always)]
    fn slots(&self, block: usize) -> Option<(*const u8, usize)> {
        let rows = &self.spec.rows;
        let id = usize::try_from(rows.id(self.row, block)).ok()?;
        let slots = match block + 1 == rows.blocks(self.row) {
            true => rows.last_len(self.row),
            false => rows.block_size(),
        };
        // SAFETY: `check` has compared the ids with the number of blocks.
        Some((unsafe { self.spec.codes.at(id) }, slots))
    }
}
