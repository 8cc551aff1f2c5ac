//! The pool under a manual clock: no test waits for real time.

mod demand;
mod handover;
mod jobs;
mod life;
mod model;
mod stuck;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ucm_core::{ErrorKind, Result};

use super::*;
use crate::tests_clock::ManualClock;

const SECOND: Duration = Duration::from_secs(1);
/// Only a failing test waits this long.
const GUARD: Duration = Duration::from_secs(60);

fn lane(name: &'static str, capacity: usize, max_running: usize) -> Lane {
    Lane {
        name,
        capacity,
        max_running,
    }
}

/// A pool, its clock, and a channel into which jobs report.
struct Rig {
    clock: Arc<ManualClock>,
    pool: Arc<WorkerPool>,
    told: Receiver<(u32, Result<u32>)>,
    tell: Sender<(u32, Result<u32>)>,
}

impl Rig {
    fn new(describe: impl FnOnce(WorkerPoolBuilder) -> WorkerPoolBuilder) -> Self {
        let clock = ManualClock::new();
        let shared: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let pool = describe(WorkerPool::builder("test").clock(shared))
            .build()
            .unwrap();
        let (tell, told) = channel();
        Self {
            clock,
            pool,
            told,
            tell,
        }
    }

    fn deadline(&self, span: Duration) -> MonotonicTime {
        self.clock.now().after(span)
    }

    /// Submits a job that does `work` and reports `(id, result)`.
    fn submit(
        &self,
        lane: usize,
        deadline: MonotonicTime,
        id: u32,
        work: impl FnOnce() -> u32 + Send + 'static,
    ) -> Result<()> {
        let tell = self.tell.clone();
        self.pool.submit(lane, deadline, work, move |result| {
            tell.send((id, result)).unwrap();
        })
    }

    /// Submits a job that hangs until the returned sender is used or dropped; returns once it runs.
    fn hang(&self, lane: usize, deadline: MonotonicTime, id: u32) -> Sender<()> {
        let (release, held) = channel::<()>();
        let (running, runs) = channel();
        self.submit(lane, deadline, id, move || {
            running.send(()).unwrap();
            held.recv().ok();
            id
        })
        .unwrap();
        runs.recv_timeout(GUARD).unwrap();
        release
    }

    fn next(&self) -> (u32, Result<u32, ErrorKind>) {
        let (id, result) = self.told.recv_timeout(GUARD).unwrap();
        (id, result.map_err(|error| error.kind()))
    }

    /// Waits until the pool's threads made `enough` true.
    fn until(&self, enough: impl Fn(&PoolStats) -> bool) -> PoolStats {
        assert!(
            self.pool
                .shared
                .wait_until(MonotonicTime::NEVER, |state| enough(&state.stats()))
        );
        self.pool.stats()
    }
}
