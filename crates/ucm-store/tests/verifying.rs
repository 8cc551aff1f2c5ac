//! Loads that end in the verified slot: read, joined, verified and ended as any other, with nothing
//! copied anywhere.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, limits};
use ucm_infra::{Clock, ManualClock};
use ucm_store::engine::Until;
use ucm_testkit::{Gate, OpKind};

use crate::common::{
    Device, Fixture, Store, directory, eventually, id, ids, media, of_records, on, only_over,
};

fn verify(store: &Store, blocks: &[BlockId]) -> Result<(), Vec<(usize, ucm_core::Error)>> {
    store.outcome(&store.engine.verify(blocks, None).unwrap())
}

#[test]
fn sound_blocks_are_verified_and_none_is_delivered() {
    for medium in media() {
        let (dir, fixture) = (directory(), on(medium));
        let store = Store::open(dir.path(), fixture.clone());
        store
            .dump(&Device::filled(&fixture, &ids(9)), &ids(9))
            .unwrap();
        verify(&store, &ids(9)).unwrap();
        verify(&store, &[]).unwrap();
        // Each block once, also where a caller names it twice.
        verify(&store, &[id(3), id(4), id(3)]).unwrap();
        assert_eq!(store.stat("blocks_verified"), 11);
        assert_eq!(
            (store.stat("blocks_loaded"), store.stat("bytes_loaded")),
            (0, 0)
        );
        eventually("the slots come back", || {
            store.stat("slots_free") == store.stat("slots")
        });
        let target = Device::blank(&fixture, &ids(9));
        store.load(&target, &ids(9)).unwrap();
        assert!(ids(9).iter().all(|&id| target.is_right(id)));
        assert_eq!(
            (store.stat("blocks_loaded"), store.stat("blocks_verified")),
            (9, 11)
        );
    }
}

#[test]
fn more_blocks_than_slots_are_verified() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    for some in ids(40).chunks(8) {
        store.dump(&Device::filled(&fixture, some), some).unwrap();
    }
    assert!(store.stat("slots") < 40);
    verify(&store, &ids(40)).unwrap();
    assert_eq!(store.stat("blocks_verified"), 40);
}

#[test]
fn what_a_load_would_refuse_is_refused() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(3));
    store.dump(&device, &ids(3)).unwrap();
    // The last byte of the last layer: all of the record is read and verified.
    let content = fixture.tensors.iter().sum::<u64>() as usize;
    let last = crate::common::shape(&fixture)
        .1
        .layer_data(fixture.layers - 1)
        .start
        + content
        - 1;
    store.edit(id(1), |bytes| bytes[last] ^= 1);
    let failed = verify(&store, &ids(3)).unwrap_err();
    assert_eq!((failed[0].0, failed[0].1.kind()), (1, ErrorKind::Corrupt));
    assert_eq!(
        (store.missed("bad_checksum"), store.stat("second_reads")),
        (1, 1)
    );
    assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [true, false, true]);
    store.dump(&device, &ids(3)).unwrap();
    assert_eq!(store.stat("records_replaced"), 1);
    verify(&store, &ids(3)).unwrap();
}

#[test]
fn an_absent_block_is_no_record() {
    for medium in media() {
        let (dir, fixture) = (directory(), on(medium));
        let store = Store::open(dir.path(), fixture);
        let failed = verify(&store, &ids(1)).unwrap_err();
        assert_eq!((failed.len(), failed[0].1.kind()), (1, ErrorKind::NotFound));
        assert_eq!(store.stat("blocks_failed"), 1);
    }
}

#[test]
fn it_is_over_at_its_deadline() {
    only_over!(OneMedium, "a memory has what is verified");
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
    store.fault(of_records(
        OpKind::Read,
        ucm_testkit::Fault::HangAfter(gate.clone()),
    ));
    let task = store
        .engine
        .verify(&ids(3), Some(Duration::from_secs(2)))
        .unwrap();
    gate.await_waiting(1);
    assert!(!task.check(store.engine.clock(), Until::Published));
    clock.advance(Duration::from_secs(2));
    let failures = store.outcome(&task).unwrap_err();
    assert_eq!(failures.len(), 3);
    assert!(
        failures
            .iter()
            .all(|(_, error)| error.kind() == ErrorKind::Timeout)
    );
    gate.open();
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

#[test]
fn it_shares_a_read_with_a_load() {
    only_over!(FilesAlone, "it counts the reads of a block file");
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let gate = store.hang(OpKind::Read);
    let device = Device::blank(&fixture, &ids(1));
    let first = store.engine.verify(&ids(1), None).unwrap();
    let second = store.engine.load(device.rows(&ids(1)), None).unwrap();
    gate.open();
    store.outcome(&first).unwrap();
    store.outcome(&second).unwrap();
    assert!(device.is_right(id(0)));
    assert_eq!(
        (store.asked(OpKind::Read, id(0)), store.stat("loads_joined")),
        (1, 1)
    );
    assert_eq!(
        (store.stat("blocks_verified"), store.stat("blocks_loaded")),
        (1, 1)
    );
}

#[test]
fn what_cannot_be_asked_for_is_an_error() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let kind = |blocks: &[BlockId]| {
        store
            .engine
            .verify(blocks, None)
            .err()
            .map(|error| error.kind())
    };
    assert_eq!(
        kind(&vec![id(0); limits::MAX_IDS_PER_CALL + 1]),
        Some(ErrorKind::InvalidInput)
    );
    store.engine.close();
    assert_eq!(kind(&ids(1)), Some(ErrorKind::Closed));
    let looks = Fixture {
        lookup_only: true,
        ..fixture
    };
    let other = Store::open(dir.path(), looks);
    let refused = other.engine.verify(&ids(1), None).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
}
