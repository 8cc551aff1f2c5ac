//! How room is made and kept: the floor of free space, a full medium, quotas, expiry, what is left
//! over of the dead.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, LANE_DUMP, LANE_SPACE, ManualClock};
use ucm_media::quota::{Capacity, Rules};
use ucm_store::engine::{Deadlines, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::only_over;
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, id, identity, ids};

const RECORD: u64 = 8192;

fn bytes(bytes: u64) -> Option<Capacity> {
    NonZeroU64::new(bytes).map(Capacity::Bytes)
}

fn with(rules: Rules) -> Fixture {
    let fixture = Fixture::default();
    let free_floor = rules.free_floor.or(fixture.rules.free_floor);
    Fixture {
        rules: Rules {
            free_floor,
            ..rules
        },
        ..fixture
    }
}

fn age(path: &Path, by: Duration) {
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - by).unwrap();
}

#[test]
fn below_the_floor_nothing_is_stored_and_what_is_stored_goes() {
    only_over!(Files, "its limit is a number of block files");
    let dir = directory();
    let fixture = with(Rules::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(3));
    store.dump(&device, &ids(2)).unwrap();
    drop(store);
    // More than any file system has.
    let floor = Rules {
        free_floor: bytes(1 << 60),
        ..Rules::default()
    };
    let store = Store::open(dir.path(), with(floor));
    eventually("all is removed", || store.stat("records_removed") == 2);
    let error = store.dump(&device, &[id(2)]).unwrap_err().remove(0).1;
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("free_space_floor"), "{error}");
    assert_eq!(store.stat("storage_paused"), 1);
    assert_eq!(store.stat("healthy"), 1, "the medium is well");
}

#[test]
fn a_full_medium_pauses_dumps_makes_room_and_goes_on() {
    only_over!(Files, "its limit is a number of block files");
    for errno in [ucm_testkit::errno::ENOSPC, ucm_testkit::errno::EDQUOT] {
        let (dir, fixture, clock) = (directory(), Fixture::default(), ManualClock::new());
        let store = Store::with_clock(
            dir.path(),
            fixture.clone(),
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        let all = ids(20);
        let device = Device::filled(&fixture, &all);
        for &block in &all[..18] {
            store.dump(&device, &[block]).unwrap();
        }
        store.fault(
            Rule::on(Layout::of_this_run().writing(), Fault::Errno(errno))
                .path("/blocks/")
                .times(1),
        );
        let refused = |store: &Store| store.dump(&device, &[all[18]]).unwrap_err().remove(0).1;
        assert_eq!(refused(&store).kind(), ErrorKind::NoSpace);
        assert_eq!(store.stat("storage_paused"), 1);
        assert!(refused(&store).to_string().contains("pause"));
        assert_eq!(
            store.asked(OpKind::Publish, all[18]),
            1,
            "the medium is asked once"
        );
        eventually("room is made", || store.stat("records_removed") >= 1);
        assert!(store.stat("records_removed") < 18, "some of it");
        clock.advance(Duration::from_millis(250));
        store.dump(&device, &[all[18]]).unwrap();
        assert_eq!(store.stat("storage_paused"), 0);
    }
}

#[test]
fn a_namespace_keeps_to_its_quota() {
    only_over!(Files, "its limit is a number of block files");
    let dir = directory();
    let quota = with(Rules {
        namespace_quota: bytes(4 * RECORD),
        ..Rules::default()
    });
    let other = Fixture {
        weights: "other",
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), other.clone());
    store
        .dump(&Device::filled(&other, &ids(3)), &ids(3))
        .unwrap();
    drop(store);
    let store = Store::open(dir.path(), Fixture::default());
    let device = Device::filled(&store.fixture, &ids(10));
    for &block in &ids(10) {
        store.dump(&device, &[block]).unwrap();
    }
    drop(store);
    for (n, &block) in (0..).zip(&ids(10)) {
        let namespace = dir.path().join(identity("w").namespace());
        let file = namespace.join(format!("blocks/{:02x}/{block}.bin", block.0[0]));
        age(&file, Duration::from_secs(100 - n));
    }
    let store = Store::open(dir.path(), quota);
    eventually("it keeps to its quota", || {
        store.stat("records_removed") == 6
    });
    let kept = store.engine.lookup(&ids(10)).unwrap();
    assert_eq!(kept, [vec![false; 6], vec![true; 4]].concat(), "the newest");
    drop(store);
    let store = Store::open(dir.path(), other);
    assert_eq!(
        store.engine.lookup(&ids(3)).unwrap(),
        [true; 3],
        "the other model's stay"
    );
}

#[test]
fn what_was_not_used_for_too_long_expires() {
    only_over!(Files, "its limit is a number of block files");
    let dir = directory();
    let store = Store::open(dir.path(), Fixture::default());
    let device = Device::filled(&store.fixture, &ids(3));
    store.dump(&device, &ids(3)).unwrap();
    let day = Duration::from_secs(86400);
    age(&store.file(id(0)), 2 * day);
    age(&store.file(id(1)), day / 2);
    drop(store);
    let expiring = with(Rules {
        expire_after: Some(day),
        ..Rules::default()
    });
    let store = Store::open(dir.path(), expiring);
    eventually("one expired", || store.stat("records_removed") == 1);
    assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [false, true, true]);
}

#[test]
fn what_the_dead_left_is_swept_and_nothing_else() {
    let dir = directory();
    let store = Store::open(dir.path(), Fixture::default());
    drop(store);
    let namespace = dir.path().join(identity("w").namespace());
    std::fs::create_dir(namespace.join("quarantine")).unwrap();
    let make = |path: std::path::PathBuf, days: u64| {
        std::fs::write(&path, vec![1; 1000]).unwrap();
        age(&path, Duration::from_secs(days * 86400 + 60));
        path
    };
    let tmp = "0123456789abcdef-0123456789abcdef.tmp";
    // Older versions kept damaged records.
    let damaged = namespace.join(format!("quarantine/{}.bad_checksum.1700000000.bin", id(1)));
    let gone = [
        make(namespace.join("tmp").join(tmp), 1),
        make(dir.path().join("space").join(tmp), 1),
        make(dir.path().join(format!(".{}.tmp", "0a".repeat(16))), 1),
        make(damaged, 0),
    ];
    let stay = [
        make(namespace.join("tmp/of-a-user.txt"), 30),
        make(namespace.join("quarantine/notes.txt"), 30),
        make(dir.path().join("README"), 30),
        make(namespace.join(format!("quarantine/{}.bin", id(2))), 30),
    ];
    let store = Store::open(dir.path(), Fixture::default());
    for path in gone {
        assert!(!path.exists(), "{path:?}");
    }
    for path in stay {
        assert!(path.exists(), "{path:?}");
    }
    assert_eq!(store.stat("storage_used_bytes"), 0);
}

#[test]
fn a_load_of_what_is_being_removed_is_exact_or_a_miss() {
    let dir = directory();
    let fixture = Fixture {
        capacity: Some(16 * RECORD),
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let all = ids(120);
    let device = Device::filled(&fixture, &all);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut hits = 0;
            while store.stat("records_removed") < 60 || hits == 0 {
                for &block in &all {
                    let into = Device::blank(&fixture, &[block]);
                    if store.load(&into, &[block]).is_ok() {
                        assert!(into.is_right(block), "a hit is exact");
                        hits += 1;
                    } else {
                        assert!(into.is_blank(block), "a miss touches nothing");
                    }
                }
            }
        });
        for &block in &all {
            eventually("room is made", || store.dump(&device, &[block]).is_ok());
        }
        reader.join().unwrap();
    });
}

#[test]
fn room_for_a_write_past_its_deadline_is_returned() {
    only_over!(OneMedium, "a dump of a pipeline may be written elsewhere");
    let (dir, clock) = (directory(), ManualClock::new());
    let fixture = Fixture::default();
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    let device = Device::filled(&fixture, &ids(3));
    store.dump(&device, &[id(0)]).unwrap();
    let used = store.stat("storage_used_bytes");
    let gate = store.gate();
    let late = Fault::HangAfter(gate.clone());
    store.fault(Rule::on(OpKind::Stat, late).lane(LANE_DUMP).times(1));
    let task = store.engine.dump(device.rows(&[id(1)])).unwrap();
    gate.await_waiting(1);
    clock.advance(Deadlines::default().dump);
    eventually("it is written off", || {
        task.check(store.engine.clock(), Until::Published)
    });
    eventually("its thread is stuck", || store.stat("workers_stuck") == 1);
    gate.open(); // it looked, and would take room now
    eventually("its thread is back", || store.stat("workers_stuck") == 0);
    eventually("nothing is held", || {
        store.stat("storage_used_bytes") == used
    });
    assert_eq!(store.engine.lookup(&[id(1)]).unwrap(), [false]);
    store.dump(&device, &[id(2)]).unwrap();
}

#[test]
fn room_made_for_a_record_that_is_present_by_then_is_returned() {
    only_over!(FilesAlone, "it puts a block file there");
    let (dir, clock, gate) = (directory(), ManualClock::new(), Gate::new());
    let fixture = Fixture::default();
    let hang = Rule::on(OpKind::List, Fault::HangBefore(gate.clone()));
    let rules = vec![hang.lane(LANE_SPACE).times(1)];
    let clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let store = Store::faulty_with_clock(dir.path(), fixture.clone(), rules, clock);
    gate.await_waiting(1); // nothing is granted before it has looked
    let device = Device::filled(&fixture, &ids(1));
    let task = store.engine.dump(device.rows(&[id(0)])).unwrap();
    eventually("it asked, and waits for room", || {
        store.asked(OpKind::Stat, id(0)) == 1
    });
    let file = store.file(id(0));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, vec![0; RECORD as usize]).unwrap();
    gate.open();
    store.outcome(&task).unwrap();
    assert_eq!(store.stat("blocks_present"), 1);
    eventually("it is counted once", || {
        store.stat("storage_counted") == 1 && store.stat("storage_used_bytes") == RECORD
    });
}

#[test]
fn every_block_of_a_first_dump_waits_for_the_first_grant() {
    only_over!(FilesAlone, "a segment reserves room for all of its records");
    let (dir, clock, gate) = (directory(), ManualClock::new(), Gate::new());
    let fixture = Fixture {
        slots: 600,
        ..Fixture::default()
    };
    let hang = Rule::on(OpKind::List, Fault::HangBefore(gate.clone()));
    let rules = vec![hang.lane(LANE_SPACE).times(1)];
    let clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let store = Store::faulty_with_clock(dir.path(), fixture.clone(), rules, clock);
    gate.await_waiting(1); // nothing is granted before it has looked
    let many: Vec<BlockId> = (0..400u128).map(|n| BlockId(n.to_le_bytes())).collect();
    let device = Device::filled(&fixture, &many);
    let task = store.engine.dump(device.rows(&many)).unwrap();
    eventually("the first one waits", || {
        many.iter()
            .any(|&block| store.asked(OpKind::Stat, block) == 1)
    });
    gate.open();
    store.outcome(&task).unwrap();
    assert_eq!(store.stat("blocks_published"), 400);
}
