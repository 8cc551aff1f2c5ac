//! Who waits, who is on its way and who is lost: the decisions of the engine, without threads, callbacks or a kernel.

use std::collections::VecDeque;

use ucm_core::{Error, ErrorKind};
use ucm_infra::{Lane, Mono};

use super::work::Work;
use crate::engine::Done;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Takes operations.
    Open,
    /// Takes no more, ends those it has.
    Draining,
    /// Everything has been answered or is about to be.
    Stopped,
}

/// An operation in the queue of its lane.
pub(super) struct Waiting {
    pub(super) work: Box<Work>,
    pub(super) deadline: Mono,
    pub(super) done: Done,
}

struct LaneState {
    spec: Lane,
    queue: VecDeque<Waiting>,
    /// Its operations on their way that somebody waits for.
    running: usize,
}

/// The place of one operation on its way; its number goes to the kernel and comes back with every answer.
enum Place {
    Free,
    /// In the ring.
    Ring {
        lane: usize,
        deadline: Mono,
        done: Done,
    },
    /// Answered without having ended; the kernel may still use its buffer.
    Lost,
    /// Its rest waits or runs in the thread pool, which answers for it.
    Pool,
}

/// An operation that passed its deadline.
pub(super) struct Overdue {
    pub(super) done: Done,
    /// Its work, if it was not begun; to be dropped before `done` hears.
    pub(super) work: Option<Box<Work>>,
    pub(super) lane: &'static str,
}

/// What the ring's thread is to do next.
#[derive(Default)]
pub(super) struct Orders {
    /// Operations to begin, each in its place.
    pub(super) starts: Vec<(usize, Box<Work>)>,
    /// Operations to tidy up that the pool gave back, in their places.
    pub(super) returned: Vec<(usize, Box<Work>)>,
    /// Places whose calls are to be taken back.
    pub(super) cancels: Vec<usize>,
    /// Operations that were found too late.
    pub(super) late: Vec<Overdue>,
    /// Nothing is left and nothing will come.
    pub(super) leave: bool,
}

pub(super) struct State {
    pub(super) phase: Phase,
    lanes: Vec<LaneState>,
    places: Vec<Place>,
    free: Vec<usize>,
    cancels: Vec<usize>,
    returned: Vec<(usize, Box<Work>)>,
    lost: usize,
    /// Places for what was given up and has not ended: with more than that lost, lanes lack places.
    spare: usize,
    /// The ring's thread sleeps, or is about to: whoever brings news wakes it.
    pub(super) asleep: bool,
    /// When the watch looks again by itself.
    pub(super) watch_wakes: Mono,
    /// The ring is out of order; everything goes to the thread pool.
    pub(super) broken: bool,
    pub(super) callback_panics: u64,
}

impl State {
    /// With places for all that the lanes may run at once, and `spare` for what was given up and has not ended.
    pub(super) fn new(lanes: &[Lane], spare: usize) -> Self {
        let lane = |&spec: &Lane| LaneState {
            spec,
            queue: VecDeque::new(),
            running: 0,
        };
        let places = Self::places(lanes, spare);
        Self {
            phase: Phase::Open,
            lanes: lanes.iter().map(lane).collect(),
            places: (0..places).map(|_| Place::Free).collect(),
            free: (0..places).rev().collect(),
            cancels: Vec::new(),
            returned: Vec::new(),
            lost: 0,
            spare,
            asleep: false,
            watch_wakes: Mono::NEVER,
            broken: false,
            callback_panics: 0,
        }
    }

    /// How many places that makes.
    pub(super) fn places(lanes: &[Lane], spare: usize) -> usize {
        let running = lanes
            .iter()
            .fold(0_usize, |sum, lane| sum.saturating_add(lane.max_running));
        running.saturating_add(spare)
    }

    /// Why no operation is taken in this lane, whatever it is.
    pub(super) fn refusal(&self, lane: usize) -> Option<Error> {
        if lane >= self.lanes.len() {
            return Some(Error::invalid("the engine has no such lane").with("lane", lane));
        }
        (self.phase != Phase::Open).then(|| Error::new(ErrorKind::Closed, "the engine is shut down"))
    }

    /// Queues an operation, or gives it back and says why.
    pub(super) fn push(&mut self, lane: usize, waiting: Waiting) -> Result<(), (Error, Waiting)> {
        if let Some(error) = self.refusal(lane) {
            return Err((error, waiting));
        }
        if self.broken {
            return Err((Error::new(ErrorKind::Io, "the ring is out of order"), waiting));
        }
        let Some(open) = self.lanes.get_mut(lane) else {
            return Err((Error::internal("a lane vanished"), waiting));
        };
        if open.queue.len() >= open.spec.capacity {
            let full = Error::new(ErrorKind::Busy, "the lane's queue is full").with("lane", open.spec.name);
            return Err((full, waiting));
        }
        open.queue.push_back(waiting);
        Ok(())
    }

    /// Everything there is to do now. Marks the ring's thread as asleep, for it will sleep when that is done, unless it
    /// says otherwise.
    pub(super) fn orders(&mut self, now: Mono) -> Orders {
        let mut orders = Orders {
            cancels: std::mem::take(&mut self.cancels),
            returned: std::mem::take(&mut self.returned),
            ..Orders::default()
        };
        for lane in 0..self.lanes.len() {
            while let Some(place) = self.place_for(lane) {
                let Some(state) = self.lanes.get_mut(lane) else {
                    break;
                };
                let Some(Waiting { work, deadline, done }) = state.queue.pop_front() else {
                    self.free.push(place);
                    break;
                };
                if deadline <= now {
                    self.free.push(place);
                    orders.late.push(Overdue {
                        done,
                        work: Some(work),
                        lane: state.spec.name,
                    });
                    continue;
                }
                state.running += 1;
                self.places[place] = Place::Ring { lane, deadline, done };
                orders.starts.push((place, work));
            }
        }
        orders.leave = self.phase == Phase::Stopped
            && orders.returned.is_empty()
            && self.free.len() == self.places.len();
        self.asleep = true;
        orders
    }

    fn place_for(&mut self, lane: usize) -> Option<usize> {
        let state = self.lanes.get(lane)?;
        if state.queue.is_empty() || state.running >= state.spec.max_running {
            return None;
        }
        self.free.pop()
    }

    /// Whether somebody waits for what is in this place.
    pub(super) fn is_wanted(&self, place: usize) -> bool {
        matches!(self.places.get(place), Some(Place::Ring { .. }))
    }

    /// What was given up in this place has ended, and its bytes are free again.
    pub(super) fn ended(&mut self, place: usize) {
        if matches!(self.places[place], Place::Lost) {
            self.lost -= 1;
            self.places[place] = Place::Free;
            self.free.push(place);
        }
    }

    /// What is left of it goes to the pool, which will tell. The lane is left by `leave_lane`, the place by `back`.
    pub(super) fn hand_out(&mut self, place: usize) -> Option<(Done, Mono, usize)> {
        match std::mem::replace(&mut self.places[place], Place::Pool) {
            Place::Ring { lane, deadline, done } => Some((done, deadline, lane)),
            other => {
                self.places[place] = other;
                None
            }
        }
    }

    pub(super) fn leave_lane(&mut self, lane: usize) {
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.running -= 1;
        }
    }

    /// The pool has done with it, or gives it back undone, to be tidied up.
    pub(super) fn back(&mut self, place: usize, work: Option<Box<Work>>) {
        match work {
            Some(work) => {
                self.places[place] = Place::Lost;
                self.lost += 1;
                self.returned.push((place, work));
            }
            None => {
                self.places[place] = Place::Free;
                self.free.push(place);
            }
        }
    }

    /// Takes whatever is past its deadline out of the queues, and off what is on its way.
    pub(super) fn overdue(&mut self, now: Mono) -> Vec<Overdue> {
        let mut overdue = self.give_up(|deadline| deadline <= now);
        for lane in &mut self.lanes {
            if lane.queue.iter().all(|waiting| waiting.deadline > now) {
                continue;
            }
            let (late, still): (VecDeque<_>, _) = std::mem::take(&mut lane.queue)
                .into_iter()
                .partition(|waiting| waiting.deadline <= now);
            lane.queue = still;
            overdue.extend(late.into_iter().map(|Waiting { work, done, .. }| Overdue {
                done,
                work: Some(work),
                lane: lane.spec.name,
            }));
        }
        overdue
    }

    /// Takes everything, at the end of a shutdown or when the ring is out of order.
    pub(super) fn abandon(&mut self) -> Vec<Overdue> {
        let mut left = self.give_up(|_| true);
        for lane in &mut self.lanes {
            left.extend(lane.queue.drain(..).map(|Waiting { work, done, .. }| Overdue {
                done,
                work: Some(work),
                lane: lane.spec.name,
            }));
        }
        left
    }

    /// Marks as lost what is in the ring with such a deadline, and wants its calls taken back.
    fn give_up(&mut self, is_late: impl Fn(Mono) -> bool) -> Vec<Overdue> {
        let mut given_up = Vec::new();
        for (number, place) in self.places.iter_mut().enumerate() {
            if !matches!(place, Place::Ring { deadline, .. } if is_late(*deadline)) {
                continue;
            }
            if let Place::Ring { lane, done, .. } = std::mem::replace(place, Place::Lost) {
                self.lost += 1;
                self.cancels.push(number);
                let lane = self.lanes.get_mut(lane);
                given_up.push(Overdue {
                    done,
                    work: None,
                    lane: lane.as_ref().map_or("", |lane| lane.spec.name),
                });
                if let Some(lane) = lane {
                    lane.running -= 1;
                }
            }
        }
        given_up
    }

    /// The earliest deadline of all.
    pub(super) fn next_deadline(&self) -> Mono {
        let on_their_way = self.places.iter().filter_map(|place| match place {
            Place::Ring { deadline, .. } => Some(*deadline),
            _ => None,
        });
        let queued = self
            .lanes
            .iter()
            .flat_map(|lane| &lane.queue)
            .map(|waiting| waiting.deadline);
        on_their_way.chain(queued).min().unwrap_or(Mono::NEVER)
    }

    /// Whether nothing is left that somebody waits for, in the pool neither.
    pub(super) fn is_drained(&self) -> bool {
        self.lanes
            .iter()
            .all(|lane| lane.queue.is_empty() && lane.running == 0)
    }

    /// Waiting and running in each lane.
    pub(super) fn lanes(&self) -> Vec<(usize, usize)> {
        self.lanes
            .iter()
            .map(|lane| (lane.queue.len(), lane.running))
            .collect()
    }

    /// Given up and not ended.
    pub(super) fn lost(&self) -> usize {
        self.lost
    }

    /// The same in threads of a pool that replaces so many: with as many lost either has none to spare.
    pub(super) fn lost_workers(&self, replaced: usize) -> usize {
        self.lost.saturating_mul(replaced) / self.spare.max(1)
    }

    /// Whether the ring's thread has to hear of something.
    pub(super) fn has_news(&self) -> bool {
        !self.cancels.is_empty()
            || !self.returned.is_empty()
            || self.phase == Phase::Stopped
            || self.can_start()
    }

    fn can_start(&self) -> bool {
        !self.free.is_empty()
            && self
                .lanes
                .iter()
                .any(|lane| !lane.queue.is_empty() && lane.running < lane.spec.max_running)
    }
}
