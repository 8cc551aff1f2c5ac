//! The memory tier as the only backend, between stores of one host: what is kept, what goes, who
//! sees it.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock, MonotonicTime, SystemClock};
use ucm_media::backend::{Backend, Listed, LocallyVisible, Written};
use ucm_media::memory::{MemoryBackend, Policy, cache_bytes};
use ucm_media::quota::Capacity;

use crate::common::memory::{fixture, keep, record, tier};
use crate::common::{
    Device, Fixture, Medium, Store, directory, eventually, id, ids, memory_config, pages, shape,
};

fn list(tier: &MemoryBackend) -> Vec<Listed> {
    let mut listed = tier
        .list(&tier.pool().here(0, MonotonicTime::NEVER))
        .unwrap();
    listed.sort_by_key(|listed| listed.id);
    listed
}

fn sees(reader: &MemoryBackend, regions: u64) {
    eventually("the other regions are found", || {
        reader.look_around();
        reader.counts().neighbours == regions
    });
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("regions")).map_or(0, Iterator::count)
}

#[test]
fn a_scheduler_and_another_rank_see_and_load_what_one_rank_dumped() {
    let dir = directory();
    let (writer, reader) = (
        Store::open(dir.path(), fixture(64)),
        Store::open(dir.path(), fixture(64)),
    );
    let scheduler = Store::open(
        dir.path(),
        Fixture {
            lookup_only: true,
            ..fixture(64)
        },
    );
    let all = ids(12);
    writer
        .dump(&Device::filled(&writer.fixture, &all), &all)
        .unwrap();
    for other in [&reader, &scheduler] {
        sees(
            other.memory.as_ref().unwrap(),
            if other.fixture.lookup_only { 2 } else { 1 },
        );
        assert_eq!(other.engine.lookup_on_prefix(&all).unwrap(), 12);
        assert_eq!(
            other.engine.lookup(&[id(3), id(200)]).unwrap(),
            [true, false]
        );
    }
    let target = Device::blank(&reader.fixture, &all);
    reader.load(&target, &all).unwrap();
    assert!(all.iter().all(|&id| target.is_right(id)));
    // It is there already: nothing is kept twice on one host.
    reader
        .dump(&Device::filled(&reader.fixture, &all), &all)
        .unwrap();
    assert_eq!(
        (
            reader.stat("blocks_present"),
            reader.stat("storage_records")
        ),
        (12, 0)
    );
    drop(writer);
    eventually("a removed record is no hit", || {
        scheduler.memory.as_ref().unwrap().look_around();
        scheduler.engine.lookup_on_prefix(&all).unwrap() == 0
    });
    drop((reader, scheduler));
    assert_eq!(files(dir.path()), 0, "nothing is left behind");
}

#[test]
fn memory_stays_within_its_bound_and_keeps_what_was_used_last() {
    for policy in Policy::ALL {
        let dir = directory();
        let store = Store::open(
            dir.path(),
            Fixture {
                medium: Medium::Memory(8, policy),
                slots: 8,
                ..Fixture::default()
            },
        );
        let all = ids(40);
        let device = Device::filled(&store.fixture, &all);
        for &id in &all {
            store.dump(&device, &[id]).unwrap();
            assert!(store.stat("storage_used_bytes") <= store.stat("storage_capacity_bytes"));
        }
        assert_eq!(
            (store.stat("storage_records"), store.stat("records_removed")),
            (8, 32),
            "{policy:?}"
        );
        let found = store.engine.lookup(&all).unwrap();
        assert_eq!(found.iter().filter(|&&there| there).count(), 8);
        let target = Device::blank(&store.fixture, &all);
        for (&id, there) in all.iter().zip(found) {
            assert_eq!(store.load(&target, &[id]).is_ok(), there);
            assert!(if there {
                target.is_right(id)
            } else {
                target.is_blank(id)
            });
        }
        assert_eq!(
            store.stat("records_refused"),
            0,
            "what went is a miss, not damage"
        );
    }
}

#[test]
fn a_flipped_bit_is_refused_by_every_reader_and_the_next_dump_heals() {
    let dir = directory();
    let (writer, reader) = (
        Store::open(dir.path(), fixture(8)),
        Store::open(dir.path(), fixture(8)),
    );
    let region = writer.memory.as_ref().unwrap().region().unwrap();
    let device = Device::filled(&writer.fixture, &ids(8));
    for (n, at) in [0usize, 13, 100, 4000, 4096, 4300, 4500, 8191]
        .into_iter()
        .enumerate()
    {
        let block = id(n as u8);
        writer.dump(&device, &[block]).unwrap();
        assert!(pages::flip(block, region, at));
        for store in [&writer, &reader] {
            sees(store.memory.as_ref().unwrap(), 1);
            let target = Device::blank(&store.fixture, &[block]);
            let error = store.load(&target, &[block]).unwrap_err().remove(0).1;
            assert!(
                matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Foreign),
                "byte {at}: {error}"
            );
            assert!(target.is_blank(block), "byte {at}");
            assert!(!store.engine.lookup(&[block]).unwrap()[0]);
        }
        for store in [&writer, &reader] {
            store.dump(&device, &[block]).unwrap();
            let target = Device::blank(&store.fixture, &[block]);
            store.load(&target, &[block]).unwrap();
            assert!(target.is_right(block), "byte {at}");
        }
    }
}

#[test]
fn other_namespaces_lengths_and_processes_that_share_nothing_are_not_seen() {
    let dir = directory();
    let ours = tier(dir.path(), 8, |_| ());
    let namespace = tier(dir.path(), 8, |config| {
        config.scope.identity = crate::common::identity("other")
    });
    let length = tier(dir.path(), 8, |config| {
        config.scope.record = shape(&Fixture {
            layers: 60,
            layers_per_shard: 60,
            ..Fixture::default()
        })
        .1;
    });
    let alone = tier(dir.path(), 8, |config| config.shared = false);
    keep(&ours, ids(3));
    let friend = tier(dir.path(), 0, |_| ());
    sees(&friend, 2); // longer records may be those of its blocks, with side shards
    for other in [&namespace, &length, &alone] {
        other.look_around();
        assert!(!other.contains(id(1)) && other.counts().neighbours == 0);
    }
    assert!(friend.contains(id(1)) && files(dir.path()) == 3);
    assert!(
        alone
            .open(MonotonicTime::NEVER)
            .unwrap()
            .contains("not shared"),
        "{}",
        alone.open(MonotonicTime::NEVER).unwrap()
    );
}

#[test]
fn what_is_pinned_stays_and_a_tier_full_of_pins_is_busy() {
    let dir = directory();
    let tier = tier(dir.path(), 4, |_| ());
    keep(&tier, ids(4));
    let pins: Vec<_> = ids(4).into_iter().map(|id| tier.pin(id).unwrap()).collect();
    let error = tier.insert(id(9), &record(id(9)), 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("raise cache_size"), "{error}");
    for (pin, id) in pins.iter().zip(ids(4)) {
        assert_eq!(**pin, record(id), "byte for byte");
    }
    // Removed by name, and still held.
    assert_eq!(
        tier.delete(&tier.pool().here(0, MonotonicTime::NEVER), &ids(1))
            .unwrap(),
        1
    );
    assert!(!tier.contains(id(0)) && *pins[0] == record(id(0)));
    assert!(tier.insert(id(9), &record(id(9)), 0).is_err());
    drop(pins);
    keep(&tier, [id(9), id(10)]);
    assert_eq!((tier.stats().usage.records, tier.counts().evicted), (4, 1));
}

#[test]
fn records_of_a_wrong_length_and_writers_without_memory_are_refused() {
    let dir = directory();
    let (full, none) = (tier(dir.path(), 4, |_| ()), tier(dir.path(), 0, |_| ()));
    let whole = record(id(1));
    for len in [0, 1, whole.len() - 1] {
        let error = full.insert(id(1), &whole[..len], 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    let error = none.insert(id(1), &whole, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(full.insert(id(1), &whole, 0).unwrap(), Written::Published);
    assert_eq!(full.insert(id(1), &whole, 0).unwrap(), Written::Present);
    let mut short = vec![0; whole.len() - 1];
    assert_eq!(full.copy_out(id(1), &mut short), None);
    let mut out = vec![0; whole.len() + 4096];
    assert_eq!(full.copy_out(id(1), &mut out), Some(whole.len()));
    assert_eq!(out[..whole.len()], whole);
    let too_small = memory_config(&Fixture::default(), Some(3));
    let error = MemoryBackend::new(too_small, SystemClock::shared())
        .err()
        .unwrap();
    assert!(
        error.kind() == ErrorKind::Config && error.to_string().contains("at_least"),
        "{error}"
    );
}

#[test]
fn own_records_are_early_only_where_the_scheduler_cannot_see_them() {
    let sorted = |mut early: LocallyVisible| {
        early.added.sort();
        early.removed.sort();
        early
    };
    let dir = directory();
    let mut three = ids(3);
    three.sort();
    // Announced: the scheduler sees them by itself.
    let seen = tier(dir.path(), 8, |_| ());
    keep(&seen, ids(3));
    assert_eq!(seen.features().locally_visible(), LocallyVisible::default());
    // On another host it sees none of them.
    let far = tier(dir.path(), 4, |config| config.scheduler_elsewhere = true);
    keep(&far, ids(3));
    assert_eq!(sorted(far.features().locally_visible()).added, three);
    assert_eq!(far.features().locally_visible(), LocallyVisible::default());
    keep(&far, (3..6).map(id));
    let early = sorted(far.features().locally_visible());
    assert_eq!((early.added.len(), early.removed.len()), (3, 2));
    // The directory cannot be used: no process sees them, until it can.
    let blocked = directory();
    std::fs::write(blocked.path().join("regions"), "a file").unwrap();
    let hidden = tier(blocked.path(), 8, |_| ());
    keep(&hidden, ids(3));
    assert_eq!(sorted(hidden.features().locally_visible()).added, three);
    assert!(
        hidden
            .open(MonotonicTime::NEVER)
            .unwrap()
            .contains("sharing is limited"),
        "{}",
        hidden.open(MonotonicTime::NEVER).unwrap()
    );
    std::fs::remove_file(blocked.path().join("regions")).unwrap();
    let mut lost = Vec::new();
    eventually("they can be seen", || {
        hidden.look_around();
        lost.extend(hidden.features().locally_visible().removed);
        lost.len() == 3
    });
    let reader = tier(blocked.path(), 0, |_| ());
    sees(&reader, 1);
    assert!(ids(3).into_iter().all(|id| reader.contains(id)));
}

#[test]
fn regions_are_found_within_a_second_of_the_clock_and_dead_files_are_swept() {
    let (dir, clock) = (directory(), ManualClock::new());
    let mut config = memory_config(&Fixture::default(), None);
    config.registry = Some(dir.path().join("regions"));
    let reader = MemoryBackend::new(config, Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    reader.open(MonotonicTime::NEVER).unwrap();
    let writer = tier(dir.path(), 8, |_| ());
    keep(&writer, ids(2));
    std::fs::write(
        dir.path().join("regions/00000000000000aa.region"),
        "ucm region 1\n",
    )
    .unwrap();
    assert!(!reader.contains(id(0)), "no scan yet");
    eventually("its thread sleeps", || clock.next_deadline().is_some());
    clock.advance(Duration::from_secs(1));
    eventually("the region is found", || reader.contains(id(0)));
    assert_eq!(
        files(dir.path()),
        1,
        "the file without a process is removed"
    );
    writer.close(Duration::from_secs(10));
    assert_eq!(files(dir.path()), 0);
}

#[test]
fn lists_usage_and_touches() {
    let dir = directory();
    let (ours, theirs) = (tier(dir.path(), 8, |_| ()), tier(dir.path(), 8, |_| ()));
    keep(&ours, ids(3));
    keep(&theirs, (2..5).map(id));
    sees(&ours, 1);
    let listed = list(&ours);
    let mut own = ids(3);
    own.sort();
    let found: Vec<_> = listed.iter().map(|listed| listed.id).collect();
    assert_eq!(
        found, own,
        "what others hold is read, and theirs to list and remove"
    );
    assert!(ours.contains(id(4)));
    let len = record(id(0)).len() as u64;
    assert!(
        listed
            .iter()
            .all(|listed| listed.len == len && listed.used_ns > 0)
    );
    let usage = ours.stats().usage;
    assert_eq!(
        (usage.records, usage.used, usage.capacity),
        (3, 3 * 8192, 8 * 8192)
    );
    ours.touch(&[(id(0), 0), (id(4), 1), (id(7), 2)], MonotonicTime::NEVER);
    assert_eq!(
        (ours.counts().touched, ours.stats().blocks_touched),
        (1, 1),
        "the own region's alone"
    );
    ours.touch(&[(id(1), 0)], MonotonicTime::NEVER);
    assert_eq!(ours.counts().touched, 2);
    assert_eq!(
        ours.delete(&ours.pool().here(0, MonotonicTime::NEVER), &ids(5))
            .unwrap(),
        listed.len()
    );
    assert!(list(&ours).is_empty());
    assert!(
        !ours.contains(id(0)) && ours.contains(id(4)),
        "others' stay"
    );
}

#[test]
fn a_size_is_bytes_or_a_share_and_never_more_than_there_is() {
    let memory = ucm_device::MachineMemory {
        total: 64 << 30,
        available: 32 << 30,
        limited_by: "the control group /x".into(),
    };
    let bytes = |bytes| Capacity::Bytes(std::num::NonZeroU64::new(bytes).unwrap());
    let resolve =
        |asked, processes| cache_bytes(asked, processes, &memory).map(|bytes| bytes.get() >> 30);
    assert_eq!(resolve(bytes(32 << 30), 1).unwrap(), 32);
    assert_eq!(
        resolve(Capacity::Percent(50.0), 8).unwrap(),
        4,
        "for all of them together"
    );
    for (asked, processes) in [
        (bytes(33 << 30), 1),
        (bytes(16 << 30), 3),
        (Capacity::Percent(51.0), 1),
    ] {
        let text = resolve(asked, processes).unwrap_err().to_string();
        assert!(
            text.contains("cache_size is more than") && text.contains("control group /x"),
            "{text}"
        );
    }
    assert!(resolve(Capacity::Percent(0.0), 1).is_err());
}
