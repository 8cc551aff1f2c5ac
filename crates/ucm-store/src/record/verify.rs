//! Judging a record that was read: it is exactly what was asked for, byte for byte, or there is a reason why not.

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
/// Identity and part are asked before the id, because a record of another part always has another id too.
pub fn verify(bytes: &[u8], stored_len: u64, expected: &Expect<'_>) -> Result<RecordHeader, MissReason> {
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
    for (entry, end) in header.table.iter().zip(ends) {
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

/// Whether the KV lies where the layout says, and is made as it says.
fn has_layout(header: &RecordHeader, layout: &RecordLayout) -> bool {
    let table = || {
        (0..layout.layers).zip(&header.table).all(|(layer, entry)| {
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
        && header.stored_len == layout.payload_len
        && header.header_len == layout.header_len() as u64
        && table()
}
