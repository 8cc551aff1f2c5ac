//! Sixteen lanes in two registers of AVX2.

use std::arch::x86_64::*;

use super::{Lanes, operations};
use crate::element::{Bf16, F16};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub(crate) __m256, pub(crate) __m256);

/// The sum of eight lanes, by halves.
///
/// # Safety
///
/// The processor has AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(lanes: __m256) -> f32 {
    // SAFETY: as the caller vouches.
    unsafe {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(lanes),
            _mm256_extractf128_ps::<1>(lanes),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

impl Lanes for Avx2 {
    const WIDTH: usize = 16;
    const SUMS: usize = 4;
    const REGISTERS: usize = 16;

    operations! {
        splat(value: f32) -> Self = Self(_mm256_set1_ps(value), _mm256_set1_ps(value));
        load_f32(from: *const f32) -> Self = {
            Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
        };
        load_bf16(from: *const Bf16) -> Self = {
            let half = |at: usize| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(at).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            };
            Self(half(0), half(8))
        };
        load_f16(from: *const F16) -> Self = {
            let half = |at: usize| _mm256_cvtph_ps(_mm_loadu_si128(from.add(at).cast()));
            Self(half(0), half(8))
        };
        load_i8(from: *const i8) -> Self = {
            let half = |at: usize| {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(at).cast())))
            };
            Self(half(0), half(8))
        };
        store(self, to: *mut f32) -> () = {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        };
        add(self, other: Self) -> Self = {
            Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1))
        };
        add_product(self, a: Self, b: Self) -> Self = {
            Self(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1))
        };
        add_product_exact(self, a: Self, b: Self) -> Self = self.add_product(a, b);
        positive(self) -> u32 = {
            let half = |lanes| {
                let above = _mm256_cmp_ps::<_CMP_GT_OQ>(lanes, _mm256_setzero_ps());
                _mm256_movemask_ps(above) as u32
            };
            half(self.0) | half(self.1) << 8
        };
        max(self, other: Self) -> Self = {
            Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1))
        };
        round(self) -> Self = {
            let half =
                |lanes| _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(lanes);
            Self(half(self.0), half(self.1))
        };
        scale_by_power(self, power: Self) -> Self = {
            let half = |lanes, power| {
                let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(power));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(lanes), exponent))
            };
            Self(half(self.0, power.0), half(self.1, power.1))
        };
        most(self) -> f32 = {
            let eight = _mm256_max_ps(self.0, self.1);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        };
        sum(self) -> f32 = sum_of_eight(_mm256_add_ps(self.0, self.1));
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}
