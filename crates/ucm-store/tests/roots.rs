//! A root is shared, wiped, misconfigured and raced for: what then is stored, removed and logged.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock};
use ucm_media::layout::Modes;
use ucm_store::engine::{Deadlines, Until};
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::{Device, Fixture, Store, directory, eventually, id, identity, ids, of_records};

fn marker(capacity: u64) -> String {
    format!("{{\"format\":1,\"uuid\":\"other\",\"created\":1,\"storage_capacity\":{capacity}}}")
}

#[test]
fn the_marker_that_stays_counts_when_two_mark_a_root() {
    let dir = directory();
    let fixture = Fixture {
        capacity: None,
        ..Fixture::default()
    };
    let path = dir.path().join("ucm-root.json");
    let gate = Gate::new();
    let hang = Rule::on(OpKind::Publish, Fault::HangAfter(gate.clone())).path("ucm-root.json");
    let store = std::thread::scope(|scope| {
        let opening = scope.spawn(|| Store::open_faulty(dir.path(), fixture, vec![hang]));
        gate.await_waiting(1);
        std::fs::write(&path, marker(7 << 20)).unwrap();
        gate.open();
        opening.join().unwrap()
    });
    assert_eq!(store.stat("storage_capacity_bytes"), 7 << 20);
    assert!(
        std::fs::read_to_string(&path).unwrap().contains("other"),
        "not marked again"
    );
}

#[test]
fn a_marker_written_over_later_counts_with_the_next_count() {
    let dir = directory();
    let fixture = Fixture {
        capacity: None,
        ..Fixture::default()
    };
    let path = dir.path().join("ucm-root.json");
    std::fs::write(&path, marker(7 << 20)).unwrap();
    let gate = Gate::new();
    let hang = Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())).path("ucm-root.json");
    let store = Store::open_faulty(dir.path(), fixture, vec![hang.nth(2)]);
    gate.await_waiting(1);
    std::fs::write(&path, marker(9 << 20)).unwrap();
    gate.open();
    eventually("the count adopts it", || {
        store.stat("storage_capacity_bytes") == 9 << 20
    });
}

#[test]
fn a_part_that_another_rank_wrote_over_is_added_again() {
    let dir = directory();
    let gate = Gate::new();
    let manifest = dir
        .path()
        .join(identity("w").namespace())
        .join("manifest.json");
    // Reads of the manifest: none there, ours there, and the one before the first count.
    let hang = Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())).path("manifest.json");
    let _store = Store::open_faulty(dir.path(), Fixture::default(), vec![hang.nth(3)]);
    gate.await_waiting(1);
    let ours = std::fs::read_to_string(&manifest).unwrap();
    assert!(ours.contains("g0p0t0"));
    std::fs::write(&manifest, ours.replace("g0p0t0", "g0p0t1")).unwrap();
    gate.open();
    eventually("both are there", || {
        let text = std::fs::read_to_string(&manifest).unwrap();
        text.contains("g0p0t0") && text.contains("g0p0t1")
    });
}

#[test]
fn a_long_identity_makes_a_long_manifest_and_no_trouble() {
    let dir = directory();
    let fixture = Fixture {
        weights: Box::leak("w".repeat(200_000).into_boxed_str()),
        ..Fixture::default()
    };
    for _ in 0..2 {
        let store = Store::open(dir.path(), fixture.clone());
        assert_eq!(store.stat("healthy"), 1);
    }
}

#[test]
fn a_removed_namespace_is_made_again() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    std::fs::remove_dir_all(dir.path().join(identity("w").namespace())).unwrap();
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    eventually("it is written again", || {
        store.dump(&device, &ids(1)).is_ok()
    });
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
    let manifest = dir
        .path()
        .join(identity("w").namespace())
        .join("manifest.json");
    eventually("it is explained again", || manifest.exists());
}

#[test]
fn a_limit_too_small_for_anything_is_an_error_that_says_so() {
    let dir = directory();
    let fixture = Fixture {
        capacity: Some(8 * 8192 - 1),
        ..Fixture::default()
    };
    let error = Store::try_open(dir.path(), fixture.clone()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("storage_capacity"), "{error}");
    // One in the marker is found later: the store says so and stays empty.
    std::fs::write(dir.path().join("ucm-root.json"), marker(100)).unwrap();
    let store = Store::open(
        dir.path(),
        Fixture {
            capacity: None,
            ..fixture
        },
    );
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    assert!(store.said()[0].contains("storage_capacity"));
}

#[test]
fn the_smallest_limit_stores() {
    let dir = directory();
    let fixture = Fixture {
        capacity: Some(8 * 8192),
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(30));
    for &block in &ids(30) {
        eventually("room is made", || store.dump(&device, &[block]).is_ok());
    }
    let there = |found: Vec<bool>| found.into_iter().filter(|&there| there).count();
    eventually("much of the limit is used", || {
        there(store.engine.lookup(&ids(30)).unwrap()) >= 4
    });
}

#[test]
fn lookups_do_not_trust_a_root_of_a_newer_format() {
    let dir = directory();
    let newer = marker(1 << 30).replace("\"format\":1", "\"format\":2");
    std::fs::write(dir.path().join("ucm-root.json"), newer).unwrap();
    let fixture = Fixture {
        lookup_only: true,
        ..Fixture::default()
    };
    let store = Store::open(dir.path(), fixture);
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    assert_eq!((store.stat("healthy"), store.missed("unhealthy")), (0, 1));
    assert!(store.said()[0].contains("newer"));
}

#[test]
fn a_write_that_may_have_happened_counts() {
    let (dir, clock, gate) = (directory(), ManualClock::new(), Gate::new());
    let fixture = Fixture::default();
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    store.fault(of_records(OpKind::Publish, Fault::HangAfter(gate.clone())));
    let device = Device::filled(&fixture, &ids(1));
    let task = store.engine.dump(device.rows(&ids(1))).unwrap();
    gate.await_waiting(1);
    clock.advance(Deadlines::default().dump);
    assert!(task.wait(store.engine.clock(), Until::Published, None));
    assert_eq!(task.failures()[0].1.kind(), ErrorKind::Timeout);
    assert!(store.file(id(0)).exists(), "it was written all the same");
    assert_eq!(store.stat("storage_used_bytes"), 8192);
    gate.open();
}

#[test]
fn a_count_that_fails_says_why_nothing_is_stored() {
    let dir = directory();
    let fail = Rule::on(OpKind::List, Fault::Errno(13));
    let fixture = Fixture {
        capacity: Some(8 * 8192),
        ..Fixture::default()
    };
    let store = Store::open_faulty(dir.path(), fixture.clone(), vec![fail]);
    let device = Device::filled(&fixture, &ids(1));
    eventually("the count failed", || {
        let error = store.dump(&device, &ids(1)).unwrap_err().remove(0).1;
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        error.to_string().contains("cannot") || error.to_string().contains("denied")
    });
    store.faults.clear();
    eventually("it is counted", || store.dump(&device, &ids(1)).is_ok());
}

#[test]
fn a_prefix_counts_only_what_was_looked_at() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(3)), &ids(3))
        .unwrap();
    assert_eq!(store.engine.lookup_on_prefix(&ids(10)).unwrap(), 3);
    assert_eq!((store.missed("absent"), store.stat("lookup_hits")), (1, 3));
    assert_eq!(store.engine.lookup_on_prefix(&ids(3)).unwrap(), 3);
}

#[test]
fn what_is_made_has_the_configured_permissions() {
    let (dir, modes) = (
        directory(),
        Modes {
            file: 0o640,
            dir: 0o750,
        },
    );
    for (name, modes) in [("usual", Modes::default()), ("opened", modes)] {
        let fixture = Fixture {
            modes,
            ..Fixture::default()
        };
        let root = dir.path().join(name);
        let store = Store::open(&root, fixture.clone());
        store
            .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
            .unwrap();
        drop(store);
        let (mut files, mut dirs) = (Vec::new(), vec![root]);
        let mut looked = 0;
        while let Some(dir) = dirs.pop() {
            looked += 1;
            assert_eq!(mode(&dir), modes.dir, "{dir:?}");
            for entry in std::fs::read_dir(&dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { &mut dirs } else { &mut files }.push(path);
            }
        }
        for file in &files {
            assert_eq!(mode(file), modes.file, "{file:?}");
        }
        assert!(looked >= 5 && files.len() >= 4, "{looked} {files:?}");
    }
}

/// Permission bits.
fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}
