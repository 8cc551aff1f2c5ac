//! Reading from segments: neighbours with one operation and each with an outcome of its own,
//! descriptors that are kept open and let go.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, ManualClock};
use ucm_io::IoEngine;
use ucm_media::backend::Flush;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::segments::{self, change, loads, write};
use crate::common::shared::{in_time, on};
use crate::common::{Above, Device, Fixture, Store, directory, eventually, ids};

/// Bytes of a record of the usual fixture.
const RECORD: usize = 8192;

/// Sealed at a flush; as many slots as loads of all blocks take.
fn patient() -> Fixture {
    Fixture {
        slots: 40,
        ..segments::patient()
    }
}

/// The same, sealed as soon as nothing is being written.
fn quick() -> Fixture {
    Fixture {
        slots: 40,
        ..segments::quick()
    }
}

/// Reads of records from the medium since the log was forgotten.
fn asked(store: &Store) -> usize {
    let log = store.faults.log();
    log.iter()
        .filter(|seen| seen.kind == OpKind::Read && seen.lane == 0)
        .count()
}

fn slots_come_back(store: &Store) {
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

/// Descriptors of this process that are open on something below a directory's segments.
fn open_segments(store: &Store) -> usize {
    let dir = store.namespace().join("segments");
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    targets.filter(|target| target.starts_with(&dir)).count()
}

#[test]
fn neighbours_are_read_with_one_operation() {
    let (dir, blocks) = (directory(), ids(32));
    write(dir.path(), &patient(), &blocks);
    let reader = Store::open(dir.path(), patient());
    reader.faults.forget();
    assert!(loads(&reader, &blocks));
    assert_eq!(asked(&reader), 1);
    reader.faults.forget();
    // As they lie there: several threads gather them.
    let blocks: Vec<BlockId> = reader.places().iter().map(|place| place.id).collect();
    assert!(loads(
        &reader,
        &[blocks[3], blocks[5], blocks[4], blocks[9]]
    ));
    assert_eq!(
        asked(&reader),
        2,
        "three in a row, in any order, and one by itself"
    );
    reader.faults.forget();
    assert!(loads(&reader, &blocks[7..8]));
    assert_eq!(asked(&reader), 1);
}

#[test]
fn the_open_segment_is_read_so_too_and_no_descriptor_of_it_is_kept() {
    let (dir, blocks) = (directory(), ids(8));
    let store = Store::open(dir.path(), patient());
    let device = Device::filled(&patient(), &blocks);
    let task = store.engine.dump(device.rows(&blocks)).unwrap();
    eventually("the records are written", || {
        store.engine.lookup(&blocks).unwrap() == [true; 8]
    });
    store.faults.forget();
    assert!(loads(&store, &blocks));
    assert_eq!((asked(&store), store.faults.kept()), (1, 0));
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    assert!(loads(&store, &blocks));
    assert_eq!((asked(&store), store.faults.kept()), (2, 1));
}

#[test]
fn a_long_prefix_is_read_by_all_threads() {
    let fixture = Fixture {
        tensors: vec![32 << 10],
        layers: 2,
        layers_per_shard: 2,
        workers: 4,
        ..patient()
    };
    let (dir, blocks) = (directory(), ids(32));
    write(dir.path(), &fixture, &blocks);
    let reader = Store::open(dir.path(), fixture);
    reader.faults.forget();
    assert!(loads(&reader, &blocks));
    // 32 records of 68 KiB for four threads.
    assert!((4..=6).contains(&asked(&reader)), "{}", asked(&reader));
}

#[test]
fn below_a_memory_tier_neighbours_are_read_together() {
    let (dir, blocks) = (directory(), ids(16));
    write(dir.path(), &patient(), &blocks);
    for above in [
        Above::Memory(64, WritePolicy::Through),
        Above::Map(64, WritePolicy::Through),
    ] {
        let fixture = Fixture { above, ..patient() };
        let reader = Store::open(dir.path(), fixture);
        reader.faults.forget();
        assert!(loads(&reader, &blocks));
        assert_eq!(asked(&reader), 1, "{above:?}");
        assert_eq!(reader.tier(1, "blocks_read"), 16);
        eventually("they are above", || reader.tier(0, "promotions") == 16);
        assert!(loads(&reader, &blocks));
        assert_eq!(asked(&reader), 1, "from above");
    }
}

#[test]
fn a_load_larger_than_the_arena_streams_through_it() {
    let (dir, blocks) = (directory(), ids(40));
    write(dir.path(), &patient(), &blocks);
    let reader = Store::open(
        dir.path(),
        Fixture {
            slots: 5,
            ..patient()
        },
    );
    assert!(loads(&reader, &blocks));
    slots_come_back(&reader);
}

#[test]
fn what_goes_wrong_with_several_at_once_is_asked_again_one_by_one() {
    let (dir, blocks) = (directory(), ids(8));
    write(dir.path(), &patient(), &blocks);
    for (fault, more) in [
        (Fault::Errno(5), 8),
        (Fault::Errno(13), 8),
        (Fault::LostReply(5), 8),
        (Fault::Errno(2), 1),
        (Fault::stale(), 1),
        (Fault::ShortRead(0), 8),
        (Fault::ShortRead(2 * RECORD + 100), 6),
        (Fault::Flip(vec![5000, 3 * RECORD + 5000]), 2),
        (Fault::FlipRandom(3), 1),
    ] {
        let reader = Store::open(dir.path(), patient());
        reader.faults.forget();
        reader.fault(Rule::on(OpKind::Read, fault.clone()).lane(0).times(1));
        assert!(loads(&reader, &blocks), "{fault:?}");
        let asked = asked(&reader);
        assert!((1 + more..=1 + 8).contains(&asked), "{fault:?}: {asked}");
        assert_eq!(reader.stat("records_refused"), 0, "{fault:?}");
        slots_come_back(&reader);
    }
}

#[test]
fn one_that_cannot_be_read_does_not_fail_its_neighbours() {
    let (dir, blocks) = (directory(), ids(8));
    write(dir.path(), &patient(), &blocks);
    let reader = Store::open(dir.path(), patient());
    // All of them at once, and then the fourth by itself.
    let rule = Rule::on(OpKind::Read, Fault::Errno(5)).lane(0);
    reader.fault(rule.clone().nth(1));
    reader.fault(rule.nth(4));
    let device = Device::blank(&patient(), &blocks);
    let failures = reader.load(&device, &blocks).unwrap_err();
    let own: Vec<_> = failures
        .iter()
        .filter(|(_, error)| error.kind() == ErrorKind::Io)
        .map(|(row, _)| *row)
        .collect();
    assert_eq!(own, [failures[0].0], "{failures:?}");
    assert!(blocks[..own[0]].iter().all(|&block| device.is_right(block)));
    assert_eq!(reader.engine.lookup(&blocks).unwrap(), [true; 8]);
    slots_come_back(&reader);
    reader.faults.clear();
    assert!(loads(&reader, &blocks));
}

#[test]
fn a_damaged_record_is_refused_and_its_neighbours_are_not() {
    let (dir, blocks) = (directory(), ids(8));
    write(dir.path(), &patient(), &blocks);
    let reader = Store::open(dir.path(), patient());
    let bad = reader
        .places()
        .into_iter()
        .find(|place| place.id == blocks[4])
        .unwrap();
    change(&bad.file, |bytes| bytes[bad.offset + 5000] ^= 1);
    let device = Device::blank(&patient(), &blocks);
    let failures = reader.load(&device, &blocks).unwrap_err();
    assert_eq!(
        (failures[0].0, failures[0].1.kind()),
        (4, ErrorKind::Corrupt)
    );
    assert!(blocks[..4].iter().all(|&block| device.is_right(block)));
    eventually("only it is refused", || {
        let mut found = [true; 8];
        found[4] = false;
        reader.engine.lookup(&blocks).unwrap() == found
    });
    assert_eq!(reader.stat("records_refused"), 1);
    let mut others = blocks.clone();
    others.remove(4);
    assert!(loads(&reader, &others));
}

#[test]
fn a_segment_that_is_cut_off_gives_what_it_has() {
    let (dir, blocks) = (directory(), ids(8));
    write(dir.path(), &patient(), &blocks);
    let reader = on(&ManualClock::new(), dir.path(), &patient());
    // After this look at the directory, in which nothing changes, the next one is half a minute
    // away: it would see the other length, and take the segment for removed.
    assert!(!loads(&reader, &ids(9)[8..]));
    let places = reader.places();
    let cut = places.iter().map(|place| place.offset).max().unwrap() - RECORD + 100;
    change(&places[0].file, |bytes| bytes.truncate(cut));
    let (whole, lost): (Vec<_>, Vec<_>) = places
        .iter()
        .partition(|place| place.offset + place.len <= cut);
    assert_eq!((whole.len(), lost.len()), (6, 2));
    assert!(!loads(&reader, &blocks));
    let whole: Vec<BlockId> = whole.iter().map(|place| place.id).collect();
    assert!(loads(&reader, &whole));
    assert!(lost.iter().all(|place| !loads(&reader, &[place.id])));
}

#[test]
fn a_read_that_hangs_ends_every_load_of_it_at_its_deadline() {
    let (dir, blocks, clock) = (directory(), ids(8), ManualClock::new());
    write(dir.path(), &patient(), &blocks);
    let reader = Store::with_clock(dir.path(), patient(), Arc::clone(&clock) as Arc<dyn Clock>);
    for after in [false, true] {
        let gate = reader.gate();
        let fault = if after {
            Fault::HangAfter(gate.clone())
        } else {
            Fault::HangBefore(gate.clone())
        };
        reader.fault(Rule::on(OpKind::Read, fault).lane(0));
        let device = Device::blank(&patient(), &blocks);
        let two = Some(Duration::from_secs(2));
        let task = reader.engine.load(device.rows(&blocks), two).unwrap();
        gate.await_waiting(1);
        clock.advance(Duration::from_secs(2));
        let failures = reader.outcome(&task).unwrap_err();
        assert!(
            failures.len() == 8
                && failures
                    .iter()
                    .all(|(_, error)| error.kind() == ErrorKind::Timeout),
            "{failures:?}"
        );
        gate.open();
        slots_come_back(&reader);
        assert!(blocks.iter().all(|&block| device.is_blank(block)));
        reader.faults.clear();
        assert!(loads(&reader, &blocks));
    }
}

#[test]
fn a_removed_segment_is_a_miss_although_its_descriptor_was_kept() {
    let (dir, blocks, clock) = (directory(), ids(8), ManualClock::new());
    write(dir.path(), &patient(), &blocks);
    let reader = on(&clock, dir.path(), &patient());
    assert!(loads(&reader, &blocks));
    assert_eq!((reader.faults.kept(), open_segments(&reader)), (1, 1));
    std::fs::remove_file(reader.segments().remove(0)).unwrap();
    assert!(!loads(&reader, &blocks));
    assert_eq!(reader.stat("records_refused"), 0);
    assert_eq!((reader.faults.kept(), open_segments(&reader)), (0, 0));
    slots_come_back(&reader);
}

#[test]
fn a_segment_removed_elsewhere_is_let_go_when_that_is_seen() {
    let (dir, blocks, clock) = (directory(), ids(8), ManualClock::new());
    write(dir.path(), &patient(), &blocks);
    let reader = on(&clock, dir.path(), &patient());
    assert!(loads(&reader, &blocks));
    std::fs::remove_file(reader.segments().remove(0)).unwrap();
    in_time(&clock, Duration::from_secs(8), "it is closed", || {
        open_segments(&reader) == 0
    });
    assert!(!loads(&reader, &blocks));
}

#[test]
fn a_file_without_reads_is_closed() {
    let (dir, blocks, clock) = (directory(), ids(8), ManualClock::new());
    write(dir.path(), &patient(), &blocks);
    let reader = on(&clock, dir.path(), &patient());
    assert!(loads(&reader, &blocks));
    assert_eq!(open_segments(&reader), 1);
    in_time(&clock, Duration::from_secs(60), "it is closed", || {
        open_segments(&reader) == 0
    });
    assert!(loads(&reader, &blocks), "and opened again");
}

#[test]
fn descriptors_are_bounded_whatever_is_read() {
    let dir = directory();
    // whose time stands: none is closed for want of readers
    let store = on(&ManualClock::new(), dir.path(), &quick());
    let blocks: Vec<BlockId> = (0..140u8).map(|n| BlockId([n; 16])).collect();
    let device = Device::filled(&store.fixture, &blocks);
    for block in &blocks {
        store.dump(&device, &[*block]).unwrap();
    }
    assert!(store.segments().len() >= 130);
    for block in blocks.iter().chain(&blocks) {
        assert!(loads(&store, &[*block]));
        assert!(store.faults.kept() <= 128);
    }
    assert!(open_segments(&store) <= 128 + 4, "four may be being closed");
    assert_eq!(store.faults.kept(), 128);
    drop(store);
}

#[test]
fn readers_of_whole_prefixes_see_exact_bytes_while_segments_come_and_go() {
    let dir = directory();
    let store = Store::open(dir.path(), quick());
    let reader = Store::open(dir.path(), quick());
    let blocks = ids(30);
    let device = Device::filled(&store.fixture, &blocks);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0..30 {
                let _ = store.dump(&device, &blocks); // its segment may be taken away below
                let files = store.segments();
                if turn % 2 == 1 {
                    let _ = files
                        .get(turn % files.len().max(1))
                        .map(std::fs::remove_file);
                }
            }
        });
        for _ in 0..60 {
            loads(&reader, &blocks);
        }
    });
    eventually("all is well again", || {
        store.dump(&device, &blocks).is_ok() && loads(&reader, &blocks)
    });
    assert_eq!(reader.stat("records_refused"), 0);
    slots_come_back(&reader);
}
