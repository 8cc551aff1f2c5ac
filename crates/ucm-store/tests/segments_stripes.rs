//! Segments that are written side by side: one file is filled by one thread at a time, and where it
//! cannot keep up others are opened beside it.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::BlockId;
use ucm_infra::{Clock, ManualClock};
use ucm_media::segment::SegmentConfig;
use ucm_store::engine::{Task, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::segments::Place;
use crate::common::shared::LONG;
use crate::common::{Above, Device, Fixture, Layout, Store, directory, eventually, ids};

/// Bytes of a block; with its header a record is a little longer.
const BLOCK: u64 = 512 << 10;
/// Records of one dump: 4 MiB.
const RUN: usize = 8;

/// Records of half a MiB, in segments that stay open for this long or until a caller waits, and
/// threads to write two at once.
fn large(slots: u64, age: Duration) -> Fixture {
    Fixture {
        above: Above::Nothing,
        compressed: false,
        tensors: vec![BLOCK],
        layers: 1,
        layers_per_shard: 1,
        slots,
        workers: 4,
        capacity: Some(64 << 30),
        layout: Layout::Segment(SegmentConfig {
            age,
            ..SegmentConfig::default()
        }),
        ..Fixture::default()
    }
}

/// Starts a dump and waits until all of it was handed to the segments.
fn begin(store: &Store, device: &Device, blocks: &[BlockId]) -> Task {
    let task = store.engine.dump(device.rows(blocks)).unwrap();
    assert!(task.wait(store.engine.clock(), Until::Staged, None));
    task
}

fn assert_loads(store: &Store, blocks: &[BlockId]) {
    let blank = Device::blank(&store.fixture, blocks);
    store.load(&blank, blocks).unwrap();
    assert!(blocks.iter().all(|&block| blank.is_right(block)));
}

fn by_file(places: Vec<Place>) -> BTreeMap<PathBuf, Vec<Place>> {
    let mut files: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for place in places {
        files
            .entry(place.file.clone())
            .or_insert_with(Vec::new)
            .push(place);
    }
    for places in files.values_mut() {
        places.sort_by_key(|place| place.offset);
    }
    files
}

#[test]
fn a_file_is_written_by_one_thread_and_others_are_opened_beside_it() {
    let (dir, fixture) = (directory(), large(64, LONG));
    let store = Store::open(dir.path(), fixture.clone());
    let blocks = ids(5 * RUN as u8);
    let device = Device::filled(&fixture, &blocks);
    let gate = store.hang(OpKind::WriteAt);
    let tasks: Vec<_> = blocks
        .chunks(RUN)
        .map(|some| begin(&store, &device, some))
        .collect();
    eventually("two are written", || gate.waiting() == 2);
    assert_eq!(
        store.faults.count(OpKind::WriteAt),
        2,
        "one of each at a time"
    );
    assert_eq!(
        store.privates().len(),
        2,
        "as many as there are threads for dumps"
    );

    gate.open();
    store.faults.clear();
    for task in &tasks {
        store.outcome(task).unwrap();
    }
    let files = by_file(store.places());
    assert!(files.len() >= 2);
    assert_eq!(files.values().map(Vec::len).sum::<usize>(), blocks.len());
    assert_loads(&store, &blocks);
    let later = Store::open(dir.path(), fixture);
    assert_eq!(
        later.engine.lookup(&blocks).unwrap(),
        vec![true; blocks.len()]
    );
}

#[test]
fn a_thread_opens_a_segment_of_its_own_while_another_opens_one() {
    let (dir, mut fixture) = (directory(), large(64, LONG));
    if let Layout::Segment(segments) = &mut fixture.layout {
        segments.size = 32 << 20; // the first grant is for several
    }
    let store = Store::open(dir.path(), fixture.clone());
    let blocks = ids(3 * RUN as u8);
    let device = Device::filled(&fixture, &blocks);
    store.dump(&device, &blocks[..RUN]).unwrap(); // from now on there is granted room
    let gate = store.hang(OpKind::Create);
    let task = begin(&store, &device, &blocks[RUN..]);
    gate.await_waiting(2);
    gate.open();
    store.faults.clear();
    store.outcome(&task).unwrap();
    assert_loads(&store, &blocks);
}

#[test]
fn all_that_are_open_are_no_more_than_a_share_of_the_limit() {
    let dir = directory();
    let fixture = Fixture {
        capacity: Some(8 << 30), // a 64th of it is one segment
        ..large(64, LONG)
    };
    let store = Store::open(dir.path(), fixture.clone());
    let blocks = ids(4 * RUN as u8);
    let device = Device::filled(&fixture, &blocks);
    let gate = store.hang(OpKind::WriteAt);
    let task = begin(&store, &device, &blocks);
    gate.await_waiting(1);
    gate.open();
    store.faults.clear();
    eventually("all is written", || {
        store
            .engine
            .lookup(&blocks)
            .unwrap()
            .iter()
            .all(|&found| found)
    });
    assert_eq!(store.faults.count(OpKind::Create), 1);
    store.outcome(&task).unwrap();
}

#[test]
fn closing_waits_for_what_is_in_turn_and_leaves_nothing_private() {
    let (dir, fixture) = (directory(), large(64, LONG));
    let store = Store::open(dir.path(), fixture.clone());
    let blocks = ids(4 * RUN as u8);
    let device = Device::filled(&fixture, &blocks);
    let task = begin(&store, &device, &blocks);
    store.engine.close();
    store.outcome(&task).unwrap();
    assert!(store.privates().is_empty());
    let later = Store::open(dir.path(), fixture);
    assert_eq!(
        later.engine.lookup(&blocks).unwrap(),
        vec![true; blocks.len()]
    );
}

#[test]
fn writes_that_fail_at_once_cost_only_themselves_however_many_wait() {
    let (dir, fixture) = (directory(), large(64, LONG));
    let store = Store::open(dir.path(), fixture.clone());
    let blocks = ids(6 * RUN as u8);
    let device = Device::filled(&fixture, &blocks);
    let gate = store.gate();
    let first = Rule::on(OpKind::WriteAt, Fault::HangBefore(gate.clone()));
    store.fault(first.times(1));
    store.fault(Rule::on(OpKind::WriteAt, Fault::Busy).skip(1).times(20));
    let task = begin(&store, &device, &blocks);
    gate.await_waiting(1);
    gate.open();
    assert_eq!(store.outcome(&task).unwrap_err().len(), 20);
    store.dump(&device, &blocks).unwrap();
    assert_loads(&store, &blocks);
}

#[test]
fn a_wait_for_a_dump_is_shorter_than_the_age_of_segments_that_its_records_had_yet_to_find() {
    let (dir, fixture, clock) = (directory(), large(64, LONG), ManualClock::new());
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    let blocks = ids(RUN as u8);
    let device = Device::filled(&fixture, &blocks);
    // A segment is opened while all others wait for it. Then both threads hang at a write, and the
    // rest has no place yet when one of the two ends and the dump is flushed.
    let (opening, first, second) = (store.gate(), store.gate(), store.gate());
    let hang = |kind, gate: &Gate| Rule::on(kind, Fault::HangBefore(gate.clone())).times(1);
    store.fault(hang(OpKind::Create, &opening));
    store.fault(hang(OpKind::WriteAt, &first));
    store.fault(hang(OpKind::WriteAt, &second));
    let task = begin(&store, &device, &blocks);
    opening.await_waiting(1);
    assert!(!task.wait(store.engine.clock(), Until::Published, Some(clock.now())));
    opening.open();
    first.await_waiting(1);
    second.await_waiting(1);
    first.open();
    second.open();
    store.outcome(&task).unwrap(); // and no time has passed
    assert_loads(&store, &blocks);
}
