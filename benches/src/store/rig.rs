//! Our side: a backend and an engine over it, set up as in production but for the number of
//! threads.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_device::{HostDevice, Slot};
use ucm_infra::{Clock, Completion, LANE_DUMP, LANE_LOAD, MonotonicTime, SystemClock};
use ucm_io::{IoJob, IoOptions, IoPool, Process, PsyncEngine};
use ucm_quota::evidence::QuarantineConfig;
use ucm_quota::layout::Layout;
use ucm_quota::layout::Modes;
use ucm_quota::{Capacity, Rules};
use ucm_record::{Expect, RecordLayout, RecordMeta, verify};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::{Deadlines, Engine, EngineConfig, Row, Until};
use ucm_store::tiers::{TierConfig, WritePolicy};
use ucm_tier::backend::{Backend, BlockRead, Flush, Outcome, ReadDone, WriteOptions, either};
use ucm_tier::posix::{Place, PosixBackend, PosixConfig};
use ucm_tier::segment::{SegmentBackend, SegmentConfig};

use super::Result;
use super::contest::{Spent, Watch};

/// Layers of a block, one tensor each, as in a model of 7 or 8 billion parameters.
const LAYERS: usize = 32;
/// Tokens of a block; in the header only.
const BLOCK_TOKENS: u32 = 128;
/// Most reads that the engine hands over together.
const TOGETHER: usize = 256;
/// The store's limit: never reached, so that nothing is collected.
const CAPACITY: u64 = 64 << 30;
/// No turn takes as long.
const LONG: Duration = Duration::from_secs(120);

/// Sizes of the blocks of a case.
pub(super) struct Shape {
    pub(super) block: usize,
    pub(super) geometry: Geometry,
    pub(super) layout: RecordLayout,
    pub(super) identity: Identity,
}

impl Shape {
    /// Of blocks of so many bytes of KV.
    pub(super) fn of(block: usize) -> Result<Self> {
        Self::with_layers(block, LAYERS)
    }

    /// The smallest blocks: what a lookup costs does not depend on their size.
    pub(super) fn small() -> Result<Self> {
        Self::with_layers(4096, 1)
    }

    fn with_layers(block: usize, layers: usize) -> Result<Self> {
        let geometry = Geometry::new(vec![(block / layers) as u64], layers as u32, layers as u32)?;
        let layout = RecordLayout::new(&geometry).describing(BLOCK_TOKENS, DType::F32);
        let text = format!(
            "{{\"format_version\":1,\"architecture\":\"bench\",\"world_size\":1,\"dtype\":\"f32\",\"weights\":\"{block}\",\
             \"model_config\":{{}},\"position\":{{}},\"kv_dtype\":\"f32\",\"attention_backend\":\"none\",\
             \"kv_packing\":{{}},\"kv_layout\":\"none\",\"kv_groups\":[],\"block_tokens\":{BLOCK_TOKENS},\
             \"tensor_parallel\":1,\"pipeline_parallel\":1,\"decode_context_parallel\":1}}"
        );
        Ok(Self {
            block,
            geometry,
            layout,
            identity: Identity::parse(&text)?,
        })
    }

    fn expect(&self, id: BlockId) -> Expect<'_> {
        Expect {
            id,
            namespace: *self.identity.digest(),
            part: Part::default(),
            layout: &self.layout,
        }
    }

    /// Makes a record of a filled slot: checksums of all layers, then the header.
    fn seal(&self, id: BlockId, slot: &mut Slot) -> ucm_core::Result<()> {
        let meta = RecordMeta {
            id,
            parent: BlockId::default(),
            ordinal: 0,
            namespace: *self.identity.digest(),
            part: Part::default(),
            tokens: BLOCK_TOKENS,
            time_ns: 0,
            writer: 1,
            tenant: [0; 32],
        };
        self.layout.seal(&meta, slot.as_mut_slice())
    }
}

/// The I/O engine of a rig, and its threads.
#[derive(Clone)]
pub(super) struct Io {
    engine: Arc<PsyncEngine>,
    pool: Arc<IoPool>,
}

impl Io {
    /// Threads over an engine of plain system calls.
    pub(super) fn new(direct: bool, options: &IoOptions) -> Result<Self> {
        let engine = PsyncEngine::new(direct);
        let pool = IoPool::new(Arc::clone(&engine) as _, options)?;
        Ok(Self { engine, pool })
    }
}

/// Makes the backend of a rig.
type Make = fn(PosixConfig, &Io, Arc<dyn Clock>) -> ucm_core::Result<Arc<dyn Backend>>;

/// A backend with an engine over it.
pub(super) struct Rig {
    shape: Arc<Shape>,
    files: Layout,
    io: Io,
    backend: Arc<dyn Backend>,
    /// Documents that were read and written to open the root; they are never direct.
    documents: u64,
    pub(super) engine: Engine,
}

impl Rig {
    /// Opens a store below `root`; the pool has `threads` threads: loads may use all, dumps half of
    /// them. The engine stages `slots` blocks.
    pub(super) fn open(
        root: &Path,
        shape: Shape,
        threads: usize,
        direct: bool,
        slots: usize,
    ) -> Result<Self> {
        let io = Io::new(direct, &IoOptions::with_workers(threads))?;
        Self::over(root, shape, io, direct, slots, |config, io, clock| {
            Ok(Arc::new(PosixBackend::new(
                config,
                Arc::clone(&io.pool),
                clock,
            )?))
        })
    }

    /// The same with segments, over an I/O engine.
    pub(super) fn segments(
        root: &Path,
        shape: Shape,
        io: Io,
        direct: bool,
        slots: usize,
    ) -> Result<Self> {
        Self::over(root, shape, io, direct, slots, |config, io, clock| {
            let segments = SegmentConfig::default();
            Ok(Arc::new(SegmentBackend::new(
                config,
                segments,
                Arc::clone(&io.pool),
                clock,
            )?))
        })
    }

    fn over(
        root: &Path,
        shape: Shape,
        io: Io,
        direct: bool,
        slots: usize,
        make: Make,
    ) -> Result<Self> {
        let clock = SystemClock::shared();
        let posix = PosixConfig {
            root: root.to_owned(),
            identity: shape.identity.clone(),
            labels: BTreeMap::new(),
            part: Part::default(),
            geometry: shape.geometry.clone(),
            record: shape.layout.clone(),
            other_parts: Vec::new(),
            shorter: false,
            direct,
            lookup_only: false,
            capacity: NonZeroU64::new(CAPACITY).map(Capacity::Bytes),
            rules: Rules {
                free_floor: Some(Capacity::Percent(0.0)),
                ..Rules::default()
            },
            process: Process::this(),
            modes: Modes::default(),
            quarantine: QuarantineConfig::default(),
            place: Place::default(),
            writer: ucm_infra::random_u64(),
        };
        let config = EngineConfig {
            geometry: shape.geometry.clone(),
            identity: shape.identity.clone(),
            part: Part::default(),
            block_tokens: BLOCK_TOKENS,
            dtype: DType::F32,
            sides: Vec::new(),
            staging_bytes: (slots * shape.layout.record_len()) as u64,
            copy_threads: 1,
            paranoid: false,
            keys: None,
            tenant_quota: None,
            deadlines: Deadlines {
                lookup: LONG,
                dump: LONG,
                ..Deadlines::default()
            },
            breaker: BreakerConfig::default(),
            writer: 1,
        };
        let backend = make(posix, &io, Arc::clone(&clock))?;
        let tier = TierConfig {
            backend: Arc::clone(&backend),
            pool: Arc::clone(&io.pool),
            policy: WritePolicy::Through,
            compressed: false,
            max_stuck: usize::MAX,
        };
        let engine = Engine::open(config, vec![tier], Arc::new(HostDevice::new()), clock)?;
        Ok(Self {
            files: Layout::new(root, &shape.identity),
            documents: io.engine.direct_fallbacks(),
            shape: Arc::new(shape),
            io,
            backend,
            engine,
        })
    }

    /// The directory of private files.
    pub(super) fn private(&self) -> PathBuf {
        self.files.tmp()
    }

    /// The file of a record.
    pub(super) fn path(&self, id: BlockId) -> PathBuf {
        self.files.record(id)
    }

    /// Ends the store and removes it. If the rig was `direct`, with the number of records that it
    /// moved: an error if as many went through the page cache. The documents of the collector
    /// always do, but are fewer.
    pub(super) fn retire(&self, root: &Path, direct: Option<usize>) -> Result<()> {
        let buffered = self.io.engine.direct_fallbacks() - self.documents;
        if direct.is_some_and(|records| buffered >= records as u64) {
            return Err(
                "the store fell back to the page cache where the yardstick used O_DIRECT".into(),
            );
        }
        self.engine.close();
        Ok(std::fs::remove_dir_all(root)?)
    }

    /// Reads records into slots, verifying each where it arrived, or not. Gives the slots back.
    pub(super) fn read(
        &self,
        ids: &[BlockId],
        slots: Vec<Slot>,
        judge: bool,
    ) -> Result<(Spent, Vec<Slot>)> {
        let batch = Batch::new(ids.len());
        let (watch, deadline) = (Watch::start(), self.deadline());
        let mut reads = Vec::with_capacity(ids.len());
        for (&id, slot) in ids.iter().zip(slots) {
            let (batch, shape) = (Arc::clone(&batch), Arc::clone(&self.shape));
            let done = move |result: ucm_core::Result<ReadDone>| {
                let judged = result.and_then(|read| {
                    let bytes = &read.slot.as_slice()[..read.read];
                    match judge.then(|| verify(bytes, read.stored_len, &shape.expect(id))) {
                        Some(Err(refusal)) => Err(refusal.into()),
                        _ if bytes.len() == shape.layout.record_len() => Ok(read.slot),
                        _ => Err(ucm_core::Error::internal("a record is short")),
                    }
                });
                batch.one(judged.map(Some));
            };
            reads.push((BlockRead::whole(id, slot, deadline), done));
        }
        // As the engine hands them over.
        while !reads.is_empty() {
            let next = reads.split_off(reads.len().min(TOGETHER));
            let (reads, mut done): (Vec<_>, Vec<_>) = std::mem::replace(&mut reads, next)
                .into_iter()
                .map(|(read, done)| (read, Some(done)))
                .unzip();
            self.read_in_runs(reads, &mut done);
        }
        let slots = batch.wait()?;
        Ok((watch.stop(), slots))
    }

    /// Reads records as a tier does: in the runs of its backend, each on one thread.
    fn read_in_runs<D: FnOnce(ucm_core::Result<ReadDone>) + Send + 'static>(
        &self,
        reads: Vec<BlockRead>,
        done: &mut [Option<D>],
    ) {
        let asked: Vec<&BlockRead> = reads.iter().collect();
        let runs = self
            .backend
            .features()
            .runs(&asked, self.io.pool.width(LANE_LOAD));
        let mut reads: Vec<_> = reads.into_iter().map(Some).collect();
        for run in runs {
            let (backend, deadline) = (Arc::clone(&self.backend), self.deadline());
            let asked: Vec<_> = run.iter().filter_map(|&at| reads[at].take()).collect();
            let told: Vec<_> = run.iter().filter_map(|&at| done[at].take()).collect();
            let work = move |io: &IoJob| Ok(backend.read(io, asked));
            let ended = move |outcomes: ucm_core::Result<Vec<Outcome>>| {
                let failed = |error: ucm_core::Error| {
                    let each = told.iter().map(|_| Outcome::Came(Err(error.clone())));
                    each.collect()
                };
                let outcomes = outcomes.unwrap_or_else(failed);
                for (done, outcome) in told.into_iter().zip(outcomes) {
                    done(match outcome {
                        Outcome::Came(read) => read,
                        Outcome::Moved(_) => Err(ucm_core::Error::internal("a record has moved")),
                    });
                }
            };
            self.io.pool.job(LANE_LOAD, deadline, work, ended);
        }
    }

    /// Writes filled slots as records, sealing each first, or not.
    pub(super) fn write(&self, ids: &[BlockId], slots: Vec<Slot>, seal: bool) -> Result<Spent> {
        let batch = Batch::new(ids.len());
        let options = WriteOptions {
            len: self.shape.layout.record_len(),
            ordinal: 0,
            replace: false,
            read_back: false,
        };
        let (watch, deadline) = (Watch::start(), self.deadline());
        let to_place = Arc::new(AtomicUsize::new(ids.len()));
        for (&id, mut slot) in ids.iter().zip(slots) {
            if seal {
                self.shape.seal(id, &mut slot)?;
            }
            let batch = Arc::clone(&batch);
            let (done, ended) = either(Box::new(move |result| batch.one(result.map(|_| None))));
            let (backend, left) = (Arc::clone(&self.backend), Arc::clone(&to_place));
            let write = move |io: &IoJob| {
                backend.write(io, id, slot, options, done);
                if left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    backend.flush(Flush::Soon); // as for a dump that is waited for
                }
                Ok(())
            };
            self.io.pool.job(LANE_DUMP, deadline, write, ended);
        }
        batch.wait()?;
        Ok(watch.stop())
    }

    /// Loads rows by the engine.
    pub(super) fn load(&self, rows: Vec<Row>) -> Result<Spent> {
        let watch = Watch::start();
        let task = self.engine.load(rows, Some(LONG))?;
        task.wait(self.engine.clock(), Until::Published, None);
        let took = watch.stop();
        task.failures()
            .pop()
            .map_or(Ok(took), |(_, error)| Err(error.into()))
    }

    /// Loads blocks by the engine to their verified slots.
    pub(super) fn verify(&self, ids: &[BlockId]) -> Result<Spent> {
        let watch = Watch::start();
        let task = self.engine.verify(ids, Some(LONG))?;
        task.wait(self.engine.clock(), Until::Published, None);
        let took = watch.stop();
        task.failures()
            .pop()
            .map_or(Ok(took), |(_, error)| Err(error.into()))
    }

    /// Dumps rows by the engine, until published.
    pub(super) fn dump(&self, rows: Vec<Row>) -> Result<Spent> {
        let watch = Watch::start();
        let task = self.engine.dump(rows)?;
        task.wait(self.engine.clock(), Until::Published, None);
        let took = watch.stop();
        task.failures()
            .pop()
            .map_or(Ok(took), |(_, error)| Err(error.into()))
    }

    fn deadline(&self) -> MonotonicTime {
        self.engine.clock().now().after(LONG)
    }
}

/// Operations of which the last one to end wakes who waits.
pub(super) struct Batch {
    left: AtomicUsize,
    ended: Mutex<(Vec<Slot>, Option<ucm_core::Error>)>,
    over: Arc<Completion<()>>,
}

impl Batch {
    pub(super) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicUsize::new(count),
            ended: Mutex::new((Vec::with_capacity(count), None)),
            over: Completion::new(),
        })
    }

    pub(super) fn one(&self, result: ucm_core::Result<Option<Slot>>) {
        let mut ended = self.ended.lock();
        match result {
            Ok(slot) => ended.0.extend(slot),
            Err(error) => ended.1 = Some(error),
        }
        drop(ended);
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.over.complete(());
        }
    }

    pub(super) fn wait(&self) -> Result<Vec<Slot>> {
        self.over.wait(&SystemClock, None);
        let mut ended = self.ended.lock();
        match ended.1.take() {
            Some(error) => Err(error.into()),
            None => Ok(std::mem::take(&mut ended.0)),
        }
    }
}
