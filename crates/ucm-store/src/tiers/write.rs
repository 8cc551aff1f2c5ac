//! How a record comes into the tiers: from a dump, after a load or a prefetch, and when a tier
//! above gives it up.
//!
//! A dump is published by the lowest level that is written through and outlives this process, in
//! the member that its spread gives it to. The other levels get copies: a memory at once, a file in
//! a spare slot, and no caller waits for them. A copy that finds no spare slot, or a tier that is
//! not well, is dropped and counted. The outcome of a record that its medium publishes later is
//! reported by receipt ([`Receipts`]).

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::{Slot, SlotPool};
use ucm_infra::{LANE_DUMP, MonotonicTime, Notify, Ticket, WorkerPool};
use ucm_io::IoJob;
use ucm_media::backend::{Flush, OnSealed, ReadDone, Receipt, Victim, WriteOptions, Written};

use super::config::{LANE_MOVE, Request, WritePolicy};
use super::level::{Level, TierTable};
use super::probes::Probes;
use super::tenants::{Counted, Tenants};
use crate::records::OwnParts;
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
}

/// The write of one record to one tier.
#[derive(Clone, Copy)]
pub(crate) struct WriteTarget {
    number: usize,
    id: BlockId,
    options: WriteOptions,
    request: Request,
    why: WriteReason,
    /// As many as are published together are on their way: that is not to wait for more.
    enough: bool,
}

/// The purpose of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteReason {
    /// A dump that this tier decides on.
    Dump,
    /// A copy of a dump that goes to more than one tier.
    Copy,
    /// A copy of what a lower tier had.
    Promotion,
    /// A copy of what the tier above gave up.
    Demotion,
}

/// Values that are dropped when a copy has ended.
pub(super) type Held = Box<dyn Send>;

/// The records that media have and have not published yet. A receipt is returned by the write on
/// one thread and its outcome reported on another: whichever is first is kept here for the other.
#[derive(Default)]
pub(super) struct Receipts {
    open: Mutex<HashMap<Receipt, Open>>,
    /// Called with the outcomes of dumps.
    on_dump: OnceLock<OnDump>,
}

/// Called with the id of a block, its dump's request, and the outcome; must not wait.
pub(crate) type OnDump = Box<dyn Fn(BlockId, Request, Result<Written>) + Send + Sync>;

enum Open {
    /// The write has returned.
    Awaited {
        target: WriteTarget,
        counts: Option<Counted>,
        held: Option<Held>,
    },
    /// The outcome was reported.
    Sealed(Result<()>),
}

/// The moves of records between tiers.
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
    /// Number of the store in the log.
    pub(super) store: u64,
    pub(super) parts: Arc<OwnParts>,
    pub(super) tenants: Option<Arc<Tenants>>,
    pub(super) moves: Moves,
    pub(super) receipts: Receipts,
}

impl Writes {
    /// Sets, once, what is called with the outcomes of dumps that were published later.
    pub(crate) fn on_dump(&self, hook: OnDump) {
        let _ = self.receipts.on_dump.set(hook); // it is set once
    }

    /// The hook that a medium calls with the outcomes of its receipts.
    pub(super) fn on_sealed(self: &Arc<Self>) -> OnSealed {
        let weak = Arc::downgrade(self);
        Box::new(move |receipt, result| {
            if let Some(writes) = weak.upgrade() {
                writes.meet(receipt, Open::Sealed(result));
            }
        })
    }

    /// A write has returned a receipt, or a medium has published its record or never will. The
    /// second of both finds the first here.
    fn meet(&self, receipt: Receipt, this: Open) {
        let mut open = self.receipts.open.lock();
        let Some(other) = open.remove(&receipt) else {
            open.insert(receipt, this);
            return;
        };
        drop(open);
        if let (
            Open::Sealed(result),
            Open::Awaited {
                target,
                counts,
                held,
            },
        )
        | (
            Open::Awaited {
                target,
                counts,
                held,
            },
            Open::Sealed(result),
        ) = (this, other)
        {
            self.published(&target, counts, result);
            drop(held);
        }
    }

    /// Keeps this until the outcome of a receipt is reported, if it was not yet.
    fn hold(&self, receipt: Receipt, keep: Held) {
        if let Some(Open::Awaited { held, .. }) = self.receipts.open.lock().get_mut(&receipt) {
            *held = Some(keep);
        }
    }

    /// The outcome of a record that was to be published later.
    fn published(&self, target: &WriteTarget, counts: Option<Counted>, result: Result<()>) {
        let result = result.map(|()| Written::Published);
        if result.is_ok() {
            self.count(counts);
        }
        self.written(target, &result);
        if let (WriteReason::Dump, Some(hook)) = (target.why, self.receipts.on_dump.get()) {
            hook(target.id, target.request, result);
        }
    }

    /// A record was published: counts it for its tenant.
    fn count(&self, counts: Option<Counted>) {
        if let (Some(tenants), Some(counts)) = (&self.tenants, counts) {
            tenants.count(counts);
        }
    }

    /// Gives a dumped record to every other tier that is written through, and chooses the tier that
    /// decides.
    pub(crate) fn begin_dump(self: &Arc<Self>, write: &TierWrite) -> Result<WriteTarget> {
        let (id, options, request) = (write.id, write.options, write.request);
        let now = self.table.clock.now();
        let through = |level: &&Level| level.policy == WritePolicy::Through;
        let lasting = |level: &&Level| through(level) && !level.memory;
        let outlives = self.table.levels.iter().any(|level| lasting(&level));
        let takes = |level: &Level| self.taker_of_dump(level, id, request, now);
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
        let deciding = decides.map(|number| self.table.tiers[number].level);
        for (at, level) in self.table.levels.iter().enumerate() {
            if write.alone || !through(&level) || Some(at) == deciding {
                continue;
            }
            let number = self.table.taker_of_copy(level, id);
            let copy = WriteTarget::new(number, id, options, request, WriteReason::Copy);
            self.copy(copy, &write.slot.as_slice()[..options.len]);
        }
        let Some(number) = decides else {
            let off = "no tier that outlives this process can be written to now";
            return Err(Error::new(ErrorKind::Unhealthy, off));
        };
        let mut target = WriteTarget::new(number, id, options, request, WriteReason::Dump);
        target.options.replace |= self.table.tiers[number].replaces(id);
        Ok(target)
    }

    /// The member of a level that a dump goes to. A root that is in doubt is not tried out by it
    /// while another beside it is well: it could answer from its index that it has the record, and
    /// then not give it. It is looked at in the background.
    fn taker_of_dump(
        self: &Arc<Self>,
        level: &Level,
        id: BlockId,
        request: Request,
        now: MonotonicTime,
    ) -> Option<usize> {
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

    /// Writes a dumped record on the thread that calls, whose pool keeps the time by `ticket`. The
    /// outcome is to be noted by [`Writes::written`].
    pub(crate) fn write_here(
        &self,
        target: &WriteTarget,
        slot: Slot,
        ticket: &Arc<Ticket>,
    ) -> Result<Written> {
        let pool = &self.table.tiers[target.number].pool;
        let io = pool.visit(LANE_DUMP, target.request.deadline, ticket);
        self.write(&io, target, slot)
    }

    /// Writes a record on a thread of its tier, and notes the outcome; `done` is called with it.
    pub(crate) fn write_on_a_thread(
        self: &Arc<Self>,
        target: WriteTarget,
        slot: Slot,
        done: impl FnOnce(Result<Written>) + Send + 'static,
    ) {
        let (writes, ended) = (Arc::clone(self), Arc::clone(self));
        let work = move |io: &IoJob| writes.write(io, &target, slot);
        let noted = move |result| {
            ended.written(&target, &result);
            done(result);
        };
        let pool = &self.table.tiers[target.number].pool;
        pool.job(LANE_DUMP, target.request.deadline, work, noted);
    }

    /// Writes a record to a tier, in the form in which it is stored there.
    fn write(&self, io: &IoJob, target: &WriteTarget, mut slot: Slot) -> Result<Written> {
        let (number, id) = (target.number, target.id);
        let tier = &self.table.tiers[number];
        let options = tier
            .form
            .encode(&*tier.backend, id, &mut slot, target.options)?;
        let tenants = self.tenants.as_ref();
        let counts =
            tenants.and_then(|tenants| tenants.to_count(number, &slot.as_slice()[..options.len]));
        io.still_wanted()?;
        let written = tier.backend.write(io, id, slot, options)?;
        match written {
            Written::Published => self.count(counts),
            Written::Present
                if target.why == WriteReason::Dump && tier.form.may_be_of_another_key(id) =>
            {
                return tier.form.check_present(&*tier.backend, io, id);
            }
            Written::Sealing(receipt) => {
                let (target, held) = (*target, None);
                self.meet(
                    receipt,
                    Open::Awaited {
                        target,
                        counts,
                        held,
                    },
                );
            }
            Written::Present | Written::InTheWay(_) => {}
        }
        Ok(written)
    }

    /// Notes how a write ended; one that is published later has not ended yet.
    pub(crate) fn written(&self, target: &WriteTarget, result: &Result<Written>) {
        let (id, request) = (target.id, target.request);
        let tier = &self.table.tiers[target.number];
        let of_writes = match result {
            Ok(Written::Sealing(_)) => return,
            Ok(Written::Present | Written::InTheWay(_)) => {
                tier.note_answer(request);
                None
            }
            Ok(Written::Published) => {
                tier.note(request, None);
                Some(Ok(()))
            }
            Err(error) => {
                tier.note(request, Some(error));
                Some(Err(error))
            }
        };
        tier.health.note_write(request.number, of_writes);
        match result {
            Ok(Written::Published) => {
                tier.clear_bad(id);
                tier.form.note_key_fits(id);
                add(&tier.counts.blocks_written, 1);
                add(&tier.counts.bytes_written, target.options.len as u64);
            }
            Ok(Written::InTheWay(reason)) => tier.refuse(id, *reason),
            _ => {}
        }
        match (result, target.why) {
            (_, WriteReason::Dump) => {}
            (Ok(Written::Published), WriteReason::Promotion) => add(&tier.counts.promotions, 1),
            (Ok(Written::Published), WriteReason::Demotion) => add(&tier.counts.demotions, 1),
            (Err(_) | Ok(Written::InTheWay(_)), _) => add(&tier.counts.copies_dropped, 1),
            _ => {}
        }
    }

    /// Whether a copy may be written now; its outcome must be noted.
    fn admits(&self, target: &WriteTarget) -> bool {
        let now = self.table.clock.now();
        self.probes.admits_write(target.number, target.request, now)
    }

    /// Gives a tier a copy of its own, if that can be had without waiting.
    fn copy(self: &Arc<Self>, mut copy: WriteTarget, record: &[u8]) {
        let tier = &self.table.tiers[copy.number];
        let Some(memory) = tier.backend.features().memory else {
            match self.spare_copy(&copy, record) {
                Some(slot) => self.write_copy(copy, slot, None),
                None => add(&tier.counts.copies_dropped, 1),
            }
            return;
        };
        if !self.admits(&copy) {
            return add(&tier.counts.copies_dropped, 1);
        }
        copy.options.replace |= tier.replaces(copy.id);
        self.written(&copy, &memory.insert(copy.id, record, copy.options));
    }

    /// A spare slot with these bytes in it, for a tier that is well.
    fn spare_copy(&self, target: &WriteTarget, record: &[u8]) -> Option<Slot> {
        let (health, now) = (
            &self.table.tiers[target.number].health,
            self.table.clock.now(),
        );
        if !health.may_write(target.request.number, now) {
            return None;
        }
        let mut slot = self.moves.spare.try_acquire()?;
        slot.as_mut_slice()[..record.len()].copy_from_slice(record);
        Some(slot)
    }

    /// Writes what is in a spare slot; `held` is dropped when that has ended.
    fn write_copy(self: &Arc<Self>, mut copy: WriteTarget, slot: Slot, held: Option<Held>) {
        let tier = &self.table.tiers[copy.number];
        if !self.admits(&copy) {
            return add(&tier.counts.copies_dropped, 1);
        }
        copy.options.replace |= tier.replaces(copy.id);
        let writes = Arc::clone(self);
        let ended = move |result: Result<Written>| {
            if let (Some(held), Ok(Written::Sealing(receipt))) = (held, &result) {
                writes.hold(*receipt, held);
                if copy.enough {
                    writes.table.tiers[copy.number].backend.flush(Flush::Now);
                }
            }
        };
        self.write_on_a_thread(copy, slot, ended);
    }

    /// A verified record of tier `from` goes to the tiers above that take what is written.
    pub(crate) fn promote(self: &Arc<Self>, from: usize, id: BlockId, record: &[u8], ordinal: u32) {
        for number in self.takers(from, id) {
            self.copy(self.promotion(number, id, record.len(), ordinal), record);
        }
    }

    /// As [`Writes::promote`], with a record that has a spare slot already: the lowest file above
    /// is written from that slot, so that what was read is not dropped for want of another. `held`
    /// is dropped when that has ended.
    pub(super) fn raise(
        self: &Arc<Self>,
        from: usize,
        id: BlockId,
        read: ReadDone,
        ordinal: u32,
        held: Held,
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
        if let Some(number) = file {
            let copy = self.promotion(number, id, read.read, ordinal);
            self.write_copy(copy, read.slot, Some(held));
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
    fn promotion(&self, number: usize, id: BlockId, len: usize, ordinal: u32) -> WriteTarget {
        let (options, why) = (WriteOptions::of_copy(len, ordinal), WriteReason::Promotion);
        WriteTarget::new(number, id, options, self.request(), why)
    }

    /// A request for a copy that begins now.
    fn request(&self) -> Request {
        let now = self.table.clock.now();
        self.table.request(now.after(self.moves.deadline))
    }

    /// The memory above a level, which is written back to, gives a record up: verified again, it
    /// goes down. It is let go above when it is below.
    pub(super) fn demote(self: &Arc<Self>, level: usize, victim: Box<dyn Victim>) {
        let (table, request) = (&self.table, self.request());
        let number = table.taker_of_copy(&table.levels[level], victim.id());
        let (health, counts) = (&table.tiers[number].health, &table.tiers[number].counts);
        let well = health.may_write(request.number, table.clock.now());
        let Some(slot) = well.then(|| self.moves.spare.try_acquire()).flatten() else {
            return add(&counts.copies_dropped, 1);
        };
        let writes = Arc::clone(self);
        let work = move || {
            let (mut slot, id, len) = (slot, victim.id(), victim.record().len());
            slot.as_mut_slice()[..len].copy_from_slice(victim.record());
            let enough = writes.table.tiers[number].demotion_begins();
            let demotion = Demotion {
                victim: Some(victim),
                writes: Arc::clone(&writes),
                number,
            };
            writes.move_down(number, id, slot, (len, enough), request, Box::new(demotion));
        };
        let pool = &self.moves.pool;
        if let Err(refused) = pool.offer(LANE_MOVE, request.deadline, work, |_| {}) {
            drop(refused.work);
            add(&counts.copies_dropped, 1);
        }
    }

    /// Verifies a record of `len` bytes that leaves memory, and writes it below; `held` is dropped
    /// when that has ended.
    pub(super) fn move_down(
        self: &Arc<Self>,
        number: usize,
        id: BlockId,
        slot: Slot,
        (len, enough): (usize, bool),
        request: Request,
        held: Held,
    ) {
        let record = &slot.as_slice()[..len];
        let ordinal = match self.parts.of(record).verify(id, record, len as u64) {
            Ok(ordinal) => ordinal,
            Err(reason) => {
                add(&self.table.tiers[number].counts.copies_dropped, 1);
                let why = reason.name();
                warn!(
                    store = self.store,
                    block = %id,
                    reason = why,
                    "record {id} was damaged in memory ({why}) and is not written back"
                );
                return;
            }
        };
        let (options, why) = (WriteOptions::of_copy(len, ordinal), WriteReason::Demotion);
        let copy = WriteTarget {
            enough,
            ..WriteTarget::new(number, id, options, request, why)
        };
        self.write_copy(copy, slot, Some(held));
    }
}

impl WriteTarget {
    fn new(
        number: usize,
        id: BlockId,
        options: WriteOptions,
        request: Request,
        why: WriteReason,
    ) -> Self {
        Self {
            number,
            id,
            options,
            request,
            why,
            enough: false,
        }
    }
}

/// A record that a memory gives up, until it is below.
struct Demotion {
    victim: Option<Box<dyn Victim>>,
    writes: Arc<Writes>,
    number: usize,
}

impl Drop for Demotion {
    fn drop(&mut self) {
        drop(self.victim.take());
        self.writes.table.tiers[self.number].demotion_ended();
    }
}
