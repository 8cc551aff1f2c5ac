//! Space below a root: a limit that holds with any number of writers, and removal of what was used
//! longest ago.
//!
//! One of the root's writers is its *collector*: it counts what lies below the root (all
//! namespaces), removes the oldest records, and grants every writer an absolute running total, a
//! little ahead of what that writer has used. A write is reserved against the grant, in memory; a
//! writer whose grant is spent requests more and refuses ([`Quota::reserve`]). So the limit holds
//! while the collector is dead, and with two of them. The parts:
//!
//! * [`writer_quota`]: one writer's side; [`grant_table`]: the collector's; [`documents`]: the
//!   files by which they agree; [`documents_io`]: reading and writing them;
//! * [`agent`]: the thread on which all of that happens; [`election`]: its election of a collector;
//!   [`state`]: what it shares with the store and the counts;
//! * [`count`]: counting and removing; [`remove`]: what is removed first. Time of use is the file's
//!   modification time: see [`crate::recency`].
//!
//! [`space_document`]: the same rules where a medium has compare-and-swap, and one document is enough.
//!
//! [`crate::layout`] says where things lie below a root.

mod agent;
mod count;
mod documents;
mod documents_io;
mod election;
mod grant_table;
mod pause;
mod remove;
pub mod space_document;
mod state;
mod writer_quota;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ucm_core::sync::{Mutex, MutexGuard};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, Lane, MonotonicTime, Notify, WorkerPool};
use ucm_io::IoPool;

use agent::QuotaAgent;
pub use count::visit_records;
use count::{Counter, LANE_WORK};
pub use documents_io::{Entries, QuotaConfig};
use documents_io::{Root, SpaceFiles};
use state::SpaceState;
use writer_quota::{PATIENCE, WriterQuota};

pub use grant_table::Snapshot;
pub use pause::Pause;
pub use remove::{Capacity, Rules};
pub use writer_quota::{FIRST, Reservation, is_unsure};

/// What a medium holds, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of records and private files below the root, as last counted plus what was written
    /// since.
    pub used: u64,
    /// The limit.
    pub capacity: u64,
    /// Records as last counted.
    pub records: u64,
    /// Whether what lay there before was counted yet.
    pub counted: bool,
    /// Whether this process counts and removes for all writers of the root.
    pub collector: bool,
    /// Whether nothing is written for now: the medium was full, or too little of it is free.
    pub paused: bool,
}

/// The space below one root.
pub struct Quota {
    clock: Arc<dyn Clock>,
    state: Arc<SpaceState>,
    counter: Arc<Counter>,
    worker: Arc<WorkerPool>,
    /// The quota agent, until it is started.
    agent: Mutex<Option<QuotaAgent>>,
    /// Jobs of [`Quota::in_background`] that have not ended; notified when one has.
    background: Arc<(AtomicUsize, Notify)>,
}

impl Quota {
    /// One whose limit is not known yet: nothing is reserved before [`Quota::open`].
    pub fn new(config: QuotaConfig, io: Arc<IoPool>, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let lane = |name, capacity| Lane {
            name,
            capacity,
            max_running: 1,
        };
        let worker = WorkerPool::builder("ucm-space")
            .size(2)
            .lanes(&[lane("keep", 1), lane("work", 16)])
            .clock(Arc::clone(&clock))
            .build()?;
        let mut quota = WriterQuota::new(ucm_infra::random_u64(), config.record_len);
        quota.report.root = config.root.display().to_string();
        let files = SpaceFiles {
            config,
            io,
            clock: Arc::clone(&clock),
            root: OnceLock::new(),
            closing: AtomicBool::default(),
        };
        let state = Arc::new(SpaceState {
            files: Arc::new(files),
            writer_quota: Mutex::new(quota),
            grant_table: Mutex::default(),
            term: AtomicU64::default(),
            notify: Notify::new(),
            granted: Notify::new(),
            leaving: OnceLock::new(),
        });
        let counter = Counter::new(&state, &worker);
        let agent = QuotaAgent::new(Arc::clone(&state), Arc::clone(&counter));
        Ok(Arc::new(Self {
            clock,
            state,
            counter,
            worker,
            agent: Mutex::new(Some(agent)),
            background: Arc::default(),
        }))
    }

    /// Sets the limit and starts the agent. `check` is called before any document is written, and
    /// fails if the root is not the one that was opened. `tend` is called before every count: it
    /// checks the same, accepts a root that is back, and returns the limit; else nothing is removed.
    pub fn open(
        self: &Arc<Self>,
        limit: u64,
        check: impl Fn(MonotonicTime) -> Result<()> + Send + Sync + 'static,
        tend: impl Fn(MonotonicTime) -> Result<u64> + Send + Sync + 'static,
    ) {
        self.quota().report.limit = limit;
        let (check, tend) = (Box::new(check), Box::new(tend));
        // The same ones when a root is opened again.
        let _ = self.state.files.root.set(Root { check, tend });
        if let Some(agent) = self.agent.lock().take() {
            agent.start(&self.worker);
        }
        self.state.notify.notify();
    }

    fn quota(&self) -> MutexGuard<'_, WriterQuota> {
        self.state.writer_quota.lock()
    }

    /// Wakes the quota agent if there is a reason.
    fn wake_if(&self, reason: bool) {
        if reason {
            self.state.notify.notify();
        }
    }

    /// Room for a write of `bytes`, for [`Quota::ended`] or [`Quota::commit`]. `None` if it only
    /// has to be granted: see [`Quota::await_grant`]. `Busy` at once if the limit has no room, or
    /// an earlier wait for the grant failed; the agent then requests a larger grant.
    pub fn reserve(&self, bytes: u64) -> Result<Option<Reservation>> {
        let (had, wakes) = self.quota().reserve(bytes, self.clock.now());
        self.wake_if(wakes);
        had
    }

    /// Waits until a grant holds `bytes`, or none is to be had now, by `deadline`; then
    /// [`Quota::reserve`] is called again. Before a first grant, what lies there is counted.
    pub fn await_grant(&self, bytes: u64, deadline: MonotonicTime) {
        let patience = self.quota().patience();
        let until = self.clock.now().after(patience).min(deadline);
        if !self.wait(bytes, until) {
            self.quota().asking.unanswered = true;
        }
    }

    /// Waits until there is an answer for `bytes`; false where there was none in time.
    fn wait(&self, bytes: u64, until: MonotonicTime) -> bool {
        let mut turned = false;
        loop {
            let seen = self.state.granted.seen();
            {
                let (mut quota, now) = (self.quota(), self.clock.now());
                if quota.answers(bytes, now) {
                    return true;
                }
                let lasting = |error: &Error| error.kind() != ErrorKind::Timeout; // not only slow
                if now >= until || turned && quota.report.trouble.as_ref().is_some_and(lasting) {
                    return false;
                }
                quota.asking.waiting += 1;
            }
            self.state.notify.notify();
            self.clock.sleep(&self.state.granted, seen, Some(until));
            self.quota().asking.waiting -= 1;
            turned = true;
        }
    }

    /// A reserved write ended. If it wrote nothing for sure ([`is_unsure`]) its bytes are free
    /// again. A full medium pauses all writes for a while and starts the collector.
    pub fn ended(&self, reservation: Reservation, error: Option<&Error>) {
        let now = self.clock.now();
        let full = self.quota().ended(reservation, error, now);
        self.wake_if(full);
    }

    /// Room that was reserved at once for several records is not all needed: `kept` bytes of it
    /// were written, or may have been. `error` counts for the medium as in [`Quota::ended`].
    pub fn commit(&self, reservation: Reservation, kept: u64, error: Option<&Error>) {
        let now = self.clock.now();
        let full = self.quota().commit(reservation, kept, error, now);
        self.wake_if(full);
    }

    /// Reserves `bytes` and waits for them until then at most; for the control path.
    pub fn reserve_blocking(&self, bytes: u64, until: MonotonicTime) -> Result<Reservation> {
        match self.reserve(bytes) {
            Ok(Some(reservation)) => return Ok(reservation),
            Err(error) if error.kind() != ErrorKind::Busy => return Err(error),
            Ok(None) | Err(_) => self.wait(bytes, until.min(self.clock.now().after(PATIENCE))),
        };
        let none = || Error::new(ErrorKind::Busy, "no room was made in time");
        self.reserve(bytes)?.ok_or_else(none)
    }

    /// This writer's largest write is at least this long: its grant is to hold that.
    pub fn expect_writes_of(&self, bytes: u64) {
        let mut quota = self.quota();
        quota.unit = quota.unit.max(bytes);
    }

    /// Reserves `bytes` for a write that nothing depends on, of what is granted already, without
    /// waiting. `Busy` when that is too little.
    pub fn try_reserve(&self, bytes: u64) -> Result<Reservation> {
        let spare = self.quota().try_reserve(bytes, self.clock.now());
        let none = || Error::new(ErrorKind::Busy, "there is no room to spare now");
        spare.ok_or_else(|| none().with("bytes", bytes))
    }

    /// How many counts were begun or ended, for [`Quota::deleted`].
    pub fn counts(&self) -> u64 {
        self.counter.counts()
    }

    /// Bytes were deleted by name, in an operation begun when [`Quota::counts`] was `before`: a
    /// count since may have missed them. Of others' deletions the collector knows by its next count.
    /// `count_again`: what is removed so seldom that it is worth another count where it is not
    /// known what the last one saw.
    pub fn deleted(&self, bytes: u64, before: u64, count_again: bool) {
        let mut table = self.state.grant_table.lock();
        if self.state.term() == 0 {
            return;
        }
        if before == self.counts() && before.is_multiple_of(2) {
            table.removed(0, bytes);
            self.state.show(&table);
        } else if count_again {
            table.in_doubt = true;
        }
    }

    /// The root was lost and is back, perhaps with something else in it: nothing is granted before
    /// the next count.
    pub fn lost(&self) {
        self.state.grant_table.lock().counted = None;
    }

    /// Bytes used and allowed.
    pub fn usage(&self) -> Usage {
        let quota = self.quota();
        Usage {
            used: quota.used(),
            capacity: quota.report.limit,
            records: quota.report.records,
            counted: quota.report.counted,
            collector: self.state.term() > 0,
            paused: quota.barred(quota.unit, self.clock.now()).is_some(),
        }
    }

    /// Records and bytes removed so far.
    pub fn removed(&self) -> (u64, u64) {
        self.quota().removed
    }

    /// Runs a longer job of the control path on a background thread.
    pub fn in_background<T: Send + 'static>(
        &self,
        deadline: MonotonicTime,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        done: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        self.background.0.fetch_add(1, Ordering::AcqRel);
        let background = Arc::clone(&self.background);
        let tell = move |result: Result<Result<T>>| {
            done(result.and_then(|inner| inner));
            background.0.fetch_sub(1, Ordering::AcqRel);
            background.1.notify();
        };
        if let Err(refused) = self.worker.offer(LANE_WORK, deadline, work, tell) {
            (refused.done)(Err(refused.error));
        }
    }

    /// Resigns, refuses what waits, and ends the background threads.
    pub fn shutdown(&self, drain: Duration) {
        self.state.files.closing.store(true, Ordering::Release); // a count ends here
        self.quota().closed = true;
        self.state.granted.notify();
        // A process that still writes cannot resign, and the next collector would have to wait for
        // this one's silence.
        let now = self.clock.now();
        let (until, half) = (now.after(drain), now.after(drain / 2));
        loop {
            let (running, ends) = &*self.background;
            let seen = ends.seen();
            if running.load(Ordering::Acquire) == 0 || self.clock.now() >= half {
                break;
            }
            self.clock.sleep(ends, seen, Some(half));
        }
        let _ = self.state.leaving.set(until);
        self.state.notify.notify();
        self.worker.shutdown(until.since(self.clock.now()));
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        self.state.notify.notify(); // the quota agent ends
    }
}

#[cfg(test)]
mod tests {
    use ucm_infra::SystemClock;
    use ucm_io::{IoOptions, Process};

    use super::*;

    #[test]
    fn a_write_waits_for_its_first_grant_though_looks_at_the_medium_come_late() {
        let (dir, clock) = (tempfile::TempDir::new().unwrap(), SystemClock::shared());
        let config = QuotaConfig {
            root: dir.path().to_owned(),
            process: Process::this(),
            record_len: 1,
            ..QuotaConfig::default()
        };
        let io = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
        let quota = Quota::new(config, Arc::clone(&io), Arc::clone(&clock)).unwrap();
        let looks = AtomicUsize::default();
        let late = || Err(Error::new(ErrorKind::Timeout, "late"));
        let tend = move |_| match looks.fetch_add(1, Ordering::Relaxed) {
            0..4 => late(),
            _ => Ok(1000),
        };
        assert!(quota.reserve(1).unwrap().is_none(), "not granted yet");
        quota.open(1000, move |_| late().map(drop), tend);
        quota.await_grant(1, clock.now().after(FIRST));
        assert!(quota.reserve(1).unwrap().is_some());
        io.shutdown(FIRST);
    }
}
