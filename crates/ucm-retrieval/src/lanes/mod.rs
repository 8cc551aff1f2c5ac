//! Vector lanes: the few operations of which the kernels are made, with one implementation for each
//! instruction set.
//!
//! A kernel is a function generic over [`Lanes`], inlined into a small function that is compiled
//! for the instruction set. Sums are taken in the same order on every vector set, so AVX2 and
//! AVX-512 yield the same bits; the scalar lane adds one number after the other, without fused
//! operations.
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

/// Operations of an instruction set, each one expression and inlined.
macro_rules! operations {
    ($($name:ident($($argument:tt)*) -> $result:ty = $value:expr;)*) => {
        $(#[inline(always)]
        #[allow(unused_unsafe, reason = "not every expression needs it")]
        unsafe fn $name($($argument)*) -> $result {
            // SAFETY: the caller vouches for the instructions, and for lengths as the trait says.
            unsafe { $value }
        })*
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use operations;

/// Some singles in lanes.
///
/// # Safety
///
/// Every function requires a processor with the implementation's instructions, and must be inlined
/// into a function compiled for them. Loads read [`Lanes::WIDTH`] elements at an address of any
/// alignment.
pub(crate) trait Lanes: Copy {
    /// How many.
    const WIDTH: usize;
    /// Independent sums that hide the latency of an addition.
    const SUMS: usize;
    /// Registers of sixteen singles, or of eight.
    const REGISTERS: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load_f32(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn load_bf16(from: *const Bf16) -> Self;
    unsafe fn load_f16(from: *const F16) -> Self;
    unsafe fn load_i8(from: *const i8) -> Self;
    /// `self + a * b`.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// `self + a * b` with one rounding: the same bits on every set.
    unsafe fn add_product_exact(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    /// A bit for each lane, the first one lowest: set if the lane is above zero.
    unsafe fn positive(self) -> u32;
    /// The lane-wise maximum.
    unsafe fn max(self, other: Self) -> Self;
    /// The nearest whole numbers, ties to even.
    unsafe fn round(self) -> Self;
    /// Each lane times two to the power of an integer.
    unsafe fn scale_by_power(self, power: Self) -> Self;
    /// The sum of all.
    unsafe fn sum(self) -> f32;
    /// The largest.
    unsafe fn most(self) -> f32;
    /// Prefetches the cache line at an address, which need not be mapped.
    unsafe fn prefetch(at: *const u8);
}

/// Element types from which lanes are loaded.
pub(crate) trait Load: Number {
    /// As for [`Lanes`].
    unsafe fn load<L: Lanes>(from: *const Self) -> L;
}

macro_rules! load {
    ($($element:ty: $load:ident),*) => {
        $(impl Load for $element {
            #[inline(always)]
            unsafe fn load<L: Lanes>(from: *const Self) -> L {
                // SAFETY: as the caller vouches.
                unsafe { L::$load(from) }
            }
        })*
    };
}
load!(Bf16: load_bf16, F16: load_f16, f32: load_f32, i8: load_i8);

/// The function `$f::<L>` compiled for an instruction set, or `$f::<L, N>` for elements of a type
/// besides, as a pointer to an unsafe function.
macro_rules! kernel {
    ($isa:expr, $f:ident $(<$n:ty>)? ($($argument:ident: $type:ty),*)) => {{
        unsafe fn scalar($($argument: $type),*) {
            // SAFETY: as the caller vouches.
            unsafe { $f::<crate::lanes::Scalar $(, $n)?>($($argument),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($($argument: $type),*) {
            // SAFETY: as the caller vouches.
            unsafe { $f::<crate::lanes::Avx2 $(, $n)?>($($argument),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn avx512($($argument: $type),*) {
            // SAFETY: as the caller vouches.
            unsafe { $f::<crate::lanes::Avx512 $(, $n)?>($($argument),*) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            crate::isa::Isa::Avx2 => avx2,
            #[cfg(target_arch = "x86_64")]
            crate::isa::Isa::Avx512 => avx512,
            _ => scalar as unsafe fn($($type),*),
        }
    }};
    ($isa:expr, $element:expr, $f:ident($($arguments:tt)*)) => {
        match $element {
            crate::element::Element::Bf16 => {
                crate::lanes::kernel!($isa, $f<crate::element::Bf16>($($arguments)*))
            }
            crate::element::Element::F16 => {
                crate::lanes::kernel!($isa, $f<crate::element::F16>($($arguments)*))
            }
            crate::element::Element::F32 => crate::lanes::kernel!($isa, $f<f32>($($arguments)*)),
            crate::element::Element::I8 => crate::lanes::kernel!($isa, $f<i8>($($arguments)*)),
        }
    };
}
pub(crate) use kernel;

/// One number at a time: the oracle.
#[derive(Clone, Copy)]
pub(crate) struct Scalar(f32);

impl Lanes for Scalar {
    const WIDTH: usize = 1;
    const SUMS: usize = 1;
    const REGISTERS: usize = 1;

    operations! {
        splat(value: f32) -> Self = Self(value);
        load_f32(from: *const f32) -> Self = Self(from.read_unaligned());
        load_bf16(from: *const Bf16) -> Self = Self(from.read_unaligned().to_f32());
        load_f16(from: *const F16) -> Self = Self(from.read_unaligned().to_f32());
        load_i8(from: *const i8) -> Self = Self(from.read_unaligned().to_f32());
        store(self, to: *mut f32) -> () = to.write_unaligned(self.0);
        add(self, other: Self) -> Self = Self(self.0 + other.0);
        add_product(self, a: Self, b: Self) -> Self = Self(self.0 + a.0 * b.0);
        add_product_exact(self, a: Self, b: Self) -> Self = Self(a.0.mul_add(b.0, self.0));
        positive(self) -> u32 = u32::from(self.0 > 0.0);
        max(self, other: Self) -> Self = Self(self.0.max(other.0));
        round(self) -> Self = Self(self.0.round_ties_even());
        scale_by_power(self, power: Self) -> Self = Self(self.0 * power.0.exp2());
        sum(self) -> f32 = self.0;
        most(self) -> f32 = self.0;
        prefetch(_at: *const u8) -> () = ();
    }
}

/// `e` to the power of each lane, for numbers up to 88, with a relative error below 2e-7; numbers
/// below -87 yield `e^-87`.
///
/// A power of two times `e^r`, with `r` at most half of `ln 2` away from zero:
/// `1 + r + r²·(polynomial of Cephes' expf)`.
///
/// # Safety
///
/// As for [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn exp<L: Lanes>(of: L) -> L {
    const POLYNOMIAL: [f32; 6] = [
        1.987_569_1e-4,
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_65,
        0.5,
    ];
    // SAFETY: as the caller vouches.
    unsafe {
        let of = of.max(L::splat(-87.0));
        let power = L::splat(0.0)
            .add_product(of, L::splat(std::f32::consts::LOG2_E))
            .round();
        // ln 2 in two parts. The first has few digits, so that its products are exact.
        let rest = of.add_product(power, L::splat(-0.693_359_4));
        let rest = rest.add_product(power, L::splat(2.121_944_4e-4));
        let mut sum = L::splat(POLYNOMIAL[0]);
        for term in POLYNOMIAL.into_iter().skip(1) {
            sum = L::splat(term).add_product(sum, rest);
        }
        let square = L::splat(0.0).add_product(rest, rest);
        rest.add_product(sum, square)
            .add(L::splat(1.0))
            .scale_by_power(power)
    }
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
            let (a, b) = (
                a.add(at).read_unaligned(),
                b.add(at).read_unaligned().to_f32(),
            );
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs on every set of this processor, sixteen at a time.
    fn exps(of: &[f32; 16]) -> Vec<[f32; 16]> {
        #[inline(always)]
        unsafe fn on<L: Lanes>(of: &[f32; 16]) -> [f32; 16] {
            let mut found = [0.0; 16];
            for at in (0..16).step_by(L::WIDTH) {
                // SAFETY: the arrays have sixteen numbers.
                unsafe { exp(L::load_f32(of.as_ptr().add(at))).store(found.as_mut_ptr().add(at)) };
            }
            found
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn on_avx2(of: &[f32; 16]) -> [f32; 16] {
            // SAFETY: the caller checked the processor.
            unsafe { on::<Avx2>(of) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512dq")]
        unsafe fn on_avx512(of: &[f32; 16]) -> [f32; 16] {
            // SAFETY: the caller checked the processor.
            unsafe { on::<Avx512>(of) }
        }
        // SAFETY: scalar lanes need no instructions; the others are checked.
        unsafe {
            let mut found = vec![on::<Scalar>(of)];
            #[cfg(target_arch = "x86_64")]
            if crate::Isa::Avx2.supported() {
                found.push(on_avx2(of));
            }
            #[cfg(target_arch = "x86_64")]
            if crate::Isa::Avx512.supported() {
                found.push(on_avx512(of));
            }
            found
        }
    }

    #[test]
    fn powers_of_e() {
        for step in 0..20_000_u16 {
            let of: [f32; 16] =
                std::array::from_fn(|i| (f32::from(step) + i as f32 / 16.0) * -0.0043 - 0.0001);
            for found in exps(&of) {
                for (found, of) in found.into_iter().zip(of) {
                    let right = f64::from(of.max(-87.0)).exp();
                    assert!(
                        (f64::from(found) / right - 1.0).abs() < 2e-7,
                        "e^{of} is {found}"
                    );
                }
            }
        }
        for found in exps(&[f32::NEG_INFINITY; 16])
            .into_iter()
            .chain(exps(&[-1e30; 16]))
        {
            assert!(found.into_iter().all(|found| (0.0..1e-37).contains(&found)));
        }
        for found in exps(&[0.0; 16]) {
            assert_eq!(found, [1.0; 16]);
        }
    }
}
