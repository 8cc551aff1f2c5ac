//! Pipelines: what one tier has, the whole has; what one tier lacks, loses or refuses, the others
//! make good.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{ErrorKind, MissReason, crc32c};
use ucm_infra::{Clock, ManualClock};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::NOWHERE;
use ucm_testkit::{Fault, OpKind};

use crate::common::segments::change;
use crate::common::shared::LONG;
use crate::common::tiers::{dumped, load, lookup, of_blocks, open, reads, with_file, with_memory};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, id, ids};

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
    let early = store.engine.locally_visible().unwrap();
    assert_eq!(early.added.len(), 3);
}

/// This many blocks were promoted: each once it was read, and a load of several may end before.
fn above(store: &Store, blocks: u64) {
    eventually("they are above", || store.tier(0, "promotions") == blocks);
}

#[test]
fn what_is_loaded_from_below_is_kept_above() {
    let (_dir, store) = dumped(&with_memory(), 3);
    store.map().forget();
    assert_eq!(lookup(&store, &ids(4)), [true, true, true, false]);
    load(&store, &ids(3));
    above(&store, 3);
    assert!(ids(3).iter().all(|&id| store.map().has(id)));
    assert_eq!(store.tier(1, "blocks_read"), 3);
    load(&store, &ids(3));
    assert_eq!(store.tier(1, "blocks_read"), 3);
}

#[test]
fn memory_that_has_no_room_stops_neither_dump_nor_load() {
    let (_dir, store) = open(&with_memory());
    store.map().busy(true);
    let device = Device::filled(&store.fixture, &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    load(&store, &ids(2));
    eventually("two dumps and two promotions were dropped", || {
        store.tier(0, "copies_dropped") == 4
    });
    assert_eq!(store.map().len(), 0);
    store.map().busy(false);
    load(&store, &ids(2));
    above(&store, 2);
}

#[test]
fn a_prefix_goes_through_both_tiers() {
    let (_dir, store) = dumped(&with_memory(), 6);
    store.map().forget();
    load(&store, &[id(1), id(4)]);
    above(&store, 2);
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
    above(&store, 2);
    std::fs::remove_file(store.file(id(4))).unwrap();
    let located = store.engine.locate_on_prefix(&ids(5)).unwrap();
    assert_eq!(located, (vec![0, 1, 0, 1], Some(MissReason::Absent)));
    let scattered = [id(4), id(1), id(9), id(2), id(1)];
    let located = store.engine.locate(&scattered).unwrap();
    let tiers = vec![NOWHERE, 1, NOWHERE, 0, 1];
    assert_eq!(located, (tiers, Some(MissReason::Absent)));
    assert_eq!(store.engine.locate(&ids(3)).unwrap(), (vec![0, 1, 0], None));
    assert_eq!(store.engine.locate(&[]).unwrap(), (Vec::new(), None));
    assert_eq!(
        store.engine.explain_on_prefix(&ids(3)).unwrap(),
        (3, None),
        "nothing else differs"
    );
    let device = Device::blank(&store.fixture, &ids(4));
    let task = store.engine.load(device.rows(&ids(4)), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served()[..4], [2, 2, 0, 0]);
    eventually("what was loaded is above", || {
        store.engine.locate_on_prefix(&ids(4)).unwrap().0 == [0; 4]
    });
    // The result of a lookup is a hint; the load decides.
    store.map().forget();
    let task = store.engine.load(device.rows(&[id(1)]), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served()[..4], [0, 1, 0, 0]);
}

#[test]
fn a_copy_refused_above_is_found_and_served_below() {
    let (_dir, store) = dumped(&with_memory(), 1);
    store.map().change(id(0), |record| record[4200] ^= 1);
    store.map().busy(true); // so that the sound one does not take its place
    let device = Device::blank(&store.fixture, &ids(1));
    let task = store.engine.load(device.rows(&ids(1)), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served()[..4], [0, 1, 0, 0]);
    assert_eq!(
        store.engine.locate_on_prefix(&ids(1)).unwrap(),
        (vec![1], None)
    );
}

#[test]
fn a_medium_alone_is_stage_nought() {
    let (_dir, store) = dumped(&Fixture::default(), 2);
    assert_eq!(
        store.engine.locate_on_prefix(&ids(2)).unwrap(),
        (vec![0, 0], None)
    );
    let device = Device::blank(&store.fixture, &ids(2));
    let task = store.engine.load(device.rows(&ids(2)), None).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(task.served()[..4], [2, 0, 0, 0]);
}

#[test]
fn a_damaged_copy_above_is_made_good_from_below() {
    for fixture in [with_memory(), with_file()] {
        let (_dir, store) = dumped(&fixture, 1);
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
        eventually("a sound copy took its place", || {
            store.tier(0, "promotions") == 1
        });
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
    let device = Device::blank(&store.fixture, &ids(1));
    let failed = store.load(&device, &ids(1)).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::Corrupt);
    assert!(device.is_blank(id(0)));
    assert_eq!(lookup(&store, &ids(1)), [false]);
    store
        .dump(&Device::filled(&store.fixture, &ids(1)), &ids(1))
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
            &Fixture {
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
        let target = Device::blank(&store.fixture, &ids(1));
        let failed = store.load(&target, &ids(1)).unwrap_err();
        assert_eq!(failed[0].1.kind(), ErrorKind::Foreign);
        let dumped = store.dump(&Device::filled(&store.fixture, &ids(1)), &ids(1));
        assert_eq!(
            dumped.unwrap_err()[0].1.kind(),
            ErrorKind::Foreign,
            "{layout:?}"
        );
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
        .load(&Device::blank(&store.fixture, &ids(1)), &ids(1))
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
    eventually("it is brought up again", || {
        store.upper_file(id(0)).exists()
    });
    let upper = store.upper.as_ref().unwrap();
    upper.add(of_blocks(OpKind::Read, Fault::Errno(5)));
    load(&store, &ids(2));
    assert_eq!(store.tier(0, "failures"), 2);
    assert_eq!(lookup(&store, &ids(2)), [true, true]);
}

#[test]
fn many_loads_of_a_lost_copy_stream_through_few_slots() {
    let fixture = Fixture {
        slots: 4,
        ..with_file()
    };
    let (_dir, store) = open(&fixture);
    let all = ids(24);
    for block in &all {
        store
            .dump(&Device::filled(&fixture, &[*block]), &[*block])
            .unwrap();
        // One copy at a time: a copy that finds its tier busy is dropped.
        eventually("written above", || store.upper_file(*block).exists());
        std::fs::remove_file(store.upper_file(*block)).unwrap();
    }
    load(&store, &all);
    eventually("every slot is back", || store.stat("slots_free") == 4);
}

/// Tiers whose breakers open at the first failure.
fn brittle(fixture: Fixture) -> Fixture {
    Fixture {
        breaker: BreakerConfig {
            threshold: 1,
            cool_down: Duration::from_secs(10),
            window: Duration::from_secs(60),
            max_stuck: 64,
            ..BreakerConfig::default()
        },
        ..fixture
    }
}

#[test]
fn a_dead_lower_stage_costs_once_and_memory_serves_on() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), brittle(with_memory()));
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    store
        .dump(&Device::filled(&fixture, &ids(2)), &ids(2))
        .unwrap();
    let rule = store.faults.add(of_blocks(OpKind::Stat, Fault::Errno(5)));
    // Id 2 is nowhere: the lower tier is asked for it, once.
    for _ in 0..5 {
        assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
    }
    assert_eq!(store.faults.hits(rule), 1);
    assert_eq!((store.tier(0, "healthy"), store.tier(1, "healthy")), (1, 0));
    assert_eq!(store.stat("healthy"), 1, "what memory has is served");
    load(&store, &ids(2));
    let failed = store
        .dump(&Device::filled(&fixture, &[id(7)]), &[id(7)])
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
    store
        .dump(&Device::filled(&fixture, &[id(8)]), &[id(8)])
        .unwrap();
    assert!(store.file(id(8)).exists());
    let said = store.said();
    let of = |text: &str| said.iter().filter(|line| line.contains(text)).count();
    assert_eq!(
        (
            of("tier posix is switched off"),
            of("tier posix answers again")
        ),
        (1, 1)
    );
}

#[test]
fn a_hanging_lower_stage_hides_no_hit_of_memory() {
    let (_dir, store) = dumped(
        &Fixture {
            deadlines: ucm_store::engine::Deadlines {
                lookup: Duration::from_secs(2),
                ..Fixture::default().deadlines
            },
            ..brittle(with_memory())
        },
        2,
    );
    let gate = store.gate();
    store.fault(of_blocks(OpKind::Stat, Fault::HangBefore(gate.clone())));
    assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
    assert_eq!(store.missed("lookup_late"), 1);
    assert_eq!(
        lookup(&store, &ids(3)),
        [true, true, false],
        "at once, by now"
    );
    assert_eq!(store.missed("unhealthy"), 1);
    gate.open();
}

#[test]
fn a_dead_upper_root_hides_nothing_of_the_lower() {
    let (_dir, store) = dumped(&brittle(with_file()), 2);
    let upper = store.upper.as_ref().unwrap();
    for kind in [OpKind::Stat, OpKind::Read, OpKind::Publish] {
        upper.add(of_blocks(kind, Fault::Errno(5)));
    }
    for _ in 0..2 {
        assert_eq!(lookup(&store, &ids(3)), [true, true, false]);
        load(&store, &ids(2));
        store
            .dump(&Device::filled(&store.fixture, &[id(9)]), &[id(9)])
            .unwrap();
    }
    assert_eq!((store.tier(0, "healthy"), store.tier(1, "healthy")), (0, 1));
}

#[test]
fn a_load_that_hangs_above_is_read_below_in_its_time() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), brittle(with_file()));
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    store
        .dump(&Device::filled(&fixture, &ids(2)), &ids(2))
        .unwrap();
    eventually("copies are above", || store.tier(0, "blocks_written") == 2);
    let gate = store.gate();
    let upper = store.upper.as_ref().unwrap();
    upper.add(of_blocks(OpKind::Read, Fault::HangBefore(gate.clone())));
    let device = Device::blank(&fixture, &ids(2));
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
fn a_load_that_joined_a_read_that_is_late_above_has_its_own_time_there() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), with_file());
    let root = dir.path().join("root");
    let store = Store::with_clock(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    let device = Device::filled(&fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    eventually("a copy is above", || store.tier(0, "blocks_written") == 1);
    std::fs::remove_file(store.file(id(0))).unwrap();
    let (gate, upper) = (store.gate(), store.upper.as_ref().unwrap());
    upper.add(of_blocks(OpKind::Read, Fault::HangBefore(gate.clone())).times(1));
    let [hasty, patient] = [2, 60].map(|seconds| {
        let deadline = Some(Duration::from_secs(seconds));
        let task = store.engine.load(device.rows(&ids(1)), deadline);
        gate.await_waiting(1);
        task.unwrap()
    });
    clock.advance(Duration::from_secs(2));
    assert!(store.outcome(&hasty).is_err());
    store.outcome(&patient).unwrap();
    gate.open();
}

#[test]
fn a_full_lower_stage_is_reported_and_memory_serves() {
    let (_dir, store) = open(&with_memory());
    store.fault(of_blocks(OpKind::Publish, Fault::Errno(28)));
    let device = Device::filled(&store.fixture, &ids(1));
    let failed = store.dump(&device, &ids(1)).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::NoSpace);
    assert!(!store.file(id(0)).exists());
    load(&store, &ids(1));
    assert_eq!(store.tier(1, "failures"), 0, "full is an answer");
}

#[test]
fn a_lower_stage_that_is_not_there_at_first_is_used_when_it_is() {
    let (dir, clock, mut fixture) = (directory(), ManualClock::new(), brittle(with_memory()));
    // the clock below runs ahead of the look in the background, which is of many steps
    fixture.deadlines.probe = LONG;
    let root = dir.path().join("root");
    std::fs::write(&root, "a file, not a directory").unwrap();
    let store = Store::with_clock_now(&root, fixture.clone(), Arc::clone(&clock) as Arc<dyn Clock>);
    assert_eq!((store.tier(0, "healthy"), store.tier(1, "healthy")), (1, 0));
    let device = Device::filled(&fixture, &ids(1));
    assert!(store.dump(&device, &ids(1)).is_err());
    load(&store, &ids(1));
    std::fs::remove_file(&root).unwrap();
    let mut looks = 0_u32;
    eventually("the root is taken up", || {
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
