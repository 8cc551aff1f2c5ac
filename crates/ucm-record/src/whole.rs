//! Verification of a whole record by its own header, for tools. They may lack the layout of its
//! part and its key.
//!
//! An engine verifies with [`super::verify`], by the layout that it has.

use ucm_core::{BlockId, LAYER_ALIGN, MissReason, PAGE, limits, round_up};
use ucm_device::crc32c;

use crate::cipher::{Keys, Opened};
use crate::coder::LayerCoder;
use crate::header::RecordHeader;
use crate::layout::RecordLayout;
use crate::refusal::{Refusal, same};
use crate::verify::{check_layout, check_namespace, verify_side_bytes, verify_stretches};

/// A tool's knowledge of a record. Only given fields are compared.
#[derive(Debug, Clone, Copy, Default)]
pub struct KnownRecord<'a> {
    /// The record id.
    pub id: Option<BlockId>,
    /// The first bytes of the identity's digest.
    pub namespace: &'a [u8],
    /// The layout of its part's records.
    pub layout: Option<&'a RecordLayout>,
}

/// A record that is sound.
#[derive(Debug, Clone)]
pub struct Whole {
    /// Its stored header.
    pub header: RecordHeader,
    /// True if it was decrypted with correct tags.
    pub decrypted: bool,
    /// True if its layers were decoded and have the checksums of the uncompressed layers.
    pub decoded: bool,
    /// Bad side shards by name, with the reason: damaged, or `Absent` if the bytes end before them.
    /// They do not affect the KV.
    pub lost_sides: Vec<(String, Refusal)>,
}

/// Verifies a record read whole, or at least up to the end of its payload: in its stored form, and
/// also decrypted and decoded if `keys` has its key and this build its codec. In a record without
/// KV the side shards are verified.
pub fn verify_whole(
    bytes: &[u8],
    known: &KnownRecord<'_>,
    keys: Option<&Keys>,
) -> Result<Whole, Refusal> {
    let header = verify_known(bytes, known)?;
    let lost_sides = lost_sides(bytes, &header);
    if header.without_kv
        && let Some((_, refusal)) = lost_sides.first()
    {
        return Err(refusal.clone());
    }
    let (mut decrypted, mut decoded) = (false, false);
    if header.key.is_none() {
        decoded = verify_decoded(bytes, &header)?;
    } else if let Some(keys) = keys {
        let mut plain = bytes.to_vec();
        decrypted = keys.decrypt(&mut plain, bytes.len())? == Opened::Decrypted;
        // A modified layer is zeros now, so its checksum fails. The layout was compared above.
        let layout = None;
        let used = verify_known(&plain, &KnownRecord { layout, ..*known })?;
        if decrypted {
            decoded = verify_decoded(&plain, &used)?;
        }
    }
    Ok(Whole {
        header,
        decrypted,
        decoded,
        lost_sides,
    })
}

/// Verifies the stored header and payload.
fn verify_known(bytes: &[u8], known: &KnownRecord<'_>) -> Result<RecordHeader, Refusal> {
    let header = RecordHeader::decode(bytes)?;
    check_namespace(&header, known.namespace)?;
    if let Some(id) = known.id {
        same(MissReason::ForeignId, "id", header.meta.id, id)?;
    }
    if let Some(layout) = known.layout {
        check_layout(&header, layout)?;
    }
    let len = bytes.len() as u64;
    verify_stretches(bytes, len, &header, 0)?;
    if header.without_kv && len < header.record_len {
        return Err(Refusal::truncated(len, header.record_len));
    }
    Ok(header)
}

fn lost_sides(bytes: &[u8], header: &RecordHeader) -> Vec<(String, Refusal)> {
    let mut lost = Vec::new();
    for side in &header.sides {
        let pages = side.pages();
        let verified = match bytes.get(pages.clone()) {
            Some(found) => verify_side_bytes(side, found).map(|_| ()),
            None => {
                let least = format_args!("at least {}", pages.end);
                let (reason, len) = (MissReason::Absent, bytes.len());
                Err(Refusal::new(reason, "length", len, least))
            }
        };
        if let Err(refusal) = verified {
            lost.push((side.name.clone(), refusal));
        }
    }
    lost
}

/// Decodes the layers of a record with a verified stored form, and verifies them with the zeros
/// behind them. True if there was something to decode and a codec for it.
fn verify_decoded(bytes: &[u8], header: &RecordHeader) -> Result<bool, Refusal> {
    if header.codec.is_as_is() {
        return Ok(false);
    }
    let refused =
        |found: String| Refusal::new(MissReason::BadChecksum, "decoded layer", found, "its bytes");
    let layer_len = header.layer_len;
    if layer_len > limits::MAX_BLOCK_BYTES || !header.codec.fits(layer_len) {
        return Err(refused(format!("{layer_len} bytes long")));
    }
    let Ok(mut coder) = LayerCoder::new(layer_len as usize) else {
        return Ok(false);
    };
    let stride = round_up(layer_len, LAYER_ALIGN);
    let layers = header.table.len() as u64;
    let last = round_up(stride * layers, PAGE) - stride * layers.saturating_sub(1);
    let mut raw = vec![0; last as usize];
    for (number, entry) in (1..).zip(&header.table) {
        let end = entry.offset.saturating_add(entry.len);
        let stored = bytes.get(entry.offset as usize..end as usize);
        let (layer, zeros) = raw.split_at_mut(layer_len as usize);
        zeros.fill(0);
        if !coder.decode(header.codec, stored.unwrap_or_default(), layer) {
            return Err(refused(format!("{number} cannot be decoded")));
        }
        let padded = if number == layers { last } else { stride };
        let found = crc32c(&raw[..padded as usize]);
        if found != entry.raw_crc {
            return Err(refused(format!("{number} with checksum {found:#010x}")));
        }
    }
    Ok(true)
}
