//! The record: one block of one part as it lies on a medium, byte for byte as in `docs/format.md`.
//!
//! A header of whole pages, the payload (layers in model order, 64-byte aligned, padded to a page),
//! then optional side shards, each with a checksum of its own: what is wrong with one says nothing
//! of the KV. Side shards that are made later lie in a record of their own, without KV
//! ([`seal_side_alone`]). The header names everything the bytes depend on; checksums cover every
//! byte, padding too, so a record proves itself without any other file. [`RecordLayout`] knows
//! where things lie, [`RecordLayout::seal_layer`] and [`encode_header`] finish a filled buffer,
//! [`verify`] checks what was read. A record may be stored in another form than it is used in
//! ([`Codec`]): a [`Coder`] makes the one of the other. And it may be stored encrypted, in either
//! form, by [`Keys`].

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
/// Where the seed's form has zeros: tells its files from ours.
pub const MARK: [u8; 4] = *b"UCMR";
/// Version that is written, and the newest that is read.
pub const VERSION: u32 = 1;
/// Bytes whose form is the same in every version; they carry their own checksum.
pub const PREAMBLE_LEN: usize = 64;
/// The flag of a record that has no KV: side shards of a block whose own record is without them.
pub const WITHOUT_KV: u32 = 1;
/// The flag of a record whose layers and side shards are encrypted ([`Keys`]).
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
    /// Bytes that encryption adds for each side shard: its tag, and its checksum as it is used.
    pub(super) const SIDE_SEAL: usize = SEAL + 4;

    /// Where, in an encrypted record of so many shards, the header's tag lies; those of the shards
    /// and of the side shards follow.
    pub(super) fn seals(shards: usize) -> usize {
        SHARD_TABLE + SHARD_ENTRY * shards
    }

    /// Where the tag of a shard lies.
    pub(super) fn shard_seal(shards: usize, i: usize) -> usize {
        seals(shards) + SEAL * (1 + i)
    }

    /// Where the tag and the checksum of a side shard lie.
    pub(super) fn side_seal(shards: usize, i: usize) -> usize {
        shard_seal(shards, shards) + SIDE_SEAL * i
    }

    /// Length of the checksum in the header's last bytes.
    pub(super) const CRC_LEN: usize = 4;
}
