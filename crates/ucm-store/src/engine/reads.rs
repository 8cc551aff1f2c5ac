//! Reads of blocks, each into a slot of its own: begun while slots are free, asked tier by tier of
//! what lies below, and verified before anybody hears of them.
//!
//! A load that wants few of a block's layers has only those read where that can be; loads that join
//! it and want others wait for the next read. A copy that is absent, refused or late in one tier is
//! asked of the next. A record is refused when no tier has a sound one.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, limits};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_record::{LayerEntry, RecordHeader, verify_layers};
use ucm_tier::backend::{BlockRead, InPlace, Part, Parts, ReadDone};

use super::load::{BlockRow, LoadTask};
use super::verify::{reason_named, reason_of, refusal};
use super::{Core, LANE_PUMP};
use crate::stats::Stats;
use crate::tiers::{Request, TierRead};

/// Most reads handed to the tiers at once; the others wait here, where no queue is full.
const READS_AT_ONCE: usize = 1024;
/// Most reads of one tier that are handed over together.
const TOGETHER: usize = 256;
/// Bytes that reading a part of a record must save: less is read sooner than asked for by itself.
/// And at least half.
const WORTH: usize = 256 << 10;
/// Bytes that an operation brings at least where a block is read part by part.
const STEP: usize = 256 << 10;
/// How much earlier than at its deadline a block may fail because the read that it joined after
/// others was late.
const LITTLE: Duration = Duration::from_secs(1);
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
    /// The tier that was asked last: the next one behind it that can be asked is.
    after: Option<usize>,
    /// What the tiers above said; the last word if none below has it either.
    so_far: Option<Failed>,
}

/// A block whose read begins.
struct Begun {
    wanted: Wanted,
    slot: Slot,
    request: Request,
    /// The layers that are wanted, if few.
    layers: Option<Range<u32>>,
}

/// A read under way.
struct Reading {
    id: BlockId,
    tier: usize,
    /// The layers that are read, if not all.
    layers: Option<Range<u32>>,
    /// The second read of the same copy, of all of it.
    again: bool,
    /// Layers before this one were verified as they arrived.
    verified: Arc<AtomicU32>,
    /// The record that they are of.
    begun_with: Arc<BegunWith>,
    request: Request,
    so_far: Option<Failed>,
}

/// The layers, with their checksums, of the record of which some may have gone to the device before
/// all of it was there. Another record may have its name when the others are read.
type BegunWith = Mutex<Option<Vec<LayerEntry>>>;

/// A read that brings a block part by part, as those parts are told of it.
struct PartialRead {
    id: BlockId,
    tier: usize,
    layers: Range<u32>,
    verified: Arc<AtomicU32>,
    begun_with: Arc<BegunWith>,
    deadline: MonotonicTime,
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
            after: None,
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
    /// Joins reads under way or queues new ones, for the blocks not cancelled yet; false if that
    /// would be too many.
    pub(super) fn enqueue(&self, task: &Arc<LoadTask>) -> bool {
        let mut reads = self.reads.blocks.lock();
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

    /// Starts waiting reads on another thread: the thread that begins a load has a model to
    /// compute.
    pub(super) fn pump_elsewhere(self: &Arc<Self>) {
        let core = Arc::clone(self);
        let pump = move || {
            core.pump();
            core.pump_sides();
        };
        // Nothing in it waits, so it has no deadline. What is refused has others before it that
        // have not begun.
        if let Err(refused) = self
            .asks
            .offer(LANE_PUMP, MonotonicTime::NEVER, pump, |_| {})
            && refused.error.kind() != ErrorKind::Busy
        {
            (refused.work)(); // closed meanwhile
        }
    }

    /// Starts waiting reads while slots are free, those of one tier together. One thread pumps at a
    /// time: a call from inside (an operation that failed at once) or beside has nothing to do,
    /// because that thread looks again, under the lock, before it stops.
    pub(super) fn pump(self: &Arc<Self>) {
        if std::mem::replace(&mut self.reads.blocks.lock().pumping, true) {
            return;
        }
        loop {
            let begun = self.take_slots_for_reads();
            if begun.is_empty() {
                return;
            }
            let mut batches: Vec<(usize, Vec<TierRead<Reading>>)> = Vec::new();
            for Begun {
                wanted,
                slot,
                request,
                layers,
            } in begun
            {
                let Wanted { id, after, so_far } = wanted;
                let Some(tier) = self.tiers.place(id, after, request.number) else {
                    drop(slot);
                    self.read_failed(id, request, self.nowhere(id, so_far));
                    continue;
                };
                let reading = Reading {
                    id,
                    tier,
                    layers: layers.filter(|_| self.tiers.reads_parts(tier)),
                    again: false,
                    verified: Arc::default(),
                    begun_with: Arc::default(),
                    request,
                    so_far,
                };
                let read = self.tier_read(reading, slot);
                match batches.iter_mut().find(|(other, _)| *other == tier) {
                    Some((_, batch)) => batch.push(read),
                    None => batches.push((tier, vec![read])),
                }
            }
            for (tier, batch) in batches {
                self.tiers.read(tier, batch, &self.way_on());
            }
        }
    }

    /// The store is closed: waits for a thread that is starting reads, which takes moments, so that
    /// no one else ends a task after this one has looked.
    pub(super) fn await_pump(&self) {
        let begun = std::time::Instant::now();
        let pumping = || self.reads.blocks.lock().pumping || self.reads.sides.lock().is_pumping();
        while pumping() && begun.elapsed() < MOMENTS {
            std::thread::yield_now();
        }
    }

    /// Reads that can begin now, at most a batch of them; none ends the pumping. What no one waits
    /// for any more is dropped.
    fn take_slots_for_reads(&self) -> Vec<Begun> {
        let (mut begun, mut reads) = (Vec::new(), self.reads.blocks.lock());
        let reads = &mut *reads;
        while begun.len() < TOGETHER
            && let Some(wanted) = reads.pending.pop_front()
        {
            let waiters = reads.waiters.entry(wanted.id).or_default();
            waiters.retain(|(task, index)| task.reads(*index));
            let requests = waiters.iter().map(|(task, _)| task.request);
            let Some(request) = requests.max_by_key(|request| request.deadline) else {
                reads.waiters.remove(&wanted.id);
                continue;
            };
            let room = reads.running < READS_AT_ONCE;
            let Some(slot) = room.then(|| self.device.slots.try_acquire()).flatten() else {
                reads.pending.push_front(wanted);
                break;
            };
            let layers = self.few_layers(waiters);
            reads.running += 1;
            begun.push(Begun {
                wanted,
                slot,
                request,
                layers,
            });
        }
        reads.pumping = !begun.is_empty();
        begun
    }

    /// The layers that all who wait for a block want together, if they are few enough to be read by
    /// themselves.
    fn few_layers(&self, waiters: &[(Arc<LoadTask>, usize)]) -> Option<Range<u32>> {
        if self.records.geometry.shards() == 1 {
            return None;
        }
        let wanted = waiters
            .iter()
            .map(|(task, index)| task.blocks[*index].layers(&self.records.geometry));
        let all = wanted.reduce(|one, other| one.start.min(other.start)..one.end.max(other.end))?;
        let bytes: usize = self
            .records
            .layout
            .parts(all.clone())
            .iter()
            .map(Range::len)
            .sum();
        let whole = self.records.layout.record_len();
        (bytes + WORTH.max(whole / 2) <= whole).then_some(all)
    }

    /// Where a block goes that a tier has read, or has not.
    fn way_on(
        self: &Arc<Self>,
    ) -> Arc<impl Fn(Reading, Result<ReadDone>) + Send + Sync + 'static + use<>> {
        let core = Arc::clone(self);
        Arc::new(move |reading, result| core.load_block(reading, result))
    }

    /// What a tier is asked for.
    fn tier_read(self: &Arc<Self>, reading: Reading, slot: Slot) -> TierRead<Reading> {
        let read = BlockRead {
            id: reading.id,
            slot,
            parts: self.parts(&reading),
            sides: false,
            again: reading.again,
            deadline: reading.request.deadline,
            looked: false,
            in_place: self.in_place(&reading),
        };
        TierRead {
            read,
            request: reading.request,
            whose: reading,
        }
    }

    /// Whole records that are read for the first time go to the device from where they lie, if that
    /// is as fast and they lie there in the form in which they are used.
    fn in_place(&self, reading: &Reading) -> InPlace {
        if reading.again || reading.layers.is_some() {
            InPlace::Never
        } else if self.tiers.recodes(reading.tier)
            || !self.device.streams.device().reaches_all_memory()
        {
            InPlace::Region
        } else {
            InPlace::Anywhere
        }
    }

    /// How a block is read whose layers go to the device as they arrive, or of which only some are
    /// wanted.
    fn parts(self: &Arc<Self>, reading: &Reading) -> Option<Parts> {
        if self.records.geometry.shards() == 1 || reading.again || self.tiers.recodes(reading.tier)
        {
            return None;
        }
        let layers = reading
            .layers
            .clone()
            .unwrap_or(0..self.records.geometry.layers());
        let steps = self.steps(layers.clone());
        if steps.len() == 1 && reading.layers.is_none() {
            return None;
        }
        let end = steps
            .last()
            .and_then(|step| step.last())
            .map_or(0, |last| last.end);
        let (core, partial) = (
            Arc::downgrade(self),
            PartialRead {
                id: reading.id,
                tier: reading.tier,
                layers,
                verified: Arc::clone(&reading.verified),
                begun_with: Arc::clone(&reading.begun_with),
                deadline: reading.request.deadline,
            },
        );
        let arrived = move |io: &IoJob, part: Part<'_>| {
            // The last one is verified with the whole.
            if let Some(core) = core.upgrade().filter(|_| part.range.end < end) {
                core.part_arrived(io, &partial, &part);
            }
            None
        };
        Some(Parts {
            steps,
            arrived: Box::new(arrived),
        })
    }

    /// The operations that bring these layers of a record: each some whole shards, if they are
    /// enough to be worth one.
    fn steps(&self, layers: Range<u32>) -> Vec<Vec<Range<usize>>> {
        let (mut steps, mut step) = (Vec::new(), self.records.layout.parts(layers.clone()));
        let per_shard = self.records.geometry.layers_per_shard();
        for upto in (layers.start + per_shard..layers.end).step_by(per_shard as usize) {
            let end = self
                .records
                .layout
                .parts(layers.start..upto)
                .last()
                .map_or(0, |part| part.end);
            if let Some(last) = step.last_mut()
                && last.start + STEP <= end
                && end + STEP <= last.end
            {
                let rest = end..std::mem::replace(&mut last.end, end);
                steps.push(std::mem::replace(&mut step, vec![rest]));
            }
        }
        steps.push(step);
        steps
    }

    /// Part of a record has arrived: the layers that are whole by now are verified and go where
    /// they are wanted, before the rest of it is there.
    fn part_arrived(self: &Arc<Self>, io: &IoJob, partial: &PartialRead, part: &Part<'_>) {
        let from = match part.range.start {
            0 => partial.layers.start, // it begins anew
            _ => partial.verified.load(Ordering::Acquire),
        };
        let is_whole =
            |&layer: &u32| self.records.layout.layer_data(layer + 1).start <= part.range.end;
        let upto = (from..partial.layers.end).take_while(is_whole).last();
        let upto = upto.map_or(from, |last| last + 1);
        let checked = verify_layers(
            part.record,
            part.stored_len,
            &self.expect(partial.id),
            from..upto,
        );
        let Ok(header) = checked else {
            partial.verified.store(from, Ordering::Release);
            return; // what is bad is verified with the whole
        };
        partial.verified.store(upto, Ordering::Release);
        if !io.is_wanted() {
            return; // others may read this block by now, from the record that has its name now
        }
        self.stay_with(partial.id, &partial.begun_with, &header);
        for (task, index, taken) in self.take_ready(io, partial, upto) {
            if self.scatter(&task, index, &taken, part.record, partial.tier) {
                self.report(&task);
            }
        }
    }

    /// The layers of one block never come from two records: where some went to the device of
    /// another one than this, those who wait for the rest have failed.
    fn stay_with(self: &Arc<Self>, id: BlockId, begun_with: &BegunWith, header: &RecordHeader) {
        if self.records.geometry.shards() == 1 {
            return;
        }
        let before = begun_with.lock().replace(header.table.clone());
        if before.is_some_and(|before| before != header.table) {
            let text = "another record took the name of this one while its layers were read";
            self.fail_begun(
                id,
                &Failed::Unread(Error::new(ErrorKind::Busy, text).with("block", id)),
            );
        }
    }

    /// The rows whose layers lie before `upto`, of those who wait for a block and want no other
    /// layers than are read. The thread that has much more time than the read gets all of them at
    /// its end, or from another read.
    fn take_ready(
        &self,
        io: &IoJob,
        partial: &PartialRead,
        upto: u32,
    ) -> Vec<(Arc<LoadTask>, usize, Vec<usize>)> {
        let per_shard = self.records.geometry.layers_per_shard();
        let ready =
            |(_, shard, pieces): &BlockRow| !pieces.in_slot() && (shard + 1) * per_shard <= upto;
        let reads = self.reads.blocks.lock();
        // The thread that ends a read that was written off does it under this lock: nothing of it
        // goes to the device after that.
        let waiters = reads.waiters.get(&partial.id).filter(|_| io.is_wanted());
        let covered = waiters.into_iter().flatten().filter(|(task, index)| {
            let wanted = task.blocks[*index].layers(&self.records.geometry);
            let covered = partial.layers.start <= wanted.start && wanted.end <= partial.layers.end;
            covered && task.state.deadline <= partial.deadline.after(LITTLE)
        });
        let taken =
            covered.map(|(task, index)| (Arc::clone(task), *index, task.take(*index, ready)));
        taken.filter(|(_, _, taken)| !taken.is_empty()).collect()
    }

    /// The way of a block on the thread that has read it: verify, scatter, report, promote.
    fn load_block(self: &Arc<Self>, reading: Reading, result: Result<ReadDone>) {
        let (read, header) = match self.verified(&reading, result) {
            Ok(sound) => sound,
            Err((Failed::Refused(reason, _), Some(slot)))
                if reason.is_damage() && !reading.again =>
            {
                return self.read_again(reading, slot);
            }
            Err((failed, slot)) => return self.ask_below(reading, failed, slot),
        };
        let (id, tier) = (reading.id, reading.tier);
        self.stay_with(id, &reading.begun_with, &header);
        let waiters = self.end_read(id, |task, index| {
            let wanted = task.blocks[index].layers(&self.records.geometry);
            let brought = reading.layers.as_ref();
            brought.is_some_and(|layers| wanted.start < layers.start || wanted.end > layers.end)
        });
        let record = read.lent.as_deref().unwrap_or(read.slot.as_slice());
        let scattered = |(task, index): &(Arc<LoadTask>, usize)| {
            let taken = task.take(*index, |_| true); // what did not go to the device before
            !taken.is_empty() && self.scatter(task, *index, &taken, record, tier)
        };
        let over: Vec<_> = waiters.into_iter().filter(scattered).collect();
        // Where nothing takes it up, the caller that learns that its load is over finds the slot
        // free.
        let whole = reading.layers.is_none();
        let kept = (whole && self.tiers.is_kept_above(tier)).then_some(read);
        over.iter().for_each(|(task, _)| self.report(task));
        if let Some(read) = kept {
            self.tiers
                .promote(tier, id, read.bytes(), header.meta.ordinal);
        }
        self.pump(); // one read less is running
    }

    /// What was read, if it is sound; or why not, and its slot.
    fn verified(
        &self,
        reading: &Reading,
        result: Result<ReadDone>,
    ) -> Result<(ReadDone, RecordHeader), (Failed, Option<Slot>)> {
        let read = result.map_err(|error| match error.kind() {
            ErrorKind::Foreign => (Failed::Refused(reason_named(&error), Some(error)), None),
            _ => (Failed::Unread(error), None),
        })?;
        let before = reading.verified.load(Ordering::Acquire);
        let checked = match &reading.layers {
            Some(layers) => self.verify_layers(reading.id, &read, layers, before),
            None => self.verify(reading.id, &read, before),
        };
        match checked {
            Ok(header) => Ok((read, header)),
            Err(refusal) => {
                let failed = Failed::Refused(refusal.reason, Some(refusal.into()));
                Err((failed, Some(read.slot)))
            }
        }
    }

    /// The medium or the way from it? A second read past every cache tells.
    fn read_again(self: &Arc<Self>, reading: Reading, slot: Slot) {
        Stats::add(&self.stats.second_reads, 1);
        let again = Reading {
            layers: None,
            again: true,
            verified: Arc::default(),
            ..reading
        };
        let tier = again.tier;
        let read = self.tier_read(again, slot);
        self.tiers.read(tier, vec![read], &self.way_on());
    }

    /// A copy could not be had: the next tier is asked, with the next slot that is free, or those
    /// who wait are told.
    fn ask_below(self: &Arc<Self>, reading: Reading, failed: Failed, slot: Option<Slot>) {
        let (id, tier) = (reading.id, reading.tier);
        let closed = matches!(&failed, Failed::Unread(error) if error.kind() == ErrorKind::Closed);
        let below = self.tiers.place(id, Some(tier), reading.request.number);
        if closed || below.is_none() {
            let error = self.no_copy(&reading, failed);
            drop(slot);
            return self.read_failed(id, reading.request, error);
        }
        if let Failed::Refused(reason, _) = &failed {
            self.discard(id, tier, *reason);
        }
        self.fail_begun(id, &failed);
        let mut reads = self.reads.blocks.lock();
        reads.running -= 1;
        reads.pending.push_front(Wanted {
            id,
            after: Some(tier),
            so_far: Some(tell(reading.so_far, failed)),
        });
        drop(reads);
        drop(slot);
        self.pump();
    }

    /// The layers of one block never come from two copies: those of whose rows some came from this
    /// one have failed with it.
    fn fail_begun(self: &Arc<Self>, id: BlockId, failed: &Failed) {
        let mut reads = self.reads.blocks.lock();
        let waiters = reads
            .waiters
            .get_mut(&id)
            .filter(|_| self.records.geometry.shards() > 1);
        let begun = |(task, index): &mut (Arc<LoadTask>, usize)| task.has_begun(*index);
        let begun: Vec<_> =
            waiters.map_or_else(Vec::new, |waiters| waiters.extract_if(.., begun).collect());
        drop(reads);
        if begun.is_empty() {
            return;
        }
        let (error, reason) = match failed {
            Failed::Refused(reason, Some(cause)) => {
                (refusal(*reason).caused_by(cause.clone()), *reason)
            }
            Failed::Refused(reason, None) => (refusal(*reason), *reason),
            Failed::Unread(error) => (error.clone(), reason_of(error)),
        };
        let mut miss = Some(reason);
        for (task, index) in begun {
            self.fail_block(&task, index, error.clone(), &mut miss);
        }
    }

    /// No tier is left for a read that ended with `failed` in the last one: what those who wait are
    /// told.
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
            (Some(Failed::Unread(above)), Failed::Unread(error))
                if error.kind() == ErrorKind::NotFound =>
            {
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
            _ if self.tiers.is_all_well() => {
                Error::new(ErrorKind::NotFound, "no tier has this record")
            }
            _ => Error::new(
                ErrorKind::Unhealthy,
                "no tier that may have this record can be asked now",
            ),
        }
    }

    /// A block could not be had. A load with more time than a read that was late gets another one;
    /// so does a load that came after a read began that found nothing: the block may have been
    /// stored in between.
    fn read_failed(self: &Arc<Self>, id: BlockId, request: Request, error: Error) {
        let late = error.kind() == ErrorKind::Timeout;
        let absent = error.kind() == ErrorKind::NotFound;
        let waiters = self.end_read(id, |task, _| {
            late && task.state.deadline > request.deadline
                || absent && task.request.number > request.number
        });
        let error = self.count_failed_read(id, error);
        // Of a late one the first that notices it counts it: this, or the load itself.
        let mut late_miss = late.then(|| reason_of(&error));
        for (task, index) in waiters {
            self.fail_block(&task, index, error.clone(), &mut late_miss);
        }
        self.pump(); // one read less is running
    }

    /// Takes a read off the list, with those who wait for it; for those of whom `goes_on` says so
    /// another one begins.
    fn end_read(
        &self,
        id: BlockId,
        goes_on: impl Fn(&LoadTask, usize) -> bool,
    ) -> Vec<(Arc<LoadTask>, usize)> {
        let mut reads = self.reads.blocks.lock();
        reads.running -= 1;
        let waiters = reads.waiters.remove(&id).unwrap_or_default();
        let (more, over): (Vec<_>, Vec<_>) = waiters.into_iter().partition(|(task, index)| {
            goes_on(task, *index) && task.reads(*index) && !task.has_begun(*index)
        });
        if !more.is_empty() {
            reads.waiters.insert(id, more);
            reads.pending.push_back(Wanted::new(id));
        }
        over
    }

    /// What a failed read says: of this record, of the medium, or nothing. A late one is counted
    /// with its load.
    fn count_failed_read(&self, id: BlockId, error: Error) -> Error {
        match error.kind() {
            // refused, and the medium did answer
            ErrorKind::Corrupt | ErrorKind::Foreign => return error,
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
        (Some(Failed::Unread(above)), Failed::Unread(here))
            if here.kind() == ErrorKind::NotFound =>
        {
            Failed::Unread(above)
        }
        (_, here) => here,
    }
}
