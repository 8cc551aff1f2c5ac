//! Loads of blocks in shards: each layer is verified and goes to the device when its bytes have
//! arrived, and the task says so.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::time::Duration;

use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, ManualClock, MonotonicTime};
use ucm_store::engine::{Task, Until};
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::segments::{change, is_over};
use crate::common::{
    Above, Device, Fixture, Layout, SlowDevice, Store, content, directory, eventually, id, ids,
};

/// Bytes of a layer, and layers of a block. An operation brings four layers, the first one the
/// header too.
const LAYER: usize = 64 << 10;
const LAYERS: usize = 16;
const STEP: usize = 4;

const LAYOUTS: [fn() -> Layout; 2] = [|| Layout::File, Layout::segments];

fn fixture(layout: Layout) -> Fixture {
    Fixture {
        tensors: vec![LAYER as u64],
        layers: LAYERS as u32,
        layers_per_shard: 1,
        above: Above::Nothing,
        layout,
        ..Fixture::default()
    }
}

/// A store with blocks on its medium.
fn stored(
    fixture: &Fixture,
    blocks: &[BlockId],
    clock: &std::sync::Arc<ManualClock>,
) -> (tempfile::TempDir, Store) {
    let dir = directory();
    let store = Store::with_clock(&dir.path().join("root"), fixture.clone(), clock.clone());
    for &block in blocks {
        store
            .dump(&Device::filled(fixture, &[block]), &[block])
            .unwrap();
        store.forget(block);
    }
    (dir, store)
}

fn begin(
    store: &Store,
    device: &Device,
    blocks: &[BlockId],
    shards: std::ops::Range<usize>,
) -> Task {
    let rows = blocks.iter().flat_map(|&block| {
        shards
            .clone()
            .map(move |shard| device.row(block, shard as u32))
    });
    store.engine.load(rows.collect(), None).unwrap()
}

/// The operation that brings these layers hangs, the first time that it is asked for.
fn hang(store: &Store, step: u64) -> Gate {
    let gate = store.gate();
    let hang = Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())).lane(0);
    store.fault(hang.nth(step));
    gate
}

/// The rows that have arrived.
fn done(task: &Task, rows: usize) -> Vec<usize> {
    (0..rows).filter(|&row| task.shard_done(row)).collect()
}

fn first(layers: usize) -> Vec<usize> {
    (0..layers).collect()
}

/// Whether the device has these layers of a block, and nothing else of it.
fn holds(device: &mut Device, fixture: &Fixture, block: BlockId, layers: &[usize]) -> bool {
    let mut expected = vec![0xee; LAYER * LAYERS];
    for &layer in layers {
        let range = LAYER * layer..LAYER * (layer + 1);
        expected[range.clone()].copy_from_slice(&content(fixture, block)[range]);
    }
    let mut same = false;
    device.change(block, |bytes| same = *bytes == expected);
    same
}

/// Damages a byte of a layer where it lies.
fn damage(store: &Store, block: BlockId, layer: usize) {
    store.edit(block, |record| record[4096 + layer * LAYER + 77] ^= 1);
}

fn slots_come_back(store: &Store) {
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

fn kinds(failed: &[(usize, ucm_core::Error)]) -> Vec<(usize, ErrorKind)> {
    failed
        .iter()
        .map(|(row, error)| (*row, error.kind()))
        .collect()
}

#[test]
fn layers_arrive_before_the_rest_of_their_block() {
    for layout in LAYOUTS {
        let fixture = fixture(layout());
        let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
        let gates = [hang(&store, 2), hang(&store, 2), hang(&store, 2)];
        let mut device = Device::blank(&fixture, &ids(1));
        let task = begin(&store, &device, &ids(1), 0..LAYERS);
        let clock = store.engine.clock();
        for (step, gate) in (1..).zip(&gates) {
            gate.await_waiting(1);
            assert_eq!(done(&task, LAYERS), first(step * STEP));
            assert!(holds(&mut device, &fixture, id(0), &first(step * STEP)));
            assert!(task.wait_shard(clock, step * STEP - 1, None));
            assert!(!task.wait_shard(clock, step * STEP, Some(MonotonicTime(0))));
            assert!(!is_over(&store, &task));
            gate.open();
        }
        assert!(task.wait_shard(clock, LAYERS - 1, None));
        store.outcome(&task).unwrap();
        assert!(device.is_right(id(0)));
        assert_eq!(done(&task, LAYERS + 1), first(LAYERS));
        let read = (LAYERS * LAYER) as u64;
        assert_eq!(
            (store.stat("blocks_loaded"), store.stat("bytes_loaded")),
            (1, read)
        );
        assert_eq!(task.served()[..4], [1, 0, 0, 0]);
        slots_come_back(&store);
    }
}

#[test]
fn a_bad_layer_after_reported_ones_fails_the_block() {
    for layout in LAYOUTS {
        let fixture = fixture(layout());
        let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
        damage(&store, id(0), LAYERS - 1);
        let mut device = Device::blank(&fixture, &ids(1));
        let task = begin(&store, &device, &ids(1), 0..LAYERS);
        let failed = store.outcome(&task).unwrap_err();
        assert_eq!(
            kinds(&failed),
            first(LAYERS)
                .into_iter()
                .map(|row| (row, ErrorKind::Corrupt))
                .collect::<Vec<_>>()
        );
        assert_eq!(done(&task, LAYERS), first(LAYERS - STEP));
        assert!(
            task.wait_shard(store.engine.clock(), 0, None),
            "what has arrived stays"
        );
        assert!(!task.wait_shard(store.engine.clock(), LAYERS - 1, None));
        assert!(holds(&mut device, &fixture, id(0), &first(LAYERS - STEP)));
        assert_eq!(
            (store.stat("second_reads"), store.stat("records_refused")),
            (1, 1)
        );
        assert_eq!(
            (store.stat("blocks_loaded"), store.stat("blocks_failed")),
            (0, 1)
        );
        assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    }
}

#[test]
fn damage_on_the_way_is_read_again_and_the_rest_arrives() {
    for layout in LAYOUTS {
        let fixture = fixture(layout());
        let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
        store.fault(Rule::on(OpKind::Read, Fault::Flip(vec![5])).lane(0).nth(3));
        let device = Device::blank(&fixture, &ids(1));
        let task = begin(&store, &device, &ids(1), 0..LAYERS);
        store.outcome(&task).unwrap();
        assert!(device.is_right(id(0)));
        assert_eq!(
            (store.stat("second_reads"), store.stat("records_refused")),
            (1, 0)
        );
    }
}

/// A record of the same block with other bytes, as another engine's numerics would make them.
fn another(fixture: &Fixture, block: BlockId) -> Vec<u8> {
    let (_dir, store) = stored(fixture, &[], &ManualClock::new());
    let mut device = Device::filled(fixture, &[block]);
    device.change(block, |bytes| {
        bytes.iter_mut().for_each(|byte| *byte ^= 0x55)
    });
    store.dump(&device, &[block]).unwrap();
    let mut found = Vec::new();
    store.edit(block, |record| found.clone_from(record));
    found
}

#[test]
fn the_layers_of_a_block_do_not_come_from_two_records() {
    let fixture = fixture(Layout::File);
    let other = another(&fixture, id(0));
    let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
    let gate = hang(&store, 2);
    let mut device = Device::blank(&fixture, &ids(1));
    let task = begin(&store, &device, &ids(1), 0..LAYERS);
    gate.await_waiting(1);
    assert_eq!(done(&task, LAYERS), first(STEP));
    store.edit(id(0), |record| record.clone_from(&other)); // it is replaced during the load
    gate.open();
    let failed = store.outcome(&task).unwrap_err();
    assert!(
        failed.len() == LAYERS
            && failed
                .iter()
                .all(|(_, error)| error.kind() == ErrorKind::Busy)
    );
    assert_eq!(
        (store.missed("busy"), store.stat("records_refused")),
        (1, 0)
    );
    assert!(holds(&mut device, &fixture, id(0), &first(STEP)));
    // It is sound, and the next load has all of it.
    let mut device = Device::blank(&fixture, &ids(1));
    store
        .outcome(&begin(&store, &device, &ids(1), 0..LAYERS))
        .unwrap();
    let right: Vec<u8> = content(&fixture, id(0))
        .iter()
        .map(|byte| byte ^ 0x55)
        .collect();
    device.change(id(0), |bytes| assert!(*bytes == right));
    slots_come_back(&store);
}

#[test]
fn a_read_that_hangs_leaves_nothing_scattering_and_ends_with_its_block() {
    for layout in LAYOUTS {
        let (fixture, clock) = (fixture(layout()), ManualClock::new());
        let (_dir, store) = stored(&fixture, &ids(1), &clock);
        let gate = hang(&store, 2);
        let mut device = Device::blank(&fixture, &ids(1));
        let task = begin(&store, &device, &ids(1), 0..LAYERS);
        gate.await_waiting(1);
        clock.advance(Duration::from_secs(100));
        eventually("it has ended while its read hangs", || {
            is_over(&store, &task)
        });
        let failed = store.outcome(&task).unwrap_err();
        assert!(
            failed.len() == LAYERS
                && failed
                    .iter()
                    .all(|(_, error)| error.kind() == ErrorKind::Timeout)
        );
        assert_eq!(
            (done(&task, LAYERS), store.missed("timeout")),
            (first(STEP), 1)
        );
        gate.open();
        slots_come_back(&store);
        assert!(
            holds(&mut device, &fixture, id(0), &first(STEP)),
            "no late bytes"
        );
    }
}

#[test]
fn what_joins_a_read_gets_its_layers_when_they_are_there() {
    for layout in LAYOUTS {
        let fixture = fixture(layout());
        let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
        let (second, last) = (hang(&store, 2), hang(&store, 3));
        let mut devices: Vec<_> = (0..4).map(|_| Device::blank(&fixture, &ids(1))).collect();
        let whole = begin(&store, &devices[0], &ids(1), 0..LAYERS);
        second.await_waiting(1);
        let begin = |n: usize, layer| begin(&store, &devices[n], &ids(1), layer..layer + 1);
        let (seen, next, end) = (begin(1, 1), begin(2, 6), begin(3, 15));
        eventually("they wait with it", || store.stat("loads_joined") == 3);
        second.open();
        last.await_waiting(1);
        for task in [&seen, &next] {
            store.outcome(task).unwrap();
        }
        assert!(!is_over(&store, &whole) && !is_over(&store, &end));
        last.open();
        for task in [&whole, &end] {
            store.outcome(task).unwrap();
        }
        let layers = [first(LAYERS), vec![1], vec![6], vec![15]];
        for (device, layers) in devices.iter_mut().zip(layers) {
            assert!(holds(device, &fixture, id(0), &layers));
        }
        assert_eq!(store.stat("blocks_loaded"), 4);
        slots_come_back(&store);
    }
}

#[test]
fn what_joins_and_has_more_time_gets_a_read_of_its_own() {
    for layout in LAYOUTS {
        let (fixture, clock) = (fixture(layout()), ManualClock::new());
        let (_dir, store) = stored(&fixture, &ids(1), &clock);
        let (second, third) = (hang(&store, 2), hang(&store, 2));
        let mut devices = [0, 1].map(|_| Device::blank(&fixture, &ids(1)));
        let load = |n: usize, seconds| {
            let rows: &Device = &devices[n];
            let time = Some(Duration::from_secs(seconds));
            store.engine.load(rows.rows(&ids(1)), time).unwrap()
        };
        let short = load(0, 1);
        second.await_waiting(1);
        let long = load(1, 100);
        eventually("it waits with it", || store.stat("loads_joined") == 1);
        second.open();
        third.await_waiting(1);
        assert_eq!(
            (done(&short, LAYERS), done(&long, LAYERS)),
            (first(2 * STEP), vec![])
        );
        clock.advance(Duration::from_secs(1));
        store.outcome(&short).unwrap_err();
        store.outcome(&long).unwrap();
        third.open();
        slots_come_back(&store);
        assert!(holds(&mut devices[0], &fixture, id(0), &first(2 * STEP)));
        assert!(devices[1].is_right(id(0)));
    }
}

#[test]
fn few_layers_of_a_file_are_read_by_themselves() {
    let fixture = fixture(Layout::File);
    let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
    damage(&store, id(0), 3);
    let mut device = Device::blank(&fixture, &ids(1));
    for (layer, loads) in [(9, true), (3, false)] {
        let task = begin(&store, &device, &ids(1), layer..layer + 1);
        assert_eq!(store.outcome(&task).is_ok(), loads);
    }
    assert!(holds(&mut device, &fixture, id(0), &[9]));
    assert_eq!(store.stat("records_refused"), 1);
}

#[test]
fn what_was_cancelled_gets_no_further_layers() {
    for layout in LAYOUTS {
        let fixture = fixture(layout());
        let (_dir, store) = stored(&fixture, &ids(2), &ManualClock::new());
        store.edit(id(0), |record| record[100] ^= 1);
        let (bad, good) = (store.gate(), store.gate());
        store.hang_record(id(0), &bad);
        let mut device = Device::blank(&fixture, &ids(2));
        let name = Rule::on(OpKind::Read, Fault::HangBefore(good.clone())).lane(0);
        store.fault(name.nth(2));
        let task = begin(&store, &device, &ids(2), 0..LAYERS);
        good.await_waiting(1);
        bad.open();
        let failed = store.outcome(&task).unwrap_err();
        assert_eq!(failed.len(), 2 * LAYERS);
        assert_eq!(
            (failed[0].1.kind(), failed[LAYERS].1.kind()),
            (ErrorKind::Corrupt, ErrorKind::Busy)
        );
        good.open();
        slots_come_back(&store);
        assert!(device.is_blank(id(0)) && holds(&mut device, &fixture, id(1), &first(STEP)));
    }
}

#[test]
fn a_copy_to_the_device_that_fails_is_the_end_of_its_block() {
    let device = SlowDevice::failing(1);
    let fixture = Fixture {
        device: Some(device.clone()),
        ..fixture(Layout::File)
    };
    let (dir, clock) = (directory(), ManualClock::new());
    let writer = Fixture {
        device: None,
        ..fixture.clone()
    };
    let root = dir.path().join("root");
    Store::open(&root, writer)
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let store = Store::with_clock(&root, fixture.clone(), clock);
    let target = Device::blank(&fixture, &ids(1));
    let task = begin(&store, &target, &ids(1), 0..LAYERS);
    device.await_hanging(1);
    device.go();
    assert_eq!(store.outcome(&task).unwrap_err().len(), LAYERS);
    assert!(target.is_blank(id(0)) && done(&task, LAYERS).is_empty());
    slots_come_back(&store);
}

/// Two roots, one above the other, with one block in both.
fn two_roots(clock: &std::sync::Arc<ManualClock>) -> (tempfile::TempDir, Store) {
    let fixture = Fixture {
        above: Above::File,
        ..fixture(Layout::File)
    };
    let (dir, store) = stored(&fixture, &ids(1), clock);
    eventually("both have it", || store.upper_file(id(0)).exists());
    (dir, store)
}

#[test]
fn layers_of_one_block_never_come_from_two_tiers() {
    let (_dir, store) = two_roots(&ManualClock::new());
    change(&store.upper_file(id(0)), |record| {
        record[4096 + 9 * LAYER] ^= 1
    });
    let mut device = Device::blank(&store.fixture, &ids(1));
    let task = begin(&store, &device, &ids(1), 0..LAYERS);
    let failed = store.outcome(&task).unwrap_err();
    assert!(
        failed.len() == LAYERS
            && failed
                .iter()
                .all(|(_, error)| error.kind() == ErrorKind::Corrupt)
    );
    assert_eq!(
        (&task.served()[..4], done(&task, LAYERS)),
        (&[0; 4][..], first(2 * STEP))
    );
    assert!(holds(&mut device, &store.fixture, id(0), &first(2 * STEP)));
    assert_eq!(
        (store.tier(0, "copies_refused"), store.stat("refused_now")),
        (1, 0)
    );
    let task = begin(&store, &device, &ids(1), 0..LAYERS);
    store.outcome(&task).unwrap();
    assert!(
        device.is_right(id(0)),
        "the copy below is as good as before"
    );
    assert_eq!(task.served()[..4], [0, 1, 0, 0]);
}

#[test]
fn what_has_nothing_yet_is_asked_of_the_next_tier() {
    let (_dir, store) = two_roots(&ManualClock::new());
    change(&store.upper_file(id(0)), |record| {
        record[4096 + 9 * LAYER] ^= 1
    });
    let gate = store.gate();
    let upper = store.upper.as_ref().unwrap();
    upper.add(
        Rule::on(OpKind::Read, Fault::HangBefore(gate.clone()))
            .lane(0)
            .nth(3),
    );
    let devices = [0, 1].map(|_| Device::blank(&store.fixture, &ids(1)));
    let begun = begin(&store, &devices[0], &ids(1), 0..LAYERS);
    gate.await_waiting(1);
    let late = begin(&store, &devices[1], &ids(1), 9..LAYERS);
    gate.open();
    assert_eq!(store.outcome(&begun).unwrap_err().len(), LAYERS);
    store.outcome(&late).unwrap();
    assert_eq!(
        (done(&begun, LAYERS), &late.served()[..4]),
        (first(2 * STEP), &[0, 1, 0, 0][..])
    );
}

#[test]
fn a_tier_that_hangs_after_some_layers_ends_their_block() {
    let clock = ManualClock::new();
    let (_dir, store) = two_roots(&clock);
    let gate = store.gate();
    let upper = store.upper.as_ref().unwrap();
    upper.add(
        Rule::on(OpKind::Read, Fault::HangBefore(gate.clone()))
            .lane(0)
            .nth(2),
    );
    let mut device = Device::blank(&store.fixture, &ids(1));
    let task = begin(&store, &device, &ids(1), 0..LAYERS);
    gate.await_waiting(1);
    clock.advance(store.fixture.deadlines.load / 5 * 3); // more than its half of the time
    let failed = store.outcome(&task).unwrap_err();
    assert!(
        failed.len() == LAYERS
            && failed
                .iter()
                .all(|(_, error)| error.kind() == ErrorKind::Timeout)
    );
    gate.open();
    slots_come_back(&store);
    assert!(
        holds(&mut device, &store.fixture, id(0), &first(STEP)),
        "no late bytes"
    );
    assert_eq!(store.tier(1, "blocks_read"), 0);
}

#[test]
fn below_memory_layers_arrive_as_they_are_read_and_the_block_is_kept_above() {
    for layout in LAYOUTS {
        let fixture = Fixture {
            above: Above::Memory(16, WritePolicy::Through),
            ..fixture(layout())
        };
        let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
        let gate = hang(&store, 2);
        let device = Device::blank(&fixture, &ids(1));
        let task = begin(&store, &device, &ids(1), 0..LAYERS);
        gate.await_waiting(1);
        assert_eq!(done(&task, LAYERS), first(STEP));
        gate.open();
        store.outcome(&task).unwrap();
        eventually("it is above", || store.tier(0, "promotions") == 1);
        let again = Device::blank(&fixture, &ids(1));
        let task = begin(&store, &again, &ids(1), 0..LAYERS);
        store.outcome(&task).unwrap();
        assert_eq!(
            (&task.served()[..4], done(&task, LAYERS)),
            (&[1, 0, 0, 0][..], first(LAYERS))
        );
        assert!(device.is_right(id(0)) && again.is_right(id(0)));
    }
}

#[test]
fn a_block_is_verified_whole_while_a_load_gets_its_layers() {
    let fixture = fixture(Layout::File);
    let (_dir, store) = stored(&fixture, &ids(1), &ManualClock::new());
    let gate = hang(&store, 2);
    let device = Device::blank(&fixture, &ids(1));
    let task = begin(&store, &device, &ids(1), 0..LAYERS);
    gate.await_waiting(1);
    let verified = store.engine.verify(&ids(1), None).unwrap();
    gate.open();
    store.outcome(&task).unwrap();
    store.outcome(&verified).unwrap();
    assert!(verified.shard_done(0));
    assert_eq!(
        (store.stat("blocks_loaded"), store.stat("blocks_verified")),
        (1, 1)
    );
}

#[test]
fn a_dump_reports_no_shards_and_a_wait_for_one_ends() {
    let fixture = fixture(Layout::File);
    let clock = ManualClock::new();
    let (_dir, store) = stored(&fixture, &[], &clock);
    let device = Device::filled(&fixture, &ids(1));
    let task = store.engine.dump(device.rows(&ids(1))).unwrap();
    assert!(!task.wait_shard(store.engine.clock(), 0, None));
    assert!(task.check(store.engine.clock(), Until::Published) && clock.now() == MonotonicTime(0));
}
