//! Loads from the memory of another process that stores, evicts and is killed: exact or a miss, and nothing stays.
//!
//! The other process is this test binary again, running `other_process` with its part in the environment.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Device, Medium, Setup, Store, directory, eventually, id, ids};
use ucm_store::memory::Policy;

const DIR: &str = "UCM_TEST_MEMORY_DIR";
/// Blocks that come and go, and slots for them.
const BLOCKS: u8 = 12;
const SLOTS: u64 = 8;

fn setup(records: u64) -> Setup {
    Setup {
        medium: Medium::Memory(records, Policy::Lru),
        ..Setup::default()
    }
}

/// The other side: stores one block after the other, for ever.
#[test]
#[ignore = "run by the tests of this file, as another process"]
fn other_process() {
    let dir = std::env::var_os(DIR).unwrap();
    let store = Store::open(Path::new(&dir), setup(SLOTS));
    let device = Device::filled(&store.setup, &ids(BLOCKS));
    for n in (0..BLOCKS).cycle() {
        store.dump(&device, &[id(n)]).unwrap();
        if n == BLOCKS - 1 {
            writeln!(std::io::stdout(), "\n@round").unwrap();
        }
    }
}

struct Other(Child);

impl Other {
    /// Starts it and waits until it has stored every block once.
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_process", "--ignored", "--nocapture"])
            .env(DIR, dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        assert!(lines.any(|line| line == "@round"), "it ended");
        // It goes on saying so: somebody has to listen until it is killed.
        std::thread::spawn(move || lines.count());
        Self(child)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Loads every block, each on its own; how many were hits. What is no hit left the device alone.
fn load_all(store: &Store) -> usize {
    let blocks = ids(BLOCKS);
    let target = Device::blank(&store.setup, &blocks);
    let hit = |&&id: &&ucm_core::BlockId| {
        let hit = store.load(&target, &[id]).is_ok();
        assert!(if hit {
            target.is_right(id)
        } else {
            target.is_blank(id)
        });
        hit
    };
    blocks.iter().filter(hit).count()
}

#[test]
fn what_another_process_evicts_while_it_is_copied_is_exact_or_a_miss() {
    let dir = directory();
    let other = Other::start(dir.path());
    let reader = Store::open(dir.path(), setup(4));
    let (mut hits, mut missed) = (0, 0);
    while hits < 400 || missed < 100 {
        let found = load_all(&reader);
        (hits, missed) = (hits + found, missed + usize::from(BLOCKS) - found);
    }
    assert_eq!(
        reader.stat("records_refused"),
        0,
        "a race is a miss and no damage"
    );
    drop(other);
    // Killed, it is gone from the next look on, and so is its file.
    eventually("the dead region is ignored", || {
        load_all(&reader);
        reader.memory.as_ref().unwrap().look_around();
        reader
            .engine
            .lookup(&ids(BLOCKS))
            .unwrap()
            .iter()
            .all(|&there| !there)
    });
    assert_eq!(
        std::fs::read_dir(dir.path().join("regions")).unwrap().count(),
        1,
        "the reader's own"
    );
    let device = Device::filled(&reader.setup, &ids(3));
    reader.dump(&device, &ids(3)).unwrap();
    assert_eq!(reader.engine.lookup_on_prefix(&ids(3)).unwrap(), 3);
}
