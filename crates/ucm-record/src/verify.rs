//! Verification of a read record: it is exactly the requested one, byte for byte, or the reason is
//! returned.

use std::ops::Range;

use ucm_core::{BlockId, MissReason, PAGE, Part, round_up};
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
    readable(&header)?;
    as_is(&header)?;
    with_kv(&header)?;
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

/// Checks that a record has KV.
fn with_kv(header: &RecordHeader) -> Result<(), Refusal> {
    let flags = if header.without_kv { WITHOUT_KV } else { 0 };
    same(MissReason::ForeignShape, "flags", flags, 0)
}

/// Checks that a record is uncompressed.
fn as_is(header: &RecordHeader) -> Result<(), Refusal> {
    same(
        MissReason::NewerVersion,
        "codec",
        header.codec.code(),
        Codec::AS_IS.code(),
    )
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
    let (len, kv_len) = (bytes.len() as u64, header.kv_len());
    let longest = len.max(stored_len);
    if longest > header.record_len {
        let found = format_args!("{longest} bytes");
        return Err(Refusal::new(
            MissReason::WrongLength,
            "length",
            found,
            header.record_len,
        ));
    }
    if len < kv_len {
        return Err(Refusal::truncated(len, kv_len));
    }
    let ends = header
        .table
        .iter()
        .skip(1)
        .map(|entry| entry.offset)
        .chain([kv_len]);
    for (entry, end) in header.table.iter().zip(ends).skip(verified as usize) {
        check(bytes, entry.offset, end, entry.crc)?;
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
    let header = verify_kv_header(bytes, expected)?;
    readable(&header)?;
    as_is(&header)?;
    if stored_len > header.record_len {
        let found = format_args!("{stored_len} bytes");
        return Err(Refusal::new(
            MissReason::WrongLength,
            "length",
            found,
            header.record_len,
        ));
    }
    if stored_len < header.kv_len() {
        return Err(Refusal::truncated(stored_len, header.kv_len()));
    }
    for layer in layers {
        let at = layer as usize;
        let none = || Refusal::new(MissReason::ForeignShape, "layers", header.layers, at + 1);
        let entry = header.table.get(at).ok_or_else(none)?;
        let end = header
            .table
            .get(at + 1)
            .map_or(header.kv_len(), |next| next.offset);
        check(bytes, entry.offset, end, entry.crc)?;
    }
    Ok(header)
}

/// Checks that a header is sound and that of the requested record, with KV.
fn verify_kv_header(bytes: &[u8], expected: &Expect<'_>) -> Result<RecordHeader, Refusal> {
    let header = verify_header(bytes, expected)?;
    with_kv(&header)?;
    Ok(header)
}

/// Verifies only the header at the start of `bytes`: it is sound and that of the requested record,
/// in any form of this version, with KV or without.
pub fn verify_header(bytes: &[u8], expected: &Expect<'_>) -> Result<RecordHeader, Refusal> {
    let header = RecordHeader::decode(bytes)?;
    let meta = &header.meta;
    if meta.namespace != expected.namespace {
        let (found, expected) = (hex(&meta.namespace), hex(&expected.namespace));
        return Err(Refusal::new(
            MissReason::ForeignIdentity,
            "namespace",
            found,
            expected,
        ));
    }
    if meta.part != expected.part {
        return Err(Refusal::new(
            MissReason::ForeignPart,
            "part",
            meta.part,
            expected.part,
        ));
    }
    same(MissReason::ForeignId, "id", meta.id, expected.id)?;
    check_layout(&header, expected.layout)?;
    Ok(header)
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
    let absent =
        |field, found: u64, expected| Refusal::new(MissReason::Absent, field, found, expected);
    let side = header
        .side_of(wanted)
        .ok_or_else(|| absent("side shards of this name", 0, "1".to_owned()))?;
    let pages = side.pages();
    if stored_len < pages.end as u64 {
        return Err(absent(
            "length",
            stored_len,
            format!("at least {}", pages.end),
        ));
    }
    let short = || {
        absent(
            "room",
            bytes.len() as u64,
            format!("at least {}", pages.end),
        )
    };
    verify_side_bytes(side, bytes.get(pages.clone()).ok_or_else(short)?)
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
    let expected = format_args!("{crc:#010x}");
    Err(Refusal::new(
        MissReason::BadChecksum,
        "checksum",
        found,
        expected,
    ))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks that the KV has the offsets and shapes of the layout.
pub fn has_layout(header: &RecordHeader, layout: &RecordLayout) -> bool {
    check_layout(header, layout).is_ok()
}

/// [`has_layout`] as a result, with the difference. A compressed form has offsets of its own but is
/// never longer. A record without KV has the shapes of its blocks and no payload.
pub(crate) fn check_layout(header: &RecordHeader, layout: &RecordLayout) -> Result<(), Refusal> {
    if header.key.is_some() && !layout.room_for_seals {
        // Written with a key, verified without one.
        let none = |_| {
            Refusal::new(
                MissReason::ForeignShape,
                "layers",
                header.layers,
                layout.layers,
            )
        };
        return check_layout(header, &layout.clone().encrypted().map_err(none)?);
    }
    for (field, found, expected) in [
        ("layers", header.layers.into(), layout.layers.into()),
        (
            "block_tokens",
            header.block_tokens.into(),
            layout.block_tokens.into(),
        ),
        ("dtype", header.dtype.into(), layout.dtype.code().into()),
        (
            "tensors",
            header.tensors.into(),
            layout.tensors.len() as u64,
        ),
        ("layer_len", header.layer_len, layout.layer_len),
        ("shape", header.shape.into(), layout.shape.into()),
    ] {
        same(MissReason::ForeignShape, field, found, expected)?;
    }
    if header.without_kv {
        return same(
            MissReason::ForeignShape,
            "header_len",
            header.header_len,
            PAGE,
        );
    }
    for (field, found, expected) in [
        ("shards", header.table.len() as u64, layout.layers.into()),
        ("raw_len", header.raw_len, layout.raw_len),
        ("header_len", header.header_len, layout.header_len() as u64),
    ] {
        same(MissReason::ForeignShape, field, found, expected)?;
    }
    if !header.codec.is_as_is() {
        let fits = header.stored_len <= layout.payload_len && header.codec.fits(layout.layer_len);
        let (found, most) = (
            header.stored_len,
            format_args!("at most {}", layout.payload_len),
        );
        let refusal = || Refusal::new(MissReason::ForeignShape, "stored_len", found, most);
        return fits.then_some(()).ok_or_else(refusal);
    }
    same(
        MissReason::ForeignShape,
        "stored_len",
        header.stored_len,
        layout.payload_len,
    )?;
    for (layer, entry) in (0..).zip(&header.table) {
        let range = layout.layer_data(layer);
        let (offset, len) = (range.start as u64, range.len() as u64);
        same(
            MissReason::ForeignShape,
            "offset of a layer",
            entry.offset,
            offset,
        )?;
        same(
            MissReason::ForeignShape,
            "length of a layer",
            entry.len,
            len,
        )?;
    }
    Ok(())
}
