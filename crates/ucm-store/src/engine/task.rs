//! A load or dump under way: how far each row is, which failed, and the waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use ucm_core::Error;
use ucm_core::sync::Mutex;
use ucm_device::Event;
use ucm_infra::{Clock, Completion, MonotonicTime, Notify};

use crate::stats::StageSpan;
use crate::tiers::MAX_TIERS;

/// Which of a dump's two levels a caller waits for. A load has one level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Device memory may be reused.
    Staged,
    /// Visible to others, survives this process.
    Published,
}

/// How long after a task's deadline its last reports may take.
const GRACE: Duration = Duration::from_secs(1);

/// Shared state of one task. Counts rows down to each level; both levels are reached exactly once.
pub(crate) struct TaskState {
    pub(crate) started: MonotonicTime,
    pub(crate) deadline: MonotonicTime,
    unstaged: AtomicUsize,
    /// Rows whose block the medium has not taken yet.
    unplaced: AtomicUsize,
    unfinished: AtomicUsize,
    staged: Arc<Completion<()>>,
    finished: Arc<Completion<()>>,
    failures: Mutex<BTreeMap<usize, Error>>,
    /// Rows of a load that have arrived.
    arrived: Box<[AtomicBool]>,
    /// Notified when rows have arrived or failed, and at the end.
    news: Notify,
    /// A caller waits for it to be published.
    flush_wanted: AtomicBool,
    figures: Figures,
}

/// See [`Task::served`] and [`Task::stages`].
#[derive(Default)]
struct Figures {
    served: [AtomicU64; MAX_TIERS],
    stages: Mutex<BTreeMap<&'static str, [f64; 3]>>,
}

impl TaskState {
    pub(crate) fn new(rows: usize, started: MonotonicTime, deadline: MonotonicTime) -> Arc<Self> {
        let state = Self {
            started,
            deadline,
            unstaged: AtomicUsize::new(rows),
            unplaced: AtomicUsize::new(rows),
            unfinished: AtomicUsize::new(rows),
            staged: Completion::new(),
            finished: Completion::new(),
            failures: Mutex::default(),
            arrived: (0..rows).map(|_| AtomicBool::new(false)).collect(),
            news: Notify::new(),
            flush_wanted: AtomicBool::new(false),
            figures: Figures::default(),
        };
        if rows == 0 {
            state.staged.complete(());
            state.finished.complete(());
        }
        Arc::new(state)
    }

    /// `n` rows' device memory is free again. True for the call that completed the level.
    pub(crate) fn rows_staged(&self, n: usize) -> bool {
        n > 0 && self.unstaged.fetch_sub(n, Ordering::AcqRel) == n && self.staged.complete(())
    }

    /// The medium has taken the blocks of `n` rows, or never will.
    pub(crate) fn rows_placed(&self, n: usize) {
        self.unplaced.fetch_sub(n, Ordering::SeqCst);
    }

    /// `n` rows are finished for good (well, or recorded as failed before). True for the call that
    /// completed it.
    pub(crate) fn rows_finished(&self, n: usize) -> bool {
        let last = n > 0
            && self.unfinished.fetch_sub(n, Ordering::AcqRel) == n
            && self.finished.complete(());
        if last {
            self.news.notify();
        }
        last
    }

    /// These rows of a load were verified and are where they were wanted.
    pub(crate) fn rows_arrived(&self, rows: impl Iterator<Item = usize>) {
        for row in rows {
            self.arrived[row].store(true, Ordering::Release);
        }
        self.news.notify();
    }

    pub(crate) fn has_arrived(&self, row: usize) -> bool {
        let arrived = self.arrived.get(row);
        arrived.is_some_and(|arrived| arrived.load(Ordering::Acquire))
    }

    /// Records why a row failed, unless it failed before; the row is still to be counted as
    /// finished.
    pub(crate) fn fail_row(&self, row: usize, error: Error) {
        self.failures.lock().entry(row).or_insert(error);
        self.news.notify();
    }

    pub(crate) fn failed(&self, row: usize) -> bool {
        self.failures.lock().contains_key(&row)
    }

    /// A caller waits for it to be published.
    pub(crate) fn flush_soon(&self) {
        // The thread that counts the last row as placed sees this flag, or this thread sees that
        // it was placed.
        self.flush_wanted.store(true, Ordering::SeqCst);
    }

    /// Whether a caller waits, and the backend has every block of it that it ever will.
    pub(crate) fn only_waits(&self) -> bool {
        self.flush_wanted.load(Ordering::SeqCst) && self.is_handed_over()
    }

    /// Whether the backend has every block of it that it ever will, and it is not published yet.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.unplaced.load(Ordering::SeqCst) == 0 && !self.is_finished()
    }

    /// A block arrived that was read from this tier.
    pub(crate) fn serve(&self, tier: usize) {
        if let Some(blocks) = self.figures.served.get(tier) {
            blocks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One of its blocks was in this stage; of a read that it joined, only the time since then.
    pub(crate) fn note_stage(&self, stage: &'static str, span: StageSpan) {
        let Some((began, ended)) = span else { return };
        let seconds = |at: MonotonicTime| at.since(self.started).as_secs_f64();
        let (from, to, mut stages) = (seconds(began), seconds(ended), self.figures.stages.lock());
        let times = stages.entry(stage).or_insert([from, to, 0.0]);
        *times = [times[0].min(from), times[1].max(to), times[2] + to - from];
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished.peek().is_some()
    }
}

/// The tasks of an engine that have not ended yet.
#[derive(Default)]
pub(crate) struct OpenTasks {
    count: AtomicUsize,
    ended: Notify,
}

impl OpenTasks {
    /// Counts a task until it is finished.
    pub(crate) fn add(self: &Arc<Self>, task: &TaskState) {
        self.count.fetch_add(1, Ordering::AcqRel);
        let tasks = Arc::clone(self);
        task.finished.on_complete(move |()| {
            tasks.count.fetch_sub(1, Ordering::AcqRel);
            tasks.ended.notify();
        });
    }

    /// Waits until none is left, at most until `until`.
    pub(crate) fn wait(&self, clock: &dyn Clock, until: MonotonicTime) {
        loop {
            let seen = self.ended.seen();
            if self.count.load(Ordering::Acquire) == 0 || clock.now() >= until {
                return;
            }
            clock.sleep(&self.ended, seen, Some(until));
        }
    }
}

/// Handle of a task; cheap to clone, and waiting for it can be repeated.
#[derive(Clone)]
pub struct Task {
    pub(crate) state: Arc<TaskState>,
    /// Ends the task at its deadline (a load cancels what is still reading).
    pub(crate) expire: Arc<dyn Fn() + Send + Sync>,
    /// Called when a caller waits for it to be published.
    pub(crate) flush_soon: Arc<dyn Fn() + Send + Sync>,
}

impl Task {
    /// Whether the level was reached or failed. Never waits; a task past its deadline is ended
    /// here.
    pub fn check(&self, clock: &dyn Clock, until: Until) -> bool {
        if self.level(until).peek().is_some() {
            return true;
        }
        if clock.now() >= self.state.deadline {
            (self.expire)();
        }
        self.level(until).peek().is_some()
    }

    /// Waits until the level is reached, at most until `limit` and never past the task's own
    /// deadline. False if the limit was first. A backend that publishes many records at once
    /// publishes them soon.
    pub fn wait(&self, clock: &dyn Clock, until: Until, limit: Option<MonotonicTime>) -> bool {
        if until == Until::Published && !self.state.is_finished() {
            (self.flush_soon)();
        }
        let deadline = self.state.deadline;
        let first = limit.map_or(deadline, |limit| limit.min(deadline));
        if self.level(until).wait(clock, Some(first)).is_some() || self.check(clock, until) {
            return true;
        }
        if clock.now() < deadline {
            return false; // the caller's own limit
        }
        // Past the deadline the last reports follow: copies end at memory speed, I/O is written
        // off by its pool.
        let grace = deadline.after(GRACE);
        let last = limit.map_or(grace, |limit| limit.min(grace));
        self.level(until).wait(clock, Some(last)).is_some()
    }

    /// Records `event` once the device memory of the task is free, whether it succeeded or not: no
    /// copy of it is under way (other than one of a dump that hung and was given up), and none will
    /// begin. At once if it is free already.
    pub fn record(&self, event: Arc<dyn Event>) {
        self.state.staged.on_complete(move |()| event.record());
    }

    /// Whether a row of a load has arrived: its bytes were verified and are on the device, and stay
    /// there. The rows of a block arrive in the order of its layers, and each before the rest of
    /// its block, where the medium reads it in parts. If a later one of its block fails, the block
    /// has failed ([`Task::failures`] names all of its rows then). Never waits.
    pub fn shard_done(&self, row: usize) -> bool {
        self.state.has_arrived(row)
    }

    /// Waits until a row of a load has arrived, at most until `limit` and never past the task's own
    /// deadline. False where it has not: the limit was first, or the row failed.
    pub fn wait_shard(&self, clock: &dyn Clock, row: usize, limit: Option<MonotonicTime>) -> bool {
        let (deadline, limit) = (self.state.deadline, limit.unwrap_or(MonotonicTime::NEVER));
        loop {
            let seen = self.state.news.seen();
            if self.shard_done(row) || self.state.failed(row) || self.check(clock, Until::Published)
            {
                return self.shard_done(row);
            }
            let now = clock.now();
            let last = deadline.after(GRACE * u32::from(now >= deadline));
            if now >= last.min(limit) {
                return false;
            }
            clock.sleep(&self.state.news, seen, Some(last.min(limit)));
        }
    }

    /// The rows that failed, with why; final once the task is finished.
    pub fn failures(&self) -> Vec<(usize, Error)> {
        let failures = self.state.failures.lock().clone();
        failures.into_iter().collect()
    }

    /// Blocks of a load that arrived, by the tier they were read from, counted from the top; final
    /// once the task is finished. A medium alone is tier 0.
    pub fn served(&self) -> [u64; MAX_TIERS] {
        let served = self.state.figures.served.each_ref();
        served.map(|blocks| blocks.load(Ordering::Relaxed))
    }

    /// The stages of its blocks, where their times are kept ([`crate::stats::keep_stages`]): the
    /// first begin and the last end in seconds after the task's begin, and the sum of all blocks.
    pub fn stages(&self) -> BTreeMap<&'static str, [f64; 3]> {
        self.state.figures.stages.lock().clone()
    }

    fn level(&self, until: Until) -> &Completion<()> {
        match until {
            Until::Staged => &self.state.staged,
            Until::Published => &self.state.finished,
        }
    }
}
