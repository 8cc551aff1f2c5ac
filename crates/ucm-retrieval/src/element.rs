//! Types of the numbers in representations, queries and pages, one at a time. The vector forms are
//! in `lanes`.

use ucm_core::{DType, Error, Result};

/// An element type of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// 8-bit integer with a separate scale.
    I8,
}

impl Element {
    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The element of a KV type.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for a type that no kernel reads.
    pub fn from_dtype(dtype: DType) -> Result<Self> {
        match dtype {
            DType::Bf16 => Ok(Self::Bf16),
            DType::F16 => Ok(Self::F16),
            DType::F32 => Ok(Self::F32),
            DType::Int8 => Ok(Self::I8),
            _ => Err(Error::invalid("elements are bf16, f16, f32 or int8 here")
                .with("dtype", dtype.name())),
        }
    }
}

/// A number in its memory format.
pub(crate) trait Number: Copy + Send + Sync + 'static {
    /// Its value, exactly.
    fn to_f32(self) -> f32;
}

/// bfloat16: the upper half of a single.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

/// IEEE half precision.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

impl Number for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

impl Number for F16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7fff) << 13;
        let sign = u32::from(self.0 & 0x8000) << 16;
        // Interpreted as a single, the exponent is 112 too small; the product is exact, also for
        // subnormal halves.
        let value = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
        let special = if self.0 & 0x7c00 == 0x7c00 {
            0x7f80_0000
        } else {
            0
        };
        f32::from_bits(value.to_bits() | special | sign)
    }
}

impl Number for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Number for i8 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

/// The nearest bfloat16, ties to even.
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The nearest half, ties to even; larger numbers become infinite.
pub(crate) fn to_f16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    let magnitude = value.abs();
    if value.is_nan() {
        return sign | 0x7e00;
    }
    let bits = if magnitude < f32::from_bits(0x3880_0000) {
        // A subnormal half: adding 0.5 leaves its multiples of 2^-24 in the lowest bits, correctly
        // rounded.
        (magnitude + 0.5).to_bits() - 0.5f32.to_bits()
    } else {
        let rounded = magnitude.to_bits() + 0xfff + (magnitude.to_bits() >> 13 & 1);
        (rounded >> 13).saturating_sub(112 << 10).min(0x7c00)
    };
    sign | bits as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_halves() {
        let known = [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 2f32.powi(-24)),
            (0x03ff, 1023.0 * 2f32.powi(-24)),
            (0x0400, 2f32.powi(-14)),
            (0x3555, 0.333_251_95),
            (0xfc00, f32::NEG_INFINITY),
        ];
        for (bits, value) in known {
            assert_eq!(F16(bits).to_f32(), value);
            assert_eq!(to_f16(value), bits);
        }
        assert!(F16(0x7e00).to_f32().is_nan());
    }

    #[test]
    fn every_half_and_bfloat_comes_back() {
        for bits in 0..=u16::MAX {
            let (half, bfloat) = (F16(bits).to_f32(), Bf16(bits).to_f32());
            assert!(half.is_nan() || to_f16(half) == bits, "{bits:04x}");
            assert!(bfloat.is_nan() || to_bf16(bfloat) == bits, "{bits:04x}");
        }
    }

    #[test]
    fn ties_go_to_even_and_the_rest_to_the_nearest() {
        for bits in (0..0x7bff).step_by(7) {
            let (low, high) = (F16(bits).to_f32(), F16(bits + 1).to_f32());
            let middle = (low + high) / 2.0;
            let even = if bits & 1 == 0 { bits } else { bits + 1 };
            assert_eq!(to_f16(middle), even);
            assert_eq!(to_f16(-middle), even | 0x8000);
            assert_eq!(to_f16(middle.next_up()), bits + 1);
            assert_eq!(to_f16(middle.next_down()), bits);
        }
        for bits in (0..0x7f7f_u16).step_by(7) {
            let middle = f32::from_bits(u32::from(bits) << 16 | 0x8000);
            let even = if bits & 1 == 0 { bits } else { bits + 1 };
            assert_eq!(to_bf16(middle), even);
            assert_eq!(to_bf16(middle.next_up()), bits + 1);
            assert_eq!(to_bf16(middle.next_down()), bits);
        }
        assert_eq!(
            to_f16(65_520.0),
            0x7c00,
            "half way beyond the largest is infinite"
        );
        assert_eq!(to_f16(65_519.0), 0x7bff);
    }
}
