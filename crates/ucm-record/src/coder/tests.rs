//! A record to its stored form and back: to the byte, or not at all.

use proptest::prelude::*;
use ucm_core::{BlockId, DType, Geometry, MissReason, Part};

use super::*;
use crate::codec::Algorithm;
use crate::{RecordMeta, verify};

const LAYERS: u32 = 4;
/// Digest of the identity of the frozen records.
const NAMESPACE: [u8; 32] = [
    0x6e, 0xd3, 0xe6, 0x4f, 0xc6, 0xf9, 0x1e, 0x72, 0xe8, 0x79, 0x5d, 0x70, 0xc0, 0x3f, 0xc8, 0xdf, 0xea,
    0xf0, 0xce, 0x27, 0xdf, 0x7b, 0xf3, 0x6f, 0x68, 0xb1, 0xbf, 0x05, 0x94, 0xc7, 0xb4, 0x95,
];

fn layout(dtype: DType) -> RecordLayout {
    let geometry = Geometry::new(vec![5000, 3000], LAYERS, LAYERS).unwrap();
    RecordLayout::new(&geometry).describing(16, dtype)
}

fn id() -> BlockId {
    BlockId([7; 16])
}

/// A sealed record with what the algorithm makes shorter: numbers that are alike, as those of a model are, or repetitions.
fn record(algorithm: Algorithm, dtype: DType) -> Vec<u8> {
    let layout = layout(dtype);
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
    let (layout, mut bytes) = (layout(dtype), record.to_vec());
    let mut coder = Coder::new(&layout).unwrap();
    let len = coder
        .encode(Codec::of(algorithm, &layout), &mut bytes, true)
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

/// What whoever asked gets for these stored bytes.
fn read(stored: &[u8]) -> Vec<u8> {
    let layout = layout(DType::Bf16);
    let mut bytes = stored.to_vec();
    let Some(header) = stored_form(&bytes, bytes.len() as u64, &expect(&layout)) else {
        return bytes;
    };
    bytes.resize(layout.kv_len().max(bytes.len()), 0xee);
    Coder::new(&layout).unwrap().decode(&header, &mut bytes);
    bytes
}

fn judge(record: &[u8]) -> std::result::Result<RecordHeader, MissReason> {
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
            assert!(stored.len() * 10 < record.len() * 9, "{algorithm:?} {dtype:?}");
            assert!(stored.len().is_multiple_of(4096));
            let header = stored_form(&stored, stored.len() as u64, &expect(&layout)).unwrap();
            stored.resize(record.len(), 0xee);
            assert!(Coder::new(&layout).unwrap().decode(&header, &mut stored));
            assert_eq!(stored, record, "{algorithm:?} {dtype:?}");
        }
    }
}

fn fixture(algorithm: Algorithm) -> std::path::PathBuf {
    let name = match algorithm {
        Algorithm::Zstd => "planes.bin",
        Algorithm::Lz4 => "planes-lz4.bin",
    };
    [env!("CARGO_MANIFEST_DIR"), "../../tests/fixtures/record-v1", name]
        .iter()
        .collect()
}

/// Written once; `cargo test -p ucm-record writes_the_fixtures -- --ignored` never replaces what is there.
#[test]
#[ignore = "writes the frozen fixtures where they are missing"]
fn writes_the_fixtures() {
    use std::io::Write;

    for algorithm in Algorithm::ALL {
        let stored = stored(algorithm);
        let file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .open(fixture(algorithm));
        if let Ok(mut file) = file {
            file.write_all(&stored).unwrap();
        }
    }
}

/// The same files are decoded by `tests/unit/test_compressed_format.py`, which shares no code with this.
#[test]
fn the_frozen_compressed_records_stay_readable() {
    for algorithm in Algorithm::ALL {
        let frozen = std::fs::read(fixture(algorithm)).unwrap();
        assert_eq!(read(&frozen), record(algorithm, DType::Bf16), "{algorithm:?}");
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
        assert_eq!(judge(&stored).unwrap_err(), MissReason::NewerVersion);
        // A damaged one is damage, to both.
        let mut bad = stored.clone();
        bad[4096 + 100] ^= 1;
        assert_eq!(judge(&bad).unwrap_err(), MissReason::BadChecksum);
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
    assert_eq!(judge(&stored).unwrap_err(), MissReason::NewerVersion);
}

#[test]
fn a_record_that_names_the_other_codec_is_refused() {
    for (algorithm, other) in [(Algorithm::Zstd, 2), (Algorithm::Lz4, 1)] {
        let mut stored = stored(algorithm);
        forge(&mut stored, 136, &[other]);
        assert_eq!(
            judge(&read(&stored)).unwrap_err(),
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
    judge(&padded).unwrap();
    assert_eq!(stored(&padded), padded);
}

#[test]
fn a_header_of_another_layout_decodes_nothing() {
    let stored = stored_of(Algorithm::Zstd, DType::F16, &record(Algorithm::Zstd, DType::F16));
    let header = RecordHeader::decode(&stored).unwrap();
    let mut coder = Coder::new(&layout(DType::Bf16)).unwrap();
    let mut bytes = stored.clone();
    bytes.resize(layout(DType::Bf16).kv_len(), 0);
    assert!(!coder.decode(&header, &mut bytes));
    assert_eq!(&bytes[..stored.len()], stored);
}

fn any_algorithm() -> impl Strategy<Value = Algorithm> {
    (0..Algorithm::ALL.len()).prop_map(|at| Algorithm::ALL[at])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any change of any stored bytes is refused, or changed nothing that counts; never is it a wrong hit.
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
        prop_assert!(judge(&read(&bytes)).is_err());
    }

    /// The same where somebody made the checksums of what is stored right again: then the record's own refuse it.
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
        match judge(&back) {
            // A byte that the codec does not look at.
            Ok(_) => prop_assert_eq!(back, record(algorithm, DType::Bf16)),
            Err(reason) => prop_assert_eq!(reason, MissReason::BadChecksum),
        }
    }
}
