//! A store in a temporary directory with a pretended device, and the truth it is compared with.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "device addresses of the tests' own buffers")]
#![allow(dead_code, reason = "each test file uses its part of this")]

pub(crate) mod bench;
pub(crate) mod harm;
pub(crate) mod map;
pub(crate) mod media;
pub(crate) mod memory;
pub(crate) mod merging;
pub(crate) mod mount;
pub(crate) mod over;
pub(crate) mod pages;
pub(crate) mod segments;
pub(crate) mod shared;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;
use ucm_core::{BlockId, DType, Identity, Part};
use ucm_device::{DeviceSpan, HostDevice};
use ucm_infra::{Clock, SystemClock};
use ucm_io::{
    Fault, FaultyEngine, Gate, IoEngine, OpKind, Process, PsyncEngine, PsyncOptions, Rule, UringEngine,
    UringOptions,
};
use ucm_store::backend::Backend;
use ucm_store::compress::worth::When;
use ucm_store::engine::{Deadlines, Engine, EngineConfig, Row, Task, Until};
use ucm_store::evidence::QuarantineConfig;
use ucm_store::health::BreakerConfig;
use ucm_store::memory::{MemoryBackend, MemoryConfig, Policy};
use ucm_store::posix::Modes;
use ucm_store::segment::{Merging, SegmentConfig};
use ucm_store::space::{Capacity, Rules};
use ucm_store::tiers::{StageConfig, Tiers, TiersConfig, WritePolicy};

use map::{MapBackend, MapStage};

/// What stands above the root of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Above {
    Nothing,
    /// A map of so many records; how the root below is written.
    Map(usize, WritePolicy),
    /// Memory for so many records; how the root below is written.
    Memory(u64, WritePolicy),
    /// Another root beside it, on an engine of its own.
    File,
}

/// Records in the memory above a root, where `UCM_TEST_TIERS` asks for one: more than most tests have.
const MEMORY: u64 = 256;

impl Above {
    /// What stands above the root in most tests: nothing, unless `UCM_TEST_TIERS` says otherwise. `memory`: a memory
    /// tier, as in `Cache|Posix`. `map`: a memory that keeps nothing, so that all of it goes through a pipeline to the root.
    pub(crate) fn of_this_run() -> Self {
        match std::env::var("UCM_TEST_TIERS").as_deref() {
            Err(_) | Ok("none") => Self::Nothing,
            Ok("memory") => Self::Memory(MEMORY, WritePolicy::Through),
            Ok("map") => Self::Map(0, WritePolicy::Through),
            Ok(other) => unreachable!("UCM_TEST_TIERS is none, memory or map, not {other}"),
        }
    }
}

#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use over::only_over;

#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use media::{MEDIA, Medium, memory_config, on, shape};

/// How a test wants its store.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) above: Above,
    /// The breaker of each stage of a pipeline.
    pub(crate) stage_breaker: BreakerConfig,
    pub(crate) medium: Medium,
    pub(crate) tensors: Vec<u64>,
    pub(crate) layers: u32,
    pub(crate) layers_per_shard: u32,
    pub(crate) slots: u64,
    pub(crate) capacity: Option<u64>,
    pub(crate) rules: Rules,
    pub(crate) modes: Modes,
    pub(crate) process: Process,
    pub(crate) weights: &'static str,
    pub(crate) part: Part,
    pub(crate) deadlines: Deadlines,
    pub(crate) breaker: BreakerConfig,
    pub(crate) quarantine: QuarantineConfig,
    pub(crate) paranoid: bool,
    pub(crate) lookup_only: bool,
    pub(crate) workers: usize,
    pub(crate) copy_threads: usize,
    pub(crate) device: Option<Arc<SlowDevice>>,
    pub(crate) io: Io,
    /// How records lie below the root.
    pub(crate) layout: Layout,
    /// Nobody names the layout: the root has records in it already.
    pub(crate) auto: bool,
    /// When they are compressed, which needs segments and records of more than a page; [`Setup::compressed`].
    pub(crate) compress: Option<When>,
}

/// Which I/O engine is below the faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Io {
    Psync,
    Uring,
}

impl Io {
    /// What tests use that do not say: the thread pool, or what `UCM_TEST_IO_ENGINE` names.
    pub(crate) fn usual() -> Self {
        match std::env::var("UCM_TEST_IO_ENGINE").as_deref() {
            Err(_) | Ok("psync") => Self::Psync,
            Ok("io_uring") => Self::Uring,
            Ok(other) => unreachable!("UCM_TEST_IO_ENGINE is psync or io_uring, not {other}"),
        }
    }

    fn engine(self, options: PsyncOptions) -> Arc<dyn IoEngine> {
        match self {
            Self::Psync => PsyncEngine::new(options).unwrap(),
            Self::Uring => UringEngine::new(&UringOptions::beside(options)).unwrap(),
        }
    }

    /// Whether it can be had here; with `UCM_REQUIRE_ROOT_TESTS` in the environment it must.
    #[allow(clippy::print_stderr, reason = "a test says why it is skipped")]
    pub(crate) fn or_skip(self, test: &str) -> bool {
        let options = UringOptions::beside(PsyncOptions::with_workers(1));
        match (self == Self::Uring).then(|| UringEngine::new(&options)) {
            Some(Err(error)) => {
                assert!(
                    std::env::var_os("UCM_REQUIRE_ROOT_TESTS").is_none(),
                    "{test} may not be skipped here: {error}"
                );
                eprintln!("{test} is skipped: {error}");
                false
            }
            _ => true,
        }
    }
}

/// How records lie below the root.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Layout {
    File,
    Segment(SegmentConfig),
}

impl Layout {
    /// What most tests run over: files, unless `UCM_TEST_LAYOUT` is `segment`. With `auto-file` or `auto-segment` that
    /// is what the backend finds.
    pub(crate) fn of_this_run() -> Self {
        match std::env::var("UCM_TEST_LAYOUT").as_deref() {
            _ if compressing().is_some() => Self::segments(),
            Err(_) | Ok("file" | "auto-file") => Self::File,
            Ok("segment" | "auto-segment") => Self::segments(),
            Ok(other) => unreachable!("UCM_TEST_LAYOUT is no layout: {other}"),
        }
    }

    /// The operation by which the bytes of a record reach the medium.
    pub(crate) fn writing(self) -> OpKind {
        match self {
            Self::File => OpKind::Publish,
            Self::Segment(_) => OpKind::WriteAt,
        }
    }

    /// Segments that are sealed as soon as nothing is being written.
    pub(crate) fn segments() -> Self {
        Self::merging(Merging::default())
    }

    /// The same, merged like this.
    pub(crate) fn merging(merging: Merging) -> Self {
        Self::Segment(SegmentConfig {
            age: Duration::ZERO,
            merging,
            ..SegmentConfig::default()
        })
    }
}

/// When most tests compress: never, unless `UCM_TEST_COMPRESS` is set.
fn compressing() -> Option<When> {
    std::env::var_os("UCM_TEST_COMPRESS").map(|_| When::Always)
}

/// Pieces of one layer.
const TENSORS: [u64; 2] = [96, 32];
/// The same of records that can become shorter.
const LARGE_TENSORS: [u64; 2] = [6144, 2048];

impl Setup {
    /// Larger records, compressed, in segments.
    pub(crate) fn compressed(self) -> Self {
        Self {
            compress: Some(When::Always),
            tensors: LARGE_TENSORS.to_vec(),
            layout: match self.layout {
                Layout::File => Layout::segments(),
                layout => layout,
            },
            ..self
        }
    }
}

impl Default for Setup {
    fn default() -> Self {
        let never = BreakerConfig {
            threshold: u32::MAX,
            cool_down: Duration::from_secs(1),
            window: Duration::from_secs(60),
            max_stuck: usize::MAX,
        };
        Self {
            above: Above::of_this_run(),
            stage_breaker: never,
            medium: Medium::Posix,
            tensors: if compressing().is_some() {
                LARGE_TENSORS
            } else {
                TENSORS
            }
            .to_vec(),
            layers: 3,
            layers_per_shard: 3,
            slots: 16,
            capacity: Some(1 << 30),
            rules: Rules {
                free_floor: Some(Capacity::Percent(0.0)), // whatever else lies on the disk of the tests
                ..Rules::default()
            },
            modes: Modes::default(),
            process: Process::this(),
            weights: "w",
            part: Part::default(),
            deadlines: Deadlines {
                lookup: Duration::from_secs(20),
                ..Deadlines::default()
            },
            breaker: never,
            quarantine: QuarantineConfig::default(),
            paranoid: false,
            lookup_only: false,
            workers: 4,
            copy_threads: 1,
            device: None,
            io: Io::usual(),
            layout: Layout::of_this_run(),
            auto: std::env::var("UCM_TEST_LAYOUT").is_ok_and(|layout| layout.starts_with("auto")),
            compress: compressing(),
        }
    }
}

/// A store, the faults before it, and the directory below it.
pub(crate) struct Store {
    pub(crate) engine: Engine,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) faults: Arc<FaultyEngine>,
    pub(crate) setup: Setup,
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
    setup: &Setup,
    records: u64,
    policy: Policy,
    clock: &Arc<dyn Clock>,
) -> ucm_core::Result<Arc<MemoryBackend>> {
    let config = MemoryConfig {
        policy,
        registry: Some(root.join("regions")),
        ..memory_config(setup, (!setup.lookup_only).then_some(records))
    };
    Ok(Arc::new(MemoryBackend::new(config, Arc::clone(clock))?))
}

/// Where the root above another one lies: beside it, so a test that has one opens a directory below its own.
pub(crate) fn above(root: &Path) -> PathBuf {
    root.with_extension("above")
}

fn engine(setup: &Setup, clock: &Arc<dyn Clock>) -> Arc<FaultyEngine> {
    let options = PsyncOptions {
        clock: Arc::clone(clock),
        ..PsyncOptions::with_workers(setup.workers)
    };
    FaultyEngine::new(setup.io.engine(options), Arc::clone(clock), 1)
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
    pub(crate) fn open(root: &Path, setup: Setup) -> Self {
        Self::with_clock(root, setup, SystemClock::shared())
    }

    pub(crate) fn with_clock(root: &Path, setup: Setup, clock: Arc<dyn Clock>) -> Self {
        Self::build(root, setup, clock, Vec::new(), true).unwrap()
    }

    /// Without waiting for the first count.
    pub(crate) fn with_clock_now(root: &Path, setup: Setup, clock: Arc<dyn Clock>) -> Self {
        Self::build(root, setup, clock, Vec::new(), false).unwrap()
    }

    /// With faults from the first operation on.
    pub(crate) fn open_faulty(root: &Path, setup: Setup, rules: Vec<Rule>) -> Self {
        Self::build(root, setup, SystemClock::shared(), rules, false).unwrap()
    }

    pub(crate) fn try_open(root: &Path, setup: Setup) -> ucm_core::Result<Self> {
        Self::build(root, setup, SystemClock::shared(), Vec::new(), true)
    }

    fn build(
        root: &Path,
        setup: Setup,
        clock: Arc<dyn Clock>,
        rules: Vec<Rule>,
        counted: bool,
    ) -> ucm_core::Result<Self> {
        let faults = engine(&setup, &clock);
        for rule in rules {
            faults.add(rule)?;
        }
        let (geometry, record) = shape(&setup);
        let record_len = record.record_len() as u64;
        let identity = identity(setup.weights);
        let writer = ucm_store::random_u64();
        let mut memory = None;
        let lower: Arc<dyn Backend> = match setup.medium {
            Medium::Posix => media::posix(root, &setup, &identity, writer, &faults, &clock)?,
            Medium::Memory(records, policy) => {
                let backend = in_memory(root, &setup, records, policy, &clock)?;
                Arc::clone(memory.insert(backend)) as Arc<dyn Backend>
            }
        };
        let (mut map, mut upper) = (None, None);
        let above: Option<(Arc<dyn Backend>, WritePolicy)> = match setup.above {
            _ if setup.medium != Medium::Posix => None, // memory is the top stage
            Above::Nothing => None,
            Above::Map(records, policy) => {
                let made = map.insert(MapBackend::new(records));
                Some((Arc::new(MapStage(Arc::clone(made))), policy))
            }
            Above::Memory(records, policy) => {
                let made = in_memory(root, &setup, records, Policy::default(), &clock)?;
                Some((Arc::clone(memory.insert(made)) as Arc<dyn Backend>, policy))
            }
            Above::File => {
                let io = upper.insert(engine(&setup, &clock));
                for dir in [root, &above(root)] {
                    std::fs::create_dir_all(dir).unwrap();
                }
                Some((
                    media::posix(&above(root), &setup, &identity, writer, io, &clock)?,
                    WritePolicy::Through,
                ))
            }
        };
        let backend = match above {
            None => lower,
            Some((top, policy)) => {
                let stage = |backend, policy| StageConfig {
                    backend,
                    policy,
                    max_stuck: setup.stage_breaker.max_stuck,
                };
                let tiers = TiersConfig {
                    stages: vec![stage(top, WritePolicy::Through), stage(lower, policy)],
                    record: record.clone(),
                    identity: identity.clone(),
                    part: setup.part,
                    breaker: setup.stage_breaker,
                    probe: setup.deadlines.probe,
                    copy: setup.deadlines.dump,
                    spare_slots: 8,
                };
                Arc::new(Tiers::new(tiers, Arc::clone(&clock))?)
            }
        };
        let config = EngineConfig {
            geometry,
            identity,
            part: setup.part,
            block_tokens: 16,
            dtype: DType::F32,
            staging_bytes: if setup.lookup_only {
                0
            } else {
                setup.slots * record_len
            },
            copy_threads: setup.copy_threads,
            deadlines: setup.deadlines,
            breaker: setup.breaker,
            writer,
            paranoid: setup.paranoid,
        };
        let device: Arc<dyn ucm_device::Device> = match &setup.device {
            Some(device) => Arc::clone(device) as Arc<dyn ucm_device::Device>,
            None => Arc::new(HostDevice::new()),
        };
        let engine = Engine::open(config, Arc::clone(&backend), device, clock)?;
        let store = Self {
            engine,
            backend,
            faults,
            setup,
            root: root.to_owned(),
            map,
            upper,
            memory,
            gates: Mutex::default(),
        };
        // So that faults and counts of a test see its own operations only, not those of the first count.
        if counted && !store.setup.lookup_only && store.stat("healthy") == 1 {
            eventually("the root was counted", || store.stat("storage_counted") == 1);
        }
        Ok(store)
    }

    /// The map above the root.
    pub(crate) fn map(&self) -> &MapBackend {
        self.map.as_ref().unwrap()
    }

    /// What a stage of a pipeline counted.
    pub(crate) fn tier(&self, stage: usize, name: &str) -> u64 {
        let value = self.engine.stats()["tiers"][stage][name].clone();
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
        let namespace = root.join(identity(self.setup.weights).namespace());
        namespace
            .join("blocks")
            .join(format!("{:02x}", id.0[0]))
            .join(format!("{id}.bin"))
    }

    /// From now on this happens to the operations it is for.
    pub(crate) fn fault(&self, rule: Rule) {
        self.faults.add(rule).unwrap();
    }

    /// From now on operations of this kind hang before they begin, until the gate is opened.
    pub(crate) fn hang(&self, kind: OpKind) -> Gate {
        let gate = self.gate();
        self.fault(Rule::on(kind, Fault::HangBefore(gate.clone())));
        gate
    }

    /// A gate that opens by itself when the test fails.
    pub(crate) fn gate(&self) -> Gate {
        let gate = Gate::new();
        self.gates.lock().push(gate.clone());
        gate
    }

    /// How often the medium was asked for this of the file of a block (what the space keeper asks is not counted).
    pub(crate) fn asked(&self, kind: OpKind, id: BlockId) -> usize {
        times(&self.faults, kind, &self.file(id))
    }

    /// The same of the root above.
    pub(crate) fn asked_above(&self, kind: OpKind, id: BlockId) -> usize {
        times(self.upper.as_ref().unwrap(), kind, &self.upper_file(id))
    }

    /// Dumps whole blocks and waits until they are published.
    pub(crate) fn dump(&self, device: &Device, ids: &[BlockId]) -> Result<(), Vec<(usize, ucm_core::Error)>> {
        let task = self
            .engine
            .dump(device.rows(ids))
            .map_err(|error| vec![(usize::MAX, error)])?;
        self.outcome(&task)
    }

    /// Loads whole blocks and waits for the outcome.
    pub(crate) fn load(&self, device: &Device, ids: &[BlockId]) -> Result<(), Vec<(usize, ucm_core::Error)>> {
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

    /// What was said since this was last asked, oldest first.
    pub(crate) fn said(&self) -> Vec<String> {
        let events = self.engine.events();
        events.into_iter().map(|event| event.text).collect()
    }

    pub(crate) fn missed(&self, reason: &str) -> u64 {
        self.engine.stats()["misses"][reason].as_u64().unwrap_or(0)
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

/// Memory that plays the device: one buffer per block, all layers in a row.
pub(crate) struct Device {
    setup: Setup,
    blocks: BTreeMap<BlockId, Vec<u8>>,
}

impl Device {
    /// Blocks filled with what their id stands for.
    pub(crate) fn filled(setup: &Setup, ids: &[BlockId]) -> Self {
        let blocks = ids.iter().map(|&id| (id, content(setup, id))).collect();
        Self {
            setup: setup.clone(),
            blocks,
        }
    }

    /// Blocks filled with rubbish, to be loaded into.
    pub(crate) fn blank(setup: &Setup, ids: &[BlockId]) -> Self {
        let len = content(setup, id(0)).len();
        let blocks = ids.iter().map(|&id| (id, vec![0xee; len])).collect();
        Self {
            setup: setup.clone(),
            blocks,
        }
    }

    /// Changes what a block holds.
    pub(crate) fn change(&mut self, id: BlockId, change: impl FnOnce(&mut [u8])) {
        change(self.blocks.get_mut(&id).unwrap());
    }

    /// One row per shard of each block.
    pub(crate) fn rows(&self, ids: &[BlockId]) -> Vec<Row> {
        let shards = self.setup.layers / self.setup.layers_per_shard;
        ids.iter()
            .flat_map(|&id| (0..shards).map(move |shard| (id, shard)))
            .map(|(id, shard)| self.row(id, shard))
            .collect()
    }

    pub(crate) fn row(&self, id: BlockId, shard: u32) -> Row {
        let mut address = self.blocks[&id].as_ptr() as u64;
        let layer: u64 = self.setup.tensors.iter().sum();
        address += layer * u64::from(self.setup.layers_per_shard * shard);
        let mut spans = Vec::new();
        for _ in 0..self.setup.layers_per_shard {
            for &size in &self.setup.tensors {
                // SAFETY: within this device's own buffer, which the tests keep until their tasks ended.
                spans.push(unsafe { DeviceSpan::new(address, size) });
                address += size;
            }
        }
        Row { id, shard, spans }
    }

    /// Whether the block holds what its id stands for.
    pub(crate) fn is_right(&self, id: BlockId) -> bool {
        self.blocks[&id] == content(&self.setup, id)
    }

    /// Whether both hold the same blocks.
    pub(crate) fn equals(&self, other: &Self) -> bool {
        self.blocks == other.blocks
    }

    pub(crate) fn is_blank(&self, id: BlockId) -> bool {
        self.blocks[&id].iter().all(|&byte| byte == 0xee)
    }
}

/// The bytes an id stands for.
pub(crate) fn content(setup: &Setup, id: BlockId) -> Vec<u8> {
    let len = setup.tensors.iter().sum::<u64>() as usize * setup.layers as usize;
    (0..len)
        .map(|i| match setup.compress {
            Some(_) if i % 4 > 1 => id.0[i % 2], // half of it compresses well
            _ => id.0[i % 16].wrapping_add((i / 16) as u8),
        })
        .collect()
}

/// A device whose first copies hang until they are let go.
pub(crate) struct SlowDevice {
    inner: HostDevice,
    state: Mutex<(usize, usize)>,
    news: Condvar,
}

impl SlowDevice {
    /// The first `copies` to start hang.
    pub(crate) fn new(copies: usize) -> Arc<Self> {
        Arc::new(Self {
            inner: HostDevice::new(),
            state: Mutex::new((copies, 0)),
            news: Condvar::new(),
        })
    }

    /// Waits until so many copies hang.
    pub(crate) fn await_hanging(&self, copies: usize) {
        let mut state = self.state.lock();
        while state.1 < copies {
            self.news.wait(&mut state);
        }
    }

    /// Lets all go on.
    pub(crate) fn go(&self) {
        *self.state.lock() = (0, 0);
        self.news.notify_all();
    }
}

impl ucm_device::Device for SlowDevice {
    fn name(&self) -> &str {
        "slow"
    }

    /// A copy that finds no stream in the engine's pool makes one: here it hangs.
    fn make_stream(&self) -> ucm_core::Result<Box<dyn ucm_device::Stream>> {
        let mut state = self.state.lock();
        if state.0 > 0 {
            state.0 -= 1;
            state.1 += 1;
            self.news.notify_all();
            while state.1 > 0 {
                self.news.wait(&mut state);
            }
        }
        drop(state);
        self.inner.make_stream()
    }

    fn make_arena(
        &self,
        bytes: usize,
        options: ucm_device::ArenaOptions,
    ) -> ucm_core::Result<Arc<ucm_device::HostArena>> {
        self.inner.make_arena(bytes, options)
    }
}

pub(crate) fn directory() -> TempDir {
    tempfile::Builder::new().prefix("ucm-store-").tempdir().unwrap()
}

/// Looks until something is so; gives up after far longer than it can take.
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
