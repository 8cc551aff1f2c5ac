//! Judging a record that was read: it is exactly what was asked for, byte for byte, or there is a reason why not.

use std::ops::Range;

use ucm_core::{BlockId, MissReason, PAGE, Part, round_up};
use ucm_device::crc32c;

use super::header::{RecordHeader, SideEntry};
use super::layout::RecordLayout;

/// What a reader asked for.
#[derive(Debug, Clone, Copy)]
pub struct Expect<'a> {
    /// The record id.
    pub id: BlockId,
    /// Digest of the identity.
    pub namespace: [u8; 32],
    /// Which part of the block.
    pub part: Part,
    /// The layout of this part's records. Side shards make no difference: a record may have others or none.
    pub layout: &'a RecordLayout,
}

/// Judges `bytes`, what was read of a record that has `stored_len` bytes: all of it, or up to the end of its payload
/// ([`RecordLayout::kv_len`]). Side shards are judged too where they are there. On success the KV lies at the layout's
/// layer ranges.
///
/// Identity and part are asked before the id, because a record of another part always has another id too. A record that
/// is stored in another form is `NewerVersion` to whoever reads it as it is, unless even that form is damaged.
pub fn verify(bytes: &[u8], stored_len: u64, expected: &Expect<'_>) -> Result<RecordHeader, MissReason> {
    verify_rest(bytes, stored_len, expected, 0)
}

/// [`verify`] of a record whose first `verified` layers were judged by [`verify_layers`] as they arrived.
pub fn verify_rest(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
    verified: u32,
) -> Result<RecordHeader, MissReason> {
    let header = judge_stored(bytes, stored_len, expected, verified)?;
    if header.codec.is_as_is() {
        Ok(header)
    } else {
        Err(MissReason::NewerVersion)
    }
}

/// [`verify`] for whoever takes a record in any form of this version. What is in another form is judged as it is stored;
/// what comes out of it is to be judged by [`verify`].
pub fn verify_stored(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
) -> Result<RecordHeader, MissReason> {
    judge_stored(bytes, stored_len, expected, 0)
}

fn judge_stored(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
    verified: u32,
) -> Result<RecordHeader, MissReason> {
    let header = judge_header(bytes, expected)?;
    let (len, kv_len) = (bytes.len() as u64, header.kv_len());
    if len > header.record_len || stored_len > header.record_len {
        return Err(MissReason::WrongLength);
    }
    if len != header.record_len && len != kv_len {
        return Err(MissReason::Truncated);
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
    if len == header.record_len {
        for side in &header.sides {
            check(
                bytes,
                side.offset,
                side.offset + round_up(side.len, PAGE),
                side.crc,
            )?;
        }
    }
    Ok(header)
}

/// Judges some layers of a record of `stored_len` bytes: `bytes` begins with its header, and these layers with the padding
/// behind each lie in it where they lie in the whole. The header is judged as in [`verify`], and nothing else is looked at.
pub fn verify_layers(
    bytes: &[u8],
    stored_len: u64,
    expected: &Expect<'_>,
    layers: Range<u32>,
) -> Result<RecordHeader, MissReason> {
    let header = judge_header(bytes, expected)?;
    if !header.codec.is_as_is() {
        return Err(MissReason::NewerVersion);
    }
    if stored_len > header.record_len {
        return Err(MissReason::WrongLength);
    }
    if stored_len < header.kv_len() {
        return Err(MissReason::Truncated);
    }
    for layer in layers {
        let at = layer as usize;
        let entry = header.table.get(at).ok_or(MissReason::ForeignShape)?;
        let end = header
            .table
            .get(at + 1)
            .map_or(header.kv_len(), |next| next.offset);
        check(bytes, entry.offset, end, entry.crc)?;
    }
    Ok(header)
}

/// Whether a header is sound and that of what was asked for.
fn judge_header(bytes: &[u8], expected: &Expect<'_>) -> Result<RecordHeader, MissReason> {
    let header = RecordHeader::decode(bytes)?;
    if header.meta.namespace != expected.namespace {
        return Err(MissReason::ForeignIdentity);
    }
    if header.meta.part != expected.part {
        return Err(MissReason::ForeignPart);
    }
    if header.meta.id != expected.id {
        return Err(MissReason::ForeignId);
    }
    if !has_layout(&header, expected.layout) {
        return Err(MissReason::ForeignShape);
    }
    Ok(header)
}

/// Judges the bytes of one side shard, read alone from its offset up to the end of its last page.
pub fn verify_side<'a>(side: &SideEntry, bytes: &'a [u8]) -> Result<&'a [u8], MissReason> {
    let padded = round_up(side.len, PAGE);
    match (bytes.len() as u64).cmp(&padded) {
        std::cmp::Ordering::Less => return Err(MissReason::Truncated),
        std::cmp::Ordering::Greater => return Err(MissReason::WrongLength),
        std::cmp::Ordering::Equal => {}
    }
    check(bytes, 0, padded, side.crc)?;
    Ok(&bytes[..side.len as usize])
}

/// Checks one stretch; a stretch that is not all there is truncated.
fn check(bytes: &[u8], start: u64, end: u64, crc: u32) -> Result<(), MissReason> {
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let stretch = range
        .and_then(|(start, end)| bytes.get(start..end))
        .ok_or(MissReason::Truncated)?;
    if crc32c(stretch) == crc {
        Ok(())
    } else {
        Err(MissReason::BadChecksum)
    }
}

/// Whether the KV lies where the layout says, and is made as it says. Where another form lies is its own business, but it
/// is never longer.
pub fn has_layout(header: &RecordHeader, layout: &RecordLayout) -> bool {
    let lies = || {
        if !header.codec.is_as_is() {
            return header.stored_len <= layout.payload_len && header.codec.fits(layout.layer_len);
        }
        let mut table = (0..layout.layers).zip(&header.table);
        header.stored_len == layout.payload_len
            && table.all(|(layer, entry)| {
                let range = layout.layer_data(layer);
                entry.offset == range.start as u64 && entry.len == range.len() as u64
            })
    };
    header.layers == layout.layers
        && header.table.len() == layout.layers as usize
        && header.block_tokens == layout.block_tokens
        && header.dtype == layout.dtype.code()
        && header.tensors == layout.tensors
        && header.layer_len == layout.layer_len
        && header.shape == layout.shape
        && header.raw_len == layout.raw_len
        && header.header_len == layout.header_len() as u64
        && lies()
}
