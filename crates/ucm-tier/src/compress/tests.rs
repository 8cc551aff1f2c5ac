//! The stage in its own terms: a record to its stored form and back, what is changed on the way, and what is told.

use proptest::prelude::*;
use ucm_core::{Geometry, MissReason};
use ucm_device::{HostArena, SlotPool};
use ucm_infra::SystemClock;
use ucm_io::IoOptions;
use ucm_record::{Expect, RecordHeader, RecordMeta, verify, verify_stored};

use super::*;
use crate::nothing::Nothing;

const LAYERS: u32 = 4;

fn identity() -> Identity {
    Identity::parse(concat!(
        r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"#,
        r#""position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"#,
        r#""block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#
    ))
    .unwrap()
}

fn layout(dtype: DType) -> RecordLayout {
    let geometry = Geometry::new(vec![5000, 3000], LAYERS, LAYERS).unwrap();
    RecordLayout::new(&geometry).describing(16, dtype)
}

fn stage(dtype: DType) -> CompressBackend {
    let config = CompressConfig {
        record: layout(dtype),
        identity: identity(),
        part: Part::default(),
        writer: 1,
        io: IoPool::psync(false, &IoOptions::default()).unwrap(),
    };
    CompressBackend::new(config, Arc::new(Nothing), SystemClock::shared()).unwrap()
}

fn id() -> BlockId {
    BlockId([7; 16])
}

/// A sealed record whose numbers are alike, as those of a model are.
fn record(dtype: DType) -> Vec<u8> {
    let layout = layout(dtype);
    let mut record = vec![0xaa; layout.record_len()];
    let mut state = 1u32;
    for layer in 0..LAYERS {
        for (at, byte) in record[layout.layer_data(layer)].iter_mut().enumerate() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = if at % 2 == 1 {
                (state >> 30) as u8
            } else {
                (state >> 24) as u8
            };
        }
    }
    let meta = RecordMeta {
        id: id(),
        namespace: *identity().digest(),
        ordinal: 3,
        tokens: 16,
        time_ns: 5,
        writer: 9,
        ..RecordMeta::default()
    };
    layout.seal(&meta, &mut record).unwrap();
    record
}

fn slot(record: &[u8]) -> Slot {
    let pool = SlotPool::new(HostArena::new(record.len() * 2).unwrap(), record.len()).unwrap();
    let mut slot = pool.try_acquire().unwrap();
    slot.as_mut_slice()[..record.len()].copy_from_slice(record);
    slot
}

fn options(len: usize) -> WriteOptions {
    WriteOptions {
        len,
        ordinal: 3,
        replace: false,
        read_back: true,
    }
}

/// The stored form.
fn stored(stage: &CompressBackend, record: &[u8]) -> Vec<u8> {
    let mut slot = slot(record);
    let len = stage.shared.encode(&mut slot, options(record.len()));
    slot.as_slice()[..len].to_vec()
}

/// What whoever asked gets for these stored bytes.
fn read(stage: &CompressBackend, stored: &[u8]) -> ReadDone {
    let read = ReadDone {
        slot: {
            let mut whole = vec![0; layout(DType::Bf16).record_len().max(stored.len())];
            whole[..stored.len()].copy_from_slice(stored);
            slot(&whole)
        },
        read: stored.len(),
        stored_len: stored.len() as u64,
    };
    if coding::is_encoded(&read) {
        stage.shared.decode(id(), read).unwrap()
    } else {
        read
    }
}

fn judge(read: &ReadDone, dtype: DType) -> std::result::Result<RecordHeader, MissReason> {
    let layout = layout(dtype);
    let identity = identity();
    let expect = Expect {
        id: id(),
        namespace: *identity.digest(),
        part: Part::default(),
        layout: &layout,
    };
    Ok(verify(
        &read.slot.as_slice()[..read.read],
        read.stored_len,
        &expect,
    )?)
}

#[test]
fn a_record_of_every_type_comes_back_to_the_byte() {
    for dtype in DType::ALL {
        let (stage, record) = (stage(dtype), record(dtype));
        let stored = stored(&stage, &record);
        assert!(
            stored.len() * 10 < record.len() * 9,
            "{dtype:?}: {}",
            stored.len()
        );
        assert!(stored.len().is_multiple_of(4096));
        let back = read(&stage, &stored);
        assert_eq!(&back.slot.as_slice()[..back.read], record, "{dtype:?}");
        judge(&back, dtype).unwrap();
    }
}

fn fixture() -> std::path::PathBuf {
    [
        env!("CARGO_MANIFEST_DIR"),
        "../../tests/fixtures/record-v1/planes.bin",
    ]
    .iter()
    .collect()
}

/// Written once; `cargo test -p ucm-store --lib writes_the_fixture -- --ignored` never replaces what is there.
#[test]
#[ignore = "writes the frozen fixture where it is missing"]
fn writes_the_fixture() {
    use std::io::Write;

    let stored = stored(&stage(DType::Bf16), &record(DType::Bf16));
    let file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(fixture());
    file.unwrap().write_all(&stored).unwrap();
}

/// The same file is decoded by `tests/unit/test_format.py`, which shares no code with this.
#[test]
fn the_frozen_compressed_record_stays_readable() {
    let frozen = std::fs::read(fixture()).unwrap();
    let stage = stage(DType::Bf16);
    let back = read(&stage, &frozen);
    assert_eq!(&back.slot.as_slice()[..back.read], record(DType::Bf16));
}

#[test]
fn the_stored_form_is_whole_in_itself_and_newer_to_who_reads_records_as_they_are() {
    let (stage, record) = (stage(DType::Bf16), record(DType::Bf16));
    let stored = stored(&stage, &record);
    let (layout, identity) = (layout(DType::Bf16), identity());
    let expect = Expect {
        id: id(),
        namespace: *identity.digest(),
        part: Part::default(),
        layout: &layout,
    };
    let header = verify_stored(&stored, stored.len() as u64, &expect).unwrap();
    assert_eq!(
        (header.codec, header.codec.code()),
        (Codec::planes(2).unwrap(), 0x201)
    );
    assert_eq!(header.record_len, stored.len() as u64);
    let newer = verify(&stored, stored.len() as u64, &expect);
    assert_eq!(newer.unwrap_err().reason, MissReason::NewerVersion);
    // A damaged one is damage, to both.
    let mut bad = stored.clone();
    bad[4096 + 100] ^= 1;
    assert_eq!(
        verify(&bad, bad.len() as u64, &expect).unwrap_err().reason,
        MissReason::BadChecksum
    );
    assert!(
        RecordHeader::is_newer(&stored),
        "in a block file, where it has no place"
    );
}

#[test]
fn a_codec_that_is_not_known_yet_is_left_alone() {
    let (stage, record) = (stage(DType::Bf16), record(DType::Bf16));
    let mut stored = stored(&stage, &record);
    stored[136] = 9;
    let crc = ucm_core::crc32c(&stored[..4092]);
    stored[4092..4096].copy_from_slice(&crc.to_le_bytes());
    let back = read(&stage, &stored);
    assert_eq!(&back.slot.as_slice()[..back.read], stored, "as it was read");
    assert_eq!(judge(&back, DType::Bf16).unwrap_err(), MissReason::NewerVersion);
}

#[test]
fn what_is_no_record_of_this_part_goes_as_it_is() {
    let stage = stage(DType::Bf16);
    let other = record(DType::F16);
    assert_eq!(stored(&stage, &other), other);
    let noise = vec![3; other.len()];
    assert_eq!(stored(&stage, &noise), noise);
    // Whole and its own, but what lies behind its last layer would not come back.
    let mut padded = record(DType::Bf16);
    let (last, end) = (layout(DType::Bf16).layer_data(LAYERS - 1), padded.len());
    padded[end - 1] = 1;
    let crc = ucm_core::crc32c(&padded[last.start..]);
    let entry = 576 + 24 * (LAYERS as usize - 1) + 16;
    padded[entry..entry + 4].copy_from_slice(&crc.to_le_bytes());
    let crc = ucm_core::crc32c(&padded[..4092]);
    padded[4092..4096].copy_from_slice(&crc.to_le_bytes());
    judge(&read(&stage, &padded), DType::Bf16).unwrap();
    assert_eq!(stored(&stage, &padded), padded);
    assert_eq!(stage.stats().compression.unwrap().records_as_is, 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any change of any stored bytes is refused, or changed nothing that counts; never is it a wrong hit.
    #[test]
    fn changed_bytes_are_refused(
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (stage, record) = (stage(DType::Bf16), record(DType::Bf16));
        let mut bytes = stored(&stage, &record);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        prop_assert!(judge(&read(&stage, &bytes), DType::Bf16).is_err());
    }

    /// The same where somebody made the checksums of what is stored right again: then the record's own refuse it.
    #[test]
    fn forged_bytes_are_refused(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let (stage, record) = (stage(DType::Bf16), record(DType::Bf16));
        let mut bytes = stored(&stage, &record);
        let number = |bytes: &[u8], at| ucm_record::bytes::u64_at(bytes, at) as usize;
        let (first, second) = (number(&bytes, 576), number(&bytes, 600));
        let at = first + at.index(second - first);
        bytes[at] ^= flip;
        let crc = ucm_core::crc32c(&bytes[first..second]);
        bytes[592..596].copy_from_slice(&crc.to_le_bytes());
        let crc = ucm_core::crc32c(&bytes[..4092]);
        bytes[4092..4096].copy_from_slice(&crc.to_le_bytes());
        let back = read(&stage, &bytes);
        match judge(&back, DType::Bf16) {
            // A byte that the codec does not look at.
            Ok(_) => prop_assert_eq!(&back.slot.as_slice()[..back.read], &record[..]),
            Err(reason) => prop_assert_eq!(reason, MissReason::BadChecksum),
        }
    }
}
