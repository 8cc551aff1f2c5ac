//! The engine against a map: whatever is dumped, damaged, removed, refused or made to fail, a hit
//! is exact.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use ucm_core::{BlockId, Error, MissReason};
use ucm_infra::{LANE_SPACE, MonotonicTime};
use ucm_media::backend::Backend;
use ucm_media::memory::Policy;
use ucm_media::segment::Merging;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::device::side_content;
use crate::common::servers::{shared_redis, shared_s3};
use crate::common::sides::{CODES, MEAN, sided, sides};
use crate::common::{
    Above, Device, Fixture, Layout, Medium, Store, directory, eventually, id, pages,
};

/// One thing a test does.
#[derive(Debug, Clone)]
enum Act {
    Dump(Vec<u8>),
    Load(Vec<u8>),
    Lookup(Vec<u8>),
    /// Side shards, read.
    LoadSides(Vec<u8>),
    /// Side shards, written to records of their own.
    DumpSides(Vec<u8>),
    Flip(u8, usize),
    Cut(u8, usize),
    Grow(u8),
    Remove(u8),
    Swap(u8, u8),
    Reopen,
    Fault(u8),
}

fn act() -> impl Strategy<Value = Act> {
    let one = 0..6u8;
    let some = || prop::collection::vec(0..6u8, 1..5);
    prop_oneof![
        4 => some().prop_map(Act::Dump),
        4 => some().prop_map(Act::Load),
        2 => some().prop_map(Act::Lookup),
        2 => some().prop_map(Act::LoadSides),
        1 => some().prop_map(Act::DumpSides),
        2 => (one.clone(), any::<usize>()).prop_map(|(n, at)| Act::Flip(n, at)),
        1 => (one.clone(), any::<usize>()).prop_map(|(n, len)| Act::Cut(n, len)),
        1 => one.clone().prop_map(Act::Grow),
        1 => one.clone().prop_map(Act::Remove),
        1 => (one.clone(), one).prop_map(|(a, b)| Act::Swap(a, b)),
        1 => Just(Act::Reopen),
        1 => (0..10u8).prop_map(Act::Fault),
    ]
}

/// The fault that says that the medium is full.
const FULL: u8 = 3;

fn fault(n: u8, layout: Layout) -> Rule {
    if layout != Layout::File {
        match n {
            FULL => return Rule::on(OpKind::WriteAt, Fault::Errno(28)),
            4 => return Rule::on(OpKind::Finish, Fault::LostReply(5)),
            5 => return Rule::on(OpKind::Create, Fault::Errno(5)),
            6 => return Rule::on(OpKind::Finish, Fault::Replay),
            7 => return Rule::on(OpKind::Finish, Fault::FlipRandom(1)),
            8 => return Rule::on(OpKind::WriteAt, Fault::FlipRandom(1)),
            9 => return Rule::on(OpKind::Finish, Fault::Killed { keep: 100 }),
            _ => {}
        }
    }
    match n {
        0 => Rule::on(OpKind::Read, Fault::Errno(5)),
        1 => Rule::on(OpKind::Read, Fault::FlipRandom(1)),
        2 => Rule::on(OpKind::Read, Fault::ShortRead(4096)),
        FULL => Rule::on(OpKind::Publish, Fault::Errno(28)),
        7 => Rule::on(OpKind::Publish, Fault::FlipRandom(1)),
        4 => Rule::on(OpKind::Publish, Fault::LostReply(5)),
        5 => Rule::on(OpKind::Read, Fault::stale()),
        _ => Rule::on(OpKind::Publish, Fault::Replay),
    }
}

fn unique(ns: &[u8]) -> Vec<BlockId> {
    ns.iter()
        .copied()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .map(id)
        .collect()
}

/// The same in the order they were named in.
fn in_order(ns: &[u8]) -> Vec<BlockId> {
    let mut seen = BTreeSet::new();
    let first = |n: &u8| seen.insert(*n);
    ns.iter().copied().filter(first).map(id).collect()
}

/// Whether a block failed because another one of its load did.
fn given_up(error: &Error) -> bool {
    let reason =
        |(key, value): &(&str, String)| *key == "reason" && *value == MissReason::LoadFailed.name();
    error.context().iter().any(reason)
}

/// What may be true of a block's file.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Truth {
    Absent,
    Whole,
    /// Touched by a test or by an injected fault: may be anything, but never a wrong hit.
    Unsure,
}

/// With side shards or without, by how much is done.
fn run(fixture: Fixture, acts: &[Act]) {
    let fixture = if acts.len().is_multiple_of(2) {
        sided(fixture)
    } else {
        fixture
    };
    let (medium, above, layers_per_shard) =
        (fixture.medium, fixture.above, fixture.layers_per_shard);
    let layout = fixture.layout;
    let dir = directory();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let lasts = !matches!(medium, Medium::Memory(..)); // and a test can reach what lies there
    let mut store = Store::open(&root, fixture.clone());
    let mut truth: BTreeMap<BlockId, Truth> = (0..6).map(|n| (id(n), Truth::Absent)).collect();
    // Every stored record may be removed again.
    let scarce = matches!(medium, Medium::Memory(slots, _) if slots < 6);
    let (mut faulty, mut lasting) = (scarce, scarce);
    let mut alone = BTreeSet::new();
    for act in acts {
        match act {
            Act::Dump(ns) => {
                let ids = unique(ns);
                let ended = store.dump(&Device::filled(&fixture, &ids), &ids);
                assert!(ended.is_ok() || faulty, "{ended:?}");
                for id in ids {
                    // What goes down when it is given up is nowhere for a moment, and may find no
                    // room on its way.
                    let back = matches!(
                        above,
                        Above::Map(_, WritePolicy::Back) | Above::Memory(_, WritePolicy::Back)
                    );
                    let known = back || truth[&id] == Truth::Unsure || ended.is_err();
                    truth.insert(id, if known { Truth::Unsure } else { Truth::Whole });
                }
            }
            Act::Load(ns) => {
                let ids = in_order(ns);
                let device = Device::blank(&fixture, &ids);
                let failed: BTreeMap<usize, Error> = store
                    .load(&device, &ids)
                    .err()
                    .into_iter()
                    .flatten()
                    .collect();
                let shards = (fixture.layers / layers_per_shard) as usize;
                for (i, &id) in ids.iter().enumerate() {
                    let rows = failed.range(i * shards..(i + 1) * shards).count();
                    assert!(rows == 0 || rows == shards, "a block fails whole");
                    if rows == 0 {
                        assert!(device.is_right(id), "a hit is exact");
                        assert_ne!(truth[&id], Truth::Absent, "a hit on nothing");
                    } else {
                        assert!(device.is_right_as_far(id), "half a shard on the device");
                    }
                }
                // Every block before the first bad one arrives, so that one failed by itself.
                if let Some((row, error)) = failed.first_key_value() {
                    assert!(
                        !given_up(error),
                        "the first that failed was given up: {error}"
                    );
                    let sound = truth[&ids[row / shards]] == Truth::Whole;
                    assert!(!sound || faulty, "a sound block failed: {error}");
                }
                for (row, error) in failed {
                    // A medium that lies three times in a row has a sound record moved aside.
                    if faulty || !given_up(&error) {
                        truth.insert(ids[row / shards], Truth::Unsure);
                    }
                }
            }
            Act::Lookup(ns) => {
                let ids = unique(ns);
                let found = store.engine.lookup(&ids).unwrap();
                let prefix = store.engine.lookup_on_prefix(&ids).unwrap();
                // Damaged records are moved in the background, between two lookups too.
                if ids.iter().all(|id| truth[id] != Truth::Unsure) {
                    assert_eq!(prefix, found.iter().take_while(|&&present| present).count());
                }
                for (id, present) in ids.iter().zip(found) {
                    match truth[id] {
                        Truth::Absent => assert!(!present, "nothing was stored under {id}"),
                        Truth::Whole => assert!(present || faulty, "{id} was stored"),
                        Truth::Unsure => {}
                    }
                }
            }
            Act::LoadSides(_) | Act::DumpSides(_) if fixture.sides.is_empty() => {}
            Act::LoadSides(ns) => {
                let ids = in_order(ns);
                for name in [MEAN, CODES] {
                    let there = sides(&store, &ids, name); // what is a hit is exact
                    let stored = |id: &BlockId| truth[id] != Truth::Absent || alone.contains(id);
                    assert!(
                        ids.iter()
                            .zip(there)
                            .all(|(id, there)| !there || stored(id)),
                        "a hit on nothing"
                    );
                }
            }
            Act::DumpSides(ns) => {
                let ids = unique(ns);
                let bytes: Vec<u8> = ids
                    .iter()
                    .flat_map(|&id| side_content(id, 0, fixture.sides[0].1))
                    .collect();
                let ended = store.engine.dump_sides(&ids, &[(MEAN, &bytes)]);
                let ended = ended
                    .map_err(|error| vec![(0, error)])
                    .and_then(|task| store.outcome(&task));
                assert!(ended.is_ok() || faulty, "{ended:?}");
                alone.extend(ids);
            }
            Act::Flip(n, at) if !lasts => {
                let region = store
                    .memory
                    .as_ref()
                    .and_then(|memory| memory.region())
                    .unwrap();
                // A slot that is free may still hold what it held.
                let there = store
                    .memory
                    .as_ref()
                    .is_some_and(|memory| memory.contains(id(*n)));
                if pages::flip(id(*n), region, at % 8192) && there {
                    truth.insert(id(*n), Truth::Unsure);
                }
            }
            Act::Flip(n, at) => damage(&store, &mut truth, *n, |bytes| {
                let at = at % bytes.len();
                bytes[at] ^= 1 << (at % 8);
            }),
            Act::Cut(..) | Act::Grow(_) | Act::Swap(..) if !lasts => {} // not in memory
            Act::Fault(_) if medium != Medium::Posix => {}              // a file's troubles
            Act::Cut(n, len) => damage(&store, &mut truth, *n, |bytes| {
                bytes.truncate(len % bytes.len())
            }),
            Act::Grow(n) => damage(&store, &mut truth, *n, |bytes| bytes.push(0)),
            Act::Remove(n) if layout != Layout::File => {
                // Its process may not have noticed yet; whatever it says, no load brings wrong
                // bytes.
                for file in damage_segments(&store, &mut truth, *n) {
                    let _ = std::fs::remove_file(file);
                }
            }
            Act::Remove(n) => {
                // A load that failed at another block leaves its reads to end by themselves, and
                // the next load of the same block joins them: it may have what was there when they
                // began.
                eventually("no read is under way", || {
                    store.stat("slots_free") == store.stat("slots")
                });
                if let Some(memory) = &store.memory {
                    let here = memory.pool().here(LANE_SPACE, MonotonicTime::NEVER);
                    memory.delete(&here, &[id(*n)]).unwrap();
                }
                store.remove_stored(id(*n));
                // Whether this process refused it decides nothing about a file that was removed;
                // there may be a copy above. What goes on a server is known to be there for a
                // while.
                let alone = above == Above::Nothing && !matches!(medium, Medium::Kind(_));
                let gone = alone || truth[&id(*n)] == Truth::Absent;
                truth.insert(id(*n), if gone { Truth::Absent } else { Truth::Unsure });
            }
            Act::Swap(a, b) if layout != Layout::File => swap_places(&store, &mut truth, *a, *b),
            Act::Swap(a, b) => {
                if let (Some(one), Some(other)) = (store.stored(id(*a)), store.stored(id(*b))) {
                    store.store_as(id(*a), &other);
                    store.store_as(id(*b), &one);
                    if a != b {
                        truth.insert(id(*a), Truth::Unsure);
                        truth.insert(id(*b), Truth::Unsure);
                    }
                }
            }
            Act::Reopen => {
                drop(store);
                store = Store::open(&root, fixture.clone());
                faulty = lasting;
                if !lasts {
                    // memory goes with its process
                    truth.values_mut().for_each(|known| *known = Truth::Absent);
                }
            }
            Act::Fault(n) => {
                store.fault(fault(*n, layout).times(2));
                faulty = true;
                lasting |= *n == FULL; // the collector makes room, of anything
                lasting |= matches!(n, 7 | 8); // what is damaged on the medium stays so
            }
        }
    }
    // Healthy again without help: what is dumped now is there, whatever failed before, at the
    // latest after a refusal and a pause.
    store.faults.clear();
    let ids: Vec<BlockId> = (0..if scarce { 3 } else { 6 }).map(id).collect();
    eventually("all is well again", || {
        let device = Device::blank(&fixture, &ids);
        for &id in &ids {
            let _ = store.load(&device, &[id]);
        }
        let dumped = store.dump(&Device::filled(&fixture, &ids), &ids);
        let device = Device::blank(&fixture, &ids);
        let well = dumped.is_ok() && store.load(&device, &ids).is_ok();
        assert!(!well || ids.iter().all(|&id| device.is_right(id)));
        well
    });
    eventually("every slot comes back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

/// Segments with a record of this block, of which nothing is sure any more.
fn damage_segments(
    store: &Store,
    truth: &mut BTreeMap<BlockId, Truth>,
    n: u8,
) -> BTreeSet<std::path::PathBuf> {
    let places = store.places();
    let files: BTreeSet<_> = places
        .iter()
        .filter(|place| place.id == id(n))
        .map(|place| place.file.clone())
        .collect();
    for place in places.iter().filter(|place| files.contains(&place.file)) {
        truth.insert(place.id, Truth::Unsure);
    }
    files
}

/// Writes the records of two blocks into each other's places.
fn swap_places(store: &Store, truth: &mut BTreeMap<BlockId, Truth>, a: u8, b: u8) {
    let places = store.places();
    let find = |n| places.iter().find(|place| place.id == id(n));
    if let (Some(one), Some(other)) = (find(a), find(b))
        && a != b
    {
        let bytes = |place: &crate::common::segments::Place| {
            let file = std::fs::read(&place.file).ok()?;
            file.get(place.offset..place.offset + place.len)
                .map(<[u8]>::to_vec)
        };
        let (Some(of_one), Some(of_other)) = (bytes(one), bytes(other)) else {
            return; // removed: a collector is at work
        };
        for (place, bytes) in [(one, of_other), (other, of_one)] {
            crate::common::segments::change(&place.file, |file| {
                let len = place.len.min(bytes.len()); // compressed ones are not equally long
                file[place.offset..place.offset + len].copy_from_slice(&bytes[..len])
            });
            truth.insert(place.id, Truth::Unsure);
        }
    }
}

fn damage(
    store: &Store,
    truth: &mut BTreeMap<BlockId, Truth>,
    n: u8,
    change: impl FnOnce(&mut Vec<u8>),
) {
    if store.fixture.layout != Layout::File {
        if let Some(file) = damage_segments(store, truth, n).pop_first() {
            crate::common::segments::change(&file, change);
        }
        return;
    }
    if let Some(bytes) = store.stored(id(n)) {
        let mut bytes = if bytes.is_empty() { vec![0] } else { bytes };
        change(&mut bytes);
        store.store_as(id(n), &bytes);
        truth.insert(id(n), Truth::Unsure);
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(Policy::ALL.to_vec())
}

/// Cases of each property: few, as every case opens stores and there are twenty properties.
/// `UCM_TEST_LONG` runs more, `PROPTEST_CASES` any number.
fn cases() -> u32 {
    let default = if std::env::var_os("UCM_TEST_LONG").is_some() {
        48
    } else {
        12
    };
    let asked = std::env::var("PROPTEST_CASES");
    asked
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(default)
}

/// The layout below other tiers: each one in turn, or that of this run if it names one.
fn layout() -> impl Strategy<Value = Layout> {
    let named = std::env::var_os("UCM_TEST_LAYOUT").is_some();
    let all = if named {
        vec![Layout::of_this_run()]
    } else {
        vec![Layout::of_this_run(), Layout::segments()]
    };
    prop::sample::select(all)
}

/// Records in this layout below something.
fn below(layout: Layout, layers_per_shard: u32, above: Above) -> Fixture {
    Fixture {
        layout,
        ..made(layers_per_shard, Medium::Posix, above)
    }
}

/// A fixture of these rows, this medium, and what stands above it.
fn made(layers_per_shard: u32, medium: Medium, above: Above) -> Fixture {
    Fixture {
        layers_per_shard,
        medium,
        above,
        ..Fixture::default()
    }
}

/// Segments that are sealed at once, alone or below something.
fn in_segments(layers_per_shard: u32, above: Above) -> Fixture {
    below(Layout::segments(), layers_per_shard, above)
}

/// Segments that are objects, each put at once.
fn in_a_bucket(layers_per_shard: u32) -> Fixture {
    Fixture {
        layout: Layout::segments(),
        ..made(layers_per_shard, Medium::Kind("object"), Above::Nothing)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn direct_rows(acts in prop::collection::vec(act(), 1..30)) {
        run(made(3, Medium::Posix, Above::Nothing), &acts);
    }

    #[test]
    fn layerwise_rows(acts in prop::collection::vec(act(), 1..30)) {
        run(made(1, Medium::Posix, Above::Nothing), &acts);
    }

    #[test]
    fn below_memory_that_has_room(acts in prop::collection::vec(act(), 1..30)) {
        run(made(3, Medium::Posix, Above::Map(100, WritePolicy::Through)), &acts);
    }

    #[test]
    fn below_memory_that_is_too_small(acts in prop::collection::vec(act(), 1..30)) {
        run(made(1, Medium::Posix, Above::Map(2, WritePolicy::Through)), &acts);
    }

    #[test]
    fn written_back_from_memory(layout in layout(), acts in prop::collection::vec(act(), 1..30)) {
        run(below(layout, 3, Above::Map(2, WritePolicy::Back)), &acts);
    }

    #[test]
    fn below_another_root(layout in layout(), acts in prop::collection::vec(act(), 1..30)) {
        run(below(layout, 3, Above::File), &acts);
    }

    #[test]
    fn below_the_memory_tier(layout in layout(), acts in prop::collection::vec(act(), 1..30)) {
        run(below(layout, 3, Above::Memory(4, WritePolicy::Through)), &acts);
    }

    #[test]
    fn written_back_from_the_memory_tier(layout in layout(), acts in prop::collection::vec(act(), 1..30)) {
        run(below(layout, 1, Above::Memory(4, WritePolicy::Back)), &acts);
    }

    #[test]
    fn direct_rows_in_memory(policy in policy(), acts in prop::collection::vec(act(), 1..30)) {
        run(made(3, Medium::Memory(16, policy), Above::Nothing), &acts);
    }

    #[test]
    fn layerwise_rows_in_memory(policy in policy(), acts in prop::collection::vec(act(), 1..30)) {
        run(made(1, Medium::Memory(16, policy), Above::Nothing), &acts);
    }

    /// Four slots for six blocks: dumped blocks may be removed, and every hit is exact.
    #[test]
    fn rows_in_too_little_memory(policy in policy(), acts in prop::collection::vec(act(), 1..30)) {
        run(made(3, Medium::Memory(4, policy), Above::Nothing), &acts);
    }

    #[test]
    fn direct_rows_on_a_redis_server(acts in prop::collection::vec(act(), 1..30)) {
        if shared_redis().is_some() {
            run(made(3, Medium::Kind("redis"), Above::Nothing), &acts);
        }
    }

    #[test]
    fn layerwise_rows_on_a_redis_server(acts in prop::collection::vec(act(), 1..30)) {
        if shared_redis().is_some() {
            run(made(1, Medium::Kind("redis"), Above::Nothing), &acts);
        }
    }

    #[test]
    fn direct_rows_in_a_bucket(acts in prop::collection::vec(act(), 1..30)) {
        if shared_s3().is_some() {
            run(in_a_bucket(3), &acts);
        }
    }

    #[test]
    fn layerwise_rows_in_a_bucket(acts in prop::collection::vec(act(), 1..30)) {
        if shared_s3().is_some() {
            run(in_a_bucket(1), &acts);
        }
    }

    #[test]
    fn direct_rows_in_segments(acts in prop::collection::vec(act(), 1..30)) {
        run(in_segments(3, Above::Nothing), &acts);
    }

    #[test]
    fn layerwise_rows_in_segments(acts in prop::collection::vec(act(), 1..30)) {
        run(in_segments(1, Above::Nothing), &acts);
    }

    /// Segments that are merged all the time, and removed as soon as they were.
    #[test]
    fn rows_in_segments_that_merge(acts in prop::collection::vec(act(), 1..40)) {
        let layout = Layout::merging(Merging {
            rate: u64::MAX,
            look: Duration::from_millis(12),
            grace: Duration::ZERO,
        });
        run(Fixture { layout, ..made(3, Medium::Posix, Above::Nothing) }, &acts);
    }

    #[test]
    fn compressed_rows(acts in prop::collection::vec(act(), 1..30)) {
        run(in_segments(3, Above::Nothing).compressed(), &acts);
    }

    #[test]
    fn compressed_segments_below_memory(acts in prop::collection::vec(act(), 1..30)) {
        run(in_segments(1, Above::Map(2, WritePolicy::Through)).compressed(), &acts);
    }

    #[test]
    fn segments_below_memory(acts in prop::collection::vec(act(), 1..30)) {
        run(in_segments(3, Above::Map(2, WritePolicy::Through)), &acts);
    }
}
