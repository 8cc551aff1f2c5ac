//! Distances 32 bytes at a time: AVX2 counts the bits of each half byte by a table lookup.
//!
//! The table of sixteen counts in a register is W. Mula's, "Faster population counts using AVX2
//! instructions" (2016).

use std::arch::x86_64::*;

use super::stream::{self, Register};
use super::{HammingJob, words};
use crate::lanes::operations;

/// See [`super::Kernel`].
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn score(job: HammingJob<'_>) {
    // SAFETY: as the caller vouches.
    unsafe {
        if !stream::score::<Avx2>(job.clone()) {
            words::score(job);
        }
    }
}

#[derive(Clone, Copy)]
struct Avx2(__m256i);

impl Register for Avx2 {
    const WIDTH: usize = 32;

    operations! {
        load(from: *const u8) -> Self = Self(_mm256_loadu_si256(from.cast()));
        store(self, to: *mut u8) -> () = _mm256_storeu_si256(to.cast(), self.0);
        splat(word: u64) -> Self = Self(_mm256_set1_epi64x(word.cast_signed()));
        least(self, other: Self) -> Self = Self(_mm256_min_epu32(self.0, other.0));
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn distances<const WORDS: usize>(self, query: Self) -> Self {
        // SAFETY: the caller vouches for the processor.
        unsafe {
            let counts = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
            ));
            let low = _mm256_set1_epi8(15);
            let bits = _mm256_xor_si256(self.0, query.0);
            let of_low = _mm256_shuffle_epi8(counts, _mm256_and_si256(bits, low));
            let of_high =
                _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16::<4>(bits), low));
            let mut found =
                _mm256_sad_epu8(_mm256_add_epi8(of_low, of_high), _mm256_setzero_si256());
            if WORDS >= 2 {
                found = _mm256_add_epi64(found, _mm256_shuffle_epi32::<0b01_00_11_10>(found));
            }
            if WORDS >= 4 {
                found = _mm256_add_epi64(found, _mm256_permute4x64_epi64::<0b01_00_11_10>(found));
            }
            Self(found)
        }
    }
}
