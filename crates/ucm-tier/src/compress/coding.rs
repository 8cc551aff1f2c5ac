//! A record in its slot to its stored form, and back, in the same slot.

use std::sync::atomic::Ordering;

use tracing::warn;
use ucm_core::{BlockId, PAGE, Result};
use ucm_device::Slot;
use ucm_record::encoded::{claimed_codec, restore_header, seal_stored};
use ucm_record::{Expect, MAGIC, RecordHeader, has_layout, verify_stored};

use super::{Shared, Tools};
use crate::backend::{ReadDone, WriteOptions};

/// Of so many records that are encoded one is decoded again before it is written, and compared.
const PROVEN: u64 = 64;

/// Whether what was read claims to be in another form than it is used in.
pub(super) fn is_encoded(read: &ReadDone) -> bool {
    let bytes = &read.slot.as_slice()[..read.read];
    bytes.starts_with(&MAGIC) && claimed_codec(bytes).is_some_and(|codec| !codec.is_as_is())
}

impl Shared {
    /// Puts the stored form of the record in a slot in its place, if that is shorter: the length of what is there then.
    /// Where it is to be read back, and now and then besides, it is decoded again first, and compared.
    pub(super) fn encode(&self, slot: &mut Slot, options: WriteOptions) -> usize {
        let counts = &self.counts;
        let proven = options.read_back || counts.encoded.load(Ordering::Relaxed).is_multiple_of(PROVEN);
        let worked = self.with_tools(|tools| {
            let len = self.encode_into(tools, &slot.as_slice()[..options.len], proven)?;
            slot.as_mut_slice()[..len].copy_from_slice(&tools.scratch[..len]);
            Some(len)
        });
        // Not a record of this part, no shorter, or no memory to work in: it goes as it is.
        let Some(len) = worked.ok().flatten() else {
            counts.as_is.fetch_add(1, Ordering::Relaxed);
            return options.len;
        };
        counts.encoded.fetch_add(1, Ordering::Relaxed);
        counts.raw_bytes.fetch_add(options.len as u64, Ordering::Relaxed);
        counts.stored_bytes.fetch_add(len as u64, Ordering::Relaxed);
        len
    }

    /// Encodes a record into the scratch: the length of its stored form, if that is shorter.
    fn encode_into(&self, tools: &mut Tools, raw: &[u8], proven: bool) -> Option<usize> {
        let header = RecordHeader::decode(raw).ok()?;
        let ours = header.codec.is_as_is() && header.sides.is_empty() && has_layout(&header, &self.record);
        let whole = header.record_len == raw.len() as u64 && self.has_zeros_between(raw);
        if !ours || !whole || self.codec.is_as_is() {
            return None;
        }
        let lens = self.encode_layers(tools, raw)?;
        let len = seal_stored(&header, raw, self.codec, &lens, self.granule, &mut tools.scratch);
        let len = len.filter(|&len| len < raw.len())?;
        if proven && !self.proves(tools, raw, &lens) {
            self.undecodable(header.meta.id, "nothing is stored that does not come back");
            return None;
        }
        Some(len)
    }

    /// Whether there is nothing behind the layers that would not come back.
    fn has_zeros_between(&self, raw: &[u8]) -> bool {
        let starts = (1..self.record.layers()).map(|layer| self.record.layer_data(layer).start);
        let ends = starts.chain([raw.len()]);
        let gaps = (0..self.record.layers())
            .zip(ends)
            .map(|(layer, end)| self.record.layer_data(layer).end..end);
        gaps.into_iter()
            .all(|gap| raw.get(gap).is_some_and(|gap| gap.iter().all(|&byte| byte == 0)))
    }

    /// Encodes every layer into the scratch, one behind the other behind the room for the header; their lengths.
    fn encode_layers(&self, tools: &mut Tools, raw: &[u8]) -> Option<Vec<usize>> {
        let (mut at, end) = (self.record.header_len(), raw.len() - PAGE as usize);
        let mut lens = Vec::with_capacity(self.record.layers() as usize);
        for layer in 0..self.record.layers() {
            let out = tools.scratch.get_mut(at..end)?;
            let len = tools
                .coder
                .encode(self.codec.width(), &raw[self.record.layer_data(layer)], out)?;
            lens.push(len);
            at += len;
        }
        Some(lens)
    }

    /// Whether what is in the scratch gives the layers of this record.
    fn proves(&self, tools: &mut Tools, raw: &[u8], lens: &[usize]) -> bool {
        let mut at = self.record.header_len();
        let mut back = vec![0; self.record.layer_data(0).len()];
        (0..).zip(lens).all(|(layer, len)| {
            let stored = &tools.scratch[at..at + len];
            at += len;
            tools.coder.decode(self.codec.width(), stored, &mut back)
                && back == raw[self.record.layer_data(layer)]
        })
    }

    /// A record that was read in its stored form, as it is used. What is damaged or foreign stays as it is, to be refused
    /// for that; of what cannot be decoded the layers come to be zeros, which their checksums refuse.
    pub(super) fn decode(&self, id: BlockId, read: ReadDone) -> Result<ReadDone> {
        let expect = Expect {
            id,
            namespace: *self.identity.digest(),
            part: self.part,
            layout: &self.record,
        };
        let header = match verify_stored(&read.slot.as_slice()[..read.read], read.stored_len, &expect) {
            Ok(header) if !header.codec.is_as_is() && self.record.kv_len() <= read.slot.len() => header,
            _ => return Ok(read),
        };
        let (mut slot, stored_len) = (read.slot, read.read);
        let whole =
            self.with_tools(|tools| self.decode_layers(tools, &header, slot.as_mut_slice(), stored_len))?;
        if whole {
            self.counts.decoded.fetch_add(1, Ordering::Relaxed);
        } else {
            self.undecodable(id, "it will be recomputed");
        }
        Ok(ReadDone {
            slot,
            read: self.record.kv_len(),
            stored_len: self.record.kv_len() as u64,
        })
    }

    /// Decodes what lies at the start of `bytes` in place, by way of the scratch; whether all of it could be.
    fn decode_layers(
        &self,
        tools: &mut Tools,
        header: &RecordHeader,
        bytes: &mut [u8],
        stored_len: usize,
    ) -> bool {
        let (scratch, start) = (&mut tools.scratch[..stored_len], self.record.header_len());
        scratch[start..].copy_from_slice(&bytes[start..stored_len]);
        let (mut whole, mut free) = (true, start);
        for (layer, entry) in (0..).zip(&header.table) {
            let range = self.record.layer_data(layer);
            bytes[free..range.start].fill(0); // between layers
            free = range.end;
            let end = entry.offset.saturating_add(entry.len);
            let stored = scratch
                .get(entry.offset as usize..end as usize)
                .unwrap_or_default();
            let layer = &mut bytes[range];
            if !tools.coder.decode(header.codec.width(), stored, layer) {
                layer.fill(0);
                whole = false;
            }
        }
        bytes[free..self.record.kv_len()].fill(0);
        restore_header(header, &self.record, bytes);
        whole
    }

    fn undecodable(&self, id: BlockId, so: &str) {
        self.counts.undecodable.fetch_add(1, Ordering::Relaxed);
        warn!(
            store = self.writer,
            block = %id,
            "record {id} does not come back from its compressed form, though that is whole; {so}"
        );
    }
}
