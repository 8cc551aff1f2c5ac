//! A root that goes away, changes or refuses while an engine runs: misses with the right reason, no
//! byte written where it does not belong, and all as before when the cause is removed, without a
//! restart.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::Path;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, in_units};
use ucm_infra::{LANE_DUMP, SystemClock};
use ucm_io::{IoJob, PsyncEngine};
use ucm_media::quota::{Capacity, Rules};
use ucm_store::breaker::BreakerConfig;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::mount::{Place, copy_all};
use crate::common::only_over;
use crate::common::{
    Device, Fixture, Layout, Store, directory, eventually, id, identity, ids, of_records,
};

/// As configured by default, so that a breaker that opens for the wrong reason shows.
fn fixture() -> Fixture {
    Fixture {
        breaker: BreakerConfig::default(),
        capacity: Some(16 << 20),
        ..Fixture::default()
    }
}

fn opened(root: &Path) -> (Store, Device) {
    let fixture = fixture();
    let device = Device::filled(&fixture, &ids(60));
    let store = Store::open(root, fixture);
    store.dump(&device, &ids(3)).unwrap();
    (store, device)
}

fn refused(store: &Store, device: &Device, block: BlockId) -> Error {
    store.dump(device, &[block]).unwrap_err().remove(0).1
}

/// Everything works: what was stored is found and read, more can be stored.
fn all_is_well(store: &Store, device: &Device, stored: &[BlockId]) {
    eventually("blocks are stored again", || {
        store.dump(device, &[id(50)]).is_ok()
    });
    assert_eq!(store.stat("healthy"), 1);
    let known: Vec<BlockId> = stored.iter().copied().chain([id(50)]).collect();
    finds(store, &known, &vec![true; known.len()]);
    let target = Device::blank(&store.fixture, &known);
    store.load(&target, &known).unwrap();
    assert!(known.iter().all(|&block| target.is_right(block)));
}

/// Lookups answer this: at once over files; an index of segments finds out at its next refresh.
fn finds(store: &Store, blocks: &[BlockId], expected: &[bool]) {
    let found = || store.engine.lookup(blocks).unwrap();
    match store.fixture.layout {
        Layout::File => assert_eq!(found(), expected),
        Layout::Segment(_) => eventually("lookups find the records", || found() == expected),
    }
}

fn said(store: &Store, text: &str) -> usize {
    store
        .said()
        .iter()
        .filter(|line| line.contains(text))
        .count()
}

/// Files below a directory.
fn files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| {
            if entry.path().is_dir() {
                files(&entry.path())
            } else {
                1
            }
        })
        .sum()
}

#[test]
fn a_read_only_root_is_read_and_said_once() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let Some(place) = Place::new(4096) else {
        return;
    };
    let (store, device) = opened(&place.path("root"));
    place.read_only("root", true);
    let blocks = ids(12);
    for &block in &blocks[3..] {
        let error = refused(&store, &device, block);
        assert_eq!((error.kind(), error.os_code()), (ErrorKind::Io, Some(30)));
    }
    assert_eq!(said(&store, "could not be stored"), 1);
    assert_eq!(
        (store.stat("healthy"), store.stat("breaker_opened")),
        (1, 0)
    );
    let target = Device::blank(&store.fixture, &ids(3));
    store.load(&target, &ids(3)).unwrap();
    assert!(target.is_right(id(2)));
    assert_eq!(
        store.engine.lookup(&ids(4)).unwrap(),
        [true, true, true, false]
    );
    place.read_only("root", false);
    all_is_well(&store, &device, &ids(3));
    assert_eq!(said(&store, "stored again"), 1);
}

#[test]
fn a_root_that_is_read_only_at_the_start_is_read_too() {
    let Some(place) = Place::new(4096) else {
        return;
    };
    drop(opened(&place.path("root")));
    place.read_only("root", true);
    let device = Device::filled(&fixture(), &ids(60));
    // Nothing is counted where no process can write.
    let open = |fixture| Store::with_clock_now(&place.path("root"), fixture, SystemClock::shared());
    let store = open(fixture());
    let target = Device::blank(&store.fixture, &ids(3));
    store.load(&target, &ids(3)).unwrap();
    assert!(target.is_right(id(0)));
    assert_eq!(refused(&store, &device, id(3)).os_code(), Some(30));
    assert_eq!(said(&store, "could not be stored"), 1);
    // Another part's directories and manifest cannot be made, and need not be.
    let others = Fixture {
        weights: "others",
        ..fixture()
    };
    let other = open(others.clone());
    assert_eq!(other.engine.lookup(&ids(3)).unwrap(), [false; 3]);
    assert_eq!((other.stat("healthy"), other.missed("absent")), (1, 3));
    place.read_only("root", false);
    all_is_well(&store, &device, &ids(3));
    all_is_well(&other, &Device::filled(&others, &ids(60)), &[]);
}

#[test]
fn an_unmarked_root_that_is_read_only_is_taken_up_when_it_can_be_marked() {
    only_over!(
        OneMedium,
        "a memory is there whatever the root is, so the engine is well: tiers.rs"
    );
    let Some(place) = Place::new(4096) else {
        return;
    };
    place.read_only("root", true);
    let store = Store::open(&place.path("root"), patient());
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [false; 2]);
    assert_eq!((store.missed("unhealthy"), store.stat("healthy")), (2, 0));
    let log = store.said();
    let off: Vec<&String> = log
        .iter()
        .filter(|line| line.contains("switched off"))
        .collect();
    assert_eq!(off.len(), 1, "{log:?}");
    for words in [
        "posix is switched off until it can be used",
        "nothing is stored",
        "Read-only",
        "configure another place",
    ] {
        assert!(off[0].contains(words), "{words}: {}", off[0]);
    }
    assert!(
        off[0].contains(&place.path("root").display().to_string()),
        "{}",
        off[0]
    );
    place.read_only("root", false);
    taken_up(&store);
    all_is_well(&store, &Device::filled(&fixture(), &ids(60)), &[]);
}

#[test]
fn a_limit_above_its_file_system_is_logged_once_with_both_numbers_and_what_happens() {
    only_over!(OneMedium, "it is about the root alone");
    for (floor, then) in [
        (None, ""),
        (Some(Capacity::Percent(0.0)), "free_space_floor is 0"),
    ] {
        let dir = directory();
        let fixture = Fixture {
            capacity: Some(900 << 40),
            rules: Rules {
                free_floor: floor,
                ..Rules::default()
            },
            ..fixture()
        };
        let store = Store::open(dir.path(), fixture.clone());
        let total = IoJob::alone(PsyncEngine::new(false))
            .space(dir.path())
            .unwrap()
            .total;
        let then = match floor {
            None => format!(
                "less than {} of the file system is free",
                in_units(total / 20)
            ),
            Some(_) => then.to_owned(),
        };
        let log = store.said();
        let large: Vec<&String> = log
            .iter()
            .filter(|line| line.contains("never reached"))
            .collect();
        assert_eq!(large.len(), 1, "{log:?}");
        let root = dir.path().display();
        for words in [
            format!("storage_capacity of {root} is 900 TiB"),
            format!("its file system has {}", in_units(total)),
            then,
            "lower storage_capacity".to_owned(),
        ] {
            assert!(large[0].contains(&words), "{words}: {}", large[0]);
        }
        let fits = Fixture {
            capacity: Some(16 << 20),
            ..fixture
        };
        let other = Store::open(dir.path(), fits);
        assert_eq!(said(&other, "never reached"), 0, "one that fits");
    }
}

#[test]
fn a_damaged_marker_at_the_start_is_named_and_the_root_taken_up_when_it_is_put_right() {
    only_over!(
        OneMedium,
        "a memory is there whatever the root is, so the engine is well: tiers.rs"
    );
    let dir = directory();
    drop(opened(dir.path()));
    let marker = dir.path().join("ucm-root.json");
    let ours = std::fs::read(&marker).unwrap();
    std::fs::write(&marker, &ours[..ours.len() / 2]).unwrap();
    let store = Store::open(dir.path(), patient());
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [false; 2]);
    assert_eq!(store.missed("unhealthy"), 2);
    assert_eq!(said(&store, "marker is damaged"), 1);
    std::fs::write(&marker, ours).unwrap();
    taken_up(&store);
    all_is_well(&store, &Device::filled(&fixture(), &ids(60)), &ids(3));
}

/// A breaker that is soon over: the first to come after its time has the root looked at.
fn patient() -> Fixture {
    let breaker = BreakerConfig {
        cool_down: Duration::from_millis(1),
        ..BreakerConfig::default()
    };
    Fixture {
        breaker,
        ..fixture()
    }
}

fn taken_up(store: &Store) {
    eventually("the root is taken up", || {
        let _ = store.engine.lookup(&ids(1));
        store.stat("healthy") == 1
    });
}

#[test]
fn an_unmounted_share_is_never_written_beside() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    place.bind("root", "share");
    let share = place.path("share");
    let (store, device) = opened(&share);
    place.unmount("share");
    finds(&store, &ids(3), &[false; 3]);
    for block in ids(20) {
        let error = refused(&store, &device, block);
        assert_eq!(error.kind(), ErrorKind::Foreign);
        assert!(error.to_string().contains("marker"), "{error}");
    }
    assert_eq!(files(&share), 0, "nothing was written where it was mounted");
    assert!(store.missed("absent") >= 3 && store.stat("healthy") == 1);
    assert_eq!(said(&store, "could not be stored"), 1, "once");
    place.bind("root", "share");
    all_is_well(&store, &device, &ids(3));
}

/// Has the root looked for again, several times: every look begins only when the one before it has
/// ended.
fn looked_for(store: &Store, again: impl Fn()) {
    let marker = store.root.join("ucm-root.json");
    store.faults.forget();
    eventually("the root was looked for several times", || {
        again();
        let log = store.faults.log();
        let reads = log
            .iter()
            .filter(|seen| seen.kind == OpKind::Read && seen.paths.contains(&marker));
        reads.count() >= 4
    });
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn a_root_below_a_mount_point_is_made_again_where_it_was_removed_and_not_where_it_was_unmounted() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    // On the same file system as the mount point, so that device numbers say nothing.
    std::fs::create_dir(place.path("root/kept")).unwrap();
    place.bind("root/kept", "root/share");
    let share = place.path("root/share");
    let (store, device) = opened(&share.join("a").join("b"));
    place.unmount("root/share");
    finds(&store, &ids(3), &[false; 3]);
    let target = Device::blank(&store.fixture, &ids(1));
    assert!(store.load(&target, &ids(1)).is_err() && target.is_blank(id(0)));
    looked_for(&store, || {
        assert_eq!(refused(&store, &device, id(9)).kind(), ErrorKind::Foreign);
    });
    assert!(is_empty(&share), "nothing was made where it was mounted");
    place.bind("root/kept", "root/share");
    all_is_well(&store, &device, &ids(3));
    // Removed at once; the name that it gets is no matter.
    std::fs::rename(share.join("a"), share.join("gone")).unwrap();
    finds(&store, &[id(0), id(50)], &[false; 2]);
    all_is_well(&store, &device, &[]);
    assert!(share.join("a").join("b").join("ucm-root.json").exists());
}

#[test]
fn a_root_that_is_looked_at_while_it_is_unmounted_is_not_made() {
    only_over!(
        OneMedium,
        "a memory has what was dumped, and it is a hit there"
    );
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    place.bind("root", "share");
    let share = place.path("share");
    // Over segments a breaker that is open has the root looked at, as it is at the start.
    let store = Store::open(
        &share.join("root"),
        Fixture {
            layout: Layout::segments(),
            ..patient()
        },
    );
    let device = Device::filled(&store.fixture, &ids(60));
    store.dump(&device, &ids(3)).unwrap();
    store.fault(Rule::always(Fault::Errno(5)));
    eventually("the breaker opened", || {
        let target = Device::blank(&store.fixture, &ids(1));
        let _ = store.load(&target, &ids(1));
        store.stat("healthy") == 0
    });
    place.unmount("share");
    store.faults.clear();
    looked_for(&store, || {
        let _ = store.engine.lookup(&ids(3));
    });
    assert!(is_empty(&share), "nothing was made where it was mounted");
    eventually("they are misses", || {
        store.engine.lookup(&ids(3)).unwrap() == [false; 3]
    });
    place.bind("root", "share");
    taken_up(&store);
    all_is_well(&store, &device, &ids(3));
}

#[test]
fn directories_that_a_write_misses_are_not_made_where_a_share_was_unmounted() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    place.bind("root", "share");
    let share = place.path("share");
    let (store, device) = opened(&share);
    // Between the look at the marker and the file.
    let gate = store.gate();
    let making = match store.fixture.layout {
        Layout::File => OpKind::Publish,
        Layout::Segment(_) => OpKind::Create,
    };
    let rule = Rule::on(making, Fault::HangBefore(gate.clone()));
    store.fault(rule.lane(LANE_DUMP));
    let task = store.engine.dump(device.rows(&[id(7)])).unwrap();
    gate.await_waiting(1);
    place.unmount("share");
    store.faults.clear();
    gate.open();
    let error = store.outcome(&task).unwrap_err().remove(0).1;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    looked_for(&store, || {
        assert_eq!(refused(&store, &device, id(9)).kind(), ErrorKind::Foreign);
    });
    assert!(is_empty(&share), "nothing was made where it was mounted");
    place.bind("root", "share");
    all_is_well(&store, &device, &ids(3));
}

#[test]
fn the_same_root_on_another_device_is_taken_up_and_another_root_is_not() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let Some(mut place) = Place::new(4096) else {
        return;
    };
    place.bind("root", "share");
    let share = place.path("share");
    let (store, device) = opened(&share);
    place.unmount("share");
    // The root of another store, whole and marked.
    place.tmpfs("share", 4096);
    let theirs = Store::open(&share, fixture());
    theirs.dump(&device, &[id(9)]).unwrap();
    drop(theirs);
    let before = files(&share);
    finds(&store, &[id(0)], &[false]);
    for _ in 0..3 {
        assert_eq!(refused(&store, &device, id(0)).kind(), ErrorKind::Foreign);
    }
    assert_eq!(files(&share), before);
    // What is there is read all the same: every record says whose it is.
    finds(&store, &[id(9), id(0)], &[true, false]);
    place.unmount("share");
    // A share mounted anew gets another device number.
    place.tmpfs("share", 4096);
    copy_all(&place.path("root"), &share);
    all_is_well(&store, &device, &ids(3));
}

#[test]
fn a_root_that_was_removed_is_made_again() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let dir = directory();
    let root = dir.path().join("a").join("b");
    let (store, device) = opened(&root);
    eventually("it is removed, though its store writes there", || {
        std::fs::remove_dir_all(dir.path().join("a")).is_ok()
    });
    finds(&store, &ids(3), &[false; 3]);
    let target = Device::blank(&store.fixture, &ids(1));
    let error = store.load(&target, &ids(1)).unwrap_err().remove(0).1;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(store.missed("absent") >= 4 && store.stat("healthy") == 1);
    all_is_well(&store, &device, &[]);
    assert!(root.join("ucm-root.json").exists());
    eventually("the log says that it was made anew", || {
        said(&store, "it was made anew, without its blocks") == 1
    });
    let manifest = root.join(identity("w").namespace()).join("manifest.json");
    eventually("the manifest is written", || manifest.exists());
}

#[test]
fn a_removed_marker_stops_writing_until_it_is_back() {
    let dir = directory();
    let (store, device) = opened(dir.path());
    let (marker, kept) = (dir.path().join("ucm-root.json"), dir.path().join("kept"));
    std::fs::rename(&marker, &kept).unwrap();
    for _ in 0..3 {
        refused(&store, &device, id(7));
    }
    assert!(!marker.exists() && !store.file(id(7)).exists());
    let writable = || {
        let stats = store.engine.stats();
        let tiers = stats["tiers"].as_array().unwrap();
        tiers.last().unwrap()["writable"] == true
    };
    assert!(!writable());
    std::fs::rename(&kept, &marker).unwrap();
    all_is_well(&store, &device, &ids(3));
    assert!(writable());
}

#[test]
fn a_marker_of_a_newer_format_stops_writing_with_the_next_count() {
    let dir = directory();
    let (store, device) = opened(dir.path());
    let marker = dir.path().join("ucm-root.json");
    let ours = std::fs::read_to_string(&marker).unwrap();
    std::fs::write(&marker, ours.replace("\"format\": 1", "\"format\": 2")).unwrap();
    // A full medium has the root counted.
    store.fault(of_records(Layout::of_this_run().writing(), Fault::Errno(28)).times(1));
    assert_eq!(refused(&store, &device, id(3)).kind(), ErrorKind::NoSpace);
    let (many, mut looks) = (Device::filled(&fixture(), &ids(u8::MAX)), 0_u32);
    eventually("the count found it", || {
        looks += 1;
        // Ten times a second at most, so that there are new blocks for as long as it takes.
        if looks % 512 != 0 {
            return false;
        }
        let ended = store.dump(&many, &[id((3 + looks / 512).min(254) as u8)]);
        ended.is_err_and(|failures| failures[0].1.to_string().contains("marker"))
    });
    std::fs::write(&marker, ours).unwrap();
    all_is_well(&store, &device, &ids(3));
}

#[test]
fn a_full_file_system_costs_dumps_only() {
    only_over!(
        Files,
        "its file system has room for block files and for no segment"
    );
    let Some(place) = Place::new(256) else { return };
    let (store, device) = opened(&place.path("root"));
    let filler = place.path("root").join("others");
    let free = vec![0u8; 1 << 20];
    let _ = std::fs::write(&filler, free); // as far as it goes
    assert_eq!(refused(&store, &device, id(3)).kind(), ErrorKind::NoSpace);
    // Dumps pause for a quarter of a second while room is made; a test that is slower than that
    // finds room.
    for &block in &ids(12)[4..] {
        match store.dump(&device, &[block]) {
            Ok(()) => break,
            Err(failures) => assert_eq!(failures[0].1.kind(), ErrorKind::NoSpace),
        }
    }
    assert_eq!(
        (store.stat("healthy"), store.stat("breaker_opened")),
        (1, 0)
    );
    // The oldest go to make room; what is there is right.
    for block in ids(3) {
        let target = Device::blank(&store.fixture, &[block]);
        match store.load(&target, &[block]) {
            Ok(()) => assert!(target.is_right(block)),
            Err(_) => assert!(target.is_blank(block)),
        }
    }
    let private = place
        .path("root")
        .join(identity("w").namespace())
        .join("tmp");
    assert_eq!(files(&private), 0, "begun files are removed");
    std::fs::remove_file(&filler).unwrap();
    all_is_well(&store, &device, &[]);
}

/// What the operating system may say to every operation, for how long it likes: (error number, kind
/// of a dump's failure, kind of a load's).
#[test]
fn what_every_operation_is_refused_with_is_a_bounded_miss() {
    only_over!(
        FilesAlone,
        "a lookup of segments makes no system call, and one through tiers ends a prefix at the \
         first block that is missing"
    );
    for (code, dumped, loaded) in [
        (13, ErrorKind::Io, ErrorKind::Io), // wrong owner or mode
        (1, ErrorKind::Io, ErrorKind::Io),  // likewise
        (24, ErrorKind::Io, ErrorKind::Io), // no descriptors left in this process
        (23, ErrorKind::Io, ErrorKind::Io), // nor on this machine
        (12, ErrorKind::Io, ErrorKind::Io), // no memory
        (122, ErrorKind::NoSpace, ErrorKind::NoSpace), // over quota
    ] {
        let dir = directory();
        let (store, device) = opened(dir.path());
        store.fault(Rule::always(Fault::Errno(code)));
        for _ in 0..6 {
            assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [false; 3], "{code}");
            assert_eq!(store.engine.lookup_on_prefix(&ids(3)).unwrap(), 0);
            assert_eq!(refused(&store, &device, id(40)).kind(), dumped, "{code}");
        }
        let target = Device::blank(&store.fixture, &ids(1));
        let error = store.load(&target, &ids(1)).unwrap_err().remove(0).1;
        assert_eq!(error.kind(), loaded, "{code}");
        assert_eq!(
            (store.stat("healthy"), store.stat("breaker_opened")),
            (1, 0),
            "{code}"
        );
        assert_eq!(
            (store.missed("absent"), store.missed("io_error")),
            (0, 37),
            "{code}"
        );
        store.faults.clear();
        assert_eq!(store.stat("refused_now"), 0, "{code}: no record's fault");
        // Where the collector's heartbeat found the medium full it may make room now, of
        // anything.
        let was_full = dumped == ErrorKind::NoSpace;
        eventually("a dump is well again", || {
            let ended = store.dump(&device, &ids(1));
            assert!(ended.is_ok() || was_full, "{code}: {ended:?}");
            ended.is_ok()
        });
        let stay = if was_full { 0 } else { 3 };
        all_is_well(&store, &device, &ids(stay));
    }
}
