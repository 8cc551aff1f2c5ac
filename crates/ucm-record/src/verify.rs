//! Verification of a record that was read: it is exactly what was asked for, byte for byte, or
//! there is a reason why not.

use std::ops::Range;

use ucm_core::{BlockId, MissReason, PAGE, Part, round_up};
use ucm_device::crc32c;

use super::codec::Codec;
use super::header::{RecordHeader, SideEntry};
use super::layout::{RecordLayout, SideSpec};
use super::refusal::{Refusal, same};
use crate::WITHOUT_KV;

/// What a reader asked for.
#[derive(Debug, Clone, Copy)]
pub struct Expect<'a> {
    /// The record id.
    pub id: BlockId,
    /// Digest of the identity.
    pub namespace: [u8; 32],
    /// Which part of the block.
    pub part: Part,
    /// The layout of this part's records. Side shards make no difference: a record may have others
    /// or none.
    pub layout: &'a RecordLayout,
}

/// Verifies `bytes`, what was read of a record that has `stored_len` bytes: all of it, or at least
/// all up to the end of its payload ([`RecordLayout::kv_len`]). Side shards are not looked at: what
/// is wrong with one is a miss of that one alone ([`verify_side_bytes`]). On success the KV lies at
/// the layout's layer ranges.
///
/// One that is still encrypted is `WrongKey`, unless the ciphertext is damaged.
/// Identity and part are asked before the id, because a record of another part always has another
/// id too. A record that is stored in another form is `NewerVersion` to a reader that reads it as
/// it is, unless even that form is damaged.
pub fn verify(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
) -> Result<RecordHeader, Refusal> {
    verify_rest(bytes, stored_len, expected, 0)
}

/// [`verify`] of a record whose first `verified` layers were verified by [`verify_layers`] as they
/// arrived.
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

/// Whether a record is not encrypted, or is not any more: who has the key has decrypted it before
/// it is verified.
fn readable(header: &RecordHeader) -> Result<(), Refusal> {
    match header.key {
        None => Ok(()),
        Some(key) => {
            let known = "none, or one that this store has";
            Err(Refusal::new(MissReason::WrongKey, "key", hex(&key), known))
        }
    }
}

/// Whether a record has KV.
fn with_kv(header: &RecordHeader) -> Result<(), Refusal> {
    let flags = if header.without_kv { WITHOUT_KV } else { 0 };
    same(MissReason::ForeignShape, "flags", flags, 0)
}

/// Whether a record is stored as it is used.
fn as_is(header: &RecordHeader) -> Result<(), Refusal> {
    same(
        MissReason::NewerVersion,
        "codec",
        header.codec.code(),
        Codec::AS_IS.code(),
    )
}

/// [`verify`] for a reader that takes a record in any form of this version. What is in another form
/// is verified as it is stored; what comes out of it is to be verified by [`verify`]. Of a record
/// without KV its side shards are verified, which are all it has.
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

/// Verifies the lengths of a record whose header this is, and its layers but for the first
/// `verified`.
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

/// Verifies some layers of a record of `stored_len` bytes: `bytes` begins with its header, and
/// these layers with the padding behind each lie in it where they lie in the whole. The header is
/// verified as in [`verify`], and nothing else is looked at.
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

/// Whether a header is sound and that of what was asked for, with KV.
fn verify_kv_header(bytes: &[u8], expected: &Expect<'_>) -> Result<RecordHeader, Refusal> {
    let header = verify_header(bytes, expected)?;
    with_kv(&header)?;
    Ok(header)
}

/// Verifies the header at the start of `bytes`, and nothing behind it: it is sound and that of what
/// was asked for, in any form of this version, with KV or without.
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

/// The bytes of the side shard that was asked for, sound: `bytes` begins with the header of a
/// record of `stored_len` bytes, which is verified here, and the pages of the side shard lie in it
/// where they lie in the whole. Nothing else is looked at, and nothing behind `stored_len`: a slot
/// still has there what it held before, and the checksum of a header does not tell its own preamble
/// from that of another record. `Absent` where the record has none of that name, version and
/// length, or ends before it, or `bytes` do.
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

/// Checks one stretch; a stretch that is not all there is truncated.
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

/// Whether the KV lies where the layout says, and is made as it says.
pub fn has_layout(header: &RecordHeader, layout: &RecordLayout) -> bool {
    check_layout(header, layout).is_ok()
}

/// [`has_layout`], or what is different. Where another form lies is its own business, but it is
/// never longer. A record without KV says of which blocks it is, and has no payload.
pub(crate) fn check_layout(header: &RecordHeader, layout: &RecordLayout) -> Result<(), Refusal> {
    if header.key.is_some() && !layout.room_for_seals {
        // Written where there is a key, verified where there is none.
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
        ("tensors", header.tensors.into(), layout.tensors.into()),
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
