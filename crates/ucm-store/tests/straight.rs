//! A thread that gathered a block writes it too, but one thread always gathers on: what a device
//! waits for is no medium.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock};
use ucm_media::segment::SegmentConfig;
use ucm_store::engine::{Deadlines, Until};

use crate::common::shared::LONG;
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, ids};

/// One thread of the tier for writes, and two that copy.
fn two_that_copy() -> Fixture {
    Fixture {
        slots: 32,
        workers: 2,
        copy_threads: 2,
        ..Fixture::default()
    }
}

#[test]
fn the_thread_that_gathered_a_block_writes_it() {
    let (dir, fixture) = (directory(), two_that_copy());
    let store = Store::open(dir.path(), fixture.clone());
    let gate = store.hang(Layout::of_this_run().writing());
    let blocks = ids(8);
    let device = Device::filled(&fixture, &blocks);
    let task = store.engine.dump(device.rows(&blocks)).unwrap();
    // The tier has one thread for writes; the other one is a thread that gathers.
    gate.await_waiting(2);
    assert!(
        task.wait(store.engine.clock(), Until::Staged, None),
        "the other thread gathers on"
    );
    gate.open();
    store.outcome(&task).unwrap();
    let target = Device::blank(&fixture, &blocks);
    store.load(&target, &blocks).unwrap();
    assert!(blocks.iter().all(|&block| target.is_right(block)));
}

#[test]
fn a_writing_that_hangs_is_the_tiers_and_gathering_goes_on() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), two_that_copy());
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    let gate = store.hang(Layout::of_this_run().writing());
    let device = Device::filled(&fixture, &ids(12));
    let first = store.engine.dump(device.rows(&ids(6))).unwrap();
    gate.await_waiting(2);
    assert!(first.wait(store.engine.clock(), Until::Staged, None));
    clock.advance(Deadlines::default().dump + Duration::from_secs(1));
    eventually("the dump is given up", || {
        first.check(store.engine.clock(), Until::Published)
    });
    let failures = first.failures();
    assert_eq!(failures.len(), 6);
    assert!(
        failures
            .iter()
            .all(|(_, error)| error.kind() == ErrorKind::Timeout)
    );
    eventually("both are lost", || store.stat("workers_stuck") == 2);
    assert_eq!(store.stat("blocks_in_flight"), 0);
    gate.open();
    store.faults.clear();
    eventually("they come back", || {
        store.stat("workers_stuck") == 0 && store.stat("slots_free") == store.stat("slots")
    });
    eventually("blocks are stored again", || {
        clock.advance(Duration::from_secs(1));
        store.dump(&device, &ids(12)).is_ok()
    });
}

#[test]
fn a_wait_for_blocks_ends_when_the_medium_has_them_and_waits_for_no_age() {
    let dir = directory();
    let fixture = Fixture {
        layout: Layout::Segment(SegmentConfig {
            age: LONG,
            ..SegmentConfig::default()
        }),
        ..two_that_copy()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let gate = store.hang(fixture.layout.writing());
    let blocks = ids(16);
    let device = Device::filled(&fixture, &blocks);
    let task = store.engine.dump(device.rows(&blocks)).unwrap();
    gate.await_waiting(2);
    assert!(task.wait(store.engine.clock(), Until::Staged, None));
    std::thread::scope(|scope| {
        // before the medium has all of it
        let waits = scope.spawn(|| store.outcome(&task).unwrap());
        gate.open();
        waits.join().unwrap();
    });
    assert_eq!(store.stat("blocks_published"), 16);
}
