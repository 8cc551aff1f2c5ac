//! Records in use outlive their segment while room is short; and an index without room says so.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ucm_core::BlockId;
use ucm_media::segment::SegmentConfig;
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::merging::{eager, fill, filling, finds, loads, many, mtime, privates, seal};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, ids};

/// Room for segments of twelve records.
const LIMIT: u64 = 8 << 20;

/// A root that is nearly full, and its oldest segment: the first twelve blocks.
fn nearly_full(root: &Path, fixture: &Fixture) -> PathBuf {
    let store = Store::open(root, fixture.clone());
    let device = Device::filled(fixture, &many(0..720));
    seal(&store, &device, &many(0..12));
    let oldest = store.segments().remove(0);
    for turn in 1..60 {
        seal(&store, &device, &many(turn * 12..turn * 12 + 12));
    }
    assert_eq!(store.stat("records_removed"), 0);
    set_age(&oldest, 3600);
    oldest
}

fn set_age(file: &Path, seconds: u64) {
    let file = std::fs::File::options().write(true).open(file).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(seconds))
        .unwrap();
}

fn small(fixture: Fixture) -> Fixture {
    Fixture {
        capacity: Some(LIMIT),
        slots: 32,
        ..fixture
    }
}

#[test]
fn records_in_use_outlive_their_segment() {
    let dir = directory();
    let oldest = nearly_full(dir.path(), &small(filling()));
    let before = mtime(&oldest);
    let store = Store::open(dir.path(), small(eager(Duration::ZERO)));
    eventually("room is short", || store.stat("storage_short") == 1);
    store.engine.touch(&in_use()).unwrap();
    eventually("they are reinserted", || store.stat("records_carried") == 2);
    assert_eq!(mtime(&oldest), before, "the others are not in use");
    let places = store.places();
    let young = places
        .iter()
        .find(|place| place.id == many(3..4)[0] && place.file != oldest)
        .unwrap();
    assert!(mtime(&young.file) > before);
    // As a collector does now.
    std::fs::remove_file(&oldest).unwrap();
    assert!(loads(&store, &many(3..5)) && !loads(&store, &many(0..3)));
    assert!(loads(
        &Store::open(dir.path(), small(filling())),
        &many(3..5)
    ));
}

/// Two of the blocks in the oldest segment, as a request touches them.
fn in_use() -> [(BlockId, u32); 2] {
    [(many(0..12)[3], 3), (many(0..12)[4], 4)]
}

#[test]
fn what_a_scheduler_knows_to_be_in_use_is_reinserted_by_the_rank_that_it_tells() {
    let dir = directory();
    let oldest = nearly_full(dir.path(), &small(filling()));
    let before = mtime(&oldest);
    let lookups = Fixture {
        lookup_only: true,
        ..small(filling())
    };
    let scheduler = Store::open(dir.path(), lookups);
    let rank = Store::open(dir.path(), small(eager(Duration::ZERO)));
    eventually("room is short", || rank.stat("storage_short") == 1);
    assert!(rank.engine.wants_touch_own());
    scheduler.engine.touch(&in_use()).unwrap();
    assert_eq!(
        scheduler.faults.count(OpKind::Touch),
        0,
        "it is not for it to say"
    );
    rank.engine.touch_own(&in_use()).unwrap();
    eventually("they are reinserted", || rank.stat("records_carried") == 2);
    assert_eq!(mtime(&oldest), before, "the others are not in use");
    std::fs::remove_file(&oldest).unwrap();
    assert!(loads(&rank, &many(3..5)) && !loads(&rank, &many(0..3)));
    eventually("the scheduler finds them", || {
        finds(&scheduler, &many(2..6)) == [false, true, true, false]
    });
}

#[test]
fn what_several_use_is_reinserted_by_one_of_them() {
    let dir = directory();
    nearly_full(dir.path(), &small(filling()));
    let gate = Gate::new();
    let rule = Rule::on(OpKind::Finish, Fault::HangBefore(gate.clone())).nth(1);
    let one = Store::open_faulty(dir.path(), small(eager(Duration::ZERO)), vec![rule]);
    let other = Store::open(dir.path(), small(eager(Duration::ZERO)));
    for store in [&one, &other] {
        eventually("room is short", || store.stat("storage_short") == 1);
    }
    // It is granted room, of which what it copies would be taken.
    let block = many(720..721);
    other
        .dump(&Device::filled(&other.fixture, &block), &block)
        .unwrap();
    let finished = other.faults.count(OpKind::Finish);
    one.engine.touch_own(&in_use()).unwrap();
    gate.await_waiting(1);
    other.engine.touch_own(&in_use()).unwrap();
    let claims = |kind: OpKind| {
        let log = other.faults.log();
        let is_claim = |path: &PathBuf| path.to_string_lossy().contains("/tmp/6d657267");
        log.iter()
            .filter(|seen| seen.kind == kind && seen.paths.iter().any(is_claim))
            .count()
    };
    eventually("the other one tries a few times", || {
        claims(OpKind::Create) >= 3
    });
    gate.open();
    eventually("they are reinserted", || one.stat("records_carried") == 2);
    eventually("the other one has had its turn", || {
        claims(OpKind::Remove) > 0
    });
    assert_eq!(other.stat("records_carried"), 0);
    assert_eq!(
        other.faults.count(OpKind::Finish),
        finished,
        "it copied nothing"
    );
}

#[test]
fn compressed_records_in_use_are_reinserted_each_by_itself() {
    const LIMIT: u64 = 24 << 20;
    let compressed = |fixture: Fixture| Fixture {
        capacity: Some(LIMIT),
        slots: 32,
        ..fixture.compressed()
    };
    let dir = directory();
    let fixture = compressed(filling());
    let store = Store::open(dir.path(), fixture.clone());
    let mut filled = 0;
    while store.stat("storage_used_bytes") < LIMIT / 4 * 3 {
        let some = many(filled..filled + 12);
        seal(&store, &Device::filled(&fixture, &some), &some);
        filled += 12;
    }
    let places = store.places();
    let oldest = places
        .iter()
        .find(|place| place.id == many(3..4)[0])
        .unwrap();
    assert!(
        oldest.len < 4096 + 3 * 8192,
        "shorter than header and layers are"
    );
    let oldest = oldest.file.clone();
    drop(store);
    set_age(&oldest, 3600);
    let store = Store::open(dir.path(), compressed(eager(Duration::ZERO)));
    eventually("room is short", || store.stat("storage_short") == 1);
    store.engine.touch_own(&in_use()).unwrap();
    eventually("they are reinserted", || store.stat("records_carried") == 2);
    std::fs::remove_file(&oldest).unwrap();
    assert!(loads(&store, &many(3..5)));
    assert!(!loads(&store, &many(2..3)) && !loads(&store, &many(5..6)));
}

#[test]
fn a_segment_much_of_which_is_in_use_is_used_whole() {
    let dir = directory();
    let oldest = nearly_full(dir.path(), &small(filling()));
    let before = mtime(&oldest);
    let store = Store::open(dir.path(), small(eager(Duration::ZERO)));
    eventually("room is short", || store.stat("storage_short") == 1);
    let some: Vec<_> = many(0..3).into_iter().zip(0..).collect();
    store.engine.touch(&some).unwrap();
    eventually("it is reported", || mtime(&oldest) > before);
    assert_eq!(store.stat("records_carried"), 0);
}

#[test]
fn what_cannot_be_reinserted_keeps_its_segment_in_use() {
    let dir = directory();
    let oldest = nearly_full(dir.path(), &small(filling()));
    let before = mtime(&oldest);
    let store = Store::open(dir.path(), small(eager(Duration::ZERO)));
    eventually("room is short", || store.stat("storage_short") == 1);
    store.fault(Rule::on(OpKind::Finish, Fault::Errno(5)));
    store.engine.touch(&[(many(0..1)[0], 0)]).unwrap();
    eventually("it is reported", || mtime(&oldest) > before);
    assert_eq!(store.stat("records_carried"), 0);
    assert!(loads(&store, &many(0..1)) && privates(&store).len() <= 1);
}

#[test]
fn an_index_that_is_full_says_so() {
    let dir = directory();
    fill(dir.path(), &filling(), &ids(6));
    let fixture = Fixture {
        layout: Layout::Segment(SegmentConfig {
            most_blocks: 4,
            ..SegmentConfig::default()
        }),
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture);
    assert_eq!(
        finds(&store, &ids(6))
            .iter()
            .filter(|&&found| found)
            .count(),
        4
    );
    assert_eq!(store.stat("records_not_indexed"), 2);
    let said = store.said().join("\n");
    assert!(
        said.contains("room for 4 blocks, 2 more") && said.contains("storage_capacity"),
        "{said}"
    );
    assert!(store.said().is_empty(), "once");
}
