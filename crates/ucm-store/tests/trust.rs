//! What is stored is verified: refused records, foreign ones, newer ones, a root that goes away, a
//! limit that holds.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, MissReason, Part, crc32c};
use ucm_infra::{Clock, LANE_LOAD, ManualClock, MonotonicTime, Notify, SystemClock};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::Pieces;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::shared::LONG;
use crate::common::{Device, Fixture, Store, are_busy, directory, eventually, id, ids, only_over};

fn kind(ended: Result<(), Vec<(usize, ucm_core::Error)>>) -> ErrorKind {
    ended.unwrap_err()[0].1.kind()
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_refused_record_is_no_hit_until_a_dump_replaced_it() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    store.edit(id(0), |bytes| bytes[4200] ^= 1);
    assert_eq!(
        store.engine.lookup(&ids(1)).unwrap(),
        [true],
        "its length is right"
    );
    let target = Device::blank(&fixture, &ids(1));
    assert_eq!(kind(store.load(&target, &ids(1))), ErrorKind::Corrupt);
    assert!(target.is_blank(id(0)));
    assert_eq!(
        (store.missed("bad_checksum"), store.stat("second_reads")),
        (1, 1)
    );
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    assert_eq!(
        kind(store.load(&target, &ids(1))),
        ErrorKind::Corrupt,
        "not even read again"
    );
    let before = store.said(); // the refusal
    store.dump(&device, &ids(1)).unwrap();
    let name = id(0).to_string();
    assert!(before.iter().any(|line| line.contains(&name)));
    let mut after = store.said().into_iter();
    assert!(
        !after.any(|line| line.contains(&name)),
        "it is only counted"
    );
    assert_eq!(
        (store.stat("records_replaced"), store.stat("refused_now")),
        (1, 0)
    );
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
    store.load(&target, &ids(1)).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn damage_on_the_way_is_not_blamed_on_the_record() {
    only_over!(NothingKept, "a memory has what it loads");
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    store.fault(Rule::on(OpKind::Read, Fault::Flip(vec![5000])).times(1));
    let target = Device::blank(&fixture, &ids(1));
    store.load(&target, &ids(1)).unwrap();
    assert!(target.is_right(id(0)));
    assert_eq!(
        (store.stat("second_reads"), store.stat("records_refused")),
        (1, 0)
    );
}

#[test]
fn a_record_that_cannot_be_read_is_written_anew_by_the_next_dump() {
    only_over!(NothingKept, "memory has a sound copy");
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    store.fault(Rule::on(OpKind::Read, Fault::Errno(5)).times(1));
    let target = Device::blank(&fixture, &ids(2));
    assert_eq!(kind(store.load(&target, &ids(1))), ErrorKind::Io);
    store.dump(&device, &ids(2)).unwrap();
    assert_eq!(
        (store.stat("blocks_published"), store.stat("blocks_present")),
        (3, 1),
        "only what could not be read"
    );
    store.dump(&device, &ids(2)).unwrap();
    assert_eq!(store.stat("blocks_published"), 3, "once");
    store.load(&target, &ids(2)).unwrap();
    assert!(ids(2).iter().all(|&block| target.is_right(block)));
}

#[test]
fn what_one_rank_refused_another_replaces_and_then_both_read_it() {
    only_over!(NothingKept, "memory has a sound copy");
    let (dir, fixture) = (directory(), Fixture::default());
    let (writer, other) = (
        Store::open(dir.path(), fixture.clone()),
        Store::open(dir.path(), fixture.clone()),
    );
    let device = Device::filled(&fixture, &ids(1));
    writer.dump(&device, &ids(1)).unwrap();
    other.fault(
        Rule::on(OpKind::Read, Fault::Flip(vec![5000]))
            .lane(LANE_LOAD)
            .times(2),
    );
    let target = Device::blank(&fixture, &ids(1));
    assert_eq!(kind(other.load(&target, &ids(1))), ErrorKind::Corrupt);
    writer.dump(&device, &ids(1)).unwrap();
    assert_eq!(writer.stat("blocks_present"), 1, "it knows of nothing");
    writer.engine.mark_bad(&ids(1)).unwrap();
    assert_eq!(writer.engine.lookup(&ids(1)).unwrap(), [false]);
    writer.dump(&device, &ids(1)).unwrap();
    assert_eq!(writer.stat("records_replaced"), 1);
    assert_eq!(writer.engine.lookup(&ids(1)).unwrap(), [true]);
    assert_eq!(kind(other.load(&target, &ids(1))), ErrorKind::Corrupt);
    other.engine.clear_bad(&ids(1)).unwrap();
    other.load(&target, &ids(1)).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn a_newer_version_is_a_miss_and_is_left_alone() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    let newer = store.edit(id(0), |bytes| {
        bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
        let crc = crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    });
    assert_eq!(
        kind(store.load(&Device::blank(&fixture, &ids(1)), &ids(1))),
        ErrorKind::Foreign
    );
    assert_eq!(store.missed("newer_version"), 1);
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    // What is not stored is not reported as stored.
    assert_eq!(kind(store.dump(&device, &ids(1))), ErrorKind::Foreign);
    assert_eq!(store.record(id(0)), newer, "never rewritten");
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
}

#[test]
fn a_newer_version_of_another_length_is_left_alone_too() {
    only_over!(
        FilesUnkept,
        "a record in a segment cannot change its length"
    );
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    for (n, more) in [(0, 4096), (1, -4096)] {
        let file = store.file(id(n));
        edit(&file, |bytes| {
            bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
            let crc = crc32c(&bytes[..60]);
            bytes[60..64].copy_from_slice(&crc.to_le_bytes());
            bytes.resize(bytes.len().saturating_add_signed(more), 7);
        });
        let newer = std::fs::read(&file).unwrap();
        assert_eq!(store.engine.lookup(&[id(n)]).unwrap(), [false]);
        assert_eq!(kind(store.dump(&device, &[id(n)])), ErrorKind::Foreign);
        assert_eq!(std::fs::read(&file).unwrap(), newer, "never replaced");
        let target = Device::blank(&fixture, &[id(n)]);
        assert_eq!(kind(store.load(&target, &[id(n)])), ErrorKind::Foreign);
        assert_eq!(kind(store.dump(&device, &[id(n)])), ErrorKind::Foreign);
        assert_eq!(
            std::fs::read(&file).unwrap(),
            newer,
            "not once it is known either"
        );
    }
    assert_eq!(
        (store.missed("wrong_length"), store.missed("newer_version")),
        (2, 2)
    );
    // One that is no record is replaced.
    edit(&store.file(id(0)), |bytes| bytes[60] ^= 1);
    let (again, target) = (
        Store::open(dir.path(), fixture.clone()),
        Device::blank(&fixture, &[id(0)]),
    );
    again.dump(&device, &[id(0)]).unwrap();
    again.load(&target, &[id(0)]).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn records_of_another_identity_or_part_are_refused() {
    only_over!(Files, "it puts block files of others in the place of ours");
    let dir = directory();
    let ours = Fixture::default();
    let store = Store::open(dir.path(), ours.clone());
    for (fixture, reason) in [
        (
            Fixture {
                weights: "others",
                ..ours.clone()
            },
            "foreign_identity",
        ),
        (
            Fixture {
                part: Part {
                    group: 0,
                    pipeline_rank: 0,
                    tensor_rank: 1,
                },
                ..ours.clone()
            },
            "foreign_part",
        ),
        (
            Fixture {
                tensors: vec![64, 64],
                ..ours.clone()
            },
            "foreign_shape",
        ),
    ] {
        store.forget(id(0));
        let theirs = directory();
        let foreign = Store::open(theirs.path(), fixture.clone());
        foreign
            .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
            .unwrap();
        std::fs::create_dir_all(store.file(id(0)).parent().unwrap()).unwrap();
        std::fs::copy(foreign.file(id(0)), store.file(id(0))).unwrap();
        let target = Device::blank(&ours, &ids(1));
        assert_eq!(
            kind(store.load(&target, &ids(1))),
            ErrorKind::Foreign,
            "{reason}"
        );
        assert!(target.is_blank(id(0)));
        assert_eq!(store.missed(reason), 1);
        store
            .dump(&Device::filled(&ours, &ids(1)), &ids(1))
            .unwrap();
        store.load(&target, &ids(1)).unwrap();
    }
}

#[test]
fn identities_and_parts_do_not_meet_in_one_root() {
    let dir = directory();
    let ours = Fixture::default();
    let store = Store::open(dir.path(), ours.clone());
    store
        .dump(&Device::filled(&ours, &ids(2)), &ids(2))
        .unwrap();
    let other = Store::open(
        dir.path(),
        Fixture {
            weights: "others",
            ..ours.clone()
        },
    );
    assert_eq!(other.engine.lookup(&ids(2)).unwrap(), [false, false]);
    let again = Store::open(dir.path(), ours.clone());
    let target = Device::blank(&ours, &ids(2));
    again.load(&target, &ids(2)).unwrap();
    assert!(
        ids(2).iter().all(|&id| target.is_right(id)),
        "and the next process finds them"
    );
    let lookups = Store::open(
        dir.path(),
        Fixture {
            lookup_only: true,
            ..ours.clone()
        },
    );
    assert_eq!(lookups.engine.lookup(&ids(3)).unwrap(), [true, true, false]);
    assert_eq!(lookups.engine.lookup_on_prefix(&ids(3)).unwrap(), 2);
    let absent = (2, Some(MissReason::Absent));
    assert_eq!(lookups.engine.explain_on_prefix(&ids(3)).unwrap(), absent);
    assert_eq!(
        lookups.engine.explain_on_prefix(&ids(2)).unwrap(),
        (2, None)
    );
    assert_eq!(
        lookups
            .engine
            .dump(target.rows(&ids(1)))
            .err()
            .unwrap()
            .kind(),
        ErrorKind::Unsupported
    );
}

#[test]
fn a_sick_medium_is_left_alone_for_a_while_and_tried_again() {
    only_over!(
        FilesAlone,
        "its medium fails lookups, and so the breaker of the engine opens"
    );
    let (dir, clock) = (directory(), ManualClock::new());
    let breaker = BreakerConfig {
        threshold: 2,
        cool_down: Duration::from_secs(10),
        window: Duration::from_secs(60),
        max_stuck: usize::MAX,
        ..BreakerConfig::default()
    };
    let fixture = Fixture {
        breaker,
        ..Fixture::default()
    };
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    let device = Device::filled(&fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    store.fault(Rule::on(OpKind::Stat, Fault::Errno(5)));
    for _ in 0..2 {
        assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    }
    assert_eq!(
        (store.stat("breaker_opened"), store.stat("healthy")),
        (1, 0)
    );
    let asked = store.asked(OpKind::Stat, id(0));
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    assert_eq!(
        store
            .engine
            .dump(device.rows(&ids(1)))
            .err()
            .unwrap()
            .kind(),
        ErrorKind::Unhealthy
    );
    assert_eq!(store.asked(OpKind::Stat, id(0)), asked, "not even asked");
    assert_eq!(store.missed("unhealthy"), 1);
    store.faults.clear();
    clock.advance(Duration::from_secs(10));
    assert_eq!(
        store.engine.lookup(&ids(1)).unwrap(),
        [true],
        "back without help"
    );
    assert_eq!(store.stat("healthy"), 1);
    let said = store.said();
    assert!(
        said.iter().any(|text| text.contains("switched off"))
            && said.iter().any(|text| text.contains("again"))
    );
}

#[test]
fn a_root_that_is_not_there_at_the_start_is_taken_up_later() {
    only_over!(OneMedium, "a memory is there from the start: tiers.rs");
    let (dir, clock) = (directory(), ManualClock::new());
    let root = dir.path().join("share");
    std::fs::write(&root, "in the way").unwrap();
    let mut fixture = Fixture::default();
    // the clock below runs ahead of the look in the background, which is of many steps
    fixture.deadlines.probe = LONG;
    let store = Store::with_clock(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    let device = Device::filled(&fixture, &ids(1));
    assert_eq!(
        store
            .engine
            .dump(device.rows(&ids(1)))
            .err()
            .unwrap()
            .kind(),
        ErrorKind::Unhealthy
    );
    std::fs::remove_file(&root).unwrap();
    let mut looks = 0_u32;
    eventually("the root is taken up", || {
        if looks.is_multiple_of(256) {
            clock.advance(Duration::from_secs(1));
        }
        looks += 1;
        let _ = store.engine.lookup(&ids(1));
        store.stat("healthy") == 1
    });
    store.dump(&device, &ids(1)).unwrap();
}

#[test]
fn writing_stops_when_the_marker_is_removed() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(2));
    store.dump(&device, &ids(1)).unwrap();
    std::fs::remove_file(dir.path().join("ucm-root.json")).unwrap();
    assert_eq!(kind(store.dump(&device, &[id(1)])), ErrorKind::Foreign);
    assert!(!store.file(id(1)).exists());
    store.load(&device, &ids(1)).unwrap();
}

fn bytes_below(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
            Ok(meta) if entry.path().extension().is_some_and(|kind| kind == "bin") => meta.len(),
            _ => 0,
        })
        .sum()
}

#[test]
fn the_limit_holds_and_the_oldest_use_goes_first() {
    only_over!(FilesUnkept, "its limit is a number of block files");
    let (dir, clock) = (directory(), ManualClock::new());
    let record = 8192;
    let fixture = Fixture {
        capacity: Some(20 * record),
        ..Fixture::default()
    };
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    assert_eq!(store.engine.record_len() as u64, record);
    let all = ids(60);
    let device = Device::filled(&fixture, &all);
    for (&block, minute) in all.iter().zip(1..) {
        // Full: refused while room is made, never beyond the limit.
        eventually("room is made", || match store.dump(&device, &[block]) {
            Ok(()) => true,
            Err(failures) => {
                assert!(are_busy(&failures), "{failures:?}");
                false
            }
        });
        assert!(bytes_below(dir.path()) <= 20 * record);
        clock.advance(Duration::from_secs(60));
        store.engine.touch(&[(all[0], 0)]).unwrap();
        eventually("the touch was done", || {
            store.stat("blocks_touched") == minute
        });
    }
    assert!(
        store.stat("storage_used_bytes") >= bytes_below(dir.path()),
        "never too little"
    );
    let found = store.engine.lookup(&all).unwrap();
    assert!(found[0], "used all the time");
    assert!(found[59] && found[58], "the newest stay");
    assert!(!found[1..30].contains(&true), "the oldest went");
    assert!(
        store.stat("records_removed") >= 40 && store.stat("bytes_removed").is_multiple_of(record)
    );
    drop(store);
    let again = Store::open(dir.path(), fixture.clone());
    eventually("usage survives a restart", || {
        again.stat("storage_used_bytes") == bytes_below(dir.path())
    });
}

/// The real clock, in a minute that does not end: times of use are cut to it.
#[derive(Debug)]
struct OneMinute;

impl Clock for OneMinute {
    fn now(&self) -> MonotonicTime {
        SystemClock.now()
    }

    fn wall_ns(&self) -> u64 {
        1_600_000_000_000_000_000
    }

    fn sleep(&self, notify: &Notify, seen: u64, until: Option<MonotonicTime>) {
        SystemClock.sleep(notify, seen, until);
    }
}

#[test]
fn removal_takes_the_deepest_of_a_chain_first() {
    only_over!(Files, "its limit is a number of block files");
    let dir = directory();
    let record = 8192;
    let fixture = Fixture {
        capacity: Some(40 * record),
        ..Fixture::default()
    };
    let store = Store::with_clock(dir.path(), fixture.clone().unhurried(), Arc::new(OneMinute));
    let chain = ids(30);
    let device = Device::filled(&fixture, &chain);
    let hint = |(ordinal, &id): (usize, &BlockId)| {
        let hint = ucm_store::engine::Hint {
            parent: BlockId::default(),
            ordinal: ordinal as u32,
            tokens: 0,
            tenant: [0; 32],
        };
        (id, hint)
    };
    store
        .engine
        .describe(chain.iter().enumerate().map(hint))
        .unwrap();
    for ids in chain.chunks(4) {
        eventually("the root was counted", || store.dump(&device, ids).is_ok());
    }
    drop(store);
    let small = Store::open(
        dir.path(),
        Fixture {
            capacity: Some(20 * record),
            ..fixture
        },
    );
    eventually("room is made", || {
        small.stat("records_removed") > 0 && small.stat("storage_used_bytes") <= 17 * record
    });
    let prefix = small.engine.lookup_on_prefix(&chain).unwrap();
    let found = small.engine.lookup(&chain).unwrap();
    assert_eq!(
        prefix,
        found.iter().filter(|&&present| present).count(),
        "what is left is a prefix"
    );
    assert!(prefix >= 10);
}

#[test]
fn use_after_close_and_wrong_rows_are_clear_errors() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(1));
    let mut wrong = device.rows(&ids(1));
    wrong[0].shard = 1;
    assert_eq!(
        store.engine.load(wrong, None).err().unwrap().kind(),
        ErrorKind::InvalidInput
    );
    let mut wrong = device.rows(&ids(1));
    wrong[0].pieces = Pieces::Listed(Vec::new());
    assert_eq!(
        store.engine.dump(wrong).err().unwrap().kind(),
        ErrorKind::InvalidInput
    );
    store.engine.close();
    store.engine.close();
    assert_eq!(
        store.engine.lookup(&ids(1)).err().unwrap().kind(),
        ErrorKind::Closed
    );
    assert_eq!(
        store
            .engine
            .dump(device.rows(&ids(1)))
            .err()
            .unwrap()
            .kind(),
        ErrorKind::Closed
    );
}
