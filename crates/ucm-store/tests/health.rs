//! The breaker in the engine: what opens it, what closes it, and what does not reach it.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{ErrorKind, MissReason};
use ucm_infra::{Clock, ManualClock};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::{Deadlines, NOWHERE, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::only_over;
use crate::common::{
    Above, Device, Fixture, Layout, Store, directory, eventually, id, ids, of_records,
};

const SECOND: Duration = Duration::from_secs(1);

fn opened(threshold: u32, max_stuck: usize) -> (tempfile::TempDir, Store, Arc<ManualClock>) {
    let (dir, clock) = (directory(), ManualClock::new());
    let breaker = BreakerConfig {
        threshold,
        max_stuck,
        cool_down: 10 * SECOND,
        window: Duration::from_secs(60),
        ..BreakerConfig::default()
    };
    let fixture = Fixture {
        breaker,
        ..Fixture::default()
    };
    let store = Store::with_clock(dir.path(), fixture, Arc::clone(&clock) as Arc<dyn Clock>);
    (dir, store, clock)
}

/// Whether the breaker of the medium is closed: the engine's, or in a pipeline that of its tier.
fn is_well(store: &Store) -> bool {
    match store.fixture.above {
        Above::Nothing => store.stat("healthy") == 1,
        _ => store.tier(1, "healthy") == 1,
    }
}

#[test]
fn one_lookup_of_many_pieces_is_one_failure() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and a tier below a memory gets fewer reads"
    );
    let (_dir, store, _clock) = opened(2, usize::MAX);
    store.fault(Rule::on(OpKind::Stat, Fault::Errno(5)));
    assert_eq!(store.engine.lookup(&ids(250)).unwrap(), [false; 250]);
    assert_eq!(
        (store.stat("breaker_opened"), store.missed("io_error")),
        (0, 250)
    );
    assert_eq!(store.missed("absent"), 0, "no medium reported that");
    let io_error = (0, Some(MissReason::IoError));
    assert_eq!(store.engine.explain_on_prefix(&ids(250)).unwrap(), io_error);
    assert_eq!(store.stat("breaker_opened"), 1);
    let unhealthy = (0, Some(MissReason::Unhealthy));
    assert_eq!(
        store.engine.explain_on_prefix(&ids(250)).unwrap(),
        unhealthy
    );
    assert_eq!(store.engine.explain_on_prefix(&[]).unwrap(), (0, None));
    let unhealthy = (vec![NOWHERE; 250], Some(MissReason::Unhealthy));
    assert_eq!(store.engine.locate(&ids(250)).unwrap(), unhealthy);
}

#[test]
fn one_late_load_is_one_failure_and_late_loads_open_it() {
    only_over!(
        OneMedium,
        "a read has half of its time where another tier comes below"
    );
    let (_dir, store, clock) = opened(2, usize::MAX);
    store
        .dump(&Device::filled(&store.fixture, &ids(8)), &ids(8))
        .unwrap();
    let gate = store.hang(OpKind::Read);
    let device = Device::blank(&store.fixture, &ids(8));
    for opened in [0, 1] {
        let before = gate.waiting();
        let task = store
            .engine
            .load(device.rows(&ids(8)), Some(SECOND))
            .unwrap();
        eventually("a read hangs", || gate.waiting() > before);
        clock.advance(SECOND);
        eventually("the load is late", || {
            task.check(store.engine.clock(), Until::Published)
        });
        eventually("every read was reported", || {
            store.stat("loads_queued") == 0
        });
        eventually("late reads are one failure", || {
            store.stat("breaker_opened") == opened
        });
    }
    gate.open();
}

#[test]
fn a_block_that_is_absent_is_an_answer_of_a_medium_that_is_back() {
    only_over!(Files, "a lookup of segments makes no system call");
    let (_dir, store, clock) = opened(1, usize::MAX);
    store.fault(of_records(OpKind::Stat, Fault::Errno(5)).times(1));
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    assert!(!is_well(&store));
    clock.advance(10 * SECOND);
    let target = Device::blank(&store.fixture, &ids(1));
    assert_eq!(
        store.load(&target, &ids(1)).unwrap_err()[0].1.kind(),
        ErrorKind::NotFound
    );
    assert!(is_well(&store));
}

#[test]
fn what_never_reaches_the_medium_does_not_use_up_the_one_try() {
    let (_dir, store, clock) = opened(1, usize::MAX);
    // Of blocks: over segments no lookup needs files, and the dump must not meet it.
    store.fault(
        Rule::on(OpKind::Stat, Fault::Errno(5))
            .path("/blocks/")
            .times(1),
    );
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    clock.advance(10 * SECOND);
    assert!(store.engine.lookup(&[]).unwrap().is_empty());
    let device = Device::filled(&store.fixture, &ids(40));
    let refused = store.engine.dump(device.rows(&ids(40))).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    store.dump(&device, &ids(1)).unwrap();
    assert_eq!(store.stat("healthy"), 1);
}

#[test]
fn too_many_stuck_operations_open_it_until_they_return() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let (_dir, store, clock) = opened(u32::MAX, 2);
    let device = Device::filled(&store.fixture, &ids(3));
    store.dump(&device, &[id(2)]).unwrap();
    let gate = store.hang(Layout::of_this_run().writing());
    for n in 0..2_u8 {
        let task = store.engine.dump(device.rows(&[id(n)])).unwrap();
        gate.await_waiting(usize::from(n) + 1);
        clock.advance(Deadlines::default().dump);
        eventually("it is written off", || {
            task.check(store.engine.clock(), Until::Published)
        });
        // What was on its way when the time jumped is late too, until it returns.
        eventually("only these are stuck", || {
            store.stat("workers_stuck") == u64::from(n) + 1
        });
    }
    let asked = store.asked(OpKind::Stat, id(2));
    assert_eq!(store.engine.lookup(&[id(2)]).unwrap(), [false]);
    assert!(!is_well(&store));
    clock.advance(20 * SECOND);
    assert_eq!(
        store.engine.lookup(&[id(2)]).unwrap(),
        [false],
        "they are stuck still"
    );
    assert_eq!(store.asked(OpKind::Stat, id(2)), asked, "not even read");
    store.faults.clear();
    gate.open();
    eventually("they return", || store.stat("workers_stuck") == 0);
    // After a jump of the time other jobs may be late too, and count as stuck until they return.
    eventually("the cool-down ends", || {
        clock.advance(10 * SECOND);
        store.engine.lookup(&[id(2)]).unwrap() == [true]
    });
    eventually("the medium was probed", || {
        store.engine.lookup(&[id(2)]).unwrap();
        is_well(&store)
    });
}

#[test]
fn all_windows_of_a_prefix_lookup_share_one_deadline() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and below a memory it has half of the time"
    );
    let (_dir, store, clock, gates) = two_looks_that_hang();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| store.engine.lookup_on_prefix(&ids(100)).unwrap());
        gates[0].await_waiting(1);
        clock.advance(9 * SECOND);
        gates[0].open();
        gates[1].await_waiting(1);
        clock.advance(2 * SECOND);
        eventually("it is late", || asking.is_finished());
        assert_eq!(
            asking.join().unwrap(),
            64,
            "what was answered in time counts"
        );
    });
    gates[1].open();
    assert_eq!(store.missed("lookup_late"), 36);
}

#[test]
fn a_lookup_that_is_polled_ends_in_time_too() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and below a memory it has half of the time"
    );
    let (_dir, store, clock, gates) = two_looks_that_hang();
    let begun = store.engine.begin_locate_on_prefix(ids(100)).unwrap();
    gates[0].await_waiting(1);
    assert!(begun.answer().is_none());
    clock.advance(9 * SECOND);
    gates[0].open();
    gates[1].await_waiting(1);
    clock.advance(SECOND + SECOND / 2);
    eventually("it is late", || begun.answer().is_some());
    let (located, took) = begun.answer().unwrap();
    let late = (vec![0; 64], Some(MissReason::LookupLate));
    assert_eq!(located.unwrap(), late);
    assert!(took >= 10 * SECOND);
    gates[1].open();
}

#[test]
fn a_lookup_of_scattered_ids_counts_no_late_answer_as_a_hit() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and below a memory it has half of the time"
    );
    let (_dir, store, clock, gates) = two_looks_that_hang();
    let begun = store.engine.begin_locate(ids(100)).unwrap();
    for gate in &gates {
        gate.await_waiting(1); // two threads share the ids
    }
    clock.advance(10 * SECOND + SECOND / 2);
    eventually("it is late", || begun.answer().is_some());
    let late = (vec![NOWHERE; 100], Some(MissReason::LookupLate));
    assert_eq!(begun.answer().unwrap().0.unwrap(), late);
    gates.iter().for_each(Gate::open);
    eventually("they return", || store.stat("workers_stuck") == 0);
    let located = store.engine.locate(&[99, 3, 64, 63].map(id)).unwrap();
    let expected = vec![NOWHERE, 0, NOWHERE, 0];
    assert_eq!(located, (expected, Some(MissReason::Absent)));
}

#[test]
fn a_lookup_that_was_dropped_or_had_no_turn_is_not_made() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and below a memory it has half of the time"
    );
    let (_dir, store, clock, gates) = two_looks_that_hang();
    let hang = Rule::on(OpKind::Stat, Fault::HangBefore(gates[1].clone()));
    store.fault(hang.lane(1).times(2));
    let begin = |blocks: u8| store.engine.begin_locate_on_prefix(ids(blocks)).unwrap();
    let mut busy: Vec<_> = (0..3).map(|_| begin(1)).collect();
    gates[0].await_waiting(1);
    gates[1].await_waiting(2);
    let asked = store.stat("lookups");
    drop(begin(2));
    busy.push(begin(1));
    gates[0].open(); // one thread is free, and comes past the one that was dropped
    gates[1].await_waiting(3);
    assert_eq!(store.stat("lookups"), asked + 1, "the other was not wanted");
    let waiting = begin(2);
    clock.advance(10 * SECOND);
    gates[1].open();
    eventually("all ended", || {
        busy.iter()
            .chain([&waiting])
            .all(|begun| begun.answer().is_some())
    });
    let error = waiting.answer().unwrap().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "it had no turn in time");
    assert_eq!(store.stat("lookups"), asked + 1, "and had no lookup");
}

/// A store with 64 blocks, of which the first two looks hang; a lookup may take ten seconds.
fn two_looks_that_hang() -> (tempfile::TempDir, Store, Arc<ManualClock>, [Gate; 2]) {
    let (dir, clock) = (directory(), ManualClock::new());
    let fixture = Fixture {
        slots: 100,
        deadlines: Deadlines {
            lookup: 10 * SECOND,
            ..Deadlines::default()
        },
        ..Fixture::default()
    };
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    store
        .dump(&Device::filled(&fixture, &ids(64)), &ids(64))
        .unwrap();
    let gates = [Gate::new(), Gate::new()];
    for gate in &gates {
        let hang = Rule::on(OpKind::Stat, Fault::HangBefore(gate.clone()));
        store.fault(hang.lane(1).times(1));
    }
    (dir, store, clock, gates)
}

#[test]
fn a_file_that_we_may_not_read_is_refused_and_replaced() {
    only_over!(NothingKept, "a memory has what it loads");
    let (_dir, store, _clock) = opened(1, usize::MAX);
    let device = Device::filled(&store.fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    store.fault(of_records(OpKind::Read, Fault::Errno(13)).times(1));
    let target = Device::blank(&store.fixture, &ids(1));
    assert_eq!(
        store.load(&target, &ids(1)).unwrap_err()[0].1.kind(),
        ErrorKind::Foreign
    );
    assert!(is_well(&store), "one file, not the medium");
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    store.dump(&device, &ids(1)).unwrap();
    assert_eq!(store.stat("records_replaced"), 1);
    store.load(&target, &ids(1)).unwrap();
}

#[test]
fn a_directory_that_we_may_not_search_blames_no_record() {
    only_over!(NothingKept, "a memory has what it loads");
    let (_dir, store, _clock) = opened(8, usize::MAX);
    let device = Device::filled(&store.fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    for kind in [OpKind::Read, OpKind::Stat] {
        store.fault(Rule::on(kind, Fault::Errno(13)));
    }
    let target = Device::blank(&store.fixture, &ids(1));
    assert_eq!(
        store.load(&target, &ids(1)).unwrap_err()[0].1.kind(),
        ErrorKind::Io
    );
    assert_eq!(store.stat("refused_now"), 0);
    store.faults.clear();
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
    store.load(&target, &ids(1)).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn opening_and_recovery_are_said_once_each() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and a tier has texts of its own: tiers.rs"
    );
    let (_dir, store, clock) = opened(2, usize::MAX);
    store.said();
    store.fault(Rule::on(OpKind::Stat, Fault::Errno(5)));
    for _ in 0..5 {
        // Two failures open it; then each cool-down lets one through, which fails.
        for _ in 0..4 {
            assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
        }
        clock.advance(10 * SECOND);
    }
    assert_eq!(
        (store.missed("io_error"), store.missed("unhealthy")),
        (2 + 4, 14)
    );
    store.faults.clear();
    for _ in 0..3 {
        store.engine.lookup(&ids(1)).unwrap();
    }
    let said = store.said();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("switched off") && said[1].contains("answers again"));
    assert_eq!(
        (store.stat("breaker_opened"), store.stat("healthy")),
        (1, 1)
    );
}

#[test]
fn failures_far_apart_do_not_open_it() {
    only_over!(Files, "a lookup of segments makes no system call");
    let (_dir, store, clock) = opened(2, usize::MAX);
    store.fault(Rule::on(OpKind::Stat, Fault::Errno(5)));
    for _ in 0..5 {
        assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
        clock.advance(61 * SECOND);
    }
    assert_eq!((store.missed("io_error"), is_well(&store)), (5, true));
}

#[test]
fn the_log_says_at_the_start_what_is_used() {
    let (dir, store, _clock) = opened(1, usize::MAX);
    let mut said = store.said();
    said.retain(|line| line.starts_with("ucm ") || line.starts_with("open: ")); // not the device's
    let first = concat!(
        "ucm ",
        env!("CARGO_PKG_VERSION"),
        ": 16 staging slots of 8 KiB on "
    );
    assert!(said[0].starts_with(first), "{}", said[0]);
    let of_root: Vec<_> = said.iter().filter(|l| l.contains("I/O threads")).collect();
    assert_eq!(of_root.len(), 1, "one line for each root: {said:?}");
    let root = dir.path().display().to_string();
    for word in [&*root, "buffered I/O", "at most 1 GiB stored"] {
        assert!(of_root[0].contains(word), "{word}: {}", of_root[0]);
    }
}
