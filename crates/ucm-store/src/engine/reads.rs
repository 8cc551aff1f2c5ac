//! Loads of blocks, each read into a slot of its own: begun while slots are free, read tier by
//! tier, and verified before any of it goes to the device.
//!
//! Loads of one block by several tasks join one read. A load that wants few of a block's layers has
//! only those read where that is possible; loads that join it and want others wait for the next
//! read. Where a copy is absent, refused or late in one tier, the next tier is read. A record is
//! refused when no tier has a sound one.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, limits};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_media::backend::{BlockRead, InPlace, Parts, ReadDone, ReadPart};
use ucm_record::{LayerEntry, RecordHeader, Refusal, verify_layers, verify_rest};

use super::config::Row;
use super::core::{
    Core, LANE_LOADS, await_end, closed, other_part, reason_named, reason_of, refusal,
};
use super::load::LoadTask;
use super::rows::BlockRow;
use super::task::Task;
use crate::records::StoredRecords;
use crate::stats::{StageSpan, add, stage_time};
use crate::tiers::{Reader, Request, TierRead};

/// Most reads in the tiers at once; the others wait here, where no queue is full.
const READS_AT_ONCE: usize = 1024;
/// Most reads of one tier that begin together.
const TOGETHER: usize = 256;
/// Bytes that reading a part of a record must save, and at least half of it: reading less than that
/// more costs less than a second operation.
const WORTH: usize = 256 << 10;
/// Bytes of an operation at least where a block is read part by part.
const STEP: usize = 256 << 10;
/// How much earlier than at its deadline a block may fail because the read that it joined after
/// others was late.
const LITTLE: Duration = Duration::from_secs(1);
/// Most blocks waiting for a slot; a load that would make them more is refused.
const MAX_PENDING: usize = limits::MAX_IDS_PER_CALL;

/// A block that a load wants: the number of the block in it.
type Waiter = (Arc<LoadTask>, usize);

/// See the module.
pub(super) struct Loads {
    core: Arc<Core>,
    reads: Mutex<Reads>,
}

/// Reads under way or waiting for a slot, with the loads that joined them.
#[derive(Default)]
struct Reads {
    waiters: HashMap<BlockId, Vec<Waiter>>,
    /// Blocks waiting for a slot, oldest first.
    pending: VecDeque<Wanted>,
    /// Reads in the tiers now.
    running: usize,
    /// A thread is starting reads.
    pumping: bool,
}

/// A block to be read, and how far that is.
#[derive(Default)]
struct Wanted {
    id: BlockId,
    /// That of the read in the uppermost tier, which later loads join.
    first: Option<Request>,
    /// The tier that was read last: the next one behind it that can be read follows.
    after: Option<usize>,
    /// The failure of the tiers above, the answer if no tier below has the block either.
    so_far: Option<Failed>,
}

/// A read that can begin.
struct Begun {
    wanted: Wanted,
    records: Arc<StoredRecords>,
    slot: Slot,
    request: Request,
    /// The layers that are wanted, if few.
    layers: Option<Range<u32>>,
}

/// A read under way.
struct Reading {
    loads: Arc<Loads>,
    id: BlockId,
    tier: usize,
    /// The layers that are read, if not all.
    layers: Option<Range<u32>>,
    /// The second read of the same copy, of all of it.
    again: bool,
    progress: Arc<Progress>,
    request: Request,
    first: Request,
    so_far: Option<Failed>,
}

/// How much of a block was read, of a read that brings it part by part.
struct Progress {
    id: BlockId,
    tier: usize,
    /// The layers that are read.
    layers: Range<u32>,
    deadline: MonotonicTime,
    /// Those of the part of the block.
    records: Arc<StoredRecords>,
    /// Layers before this one were verified as they were read.
    verified: AtomicU32,
    /// The layers, with their checksums, of the record that this block is read from: another record
    /// may have its name when later layers are read.
    record: Mutex<Option<Vec<LayerEntry>>>,
}

/// Why a copy could not be read.
enum Failed {
    /// It was refused.
    Refused(MissReason, Option<Error>),
    /// It is not there, or could not be read.
    Unread(Error),
}

impl Loads {
    pub(super) fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self {
            core: Arc::clone(core),
            reads: Mutex::default(),
        })
    }

    /// Starts loading rows of a part; see [`EnginePart::load`](super::EnginePart::load).
    pub(super) fn load(
        self: &Arc<Self>,
        records: &Arc<StoredRecords>,
        rows: Vec<Row>,
        deadline: Option<Duration>,
    ) -> Result<Task> {
        self.core.check_rows(records, &rows, true)?;
        let task = LoadTask::new(&self.core, records, rows, deadline);
        if !task.blocks.is_empty() {
            self.begin(&task);
        }
        Ok(task.handle())
    }

    /// Lets the blocks of a load wait for their reads, or ends it here.
    fn begin(self: &Arc<Self>, task: &Arc<LoadTask>) {
        let core = &self.core;
        if let Err(error) = core.check_available(task.state.started) {
            let count = task.blocks.len() as u64;
            core.stats.misses.add(reason_of(&error), count);
            return task.end(error);
        }
        let mut blocks = task.blocks.iter();
        if let Some(index) = blocks.position(|block| core.refused.contains(block.id)) {
            let (kind, reason) = core.refused.known_refusal(task.blocks[index].id);
            core.stats.misses.add(reason, 1);
            let text = "this record was refused before and not replaced yet";
            let refused = Error::new(kind, text).with("reason", reason.name());
            task.fail_block(index, refused, &mut None);
            if index == 0 {
                return; // nothing lies before it
            }
        }
        let Some(clashing) = self.enqueue(task) else {
            let full = Error::new(ErrorKind::Busy, "too many blocks wait for a staging slot");
            return task.end(full.with("most", MAX_PENDING));
        };
        for index in clashing {
            task.fail_block(index, other_part(), &mut None);
        }
        self.pump_elsewhere();
        // Either the thread that closes the engine has seen the blocks, or we see here that it is
        // closed.
        if let Err(closed) = core.check_open() {
            task.end(closed);
        }
    }

    /// Blocks waiting for a slot.
    pub(super) fn queued(&self) -> usize {
        self.reads.lock().pending.len()
    }

    /// Ends every load that still reads, because the engine is closed.
    pub(super) fn end(&self) {
        let mut reads = self.reads.lock();
        reads.pending.clear();
        let waiters = std::mem::take(&mut reads.waiters);
        drop(reads);
        for (task, _) in waiters.into_values().flatten() {
            task.end(closed());
        }
    }

    /// Joins reads under way or queues new ones, for the blocks not cancelled yet; `None` if that
    /// would be too many. Those that others load as of another part are returned.
    fn enqueue(&self, task: &Arc<LoadTask>) -> Option<Vec<usize>> {
        let (mut clashing, mut reads) = (Vec::new(), self.reads.lock());
        if reads.pending.len() + task.blocks.len() > MAX_PENDING {
            return None;
        }
        for (index, block) in task.blocks.iter().enumerate() {
            if !task.reads(index) {
                continue;
            }
            let waiter = (Arc::clone(task), index);
            if let Some(waiters) = reads.waiters.get_mut(&block.id) {
                let clashes = |(other, _): &Waiter| other.records.part != task.records.part;
                if waiters.iter().any(clashes) {
                    clashing.push(index);
                    continue;
                }
                waiters.push(waiter);
                add(&self.core.stats.loads_joined, 1);
            } else {
                reads.waiters.insert(block.id, vec![waiter]);
                let id = block.id;
                reads.pending.push_back(Wanted {
                    id,
                    ..Wanted::default()
                });
            }
        }
        Some(clashing)
    }

    /// Starts waiting reads on another thread: the thread that begins a load has a model to
    /// compute.
    fn pump_elsewhere(self: &Arc<Self>) {
        let this = Arc::clone(self);
        self.core.start(LANE_LOADS, move || this.pump());
    }

    /// Starts waiting reads while slots are free, those of one tier together. One thread pumps at a
    /// time: a call from inside (an operation that failed at once) or beside has nothing to do,
    /// because that thread checks the queue again, under the lock, before it stops.
    pub(super) fn pump(self: &Arc<Self>) {
        if std::mem::replace(&mut self.reads.lock().pumping, true) {
            return;
        }
        loop {
            let begun = self.take_slots();
            if begun.is_empty() {
                return;
            }
            let mut reads = Vec::with_capacity(begun.len());
            for Begun {
                wanted,
                records,
                slot,
                request,
                layers,
            } in begun
            {
                let (id, tiers) = (wanted.id, &self.core.tiers);
                let Some(tier) = tiers.table.place(id, wanted.after, request.number) else {
                    drop(slot);
                    self.read_failed(id, wanted.first.unwrap_or(request), self.no_tier(wanted));
                    continue;
                };
                let layers = layers.filter(|_| tiers.table.reads_parts(tier));
                let all = 0..records.geometry.layers();
                let progress = Progress {
                    id,
                    tier,
                    layers: layers.clone().unwrap_or(all),
                    deadline: request.deadline,
                    records,
                    verified: AtomicU32::new(0),
                    record: Mutex::default(),
                };
                let reading = Reading {
                    loads: Arc::clone(self),
                    id,
                    tier,
                    layers,
                    again: false,
                    progress: Arc::new(progress),
                    request,
                    first: wanted.first.unwrap_or(request),
                    so_far: wanted.so_far,
                };
                reads.push(reading.in_tier(slot));
            }
            self.core.tiers.reads.read(reads);
        }
    }

    /// The store is closed: waits for a thread that is starting reads, which takes moments, so that
    /// no other thread ends a task after this one.
    pub(super) fn await_pump(&self) {
        await_end(|| self.reads.lock().pumping);
    }

    /// Reads that can begin now, at most a batch of them; none ends the pumping. Blocks that no
    /// load wants any more are dropped.
    fn take_slots(&self) -> Vec<Begun> {
        let (mut begun, mut reads) = (Vec::new(), self.reads.lock());
        let reads = &mut *reads;
        while begun.len() < TOGETHER
            && let Some(wanted) = reads.pending.pop_front()
        {
            let waiters = reads.waiters.entry(wanted.id).or_default();
            waiters.retain(|(task, index)| task.reads(*index));
            let latest = waiters.iter().max_by_key(|(task, _)| task.request.deadline);
            let Some((task, _)) = latest else {
                reads.waiters.remove(&wanted.id);
                continue;
            };
            let slot = match reads.running < READS_AT_ONCE {
                true => self.core.device.slots.try_acquire(),
                false => None,
            };
            let Some(slot) = slot else {
                reads.pending.push_front(wanted);
                break;
            };
            reads.running += 1;
            begun.push(Begun {
                wanted,
                records: Arc::clone(&task.records),
                slot,
                request: task.request,
                layers: few_layers(waiters),
            });
        }
        reads.pumping = !begun.is_empty();
        begun
    }

    /// Part of a record was read: the layers that are whole by now are verified and go where they
    /// are wanted, before the rest of it is there.
    fn part_read(&self, io: &IoJob, read: &Progress, part: &ReadPart<'_>) {
        let (records, verified) = (&read.records, &read.verified);
        let from = match part.range.start {
            0 => read.layers.start, // it begins anew
            _ => verified.load(Ordering::Acquire),
        };
        let mut upto = from;
        while upto < read.layers.end && records.layout.layer_data(upto + 1).start <= part.range.end
        {
            upto += 1;
        }
        let (expect, began) = (records.expect(read.id), stage_time(&*self.core.clock));
        let Ok(header) = verify_layers(part.record, part.stored_len, &expect, from..upto) else {
            verified.store(from, Ordering::Release);
            return; // damage is found again with the whole
        };
        verified.store(upto, Ordering::Release);
        if !io.is_wanted() {
            return; // others may read this block by now, from the record that has its name now
        }
        let span = began.zip(stage_time(&*self.core.clock));
        self.stay_with(read, &header);
        for (task, index, taken) in self.take_ready(io, read, upto) {
            task.state.note_stage("verify", span);
            if task.scatter(index, &taken, part.record, read.tier) {
                task.report();
            }
        }
    }

    /// The layers of one block never come from two records: where some went to the device of
    /// another one than this, the loads that wait for the rest fail.
    fn stay_with(&self, read: &Progress, header: &RecordHeader) {
        if read.records.geometry.shards() == 1 {
            return;
        }
        let before = read.record.lock().replace(header.table.clone());
        if before.is_some_and(|before| before != header.table) {
            let text = "another record took the name of this one while its layers were read";
            let error = Error::new(ErrorKind::Busy, text).with("block", read.id);
            self.fail_begun(read, &Failed::Unread(error));
        }
    }

    /// The rows whose layers lie before `upto`, of the loads that wait for a block and want no
    /// other layers than are read. A load that has much more time than the read gets all of them at
    /// its end, or from another read.
    fn take_ready(
        &self,
        io: &IoJob,
        read: &Progress,
        upto: u32,
    ) -> Vec<(Arc<LoadTask>, usize, Vec<usize>)> {
        let geometry = &read.records.geometry;
        let per_shard = geometry.layers_per_shard();
        let ready =
            |(_, shard, pieces): &BlockRow| !pieces.in_slot() && (shard + 1) * per_shard <= upto;
        let (mut all, reads) = (Vec::new(), self.reads.lock());
        // The thread that ends a read that was written off does it under this lock: nothing of it
        // goes to the device after that.
        let Some(waiters) = reads.waiters.get(&read.id).filter(|_| io.is_wanted()) else {
            return all;
        };
        for (task, index) in waiters {
            let wanted = task.blocks[*index].layers(geometry);
            let covered = read.layers.start <= wanted.start && wanted.end <= read.layers.end;
            if covered && task.state.deadline <= read.deadline.after(LITTLE) {
                let taken = task.take(*index, ready);
                if !taken.is_empty() {
                    all.push((Arc::clone(task), *index, taken));
                }
            }
        }
        all
    }

    /// A copy could not be read: the next tier is read, with the next slot that is free, or the
    /// loads that wait fail.
    fn read_below(self: &Arc<Self>, reading: Reading, failed: Failed, slot: Option<Slot>) {
        let (id, tier) = (reading.id, reading.tier);
        let closed = matches!(&failed, Failed::Unread(error) if error.kind() == ErrorKind::Closed);
        let table = &self.core.tiers.table;
        let below = table.place(id, Some(tier), reading.request.number);
        if closed || below.is_none() {
            let first = reading.first;
            let error = self.no_copy(reading, failed);
            drop(slot);
            return self.read_failed(id, first, error);
        }
        if let Failed::Refused(reason, _) = &failed {
            self.core.discard(id, tier, *reason);
        }
        self.fail_begun(&reading.progress, &failed);
        let mut reads = self.reads.lock();
        reads.running -= 1;
        reads.pending.push_front(Wanted {
            id,
            first: Some(reading.first),
            after: Some(tier),
            so_far: Some(worse(reading.so_far, failed)),
        });
        drop(reads);
        drop(slot);
        self.pump();
    }

    /// The layers of one block never come from two copies: loads that have rows of this one fail
    /// with it.
    fn fail_begun(&self, read: &Progress, failed: &Failed) {
        if read.records.geometry.shards() == 1 {
            return;
        }
        let mut begun = Vec::new();
        if let Some(waiters) = self.reads.lock().waiters.get_mut(&read.id) {
            begun.extend(waiters.extract_if(.., |(task, index)| task.has_begun(*index)));
        }
        let (mut error, reason) = match failed {
            Failed::Refused(reason, _) => (refusal(*reason), *reason),
            Failed::Unread(error) => (error.clone(), reason_of(error)),
        };
        if let Failed::Refused(_, Some(cause)) = failed {
            error = error.caused_by(cause.clone());
        }
        let mut miss = Some(reason);
        for (task, index) in begun {
            task.fail_block(index, error.clone(), &mut miss);
        }
    }

    /// No tier is left for a read that ended with `failed` in the last one: the error of the loads
    /// that wait.
    fn no_copy(&self, reading: Reading, failed: Failed) -> Error {
        let error = match failed {
            Failed::Refused(reason, cause) => {
                let error = self.core.refuse(reading.id, Some(reading.tier), reason);
                return match cause {
                    Some(cause) => error.caused_by(cause),
                    None => error,
                };
            }
            Failed::Unread(error) => error,
        };
        match reading.so_far {
            // A copy above was refused, and there is none below.
            Some(Failed::Refused(reason, _)) if error.kind() == ErrorKind::NotFound => {
                self.core.refuse_id(reading.id, reason)
            }
            // The failure above says more than that there is nothing below.
            Some(Failed::Unread(above)) if error.kind() == ErrorKind::NotFound => above,
            _ => error,
        }
    }

    /// No tier can be read: the error of the loads that wait.
    fn no_tier(&self, wanted: Wanted) -> Error {
        match wanted.so_far {
            Some(Failed::Refused(reason, _)) => self.core.refuse_id(wanted.id, reason),
            Some(Failed::Unread(error)) if error.kind() != ErrorKind::NotFound => error,
            _ if self.core.tiers.table.is_all_well() => {
                Error::new(ErrorKind::NotFound, "no tier has this record")
            }
            _ => Error::new(
                ErrorKind::Unhealthy,
                "no tier that may have this record can be read now",
            ),
        }
    }

    /// A block could not be read. A load with more time than a read that was late gets another one;
    /// so does a load that began after a read that found nothing: the block may have been stored in
    /// between. `first`: of the read in the uppermost tier.
    fn read_failed(self: &Arc<Self>, id: BlockId, first: Request, error: Error) {
        let kind = error.kind();
        let waiters = self.end_read(id, |task, _| match kind {
            ErrorKind::Timeout => task.state.deadline > first.deadline,
            ErrorKind::NotFound => task.request.number > first.number,
            _ => false,
        });
        let mut late_miss = None;
        match kind {
            // refused and counted, and the medium did answer
            ErrorKind::Corrupt | ErrorKind::Foreign => {}
            // Counted once, by the first load that sees it: here, or at its own deadline.
            ErrorKind::Timeout => late_miss = Some(MissReason::Timeout),
            _ => {
                if kind == ErrorKind::Io {
                    self.core.refused.add_unread(id);
                }
                self.core.stats.misses.add(reason_of(&error), 1);
            }
        }
        for (task, index) in waiters {
            task.fail_block(index, error.clone(), &mut late_miss);
        }
        self.pump(); // one read less is running
    }

    /// Ends a read, and returns the loads that wait for it; for those of which `goes_on` is true
    /// another read begins.
    fn end_read(&self, id: BlockId, goes_on: impl Fn(&LoadTask, usize) -> bool) -> Vec<Waiter> {
        let mut reads = self.reads.lock();
        reads.running -= 1;
        let waiters = reads.waiters.remove(&id).unwrap_or_default();
        let (more, over): (Vec<_>, Vec<_>) = waiters.into_iter().partition(|(task, index)| {
            goes_on(task, *index) && task.reads(*index) && !task.has_begun(*index)
        });
        if !more.is_empty() {
            reads.waiters.insert(id, more);
            reads.pending.push_back(Wanted {
                id,
                ..Wanted::default()
            });
        }
        over
    }
}

/// The layers that all who wait for a block want together, if they are few enough to be read by
/// themselves.
fn few_layers(waiters: &[Waiter]) -> Option<Range<u32>> {
    let records = &waiters.first()?.0.records;
    let (geometry, layout) = (&records.geometry, &records.layout);
    if geometry.shards() == 1 {
        return None;
    }
    let wanted = waiters
        .iter()
        .map(|(task, index)| task.blocks[*index].layers(geometry));
    let all = wanted.reduce(|one, other| one.start.min(other.start)..one.end.max(other.end))?;
    let bytes: usize = layout.parts(all.clone()).iter().map(Range::len).sum();
    let whole = layout.record_len();
    (bytes + WORTH.max(whole / 2) <= whole).then_some(all)
}

impl Reading {
    /// The read of this record in its tier.
    fn in_tier(self, slot: Slot) -> TierRead<Self> {
        let read = BlockRead {
            parts: self.parts(),
            again: self.again,
            in_place: self.in_place(),
            ..BlockRead::whole(self.id, slot, self.request.deadline)
        };
        TierRead {
            tier: self.tier,
            read,
            request: self.request,
            reader: self,
        }
    }

    /// Whole records that are read for the first time go to the device from where they lie, if that
    /// is as fast and they lie there in the form in which they are used.
    fn in_place(&self) -> InPlace {
        let core = &self.loads.core;
        if self.again || self.layers.is_some() {
            InPlace::Never
        } else if core.tiers.table.recodes(self.tier)
            || !core.device.streams.device().reaches_all_memory()
        {
            InPlace::Region
        } else {
            InPlace::Anywhere
        }
    }

    /// How a block is read whose layers go to the device as they are read, or of which only some
    /// are wanted.
    fn parts(&self) -> Option<Parts> {
        let core = &self.loads.core;
        let geometry = &self.progress.records.geometry;
        if geometry.shards() == 1 || self.again || core.tiers.table.recodes(self.tier) {
            return None;
        }
        let steps = self.steps(&self.progress.layers);
        if steps.len() == 1 && self.layers.is_none() {
            return None;
        }
        let last = steps.last().and_then(|step| step.last());
        let end = last.map_or(0, |last| last.end);
        let (loads, progress) = (Arc::downgrade(&self.loads), Arc::clone(&self.progress));
        let arrived = move |io: &IoJob, part: ReadPart<'_>| {
            // The last one is verified with the whole.
            if part.range.end < end
                && let Some(loads) = loads.upgrade()
            {
                loads.part_read(io, &progress, &part);
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
    fn steps(&self, layers: &Range<u32>) -> Vec<Vec<Range<usize>>> {
        let records = &self.progress.records;
        let (mut steps, mut step) = (Vec::new(), records.layout.parts(layers.clone()));
        let per_shard = records.geometry.layers_per_shard();
        for upto in (layers.start + per_shard..layers.end).step_by(per_shard as usize) {
            let parts = records.layout.parts(layers.start..upto);
            let end = parts.last().map_or(0, |part| part.end);
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

    /// Verifies a record that was read; layers that were verified as they were read are not
    /// verified again.
    fn verify(&self, read: &ReadDone) -> Result<RecordHeader, Refusal> {
        let records = &self.progress.records;
        let expect = records.expect(self.id);
        let verified = self.progress.verified.load(Ordering::Acquire);
        let Some(layers) = &self.layers else {
            return verify_rest(read.bytes(), read.stored_len, &expect, verified);
        };
        let parts = records.layout.parts(layers.clone());
        let len = parts.iter().map(Range::len).sum();
        if read.read < len {
            let (reason, what) = (MissReason::Truncated, "length");
            return Err(Refusal::new(reason, what, read.read, len));
        }
        let rest = verified.max(layers.start)..layers.end;
        verify_layers(read.slot.as_slice(), read.stored_len, &expect, rest)
    }

    /// A record was verified: it goes to the device, and to the tiers above.
    fn deliver(self, read: ReadDone, header: &RecordHeader, spans: [StageSpan; 2]) {
        let (loads, id, tier) = (&self.loads, self.id, self.tier);
        loads.stay_with(&self.progress, header);
        let waiters = loads.end_read(id, |task, index| match &self.layers {
            Some(layers) => {
                let wanted = task.blocks[index].layers(&task.records.geometry);
                wanted.start < layers.start || wanted.end > layers.end
            }
            None => false,
        });
        let record = read.lent.as_deref().unwrap_or(read.slot.as_slice());
        let mut over = Vec::new();
        for (task, index) in waiters {
            task.state.note_stage("read", spans[0]);
            task.state.note_stage("verify", spans[1]);
            let taken = task.take(index, |_| true); // rows that did not go to the device before
            if !taken.is_empty() && task.scatter(index, &taken, record, tier) {
                over.push(task);
            }
        }
        // Where no tier keeps it, a caller that sees that its load is over finds the slot free.
        let tiers = &loads.core.tiers;
        let kept = self.layers.is_none() && tiers.table.is_kept_above(tier);
        let read = kept.then_some(read);
        over.iter().for_each(|task| task.report());
        if let Some(read) = read {
            tiers
                .writes
                .promote(tier, id, read.bytes(), header.meta.ordinal);
        }
        loads.pump(); // one read less is running
    }

    /// Reads the same copy a second time, past every cache: the medium may be damaged, or only the
    /// way from it.
    fn read_again(self, slot: Slot) {
        let loads = Arc::clone(&self.loads);
        add(&loads.core.stats.second_reads, 1);
        self.progress.verified.store(0, Ordering::Release);
        let again = Self {
            layers: None,
            again: true,
            ..self
        };
        loads.core.tiers.reads.read(vec![again.in_tier(slot)]);
    }
}

impl Reader for Reading {
    /// On the thread that has read a block: verify, scatter, report, promote.
    fn read_ended(self, result: Result<ReadDone>, span: StageSpan) {
        let loads = Arc::clone(&self.loads);
        let read = match result {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Foreign => {
                let failed = Failed::Refused(reason_named(&error), Some(error));
                return loads.read_below(self, failed, None);
            }
            Err(error) => return loads.read_below(self, Failed::Unread(error), None),
        };
        let began = stage_time(&*loads.core.clock);
        let verified = self.verify(&read);
        let spans = [span, began.zip(stage_time(&*loads.core.clock))];
        match verified {
            Ok(header) => self.deliver(read, &header, spans),
            Err(refusal) if refusal.reason.is_damage() && !self.again => self.read_again(read.slot),
            Err(refusal) => {
                let failed = Failed::Refused(refusal.reason, Some(refusal.into()));
                loads.read_below(self, failed, Some(read.slot));
            }
        }
    }
}

/// The more telling of the failures of two tiers, the upper one first.
fn worse(above: Option<Failed>, here: Failed) -> Failed {
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
