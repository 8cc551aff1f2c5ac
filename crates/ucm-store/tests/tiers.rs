//! Pipelines: what one stage has, the whole has; what one stage lacks, loses or refuses, the others make good.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::segments::change;
use common::{Above, Device, Layout, Setup, Store, directory, eventually, id, ids};
use ucm_core::{BlockId, ErrorKind, MissReason, Part, crc32c};
use ucm_infra::{Clock, ManualClock};
use ucm_io::{Fault, OpKind, Rule};
use ucm_store::backend::Priority;
use ucm_store::health::BreakerConfig;
use ucm_store::segment::SegmentConfig;
use ucm_store::tiers::WritePolicy;

/// Memory with room above a root.
fn with_memory() -> Setup {
    Setup {
        above: Above::Map(100, WritePolicy::Through),
        ..Setup::default()
    }
}

/// A root above a root.
fn with_file() -> Setup {
    Setup {
        above: Above::File,
        ..Setup::default()
    }
}

fn open(setup: &Setup) -> (tempfile::TempDir, Store) {
    let dir = directory();
    let store = Store::open(&dir.path().join("root"), setup.clone());
    (dir, store)
}

fn dumped(setup: &Setup, n: u8) -> (tempfile::TempDir, Store) {
    let (dir, store) = open(setup);
    store.dump(&Device::filled(setup, &ids(n)), &ids(n)).unwrap();
    (dir, store)
}

/// Loads blocks and looks whether they are right.
fn load(store: &Store, blocks: &[BlockId]) {
    let device = Device::blank(&store.setup, blocks);
    store.load(&device, blocks).unwrap();
    assert!(blocks.iter().all(|&block| device.is_right(block)));
}

/// This befalls the files of blocks only.
fn of_blocks(kind: OpKind, fault: Fault) -> Rule {
    Rule::on(kind, fault).path("/blocks/")
}

/// How often the files of the first `n` blocks were read.
fn reads(store: &Store, n: u8) -> usize {
    ids(n).into_iter().map(|id| store.asked(OpKind::Read, id)).sum()
}

fn lookup(store: &Store, blocks: &[BlockId]) -> Vec<bool> {
    store.engine.lookup(blocks).unwrap()
}

#[test]
fn a_dump_goes_through_to_the_file_and_stays_in_memory() {
    let (_dir, store) = dumped(&with_memory(), 3);
    assert!(
        ids(3)
            .iter()
            .all(|&id| store.file(id).exists() && store.map().has(id))
    );
    load(&store, &ids(3));
    assert_eq!(reads(&store, 3), 0, "what memory has is read there");
    assert_eq!(
        (store.tier(0, "blocks_read"), store.tier(1, "blocks_read")),
        (3, 0)
    );
    let early = store.engine.early().unwrap();
    assert_eq!(early.gained.len(), 3);
}

#[test]
fn what_is_loaded_from_below_is_kept_above() {
    let (_dir, store) = dumped(&with_memory(), 3);
    store.map().forget();
    assert_eq!(lookup(&store, &ids(4)), [true, true, true, false]);
    load(&store, &ids(3));
    assert!(ids(3).iter().all(|&id| store.map().has(id)));
    assert_eq!(
        (store.tier(0, "promotions"), store.tier(1, "blocks_read")),
        (3, 3)
    );
    load(&store, &ids(3));
    assert_eq!(store.tier(1, "blocks_read"), 3);
}

#[test]
fn memory_that_has_no_room_stops_neither_dump_nor_load() {
    let (_dir, store) = open(&with_memory());
    store.map().busy(true);
    let device = Device::filled(&store.setup, &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    load(&store, &ids(2));
    assert_eq!(store.map().len(), 0);
    assert_eq!(
        store.tier(0, "copies_dropped"),
        4,
        "of two dumps and two promotions"
    );
    store.map().busy(false);
    load(&store, &ids(2));
    assert_eq!(store.tier(0, "promotions"), 2);
}

#[test]
fn a_prefix_goes_through_both_stages() {
    let (_dir, store) = dumped(&with_memory(), 6);
    store.map().forget();
    load(&store, &[id(1), id(4)]);
    std::fs::remove_file(store.file(id(1))).unwrap();
    std::fs::remove_file(store.file(id(5))).unwrap();
    assert_eq!(store.engine.lookup_on_prefix(&ids(6)).unwrap(), 5);
    assert_eq!((store.tier(0, "hits"), store.tier(1, "hits")), (2, 3));
}

#[test]
fn a_lookup_tells_which_stage_has_what_and_a_load_which_one_brought_it() {
    let (_dir, store) = dumped(&with_memory(), 5);
    store.map().forget();
    load(&store, &[id(0), id(2)]);
    eventually("both are above", || store.tier(0, "promotions") == 2);
    std::fs::remove_file(store.file(id(4))).unwrap();
    let located = store.engine.locate_on_prefix(&ids(5)).unwrap();
    assert_eq!(located, (vec![0, 1, 0, 1], Some(MissReason::Absent)));
    assert_eq!(
        store.engine.explain_on_prefix(&ids(3)).unwrap(),
        (3, None),
        "nothing else differs"
    );
    let device = Device::blank(&store.setup, &ids(4));
    let task = store.engine.load(device.rows(&ids(4)), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served(), [2, 2, 0, 0]);
    eventually("what was loaded is above", || {
        store.engine.locate_on_prefix(&ids(4)).unwrap().0 == [0; 4]
    });
    // What a lookup said is a hint: a load says what was so.
    store.map().forget();
    let task = store.engine.load(device.rows(&[id(1)]), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served(), [0, 1, 0, 0]);
}

#[test]
fn a_copy_refused_above_is_found_and_served_below() {
    let (_dir, store) = dumped(&with_memory(), 1);
    store.map().change(id(0), |record| record[4200] ^= 1);
    store.map().busy(true); // so that the sound one does not take its place
    let device = Device::blank(&store.setup, &ids(1));
    let task = store.engine.load(device.rows(&ids(1)), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served(), [0, 1, 0, 0]);
    assert_eq!(store.engine.locate_on_prefix(&ids(1)).unwrap(), (vec![1], None));
}

#[test]
fn a_medium_alone_is_stage_nought() {
    let (_dir, store) = dumped(&Setup::default(), 2);
    assert_eq!(
        store.engine.locate_on_prefix(&ids(2)).unwrap(),
        (vec![0, 0], None)
    );
    let device = Device::blank(&store.setup, &ids(2));
    let task = store.engine.load(device.rows(&ids(2)), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served(), [2, 0, 0, 0]);
}

#[test]
fn a_damaged_copy_above_is_made_good_from_below() {
    for setup in [with_memory(), with_file()] {
        let (_dir, store) = dumped(&setup, 1);
        let flip = |bytes: &mut [u8]| *bytes.last_mut().unwrap() ^= 1;
        if let Some(map) = &store.map {
            map.change(id(0), |record| flip(&mut record[..4200]));
        } else {
            eventually("the copy is there", || store.upper_file(id(0)).exists());
            let mut bytes = std::fs::read(store.upper_file(id(0))).unwrap();
            flip(&mut bytes[..4200]);
            std::fs::write(store.upper_file(id(0)), bytes).unwrap();
        }
        load(&store, &ids(1));
        assert_eq!(store.tier(0, "copies_refused"), 1);
        assert_eq!(
            store.stat("refused_now"),
            0,
            "the block itself is as good as before"
        );
        assert!(lookup(&store, &ids(1))[0]);
        eventually("a sound copy took its place", || store.tier(0, "promotions") == 1);
        load(&store, &ids(1));
        assert_eq!(store.tier(1, "blocks_read"), 1, "from above again");
    }
}

#[test]
fn damage_in_every_stage_is_a_refusal_and_the_next_dump_heals_all() {
    let (_dir, store) = dumped(&with_memory(), 1);
    store.map().change(id(0), |record| record[4200] ^= 1);
    let mut bytes = std::fs::read(store.file(id(0))).unwrap();
    bytes[4200] ^= 1;
    std::fs::write(store.file(id(0)), bytes).unwrap();
    let device = Device::blank(&store.setup, &ids(1));
    let failed = store.load(&device, &ids(1)).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::Corrupt);
    assert!(device.is_blank(id(0)));
    assert_eq!(lookup(&store, &ids(1)), [false]);
    store
        .dump(&Device::filled(&store.setup, &ids(1)), &ids(1))
        .unwrap();
    assert_eq!(lookup(&store, &ids(1)), [true]);
    load(&store, &ids(1));
    store.map().forget();
    load(&store, &ids(1));
}

#[test]
fn a_newer_version_below_memory_is_no_hit_and_is_left_alone() {
    for layout in [Layout::File, Layout::segments()] {
        let (_dir, store) = dumped(
            &Setup {
                layout,
                ..with_memory()
            },
            1,
        );
        let place = store.places().pop();
        let (file, at) = place.map_or((store.file(id(0)), 0), |place| (place.file, place.offset));
        change(&file, |bytes| {
            bytes[at + 4..at + 8].copy_from_slice(&2u32.to_le_bytes());
            let crc = crc32c(&bytes[at..at + 60]);
            bytes[at + 60..at + 64].copy_from_slice(&crc.to_le_bytes());
        });
        let newer = std::fs::read(&file).unwrap();
        store.map().forget();
        let target = Device::blank(&store.setup, &ids(1));
        let failed = store.load(&target, &ids(1)).unwrap_err();
        assert_eq!(failed[0].1.kind(), ErrorKind::Foreign);
        store
            .dump(&Device::filled(&store.setup, &ids(1)), &ids(1))
            .unwrap();
        assert_eq!(lookup(&store, &ids(1)), [false], "{layout:?}");
        assert_eq!(std::fs::read(&file).unwrap(), newer);
        assert!(store.places().len() <= 1, "nothing was put over it");
    }
}

#[test]
fn a_damaged_copy_above_with_nothing_below_is_a_refusal() {
    let (_dir, store) = dumped(&with_memory(), 1);
    store.map().change(id(0), |record| record[4200] ^= 1);
    std::fs::remove_file(store.file(id(0))).unwrap();
    let failed = store
        .load(&Device::blank(&store.setup, &ids(1)), &ids(1))
        .unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::Corrupt);
    assert_eq!(store.missed("bad_checksum"), 1);
    assert_eq!(lookup(&store, &ids(1)), [false]);
}

#[test]
fn an_upper_root_that_lost_a_record_or_errs_is_passed_by() {
    let (_dir, store) = dumped(&with_file(), 2);
    eventually("copies are above", || store.tier(0, "blocks_written") == 2);
    std::fs::remove_file(store.upper_file(id(0))).unwrap();
    load(&store, &ids(2));
    assert_eq!(
        (store.tier(0, "blocks_read"), store.tier(1, "blocks_read")),
        (1, 1)
    );
    eventually("it is brought up again", || store.upper_file(id(0)).exists());
    let upper = store.upper.as_ref().unwrap();
    upper.add(of_blocks(OpKind::Read, Fault::Errno(5))).unwrap();
    load(&store, &ids(2));
    assert_eq!(store.tier(0, "failures"), 2);
    assert_eq!(lookup(&store, &ids(2)), [true, true]);
}

#[test]
fn many_loads_of_a_lost_copy_stream_through_few_slots() {
    let setup = Setup {
        slots: 4,
        ..with_file()
    };
    let (_dir, store) = open(&setup);
    let all = ids(24);
    for block in &all {
        store.dump(&Device::filled(&setup, &[*block]), &[*block]).unwrap();
        // One copy at a time: a copy that finds its stage busy is dropped.
        eventually("written above", || store.upper_file(*block).exists());
        std::fs::remove_file(store.upper_file(*block)).unwrap();
    }
    load(&store, &all);
    eventually("every slot is back", || store.stat("slots_free") == 4);
}

/// Stages whose breakers open at the first failure.
fn brittle(setup: Setup) -> Setup {
    Setup {
        stage_breaker: BreakerConfig {
            threshold: 1,
            cool_down: Duration::from_secs(10),
            window: Duration::from_secs(60),
            max_stuck: 64,
        },
        ..setup
    }
}

#[test]
fn a_dead_lower_stage_costs_once_and_memory_serves_on() {
    let (dir, clock, setup) = (directory(), ManualClock::new(), brittle(with_memory()));
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, setup.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    store.dump(&Device::filled(&setup, &ids(2)), &ids(2)).unwrap();
    let rule = store
        .faults
        .add(of_blocks(OpKind::Stat, Fault::Errno(5)))
        .unwrap();
    // Id 2 is nowhere: the lower stage is asked for it, once.
    for _ in 0..5 {
        assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
    }
    assert_eq!(store.faults.hits(rule), 1);
    assert_eq!((store.tier(0, "healthy"), store.tier(1, "healthy")), (1, 0));
    assert_eq!(store.stat("healthy"), 1, "what memory has is served");
    load(&store, &ids(2));
    let failed = store
        .dump(&Device::filled(&setup, &[id(7)]), &[id(7)])
        .unwrap_err();
    assert_eq!(
        failed[0].1.kind(),
        ErrorKind::Unhealthy,
        "never a publish that was none"
    );
    load(&store, &[id(7)]);
    // Past its cool-down one operation finds it well again.
    store.faults.clear();
    clock.advance(Duration::from_secs(10));
    assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
    assert_eq!(store.tier(1, "healthy"), 1);
    store.dump(&Device::filled(&setup, &[id(8)]), &[id(8)]).unwrap();
    assert!(store.file(id(8)).exists());
    let said = store.said();
    let of = |text: &str| said.iter().filter(|line| line.contains(text)).count();
    assert_eq!(
        (of("tier posix is switched off"), of("tier posix answers again")),
        (1, 1)
    );
}

#[test]
fn a_hanging_lower_stage_hides_no_hit_of_memory() {
    let (_dir, store) = dumped(
        &Setup {
            deadlines: ucm_store::engine::Deadlines {
                lookup: Duration::from_secs(2),
                ..Setup::default().deadlines
            },
            ..brittle(with_memory())
        },
        2,
    );
    let gate = store.gate();
    store.fault(of_blocks(OpKind::Stat, Fault::HangBefore(gate.clone())));
    assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
    assert_eq!(store.missed("lookup_late"), 1);
    assert_eq!(lookup(&store, &ids(3)), [true, true, false], "at once, by now");
    assert_eq!(store.missed("unhealthy"), 1);
    gate.open();
}

#[test]
fn a_dead_upper_root_hides_nothing_of_the_lower() {
    let (_dir, store) = dumped(&brittle(with_file()), 2);
    let upper = store.upper.as_ref().unwrap();
    for kind in [OpKind::Stat, OpKind::Read, OpKind::Publish] {
        upper.add(of_blocks(kind, Fault::Errno(5))).unwrap();
    }
    for _ in 0..2 {
        assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
        load(&store, &ids(2));
        store
            .dump(&Device::filled(&store.setup, &[id(9)]), &[id(9)])
            .unwrap();
    }
    assert_eq!((store.tier(0, "healthy"), store.tier(1, "healthy")), (0, 1));
}

#[test]
fn a_load_that_hangs_above_is_read_below_in_its_time() {
    let (dir, clock, setup) = (directory(), ManualClock::new(), brittle(with_file()));
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, setup.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    store.dump(&Device::filled(&setup, &ids(2)), &ids(2)).unwrap();
    eventually("copies are above", || store.tier(0, "blocks_written") == 2);
    let gate = store.gate();
    let upper = store.upper.as_ref().unwrap();
    upper
        .add(of_blocks(OpKind::Read, Fault::HangBefore(gate.clone())))
        .unwrap();
    let device = Device::blank(&setup, &ids(2));
    let task = store
        .engine
        .load(device.rows(&ids(2)), Some(Duration::from_secs(8)))
        .unwrap();
    eventually("both hang above", || {
        ids(2)
            .into_iter()
            .all(|id| store.asked_above(OpKind::Read, id) == 1)
    });
    clock.advance(Duration::from_secs(4));
    eventually("it ends", || {
        task.check(store.engine.clock(), ucm_store::engine::Until::Published)
    });
    assert!(task.failures().is_empty());
    assert!(ids(2).iter().all(|&id| device.is_right(id)));
    assert_eq!(store.tier(0, "failures"), 2);
    gate.open();
}

#[test]
fn a_full_lower_stage_is_reported_and_memory_serves() {
    let (_dir, store) = open(&with_memory());
    store.fault(of_blocks(OpKind::Publish, Fault::Errno(28)));
    let device = Device::filled(&store.setup, &ids(1));
    let failed = store.dump(&device, &ids(1)).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::NoSpace);
    assert!(!store.file(id(0)).exists());
    load(&store, &ids(1));
    assert_eq!(store.tier(1, "failures"), 0, "full is an answer");
}

#[test]
fn a_block_that_only_memory_has_goes_below_with_its_next_dump() {
    let memories = [with_memory().above, Above::Memory(100, WritePolicy::Through)];
    for (above, layout) in memories.into_iter().zip([Layout::File, Layout::segments()]) {
        let setup = Setup {
            above,
            layout,
            ..Setup::default()
        };
        let (_dir, store) = open(&setup);
        let device = Device::filled(&setup, &ids(2));
        store.fault(Rule::on(layout.writing(), Fault::Errno(5)));
        let failed = store.dump(&device, &ids(2)).unwrap_err();
        assert_eq!((failed.len(), failed[0].1.kind()), (2, ErrorKind::Io));
        assert_eq!(store.engine.locate_on_prefix(&ids(2)).unwrap().0, [0, 0]);
        load(&store, &ids(2)); // found, whole, and in memory only
        store.faults.clear();
        store.dump(&device, &ids(2)).unwrap();
        // What another store finds that has no such memory.
        let below = Setup {
            above: Above::Nothing,
            lookup_only: true,
            ..setup
        };
        let other = Store::open(&store.root, below);
        eventually("they are below", || lookup(&other, &ids(2)) == [true, true]);
    }
}

#[test]
fn what_is_written_back_goes_down_when_it_is_given_up() {
    let setup = Setup {
        above: Above::Map(2, WritePolicy::Back),
        ..Setup::default()
    };
    let (_dir, store) = open(&setup);
    for block in ids(5) {
        store.dump(&Device::filled(&setup, &[block]), &[block]).unwrap();
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
    let setup = Setup {
        above: Above::Memory(16, WritePolicy::Back),
        ..Setup::default()
    };
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, setup.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    let gate = store.gate();
    store.fault(Rule::on(setup.layout.writing(), Fault::HangBefore(gate.clone())));
    let device = Device::filled(&setup, &ids(16));
    for block in &ids(16) {
        store.dump(&device, &[*block]).unwrap();
    }
    gate.await_waiting(1);
    store.dump(&device, &ids(1)).unwrap(); // the oldest was the first to go
    clock.advance(setup.deadlines.dump);
    eventually("no move ended in time", || {
        store.tier(1, "copies_dropped") >= 1 && store.memory.as_ref().unwrap().counts().returned == 1
    });
    assert_eq!(store.tier(1, "blocks_written"), 0);
    load(&store, &ids(1));
    gate.open();
}

#[test]
fn shutdown_writes_back_what_only_memory_has() {
    let (dir, setup) = (
        directory(),
        Setup {
            above: Above::Map(100, WritePolicy::Back),
            ..Setup::default()
        },
    );
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, setup.clone(), ManualClock::new());
    let blocks = ids(20);
    for block in &blocks {
        store.dump(&Device::filled(&setup, &[*block]), &[*block]).unwrap();
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
    let store = Store::open(&root, setup);
    let sound: Vec<BlockId> = blocks.into_iter().filter(|&block| block != id(3)).collect();
    load(&store, &sound);
}

#[test]
fn shutdown_writes_back_what_is_its_own_and_leaves_the_other_ranks_blocks_to_them() {
    let dir = directory();
    let root = dir.path().join("root");
    let rank = |tensor_rank, policy| Setup {
        above: Above::Memory(100, policy),
        part: Part {
            tensor_rank,
            ..Part::default()
        },
        ..Setup::default()
    };
    let first = Store::with_clock(&root, rank(0, WritePolicy::Back), ManualClock::new());
    let second = Store::open(&root, rank(1, WritePolicy::Never));
    let (ours, theirs) = (ids(5), (5..12).map(id).collect::<Vec<_>>());
    for (store, blocks) in [(&first, &ours), (&second, &theirs)] {
        let device = Device::filled(&store.setup, blocks);
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
    let setup = Setup {
        above: Above::Map(100, WritePolicy::Back),
        ..Setup::default()
    };
    let clock = ManualClock::new();
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, setup.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    for block in &ids(20) {
        store.dump(&Device::filled(&setup, &[*block]), &[*block]).unwrap();
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
        said.iter().any(|line| line.contains("were not written back")),
        "{said:?}"
    );
    gate.open();
}

#[test]
fn a_stage_that_is_never_written_is_only_read() {
    let (dir, stored) = (directory(), Setup::default());
    let root = dir.path().join("root");
    let store = Store::open(&root, stored.clone());
    store.dump(&Device::filled(&stored, &ids(2)), &ids(2)).unwrap();
    drop(store);
    let setup = Setup {
        above: Above::Map(100, WritePolicy::Never),
        ..Setup::default()
    };
    let store = Store::open(&root, setup.clone());
    store.dump(&Device::filled(&setup, &ids(4)), &ids(4)).unwrap();
    assert!(!store.file(id(3)).exists() && store.map().has(id(3)));
    store.map().forget();
    assert_eq!(lookup(&store, &ids(4)), [true, true, false, false]);
    load(&store, &ids(2));
}

#[test]
fn prefetch_brings_blocks_up_and_nothing_twice() {
    for setup in [with_memory(), with_file()] {
        let (_dir, store) = dumped(&setup, 6);
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
    let device = Device::blank(&store.setup, &[id(0)]);
    let task = store.engine.load(device.rows(&[id(0)]), None).unwrap();
    eventually("the load reads", || reads(&store, 8) == 1);
    let later = &ids(8)[1..];
    assert_eq!(store.engine.prefetch(later, Priority::Speculative).unwrap(), 7);
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
    let (_dir, store) = dumped(&Setup::default(), 2);
    assert_eq!(store.engine.prefetch(&ids(2), Priority::Urgent).unwrap(), 0);
    assert_eq!(store.engine.cancel_prefetch(&ids(2)).unwrap(), 0);
    assert_eq!(reads(&store, 2), 0);
}

#[test]
fn a_store_for_lookups_prefetches_nothing() {
    let memory = Setup {
        above: Above::Memory(100, WritePolicy::Through),
        ..Setup::default()
    };
    for setup in [memory, with_file()] {
        let (_dir, store) = dumped(&setup, 2);
        drop(store.engine.lookup(&ids(2)).unwrap());
        let asks = Setup {
            lookup_only: true,
            ..setup
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
    let device = Device::blank(&store.setup, &ids(1));
    assert!(store.load(&device, &ids(1)).is_err());
    assert!(!store.map().has(id(0)) && device.is_blank(id(0)));
}

#[test]
fn a_lower_stage_that_is_not_there_at_first_is_used_when_it_is() {
    let (dir, clock, setup) = (directory(), ManualClock::new(), brittle(with_memory()));
    let root = dir.path().join("root");
    std::fs::write(&root, "a file, not a directory").unwrap();
    let store = Store::with_clock_now(&root, setup.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    assert_eq!((store.tier(0, "healthy"), store.tier(1, "healthy")), (1, 0));
    let device = Device::filled(&setup, &ids(1));
    assert!(store.dump(&device, &ids(1)).is_err());
    load(&store, &ids(1));
    std::fs::remove_file(&root).unwrap();
    let mut looks = 0_u32;
    eventually("the root is taken up", || {
        // Seldom enough that the look in the background, of many steps, is not late on this clock.
        if looks.is_multiple_of(256) {
            clock.advance(Duration::from_secs(1));
        }
        looks += 1;
        let _ = lookup(&store, &ids(2));
        store.tier(1, "healthy") == 1
    });
    store.dump(&device, &ids(1)).unwrap();
    assert!(store.file(id(0)).exists());
}

#[test]
fn segments_written_back_to_do_not_wait_for_their_age_while_memory_makes_room() {
    let setup = Setup {
        above: Above::Map(2, WritePolicy::Back),
        layout: Layout::Segment(SegmentConfig {
            age: Duration::from_secs(3600),
            ..SegmentConfig::default()
        }),
        ..Setup::default()
    };
    let dir = directory();
    // Time stands still, so nothing is ever old enough.
    let store = Store::with_clock(&dir.path().join("root"), setup.clone(), ManualClock::new());
    let device = Device::filled(&setup, &ids(100));
    for block in ids(100) {
        store.dump(&device, &[block]).unwrap(); // some may find no spare slot
    }
    eventually("they are published", || store.places().len() >= 16);
}
