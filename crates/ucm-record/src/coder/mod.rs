//! A record to its stored form and back, in the buffer it lies in.
//!
//! The thread that writes a record encodes it just before, and the thread that has read one decodes
//! it before it is verified. What was read is verified twice: as it was stored
//! ([`crate::verify_stored`]), and as it is used, by the checksums that were taken when it left the
//! device. The parts: [`planes`] sorts the bytes of elements, [`layers`] makes the stored form of
//! one layer, `packer` makes one plane shorter; the header of the stored form is the business of
//! [`crate::encoded`].

mod layers;
#[cfg_attr(not(feature = "compress"), path = "no_packer.rs")]
mod packer;
mod planes;
#[cfg(test)]
mod tests;

use ucm_core::{Error, PAGE, Result};

use crate::MAGIC;
use crate::codec::Codec;
use crate::encoded::{claimed_codec, restore_header, seal_stored};
use crate::header::RecordHeader;
use crate::layout::RecordLayout;
use crate::verify::{Expect, has_layout, verify_stored};
pub(crate) use layers::LayerCoder;

/// Different lengths that stored records may have, about: an index of places keeps a table of them.
const LENGTHS: u64 = 256;

/// What one thread needs to encode and decode the records of one layout: memory for a record and
/// for a layer, and what zstd keeps (less than 2 MiB).
pub struct Coder {
    layout: RecordLayout,
    granule: u64,
    scratch: Vec<u8>,
    layers: LayerCoder,
}

impl Coder {
    /// `Internal` when there is no memory for it, `Unsupported` in a build without codecs.
    pub fn new(layout: &RecordLayout) -> Result<Self> {
        Ok(Self {
            layout: layout.clone(),
            granule: (layout.payload_len / LENGTHS).next_multiple_of(PAGE),
            scratch: vec![0; layout.kv_len()],
            layers: LayerCoder::new(layout.layer_len as usize)?,
        })
    }

    /// Puts the stored form of a record in its place, if that is shorter: its length. `None` leaves
    /// the record as it is: it is none of this layout, has more than this form can hold, or does
    /// not get shorter. With `prove` the form is decoded again first and compared, and what does
    /// not come back is an error and stays as it is.
    pub fn encode(
        &mut self,
        codec: Codec,
        record: &mut [u8],
        prove: bool,
    ) -> Result<Option<usize>> {
        let Some((header, lens)) = self.encode_layers(codec, record) else {
            return Ok(None);
        };
        let (kv_len, out) = (self.layout.kv_len(), &mut self.scratch);
        let stored = seal_stored(&header, record, codec, &lens, self.granule, out);
        let Some(stored) = stored.filter(|&stored| stored < kv_len) else {
            return Ok(None);
        };
        if prove && !self.proves(codec, record, &lens) {
            return Err(Error::internal("what was compressed does not come back"));
        }
        record[..stored].copy_from_slice(&self.scratch[..stored]);
        record.copy_within(kv_len.., stored); // the side shards, as they are
        Ok(Some(stored + record.len() - kv_len))
    }

    /// Encodes every layer into the scratch, one behind the other behind the room for the header;
    /// the header of the record, and the lengths of the stored layers.
    fn encode_layers(&mut self, codec: Codec, record: &[u8]) -> Option<(RecordHeader, Vec<usize>)> {
        let header = RecordHeader::decode(record).ok()?;
        let ours =
            header.codec.is_as_is() && !header.without_kv && has_layout(&header, &self.layout);
        if !ours || header.record_len != record.len() as u64 || !self.has_zeros_between(record) {
            return None;
        }
        let (mut at, end) = (
            self.layout.header_len(),
            self.layout.kv_len() - PAGE as usize,
        );
        let mut lens = Vec::with_capacity(self.layout.layers as usize);
        for layer in 0..self.layout.layers {
            let out = self.scratch.get_mut(at..end)?;
            let len = self
                .layers
                .encode(codec, &record[self.layout.layer_data(layer)], out)?;
            lens.push(len);
            at += len;
        }
        Some((header, lens))
    }

    /// Whether there is nothing behind the layers that would not come back.
    fn has_zeros_between(&self, record: &[u8]) -> bool {
        let data = |layer| self.layout.layer_data(layer);
        let starts = (1..self.layout.layers).map(|layer| data(layer).start);
        let gaps = (0..self.layout.layers)
            .zip(starts.chain([self.layout.kv_len()]))
            .map(|(layer, end)| data(layer).end..end);
        let zeros = |gap: &[u8]| gap.iter().all(|&byte| byte == 0);
        gaps.into_iter()
            .all(|gap| record.get(gap).is_some_and(zeros))
    }

    /// Whether what is in the scratch gives the layers of this record.
    fn proves(&mut self, codec: Codec, record: &[u8], lens: &[usize]) -> bool {
        let mut at = self.layout.header_len();
        let mut back = vec![0; self.layout.layer_len as usize];
        (0..).zip(lens).all(|(layer, len)| {
            let stored = &self.scratch[at..at + len];
            at += len;
            self.layers.decode(codec, stored, &mut back)
                && back == record[self.layout.layer_data(layer)]
        })
    }

    /// Puts the record in the place of its stored form, whose verified header this is and the first
    /// `read` bytes of which lie at the start of `bytes`. Gives the length of the record, which
    /// ends with its payload where its side shards were not read or do not fit, and whether all of
    /// its payload could be decoded. What could not comes to be zeros, which its checksum refuses.
    /// Of a header that is none of this layout nothing is decoded.
    pub fn decode(
        &mut self,
        header: &RecordHeader,
        bytes: &mut [u8],
        read: usize,
    ) -> (usize, bool) {
        let (start, kv_len, stored_len) = (
            self.layout.header_len(),
            self.layout.kv_len(),
            header.kv_len() as usize,
        );
        let ours = !header.codec.is_as_is() && has_layout(header, &self.layout);
        if !ours || stored_len > kv_len || read < stored_len || bytes.len() < kv_len {
            return (read, false);
        }
        let sides = header.record_len as usize - stored_len;
        let fit = read >= stored_len + sides && bytes.len() >= kv_len + sides;
        let sides = if fit { sides } else { 0 };
        // first, since the payload grows over them
        bytes.copy_within(stored_len..stored_len + sides, kv_len);
        self.scratch[start..stored_len].copy_from_slice(&bytes[start..stored_len]);
        let (mut whole, mut free) = (true, start);
        for (layer, entry) in (0..).zip(&header.table) {
            let range = self.layout.layer_data(layer);
            bytes[free..range.start].fill(0); // between layers
            free = range.end;
            let end = entry
                .offset
                .saturating_add(entry.len)
                .min(stored_len as u64);
            let stored = self.scratch.get(entry.offset as usize..end as usize);
            let layer = &mut bytes[range];
            if !self
                .layers
                .decode(header.codec, stored.unwrap_or_default(), layer)
            {
                layer.fill(0);
                whole = false;
            }
        }
        bytes[free..kv_len].fill(0);
        restore_header(header, &self.layout, bytes);
        (kv_len + sides, whole)
    }
}

/// The header of what was read, `stored_len` bytes on its medium, if it is the stored form of what
/// was asked for and whole in itself. Anything else is to be verified as it is.
pub fn stored_form(bytes: &[u8], stored_len: u64, expected: &Expect<'_>) -> Option<RecordHeader> {
    let claimed =
        claimed_codec(bytes).filter(|codec| !codec.is_as_is() && bytes.starts_with(&MAGIC));
    claimed.and_then(|_| verify_stored(bytes, stored_len, expected).ok())
}
