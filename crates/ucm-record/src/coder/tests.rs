//! A record to its stored form and back: to the byte, or not at all.

use proptest::prelude::*;
use ucm_core::{BlockId, DType, Geometry, MissReason, Part};

use super::*;
use crate::codec::Algorithm;
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

/// A sealed record with what the algorithm makes shorter: numbers that are alike, as those of a
/// model are, or repetitions.
fn record(algorithm: Algorithm, dtype: DType) -> Vec<u8> {
    record_of(algorithm, &layout(dtype))
}

fn record_of(algorithm: Algorithm, layout: &RecordLayout) -> Vec<u8> {
    let mut record = vec![0xaa; layout.record_len()];
    let mut state = 1u32;
    for layer in 0..LAYERS {
        for (at, byte) in record[layout.layer_data(layer)].iter_mut().enumerate() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = match algorithm {
                Algorithm::Zstd if at % 2 == 1 => (state >> 30) as u8,
                Algorithm::Lz4 if at % 256 >= 64 => (at / 256) as u8,
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

/// The stored form, or the record as it is.
fn stored_of(algorithm: Algorithm, dtype: DType, record: &[u8]) -> Vec<u8> {
    encoded(algorithm, &layout(dtype), record)
}

fn encoded(algorithm: Algorithm, layout: &RecordLayout, record: &[u8]) -> Vec<u8> {
    let mut bytes = record.to_vec();
    let mut coder = Coder::new(layout).unwrap();
    let len = coder
        .encode(Codec::of(algorithm, layout), &mut bytes, true)
        .unwrap();
    bytes.truncate(len.unwrap_or(record.len()));
    bytes
}

fn stored(algorithm: Algorithm) -> Vec<u8> {
    stored_of(algorithm, DType::Bf16, &record(algorithm, DType::Bf16))
}

fn expect(layout: &RecordLayout) -> Expect<'_> {
    Expect {
        id: id(),
        namespace: NAMESPACE,
        part: Part::default(),
        layout,
    }
}

/// What a caller that asked gets for these stored bytes.
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
    for algorithm in Algorithm::ALL {
        for dtype in DType::ALL {
            let (layout, record) = (layout(dtype), record(algorithm, dtype));
            let mut stored = stored_of(algorithm, dtype, &record);
            assert!(
                stored.len() * 10 < record.len() * 9,
                "{algorithm:?} {dtype:?}"
            );
            assert!(stored.len().is_multiple_of(4096));
            let header = stored_form(&stored, stored.len() as u64, &expect(&layout)).unwrap();
            let read = stored.len();
            stored.resize(record.len(), 0xee);
            let decoded = Coder::new(&layout)
                .unwrap()
                .decode(&header, &mut stored, read);
            assert_eq!(decoded, (record.len(), true));
            assert_eq!(stored, record, "{algorithm:?} {dtype:?}");
        }
    }
}

#[test]
fn side_shards_are_stored_as_they_are_behind_the_payload() {
    let layout = sided_layout();
    for algorithm in Algorithm::ALL {
        let record = record_of(algorithm, &layout);
        let mut stored = encoded(algorithm, &layout, &record);
        let (read, plain) = (
            stored.len(),
            stored_of(algorithm, DType::Bf16, &record[..layout.kv_len()]),
        );
        assert!(read < record.len());
        assert_eq!(
            plain.len(),
            record[..layout.kv_len()].len(),
            "what is not whole is left as it is"
        );
        let header = stored_form(&stored, read as u64, &expect(&layout)).unwrap();
        for (index, wanted) in layout.sides().iter().enumerate() {
            let side = verify_side(&stored, read as u64, &expect(&layout), wanted).unwrap();
            assert_eq!(side, &record[layout.side_data(index).unwrap()]);
        }
        stored.resize(layout.record_len(), 0xee);
        let decode =
            |bytes: &mut [u8], read| Coder::new(&layout).unwrap().decode(&header, bytes, read);
        // Into a slot for the KV alone, and of what was read of it.
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
        assert_eq!(stored, record, "{algorithm:?}");
    }
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
    assert_eq!(encoded(Algorithm::Zstd, &layout, &alone), alone);
}

fn fixture(algorithm: Algorithm) -> std::path::PathBuf {
    let name = match algorithm {
        Algorithm::Zstd => "planes.bin",
        Algorithm::Lz4 => "planes-lz4.bin",
    };
    fixture_named(name)
}

fn fixture_named(name: &str) -> std::path::PathBuf {
    [
        env!("CARGO_MANIFEST_DIR"),
        "../../tests/fixtures/record-v1",
        name,
    ]
    .iter()
    .collect()
}

/// Written once; `cargo test -p ucm-record writes_the_fixtures -- --ignored` never replaces what is
/// there.
#[test]
#[ignore = "writes the frozen fixtures where they are missing"]
fn writes_the_fixtures() {
    use std::io::Write;

    let sided = (fixture_named(SIDED), sided_stored());
    let plain = Algorithm::ALL.map(|algorithm| (fixture(algorithm), stored(algorithm)));
    for (path, stored) in plain.into_iter().chain([sided]) {
        let file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .open(path);
        if let Ok(mut file) = file {
            file.write_all(&stored).unwrap();
        }
    }
}

/// A compressed record with side shards.
const SIDED: &str = "planes-sided.bin";

fn sided_stored() -> Vec<u8> {
    let layout = sided_layout();
    encoded(Algorithm::Lz4, &layout, &record_of(Algorithm::Lz4, &layout))
}

/// The same files are decoded by `tests/unit/test_compressed_format.py`, which shares no code with
/// this.
#[test]
fn the_frozen_compressed_records_stay_readable() {
    for algorithm in Algorithm::ALL {
        let frozen = std::fs::read(fixture(algorithm)).unwrap();
        assert_eq!(
            read(&frozen),
            record(algorithm, DType::Bf16),
            "{algorithm:?}"
        );
    }
    let frozen = std::fs::read(fixture_named(SIDED)).unwrap();
    let (layout, whole) = (sided_layout(), record_of(Algorithm::Lz4, &sided_layout()));
    let kv = read(&frozen); // by a reader that has no room for them
    assert_eq!(kv, whole[..layout.kv_len()]);
    for (index, wanted) in layout.sides().iter().enumerate() {
        let side = verify_side(&frozen, frozen.len() as u64, &expect(&layout), wanted).unwrap();
        assert_eq!(side, &whole[layout.side_data(index).unwrap()]);
    }
}

#[test]
fn the_stored_form_is_whole_in_itself_and_newer_to_who_reads_records_as_they_are() {
    let layout = layout(DType::Bf16);
    for (algorithm, code) in [(Algorithm::Zstd, 0x201), (Algorithm::Lz4, 0x202)] {
        let stored = stored(algorithm);
        let header = verify_stored(&stored, stored.len() as u64, &expect(&layout)).unwrap();
        assert_eq!(header.codec.code(), code);
        assert_eq!(header.record_len, stored.len() as u64);
        assert_eq!(check(&stored).unwrap_err(), MissReason::NewerVersion);
        // A damaged one is damage, to both.
        let mut bad = stored.clone();
        bad[4096 + 100] ^= 1;
        assert_eq!(check(&bad).unwrap_err(), MissReason::BadChecksum);
        assert!(
            RecordHeader::is_newer(&stored),
            "in a block file, where it has no place"
        );
    }
}

/// Other bytes in the header, whose checksum is made right again.
fn forge(record: &mut [u8], offset: usize, bytes: &[u8]) {
    record[offset..offset + bytes.len()].copy_from_slice(bytes);
    let crc = ucm_core::crc32c(&record[..4092]);
    record[4092..4096].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_codec_that_is_not_known_yet_is_left_alone() {
    let mut stored = stored(Algorithm::Zstd);
    forge(&mut stored, 136, &[9]);
    assert_eq!(read(&stored), stored, "as it was read");
    assert_eq!(check(&stored).unwrap_err(), MissReason::NewerVersion);
}

#[test]
fn a_record_that_names_the_other_codec_is_refused() {
    for (algorithm, other) in [(Algorithm::Zstd, 2), (Algorithm::Lz4, 1)] {
        let mut stored = stored(algorithm);
        forge(&mut stored, 136, &[other]);
        assert_eq!(
            check(&read(&stored)).unwrap_err(),
            MissReason::BadChecksum,
            "{algorithm:?}"
        );
    }
}

#[test]
fn what_is_no_record_of_this_part_goes_as_it_is() {
    let stored = |record: &[u8]| stored_of(Algorithm::Zstd, DType::Bf16, record);
    let other = record(Algorithm::Zstd, DType::F16);
    assert_eq!(stored(&other), other);
    let noise = vec![3; other.len()];
    assert_eq!(stored(&noise), noise);
    // Whole and its own, but what lies behind its last layer would not come back.
    let mut padded = record(Algorithm::Zstd, DType::Bf16);
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
    let stored = stored_of(
        Algorithm::Zstd,
        DType::F16,
        &record(Algorithm::Zstd, DType::F16),
    );
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

fn any_algorithm() -> impl Strategy<Value = Algorithm> {
    (0..Algorithm::ALL.len()).prop_map(|at| Algorithm::ALL[at])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any change of any stored bytes is refused, or changed nothing that counts; never is it a
    /// wrong hit.
    #[test]
    fn changed_bytes_are_refused(
        algorithm in any_algorithm(),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = stored(algorithm);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        prop_assert!(check(&read(&bytes)).is_err());
    }

    /// The same where somebody made the checksums of what is stored right again: then the record's
    /// own refuse it.
    #[test]
    fn forged_bytes_are_refused(
        algorithm in any_algorithm(),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut bytes = stored(algorithm);
        let number = |bytes: &[u8], at| crate::bytes::u64_at(bytes, at) as usize;
        let (first, second) = (number(&bytes, 576), number(&bytes, 600));
        let at = first + at.index(second - first);
        bytes[at] ^= flip;
        let crc = ucm_core::crc32c(&bytes[first..second]);
        forge(&mut bytes, 592, &crc.to_le_bytes());
        let back = read(&bytes);
        match check(&back) {
            // A byte that the codec does not look at.
            Ok(_) => prop_assert_eq!(back, record(algorithm, DType::Bf16)),
            Err(reason) => prop_assert_eq!(reason, MissReason::BadChecksum),
        }
    }
}
