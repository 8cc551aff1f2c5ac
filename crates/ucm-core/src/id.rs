//! Names of blocks: the 16-byte id that stores use, and how a part's record id is made from a block
//! key.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::units::from_hex;

/// Sixteen bytes that name a block: a *block key* (the hash chain over tokens) or a *record id*
/// (the key of one part of it). Stores use record ids only.
///
/// ```
/// use ucm_core::BlockId;
///
/// let id = BlockId::from_slice(&[7; 16]).unwrap();
/// assert_eq!(id.to_hex(), "07070707070707070707070707070707");
/// assert_eq!(id.to_hex().parse::<BlockId>().unwrap(), id);
/// assert!(BlockId::from_slice(&[7; 4]).is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct BlockId(pub [u8; 16]);

impl BlockId {
    /// Length in bytes.
    pub const LEN: usize = 16;

    /// From exactly 16 bytes; any other length is an error that names it.
    pub fn from_slice(bytes: &[u8]) -> Result<Self> {
        match <[u8; 16]>::try_from(bytes) {
            Ok(id) => Ok(Self(id)),
            Err(_) => Err(Error::invalid(format!(
                "a block id has 16 bytes, this one has {}",
                bytes.len()
            ))),
        }
    }

    /// The 32 hex digits of the id, as in file names.
    pub fn to_hex(self) -> String {
        self.to_string()
    }

    /// XOR with a mask. The mask of a part turns a block key into a record id and back. The mask of
    /// a side shard turns the record id of a block into that of the record which holds the side
    /// shard alone, and back.
    #[must_use]
    pub fn xor(self, mask: IdMask) -> Self {
        Self((u128::from_ne_bytes(self.0) ^ u128::from_ne_bytes(mask.0)).to_ne_bytes())
    }
}

/// Digits of file names.
const HEX: &[u8; 16] = b"0123456789abcdef";

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Written by hand because a lookup makes one file name per block.
        let mut text = [0; 2 * Self::LEN];
        for (pair, byte) in text.chunks_exact_mut(2).zip(self.0) {
            pair[0] = HEX[usize::from(byte >> 4)];
            pair[1] = HEX[usize::from(byte & 0xf)];
        }
        f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for BlockId {
    type Err = Error;

    /// From 32 lower-case hex digits (the exact pattern of our file names).
    fn from_str(text: &str) -> Result<Self> {
        let lower = !text.bytes().any(|digit| digit.is_ascii_uppercase());
        from_hex(text).filter(|_| lower).map(Self).ok_or_else(|| {
            Error::invalid("a block id in text is 32 lower-case hex digits").with("text", text)
        })
    }
}

/// Which part of a block a record holds: KV group, pipeline rank, tensor rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug, Deserialize)]
pub struct Part {
    /// KV cache group.
    pub group: u32,
    /// Pipeline-parallel rank.
    pub pipeline_rank: u32,
    /// Tensor-parallel rank (0 where KV is replicated).
    pub tensor_rank: u32,
}

/// A mask that maps one id to another: see [`BlockId::xor`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdMask(pub [u8; 16]);

impl IdMask {
    /// The first 16 bytes of the SHA-256 of the concatenated parts.
    fn of(pieces: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        pieces.iter().for_each(|piece| hash.update(piece));
        let mut mask = [0; 16];
        mask.copy_from_slice(&hash.finalize()[..16]);
        Self(mask)
    }

    /// The mask of records that hold a side shard alone: the first 16 bytes of SHA-256("UCMSIDE" ‖
    /// its name, padded with zeros to 16 bytes ‖ the version of its content as u32 LE).
    pub fn of_side(name: &str, version: u32) -> Self {
        let mut padded = [0; 16];
        let len = name.len().min(padded.len());
        padded[..len].copy_from_slice(&name.as_bytes()[..len]);
        Self::of(&[b"UCMSIDE", &padded, &version.to_le_bytes()])
    }
}

impl Part {
    /// The mask of this part, one hash per part and none per block: the first 16 bytes of
    /// SHA-256("UCMPART" ‖ group ‖ pipeline rank ‖ tensor rank), numbers as u32 LE.
    pub fn mask(self) -> IdMask {
        IdMask::of(&[b"UCMPART", &self.to_bytes()])
    }

    /// The three numbers as 12 bytes, little endian, as in the record header.
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.group.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.pipeline_rank.to_le_bytes());
        bytes[8..].copy_from_slice(&self.tensor_rank.to_le_bytes());
        bytes
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "g{}p{}t{}",
            self.group, self.pipeline_rank, self.tensor_rank
        )
    }
}

impl FromStr for Part {
    type Err = Error;

    /// Parses exactly the form that `Display` writes.
    fn from_str(text: &str) -> Result<Self> {
        let numbers = || {
            let (group, rest) = text.strip_prefix('g')?.split_once('p')?;
            let (pipeline, tensor) = rest.split_once('t')?;
            Some(Self {
                group: group.parse().ok()?,
                pipeline_rank: pipeline.parse().ok()?,
                tensor_rank: tensor.parse().ok()?,
            })
        };
        let bad = || Error::invalid("a part in text is g0p0t0").with("text", text);
        numbers()
            .filter(|part| part.to_string() == text)
            .ok_or_else(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_read_as_it_is_shown() {
        let part = Part {
            group: 1,
            pipeline_rank: 20,
            tensor_rank: 3,
        };
        assert_eq!(part.to_string().parse::<Part>().unwrap(), part);
        for bad in ["", "g1p2", "g01p2t3", "g1p2t3 ", "g1p2t+3", "x1p2t3"] {
            assert!(bad.parse::<Part>().is_err(), "{bad}");
        }
    }

    #[test]
    fn hex_round_trip_and_exact_pattern() {
        let id = BlockId([0xab; 16]);
        assert_eq!(id.to_hex().parse::<BlockId>().unwrap(), id);
        for bad in [
            "",
            "ab",
            &"AB".repeat(16),
            &"zz".repeat(16),
            &"a".repeat(33),
        ] {
            assert!(bad.parse::<BlockId>().is_err(), "{bad}");
        }
        assert!(BlockId::from_slice(&[0; 15]).is_err());
    }

    #[test]
    fn parts_mask_invertibly_and_apart() {
        let key = BlockId([7; 16]);
        let a = Part {
            group: 0,
            pipeline_rank: 0,
            tensor_rank: 0,
        };
        let b = Part {
            group: 0,
            pipeline_rank: 0,
            tensor_rank: 1,
        };
        assert_ne!(key.xor(a.mask()), key.xor(b.mask()));
        assert_eq!(key.xor(b.mask()).xor(b.mask()), key);
    }

    #[test]
    fn side_shards_mask_by_name_and_version() {
        let hex = |name, version| BlockId(IdMask::of_side(name, version).0).to_hex();
        // hashlib.sha256(b"UCMSIDE" + name.ljust(16, b"\0") + version.to_bytes(4,
        // "little")).hexdigest()[:32]
        assert_eq!(hex("mean-k", 3), "44b758b0cd51aaddb9007f5f71670773");
        assert_eq!(hex("mean-k", 0), "0887bff16beda62a662b4fa1aca0f092");
        assert_ne!(hex("mean-q", 3), hex("mean-k", 3));
        let (id, mask) = (BlockId([7; 16]), IdMask::of_side("mean-k", 3));
        assert_ne!(id.xor(mask), id);
        assert_eq!(id.xor(mask).xor(mask), id);
    }

    #[test]
    fn masks_are_those_of_hashlib() {
        for ((group, pipeline_rank, tensor_rank), mask) in [
            ((0, 0, 0), "d1735336227e3c2f267c9eba12d4504b"),
            ((0, 0, 1), "31e4d3fa5060ad12d7811d7a592de7a9"),
            ((1, 2, 3), "270550f27eb00da7464412fd597e2b1e"),
        ] {
            let part = Part {
                group,
                pipeline_rank,
                tensor_rank,
            };
            assert_eq!(BlockId(part.mask().0).to_hex(), mask);
        }
    }
}
