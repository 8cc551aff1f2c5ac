//! The forms in which the layers of a record may be stored, as the header's codec field names them.

/// How the layers of a record are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Codec(u32);

/// Low byte of the code: byte planes, each a zstd frame or as it is.
const PLANES: u32 = 1;
/// Where the bytes of an element stand in the code.
const WIDTH_SHIFT: u32 = 8;

impl Codec {
    /// The layers as they are used.
    pub const AS_IS: Self = Self(0);

    /// Byte planes of elements of so many bytes: 1, 2 or 4.
    pub fn planes(width: usize) -> Option<Self> {
        let code = match width {
            1 => PLANES | 1 << WIDTH_SHIFT,
            2 => PLANES | 2 << WIDTH_SHIFT,
            4 => PLANES | 4 << WIDTH_SHIFT,
            _ => return None,
        };
        Some(Self(code))
    }

    /// The codec of a code, `None` for one that this version does not know.
    pub fn from_code(code: u32) -> Option<Self> {
        if code == 0 {
            return Some(Self::AS_IS);
        }
        Self::planes((code >> WIDTH_SHIFT) as usize).filter(|codec| codec.0 == code)
    }

    /// The code in record headers.
    pub fn code(self) -> u32 {
        self.0
    }

    /// Whether nothing was done to them.
    pub fn is_as_is(self) -> bool {
        self == Self::AS_IS
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
        assert_eq!(known, [0, 0x101, 0x201, 0x401]);
        for code in known {
            assert_eq!(Codec::from_code(code).map(Codec::code), Some(code));
        }
        assert_eq!(Codec::planes(3), None);
        assert!(Codec::from_code(0x1_0201).is_none());
    }
}
