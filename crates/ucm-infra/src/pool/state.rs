//! Who does what in a pool: the decisions, without threads or callbacks.

use std::collections::VecDeque;
use std::sync::Arc;

use ucm_core::Error;

use super::inbox::{Inbox, Queued};
use super::job::Job;
use super::stats::{Lane, PoolStats};
use crate::clock::MonotonicTime;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Takes jobs.
    Open,
    /// Takes no more jobs, runs those it has.
    Draining,
    /// Runs nothing more; every job has been reported or is about to be.
    Stopped,
}

struct LaneState {
    spec: Lane,
    inbox: Arc<Inbox>,
    /// The jobs that wait, as far as they were collected.
    queue: VecDeque<Queued>,
    /// Its jobs on live workers.
    running: usize,
}

/// The place of one thread. There are as many as threads may ever exist at once.
enum Slot {
    Free,
    /// In `on_start`.
    Starting {
        deadline: MonotonicTime,
    },
    Idle,
    Busy {
        lane: usize,
        job: Arc<dyn Job>,
        deadline: MonotonicTime,
    },
    /// Written off; its thread is still inside a call.
    Stuck,
}

/// What a worker does after a job or its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Takes another job.
    Stay,
    /// Was written off, is counted again, and takes another job.
    Rejoin,
    /// Its place was filled meanwhile, or the pool is stopped.
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
    /// Workers there should be by now: all, or as many as were ever needed at once.
    wanted: usize,
    /// Whether the monitor thread exists.
    pub(super) monitored: bool,
    /// No thread is started before this: the last attempt failed.
    start_not_before: MonotonicTime,
    /// The first failed start, for the builder.
    pub(super) start_error: Option<Error>,
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
            wanted: size,
            monitored: false,
            start_not_before: MonotonicTime::default(),
            start_error: None,
            replaced: 0,
            failed_starts: 0,
            callback_panics: 0,
        }
    }

    /// Starts no worker before it is wanted.
    pub(super) fn on_demand(mut self, on_demand: bool) -> Self {
        self.wanted = if on_demand { 0 } else { self.size };
        self
    }

    /// Moves the jobs that were handed over into their lanes.
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

    /// Workers that shutdown still waits for: all but those written off.
    pub(super) fn active(&self) -> usize {
        self.count(|slot| !matches!(slot, Slot::Free | Slot::Stuck))
    }

    /// Workers in `on_start`.
    pub(super) fn starting(&self) -> usize {
        self.count(|slot| matches!(slot, Slot::Starting { .. }))
    }

    /// Jobs waiting.
    pub(super) fn queued(&self) -> usize {
        self.lanes.iter().map(|lane| lane.queue.len()).sum()
    }

    /// How many jobs of a lane may run. While workers are stuck and not replaced, a limited lane
    /// gets its share of those left, never the last one: a part of the workers stays free for the
    /// lanes without a limit.
    fn allowed(&self, lane: &Lane, live: usize) -> usize {
        if lane.max_running >= self.size || live >= self.size {
            lane.max_running
        } else {
            (lane.max_running * live)
                .div_ceil(self.size)
                .min(live.saturating_sub(1))
        }
    }

    /// The lane whose job comes next, if any may run.
    fn next_lane(&self) -> Option<usize> {
        // Those that were not needed yet, or are on their way, count as there.
        let live = self.live() + self.starting() + (self.size - self.wanted);
        let ready = |&number: &usize| {
            self.lanes.get(number).is_some_and(|lane| {
                let allowed = self.allowed(&lane.spec, live);
                !lane.queue.is_empty() && lane.running < allowed
            })
        };
        (0..self.lanes.len()).find(ready)
    }

    /// Whether some job could run now if a worker were free.
    pub(super) fn has_work(&self) -> bool {
        self.next_lane().is_some()
    }

    /// Wants another worker where jobs may run that no worker waits for; whether it does.
    pub(super) fn grow(&mut self) -> bool {
        let coming = self.count(|slot| matches!(slot, Slot::Idle | Slot::Starting { .. }));
        let grows = self.is_growing() && coming < self.queued() && self.has_work();
        self.wanted += usize::from(grows);
        grows
    }

    /// Gives the next job to an idle worker. A job that is past its deadline goes to `late`
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

    /// A worker ended its job, or `on_start` succeeded.
    pub(super) fn ready(&mut self, slot: usize) -> Next {
        // A replacement that is on its way counts: it was started for this very place.
        let wanted = self.phase != Phase::Stopped && self.live() + self.starting() < self.wanted;
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
            Slot::Starting { .. } | Slot::Idle | Slot::Free => Next::Stay,
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

    /// A worker's start failed; no other is tried before `retry`.
    pub(super) fn start_failed(&mut self, slot: usize, retry: MonotonicTime, error: Error) {
        self.left(slot);
        self.failed_starts += 1;
        self.start_not_before = retry;
        self.start_error.get_or_insert(error);
    }

    /// Takes every job that is past its deadline out of the queues and off its worker, and writes
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
                Slot::Starting { deadline } if *deadline <= now => *slot = Slot::Stuck,
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

    /// Claims places for the workers that are missing, as many as the cap allows.
    pub(super) fn claim_missing(
        &mut self,
        now: MonotonicTime,
        start_deadline: MonotonicTime,
        replacing: bool,
    ) -> Vec<usize> {
        let wanted = match self.phase {
            Phase::Open => true,
            Phase::Draining => self.queued() > 0,
            Phase::Stopped => false,
        };
        if !wanted || now < self.start_not_before {
            return Vec::new();
        }
        let missing = self.wanted.saturating_sub(self.live() + self.starting());
        let mut claimed = Vec::new();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if claimed.len() == missing {
                break;
            }
            if matches!(slot, Slot::Free) {
                *slot = Slot::Starting {
                    deadline: start_deadline,
                };
                claimed.push(index);
            }
        }
        if replacing {
            self.replaced += claimed.len() as u64;
        }
        claimed
    }

    /// The earliest point at which the monitor has something to do.
    pub(super) fn next_event(&self, now: MonotonicTime) -> MonotonicTime {
        let slots = self.slots.iter().filter_map(|slot| match slot {
            Slot::Busy { deadline, .. } | Slot::Starting { deadline } => Some(*deadline),
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

    /// Takes every job that is left, queued or running, at the end of a shutdown.
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
