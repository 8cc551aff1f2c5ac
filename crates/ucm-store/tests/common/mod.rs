//! A store in a temporary directory with a pretended device, and the truth it is compared with.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "device addresses of the tests' own buffers")]
#![allow(dead_code, reason = "each test file uses its part of this")]

pub(crate) mod beside;
pub(crate) mod device;
pub(crate) mod fixture;
pub(crate) mod harm;
pub(crate) mod map;
pub(crate) mod media;
pub(crate) mod memory;
pub(crate) mod merging;
pub(crate) mod mount;
pub(crate) mod over;
pub(crate) mod pages;
pub(crate) mod segments;
pub(crate) mod servers;
pub(crate) mod shared;
pub(crate) mod sides;
pub(crate) mod stored;
pub(crate) mod tiers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;
use ucm_core::{BlockId, Identity};
use ucm_infra::{Clock, LANE_DUMP, LANE_LOAD, LANE_LOOKUP, SystemClock, log};
use ucm_io::{IoOptions, IoPool, PsyncEngine};
use ucm_media::backend::Backend;
use ucm_media::memory::{MemoryBackend, MemoryConfig, Policy};
use ucm_store::engine::{Engine, Task, Until};
use ucm_store::tiers::{TierConfig, WritePolicy};
use ucm_testkit::{Fault, FaultyEngine, Gate, OpKind, Rule};

#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use fixture::{Above, Fixture, Layout, PartShape};
use map::{MapBackend, MapTier};
#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use over::only_over;

#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use device::{Device, SlowDevice, SoftCuda, content};
#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use media::{Medium, is_here, kinds, media, memory_config, on, sample, shape, soft3fs};

/// A store, the faults before it, and the directory below it.
pub(crate) struct Store {
    pub(crate) engine: Engine,
    /// The lowest medium.
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) faults: Arc<FaultyEngine>,
    pub(crate) fixture: Fixture,
    pub(crate) root: PathBuf,
    /// The map above the root, and the faults of the root above it.
    pub(crate) map: Option<Arc<MapBackend>>,
    pub(crate) upper: Option<Arc<FaultyEngine>>,
    /// The memory tier, if that is the backend or stands above it.
    pub(crate) memory: Option<Arc<MemoryBackend>>,
    /// Where operations hang.
    gates: Mutex<Vec<Gate>>,
}

/// A test that fails must not wait for its own hanging operations, whose clock may stand still.
impl Drop for Store {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.faults.clear();
            self.upper.iter().for_each(|upper| upper.clear());
            self.gates.get_mut().drain(..).for_each(|gate| gate.open());
        }
    }
}

fn times(faults: &FaultyEngine, kind: OpKind, file: &PathBuf) -> usize {
    let log = faults.log();
    log.iter()
        .filter(|seen| seen.kind == kind && seen.paths.contains(file))
        .count()
}

fn in_memory(
    root: &Path,
    fixture: &Fixture,
    records: u64,
    policy: Policy,
    clock: &Arc<dyn Clock>,
) -> ucm_core::Result<Arc<MemoryBackend>> {
    let config = MemoryConfig {
        policy,
        registry: Some(root.join("regions")),
        ..memory_config(fixture, (!fixture.lookup_only).then_some(records))
    };
    Ok(Arc::new(MemoryBackend::new(config, Arc::clone(clock))?))
}

/// Where the root above another one lies: beside it, so a test that has one opens a directory below
/// its own.
pub(crate) fn above(root: &Path) -> PathBuf {
    root.with_extension("above")
}

/// A memory as a medium, with its threads.
fn of_memory(memory: &Arc<MemoryBackend>) -> (Arc<dyn Backend>, Arc<IoPool>) {
    (
        Arc::clone(memory) as Arc<dyn Backend>,
        Arc::clone(memory.pool()),
    )
}

fn engine() -> Arc<FaultyEngine> {
    FaultyEngine::new(PsyncEngine::new(false), 1)
}

pub(crate) fn identity(weights: &str) -> Identity {
    let text = format!(
        "{{\"format_version\":1,\"architecture\":\"A\",\"world_size\":1,\"dtype\":\"f32\",\"weights\":\"{weights}\",\
         \"model_config\":{{}},\"position\":{{}},\"kv_dtype\":\"f32\",\"attention_backend\":\"a\",\"kv_packing\":{{}},\
         \"kv_layout\":\"l\",\"kv_groups\":[],\"block_tokens\":16,\"tensor_parallel\":1,\"pipeline_parallel\":1,\
         \"decode_context_parallel\":1}}"
    );
    Identity::parse(&text).unwrap()
}

impl Store {
    pub(crate) fn open(root: &Path, fixture: Fixture) -> Self {
        Self::with_clock(root, fixture.unhurried(), SystemClock::shared())
    }

    pub(crate) fn with_clock(root: &Path, fixture: Fixture, clock: Arc<dyn Clock>) -> Self {
        Self::build(root, fixture, clock, Vec::new(), true).unwrap()
    }

    /// Without waiting for the first count.
    pub(crate) fn with_clock_now(root: &Path, fixture: Fixture, clock: Arc<dyn Clock>) -> Self {
        Self::build(root, fixture, clock, Vec::new(), false).unwrap()
    }

    /// The same with faults from the first operation on.
    pub(crate) fn faulty_with_clock(
        root: &Path,
        fixture: Fixture,
        rules: Vec<Rule>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self::build(root, fixture, clock, rules, false).unwrap()
    }

    /// With faults from the first operation on.
    pub(crate) fn open_faulty(root: &Path, fixture: Fixture, rules: Vec<Rule>) -> Self {
        Self::build(
            root,
            fixture.unhurried(),
            SystemClock::shared(),
            rules,
            false,
        )
        .unwrap()
    }

    pub(crate) fn try_open(root: &Path, fixture: Fixture) -> ucm_core::Result<Self> {
        Self::build(
            root,
            fixture.unhurried(),
            SystemClock::shared(),
            Vec::new(),
            true,
        )
    }

    fn build(
        root: &Path,
        fixture: Fixture,
        clock: Arc<dyn Clock>,
        rules: Vec<Rule>,
        counted: bool,
    ) -> ucm_core::Result<Self> {
        log::keep();
        let faults = engine();
        for rule in rules {
            faults.add(rule);
        }
        let writer = ucm_infra::random_u64();
        let mut memory = None;
        let (backend, pool) = match fixture.medium {
            Medium::Posix => media::posix(root, &fixture, writer, &faults, &clock)?,
            Medium::Memory(records, policy) => {
                of_memory(memory.insert(in_memory(root, &fixture, records, policy, &clock)?))
            }
            Medium::Kind(word) => media::of_kind(word, root, &fixture, writer, &clock)?,
        };
        let in_segments =
            fixture.medium == Medium::Posix && matches!(fixture.layout, Layout::Segment(_));
        let tier = |(backend, pool): (Arc<dyn Backend>, _), policy| TierConfig {
            compressed: fixture.compressed && in_segments && backend.features().memory.is_none(),
            backend,
            pool,
            policy,
            max_stuck: fixture.breaker.max_stuck,
        };
        let (mut map, mut upper) = (None, None);
        let above = match fixture.above {
            _ if matches!(fixture.medium, Medium::Memory(..)) => None, // it is the top tier
            // `UCM_TEST_TIERS` means directories.
            of_this_run
                if fixture.medium != Medium::Posix && of_this_run == Above::of_this_run() =>
            {
                None
            }
            Above::Nothing => None,
            Above::Map(records, policy) => {
                let made = map.insert(MapBackend::new(records));
                let top: Arc<dyn Backend> = Arc::new(MapTier(Arc::clone(made)));
                let options = IoOptions {
                    clock: Arc::clone(&clock),
                    ..IoOptions::with_workers(2)
                };
                Some(((top, IoPool::psync(false, &options)?), policy))
            }
            Above::Memory(records, policy) => {
                let made = in_memory(root, &fixture, records, Policy::default(), &clock)?;
                Some((of_memory(memory.insert(made)), policy))
            }
            Above::File => {
                let io = upper.insert(engine());
                for dir in [root, &above(root)] {
                    std::fs::create_dir_all(dir).unwrap();
                }
                Some((
                    media::posix(&above(root), &fixture, writer, io, &clock)?,
                    WritePolicy::Through,
                ))
            }
        };
        let lower = (Arc::clone(&backend), pool);
        let tiers = match above {
            None => vec![tier(lower, WritePolicy::Through)],
            Some((top, policy)) => vec![tier(top, WritePolicy::Through), tier(lower, policy)],
        };
        let config = media::engine_config(&fixture, writer);
        let device: Arc<dyn ucm_device::Device> = match &fixture.device {
            Some(device) => Arc::clone(device) as Arc<dyn ucm_device::Device>,
            None => device::of_this_run(fixture.transfer, &clock)?,
        };
        let engine = Engine::open(config, tiers, device, clock)?;
        let store = Self {
            engine,
            backend,
            faults,
            fixture,
            root: root.to_owned(),
            map,
            upper,
            memory,
            gates: Mutex::default(),
        };
        // So that faults and counts of a test see its own operations only, not those of the first
        // count.
        if counted && !store.fixture.lookup_only && store.stat("healthy") == 1 {
            eventually("the root was counted", || {
                store.stat("storage_counted") == 1
            });
        }
        Ok(store)
    }

    /// The map above the root.
    pub(crate) fn map(&self) -> &MapBackend {
        self.map.as_ref().unwrap()
    }

    /// What a tier of a pipeline counted.
    pub(crate) fn tier(&self, number: usize, name: &str) -> u64 {
        let value = self.engine.stats()["tiers"][number][name].clone();
        value.as_u64().or(value.as_bool().map(u64::from)).unwrap()
    }

    /// The file of a block in the root above.
    pub(crate) fn upper_file(&self, id: BlockId) -> PathBuf {
        self.file_below(&above(&self.root), id)
    }

    /// The file of a block.
    pub(crate) fn file(&self, id: BlockId) -> PathBuf {
        self.file_below(&self.root, id)
    }

    fn file_below(&self, root: &Path, id: BlockId) -> PathBuf {
        let namespace = root.join(identity(self.fixture.weights).namespace());
        namespace
            .join("blocks")
            .join(format!("{:02x}", id.0[0]))
            .join(format!("{id}.bin"))
    }

    /// From now on this happens to the operations it is for.
    pub(crate) fn fault(&self, rule: Rule) {
        self.faults.add(rule);
    }

    /// From now on operations of this kind hang before they begin ([`of_records`]), until the gate
    /// is opened.
    pub(crate) fn hang(&self, kind: OpKind) -> Gate {
        let gate = self.gate();
        self.fault(of_records(kind, Fault::HangBefore(gate.clone())));
        gate
    }

    /// A gate that opens by itself when the test fails.
    pub(crate) fn gate(&self) -> Gate {
        let gate = Gate::new();
        self.gates.lock().push(gate.clone());
        gate
    }

    /// How often the medium had this operation on the file of a block (what the space keeper does
    /// is not counted).
    pub(crate) fn asked(&self, kind: OpKind, id: BlockId) -> usize {
        times(&self.faults, kind, &self.file(id))
    }

    /// The same of the root above.
    pub(crate) fn asked_above(&self, kind: OpKind, id: BlockId) -> usize {
        times(self.upper.as_ref().unwrap(), kind, &self.upper_file(id))
    }

    /// Dumps whole blocks and waits until they are published.
    pub(crate) fn dump(
        &self,
        device: &Device,
        ids: &[BlockId],
    ) -> Result<(), Vec<(usize, ucm_core::Error)>> {
        let task = self
            .engine
            .dump(device.rows(ids))
            .map_err(|error| vec![(usize::MAX, error)])?;
        self.outcome(&task)
    }

    /// Dumps whole blocks, again as long as they are refused because no room is granted yet.
    pub(crate) fn keep(&self, device: &Device, ids: &[BlockId]) {
        eventually("they are stored", || match self.dump(device, ids) {
            Ok(()) => true,
            Err(failures) => {
                assert!(are_busy(&failures), "{failures:?}");
                false
            }
        });
    }

    /// Loads whole blocks and waits for the outcome.
    pub(crate) fn load(
        &self,
        device: &Device,
        ids: &[BlockId],
    ) -> Result<(), Vec<(usize, ucm_core::Error)>> {
        let task = self
            .engine
            .load(device.rows(ids), None)
            .map_err(|error| vec![(usize::MAX, error)])?;
        self.outcome(&task)
    }

    pub(crate) fn outcome(&self, task: &Task) -> Result<(), Vec<(usize, ucm_core::Error)>> {
        assert!(
            task.wait(self.engine.clock(), Until::Published, None),
            "a task must end by its deadline"
        );
        let failures = task.failures();
        if failures.is_empty() {
            Ok(())
        } else {
            Err(failures)
        }
    }

    pub(crate) fn stat(&self, name: &str) -> u64 {
        self.engine.stats()[name].as_u64().unwrap()
    }

    /// Log lines since the last call, oldest first.
    pub(crate) fn said(&self) -> Vec<String> {
        let records = log::take(self.engine.writer()).into_iter();
        records.map(|record| record.message).collect()
    }

    pub(crate) fn missed(&self, reason: &str) -> u64 {
        self.engine.stats()["misses"][reason].as_u64().unwrap_or(0)
    }
}

/// This befalls the reads of loads, the looks of lookups and the writes of dumps, and not what
/// those do who look after the root, at times of their own.
pub(crate) fn of_records(kind: OpKind, fault: Fault) -> Rule {
    let rule = Rule::on(kind, fault);
    match kind {
        OpKind::Read => rule.lane(LANE_LOAD),
        OpKind::Stat => rule.lane(LANE_LOOKUP),
        OpKind::Publish | OpKind::WriteAt => rule.lane(LANE_DUMP),
        _ => rule,
    }
}

pub(crate) fn id(n: u8) -> BlockId {
    BlockId(std::array::from_fn(|i| {
        n.wrapping_mul(31).wrapping_add(i as u8 * 7)
    }))
}

/// The first `n` ids.
pub(crate) fn ids(n: u8) -> Vec<BlockId> {
    (0..n).map(id).collect()
}

pub(crate) fn directory() -> TempDir {
    tempfile::Builder::new()
        .prefix("ucm-store-")
        .tempdir()
        .unwrap()
}

/// Looks until something is so; gives up after far longer than it can take.
/// Whether these are refusals: at least one, and nothing else.
pub(crate) fn are_busy(failures: &[(usize, ucm_core::Error)]) -> bool {
    let busy = |(_, error): &(usize, ucm_core::Error)| error.kind() == ucm_core::ErrorKind::Busy;
    !failures.is_empty() && failures.iter().all(busy)
}

pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !so() {
        assert!(
            start.elapsed() < Duration::from_secs(100),
            "never happened: {what}"
        );
        // A little sleep, for others of this process and machine have to get on.
        std::thread::sleep(Duration::from_micros(200));
    }
}
