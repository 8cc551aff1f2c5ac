//! The one engine over every backend: tasks, staging slots, gather and scatter, checksums, joined loads, deadlines,
//! back-pressure, the breaker, counters.
//!
//! The five rules it keeps are those of the design: no late bytes, block by block ([`load`]); two levels of a dump,
//! staged and published ([`dump`]); bounded queues; deadlines on every wait; verification of everything that comes
//! from a medium. Deadlines of I/O are kept by the backend's pool, those of tasks by whoever looks at them.

mod dump;
mod load;
mod task;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hashlink::LruCache;
use parking_lot::Mutex;
use ucm_core::{BlockId, DType, Error, ErrorKind, Geometry, Identity, MissReason, Part, Result, limits};
use ucm_device::{Device, DeviceSpan, HostArena, SlotPool, Stream};
use ucm_infra::{Clock, Completion, Lane, Mono, WorkerPool};

use crate::backend::{Backend, ReadDone};
use crate::events::{Event, Events, Level};
use crate::health::{Breaker, BreakerConfig, Change};
use crate::record::{Expect, RecordLayout, verify};
use crate::stats::Stats;

pub use task::{Task, Until};

/// Lane of loads, in every pool of the store.
pub const LANE_LOAD: usize = 0;
/// Lane of lookups and prefetches.
pub const LANE_LOOKUP: usize = 1;
/// Lane of dumps.
pub const LANE_DUMP: usize = 2;
/// Lane of space and housekeeping.
pub const LANE_SPACE: usize = 3;

/// Most refused ids and header hints remembered.
const REMEMBERED: usize = 1 << 16;
/// Ids per operation when a lookup is spread over workers.
const LOOKUP_CHUNK: usize = 64;
/// Most ids per operation.
const LOOKUP_CHUNK_MAX: usize = 1024;
/// Operations one window of a prefix lookup is spread over.
const LOOKUP_SPREAD: usize = 4;

/// The deadlines of an engine; every one is a key of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// One lookup call.
    pub lookup: Duration,
    /// A load whose caller names no deadline.
    pub load: Duration,
    /// A dump, in the background.
    pub dump: Duration,
    /// The first look at a root.
    pub probe: Duration,
    /// Draining at shutdown.
    pub shutdown: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            lookup: Duration::from_millis(50),
            load: Duration::from_secs(5),
            dump: Duration::from_secs(30),
            probe: Duration::from_secs(5),
            shutdown: Duration::from_secs(3),
        }
    }
}

/// What an engine needs to know.
pub struct EngineConfig {
    /// Sizes of this part's blocks.
    pub geometry: Geometry,
    /// Whose KV it is.
    pub identity: Identity,
    /// Which part of a block this engine moves.
    pub part: Part,
    /// Tokens in a block, for the header.
    pub block_tokens: u32,
    /// Element type, for the header.
    pub dtype: DType,
    /// Bytes of host memory for staging; 0 opens the engine for lookups only.
    pub staging_bytes: u64,
    /// Threads that copy from the device.
    pub copy_threads: usize,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// When the breaker opens.
    pub breaker: BreakerConfig,
    /// Tells this writer's records from others'.
    pub writer: u64,
}

/// One row of a load or dump: block, shard, and the device pieces of that shard in order.
pub struct Row {
    /// The block's record id.
    pub id: BlockId,
    /// The shard's index.
    pub shard: u32,
    /// Pieces on the device; as many and as long as the geometry says.
    pub spans: Vec<DeviceSpan>,
}

/// What ids do not say, for the record's header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hint {
    /// The block before it in its chain (zero: none or unknown).
    pub parent: BlockId,
    /// Position in the chain.
    pub ordinal: u32,
    /// Tokens in the block, 0 for the configured number.
    pub tokens: u32,
}

/// The engine; a handle over its shared core. Dropping it closes it.
pub struct Engine(Arc<Core>);

/// Shared by the handle and the callbacks under way.
pub struct Core {
    geometry: Geometry,
    layout: RecordLayout,
    identity: Identity,
    part: Part,
    writer: u64,
    deadlines: Deadlines,
    clock: Arc<dyn Clock>,
    backend: Arc<dyn Backend>,
    device: Arc<dyn Device>,
    streams: Mutex<Vec<Box<dyn Stream>>>,
    slots: Arc<SlotPool>,
    reserved_slots: usize,
    copies: Arc<WorkerPool>,
    reads: Mutex<load::Reads>,
    assemblies: dump::Assemblies,
    refused: Mutex<LruCache<BlockId, MissReason>>,
    hints: Mutex<LruCache<BlockId, Hint>>,
    breaker: Breaker,
    ready: AtomicBool,
    closed: AtomicBool,
    pid: u32,
    stats: Stats,
    events: Events,
}

impl Deref for Engine {
    type Target = Arc<Core>;

    fn deref(&self) -> &Arc<Core> {
        &self.0
    }
}

impl Engine {
    /// Sets everything up and looks at the backend once, within the probe deadline. A backend that does not answer
    /// is retried later; until then every lookup is a miss.
    pub fn open(
        config: EngineConfig,
        backend: Arc<dyn Backend>,
        device: Arc<dyn Device>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let layout = RecordLayout::new(&config.geometry).describing(config.block_tokens, config.dtype);
        let slot_len = layout.record_len() as u64;
        let slots = config.staging_bytes / slot_len;
        if config.staging_bytes > 0 && slots < 4 {
            return Err(Error::new(
                ErrorKind::Config,
                "staging_capacity must hold at least 4 blocks; raise it",
            )
            .with("staging_capacity", config.staging_bytes)
            .with("at_least", 4 * slot_len));
        }
        let arena = HostArena::new((slots.max(1) * slot_len) as usize)?;
        let slots = SlotPool::new(arena, slot_len as usize)?;
        let copies = WorkerPool::builder("ucm-copy")
            .size(config.copy_threads.max(1))
            .lanes(&[
                Lane {
                    name: "load",
                    capacity: 16,
                    max_running: 1,
                },
                Lane {
                    name: "control",
                    capacity: 16,
                    max_running: 1,
                },
                Lane {
                    name: "dump",
                    capacity: slots.capacity() * 2 + 64,
                    max_running: config.copy_threads.max(1),
                },
            ])
            .max_replacements(4)
            .clock(Arc::clone(&clock))
            .build()?;
        let remembered = LruCache::new(REMEMBERED);
        let core = Arc::new(Core {
            reserved_slots: (slots.capacity() / 4).max(1),
            slots,
            layout,
            geometry: config.geometry,
            identity: config.identity,
            part: config.part,
            writer: config.writer,
            deadlines: config.deadlines,
            clock,
            backend,
            device,
            streams: Mutex::new(Vec::new()),
            copies,
            reads: Mutex::default(),
            assemblies: Mutex::default(),
            refused: Mutex::new(remembered),
            hints: Mutex::new(LruCache::new(REMEMBERED)),
            breaker: Breaker::new(config.breaker),
            ready: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            pid: std::process::id(),
            stats: Stats::default(),
            events: Events::default(),
        });
        let weak = Arc::downgrade(&core);
        core.slots.on_release(move || {
            if let Some(core) = weak.upgrade() {
                core.pump(); // a load may be waiting for this slot
            }
        });
        core.probe(core.clock.now().after(core.deadlines.probe));
        Ok(Self(core))
    }

    /// Starts loading rows. A block that is absent, refused or late fails the task; see [`Task::failures`].
    /// `deadline`: from now, the configured one if `None`.
    pub fn load(&self, rows: Vec<Row>, deadline: Option<Duration>) -> Result<Task> {
        self.check_rows(&rows)?;
        let deadline = self.clock.now().after(deadline.unwrap_or(self.deadlines.load));
        self.0.start_load(rows, deadline)
    }

    /// Starts dumping rows, or refuses at once (Busy: no slot; Unhealthy: the breaker is open).
    pub fn dump(&self, rows: Vec<Row>) -> Result<Task> {
        self.check_rows(&rows)?;
        self.0
            .start_dump(rows, self.clock.now().after(self.deadlines.dump))
    }

    /// Ends the engine: no new work, what is under way gets the shutdown deadline. Idempotent.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) || self.pid != std::process::id() {
            return;
        }
        let until = self.clock.now().after(self.deadlines.shutdown);
        let left = || until.since(self.clock.now());
        self.copies.shutdown(left());
        self.backend.shutdown(left());
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl Core {
    /// Which of these blocks are stored whole, as far as the lookup deadline lets us know; exact per id.
    pub fn lookup(self: &Arc<Self>, ids: &[BlockId]) -> Result<Vec<bool>> {
        self.lookup_ids(ids, false)
    }

    /// How many ids from the first on are stored without a gap. Every id counted was checked.
    pub fn lookup_on_prefix(self: &Arc<Self>, ids: &[BlockId]) -> Result<usize> {
        let (mut known, mut window) = (0, LOOKUP_CHUNK);
        while known < ids.len() {
            let end = ids.len().min(known + window);
            let found = self.lookup_ids(&ids[known..end], true)?;
            let run = found.iter().take_while(|&&present| present).count();
            known += run;
            if run < found.len() || known < end {
                break;
            }
            window = (window * 2).min(LOOKUP_CHUNK_MAX * LOOKUP_SPREAD);
        }
        Ok(known)
    }

    fn lookup_ids(self: &Arc<Self>, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<bool>> {
        self.usable()?;
        if ids.len() > limits::MAX_IDS_PER_CALL {
            return Err(Error::invalid("too many ids in one call").with("ids", ids.len()));
        }
        let started = self.clock.now();
        let deadline = started.after(self.deadlines.lookup);
        Stats::add(&self.stats.lookups, 1);
        Stats::add(&self.stats.lookup_ids, ids.len() as u64);
        if self.admit(started).is_err() {
            self.stats.misses.add(MissReason::Unhealthy, ids.len() as u64);
            return Ok(vec![false; ids.len()]);
        }
        let chunk = ids
            .len()
            .div_ceil(LOOKUP_SPREAD)
            .clamp(LOOKUP_CHUNK, LOOKUP_CHUNK_MAX);
        let waits: Vec<_> = ids
            .chunks(chunk)
            .map(|ids| {
                let completion = Completion::new();
                let answer = Arc::clone(&completion);
                let done = Box::new(move |result: Result<Vec<bool>>| {
                    answer.complete(result);
                });
                self.backend.lookup(ids.to_vec(), stop_at_missing, deadline, done);
                (ids.len(), completion)
            })
            .collect();
        let mut found = Vec::with_capacity(ids.len());
        for (len, completion) in waits {
            let answer = completion.wait(&*self.clock, Some(deadline.after(Duration::from_millis(5))));
            match answer.unwrap_or_else(|| {
                Err(Error::new(
                    ErrorKind::Timeout,
                    "the lookup did not answer in time",
                ))
            }) {
                Ok(mut present) => {
                    self.healthy();
                    present.resize(len, false);
                    found.append(&mut present);
                }
                Err(error) => {
                    self.observe(&error);
                    let late = error.kind() == ErrorKind::Timeout;
                    let reason = if late {
                        MissReason::LookupLate
                    } else {
                        MissReason::IoError
                    };
                    self.stats.misses.add(reason, len as u64);
                    found.resize(found.len() + len, false);
                }
            }
        }
        self.hide_refused(ids, &mut found);
        Stats::add(
            &self.stats.lookup_hits,
            found.iter().filter(|&&present| present).count() as u64,
        );
        self.stats
            .lookup_latency
            .observe(self.clock.now().since(started).as_nanos() as u64);
        Ok(found)
    }

    fn hide_refused(&self, ids: &[BlockId], found: &mut [bool]) {
        let refused = self.refused.lock();
        for (present, id) in found.iter_mut().zip(ids) {
            if !refused.is_empty() && refused.contains_key(id) {
                *present = false;
                self.stats.misses.add(MissReason::Refused, 1);
            } else if !*present {
                self.stats.misses.add(MissReason::Absent, 1);
            }
        }
    }

    /// Remembers what the ids of a coming dump do not say.
    pub fn describe(&self, hints: impl IntoIterator<Item = (BlockId, Hint)>) {
        let mut known = self.hints.lock();
        for (id, hint) in hints {
            known.insert(id, hint);
        }
    }

    /// These blocks, with their ordinals, were used by a request.
    pub fn touch(&self, ids: &[(BlockId, u32)]) -> Result<()> {
        self.usable()?;
        if self.ready.load(Ordering::Acquire) && self.breaker.is_closed() {
            self.backend
                .touch(ids, self.clock.now().after(self.deadlines.dump));
        }
        Ok(())
    }

    /// How many more blocks a dump could take now.
    pub fn free_dump_slots(&self) -> usize {
        self.drop_incomplete(self.clock.now());
        self.slots.available().saturating_sub(self.reserved_slots)
    }

    /// Counters, histograms and gauges as one JSON object.
    pub fn stats(&self) -> serde_json::Value {
        self.drop_incomplete(self.clock.now());
        let mut json = self.stats.to_json();
        let usage = self.backend.usage();
        let (records_removed, bytes_removed, blocks_touched) = self.backend.removed();
        let gauges = [
            ("records_removed", records_removed),
            ("bytes_removed", bytes_removed),
            ("blocks_touched", blocks_touched),
            ("storage_used_bytes", usage.used),
            ("storage_capacity_bytes", usage.capacity),
            ("storage_records", usage.records),
            ("slots", self.slots.capacity() as u64),
            ("slots_free", self.slots.available() as u64),
            ("slot_bytes", self.layout.record_len() as u64),
            ("loads_queued", self.reads.lock().queued() as u64),
            ("blocks_in_flight", self.assemblies.lock().len() as u64),
            (
                "workers_stuck",
                (self.backend.stuck() + self.copies.stuck()) as u64,
            ),
            ("refused_now", self.refused.lock().len() as u64),
            (
                "healthy",
                u64::from(self.ready.load(Ordering::Acquire) && self.breaker.is_closed()),
            ),
        ];
        if let Some(map) = json.as_object_mut() {
            map.extend(gauges.map(|(name, value)| (name.to_owned(), value.into())));
        }
        json
    }

    /// Messages for the log since the last call.
    pub fn events(&self) -> Vec<Event> {
        self.events.drain()
    }

    /// The engine's clock, for waiting on its tasks.
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// The sizes the engine was opened with.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of one record on the medium.
    pub fn record_len(&self) -> usize {
        self.layout.record_len()
    }

    fn usable(&self) -> Result<()> {
        if self.pid != std::process::id() {
            return Err(Error::new(
                ErrorKind::Forked,
                "this store was opened before a fork; open another in the child",
            ));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed"));
        }
        Ok(())
    }

    fn check_rows(&self, rows: &[Row]) -> Result<()> {
        self.usable()?;
        if rows.len() > limits::MAX_IDS_PER_CALL {
            return Err(Error::invalid("too many rows in one call").with("rows", rows.len()));
        }
        if self.slots.capacity() < 4 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this store was opened for lookups only (device_id -1)",
            ));
        }
        let (shards, pieces) = (self.geometry.shards(), self.geometry.tensors_per_shard());
        for (number, row) in rows.iter().enumerate() {
            if row.shard >= shards {
                return Err(Error::invalid("shard index out of range")
                    .with("row", number)
                    .with("shard", row.shard)
                    .with("shards", shards));
            }
            if row.spans.len() != pieces {
                return Err(Error::invalid("a row must name every tensor of its shard")
                    .with("row", number)
                    .with("given", row.spans.len())
                    .with("expected", pieces));
            }
        }
        Ok(())
    }

    /// The layers of a shard with the device pieces of each.
    fn layers_of<'a>(
        &self,
        shard: u32,
        spans: &'a [DeviceSpan],
    ) -> impl Iterator<Item = (u32, &'a [DeviceSpan])> {
        let first = shard * self.geometry.layers_per_shard();
        (first..).zip(spans.chunks_exact(self.geometry.tensors().len()))
    }

    fn shard_len(&self) -> u64 {
        self.geometry.layer_len() * u64::from(self.geometry.layers_per_shard())
    }

    fn with_stream<T>(&self, run: impl FnOnce(&mut dyn Stream) -> Result<T>) -> Result<T> {
        let pooled = self.streams.lock().pop();
        let mut stream = match pooled {
            Some(stream) => stream,
            None => self.device.make_stream()?,
        };
        let result = run(&mut *stream)?; // a stream that failed is not used again
        self.streams.lock().push(stream);
        Ok(result)
    }

    fn verify(&self, id: BlockId, read: &ReadDone) -> std::result::Result<(), MissReason> {
        let expect = Expect {
            id,
            namespace: *self.identity.digest(),
            part: self.part,
            layout: &self.layout,
        };
        if read.stored_len > self.layout.record_len() as u64 {
            return Err(MissReason::WrongLength);
        }
        verify(&read.slot.as_slice()[..read.read], &expect).map(|_| ())
    }

    /// Whether work may go to the backend now. An open breaker past its cool-down lets one through; a backend that
    /// was never ready is looked at again, in the background.
    fn admit(self: &Arc<Self>, now: Mono) -> Result<()> {
        self.usable()?;
        let unhealthy = || {
            Err(Error::new(
                ErrorKind::Unhealthy,
                "the storage does not answer; treated as empty for now",
            ))
        };
        if !self.breaker.allows(now) {
            return unhealthy();
        }
        if !self.ready.load(Ordering::Acquire) {
            let core = Arc::clone(self);
            let deadline = now.after(self.deadlines.probe.saturating_mul(2));
            let probe = move || core.probe(core.clock.now().after(core.deadlines.probe));
            self.copies.submit(LANE_LOOKUP, deadline, probe, |_| {})?;
            return unhealthy();
        }
        Ok(())
    }

    fn probe(&self, deadline: Mono) {
        match self.backend.probe(deadline) {
            Ok(()) => {
                self.ready.store(true, Ordering::Release);
                self.healthy();
            }
            Err(error) => {
                self.change(self.breaker.trip(self.clock.now()), Some(&error));
            }
        }
    }

    /// The backend answered.
    fn healthy(&self) {
        self.change(self.breaker.success(), None);
    }

    /// An operation failed; opens the breaker when the medium is to blame.
    fn observe(&self, error: &Error) {
        self.change(self.breaker.failure(error, self.clock.now()), Some(error));
    }

    fn change(&self, change: Option<Change>, error: Option<&Error>) {
        match change {
            Some(Change::Opened) => {
                Stats::add(&self.stats.breaker_opened, 1);
                let why = error.map(ToString::to_string).unwrap_or_default();
                let name = self.backend.name();
                self.events.push(
                    Level::Warning,
                    format!("{name} is switched off for now, every lookup misses: {why}"),
                );
            }
            Some(Change::Recovered) => {
                self.events
                    .push(Level::Info, format!("{} answers again", self.backend.name()));
            }
            None => {}
        }
    }

    fn refuse(&self, id: BlockId, reason: MissReason) -> Error {
        self.stats.misses.add(reason, 1);
        let kind = match reason {
            MissReason::ForeignId
            | MissReason::ForeignIdentity
            | MissReason::ForeignPart
            | MissReason::ForeignShape
            | MissReason::NewerVersion => ErrorKind::Foreign,
            _ => ErrorKind::Corrupt,
        };
        self.refused.lock().insert(id, reason);
        Stats::add(&self.stats.records_refused, 1);
        self.events.push(
            Level::Warning,
            format!(
                "record {id} was refused ({}) and will be recomputed",
                reason.name()
            ),
        );
        Error::new(kind, "the stored record is not what it should be").with("reason", reason.name())
    }

    /// Whether a dump of this id replaces what is there: it was refused, and is not of a newer version.
    fn replaces(&self, id: BlockId) -> bool {
        self.refused
            .lock()
            .get(&id)
            .is_some_and(|&reason| reason != MissReason::NewerVersion)
    }

    /// Whether this process refused the record and no dump replaced it yet.
    fn is_refused(&self, id: BlockId) -> bool {
        let refused = self.refused.lock();
        !refused.is_empty() && refused.contains_key(&id)
    }

    fn forgive(&self, id: BlockId) -> bool {
        self.refused.lock().remove(&id).is_some()
    }
}
