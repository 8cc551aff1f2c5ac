//! Sixteen lanes in one register of AVX-512.

use std::arch::x86_64::*;

use super::Lanes;
use crate::element::{Bf16, F16};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(crate) __m512);

// SAFETY of all blocks below: the processor has the instructions, as the trait requires, and loads
// read sixteen elements.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all, given above: the contract of the trait"
)]
impl Lanes for Avx512 {
    const WIDTH: usize = 16;
    const SUMS: usize = 4;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const Bf16) -> Self {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const F16) -> Self {
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe {
            let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm512_cvtepi32_ps(wide))
        }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn add_product_exact(self, a: Self, b: Self) -> Self {
        unsafe { self.add_product(a, b) }
    }
    #[inline(always)]
    unsafe fn positive(self) -> u32 {
        u32::from(unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, _mm512_setzero_ps()) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(unsafe { _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0) })
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, power: Self) -> Self {
        unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(power.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(
                _mm512_castps_si512(self.0),
                exponent,
            )))
        }
    }
    #[inline(always)]
    unsafe fn most(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            super::avx2::sum_of_eight(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
