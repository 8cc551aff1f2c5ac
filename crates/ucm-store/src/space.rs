//! Space below a root: a limit that holds, and removal of what was used longest ago.
//!
//! Every write is admitted against the limit before it starts. Above the high watermark a background thread counts
//! what lies below the root (all namespaces) and removes the oldest records until the low watermark. Time of use is
//! the file's modification time: see [`crate::recency`].

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{Clock, Lane, Mono, WorkerPool};
use ucm_io::{FileMeta, IoDone, IoEngine, IoOp};

use crate::backend::{Done, Usage};
use crate::engine::LANE_SPACE;
use crate::evidence::{self, evidence_bytes};
use crate::layout::{is_namespace, is_private, record_name};
use crate::ledger::Ledger;
use crate::root::call;

pub use crate::ledger::Capacity;

/// Age at which somebody's private file is taken for dead.
const STALE: Duration = Duration::from_secs(3600);
/// How long one operation of the collector may take.
const STEP: Duration = Duration::from_secs(30);
/// Files removed per operation.
const BATCH: usize = 64;

/// Looks after the root before every count and answers the limit.
type Tend = Box<dyn Fn(Mono) -> Result<u64> + Send + Sync>;

/// The space below one root.
pub struct Space {
    root: PathBuf,
    io: Arc<dyn IoEngine>,
    clock: Arc<dyn Clock>,
    worker: Arc<WorkerPool>,
    ledger: Mutex<Ledger>,
    collecting: AtomicBool,
    tend: OnceLock<Tend>,
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
            ledger: Mutex::default(),
            collecting: AtomicBool::new(false),
            tend: OnceLock::new(),
        }))
    }

    /// Sets the limit and starts the first count. `tend` is called before every count, with a deadline: it checks
    /// that the root is still the one that was opened and answers the limit; if it fails nothing is removed.
    pub fn open(self: &Arc<Self>, limit: u64, tend: impl Fn(Mono) -> Result<u64> + Send + Sync + 'static) {
        self.ledger.lock().limit = limit;
        let _ = self.tend.set(Box::new(tend)); // the same one, when a root is opened again
        self.collect();
    }

    /// Takes `bytes` of the limit for a write, or refuses it (NoSpace) and makes room for the next one.
    pub fn admit(self: &Arc<Self>, bytes: u64) -> Result<()> {
        let mut ledger = self.ledger.lock();
        let counted = ledger.counted();
        // Before the first count only a little may be written: what lies there is not known yet.
        let allowed = if counted { ledger.limit } else { ledger.limit / 16 };
        let refused = ledger.used.saturating_add(bytes) > allowed;
        let error = refused.then(|| ledger.full(counted));
        if !refused {
            ledger.used += bytes;
            ledger.pending += bytes;
            ledger.since_count += bytes;
        }
        let collect = refused || ledger.used > ledger.high() || ledger.since_count > ledger.limit / 16;
        drop(ledger);
        if collect {
            self.collect();
        }
        error.map_or(Ok(()), Err)
    }

    /// An admitted write ended. If it wrote nothing its bytes are free again; when that is not sure they count until
    /// the next count. A full medium starts the collector.
    pub fn ended(self: &Arc<Self>, bytes: u64, error: Option<&Error>) {
        let mut ledger = self.ledger.lock();
        ledger.pending = ledger.pending.saturating_sub(bytes);
        let Some(error) = error else { return };
        if !matches!(
            error.kind(),
            ErrorKind::Timeout | ErrorKind::Io | ErrorKind::Closed
        ) {
            ledger.used = ledger.used.saturating_sub(bytes);
        }
        drop(ledger);
        if error.kind() == ErrorKind::NoSpace {
            self.collect();
        }
    }

    /// How many counts were begun or ended, for [`Space::deleted`].
    pub fn counts(&self) -> u64 {
        self.ledger.lock().counts
    }

    /// Bytes were deleted by name, in an operation begun when [`Space::counts`] was `before`. If a count was or came
    /// in between it may have missed them already.
    pub fn deleted(&self, bytes: u64, before: u64) {
        self.ledger.lock().deleted(bytes, before);
    }

    /// Bytes used and allowed.
    pub fn usage(&self) -> Usage {
        let ledger = self.ledger.lock();
        Usage {
            used: ledger.used,
            capacity: ledger.limit,
            records: ledger.records,
            counted: ledger.counted(),
        }
    }

    /// Records and bytes removed so far.
    pub fn removed(&self) -> (u64, u64) {
        let ledger = self.ledger.lock();
        (ledger.removed_records, ledger.removed_bytes)
    }

    /// Counts and, if need be, removes, in the background; one at a time.
    pub fn collect(self: &Arc<Self>) {
        if self.collecting.swap(true, Ordering::AcqRel) {
            return;
        }
        let (space, done) = (Arc::clone(self), Arc::clone(self));
        let work = move || {
            let ended = space.count_and_remove();
            space.ledger.lock().trouble = ended.err();
        };
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
        let Some(tend) = self.tend.get() else {
            return Ok(());
        };
        let limit = tend(self.clock.now().after(STEP))?;
        let pending = {
            let mut ledger = self.ledger.lock();
            ledger.limit = limit;
            ledger.since_count = 0;
            ledger.counts += 1;
            ledger.pending
        };
        let counted = self.count();
        let mut ledger = self.ledger.lock();
        let Ok((namespaces, mut records, total)) = counted else {
            // As if it had not begun, so that a first count that fails does not pass for one.
            ledger.counts -= 1;
            return counted.map(|_| ());
        };
        ledger.counts += 1;
        // What is being written may be counted or not: never too little. The next count corrects what is too much.
        ledger.used = total + pending + ledger.since_count;
        ledger.records = records.len() as u64;
        let (used, high, low) = (ledger.used, ledger.high(), ledger.low());
        drop(ledger);
        if used <= high {
            return Ok(());
        }
        records.sort_unstable_by_key(|record| (record.used_ns, record.id));
        let (mut surplus, mut oldest) = (used.saturating_sub(low), records.as_slice());
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
        let gone = batch.iter().zip(answers).filter(|(_, answer)| answer.is_ok());
        let (count, freed) = gone.fold((0, 0), |(count, freed), (record, _)| {
            (count + 1, freed + record.len)
        });
        let mut ledger = self.ledger.lock();
        ledger.used = ledger.used.saturating_sub(freed);
        ledger.records = ledger.records.saturating_sub(count);
        ledger.removed_records += count;
        ledger.removed_bytes += freed;
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
            total += evidence_bytes(&self.entries(dir.join(evidence::DIR), Mono::NEVER)?);
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
