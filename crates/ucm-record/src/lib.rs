//! The record: one block of one part as stored on a medium, byte for byte as in
//! `docs/format-record.md`.
//!
//! A header of whole pages, the payload (layers in model order, 64-byte aligned, padded to a page),
//! then optional side shards, each with a checksum of its own: damage of one does not affect the
//! KV. Side shards made later are stored in a record of their own, without KV
//! ([`seal_side_alone`]). The header names everything on which the bytes depend; checksums cover
//! every byte, including padding, so a record is verified without any other file. [`RecordLayout`]
//! has the offsets, [`RecordLayout::seal_layer`] and [`encode_header`] finish a filled buffer,
//! [`verify`] checks a read one. A record may be stored compressed ([`Codec`], [`Coder`]), and it
//! may be stored encrypted, compressed or not ([`Keys`]).

#![forbid(unsafe_code)]

pub mod bytes;
mod cipher;
mod codec;
mod coder;
mod encoded;
mod header;
mod layout;
mod refusal;
#[cfg(test)]
mod tests;
mod verify;
mod whole;

pub use cipher::{Keys, Opened};
pub use codec::Codec;
pub use coder::{Coder, stored_form};
pub use header::{LayerEntry, RecordHeader, RecordMeta, SideEntry, encode_header, seal_side_alone};
pub use layout::{RecordLayout, SideSpec};
pub use refusal::Refusal;
pub use verify::{
    Expect, has_layout, verify, verify_header, verify_layers, verify_rest, verify_side,
    verify_side_bytes, verify_sides, verify_stored,
};
pub use whole::{KnownRecord, Whole, verify_whole};

/// First four bytes of a record.
pub const MAGIC: [u8; 4] = *b"UCMB";
/// Mark where the seed's format has zeros; it distinguishes our files from the seed's.
pub const MARK: [u8; 4] = *b"UCMR";
/// The version written, and the newest version read.
pub const VERSION: u32 = 1;
/// Bytes of the preamble. Its form is the same in every version, and it has its own checksum.
pub const PREAMBLE_LEN: usize = 64;
/// The flag of a record without KV: side shards of a block whose own record lacks them.
pub const WITHOUT_KV: u32 = 1;
/// The flag of an encrypted record ([`Keys`]).
pub const ENCRYPTED: u32 = 2;
/// Most side shards of a record.
pub const MAX_SIDES: usize = 8;
/// Longest name of a side shard, in bytes.
pub const MAX_SIDE_NAME: usize = 16;
/// Longest header of this version, bytes.
const LONGEST_HEADER: usize = ucm_core::round_up(
    (at::SHARD_TABLE + at::SHARD_ENTRY * ucm_core::limits::MAX_LAYERS as usize + at::CRC_LEN)
        as u64,
    ucm_core::PAGE,
) as usize;

/// Offsets of the header's fields from the start of the record.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 4;
    pub(super) const ID: usize = 8;
    pub(super) const LAYERS: usize = 24;
    pub(super) const BLOCK_TOKENS: usize = 28;
    pub(super) const DTYPE: usize = 32;
    pub(super) const MARK: usize = 36;
    pub(super) const HEADER_LEN: usize = 40;
    pub(super) const RECORD_LEN: usize = 44;
    pub(super) const PREAMBLE_CRC: usize = 60;
    pub(super) const FLAGS: usize = 64;
    pub(super) const ORDINAL: usize = 68;
    pub(super) const PARENT: usize = 72;
    pub(super) const NAMESPACE: usize = 88;
    pub(super) const PART: usize = 120;
    pub(super) const TOKENS: usize = 132;
    pub(super) const CODEC: usize = 136;
    pub(super) const SHARDS: usize = 140;
    pub(super) const RAW_LEN: usize = 144;
    pub(super) const STORED_LEN: usize = 152;
    pub(super) const TIME: usize = 160;
    pub(super) const WRITER: usize = 168;
    pub(super) const KEY_ID: usize = 176;
    pub(super) const TENANT: usize = 184;
    pub(super) const SIDES: usize = 216;
    pub(super) const TENSORS: usize = 220;
    pub(super) const LAYER_LEN: usize = 224;
    pub(super) const SHAPE: usize = 232;
    pub(super) const SALT: usize = 236;
    pub(super) const SIDE_TABLE: usize = 256;
    pub(super) const SIDE_ENTRY: usize = 40;
    pub(super) const SHARD_TABLE: usize = SIDE_TABLE + super::MAX_SIDES * SIDE_ENTRY;
    pub(super) const SHARD_ENTRY: usize = 24;
    /// Bytes of an authentication tag.
    pub(super) const SEAL: usize = 16;
    /// Bytes that encryption adds for each side shard: its tag and its plaintext checksum.
    pub(super) const SIDE_SEAL: usize = SEAL + 4;

    /// Offset of the header's tag in an encrypted record of `shards` shards; those of the shards
    /// and side shards follow.
    pub(super) fn seals(shards: usize) -> usize {
        SHARD_TABLE + SHARD_ENTRY * shards
    }

    /// Offset of the tag of a shard.
    pub(super) fn shard_seal(shards: usize, i: usize) -> usize {
        seals(shards) + SEAL * (1 + i)
    }

    /// Offset of the tag and checksum of a side shard.
    pub(super) fn side_seal(shards: usize, i: usize) -> usize {
        shard_seal(shards, shards) + SIDE_SEAL * i
    }

    /// Length of the checksum in the header's last bytes.
    pub(super) const CRC_LEN: usize = 4;
}
