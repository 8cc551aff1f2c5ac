//! Sixteen lanes in one register of AVX-512.

use std::arch::x86_64::*;

use super::{Lanes, operations};
use crate::element::{Bf16, F16};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(crate) __m512);

impl Lanes for Avx512 {
    const WIDTH: usize = 16;
    const SUMS: usize = 4;
    const REGISTERS: usize = 32;

    operations! {
        splat(value: f32) -> Self = Self(_mm512_set1_ps(value));
        load_f32(from: *const f32) -> Self = Self(_mm512_loadu_ps(from));
        load_bf16(from: *const Bf16) -> Self = {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        };
        load_f16(from: *const F16) -> Self = Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
        load_i8(from: *const i8) -> Self = {
            Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))))
        };
        store(self, to: *mut f32) -> () = _mm512_storeu_ps(to, self.0);
        add(self, other: Self) -> Self = Self(_mm512_add_ps(self.0, other.0));
        add_product(self, a: Self, b: Self) -> Self = Self(_mm512_fmadd_ps(a.0, b.0, self.0));
        add_product_exact(self, a: Self, b: Self) -> Self = self.add_product(a, b);
        positive(self) -> u32 = {
            u32::from(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, _mm512_setzero_ps()))
        };
        max(self, other: Self) -> Self = Self(_mm512_max_ps(self.0, other.0));
        round(self) -> Self = {
            Self(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0))
        };
        scale_by_power(self, power: Self) -> Self = {
            let exponent = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(power.0));
            let scaled = _mm512_add_epi32(_mm512_castps_si512(self.0), exponent);
            Self(_mm512_castsi512_ps(scaled))
        };
        most(self) -> f32 = _mm512_reduce_max_ps(self.0);
        sum(self) -> f32 = {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            super::avx2::sum_of_eight(_mm256_add_ps(low, high))
        };
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}
