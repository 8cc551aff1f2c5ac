//! Several stores on one root, on a clock that goes on while a test waits.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ucm_core::{BlockId, Error};
use ucm_infra::{Clock, ManualClock, MonotonicTime};
use ucm_io::Process;
use ucm_store::engine::Until;

use super::{Device, Fixture, Store, eventually};

/// Bytes of a record of a test.
pub(crate) const RECORD: u64 = 8192;

/// A store with room for this many records.
pub(crate) fn small(records: u64) -> Fixture {
    Fixture {
        capacity: Some(records * RECORD),
        ..Fixture::default()
    }
}

/// The same on another host, whose processes may or may not live.
pub(crate) fn elsewhere(fixture: &Fixture) -> Fixture {
    let host = "elsewhere".into();
    let process = Process {
        host,
        ..Process::this()
    };
    Fixture {
        process,
        ..fixture.clone()
    }
}

/// Bytes of all records below a root, those in quarantine too.
pub(crate) fn stored(dir: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            bytes += stored(&path);
        } else if path.extension().is_some_and(|end| end == "bin") {
            bytes += entry.metadata().map_or(0, |meta| meta.len()); // it may be removed at any time
        }
    }
    bytes
}

/// The documents in the directory of a root, by how their names begin.
pub(crate) fn documents(dir: &Path, kind: &str) -> Vec<serde_json::Value> {
    let mut found: Vec<_> = std::fs::read_dir(dir.join("space"))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(kind))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    let read = |path| serde_json::from_slice(&std::fs::read(path).ok()?).ok();
    found.into_iter().filter_map(read).collect()
}

/// As long as a test likes to wait.
pub(crate) const LONG: Duration = Duration::from_secs(3600);

/// A store that has been counted, on a clock of the test's.
pub(crate) fn on(clock: &Arc<ManualClock>, dir: &Path, fixture: &Fixture) -> Store {
    Store::with_clock(dir, fixture.clone(), Arc::clone(clock) as Arc<dyn Clock>)
}

/// Waits while the clock goes on, twenty times as fast as the real one and for `most` at the
/// longest: so fast that no test waits long, and slowly enough that no deadline of an operation
/// passes.
pub(crate) fn in_time(
    clock: &ManualClock,
    most: Duration,
    what: &str,
    mut so: impl FnMut() -> bool,
) {
    let step = Duration::from_millis(20);
    let (mut left, mut last) = (most, Instant::now());
    eventually(what, || {
        let over = so();
        if !over && last.elapsed() >= Duration::from_millis(1) && left >= step {
            (last, left) = (Instant::now(), left - step);
            clock.advance(step);
        }
        std::thread::yield_now();
        over
    });
}

/// Dumps one block, for thirty seconds at the longest: a write waits no longer for a grant.
pub(crate) fn attempt(
    store: &Store,
    clock: &ManualClock,
    device: &Device,
    block: BlockId,
) -> Result<(), Error> {
    let task = store.engine.dump(device.rows(&[block]))?;
    in_time(clock, Duration::from_secs(30), "it ends", || {
        task.wait(
            store.engine.clock(),
            Until::Published,
            Some(MonotonicTime(0)),
        )
    });
    task.failures()
        .pop()
        .map_or(Ok(()), |(_, error)| Err(error))
}

/// Dumps one block, again where it was refused: this clock runs ahead of who grants room.
pub(crate) fn keep(store: &Store, clock: &ManualClock, device: &Device, block: BlockId) {
    eventually("it is stored", || {
        attempt(store, clock, device, block).is_ok()
    });
}
