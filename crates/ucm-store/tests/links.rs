//! Directories below a root that are replaced by symbolic links, before a store is opened and while
//! it is used: nothing is read from, written to or removed at what they lead to, and the log names
//! the link.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ucm_infra::SystemClock;
use ucm_io::{IoJob, PsyncEngine};
use ucm_store::breaker::BreakerConfig;
use ucm_testkit::Fault;

use crate::common::mount::copy_all;
use crate::common::{
    Device, Fixture, Layout, Store, directory, eventually, id, identity, ids, of_records,
};

fn fixture(layout: Layout) -> Fixture {
    Fixture {
        layout,
        compressed: false,
        above: crate::common::Above::Nothing,
        capacity: Some(16 << 20),
        breaker: BreakerConfig::default(),
        ..Fixture::default()
    }
}

/// Everything below a directory, with its times.
fn all_below(dir: &Path) -> Vec<(PathBuf, Vec<u8>, SystemTime)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let bytes = if meta.is_dir() {
            found.extend(all_below(&path));
            Vec::new()
        } else {
            std::fs::read(&path).unwrap()
        };
        found.push((path, bytes, meta.modified().unwrap()));
    }
    found.sort();
    found
}

/// A root whose directory of this name is a link to a copy of it outside.
struct Linked {
    dir: tempfile::TempDir,
    name: PathBuf,
    before: Vec<(PathBuf, Vec<u8>, SystemTime)>,
}

impl Linked {
    fn root(dir: &Path) -> PathBuf {
        dir.join("root")
    }

    fn new(dir: tempfile::TempDir, name: &Path) -> Self {
        let (at, outside) = (
            Self::root(dir.path()).join(name),
            dir.path().join("outside"),
        );
        std::fs::create_dir(&outside).unwrap();
        copy_all(&at, &outside);
        let before = all_below(&outside);
        std::fs::rename(&at, dir.path().join("was")).unwrap();
        symlink(&outside, &at).unwrap();
        Self {
            dir,
            name: name.to_owned(),
            before,
        }
    }

    fn is_untouched(&self, when: &str) {
        let now = all_below(&self.dir.path().join("outside"));
        assert_eq!(now, self.before, "{} {when}", self.name.display());
    }

    /// The directory is there again.
    fn put_back(&self) {
        let at = Self::root(self.dir.path()).join(&self.name);
        std::fs::remove_file(&at).unwrap();
        std::fs::rename(self.dir.path().join("was"), &at).unwrap();
    }
}

/// The names that a root of this layout has directories of.
fn names(layout: Layout) -> Vec<PathBuf> {
    let namespace = PathBuf::from(identity("w").namespace());
    let records = match layout {
        Layout::File => "blocks",
        Layout::Segment(_) => "segments",
    };
    let below = [records, "tmp"].map(|name| namespace.join(name));
    [namespace, PathBuf::from("space")]
        .into_iter()
        .chain(below)
        .collect()
}

/// Does to a store all that engines do, and returns the errors of its dumps.
fn use_it(store: &Store, device: &Device) -> String {
    let found = store.engine.lookup(&ids(6)).unwrap();
    let mut errors = String::new();
    for block in [10, 11, 12] {
        let dumped = store.dump(device, &[id(block)]);
        let failed = dumped.err().into_iter().flatten();
        failed.for_each(|(_, error)| errors.push_str(&format!("{error}\n")));
    }
    for (&block, found) in ids(6).iter().zip(found) {
        let target = Device::blank(&store.fixture, &[block]);
        if store.load(&target, &[block]).is_ok() {
            assert!(found && target.is_right(block));
        }
    }
    let uses: Vec<_> = ids(6).into_iter().zip(0..).collect();
    store.engine.touch(&uses).unwrap();
    let here = IoJob::alone(store_engine(store));
    let _ = store.backend.delete(&here, &ids(2));
    // A full medium has the root counted, and something removed.
    store.fault(of_records(store.fixture.layout.writing(), Fault::Errno(28)).times(1));
    let _ = store.dump(device, &[id(13)]);
    let _ = store.dump(device, &[id(14)]);
    errors
}

/// An engine that keeps below the root of a store, as its own.
fn store_engine(store: &Store) -> std::sync::Arc<PsyncEngine> {
    let engine = PsyncEngine::new(false);
    ucm_io::IoEngine::keep_below(&*engine, &store.root);
    engine
}

fn filled(layout: Layout) -> (tempfile::TempDir, Store, Device) {
    let dir = directory();
    let device = Device::filled(&fixture(layout), &ids(60));
    let store = Store::open(&Linked::root(dir.path()), fixture(layout));
    store.dump(&device, &ids(6)).unwrap();
    (dir, store, device)
}

#[test]
fn a_link_that_is_there_at_the_start_is_not_followed() {
    for layout in [Layout::File, Layout::segments()] {
        for name in names(layout) {
            let (dir, store, device) = filled(layout);
            drop(store);
            let linked = Linked::new(dir, &name);
            let root = Linked::root(linked.dir.path());
            let store = Store::with_clock_now(&root, fixture(layout), SystemClock::shared());
            if !name.starts_with("space") && !name.ends_with("tmp") {
                assert_eq!(
                    store.engine.lookup(&ids(6)).unwrap(),
                    [false; 6],
                    "{}",
                    name.display()
                );
            }
            let errors = use_it(&store, &device);
            linked.is_untouched("was a link at the start");
            let text = format!("{} is a symbolic link", root.join(&name).display());
            let said = store.said().join("\n") + &errors;
            assert!(said.contains(&text), "{text}: {said}");
            drop(store);
            linked.is_untouched("was a link until the store was closed");
        }
    }
}

#[test]
fn a_directory_that_becomes_a_link_while_it_is_used_is_not_followed() {
    for layout in [Layout::File, Layout::segments()] {
        for name in names(layout) {
            let (dir, store, device) = filled(layout);
            let linked = Linked::new(dir, &name);
            let errors = use_it(&store, &device);
            linked.is_untouched("became a link");
            let text = format!("{} is a symbolic link", store.root.join(&name).display());
            let said = store.said().join("\n") + &errors;
            // What is granted already is written without a look at `space`.
            assert!(
                name.starts_with("space") || said.contains(&text),
                "{text}: {said}"
            );
            linked.put_back();
            eventually("blocks are stored again", || {
                store.dump(&device, &[id(50)]).is_ok()
            });
            drop(store);
            linked.is_untouched("was a link for a while");
        }
    }
}

#[test]
fn a_root_that_only_looks_up_follows_no_link_and_says_so_once() {
    for layout in [Layout::File, Layout::segments()] {
        let (dir, store, _) = filled(layout);
        drop(store);
        let name = names(layout).remove(0);
        let linked = Linked::new(dir, &name);
        let root = Linked::root(linked.dir.path());
        let fixture = Fixture {
            lookup_only: true,
            ..fixture(layout)
        };
        let store = Store::with_clock_now(&root, fixture, SystemClock::shared());
        for _ in 0..3 {
            assert_eq!(store.engine.lookup(&ids(6)).unwrap(), [false; 6]);
        }
        let text = format!("{} is a symbolic link", root.join(&name).display());
        let mut said = 0;
        eventually("it is logged", || {
            let _ = store.engine.lookup(&ids(6));
            said += store
                .said()
                .iter()
                .filter(|line| line.contains(&text))
                .count();
            said > 0
        });
        assert_eq!(said, 1, "once");
        linked.is_untouched("was a link");
    }
}
