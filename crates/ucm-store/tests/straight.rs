//! A thread that gathered a block writes it too, but one thread always gathers on: what a device waits for is no medium.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use std::time::Duration;

use ucm_core::ErrorKind;
use ucm_store::engine::{Deadlines, Until};

use common::{Device, Layout, Setup, Store, directory, ended, eventually, failed_as, ids, manual};

/// One thread of the tier for writes, and two that copy.
fn two_that_copy() -> Setup {
    Setup {
        slots: 32,
        workers: 2,
        copy_threads: 2,
        ..Setup::default()
    }
}

#[test]
fn who_gathered_a_block_writes_it() {
    let (dir, setup) = (directory(), two_that_copy());
    let store = Store::open(dir.path(), setup.clone());
    let gate = store.hang(Layout::of_this_run().writing());
    let blocks = ids(8);
    let device = Device::filled(&setup, &blocks);
    let task = store.engine.dump(device.rows(&blocks)).unwrap();
    // The tier has one thread for writes; the other one is a thread that gathers.
    gate.await_waiting(2);
    assert!(
        task.wait(store.engine.clock(), Until::Staged, None),
        "the other thread gathers on"
    );
    gate.open();
    store.outcome(&task).unwrap();
    let target = Device::blank(&setup, &blocks);
    store.load(&target, &blocks).unwrap();
    assert!(blocks.iter().all(|&block| target.is_right(block)));
}

#[test]
fn a_writing_that_hangs_is_the_tiers_and_gathering_goes_on() {
    let setup = two_that_copy();
    let (_dir, store, clock) = manual(&setup);
    let gate = store.hang(Layout::of_this_run().writing());
    let device = Device::filled(&setup, &ids(12));
    let first = store.engine.dump(device.rows(&ids(6))).unwrap();
    gate.await_waiting(2);
    assert!(first.wait(store.engine.clock(), Until::Staged, None));
    clock.advance(Deadlines::default().dump + Duration::from_secs(1));
    eventually("the dump is given up", || ended(&store, &first));
    assert!(failed_as(&first, ErrorKind::Timeout));
    eventually("both are lost", || store.stat("workers_stuck") == 2);
    assert_eq!(store.stat("blocks_in_flight"), 0);
    gate.open();
    eventually("they come back", || {
        store.stat("workers_stuck") == 0 && store.stat("slots_free") == store.stat("slots")
    });
    clock.advance(Duration::from_secs(60));
    eventually("blocks are stored again", || {
        clock.advance(Duration::from_secs(1));
        store.dump(&device, &ids(12)).is_ok()
    });
}

#[test]
fn somebody_who_waits_waits_for_what_is_parked_and_not_for_the_age_of_a_segment() {
    let (dir, setup) = (directory(), two_that_copy());
    let store = Store::open(dir.path(), setup.clone());
    let gate = store.hang(Layout::of_this_run().writing());
    let blocks = ids(16);
    let device = Device::filled(&setup, &blocks);
    let task = store.engine.dump(device.rows(&blocks)).unwrap();
    gate.await_waiting(2);
    assert!(task.wait(store.engine.clock(), Until::Staged, None));
    // It waits before the medium has all of it; what comes after is published for it all the same.
    task.flush_soon();
    gate.open();
    store.outcome(&task).unwrap();
    assert_eq!(store.stat("blocks_published"), 16);
}
