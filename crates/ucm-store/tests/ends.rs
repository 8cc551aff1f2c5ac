//! Every task ends, exactly once and with the right word, whatever hangs: copies, reads, writes, or
//! the end of the store.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, ManualClock};
use ucm_store::engine::{Deadlines, Task, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::{
    Device, Fixture, Layout, SlowDevice, Store, directory, eventually, id, ids, media, on,
    only_over,
};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn ended(store: &Store, task: &Task) -> bool {
    task.check(store.engine.clock(), Until::Published)
}

fn failed_as(task: &Task, kind: ErrorKind) -> bool {
    let failures = task.failures();
    !failures.is_empty() && failures.iter().all(|(_, error)| error.kind() == kind)
}

/// A store on a clock moved by hand, whose end waits for nothing.
fn manual(fixture: &Fixture) -> (tempfile::TempDir, Store, Arc<ManualClock>) {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    (dir, store, clock)
}

fn small() -> Fixture {
    Fixture {
        slots: 4,
        deadlines: Deadlines {
            shutdown: Duration::ZERO,
            ..Fixture::default().deadlines
        },
        ..Fixture::default()
    }
}

#[test]
fn closing_waits_for_every_step_of_what_is_under_way() {
    only_over!(
        FilesUnkept,
        "it goes by the steps in which a block file is looked for, read and made"
    );
    let dir = directory();
    // However long this test is kept from opening the gate.
    let fixture = Fixture {
        deadlines: Deadlines {
            load: MINUTE,
            shutdown: MINUTE,
            ..Fixture::default().deadlines
        },
        ..Fixture::default()
    };
    let device = Device::filled(&fixture, &ids(41));
    Store::open(dir.path(), fixture.clone())
        .dump(&device, &[id(0)])
        .unwrap();
    // Again and again, because the end of the store and the next step of each task meet somewhere
    // else each time.
    for n in 1..=40 {
        let store = Store::open(dir.path(), fixture.clone());
        let blank = Device::blank(&fixture, &[id(0)]);
        // The first of two operations each: the look before a publication, the read before a copy
        // to the device.
        let gate = Gate::new();
        for kind in [OpKind::Stat, OpKind::Read] {
            store.fault(Rule::on(kind, Fault::HangBefore(gate.clone())));
        }
        let dump = store.engine.dump(device.rows(&[id(n)])).unwrap();
        let load = store.engine.load(blank.rows(&[id(0)]), None).unwrap();
        gate.await_waiting(2);
        std::thread::scope(|scope| {
            scope.spawn(|| store.engine.close());
            eventually("it is being closed", || store.engine.lookup(&[]).is_err());
            gate.open();
        });
        store.outcome(&dump).unwrap();
        store.outcome(&load).unwrap();
        assert!(blank.is_right(id(0)) && store.file(id(n)).is_file());
    }
}

#[test]
fn closing_ends_loads_that_never_got_a_slot() {
    only_over!(
        Files,
        "an index knows, without any read, that a block is not stored"
    );
    let (_dir, store, _clock) = manual(&small());
    let gate = store.hang(OpKind::Read);
    let device = Device::blank(&store.fixture, &ids(30));
    let tasks = [ids(10), ids(30)[10..30].to_vec()]
        .map(|ids| store.engine.load(device.rows(&ids), None).unwrap());
    gate.await_waiting(4);
    store.engine.close();
    for task in &tasks {
        assert!(ended(&store, task) && failed_as(task, ErrorKind::Closed));
    }
    assert_eq!(tasks[0].failures().len() + tasks[1].failures().len(), 30);
    gate.open();
    assert!(ids(30).iter().all(|&id| device.is_blank(id)));
}

#[test]
fn closing_ends_dumps_that_hang_and_frees_incomplete_blocks() {
    let fixture = Fixture {
        layers_per_shard: 1,
        ..small()
    };
    let (_dir, store, _clock) = manual(&fixture);
    let gate = store.hang(Layout::of_this_run().writing());
    let device = Device::filled(&fixture, &ids(2));
    let half = store.engine.dump(vec![device.row(id(1), 0)]).unwrap();
    store.outcome(&half).unwrap();
    let hung = store.engine.dump(device.rows(&ids(1))).unwrap();
    gate.await_waiting(1);
    store.engine.close();
    assert!(ended(&store, &hung) && failed_as(&hung, ErrorKind::Closed));
    assert_eq!(store.stat("blocks_in_flight"), 0);
    gate.open();
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

#[test]
fn a_copy_that_hangs_costs_its_dump_and_no_other_of_the_same_block() {
    let slow = SlowDevice::new(1);
    let fixture = Fixture {
        device: Some(Arc::clone(&slow)),
        ..Fixture::default()
    };
    let (_dir, store, clock) = manual(&fixture);
    let device = Device::filled(&fixture, &ids(1));
    let stuck = store.engine.dump(device.rows(&ids(1))).unwrap();
    slow.await_hanging(1);
    clock.advance(Deadlines::default().dump);
    eventually("the dump is given up", || ended(&store, &stuck));
    assert!(failed_as(&stuck, ErrorKind::Timeout));
    assert!(stuck.check(store.engine.clock(), Until::Staged));
    assert_eq!(store.stat("blocks_in_flight"), 0);
    // Another dump of the block, now with the backend when the first copy comes back.
    let gate = store.hang(Layout::of_this_run().writing());
    let second = store.engine.dump(device.rows(&ids(1))).unwrap();
    gate.await_waiting(1);
    assert_eq!(
        store.stat("slots") - store.stat("slots_free"),
        2,
        "one is quarantined"
    );
    slow.go();
    eventually("the first slot comes back", || {
        store.stat("slots") - store.stat("slots_free") == 1
    });
    assert_eq!(
        store.stat("blocks_in_flight"),
        1,
        "the second is still the block's own"
    );
    let third = store.engine.dump(device.rows(&ids(1))).unwrap();
    gate.open();
    store.outcome(&second).unwrap();
    store.outcome(&third).unwrap();
    assert_eq!(store.stat("blocks_published"), 1);
    let target = Device::blank(&fixture, &ids(1));
    store.load(&target, &ids(1)).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn a_dump_behind_a_copy_that_hangs_ends_too() {
    for medium in media() {
        let slow = SlowDevice::new(1);
        let fixture = Fixture {
            medium,
            layers_per_shard: 1,
            copy_threads: 2,
            device: Some(Arc::clone(&slow)),
            ..Fixture::default()
        };
        let (_dir, store, clock) = manual(&fixture);
        let device = Device::filled(&fixture, &ids(1));
        let first = store.engine.dump(vec![device.row(id(0), 0)]).unwrap();
        slow.await_hanging(1);
        clock.advance(SECOND);
        let second = store
            .engine
            .dump(vec![device.row(id(0), 1), device.row(id(0), 2)])
            .unwrap();
        clock.advance(Deadlines::default().dump - SECOND);
        eventually("the first is given up", || ended(&store, &first));
        slow.go();
        eventually("the second ends, although it has time left", || {
            ended(&store, &second)
        });
        assert!(failed_as(&second, ErrorKind::Timeout));
        eventually("the slots come back", || {
            store.stat("slots_free") == store.stat("slots")
        });
        store.dump(&device, &ids(1)).unwrap();
    }
}

#[test]
fn a_dump_for_which_the_queue_of_copies_has_no_place_is_refused_and_changes_nothing() {
    for medium in media() {
        let slow = SlowDevice::new(1);
        let fixture = Fixture {
            medium,
            slots: 4,
            device: Some(Arc::clone(&slow)),
            ..Fixture::default()
        };
        let dir = directory();
        let store = Store::open(dir.path(), fixture.clone());
        let device = Device::filled(&fixture, &ids(2));
        let dump = |ids: &[BlockId]| store.engine.dump(device.rows(ids));
        let mut tasks = vec![dump(&ids(1)).unwrap()];
        slow.await_hanging(1);
        let refused = loop {
            match dump(&ids(1)) {
                Ok(task) => tasks.push(task),
                Err(error) => break error,
            }
            assert!(tasks.len() < 1000, "the queue has no end");
        };
        assert_eq!(refused.kind(), ErrorKind::Busy);
        assert_eq!(dump(&[id(1)]).err().unwrap().kind(), ErrorKind::Busy);
        assert_eq!(
            (store.stat("slots_free"), store.stat("blocks_in_flight")),
            (3, 1)
        );
        slow.go();
        for task in &tasks {
            store.outcome(task).unwrap();
        }
        assert_eq!(store.stat("blocks_published"), 1);
        store.dump(&device, &[id(1)]).unwrap();
    }
}

#[test]
fn a_load_that_joined_a_late_read_has_its_own_time() {
    only_over!(NothingKept, "a memory has what it loads");
    let fixture = Fixture::default();
    let (_dir, store, clock) = manual(&fixture);
    store
        .dump(&Device::filled(&fixture, &ids(2)), &ids(2))
        .unwrap();
    let gate = Gate::new();
    // Neighbours in a segment are one read; they lie in two if the first was sealed before the
    // second was there.
    let reads = match fixture.layout {
        Layout::File => 2,
        Layout::Segment(_) => store.segments().len(),
    };
    let hang = Rule::on(OpKind::Read, Fault::HangBefore(gate.clone()));
    store.fault(hang.lane(0).times(reads as u64));
    let (one, other) = (
        Device::blank(&fixture, &ids(2)),
        Device::blank(&fixture, &ids(1)),
    );
    let hasty = store.engine.load(one.rows(&ids(2)), Some(SECOND)).unwrap();
    gate.await_waiting(reads);
    let patient = store
        .engine
        .load(other.rows(&ids(1)), Some(9 * SECOND))
        .unwrap();
    clock.advance(SECOND);
    eventually("the first is late", || ended(&store, &hasty));
    assert!(ended(&store, &hasty), "looking twice counts once");
    assert!(failed_as(&hasty, ErrorKind::Timeout));
    assert!((1..=2).contains(&store.missed("timeout")));
    store.outcome(&patient).unwrap();
    assert!(other.is_right(id(0)));
    gate.open();
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
    assert!(ids(2).iter().all(|&id| one.is_blank(id)));
}

#[test]
fn a_load_whose_copy_to_the_device_hangs_is_not_reported_before_it_returns() {
    for medium in media() {
        let dir = directory();
        let writer = Store::open(dir.path(), on(medium));
        writer
            .dump(&Device::filled(&writer.fixture, &ids(1)), &ids(1))
            .unwrap();
        let (clock, slow) = (ManualClock::new(), SlowDevice::new(1));
        let fixture = Fixture {
            medium,
            device: Some(Arc::clone(&slow)),
            ..Fixture::default()
        };
        let store = Store::with_clock(
            dir.path(),
            fixture.clone(),
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        let target = Device::blank(&fixture, &ids(1));
        let task = store
            .engine
            .load(target.rows(&ids(1)), Some(SECOND))
            .unwrap();
        slow.await_hanging(1);
        clock.advance(SECOND);
        assert!(!ended(&store, &task), "device memory may still be written");
        slow.go();
        eventually("the load ends with its copy", || ended(&store, &task));
        assert!(task.failures().is_empty() && target.is_right(id(0)));
    }
}

#[test]
fn nothing_to_move_is_done_at_once_and_one_bad_row_names_itself() {
    only_over!(
        Files,
        "it goes by the words for a block file that is not there"
    );
    let (_dir, store, _clock) = manual(&Fixture::default());
    for task in [
        store.engine.load(Vec::new(), None),
        store.engine.dump(Vec::new()),
    ] {
        assert!(ended(&store, &task.unwrap()));
    }
    assert!(store.engine.lookup(&[]).unwrap().is_empty());
    store
        .dump(&Device::filled(&store.fixture, &ids(1)), &ids(1))
        .unwrap();
    let target = Device::blank(&store.fixture, &ids(2));
    let failures = store.load(&target, &ids(2)).unwrap_err();
    let (row, text) = (failures[0].0, failures[0].1.to_string());
    assert!(failures.len() == 1 && row == 1, "{failures:?}");
    assert!(text.contains("read the file"), "{text}");
}

#[test]
fn a_huge_load_never_fills_the_queues_of_the_backend() {
    only_over!(
        FilesUnkept,
        "it counts what a directory of files is asked for"
    );
    let slow = SlowDevice::new(4);
    let fixture = Fixture {
        slots: 1200,
        device: Some(Arc::clone(&slow)),
        ..Fixture::default()
    };
    let dir = directory();
    let writer = Store::open(dir.path(), Fixture::default());
    let many: Vec<BlockId> = (0..1100u64)
        .map(|n| {
            BlockId(std::array::from_fn(|i| {
                (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (i % 8 * 8)) as u8
            }))
        })
        .collect();
    // All of them are there: a block that is not would end the load before the others are read.
    let source = Device::filled(&fixture, &many);
    for some in many.chunks(4) {
        writer.dump(&source, some).unwrap();
    }
    let store = Store::open(dir.path(), fixture.clone());
    let target = Device::blank(&fixture, &many);
    let task = store
        .engine
        .load(target.rows(&many), Some(Duration::from_secs(120)))
        .unwrap();
    slow.await_hanging(4); // every worker copies to the device
    let waiting = many.len() as u64 - 1024;
    eventually("as many are read as may be at once", || {
        store.stat("loads_queued") <= waiting
    });
    let queued = store.stat("loads_queued");
    assert!(queued >= waiting - 4, "and those being copied: {queued}");
    slow.go();
    store.outcome(&task).unwrap();
    assert!(target.equals(&source));
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
    assert_eq!(store.stat("loads_queued"), 0);
}
