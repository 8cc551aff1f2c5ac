//! Segments of several writers below one limit, and those that dead writers left.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ucm_core::BlockId;
use ucm_infra::{Clock, ManualClock, MonotonicTime};
use ucm_store::engine::Until;
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::merging::gone;
use crate::common::segments::{await_taken_over, change, die_at_seal, finds, loads, quick};
use crate::common::shared::{LONG, elsewhere, in_time, on};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, id, ids};

/// Leaves the private segment of a writer that died at its seal, with these blocks in it.
fn die(root: &Path, fixture: &Fixture, blocks: &[BlockId]) -> std::path::PathBuf {
    let fixture = Fixture {
        layout: Layout::Segment(ucm_media::segment::SegmentConfig {
            age: Duration::from_secs(3600),
            ..ucm_media::segment::SegmentConfig::default()
        }),
        ..fixture.clone()
    };
    die_at_seal(root, &fixture, &Device::filled(&fixture, blocks), blocks)
}

#[test]
fn whole_records_of_a_dead_writer_are_taken_over() {
    let dir = directory();
    let dead = Fixture {
        process: gone(),
        ..quick()
    };
    let left = die(dir.path(), &dead, &ids(4));
    // One of them did not reach the medium whole.
    change(&left, |bytes| bytes[4096 + 8192 + 4096 + 10] ^= 1);
    let store = Store::open(dir.path(), quick());
    await_taken_over(&store);
    assert_eq!(
        finds(&store, &ids(4))
            .iter()
            .filter(|&&found| found)
            .count(),
        3
    );
    let whole: Vec<_> = ids(4)
        .into_iter()
        .filter(|&block| finds(&store, &[block])[0])
        .collect();
    assert!(loads(&store, &whole));
    assert_eq!(store.segments().len(), 1);
    eventually("what was cleared away does not count", || {
        store.stat("storage_used_bytes") == stored(dir.path())
    });
    assert!(loads(&Store::open(dir.path(), quick()), &whole));
}

#[test]
fn the_private_segment_of_a_living_writer_is_left_alone() {
    let dir = directory();
    let left = die(dir.path(), &quick(), &ids(2));
    let before = std::fs::read(&left).unwrap();
    let other_host = elsewhere(&quick());
    let left_there = die(dir.path().join("there").as_path(), &other_host, &ids(2));
    for root in [dir.path().to_owned(), dir.path().join("there")] {
        let store = Store::open(&root, quick());
        assert_eq!(finds(&store, &ids(2)), [false; 2]);
        assert_eq!(store.privates().len(), 1);
    }
    assert_eq!(std::fs::read(&left).unwrap(), before);
    // Silent for ten minutes: there is no writer any more. Only of a process of another host that
    // is believed.
    for (path, taken) in [(&left, false), (&left_there, true)] {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(601))
            .unwrap();
        let root = path.ancestors().nth(3).unwrap();
        let store = Store::open(root, quick());
        if taken {
            await_taken_over(&store);
        }
        assert_eq!(finds(&store, &ids(2)), [taken; 2]);
        assert_eq!(path.exists(), !taken);
    }
}

#[test]
fn what_is_not_a_segment_of_ours_is_never_taken_up() {
    let dir = directory();
    let dead = Fixture {
        process: gone(),
        ..quick()
    };
    let left = die(dir.path(), &dead, &ids(2));
    let whole = std::fs::read(&left).unwrap();
    for (what, bytes) in [
        ("a torn head", whole[..2000].to_vec()),
        ("another namespace", {
            let mut bytes = whole.clone();
            bytes[24] ^= 1;
            let crc = ucm_core::crc32c(&bytes[..4092]);
            bytes[4092..4096].copy_from_slice(&crc.to_le_bytes());
            bytes
        }),
        ("a head with a flipped bit", {
            let mut bytes = whole.clone();
            bytes[81] ^= 1;
            bytes
        }),
        ("a block file", whole[4096..].to_vec()),
    ] {
        std::fs::write(&left, &bytes).unwrap();
        let store = Store::open(dir.path(), quick());
        assert_eq!(finds(&store, &ids(2)), [false; 2], "{what}");
        assert_eq!(std::fs::read(&left).unwrap(), bytes, "{what}");
    }
    std::fs::write(&left, &whole).unwrap();
    let store = Store::open(dir.path(), quick());
    await_taken_over(&store);
    assert!(loads(&store, &ids(2)));
}

#[test]
fn a_recovery_that_fails_is_tried_again_by_the_next() {
    for (kind, nth) in [
        (OpKind::Rename, 1),
        (OpKind::WriteAt, 2),
        (OpKind::Finish, 1),
    ] {
        let dir = directory();
        let dead = Fixture {
            process: gone(),
            ..quick()
        };
        die(dir.path(), &dead, &ids(3));
        let rule = Rule::on(kind, Fault::Errno(5)).skip(nth - 1); // its finder tries again at once
        let store = Store::open_faulty(dir.path(), quick(), vec![rule]);
        assert_eq!(finds(&store, &ids(3)), [false; 3], "{kind:?}");
        drop(store);
        let store = Store::open(dir.path(), quick());
        await_taken_over(&store);
        assert!(loads(&store, &ids(3)), "{kind:?}");
    }
}

#[test]
fn an_opening_keeps_its_time_and_the_recovery_goes_on_behind_it() {
    let (dir, clock, gate) = (directory(), ManualClock::new(), Gate::new());
    let dead = Fixture {
        process: gone(),
        ..quick()
    };
    die(dir.path(), &dead, &ids(4));
    // The head is read, then the records.
    let hang = Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())).path(".tmp");
    let (root, at) = (dir.path().to_owned(), Arc::clone(&clock));
    let opening = std::thread::spawn(move || {
        let clock = Arc::clone(&at) as Arc<dyn Clock>;
        Store::faulty_with_clock(&root, quick(), vec![hang.nth(3)], clock)
    });
    gate.await_waiting(1);
    let probe = quick().deadlines.probe + Duration::from_secs(1);
    in_time(&clock, probe, "it is open", || opening.is_finished());
    let store = opening.join().unwrap();
    assert_eq!(
        (store.stat("healthy"), finds(&store, &ids(4))),
        (1, vec![false; 4])
    );
    gate.open();
    in_time(&clock, LONG, "they are taken over", || {
        finds(&store, &ids(4)) == [true; 4]
    });
    assert!(loads(&store, &ids(4)));
}

#[test]
fn a_read_waits_for_a_look_around_and_not_for_a_recovery() {
    let wanted = [ids(9)[8]];
    let (dir, clock) = (directory(), ManualClock::new());
    // whose time stands still: it recovers nothing
    let writer = on(&ManualClock::new(), dir.path(), &quick());
    let reader = on(&clock, dir.path(), &quick());
    let dead = Fixture {
        process: gone(),
        ..quick()
    };
    let left = die(&dir.path().join("there"), &dead, &ids(4));
    let tmp = reader.namespace().join("tmp");
    std::fs::create_dir_all(&tmp).unwrap();
    std::fs::rename(&left, tmp.join(left.file_name().unwrap())).unwrap();
    // The head is read, then one record after the other.
    let (second, third) = (reader.gate(), reader.gate());
    for gate in [&second, &third] {
        let hang = Fault::HangBefore(gate.clone());
        reader.fault(Rule::on(OpKind::Read, hang).path(".tmp").nth(3));
    }
    reader.faults.forget();
    eventually("the second record is read", || {
        clock.advance(Duration::from_millis(500));
        reader
            .faults
            .log()
            .iter()
            .filter(|seen| seen.fault.is_some())
            .count()
            == 1
    });
    assert_read_between(&writer, &reader, wanted, &second);
    third.open();
    // A turn whose time was over at a gate is followed by another.
    eventually("the others are taken over", || {
        clock.advance(Duration::from_millis(20));
        finds(&reader, &ids(4)) == [true; 4]
    });
}

#[test]
fn a_read_waits_for_a_look_around_and_not_for_many_dead_writers() {
    let wanted = [ids(9)[8]];
    let (dir, clock) = (directory(), ManualClock::new());
    // whose time stands still: it recovers nothing
    let writer = on(&ManualClock::new(), dir.path(), &quick());
    let reader = on(&clock, dir.path(), &quick());
    let dead = Fixture {
        process: gone(),
        ..quick()
    };
    let tmp = reader.namespace().join("tmp");
    std::fs::create_dir_all(&tmp).unwrap();
    for n in 0..3u8 {
        let left = die(&dir.path().join(format!("there{n}")), &dead, &[id(n)]);
        std::fs::rename(&left, tmp.join(left.file_name().unwrap())).unwrap();
    }
    // Their heads are read one after the other.
    let (second, third) = (reader.gate(), reader.gate());
    for (n, gate) in [(2, &second), (2, &third)] {
        let hang = Fault::HangBefore(gate.clone());
        reader.fault(Rule::on(OpKind::Read, hang).path(".tmp").nth(n));
    }
    eventually("the second head is read", || {
        clock.advance(Duration::from_millis(500));
        second.waiting() == 1
    });
    assert_read_between(&writer, &reader, wanted, &second);
    third.open();
    // A turn whose time was over at a gate is followed by another.
    eventually("the others are taken over", || {
        clock.advance(Duration::from_millis(20));
        finds(&reader, &ids(3)) == [true; 3]
    });
}

/// What another process stores while a turn of taking over hangs at a gate is read once that is
/// open, before the next one is.
fn assert_read_between(writer: &Store, reader: &Store, wanted: [BlockId; 1], gate: &Gate) {
    let device = Device::blank(&quick(), &wanted);
    writer
        .dump(&Device::filled(&quick(), &wanted), &wanted)
        .unwrap();
    let task = reader.engine.load(device.rows(&wanted), None).unwrap();
    eventually("it waits for a look", || {
        reader.stat("reads_awaiting_a_look") == 1
    });
    gate.open();
    eventually("it is read while the rest hangs", || {
        task.wait(
            reader.engine.clock(),
            Until::Published,
            Some(MonotonicTime(0)),
        )
    });
    assert!(reader.outcome(&task).is_ok() && device.is_right(wanted[0]));
}

/// Bytes of everything below a root that counts, segments and private files too, but no document.
fn stored(dir: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            if entry.file_name() != "space" {
                bytes += stored(&path);
            }
        } else if path
            .extension()
            .is_some_and(|end| end == "bin" || end == "seg" || end == "tmp")
        {
            bytes += entry.metadata().map_or(0, |meta| meta.len()); // it may be removed at any time
        }
    }
    bytes
}

#[test]
fn a_segment_whose_end_cannot_be_read_is_said() {
    let dir = directory();
    let writer = Store::open(dir.path(), quick());
    for block in ids(2) {
        let device = Device::filled(&quick(), &[block]);
        writer.dump(&device, &[block]).unwrap();
    }
    let denied = Rule::on(OpKind::Read, Fault::Errno(13)).path(".seg");
    let clock = ManualClock::new() as Arc<dyn Clock>;
    let reader = Store::faulty_with_clock(dir.path(), quick(), vec![denied], clock);
    assert_eq!(finds(&reader, &ids(2)), [false, false]);
    let said = reader.said();
    let lines = said
        .iter()
        .filter(|line| line.contains("a segment cannot be read"));
    assert_eq!(lines.count(), 1, "{said:?}");
}

#[test]
fn the_limit_holds_over_segments_and_files_of_one_root() {
    let dir = directory();
    let limit = 40 * 8192;
    let fixture = |layout| Fixture {
        layout,
        capacity: Some(limit),
        ..Fixture::default()
    };
    let stores = [
        Store::open(dir.path(), fixture(Layout::File)),
        Store::open(dir.path(), fixture(Layout::segments())),
        Store::open(dir.path(), fixture(Layout::segments())),
    ];
    let all: Vec<BlockId> = (0..90u8).map(|n| BlockId([n; 16])).collect();
    let device = Device::filled(&stores[0].fixture, &all);
    let published = || -> u64 {
        stores
            .iter()
            .map(|store| store.stat("blocks_published"))
            .sum()
    };
    let mut turns = 0..;
    eventually("more than fit at once are stored", || {
        let turn = turns.next().unwrap_or_default();
        // A dump without room is refused, and room is made: by a thread that may get no
        // turn for seconds.
        let _ = stores[turn % 3].dump(&device, &[all[turn % all.len()]]);
        let bytes = stored(dir.path());
        assert!(bytes <= limit, "{bytes} of {limit} after {turn}");
        turn >= all.len() && published() > 40
    });
    let removed: u64 = stores
        .iter()
        .map(|store| store.stat("records_removed"))
        .sum();
    assert!(removed > 0);
    let reader = Store::open(dir.path(), fixture(Layout::segments()));
    eventually("found records are there, once no process removes", || {
        let found = all
            .iter()
            .copied()
            .filter(|&block| finds(&reader, &[block])[0]);
        let found: Vec<_> = found.collect();
        !found.is_empty() && loads(&reader, &found)
    });
}

#[test]
fn old_segments_expire_whole() {
    let dir = directory();
    let fixture = Fixture {
        rules: ucm_media::quota::Rules {
            expire_after: Some(Duration::from_secs(3600)),
            ..quick().rules
        },
        ..quick()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(2));
    store.dump(&device, &ids(1)).unwrap();
    store.dump(&device, &ids(2)[1..]).unwrap();
    let old = store
        .places()
        .into_iter()
        .find(|place| place.id == ids(1)[0])
        .unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(&old.file)
        .unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(7200))
        .unwrap();
    drop(store);
    let store = Store::open(dir.path(), fixture);
    eventually("the old segment is removed", || !old.file.exists());
    eventually("and known to be", || {
        finds(&store, &ids(2)) == [false, true]
    });
}
