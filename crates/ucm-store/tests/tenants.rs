//! A quota for each tenant: over every medium the oldest blocks of a tenant above it are removed,
//! and no others; blocks of other writers and older ones count too; a removal that fails is tried
//! again.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::BlockId;
use ucm_infra::{Clock, LANE_SPACE, ManualClock, MonotonicTime};
use ucm_io::{IoOptions, IoPool};
use ucm_media::quota::Capacity;
use ucm_store::engine::Hint;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::merging::{eager, there};
use crate::common::segments::{finds, loads};
use crate::common::shared::in_time;
use crate::common::{
    Above, Device, Fixture, Layout, Medium, Store, directory, eventually, id, media, on, shape,
};

/// No tenant.
const NO_TENANT: u8 = 0;

/// Blocks whose record is longer than its header by far.
fn of(medium: Medium) -> Fixture {
    Fixture {
        above: Above::Nothing,
        tensors: vec![6144, 2048],
        compressed: false,
        keys: None,
        unnamed: false,
        ..on(medium)
    }
}

/// Files, segments, encrypted segments, and every other medium below memory that is here.
fn columns() -> Vec<Fixture> {
    let layouts = [Layout::File, Layout::segments()];
    let files = layouts.map(|layout| Fixture {
        layout,
        ..of(Medium::Posix)
    });
    let encrypted = files[1].clone().encrypted(1);
    let others = media()
        .into_iter()
        .filter(|medium| matches!(medium, Medium::Kind(_)));
    files
        .into_iter()
        .chain([encrypted])
        .chain(others.map(of))
        .collect()
}

fn what(fixture: &Fixture) -> String {
    format!("{:?} {:?}", fixture.medium, fixture.layout)
}

/// With a quota of this many blocks and a little more.
fn bounded(fixture: &Fixture, blocks: u64) -> Fixture {
    let bytes = shape(fixture).1.record_len() as u64 * blocks + 100;
    Fixture {
        tenant_quota: NonZeroU64::new(bytes).map(Capacity::Bytes),
        ..fixture.clone()
    }
}

fn blocks(numbers: std::ops::Range<u8>) -> Vec<BlockId> {
    numbers.map(id).collect()
}

/// Dumps blocks of a tenant, one after the other.
fn dump(store: &Store, tenant: u8, blocks: &[BlockId]) {
    let hint = Hint {
        tenant: [tenant; 32],
        ..Hint::default()
    };
    store
        .engine
        .describe(blocks.iter().map(|&block| (block, hint)))
        .unwrap();
    for block in blocks {
        let block = std::slice::from_ref(block);
        store
            .dump(&Device::filled(&store.fixture, block), block)
            .unwrap();
    }
}

/// Whether the last `newest` of these are there and the others are not.
fn has_newest(store: &Store, blocks: &[BlockId], newest: usize) -> bool {
    let there = finds(store, blocks).into_iter().enumerate();
    let mut right = there.map(|(at, there)| there == (at + newest >= blocks.len()));
    right.all(|right| right)
}

/// How many blocks the tiers have removed for it.
fn removed(store: &Store) -> u64 {
    let stats = store.engine.stats();
    let tiers = stats["tiers"].as_array().unwrap().iter();
    tiers
        .map(|tier| tier["quota_removed"].as_u64().unwrap())
        .sum()
}

#[test]
fn a_tenant_keeps_its_newest_and_others_lose_nothing() {
    for fixture in columns() {
        let (dir, what) = (directory(), what(&fixture));
        let store = Store::open(dir.path(), bounded(&fixture, 4));
        dump(&store, NO_TENANT, &blocks(30..36));
        dump(&store, 2, &blocks(20..24));
        for upto in 1..=9 {
            dump(&store, 1, &blocks(upto - 1..upto));
            let newest = usize::from(upto).min(4);
            let within = || has_newest(&store, &blocks(0..upto), newest);
            eventually(&format!("it is within its quota, {what}"), within);
        }
        eventually("they are counted", || removed(&store) == 5);
        assert_eq!(finds(&store, &blocks(20..24)), [true; 4], "{what}");
        assert_eq!(finds(&store, &blocks(30..36)), [true; 6], "{what}");
        for kept in [blocks(5..9), blocks(20..24), blocks(30..36)] {
            assert!(loads(&store, &kept), "{what}");
        }
        // What went is stored again like any other, and then it is the newest.
        dump(&store, 1, &blocks(0..1));
        let all: Vec<_> = blocks(5..9).into_iter().chain(blocks(0..1)).collect();
        eventually("the next one went for it", || has_newest(&store, &all, 4));
        assert!(loads(&store, &blocks(0..1)), "{what}");
    }
}

#[test]
fn what_was_there_before_counts() {
    for fixture in columns() {
        let (dir, what) = (directory(), what(&fixture));
        let before = Store::open(dir.path(), fixture.clone());
        dump(&before, 1, &blocks(0..8));
        dump(&before, 2, &blocks(20..23));
        dump(&before, NO_TENANT, &blocks(30..36));
        drop(before);
        if fixture.medium == Medium::Kind("toy") {
            // With the last of its threads that lets it go, which may be a moment later.
            eventually("it ends with its store", || {
                let store = Store::open(dir.path(), fixture.clone());
                finds(&store, &blocks(0..8)) == [false; 8]
            });
            continue;
        }
        let store = Store::open(dir.path(), fixture.clone());
        eventually("all are there again", || {
            finds(&store, &blocks(0..8)) == [true; 8]
        });
        drop(store);
        let store = Store::open(dir.path(), bounded(&fixture, 3));
        eventually(&format!("it is within its quota, {what}"), || {
            has_newest(&store, &blocks(0..8), 3)
        });
        for kept in [blocks(5..8), blocks(20..23), blocks(30..36)] {
            eventually("they are found", || {
                finds(&store, &kept).iter().all(|&there| there)
            });
            assert!(loads(&store, &kept), "{what}");
        }
        eventually("they are counted", || removed(&store) == 5); // after they are removed
        // Among the blocks that were found before, those of now are the newest.
        dump(&store, 1, &blocks(8..9));
        eventually("the next one went", || has_newest(&store, &blocks(0..9), 3));
    }
}

/// A store whose clock the test moves.
fn on_clock(dir: &Path, fixture: Fixture) -> (Store, Arc<ManualClock>) {
    let clock = ManualClock::new();
    let store = Store::with_clock(dir, fixture, Arc::clone(&clock) as Arc<dyn Clock>);
    (store, clock)
}

#[test]
fn what_another_engine_writes_counts_at_the_next_scan() {
    for layout in [Layout::File, Layout::segments()] {
        let (dir, fixture) = (
            directory(),
            Fixture {
                layout,
                ..of(Medium::Posix)
            },
        );
        let other = Store::open(dir.path(), fixture.clone());
        dump(&other, 1, &blocks(0..2));
        let (store, clock) = on_clock(dir.path(), bounded(&fixture, 4));
        dump(&other, 1, &blocks(2..8));
        dump(&other, 2, &blocks(20..24));
        let scan = Duration::from_secs(200);
        in_time(&clock, scan, "all count", || {
            has_newest(&store, &blocks(0..8), 4)
        });
        in_time(&clock, scan, "they are found", || {
            finds(&store, &blocks(20..24)) == [true; 4]
        });
        if layout == Layout::File {
            assert!(
                has_newest(&other, &blocks(0..8), 4),
                "a removed block is a miss for all"
            );
        }
    }
}

#[test]
fn a_removal_that_fails_is_tried_again() {
    for fault in [Fault::Errno(5), Fault::LostReply(5)] {
        let dir = directory();
        let fixture = Fixture {
            layout: Layout::File,
            ..of(Medium::Posix)
        };
        let (store, clock) = on_clock(dir.path(), bounded(&fixture, 2));
        store.fault(Rule::on(OpKind::Remove, fault.clone()).path("/blocks/"));
        for n in 0..4 {
            clock.advance(Duration::from_millis(1)); // or they would be of one age
            dump(&store, 1, &blocks(n..n + 1));
        }
        dump(&store, 2, &blocks(20..22));
        eventually("it was tried", || {
            store
                .faults
                .log()
                .iter()
                .any(|seen| seen.kind == OpKind::Remove)
        });
        if matches!(fault, Fault::Errno(_)) {
            assert_eq!(finds(&store, &blocks(0..4)), [true; 4]);
            assert_eq!(removed(&store), 0);
        }
        store.faults.clear();
        in_time(&clock, Duration::from_secs(60), "it succeeds", || {
            has_newest(&store, &blocks(0..4), 2)
        });
        assert!(loads(&store, &blocks(2..4)) && loads(&store, &blocks(20..22)));
    }
}

#[test]
fn a_removal_that_hangs_delays_nothing() {
    let dir = directory();
    let fixture = Fixture {
        layout: Layout::File,
        ..of(Medium::Posix)
    };
    let (store, clock) = on_clock(dir.path(), bounded(&fixture, 2));
    let gate = store.gate();
    store.fault(
        Rule::on(OpKind::Remove, Fault::HangBefore(gate.clone()))
            .path("/blocks/")
            .times(1),
    );
    for n in 0..3 {
        clock.advance(Duration::from_millis(1));
        dump(&store, 1, &blocks(n..n + 1));
    }
    eventually("it hangs", || gate.waiting() > 0);
    dump(&store, 1, &blocks(3..4));
    assert!(loads(&store, &blocks(2..4)));
    // Past its deadline it is written off, and another thread tries again.
    in_time(&clock, Duration::from_secs(200), "it succeeds", || {
        has_newest(&store, &blocks(0..4), 2)
    });
    gate.open();
}

#[test]
fn a_store_for_lookups_sees_the_same_and_removes_nothing() {
    let (dir, fixture) = (
        directory(),
        Fixture {
            layout: Layout::segments(),
            ..of(Medium::Posix)
        },
    );
    let store = Store::open(dir.path(), fixture.clone());
    dump(&store, 1, &blocks(0..6));
    let looking = Fixture {
        lookup_only: true,
        ..bounded(&fixture, 2)
    };
    let reader = Store::open(dir.path(), looking);
    eventually("they are no hits", || has_newest(&reader, &blocks(0..6), 2));
    assert_eq!(finds(&store, &blocks(0..6)), [true; 6]);
    assert!(loads(&store, &blocks(0..6)));
}

#[test]
fn below_memory_the_quota_holds_and_memory_keeps_its_own() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        let (dir, fixture) = (
            directory(),
            Fixture {
                layout: Layout::File,
                above: Above::Memory(if policy == WritePolicy::Back { 4 } else { 256 }, policy),
                ..of(Medium::Posix)
            },
        );
        let store = Store::open(dir.path(), bounded(&fixture, 3));
        // Of what memory gives up some may be dropped, so it is as many as it takes.
        dump(&store, 1, &blocks(0..16));
        // however long those who write and remove below get no turn
        let mut next = (16..u8::MAX).cycle();
        eventually("more than the quota was written below", || {
            let block = next.next().unwrap();
            dump(&store, 1, &blocks(block..block + 1));
            store.tier(1, "quota_removed") > 0
        });
        let io = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
        let io = io.here(LANE_SPACE, MonotonicTime::NEVER);
        eventually("it is within its quota below", || {
            store.backend.list(&io).unwrap().len() <= 3
        });
        assert_eq!(store.tier(0, "quota_removed"), 0);
        if policy == WritePolicy::Through {
            assert_eq!(finds(&store, &blocks(0..16)), [true; 16]);
        }
    }
}

#[test]
fn a_share_is_one_of_what_the_level_may_hold() {
    let fixture = of(Medium::Posix);
    let blocks_wanted = shape(&fixture).1.record_len() as f64 * 3.5;
    let share = Some(Capacity::Percent(
        blocks_wanted * 100.0 / (1u64 << 30) as f64,
    ));
    for layout in [Layout::File, Layout::segments()] {
        let dir = directory();
        let store = Store::open(
            dir.path(),
            Fixture {
                layout,
                tenant_quota: share,
                capacity: Some(1 << 30),
                ..fixture.clone()
            },
        );
        dump(&store, 1, &blocks(0..8));
        eventually("it is within its share", || {
            has_newest(&store, &blocks(0..8), 3)
        });
    }
}

#[test]
fn the_room_of_what_went_from_segments_is_given_back() {
    let dir = directory();
    let fixture = Fixture {
        layout: eager(Duration::ZERO).layout,
        ..of(Medium::Posix)
    };
    let store = Store::open(dir.path(), bounded(&fixture, 2));
    dump(&store, 2, &blocks(20..22));
    dump(&store, 1, &blocks(0..12));
    eventually("it is within its quota", || {
        has_newest(&store, &blocks(0..12), 2)
    });
    let kept: BTreeSet<_> = blocks(10..12).into_iter().chain(blocks(20..22)).collect();
    // A segment of which half is kept stays as it is.
    eventually("most of them are removed", || {
        let there = there(&store);
        there.is_superset(&kept) && there.len() <= 2 * kept.len()
    });
    assert!(loads(&store, &blocks(10..12)) && loads(&store, &blocks(20..22)));
}
