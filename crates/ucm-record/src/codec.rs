//! The forms in which the layers of a record may be stored, as the header's codec field names them.

use ucm_core::DType;

use super::layout::RecordLayout;

/// What makes byte planes shorter. Its number is the low byte of a codec's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// zstd frames, tuned for planes of exponents: shorter than by lz4, and slower.
    Zstd = 1,
    /// lz4 blocks.
    Lz4 = 2,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 2] = [Self::Zstd, Self::Lz4];

    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        }
    }
}

/// How the layers of a record are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Codec(u32);

/// Where the bytes of an element stand in the code.
const WIDTH_SHIFT: u32 = 8;

impl Codec {
    /// The layers as they are used.
    pub const AS_IS: Self = Self(0);

    /// Byte planes of elements of so many bytes: 1, 2 or 4.
    pub fn planes(algorithm: Algorithm, width: usize) -> Option<Self> {
        let width = match width {
            1 => 1,
            2 => 2,
            4 => 4,
            _ => return None,
        };
        Some(Self(algorithm as u32 | width << WIDTH_SHIFT))
    }

    /// The codec for records of this layout, by the type of their elements. Layers that are no
    /// whole number of them are taken byte by byte.
    pub fn of(algorithm: Algorithm, layout: &RecordLayout) -> Self {
        let width = match layout.dtype {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
            _ => 1,
        };
        let codecs = [width, 1].map(|width| Self::planes(algorithm, width));
        let fits = |codec: &Self| codec.fits(layout.layer_len);
        codecs
            .into_iter()
            .flatten()
            .find(fits)
            .unwrap_or(Self::AS_IS)
    }

    /// The codec of a code, `None` for one that this version does not know.
    pub fn from_code(code: u32) -> Option<Self> {
        if code == 0 {
            return Some(Self::AS_IS);
        }
        let known =
            Algorithm::ALL.map(|algorithm| Self::planes(algorithm, (code >> WIDTH_SHIFT) as usize));
        known.into_iter().flatten().find(|codec| codec.0 == code)
    }

    /// The code in record headers.
    pub fn code(self) -> u32 {
        self.0
    }

    /// Whether nothing was done to them.
    pub fn is_as_is(self) -> bool {
        self == Self::AS_IS
    }

    /// What made their planes shorter; none where the layers are as they are.
    pub fn algorithm(self) -> Option<Algorithm> {
        let mut all = Algorithm::ALL.into_iter();
        all.find(|&algorithm| algorithm as u32 == self.0 & 0xff)
    }

    /// Bytes of an element; 0 where the layers are as they are.
    pub fn width(self) -> usize {
        (self.0 >> WIDTH_SHIFT) as usize
    }

    /// Whether a layer of so many bytes is whole elements.
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
        assert_eq!(Codec::planes(Algorithm::Zstd, 3), None);
        assert!(Codec::from_code(0x1_0201).is_none());
    }

    #[test]
    fn a_codec_knows_its_algorithm() {
        assert_eq!(Codec::AS_IS.algorithm(), None);
        for algorithm in Algorithm::ALL {
            let codec = Codec::planes(algorithm, 4).unwrap();
            assert_eq!((codec.algorithm(), codec.width()), (Some(algorithm), 4));
        }
    }
}
