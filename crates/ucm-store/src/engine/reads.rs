//! Reads of blocks, each into a slot of its own: begun while slots are free, asked tier by tier of what lies below, and
//! judged before anybody hears of them.
//!
//! A load that wants few of a block's layers has only those read where that can be; loads that join it and want others wait
//! for the next read. A copy that is absent, refused or late in one tier is asked of the next. A record is refused when no tier has a
//! sound one.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, limits};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_quota::evidence::is_damage;
use ucm_tier::backend::{BlockRead, ReadDone};

use super::guard::reason_of;
use super::load::LoadTask;
use super::{Core, LANE_PUMP};
use crate::stats::Stats;
use crate::tiers::{Request, TierRead};

/// Most reads handed to the tiers at once; the others wait here, where no queue is full.
const READS_AT_ONCE: usize = 1024;
/// Most reads of one tier that are handed over together.
const TOGETHER: usize = 256;
/// Bytes that reading a part of a record must save: less is read sooner than asked for by itself. And at least half.
const WORTH: usize = 256 << 10;
/// How long starting reads can take at most on a machine that gives every thread a turn.
const MOMENTS: Duration = Duration::from_secs(1);
/// Most blocks waiting for a slot; a load that would make them more is refused.
pub(super) const MAX_PENDING: usize = limits::MAX_IDS_PER_CALL;

/// Reads under way or waiting for a slot, with the (task, block index) pairs that joined them.
#[derive(Default)]
pub(super) struct Reads {
    waiters: HashMap<BlockId, Vec<(Arc<LoadTask>, usize)>>,
    /// Blocks waiting for a slot, oldest first.
    pending: VecDeque<Wanted>,
    /// Reads with the tiers now.
    running: usize,
    /// A thread is starting reads.
    pumping: bool,
}

/// A block to be read, and how far that is.
struct Wanted {
    id: BlockId,
    /// The tier to ask, or the next below it that can be asked.
    from: usize,
    /// What the tiers above said; the last word if none below has it either.
    so_far: Option<Failed>,
}

/// A read under way.
struct Reading {
    id: BlockId,
    tier: usize,
    /// The layers that are read, if not all.
    layers: Option<Range<u32>>,
    /// The second read of the same copy, of all of it.
    again: bool,
    request: Request,
    so_far: Option<Failed>,
}

/// A record that was read and is what was asked for.
struct Sound {
    slot: Slot,
    /// The tier it came from.
    tier: usize,
    /// Its bytes in the slot.
    len: usize,
    /// Its position in its chain.
    ordinal: u32,
    /// The layers that are in the slot, if not all.
    layers: Option<Range<u32>>,
}

/// Why a copy could not be had.
enum Failed {
    /// It was refused.
    Refused(MissReason, Option<Error>),
    /// It is not there, or could not be read.
    Unread(Error),
}

/// What the thread that starts reads does next.
enum Step {
    /// Starts this one, of these layers if not of all.
    Start(Wanted, Slot, Request, Option<Range<u32>>),
    /// Hands over what it has collected: nothing more can start.
    HandOver,
}

/// Reads of one tier that are handed over together.
#[derive(Default)]
struct Batch {
    tier: usize,
    reads: Vec<TierRead<Reading>>,
}

impl Wanted {
    fn new(id: BlockId) -> Self {
        Self {
            id,
            from: 0,
            so_far: None,
        }
    }
}

impl Reads {
    pub(super) fn queued(&self) -> usize {
        self.pending.len()
    }

    /// Nothing more is read; who waited is told by the caller.
    pub(super) fn take_waiters(&mut self) -> impl Iterator<Item = (Arc<LoadTask>, usize)> + use<> {
        self.pending.clear();
        std::mem::take(&mut self.waiters).into_values().flatten()
    }
}

impl Core {
    /// Joins reads under way or queues new ones, for the blocks not cancelled yet; false if that would be too many.
    pub(super) fn enqueue(&self, task: &Arc<LoadTask>) -> bool {
        let mut reads = self.reads.lock();
        if reads.pending.len() + task.blocks.len() > MAX_PENDING {
            return false;
        }
        let wanted = task.blocks.iter().enumerate();
        for (index, block) in wanted.filter(|(index, _)| task.reads(*index)) {
            let waiter = (Arc::clone(task), index);
            if let Some(waiters) = reads.waiters.get_mut(&block.id) {
                waiters.push(waiter);
                Stats::add(&self.stats.loads_joined, 1);
            } else {
                reads.waiters.insert(block.id, vec![waiter]);
                reads.pending.push_back(Wanted::new(block.id));
            }
        }
        true
    }

    /// [`Core::pump`] on another thread: whoever begins a load has a model to compute.
    pub(super) fn pump_elsewhere(self: &Arc<Self>) {
        let core = Arc::clone(self);
        // Nothing in it waits, so it has no deadline. What is refused has others before it that have not begun.
        if let Err(refused) = self
            .asks
            .offer(LANE_PUMP, MonotonicTime::NEVER, move || core.pump(), |_| {})
            && refused.error.kind() != ErrorKind::Busy
        {
            self.pump(); // closed meanwhile
        }
    }

    /// Starts waiting reads while slots are free; drops those that nobody waits for any more. One thread pumps at a
    /// time: a call from inside (an operation that failed at once) or beside has nothing to do, because that thread
    /// looks again, under the lock, before it stops.
    pub(super) fn pump(self: &Arc<Self>) {
        if std::mem::replace(&mut self.reads.lock().pumping, true) {
            return;
        }
        let mut batch = Batch::default();
        while let Some(step) = self.next_step(batch.reads.is_empty()) {
            match step {
                Step::Start(wanted, slot, request, layers) => {
                    self.start(wanted, slot, request, layers, &mut batch);
                }
                Step::HandOver => self.hand_over(&mut batch),
            }
        }
    }

    /// The store is closed: waits for a thread that is starting reads, which takes moments, so that nobody else ends a task
    /// after this one has looked.
    pub(super) fn await_pump(&self) {
        let begun = std::time::Instant::now();
        while self.reads.lock().pumping && begun.elapsed() < MOMENTS {
            std::thread::yield_now();
        }
    }

    /// What comes next; `None` ends the pumping, which is only where nothing collected waits to be handed over.
    fn next_step(&self, none_collected: bool) -> Option<Step> {
        let mut reads = self.reads.lock();
        while let Some(id) = reads.pending.front().map(|wanted| wanted.id) {
            let waiters = reads.waiters.entry(id).or_default();
            waiters.retain(|(task, index)| task.reads(*index));
            let requests = waiters.iter().map(|(task, _)| task.request);
            let Some(request) = requests.max_by_key(|request| request.deadline) else {
                reads.pending.pop_front();
                reads.waiters.remove(&id);
                continue;
            };
            let room = reads.running < READS_AT_ONCE;
            if let Some(slot) = room.then(|| self.slots.try_acquire()).flatten()
                && let Some(wanted) = reads.pending.pop_front()
            {
                reads.running += 1;
                let layers = reads
                    .waiters
                    .get(&id)
                    .and_then(|waiters| self.few_layers(waiters));
                return Some(Step::Start(wanted, slot, request, layers));
            }
            break;
        }
        if none_collected {
            reads.pumping = false;
            return None;
        }
        Some(Step::HandOver)
    }

    /// The layers that all who wait for a block want together, if they are few enough to be read by themselves.
    fn few_layers(&self, waiters: &[(Arc<LoadTask>, usize)]) -> Option<Range<u32>> {
        if self.geometry.shards() == 1 {
            return None;
        }
        let wanted = waiters
            .iter()
            .map(|(task, index)| task.blocks[*index].layers(&self.geometry));
        let all = wanted.reduce(|one, other| one.start.min(other.start)..one.end.max(other.end))?;
        let bytes: usize = self.layout.parts(all.clone()).iter().map(Range::len).sum();
        let whole = self.layout.record_len();
        (bytes + WORTH.max(whole / 2) <= whole).then_some(all)
    }

    /// Collects a read with others of the same tier.
    fn start(
        self: &Arc<Self>,
        wanted: Wanted,
        slot: Slot,
        request: Request,
        layers: Option<Range<u32>>,
        batch: &mut Batch,
    ) {
        let Wanted { id, from, so_far } = wanted;
        let Some(tier) = self.tiers.place(id, from, request.number) else {
            drop(slot);
            return self.read_ended(id, request, Err(self.nowhere(id, so_far)));
        };
        if batch.tier != tier || batch.reads.len() >= TOGETHER {
            self.hand_over(batch);
        }
        batch.tier = tier;
        let reading = Reading {
            id,
            tier,
            layers: layers.filter(|_| self.tiers.reads_parts(tier)),
            again: false,
            request,
            so_far,
        };
        batch.reads.push(self.tier_read(reading, slot));
    }

    fn hand_over(self: &Arc<Self>, batch: &mut Batch) {
        if batch.reads.is_empty() {
            return;
        }
        let core = Arc::clone(self);
        let ended = Arc::new(move |reading, result| core.read_done(reading, result));
        self.tiers
            .read(batch.tier, std::mem::take(&mut batch.reads), &ended);
    }

    /// Reads a block from the tier whose turn it is.
    fn read(self: &Arc<Self>, wanted: Wanted, slot: Slot, request: Request) {
        let mut batch = Batch::default();
        self.start(wanted, slot, request, None, &mut batch);
        self.hand_over(&mut batch);
    }

    /// What a tier is asked for.
    fn tier_read(&self, reading: Reading, slot: Slot) -> TierRead<Reading> {
        let read = BlockRead {
            id: reading.id,
            slot,
            parts: reading.layers.clone().map(|layers| self.layout.parts(layers)),
            again: reading.again,
            deadline: reading.request.deadline,
            looked: false,
        };
        TierRead {
            read,
            request: reading.request,
            whose: reading,
        }
    }

    fn read_done(self: &Arc<Self>, reading: Reading, result: Result<ReadDone>) {
        let (id, tier, request) = (reading.id, reading.tier, reading.request);
        let (slot, failed) = match result {
            Err(error) if error.kind() == ErrorKind::Foreign => {
                (None, Failed::Refused(MissReason::IoError, Some(error)))
            }
            Err(error) => (None, Failed::Unread(error)),
            Ok(read) => {
                let judged = match &reading.layers {
                    Some(layers) => self.verify_layers(id, &read, layers.clone()),
                    None => self.verify(id, &read),
                };
                match judged {
                    Ok(header) => {
                        let sound = Sound {
                            slot: read.slot,
                            tier,
                            len: read.read,
                            ordinal: header.meta.ordinal,
                            layers: reading.layers,
                        };
                        return self.read_ended(id, request, Ok(sound));
                    }
                    Err(refusal) if is_damage(refusal.reason) && !reading.again => {
                        // The medium or the way from it? A second read past every cache tells.
                        Stats::add(&self.stats.second_reads, 1);
                        let again = Reading {
                            layers: None,
                            again: true,
                            ..reading
                        };
                        let mut batch = Batch {
                            tier,
                            reads: vec![self.tier_read(again, read.slot)],
                        };
                        return self.hand_over(&mut batch);
                    }
                    Err(refusal) => (
                        Some(read.slot),
                        Failed::Refused(refusal.reason, Some(refusal.into())),
                    ),
                }
            }
        };
        let closed = matches!(&failed, Failed::Unread(error) if error.kind() == ErrorKind::Closed);
        let below = if closed {
            None
        } else {
            self.tiers.place(id, tier + 1, request.number)
        };
        let Some(below) = below else {
            let error = self.no_copy(&reading, failed);
            drop(slot);
            return self.read_ended(id, request, Err(error));
        };
        if let Failed::Refused(reason, _) = &failed {
            self.discard(id, tier, *reason);
        }
        let wanted = Wanted {
            id,
            from: below,
            so_far: Some(tell(reading.so_far, failed)),
        };
        match slot {
            Some(slot) => self.read(wanted, slot, request),
            None => {
                // The slot went with the read; the next one free is for this block.
                let mut reads = self.reads.lock();
                reads.running -= 1;
                reads.pending.push_front(wanted);
                drop(reads);
                self.pump();
            }
        }
    }

    /// No tier is left for a read that ended with `failed` in the last one: what those who wait are told.
    fn no_copy(self: &Arc<Self>, reading: &Reading, failed: Failed) -> Error {
        match (&reading.so_far, failed) {
            (_, Failed::Refused(reason, cause)) => {
                let error = self.refuse(reading.id, Some(reading.tier), reason);
                match cause {
                    Some(cause) => error.caused_by(cause),
                    None => error,
                }
            }
            // A copy above was refused, and there is none below.
            (Some(Failed::Refused(reason, _)), Failed::Unread(error))
                if error.kind() == ErrorKind::NotFound =>
            {
                self.refuse_id(reading.id, *reason)
            }
            // What happened above says more than that there is nothing below.
            (Some(Failed::Unread(above)), Failed::Unread(error)) if error.kind() == ErrorKind::NotFound => {
                above.clone()
            }
            (_, Failed::Unread(error)) => error,
        }
    }

    /// No tier can be asked.
    fn nowhere(self: &Arc<Self>, id: BlockId, so_far: Option<Failed>) -> Error {
        match so_far {
            Some(Failed::Refused(reason, _)) => self.refuse_id(id, reason),
            Some(Failed::Unread(error)) if error.kind() != ErrorKind::NotFound => error,
            _ if self.tiers.is_all_well() => Error::new(ErrorKind::NotFound, "no tier has this record"),
            _ => Error::new(
                ErrorKind::Unhealthy,
                "no tier that may have this record can be asked now",
            ),
        }
    }

    /// A block was read and is sound, or it could not be had.
    fn read_ended(self: &Arc<Self>, id: BlockId, request: Request, outcome: Result<Sound>) {
        let late = |error: &Error| error.kind() == ErrorKind::Timeout;
        let layers = outcome.as_ref().ok().and_then(|sound| sound.layers.clone());
        let waiters = self.end_read(
            id,
            outcome.as_ref().is_err_and(late).then_some(request.deadline),
            layers,
        );
        let outcome = outcome.map_err(|error| self.judge_failure(id, error));
        match outcome {
            Ok(sound) => {
                let slot = sound.slot;
                let scattered = |(task, index): &(Arc<LoadTask>, usize)| {
                    self.scatter(task, *index, slot.as_slice(), sound.tier)
                };
                let over: Vec<_> = waiters.into_iter().filter(scattered).collect();
                if sound.layers.is_none() {
                    let record = &slot.as_slice()[..sound.len];
                    self.tiers.promote(sound.tier, id, record, sound.ordinal);
                }
                drop(slot); // whoever learns that its load is over finds the slot free
                over.iter().for_each(|(task, _)| self.report(task));
            }
            Err(error) => {
                // Of a late one whoever notices it first counts it: this, or the load itself.
                let mut late_miss = late(&error).then(|| reason_of(&error));
                for (task, index) in waiters {
                    self.fail_block(&task, index, error.clone(), &mut late_miss);
                }
            }
        }
        self.pump(); // one read less is running
    }

    /// Takes a read off the list, with those who wait for it. If it was late by `deadline`, loads that have more time
    /// get a read of their own; if it brought these `layers` only, loads that want others.
    fn end_read(
        &self,
        id: BlockId,
        deadline: Option<MonotonicTime>,
        layers: Option<Range<u32>>,
    ) -> Vec<(Arc<LoadTask>, usize)> {
        let mut reads = self.reads.lock();
        reads.running -= 1;
        let waiters = reads.waiters.remove(&id).unwrap_or_default();
        let goes_on = |(task, index): &(Arc<LoadTask>, usize)| {
            let has_time = deadline.is_some_and(|late| task.state.deadline > late);
            let wants_more = layers.as_ref().is_some_and(|layers| {
                let wanted = task.blocks[*index].layers(&self.geometry);
                wanted.start < layers.start || wanted.end > layers.end
            });
            (has_time || wants_more) && task.reads(*index)
        };
        let (more, over): (Vec<_>, Vec<_>) = waiters.into_iter().partition(goes_on);
        if !more.is_empty() {
            reads.waiters.insert(id, more);
            reads.pending.push_back(Wanted::new(id));
        }
        over
    }

    /// What a failed read says: of this record, of the medium, or nothing. A late one is judged with its load.
    fn judge_failure(&self, id: BlockId, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Corrupt | ErrorKind::Foreign => return error, // refused, and the medium did answer
            ErrorKind::Timeout => return error,
            ErrorKind::Io => self.refused.unread(id),
            _ => {}
        }
        self.stats.misses.add(reason_of(&error), 1);
        error
    }
}

/// The more telling of what two tiers said, the upper one first.
fn tell(above: Option<Failed>, here: Failed) -> Failed {
    match (above, here) {
        (Some(above @ Failed::Refused(..)), Failed::Unread(_)) => above,
        (Some(Failed::Unread(above)), Failed::Unread(here)) if here.kind() == ErrorKind::NotFound => {
            Failed::Unread(above)
        }
        (_, here) => here,
    }
}
