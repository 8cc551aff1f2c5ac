//! Configuration and start of a pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ucm_core::{Error, ErrorKind, Result};

use super::inbox::Inbox;
use super::state::{Phase, State};
use super::stats::Lane;
use super::{ExitHook, Handover, Shared, StartHook, WorkerPool};
use crate::clock::{Clock, MonotonicTime, SystemClock};
use crate::notify::Notify;

/// Most lanes of a pool.
pub const MAX_LANES: usize = 16;
/// Most threads of a pool, replacements included.
pub const MAX_WORKERS: usize = 1024;
/// Most jobs that wait in a lane.
pub const MAX_QUEUE: usize = 1 << 20;

/// Configuration of a [`WorkerPool`]; nothing is started before [`build`](Self::build).
pub struct WorkerPoolBuilder {
    name: String,
    size: usize,
    lanes: Vec<Lane>,
    max_replacements: usize,
    clock: Option<Arc<dyn Clock>>,
    start_within: Duration,
    on_demand: bool,
    on_start: Option<StartHook>,
    on_exit: Option<ExitHook>,
}

impl WorkerPoolBuilder {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            size: 1,
            lanes: Vec::new(),
            max_replacements: 0,
            clock: None,
            start_within: Duration::from_secs(10),
            on_demand: false,
            on_start: None,
            on_exit: None,
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

    /// How long [`on_start`](Self::on_start) may take before that worker counts as stuck; default
    /// 10 s.
    #[must_use]
    pub fn start_within(mut self, span: Duration) -> Self {
        self.start_within = span;
        self
    }

    /// Starts a thread only when a job needs it, and no more workers than jobs ran at once. If the
    /// monitor thread cannot be started, the first job reports it instead of
    /// [`build`](Self::build); if a worker cannot be started, its job waits for another attempt.
    #[must_use]
    pub fn on_demand(mut self) -> Self {
        self.on_demand = true;
        self
    }

    /// Runs first on every worker thread, replacements included, with the number of its place
    /// (below size + replacements; a place is reused after its thread ended). An error or a panic
    /// ends that thread: at the start it fails `build`, later another start is tried after a
    /// second.
    #[must_use]
    pub fn on_start(mut self, hook: impl Fn(usize) -> Result<()> + Send + Sync + 'static) -> Self {
        self.on_start = Some(Box::new(hook));
        self
    }

    /// Runs last on every worker thread that started, with the number of its place.
    #[must_use]
    pub fn on_exit(mut self, hook: impl Fn(usize) + Send + Sync + 'static) -> Self {
        self.on_exit = Some(Box::new(hook));
        self
    }

    /// Starts the threads and waits until each worker has started.
    ///
    /// # Errors
    /// `Config` if a number is out of range; the error of `on_start`; `Io` if the system
    /// gives no thread; `Timeout` if a worker did not start within
    /// [`start_within`](Self::start_within). No thread stays behind then, except one that hangs in
    /// `on_start`.
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
        let clock = self.clock.take().unwrap_or_else(SystemClock::shared);
        let inboxes: Vec<Arc<Inbox>> = self
            .lanes
            .iter()
            .map(|&lane| Arc::new(Inbox::new(lane)))
            .collect();
        let state =
            State::new(self.size, self.max_replacements, &inboxes).on_demand(self.on_demand);
        let start_by = clock.now().after(self.start_within);
        let pool = Arc::new(WorkerPool {
            shared: Arc::new(Shared {
                name: self.name,
                clock,
                start_within: self.start_within,
                on_start: self.on_start,
                on_exit: self.on_exit,
                handover: Handover {
                    inboxes,
                    phase: AtomicU8::new(Phase::Open as u8),
                    monitored: AtomicBool::new(false),
                    growing: AtomicBool::new(state.is_growing()),
                    sleepers: AtomicUsize::new(0),
                    monitor_wakes: AtomicU64::new(MonotonicTime::NEVER.0),
                },
                state: Mutex::new(state),
                work: Condvar::new(),
                alarm: Notify::new(),
                roll_call: Notify::new(),
            }),
        });
        // From here on, an early return drops the pool, which shuts it down.
        let shared = &pool.shared;
        let now = shared.clock.now();
        let claimed = shared.state.lock().claim_missing(now, start_by, false);
        for slot in claimed {
            shared.start_worker(slot);
        }
        let started = shared.wait_until(start_by, |state| {
            state.start_error.is_some() || state.starting() == 0
        });
        if let Some(error) = shared.state.lock().start_error.take() {
            return Err(error);
        }
        if !started {
            return Err(Error::new(
                ErrorKind::Timeout,
                "the workers of a pool did not start in time",
            )
            .with("pool", &shared.name));
        }
        if !self.on_demand {
            shared.start_monitor(&mut shared.state.lock())?;
        }
        Ok(pool)
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
