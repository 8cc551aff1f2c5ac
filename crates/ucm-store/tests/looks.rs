//! Reads of records that this process does not know of yet: it looks at what others have stored,
//! once for all of them, and nothing else waits for it.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::time::Duration;

use crate::common::segments::{self, finds, loads, write};
use crate::common::shared::on;
use crate::common::{Above, Device, Fixture, Store, directory, eventually, id, ids};
use ucm_core::ErrorKind;
use ucm_infra::{LANE_LOAD, ManualClock};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::Until;
use ucm_store::tiers::{Priority, WritePolicy};
use ucm_testkit::{Fault, OpKind, Rule};

const LONG: Duration = Duration::from_secs(100);

/// Room for all blocks of a test, in segments.
fn roomy(fixture: Fixture) -> Fixture {
    Fixture {
        slots: 40,
        above: Above::Nothing,
        ..fixture
    }
}

fn reads_of_loads(store: &Store) -> usize {
    let log = store.faults.log();
    let of_load = log.iter().filter(|seen| seen.lane == LANE_LOAD);
    of_load.filter(|seen| seen.kind == OpKind::Read).count()
}

#[test]
fn what_was_looked_for_is_read_as_neighbours_are() {
    let (dir, blocks) = (directory(), ids(8));
    let fixture = roomy(segments::patient());
    let store = Store::open(dir.path(), fixture.clone());
    let reader = on(&ManualClock::new(), dir.path(), &fixture);
    store
        .dump(&Device::filled(&fixture, &blocks), &blocks)
        .unwrap();
    reader.faults.forget();
    assert!(loads(&reader, &blocks));
    assert_eq!((reader.segments().len(), reads_of_loads(&reader)), (1, 1));
}

#[test]
fn one_refresh_is_for_all_records_of_a_removed_segment() {
    let (dir, blocks) = (directory(), ids(32));
    let fixture = roomy(segments::patient());
    write(dir.path(), &fixture, &blocks);
    let reader = on(&ManualClock::new(), dir.path(), &fixture);
    assert!(loads(&reader, &blocks));
    for file in reader.segments() {
        std::fs::remove_file(file).unwrap();
    }
    reader.faults.forget();
    assert!(!loads(&reader, &blocks));
    let looks = reader.faults.count(OpKind::List);
    assert!(looks <= 2, "{looks}");
    assert_eq!(reader.missed("timeout"), 0);
}

#[test]
fn what_is_known_is_read_while_others_wait_for_a_look_that_hangs() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), roomy(segments::quick()));
    let store = on(&clock, dir.path(), &fixture);
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    assert!(loads(&store, &ids(1)));
    let gate = store.hang(OpKind::List);
    let device = Device::blank(&fixture, &ids(20));
    let load = |n| {
        store
            .engine
            .load(device.rows(&[id(n)]), Some(LONG))
            .unwrap()
    };
    let unknown: Vec<_> = (10..18).map(load).collect();
    eventually("all of them wait for the look that hangs", || {
        (store.stat("reads_awaiting_a_look"), gate.waiting()) == (8, 1)
    });
    let known = load(0);
    eventually("the known one is there", || {
        known.check(store.engine.clock(), Until::Published)
    });
    assert!(known.failures().is_empty());
    let over = |task: &ucm_store::engine::Task| task.check(store.engine.clock(), Until::Published);
    assert!(!unknown.iter().any(over), "no index was refreshed for them");
    gate.open();
    eventually("the others are over", || unknown.iter().all(over));
}

#[test]
fn a_read_waits_for_a_look_no_longer_than_it_has_time() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), roomy(segments::quick()));
    let store = on(&clock, dir.path(), &fixture);
    let gate = store.hang(OpKind::List);
    let device = Device::blank(&fixture, &ids(2));
    let load = |n, time| {
        store
            .engine
            .load(device.rows(&[id(n)]), Some(time))
            .unwrap()
    };
    let (short, long) = (load(0, Duration::from_secs(1)), load(1, LONG));
    eventually("both wait for the look that hangs", || {
        (store.stat("reads_awaiting_a_look"), gate.waiting()) == (2, 1)
    });
    clock.advance(Duration::from_secs(1));
    eventually("one has ended, and its slot is free", || {
        (
            store.stat("reads_awaiting_a_look"),
            store.stat("slots") - store.stat("slots_free"),
        ) == (1, 1)
    });
    let failed = store.outcome(&short).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::Timeout);
    assert!(
        !segments::is_over(&store, &long),
        "no index was refreshed for it"
    );
    gate.open();
    let failed = store.outcome(&long).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::NotFound);
}

#[test]
fn a_look_that_fails_is_no_error_of_what_is_known_by_then() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), roomy(segments::quick()));
    let store = on(&clock, dir.path(), &fixture);
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let gate = store.gate();
    let hang = Rule::on(OpKind::Stat, Fault::HangBefore(gate.clone())).path("segments");
    store.fault(hang.times(1));
    store.fault(Rule::on(OpKind::List, Fault::Errno(5)).path("segments"));
    let device = Device::blank(&fixture, &ids(3));
    let tasks: Vec<_> = (1..3)
        .map(|n| {
            store
                .engine
                .load(device.rows(&[id(n)]), Some(LONG))
                .unwrap()
        })
        .collect();
    eventually("both wait for the look that hangs", || {
        (store.stat("reads_awaiting_a_look"), gate.waiting()) == (2, 1)
    });
    store
        .dump(&Device::filled(&fixture, &ids(2)), &ids(2)[1..])
        .unwrap();
    gate.open();
    assert!(store.outcome(&tasks[0]).is_ok() && device.is_right(id(1)));
    let failed = store.outcome(&tasks[1]).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::Io);
}

#[test]
fn prefetching_what_is_nowhere_keeps_no_load_waiting() {
    let (dir, clock) = (directory(), ManualClock::new());
    let fixture = Fixture {
        above: Above::Map(0, WritePolicy::Through),
        ..roomy(segments::quick())
    };
    let store = on(&clock, dir.path(), &fixture);
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    assert!(loads(&store, &ids(1)));
    let gate = store.hang(OpKind::List);
    let absent: Vec<_> = (10..18).map(id).collect();
    assert_eq!(store.engine.prefetch(&absent, Priority::Normal).unwrap(), 8);
    assert!(loads(&store, &ids(1)));
    gate.open();
}

#[test]
fn a_lookup_from_memory_does_not_heal_a_medium_that_cannot_read() {
    let (dir, clock, blocks) = (directory(), ManualClock::new(), ids(8));
    let fixture = Fixture {
        breaker: BreakerConfig {
            threshold: 2,
            max_stuck: usize::MAX,
            cool_down: Duration::from_secs(10),
            window: Duration::from_secs(60),
            ..BreakerConfig::default()
        },
        ..roomy(segments::patient())
    };
    write(dir.path(), &fixture, &blocks);
    let reader = on(&clock, dir.path(), &fixture);
    reader.fault(Rule::on(OpKind::Read, Fault::Errno(5)).lane(LANE_LOAD));
    for _ in 0..2 {
        assert_eq!(finds(&reader, &blocks), [true; 8]);
        assert!(!loads(&reader, &blocks));
    }
    assert_eq!(
        (reader.stat("breaker_opened"), reader.stat("healthy")),
        (1, 0)
    );
    assert_eq!(finds(&reader, &blocks), [false; 8], "switched off");
    reader.faults.clear();
    clock.advance(Duration::from_secs(10));
    assert_eq!(
        finds(&reader, &blocks),
        [true; 8],
        "and the root is looked at"
    );
    eventually("it is well again", || reader.stat("healthy") == 1);
    assert!(loads(&reader, &blocks));
}
