//! The segment layout: many records in one file, which gets its name when it is sealed and never
//! changes after that.
//!
//! A writer appends records to a private file; after a while, or when it is large enough, the file
//! is *sealed*: an index of its records becomes its footer, it is closed and renamed. Only then are
//! its records published, all at once, so that creating, closing and renaming cost what they cost
//! once per segment and not once per block. Lookups are answered from memory. The parts:
//!
//! * [`format`]: the bytes; [`index`]: where every record lies;
//! * [`writer`]: the way of a record into a segment; [`open`]: one segment being written;
//!   [`sealing`]: how it ends;
//! * [`cache`]: the records that are known, [`reader`]: reading them, [`unread`]: footers of new
//!   segments; all of these serve any medium ([`crate::blobs`]), [`files`] is the one below a root;
//! * [`timer`]: the background threads;
//! * [`discovery`]: the segments of other writers; [`recheck`]: whether footers are still there;
//!   [`recovery`]: private files of dead writers;
//! * [`reclaim`]: small and sparse segments become one, records in use outlive their segment.
//!
//! Root, space and everything else that is not about records are those of the file layout.

pub(crate) mod cache;
mod discovery;
mod files;
pub(crate) mod footer;
pub(crate) mod format;
pub(crate) mod index;
mod open;
pub(crate) mod reader;
mod recheck;
mod reclaim;
mod recovery;
mod sealing;
mod timer;
pub(crate) mod unread;
pub(crate) mod writer;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, Result, in_units};
use ucm_device::Slot;
use ucm_infra::{Lane, MonotonicTime, WorkerPool};
use ucm_io::IoJob;

use crate::backend::{
    Backend, BlockRead, Features, Flush, Listed, MediumStats, OnSealed, Outcome, Presence,
    WriteOptions, Written,
};
use crate::quota::Capacity;
use crate::shared::Shared;
use cache::SegmentCache;
use discovery::{FOUND_BY, SegmentDiscovery};
use files::SegmentFiles;
use reclaim::Reclaim;
use recovery::{RecoveredAt, Recovery};
use writer::{SegmentWriter, WriterConfig, check_limit};

pub use reclaim::Merging;

/// Lanes of the background threads: when to seal, what others wrote, what can be reclaimed.
const LANE_TIMER: usize = 0;
const LANE_DISCOVERY: usize = 1;
const LANE_MERGER: usize = 2;
/// Bytes of dead writers' segments that the process that opens a root waits for.
const AT_OPENING: u64 = 32 << 20;
/// Largest `segment_size` that is accepted, bytes.
const LONGEST: u64 = 1 << 30;

/// Configuration of segments, beside that of every POSIX root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentConfig {
    /// Length at which a segment is sealed, bytes, at most 1 GiB. Never more than a 64th of the
    /// root's limit, but at least one record.
    pub size: u64,
    /// How long after its oldest record was written a segment is sealed. Zero: as soon as nothing
    /// is being written.
    pub age: Duration,
    /// Most records in the index in memory; further ones are misses.
    pub most_blocks: usize,
    /// How segments are reclaimed.
    pub merging: Merging,
}

impl Default for SegmentConfig {
    fn default() -> Self {
        Self {
            size: 128 << 20,
            age: Duration::from_secs(1),
            most_blocks: 1 << 24,
            merging: Merging::default(),
        }
    }
}

/// Many records per file.
pub struct SegmentBackend {
    segments: Arc<Segments>,
}

/// Shared by the handle, the callbacks under way and the background threads.
pub(crate) struct Segments {
    shared: Arc<Shared>,
    config: SegmentConfig,
    cache: Arc<SegmentCache<SegmentFiles>>,
    writer: Arc<SegmentWriter<SegmentFiles>>,
    discovery: Arc<SegmentDiscovery>,
    recovered_at: RecoveredAt,
    reclaim: Reclaim,
    pool: Arc<WorkerPool>,
    started: Once,
}

impl SegmentBackend {
    /// Over this root; nothing is touched before [`Backend::open`]. `Config` if the limit is too
    /// small, or a segment too long.
    pub(crate) fn over(shared: Arc<Shared>, segments: SegmentConfig) -> Result<Self> {
        if segments.size > LONGEST {
            let text = "a segment is at most 1 GiB long; lower segment_size";
            return Err(Error::new(ErrorKind::Config, text).with("segment_size", segments.size));
        }
        let lane = |name| Lane {
            name,
            capacity: 1,
            max_running: 1,
        };
        let pool = WorkerPool::builder("ucm-segment")
            .size(3)
            .lanes(&[lane("timer"), lane("finder"), lane("merger")])
            .clock(Arc::clone(&shared.clock))
            .build()?;
        if let Some(Capacity::Bytes(limit)) = shared.config.capacity
            && !shared.config.scope.lookup_only
        {
            let root = shared.layout.root().display().to_string();
            check_limit(limit.get(), &shared.lengths, ("root", &root))?;
        }
        let (lengths, namespace) = (&shared.lengths, *shared.config.scope.identity.digest());
        let files = Arc::new(SegmentFiles {
            shared: Arc::clone(&shared),
        });
        let (most, clock) = (segments.most_blocks, &shared.clock);
        let cache = SegmentCache::new(files, Arc::clone(lengths), namespace, most, clock);
        let how = WriterConfig {
            size: segments.size,
            age: segments.age,
            found_within: FOUND_BY,
            process: shared.config.process.clone(),
            on_sealed: Arc::clone(&shared.on_sealed),
        };
        let writer = SegmentWriter::new(&cache, how);
        let discovery = Arc::new(SegmentDiscovery::new(&cache));
        let segments = Arc::new(Segments {
            shared,
            config: segments,
            writer,
            recovered_at: RecoveredAt::default(),
            reclaim: Reclaim::new(&cache, &discovery, segments.merging),
            discovery,
            cache,
            pool,
            started: Once::new(),
        });
        Ok(Self { segments })
    }
}

impl Segments {
    /// A text for the log: what is used, and why.
    fn words(&self) -> String {
        let (size, age) = (in_units(self.room()), self.config.age.as_secs_f64());
        let (index, words) = (&self.cache.index, self.shared.words());
        let (known, blocks) = (index.segments(), index.blocks());
        let left_out = match index.left_out() {
            0 => String::new(),
            more => format!(", {more} more do not fit the index and are misses"),
        };
        let sealing = if self.shared.config.scope.lookup_only {
            ", segments are looked up".to_owned() // the limit, and so their size, is a writer's
        } else {
            format!(", segments of {size} sealed after {age} s")
        };
        format!("{words}{sealing}; {blocks} blocks in {known} of them found{left_out}")
    }

    /// Takes over what dead writers left: see [`Recovery::run`].
    fn recover(&self, most: u64, until: MonotonicTime) {
        let recovery = Recovery {
            cache: &self.cache,
            discovery: &self.discovery,
            uses: &self.reclaim.uses,
            living: self.writer.living().iter().map(|open| open.name).collect(),
            until,
        };
        recovery.run(&self.recovered_at, most);
    }

    /// Length at which segments are sealed now, bytes.
    fn room(&self) -> u64 {
        self.writer.room()
    }
}

impl Backend for SegmentBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        self.segments.shared.open_root(deadline)?;
        let space = &self.segments.shared.space;
        space.expect_writes_of(self.segments.room());
        self.segments.discovery.find_all(deadline);
        self.segments.recover(AT_OPENING, deadline);
        self.segments.start();
        Ok(self.segments.words())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "posix",
            answers_at_once: true,
            reads_parts: true,
            writes_cached: self.segments.shared.writes_cached(),
            own_touches: true,
            index: Some(&*self.segments.cache),
            local: Some(&*self.segments.cache),
            ..Features::default()
        }
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        Ok(self.segments.cache.lookup(ids, stop_at_missing))
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        self.segments.cache.read(io, run)
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        let record = &slot.as_slice()[..options.len];
        self.segments.writer.write(io, id, record, &options)
    }

    fn on_sealed(&self, hook: OnSealed) {
        let _ = self.segments.shared.on_sealed.set(hook); // it is set once
    }

    /// Only who merges segments knows whether a use is one of the whole segment.
    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        if !self.segments.shared.config.scope.lookup_only {
            let segments = &self.segments;
            segments.reclaim.uses.touch(&segments.cache, ids, deadline);
        }
    }

    /// Forgets records in this process. Their bytes stay until their segment goes, or this process
    /// gathers it because most of it was removed: others may be using the rest.
    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        Ok(self.segments.cache.delete(ids))
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        Ok(self.segments.cache.list())
    }

    fn flush(&self, how: Flush) {
        self.segments.writer.flush(how);
    }

    fn stats(&self) -> MediumStats {
        let (reclaim, writer) = (&self.segments.reclaim, &self.segments.writer);
        let reinserted = reclaim.reinserted.load(Ordering::Relaxed);
        MediumStats {
            more: vec![
                ("segments_open", writer.taking_records() as u64),
                ("segments_merged", reclaim.gathered.load(Ordering::Relaxed)),
                ("records_carried", reinserted),
                ("records_not_indexed", self.segments.cache.index.left_out()),
                ("storage_short", u64::from(reclaim.uses.is_room_short())),
            ],
            ..self.segments.shared.stats()
        }
    }

    fn close(&self, drain: Duration) {
        let segments = &self.segments;
        let clock = &segments.shared.clock;
        let until = clock.now().after(drain);
        let left = || until.since(clock.now());
        segments.cache.looks.end();
        segments.reclaim.notify.notify();
        segments.writer.flush(Flush::Last);
        segments.writer.await_sealed(clock.now().after(left() / 2));
        segments.writer.changed.notify();
        // A reclaiming that is not over holds room, and who holds room cannot say to the others
        // that it is not there any more: they would wait for its silence.
        segments.pool.shutdown(left() / 2);
        segments.shared.space.shutdown(left() / 2);
        segments.shared.io.shutdown(left());
    }
}

impl Drop for SegmentBackend {
    fn drop(&mut self) {
        self.segments.cache.looks.end();
        self.segments.reclaim.notify.notify();
    }
}
