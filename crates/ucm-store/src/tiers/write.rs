//! How a record comes into the stages: from a dump, after a load or a prefetch, and when a stage above gives it up.
//!
//! A dump is published by the lowest stage that is written through and outlives this process. The other stages get
//! copies: a memory at once, a file in a spare slot, and nobody waits for them. A copy that finds no spare slot, or a
//! stage that is not well, is dropped and counted.

use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::Slot;
use ucm_infra::Mono;

use super::stage::{Stage, add};
use super::{LANE_MOVE, Shared, WritePolicy};
use crate::backend::{Done, Flush, Keep, ReadDone, Victim, WriteOptions, Written};
use crate::events::Level;

/// Why a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copy {
    /// A dump goes to more than one stage.
    Dump,
    /// A lower stage had it.
    Promotion,
    /// The stage above gave it up.
    Demotion,
}

/// A copy on its way to a stage.
#[derive(Clone)]
struct Moving {
    number: usize,
    id: BlockId,
    len: usize,
    keep: Keep,
    deadline: Mono,
    why: Copy,
}

impl Shared {
    pub(super) fn write(
        self: &Arc<Self>,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        deadline: Mono,
        done: Done<Written>,
    ) {
        let now = self.clock.now();
        let through = |stage: &Stage| stage.policy == WritePolicy::Through;
        let lasting = |&n: &usize| through(&self.stages[n]) && !self.stages[n].memory;
        let outlives = (0..self.stages.len()).any(|n| lasting(&n));
        // The lowest that is well; where nothing outlives this process, the memory is all there is to write to.
        let decides = if outlives {
            (0..self.stages.len())
                .rev()
                .find(|n| lasting(n) && self.admits(*n, now))
        } else {
            (0..self.stages.len()).find(|&n| through(&self.stages[n]) && self.admits(n, now))
        };
        let keep = Keep {
            ordinal: options.ordinal,
            replace: options.replace,
        };
        for number in (0..self.stages.len()).filter(|&n| Some(n) != decides && through(&self.stages[n])) {
            let moving = Moving {
                number,
                id,
                len: options.len,
                keep,
                deadline,
                why: Copy::Dump,
            };
            self.copy(moving, &slot.as_slice()[..options.len]);
        }
        let Some(number) = decides else {
            drop(slot);
            let off = "no tier that outlives this process can be written to now";
            return done(Err(Error::new(ErrorKind::Unhealthy, off)));
        };
        let stage = &self.stages[number];
        let options = WriteOptions {
            replace: options.replace || stage.replaces(id),
            ..options
        };
        let shared = Arc::clone(self);
        let written = move |result: Result<Written>| {
            shared.written(number, id, options.len, deadline, &result);
            done(result);
        };
        stage
            .backend
            .write(id, slot, options, deadline, Box::new(written));
    }

    /// Notes how a write ended.
    fn written(&self, number: usize, id: BlockId, len: usize, deadline: Mono, result: &Result<Written>) {
        let stage = &self.stages[number];
        self.note(number, deadline, result.as_ref().err());
        match result {
            Ok(Written::Published) => {
                stage.forgive(id);
                add(&stage.counts.blocks_written, 1);
                add(&stage.counts.bytes_written, len as u64);
            }
            Ok(Written::Unsound(reason)) => stage.refuse(id, *reason),
            Ok(Written::Present) | Err(_) => {}
        }
    }

    /// Gives a stage a copy of its own, if that can be had without waiting.
    fn copy(self: &Arc<Self>, moving: Moving, record: &[u8]) {
        let stage = &self.stages[moving.number];
        if !stage.memory {
            match self.spare_copy(moving.number, record) {
                Some(slot) => self.write_copy(moving, slot, || ()),
                None => add(&stage.counts.copies_dropped, 1),
            }
            return;
        }
        if !self.admits(moving.number, self.clock.now()) {
            return add(&stage.counts.copies_dropped, 1);
        }
        let keep = Keep {
            replace: moving.keep.replace || stage.replaces(moving.id),
            ..moving.keep
        };
        self.copied(&moving, &stage.backend.keep(moving.id, record, keep));
    }

    /// A spare slot with these bytes in it, for a stage that is well.
    fn spare_copy(&self, number: usize, record: &[u8]) -> Option<Slot> {
        if !self.stages[number].may(self.clock.now()) {
            return None;
        }
        let mut slot = self.spare.try_acquire()?;
        slot.as_mut_slice()[..record.len()].copy_from_slice(record);
        Some(slot)
    }

    /// Writes what is in a spare slot; `over` is called when that has ended.
    fn write_copy(self: &Arc<Self>, moving: Moving, slot: Slot, over: impl FnOnce() + Send + 'static) {
        let stage = &self.stages[moving.number];
        if !self.admits(moving.number, self.clock.now()) {
            add(&stage.counts.copies_dropped, 1);
            drop(slot);
            return over();
        }
        let options = WriteOptions {
            len: moving.len,
            ordinal: moving.keep.ordinal,
            replace: moving.keep.replace || stage.replaces(moving.id),
            read_back: false,
        };
        let (shared, id, deadline) = (Arc::clone(self), moving.id, moving.deadline);
        let written = move |result| {
            shared.copied(&moving, &result);
            over();
        };
        stage
            .backend
            .write(id, slot, options, deadline, Box::new(written));
    }

    fn copied(&self, moving: &Moving, result: &Result<Written>) {
        self.written(moving.number, moving.id, moving.len, moving.deadline, result);
        let counts = &self.stages[moving.number].counts;
        match (result, moving.why) {
            (Ok(Written::Published), Copy::Promotion) => add(&counts.promotions, 1),
            (Ok(Written::Published), Copy::Demotion) => add(&counts.demotions, 1),
            (Err(_), _) => add(&counts.copies_dropped, 1),
            _ => {}
        }
    }

    /// A verified record of stage `from` goes to the stages above that take what is written.
    pub(super) fn promote(self: &Arc<Self>, from: usize, id: BlockId, record: &[u8], ordinal: u32) {
        for number in self.takers(from) {
            self.copy(self.promotion(number, id, record.len(), ordinal), record);
        }
    }

    /// The same with a record that has a spare slot already: the lowest file above is written from that slot, so that
    /// what was read is not dropped for want of another. `over` is called when that has ended.
    pub(super) fn raise(
        self: &Arc<Self>,
        from: usize,
        id: BlockId,
        read: ReadDone,
        ordinal: u32,
        over: impl FnOnce() + Send + 'static,
    ) {
        let file = self.takers(from).rfind(|&number| !self.stages[number].memory);
        for number in self.takers(from).filter(|&number| Some(number) != file) {
            let record = &read.slot.as_slice()[..read.read];
            self.copy(self.promotion(number, id, read.read, ordinal), record);
        }
        match file {
            Some(number) => self.write_copy(self.promotion(number, id, read.read, ordinal), read.slot, over),
            None => {
                drop(read);
                over();
            }
        }
    }

    /// The stages above `from` that take what is written.
    fn takers(&self, from: usize) -> impl DoubleEndedIterator<Item = usize> {
        (0..from).filter(|&number| self.stages[number].policy != WritePolicy::Never)
    }

    /// A record that is brought up to a stage.
    fn promotion(&self, number: usize, id: BlockId, len: usize, ordinal: u32) -> Moving {
        Moving {
            number,
            id,
            len,
            keep: Keep {
                ordinal,
                replace: false,
            },
            deadline: self.clock.now().after(self.copy_deadline),
            why: Copy::Promotion,
        }
    }

    /// The stage above `number`, which is written back to, gives a record up: judged again, it goes down. It is let go
    /// above when it is below.
    pub(super) fn demote(self: &Arc<Self>, number: usize, victim: Box<dyn Victim>) {
        let counts = &self.stages[number].counts;
        let well = self.stages[number].may(self.clock.now());
        let Some(slot) = well.then(|| self.spare.try_acquire()).flatten() else {
            return add(&counts.copies_dropped, 1);
        };
        let deadline = self.clock.now().after(self.copy_deadline);
        let shared = Arc::clone(self);
        let work = move || {
            let (mut slot, id, len) = (slot, victim.id(), victim.record().len());
            slot.as_mut_slice()[..len].copy_from_slice(victim.record());
            let ended = Arc::clone(&shared);
            let over = move || {
                drop(victim);
                ended.stages[number].demotion_ended();
            };
            let enough = shared.stages[number].demotion_begins();
            shared.move_down(number, id, slot, len, deadline, over);
            if enough {
                shared.stages[number].backend.flush(Flush::Now);
            }
        };
        if self.pool.submit(LANE_MOVE, deadline, work, |_| {}).is_err() {
            add(&counts.copies_dropped, 1);
        }
    }

    /// Judges a record that leaves memory, and writes it below; `over` is called when that has ended.
    pub(super) fn move_down(
        self: &Arc<Self>,
        number: usize,
        id: BlockId,
        slot: Slot,
        len: usize,
        deadline: Mono,
        over: impl FnOnce() + Send + 'static,
    ) {
        let copy = match self.verify(id, &slot.as_slice()[..len], len as u64) {
            Ok(ordinal) => Moving {
                number,
                id,
                len,
                keep: Keep {
                    ordinal,
                    replace: false,
                },
                deadline,
                why: Copy::Demotion,
            },
            Err(reason) => {
                add(&self.stages[number].counts.copies_dropped, 1);
                let why = reason.name();
                let text = format!("record {id} was damaged in memory ({why}) and is not written back");
                self.say(Level::Warning, text);
                return over();
            }
        };
        self.write_copy(copy, slot, over);
    }
}
