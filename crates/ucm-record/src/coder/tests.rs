//! Encoding and decoding of records: restored to the byte, or refused.

use proptest::prelude::*;
use ucm_core::{BlockId, DType, Geometry, MissReason, Part};

use super::*;
use crate::{RecordMeta, SideSpec, verify, verify_side};

const LAYERS: u32 = 4;
/// Digest of the identity of the frozen records.
const NAMESPACE: [u8; 32] = [
    0x6e, 0xd3, 0xe6, 0x4f, 0xc6, 0xf9, 0x1e, 0x72, 0xe8, 0x79, 0x5d, 0x70, 0xc0, 0x3f, 0xc8, 0xdf,
    0xea, 0xf0, 0xce, 0x27, 0xdf, 0x7b, 0xf3, 0x6f, 0x68, 0xb1, 0xbf, 0x05, 0x94, 0xc7, 0xb4, 0x95,
];

fn layout(dtype: DType) -> RecordLayout {
    let geometry = Geometry::new(vec![5000, 3000], LAYERS, LAYERS).unwrap();
    RecordLayout::new(&geometry).describing(16, dtype)
}

/// The same with side shards of 100 and of 5000 bytes.
fn sided_layout() -> RecordLayout {
    let sides = [("mean-k", 100), ("codes", 5000)];
    let sides = sides.map(|(name, len)| SideSpec {
        name: name.to_owned(),
        version: 3,
        len,
    });
    layout(DType::Bf16).with_sides(sides.to_vec()).unwrap()
}

fn id() -> BlockId {
    BlockId([7; 16])
}

/// A sealed record of similar numbers, like those of a model.
fn record(dtype: DType) -> Vec<u8> {
    record_of(&layout(dtype))
}

fn record_of(layout: &RecordLayout) -> Vec<u8> {
    let mut record = vec![0xaa; layout.record_len()];
    let mut state = 1u32;
    for layer in 0..LAYERS {
        for (at, byte) in record[layout.layer_data(layer)].iter_mut().enumerate() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = match at % 2 {
                1 => (state >> 30) as u8,
                _ => (state >> 24) as u8,
            };
        }
    }
    for range in (0..layout.sides().len()).filter_map(|index| layout.side_data(index)) {
        for (at, byte) in record[range].iter_mut().enumerate() {
            *byte = (at * 7 + 3) as u8;
        }
    }
    let meta = RecordMeta {
        id: id(),
        namespace: NAMESPACE,
        ordinal: 3,
        tokens: 16,
        time_ns: 5,
        writer: 9,
        ..RecordMeta::default()
    };
    layout.seal(&meta, &mut record).unwrap();
    record
}

/// The stored form, or the unchanged record.
fn stored_of(dtype: DType, record: &[u8]) -> Vec<u8> {
    encoded(&layout(dtype), record)
}

fn encoded(layout: &RecordLayout, record: &[u8]) -> Vec<u8> {
    let mut bytes = record.to_vec();
    let mut coder = Coder::new(layout).unwrap();
    let len = coder.encode(Codec::of(layout), &mut bytes, true).unwrap();
    bytes.truncate(len.unwrap_or(record.len()));
    bytes
}

fn stored() -> Vec<u8> {
    stored_of(DType::Bf16, &record(DType::Bf16))
}

fn expect(layout: &RecordLayout) -> Expect<'_> {
    Expect {
        id: id(),
        namespace: NAMESPACE,
        part: Part::default(),
        layout,
    }
}

/// Result of a load of these stored bytes.
fn read(stored: &[u8]) -> Vec<u8> {
    let layout = layout(DType::Bf16);
    let mut bytes = stored.to_vec();
    let Some(header) = stored_form(&bytes, bytes.len() as u64, &expect(&layout)) else {
        return bytes;
    };
    let read = bytes.len();
    bytes.resize(layout.kv_len().max(read), 0xee);
    let (len, _) = Coder::new(&layout)
        .unwrap()
        .decode(&header, &mut bytes, read);
    bytes.truncate(len);
    bytes
}

fn check(record: &[u8]) -> std::result::Result<RecordHeader, MissReason> {
    Ok(verify(
        record,
        record.len() as u64,
        &expect(&layout(DType::Bf16)),
    )?)
}

#[test]
fn a_record_of_every_type_comes_back_to_the_byte() {
    for dtype in DType::ALL {
        let (layout, record) = (layout(dtype), record(dtype));
        let mut stored = stored_of(dtype, &record);
        assert!(stored.len() * 10 < record.len() * 9, "{dtype:?}");
        assert!(stored.len().is_multiple_of(4096));
        let header = stored_form(&stored, stored.len() as u64, &expect(&layout)).unwrap();
        let read = stored.len();
        stored.resize(record.len(), 0xee);
        let decoded = Coder::new(&layout)
            .unwrap()
            .decode(&header, &mut stored, read);
        assert_eq!(decoded, (record.len(), true));
        assert_eq!(stored, record, "{dtype:?}");
    }
}

#[test]
fn side_shards_are_stored_as_they_are_behind_the_payload() {
    let layout = sided_layout();
    let record = record_of(&layout);
    let mut stored = encoded(&layout, &record);
    let (read, plain) = (
        stored.len(),
        stored_of(DType::Bf16, &record[..layout.kv_len()]),
    );
    assert!(read < record.len());
    assert_eq!(
        plain.len(),
        record[..layout.kv_len()].len(),
        "an incomplete record stays unchanged"
    );
    let header = stored_form(&stored, read as u64, &expect(&layout)).unwrap();
    for (index, wanted) in layout.sides().iter().enumerate() {
        let side = verify_side(&stored, read as u64, &expect(&layout), wanted).unwrap();
        assert_eq!(side, &record[layout.side_data(index).unwrap()]);
    }
    stored.resize(layout.record_len(), 0xee);
    let decode = |bytes: &mut [u8], read| Coder::new(&layout).unwrap().decode(&header, bytes, read);
    // Into a slot for the KV only, and from a partial read.
    for (room, read) in [
        (layout.kv_len(), read),
        (layout.record_len(), header.kv_len() as usize),
    ] {
        let mut kv = stored[..room].to_vec();
        assert_eq!(decode(&mut kv, read), (layout.kv_len(), true));
        kv.truncate(layout.kv_len());
        assert_eq!(kv, record[..layout.kv_len()]);
        verify(&kv, kv.len() as u64, &expect(&layout)).unwrap();
    }
    assert_eq!(decode(&mut stored, read), (layout.record_len(), true));
    assert_eq!(stored, record);
}

#[test]
fn a_record_without_kv_is_stored_as_it_is() {
    let layout = sided_layout();
    let mut alone = vec![0; layout.record_len()];
    let meta = RecordMeta {
        id: id(),
        namespace: NAMESPACE,
        ..RecordMeta::default()
    };
    let len = crate::seal_side_alone(&layout, 0, &meta, &mut alone).unwrap();
    alone.truncate(len);
    assert_eq!(encoded(&layout, &alone), alone);
}

fn fixture(name: &str) -> std::path::PathBuf {
    [
        env!("CARGO_MANIFEST_DIR"),
        "../../tests/fixtures/record-v1",
        name,
    ]
    .iter()
    .collect()
}

/// Written once; `cargo test -p ucm-record writes_the_fixtures -- --ignored` never replaces
/// existing files.
#[test]
#[ignore = "writes missing frozen fixtures"]
fn writes_the_fixtures() {
    use std::io::Write;

    let layout = sided_layout();
    let sided = (fixture(SIDED), encoded(&layout, &record_of(&layout)));
    let plain = (fixture(PLANES), stored());
    for (path, stored) in [plain, sided] {
        let file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .open(path);
        if let Ok(mut file) = file {
            file.write_all(&stored).unwrap();
        }
    }
}

/// A compressed record.
const PLANES: &str = "planes.bin";
/// One with side shards.
const SIDED: &str = "planes-zstd-sided.bin";

/// The same files are decoded by `tests/unit/test_compressed_format.py`, which shares no code with
/// this.
#[test]
fn the_frozen_compressed_records_stay_readable() {
    let frozen = std::fs::read(fixture(PLANES)).unwrap();
    assert_eq!(read(&frozen), record(DType::Bf16));
    let frozen = std::fs::read(fixture(SIDED)).unwrap();
    let (layout, whole) = (sided_layout(), record_of(&sided_layout()));
    let kv = read(&frozen); // by a reader without space for them
    assert_eq!(kv, whole[..layout.kv_len()]);
    for (index, wanted) in layout.sides().iter().enumerate() {
        let side = verify_side(&frozen, frozen.len() as u64, &expect(&layout), wanted).unwrap();
        assert_eq!(side, &whole[layout.side_data(index).unwrap()]);
    }
}

/// Older versions wrote them. They are neither decoded nor counted as a newer version, so the next
/// dump replaces them.
#[test]
fn the_frozen_records_of_lz4_are_refused() {
    for (name, layout) in [
        ("planes-lz4.bin", layout(DType::Bf16)),
        ("planes-sided.bin", sided_layout()),
    ] {
        let (frozen, expect) = (std::fs::read(fixture(name)).unwrap(), expect(&layout));
        let len = frozen.len() as u64;
        assert!(stored_form(&frozen, len, &expect).is_none(), "{name}");
        for refused in [
            verify(&frozen, len, &expect),
            verify_stored(&frozen, len, &expect),
        ] {
            assert_eq!(refused.unwrap_err().reason, MissReason::ForeignShape);
        }
        for wanted in layout.sides() {
            let side = verify_side(&frozen, len, &expect, wanted);
            assert_eq!(side.unwrap_err().reason, MissReason::ForeignShape);
        }
    }
}

#[test]
fn the_stored_form_is_whole_in_itself_and_newer_to_who_reads_records_as_they_are() {
    let (layout, stored) = (layout(DType::Bf16), stored());
    let header = verify_stored(&stored, stored.len() as u64, &expect(&layout)).unwrap();
    assert_eq!(header.codec.code(), 0x201);
    assert_eq!(header.record_len, stored.len() as u64);
    assert_eq!(check(&stored).unwrap_err(), MissReason::NewerVersion);
    // A damaged one is damage, to both.
    let mut bad = stored.clone();
    bad[4096 + 100] ^= 1;
    assert_eq!(check(&bad).unwrap_err(), MissReason::BadChecksum);
    assert!(
        RecordHeader::is_newer(&stored),
        "in a block file, which must not contain it"
    );
}

/// Other bytes in the header, with a corrected checksum.
fn forge(record: &mut [u8], offset: usize, bytes: &[u8]) {
    record[offset..offset + bytes.len()].copy_from_slice(bytes);
    let crc = ucm_core::crc32c(&record[..4092]);
    record[4092..4096].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_codec_that_is_not_known_yet_is_left_alone() {
    let mut stored = stored();
    forge(&mut stored, 136, &[9]);
    assert_eq!(read(&stored), stored, "as it was read");
    assert_eq!(check(&stored).unwrap_err(), MissReason::NewerVersion);
}

#[test]
fn what_is_no_record_of_this_part_goes_as_it_is() {
    let stored = |record: &[u8]| stored_of(DType::Bf16, record);
    let other = record(DType::F16);
    assert_eq!(stored(&other), other);
    let noise = vec![3; other.len()];
    assert_eq!(stored(&noise), noise);
    // Complete and its own, but the bytes behind its last layer could not be restored.
    let mut padded = record(DType::Bf16);
    let (last, end) = (layout(DType::Bf16).layer_data(LAYERS - 1), padded.len());
    padded[end - 1] = 1;
    let crc = ucm_core::crc32c(&padded[last.start..]);
    forge(
        &mut padded,
        576 + 24 * (LAYERS as usize - 1) + 16,
        &crc.to_le_bytes(),
    );
    check(&padded).unwrap();
    assert_eq!(stored(&padded), padded);
}

#[test]
fn a_header_of_another_layout_decodes_nothing() {
    let stored = stored_of(DType::F16, &record(DType::F16));
    let header = RecordHeader::decode(&stored).unwrap();
    let mut coder = Coder::new(&layout(DType::Bf16)).unwrap();
    let mut bytes = stored.clone();
    bytes.resize(layout(DType::Bf16).kv_len(), 0);
    assert_eq!(
        coder.decode(&header, &mut bytes, stored.len()),
        (stored.len(), false)
    );
    assert_eq!(&bytes[..stored.len()], stored);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any change of stored bytes is refused or has no effect; it is never a wrong hit.
    #[test]
    fn changed_bytes_are_refused(
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = stored();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        prop_assert!(check(&read(&bytes)).is_err());
    }

    /// The same with corrected checksums of the stored bytes: then the record's own checksums fail.
    #[test]
    fn forged_bytes_are_refused(
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut bytes = stored();
        let number = |bytes: &[u8], at| crate::bytes::u64_at(bytes, at) as usize;
        let (first, second) = (number(&bytes, 576), number(&bytes, 600));
        let at = first + at.index(second - first);
        bytes[at] ^= flip;
        let crc = ucm_core::crc32c(&bytes[first..second]);
        forge(&mut bytes, 592, &crc.to_le_bytes());
        let back = read(&bytes);
        match check(&back) {
            // A byte that the codec ignores.
            Ok(_) => prop_assert_eq!(back, record(DType::Bf16)),
            Err(reason) => prop_assert_eq!(reason, MissReason::BadChecksum),
        }
    }
}
