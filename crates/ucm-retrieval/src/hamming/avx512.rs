//! Distances 64 bytes at a time, by the vector instruction that counts bits.
//!
//! Where several queries of a head add up, their distances to a key are linear in the key's bits:
//! with `c_j` queries that have bit `j`, of `R`, the sum is `Σ_j c_j + Σ_j k_j·(R - 2·c_j)`. So a
//! key costs one masked sum of small weights, however many queries there are.

use std::arch::x86_64::*;

use super::stream::{self, Register};
use super::{HammingJob, words};
use crate::lanes::operations;

/// See [`super::Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")]
pub(super) unsafe fn score(job: HammingJob<'_>) {
    if job.spec.queries_per_head > 1
        && job.spec.code_len.is_multiple_of(8)
        && job.spec.code_len <= MOST_WEIGHTS / 8
    {
        return summed(job);
    }
    // SAFETY: as the caller vouches.
    unsafe {
        if !stream::score::<Avx512>(job.clone()) {
            words::score(job);
        }
    }
}

#[derive(Clone, Copy)]
struct Avx512(__m512i);

impl Register for Avx512 {
    const WIDTH: usize = 64;

    operations! {
        load(from: *const u8) -> Self = Self(_mm512_loadu_si512(from.cast()));
        store(self, to: *mut u8) -> () = _mm512_storeu_si512(to.cast(), self.0);
        splat(word: u64) -> Self = Self(_mm512_set1_epi64(word.cast_signed()));
        least(self, other: Self) -> Self = Self(_mm512_min_epu32(self.0, other.0));
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn distances<const WORDS: usize>(self, query: Self) -> Self {
        // SAFETY: the caller vouches for the processor.
        unsafe {
            let mut counts = _mm512_popcnt_epi64(_mm512_xor_si512(self.0, query.0));
            if WORDS >= 2 {
                counts = _mm512_add_epi64(counts, _mm512_shuffle_epi32::<0b01_00_11_10>(counts));
            }
            if WORDS >= 4 {
                counts = _mm512_add_epi64(counts, _mm512_permutex_epi64::<0b01_00_11_10>(counts));
            }
            if WORDS >= 8 {
                counts = _mm512_add_epi64(
                    counts,
                    _mm512_shuffle_i64x2::<0b01_00_11_10>(counts, counts),
                );
            }
            Self(counts)
        }
    }
}

/// Most bits of a code whose weights can be added up in 16 bits: pairs of weights up to 127, one
/// pair from each word.
const MOST_WEIGHTS: usize = 128 * 64;

/// Several queries for each head.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")]
fn summed(job: HammingJob<'_>) {
    let (heads, len, per_head) = (job.spec.heads, job.spec.code_len, job.spec.queries_per_head);
    let mut weights = vec![0_i8; heads * len * 8];
    let mut constants = vec![0_i32; heads];
    for (head, queries) in job.queries().chunks_exact(per_head * len).enumerate() {
        for bit in 0..len * 8 {
            let set = queries
                .chunks_exact(len)
                .filter(|query| query[bit / 8] >> (bit % 8) & 1 == 1);
            let set = set.count() as i32;
            constants[head] += set;
            // at most 127 queries
            weights[head * len * 8 + bit] = (per_head as i32 - 2 * set) as i8;
        }
    }
    let ones = _mm512_set1_epi8(1);
    job.each_block(|codes, slots, _, least| {
        for slot in 0..slots {
            for (head, least) in least.iter_mut().enumerate() {
                let mut sum = _mm512_setzero_si512();
                for word in 0..len / 8 {
                    // SAFETY: the word is within the code, and there are as many weights as bits.
                    let (key, weights) = unsafe {
                        let key = codes
                            .add((slot * heads + head) * len + word * 8)
                            .cast::<u64>();
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
