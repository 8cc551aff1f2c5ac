//! The header: its fields, how it is written, and how it is read without trusting any byte of it.

use std::fmt::Display;
use std::ops::Range;

use ucm_core::{BlockId, Error, MissReason, PAGE, Part, crc32c, limits, round_up};

use super::codec::Codec;
use super::layout::{RecordLayout, SideSpec, seal_pages};
use super::refusal::{Refusal, same};
use super::{
    ENCRYPTED, LONGEST_HEADER, MAGIC, MARK, MAX_SIDES, PREAMBLE_LEN, VERSION, WITHOUT_KV, at,
};
use crate::bytes::{self, array, part_at, u32_at, u64_at};

/// A writer's fields of one record; the rest of the header follows from the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecordMeta {
    /// The record id, also the file's name.
    pub id: BlockId,
    /// Digest of the identity.
    pub namespace: [u8; 32],
    /// Which part of the block.
    pub part: Part,
    /// Record id of the previous block in the chain; zero if unknown or none.
    pub parent: BlockId,
    /// Index of the block in its chain; zero if unknown.
    pub ordinal: u32,
    /// Tokens of the block; zero if unknown.
    pub tokens: u32,
    /// Wall clock of the writer, ns since 1970.
    pub time_ns: u64,
    /// Random number of the writing process.
    pub writer: u64,
    /// Tag of the tenant, made from the cache salt by the writing process; zero if unknown. It is
    /// independent of the block's content, and readers do not check it.
    pub tenant: [u8; 32],
}

/// One layer in the header's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerEntry {
    /// From the start of the record.
    pub offset: u64,
    /// Stored bytes, without the padding behind them.
    pub len: u64,
    /// CRC-32C from `offset` to the next layer, or to the end of the payload.
    pub crc: u32,
    /// The same of the uncompressed layer; 0 if the layer is stored uncompressed. Encrypted in an
    /// encrypted record.
    pub raw_crc: u32,
}

/// One side shard in the header's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideEntry {
    /// Its name.
    pub name: String,
    /// Version of its content.
    pub version: u32,
    /// CRC-32C from `offset` to the end of the last page it touches.
    pub crc: u32,
    /// From the start of the record, a whole page.
    pub offset: u64,
    /// Bytes, without the padding behind them.
    pub len: u64,
}

/// A header with correct checksums and a table that lies inside the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// The metadata of its writer.
    pub meta: RecordMeta,
    /// Format version.
    pub version: u32,
    /// True for a record of side shards only.
    pub without_kv: bool,
    /// The codec of the layers.
    pub codec: Codec,
    /// Number derived from the key of an encrypted record.
    pub key: Option<[u8; 8]>,
    /// Number of layers.
    pub layers: u32,
    /// Tokens of a block, the seed's `block_size`.
    pub block_tokens: u32,
    /// Code of the element type, see [`ucm_core::DType`].
    pub dtype: u32,
    /// Bytes of the header.
    pub header_len: u64,
    /// Bytes of the whole record.
    pub record_len: u64,
    /// Bytes of KV, without alignment.
    pub raw_len: u64,
    /// Bytes of the payload as stored.
    pub stored_len: u64,
    /// Tensors of a layer.
    pub tensors: u32,
    /// Bytes of a layer.
    pub layer_len: u64,
    /// CRC-32C of the sizes of a layer's tensors, each as u64 LE.
    pub shape: u32,
    /// The layers, in order.
    pub table: Vec<LayerEntry>,
    /// The side shards, in order.
    pub sides: Vec<SideEntry>,
}

impl SideEntry {
    /// The pages it touches, from the start of the record.
    pub fn pages(&self) -> Range<usize> {
        let end = self.offset.saturating_add(round_up(self.len, PAGE));
        self.offset as usize..usize::try_from(end).unwrap_or(usize::MAX)
    }
}

impl RecordLayout {
    /// Makes a record of a buffer with all layers and side shards filled in. Fails if the buffer is
    /// shorter than [`RecordLayout::record_len`].
    pub fn seal(&self, meta: &RecordMeta, record: &mut [u8]) -> ucm_core::Result<()> {
        let mut checksums: Vec<_> = (0..self.layers())
            .map(|layer| self.seal_layer(record, layer))
            .collect();
        checksums.extend((0..self.sides().len()).map(|index| self.seal_side(record, index)));
        encode_header(self, meta, &checksums, record)
    }
}

/// Writes the header over the first bytes of `record`, the buffer of the whole record. `checksums`
/// are those of [`RecordLayout::seal_layer`] for every layer, then of [`RecordLayout::seal_side`]
/// for every side shard; with those of the layers only, the record ends with its payload. Fails if
/// the buffer is shorter than the record or the number of checksums is wrong.
pub fn encode_header(
    layout: &RecordLayout,
    meta: &RecordMeta,
    checksums: &[u32],
    record: &mut [u8],
) -> ucm_core::Result<()> {
    let layers = layout.layers as usize;
    if checksums.len() != layers && checksums.len() != layers + layout.sides.len() {
        return Err(Error::invalid(
            "a record has one checksum per layer and, with side shards, per side shard",
        )
        .with("checksums", checksums.len())
        .with("layers", layout.layers)
        .with("sides", layout.sides.len()));
    }
    let (of_layers, of_sides) = checksums.split_at(layers);
    let sides = (0..)
        .zip(of_sides)
        .filter_map(|(index, &crc)| Some((index, layout.side_data(index)?, crc)));
    let contents = Contents {
        flags: 0,
        header_len: layout.header_len(),
        raw_len: layout.raw_len,
        stored_len: layout.payload_len,
        layers: of_layers,
        sides: sides.collect(),
    };
    write_header(layout, meta, &contents, record)
}

/// Makes the record with only the side shard at `index`, at the start of `record`, where its bytes
/// are filled in ([`RecordLayout::side_alone`]). Returns its length. `meta` is that of this record,
/// with its own id. Fails if there is no such side shard or the buffer is shorter than the record.
pub fn seal_side_alone(
    layout: &RecordLayout,
    index: usize,
    meta: &RecordMeta,
    record: &mut [u8],
) -> ucm_core::Result<usize> {
    let none = || Error::invalid("there is no such side shard").with("index", index);
    let range = layout.side_alone(index).ok_or_else(none)?;
    let (header_len, end) = (range.start, range.end.next_multiple_of(range.start));
    let crc = seal_pages(record, range.clone());
    let contents = Contents {
        flags: WITHOUT_KV,
        header_len,
        raw_len: 0,
        stored_len: 0,
        layers: &[],
        sides: vec![(index, range, crc)],
    };
    write_header(layout, meta, &contents, record)?;
    Ok(end)
}

/// The header's fields beyond the layout.
struct Contents<'a> {
    flags: u32,
    header_len: usize,
    raw_len: u64,
    stored_len: u64,
    /// Checksums of the layers.
    layers: &'a [u32],
    /// Side shards by their index in the layout: their ranges and checksums.
    sides: Vec<(usize, Range<usize>, u32)>,
}

fn write_header(
    layout: &RecordLayout,
    meta: &RecordMeta,
    contents: &Contents<'_>,
    record: &mut [u8],
) -> ucm_core::Result<()> {
    let payload_end = contents.header_len + contents.stored_len as usize;
    let end = contents
        .sides
        .last()
        .map_or(payload_end, |(_, range, _)| range.end);
    let record_len = round_up(end as u64, PAGE);
    if (record.len() as u64) < record_len {
        return Err(Error::invalid("the buffer is shorter than the record")
            .with("len", record.len())
            .with("record_len", record_len));
    }
    let out = &mut record[..contents.header_len];
    out.fill(0);
    let mut put = |offset, bytes: &[u8]| bytes::put(out, offset, bytes);
    put(at::MAGIC, &MAGIC);
    put(at::VERSION, &VERSION.to_le_bytes());
    put(at::ID, &meta.id.0);
    put(at::LAYERS, &layout.layers.to_le_bytes());
    put(at::BLOCK_TOKENS, &layout.block_tokens.to_le_bytes());
    put(at::DTYPE, &layout.dtype.code().to_le_bytes());
    put(at::MARK, &MARK);
    put(at::HEADER_LEN, &(contents.header_len as u32).to_le_bytes());
    put(at::RECORD_LEN, &record_len.to_le_bytes());
    put(at::FLAGS, &contents.flags.to_le_bytes());
    put(at::ORDINAL, &meta.ordinal.to_le_bytes());
    put(at::PARENT, &meta.parent.0);
    put(at::NAMESPACE, &meta.namespace);
    put(at::PART, &meta.part.to_bytes());
    put(at::TOKENS, &meta.tokens.to_le_bytes());
    put(at::SHARDS, &(contents.layers.len() as u32).to_le_bytes());
    put(at::RAW_LEN, &contents.raw_len.to_le_bytes());
    put(at::STORED_LEN, &contents.stored_len.to_le_bytes());
    put(at::TIME, &meta.time_ns.to_le_bytes());
    put(at::WRITER, &meta.writer.to_le_bytes());
    put(at::TENANT, &meta.tenant);
    put(at::SIDES, &(contents.sides.len() as u32).to_le_bytes());
    // At most MAX_TENSORS.
    put(at::TENSORS, &(layout.tensors.len() as u32).to_le_bytes());
    put(at::LAYER_LEN, &layout.layer_len.to_le_bytes());
    put(at::SHAPE, &layout.shape.to_le_bytes());
    for (i, crc) in contents.layers.iter().enumerate() {
        let range = layout.layer_data(i as u32);
        let entry = at::SHARD_TABLE + i * at::SHARD_ENTRY;
        put(entry, &(range.start as u64).to_le_bytes());
        put(entry + 8, &(range.len() as u64).to_le_bytes());
        put(entry + 16, &crc.to_le_bytes());
    }
    for (i, (index, range, crc)) in contents.sides.iter().enumerate() {
        let (side, entry) = (&layout.sides[*index], at::SIDE_TABLE + i * at::SIDE_ENTRY);
        put(entry, side.name.as_bytes());
        put(entry + 16, &side.version.to_le_bytes());
        put(entry + 20, &crc.to_le_bytes());
        put(entry + 24, &(range.start as u64).to_le_bytes());
        put(entry + 32, &(range.len() as u64).to_le_bytes());
    }
    seal_header(out);
    Ok(())
}

/// Sets the checksums of a header; `out` is all of it.
pub(super) fn seal_header(out: &mut [u8]) {
    let preamble = crc32c(&out[..at::PREAMBLE_CRC]);
    bytes::put(out, at::PREAMBLE_CRC, &preamble.to_le_bytes());
    let end = out.len() - at::CRC_LEN;
    let whole = crc32c(&out[..end]);
    bytes::put(out, end, &whole.to_le_bytes());
}

/// Refusal of an impossible header.
fn bad(field: &'static str, found: impl Display, expected: impl Display) -> Refusal {
    Refusal::new(MissReason::BadHeader, field, found, expected)
}

/// Refusal of a header that a newer version wrote.
fn newer(field: &'static str, found: u32, expected: impl Display) -> Refusal {
    Refusal::new(MissReason::NewerVersion, field, found, expected)
}

/// Checks that a field has its only possible value.
fn sound<T: PartialEq + Display>(
    field: &'static str,
    found: T,
    expected: T,
) -> Result<(), Refusal> {
    same(MissReason::BadHeader, field, found, expected)
}

/// Verifies the preamble: magic, form, its checksum, version. Returns the header's length.
fn check_preamble(bytes: &[u8]) -> Result<usize, Refusal> {
    let seen = bytes.len().min(MAGIC.len());
    if bytes[..seen] != MAGIC[..seen] {
        let (found, expected) = (bytes[..seen].escape_ascii(), MAGIC.escape_ascii());
        let reason = MissReason::NotARecord;
        return Err(Refusal::new(reason, "magic", found, expected));
    }
    if bytes.len() < PREAMBLE_LEN {
        return Err(Refusal::truncated(bytes.len() as u64, PREAMBLE_LEN as u64));
    }
    // The seed reserved these bytes; every version of our records has the mark.
    let mark = &bytes[at::MARK..][..MARK.len()];
    let (found, expected) = (mark.escape_ascii(), MARK.escape_ascii());
    if bytes[at::MARK..PREAMBLE_LEN].iter().all(|&byte| byte == 0) {
        return Err(Refusal::new(MissReason::SeedForm, "mark", found, expected));
    }
    if mark != MARK {
        return Err(bad("mark", found, expected));
    }
    // Checked before the version: a flipped bit must not turn a record into one that is never
    // replaced.
    let (found, end) = (crc32c(&bytes[..at::PREAMBLE_CRC]), at::PREAMBLE_CRC);
    sound("checksum of the preamble", found, u32_at(bytes, end))?;
    match u32_at(bytes, at::VERSION) {
        0 => Err(bad("version", 0, VERSION)),
        VERSION => Ok(u32_at(bytes, at::HEADER_LEN) as usize),
        version => Err(newer("version", version, VERSION)),
    }
}

impl RecordHeader {
    /// Longest header of this version in bytes: enough of a file to identify it.
    pub const LONGEST: usize = LONGEST_HEADER;

    /// The part that the header at the start of these bytes names, unverified: a hint for a reader
    /// of several parts. `None` if they end before it.
    pub fn part_of(bytes: &[u8]) -> Option<Part> {
        (bytes.len() >= at::TOKENS).then(|| part_at(bytes, at::PART))
    }

    /// True if these first bytes of a block file belong to a record of a newer version. Block files
    /// hold uncompressed records, so a compressed one counts as newer too.
    pub fn is_newer(bytes: &[u8]) -> bool {
        match Self::decode(bytes) {
            Ok(header) => !header.codec.is_as_is(),
            Err(refusal) => refusal.reason == MissReason::NewerVersion,
        }
    }

    /// Reads and checks the header at the start of `bytes`, which may be longer or, for a damaged
    /// file, shorter. Returns the reason of a refusal. [`super::verify`] checks the payload and the
    /// expectations.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let header_len = check_preamble(bytes)?;
        if !(header_len as u64).is_multiple_of(PAGE)
            || header_len == 0
            || header_len > Self::LONGEST
        {
            let pages = format_args!("whole pages, at most {}", Self::LONGEST);
            return Err(bad("header_len", header_len, pages));
        }
        let short = || Refusal::truncated(bytes.len() as u64, header_len as u64);
        let bytes = bytes.get(..header_len).ok_or_else(short)?;
        let end = header_len - at::CRC_LEN;
        let found = crc32c(&bytes[..end]);
        sound("checksum of the header", found, u32_at(bytes, end))?;
        // Unknown flags or an unknown codec come from a newer version.
        let (shards, sides) = (
            u32_at(bytes, at::SHARDS) as usize,
            u32_at(bytes, at::SIDES) as usize,
        );
        let code = u32_at(bytes, at::CODEC);
        let codec = Codec::from_code(code).ok_or_else(|| newer("codec", code, "a known one"))?;
        let flags = u32_at(bytes, at::FLAGS);
        if flags & !(WITHOUT_KV | ENCRYPTED) != 0 {
            return Err(newer("flags", flags, "0 to 3"));
        }
        let (without_kv, encrypted) = (flags & WITHOUT_KV != 0, flags & ENCRYPTED != 0);
        if without_kv && !codec.is_as_is() {
            return Err(newer("codec", code, "0 of a record without KV"));
        }
        if !codec.is_readable() {
            let (reason, expected) = (MissReason::ForeignShape, "0, or one of zstd");
            return Err(Refusal::new(reason, "codec", code, expected));
        }
        let room = match without_kv {
            true => 0,
            false => (end - at::SHARD_TABLE) / at::SHARD_ENTRY,
        };
        if shards > room || (shards == 0) != without_kv {
            let least = u32::from(!without_kv);
            return Err(bad("shards", shards, format_args!("{least} to {room}")));
        }
        if sides > MAX_SIDES || (sides == 0 && without_kv) {
            let least = u32::from(without_kv);
            let range = format_args!("{least} to {MAX_SIDES}");
            return Err(bad("side shards", sides, range));
        }
        let seals_end = at::side_seal(shards, sides);
        if encrypted && seals_end > end {
            return Err(bad("end of the authentication tags", seals_end, end));
        }
        let header = Self {
            meta: RecordMeta {
                id: BlockId(array(bytes, at::ID)),
                namespace: array(bytes, at::NAMESPACE),
                part: part_at(bytes, at::PART),
                parent: BlockId(array(bytes, at::PARENT)),
                ordinal: u32_at(bytes, at::ORDINAL),
                tokens: u32_at(bytes, at::TOKENS),
                time_ns: u64_at(bytes, at::TIME),
                writer: u64_at(bytes, at::WRITER),
                tenant: array(bytes, at::TENANT),
            },
            version: VERSION,
            without_kv,
            codec,
            key: encrypted.then(|| array(bytes, at::KEY_ID)),
            layers: u32_at(bytes, at::LAYERS),
            block_tokens: u32_at(bytes, at::BLOCK_TOKENS),
            dtype: u32_at(bytes, at::DTYPE),
            header_len: header_len as u64,
            record_len: u64_at(bytes, at::RECORD_LEN),
            raw_len: u64_at(bytes, at::RAW_LEN),
            stored_len: u64_at(bytes, at::STORED_LEN),
            tensors: u32_at(bytes, at::TENSORS),
            layer_len: u64_at(bytes, at::LAYER_LEN),
            shape: u32_at(bytes, at::SHAPE),
            table: (0..shards)
                .map(|i| layer_entry(bytes, codec.is_as_is() && !encrypted, i))
                .collect(),
            sides: (0..sides)
                .map(|i| side_entry(bytes, i))
                .collect::<Option<_>>()
                .ok_or_else(|| bad("name of a side shard", "no text", "UTF-8"))?,
        };
        header.check_whole()?;
        Ok(header)
    }

    /// Bytes of header and payload.
    pub fn kv_len(&self) -> u64 {
        self.header_len.saturating_add(self.stored_len)
    }

    /// The side shard of that name.
    pub fn side(&self, name: &str) -> Option<&SideEntry> {
        self.sides.iter().find(|side| side.name == name)
    }

    /// The requested side shard: of that name, version and length.
    pub fn side_of(&self, spec: &SideSpec) -> Option<&SideEntry> {
        self.side(&spec.name)
            .filter(|side| (side.version, side.len) == (spec.version, spec.len))
    }

    /// Bytes of its side shards, padding included.
    pub fn sides_len(&self) -> u64 {
        self.record_len.saturating_sub(self.kv_len())
    }

    /// True if layers and side shards are contiguous up to the record's end, so that checksums
    /// cover every byte.
    fn check_whole(&self) -> Result<(), Refusal> {
        if self.without_kv {
            sound("stored_len", self.stored_len, 0)?;
            sound("raw_len", self.raw_len, 0)?;
        }
        let kv_end = self.kv_len(); // on overflow the largest number, which is no whole page
        let mut free = self.header_len;
        for (i, entry) in self.table.iter().enumerate() {
            let (offset, end) = (entry.offset, entry.offset.saturating_add(entry.len));
            if offset < free || (i == 0 && offset != free) {
                return Err(bad("offset of a layer", offset, free));
            }
            if end > kv_end {
                return Err(bad("end of a layer", end, format_args!("at most {kv_end}")));
            }
            free = end;
        }
        let mut page = kv_end;
        for side in &self.sides {
            if side.offset != page {
                return Err(bad("offset of a side shard", side.offset, page));
            }
            if side.len == 0 || side.len > limits::MAX_BLOCK_BYTES {
                let range = format_args!("1 to {}", limits::MAX_BLOCK_BYTES);
                return Err(bad("length of a side shard", side.len, range));
            }
            page = page.saturating_add(round_up(side.len, PAGE));
        }
        if !page.is_multiple_of(PAGE) {
            let pages = "whole pages with the header";
            return Err(bad("stored_len", self.stored_len, pages));
        }
        sound("record_len", self.record_len, page)
    }
}

fn layer_entry(bytes: &[u8], as_is: bool, i: usize) -> LayerEntry {
    let entry = at::SHARD_TABLE + i * at::SHARD_ENTRY;
    LayerEntry {
        offset: u64_at(bytes, entry),
        len: u64_at(bytes, entry + 8),
        crc: u32_at(bytes, entry + 16),
        raw_crc: if as_is { 0 } else { u32_at(bytes, entry + 20) },
    }
}

fn side_entry(bytes: &[u8], i: usize) -> Option<SideEntry> {
    let entry = at::SIDE_TABLE + i * at::SIDE_ENTRY;
    let name: [u8; 16] = array(bytes, entry);
    let name = std::str::from_utf8(&name).ok()?.trim_end_matches('\0');
    Some(SideEntry {
        name: name.to_owned(),
        version: u32_at(bytes, entry + 16),
        crc: u32_at(bytes, entry + 20),
        offset: u64_at(bytes, entry + 24),
        len: u64_at(bytes, entry + 32),
    })
}
