//! Space below a root: a limit that holds, and removal of what was used longest ago.
//!
//! Every write is admitted against the limit before it starts. Above the high watermark a background thread counts
//! what lies below the root (all namespaces) and removes the oldest records until the low watermark. Time of use is
//! the file's modification time: see [`Recency`].

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hashlink::LruCache;
use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{Clock, Lane, Mono, WorkerPool};
use ucm_io::{FileMeta, IoDone, IoEngine, IoOp};

use crate::backend::{Done, Usage};
use crate::engine::LANE_SPACE;
use crate::layout::{is_namespace, is_private, record_name};
use crate::posix::call;

/// A limit as configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Capacity {
    /// So many bytes.
    Bytes(NonZeroU64),
    /// A share of the file system, in percent.
    Percent(f64),
}

impl Capacity {
    /// The limit in bytes on a file system of `total` bytes.
    pub fn bytes(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.get(),
            Self::Percent(percent) => (total as f64 * percent.clamp(0.0, 100.0) / 100.0) as u64,
        }
    }

    /// The default: 20 % of the file system, at most 80 % of what is free at the first start.
    pub fn default_bytes(total: u64, free: u64) -> u64 {
        (total / 5).min(free / 5 * 4)
    }
}

/// Share of the limit above which the collector starts, and down to which it removes.
const HIGH: f64 = 0.95;
const LOW: f64 = 0.85;
/// Age at which somebody's private file is taken for dead.
const STALE: Duration = Duration::from_secs(3600);
/// How long one operation of the collector may take.
const STEP: Duration = Duration::from_secs(30);
/// Files removed per operation.
const BATCH: usize = 64;

/// The space below one root.
pub struct Space {
    root: PathBuf,
    io: Arc<dyn IoEngine>,
    clock: Arc<dyn Clock>,
    worker: Arc<WorkerPool>,
    limit: AtomicU64,
    used: AtomicU64,
    records: AtomicU64,
    /// Bytes admitted whose write has not ended.
    pending: AtomicU64,
    /// Bytes admitted since the last count; bounds what is written on an old count.
    since_count: AtomicU64,
    counted: AtomicBool,
    collecting: AtomicBool,
    removed_records: AtomicU64,
    removed_bytes: AtomicU64,
}

impl Space {
    /// Space whose limit is not known yet: nothing is admitted before [`Space::open`].
    pub fn new(root: PathBuf, io: Arc<dyn IoEngine>, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let worker = WorkerPool::builder("ucm-space")
            .size(1)
            .lanes(&[Lane {
                name: "space",
                capacity: 16,
                max_running: 1,
            }])
            .clock(Arc::clone(&clock))
            .build()?;
        Ok(Arc::new(Self {
            root,
            io,
            clock,
            worker,
            limit: AtomicU64::new(0),
            used: AtomicU64::new(0),
            records: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            since_count: AtomicU64::new(0),
            counted: AtomicBool::new(false),
            collecting: AtomicBool::new(false),
            removed_records: AtomicU64::new(0),
            removed_bytes: AtomicU64::new(0),
        }))
    }

    /// Sets the limit and starts the first count.
    pub fn open(self: &Arc<Self>, limit: u64) {
        self.limit.store(limit, Ordering::Release);
        self.collect();
    }

    /// Takes `bytes` of the limit for a write, or refuses it (NoSpace) and makes room for the next one.
    pub fn admit(self: &Arc<Self>, bytes: u64) -> Result<()> {
        let limit = self.limit.load(Ordering::Acquire);
        self.pending.fetch_add(bytes, Ordering::AcqRel);
        let used = self.used.fetch_add(bytes, Ordering::AcqRel) + bytes;
        let fresh = self.since_count.fetch_add(bytes, Ordering::AcqRel) + bytes;
        // Before the first count only a little may be written: what lies there is not known yet.
        let allowed = if self.counted.load(Ordering::Acquire) {
            limit
        } else {
            limit / 16
        };
        if used > (limit as f64 * HIGH) as u64 || fresh > limit / 16 {
            self.collect();
        }
        if used > allowed {
            self.pending.fetch_sub(bytes, Ordering::AcqRel);
            less(&self.since_count, bytes);
            self.give_back(bytes);
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the configured storage_capacity is used up; making room",
            )
            .with("limit", limit)
            .with("used", used - bytes));
        }
        Ok(())
    }

    /// Returns bytes that were not written or are gone.
    pub fn give_back(&self, bytes: u64) {
        less(&self.used, bytes);
    }

    /// An admitted write ended. If it failed its bytes are free again, and a full medium starts the collector.
    pub fn ended(self: &Arc<Self>, bytes: u64, error: Option<&Error>) {
        self.pending.fetch_sub(bytes, Ordering::AcqRel);
        if let Some(error) = error {
            self.give_back(bytes);
            if error.kind() == ErrorKind::NoSpace {
                self.collect();
            }
        }
    }

    /// Bytes used and allowed.
    pub fn usage(&self) -> Usage {
        Usage {
            used: self.used.load(Ordering::Acquire),
            capacity: self.limit.load(Ordering::Acquire),
            records: self.records.load(Ordering::Acquire),
        }
    }

    /// Records and bytes removed so far.
    pub fn removed(&self) -> (u64, u64) {
        (
            self.removed_records.load(Ordering::Relaxed),
            self.removed_bytes.load(Ordering::Relaxed),
        )
    }

    /// Counts and, if need be, removes, in the background; one at a time.
    pub fn collect(self: &Arc<Self>) {
        if self.collecting.swap(true, Ordering::AcqRel) {
            return;
        }
        let (space, done) = (Arc::clone(self), Arc::clone(self));
        let work = move || space.count_and_remove();
        let ended = move |_| done.collecting.store(false, Ordering::Release);
        if self.worker.submit(0, Mono::NEVER, work, ended).is_err() {
            self.collecting.store(false, Ordering::Release);
        }
    }

    /// Runs a longer job of the control path on the background thread.
    pub fn in_background<T: Send + 'static>(
        &self,
        deadline: Mono,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        done: Done<T>,
    ) {
        let done = Arc::new(Mutex::new(Some(done)));
        let answer = Arc::clone(&done);
        let ended = move |result: Result<Result<T>>| {
            if let Some(done) = answer.lock().take() {
                done(result.and_then(|inner| inner));
            }
        };
        let refused = self.worker.submit(0, deadline, work, ended).err();
        if let Some((error, done)) = refused.and_then(|error| Some((error, done.lock().take()?))) {
            done(Err(error));
        }
    }

    /// Visits every record of one namespace.
    pub fn list_namespace(
        &self,
        namespace: &Path,
        deadline: Mono,
        visit: &mut dyn FnMut(BlockId, FileMeta),
    ) -> Result<()> {
        for (name, meta) in self.entries(namespace.join("blocks"), deadline)? {
            let shard = name
                .to_str()
                .filter(|name| name.len() == 2)
                .and_then(|name| u8::from_str_radix(name, 16).ok());
            let Some(shard) = shard.filter(|_| meta.is_dir) else {
                continue;
            };
            for (file, meta) in self.entries(namespace.join("blocks").join(&name), deadline)? {
                if let Some(id) = record_name(shard, &file).filter(|_| !meta.is_dir) {
                    visit(id, meta);
                }
            }
        }
        Ok(())
    }

    /// Ends the background thread.
    pub fn shutdown(&self, drain: Duration) {
        self.worker.shutdown(drain);
    }

    fn call(&self, op: IoOp) -> Result<IoDone> {
        call(
            &*self.io,
            &*self.clock,
            LANE_SPACE,
            self.clock.now().after(STEP),
            op,
        )
    }

    fn entries(&self, dir: PathBuf, deadline: Mono) -> Result<Vec<(std::ffi::OsString, FileMeta)>> {
        let step = deadline.min(self.clock.now().after(STEP));
        match call(&*self.io, &*self.clock, LANE_SPACE, step, IoOp::List { dir }) {
            Ok(IoDone::List(entries)) => Ok(entries),
            Ok(_) => Err(Error::internal("a listing answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()), // removed meanwhile
            Err(error) => Err(error),
        }
    }

    fn count_and_remove(&self) -> Result<()> {
        let limit = self.limit.load(Ordering::Acquire);
        self.since_count.store(0, Ordering::Release);
        let pending = self.pending.load(Ordering::Acquire);
        let (namespaces, mut records, total) = self.count()?;
        // What is being written may be counted or not: never too little. The next count corrects what is too much.
        let meanwhile = pending + self.since_count.load(Ordering::Acquire);
        self.used.store(total + meanwhile, Ordering::Release);
        self.records.store(records.len() as u64, Ordering::Release);
        self.counted.store(true, Ordering::Release);
        if total + meanwhile <= (limit as f64 * HIGH) as u64 {
            return Ok(());
        }
        let low = (limit as f64 * LOW) as u64;
        records.sort_unstable_by_key(|record| (record.used_ns, record.id));
        let (mut surplus, mut oldest) = ((total + meanwhile).saturating_sub(low), records.as_slice());
        while surplus > 0 && !oldest.is_empty() {
            let mut expected = 0;
            let mut enough = |record: &Found| {
                let wanted = expected < surplus;
                expected += record.len;
                wanted
            };
            let count = oldest
                .iter()
                .take(BATCH)
                .take_while(|record| enough(record))
                .count();
            let (batch, rest) = oldest.split_at(count);
            surplus = surplus.saturating_sub(self.remove(batch, &namespaces)?);
            oldest = rest;
        }
        Ok(())
    }

    /// Removes records; the answer is how many bytes that freed. What somebody else removed before counts too.
    fn remove(&self, batch: &[Found], namespaces: &[PathBuf]) -> Result<u64> {
        let paths = batch.iter().map(|record| record.path(namespaces)).collect();
        let IoDone::Removed(answers) = self.call(IoOp::Remove { paths })? else {
            return Err(Error::internal("a removal answered with something else"));
        };
        let mut freed = 0;
        for (record, _) in batch.iter().zip(answers).filter(|(_, answer)| answer.is_ok()) {
            freed += record.len;
            self.records.fetch_sub(1, Ordering::Relaxed);
            self.removed_records.fetch_add(1, Ordering::Relaxed);
        }
        self.give_back(freed);
        self.removed_bytes.fetch_add(freed, Ordering::Relaxed);
        Ok(freed)
    }

    /// Everything below the root that is ours: namespaces, records, and bytes with private files included. Private
    /// files of the dead are removed on the way.
    fn count(&self) -> Result<(Vec<PathBuf>, Vec<Found>, u64)> {
        let (mut namespaces, mut records, mut total) = (Vec::new(), Vec::new(), 0);
        for (name, meta) in self.entries(self.root.clone(), Mono::NEVER)? {
            if !meta.is_dir || !is_namespace(&name) {
                continue;
            }
            let dir = self.root.join(&name);
            self.list_namespace(&dir, Mono::NEVER, &mut |id, meta| {
                total += meta.len;
                let namespace = namespaces.len() as u32;
                records.push(Found {
                    id,
                    len: meta.len,
                    used_ns: meta.mtime_ns,
                    namespace,
                });
            })?;
            total += self.sweep_private(dir.join("tmp"))?;
            namespaces.push(dir);
        }
        Ok((namespaces, records, total))
    }

    /// Bytes of the private files in a directory, without those of the dead, which are removed.
    fn sweep_private(&self, dir: PathBuf) -> Result<u64> {
        let oldest = i64::try_from(self.clock.wall_ns())
            .unwrap_or(i64::MAX)
            .saturating_sub(STALE.as_nanos() as i64);
        let (mut bytes, mut dead) = (0, Vec::new());
        for (name, meta) in self.entries(dir.clone(), Mono::NEVER)? {
            if is_private(&name) && !meta.is_dir {
                if meta.mtime_ns < oldest {
                    dead.push(dir.join(&name));
                } else {
                    bytes += meta.len;
                }
            }
        }
        if !dead.is_empty() {
            self.call(IoOp::Remove { paths: dead })?;
        }
        Ok(bytes)
    }
}

/// Takes `bytes` off a counter that a count may have set back meanwhile.
fn less(counter: &AtomicU64, bytes: u64) {
    let take = |value: u64| Some(value.saturating_sub(bytes));
    let _ = counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
}

/// One record found by the count.
#[derive(Clone, Copy)]
struct Found {
    id: BlockId,
    len: u64,
    used_ns: i64,
    namespace: u32,
}

impl Found {
    fn path(&self, namespaces: &[PathBuf]) -> PathBuf {
        let shard = format!("{:02x}", self.id.0[0]);
        namespaces[self.namespace as usize]
            .join("blocks")
            .join(shard)
            .join(format!("{}.bin", self.id))
    }
}

/// Time of use, told to the file system as a modification time.
///
/// The time is cut to a minute and the block's ordinal in its chain is taken off in microseconds: within a minute a
/// descendant is always older than its ancestors, so that removing the oldest first is removing the deepest first,
/// without reading a header. A request touches its whole prefix, at most once a minute and block.
#[derive(Default)]
pub struct Recency {
    told: Mutex<Option<LruCache<BlockId, i64>>>,
    touched: AtomicU64,
}

/// Length of the step to which times of use are cut.
const STEP_NS: i64 = 60_000_000_000;
/// Most blocks remembered as told.
const TOLD: usize = 1 << 17;

impl Recency {
    fn time(ordinal: u32, wall_ns: u64) -> i64 {
        let now = i64::try_from(wall_ns).unwrap_or(i64::MAX);
        now - now % STEP_NS - i64::from(ordinal) * 1000
    }

    /// The time to give to a record being published.
    pub fn published(&self, id: BlockId, ordinal: u32, wall_ns: u64) -> i64 {
        let time = Self::time(ordinal, wall_ns);
        self.told
            .lock()
            .get_or_insert_with(|| LruCache::new(TOLD))
            .insert(id, time);
        time
    }

    /// Which of these blocks need to be told to the file system, and what.
    pub fn due(&self, ids: &[(BlockId, u32)], wall_ns: u64) -> Vec<(BlockId, i64)> {
        let mut told = self.told.lock();
        let told = told.get_or_insert_with(|| LruCache::new(TOLD));
        let times = ids
            .iter()
            .map(|&(id, ordinal)| (id, Self::time(ordinal, wall_ns)));
        times
            .filter(|&(id, time)| told.insert(id, time).is_none_or(|last| last < time))
            .collect()
    }

    /// Counts blocks touched.
    pub fn count(&self, blocks: u64) {
        self.touched.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Blocks touched so far.
    pub fn touched(&self) -> u64 {
        self.touched.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_are_younger_than_descendants() {
        let recency = Recency::default();
        let minute = STEP_NS as u64;
        let (a, b) = (BlockId([1; 16]), BlockId([2; 16]));
        let first = recency.published(a, 0, 5 * minute + 7);
        let second = recency.published(b, 1, 5 * minute + 900);
        assert!(first > second, "written later, and still older");
        assert!(
            recency.due(&[(a, 0), (b, 1)], 5 * minute + 1000).is_empty(),
            "told this minute"
        );
        let due = recency.due(&[(a, 0), (b, 1)], 6 * minute);
        assert_eq!(due.len(), 2);
        assert!(due[0].1 > due[1].1 && due[1].1 > first);
    }

    #[test]
    fn limits_in_bytes_and_percent() {
        assert_eq!(Capacity::Percent(50.0).bytes(1000), 500);
        assert_eq!(Capacity::default_bytes(1000, 1000), 200);
        assert_eq!(Capacity::default_bytes(1000, 100), 80);
    }
}
