//! The codec of a tier of segments: what is stored is shorter, what comes back is the same, and
//! what was damaged on the way is a miss. The rules that hold with and without it are those of the
//! other suites (`UCM_TEST_COMPRESS`).

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::time::Duration;

use ucm_core::{BlockId, ErrorKind};
use ucm_io::Process;
use ucm_media::segment::SegmentConfig;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::segments::{Place, await_taken_over, change, die_at_seal, finds};
use crate::common::{Above, Device, Fixture, Layout, Store, directory, eventually, id, ids};

/// Header and payload of a record as it is used, bytes.
const RECORD: usize = 4096 + 3 * 8192;

fn compressed() -> Fixture {
    Fixture::default().compressed()
}

/// The same records in the same segments, by a store that does not compress and does not know of
/// it.
fn plain() -> Fixture {
    Fixture {
        compressed: false,
        ..compressed()
    }
}

/// Fills a device with what compresses, whatever the store does.
fn filled(blocks: &[BlockId]) -> Device {
    Device::filled(&compressed(), blocks)
}

/// Loads blocks: whether all were loaded; those that were are right, the others are untouched.
fn loads(store: &Store, blocks: &[BlockId]) -> bool {
    let device = Device::blank(&compressed(), blocks);
    let loaded = store.load(&device, blocks).is_ok();
    for &block in blocks {
        assert!(
            device.is_right(block) || device.is_blank(block),
            "wrong bytes"
        );
        assert!(!loaded || device.is_right(block));
    }
    loaded
}

fn compression(store: &Store, name: &str) -> u64 {
    let value = store.engine.stats()["tiers"][0]["compression"][name].clone();
    value.as_u64().unwrap()
}

fn place(store: &Store, block: BlockId) -> Place {
    store
        .places()
        .into_iter()
        .find(|place| place.id == block)
        .unwrap()
}

#[test]
fn what_is_stored_is_shorter_and_what_comes_back_is_the_same() {
    let dir = directory();
    let store = Store::open(dir.path(), compressed());
    let blocks = ids(8);
    store.dump(&filled(&blocks), &blocks).unwrap();
    assert!(loads(&store, &blocks));
    assert!(
        store
            .places()
            .iter()
            .all(|place| place.len * 4 < RECORD * 3)
    );
    assert_eq!(compression(&store, "records_compressed"), 8);
    assert_eq!(compression(&store, "records_decompressed"), 8);
    assert_eq!(compression(&store, "bytes_compressed"), 8 * RECORD as u64);
    let stored: usize = store.places().iter().map(|place| place.len).sum();
    assert_eq!(compression(&store, "bytes_stored"), stored as u64);
    drop(store);
    let later = Store::open(dir.path(), compressed());
    assert_eq!(finds(&later, &blocks), [true; 8]);
    assert!(loads(&later, &blocks));
    later.dump(&filled(&blocks), &blocks).unwrap();
    assert_eq!(
        later.stat("blocks_present"),
        8,
        "what is there is not written again"
    );
    assert_eq!(later.places().len(), 8);
    assert_eq!(
        compression(&later, "records_compressed"),
        0,
        "nor compressed"
    );
}

/// A record of lz4, which older versions wrote, is refused and replaced; it counts neither as
/// damage nor as a newer version. A codec that this version does not know is newer.
#[test]
fn a_record_that_names_another_codec_is_a_miss() {
    for (codec, reason) in [(2, "foreign_shape"), (3, "newer_version")] {
        let dir = directory();
        Store::open(dir.path(), compressed())
            .dump(&filled(&ids(1)), &ids(1))
            .unwrap();
        let place = place(&Store::open(dir.path(), compressed()), id(0));
        change(&place.file, |bytes| {
            let record = &mut bytes[place.offset..place.offset + place.len];
            record[136] = codec;
            seal(record);
        });
        let store = Store::open(dir.path(), compressed());
        assert!(!loads(&store, &ids(1)), "{reason}");
        assert_eq!((store.missed(reason), store.stat("second_reads")), (1, 0));
        assert_eq!(finds(&store, &ids(1)), [false], "{reason}");
        if reason == "foreign_shape" {
            store.dump(&filled(&ids(1)), &ids(1)).unwrap();
            assert!(loads(&store, &ids(1)), "the next dump replaces it");
        }
    }
}

#[test]
fn memory_takes_no_codec() {
    let fixture = Fixture {
        above: Above::Memory(8, WritePolicy::Through),
        ..compressed()
    };
    let dir = directory();
    let store = Store::open(dir.path(), fixture);
    store.dump(&filled(&ids(2)), &ids(2)).unwrap();
    assert!(loads(&store, &ids(2)));
    let tiers = store.engine.stats()["tiers"].clone();
    assert!(tiers[0].get("compression").is_none());
    assert_eq!(tiers[0]["blocks_read"], 2, "as they are");
    assert_eq!(tiers[1]["compression"]["records_compressed"], 2);
    assert_eq!(tiers[1]["compression"]["records_decompressed"], 0);
}

#[test]
fn single_shards_of_a_compressed_record() {
    let dir = directory();
    let fixture = Fixture {
        layers_per_shard: 1,
        ..compressed()
    };
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(2)), &ids(2))
        .unwrap();
    let target = Device::blank(&fixture, &ids(2));
    store.load(&target, &ids(2)).unwrap();
    assert!(ids(2).iter().all(|&block| target.is_right(block)));
    assert_eq!(compression(&store, "records_decompressed"), 2);
}

#[test]
fn one_segment_holds_both_kinds() {
    let dir = directory();
    let store = Store::open(dir.path(), compressed());
    let mut device = filled(&ids(4));
    // One of noise: a thread that meets several in a row does not try the next.
    let mut state = 1_u64;
    device.change(id(1), |bytes| {
        bytes.iter_mut().for_each(|byte| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = (state >> 56) as u8;
        });
    });
    store.dump(&device, &ids(4)).unwrap();
    let counts = ["records_compressed", "records_as_is", "records_undecodable"];
    assert_eq!(counts.map(|name| compression(&store, name)), [3, 1, 0]);
    let shorter: Vec<bool> = ids(4)
        .iter()
        .map(|&block| place(&store, block).len < RECORD)
        .collect();
    assert_eq!(shorter, [true, false, true, true]);
    let target = Device::blank(&compressed(), &ids(4));
    store.load(&target, &ids(4)).unwrap();
    assert!(target.equals(&device));
}

#[test]
fn damage_at_any_place_of_what_is_stored_is_a_miss_and_heals() {
    let dir = directory();
    Store::open(dir.path(), compressed())
        .dump(&filled(&ids(1)), &ids(1))
        .unwrap();
    let whole = place(&Store::open(dir.path(), compressed()), id(0));
    let before = std::fs::read(&whole.file).unwrap();
    // The fields of the header that are looked at, the tables, then every page of what is behind
    // it, its end too.
    let fields = [
        0, 4, 8, 36, 44, 60, 64, 90, 120, 136, 140, 152, 576, 584, 592, 596, 600, 4092,
    ];
    let behind = (4096..whole.len).step_by(509).chain([whole.len - 1]);
    for at in fields.into_iter().chain(behind) {
        change(&whole.file, |bytes| bytes[whole.offset + at] ^= 0x10);
        let store = Store::open(dir.path(), compressed());
        assert!(!loads(&store, &ids(1)), "{at}");
        assert_eq!(finds(&store, &ids(1)), [false], "{at}: refused");
        drop(store);
        std::fs::write(&whole.file, &before).unwrap();
    }
    change(&whole.file, |bytes| bytes[whole.offset + 5000] ^= 0x10);
    let store = Store::open(dir.path(), compressed());
    assert!(!loads(&store, &ids(1)));
    assert_eq!(
        (store.missed("bad_checksum"), store.stat("second_reads")),
        (1, 1)
    );
    store.dump(&filled(&ids(1)), &ids(1)).unwrap();
    assert!(loads(&store, &ids(1)), "the next dump replaces it");
    assert_eq!(compression(&store, "records_undecodable"), 0);
}

/// Damage from before the checksums of the stored bytes were computed: those are right, and the
/// record's own tell.
#[test]
fn what_is_whole_as_stored_and_does_not_decode_is_a_miss() {
    let dir = directory();
    Store::open(dir.path(), compressed())
        .dump(&filled(&ids(2)), &ids(2))
        .unwrap();
    for (block, at) in [(id(0), 4096 + 20), (id(1), 4096)] {
        let place = place(&Store::open(dir.path(), compressed()), block);
        change(&place.file, |bytes| {
            let record = &mut bytes[place.offset..place.offset + place.len];
            record[at] ^= 0x40;
            seal(record);
        });
    }
    let store = Store::open(dir.path(), compressed());
    for block in ids(2) {
        assert!(!loads(&store, &[block]));
    }
    assert_eq!(store.missed("bad_checksum"), 2);
    assert_eq!(finds(&store, &ids(2)), [false; 2]);
    store.dump(&filled(&ids(2)), &ids(2)).unwrap();
    assert!(loads(&store, &ids(2)));
}

/// Makes the checksums of what is stored right again: of the first layer, and of the header.
fn seal(record: &mut [u8]) {
    let number = |record: &[u8], at: usize| {
        u64::from_le_bytes(record[at..at + 8].try_into().unwrap()) as usize
    };
    let (first, second) = (number(record, 576), number(record, 600));
    let crc = ucm_core::crc32c(&record[first..second]);
    record[592..596].copy_from_slice(&crc.to_le_bytes());
    let crc = ucm_core::crc32c(&record[..4092]);
    record[4092..4096].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn without_a_codec_compressed_records_are_misses_and_stay_as_they_are() {
    let dir = directory();
    Store::open(dir.path(), compressed())
        .dump(&filled(&ids(3)), &ids(3))
        .unwrap();
    let files = |store: &Store| -> Vec<Vec<u8>> {
        let files = store.segments();
        files
            .iter()
            .map(|file| std::fs::read(file).unwrap())
            .collect()
    };
    let store = Store::open(dir.path(), plain());
    let before = files(&store);
    assert_eq!(finds(&store, &ids(3)), [false; 3]);
    assert_eq!(store.missed("wrong_length"), 3);
    // Read all the same: a newer form is not refused, moved aside or counted as damage.
    assert!(!loads(&store, &[id(0)]));
    assert_eq!(store.missed("newer_version"), 1);
    assert_eq!(store.stat("second_reads"), 0);
    assert_eq!(files(&store), before);
    // A dump stores them as they are, beside the others; the newer copies count, for those who
    // decompress too.
    store.dump(&filled(&ids(2)), &ids(2)).unwrap();
    assert!(loads(&store, &ids(2)));
    assert_eq!(finds(&store, &ids(3)), [true, true, false]);
    drop(store);
    let again = Store::open(dir.path(), compressed());
    assert_eq!(finds(&again, &ids(3)), [true; 3]);
    assert!(loads(&again, &ids(3)));
    assert_eq!(compression(&again, "records_decompressed"), 1);
}

#[test]
fn the_whole_records_of_a_dead_writer_are_taken_over_in_the_form_they_have() {
    let dir = directory();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    let dead = Fixture {
        process: Process {
            pid,
            started: 1, // no process is that old, should the number be used again
            ..Process::this()
        },
        layout: Layout::Segment(SegmentConfig {
            age: Duration::from_secs(3600),
            ..SegmentConfig::default()
        }),
        ..compressed()
    };
    let left = die_at_seal(dir.path(), &dead, &filled(&ids(5)), &ids(5));
    // The second of them did not reach the medium whole.
    let records = beginnings(&std::fs::read(&left).unwrap());
    assert_eq!(records.len(), 5);
    change(&left, |bytes| bytes[records[1] + 4096 + 30] ^= 1);
    let store = Store::open(dir.path(), compressed());
    await_taken_over(&store);
    let whole: Vec<BlockId> = ids(5)
        .into_iter()
        .filter(|&block| finds(&store, &[block])[0])
        .collect();
    assert_eq!(whole.len(), 4);
    assert!(loads(&store, &whole));
    assert!(store.places().iter().all(|place| place.len < RECORD));
}

/// Where records begin in the bytes of a segment.
fn beginnings(bytes: &[u8]) -> Vec<usize> {
    let pages = (0..bytes.len()).step_by(4096);
    pages
        .filter(|&at| bytes[at..].starts_with(b"UCMB"))
        .collect()
}

#[test]
fn a_full_medium_refuses_a_compressed_record_as_any_other() {
    let dir = directory();
    let store = Store::open(dir.path(), compressed());
    store.fault(Rule::on(OpKind::WriteAt, Fault::Errno(28)).times(1));
    let failed = store.dump(&filled(&ids(1)), &ids(1)).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::NoSpace);
    assert_eq!(finds(&store, &ids(1)), [false]);
    // The collector makes room at any time, and may remove the record just stored.
    eventually("it is stored again", || {
        store.dump(&filled(&ids(1)), &ids(1)).is_ok() && loads(&store, &ids(1))
    });
}

#[test]
fn what_waits_for_the_codec_is_stored_before_the_end() {
    let dir = directory();
    let mut fixture = Fixture {
        layout: Layout::Segment(SegmentConfig {
            age: Duration::from_secs(3600),
            ..SegmentConfig::default()
        }),
        slots: 64,
        ..compressed()
    };
    fixture.deadlines.shutdown = Duration::from_secs(60); // however slow the machine is
    let store = Store::open(dir.path(), fixture);
    let blocks = ids(40);
    let device = filled(&blocks);
    let task = store.engine.dump(device.rows(&blocks)).unwrap();
    store.engine.close();
    store.outcome(&task).unwrap();
    assert!(loads(&Store::open(dir.path(), compressed()), &blocks));
}
