//! The segment layout as a writer sees it: when a segment is sealed, everything that goes wrong at
//! it, and what can be read before.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::time::Duration;

use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, ManualClock};
use ucm_media::backend::{Flush, LocallyVisible};
use ucm_media::segment::SegmentConfig;
use ucm_store::engine::{Task, Until};
use ucm_testkit::{Fault, OpKind, Rule, Tail};

use crate::common::segments::{begin, finds, is_over, loads, patient, quick};
use crate::common::shared::{LONG, on};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, id, ids};

#[test]
fn the_open_segment_is_read_by_its_writer_alone() {
    let dir = directory();
    let store = Store::open(dir.path(), patient());
    let blocks = ids(3);
    let task = begin(&store, &Device::filled(&patient(), &blocks), &blocks);
    assert!(!is_over(&store, &task));
    assert!(store.segments().is_empty());
    let mut sorted = blocks.clone();
    sorted.sort();
    let mut added = Vec::new();
    eventually("they are reported", || {
        let early = store.backend.features().locally_visible();
        assert!(early.removed.is_empty());
        added.extend(early.added);
        added.len() == 3
    });
    added.sort();
    assert_eq!(added, sorted);
    assert!(loads(&store, &blocks));
    let other = Store::open(dir.path(), patient());
    assert_eq!(finds(&other, &blocks), [false; 3]);
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    assert_eq!(store.places().len(), 3, "in one segment");
    assert_eq!(store.segments().len(), 1);
    eventually("others find it", || finds(&other, &blocks) == [true; 3]);
}

#[test]
fn a_wait_for_a_dump_is_shorter_than_the_age_of_its_segment() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &patient());
    let (first, second) = (ids(6), vec![id(90), id(91)]);
    store
        .dump(&Device::filled(&patient(), &first), &first)
        .unwrap();
    assert_eq!(store.segments().len(), 1, "all of one dump in one segment");
    // A moment later the next one that waits gets its own segment no sooner than a little later.
    let task = begin(&store, &Device::filled(&patient(), &second), &second);
    let waits = || task.wait(store.engine.clock(), Until::Published, Some(clock.now()));
    assert!(!waits());
    assert_eq!(store.segments().len(), 1);
    clock.advance(Duration::from_millis(50));
    eventually("the second is sealed", || is_over(&store, &task));
    store.outcome(&task).unwrap();
    assert_eq!(store.segments().len(), 2);
    assert_eq!(store.places().len(), 8);
}

#[test]
fn flushes_within_a_moment_make_one_segment() {
    let (dir, clock) = (directory(), ManualClock::new());
    let (store, blocks) = (on(&clock, dir.path(), &patient()), ids(6));
    let device = Device::filled(&patient(), &blocks);
    let first = begin(&store, &device, &blocks[..1]);
    store.engine.flush().unwrap();
    eventually("the first is sealed", || is_over(&store, &first));
    let flushed = |one: &BlockId| {
        let task = begin(&store, &device, std::slice::from_ref(one));
        store.engine.flush().unwrap();
        task
    };
    let tasks: Vec<Task> = blocks[1..].iter().map(flushed).collect();
    assert_eq!(store.segments().len(), 1);
    clock.advance(Duration::from_millis(50));
    eventually("the others are sealed", || {
        tasks.iter().all(|task| is_over(&store, task))
    });
    assert_eq!((store.segments().len(), store.places().len()), (2, 6));
}

#[test]
fn a_refresh_finds_what_was_published_before_the_next_listing_is_due() {
    let (dir, clock) = (directory(), ManualClock::new());
    let theirs = ManualClock::new(); // it stands, so that no listing is due
    let fixture = Fixture {
        lookup_only: true,
        ..quick()
    };
    let scheduler = on(&theirs, dir.path(), &fixture);
    let soon = theirs.now().after(Duration::from_secs(1));
    eventually("it waits for its next listing", || {
        theirs.next_deadline() == Some(soon)
    });
    let store = on(&clock, dir.path(), &quick());
    store
        .dump(&Device::filled(&quick(), &ids(2)), &ids(2))
        .unwrap();
    assert_eq!(finds(&scheduler, &ids(2)), [false; 2]);
    scheduler.engine.refresh().unwrap();
    eventually("it is found", || finds(&scheduler, &ids(2)) == [true; 2]);
}

#[test]
fn the_log_names_the_size_of_segments_where_they_are_written_alone() {
    let dir = directory();
    let lookups = Fixture {
        lookup_only: true,
        ..quick()
    };
    let opened = |fixture: Fixture| {
        let store = Store::open(dir.path(), fixture);
        let said = store.said();
        said.into_iter().find(|line| line.contains("segments"))
    };
    let (writer, scheduler) = (opened(quick()).unwrap(), opened(lookups).unwrap());
    assert!(writer.contains(", segments of ") && writer.contains(" sealed after "));
    assert!(scheduler.contains(", segments are looked up; 0 blocks"));
    assert!(!scheduler.contains("segments of"), "{scheduler}");
}

#[test]
fn a_segment_is_sealed_when_its_oldest_record_is_old_enough() {
    let (dir, clock) = (directory(), ManualClock::new());
    let fixture = Fixture {
        layout: Layout::Segment(SegmentConfig::default()),
        ..Fixture::default()
    };
    let store = on(&clock, dir.path(), &fixture);
    let device = Device::filled(&fixture, &ids(2));
    let first = begin(&store, &device, &ids(1));
    clock.advance(Duration::from_millis(600));
    let second = begin(&store, &device, &ids(2)[1..]);
    assert!(
        !is_over(&store, &first),
        "{:?} {:?}",
        first.failures(),
        store.segments()
    );
    clock.advance(Duration::from_millis(400));
    eventually("both are published", || {
        is_over(&store, &first) && is_over(&store, &second)
    });
    assert_eq!((store.segments().len(), store.places().len()), (1, 2));
}

#[test]
fn a_segment_that_is_full_is_sealed_at_once() {
    let dir = directory();
    let fixture = Fixture {
        layout: Layout::Segment(SegmentConfig {
            size: 4096 * 6, // head, two records of two pages, footer
            age: LONG,
            ..SegmentConfig::default()
        }),
        workers: 2, // one of them writes: nothing is open beside
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(6));
    let task = begin(&store, &device, &ids(6));
    eventually("two segments are sealed", || store.segments().len() == 2);
    assert!(!is_over(&store, &task), "the last two wait for more");
    eventually("they are written", || {
        store
            .engine
            .lookup(&ids(6))
            .unwrap()
            .iter()
            .all(|&found| found)
    });
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    for file in store.segments() {
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 4096 * 6);
    }
}

#[test]
fn closing_publishes_what_waits_and_leaves_nothing_private() {
    let dir = directory();
    let store = Store::open(dir.path(), patient());
    let device = Device::filled(&patient(), &ids(4));
    let task = store.engine.dump(device.rows(&ids(4))).unwrap();
    store.engine.close();
    assert!(is_over(&store, &task) && task.failures().is_empty());
    assert!(store.privates().is_empty());
    let later = Store::open(dir.path(), patient());
    assert!(loads(&later, &ids(4)));
}

#[test]
fn no_failure_of_a_seal_reports_a_dump_as_stored_that_is_not() {
    let faults: &[(OpKind, Fault)] = &[
        (OpKind::Create, Fault::Errno(5)),
        (OpKind::Create, Fault::Errno(28)),
        (OpKind::WriteAt, Fault::Errno(5)),
        (OpKind::WriteAt, Fault::Killed { keep: 5000 }),
        (OpKind::WriteAt, Fault::Busy),
        (OpKind::Finish, Fault::Errno(5)),
        (OpKind::Finish, Fault::Errno(28)),
        (OpKind::Finish, Fault::Killed { keep: 0 }),
        (OpKind::Finish, Fault::Killed { keep: 4000 }),
        (OpKind::Finish, Fault::LostReply(5)),
    ];
    for (kind, fault) in faults {
        let dir = directory();
        let store = Store::open(dir.path(), quick());
        let device = Device::filled(&quick(), &ids(1));
        store.fault(Rule::on(*kind, fault.clone()).times(1));
        let told = store.dump(&device, &ids(1));
        assert!(told.is_err(), "{kind:?} {fault:?}");
        // The writer's own next look, a second later, may find what has its name all the same.
        let there = matches!(fault, Fault::LostReply(_));
        assert!(
            there || finds(&store, &ids(1)) == [false],
            "{kind:?} {fault:?}"
        );
        assert!(store.backend.features().locally_visible().added.is_empty());
        let later = Store::open(dir.path(), quick());
        assert_eq!(finds(&later, &ids(1)), [there], "{kind:?} {fault:?}");
        eventually("it is stored again", || {
            store.dump(&device, &ids(1)).is_ok()
        });
        assert!(loads(&store, &ids(1)));
        drop(store);
        assert!(
            loads(&Store::open(dir.path(), quick()), &ids(1)),
            "{kind:?} {fault:?}"
        );
    }
}

#[test]
fn a_footer_that_did_not_reach_the_medium_is_a_miss_for_later_readers() {
    for fault in [
        Fault::Torn {
            keep: 0,
            tail: Tail::Cut,
        },
        Fault::Torn {
            keep: 4000,
            tail: Tail::Zeros,
        },
        Fault::Torn {
            keep: 4095,
            tail: Tail::Cut,
        },
        Fault::FlipRandom(1),
    ] {
        let dir = directory();
        let store = Store::open(dir.path(), quick());
        let device = Device::filled(&quick(), &ids(1));
        store.fault(Rule::on(OpKind::Finish, fault).times(1));
        let _ = store.dump(&device, &ids(1));
        let later = Store::open(dir.path(), quick());
        assert_eq!(finds(&later, &ids(1)), [false]);
        assert_eq!(
            later.segments().len(),
            1,
            "it is not removed before its time"
        );
        later.dump(&device, &ids(1)).unwrap();
        drop(store);
        assert!(loads(&Store::open(dir.path(), quick()), &ids(1)));
    }
}

#[test]
fn a_write_that_failed_is_a_hole_and_the_others_are_published() {
    let dir = directory();
    let store = Store::open(dir.path(), patient());
    let device = Device::filled(&patient(), &ids(5));
    let first = begin(&store, &device, &ids(2));
    store.fault(Rule::on(OpKind::WriteAt, Fault::Errno(5)).times(1));
    let failed = store.dump(&device, &ids(3)[2..]);
    assert_eq!(failed.unwrap_err().len(), 1);
    store.outcome(&first).unwrap(); // nothing is added behind a failure
    assert_eq!(finds(&store, &ids(3)), [true, true, false]);
    assert_eq!(store.places().len(), 2);
    let later = Store::open(dir.path(), patient());
    assert_eq!(finds(&later, &ids(3)), [true, true, false]);
    assert!(loads(&later, &ids(2)));
}

#[test]
fn a_private_file_that_was_taken_away_fails_its_dumps() {
    let dir = directory();
    let store = Store::open(dir.path(), patient());
    let device = Device::filled(&patient(), &ids(2));
    let task = begin(&store, &device, &ids(2));
    for file in store.privates() {
        std::fs::remove_file(file).unwrap();
    }
    store.backend.flush(Flush::Now);
    assert_eq!(store.outcome(&task).unwrap_err().len(), 2);
    assert_eq!(finds(&store, &ids(2)), [false; 2]);
    let task = store.engine.dump(device.rows(&ids(2))).unwrap();
    eventually("written", || finds(&store, &ids(2)) == [true; 2]);
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
}

#[test]
fn a_seal_that_hangs_costs_its_dumps_their_deadline_and_no_more() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &quick());
    let gate = store.hang(OpKind::Finish);
    let device = Device::filled(&quick(), &ids(1));
    let task = store.engine.dump(device.rows(&ids(1))).unwrap();
    eventually("the seal was begun", || {
        store.faults.count(OpKind::Finish) == 1
    });
    clock.advance(store.fixture.deadlines.dump + Duration::from_secs(1));
    eventually("the dump ends", || is_over(&store, &task));
    assert!(!task.failures().is_empty());
    eventually("it is not found any more", || {
        finds(&store, &ids(1)) == [false]
    });
    gate.open();
    store.faults.clear();
    eventually("it is stored again", || {
        store.dump(&device, &ids(1)).is_ok()
    });
}

#[test]
fn a_segment_that_cannot_be_opened_costs_its_dumps_their_deadline_and_no_more() {
    let (dir, clock) = (directory(), ManualClock::new());
    let mut fixture = quick();
    fixture.deadlines.dump = Duration::from_secs(1); // less than the opening itself has
    let store = on(&clock, dir.path(), &fixture);
    let gate = store.hang(OpKind::Create);
    let device = Device::filled(&fixture, &ids(2));
    let task = store.engine.dump(device.rows(&ids(2))).unwrap();
    eventually("the opening was begun", || {
        store.faults.count(OpKind::Create) == 1
    });
    clock.advance(fixture.deadlines.dump);
    eventually("the dump ends", || is_over(&store, &task));
    assert_eq!(task.failures().len(), 2);
    gate.open();
    eventually("its slots come back", || {
        store.stat("slots_free") == store.stat("slots")
    });
    store.faults.clear();
    eventually("it is stored again", || {
        store.dump(&device, &ids(2)).is_ok()
    });
    assert!(loads(&store, &ids(2)));
}

#[test]
fn what_is_published_is_early_until_others_must_have_found_it() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &quick());
    let lookups = Fixture {
        lookup_only: true,
        ..quick()
    };
    // Of a scheduler whose next refresh is not due: its clock stands.
    let theirs = ManualClock::new();
    let scheduler = on(&theirs, dir.path(), &lookups);
    let soon = theirs.now().after(Duration::from_secs(1));
    eventually("it waits for its next look", || {
        theirs.next_deadline() == Some(soon)
    });
    assert_eq!(
        store.backend.features().locally_visible(),
        LocallyVisible::default()
    );
    let device = Device::filled(&quick(), &ids(4));
    store.dump(&device, &ids(2)).unwrap();
    assert_eq!(finds(&scheduler, &ids(2)), [false; 2]);
    let mut early = store.backend.features().locally_visible();
    early.added.sort();
    let mut sorted = ids(2);
    sorted.sort();
    assert_eq!((early.added, early.removed.len()), (sorted.clone(), 0));
    clock.advance(Duration::from_secs(30));
    assert_eq!(
        store.backend.features().locally_visible(),
        LocallyVisible::default()
    );
    clock.advance(Duration::from_secs(6));
    let mut early = store.backend.features().locally_visible();
    early.removed.sort();
    assert_eq!((early.removed, early.added.len()), (sorted, 0));
    // What gets no name, or is not there any more, ends at once.
    store.dump(&device, &[id(2)]).unwrap();
    assert_eq!(store.backend.features().locally_visible().added, [id(2)]);
    let all = store.places();
    let place = all.iter().find(|place| place.id == id(2)).unwrap();
    std::fs::remove_file(&place.file).unwrap();
    assert!(!loads(&store, &[id(2)]));
    assert_eq!(store.backend.features().locally_visible().removed, [id(2)]);
    store.fault(Rule::on(OpKind::Finish, Fault::Errno(5)).times(1));
    assert!(store.dump(&device, &[id(3)]).is_err());
    assert_eq!(
        store.backend.features().locally_visible(),
        LocallyVisible::default()
    );
}

#[test]
fn a_block_that_the_index_has_no_room_for_is_not_said_to_be_stored() {
    let dir = directory();
    let fixture = Fixture {
        layout: Layout::Segment(SegmentConfig {
            age: Duration::ZERO,
            most_blocks: 2,
            ..SegmentConfig::default()
        }),
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(3));
    store.dump(&device, &ids(2)).unwrap();
    let refused = store.dump(&device, &[id(2)]).unwrap_err();
    assert_eq!(refused[0].1.kind(), ErrorKind::NoSpace);
    assert!(
        !store
            .backend
            .features()
            .locally_visible()
            .added
            .contains(&id(2))
    );
    assert_eq!(
        (finds(&store, &ids(3)), store.places().len()),
        (vec![true, true, false], 2)
    );
    store.dump(&device, &ids(2)).unwrap();
}

#[test]
fn no_age_keeps_a_segment_open_until_its_dumps_are_too_late() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &patient());
    let task = begin(&store, &Device::filled(&patient(), &ids(2)), &ids(2));
    // and it stands still from now on, however long the seal takes
    clock.advance(store.fixture.deadlines.dump / 10 * 9);
    eventually("its seal is begun", || {
        store.faults.count(OpKind::Finish) > 0
    });
    store.outcome(&task).unwrap();
}
