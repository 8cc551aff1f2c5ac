//! Configuration of a pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};

use ucm_core::sync::{Condvar, Mutex};
use ucm_core::{Error, ErrorKind, Result};

use super::inbox::Inbox;
use super::state::{Phase, State};
use super::stats::Lane;
use super::{Handover, Shared, WorkerPool};
use crate::clock::{Clock, MonotonicTime, SystemClock};
use crate::notify::Notify;

/// Most lanes of a pool.
pub const MAX_LANES: usize = 16;
/// Most threads of a pool, replacements included.
pub const MAX_WORKERS: usize = 1024;
/// Most jobs that wait in a lane.
pub const MAX_QUEUE: usize = 1 << 20;

/// Configuration of a [`WorkerPool`].
pub struct WorkerPoolBuilder {
    name: String,
    size: usize,
    lanes: Vec<Lane>,
    max_replacements: usize,
    clock: Option<Arc<dyn Clock>>,
}

impl WorkerPoolBuilder {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            size: 1,
            lanes: Vec::new(),
            max_replacements: 0,
            clock: None,
        }
    }

    /// Number of workers; default 1.
    #[must_use]
    pub fn size(mut self, size: usize) -> Self {
        self.size = size;
        self
    }

    /// The lanes, most urgent first. The default is one lane for 1024 jobs that may use every
    /// worker.
    #[must_use]
    pub fn lanes(mut self, lanes: &[Lane]) -> Self {
        self.lanes = lanes.to_vec();
        self
    }

    /// Number of threads beyond the size, as replacements of workers that hang; default 0.
    #[must_use]
    pub fn max_replacements(mut self, count: usize) -> Self {
        self.max_replacements = count;
        self
    }

    /// The clock of all deadlines; default [`SystemClock`].
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Makes the pool. A thread is started when a job needs it, and no more workers than jobs ran
    /// at once.
    ///
    /// # Errors
    /// `Config` if a number is out of range.
    pub fn build(mut self) -> Result<Arc<WorkerPool>> {
        if self.lanes.is_empty() {
            self.lanes.push(Lane {
                name: "jobs",
                capacity: 1024,
                max_running: self.size,
            });
        }
        self.check()
            .map_err(|error| error.with("pool", &self.name))?;
        let inboxes: Vec<_> = self
            .lanes
            .iter()
            .map(|&lane| Arc::new(Inbox::new(lane)))
            .collect();
        let state = State::new(self.size, self.max_replacements, &inboxes);
        let shared = Shared {
            name: self.name,
            clock: self.clock.unwrap_or_else(SystemClock::shared),
            handover: Handover {
                inboxes,
                phase: AtomicU8::new(Phase::Open as u8),
                monitored: AtomicBool::new(false),
                growing: AtomicBool::new(true),
                sleepers: AtomicUsize::new(0),
                monitor_wakes: AtomicU64::new(MonotonicTime::NEVER.0),
            },
            state: Mutex::new(state),
            work: Condvar::new(),
            alarm: Notify::new(),
            roll_call: Notify::new(),
        };
        let shared = Arc::new(shared);
        Ok(Arc::new(WorkerPool { shared }))
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: &'static str, value: usize| {
            Err(Error::new(ErrorKind::Config, what).with("got", value))
        };
        if self.size == 0 {
            return wrong("a pool has at least 1 worker", self.size);
        }
        if self.size.saturating_add(self.max_replacements) > MAX_WORKERS {
            return wrong(
                "a pool has at most 1024 threads, replacements included",
                self.size,
            );
        }
        if self.lanes.len() > MAX_LANES {
            return wrong("a pool has at most 16 lanes", self.lanes.len());
        }
        for lane in &self.lanes {
            let refuse =
                |what, value| wrong(what, value).map_err(|error| error.with("lane", lane.name));
            if lane.capacity == 0 || lane.capacity > MAX_QUEUE {
                return refuse("a lane holds between 1 and 1048576 jobs", lane.capacity);
            }
            if lane.max_running == 0 {
                return refuse("a lane may run at least 1 job", lane.max_running);
            }
        }
        Ok(())
    }
}
