//! Offsets in the records of one part, derived from its geometry, and the sealing of a filled
//! buffer.

use std::collections::BTreeSet;
use std::ops::Range;

use ucm_core::{DType, Error, Geometry, LAYER_ALIGN, PAGE, Result, limits, round_up};
use ucm_device::crc32c;

use super::{LONGEST_HEADER, MAX_SIDE_NAME, MAX_SIDES, at};

/// A side shard of the layout: data about the block that can be read without the KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideSpec {
    /// 1 to 16 bytes of lower-case letters, digits, `_`, `-`, `.`.
    pub name: String,
    /// Version of the content, for its reader.
    pub version: u32,
    /// Length in bytes, above zero.
    pub len: u64,
}

/// Offsets and lengths of the records of one part, all in bytes.
///
/// ```
/// use ucm_core::{BlockId, Geometry, MissReason, Part};
/// use ucm_record::{Expect, RecordLayout, RecordMeta, verify};
///
/// let layout = RecordLayout::new(&Geometry::new(vec![4096], 2, 2).unwrap());
/// let mut record = vec![0; layout.record_len()];
/// for layer in 0..layout.layers() {
///     record[layout.layer_data(layer)].fill(layer as u8 + 1);
/// }
/// let meta = RecordMeta {
///     id: BlockId([7; 16]),
///     namespace: [1; 32],
///     part: Part::default(),
///     parent: BlockId::default(),
///     ordinal: 0,
///     tokens: 16,
///     time_ns: 0,
///     writer: 0,
///     tenant: [0; 32],
/// };
/// layout.seal(&meta, &mut record).unwrap();
///
/// let asked = Expect { id: meta.id, namespace: meta.namespace, part: meta.part, layout: &layout };
/// verify(&record, record.len() as u64, &asked).unwrap();
/// record[layout.layer_data(1).start] ^= 1;
/// let refused = verify(&record, record.len() as u64, &asked).unwrap_err();
/// assert_eq!(refused.reason, MissReason::BadChecksum);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordLayout {
    pub(super) layers: u32,
    pub(super) layer_len: u64,
    pub(super) raw_len: u64,
    pub(super) payload_len: u64,
    pub(super) tensors: Vec<u64>,
    pub(super) shape: u32,
    pub(super) block_tokens: u32,
    pub(super) dtype: DType,
    pub(super) sides: Vec<SideSpec>,
    pub(super) room_for_seals: bool,
}

impl RecordLayout {
    /// The layout of blocks of this geometry, without side shards. It does not depend on the
    /// caller's layers per shard: direct and layerwise dumps write the same bytes.
    pub fn new(geometry: &Geometry) -> Self {
        let sizes: Vec<u8> = geometry
            .tensors()
            .iter()
            .flat_map(|size| size.to_le_bytes())
            .collect();
        Self {
            layers: geometry.layers(),
            layer_len: geometry.layer_len(),
            raw_len: geometry.raw_len(),
            payload_len: geometry.payload_len(),
            tensors: geometry.tensors().to_vec(),
            shape: crc32c(&sizes),
            block_tokens: 0,
            dtype: DType::default(),
            sides: Vec::new(),
            room_for_seals: false,
        }
    }

    /// Reserves space in the header for the tags of [`Keys`](super::Keys). With up to 83 layers the
    /// header is not longer. Fails if there are too many layers.
    pub fn encrypted(mut self) -> Result<Self> {
        self.room_for_seals = true;
        if self.header_len() > LONGEST_HEADER {
            let text = "a record with this number of layers cannot be encrypted: its header has no \
                        room for the tags";
            return Err(Error::invalid(text).with("layers", self.layers));
        }
        Ok(self)
    }

    /// Sets the tokens of a block and the type of its elements, for the header's seed fields. The
    /// defaults are 0 and opaque. Readers must use the same values.
    #[must_use]
    pub fn describing(mut self, block_tokens: u32, dtype: DType) -> Self {
        self.block_tokens = block_tokens;
        self.dtype = dtype;
        self
    }

    /// Adds side shards behind the payload; the offsets of the KV do not change. Fails on a
    /// malformed or repeated name, a length of zero, more than [`MAX_SIDES`], or more than
    /// [`limits::MAX_SIDES_BYTES`] in total.
    pub fn with_sides(mut self, sides: Vec<SideSpec>) -> Result<Self> {
        if sides.len() > MAX_SIDES {
            let names: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
            let many =
                Error::invalid("a record has at most 8 side shards").with("sides", sides.len());
            return Err(many.with("names", names.join(", ")));
        }
        let mut all = 0u64;
        let named = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_-.".contains(&c);
        for (i, side) in sides.iter().enumerate() {
            let bad = |why: &'static str| {
                Error::invalid(why)
                    .with("name", &side.name)
                    .with("len", side.len)
            };
            if side.name.is_empty()
                || side.name.len() > MAX_SIDE_NAME
                || !side.name.bytes().all(named)
            {
                return Err(bad("a side shard's name is 1 to 16 of a-z, 0-9, _, -, ."));
            }
            if sides[..i].iter().any(|other| other.name == side.name) {
                return Err(bad("two side shards have the same name"));
            }
            if side.len == 0 {
                return Err(bad("a side shard has at least 1 byte"));
            }
            all = all.saturating_add(side.len.min(limits::MAX_BLOCK_BYTES).next_multiple_of(PAGE));
            if all > limits::MAX_SIDES_BYTES {
                let long = bad(
                    "the side shards of a block have at most 16 MiB together, each padded to 4096 \
                     bytes",
                );
                return Err(long.with("upto_this", all));
            }
        }
        self.sides = sides;
        Ok(self)
    }

    /// Number of layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Bytes of each tensor of a layer.
    pub fn tensors(&self) -> &[u64] {
        &self.tensors
    }

    /// Tokens of a block; 0 if unknown.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Side shards, in order.
    pub fn sides(&self) -> &[SideSpec] {
        &self.sides
    }

    /// Length of the header: whole pages.
    pub fn header_len(&self) -> usize {
        let layers = self.layers as usize;
        let used = if self.room_for_seals {
            at::side_seal(layers, MAX_SIDES)
        } else {
            at::seals(layers)
        };
        round_up((used + at::CRC_LEN) as u64, PAGE) as usize
    }

    /// Length of the payload: whole pages.
    pub fn payload_len(&self) -> usize {
        self.payload_len as usize
    }

    /// Length of header and payload, the bytes to read for the KV.
    pub fn kv_len(&self) -> usize {
        self.header_len() + self.payload_len()
    }

    /// Length of the whole record, with side shards.
    pub fn record_len(&self) -> usize {
        let sides: u64 = self.sides.iter().map(|side| round_up(side.len, PAGE)).sum();
        self.kv_len() + sides as usize
    }

    /// The lengths of uncompressed records of this layout, sorted and unique: without side shards,
    /// with all of them, and with one side shard only.
    pub fn record_lengths(&self) -> Vec<u64> {
        let alone = (0..self.sides.len())
            .filter_map(|index| Some(self.side_alone(index)?.end.next_multiple_of(ALIGN)));
        let lengths = alone.chain([self.kv_len(), self.record_len()]);
        let lengths: BTreeSet<u64> = lengths.map(|len| len as u64).collect();
        lengths.into_iter().collect()
    }

    /// Range of layer `layer` in the record. A layer that does not exist lies behind the last one.
    pub fn layer_data(&self, layer: u32) -> Range<usize> {
        let start =
            self.header_len() + (round_up(self.layer_len, LAYER_ALIGN) * u64::from(layer)) as usize;
        start..start + self.layer_len as usize
    }

    /// The ranges to read to get and verify these layers, in whole pages and in order: the header,
    /// and the layers with the padding behind them.
    pub fn parts(&self, layers: Range<u32>) -> Vec<Range<usize>> {
        let page = PAGE as usize;
        let start = self.layer_data(layers.start).start / page * page;
        let end = if layers.end >= self.layers {
            self.kv_len()
        } else {
            self.layer_data(layers.end).start.next_multiple_of(page)
        };
        let header = 0..self.header_len();
        if start <= header.end {
            return std::iter::once(0..end).collect();
        }
        vec![header, start..end]
    }

    /// Range of the side shard at `index` in the record; `None` if there is no such side shard.
    pub fn side_data(&self, index: usize) -> Option<Range<usize>> {
        let side = self.sides.get(index)?;
        let before: u64 = self.sides[..index]
            .iter()
            .map(|side| round_up(side.len, PAGE))
            .sum();
        let start = self.kv_len() + before as usize;
        Some(start..start + side.len as usize)
    }

    /// Range of the side shard at `index` in a record of its own; `None` if there is no such side
    /// shard.
    pub fn side_alone(&self, index: usize) -> Option<Range<usize>> {
        let side = self.sides.get(index)?;
        Some(ALIGN..ALIGN + side.len as usize)
    }

    /// Finishes one filled layer while it is still in cache. It zeroes the padding behind it, so
    /// that a record depends on its content only and no old bytes of a reused buffer leave the
    /// process. Returns its CRC-32C, which covers that padding. `record` is the whole record's
    /// buffer; a shorter one yields 0 and fails in [`encode_header`](super::encode_header).
    pub fn seal_layer(&self, record: &mut [u8], layer: u32) -> u32 {
        let data = self.layer_data(layer);
        let last = layer + 1 == self.layers;
        let end = if last {
            self.kv_len()
        } else {
            self.layer_data(layer + 1).start
        };
        seal_stretch(record, data, end)
    }

    /// As [`RecordLayout::seal_layer`], for the side shard at `index`; 0 if there is no such side
    /// shard.
    pub fn seal_side(&self, record: &mut [u8], index: usize) -> u32 {
        self.side_data(index)
            .map_or(0, |data| seal_pages(record, data))
    }
}

/// [`PAGE`] as a length in memory.
const ALIGN: usize = PAGE as usize;

/// Zeroes the rest of the last page of `data` and returns the checksum of all of its pages.
pub(super) fn seal_pages(record: &mut [u8], data: Range<usize>) -> u32 {
    let end = data.end.next_multiple_of(ALIGN);
    seal_stretch(record, data, end)
}

/// Zeroes from the end of `data` to `end` and returns the checksum of all of it.
fn seal_stretch(record: &mut [u8], data: Range<usize>, end: usize) -> u32 {
    let Some(stretch) = record.get_mut(data.start..end) else {
        return 0;
    };
    stretch[data.len()..].fill(0);
    crc32c(stretch)
}
