//! The rules of the engine, one by one: no late bytes, two levels of a dump, bounded queues,
//! deadlines, refusal.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock};
use ucm_store::engine::{Deadlines, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::{
    Device, Fixture, Layout, Store, directory, eventually, id, ids, media, of_records, on,
    only_over,
};

fn kinds(ended: Result<(), Vec<(usize, ucm_core::Error)>>) -> Vec<(usize, ErrorKind)> {
    ended
        .unwrap_err()
        .into_iter()
        .map(|(row, error)| (row, error.kind()))
        .collect()
}

#[test]
fn staged_comes_before_published_and_only_published_is_a_hit() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let gate = store.hang(Layout::of_this_run().writing());
    let mut device = Device::filled(&fixture, &ids(2));
    let task = store.engine.dump(device.rows(&ids(2))).unwrap();
    assert!(task.wait(store.engine.clock(), Until::Staged, None));
    device = Device::blank(&fixture, &ids(2)); // device memory is reused
    assert!(!task.check(store.engine.clock(), Until::Published));
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [false, false]);
    gate.open();
    store.outcome(&task).unwrap();
    store.outcome(&task).unwrap(); // waiting is repeatable
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [true, true]);
    store.load(&device, &ids(2)).unwrap();
    assert!(ids(2).iter().all(|&id| device.is_right(id)));
}

#[test]
fn a_dump_without_a_slot_is_refused_at_once_and_loads_keep_their_share() {
    let dir = directory();
    let fixture = Fixture {
        slots: 4,
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(9));
    store.dump(&device, &[id(8)]).unwrap();
    assert_eq!(store.engine.free_dump_slots(), 3);
    let refused = store.engine.dump(device.rows(&ids(4))).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert_eq!(
        (store.stat("slots_free"), store.stat("blocks_in_flight")),
        (4, 0),
        "nothing was taken"
    );
    let gate = store.hang(Layout::of_this_run().writing());
    let hung = store.engine.dump(device.rows(&ids(3))).unwrap();
    assert_eq!(store.engine.free_dump_slots(), 0);
    assert_eq!(
        store
            .engine
            .dump(device.rows(&[id(5)]))
            .err()
            .unwrap()
            .kind(),
        ErrorKind::Busy
    );
    let target = Device::blank(&fixture, &[id(8)]);
    store.load(&target, &[id(8)]).unwrap();
    assert!(target.is_right(id(8)));
    gate.open();
    store.outcome(&hung).unwrap();
    store.dump(&device, &[id(5)]).unwrap();
}

#[test]
fn a_load_larger_than_the_arena_streams_through_it() {
    for medium in media() {
        let dir = directory();
        let fixture = Fixture {
            medium,
            slots: 4,
            ..Fixture::default()
        };
        let store = Store::open(dir.path(), fixture.clone());
        let all = ids(40);
        let device = Device::filled(&fixture, &all);
        for ids in all.chunks(3) {
            store.dump(&device, ids).unwrap();
        }
        let target = Device::blank(&fixture, &all);
        store.load(&target, &all).unwrap();
        assert!(all.iter().all(|&id| target.is_right(id)));
    }
}

#[test]
fn loads_of_one_block_share_a_read() {
    only_over!(FilesUnkept, "it counts the reads of a block file");
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let gate = store.hang(OpKind::Read);
    let (one, other) = (
        Device::blank(&fixture, &ids(1)),
        Device::blank(&fixture, &ids(1)),
    );
    let tasks = [
        store.engine.load(one.rows(&ids(1)), None),
        store.engine.load(other.rows(&ids(1)), None),
    ];
    gate.open();
    tasks
        .into_iter()
        .for_each(|task| store.outcome(&task.unwrap()).unwrap());
    assert!(one.is_right(id(0)) && other.is_right(id(0)));
    assert_eq!(
        (store.asked(OpKind::Read, id(0)), store.stat("loads_joined")),
        (1, 1)
    );
}

#[test]
fn a_load_after_a_read_that_found_nothing_gets_its_own() {
    only_over!(FilesUnkept, "it hangs the read of a block file");
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let gate = store.gate();
    store.fault(of_records(OpKind::Read, Fault::HangAfter(gate.clone())));
    let (early, late) = (
        Device::blank(&fixture, &ids(1)),
        Device::blank(&fixture, &ids(1)),
    );
    let before = store.engine.load(early.rows(&ids(1)), None).unwrap();
    gate.await_waiting(1); // it has found nothing, and has not reported it yet
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let after = store.engine.load(late.rows(&ids(1)), None).unwrap();
    assert_eq!(store.stat("loads_joined"), 1);
    gate.open();
    store.outcome(&after).unwrap();
    assert!(late.is_right(id(0)));
    let failed = store.outcome(&before).unwrap_err();
    assert!(
        failed
            .iter()
            .all(|(_, error)| error.kind() == ErrorKind::NotFound)
    );
}

#[test]
fn nothing_reaches_the_device_after_the_deadline() {
    only_over!(NothingKept, "a memory has what it loads");
    let (dir, fixture, gate) = (directory(), Fixture::default(), Gate::new());
    let clock = ManualClock::new();
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    store
        .dump(&Device::filled(&fixture, &ids(3)), &ids(3))
        .unwrap();
    store.fault(of_records(OpKind::Read, Fault::HangAfter(gate.clone())));
    let device = Device::blank(&fixture, &ids(3));
    let task = store
        .engine
        .load(device.rows(&ids(3)), Some(Duration::from_secs(2)))
        .unwrap();
    gate.await_waiting(1);
    assert!(!task.check(store.engine.clock(), Until::Published));
    clock.advance(Duration::from_secs(2));
    // The clock stands still: over while its reads hang.
    let failures = store.outcome(&task).unwrap_err();
    assert!(
        failures
            .iter()
            .all(|(_, error)| error.kind() == ErrorKind::Timeout)
    );
    assert_eq!(failures.len(), 3);
    gate.open(); // the reads come back with sound bytes, too late
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
    assert!(ids(3).iter().all(|&id| device.is_blank(id)));
    store.faults.clear();
    store.load(&device, &ids(3)).unwrap();
}

#[test]
fn the_first_failure_ends_the_reads_behind_it() {
    only_over!(FilesUnkept, "it lets the read of one block file hang");
    let (dir, fixture, gate) = (directory(), Fixture::default(), Gate::new());
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let name = format!("{}.bin", id(0));
    store.fault(Rule::on(OpKind::Read, Fault::HangAfter(gate.clone())).path(name));
    let device = Device::blank(&fixture, &ids(2));
    let ended = store.load(&device, &[id(1), id(0)]);
    assert_eq!(
        kinds(ended),
        [(0, ErrorKind::NotFound), (1, ErrorKind::Busy)],
        "one absent, one given up"
    );
    gate.open();
    eventually("the slot comes back", || {
        store.stat("slots_free") == store.stat("slots")
    });
    assert!(device.is_blank(id(0)));
}

#[test]
fn a_block_is_published_by_its_last_shard_whichever_caller_brings_it() {
    for medium in media() {
        let dir = directory();
        let fixture = Fixture {
            medium,
            layers_per_shard: 1,
            ..Fixture::default()
        };
        let store = Store::open(dir.path(), fixture.clone());
        let device = Device::filled(&fixture, &ids(1));
        for shard in [2, 0] {
            let task = store.engine.dump(vec![device.row(id(0), shard)]).unwrap();
            store.outcome(&task).unwrap();
            assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false], "incomplete");
        }
        let last = store.engine.dump(vec![device.row(id(0), 1)]).unwrap();
        store.outcome(&last).unwrap();
        assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
        let direct = on(medium);
        let whole = Store::open(dir.path(), direct.clone());
        let target = Device::blank(&direct, &ids(1));
        whole.load(&target, &ids(1)).unwrap();
        assert!(
            target.is_right(id(0)),
            "how it was dumped is not part of the format"
        );
    }
}

#[test]
fn an_incomplete_block_is_dropped_at_its_deadline() {
    for medium in media() {
        let (dir, clock) = (directory(), ManualClock::new());
        let fixture = Fixture {
            medium,
            layers_per_shard: 1,
            ..Fixture::default()
        };
        let store = Store::with_clock(
            dir.path(),
            fixture.clone(),
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        let device = Device::filled(&fixture, &ids(1));
        let task = store.engine.dump(vec![device.row(id(0), 0)]).unwrap();
        store.outcome(&task).unwrap();
        assert_eq!(store.stat("blocks_in_flight"), 1);
        clock.advance(Deadlines::default().dump);
        assert_eq!(
            (
                store.stat("blocks_incomplete"),
                store.stat("blocks_in_flight")
            ),
            (1, 0)
        );
        assert_eq!(store.stat("slots_free"), store.stat("slots"));
    }
}

#[test]
fn dumps_of_one_block_join_and_all_learn_the_end() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let gate = store.hang(Layout::of_this_run().writing());
    let device = Device::filled(&fixture, &ids(1));
    let first = store.engine.dump(device.rows(&ids(1))).unwrap();
    gate.await_waiting(1);
    let second = store.engine.dump(device.rows(&ids(1))).unwrap();
    assert!(second.wait(store.engine.clock(), Until::Staged, None));
    assert!(!second.check(store.engine.clock(), Until::Published));
    gate.open();
    store.outcome(&first).unwrap();
    store.outcome(&second).unwrap();
    assert_eq!(store.stat("blocks_published"), 1);
    store.dump(&device, &ids(1)).unwrap();
    assert_eq!(
        (store.stat("blocks_published"), store.stat("blocks_present")),
        (1, 1),
        "present is a no-op"
    );
}

#[test]
fn a_failed_publish_is_reported_and_is_no_hit() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    store.fault(of_records(Layout::of_this_run().writing(), Fault::Errno(28)).times(1));
    let device = Device::filled(&fixture, &ids(1));
    assert_eq!(
        kinds(store.dump(&device, &ids(1))),
        [(0, ErrorKind::NoSpace)]
    );
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    crate::common::eventually("the pause after a full medium ends", || {
        store.dump(&device, &ids(1)).is_ok()
    });
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
}

#[test]
fn a_hung_dump_is_written_off_and_its_slot_stays_away_until_the_call_returns() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let (dir, fixture) = (directory(), Fixture::default());
    let clock = ManualClock::new();
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    let gate = store.hang(Layout::of_this_run().writing());
    let device = Device::filled(&fixture, &ids(1));
    let task = store.engine.dump(device.rows(&ids(1))).unwrap();
    gate.await_waiting(1);
    clock.advance(Deadlines::default().dump);
    assert_eq!(kinds(store.outcome(&task)), [(0, ErrorKind::Timeout)]);
    assert_eq!(
        store.stat("slots") - store.stat("slots_free"),
        1,
        "quarantined"
    );
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    gate.open();
    eventually("the slot comes back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}
