//! Distances 64 bytes at a time, by the vector instruction that counts bits.
//!
//! A stretch of codes is a stream of 64-byte registers; after some of them (`REGISTERS`) token and head are where they
//! were, so as many registers hold the query, repeated. The counts of a code's words are added up within a register, and
//! the least of each place is kept until the block ends.
//!
//! Where several queries of a head add up, their distances to a key are linear in the key's bits: with `c_j` queries
//! that have bit `j`, of `R`, the sum is `Σ_j c_j + Σ_j k_j·(R - 2·c_j)`. So a key costs one masked sum of small
//! weights, however many queries there are.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{HammingScores, NONE, each_block, queries, words};
use crate::rows::ScoreRows;

/// How many bytes ahead memory is asked for: the processor by itself stops at every page.
const AHEAD: usize = 4096;
/// Bytes of a register.
const WIDTH: usize = 64;

/// See [`super::Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")]
pub(super) unsafe fn score(spec: &HammingScores<'_>, out: &ScoreRows<i32>, row: usize, blocks: Range<usize>) {
    if spec.queries_per_head > 1 && spec.code_len.is_multiple_of(8) && spec.code_len <= MOST_WEIGHTS / 8 {
        return summed(spec, out, row, blocks);
    }
    let token = spec.heads * spec.code_len;
    let registers = token / greatest_common_divisor(token, WIDTH);
    // SAFETY: the caller vouches for the processor.
    unsafe {
        match (spec.queries_per_head, spec.code_len) {
            (1, 8) => of_words::<1>(spec, out, row, blocks, registers),
            (1, 16) => of_words::<2>(spec, out, row, blocks, registers),
            (1, 32) => of_words::<4>(spec, out, row, blocks, registers),
            (1, 64) => of_words::<8>(spec, out, row, blocks, registers),
            _ => words::score(spec, out, row, blocks),
        }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Codes of `WORDS` words.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")]
fn of_words<const WORDS: usize>(
    spec: &HammingScores<'_>,
    out: &ScoreRows<i32>,
    row: usize,
    blocks: Range<usize>,
    registers: usize,
) {
    match registers {
        1 => least::<WORDS, 1>(spec, out, row, blocks),
        2 => least::<WORDS, 2>(spec, out, row, blocks),
        3 => least::<WORDS, 3>(spec, out, row, blocks),
        4 => least::<WORDS, 4>(spec, out, row, blocks),
        8 => least::<WORDS, 8>(spec, out, row, blocks),
        // SAFETY: the processor has what that kernel needs.
        _ => unsafe { words::score(spec, out, row, blocks) },
    }
}

/// Codes of `WORDS` words, whose places repeat after `REGISTERS` registers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")]
fn least<const WORDS: usize, const REGISTERS: usize>(
    spec: &HammingScores<'_>,
    out: &ScoreRows<i32>,
    row: usize,
    blocks: Range<usize>,
) {
    let (token, period) = (spec.heads * spec.code_len, REGISTERS * WIDTH);
    let of_tokens = queries(spec, row);
    let query: [__m512i; REGISTERS] = std::array::from_fn(|register| {
        let bytes: [u8; WIDTH] = std::array::from_fn(|at| of_tokens[(register * WIDTH + at) % token]);
        // SAFETY: the array is as long as a register.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    });
    // A count has 64 bits, of which the upper half is zero.
    let none = _mm512_set1_epi64(i64::from(NONE));
    each_block(spec, out, row, blocks, |codes, slots, of_heads| {
        let len = slots * token;
        let mut least = [none; REGISTERS];
        let whole = len / period;
        for at in 0..whole {
            for (register, least) in least.iter_mut().enumerate() {
                // SAFETY: the period is within the block.
                let keys = unsafe {
                    let from = codes.add(at * period + register * WIDTH);
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                    _mm512_loadu_si512(from.cast())
                };
                *least = _mm512_min_epu32(*least, distances::<WORDS>(keys, query[register]));
            }
        }
        for (register, least) in least.iter_mut().enumerate() {
            let at = whole * period + register * WIDTH;
            let words = len.saturating_sub(at).min(WIDTH) / 8;
            if words > 0 {
                let mask = (u16::MAX >> (16 - words)) as __mmask8;
                // SAFETY: only words within the slots are read.
                let keys = unsafe { _mm512_maskz_loadu_epi64(mask, codes.add(at).cast()) };
                let found = _mm512_mask_mov_epi64(none, mask, distances::<WORDS>(keys, query[register]));
                *least = _mm512_min_epu32(*least, found);
            }
        }
        for (register, least) in least.into_iter().enumerate() {
            let mut places = [0_u64; WIDTH / 8];
            // SAFETY: the array is as long as a register.
            unsafe { _mm512_storeu_si512(places.as_mut_ptr().cast(), least) };
            for (place, found) in places.into_iter().enumerate().step_by(WORDS) {
                let head = (register * WIDTH + place * 8) % token / spec.code_len;
                of_heads[head] = of_heads[head].min(found as u32);
            }
        }
    });
}

/// In each word of a code, in how many bits the whole code differs.
#[inline]
#[target_feature(enable = "avx512f,avx512vpopcntdq")]
fn distances<const WORDS: usize>(keys: __m512i, query: __m512i) -> __m512i {
    let mut counts = _mm512_popcnt_epi64(_mm512_xor_si512(keys, query));
    if WORDS >= 2 {
        counts = _mm512_add_epi64(counts, _mm512_shuffle_epi32::<0b01_00_11_10>(counts));
    }
    if WORDS >= 4 {
        counts = _mm512_add_epi64(counts, _mm512_permutex_epi64::<0b01_00_11_10>(counts));
    }
    if WORDS >= 8 {
        counts = _mm512_add_epi64(counts, _mm512_shuffle_i64x2::<0b01_00_11_10>(counts, counts));
    }
    counts
}

/// Most bits of a code whose weights can be added up in 16 bits: pairs of weights up to 127, one pair from each word.
const MOST_WEIGHTS: usize = 128 * 64;

/// Several queries for each head.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")]
fn summed(spec: &HammingScores<'_>, out: &ScoreRows<i32>, row: usize, blocks: Range<usize>) {
    let (heads, len, per_head) = (spec.heads, spec.code_len, spec.queries_per_head);
    let mut weights = vec![0_i8; heads * len * 8];
    let mut constants = vec![0_i32; heads];
    for (head, queries) in queries(spec, row).chunks_exact(per_head * len).enumerate() {
        for bit in 0..len * 8 {
            let set = queries
                .chunks_exact(len)
                .filter(|query| query[bit / 8] >> (bit % 8) & 1 == 1);
            let set = set.count() as i32;
            constants[head] += set;
            weights[head * len * 8 + bit] = (per_head as i32 - 2 * set) as i8; // at most 127 queries
        }
    }
    let ones = _mm512_set1_epi8(1);
    each_block(spec, out, row, blocks, |codes, slots, least| {
        for slot in 0..slots {
            for (head, least) in least.iter_mut().enumerate() {
                let mut sum = _mm512_setzero_si512();
                for word in 0..len / 8 {
                    // SAFETY: the word is within the code, and there are as many weights as bits.
                    let (key, weights) = unsafe {
                        let key = codes.add((slot * heads + head) * len + word * 8).cast::<u64>();
                        let weights = weights.as_ptr().add((head * len + word * 8) * 8);
                        (key.read_unaligned(), _mm512_loadu_si512(weights.cast()))
                    };
                    let taken = _mm512_maskz_mov_epi8(key, weights);
                    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(ones, taken));
                }
                let pairs = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
                let distance = constants[head] + _mm512_reduce_add_epi32(pairs);
                *least = (distance as u32).min(*least);
            }
        }
    });
}
