//! The engine of plain system calls on a pool of threads: right for every file system, the only sane one for network
//! mounts. Every call on a file system, open and close and rename too, is made by a worker, which the pool writes off
//! when the call does not return by its deadline; the operation's buffer stays with that call until it does.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::Result;
use ucm_infra::{Clock, Lane, Mono, PoolStats, SystemClock, WorkerPool};

use crate::append::Finish;
use crate::engine::{Done, IoEngine};
use crate::file::{Files, Publish, StillWanted};
use crate::meta;
use crate::op::{IoDone, IoOp};
use crate::probe::probe;

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
    files: Arc<Files>,
    clock: Arc<dyn Clock>,
}

impl PsyncEngine {
    /// Starts the workers. Errors as of `WorkerPool`: wrong numbers, no threads to be had.
    pub fn new(options: PsyncOptions) -> Result<Arc<Self>> {
        let pool = WorkerPool::builder("ucm-io")
            .size(options.workers)
            .lanes(&options.lanes)
            .max_replacements(options.max_replacements)
            .clock(Arc::clone(&options.clock))
            .build()?;
        Ok(Arc::new(Self {
            pool,
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
        IoOp::Publish {
            private,
            target,
            replace,
            buf,
            len,
            mode,
            mtime_ns,
        } => {
            let job = Publish {
                private: &private,
                target: &target,
                replace,
                len,
                mode,
                mtime_ns,
            };
            files.publish(&job, buf, wanted)
        }
        IoOp::Stat {
            paths,
            stop_at_missing,
        } => meta::stat(&paths, stop_at_missing, wanted),
        IoOp::Touch { files } => Ok(meta::touch(&files, wanted)),
        IoOp::Remove { paths } => Ok(meta::remove(&paths, wanted)),
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

    fn stuck(&self) -> usize {
        self.pool.stuck()
    }

    fn name(&self) -> &'static str {
        "psync"
    }

    fn shutdown(&self, drain: Duration) {
        self.pool.shutdown(drain);
    }
}
