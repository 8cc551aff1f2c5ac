//! Encodes and decodes a record in place.
//!
//! The thread that writes a record encodes it just before the write; the thread that has read one
//! decodes it. A record is verified twice: in its stored form ([`crate::verify_stored`]), and after
//! decoding by the checksums taken when it left the device. The parts: [`planes`] sorts the bytes
//! of elements, [`layers`] makes the stored form of one layer, `packer` compresses one plane, and
//! [`crate::encoded`] makes the header of the stored form.

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

/// Approximate number of different lengths of stored records. An index of locations keeps a table
/// of them.
const LENGTHS: u64 = 256;

/// State of one thread to encode and decode the records of one layout: memory for a record and a
/// layer, and zstd's own (less than 2 MiB).
pub struct Coder {
    layout: RecordLayout,
    granule: u64,
    scratch: Vec<u8>,
    layers: LayerCoder,
}

impl Coder {
    /// `Internal` without memory for it, `Unsupported` in a build without codecs.
    pub fn new(layout: &RecordLayout) -> Result<Self> {
        Ok(Self {
            layout: layout.clone(),
            granule: (layout.payload_len / LENGTHS).next_multiple_of(PAGE),
            scratch: vec![0; layout.kv_len()],
            layers: LayerCoder::new(layout.layer_len as usize)?,
        })
    }

    /// Replaces a record by its stored form if that is shorter, and returns its length. `None`
    /// leaves the record unchanged: it has another layout, has bytes that this form cannot hold, or
    /// does not get shorter. With `prove` the form is first decoded and compared; a difference is
    /// an error and the record stays unchanged.
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
            return Err(Error::internal(
                "the compressed record decodes to other bytes",
            ));
        }
        record[..stored].copy_from_slice(&self.scratch[..stored]);
        record.copy_within(kv_len.., stored); // the side shards, unchanged
        Ok(Some(stored + record.len() - kv_len))
    }

    /// Encodes every layer into the scratch buffer, behind the space for the header. Returns the
    /// header of the record and the lengths of the stored layers.
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

    /// True if the bytes behind the layers can be restored (zeros).
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

    /// True if the scratch buffer decodes to the layers of this record.
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

    /// Replaces a stored form by its record. `header` is its verified header; its first `read`
    /// bytes are at the start of `bytes`. Returns the length of the record, which ends with its
    /// payload if its side shards were not read or do not fit, and whether all of its payload could
    /// be decoded. Layers that could not become zeros, so that their checksum fails. A header of
    /// another layout is not decoded.
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

/// The header of the read bytes (`stored_len` on the medium), if they are the sound stored form of
/// the requested record. Anything else must be verified as it is.
pub fn stored_form(bytes: &[u8], stored_len: u64, expected: &Expect<'_>) -> Option<RecordHeader> {
    let claimed =
        claimed_codec(bytes).filter(|codec| !codec.is_as_is() && bytes.starts_with(&MAGIC));
    claimed.and_then(|_| verify_stored(bytes, stored_len, expected).ok())
}
