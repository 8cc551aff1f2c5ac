//! Counts what lies below a root, removes leftovers, and evicts the oldest records.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, WorkerPool};
use ucm_io::{FileMeta, IoJob};

use super::documents::Name;
use super::documents_io::{Entries, SpaceFiles};
use super::remove::{Found, Kind, Need, high, low, plan};
use super::state::SpaceState;
use crate::layout::{
    BLOCKS, QUARANTINE, SEGMENTS, SegmentName, is_marker_private, is_namespace, is_private,
    is_quarantined, record_name, shard_name,
};

/// The second lane of the background threads, for everything that may take long.
pub(super) const LANE_WORK: usize = 1;
/// Age at which a private file counts as left behind by a process that ended.
const STALE: Duration = Duration::from_secs(3600);
/// Files removed per operation.
const BATCH: usize = 64;

/// Why a count is made.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Why {
    /// The collector's term; none: the medium is so full that no writer can become collector.
    pub(super) term: Option<u64>,
    /// A writer cannot have what it wants.
    pub(super) short: bool,
    /// The medium was full for a writer.
    pub(super) full: bool,
    /// Too little of the medium is free.
    pub(super) floor: bool,
}

impl Why {
    /// The medium was full.
    pub(super) fn full(term: Option<u64>) -> Self {
        Self {
            term,
            full: true,
            ..Self::default()
        }
    }
}

/// Counts what lies below the root and removes, in the background.
pub(super) struct Counter {
    state: Arc<SpaceState>,
    files: Arc<SpaceFiles>,
    worker: Weak<WorkerPool>,
    pub(super) running: AtomicBool,
    /// Counts begun and ended; odd while one lists.
    counts: AtomicU64,
    /// The result of the last count, until the agent takes it.
    pub(super) outcome: Mutex<Option<Result<Outcome>>>,
}

/// The result of a count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    /// Bytes that were removed.
    pub(super) freed: u64,
    /// It was less than had to be removed.
    pub(super) is_short: bool,
    /// Some of it was removed because too little of the medium was free.
    pub(super) floor: bool,
}

/// The contents of a root.
#[derive(Default)]
struct Everything {
    namespaces: Vec<PathBuf>,
    /// Records and segments.
    files: Vec<Found>,
    /// Bytes, with private files and what is left in quarantine.
    total: u64,
}

impl Counter {
    /// One that counts on threads of this pool.
    pub(super) fn new(state: &Arc<SpaceState>, worker: &Arc<WorkerPool>) -> Arc<Self> {
        Arc::new(Self {
            state: Arc::clone(state),
            files: Arc::clone(&state.files),
            worker: Arc::downgrade(worker),
            running: AtomicBool::default(),
            counts: AtomicU64::default(),
            outcome: Mutex::default(),
        })
    }

    pub(super) fn counts(&self) -> u64 {
        self.counts.load(Ordering::Acquire)
    }

    /// Counts and, if need be, removes, in the background; one at a time, and not before the result
    /// of the last one was taken, which says whether another makes sense. Its end wakes the quota
    /// agent. Whether it begins.
    pub(super) fn begin(self: &Arc<Self>, why: Why) -> bool {
        let Some(worker) = self.worker.upgrade() else {
            return false;
        };
        if self.running.swap(true, Ordering::AcqRel) {
            return false;
        }
        if self.outcome.lock().is_some() {
            self.running.store(false, Ordering::Release);
            return false;
        }
        let (counter, done) = (Arc::clone(self), Arc::clone(self));
        let work = move || counter.count_and_remove(why);
        let ended = move |result: Result<Result<Outcome>>| {
            *done.outcome.lock() = Some(result.and_then(|inner| inner));
            done.running.store(false, Ordering::Release);
            done.state.notify.notify();
        };
        let never = MonotonicTime::NEVER;
        let begun = worker.submit(LANE_WORK, never, work, ended).is_ok();
        if !begun {
            self.running.store(false, Ordering::Release);
        }
        begun
    }

    /// Whether a count for this reason still makes sense.
    fn goes_on(&self, why: Why) -> bool {
        let is_collector = why.term.is_none_or(|term| self.state.term() == term);
        is_collector && !self.files.closing.load(Ordering::Acquire)
    }

    fn count_and_remove(&self, why: Why) -> Result<Outcome> {
        let limit = self.files.tend(MonotonicTime::NEVER)?;
        self.state.writer_quota.lock().report.limit = limit;
        let before = {
            let mut table = self.state.grant_table.lock();
            table.limit = limit;
            self.state.enter_self(&mut table);
            self.counts.fetch_add(1, Ordering::AcqRel);
            table.begin_count()
        };
        let everything = self.count(why);
        let mut table = self.state.grant_table.lock();
        self.counts.fetch_add(1, Ordering::AcqRel);
        let everything = everything?;
        if !self.goes_on(why) {
            return Err(Error::new(ErrorKind::Closed, "another collector took over"));
        }
        let records = everything.files.iter().map(Found::records).sum();
        self.state.enter_self(&mut table); // what this process wrote while it was counted
        let forgotten = match why.term {
            Some(_) => table.end_count(&before, everything.total, records),
            None => Vec::new(),
        };
        self.state.show(&table);
        let (bound, used) = (table.bound().unwrap_or(everything.total), everything.total);
        drop(table);
        let notes: Vec<Name> = forgotten.into_iter().map(Name::Writer).collect();
        self.files.drop_documents(&notes, MonotonicTime::NEVER);

        let mut surplus = 0;
        if bound > high(limit) || why.short {
            surplus = bound.saturating_sub(low(limit));
        }
        if why.full {
            surplus = surplus.max(used / 16 + self.files.config.record_len);
        }
        let (free, floor) = self.files.free_and_floor(MonotonicTime::NEVER)?;
        let below = why.floor && free < floor;
        if below {
            surplus = surplus.max(floor - free + self.files.config.record_len);
        }
        let rules = &self.files.config.rules;
        let wall = i64::try_from(self.files.clock.wall_ns()).unwrap_or(i64::MAX);
        let long = |age: Duration| i64::try_from(age.as_nanos()).unwrap_or(i64::MAX);
        let need = Need {
            surplus,
            quota: rules.namespace_quota.map(|quota| quota.bytes(limit)),
            expired_before: rules.expire_after.map(|age| wall.saturating_sub(long(age))),
        };
        let going = plan(everything.files, everything.namespaces.len(), &need);
        let mut freed = 0;
        for batch in going.chunks(BATCH).take_while(|_| self.goes_on(why)) {
            freed += self.remove(batch, &everything.namespaces)?;
        }
        Ok(Outcome {
            freed,
            is_short: freed < surplus,
            floor: below,
        })
    }

    /// Removes records; the answer is how many bytes that freed. What another process removed
    /// before counts too, but not in the grant table: an older version may have moved it to
    /// quarantine.
    fn remove(&self, batch: &[Found], namespaces: &[PathBuf]) -> Result<u64> {
        let paths = batch.iter().map(|record| record.path(namespaces)).collect();
        let answers = self.files.remove(paths, MonotonicTime::NEVER)?;
        let (mut count, mut freed, mut gone) = (0, 0, 0);
        for (record, answer) in batch.iter().zip(answers) {
            match answer {
                Ok(true) => (count, freed) = (count + record.records(), freed + record.len),
                Ok(false) => gone += record.len,
                Err(_) => {}
            }
        }
        let mut table = self.state.grant_table.lock();
        table.removed(count, freed);
        self.state.show(&table);
        drop(table);
        let removed = &mut self.state.writer_quota.lock().removed;
        *removed = (removed.0 + count, removed.1 + freed);
        Ok(freed + gone)
    }

    /// Everything below the root that is ours. Files of ended processes, and damaged records that
    /// older versions kept, are removed on the way.
    fn count(&self, why: Why) -> Result<Everything> {
        let mut found = Everything::default();
        let oldest = self.dead_before(why)?;
        for (name, meta) in self.files.entries(self.files.config.root.clone())? {
            if !self.goes_on(why) {
                return Err(Error::new(ErrorKind::Closed, "the count was given up"));
            }
            let dir = self.files.config.root.join(&name);
            if is_marker_private(&name) && !meta.is_dir {
                self.sweep(vec![(dir, meta.mtime_ns)], oldest)?;
                continue;
            }
            if !meta.is_dir || !is_namespace(&name) {
                continue;
            }
            let namespace = found.namespaces.len() as u32;
            let (records, total) = (&mut found.files, &mut found.total);
            visit_records(&dir, &mut |dir| self.files.entries(dir), &mut |id, meta| {
                *total += meta.len;
                records.push(Found {
                    kind: Kind::Record,
                    id,
                    len: meta.len,
                    used_ns: meta.mtime_ns,
                    namespace,
                });
            })?;
            for (name, meta) in self.files.entries(dir.join(SEGMENTS))? {
                let Some(name) = SegmentName::parse(&name).filter(|_| !meta.is_dir) else {
                    continue;
                };
                let about = meta.len / self.files.config.record_len.max(1);
                found.total += meta.len;
                found.files.push(Found {
                    kind: Kind::Segment(u32::try_from(about).unwrap_or(u32::MAX).max(1)),
                    id: name.as_id(),
                    len: meta.len,
                    used_ns: meta.mtime_ns,
                    namespace,
                });
            }
            found.total += self.sweep_private(dir.join("tmp"), oldest)?;
            found.total += self.remove_quarantined(dir.join(QUARANTINE))?;
            found.namespaces.push(dir);
        }
        self.sweep_private(self.files.directory(), oldest)?;
        Ok(found)
    }

    /// The time, ns of Unix time, before which a private file counts as left behind: by the clock
    /// that gives files their times, that of the heartbeat written a moment ago. A process that is
    /// not collector has no heartbeat and uses its own clock.
    fn dead_before(&self, why: Why) -> Result<i64> {
        let mut now = i64::try_from(self.files.clock.wall_ns()).unwrap_or(i64::MAX);
        if let Some(term) = why.term {
            let path = self.files.path(Name::Collector(term));
            let look = move |io: &IoJob| io.look(path);
            let meta = self.files.call(MonotonicTime::NEVER, look)?;
            now = meta.map_or(now, |meta| meta.mtime_ns);
        }
        Ok(now.saturating_sub(i64::try_from(STALE.as_nanos()).unwrap_or(i64::MAX)))
    }

    /// Removes those of these files (with their times) that are older.
    fn sweep(&self, files: Vec<(PathBuf, i64)>, oldest: i64) -> Result<()> {
        let dead = files.into_iter().filter(|(_, time)| *time < oldest);
        let paths = dead.map(|(path, _)| path).collect();
        self.files.remove(paths, MonotonicTime::NEVER).map(drop)
    }

    /// Removes the damaged records in a directory, which older versions kept. The answer is the
    /// bytes that could not be removed.
    fn remove_quarantined(&self, dir: PathBuf) -> Result<u64> {
        let mut files = self.files.entries(dir.clone())?;
        files.retain(|(name, meta)| is_quarantined(name) && !meta.is_dir);
        let paths = files.iter().map(|(name, _)| dir.join(name)).collect();
        let removed = self.files.remove(paths, MonotonicTime::NEVER);
        let removed = removed.unwrap_or_default();
        let is_left = |at: usize| !matches!(removed.get(at), Some(Ok(_)));
        let left = files.iter().enumerate().filter(|(at, _)| is_left(*at));
        Ok(left.map(|(_, (_, meta))| meta.len).sum())
    }

    /// Bytes of the private files in a directory, without those of the dead, which are removed.
    fn sweep_private(&self, dir: PathBuf, oldest: i64) -> Result<u64> {
        let (mut bytes, mut files) = (0, Vec::new());
        for (name, meta) in self.files.entries(dir.clone())? {
            if is_private(&name) && !meta.is_dir {
                if meta.mtime_ns >= oldest {
                    bytes += meta.len;
                }
                files.push((dir.join(&name), meta.mtime_ns));
            }
        }
        self.sweep(files, oldest)?;
        Ok(bytes)
    }
}

/// Visits every record of one namespace that lies in a file of its own; `list` lists a directory.
pub fn visit_records(
    namespace: &Path,
    list: &mut dyn FnMut(PathBuf) -> Result<Entries>,
    visit: &mut dyn FnMut(BlockId, FileMeta),
) -> Result<()> {
    let blocks = namespace.join(BLOCKS);
    for (name, meta) in list(blocks.clone())? {
        let Some(shard) = shard_name(&name).filter(|_| meta.is_dir) else {
            continue;
        };
        for (file, meta) in list(blocks.join(&name))? {
            if let Some(id) = record_name(shard, &file).filter(|_| !meta.is_dir) {
                visit(id, meta);
            }
        }
    }
    Ok(())
}
