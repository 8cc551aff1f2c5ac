//! What moves between the tiers of a pipeline: what only memory has goes down, what is prefetched
//! comes up.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, Part};
use ucm_infra::{Clock, ManualClock};
use ucm_media::segment::SegmentConfig;
use ucm_store::tiers::{Priority, WritePolicy};
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::tiers::{dumped, load, lookup, of_blocks, open, reads, with_file, with_memory};
use crate::common::{Above, Device, Fixture, Layout, Store, directory, eventually, id, ids};

#[test]
fn a_block_that_only_memory_has_goes_below_with_its_next_dump() {
    let memories = [
        with_memory().above,
        Above::Memory(100, WritePolicy::Through),
    ];
    for (above, layout) in memories.into_iter().zip([Layout::File, Layout::segments()]) {
        let fixture = Fixture {
            above,
            layout,
            ..Fixture::default()
        };
        let (_dir, store) = open(&fixture);
        let device = Device::filled(&fixture, &ids(2));
        store.fault(Rule::on(layout.writing(), Fault::Errno(5)));
        let failed = store.dump(&device, &ids(2)).unwrap_err();
        assert_eq!((failed.len(), failed[0].1.kind()), (2, ErrorKind::Io));
        assert_eq!(store.engine.locate_on_prefix(&ids(2)).unwrap().0, [0, 0]);
        load(&store, &ids(2)); // found, whole, and in memory only
        store.faults.clear();
        store.dump(&device, &ids(2)).unwrap();
        // What another store finds that has no such memory.
        let below = Fixture {
            above: Above::Nothing,
            lookup_only: true,
            ..fixture
        };
        let other = Store::open(&store.root, below);
        eventually("they are below", || lookup(&other, &ids(2)) == [true, true]);
    }
}

#[test]
fn what_is_written_back_goes_down_when_it_is_given_up() {
    let fixture = Fixture {
        above: Above::Map(2, WritePolicy::Back),
        ..Fixture::default()
    };
    let (_dir, store) = open(&fixture);
    for block in ids(5) {
        store
            .dump(&Device::filled(&fixture, &[block]), &[block])
            .unwrap();
    }
    assert!(!store.file(id(4)).exists(), "the latest is in memory only");
    eventually("three went down", || store.tier(1, "demotions") == 3);
    assert!(ids(3).iter().all(|&id| store.file(id).exists()));
    // What comes up pushes the two others down; on their way they are nowhere for a moment.
    load(&store, &ids(3));
    eventually("all are below", || {
        ids(5).iter().all(|&id| store.file(id).exists())
    });
    load(&store, &ids(5));
}

#[test]
fn a_block_dumped_again_on_its_way_down_stays_in_memory_though_the_move_fails() {
    let (dir, clock) = (directory(), ManualClock::new());
    let fixture = Fixture {
        above: Above::Memory(16, WritePolicy::Back),
        ..Fixture::default()
    };
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    let gate = store.gate();
    store.fault(Rule::on(
        fixture.layout.writing(),
        Fault::HangBefore(gate.clone()),
    ));
    let device = Device::filled(&fixture, &ids(16));
    for block in &ids(16) {
        store.dump(&device, &[*block]).unwrap();
    }
    gate.await_waiting(1);
    store.dump(&device, &ids(1)).unwrap(); // the oldest was the first to go
    clock.advance(fixture.deadlines.dump);
    eventually("no move ended in time", || {
        store.tier(1, "copies_dropped") >= 1
            && store.memory.as_ref().unwrap().counts().returned == 1
    });
    assert_eq!(store.tier(1, "blocks_written"), 0);
    load(&store, &ids(1));
    gate.open();
}

#[test]
fn shutdown_writes_back_what_only_memory_has() {
    let (dir, fixture) = (
        directory(),
        Fixture {
            above: Above::Map(100, WritePolicy::Back),
            ..Fixture::default()
        },
    );
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, fixture.clone(), ManualClock::new());
    let blocks = ids(20);
    for block in &blocks {
        store
            .dump(&Device::filled(&fixture, &[*block]), &[*block])
            .unwrap();
    }
    store.map().change(id(3), |record| record[4200] ^= 1);
    assert!(!store.file(id(0)).exists());
    store.engine.close(); // on a clock that stands still there is time for all
    let there = |block: &BlockId| store.file(*block).exists();
    assert_eq!(blocks.iter().filter(|block| there(block)).count(), 19);
    assert!(!there(&id(3)), "what is damaged is not written back");
    let said = store.said();
    assert!(
        said.iter().any(|line| line.contains("damaged in memory")),
        "{said:?}"
    );
    drop(store);
    let store = Store::open(&root, fixture);
    let sound: Vec<BlockId> = blocks.into_iter().filter(|&block| block != id(3)).collect();
    load(&store, &sound);
}

#[test]
fn shutdown_writes_back_what_is_its_own_and_leaves_the_other_ranks_blocks_to_them() {
    let dir = directory();
    let root = dir.path().join("root");
    let rank = |tensor_rank, policy| Fixture {
        above: Above::Memory(100, policy),
        part: Part {
            tensor_rank,
            ..Part::default()
        },
        ..Fixture::default()
    };
    let first = Store::with_clock(&root, rank(0, WritePolicy::Back), ManualClock::new());
    let second = Store::open(&root, rank(1, WritePolicy::Never));
    let (ours, theirs) = (ids(5), (5..12).map(id).collect::<Vec<_>>());
    for (store, blocks) in [(&first, &ours), (&second, &theirs)] {
        let device = Device::filled(&store.fixture, blocks);
        store.dump(&device, blocks).unwrap();
    }
    let memory = first.memory.as_ref().unwrap();
    eventually("the first sees the second's memory", || {
        memory.look_around();
        theirs.iter().all(|&block| memory.contains(block))
    });
    first.engine.close();
    assert!(ours.iter().all(|&block| first.file(block).exists()));
    assert!(!theirs.iter().any(|&block| first.file(block).exists()));
    assert_eq!(first.tier(1, "copies_dropped"), 0);
    let said = first.said();
    let of_records = |line: &&String| line.contains("damaged") || line.contains("written back to");
    assert_eq!(said.iter().find(of_records), None);
}

#[test]
fn shutdown_says_what_there_was_no_time_for() {
    let dir = directory();
    let fixture = Fixture {
        above: Above::Map(100, WritePolicy::Back),
        ..Fixture::default()
    };
    let clock = ManualClock::new();
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    for block in &ids(20) {
        store
            .dump(&Device::filled(&fixture, &[*block]), &[*block])
            .unwrap();
    }
    let gate = store.gate();
    store.fault(of_blocks(OpKind::Publish, Fault::HangBefore(gate.clone())));
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| store.engine.close());
        eventually("it is over", || {
            clock.advance(Duration::from_millis(100));
            closing.is_finished()
        });
    });
    let said = store.said();
    assert!(
        said.iter()
            .any(|line| line.contains("were not written back")),
        "{said:?}"
    );
    gate.open();
}

#[test]
fn a_stage_that_is_never_written_is_only_read() {
    let (dir, stored) = (directory(), Fixture::default());
    let root = dir.path().join("root");
    let store = Store::open(&root, stored.clone());
    store
        .dump(&Device::filled(&stored, &ids(2)), &ids(2))
        .unwrap();
    drop(store);
    let fixture = Fixture {
        above: Above::Map(100, WritePolicy::Never),
        ..Fixture::default()
    };
    let store = Store::open(&root, fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(4)), &ids(4))
        .unwrap();
    assert!(!store.file(id(3)).exists() && store.map().has(id(3)));
    store.map().forget();
    assert_eq!(lookup(&store, &ids(4)), [true, true, false, false]);
    load(&store, &ids(2));
}

#[test]
fn prefetch_brings_blocks_up_and_nothing_twice() {
    for fixture in [with_memory(), with_file()] {
        let (_dir, store) = dumped(&fixture, 6);
        eventually("copies are above", || store.tier(0, "blocks_written") == 6);
        for block in ids(6) {
            match &store.map {
                Some(map) => map.forget(),
                None => std::fs::remove_file(store.upper_file(block)).unwrap(),
            }
        }
        assert_eq!(store.engine.prefetch(&ids(7), Priority::Normal).unwrap(), 7);
        eventually("all six are above", || store.tier(0, "promotions") == 6);
        assert_eq!(store.tier(1, "blocks_read"), 6);
        store.engine.prefetch(&ids(6), Priority::Urgent).unwrap();
        load(&store, &ids(6));
        assert_eq!(store.tier(1, "blocks_read"), 6);
    }
}

#[test]
fn prefetch_lets_loads_go_first_and_can_be_cancelled() {
    let (_dir, store) = dumped(&with_memory(), 8);
    store.map().forget();
    let gate = store.gate();
    store.fault(of_blocks(OpKind::Read, Fault::HangBefore(gate.clone())));
    let device = Device::blank(&store.fixture, &[id(0)]);
    let task = store.engine.load(device.rows(&[id(0)]), None).unwrap();
    eventually("the load reads", || reads(&store, 8) == 1);
    let later = &ids(8)[1..];
    assert_eq!(
        store.engine.prefetch(later, Priority::Speculative).unwrap(),
        7
    );
    assert_eq!(reads(&store, 8), 1, "the load goes first");
    store.engine.prefetch(&[id(7)], Priority::Urgent).unwrap();
    eventually("what is urgent does not wait", || reads(&store, 8) == 2);
    assert_eq!(store.engine.cancel_prefetch(&ids(8)[1..5]).unwrap(), 4);
    store.faults.clear();
    gate.open();
    store.outcome(&task).unwrap();
    eventually("the others follow", || {
        [0, 5, 6, 7].iter().all(|&n| store.map().has(id(n)))
    });
    assert!(!(1..5).any(|n| store.map().has(id(n))), "cancelled");
}

#[test]
fn without_an_upper_stage_prefetch_does_nothing() {
    let (_dir, store) = dumped(&Fixture::default(), 2);
    assert_eq!(store.engine.prefetch(&ids(2), Priority::Urgent).unwrap(), 0);
    assert_eq!(store.engine.cancel_prefetch(&ids(2)).unwrap(), 0);
    assert_eq!(reads(&store, 2), 0);
}

#[test]
fn a_store_for_lookups_prefetches_nothing() {
    let memory = Fixture {
        above: Above::Memory(100, WritePolicy::Through),
        ..Fixture::default()
    };
    for fixture in [memory, with_file()] {
        let (_dir, store) = dumped(&fixture, 2);
        drop(store.engine.lookup(&ids(2)).unwrap());
        let asks = Fixture {
            lookup_only: true,
            ..fixture
        };
        let asking = Store::open(&store.root, asks);
        assert_eq!(lookup(&asking, &ids(2)), [true, true]);
        asking.faults.forget();
        for priority in Priority::ALL {
            assert_eq!(asking.engine.prefetch(&ids(2), priority).unwrap(), 0);
        }
        assert_eq!(asking.engine.cancel_prefetch(&ids(2)).unwrap(), 0);
        assert_eq!(asking.faults.count(OpKind::Read), 0);
    }
}

#[test]
fn prefetch_keeps_nothing_that_is_damaged() {
    let (_dir, store) = dumped(&with_memory(), 2);
    store.map().forget();
    let mut bytes = std::fs::read(store.file(id(0))).unwrap();
    bytes[4200] ^= 1;
    std::fs::write(store.file(id(0)), bytes).unwrap();
    store.engine.prefetch(&ids(2), Priority::Normal).unwrap();
    eventually("the sound one is above", || store.map().has(id(1)));
    eventually("both were read", || reads(&store, 2) == 2);
    let device = Device::blank(&store.fixture, &ids(1));
    assert!(store.load(&device, &ids(1)).is_err());
    assert!(!store.map().has(id(0)) && device.is_blank(id(0)));
}

#[test]
fn segments_written_back_to_do_not_wait_for_their_age_while_memory_makes_room() {
    let fixture = Fixture {
        above: Above::Map(2, WritePolicy::Back),
        layout: Layout::Segment(SegmentConfig {
            age: Duration::from_secs(3600),
            ..SegmentConfig::default()
        }),
        ..Fixture::default()
    };
    let dir = directory();
    // Time stands still, so nothing is ever old enough.
    let store = Store::with_clock(
        &dir.path().join("root"),
        fixture.clone(),
        ManualClock::new(),
    );
    let device = Device::filled(&fixture, &ids(100));
    let mut blocks = ids(100).into_iter().cycle();
    eventually("they are published", || {
        let block = blocks.next().unwrap();
        // what memory gives up for it may find no spare slot
        store.dump(&device, &[block]).unwrap();
        store.places().len() >= 16
    });
}
