//! Compressed records: makes the header of the stored form from that of the record, and back.
//!
//! The two headers differ in the length, the codec and the offsets of the layers. The stored form
//! keeps the checksum of every uncompressed layer beside that of its stored bytes. So the record's
//! own header is restored to the byte, and a reader verifies the same bytes by the same checksums
//! as without compression. Side shards are stored unchanged behind the payload; only their offsets
//! differ.

use ucm_core::{PAGE, round_up};
use ucm_device::crc32c;

use super::at;
use super::codec::Codec;
use super::header::{RecordHeader, seal_header};
use super::layout::RecordLayout;
use crate::bytes::{put, u32_at};

/// Finishes a stored form. `out` contains, from the end of the header on, the stored layers of
/// `lens` bytes each, and has space up to the end of the padded payload; `raw` is the header of the
/// record itself and `head` its bytes. The payload is padded with zeros to a multiple of `granule`
/// bytes (whole pages). Returns the length of header and payload, behind which the side shards
/// belong; `None` if it does not fit `out`.
pub(super) fn seal_stored(
    raw: &RecordHeader,
    head: &[u8],
    codec: Codec,
    lens: &[usize],
    granule: u64,
    out: &mut [u8],
) -> Option<usize> {
    let header_len = raw.header_len as usize;
    let used: usize = lens.iter().sum();
    let payload = round_up(used as u64, granule.max(PAGE));
    let len = header_len + usize::try_from(payload).ok()?;
    let (header, stored) = out.get_mut(..len)?.split_at_mut(header_len);
    header.copy_from_slice(head.get(..header_len)?);
    stored[used..].fill(0);
    let mut start = 0;
    for (i, (layer, &stored_len)) in raw.table.iter().zip(lens).enumerate() {
        // The last checksum covers the padding too.
        let end = if i + 1 == lens.len() {
            stored.len()
        } else {
            start + stored_len
        };
        let entry = at::SHARD_TABLE + i * at::SHARD_ENTRY;
        put(header, entry, &((header_len + start) as u64).to_le_bytes());
        put(header, entry + 8, &(stored_len as u64).to_le_bytes());
        let crc = crc32c(&stored[start..end]);
        put(header, entry + 16, &crc.to_le_bytes());
        put(header, entry + 20, &layer.crc.to_le_bytes());
        start += stored_len;
    }
    put(header, at::CODEC, &codec.code().to_le_bytes());
    put(header, at::STORED_LEN, &payload.to_le_bytes());
    put_sides(raw, len as u64, header);
    seal_header(header);
    Some(len)
}

/// Sets the offsets of the side shards of a record whose payload now ends at `kv_len`. Returns the
/// end of the record.
fn put_sides(before: &RecordHeader, kv_len: u64, header: &mut [u8]) {
    for (i, side) in before.sides.iter().enumerate() {
        let entry = at::SIDE_TABLE + i * at::SIDE_ENTRY;
        let offset = kv_len + (side.offset - before.kv_len());
        put(header, entry + 24, &offset.to_le_bytes());
    }
    let record_len = kv_len + before.sides_len();
    put(header, at::RECORD_LEN, &record_len.to_le_bytes());
}

/// Turns the header of a stored form, at the start of `record`, back into that of the record.
pub(super) fn restore_header(stored: &RecordHeader, layout: &RecordLayout, record: &mut [u8]) {
    let header = &mut record[..layout.header_len()];
    for (i, layer) in stored.table.iter().enumerate() {
        let range = layout.layer_data(i as u32);
        let entry = at::SHARD_TABLE + i * at::SHARD_ENTRY;
        put(header, entry, &(range.start as u64).to_le_bytes());
        put(header, entry + 8, &(range.len() as u64).to_le_bytes());
        put(header, entry + 16, &layer.raw_crc.to_le_bytes());
        put(header, entry + 20, &[0; 4]);
    }
    put(header, at::CODEC, &Codec::AS_IS.code().to_le_bytes());
    put(header, at::STORED_LEN, &layout.payload_len.to_le_bytes());
    put_sides(stored, layout.kv_len() as u64, header);
    seal_header(header);
}

/// The form of a record by its first bytes, if present; not verified yet.
pub(super) fn claimed_codec(bytes: &[u8]) -> Option<Codec> {
    let code = bytes.get(at::CODEC..at::CODEC + 4)?;
    Codec::from_code(u32_at(code, 0))
}
