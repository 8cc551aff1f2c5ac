//! The decisions of a pool, without threads or callbacks.

use std::collections::VecDeque;
use std::sync::Arc;

use super::inbox::{Inbox, Queued};
use super::job::Job;
use super::stats::{Lane, PoolStats};
use crate::clock::MonotonicTime;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Takes jobs.
    Open,
    /// Accepts no more jobs, runs those it has.
    Draining,
    /// Starts no more jobs; every job has been reported or is about to be.
    Stopped,
}

struct LaneState {
    spec: Lane,
    inbox: Arc<Inbox>,
    /// The waiting jobs that were collected.
    queue: VecDeque<Queued>,
    /// Number of its jobs on live workers.
    running: usize,
}

/// The place of one thread. There is one for each thread that may exist at the same time.
enum Slot {
    Free,
    /// Without a job, or its thread is starting.
    Idle,
    Busy {
        lane: usize,
        job: Arc<dyn Job>,
        deadline: MonotonicTime,
    },
    /// Written off; its thread still hangs in a call.
    Stuck,
}

/// Next step of a worker after a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Takes another job.
    Stay,
    /// It was written off, counts again, and takes another job.
    Rejoin,
    /// Its replacement exists, or the pool is stopped.
    Leave,
}

/// A job that passed its deadline.
pub(super) struct Overdue {
    pub(super) job: Arc<dyn Job>,
    pub(super) lane: &'static str,
    pub(super) was: &'static str,
}

pub(super) struct State {
    pub(super) phase: Phase,
    lanes: Vec<LaneState>,
    slots: Vec<Slot>,
    size: usize,
    /// Target number of workers: as many as were ever needed at once.
    wanted: usize,
    /// Whether the monitor thread exists.
    pub(super) monitored: bool,
    /// No thread is started before this time, because the last attempt failed.
    start_not_before: MonotonicTime,
    replaced: u64,
    failed_starts: u64,
    pub(super) callback_panics: u64,
}

impl State {
    pub(super) fn new(size: usize, max_replacements: usize, inboxes: &[Arc<Inbox>]) -> Self {
        let lane = |inbox: &Arc<Inbox>| LaneState {
            spec: inbox.spec,
            inbox: Arc::clone(inbox),
            queue: VecDeque::new(),
            running: 0,
        };
        Self {
            phase: Phase::Open,
            lanes: inboxes.iter().map(lane).collect(),
            slots: (0..size + max_replacements).map(|_| Slot::Free).collect(),
            size,
            wanted: 0,
            monitored: false,
            start_not_before: MonotonicTime::default(),
            replaced: 0,
            failed_starts: 0,
            callback_panics: 0,
        }
    }

    /// Moves the submitted jobs into their lanes.
    pub(super) fn collect(&mut self) {
        for lane in &mut self.lanes {
            while let Some(queued) = lane.inbox.pop() {
                lane.queue.push_back(queued);
            }
        }
    }

    /// Whether more workers are started as more jobs wait.
    pub(super) fn is_growing(&self) -> bool {
        self.wanted < self.size
    }

    fn count(&self, which: impl Fn(&Slot) -> bool) -> usize {
        self.slots.iter().filter(|slot| which(slot)).count()
    }

    /// Workers that take jobs.
    fn live(&self) -> usize {
        self.count(|slot| matches!(slot, Slot::Idle | Slot::Busy { .. }))
    }

    /// Workers written off.
    pub(super) fn stuck(&self) -> usize {
        self.count(|slot| matches!(slot, Slot::Stuck))
    }

    /// Number of workers that shutdown still waits for: all but those written off.
    pub(super) fn active(&self) -> usize {
        self.count(|slot| !matches!(slot, Slot::Free | Slot::Stuck))
    }

    /// Jobs waiting.
    pub(super) fn queued(&self) -> usize {
        self.lanes.iter().map(|lane| lane.queue.len()).sum()
    }

    /// Number of jobs of a lane that may run. While workers are stuck and not replaced, a limited
    /// lane gets its share of the remaining ones, never the last one: part of the workers stays
    /// free for the lanes without a limit.
    fn allowed(&self, lane: &Lane, live: usize) -> usize {
        if lane.max_running >= self.size || live >= self.size {
            lane.max_running
        } else {
            (lane.max_running * live)
                .div_ceil(self.size)
                .min(live.saturating_sub(1))
        }
    }

    /// The lane whose job runs next, if any may run.
    fn next_lane(&self) -> Option<usize> {
        // Workers that were not needed yet and can be started count as present.
        let free = self.count(|slot| matches!(slot, Slot::Free));
        let live = self.live() + free.min(self.size - self.wanted);
        let ready = |&number: &usize| {
            self.lanes.get(number).is_some_and(|lane| {
                let allowed = self.allowed(&lane.spec, live);
                !lane.queue.is_empty() && lane.running < allowed
            })
        };
        (0..self.lanes.len()).find(ready)
    }

    /// True if a job could run now on a free worker.
    pub(super) fn has_work(&self) -> bool {
        self.next_lane().is_some()
    }

    /// Raises the target if a job may run and no idle worker is left for it; true if it did.
    pub(super) fn grow(&mut self) -> bool {
        let idle = self.count(|slot| matches!(slot, Slot::Idle));
        let grows = self.is_growing() && idle < self.queued() && self.has_work();
        self.wanted += usize::from(grows);
        grows
    }

    /// Returns the next job for an idle worker. Jobs past their deadline are moved to `late`
    /// instead.
    pub(super) fn take(
        &mut self,
        slot: usize,
        now: MonotonicTime,
        late: &mut Vec<Overdue>,
    ) -> Option<Arc<dyn Job>> {
        if self.phase == Phase::Stopped {
            return None;
        }
        while let Some(lane) = self.next_lane() {
            let state = self.lanes.get_mut(lane)?;
            let Queued { job, deadline } = state.queue.pop_front()?;
            state.inbox.release(1);
            if deadline <= now {
                late.push(Overdue {
                    job,
                    lane: state.spec.name,
                    was: "queued",
                });
                continue;
            }
            state.running += 1;
            *self.slots.get_mut(slot)? = Slot::Busy {
                lane,
                job: Arc::clone(&job),
                deadline,
            };
            return Some(job);
        }
        None
    }

    /// A worker ended its job.
    pub(super) fn ready(&mut self, slot: usize) -> Next {
        // A replacement that is starting counts: it was started for this very place.
        let wanted = self.phase != Phase::Stopped && self.live() < self.wanted;
        let Some(place) = self.slots.get_mut(slot) else {
            return Next::Leave;
        };
        let next = match place {
            Slot::Busy { lane, .. } => {
                if let Some(lane) = self.lanes.get_mut(*lane) {
                    lane.running -= 1;
                }
                Next::Stay
            }
            Slot::Stuck if wanted => Next::Rejoin,
            Slot::Stuck => return Next::Leave,
            Slot::Idle | Slot::Free => Next::Stay,
        };
        *place = Slot::Idle;
        next
    }

    /// A worker's thread ends, or could not be started.
    pub(super) fn left(&mut self, slot: usize) {
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Slot::Free;
        }
    }

    /// A worker's start failed; the next attempt is not before `retry`.
    pub(super) fn start_failed(&mut self, slot: usize, retry: MonotonicTime) {
        self.left(slot);
        self.failed_starts += 1;
        self.start_not_before = retry;
    }

    /// Removes every job that is past its deadline from the queues and from its worker, and writes
    /// such workers off.
    pub(super) fn overdue(&mut self, now: MonotonicTime) -> Vec<Overdue> {
        let mut overdue = Vec::new();
        for slot in &mut self.slots {
            match slot {
                Slot::Busy {
                    lane,
                    job,
                    deadline,
                } if *deadline <= now => {
                    let lane = self.lanes.get_mut(*lane);
                    overdue.push(Overdue {
                        job: Arc::clone(job),
                        lane: lane.as_ref().map_or("", |lane| lane.spec.name),
                        was: "running",
                    });
                    if let Some(lane) = lane {
                        lane.running -= 1;
                    }
                    *slot = Slot::Stuck;
                }
                _ => {}
            }
        }
        for lane in &mut self.lanes {
            if lane.queue.iter().any(|queued| queued.deadline <= now) {
                let (late, still) = std::mem::take(&mut lane.queue)
                    .into_iter()
                    .partition(|queued| queued.deadline <= now);
                lane.queue = still;
                let late: VecDeque<Queued> = late;
                lane.inbox.release(late.len());
                overdue.extend(late.into_iter().map(|queued| Overdue {
                    job: queued.job,
                    lane: lane.spec.name,
                    was: "queued",
                }));
            }
        }
        overdue
    }

    /// Claims places for the missing workers, up to the cap.
    pub(super) fn claim_missing(&mut self, now: MonotonicTime, replacing: bool) -> Vec<usize> {
        let wanted = match self.phase {
            Phase::Open => true,
            Phase::Draining => self.queued() > 0,
            Phase::Stopped => false,
        };
        if !wanted || now < self.start_not_before {
            return Vec::new();
        }
        let missing = self.wanted.saturating_sub(self.live());
        let mut claimed = Vec::new();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if claimed.len() == missing {
                break;
            }
            if matches!(slot, Slot::Free) {
                *slot = Slot::Idle;
                claimed.push(index);
            }
        }
        if replacing {
            self.replaced += claimed.len() as u64;
        }
        claimed
    }

    /// The next time at which the monitor has something to do.
    pub(super) fn next_event(&self, now: MonotonicTime) -> MonotonicTime {
        let slots = self.slots.iter().filter_map(|slot| match slot {
            Slot::Busy { deadline, .. } => Some(*deadline),
            _ => None,
        });
        let queued = self
            .lanes
            .iter()
            .flat_map(|lane| &lane.queue)
            .map(|queued| queued.deadline);
        let retry = (now < self.start_not_before).then_some(self.start_not_before);
        slots
            .chain(queued)
            .chain(retry)
            .min()
            .unwrap_or(MonotonicTime::NEVER)
    }

    /// Removes every remaining job, queued or running, at the end of a shutdown.
    pub(super) fn abandon(&mut self) -> Vec<Arc<dyn Job>> {
        let mut left = Vec::new();
        for slot in &mut self.slots {
            if let Slot::Busy { lane, job, .. } = slot {
                left.push(Arc::clone(job));
                if let Some(lane) = self.lanes.get_mut(*lane) {
                    lane.running -= 1;
                }
                *slot = Slot::Stuck;
            }
        }
        for lane in &mut self.lanes {
            lane.inbox.release(lane.queue.len());
            left.extend(lane.queue.drain(..).map(|queued| queued.job));
        }
        left
    }

    pub(super) fn stats(&self) -> PoolStats {
        PoolStats {
            size: self.size,
            live: self.live(),
            idle: self.count(|slot| matches!(slot, Slot::Idle)),
            stuck: self.stuck(),
            replaced: self.replaced,
            failed_starts: self.failed_starts,
            callback_panics: self.callback_panics,
            lanes: self
                .lanes
                .iter()
                .map(|lane| {
                    lane.inbox
                        .counters
                        .stats(lane.spec, lane.queue.len(), lane.running)
                })
                .collect(),
        }
    }
}
