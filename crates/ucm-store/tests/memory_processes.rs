//! Loads from the memory of another process that stores, evicts and is killed: exact or a miss, and
//! nothing stays.
//!
//! The other process is this test binary again, running `other_process` with its part in the
//! environment.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ucm_core::{BlockId, Part};
use ucm_media::memory::Policy;

use crate::common::{Device, Fixture, Medium, Store, directory, eventually, id, ids};

const DIR: &str = "UCM_TEST_MEMORY_DIR";
const RANK: &str = "UCM_TEST_MEMORY_RANK";
/// Blocks that come and go, and slots for them.
const BLOCKS: u8 = 12;
const SLOTS: u64 = 8;

fn fixture(records: u64) -> Fixture {
    Fixture {
        medium: Medium::Memory(records, Policy::Lru),
        ..Fixture::default()
    }
}

/// A rank, whose blocks have numbers of their own.
fn of_rank(rank: u32, records: u64) -> Fixture {
    Fixture {
        part: Part {
            tensor_rank: rank,
            ..Part::default()
        },
        ..fixture(records)
    }
}

fn blocks_of(rank: u32) -> Vec<BlockId> {
    (0..BLOCKS).map(|n| id(rank as u8 * 100 + n)).collect()
}

/// The other side: stores one block after the other, for ever.
#[test]
#[ignore = "run by the tests of this file, as another process"]
fn other_process() {
    let dir = std::env::var_os(DIR).unwrap();
    let rank = std::env::var(RANK).unwrap().parse().unwrap();
    let store = Store::open(Path::new(&dir), of_rank(rank, SLOTS));
    let blocks = blocks_of(rank);
    let device = Device::filled(&store.fixture, &blocks);
    loop {
        for &block in &blocks {
            store.dump(&device, &[block]).unwrap();
        }
        writeln!(std::io::stdout(), "\n@round").unwrap();
    }
}

struct Other(Child);

impl Other {
    /// Starts it and waits until it has stored every block once.
    fn start(dir: &Path, rank: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "memory_processes::other_process",
                "--ignored",
                "--nocapture",
            ])
            .env(DIR, dir)
            .env(RANK, rank.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        assert!(lines.any(|line| line == "@round"), "it ended");
        // It prints more of it: this thread reads until the process is killed.
        std::thread::spawn(move || lines.count());
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
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
    let target = Device::blank(&store.fixture, &blocks);
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
    let other = Other::start(dir.path(), 0);
    let reader = Store::open(dir.path(), fixture(4));
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
    // Killed, it is missing from the next scan on, and its file is removed.
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
        std::fs::read_dir(dir.path().join("regions"))
            .unwrap()
            .count(),
        1,
        "the reader's own"
    );
    let device = Device::filled(&reader.fixture, &ids(3));
    reader.dump(&device, &ids(3)).unwrap();
    assert_eq!(reader.engine.lookup_on_prefix(&ids(3)).unwrap(), 3);
}

/// The number of the region that a process announced.
fn region_of(dir: &Path, pid: u32) -> String {
    let files = std::fs::read_dir(dir.join("regions")).unwrap();
    let mut ours = files.filter_map(|file| {
        let file = file.unwrap();
        let text = std::fs::read_to_string(file.path()).ok()?;
        let is_ours = text.lines().any(|line| line == format!("pid {pid}"));
        is_ours.then(|| file.file_name().to_string_lossy().replace(".region", ""))
    });
    ours.next().unwrap()
}

/// Whether a process maps a region or has it open.
fn holds(pid: u32, region: &str) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    maps.contains(region)
        || links
            .into_iter()
            .any(|link| link.to_string_lossy().contains(region))
}

#[test]
fn ranks_and_engines_share_and_of_one_that_is_killed_while_it_stores_nothing_stays() {
    let dir = directory();
    let scheduler = Store::open(
        dir.path(),
        Fixture {
            lookup_only: true,
            ..fixture(4)
        },
    );
    let other_engine = Store::open(dir.path(), of_rank(0, 4));
    let survivor = Other::start(dir.path(), 1);
    let some = |store: &Store, rank| {
        store.memory.as_ref().unwrap().look_around();
        store
            .engine
            .lookup(&blocks_of(rank))
            .unwrap()
            .contains(&true)
    };
    for _ in 0..3 {
        let victim = Other::start(dir.path(), 0);
        let (pid, region) = (victim.pid(), region_of(dir.path(), victim.pid()));
        eventually("the scheduler sees both ranks", || {
            some(&scheduler, 0) && some(&scheduler, 1)
        });
        eventually("the other engine loads what this one stored", || {
            other_engine.memory.as_ref().unwrap().look_around();
            load_all(&other_engine) > 0
        });
        eventually("the other rank has found it too", || {
            holds(survivor.pid(), &region)
        });
        assert!(holds(pid, &region) && holds(std::process::id(), &region));
        drop(victim); // it stores all the time
        eventually(
            "its blocks are no hits any more, those of the other rank are",
            || !some(&scheduler, 0) && !some(&other_engine, 0) && some(&scheduler, 1),
        );
        eventually("no process keeps its memory, so it is removed", || {
            !holds(std::process::id(), &region) && !holds(survivor.pid(), &region)
        });
        let files = std::fs::read_dir(dir.path().join("regions")).unwrap();
        assert_eq!(files.count(), 2, "the survivor's and the other engine's");
    }
    assert_eq!(other_engine.stat("records_refused"), 0);
}
