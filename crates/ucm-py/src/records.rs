//! Records and segments for the command line: their fields and their verification.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ucm_core::{BlockId, DType, Geometry, IdMask, hex};
use ucm_media::place::{SegmentTail, list_segment};
use ucm_record::{Keys, KnownRecord, RecordHeader, RecordLayout, Refusal, verify_whole};

use crate::convert::CallResult;

/// The parsed value, or the reason of the refusal and the found value.
type Verdict<'py> = (Option<Bound<'py, PyDict>>, &'static str, String);
/// Bytes of a layer's tensors, layers, tokens and type of the elements, as a manifest lists them.
type ShapeRow = (Vec<u64>, u32, u32, String);
/// Name, digest of the identity, part, and of every record its id, offset and length.
type SegmentRow = (String, [u8; 32], String, Vec<([u8; 16], u64, u64)>);

/// Keys that decrypt records.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct RecordKeys(Keys);

#[pymethods]
impl RecordKeys {
    /// `text`: each key 64 hex digits on a line of its own.
    #[new]
    fn new(text: &str) -> CallResult<Self> {
        Ok(Self(Keys::parse(text)?))
    }
}

/// The fields of the header at the start of these bytes.
#[pyfunction]
pub(crate) fn read_header<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Verdict<'py>> {
    match RecordHeader::decode(data) {
        Ok(header) => Ok((Some(fields(py, &header)?), "", String::new())),
        Err(refusal) => Ok(refused(&refusal)),
    }
}

/// Verifies a whole record: in its stored form, and decrypted and decoded if possible. Only given
/// values are compared: `namespace` is the first bytes of the digest.
#[pyfunction]
#[pyo3(signature = (data, record_id, namespace, shape, keys))]
pub(crate) fn verify_record<'py>(
    py: Python<'py>,
    data: &[u8],
    record_id: Option<[u8; 16]>,
    namespace: &[u8],
    shape: Option<ShapeRow>,
    keys: Option<&RecordKeys>,
) -> PyResult<Verdict<'py>> {
    let layout = shape.and_then(layout_of);
    let known = KnownRecord {
        id: record_id.map(BlockId),
        namespace,
        layout: layout.as_ref(),
    };
    let keys = keys.map(|keys| &keys.0);
    let whole = match py.detach(|| verify_whole(data, &known, keys)) {
        Ok(whole) => whole,
        Err(refusal) => return Ok(refused(&refusal)),
    };
    let lost: Vec<(String, &str, String)> = whole
        .lost_sides
        .into_iter()
        .map(|(name, refusal)| (name, refusal.reason.name(), refusal.to_string()))
        .collect();
    let found = PyDict::new(py);
    found.set_item("header", fields(py, &whole.header)?)?;
    found.set_item("decrypted", whole.decrypted)?;
    found.set_item("decoded", whole.decoded)?;
    found.set_item("lost_sides", lost)?;
    Ok((Some(found), "", String::new()))
}

/// Parses the last bytes of a segment of `file_len` bytes. Returns its records, or the length of
/// its footer if that begins before these bytes, or the reason of a refusal.
#[pyfunction]
pub(crate) fn read_footer(
    tail: &[u8],
    file_len: u64,
) -> (Option<SegmentRow>, u64, Option<&'static str>) {
    match list_segment(tail, file_len) {
        Ok(SegmentTail::Listed(segment)) => {
            let records = segment.records.into_iter();
            let records = records
                .map(|(id, offset, len)| (id.0, offset, len))
                .collect();
            let part = segment.part.to_string();
            let row = (segment.name, segment.namespace, part, records);
            (Some(row), 0, None)
        }
        Ok(SegmentTail::Longer(len)) => (None, len, None),
        Err(reason) => (None, 0, Some(reason.name())),
    }
}

fn refused<'py>(refusal: &Refusal) -> Verdict<'py> {
    (None, refusal.reason.name(), refusal.to_string())
}

/// The layout of a part; `None` if its manifest is invalid.
fn layout_of((tensors, layers, block_tokens, dtype): ShapeRow) -> Option<RecordLayout> {
    let geometry = Geometry::new(tensors, layers, layers).ok()?;
    let dtype = DType::of_name(&dtype)?;
    Some(RecordLayout::new(&geometry).describing(block_tokens, dtype))
}

/// The fields of a header for `ucm inspect`.
fn fields<'py>(py: Python<'py>, header: &RecordHeader) -> PyResult<Bound<'py, PyDict>> {
    let meta = &header.meta;
    let beside = header.sides.first().filter(|_| header.without_kv);
    let block = beside.map_or(meta.id, |side| {
        meta.id.xor(IdMask::of_side(&side.name, side.version))
    });
    let said = PyDict::new(py);
    said.set_item("version", header.version)?;
    said.set_item("record_id", meta.id.to_hex())?;
    said.set_item("block_key", block.xor(meta.part.mask()).to_hex())?;
    said.set_item("without_kv", header.without_kv)?;
    said.set_item("block_record_id", block.to_hex())?;
    said.set_item("namespace_digest", hex(&meta.namespace))?;
    said.set_item("part", meta.part.to_string())?;
    let dtype = match DType::from_code(header.dtype) {
        Some(dtype) => dtype.name().to_owned(),
        None => format!("unknown ({})", header.dtype),
    };
    said.set_item("dtype", dtype)?;
    said.set_item("layers", header.layers)?;
    said.set_item("tensors", header.tensors)?;
    said.set_item("layer_bytes", header.layer_len)?;
    said.set_item("block_tokens", header.block_tokens)?;
    said.set_item("tokens", meta.tokens)?;
    said.set_item("ordinal", meta.ordinal)?;
    said.set_item("parent", meta.parent.to_hex())?;
    said.set_item("header_bytes", header.header_len)?;
    said.set_item("kv_bytes", header.raw_len)?;
    let codec = match header.codec.is_as_is() {
        true => "as is".to_owned(),
        false => format!("{:#x}", header.codec.code()),
    };
    said.set_item("codec", codec)?;
    let key = header.key.map(|key| hex(&key));
    said.set_item("key", key.as_deref().unwrap_or("not encrypted"))?;
    let tenant = Some(meta.tenant).filter(|tag| *tag != [0; 32]);
    let tenant = tenant.map(|tag| hex(&tag));
    said.set_item("tenant", tenant.as_deref().unwrap_or("none"))?;
    said.set_item("stored_bytes", header.stored_len)?;
    said.set_item("record_bytes", header.record_len)?;
    said.set_item("time", meta.time_ns / 1_000_000_000)?;
    said.set_item("writer", format!("{:016x}", meta.writer))?;
    let mut sides = Vec::with_capacity(header.sides.len());
    for side in &header.sides {
        let row = PyDict::new(py);
        row.set_item("name", &side.name)?;
        row.set_item("version", side.version)?;
        row.set_item("bytes", side.len)?;
        sides.push(row);
    }
    said.set_item("sides", sides)?;
    Ok(said)
}
