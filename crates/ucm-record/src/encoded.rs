//! A record in another form than it is used in: the header of the stored form made from that of the
//! record, and back.
//!
//! Both headers say the same but for the length, the codec, and where the layers lie. The stored
//! form keeps the checksum of every layer as it is used beside that of its stored bytes, so the
//! record's own header comes back to the byte, and the thread that reads it verifies the same bytes
//! by the same checksums as if it had never been stored in another form. Side shards are stored as
//! they are, behind the payload; only their offsets are other ones.

use ucm_core::{PAGE, round_up};
use ucm_device::crc32c;

use super::at;
use super::codec::Codec;
use super::header::{RecordHeader, seal_header};
use super::layout::RecordLayout;

/// Finishes a stored form. `out` holds, from the end of the header on, the stored layers one behind
/// the other, of `lens` bytes each, and has room to the end of the padded payload; `raw` is the
/// header of the record itself and `head` its bytes. The payload is padded with zeros to a multiple
/// of `granule` bytes (whole pages). Gives the length of header and payload, behind which the side
/// shards belong; `None` where it does not fit `out`.
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
        put(
            header,
            entry + 16,
            &crc32c(&stored[start..end]).to_le_bytes(),
        );
        put(header, entry + 20, &layer.crc.to_le_bytes());
        start += stored_len;
    }
    put(header, at::CODEC, &codec.code().to_le_bytes());
    put(header, at::STORED_LEN, &payload.to_le_bytes());
    put_sides(raw, len as u64, header);
    seal_header(header);
    Some(len)
}

/// Says where the side shards of a record lie whose payload ends at `kv_len` now, and where it
/// ends.
fn put_sides(before: &RecordHeader, kv_len: u64, header: &mut [u8]) {
    for (i, side) in before.sides.iter().enumerate() {
        let entry = at::SIDE_TABLE + i * at::SIDE_ENTRY;
        let offset = kv_len + (side.offset - before.kv_len());
        put(header, entry + 24, &offset.to_le_bytes());
    }
    put(
        header,
        at::RECORD_LEN,
        &(kv_len + before.sides_len()).to_le_bytes(),
    );
}

/// Turns the header of a stored form, at the start of `record`, into that of the record itself.
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
    put(
        header,
        at::STORED_LEN,
        &(layout.payload_len() as u64).to_le_bytes(),
    );
    put_sides(stored, layout.kv_len() as u64, header);
    seal_header(header);
}

/// What the first bytes of a record that was read say of its form, if they are there; not verified
/// yet.
pub(super) fn claimed_codec(bytes: &[u8]) -> Option<Codec> {
    let code = bytes.get(at::CODEC..at::CODEC + 4)?;
    Codec::from_code(crate::bytes::u32_at(code, 0))
}

fn put(header: &mut [u8], offset: usize, bytes: &[u8]) {
    header[offset..offset + bytes.len()].copy_from_slice(bytes);
}
