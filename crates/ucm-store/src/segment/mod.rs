//! The segment layout: many records in one file, which gets its name when it is sealed and never changes after that.
//!
//! A writer appends records to a private file; after a while, or when it is large enough, the file is *sealed*: an index
//! of its records becomes its foot, it is closed and renamed. Only then are its records published, all at once, so that
//! creating, closing and renaming cost what they cost once per segment and not once per block. Lookups are answered
//! from memory. The parts:
//!
//! * [`format`]: the bytes; [`index`]: where every record lies; [`early`]: what only this process can read yet;
//! * [`open`]: one segment being written; [`writer`]: which one; [`sealing`]: how it ends; [`timer`]: when;
//! * [`finder`]: the segments of others; [`reader`]: reading records; [`rescue`]: what dead writers left;
//!   [`evidence`]: what is damaged.
//!
//! Root, space and everything else that is not about records are those of the file layout.

mod early;
mod evidence;
mod finder;
mod format;
mod index;
mod open;
mod reader;
mod rescue;
mod sealing;
mod timer;
mod writer;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{Bell, Clock, Lane, Mono, WorkerPool};
use ucm_io::{IoDone, IoEngine, IoOp};

use crate::backend::{
    Backend, Done, Early, Listed, Presence, Quarantined, ReadDone, Usage, WriteOptions, Written,
};
use crate::engine::LANE_SPACE;
use crate::layout::SEGMENTS;
use crate::posix::{PosixConfig, Shared};
use crate::space::Capacity;
use crate::writing::Write;
use early::EarlyNews;
use finder::Finder;
use index::{Hit, Index};
use writer::Writer;

/// Lanes of the background threads: when to seal, and what others wrote.
const LANE_TIMER: usize = 0;
const LANE_FINDER: usize = 1;
/// Bytes of dead writers' segments that whoever opens a root waits for.
const AT_OPENING: u64 = 32 << 20;
/// Longest a segment may be told to be, bytes.
const LONGEST: u64 = 1 << 30;

/// What the segment layout goes by beside what every POSIX root does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentConfig {
    /// Length at which a segment is sealed, bytes, at most 1 GiB. Never more than a 64th of the root's limit, but at least
    /// one record.
    pub size: u64,
    /// How long after its oldest record was written a segment is sealed. Zero: as soon as nothing is being written.
    pub age: Duration,
    /// Most records in the index in memory; further ones are misses.
    pub most_blocks: usize,
}

impl Default for SegmentConfig {
    fn default() -> Self {
        Self {
            size: 128 << 20,
            age: Duration::from_secs(1),
            most_blocks: 1 << 24,
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
    early: EarlyNews,
    writer: Writer,
    finder: Finder,
    pool: Arc<WorkerPool>,
    /// Rung when a segment may have to be sealed, and when others' segments should be looked for.
    seal_bell: Bell,
    find_bell: Bell,
    started: AtomicBool,
    closing: AtomicBool,
}

impl SegmentBackend {
    /// A backend over an I/O engine; nothing is touched before [`Backend::probe`]. `Config` if the limit is too small.
    pub fn new(
        config: PosixConfig,
        segments: SegmentConfig,
        io: Arc<dyn IoEngine>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
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
            .size(2)
            .lanes(&[lane("timer"), lane("finder")])
            .clock(Arc::clone(&clock))
            .build()?;
        let limit = match config.capacity {
            Some(Capacity::Bytes(bytes)) if !config.lookup_only => Some(bytes.get()),
            _ => None,
        };
        let shared = Arc::new(Shared::new(config, SEGMENTS, io, clock)?);
        let segments = Arc::new(Segments {
            shared,
            config: segments,
            index: Index::new(segments.most_blocks),
            early: EarlyNews::default(),
            writer: Writer::default(),
            finder: Finder::default(),
            pool,
            seal_bell: Bell::new(),
            find_bell: Bell::new(),
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
        let text = "storage_capacity must hold at least 8 segments of one block; raise it or make room";
        Err(Error::new(ErrorKind::Config, text)
            .with("storage_capacity", limit)
            .with("at_least", least)
            .with("root", self.shared.layout.root().display()))
    }

    /// Whether a record of this place is one of ours whole, by its length.
    fn presence(&self, hit: Option<Hit>) -> Presence {
        match hit {
            Some(hit) if hit.len == self.shared.config.record.record_len() as u64 => Ok(()),
            Some(_) => Err(MissReason::WrongLength),
            None => Err(MissReason::Absent),
        }
    }

    fn now_ns(&self) -> i64 {
        i64::try_from(self.shared.clock.wall_ns()).unwrap_or(i64::MAX)
    }
}

impl Backend for SegmentBackend {
    fn name(&self) -> &'static str {
        "posix"
    }

    fn describe(&self) -> String {
        let segments = &self.segments;
        let (size, age) = (segments.room(), segments.config.age.as_secs_f64());
        let (known, blocks) = (segments.index.segments(), segments.index.blocks());
        let words = segments.shared.words();
        let left_out = match segments.index.left_out() {
            0 => String::new(),
            more => format!(", {more} more do not fit the index and are misses"),
        };
        format!(
            "{words}, segments of {size} bytes sealed after {age} s; {blocks} blocks in {known} of them found{left_out}"
        )
    }

    fn probe(&self, deadline: Mono) -> Result<()> {
        self.segments.shared.open_root(deadline)?;
        self.segments.find_all(deadline);
        self.segments.rescue(AT_OPENING, deadline);
        self.segments.start();
        Ok(())
    }

    fn lookup(&self, ids: Vec<BlockId>, stop_at_missing: bool, _deadline: Mono, done: Done<Vec<Presence>>) {
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            let there = self.segments.presence(self.segments.index.find(id));
            found.push(there);
            if stop_at_missing && there == Err(MissReason::Absent) {
                break;
            }
        }
        done(Ok(found));
    }

    fn read(&self, id: BlockId, slot: Slot, again: bool, deadline: Mono, done: Done<ReadDone>) {
        self.segments.read(id, slot, again, deadline, done);
    }

    fn write(&self, id: BlockId, slot: Slot, options: WriteOptions, deadline: Mono, done: Done<Written>) {
        let write = Write {
            id,
            slot,
            options,
            deadline,
            done,
        };
        let there = self.segments.index.find(id);
        if !options.replace && there.is_some_and(|hit| !hit.private) && self.segments.presence(there).is_ok()
        {
            return write.end(Ok(Written::Present));
        }
        self.segments.append(write);
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: Mono) {
        self.segments.touch(ids, deadline);
    }

    /// Forgets records in this process. Their bytes stay until their segment goes: others may be using the rest of it.
    fn delete(&self, ids: Vec<BlockId>, _deadline: Mono, done: Done<usize>) {
        let mut removed = 0;
        for id in ids {
            let mut any = false;
            while let Some(hit) = self.segments.index.find(id) {
                self.segments.index.drop_copy(id, &hit);
                any = true;
            }
            removed += usize::from(any);
        }
        done(Ok(removed));
    }

    fn list(&self, _deadline: Mono, done: Done<Vec<Listed>>) {
        let all = self.segments.index.list().into_iter();
        done(Ok(all
            .map(|(id, len, used_ns)| Listed { id, len, used_ns })
            .collect()));
    }

    fn early(&self) -> Early {
        self.segments.early.take()
    }

    fn flush(&self, last: bool) {
        self.segments.flush(last);
    }

    fn quarantine(&self, id: BlockId, done: Done<Quarantined>) {
        self.segments.keep_evidence(id, done);
    }

    fn usage(&self) -> Usage {
        self.segments.shared.space.usage()
    }

    fn removed(&self) -> (u64, u64, u64) {
        let (records, bytes) = self.segments.shared.space.removed();
        (records, bytes, self.segments.shared.recency.touched())
    }

    fn stuck(&self) -> usize {
        self.segments.shared.io.stuck()
    }

    fn shutdown(&self, drain: Duration) {
        let segments = &self.segments;
        let clock = &segments.shared.clock;
        let until = clock.now().after(drain);
        let left = || until.since(clock.now());
        segments.closing.store(true, Ordering::Release);
        segments.flush(true);
        segments.await_sealed(clock.now().after(left() / 2));
        segments.seal_bell.ring();
        segments.find_bell.ring();
        // Then the space: it says to the others that it is not there any more.
        segments.shared.space.shutdown(left() / 2);
        segments.pool.shutdown(left() / 2);
        segments.shared.io.shutdown(left());
    }
}

impl Segments {
    /// Tells the file system, of every segment of which these records are and that was not told this minute, that it was
    /// used.
    fn touch(self: &Arc<Self>, ids: &[(BlockId, u32)], deadline: Mono) {
        let mut first: Vec<(Hit, u32, u64)> = Vec::new();
        for &(id, ordinal) in ids {
            let Some(hit) = self.index.find(id).filter(|hit| !hit.private) else {
                continue;
            };
            match first
                .iter_mut()
                .find(|(known, _, _)| known.segment == hit.segment)
            {
                Some((_, least, blocks)) => (*least, *blocks) = ((*least).min(ordinal), *blocks + 1),
                None => first.push((hit, ordinal, 1)),
            }
        }
        let asked: Vec<_> = first
            .iter()
            .map(|(hit, ordinal, _)| (hit.name.as_id(), *ordinal))
            .collect();
        let due = self.shared.recency.due(&asked, self.shared.clock.wall_ns());
        let (mut files, mut blocks) = (Vec::new(), Vec::new());
        for (id, time) in due {
            if let Some((hit, _, count)) = first.iter().find(|(hit, _, _)| hit.name.as_id() == id) {
                self.index.used(hit.segment, time);
                files.push((self.shared.layout.segment(hit.name), time));
                blocks.push(*count);
            }
        }
        if files.is_empty() {
            return;
        }
        let segments = Arc::clone(self);
        let counted = move |result| {
            if let Ok(IoDone::Touched(files)) = result {
                let there = files
                    .iter()
                    .zip(blocks)
                    .filter(|(file, _)| matches!(file, Ok(true)));
                segments
                    .shared
                    .recency
                    .count(there.map(|(_, blocks)| blocks).sum());
            }
        };
        let op = IoOp::Touch { files };
        self.shared.io.submit(LANE_SPACE, deadline, op, Box::new(counted));
    }
}

impl Drop for SegmentBackend {
    fn drop(&mut self) {
        self.segments.closing.store(true, Ordering::Release);
        self.segments.seal_bell.ring();
        self.segments.find_bell.ring();
    }
}
