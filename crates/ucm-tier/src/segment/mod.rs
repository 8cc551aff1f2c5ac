//! The segment layout: many records in one file, which gets its name when it is sealed and never
//! changes after that.
//!
//! A writer appends records to a private file; after a while, or when it is large enough, the file
//! is *sealed*: an index of its records becomes its footer, it is closed and renamed. Only then are
//! its records published, all at once, so that creating, closing and renaming cost what they cost
//! once per segment and not once per block. Lookups are answered from memory. The parts:
//!
//! * [`format`]: the bytes; [`index`]: where every record lies; [`locally_visible`]: what only this
//!   process can read yet;
//! * [`open`]: one segment being written; [`writer`]: which one; [`append`]: one record into it;
//!   [`sealing`]: how it ends;
//!   [`timer`]: when;
//! * [`discovery`]: the segments of others; [`recheck`]: whether their footers, and ours, are still
//!   there for the next one; [`runs`] and [`reader`]: reading records; [`recovery`]: what dead
//!   writers left;
//! * [`reclaim`]: small and sparse segments become one, records in use outlive their segment.
//!
//! Root, space and everything else that is not about records are those of the file layout.

mod append;
mod discovery;
pub(crate) mod footer;
pub(crate) mod format;
pub(crate) mod index;
pub(crate) mod locally_visible;
mod open;
mod reader;
mod recheck;
mod reclaim;
mod recovery;
pub(crate) mod runs;
mod sealing;
mod timer;
mod writer;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, Lane, MonotonicTime, Notify, WorkerPool};
use ucm_io::{IoJob, IoPool};
use ucm_quota::Capacity;

use crate::backend::{
    Backend, BlockRead, Done, Features, Flush, Indexed, Listed, Local, LocallyVisible, MediumStats,
    Outcome, Presence, WriteOptions, Written,
};
use crate::layout_kind::LayoutKind;
use crate::shared::{PosixConfig, Shared};
use crate::writing::Write;
use discovery::SegmentDiscovery;
use index::{Hit, Index};
use locally_visible::LocalChanges;
use reclaim::Reclaim;
use writer::{Coming, Writer};

pub use reclaim::Merging;

/// Lanes of the background threads: when to seal, what others wrote, what can be reclaimed.
const LANE_TIMER: usize = 0;
const LANE_DISCOVERY: usize = 1;
const LANE_MERGER: usize = 2;
/// Bytes of dead writers' segments that the process that opens a root waits for.
const AT_OPENING: u64 = 32 << 20;
/// Longest a segment may be told to be, bytes.
const LONGEST: u64 = 1 << 30;

/// What the segment layout goes by beside what every POSIX root does.
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
    index: Index,
    locally_visible: LocalChanges,
    writer: Writer,
    discovery: SegmentDiscovery,
    reclaim: Reclaim,
    pool: Arc<WorkerPool>,
    /// Rung when a segment may have to be sealed.
    seal_notify: Notify,
    started: AtomicBool,
    closing: AtomicBool,
}

impl SegmentBackend {
    /// A backend over an I/O engine; nothing is touched before [`Backend::open`]. `Config` if the
    /// limit is too small.
    pub fn new(
        config: PosixConfig,
        segments: SegmentConfig,
        io: Arc<IoPool>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        Self::over(
            Arc::new(Shared::new(config, Some(LayoutKind::Segment), io, clock)?),
            segments,
        )
    }

    /// The same over a root that is known already.
    pub(crate) fn over(shared: Arc<Shared>, segments: SegmentConfig) -> Result<Self> {
        if segments.size > LONGEST {
            return Err(Error::new(
                ErrorKind::Config,
                "a segment is at most 1 GiB long; lower segment_size",
            )
            .with("segment_size", segments.size));
        }
        let lane = |name| Lane {
            name,
            capacity: 1,
            max_running: 1,
        };
        let pool = WorkerPool::builder("ucm-segment")
            .on_demand()
            .size(3)
            .lanes(&[lane("timer"), lane("finder"), lane("merger")])
            .clock(Arc::clone(&shared.clock))
            .build()?;
        let limit = match shared.config.capacity {
            Some(Capacity::Bytes(bytes)) if !shared.config.lookup_only => Some(bytes.get()),
            _ => None,
        };
        let segments = Arc::new(Segments {
            shared,
            config: segments,
            index: Index::new(segments.most_blocks),
            locally_visible: LocalChanges::default(),
            writer: Writer::default(),
            discovery: SegmentDiscovery::default(),
            reclaim: Reclaim::default(),
            pool,
            seal_notify: Notify::new(),
            started: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        if let Some(limit) = limit {
            segments.check_limit(limit)?;
        }
        Ok(Self { segments })
    }
}

impl Segments {
    /// Whether enough segments of one record each fit below the limit.
    fn check_limit(&self, limit: u64) -> Result<()> {
        let least = self.least_room(self.shared.config.record.record_len() as u64) * 8;
        if limit >= least {
            return Ok(());
        }
        let text =
            "storage_capacity must hold at least 8 segments of one block; raise it or make room";
        Err(Error::new(ErrorKind::Config, text)
            .with("storage_capacity", limit)
            .with("at_least", least)
            .with("root", self.shared.layout.root().display()))
    }

    /// What is used and why, for the log.
    fn words(&self) -> String {
        let (size, age) = (self.room(), self.config.age.as_secs_f64());
        let (known, blocks, words) = (
            self.index.segments(),
            self.index.blocks(),
            self.shared.words(),
        );
        let left_out = match self.index.left_out() {
            0 => String::new(),
            more => format!(", {more} more do not fit the index and are misses"),
        };
        format!(
            "{words}, segments of {size} bytes sealed after {age} s; {blocks} blocks in {known} of \
             them found{left_out}"
        )
    }

    /// Whether a record of this place is one of ours whole and with KV, by its length.
    fn presence(&self, hit: Option<Hit>) -> Presence {
        hit.map_or(Err(MissReason::Absent), |hit| {
            self.shared.lengths.presence(hit.len)
        })
    }

    /// Whether a record of so many bytes can be one of ours whole, with KV or without.
    fn is_ours(&self, len: u64) -> bool {
        self.shared.lengths.is_ours(len)
    }

    fn now_ns(&self) -> i64 {
        i64::try_from(self.shared.clock.wall_ns()).unwrap_or(i64::MAX)
    }
}

impl Backend for SegmentBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        self.segments.shared.open_root(deadline)?;
        self.segments.find_all(deadline);
        self.segments.recover(AT_OPENING, deadline);
        self.segments.start();
        Ok(self.segments.words())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "posix",
            answers_at_once: true,
            waits_by_itself: false,
            reads_parts: true,
            writes_cached: self.segments.shared.writes_cached(),
            own_touches: true,
            memory: None,
            index: Some(self),
            local: Some(self),
        }
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        let mut found = Vec::with_capacity(ids.len());
        for &id in ids {
            let there = self.segments.presence(self.segments.index.find(id));
            found.push(there);
            if stop_at_missing && there == Err(MissReason::Absent) {
                break;
            }
        }
        Ok(found)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        self.segments.read(io, run)
    }

    fn write(
        &self,
        io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        done: Done<Written>,
    ) {
        let write = Write {
            id,
            slot,
            options,
            deadline: io.deadline(),
            done,
        };
        if !options.replace && self.is_published(id) {
            return write.end(Ok(Written::Present));
        }
        if !self.segments.index.has_room(id) {
            let full =
                "the index of segments is full: this block could be written and never be found";
            return write.end(Err(Error::new(ErrorKind::NoSpace, full)));
        }
        self.segments.append(io, Coming::new(write));
    }

    /// Who only looks up tells nothing: whether a use is one of the whole segment is known where
    /// segments are merged.
    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        if !self.segments.shared.config.lookup_only {
            self.segments.touch(ids, deadline);
        }
    }

    /// Forgets records in this process. Their bytes stay until their segment goes, or until this
    /// process gathers it, which it does where most of it was removed: others may be using the
    /// rest.
    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let mut removed = 0;
        for &id in ids {
            removed += usize::from(self.segments.index.remove(id));
            self.segments.locally_visible.lost(id);
        }
        Ok(removed)
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        let all = self.segments.index.list().into_iter();
        Ok(all
            .map(|(id, len, used_ns)| Listed { id, len, used_ns })
            .collect())
    }

    fn flush(&self, how: Flush) {
        match how {
            Flush::Soon => self.segments.flush_soon(),
            Flush::Now => self.segments.flush(false),
            Flush::Last => self.segments.flush(true),
        }
    }

    fn stats(&self) -> MediumStats {
        let reclaim = &self.segments.reclaim;
        MediumStats {
            more: vec![
                ("segments_open", self.segments.taking_records() as u64),
                ("segments_merged", reclaim.gathered.load(Ordering::Relaxed)),
                (
                    "records_carried",
                    reclaim.reinserted.load(Ordering::Relaxed),
                ),
                ("records_not_indexed", self.segments.index.left_out()),
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
        segments.closing.store(true, Ordering::Release);
        segments.reclaim.notify.notify();
        segments.discovery.looks.end();
        segments.flush(true);
        segments.await_sealed(clock.now().after(left() / 2));
        segments.seal_notify.notify();
        segments.discovery.notify.notify();
        // A reclaiming that is not over holds room, and who holds room cannot say to the others
        // that it is not there any more: they would wait for its silence.
        segments.pool.shutdown(left() / 2);
        segments.shared.space.shutdown(left() / 2);
        segments.shared.io.shutdown(left());
    }
}

impl Indexed for SegmentBackend {
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        self.segments.runs(reads, threads)
    }

    fn look(&self, deadline: MonotonicTime, done: Done<()>) {
        self.segments.after_look(deadline, done);
    }

    fn is_published(&self, id: BlockId) -> bool {
        let there = self.segments.index.find(id).filter(|hit| !hit.private);
        there.is_some_and(|hit| self.segments.is_ours(hit.len))
    }

    fn knows(&self, id: BlockId) -> bool {
        self.segments.index.find(id).is_some()
    }
}

impl Local for SegmentBackend {
    fn locally_visible(&self) -> LocallyVisible {
        self.segments
            .locally_visible
            .take(self.segments.shared.clock.now())
    }
}

impl Drop for SegmentBackend {
    fn drop(&mut self) {
        self.segments.closing.store(true, Ordering::Release);
        self.segments.discovery.looks.end();
        self.segments.seal_notify.notify();
        self.segments.discovery.notify.notify();
        self.segments.reclaim.notify.notify();
    }
}
