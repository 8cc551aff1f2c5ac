//! The engine of plain system calls on a pool of threads: right for every file system, the only sane one for network
//! mounts. Every call on a file system, open and close and rename too, is made by a worker, which the pool writes off
//! when the call does not return by its deadline; the operation's buffer stays with that call until it does.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::Result;
use ucm_infra::{Clock, Lane, Mono, PoolStats, SystemClock, WorkerPool};

use crate::append::Finish;
use crate::engine::{Done, IoEngine};
use crate::file::{Files, Publish, StillWanted};
use crate::kept::KeptFile;
use crate::meta;
use crate::op::{IoDone, IoOp};
use crate::probe::probe;

/// The lane of housekeeping.
pub(crate) const HOUSEKEEPING: usize = 3;
/// How long closing files that nobody writes may take.
const CLOSE: Duration = Duration::from_secs(5);

/// How a [`PsyncEngine`] is set up.
#[derive(Clone, Debug)]
pub struct PsyncOptions {
    /// Worker threads.
    pub workers: usize,
    /// Most workers started in the place of stuck ones.
    pub max_replacements: usize,
    /// The lanes, most urgent first: 0 load, 1 prefetch and lookup, 2 dump, 3 space.
    pub lanes: Vec<Lane>,
    /// Read and write slots past the page cache where the file system can.
    pub direct: bool,
    /// What deadlines are measured on.
    pub clock: Arc<dyn Clock>,
}

impl PsyncOptions {
    /// The usual lanes for a number of workers: loads and lookups may use all, dumps half, space a quarter.
    pub fn with_workers(workers: usize) -> Self {
        let lane = |name, capacity, max_running: usize| Lane {
            name,
            capacity,
            max_running: max_running.max(1),
        };
        Self {
            workers,
            max_replacements: workers.max(2),
            lanes: vec![
                lane("load", 4096, workers),
                lane("lookup", 4096, workers),
                lane("dump", 4096, workers / 2),
                lane("space", 4096, workers / 4),
            ],
            direct: false,
            clock: Arc::new(SystemClock),
        }
    }
}

impl Default for PsyncOptions {
    fn default() -> Self {
        Self::with_workers(8)
    }
}

/// System calls on a worker pool.
pub struct PsyncEngine {
    pool: Arc<WorkerPool>,
    /// Operations of each lane that run at once.
    widths: Vec<usize>,
    files: Arc<Files>,
    clock: Arc<dyn Clock>,
}

impl PsyncEngine {
    /// Starts the workers. Errors as of `WorkerPool`: wrong numbers, no threads to be had.
    pub fn new(options: PsyncOptions) -> Result<Arc<Self>> {
        Self::with(options, false)
    }

    /// The same with two lanes for each kind of operation, which share a limit.
    pub(crate) fn paired(options: PsyncOptions) -> Result<Arc<Self>> {
        Self::with(options, true)
    }

    fn with(options: PsyncOptions, paired: bool) -> Result<Arc<Self>> {
        let builder = WorkerPool::builder("ucm-io");
        let builder = if paired { builder.paired() } else { builder };
        let pool = builder
            .on_demand()
            .size(options.workers)
            .lanes(&options.lanes)
            .max_replacements(options.max_replacements)
            .clock(Arc::clone(&options.clock))
            .build()?;
        let widths = options
            .lanes
            .iter()
            .map(|lane| lane.max_running.min(options.workers));
        Ok(Arc::new(Self {
            pool,
            widths: widths.collect(),
            files: Arc::new(Files::new(options.direct)),
            clock: options.clock,
        }))
    }

    /// The pool's counters.
    pub fn pool_stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// The workers, for an engine that leaves them a part of its operations.
    pub(crate) fn pool(&self) -> &WorkerPool {
        &self.pool
    }

    /// What is known of files, for an engine that shares it.
    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// How many operations wanted direct I/O and went through the page cache.
    pub fn direct_fallbacks(&self) -> u64 {
        self.files.fallbacks()
    }

    /// [`IoEngine::close_kept`] by a worker of that lane.
    pub(crate) fn close_kept_in(&self, lane: usize, gone: &[PathBuf], unused: bool) {
        self.close(lane, self.files.kept.take(gone, unused));
    }

    fn close(&self, lane: usize, closed: Vec<Arc<KeptFile>>) {
        if !closed.is_empty() {
            let deadline = self.clock.now().after(CLOSE);
            // A pool that is full or ends gives them back, to be closed here.
            let _ = self.pool.submit(lane, deadline, move || drop(closed), |_| {});
        }
    }
}

/// Runs one operation to its end, on this thread.
fn run(files: &Files, op: IoOp, wanted: StillWanted<'_>) -> Result<IoDone> {
    match op {
        IoOp::Read {
            path,
            offset,
            len,
            buf,
            mode,
        } => files.read(&path, offset, len, buf, mode),
        IoOp::ReadInto {
            path,
            offset,
            into,
            keep,
        } => Ok(files.read_into(&path, offset, into, keep)),
        IoOp::ReadParts {
            path,
            offset,
            parts,
            buf,
            keep,
        } => Ok(files.read_parts(&path, offset, &parts, buf, keep)),
        IoOp::Publish {
            private,
            target,
            replace,
            buf,
            len,
            mode,
            mtime_ns,
            durable,
        } => {
            let job = Publish {
                private: &private,
                target: &target,
                replace,
                len,
                mode,
                mtime_ns,
                durable,
            };
            files.publish(&job, buf, wanted)
        }
        IoOp::Stat {
            paths,
            stop_at_missing,
        } => meta::stat(&paths, stop_at_missing, wanted),
        IoOp::Touch { files } => Ok(meta::touch(&files, wanted)),
        IoOp::Remove { paths } => {
            let removed = meta::remove(&paths, wanted);
            drop(files.kept.take(&paths, false));
            Ok(removed)
        }
        IoOp::Rename { from, to, ino } => meta::rename(&from, &to, ino, wanted),
        IoOp::List { dir } => meta::list(&dir, wanted),
        IoOp::MakeDir { path, mode } => meta::make_dir(&path, mode),
        IoOp::Space { path } => meta::space(&path),
        IoOp::Probe { dir } => probe(&dir).map(IoDone::Probe),
        IoOp::Create {
            path,
            head,
            room,
            mode,
        } => files.create(&path, &head, room, mode),
        IoOp::WriteAt {
            path,
            offset,
            buf,
            len,
        } => files.write_at(&path, offset, buf, len),
        IoOp::Finish {
            private,
            target,
            foot,
            offset,
            mtime_ns,
        } => {
            let job = Finish {
                private: &private,
                target: &target,
                foot: &foot,
                offset,
                mtime_ns,
            };
            files.finish(&job, wanted)
        }
    }
}

impl IoEngine for PsyncEngine {
    fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        let files = Arc::clone(&self.files);
        let clock = Arc::clone(&self.clock);
        let work = move || run(&files, op, &|| clock.now() < deadline);
        let tell = move |result: Result<Result<IoDone>>| done(result.and_then(|inner| inner));
        if let Err(refused) = self.pool.offer(lane, deadline, work, tell) {
            // The buffer is free again before its owner hears of it.
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
    }

    fn width(&self, lane: usize) -> usize {
        self.widths.get(lane).copied().unwrap_or(1)
    }

    fn close_kept(&self, gone: &[PathBuf], unused: bool) {
        self.close_kept_in(HOUSEKEEPING, gone, unused);
    }

    fn kept(&self) -> usize {
        self.files.kept.count()
    }

    fn stuck(&self) -> usize {
        self.pool.stuck()
    }

    fn name(&self) -> &'static str {
        "psync"
    }

    fn shutdown(&self, drain: Duration) {
        self.close(0, self.files.kept.take_all());
        self.pool.shutdown(drain);
    }
}
