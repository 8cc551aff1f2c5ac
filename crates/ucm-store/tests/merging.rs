//! Merging of segments under readers and writers: what is gained, how long the old ones stay, which
//! copy counts.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ucm_core::{BlockId, Part};
use ucm_infra::{Clock, ManualClock, MonotonicTime};
use ucm_media::backend::Flush;
use ucm_store::engine::Until;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::merging::{
    eager, fill, filling, finds, loads, loads_each, many, privates, seal, there,
};
use crate::common::segments::{change, places};
use crate::common::shared::{LONG, in_time, on};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, ids};

#[test]
fn small_segments_become_one_from_which_everything_is_read() {
    let (dir, still) = (directory(), ManualClock::new());
    fill(dir.path(), &filling(), &ids(8));
    let reader = on(&still, dir.path(), &filling());
    let store = Store::open(dir.path(), eager(Duration::ZERO));
    eventually("they are merged", || store.segments().len() == 1);
    assert_eq!(
        (there(&store), store.places().len()),
        (BTreeSet::from_iter(ids(8)), 8)
    );
    assert!(loads(&store, &ids(8)));
    assert_eq!(
        finds(&reader, &ids(8)),
        [true; 8],
        "in segments that are removed by now"
    );
    assert!(loads_each(&reader, &ids(8)), "it refreshes its index");
    assert_eq!(
        (
            reader.stat("records_refused"),
            store.stat("segments_merged")
        ),
        (0, 8)
    );
    eventually("no claim is left", || privates(&store).is_empty());
    drop((reader, store));
    assert!(loads(&Store::open(dir.path(), filling()), &ids(8)));
}

#[test]
fn segments_of_another_part_are_left_alone() {
    let dir = directory();
    let part = Part {
        tensor_rank: 1,
        ..Part::default()
    };
    fill(dir.path(), &Fixture { part, ..filling() }, &many(100..108));
    let theirs = BTreeSet::from_iter(Store::open(dir.path(), filling()).segments());
    let store = Store::open(dir.path(), filling());
    let device = Device::filled(&store.fixture, &ids(8));
    ids(8)
        .iter()
        .for_each(|block| seal(&store, &device, &[*block]));
    drop(store);
    let store = Store::open(dir.path(), eager(Duration::ZERO));
    eventually("its own are merged", || store.segments().len() == 9);
    assert!(BTreeSet::from_iter(store.segments()).is_superset(&theirs));
    assert_eq!(store.stat("segments_merged"), 8);
    assert!(loads(&store, &ids(8)));
}

#[test]
fn merged_segments_stay_a_minute_and_count_as_used() {
    let (dir, clock) = (directory(), ManualClock::new());
    fill(dir.path(), &filling(), &ids(8));
    let store = on(
        &clock,
        dir.path(),
        &Fixture {
            layout: Layout::segments(),
            ..Fixture::default()
        },
    );
    let before = store.stat("storage_used_bytes");
    let removal = store.gate();
    let hang = Rule::on(OpKind::Remove, Fault::HangBefore(removal.clone())).path("/segments/");
    store.fault(hang);
    in_time(&clock, LONG, "they are merged", || {
        store.segments().len() == 9
    });
    let merged = clock.now();
    assert!(
        merged.0 >= 60_000_000_000,
        "not before they were known for a minute"
    );
    eventually("both count", || {
        store.stat("storage_used_bytes") >= before + 8 * 8192
    });
    assert!(loads(&store, &ids(8)));
    in_time(&clock, LONG, "they are to be removed", || {
        removal.waiting() > 0
    });
    let stayed = clock.now().since(merged);
    assert!(stayed >= Duration::from_secs(58), "{stayed:?}");
    assert_eq!(store.segments().len(), 9);
    removal.open();
    eventually("they are removed", || store.segments().len() == 1);
    assert!(loads(&store, &ids(8)));
}

/// Bytes of everything below a root that counts.
fn stored(dir: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            bytes += stored(&path);
        } else if path
            .extension()
            .is_some_and(|end| end == "seg" || end == "tmp")
        {
            bytes += entry.metadata().map_or(0, |meta| meta.len()); // it may be removed at any time
        }
    }
    bytes
}

/// Room for segments of eight records beside which one record is a small one.
const LIMIT: u64 = 8 << 20;

#[test]
fn the_limit_holds_while_both_copies_are_there() {
    let dir = directory();
    let small = |fixture| Fixture {
        capacity: Some(LIMIT),
        ..fixture
    };
    fill(dir.path(), &small(filling()), &many(0..300));
    let store = Store::open(dir.path(), small(eager(Duration::from_millis(100))));
    let device = Device::filled(&store.fixture, &many(300..360));
    let (mut most, mut published) = (0, Vec::new());
    for block in many(300..360) {
        if store.dump(&device, &[block]).is_ok() {
            published.push(block);
        }
        most = most.max(stored(
            &dir.path().join(crate::common::identity("w").namespace()),
        ));
        assert!(most <= LIMIT, "{most} of {LIMIT}");
    }
    eventually("some were merged", || store.stat("segments_merged") > 100);
    assert!(stored(dir.path()) <= LIMIT);
    let found = |blocks: &[BlockId]| finds(&store, blocks).iter().filter(|&&found| found).count();
    let there = found(&many(0..300));
    let right = loads_each(&store, &many(0..300)) && loads_each(&store, &published);
    // Checked last: one may be removed at any time.
    if store.stat("records_removed") == 0 {
        assert_eq!((there, right), (300, true), "none was removed");
    }
}

#[test]
fn readers_and_writers_go_on_while_segments_are_merged() {
    let dir = directory();
    let stored = many(0..60);
    fill(dir.path(), &filling(), &stored);
    let reader = Store::open(dir.path(), filling());
    let mergers: Vec<_> = (0..2)
        .map(|_| Store::open(dir.path(), eager(Duration::from_millis(30))))
        .collect();
    let (over, more) = (AtomicBool::new(false), many(60..120));
    let device = Device::filled(&mergers[0].fixture, &more);
    std::thread::scope(|scope| {
        for turn in 0..2usize {
            let (reader, stored, over) = (&reader, &stored, &over);
            scope.spawn(move || {
                let mut at = turn * 7;
                while !over.load(Ordering::Relaxed) {
                    // A minute's grace is a blink here, so it may come too late; its bytes are
                    // right or there are none.
                    loads(reader, &[stored[at % 60], stored[(at + 30) % 60]]);
                    at += 13;
                }
            });
        }
        for (turn, block) in more.iter().enumerate() {
            mergers[turn % 2].dump(&device, &[*block]).unwrap();
        }
        let merged = || {
            mergers
                .iter()
                .map(|store| store.stat("segments_merged"))
                .sum::<u64>()
        };
        eventually("most are merged", || {
            merged() >= 100 && reader.segments().len() < 20
        });
        over.store(true, Ordering::Relaxed);
    });
    for store in mergers.iter().chain([&reader]) {
        let all: Vec<_> = stored.iter().chain(&more).copied().collect();
        eventually("all is found", || {
            finds(store, &all).iter().all(|&found| found)
        });
        eventually("and read", || loads_each(store, &all));
        assert_eq!(store.stat("records_refused"), 0);
    }
}

/// Stores these blocks of one segment again, as if they had been damaged there.
fn store_again(store: &Store, device: &Device, blocks: &[BlockId], file: &Path) {
    let places = places(file);
    let flip = || {
        change(file, |bytes| {
            for place in places.iter().filter(|place| blocks.contains(&place.id)) {
                bytes[place.offset + 5000] ^= 1;
            }
        });
    };
    flip();
    blocks
        .iter()
        .for_each(|block| assert!(!loads(store, &[*block])));
    // Refused until they are published, so no test sees when they are written.
    let task = store.engine.dump(device.rows(blocks)).unwrap();
    eventually("they are published", || {
        store.backend.flush(Flush::Now);
        task.wait(
            store.engine.clock(),
            Until::Published,
            Some(MonotonicTime(0)),
        )
    });
    store.outcome(&task).unwrap();
    flip();
}

#[test]
fn of_a_sparse_segment_only_what_is_taken_from_it_is_kept() {
    let (dir, fixture) = (directory(), filling());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(4));
    seal(&store, &device, &ids(4));
    let sparse = store.segments().remove(0);
    store_again(&store, &device, &ids(3), &sparse);
    assert_eq!(store.places().len(), 7);
    drop(store);
    let store = Store::open(dir.path(), eager(Duration::ZERO));
    // What was merged goes a file at a time.
    eventually("it is merged", || {
        !sparse.exists() && store.places().len() == 4
    });
    assert_eq!(there(&store), BTreeSet::from_iter(ids(4)));
    assert!(loads(&store, &ids(4)));
    assert!(loads(&Store::open(dir.path(), filling()), &ids(4)));
}

/// When a segment was sealed, by its footer.
fn sealed(file: &Path) -> u64 {
    let bytes = std::fs::read(file).unwrap();
    let at = bytes.len() - 128 + 80;
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn a_copy_is_no_newer_than_what_it_was_made_of() {
    let (dir, fixture) = (directory(), filling());
    fill(dir.path(), &fixture, &ids(8));
    // Before there is one that merges: it may be done before anything else is looked at.
    let still = Store::open(dir.path(), fixture.clone());
    let last = still.segments().iter().map(|file| sealed(file)).max();
    drop(still);
    let store = Store::with_clock(dir.path(), eager(Duration::ZERO), SystemTimeAhead::shared());
    eventually("they are merged", || store.segments().len() == 1);
    let merged = store.segments().remove(0);
    drop(store);
    assert_eq!(
        Some(sealed(&merged)),
        last.map(|last| last + 1),
        "whatever the clock of who merged"
    );
    let store = Store::open(dir.path(), fixture.clone());
    store_again(&store, &Device::filled(&fixture, &ids(1)), &ids(1), &merged);
    let newest = store
        .segments()
        .into_iter()
        .find(|file| *file != merged)
        .unwrap();
    drop(store);
    change(&newest, |bytes| bytes[4096 + 5000] ^= 1);
    let store = Store::open(dir.path(), fixture);
    assert!(
        !loads(&store, &ids(1)),
        "what was stored last is what is read"
    );
}

/// The clock of a host that is an hour ahead.
#[derive(Debug)]
struct SystemTimeAhead(Arc<dyn Clock>);

impl SystemTimeAhead {
    fn shared() -> Arc<dyn Clock> {
        Arc::new(Self(ucm_infra::SystemClock::shared()))
    }
}

impl Clock for SystemTimeAhead {
    fn now(&self) -> ucm_infra::MonotonicTime {
        self.0.now()
    }

    fn wall_ns(&self) -> u64 {
        self.0.wall_ns() + 3_600_000_000_000
    }

    fn sleep(
        &self,
        notify: &ucm_infra::Notify,
        seen: u64,
        until: Option<ucm_infra::MonotonicTime>,
    ) {
        self.0.sleep(notify, seen, until);
    }
}
