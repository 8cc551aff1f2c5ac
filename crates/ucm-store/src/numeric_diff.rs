//! How far two computations of the same KV lie apart: the measure of the self-audit.
//!
//! Computing a block again does not give the same bytes: the order of sums depends on the batch. So
//! what is compared is the largest difference within a tensor, relative to the largest value in it,
//! against a tolerance that depends on the element type. A relative difference per element would
//! say nothing, since some values are close to zero.

use ucm_core::DType;

/// How far apart two computations may lie before it is worth a word. Quantised and unknown types
/// compare as far as they mean something: bytes of unknown meaning must be equal.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-3,
        DType::F16 => 2e-2,
        DType::Bf16 => 5e-2,
        DType::Fp8E4m3 => 0.15,
        DType::Fp8E5m2 => 0.3,
        DType::Int8 => 5e-2,
        DType::Other | DType::Opaque => 0.0,
    }
}

/// Largest difference between two equally long tensors, relative to the largest value in either; 0
/// when they are equal byte for byte, infinite when one has a value that is not a number (or
/// endless) where the other has not. Bytes without a known meaning deviate by 1 or not at all.
pub fn numeric_diff(dtype: DType, one: &[u8], other: &[u8]) -> f64 {
    if one == other {
        return 0.0;
    }
    let (width, value): (usize, fn(&[u8]) -> f32) = match dtype {
        DType::F32 => (4, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => (2, |b| half(u16::from_le_bytes([b[0], b[1]]))),
        DType::Bf16 => (2, |b| {
            f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)
        }),
        DType::Fp8E4m3 => (1, |b| e4m3(b[0])),
        DType::Fp8E5m2 => (1, |b| half(u16::from(b[0]) << 8)),
        DType::Int8 => (1, |b| f32::from(b[0] as i8)),
        DType::Other | DType::Opaque => return 1.0,
    };
    if one.len() != other.len() || !one.len().is_multiple_of(width) {
        return f64::INFINITY;
    }
    let (mut most, mut scale) = (0f64, 0f64);
    for (a, b) in one.chunks_exact(width).zip(other.chunks_exact(width)) {
        if a == b {
            scale = scale.max(finite(value(a)));
            continue;
        }
        let (a, b) = (f64::from(value(a)), f64::from(value(b)));
        if !a.is_finite() || !b.is_finite() {
            if a.is_nan() && b.is_nan() {
                continue; // not a number in two spellings
            }
            return f64::INFINITY;
        }
        most = most.max((a - b).abs());
        scale = scale.max(a.abs()).max(b.abs());
    }
    if most == 0.0 { 0.0 } else { most / scale }
}

fn finite(value: f32) -> f64 {
    if value.is_finite() {
        f64::from(value.abs())
    } else {
        0.0
    }
}

/// The value of an IEEE half.
fn half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (
        i32::from(bits >> 10 & 0x1f),
        f32::from(bits & 0x3ff) / 1024.0,
    );
    sign * match exponent {
        0 => mantissa * 2f32.powi(-14),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + mantissa) * 2f32.powi(exponent - 15),
    }
}

/// The value of an 8-bit float with 4 exponent bits, which has no infinities (`e4m3fn`).
fn e4m3(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7) / 8.0);
    sign * match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-6),
        _ => (1.0 + mantissa) * 2f32.powi(exponent - 7),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_the_values_of_their_standards() {
        for (bits, value) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 2f32.powi(-24)),
            (0x7c00, f32::INFINITY),
        ] {
            assert_eq!(half(bits), value, "{bits:x}");
        }
        assert!(half(0x7c01).is_nan() && e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        for (bits, value) in [
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0x01, 2f32.powi(-9)),
            (0x78, 256.0),
        ] {
            assert_eq!(e4m3(bits), value, "{bits:x}");
        }
    }

    #[test]
    fn the_largest_difference_relative_to_the_largest_value() {
        let floats = |values: &[f32]| {
            values
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        let of =
            |one: &[f32], other: &[f32]| numeric_diff(DType::F32, &floats(one), &floats(other));
        assert_eq!(of(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(
            of(&[8.0, 0.0, -1.0], &[8.0, 1.0, -1.0]),
            0.125,
            "not relative to the zero"
        );
        assert_eq!(of(&[-8.0, 4.0], &[8.0, 4.0]), 2.0);
        assert_eq!(of(&[0.0], &[-0.0]), 0.0);
        assert_eq!(of(&[1.0, f32::NAN], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(of(&[1.0, f32::INFINITY], &[1.0, f32::NAN]), f64::INFINITY);
        assert_eq!(of(&[1.0, f32::NAN], &[1.0, -f32::NAN]), 0.0);
        assert_eq!(of(&[f32::INFINITY, 1.0], &[f32::INFINITY, 2.0]), 0.5);
        let bf16 = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
        assert_eq!(numeric_diff(DType::Bf16, &bf16(4.0), &bf16(3.0)), 0.25);
        assert_eq!(numeric_diff(DType::F16, &[0, 0x3c], &[0, 0x40]), 0.5);
        assert_eq!(numeric_diff(DType::Int8, &[0xff, 100], &[0x01, 100]), 0.02);
        assert_eq!(numeric_diff(DType::Fp8E5m2, &[0x3c], &[0x40]), 0.5);
    }

    #[test]
    fn bytes_without_a_meaning_are_equal_or_not() {
        for dtype in [DType::Other, DType::Opaque] {
            assert_eq!(
                (
                    numeric_diff(dtype, b"ab", b"ab"),
                    numeric_diff(dtype, b"ab", b"ac")
                ),
                (0.0, 1.0)
            );
            assert_eq!(tolerance(dtype), 0.0);
        }
        assert_eq!(
            numeric_diff(DType::F32, &[0; 3], &[1; 3]),
            f64::INFINITY,
            "no whole elements"
        );
        assert!(tolerance(DType::F32) < tolerance(DType::F16));
    }
}
