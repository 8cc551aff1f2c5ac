//! The layout by default: that of the root, segments on a new one, the same for all
//! from then on.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use ucm_infra::{Clock, ManualClock};
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::shared::{LONG, in_time};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, ids};

/// A store with the default layout. Where it decides on segments, they are sealed at once.
fn unnamed() -> Fixture {
    Fixture {
        unnamed: true,
        layout: Layout::segments(),
        ..Fixture::default()
    }
}

fn named(layout: Layout) -> Fixture {
    Fixture {
        unnamed: false,
        layout,
        ..Fixture::default()
    }
}

fn marker(root: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(root.join("ucm-root.json")).unwrap()).unwrap()
}

/// Whose marker says this of its layout; nothing is kept below it.
fn marked(root: &Path, layout: &Value) {
    Store::open(root, named(Layout::File));
    let mut marker = marker(root);
    marker["layout"] = layout.clone();
    std::fs::write(root.join("ucm-root.json"), marker.to_string()).unwrap();
}

/// What a store says of its layout when it starts.
fn says(store: &Store) -> String {
    let said = store.said().join("\n");
    said.split_once("; layout")
        .map_or(said.clone(), |(_, layout)| layout.to_owned())
}

#[test]
fn a_new_root_gets_segments_and_says_so() {
    let dir = directory();
    let store = Store::open(dir.path(), unnamed());
    assert!(
        says(&store).starts_with(" segment (marked: default)"),
        "{}",
        says(&store)
    );
    let kept = marker(dir.path())["layout"].clone();
    assert_eq!(
        (&kept["kind"], &kept["why"]),
        (&json!("segment"), &json!("default"))
    );
    store
        .dump(&Device::filled(&unnamed(), &ids(2)), &ids(2))
        .unwrap();
    assert!(!store.segments().is_empty());
    drop(store);
    let again = Store::open(dir.path(), unnamed());
    assert_eq!(again.engine.lookup(&ids(2)).unwrap(), [true; 2]);
    assert_eq!(marker(dir.path())["layout"], kept);
}

#[test]
fn what_the_marker_says_is_kept() {
    for (kind, why) in [
        ("file", "measured"),
        ("file", "large"),
        ("segment", "measured"),
    ] {
        let dir = directory();
        let layout = json!({"kind": kind, "why": why, "decided": 1, "record_bytes": 5, "file_bytes_per_s": 7});
        marked(dir.path(), &layout);
        let store = Store::open(dir.path(), unnamed());
        assert!(
            says(&store).starts_with(&format!(" {kind} (marked: {why})")),
            "{}",
            says(&store)
        );
        store
            .dump(&Device::filled(&unnamed(), &ids(2)), &ids(2))
            .unwrap();
        assert_eq!(store.segments().is_empty(), kind == "file");
        assert_eq!(marker(dir.path())["layout"], layout);
    }
}

#[test]
fn records_that_are_there_decide() {
    for layout in [Layout::File, Layout::segments()] {
        let dir = directory();
        let named = named(layout);
        let device = Device::filled(&named, &ids(4));
        Store::open(dir.path(), named)
            .dump(&device, &ids(4))
            .unwrap();
        assert_eq!(marker(dir.path()).get("layout"), None);
        let store = Store::open(dir.path(), unnamed());
        assert_eq!(
            store.engine.lookup(&ids(4)).unwrap(),
            [true; 4],
            "{layout:?}"
        );
        let name = if layout == Layout::File {
            "file"
        } else {
            "segment"
        };
        let kept = marker(dir.path())["layout"].clone();
        assert_eq!(
            (&kept["kind"], &kept["why"]),
            (&json!(name), &json!("records"))
        );
        let said = says(&store);
        assert!(
            said.starts_with(&format!(" {name} (marked: records)")),
            "{said}"
        );
    }
}

#[test]
fn a_root_that_cannot_be_listed_is_used_with_files() {
    let dir = directory();
    let denied = Rule::on(OpKind::List, Fault::Errno(13)).times(1);
    let store = Store::open_faulty(dir.path(), unnamed(), vec![denied]);
    let said = says(&store);
    assert!(said.starts_with(" file for now (what lies below"), "{said}");
    assert_eq!(marker(dir.path()).get("layout"), None);
}

#[test]
fn a_layout_that_is_named_wins_and_the_others_records_make_room() {
    let dir = directory();
    marked(
        dir.path(),
        &json!({"kind": "file", "why": "measured", "decided": 1}),
    );
    let small = |layout| Fixture {
        capacity: Some(64 * 8192),
        ..named(layout)
    };
    let filed = small(Layout::File);
    let store = Store::open(dir.path(), filed.clone());
    let device = Device::filled(&filed, &ids(30));
    for block in ids(30) {
        eventually("there is room", || store.dump(&device, &[block]).is_ok());
    }
    let warned = |store: &Store| {
        store
            .said()
            .iter()
            .any(|line| line.contains("neither finds the other's"))
    };
    assert!(!warned(&store));
    drop(store);
    let fixture = small(Layout::segments());
    let store = Store::open(dir.path(), fixture.clone());
    assert!(warned(&store));
    assert!(store.stat("storage_used_bytes") >= 30 * 8192, "they count");
    let device = Device::filled(&fixture, &ids(40));
    for block in ids(40) {
        eventually("there is room", || store.dump(&device, &[block]).is_ok());
    }
    assert!(!store.segments().is_empty());
    eventually("they are removed", || store.stat("records_removed") > 0);
    assert_eq!(
        marker(dir.path())["layout"]["kind"],
        "file",
        "the decision stays"
    );
}

#[test]
fn a_store_for_lookups_follows_the_layout_that_a_writer_decides_later() {
    let dir = directory();
    let root = dir.path().join("not there yet");
    let clock = ManualClock::new();
    let lookups = Store::with_clock(
        &root,
        Fixture {
            lookup_only: true,
            ..unnamed()
        },
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    assert!(lookups.said().join("\n").contains("layout not decided yet"));
    assert_eq!(lookups.engine.lookup(&ids(4)).unwrap(), [false; 4]);
    assert!(!root.exists(), "nothing is made by looking");

    let writer = Store::open(&root, unnamed());
    writer
        .dump(&Device::filled(&unnamed(), &ids(4)), &ids(4))
        .unwrap();
    assert!(!writer.segments().is_empty());
    in_time(&clock, LONG, "it finds them", || {
        lookups.engine.lookup(&ids(4)).unwrap() == [true; 4]
    });
}

#[test]
fn a_root_that_is_made_anew_is_what_it_was() {
    let dir = directory();
    let root = dir.path().join("root");
    let kept = json!({"kind": "file", "why": "measured", "decided": 1});
    marked(&root, &kept);
    let store = Store::open(&root, unnamed());
    eventually("it is removed, though its store writes there", || {
        std::fs::remove_dir_all(&root).is_ok()
    });
    let device = Device::filled(&unnamed(), &ids(2));
    eventually("it is made again", || store.dump(&device, &ids(2)).is_ok());
    assert_eq!(marker(&root)["layout"], kept);
    assert!(store.segments().is_empty());
}

#[test]
fn a_layout_of_a_newer_version_is_left_in_the_marker() {
    let dir = directory();
    let other = json!({"kind": "log", "why": "measured", "decided": 1});
    marked(dir.path(), &other);
    let said = says(&Store::open(dir.path(), unnamed()));
    assert!(
        said.starts_with(" file for now (the root's marker names a layout"),
        "{said}"
    );
    assert_eq!(marker(dir.path())["layout"], other);
}
