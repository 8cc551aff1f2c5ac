//! The layout that nobody named: measured once, kept in the root's marker, the same for everybody from then on.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::shared::{LONG, in_time};
use common::{Device, Layout, Setup, Store, directory, eventually, identity, ids, shape};
use serde_json::{Value, json};
use ucm_infra::{Clock, ManualClock, Mono, SystemClock};
use ucm_io::{
    Fault, FaultyEngine, Gate, IoDone, IoEngine, IoOp, OpKind, Process, PsyncEngine, PsyncOptions, Rule,
};
use ucm_store::auto::AutoBackend;
use ucm_store::auto::measure::{Place, measure};
use ucm_store::backend::Backend;
use ucm_store::evidence::QuarantineConfig;
use ucm_store::posix::{Modes, PosixConfig};
use ucm_store::segment::SegmentConfig;
use ucm_store::space::{Capacity, Rules};

/// An I/O engine whose publishes and appends take as long as a test says, on the test's clock.
struct Paced {
    inner: Arc<dyn IoEngine>,
    clock: Arc<ManualClock>,
    publish: Duration,
    append: Duration,
}

impl IoEngine for Paced {
    fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: ucm_io::Done) {
        if let IoOp::Publish { target, durable, .. } = &op {
            // What a root cannot do without survives a power cut; what can be made again need not.
            let vital = target.ends_with("ucm-root.json") || target.ends_with("manifest.json");
            assert_eq!(*durable, vital, "{}", target.display());
        }
        let takes = match op.kind() {
            // Of documents too, which no test counts.
            OpKind::Publish => self.publish,
            OpKind::WriteAt => self.append,
            _ => Duration::ZERO,
        };
        let clock = Arc::clone(&self.clock);
        let later = move |result: ucm_core::Result<IoDone>| {
            clock.advance(takes);
            done(result);
        };
        self.inner.submit(lane, deadline, op, Box::new(later));
    }

    fn stuck(&self) -> usize {
        self.inner.stuck()
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn shutdown(&self, drain: Duration) {
        self.inner.shutdown(drain);
    }
}

/// Blocks of about a megabyte: two in each turn.
const BLOCK: u64 = 1 << 20;
const SLOW: Duration = Duration::from_millis(10);
const FAST: Duration = Duration::from_millis(1);

fn setup() -> Setup {
    Setup {
        auto: true,
        layout: Layout::segments(),
        ..Setup::default()
    }
}

fn config(root: &Path, lookup_only: bool, capacity: u64) -> PosixConfig {
    let tensors = vec![BLOCK];
    let (geometry, record) = shape(&Setup {
        tensors,
        layers: 1,
        layers_per_shard: 1,
        ..Setup::default()
    });
    PosixConfig {
        root: root.to_owned(),
        identity: identity("measured"),
        labels: BTreeMap::new(),
        part: ucm_core::Part::default(),
        geometry,
        record,
        direct: false,
        lookup_only,
        capacity: NonZeroU64::new(capacity).map(Capacity::Bytes),
        rules: Rules {
            free_floor: Some(Capacity::Percent(0.0)),
            ..Rules::default()
        },
        process: Process::this(),
        writer: ucm_store::random_u64(),
        modes: Modes::default(),
        quarantine: QuarantineConfig::default(),
    }
}

fn psync(clock: &Arc<ManualClock>) -> Arc<FaultyEngine> {
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    let options = PsyncOptions {
        clock: Arc::clone(&clock),
        ..PsyncOptions::with_workers(4)
    };
    FaultyEngine::new(PsyncEngine::new(options).unwrap(), clock, 1)
}

/// Starts on a root where publishing and appending take so long; what it says of itself.
fn start(root: &Path, publish: Duration, append: Duration, rules: Vec<Rule>) -> String {
    let clock = ManualClock::new();
    let faults = psync(&clock);
    for rule in rules {
        faults.add(rule).unwrap();
    }
    let io = Arc::new(Paced {
        inner: faults,
        clock: Arc::clone(&clock),
        publish,
        append,
    });
    let clock = clock as Arc<dyn Clock>;
    let config = config(root, false, 1 << 30);
    let backend = AutoBackend::new(config, SegmentConfig::default(), io, Arc::clone(&clock)).unwrap();
    backend
        .probe(clock.now().after(Duration::from_secs(3600)))
        .unwrap();
    let said = backend.describe();
    backend.shutdown(Duration::from_secs(3600));
    said
}

fn marker(root: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(root.join("ucm-root.json")).unwrap()).unwrap()
}

fn privates(root: &Path) -> usize {
    let tmp = root.join(identity("measured").namespace()).join("tmp");
    std::fs::read_dir(tmp).map_or(0, Iterator::count)
}

fn below(root: &Path, name: &str) -> bool {
    root.join(identity("measured").namespace()).join(name).is_dir()
}

#[test]
fn the_quicker_one_is_measured_and_kept() {
    let dir = directory();
    let said = start(dir.path(), SLOW, FAST, Vec::new());
    assert!(said.contains("; layout segment (auto: on this root"), "{said}");
    let kept = marker(dir.path())["layout"].clone();
    assert_eq!(
        (&kept["kind"], &kept["why"]),
        (&json!("segment"), &json!("measured"))
    );
    let rate = |name: &str| kept[name].as_u64().unwrap();
    assert_eq!(rate("record_bytes"), BLOCK + 4096);
    // Two records in a turn: at least what one of them takes, at most what both do.
    for (name, takes) in [("file_bytes_per_s", SLOW), ("segment_bytes_per_s", FAST)] {
        let least = (BLOCK + 4096) as f64 / takes.as_secs_f64();
        let found = rate(name) as f64;
        assert!(
            (0.99 * least..2.01 * least).contains(&found),
            "{name}: {found} is not {least}"
        );
    }
    assert!(below(dir.path(), "segments") && !below(dir.path(), "blocks"));
    // What is kept counts, whatever would be measured by now.
    let again = start(dir.path(), FAST, SLOW, Vec::new());
    assert_eq!(again.split("; layout").last(), said.split("; layout").last());
    assert_eq!(marker(dir.path())["layout"], kept);
}

#[test]
fn files_are_kept_where_they_are_about_as_quick() {
    let dir = directory();
    let said = start(dir.path(), SLOW, SLOW, Vec::new());
    assert!(said.contains("; layout file (auto: on this root"), "{said}");
    assert_eq!(marker(dir.path())["layout"]["kind"], "file");
    assert!(below(dir.path(), "blocks") && !below(dir.path(), "segments"));
    let said = start(dir.path(), SLOW, FAST, Vec::new());
    assert!(said.contains("; layout file (auto: on this root"), "{said}");
}

#[test]
fn nothing_of_the_measurement_stays() {
    let dir = directory();
    start(dir.path(), SLOW, FAST, Vec::new());
    eventually("its files are gone", || privates(dir.path()) == 0);
}

#[test]
fn a_measurement_that_fails_is_repeated_at_the_next_start() {
    for kind in [OpKind::WriteAt, OpKind::Create, OpKind::Publish] {
        let dir = directory();
        let fails = Rule::on(kind, Fault::Errno(28)).times(1);
        let said = start(dir.path(), SLOW, FAST, vec![fails]);
        assert!(
            said.contains("layout file for now (auto: measuring both failed"),
            "{said}"
        );
        assert_eq!(marker(dir.path()).get("layout"), None);
        eventually("its files are gone", || privates(dir.path()) == 0);
        let said = start(dir.path(), SLOW, FAST, Vec::new());
        assert!(said.contains("; layout segment (auto: on this root"), "{said}");
        assert_eq!(marker(dir.path())["layout"]["kind"], "segment");
    }
}

#[test]
fn a_root_that_cannot_be_listed_is_used_with_files() {
    let dir = directory();
    let denied = Rule::on(OpKind::List, Fault::Errno(13)).times(1);
    let said = start(dir.path(), SLOW, FAST, vec![denied]);
    assert!(
        said.contains("layout file for now (auto: what lies below"),
        "{said}"
    );
    assert_eq!(marker(dir.path()).get("layout"), None);
}

#[test]
fn a_measurement_that_takes_too_long_ends() {
    let dir = directory();
    let (clock, gate) = (ManualClock::new(), Gate::new());
    let faults = psync(&clock);
    faults
        .add(Rule::on(OpKind::WriteAt, Fault::HangBefore(gate.clone())))
        .unwrap();
    let config = config(dir.path(), false, 1 << 30);
    let shared = Arc::clone(&clock) as Arc<dyn Clock>;
    let backend = AutoBackend::new(config, SegmentConfig::default(), faults, shared).unwrap();
    let deadline = clock.now().after(Duration::from_secs(3600));
    std::thread::scope(|scope| {
        let probe = scope.spawn(|| backend.probe(deadline));
        gate.await_waiting(1);
        while !probe.is_finished() {
            clock.advance(Duration::from_millis(10));
            std::thread::sleep(Duration::from_micros(200)); // the probe has to get on, too
        }
        probe.join().unwrap().unwrap();
    });
    let passed = clock.now().since(Mono::default());
    assert!(
        passed < Duration::from_secs(3000),
        "long before the deadline: {passed:?}"
    );
    assert!(
        backend.describe().contains("it took too long"),
        "{}",
        backend.describe()
    );
    assert_eq!(marker(dir.path()).get("layout"), None);
    gate.open();
    eventually("its files are gone", || privates(dir.path()) == 0);
    backend.shutdown(Duration::from_secs(3600));
}

#[test]
fn of_two_that_measure_a_new_root_at_once_one_decides() {
    let dir = directory();
    let (gate, path) = (Gate::new(), dir.path().join("ucm-root.json"));
    let hang = Rule::on(OpKind::Publish, Fault::HangBefore(gate.clone())).path("ucm-root.json");
    let said = std::thread::scope(|scope| {
        let slower = scope.spawn(|| start(dir.path(), SLOW, FAST, vec![hang]));
        gate.await_waiting(1);
        start(dir.path(), SLOW, SLOW, Vec::new());
        assert_eq!(marker(dir.path())["layout"]["kind"], "file");
        gate.open();
        slower.join().unwrap()
    });
    assert!(said.contains("; layout file (auto: on this root"), "{said}");
    assert_eq!(marker(dir.path())["layout"]["kind"], "file");
    assert!(path.exists());
}

#[test]
fn records_that_are_there_decide_without_measuring() {
    for layout in [Layout::File, Layout::segments()] {
        let dir = directory();
        let named = Setup {
            layout,
            auto: false,
            ..Setup::default()
        };
        let device = Device::filled(&named, &ids(4));
        Store::open(dir.path(), named).dump(&device, &ids(4)).unwrap();
        assert_eq!(marker(dir.path()).get("layout"), None);
        let store = Store::open(dir.path(), setup());
        assert_eq!(store.engine.lookup(&ids(4)).unwrap(), [true; 4], "{layout:?}");
        let name = if layout == Layout::File { "file" } else { "segment" };
        let kept = marker(dir.path())["layout"].clone();
        assert_eq!((&kept["kind"], &kept["why"]), (&json!(name), &json!("records")));
        let said = store.said().join("\n");
        assert!(
            said.contains(&format!("; layout {name} (auto: the root had records in it)")),
            "{said}"
        );
    }
}

#[test]
fn a_layout_that_is_named_wins_and_the_others_records_make_room() {
    let dir = directory();
    start(dir.path(), SLOW, SLOW, Vec::new()); // files are found to do
    let small = |layout| Setup {
        layout,
        auto: false,
        capacity: Some(64 * 8192),
        ..Setup::default()
    };
    let filed = small(Layout::File);
    let store = Store::open(dir.path(), filed.clone());
    let device = Device::filled(&filed, &ids(30));
    for block in ids(30) {
        eventually("there is room", || store.dump(&device, &[block]).is_ok());
    }
    drop(store);
    let setup = small(Layout::segments());
    let store = Store::open(dir.path(), setup.clone());
    assert!(store.stat("storage_used_bytes") >= 30 * 8192, "they count");
    let device = Device::filled(&setup, &ids(40));
    for block in ids(40) {
        eventually("there is room", || store.dump(&device, &[block]).is_ok());
    }
    assert!(!store.segments().is_empty());
    eventually("they are removed", || store.stat("records_removed") > 0);
    assert_eq!(marker(dir.path())["layout"]["kind"], "file", "the decision stays");
}

#[test]
fn who_only_looks_up_follows_what_a_writer_decides_later() {
    let dir = directory();
    let root = dir.path().join("not there yet");
    let clock = ManualClock::new();
    let lookups = Store::with_clock(
        &root,
        Setup {
            lookup_only: true,
            ..setup()
        },
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    assert!(lookups.said().join("\n").contains("layout not decided yet"));
    assert_eq!(lookups.engine.lookup(&ids(4)).unwrap(), [false; 4]);
    assert!(!root.exists(), "nothing is made by looking");

    start(&root, SLOW, FAST, Vec::new());
    let writer = Store::open(&root, setup());
    writer.dump(&Device::filled(&setup(), &ids(4)), &ids(4)).unwrap();
    assert!(!writer.segments().is_empty());
    in_time(&clock, LONG, "it finds them", || {
        lookups.engine.lookup(&ids(4)).unwrap() == [true; 4]
    });
}

#[test]
fn a_root_that_is_made_anew_is_what_it_was() {
    let dir = directory();
    let root = dir.path().join("root");
    start(&root, SLOW, FAST, Vec::new());
    let kept = marker(&root)["layout"].clone();
    let store = Store::open(&root, setup());
    std::fs::remove_dir_all(&root).unwrap();
    let device = Device::filled(&setup(), &ids(2));
    eventually("it is made again", || store.dump(&device, &ids(2)).is_ok());
    assert_eq!(marker(&root)["layout"], kept);
    assert!(!store.segments().is_empty());
}

#[test]
fn a_layout_of_a_newer_version_is_left_in_the_marker() {
    let dir = directory();
    start(dir.path(), SLOW, FAST, Vec::new());
    let mut other = marker(dir.path());
    other["layout"] = json!({"kind": "log", "why": "measured", "decided": 1});
    std::fs::write(dir.path().join("ucm-root.json"), other.to_string()).unwrap();
    let said = start(dir.path(), SLOW, FAST, Vec::new());
    assert!(
        said.contains("layout file for now (auto: the root's marker names a layout"),
        "{said}"
    );
    assert_eq!(marker(dir.path())["layout"], other["layout"]);
}

#[test]
fn nothing_is_measured_in_a_root_that_is_too_small() {
    let dir = directory();
    let clock = ManualClock::new();
    let faults = psync(&clock);
    let clock = clock as Arc<dyn Clock>;
    let io = Arc::clone(&faults) as Arc<dyn IoEngine>;
    let config = config(dir.path(), false, 9 * (BLOCK + 4096));
    let backend = AutoBackend::new(config, SegmentConfig::default(), io, Arc::clone(&clock)).unwrap();
    backend
        .probe(clock.now().after(Duration::from_secs(3600)))
        .unwrap();
    let said = backend.describe();
    assert!(
        said.contains("storage_capacity is too small to measure in it"),
        "{said}"
    );
    assert!(faults.log().iter().all(|seen| seen.kind != OpKind::Create));
    backend.shutdown(Duration::from_secs(3600));
}

#[test]
fn appends_are_measured_over_as_many_files_as_segments_would_be() {
    for (abreast, files) in [(None, 1), (Some(1), 1), (Some(3), 3), (Some(99), 16)] {
        let (dir, number) = (directory(), AtomicU64::new(0));
        let clock = SystemClock::shared();
        let options = PsyncOptions::with_workers(4);
        let engine = FaultyEngine::new(PsyncEngine::new(options).unwrap(), Arc::clone(&clock), 1);
        let io = Arc::clone(&engine) as Arc<dyn IoEngine>;
        let name = || {
            let number = number.fetch_add(1, Ordering::Relaxed);
            dir.path().join(number.to_string())
        };
        let place = Place {
            io: &io,
            clock: &*clock,
            record_len: 5000, // two pages each, sixteen a turn
            file_mode: 0o600,
            name: &name,
            abreast,
        };
        let figures = measure(&place, Mono::NEVER).unwrap();
        assert!(figures.segment_bytes_per_s > 0 && figures.file_bytes_per_s > 0);
        let (turns, rest) = (
            engine.count(OpKind::WriteAt) / 16,
            engine.count(OpKind::WriteAt) % 16,
        );
        assert!(turns >= 1 && rest == 0);
        assert_eq!(engine.count(OpKind::Create), turns * files);
        let mut appended = BTreeMap::new();
        for seen in engine
            .log()
            .into_iter()
            .filter(|seen| seen.kind == OpKind::WriteAt)
        {
            *appended.entry(seen.paths).or_insert(0) += 1_u64;
        }
        assert_eq!(appended.len() as u64, turns * files);
        assert!(
            appended
                .values()
                .all(|&records| records.abs_diff(16 / files) <= 1),
            "{appended:?}"
        );
        io.shutdown(LONG);
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "all of it is removed"
        );
    }
}
