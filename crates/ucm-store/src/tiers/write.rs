//! How a record comes into the tiers: from a dump, after a load or a prefetch, and when a tier
//! above gives it up.
//!
//! A dump is published by the lowest level that is written through and outlives this process, in
//! the member that its spread gives it to. The other levels get copies: a memory at once, a file in
//! a spare slot, and no one waits for them. A copy that finds no spare slot, or a tier that is not
//! well, is dropped and counted.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::{Slot, SlotPool};
use ucm_infra::{LANE_DUMP, MonotonicTime, Notify, Ticket, WorkerPool};
use ucm_io::IoJob;
use ucm_tier::backend::{
    Done, Flush, InsertOptions, ReadDone, Victim, WriteOptions, Written, either,
};

use super::level::{Level, TierTable};
use super::probes::Probes;
use super::tenants::Tenants;
use super::{LANE_MOVE, Request, WritePolicy};
use crate::records::StoredRecords;
use crate::stats::add;

/// A record that is to be written.
pub(crate) struct TierWrite {
    pub(crate) id: BlockId,
    pub(crate) slot: Slot,
    pub(crate) options: WriteOptions,
    /// It is a record of a side shard alone: it goes to the tier that decides and to no other. In a
    /// memory above it would take the place of a whole block, and it is read soon enough from where
    /// it lasts.
    pub(crate) alone: bool,
    pub(crate) request: Request,
    /// Called when the medium has it, so that a flush from then on is one of this record too; not
    /// where that failed.
    pub(crate) placed: Box<dyn FnOnce() + Send>,
}

/// Why a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copy {
    /// A dump goes to more than one tier.
    Dump,
    /// A lower tier had it.
    Promotion,
    /// The tier above gave it up.
    Demotion,
}

/// A copy on its way to a tier.
#[derive(Clone)]
struct Moving {
    number: usize,
    id: BlockId,
    len: usize,
    options: InsertOptions,
    request: Request,
    why: Copy,
    /// As many as are published together are on their way: that is not to wait for more.
    enough: bool,
}

/// Which thread writes.
enum On<'a> {
    /// The one that calls, whose pool keeps the time by this.
    Here(&'a Arc<Ticket>),
    /// One of the tier's, for this lane.
    Lane(usize),
}

/// What moves records between tiers.
pub(super) struct Moves {
    /// A record on its way has one of these.
    pub(super) spare: Arc<SlotPool>,
    /// Notified when one was returned.
    pub(super) freed: Notify,
    pub(super) pool: Arc<WorkerPool>,
    /// How long one may take.
    pub(super) deadline: Duration,
}

/// See the module.
pub(crate) struct Writes {
    pub(super) table: Arc<TierTable>,
    pub(super) probes: Arc<Probes>,
    pub(super) records: Arc<StoredRecords>,
    pub(super) tenants: Option<Arc<Tenants>>,
    pub(super) moves: Moves,
}

impl Writes {
    /// Writes a record to every tier that is written through: on the thread that calls, whose pool
    /// keeps the time by `here`, or else on one of the tier's. `done` hears from the tier that
    /// decides.
    pub(crate) fn write(
        self: &Arc<Self>,
        write: TierWrite,
        here: Option<&Arc<Ticket>>,
        done: Done<Written>,
    ) {
        let (id, options, request) = (write.id, write.options, write.request);
        let now = self.table.clock.now();
        let through = |level: &&Level| level.policy == WritePolicy::Through;
        let lasting = |level: &&Level| through(level) && !level.memory;
        let outlives = self.table.levels.iter().any(|level| lasting(&level));
        let takes = |level: &Level| self.taker_of_dump(level, &write, now);
        // The lowest that is well; where nothing outlives this process, the memory is all there is
        // to write to.
        let decides = if outlives {
            self.table
                .levels
                .iter()
                .rev()
                .filter(lasting)
                .find_map(takes)
        } else {
            self.table.levels.iter().filter(through).find_map(takes)
        };
        let inserted = InsertOptions {
            ordinal: options.ordinal,
            replace: options.replace,
        };
        let deciding = decides.map(|number| self.table.tiers[number].level);
        let copied = |level: &&Level| !write.alone && through(level);
        for (level, at) in self
            .table
            .levels
            .iter()
            .zip(0..)
            .filter(|(level, _)| copied(level))
        {
            if Some(at) == deciding {
                continue;
            }
            let moving = Moving {
                number: self.table.taker_of_copy(level, id),
                id,
                len: options.len,
                options: inserted,
                request,
                why: Copy::Dump,
                enough: false,
            };
            self.copy(moving, &write.slot.as_slice()[..options.len]);
        }
        let Some(number) = decides else {
            drop(write);
            let off = "no tier that outlives this process can be written to now";
            return done(Err(Error::new(ErrorKind::Unhealthy, off)));
        };
        let tier = &self.table.tiers[number];
        let options = WriteOptions {
            replace: options.replace || tier.replaces(id),
            ..options
        };
        let tiers = Arc::clone(self);
        let written = move |result: Result<Written>| {
            tiers.written(number, id, options.len, request, &result);
            done(result);
        };
        let tiers = Arc::clone(self);
        let written = move |result| {
            let written = Box::new(written);
            tiers.check_present(number, id, request.deadline, result, written);
        };
        let write = TierWrite { options, ..write };
        let on = here.map_or(On::Lane(LANE_DUMP), On::Here);
        self.write_to(number, write, on, Box::new(written));
    }

    /// The member of a level that a dump goes to. A root that is in doubt is not tried out by it
    /// while another beside it is well: it could answer from its index that it has the record, and
    /// then not give it. It is looked at in the background.
    fn taker_of_dump(
        self: &Arc<Self>,
        level: &Level,
        write: &TierWrite,
        now: MonotonicTime,
    ) -> Option<usize> {
        let (id, request) = (write.id, write.request);
        if level.is_spread() {
            let in_doubt = |number: &usize| {
                let tier = &self.table.tiers[*number];
                !tier.health.is_well() && tier.health.may(request.number, now)
            };
            level
                .members()
                .filter(in_doubt)
                .for_each(|number| self.probes.begin_later(number));
            let well = |&number: &usize| {
                self.table.tiers[number].health.is_well()
                    && self.probes.admits_write(number, request, now)
            };
            if let Some(number) = level.offers(id).find(well) {
                return Some(number);
            }
        }
        level
            .offers(id)
            .find(|&number| self.probes.admits_write(number, request, now))
    }

    /// Writes a record to one tier; `done` hears exactly once, by the deadline.
    fn write_to(
        self: &Arc<Self>,
        number: usize,
        write: TierWrite,
        on: On<'_>,
        done: Done<Written>,
    ) {
        let tier = &self.table.tiers[number];
        let TierWrite {
            id,
            mut slot,
            options,
            request,
            placed,
            ..
        } = write;
        let (done, ended) = either(done);
        let tiers = Arc::clone(self);
        let write = move |io: &IoJob| {
            let tier = &tiers.table.tiers[number];
            let options = tier.form.encode(&*tier.backend, id, &mut slot, options)?;
            let done = match &tiers.tenants {
                Some(tenants) => tenants.count(number, &slot.as_slice()[..options.len], done),
                None => done,
            };
            tier.backend.write(io, id, slot, options, done);
            placed();
            Ok(())
        };
        let (pool, deadline) = (&tier.pool, request.deadline);
        match on {
            On::Here(ticket) => pool.lend(LANE_DUMP, deadline, ticket, |io| io.here(write, ended)),
            On::Lane(lane) => pool.job(lane, deadline, write, ended),
        }
    }

    /// Passes on the outcome of a dump's write: for a record that is present and may be of another
    /// key, once its header was read on a thread of the tier.
    fn check_present(
        self: &Arc<Self>,
        number: usize,
        id: BlockId,
        deadline: MonotonicTime,
        result: Result<Written>,
        done: Done<Written>,
    ) {
        let tier = &self.table.tiers[number];
        if !matches!(result, Ok(Written::Present)) || !tier.form.may_be_of_another_key(id) {
            return done(result);
        }
        let (table, (done, ended)) = (Arc::clone(&self.table), either(done));
        let work = move |io: &IoJob| {
            let tier = &table.tiers[number];
            done(tier.form.check_present(&*tier.backend, io, id));
            Ok(())
        };
        tier.pool.job(LANE_DUMP, deadline, work, ended);
    }

    /// Notes how a write ended.
    fn written(
        &self,
        number: usize,
        id: BlockId,
        len: usize,
        request: Request,
        result: &Result<Written>,
    ) {
        let tier = &self.table.tiers[number];
        match result {
            Ok(Written::Present | Written::InTheWay(_)) => tier.note_answer(request),
            result => tier.note(request, result.as_ref().err()),
        }
        let of_writes = match result {
            Ok(Written::Published | Written::Unsound(_)) => Some(Ok(())),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        };
        tier.health.note_write(request.number, of_writes);
        match result {
            Ok(Written::Published) => {
                tier.clear_bad(id);
                tier.form.note_key_fits(id);
                add(&tier.counts.blocks_written, 1);
                add(&tier.counts.bytes_written, len as u64);
            }
            Ok(Written::Unsound(reason) | Written::InTheWay(reason)) => tier.refuse(id, *reason),
            Ok(Written::Present) | Err(_) => {}
        }
    }

    /// Gives a tier a copy of its own, if that can be had without waiting.
    fn copy(self: &Arc<Self>, moving: Moving, record: &[u8]) {
        let tier = &self.table.tiers[moving.number];
        let Some(memory) = tier.backend.features().memory else {
            match self.spare_copy(&moving, record) {
                Some(slot) => self.write_copy(moving, slot, || ()),
                None => add(&tier.counts.copies_dropped, 1),
            }
            return;
        };
        if !self
            .probes
            .admits_write(moving.number, moving.request, self.table.clock.now())
        {
            return add(&tier.counts.copies_dropped, 1);
        }
        let options = InsertOptions {
            replace: moving.options.replace || tier.replaces(moving.id),
            ..moving.options
        };
        self.copied(&moving, &memory.insert(moving.id, record, options));
    }

    /// A spare slot with these bytes in it, for a tier that is well.
    fn spare_copy(&self, moving: &Moving, record: &[u8]) -> Option<Slot> {
        if !self.table.tiers[moving.number]
            .health
            .may_write(moving.request.number, self.table.clock.now())
        {
            return None;
        }
        let mut slot = self.moves.spare.try_acquire()?;
        slot.as_mut_slice()[..record.len()].copy_from_slice(record);
        Some(slot)
    }

    /// Writes what is in a spare slot; `over` is called when that has ended.
    fn write_copy(
        self: &Arc<Self>,
        moving: Moving,
        slot: Slot,
        over: impl FnOnce() + Send + 'static,
    ) {
        let tier = &self.table.tiers[moving.number];
        if !self
            .probes
            .admits_write(moving.number, moving.request, self.table.clock.now())
        {
            add(&tier.counts.copies_dropped, 1);
            drop(slot);
            return over();
        }
        let options = WriteOptions {
            len: moving.len,
            ordinal: moving.options.ordinal,
            replace: moving.options.replace || tier.replaces(moving.id),
            read_back: false,
        };
        let (tiers, number, id, request) =
            (Arc::clone(self), moving.number, moving.id, moving.request);
        let (below, enough) = (Arc::clone(&tier.backend), moving.enough);
        let placed = Box::new(move || {
            if enough {
                below.flush(Flush::Now);
            }
        });
        let written = move |result| {
            tiers.copied(&moving, &result);
            over();
        };
        let write = TierWrite {
            id,
            slot,
            options,
            alone: false,
            request,
            placed,
        };
        self.write_to(number, write, On::Lane(LANE_DUMP), Box::new(written));
    }

    fn copied(&self, moving: &Moving, result: &Result<Written>) {
        self.written(moving.number, moving.id, moving.len, moving.request, result);
        let counts = &self.table.tiers[moving.number].counts;
        match (result, moving.why) {
            (Ok(Written::Published), Copy::Promotion) => add(&counts.promotions, 1),
            (Ok(Written::Published), Copy::Demotion) => add(&counts.demotions, 1),
            (Err(_) | Ok(Written::Unsound(_) | Written::InTheWay(_)), _) => {
                add(&counts.copies_dropped, 1)
            }
            _ => {}
        }
    }

    /// A verified record of tier `from` goes to the tiers above that take what is written.
    pub(crate) fn promote(self: &Arc<Self>, from: usize, id: BlockId, record: &[u8], ordinal: u32) {
        for number in self.takers(from, id) {
            self.copy(self.promotion(number, id, record.len(), ordinal), record);
        }
    }

    /// As [`Tiers::promote`], with a record that has a spare slot already: the lowest file above is
    /// written from that slot, so that what was read is not dropped for want of another. `over` is
    /// called when that has ended.
    pub(super) fn raise(
        self: &Arc<Self>,
        from: usize,
        id: BlockId,
        read: ReadDone,
        ordinal: u32,
        over: impl FnOnce() + Send + 'static,
    ) {
        let takers: Vec<usize> = self.takers(from, id).collect();
        let file = takers
            .iter()
            .copied()
            .rfind(|&number| !self.table.tiers[number].is_memory());
        for number in takers.into_iter().filter(|&number| Some(number) != file) {
            let record = &read.slot.as_slice()[..read.read];
            self.copy(self.promotion(number, id, read.read, ordinal), record);
        }
        match file {
            Some(number) => self.write_copy(
                self.promotion(number, id, read.read, ordinal),
                read.slot,
                over,
            ),
            None => {
                drop(read);
                over();
            }
        }
    }

    /// The tiers above `from` that take what is written, one of each level.
    fn takers(&self, from: usize, id: BlockId) -> impl Iterator<Item = usize> {
        let above = &self.table.levels[..self.table.tiers[from].level];
        let above = above
            .iter()
            .filter(|level| level.policy != WritePolicy::Never);
        above.map(move |level| self.table.taker_of_copy(level, id))
    }

    /// A record that is brought up to a tier.
    fn promotion(&self, number: usize, id: BlockId, len: usize, ordinal: u32) -> Moving {
        Moving {
            number,
            id,
            len,
            options: InsertOptions {
                ordinal,
                replace: false,
            },
            request: self
                .table
                .request(self.table.clock.now().after(self.moves.deadline)),
            why: Copy::Promotion,
            enough: false,
        }
    }

    /// The memory above a level, which is written back to, gives a record up: verified again, it
    /// goes down. It is let go above when it is below.
    pub(super) fn demote(self: &Arc<Self>, level: usize, victim: Box<dyn Victim>) {
        let number = self
            .table
            .taker_of_copy(&self.table.levels[level], victim.id());
        let counts = &self.table.tiers[number].counts;
        let request = self
            .table
            .request(self.table.clock.now().after(self.moves.deadline));
        let well = self.table.tiers[number]
            .health
            .may_write(request.number, self.table.clock.now());
        let Some(slot) = well.then(|| self.moves.spare.try_acquire()).flatten() else {
            return add(&counts.copies_dropped, 1);
        };
        let tiers = Arc::clone(self);
        let work = move || {
            let (mut slot, id, len) = (slot, victim.id(), victim.record().len());
            slot.as_mut_slice()[..len].copy_from_slice(victim.record());
            let ended = Arc::clone(&tiers);
            let over = move || {
                drop(victim);
                ended.table.tiers[number].demotion_ended();
            };
            let enough = tiers.table.tiers[number].demotion_begins();
            tiers.move_down(number, id, slot, (len, enough), request, over);
        };
        if self
            .moves
            .pool
            .submit(LANE_MOVE, request.deadline, work, |_| {})
            .is_err()
        {
            add(&counts.copies_dropped, 1);
        }
    }

    /// Verifies a record of `len` bytes that leaves memory, and writes it below; `over` is called
    /// when that has ended.
    pub(super) fn move_down(
        self: &Arc<Self>,
        number: usize,
        id: BlockId,
        slot: Slot,
        (len, enough): (usize, bool),
        request: Request,
        over: impl FnOnce() + Send + 'static,
    ) {
        let copy = match self.records.verify(id, &slot.as_slice()[..len], len as u64) {
            Ok(ordinal) => Moving {
                number,
                id,
                len,
                options: InsertOptions {
                    ordinal,
                    replace: false,
                },
                request,
                why: Copy::Demotion,
                enough,
            },
            Err(reason) => {
                add(&self.table.tiers[number].counts.copies_dropped, 1);
                let why = reason.name();
                warn!(
                    store = self.records.writer,
                    block = %id,
                    reason = why,
                    "record {id} was damaged in memory ({why}) and is not written back"
                );
                return over();
            }
        };
        self.write_copy(copy, slot, over);
    }
}
