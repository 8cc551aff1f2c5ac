//! The background threads: one keeps the time of writes and waits, one looks for others' segments,
//! one looks after the space, some put segments.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ucm_core::Result;
use ucm_infra::{Clock, Lane, MonotonicTime, Notify, Runtime, WorkerPool};

use super::discovery::TURN;
use super::{Objects, UPLOADS};

const LANE_TIMER: usize = 0;
const LANE_DISCOVERY: usize = 1;
const LANE_SPACE: usize = 2;
/// Where segments are put.
pub(super) const LANE_UPLOAD: usize = 3;

/// What is waited for: a bell, how often it had been rung, and until when.
type Next = (Notify, u64, Option<MonotonicTime>);

/// See the module.
pub(super) struct Upkeep {
    /// Where the client works.
    pub(super) runtime: Arc<Runtime>,
    pub(super) pool: Arc<WorkerPool>,
    /// Rung when a segment may have to be put, or a wait has ended.
    pub(super) timer: Notify,
    started: AtomicBool,
    closing: AtomicBool,
}

impl Upkeep {
    pub(super) fn new(clock: &Arc<dyn Clock>) -> Result<Self> {
        let lane = |name, max_running| Lane {
            name,
            capacity: 8,
            max_running,
        };
        let pool = WorkerPool::builder("ucm-object")
            .on_demand()
            .size(3 + UPLOADS)
            .lanes(&[
                lane("timer", 1),
                lane("finder", 1),
                lane("space", 1),
                lane("upload", UPLOADS),
            ])
            .clock(Arc::clone(clock))
            .build()?;
        Ok(Self {
            runtime: Runtime::of_this_process()?,
            pool,
            timer: Notify::new(),
            started: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        })
    }

    /// From now on nothing is begun any more.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

impl Objects {
    /// Starts the threads, once.
    pub(super) fn start(self: &Arc<Self>) {
        if self.upkeep.started.swap(true, Ordering::AcqRel) {
            return;
        }
        self.run(LANE_DISCOVERY, Self::tend_finding);
        self.run(LANE_TIMER, Self::tend_time);
        if !self.config.scope.lookup_only {
            self.run(LANE_SPACE, Self::keep_space);
        }
    }

    /// Does one thing after the other on a thread of its own, as long as the store is open and
    /// somebody has it.
    fn run(self: &Arc<Self>, lane: usize, turn: fn(&Arc<Self>) -> Next) {
        let (weak, clock) = (Arc::downgrade(self), Arc::clone(&self.clock));
        let work = move || {
            while let Some(objects) = weak.upgrade().filter(|objects| !objects.is_closing()) {
                let (notify, seen, until) = turn(&objects);
                drop(objects); // a thread that sleeps keeps nothing alive
                clock.sleep(&notify, seen, until);
            }
        };
        let _ = self
            .upkeep
            .pool
            .submit(lane, MonotonicTime::NEVER, work, |_| {}); // a pool that ends wants no more
    }

    /// Has every thread look whether it is to end.
    pub(super) fn wake(&self) {
        self.upkeep.timer.notify();
        self.discovery.notify.notify();
        self.wake_space();
    }

    fn tend_time(self: &Arc<Self>) -> Next {
        let (seen, now) = (self.upkeep.timer.seen(), self.clock.now());
        let writes = self.tend_writes(now);
        let looks = self.discovery.looks.end_late(now);
        let next = writes.into_iter().chain(looks).min();
        (self.upkeep.timer.clone(), seen, next)
    }

    fn tend_finding(self: &Arc<Self>) -> Next {
        let (notify, now) = (self.discovery.notify.clone(), self.clock.now());
        let seen = notify.seen();
        let due = self.next_look(now);
        if due.is_some_and(|due| due <= now) {
            self.find(now.after(TURN));
            let next = self.next_look(self.clock.now());
            return (notify, seen, next);
        }
        (notify, seen, due)
    }

    fn keep_space(self: &Arc<Self>) -> Next {
        let notify = self.space_notify();
        let seen = notify.seen();
        let next = self.tend_space();
        (notify, seen, Some(next))
    }
}
