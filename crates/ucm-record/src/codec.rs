//! The stored forms of a record's layers, as in the header's codec field.

use ucm_core::DType;

use super::layout::RecordLayout;

/// In the low byte of a code: byte planes compressed by zstd.
const ZSTD: u32 = 1;
/// In the low byte of a code: byte planes compressed by lz4, which older versions wrote. Such a
/// record is refused and the next dump replaces it; it does not count as a newer version.
const LZ4: u32 = 2;

/// How the layers of a record are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Codec(u32);

/// Position of the element size in the code.
const WIDTH_SHIFT: u32 = 8;

impl Codec {
    /// Uncompressed.
    pub const AS_IS: Self = Self(0);

    /// Byte planes of elements of `width` bytes: 1, 2 or 4.
    pub fn planes(width: usize) -> Option<Self> {
        matches!(width, 1 | 2 | 4).then_some(Self(ZSTD | (width as u32) << WIDTH_SHIFT))
    }

    /// The codec for records of this layout, by the type of their elements. Layers that are not
    /// whole elements are split into single bytes.
    pub fn of(layout: &RecordLayout) -> Self {
        let width = match layout.dtype {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
            _ => 1,
        };
        let codecs = [width, 1].map(Self::planes);
        let fits = |codec: &Self| codec.fits(layout.layer_len);
        codecs
            .into_iter()
            .flatten()
            .find(fits)
            .unwrap_or(Self::AS_IS)
    }

    /// The codec of a code; `None` if this version does not know the code.
    pub fn from_code(code: u32) -> Option<Self> {
        let width = code >> WIDTH_SHIFT;
        match code & 0xff {
            0 if width == 0 => Some(Self::AS_IS),
            ZSTD | LZ4 if matches!(width, 1 | 2 | 4) => Some(Self(code)),
            _ => None,
        }
    }

    /// The code in record headers.
    pub fn code(self) -> u32 {
        self.0
    }

    /// True for uncompressed layers.
    pub fn is_as_is(self) -> bool {
        self == Self::AS_IS
    }

    /// True if this version can decode this form; false for lz4.
    pub fn is_readable(self) -> bool {
        self.0 & 0xff != LZ4
    }

    /// Bytes of an element; 0 for uncompressed layers.
    pub fn width(self) -> usize {
        (self.0 >> WIDTH_SHIFT) as usize
    }

    /// True if a layer of `len` bytes is a whole number of elements.
    pub fn fits(self, layer_len: u64) -> bool {
        self.is_as_is() || layer_len.is_multiple_of(self.width() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_codes_of_this_version_are_known() {
        let known: Vec<u32> = (0..1 << 20)
            .filter(|&code| Codec::from_code(code).is_some())
            .collect();
        assert_eq!(known, [0, 0x101, 0x102, 0x201, 0x202, 0x401, 0x402]);
        for code in known {
            assert_eq!(Codec::from_code(code).map(Codec::code), Some(code));
        }
        assert_eq!(Codec::planes(3), None);
        assert!(Codec::from_code(0x1_0201).is_none());
    }

    #[test]
    fn codes_of_lz4_are_known_and_not_readable() {
        for code in [0x102, 0x202, 0x402] {
            assert!(!Codec::from_code(code).unwrap().is_readable());
        }
        for codec in [Codec::AS_IS, Codec::planes(4).unwrap()] {
            assert!(codec.is_readable());
        }
    }
}
