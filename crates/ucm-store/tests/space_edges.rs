//! Space where things go wrong at the edges: another root in the place of ours, records that move
//! while others are removed, a store that closes in the middle of its writes, a medium that gives
//! room back late.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{ErrorKind, crc32c};
use ucm_infra::{Clock, LANE_SPACE, ManualClock, MonotonicTime};
use ucm_media::quota::{Capacity, Rules};
use ucm_store::engine::{Task, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::mount::{Place, copy_all};
use crate::common::only_over;
use crate::common::shared::{
    LONG, RECORD, attempt, documents, elsewhere, in_time, keep, on, small, stored,
};
use crate::common::{Device, Fixture, Store, directory, eventually, id, identity, ids};

/// All files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| match entry.path() {
            path if path.is_dir() => files(&path),
            path => vec![path],
        })
        .collect()
}

fn ended(store: &Store, task: &Task) -> bool {
    task.wait(
        store.engine.clock(),
        Until::Published,
        Some(MonotonicTime(0)),
    )
}

/// Lets the keeper of a store make a few turns.
fn turns(store: &Store, clock: &ManualClock) {
    let begun = |store: &Store| store.faults.count(OpKind::Stat) + store.faults.count(OpKind::List);
    let before = begun(store);
    in_time(clock, LONG, "its keeper looks", || {
        begun(store) > before + 20
    });
}

#[test]
fn the_space_of_another_root_is_left_alone() {
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    let fixture = small(64);
    place.tmpfs("theirs", 4096);
    let clock = ManualClock::new();
    let their_root = place.path("theirs");
    let theirs = on(&clock, &their_root, &small(16));
    clock.advance(Duration::from_secs(1));
    turns(&theirs, &clock); // its documents are there
    place.bind("root", "share");
    let ours = on(&clock, &place.path("share"), &fixture);
    place.unmount("share");
    place.bind("theirs", "share");
    // A document is written as a private file first.
    let is_named = |path: &&PathBuf| path.extension().is_none_or(|end| end != "tmp");
    let before = files(&their_root).iter().filter(is_named).count();
    turns(&ours, &clock);
    eventually("nothing of ours was written there", || {
        files(&their_root).len() == before
    });
    assert_eq!(theirs.stat("storage_collector"), 1);
    assert_eq!(theirs.stat("storage_capacity_bytes"), 16 * RECORD);
    drop(ours);
    eventually("nor are its last words", || {
        files(&their_root).len() == before
    });
}

#[test]
fn a_root_that_comes_back_with_more_in_it_is_counted_before_anything_is_granted() {
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    let fixture = small(24);
    place.bind("root", "share");
    let (share, clock) = (place.path("share"), ManualClock::new());
    let store = on(&clock, &share, &fixture);
    let device = Device::filled(&fixture, &ids(60));
    keep(&store, &clock, &device, id(0));
    place.unmount("share");
    place.tmpfs("share", 4096);
    copy_all(&place.path("root"), &share);
    for block in &ids(60)[40..] {
        let file = store.file(*block);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::copy(store.file(id(0)), file).unwrap();
    }
    for block in &ids(40)[1..] {
        let _ = attempt(&store, &clock, &device, *block);
        assert!(stored(&share) <= 24 * RECORD, "{}", stored(&share) / RECORD);
    }
    let told = store.engine.lookup(&ids(40)).unwrap();
    assert!(told.contains(&true), "it is written to again");
}

#[test]
fn a_damaged_record_that_an_older_version_kept_counts_until_it_is_removed() {
    let (dir, fixture, clock) = (directory(), small(64), ManualClock::new());
    let store = on(&clock, dir.path(), &fixture);
    let device = Device::filled(&fixture, &ids(1));
    let quarantine = store.namespace().join("quarantine");
    std::fs::create_dir(&quarantine).unwrap();
    let kept = quarantine.join(format!("{}.bad_header.1700000000.bin", id(1)));
    std::fs::write(&kept, vec![1; 1000]).unwrap();
    // A full medium is counted.
    let full = || {
        let full = Rule::on(OpKind::Publish, Fault::Errno(28)).path("/blocks/");
        store.fault(full.times(1));
        attempt(&store, &clock, &device, id(0)).unwrap_err();
    };
    store.fault(Rule::on(OpKind::Remove, Fault::Errno(5)).path("/quarantine/"));
    full();
    in_time(&clock, LONG, "it is counted", || {
        store.stat("storage_used_bytes") == 1000
    });
    assert!(kept.exists());
    store.faults.clear();
    // After a count that freed too little the next ones are some time apart.
    in_time(&clock, LONG, "it is removed", || {
        full();
        !kept.exists()
    });
}

#[test]
fn records_that_an_older_version_moves_while_room_is_made_still_count() {
    let (dir, fixture, clock) = (directory(), small(64), ManualClock::new());
    let store = on(&clock, dir.path(), &fixture);
    let device = Device::filled(&fixture, &ids(20));
    for block in ids(20) {
        keep(&store, &clock, &device, block);
    }
    drop(store);
    let store = on(&clock, dir.path(), &fixture);
    assert_eq!(store.stat("storage_used_bytes"), 20 * RECORD);
    // A full medium has room made. At the same time an older version moves all records aside.
    let gate = Gate::new();
    store.fault(Rule::on(OpKind::Remove, Fault::HangBefore(gate.clone())).path("/blocks/"));
    store.fault(
        Rule::on(OpKind::Publish, Fault::Errno(28))
            .path("/blocks/")
            .times(1),
    );
    let more = Device::filled(&fixture, &[id(40)]);
    attempt(&store, &clock, &more, id(40)).unwrap_err();
    in_time(&clock, LONG, "room is made", || gate.waiting() > 0);
    let quarantine = dir
        .path()
        .join(identity("w").namespace())
        .join("quarantine");
    std::fs::create_dir(&quarantine).unwrap();
    for block in ids(20) {
        let name = format!("{block}.bad_checksum.1700000000.bin");
        std::fs::rename(store.file(block), quarantine.join(name)).unwrap();
    }
    let counts = store.faults.count(OpKind::Remove);
    gate.open();
    eventually("it was tried to remove them", || {
        store.faults.count(OpKind::Remove) >= counts
    });
    turns(&store, &clock);
    assert!(
        store.stat("storage_used_bytes") >= stored(dir.path()),
        "{} of {}",
        store.stat("storage_used_bytes"),
        stored(dir.path())
    );
}

#[test]
fn a_directory_that_only_looks_like_one_of_ours_has_no_say() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    let file = store.file(id(0));
    drop(store);
    let odd = file.parent().unwrap().with_file_name("+0");
    std::fs::create_dir(&odd).unwrap();
    let copy = odd.join(file.file_name().unwrap());
    std::fs::write(&copy, b"x").unwrap();
    let old = std::time::SystemTime::now() - 10 * LONG;
    std::fs::File::options()
        .append(true)
        .open(&copy)
        .unwrap()
        .set_modified(old)
        .unwrap();
    let rules = Rules {
        expire_after: Some(LONG),
        ..fixture.rules
    };
    let store = Store::open(dir.path(), Fixture { rules, ..fixture });
    assert_eq!(store.stat("storage_used_bytes"), RECORD);
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
}

#[test]
fn a_floor_is_not_chased_while_the_medium_keeps_what_was_removed() {
    let Some(place) = Place::new(4096) else {
        return;
    };
    let (root, clock) = (place.path("root"), ManualClock::new());
    let store = on(&clock, &root, &small(128));
    let device = Device::filled(&store.fixture, &ids(100));
    for block in ids(100) {
        keep(&store, &clock, &device, block);
    }
    // A reader has all of them open, so that nothing gets free when they are removed.
    let open: Vec<_> = ids(100)
        .into_iter()
        .map(|block| std::fs::File::open(store.file(block)).unwrap())
        .collect();
    drop(store);
    let free = rustix_free(&root);
    let floor = Rules {
        free_floor: NonZeroU64::new(free + 3 * RECORD).map(Capacity::Bytes),
        ..Rules::default()
    };
    let begun = clock.now();
    let store = on(
        &clock,
        &root,
        &Fixture {
            rules: floor,
            ..small(128)
        },
    );
    in_time(&clock, LONG, "room is made", || {
        store.stat("records_removed") > 0
    });
    for _ in 0..5 {
        turns(&store, &clock);
    }
    // It waits thirty seconds for what it removed to be free; how often depends on the machine.
    let rounds = 2 + clock.now().since(begun).as_secs() / 30;
    let removed = store.stat("records_removed");
    assert!(removed <= 7 * rounds, "{removed} in {rounds} rounds");
    drop(open);
}

/// Free bytes of a file system as `df` sees them.
fn rustix_free(path: &Path) -> u64 {
    let said = std::process::Command::new("stat")
        .args(["-f", "-c", "%a %S"])
        .arg(path)
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    said.split_whitespace()
        .map(|number| number.parse::<u64>().unwrap())
        .product()
}

#[test]
fn a_write_is_answered_though_the_medium_does_not_say_how_much_is_free() {
    let (dir, fixture, clock) = (directory(), small(512), ManualClock::new());
    let collector = on(&clock, dir.path(), &elsewhere(&fixture));
    let mut patient = fixture.clone();
    patient.deadlines.dump = LONG; // it is the keeper that answers, and not the deadline
    let writer = Store::with_clock_now(dir.path(), patient, Arc::clone(&clock) as Arc<dyn Clock>);
    assert_eq!(collector.stat("storage_collector"), 1);
    collector.fault(Rule::on(OpKind::List, Fault::Errno(5)).path("/space"));
    let gate = writer.hang(OpKind::Space);
    in_time(&clock, LONG, "it hangs", || gate.waiting() > 0);
    let device = Device::filled(&fixture, &ids(200));
    let task = writer.engine.dump(device.rows(&[id(0)])).unwrap();
    in_time(&clock, LONG, "it ends", || ended(&writer, &task));
    gate.open();
    assert_eq!(task.failures()[0].1.kind(), ErrorKind::NoSpace);
}

#[test]
fn a_count_that_was_given_up_with_the_office_is_no_trouble_for_a_writer() {
    let (dir, fixture, clock) = (directory(), small(64), ManualClock::new());
    let first = on(&clock, dir.path(), &elsewhere(&fixture));
    let device = Device::filled(&fixture, &ids(64));
    keep(&first, &clock, &device, id(0));
    let next = on(&clock, dir.path(), &fixture);
    // The first one counts when it is followed.
    let gate = Gate::new();
    first.fault(Rule::on(OpKind::List, Fault::HangAfter(gate.clone())).path("/blocks"));
    first.fault(
        Rule::on(OpKind::Publish, Fault::Errno(28))
            .path("/blocks/")
            .times(1),
    );
    attempt(&first, &clock, &device, id(1)).unwrap_err();
    in_time(&clock, LONG, "it counts", || gate.waiting() > 0);
    first.fault(Rule::on(OpKind::Publish, Fault::Errno(5)).path("/space/"));
    // Mostly while the first one's listing still has some of its half minute.
    in_time(&clock, LONG, "the other one follows", || {
        next.stat("storage_collector") == 1
    });
    first.faults.clear();
    in_time(&clock, LONG, "the first one sees it", || {
        first.stat("storage_collector") == 0
    });
    gate.open();
    turns(&first, &clock);
    for &block in &ids(20)[2..] {
        clock.advance(Duration::from_secs(1));
        if let Err(error) = attempt(&first, &clock, &device, block) {
            assert!(!error.to_string().contains("another collector"), "{error}");
        }
    }
}

#[test]
fn a_refused_dump_does_not_make_the_keeper_run() {
    let (dir, fixture, clock) = (directory(), small(512), ManualClock::new());
    let collector = on(&clock, dir.path(), &elsewhere(&fixture));
    let writer = on(&clock, dir.path(), &fixture);
    let device = Device::filled(&fixture, &ids(201));
    keep(&writer, &clock, &device, id(200));
    collector.fault(Rule::on(OpKind::List, Fault::Errno(5)).path("/space"));
    let all: Vec<_> = ids(200);
    let spent = all
        .iter()
        .position(|&block| attempt(&writer, &clock, &device, block).is_err())
        .unwrap();
    let before = writer.faults.count(OpKind::List);
    // They are refused at once, so the clock stands still: it would run ahead of a busy machine,
    // and the keeper with it.
    for &block in &all[spent..] {
        writer.dump(&device, &[block]).unwrap_err();
    }
    let looks = writer.faults.count(OpKind::List) - before;
    assert!(looks < 10, "{looks}");
}

#[test]
fn a_record_that_could_not_be_looked_at_is_not_written_over() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    // A newer version, of another length.
    let mut newer = std::fs::read(store.file(id(0))).unwrap();
    newer[4..8].copy_from_slice(&2u32.to_le_bytes());
    let crc = crc32c(&newer[..60]);
    newer[60..64].copy_from_slice(&crc.to_le_bytes());
    newer.push(0);
    std::fs::write(store.file(id(0)), &newer).unwrap();
    store.fault(Rule::on(OpKind::Read, Fault::Busy).path("/blocks/"));
    let _ = store.dump(&device, &ids(1));
    assert!(std::fs::read(store.file(id(0))).unwrap() == newer);
}

#[test]
fn a_writer_that_was_forgotten_while_its_machine_slept_writes_nothing_before_it_is_known_again() {
    let (dir, fixture) = (directory(), small(64));
    let (clock, asleep) = (ManualClock::new(), ManualClock::new());
    let collector = on(&clock, dir.path(), &fixture);
    let sleeper = Store::with_clock_now(
        dir.path(),
        Fixture {
            process: elsewhere(&fixture).process,
            ..fixture.clone()
        },
        Arc::clone(&asleep) as Arc<dyn Clock>,
    );
    let device = Device::filled(&fixture, &ids(120));
    eventually("it was granted something", || {
        clock.advance(Duration::from_millis(20));
        asleep.advance(Duration::from_millis(20));
        let task = sleeper.engine.dump(device.rows(&[id(119)])).unwrap();
        eventually("it ends", || {
            clock.advance(Duration::from_millis(5));
            asleep.advance(Duration::from_millis(5));
            ended(&sleeper, &task)
        });
        task.failures().is_empty()
    });
    let known = || {
        let space = std::fs::read_dir(dir.path().join("space"))
            .unwrap()
            .flatten();
        let grants =
            space.filter(|entry| entry.file_name().to_string_lossy().starts_with("grants-"));
        let texts = grants.map(|entry| std::fs::read(entry.path()).unwrap_or_default());
        let read = |text: Vec<u8>| serde_json::from_slice::<serde_json::Value>(&text).ok();
        texts
            .filter_map(read)
            .filter_map(|grants| Some(grants["writers"].as_object()?.len()))
            .max()
    };
    assert_eq!(known(), Some(2));
    // Its clock stands still.
    eventually("it is forgotten", || {
        clock.advance(Duration::from_secs(10));
        let _ = attempt(&collector, &clock, &device, id(118));
        std::fs::remove_file(collector.file(id(118))).is_ok() && known() == Some(1)
    });
    // It wakes, and looks a few times before the collector does.
    let begun = |store: &Store| store.faults.count(OpKind::Stat);
    for _ in 0..4 {
        let before = begun(&sleeper);
        // together less than the silence after which it takes over
        let moment = Duration::from_millis(2500);
        in_time(&asleep, moment, "it looks", || begun(&sleeper) > before);
    }
    let task = sleeper.engine.dump(device.rows(&[id(117)])).unwrap();
    eventually("it ends", || {
        asleep.advance(Duration::from_millis(1));
        ended(&sleeper, &task)
    });
    assert_eq!(task.failures().len(), 1, "no caller counts on it");
}

#[test]
fn a_collector_that_left_is_forgotten_though_the_next_one_left_before_it_counted() {
    let (dir, fixture) = (directory(), small(64));
    let first = Store::open(dir.path(), fixture.clone());
    first
        .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
        .unwrap();
    drop(first);
    let no_count = Rule::on(OpKind::List, Fault::Errno(5)).path("/blocks");
    let second = Store::open_faulty(dir.path(), fixture.clone(), vec![no_count]);
    eventually("it follows and reports the term that it took over", || {
        let grants = documents(dir.path(), "grants").pop().unwrap_or_default();
        second.stat("storage_collector") == 1
            && grants["writers"]
                .as_object()
                .is_some_and(|all| all.len() == 2)
    });
    drop(second);
    let _third = Store::open(dir.path(), fixture);
    eventually("only the third is left in the book", || {
        let grants = documents(dir.path(), "grants").pop().unwrap_or_default();
        grants["writers"]
            .as_object()
            .is_some_and(|all| all.len() == 1)
    });
}

#[test]
fn what_another_host_writes_is_not_dead_because_its_clock_or_ours_is_wrong() {
    let (dir, fixture, clock) = (directory(), small(64), ManualClock::new());
    let store = on(&clock, dir.path(), &fixture);
    let tmp = dir.path().join(identity("w").namespace()).join("tmp");
    let theirs = tmp.join("0123456789abcdef-0123456789abcdef.tmp");
    std::fs::write(&theirs, [1; 1000]).unwrap();
    drop(store);
    let ahead = ManualClock::new();
    ahead.set_wall_ns(4_000_000_000_000_000_000); // a hundred years or so
    let store = on(&ahead, dir.path(), &fixture);
    assert_eq!(store.stat("storage_used_bytes"), 1000);
    assert!(theirs.exists());
}

#[test]
fn records_written_during_a_count_are_counted_once_when_writes_end() {
    only_over!(FilesAlone, "it hangs the count at the directory of a block");
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &small(64));
    let mut twin = id(0); // in the same directory
    twin.0[1] ^= 1;
    let blocks = [ids(5), vec![twin]].concat();
    let device = Device::filled(&store.fixture, &blocks);
    for &block in &blocks[..4] {
        keep(&store, &clock, &device, block);
    }
    in_time(&clock, LONG, "it was counted", || {
        store.stat("storage_counted") == 1
    });
    let (gate, shard) = (store.gate(), store.file(twin));
    let hang = Rule::on(OpKind::List, Fault::HangBefore(gate.clone())).lane(LANE_SPACE);
    store.fault(
        hang.path(shard.parent().unwrap().to_string_lossy())
            .times(1),
    );
    // more than a 16th of the limit: time for another count
    keep(&store, &clock, &device, blocks[4]);
    in_time(&clock, LONG, "it is counted again", || gate.waiting() == 1);
    keep(&store, &clock, &device, twin);
    gate.open();
    let uses = |records| store.stat("storage_used_bytes") == records * RECORD;
    in_time(
        &clock,
        LONG,
        "the count has seen one that is charged too",
        || uses(7),
    );
    in_time(&clock, LONG, "it is counted once", || uses(6));
}
