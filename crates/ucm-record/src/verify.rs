//! Verification of a read record: it is exactly the requested one, byte for byte, or the reason is
//! returned.

use std::ops::Range;

use ucm_core::{BlockId, MissReason, PAGE, Part, hex, round_up};
use ucm_device::crc32c;

use super::codec::Codec;
use super::header::{RecordHeader, SideEntry};
use super::layout::{RecordLayout, SideSpec};
use super::refusal::{Refusal, same};
use crate::WITHOUT_KV;

/// The requested record.
#[derive(Debug, Clone, Copy)]
pub struct Expect<'a> {
    /// The record id.
    pub id: BlockId,
    /// Digest of the identity.
    pub namespace: [u8; 32],
    /// Which part of the block.
    pub part: Part,
    /// The layout of this part's records. Its side shards do not matter: a record may have others
    /// or none.
    pub layout: &'a RecordLayout,
}

/// Verifies `bytes`, read from a record of `stored_len` bytes: all of it, or at least up to the end
/// of its payload ([`RecordLayout::kv_len`]). Side shards are not checked: a damaged one is a miss
/// of that side shard only ([`verify_side_bytes`]). On success the KV lies at the layout's layer
/// ranges.
///
/// An encrypted record is `WrongKey`, unless the ciphertext is damaged. Identity and part are
/// compared before the id, because a record of another part always has another id too. For this
/// reader a compressed record is `NewerVersion`, unless its stored form is damaged.
pub fn verify(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
) -> Result<RecordHeader, Refusal> {
    verify_rest(bytes, stored_len, expected, 0)
}

/// [`verify`] for a record whose first `verified` layers were already verified by
/// [`verify_layers`].
pub fn verify_rest(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
    verified: u32,
) -> Result<RecordHeader, Refusal> {
    let header = verify_kv(bytes, stored_len, expected, verified)?;
    plain_kv(&header)?;
    Ok(header)
}

/// Checks that a record is plaintext: a reader with the key decrypts it before it verifies.
fn readable(header: &RecordHeader) -> Result<(), Refusal> {
    match header.key {
        None => Ok(()),
        Some(key) => {
            let known = "none, or one of this store";
            Err(Refusal::new(MissReason::WrongKey, "key", hex(&key), known))
        }
    }
}

/// Checks that a record has KV, as plaintext and uncompressed.
fn plain_kv(header: &RecordHeader) -> Result<(), Refusal> {
    readable(header)?;
    let (code, as_is) = (header.codec.code(), Codec::AS_IS.code());
    same(MissReason::NewerVersion, "codec", code, as_is)?;
    let flags = if header.without_kv { WITHOUT_KV } else { 0 };
    same(MissReason::ForeignShape, "flags", flags, 0)
}

/// [`verify`] for a reader that accepts any form of this version. A compressed record is verified
/// in its stored form; after decoding use [`verify`]. In a record without KV the side shards are
/// verified.
pub fn verify_stored(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
) -> Result<RecordHeader, Refusal> {
    let header = verify_kv(bytes, stored_len, expected, 0)?;
    if header.without_kv {
        verify_sides(bytes, &header)?;
    }
    Ok(header)
}

/// Verifies every side shard of a record whose verified header this is.
pub fn verify_sides(bytes: &[u8], header: &RecordHeader) -> Result<(), Refusal> {
    let mut sides = header.sides.iter();
    sides.try_for_each(|side| check(bytes, side.offset, side.pages().end as u64, side.crc))
}

fn verify_kv(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
    verified: u32,
) -> Result<RecordHeader, Refusal> {
    let header = verify_header(bytes, expected)?;
    verify_stretches(bytes, stored_len, &header, verified)?;
    Ok(header)
}

/// Verifies the lengths of a record with this header, and its layers except the first `verified`.
pub(crate) fn verify_stretches(
    bytes: &[u8],
    stored_len: u64,
    header: &RecordHeader,
    verified: u32,
) -> Result<(), Refusal> {
    let len = bytes.len() as u64;
    check_lengths(len, len.max(stored_len), header)?;
    check_layers(bytes, header, verified as usize..header.table.len())
}

/// Checks that a record of `longest` bytes is no longer than its header states, and that the
/// `present` ones have all of its KV.
fn check_lengths(present: u64, longest: u64, header: &RecordHeader) -> Result<(), Refusal> {
    if longest > header.record_len {
        let (reason, found) = (MissReason::WrongLength, format_args!("{longest} bytes"));
        return Err(Refusal::new(reason, "length", found, header.record_len));
    }
    if present < header.kv_len() {
        return Err(Refusal::truncated(present, header.kv_len()));
    }
    Ok(())
}

/// Verifies layers, each with the padding behind it.
fn check_layers(bytes: &[u8], header: &RecordHeader, layers: Range<usize>) -> Result<(), Refusal> {
    for at in layers {
        let none = || Refusal::new(MissReason::ForeignShape, "layers", header.layers, at + 1);
        let entry = header.table.get(at).ok_or_else(none)?;
        let next = header.table.get(at + 1).map(|next| next.offset);
        check(
            bytes,
            entry.offset,
            next.unwrap_or(header.kv_len()),
            entry.crc,
        )?;
    }
    Ok(())
}

/// Verifies some layers of a record of `stored_len` bytes: `bytes` begins with its header, and has
/// these layers, with the padding behind each, at their offsets in the record. The header is
/// verified as in [`verify`]; no other bytes are read.
pub fn verify_layers(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
    layers: Range<u32>,
) -> Result<RecordHeader, Refusal> {
    let header = verify_header(bytes, expected)?;
    plain_kv(&header)?;
    check_lengths(stored_len, stored_len, &header)?;
    check_layers(bytes, &header, layers.start as usize..layers.end as usize)?;
    Ok(header)
}

/// Verifies only the header at the start of `bytes`: it is sound and that of the requested record,
/// in any form of this version, with KV or without.
pub fn verify_header(bytes: &[u8], expected: &Expect<'_>) -> Result<RecordHeader, Refusal> {
    let header = RecordHeader::decode(bytes)?;
    let meta = &header.meta;
    check_namespace(&header, &expected.namespace)?;
    same(MissReason::ForeignPart, "part", meta.part, expected.part)?;
    same(MissReason::ForeignId, "id", meta.id, expected.id)?;
    check_layout(&header, expected.layout)?;
    Ok(header)
}

/// Checks that a record is of the identity whose digest begins with these bytes.
pub(crate) fn check_namespace(header: &RecordHeader, digest: &[u8]) -> Result<(), Refusal> {
    if header.meta.namespace.starts_with(digest) {
        return Ok(());
    }
    let (reason, found) = (MissReason::ForeignIdentity, hex(&header.meta.namespace));
    Err(Refusal::new(reason, "namespace", found, hex(digest)))
}

/// The verified bytes of the requested side shard. `bytes` begins with the header of a record of
/// `stored_len` bytes, which is verified here, and has the pages of the side shard at their offsets
/// in the record. No other bytes are read, and none behind `stored_len`, where a slot has old
/// bytes: the checksum of a header cannot detect a preamble of another record. `Absent` if the
/// record has none of that name, version and length, or if the record or `bytes` end before it.
pub fn verify_side<'a>(
    bytes: &'a [u8],
    stored_len: u64,
    expected: &Expect<'_>,
    wanted: &SideSpec,
) -> Result<&'a [u8], Refusal> {
    let stored = usize::try_from(stored_len).unwrap_or(usize::MAX);
    let bytes = bytes.get(..stored).unwrap_or(bytes);
    let header = verify_header(bytes, expected)?;
    readable(&header)?;
    let absent = |field, found: u64, expected: &str| {
        Refusal::new(MissReason::Absent, field, found, expected)
    };
    let none = || absent("side shards of this name", 0, "1");
    let side = header.side_of(wanted).ok_or_else(none)?;
    let pages = side.pages();
    let least = format!("at least {}", pages.end);
    if stored_len < pages.end as u64 {
        return Err(absent("length", stored_len, &least));
    }
    let short = || absent("room", bytes.len() as u64, &least);
    verify_side_bytes(side, bytes.get(pages).ok_or_else(short)?)
}

/// Verifies the bytes of one side shard, read alone from its offset up to the end of its last page.
pub fn verify_side_bytes<'a>(side: &SideEntry, bytes: &'a [u8]) -> Result<&'a [u8], Refusal> {
    let padded = round_up(side.len, PAGE);
    let len = bytes.len() as u64;
    if len < padded {
        return Err(Refusal::truncated(len, padded));
    }
    same(MissReason::WrongLength, "length", len, padded)?;
    check(bytes, 0, padded, side.crc)?;
    Ok(&bytes[..side.len as usize])
}

/// Checks one range; an incomplete range is `Truncated`.
fn check(bytes: &[u8], start: u64, end: u64, crc: u32) -> Result<(), Refusal> {
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let stretch = range
        .and_then(|(start, end)| bytes.get(start..end))
        .ok_or_else(|| Refusal::truncated(bytes.len() as u64, end))?;
    let found = crc32c(stretch);
    if found == crc {
        return Ok(());
    }
    let found = format_args!("{found:#010x} from byte {start} to {end}");
    let (reason, expected) = (MissReason::BadChecksum, format_args!("{crc:#010x}"));
    Err(Refusal::new(reason, "checksum", found, expected))
}

/// Checks that the KV has the offsets and shapes of the layout.
pub fn has_layout(header: &RecordHeader, layout: &RecordLayout) -> bool {
    check_layout(header, layout).is_ok()
}

/// [`has_layout`] as a result, with the difference. A compressed form has offsets of its own but is
/// never longer. A record without KV has the shapes of its blocks and no payload.
pub(crate) fn check_layout(header: &RecordHeader, layout: &RecordLayout) -> Result<(), Refusal> {
    let same =
        |field, found: u64, expected: u64| same(MissReason::ForeignShape, field, found, expected);
    let layers = (u64::from(header.layers), u64::from(layout.layers));
    if header.key.is_some() && !layout.room_for_seals {
        // Written with a key, verified without one.
        let none = |_| Refusal::new(MissReason::ForeignShape, "layers", layers.0, layers.1);
        return check_layout(header, &layout.clone().encrypted().map_err(none)?);
    }
    same("layers", layers.0, layers.1)?;
    let tokens = (header.block_tokens, layout.block_tokens);
    same("block_tokens", tokens.0.into(), tokens.1.into())?;
    same("dtype", header.dtype.into(), layout.dtype.code().into())?;
    let tensors = layout.tensors.len() as u64;
    same("tensors", header.tensors.into(), tensors)?;
    same("layer_len", header.layer_len, layout.layer_len)?;
    same("shape", header.shape.into(), layout.shape.into())?;
    if header.without_kv {
        return same("header_len", header.header_len, PAGE);
    }
    same("shards", header.table.len() as u64, layers.1)?;
    same("raw_len", header.raw_len, layout.raw_len)?;
    same("header_len", header.header_len, layout.header_len() as u64)?;
    if !header.codec.is_as_is() {
        if header.stored_len <= layout.payload_len && header.codec.fits(layout.layer_len) {
            return Ok(());
        }
        let (reason, most) = (MissReason::ForeignShape, layout.payload_len);
        let most = format_args!("at most {most}");
        return Err(Refusal::new(reason, "stored_len", header.stored_len, most));
    }
    same("stored_len", header.stored_len, layout.payload_len)?;
    for (layer, entry) in (0..).zip(&header.table) {
        let range = layout.layer_data(layer);
        same("offset of a layer", entry.offset, range.start as u64)?;
        same("length of a layer", entry.len, range.len() as u64)?;
    }
    Ok(())
}
