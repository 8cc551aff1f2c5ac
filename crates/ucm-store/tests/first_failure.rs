//! At the first failure of a load the blocks before the failed one finish, those behind it that
//! still read are given up: a reader of a prefix loses nothing that lies before the first bad
//! block, whatever order the reads end in.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, ManualClock};
use ucm_store::engine::{Deadlines, Task, Until};
use ucm_testkit::Gate;

use crate::common::{
    Device, Fixture, Medium, SlowDevice, Store, directory, eventually, id, ids, media, on,
    only_over,
};

/// Every read of a test may hang and leave a thread for the others.
fn wide() -> Fixture {
    Fixture {
        workers: 8,
        ..Fixture::default()
    }
}

/// A store with these blocks, each read by itself, and none of them in a memory above.
fn stored(fixture: &Fixture, blocks: &[BlockId]) -> (tempfile::TempDir, Store) {
    let dir = directory();
    let store = Store::open(dir.path(), fixture.clone());
    fill(&store, blocks);
    (dir, store)
}

fn fill(store: &Store, blocks: &[BlockId]) {
    let device = Device::filled(&store.fixture, blocks);
    for &block in blocks {
        // in a segment of its own, where segments are sealed at once
        store.dump(&device, &[block]).unwrap();
        if store.fixture.medium == Medium::Posix {
            store.forget(block);
        }
    }
}

fn damage(store: &Store, block: BlockId) {
    store.edit(block, |bytes| bytes[4200] ^= 1);
}

/// Lets the reads of these blocks hang.
fn hang(store: &Store, blocks: &[BlockId]) -> Gate {
    let gate = store.gate();
    for &block in blocks {
        store.hang_record(block, &gate);
    }
    gate
}

fn is_over(store: &Store, task: &Task) -> bool {
    task.check(store.engine.clock(), Until::Published)
}

/// The errors of the failed rows of a load that ended.
fn outcome(store: &Store, task: &Task) -> Vec<(usize, ErrorKind)> {
    let failures = store.outcome(task).err().unwrap_or_default();
    for (row, error) in &failures {
        let given_up = error.to_string().contains("another block");
        assert_eq!(
            given_up,
            error.kind() == ErrorKind::Busy,
            "row {row}: {error}"
        );
    }
    failures
        .into_iter()
        .map(|(row, error)| (row, error.kind()))
        .collect()
}

/// Waits until this many rows have failed.
fn await_failures(task: &Task, rows: usize) {
    eventually("enough rows have failed", || task.failures().len() >= rows);
}

fn slots_come_back(store: &Store) {
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

#[test]
fn those_before_the_first_bad_block_arrive_and_those_behind_it_are_given_up() {
    let (_dir, store) = stored(&wide(), &ids(5));
    damage(&store, id(2));
    let (before, behind) = (hang(&store, &ids(2)), hang(&store, &[id(3), id(4)]));
    let device = Device::blank(&store.fixture, &ids(5));
    let task = store.engine.load(device.rows(&ids(5)), None).unwrap();
    await_failures(&task, 1);
    assert!(
        !is_over(&store, &task),
        "what lies before it is still wanted"
    );
    before.open();
    assert_eq!(
        outcome(&store, &task),
        [
            (2, ErrorKind::Corrupt),
            (3, ErrorKind::Busy),
            (4, ErrorKind::Busy)
        ]
    );
    assert!(ids(2).iter().all(|&block| device.is_right(block)));
    assert_eq!(
        (store.stat("blocks_loaded"), store.stat("blocks_failed")),
        (2, 3)
    );
    behind.open();
    slots_come_back(&store);
    assert!((2..5).all(|n| device.is_blank(id(n))), "no late bytes");
    let rest = [id(3), id(4)];
    store.load(&device, &rest).unwrap();
    assert!(rest.iter().all(|&block| device.is_right(block)));
}

#[test]
fn a_failure_further_up_front_moves_the_cut() {
    let (_dir, store) = stored(&wide(), &ids(5));
    damage(&store, id(1));
    damage(&store, id(3));
    let (first, second) = (hang(&store, &[id(0)]), hang(&store, &[id(1)]));
    let third = hang(&store, &[id(2), id(4)]);
    let device = Device::blank(&store.fixture, &ids(5));
    let task = store.engine.load(device.rows(&ids(5)), None).unwrap();
    await_failures(&task, 1); // the fourth
    second.open();
    await_failures(&task, 2);
    assert!(!is_over(&store, &task));
    first.open();
    assert_eq!(
        outcome(&store, &task),
        [
            (1, ErrorKind::Corrupt),
            (2, ErrorKind::Busy),
            (3, ErrorKind::Corrupt),
            (4, ErrorKind::Busy)
        ]
    );
    third.open();
    slots_come_back(&store);
    assert!(device.is_right(id(0)) && (1..5).all(|n| device.is_blank(id(n))));
}

#[test]
fn loads_that_share_a_read_go_by_their_own_order() {
    let (_dir, store) = stored(&wide(), &ids(2));
    damage(&store, id(1));
    let (good, bad) = (hang(&store, &[id(0)]), hang(&store, &[id(1)]));
    let (one, other) = (
        Device::blank(&store.fixture, &ids(2)),
        Device::blank(&store.fixture, &ids(2)),
    );
    let forward = store.engine.load(one.rows(&ids(2)), None).unwrap();
    let backward = store
        .engine
        .load(other.rows(&[id(1), id(0)]), None)
        .unwrap();
    assert_eq!(store.stat("loads_joined"), 2);
    bad.open();
    assert_eq!(
        outcome(&store, &backward),
        [(0, ErrorKind::Corrupt), (1, ErrorKind::Busy)]
    );
    assert!(!is_over(&store, &forward));
    good.open();
    assert_eq!(outcome(&store, &forward), [(1, ErrorKind::Corrupt)]);
    assert!(one.is_right(id(0)) && other.is_blank(id(0)));
}

#[test]
fn a_block_counts_where_its_first_row_stands() {
    let fixture = Fixture {
        layers_per_shard: 1,
        ..wide()
    };
    let (_dir, store) = stored(&fixture, &ids(3));
    damage(&store, id(1));
    let (before, behind) = (hang(&store, &[id(0)]), hang(&store, &[id(2)]));
    let device = Device::blank(&fixture, &ids(3));
    let rows = (0..3).flat_map(|shard| ids(3).into_iter().map(move |block| (block, shard)));
    let rows = rows
        .map(|(block, shard)| device.row(block, shard))
        .collect();
    let task = store.engine.load(rows, None).unwrap();
    await_failures(&task, 3);
    before.open();
    let (bad, given_up) = (ErrorKind::Corrupt, ErrorKind::Busy);
    assert_eq!(
        outcome(&store, &task),
        [
            (1, bad),
            (2, given_up),
            (4, bad),
            (5, given_up),
            (7, bad),
            (8, given_up)
        ]
    );
    behind.open();
    slots_come_back(&store);
    assert!(device.is_right(id(0)) && device.is_blank(id(1)) && device.is_blank(id(2)));
}

#[test]
fn a_record_refused_before_costs_nothing_before_it() {
    for medium in media() {
        let (_dir, store) = stored(&on(medium), &ids(4));
        store.engine.mark_bad(&[id(2)]).unwrap();
        let device = Device::blank(&store.fixture, &ids(4));
        let task = store.engine.load(device.rows(&ids(4)), None).unwrap();
        assert_eq!(
            outcome(&store, &task),
            [(2, ErrorKind::Corrupt), (3, ErrorKind::Busy)],
            "nothing behind it was even read"
        );
        assert!(device.is_right(id(0)) && device.is_right(id(1)));
        assert!(device.is_blank(id(2)) && device.is_blank(id(3)));
        let task = store
            .engine
            .load(device.rows(&[id(2), id(3)]), None)
            .unwrap();
        assert!(is_over(&store, &task), "there is nothing to wait for");
        assert_eq!(outcome(&store, &task).len(), 2);
    }
}

#[test]
fn in_a_load_larger_than_the_arena_too() {
    for first in [1, 30] {
        let fixture = Fixture {
            slots: 4,
            ..Fixture::default()
        };
        let (_dir, store) = stored(&fixture, &ids(40));
        damage(&store, id(first));
        damage(&store, id(35));
        let device = Device::blank(&fixture, &ids(40));
        let task = store.engine.load(device.rows(&ids(40)), None).unwrap();
        let failed = outcome(&store, &task);
        assert_eq!(failed[0], (usize::from(first), ErrorKind::Corrupt));
        assert!((0..first).all(|n| device.is_right(id(n))));
        slots_come_back(&store);
    }
}

#[test]
fn what_is_given_up_takes_no_slot_from_others() {
    let fixture = Fixture { slots: 4, ..wide() };
    let (_dir, store) = stored(&fixture, &ids(20));
    damage(&store, id(1));
    let (before, bad) = (hang(&store, &[id(0)]), hang(&store, &[id(1)]));
    let behind = hang(&store, &[id(2), id(3)]);
    let device = Device::blank(&fixture, &ids(20));
    let task = store.engine.load(device.rows(&ids(20)), None).unwrap();
    eventually("every slot is taken", || store.stat("loads_queued") == 16);
    bad.open();
    eventually("nothing waits for a slot", || {
        store.stat("loads_queued") == 0
    });
    assert!(!is_over(&store, &task));
    let other = Device::blank(&fixture, &[id(19)]);
    store.load(&other, &[id(19)]).unwrap();
    assert!(other.is_right(id(19)));
    before.open();
    assert_eq!(outcome(&store, &task)[0], (1, ErrorKind::Corrupt));
    assert!(device.is_right(id(0)));
    behind.open();
    slots_come_back(&store);
}

#[test]
fn the_deadline_ends_those_before_it_as_well() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = Store::with_clock(dir.path(), wide(), Arc::clone(&clock) as Arc<dyn Clock>);
    fill(&store, &ids(3));
    damage(&store, id(1));
    let (before, behind) = (hang(&store, &[id(0)]), hang(&store, &[id(2)]));
    let device = Device::blank(&store.fixture, &ids(3));
    let two = Duration::from_secs(2);
    let task = store.engine.load(device.rows(&ids(3)), Some(two)).unwrap();
    await_failures(&task, 1);
    assert!(!is_over(&store, &task));
    clock.advance(two);
    assert_eq!(
        outcome(&store, &task),
        [
            (0, ErrorKind::Timeout),
            (1, ErrorKind::Corrupt),
            (2, ErrorKind::Busy)
        ]
    );
    before.open();
    behind.open();
    slots_come_back(&store);
    assert!(ids(3).iter().all(|&block| device.is_blank(block)));
}

#[test]
fn the_end_of_the_store_ends_those_before_it_as_well() {
    let fixture = Fixture {
        deadlines: Deadlines {
            shutdown: Duration::ZERO,
            ..Fixture::default().deadlines
        },
        ..wide()
    };
    let (_dir, store) = stored(&fixture, &ids(2));
    damage(&store, id(1));
    let gate = hang(&store, &[id(0)]);
    let device = Device::blank(&fixture, &ids(2));
    let task = store.engine.load(device.rows(&ids(2)), None).unwrap();
    await_failures(&task, 1);
    store.engine.close();
    assert!(is_over(&store, &task));
    assert_eq!(
        outcome(&store, &task),
        [(0, ErrorKind::Closed), (1, ErrorKind::Corrupt)]
    );
    gate.open();
}

#[test]
fn a_copy_to_the_device_that_fails_is_a_failure_like_any_other() {
    only_over!(NothingKept, "a memory brings them all at once");
    let (dir, slow) = (directory(), SlowDevice::failing(1));
    fill(&Store::open(dir.path(), wide()), &ids(3));
    let fixture = Fixture {
        device: Some(Arc::clone(&slow)),
        ..wide()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let (before, behind) = (hang(&store, &[id(0)]), hang(&store, &[id(2)]));
    let device = Device::blank(&fixture, &ids(3));
    let task = store.engine.load(device.rows(&ids(3)), None).unwrap();
    slow.await_hanging(1);
    slow.go();
    await_failures(&task, 1);
    assert!(!is_over(&store, &task));
    before.open();
    assert_eq!(
        outcome(&store, &task),
        [(1, ErrorKind::Internal), (2, ErrorKind::Busy)]
    );
    assert!(device.is_right(id(0)));
    behind.open();
    slots_come_back(&store);
    assert!(device.is_blank(id(1)) && device.is_blank(id(2)));
}

#[test]
fn an_absent_block_is_a_failure_like_any_other() {
    let (_dir, store) = stored(&wide(), &ids(1));
    let gate = hang(&store, &ids(1));
    let device = Device::blank(&store.fixture, &ids(2));
    let task = store.engine.load(device.rows(&ids(2)), None).unwrap();
    await_failures(&task, 1);
    assert!(!is_over(&store, &task));
    gate.open();
    assert_eq!(outcome(&store, &task), [(1, ErrorKind::NotFound)]);
    assert!(device.is_right(id(0)));
}
