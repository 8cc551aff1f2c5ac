//! Loads of single layers from segments: the header and those layers are read and verified, and
//! nothing else.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use ucm_core::BlockId;
use ucm_store::engine::Task;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::segments::{change, write};
use crate::common::{
    Above, Device, Fixture, Layout, Store, content, directory, eventually, id, ids,
};

/// Bytes of a layer, and layers of a block: its header takes a page. The whole is read in four
/// parts.
const LAYER: usize = 64 << 10;
const LAYERS: u32 = 16;
const WHOLE: usize = 4;

fn fixture() -> Fixture {
    Fixture {
        tensors: vec![LAYER as u64],
        layers: LAYERS,
        layers_per_shard: 1,
        layout: Layout::segments(),
        ..Fixture::default()
    }
}

/// A root with blocks in it, and a store that has read nothing of it yet.
fn store(fixture: &Fixture, blocks: &[BlockId]) -> (tempfile::TempDir, Store) {
    let dir = directory();
    let writer = Store::open(
        dir.path(),
        Fixture {
            above: Above::Nothing,
            ..fixture.clone()
        },
    );
    writer
        .dump(&Device::filled(fixture, blocks), blocks)
        .unwrap();
    drop(writer);
    let store = Store::open(dir.path(), fixture.clone());
    store.faults.forget();
    (dir, store)
}

fn begin(store: &Store, device: &Device, blocks: &[BlockId], shard: u32) -> Task {
    let rows = blocks
        .iter()
        .map(|&block| device.row(block, shard))
        .collect();
    store.engine.load(rows, None).unwrap()
}

/// Loads one layer of each block; whether that went well. Exact, or untouched, and nothing else is
/// ever touched.
fn loads(store: &Store, blocks: &[BlockId], shard: u32) -> bool {
    let mut device = Device::blank(&store.fixture, blocks);
    let task = begin(store, &device, blocks, shard);
    let loaded = store.outcome(&task).is_ok();
    for &block in blocks {
        let right = holds(&store.fixture, &mut device, block, &[shard]);
        assert!(right || device.is_blank(block), "wrong bytes on the device");
        assert!(right || !loaded);
    }
    loaded
}

/// Whether the device has these layers of a block, and nothing else of it.
fn holds(fixture: &Fixture, device: &mut Device, block: BlockId, layers: &[u32]) -> bool {
    let mut expected = vec![0xee; LAYER * LAYERS as usize];
    for &layer in layers {
        let range = LAYER * layer as usize..LAYER * (layer as usize + 1);
        expected[range.clone()].copy_from_slice(&content(fixture, block)[range]);
    }
    let mut same = false;
    device.change(block, |bytes| same = *bytes == expected);
    same
}

fn asked(store: &Store) -> usize {
    let log = store.faults.log();
    log.iter()
        .filter(|seen| seen.kind == OpKind::Read && seen.lane == 0)
        .count()
}

/// Damages a byte of a record.
fn damage(store: &Store, block: BlockId, at: usize) {
    let place = store
        .places()
        .into_iter()
        .find(|place| place.id == block)
        .unwrap();
    change(&place.file, |bytes| bytes[place.offset + at] ^= 1);
}

#[test]
fn every_layer_can_be_loaded_by_itself() {
    let (_dir, store) = store(&fixture(), &ids(3));
    for shard in 0..LAYERS {
        assert!(loads(&store, &ids(3), shard), "{shard}");
    }
    assert_eq!(
        asked(&store),
        3 * LAYERS as usize,
        "each block once for each layer"
    );
    assert_eq!(store.stat("second_reads"), 0);
    eventually("the slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

#[test]
fn damage_elsewhere_is_not_seen_and_its_own_is() {
    let (_dir, store) = store(&fixture(), &ids(2));
    damage(&store, id(0), 4096 + 5 * LAYER + 77);
    for shard in (0..LAYERS).filter(|&shard| shard != 5) {
        assert!(loads(&store, &ids(2), shard), "{shard}");
    }
    assert_eq!(store.stat("second_reads"), 0);
    assert!(!loads(&store, &ids(1), 5));
    assert_eq!(
        (store.stat("second_reads"), store.stat("records_refused")),
        (1, 1)
    );
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [false, true]);
    assert!(loads(&store, &[id(1)], 5));
}

#[test]
fn the_header_is_verified_whole() {
    for at in [0, 70, 200, 600, 3000, 4095] {
        let (_dir, store) = store(&fixture(), &ids(1));
        damage(&store, id(0), at);
        assert!(!loads(&store, &ids(1), 3), "{at}");
        assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    }
}

#[test]
fn what_joins_and_wants_another_layer_gets_it_afterwards() {
    let (_dir, store) = store(&fixture(), &ids(1));
    let gate = store.gate();
    store.fault(
        Rule::on(OpKind::Read, Fault::HangBefore(gate.clone()))
            .lane(0)
            .times(1),
    );
    let mut devices: Vec<_> = (0..4).map(|_| Device::blank(&fixture(), &ids(1))).collect();
    let first = begin(&store, &devices[0], &ids(1), 2);
    gate.await_waiting(1);
    let same = begin(&store, &devices[1], &ids(1), 2);
    let other = begin(&store, &devices[2], &ids(1), 9);
    let all = store.engine.load(devices[3].rows(&ids(1)), None).unwrap();
    gate.open();
    for task in [&first, &same, &other, &all] {
        store.outcome(task).unwrap();
    }
    assert_eq!((asked(&store), store.stat("loads_joined")), (1 + WHOLE, 3));
    for (device, layers) in devices.iter_mut().zip([&[2][..], &[2], &[9]]) {
        assert!(holds(&fixture(), device, id(0), layers));
    }
    assert!(devices[3].is_right(id(0)));
}

#[test]
fn a_block_is_verified_whole() {
    let (_dir, store) = store(&fixture(), &ids(1));
    damage(&store, id(0), 4096 + 15 * LAYER + 77);
    assert!(loads(&store, &ids(1), 0));
    let task = store.engine.verify(&ids(1), None).unwrap();
    assert!(store.outcome(&task).is_err(), "the damage was seen");
    // One that joins the read of a part gets the whole afterwards.
    let (_dir, store) = self::store(&fixture(), &ids(1));
    let gate = store.gate();
    store.fault(
        Rule::on(OpKind::Read, Fault::HangBefore(gate.clone()))
            .lane(0)
            .times(1),
    );
    let device = Device::blank(&fixture(), &ids(1));
    let part = begin(&store, &device, &ids(1), 2);
    gate.await_waiting(1);
    let whole = store.engine.verify(&ids(1), None).unwrap();
    gate.open();
    store.outcome(&part).unwrap();
    store.outcome(&whole).unwrap();
    assert_eq!(
        (asked(&store), store.stat("blocks_verified")),
        (1 + WHOLE, 1)
    );
}

#[test]
fn what_goes_wrong_with_a_part_is_read_whole() {
    for fault in [
        Fault::Errno(5),
        Fault::Errno(2),
        Fault::LostReply(5),
        Fault::ShortRead(4100),
        Fault::Flip(vec![100]),
        Fault::Flip(vec![4096 + 7 * LAYER + 9]),
    ] {
        let (_dir, store) = store(&fixture(), &ids(1));
        store.fault(Rule::on(OpKind::Read, fault.clone()).lane(0).times(1));
        assert!(loads(&store, &ids(1), 7), "{fault:?}");
        assert_eq!(
            (asked(&store), store.stat("records_refused")),
            (2, 0),
            "{fault:?}"
        );
    }
}

#[test]
fn most_of_a_block_or_a_small_one_is_read_whole() {
    let (_dir, store) = store(&fixture(), &ids(1));
    damage(&store, id(0), 4096 + 15 * LAYER + 77);
    let device = Device::blank(&fixture(), &ids(1));
    let most = (0..10).map(|shard| device.row(id(0), shard)).collect();
    let task = store.engine.load(most, None).unwrap();
    store.outcome(&task).unwrap();
    eventually("the damage behind them is seen", || {
        store.stat("records_refused") == 1
    });
    let small = Fixture {
        tensors: vec![96, 32],
        layers: 3,
        ..fixture()
    };
    let dir = directory();
    write(dir.path(), &small, &ids(4));
    let store = Store::open(dir.path(), small.clone());
    store.faults.forget();
    let device = Device::blank(&small, &ids(4));
    let task = begin(&store, &device, &ids(4), 1);
    store.outcome(&task).unwrap();
    assert_eq!(asked(&store), 1, "neighbours, together");
}

#[test]
fn below_a_memory_tier_the_whole_is_read_and_kept_above() {
    let fixture = Fixture {
        above: Above::Memory(16, WritePolicy::Through),
        ..fixture()
    };
    let (_dir, store) = store(&fixture, &ids(2));
    for shard in 0..LAYERS {
        assert!(loads(&store, &ids(2), shard));
        eventually("they are above", || store.tier(0, "promotions") == 2);
    }
    assert_eq!(store.tier(1, "blocks_read"), 2);
}
