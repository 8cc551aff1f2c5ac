//! Numbers side by side: the few operations the kernels are written in, one implementation for each instruction set.
//!
//! A kernel is a function generic over [`Lanes`], inlined into a small function that is compiled for the instruction
//! set. Sums are taken in the same order on every vector set, so AVX2 and AVX-512 give the same bits; the scalar lane
//! adds one number after the other, without fused operations.
#![allow(
    unsafe_code,
    reason = "instructions that not every processor has, and loads by address"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;

use crate::element::{Bf16, F16, Number};

/// Some singles side by side.
///
/// # Safety
///
/// Every function needs a processor with the instructions of the implementation, and has to be inlined into a function
/// that is compiled for them. Loads read [`Lanes::WIDTH`] elements at an address of any alignment.
pub(crate) trait Lanes: Copy {
    /// How many.
    const WIDTH: usize;
    /// Independent sums that hide the latency of an addition.
    const SUMS: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load_f32(from: *const f32) -> Self;
    unsafe fn load_bf16(from: *const Bf16) -> Self;
    unsafe fn load_f16(from: *const F16) -> Self;
    unsafe fn load_i8(from: *const i8) -> Self;
    /// `self + a * b`.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// `self + a * b` with one rounding, on every set: the same bits everywhere.
    unsafe fn add_product_exact(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    /// A bit for each lane, the first one lowest: whether it is above zero.
    unsafe fn positive(self) -> u32;
    /// The sum of all.
    unsafe fn sum(self) -> f32;
    /// Asks for the cache line at an address, which need not be mapped.
    unsafe fn prefetch(at: *const u8);
}

/// Elements that lanes are loaded from.
pub(crate) trait Load: Number {
    /// As for [`Lanes`].
    unsafe fn load<L: Lanes>(from: *const Self) -> L;
}

impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: as the caller vouches.
        unsafe { L::load_bf16(from) }
    }
}

impl Load for F16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: as the caller vouches.
        unsafe { L::load_f16(from) }
    }
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: as the caller vouches.
        unsafe { L::load_f32(from) }
    }
}

impl Load for i8 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: as the caller vouches.
        unsafe { L::load_i8(from) }
    }
}

/// One number at a time: the oracle.
#[derive(Clone, Copy)]
pub(crate) struct Scalar(f32);

impl Lanes for Scalar {
    const WIDTH: usize = 1;
    const SUMS: usize = 1;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self(value)
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: as the caller vouches.
        Self(unsafe { from.read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const Bf16) -> Self {
        // SAFETY: as the caller vouches.
        Self(unsafe { from.read_unaligned() }.to_f32())
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const F16) -> Self {
        // SAFETY: as the caller vouches.
        Self(unsafe { from.read_unaligned() }.to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as the caller vouches.
        Self(unsafe { from.read_unaligned() }.to_f32())
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        Self(self.0 + a.0 * b.0)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
    #[inline(always)]
    unsafe fn add_product_exact(self, a: Self, b: Self) -> Self {
        Self(a.0.mul_add(b.0, self.0))
    }
    #[inline(always)]
    unsafe fn positive(self) -> u32 {
        u32::from(self.0 > 0.0)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self.0
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

/// `Σ a·b` over `len` elements, or `Σ (a - scale·b)²`.
///
/// # Safety
///
/// As for [`Lanes`]; both have `len` elements.
#[inline(always)]
pub(crate) unsafe fn reduce<L: Lanes, N: Load, const SQUARED_DISTANCE: bool>(
    a: *const f32,
    b: *const N,
    scale: f32,
    len: usize,
) -> f32 {
    // SAFETY: every index below is smaller than `len`.
    unsafe {
        let minus = L::splat(-scale);
        let step = |sum: L, at: usize| {
            let (a, b) = (L::load_f32(a.add(at)), N::load::<L>(b.add(at)));
            if SQUARED_DISTANCE {
                let apart = a.add_product(b, minus);
                sum.add_product(apart, apart)
            } else {
                sum.add_product(a, b)
            }
        };
        let mut sums = [L::splat(0.0); 4];
        let mut at = 0;
        while L::SUMS == 4 && at + 4 * L::WIDTH <= len {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = step(*sum, at + i * L::WIDTH);
            }
            at += 4 * L::WIDTH;
        }
        while at + L::WIDTH <= len {
            sums[0] = step(sums[0], at);
            at += L::WIDTH;
        }
        let mut total = if L::SUMS == 4 {
            sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
        } else {
            sums[0].sum()
        };
        while at < len {
            let (a, b) = (a.add(at).read_unaligned(), b.add(at).read_unaligned().to_f32());
            total += if SQUARED_DISTANCE {
                (a - scale * b) * (a - scale * b)
            } else {
                a * b
            };
            at += 1;
        }
        total
    }
}
