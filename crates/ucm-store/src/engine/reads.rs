//! Reads of blocks, each into a slot of its own: begun while slots are free, asked stage by stage of what lies below, and
//! judged before anybody hears of them.
//!
//! A copy that is absent, refused or late in one stage is asked of the next. A record is refused when no stage has a
//! sound one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, limits};
use ucm_device::Slot;
use ucm_infra::Mono;

use super::Core;
use super::guard::reason_of;
use super::load::LoadTask;
use crate::backend::{Health, ReadDone};
use crate::evidence::is_damage;
use crate::stats::Stats;

/// Most reads handed to the backend at once; the others wait here, where no queue is full.
const READS_AT_ONCE: usize = 1024;
/// Most blocks waiting for a slot; a load that would make them more is refused.
pub(super) const MAX_PENDING: usize = limits::MAX_IDS_PER_CALL;

/// Reads under way or waiting for a slot, with the (task, block index) pairs that joined them.
#[derive(Default)]
pub(super) struct Reads {
    waiters: HashMap<BlockId, Vec<(Arc<LoadTask>, usize)>>,
    /// Blocks waiting for a slot, oldest first.
    pending: VecDeque<Wanted>,
    /// Reads with the backend now.
    running: usize,
    /// A thread is starting reads.
    pumping: bool,
}

/// A block to be read, and how far that is.
struct Wanted {
    id: BlockId,
    /// The stage to ask, or the next below it that can be asked.
    from: usize,
    /// What the stages above said; the last word if none below has it either.
    so_far: Option<Failed>,
}

/// A read under way.
struct Reading {
    id: BlockId,
    stage: usize,
    /// The second read of the same copy.
    again: bool,
    deadline: Mono,
    so_far: Option<Failed>,
}

/// A record that was read and is what was asked for.
struct Sound {
    slot: Slot,
    /// The stage it came from.
    stage: usize,
    /// Its bytes in the slot.
    len: usize,
    /// Its position in its chain.
    ordinal: u32,
}

/// Why a copy could not be had.
enum Failed {
    /// It was refused.
    Refused(MissReason, Option<Error>),
    /// It is not there, or could not be read.
    Unread(Error),
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
    /// Joins reads under way or queues new ones; false if that would be too many.
    pub(super) fn enqueue(&self, task: &Arc<LoadTask>) -> bool {
        let mut reads = self.reads.lock();
        if reads.pending.len() + task.blocks.len() > MAX_PENDING {
            return false;
        }
        for (index, block) in task.blocks.iter().enumerate() {
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

    /// Starts waiting reads while slots are free; drops those that nobody waits for any more. One thread pumps at a
    /// time: a call from inside (an operation that failed at once) or beside has nothing to do, because that thread
    /// looks again, under the lock, before it stops.
    pub(super) fn pump(self: &Arc<Self>) {
        if std::mem::replace(&mut self.reads.lock().pumping, true) {
            return;
        }
        while let Some((wanted, slot, deadline)) = self.next_read() {
            self.read(wanted, slot, deadline);
        }
    }

    /// The next read that can start; `None` ends the pumping.
    fn next_read(&self) -> Option<(Wanted, Slot, Mono)> {
        let mut reads = self.reads.lock();
        loop {
            let Some(id) = reads.pending.front().map(|wanted| wanted.id) else {
                reads.pumping = false;
                return None;
            };
            let waiters = reads.waiters.entry(id).or_default();
            waiters.retain(|(task, _)| !task.state.is_finished());
            let Some(deadline) = waiters.iter().map(|(task, _)| task.state.deadline).max() else {
                reads.pending.pop_front();
                reads.waiters.remove(&id);
                continue;
            };
            let room = reads.running < READS_AT_ONCE;
            if let Some(slot) = room.then(|| self.slots.try_acquire()).flatten()
                && let Some(wanted) = reads.pending.pop_front()
            {
                reads.running += 1;
                return Some((wanted, slot, deadline));
            }
            reads.pumping = false;
            return None;
        }
    }

    /// Reads a block from the stage whose turn it is.
    fn read(self: &Arc<Self>, wanted: Wanted, slot: Slot, deadline: Mono) {
        let Wanted { id, from, so_far } = wanted;
        let Some(stage) = self.backend.place(id, from) else {
            drop(slot);
            return self.read_ended(id, deadline, Err(self.nowhere(id, so_far)));
        };
        let reading = Reading {
            id,
            stage,
            again: false,
            deadline,
            so_far,
        };
        self.read_stage(reading, slot);
    }

    fn read_stage(self: &Arc<Self>, reading: Reading, slot: Slot) {
        let Reading {
            id,
            stage,
            again,
            deadline,
            ..
        } = reading;
        let core = Arc::clone(self);
        let done = Box::new(move |result| core.read_done(reading, result));
        self.backend.read_from(stage, id, slot, again, deadline, done);
    }

    fn read_done(self: &Arc<Self>, reading: Reading, result: Result<ReadDone>) {
        let (id, stage, deadline) = (reading.id, reading.stage, reading.deadline);
        let (slot, failed) = match result {
            Err(error) if error.kind() == ErrorKind::Foreign => {
                self.healthy();
                (None, Failed::Refused(MissReason::IoError, Some(error)))
            }
            Err(error) => (None, Failed::Unread(error)),
            Ok(read) => {
                self.healthy();
                match self.verify(id, &read) {
                    Ok(header) => {
                        let sound = Sound {
                            slot: read.slot,
                            stage,
                            len: read.read,
                            ordinal: header.meta.ordinal,
                        };
                        return self.read_ended(id, deadline, Ok(sound));
                    }
                    Err(reason) if is_damage(reason) && !reading.again => {
                        // The medium or the way from it? A second read past every cache tells.
                        Stats::add(&self.stats.second_reads, 1);
                        let again = Reading {
                            again: true,
                            ..reading
                        };
                        return self.read_stage(again, read.slot);
                    }
                    Err(reason) => (Some(read.slot), Failed::Refused(reason, None)),
                }
            }
        };
        let closed = matches!(&failed, Failed::Unread(error) if error.kind() == ErrorKind::Closed);
        let below = if closed {
            None
        } else {
            self.backend.place(id, stage + 1)
        };
        let Some(below) = below else {
            let error = self.no_copy(&reading, failed);
            drop(slot);
            return self.read_ended(id, deadline, Err(error));
        };
        if let Failed::Refused(reason, _) = &failed {
            self.discard(id, stage, *reason);
        }
        let wanted = Wanted {
            id,
            from: below,
            so_far: Some(tell(reading.so_far, failed)),
        };
        match slot {
            Some(slot) => self.read(wanted, slot, deadline),
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

    /// No stage is left for a read that ended with `failed` in the last one: what those who wait are told.
    fn no_copy(self: &Arc<Self>, reading: &Reading, failed: Failed) -> Error {
        match (&reading.so_far, failed) {
            (_, Failed::Refused(reason, cause)) => {
                let error = self.refuse(reading.id, Some(reading.stage), reason);
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

    /// No stage can be asked.
    fn nowhere(self: &Arc<Self>, id: BlockId, so_far: Option<Failed>) -> Error {
        match so_far {
            Some(Failed::Refused(reason, _)) => self.refuse_id(id, reason),
            Some(Failed::Unread(error)) if error.kind() != ErrorKind::NotFound => error,
            _ if self.backend.health().is_none_or(|health| health == Health::Well) => {
                Error::new(ErrorKind::NotFound, "no tier has this record")
            }
            _ => Error::new(
                ErrorKind::Unhealthy,
                "no tier that may have this record can be asked now",
            ),
        }
    }

    /// A block was read and is sound, or it could not be had.
    fn read_ended(self: &Arc<Self>, id: BlockId, deadline: Mono, outcome: Result<Sound>) {
        let late = |error: &Error| error.kind() == ErrorKind::Timeout;
        let waiters = self.end_read(id, outcome.as_ref().is_err_and(late).then_some(deadline));
        let outcome = outcome.map_err(|error| self.judge_failure(&waiters, error));
        match outcome {
            Ok(sound) => {
                let slot = sound.slot;
                let scattered =
                    |(task, index): &(Arc<LoadTask>, usize)| self.scatter(task, *index, slot.as_slice());
                let over: Vec<_> = waiters.into_iter().filter(scattered).collect();
                let record = &slot.as_slice()[..sound.len];
                self.backend.promote(sound.stage, id, record, sound.ordinal);
                drop(slot); // whoever learns that its load is over finds the slot free
                over.iter().for_each(|(task, _)| self.report(task));
            }
            Err(error) => {
                for (task, index) in waiters {
                    self.fail_block(&task, index, error.clone());
                }
            }
        }
        self.pump(); // one read less is running
    }

    /// Takes a read off the list, with those who wait for it. If it was late by `deadline`, loads that have more time
    /// get a read of their own.
    fn end_read(&self, id: BlockId, deadline: Option<Mono>) -> Vec<(Arc<LoadTask>, usize)> {
        let mut reads = self.reads.lock();
        reads.running -= 1;
        let waiters = reads.waiters.remove(&id).unwrap_or_default();
        let has_time = |(task, _): &(Arc<LoadTask>, usize)| {
            deadline.is_some_and(|late| task.state.deadline > late && !task.state.is_finished())
        };
        let (more, over): (Vec<_>, Vec<_>) = waiters.into_iter().partition(has_time);
        if !more.is_empty() {
            reads.waiters.insert(id, more);
            reads.pending.push_back(Wanted::new(id));
        }
        over
    }

    /// What a failed read says: of this record, of the medium, or nothing. A late one is judged with its load.
    fn judge_failure(&self, waiters: &[(Arc<LoadTask>, usize)], error: Error) -> Error {
        match error.kind() {
            ErrorKind::Corrupt | ErrorKind::Foreign => return error, // refused, and the medium did answer
            ErrorKind::Timeout if waiters.iter().all(|(task, _)| task.state.is_finished()) => return error,
            ErrorKind::Timeout => {}
            _ => self.observe(&error),
        }
        self.stats.misses.add(reason_of(&error), 1);
        error
    }
}

/// The more telling of what two stages said, the upper one first.
fn tell(above: Option<Failed>, here: Failed) -> Failed {
    match (above, here) {
        (Some(above @ Failed::Refused(..)), Failed::Unread(_)) => above,
        (Some(Failed::Unread(above)), Failed::Unread(here)) if here.kind() == ErrorKind::NotFound => {
            Failed::Unread(above)
        }
        (_, here) => here,
    }
}
