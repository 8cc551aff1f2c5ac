//! The way of a block from the device to the medium.
//!
//! A dump takes its slots at once or is refused (Busy, source untouched). Its rows are gathered
//! into the slot with their checksums; a task is *staged* when all its rows are. The shard that
//! completes a block sends it to the backend; the tasks that brought that shard are *published*
//! with it. A block still incomplete at its deadline is dropped and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use hashlink::LruCache;
use tracing::{info, warn};
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{MonotonicTime, Notify, Ticket};
use ucm_media::backend::{Flush, WriteOptions, Written};
use ucm_record::{RecordMeta, encode_header, seal_side_alone};

use super::block_builder::{After, BlockBuilder, BlockBuilders, Stage};
use super::config::{Hint, Row};
use super::core::{Core, other_part};
use super::inline_writers::InlineWriters;
use super::rows::{BlockRowList, by_block};
use super::task::{Task, TaskState};
use crate::records::StoredRecords;
use crate::stats::{add, stage_time};
use crate::tiers::{Request, TierWrite, WriteTarget};

/// The lane of the pool that copies: it has one.
const LANE_COPIES: usize = 0;
/// Most header hints remembered.
const REMEMBERED: usize = 1 << 16;

/// The dumps of an engine: those under way, and how many there may be.
pub(super) struct Dumps {
    core: Arc<Core>,
    builders: BlockBuilders,
    hints: Mutex<LruCache<BlockId, Hint>>,
    /// Copies from the device that are queued or running, and how many there may be.
    copying: AtomicUsize,
    copy_limit: usize,
    /// Threads that copy from the device, and those of them that also write what they copied.
    copy_threads: usize,
    inline_writers: InlineWriters,
    /// Notified when a block was gathered, and when the medium has it.
    moved_on: Notify,
    /// Blocks cannot be stored for a reason that the operator must remove, and the log says so.
    unwritable: AtomicBool,
    /// A dump found a record that is never replaced, and the log says so.
    in_the_way: AtomicBool,
    /// Just after the last call of [`Dumps::flush`]: dumps begun before are published soon.
    flushed: AtomicU64,
}

/// The blocks of one dump. The threads that copy take one after the other.
struct Run {
    blocks: Vec<(Arc<BlockBuilder>, BlockRowList)>,
    /// The next one that no thread has taken.
    next: AtomicUsize,
    task: Arc<TaskState>,
}

/// One job of the copy pool, and the block that its thread has in hand. Where the pool writes the
/// thread off, that block is reported in its place.
#[derive(Default)]
struct CopyJob {
    ticket: Arc<Ticket>,
    in_hand: Mutex<Option<InHand>>,
}

/// The next step of a thread with a block.
enum InHand {
    /// It copies from the device the block of this index.
    Gathering(usize),
    /// It writes a record.
    Writing(Arc<BlockBuilder>, WriteTarget),
}

impl CopyJob {
    /// The thread begins something that may hang; false where the job was written off before.
    fn begin(&self, step: InHand) -> bool {
        let mut in_hand = self.in_hand.lock();
        if self.ticket.is_over() {
            return false;
        }
        *in_hand = Some(step);
        true
    }

    /// The thread has returned; false where the job was written off and the block reported.
    fn end(&self) -> bool {
        self.in_hand.lock().take().is_some()
    }

    /// Nothing more is begun; what the thread has in hand.
    fn write_off(&self) -> Option<InHand> {
        self.ticket.write_off();
        self.in_hand.lock().take()
    }
}

impl Run {
    fn take(&self) -> Option<usize> {
        let next = self.next.fetch_add(1, Ordering::AcqRel);
        (next < self.blocks.len()).then_some(next)
    }

    fn has_more(&self) -> bool {
        self.next.load(Ordering::Acquire) < self.blocks.len()
    }
}

impl Dumps {
    pub(super) fn new(core: &Arc<Core>, copy_limit: usize, copy_threads: usize) -> Arc<Self> {
        let slot_len = core.parts.record_len() as u64;
        Arc::new(Self {
            core: Arc::clone(core),
            builders: Mutex::default(),
            hints: Mutex::new(LruCache::new(REMEMBERED)),
            copying: AtomicUsize::new(0),
            copy_limit,
            copy_threads,
            inline_writers: InlineWriters::new(copy_threads.saturating_sub(1), slot_len),
            moved_on: Notify::new(),
            unwritable: AtomicBool::new(false),
            in_the_way: AtomicBool::new(false),
            flushed: AtomicU64::new(0),
        })
    }

    /// Remembers hints for the headers of blocks that will be dumped.
    pub(super) fn describe(&self, hints: impl IntoIterator<Item = (BlockId, Hint)>) {
        let mut known = self.hints.lock();
        for (id, hint) in hints {
            known.insert(id, hint);
        }
    }

    /// Dumps begun before now are published soon.
    pub(super) fn flush(&self) {
        let now = self.core.clock.now().0;
        self.flushed.fetch_max(now + 1, Ordering::AcqRel);
        self.core.tiers.flush(Flush::Soon);
    }

    /// Blocks that are put together or published now.
    pub(super) fn in_flight(&self) -> usize {
        self.builders.lock().len()
    }

    /// How many more blocks a dump could take now.
    pub(super) fn free_slots(&self) -> usize {
        self.drop_incomplete(self.core.clock.now());
        let (slots, reserved) = (&self.core.device.slots, self.core.device.reserved_slots);
        slots.available().saturating_sub(reserved)
    }

    /// Starts dumping rows of a part, or refuses at once (Busy: no slot; Unhealthy: the breaker of
    /// the medium or of writes is open).
    pub(super) fn dump(
        self: &Arc<Self>,
        records: &Arc<StoredRecords>,
        rows: Vec<Row>,
    ) -> Result<Task> {
        self.core.check_rows(records, &rows, false)?;
        let now = self.core.clock.now();
        let deadline = now.after(self.core.deadlines.dump);
        let state = TaskState::new(rows.len(), now, deadline);
        let (tiers, task) = (Arc::clone(&self.core.tiers), Arc::clone(&state));
        let task = Task {
            state: Arc::clone(&state),
            expire: Arc::new(|| {}), // the pools of copies and of the backend keep its deadline
            flush_soon: Arc::new(move || {
                task.flush_soon();
                if task.only_waits() {
                    tiers.flush(Flush::Soon);
                }
            }),
        };
        if rows.is_empty() {
            return Ok(task);
        }
        self.core.check_available(now)?;
        if !self.core.tiers.table.may_take_dumps(now) {
            let text = "the storage takes no blocks for now; its blocks are read";
            return Err(Error::new(ErrorKind::Unhealthy, text));
        }
        self.drop_incomplete(now);
        let request = self.core.tiers.table.request(deadline);
        let work = self.take_slots(records, by_block(rows), request)?;
        self.core.open_tasks.add(&state);
        add(&self.core.stats.dump_tasks, 1);
        let threads = self.copy_threads.min(work.len());
        let run = Arc::new(Run {
            blocks: work,
            next: AtomicUsize::new(0),
            task: state,
        });
        self.spread(&run, threads, deadline);
        Ok(task)
    }

    /// Puts `threads` of the copy pool to a dump. Each begins the next: to wake a thread takes a
    /// system call, and the caller has a model to compute.
    fn spread(self: &Arc<Self>, run: &Arc<Run>, threads: usize, deadline: MonotonicTime) {
        let job = Arc::new(CopyJob::default());
        let (dumps, blocks, this) = (Arc::clone(self), Arc::clone(run), Arc::clone(&job));
        let work = move || {
            if threads > 1 {
                dumps.spread(&blocks, threads - 1, deadline);
            }
            dumps.dump_blocks(&blocks, &this);
        };
        let (dumps, blocks) = (Arc::clone(self), Arc::clone(run));
        let done = move |result: Result<()>| {
            if let Err(error) = result {
                dumps.write_off(&blocks, &job, &error);
            }
        };
        let copies = &self.core.device.copies;
        if let Err(refused) = copies.offer(LANE_COPIES, deadline, work, done) {
            drop(refused.work);
            (refused.done)(Err(refused.error)); // closed since
        }
    }

    /// Gathers and writes the blocks of a dump, one after the other. One copy thread never writes,
    /// so that the device does not wait for a medium: it passes its blocks to a thread of the tier.
    /// It is idle while the writes of the others fill only the page cache.
    fn dump_blocks(self: &Arc<Self>, run: &Arc<Run>, job: &CopyJob) {
        let (writers, cached) = (&self.inline_writers, self.core.tiers.table.writes_cached());
        let mut writer = writers.begin();
        while !job.ticket.is_over() {
            if writer.is_none() && cached {
                writer = writers.stand_by(|| !job.ticket.is_over() && run.has_more());
            }
            let Some(index) = run.take() else { return };
            let began = Instant::now();
            self.dump_block(run, index, job, writer.is_some());
            if let Some(writer) = &writer {
                writer.wrote(began.elapsed());
            }
        }
    }

    /// Gathers one block, and writes it: `inline`, while it is in the cache of this core, or on a
    /// thread of the tier.
    fn dump_block(self: &Arc<Self>, run: &Run, index: usize, job: &CopyJob, inline: bool) {
        let (builder, rows) = &run.blocks[index];
        let gathered = if job.begin(InHand::Gathering(index)) {
            let began = stage_time(&*self.core.clock);
            let gathered = self.gather(builder, rows);
            run.task
                .note_stage("copy", began.zip(stage_time(&*self.core.clock)));
            if !job.end() {
                return;
            }
            gathered
        } else {
            Err(late())
        };
        if let Some((slot, options)) = self.gathered(run, index, gathered) {
            self.write(builder, slot, options, inline.then_some(job));
        }
        self.flush_if_wanted(&run.task);
        self.moved_on.notify();
    }

    /// A thread of the copy pool was written off, or never began: its block fails, and those that
    /// no thread has taken.
    fn write_off(&self, run: &Run, job: &CopyJob, error: &Error) {
        match job.write_off() {
            Some(InHand::Gathering(index)) => self.not_gathered(run, index, error),
            Some(InHand::Writing(builder, target)) => {
                let failed = Err(error.clone());
                self.core.tiers.writes.written(&target, &failed);
                self.write_done(&builder, failed);
            }
            None => {}
        }
        while let Some(index) = run.take() {
            self.not_gathered(run, index, error);
        }
    }

    fn not_gathered(&self, run: &Run, index: usize, error: &Error) {
        let _ = self.gathered(run, index, Err(error.clone())); // without a record to write
        self.flush_if_wanted(&run.task);
        self.moved_on.notify();
    }

    /// A builder with a slot and a place in the queue of copies for every block, or Busy and
    /// nothing changed.
    fn take_slots(
        &self,
        records: &Arc<StoredRecords>,
        blocks: Vec<(BlockId, BlockRowList)>,
        request: Request,
    ) -> Result<Vec<(Arc<BlockBuilder>, BlockRowList)>> {
        let (mut work, mut fresh) = (Vec::with_capacity(blocks.len()), Vec::new());
        let mut builders = self.builders.lock();
        let blocks_wanted = blocks.len();
        let mut full = self.copying.load(Ordering::Acquire) + blocks_wanted > self.copy_limit;
        for (id, rows) in blocks {
            let builder = match builders.get(&id) {
                _ if full => break,
                Some(builder) if builder.records.part != records.part => {
                    return Err(other_part().with("block", id));
                }
                Some(builder) => Arc::clone(builder),
                None => {
                    let device = &self.core.device;
                    let slot = device.slots.try_acquire_above(device.reserved_slots);
                    let Some(slot) = slot else {
                        full = true;
                        break;
                    };
                    let alone = rows.sides.iter().find_map(|(_, sides)| sides.alone());
                    let builder = BlockBuilder::new(id, records, alone, request, slot);
                    let builder = Arc::new(builder);
                    fresh.push(Arc::clone(&builder));
                    builder
                }
            };
            work.push((builder, rows));
        }
        if full {
            drop(builders); // before the slots, whose return may start reads
            add(&self.core.stats.dumps_refused, 1);
            let busy = Error::new(ErrorKind::Busy, "no staging slot is free for this dump");
            let (slots, reserved) = (&self.core.device.slots, self.core.device.reserved_slots);
            let free = slots.available().saturating_sub(reserved);
            let busy = busy.with("blocks", blocks_wanted).with("free", free);
            return Err(busy.with("slots", slots.capacity()));
        }
        // Counted under the lock, so that two dumps cannot both take the last places.
        self.copying.fetch_add(work.len(), Ordering::AcqRel);
        builders.extend(fresh.into_iter().map(|builder| (builder.id, builder)));
        Ok(work)
    }

    /// Copies rows from the device into the record and checksums them. Nothing but memory is
    /// touched here: a copy that returns late, after its block was given up, only frees its slot.
    fn gather(&self, builder: &BlockBuilder, rows: &BlockRowList) -> Result<()> {
        if !rows.are_of(builder.alone) {
            let text = "a block has the id of another block's side shard";
            return Err(Error::invalid(text).with("id", builder.id));
        }
        let (_alone, records) = (builder.copying.lock(), &builder.records);
        let (mut slot, wanted) = {
            let mut inner = builder.inner.lock();
            let missing = |row: &&(usize, u32, _)| !inner.have[row.1 as usize];
            let wanted: Vec<_> = rows.iter().filter(missing).collect();
            if wanted.is_empty() || !matches!(inner.stage, Stage::Filling) {
                return Ok(());
            }
            let lost = || Error::internal("the record in the making was lost");
            (inner.slot.take().ok_or_else(lost)?, wanted)
        };
        let pieces = records.pieces(wanted.iter().copied())?;
        let with_kv = wanted.iter().filter(|_| builder.alone.is_none());
        let layers: Vec<u32> = with_kv.flat_map(|row| records.layers_of(row.1)).collect();
        let mut crcs = Vec::with_capacity(layers.len());
        // Each layer as soon as its last piece is there: its bytes are in the caches then.
        let mut seal = |record: &mut [u8], copied: usize| {
            for &layer in &layers[crcs.len()..copied / records.geometry.tensors().len()] {
                crcs.push((layer, records.layout.seal_layer(record, layer)));
            }
        };
        let streams = &self.core.device.streams;
        streams.with(&rows.ready, builder.request.deadline, |stream| {
            stream.gather(&pieces, slot.as_mut_slice(), &mut seal)
        })?;
        seal(slot.as_mut_slice(), pieces.len());
        let sided = records.place_sides(rows, slot.as_mut_slice());
        let staged: u64 = pieces.iter().map(|piece| piece.span.len()).sum();
        add(&self.core.stats.bytes_staged, staged);
        let mut inner = builder.inner.lock();
        if matches!(inner.stage, Stage::Filling) {
            for (_, shard, _) in wanted {
                inner.have[*shard as usize] = true;
                inner.sided[*shard as usize] = sided.contains(shard);
            }
            crcs.into_iter()
                .for_each(|(layer, crc)| inner.layer_crcs[layer as usize] = crc);
            inner.slot = Some(slot);
        } else {
            drop(inner); // before the slot, whose return may start reads
            drop(slot);
        }
        Ok(())
    }

    /// The rows of one block were gathered, or will not be: counts them. The record that they made
    /// whole, and how it is to be written.
    fn gathered(
        &self,
        run: &Run,
        index: usize,
        result: Result<()>,
    ) -> Option<(Slot, WriteOptions)> {
        let ((builder, rows), task) = (&run.blocks[index], &run.task);
        let rows: Vec<usize> = rows.iter().map(|(row, _, _)| *row).collect();
        let count = rows.len();
        let after = match result {
            Ok(()) => builder.after(task, &rows),
            Err(error) => {
                self.give_up(builder, &error);
                After::Ended(Err(error))
            }
        };
        self.copying.fetch_sub(1, Ordering::AcqRel); // now that its stage says where it is
        if let After::Ended(Err(error)) = &after {
            for &row in &rows {
                task.fail_row(row, error.clone());
            }
        }
        if task.rows_staged(count) {
            self.core.stats.stage_latency.observe(self.elapsed(task));
        }
        match after {
            After::Ended(_) => {
                task.rows_placed(count);
                self.finish_rows(task, count);
                None
            }
            After::Wait => None,
            After::Publish(mut slot, crcs, sided) => {
                match self.seal(builder, &mut slot, crcs, sided) {
                    Ok(options) => Some((slot, options)),
                    Err(error) => {
                        drop(slot);
                        self.write_done(builder, Err(error));
                        None
                    }
                }
            }
        }
    }

    /// Waits until every block that was begun is gathered and the media have it, by `until` at the
    /// latest.
    pub(super) fn await_placed(&self, until: MonotonicTime) {
        let on_its_way = |builder: &Arc<BlockBuilder>| {
            let inner = builder.inner.lock();
            matches!(inner.stage, Stage::Publishing) && !inner.placed
        };
        loop {
            let seen = self.moved_on.seen();
            let builders: Vec<_> = self.builders.lock().values().cloned().collect();
            let all = self.copying.load(Ordering::Acquire) == 0 && !builders.iter().any(on_its_way);
            if all || self.core.clock.now() >= until {
                return;
            }
            self.core.clock.sleep(&self.moved_on, seen, Some(until));
        }
    }

    /// Publishes the blocks that a task waits for, once the medium has all of them.
    fn flush_if_wanted(&self, task: &TaskState) {
        let flushed = task.started.0 < self.flushed.load(Ordering::Acquire);
        if task.only_waits() || flushed && task.is_handed_over() {
            self.core.tiers.flush(Flush::Soon);
        }
    }

    /// The medium has a block, or never will.
    fn placed(&self, builder: &BlockBuilder) {
        let waiting: Vec<_> = {
            let mut inner = builder.inner.lock();
            if std::mem::replace(&mut inner.placed, true) {
                return;
            }
            let rows = |(task, rows): &(Arc<TaskState>, Vec<usize>)| (Arc::clone(task), rows.len());
            inner.waiting.iter().map(rows).collect()
        };
        self.moved_on.notify();
        for (task, rows) in waiting {
            task.rows_placed(rows);
            self.flush_if_wanted(&task);
        }
    }

    /// Makes a record of a gathered block, with its side shards or without; how to write it.
    fn seal(
        &self,
        builder: &BlockBuilder,
        slot: &mut Slot,
        mut crcs: Vec<u32>,
        sided: bool,
    ) -> Result<WriteOptions> {
        let (records, layout) = (&builder.records, &builder.records.layout);
        let block = records.block_of(builder.id, builder.alone);
        let hint = self.hints.lock().get(&block).copied().unwrap_or_default();
        let meta = RecordMeta {
            id: builder.id,
            parent: hint.parent,
            ordinal: hint.ordinal,
            namespace: *records.identity.digest(),
            part: records.part,
            tokens: match hint.tokens {
                0 => layout.block_tokens(),
                tokens => tokens,
            },
            time_ns: self.core.clock.wall_ns(),
            writer: self.core.parts.writer,
            tenant: hint.tenant,
        };
        let record = slot.as_mut_slice();
        let len = if let Some(index) = builder.alone {
            seal_side_alone(layout, index, &meta, record)?
        } else {
            let sides = if sided { 0..layout.sides().len() } else { 0..0 };
            crcs.extend(sides.map(|index| layout.seal_side(record, index)));
            encode_header(layout, &meta, &crcs, record)?;
            match sided {
                true => layout.record_len(),
                false => layout.kv_len(),
            }
        };
        Ok(WriteOptions {
            len,
            ordinal: hint.ordinal,
            replace: self.core.refused.replaces(builder.id),
        })
    }

    /// Writes a whole record: on this thread, whose job that is, or on a thread of the tier.
    fn write(
        self: &Arc<Self>,
        builder: &Arc<BlockBuilder>,
        slot: Slot,
        options: WriteOptions,
        job: Option<&CopyJob>,
    ) {
        builder.inner.lock().options = Some(options);
        let began = stage_time(&*self.core.clock);
        let write = TierWrite {
            id: builder.id,
            slot,
            options,
            alone: builder.alone.is_some(),
            request: builder.request,
        };
        let writes = &self.core.tiers.writes;
        let target = match writes.begin_dump(&write) {
            Ok(target) => target,
            Err(error) => {
                drop(write); // with its slot, before the outcome is known
                return self.write_done(builder, Err(error));
            }
        };
        let Some(job) = job else {
            let (dumps, of) = (Arc::clone(self), Arc::clone(builder));
            let written = move |result| dumps.write_returned(&of, result, began);
            return writes.write_on_a_thread(target, write.slot, written);
        };
        let result = if job.begin(InHand::Writing(Arc::clone(builder), target)) {
            let result = writes.write_here(&target, write.slot, &job.ticket);
            if !job.end() {
                return;
            }
            result
        } else {
            drop(write);
            Err(late())
        };
        writes.written(&target, &result);
        self.write_returned(builder, result, began);
    }

    /// A write has returned: the medium has the record and publishes it later, or this is its
    /// outcome.
    fn write_returned(
        &self,
        builder: &Arc<BlockBuilder>,
        result: Result<Written>,
        began: Option<MonotonicTime>,
    ) {
        let span = began.zip(stage_time(&*self.core.clock));
        for (task, _) in &builder.inner.lock().waiting {
            task.note_stage("write", span);
        }
        match result {
            Ok(Written::Sealing(_)) => self.placed(builder),
            result => self.write_done(builder, result),
        }
    }

    /// The outcome of a record that its medium published later.
    pub(super) fn published(&self, id: BlockId, request: Request, result: Result<Written>) {
        let builder = self.builders.lock().get(&id).cloned();
        // Not of a dump that was given up since.
        if let Some(builder) = builder.filter(|builder| builder.request == request) {
            self.write_done(&builder, result);
        }
    }

    /// The record of a block is published, or will not be. The first outcome counts.
    fn write_done(&self, builder: &Arc<BlockBuilder>, result: Result<Written>) {
        {
            let mut builders = self.builders.lock();
            let known = builders.get(&builder.id);
            if !known.is_some_and(|known| Arc::ptr_eq(known, builder)) {
                return;
            }
            builders.remove(&builder.id);
        }
        let options = builder.inner.lock().options;
        if result.is_ok() {
            // else it may be offered again
            let block = builder.records.block_of(builder.id, builder.alone);
            self.hints.lock().remove(&block);
        }
        let in_the_way = match result {
            Ok(Written::Present) => self.core.refused.kept_for(builder.id),
            Ok(Written::InTheWay(reason)) => {
                self.core.refused.add(builder.id, reason);
                Some(reason)
            }
            _ => None,
        };
        let result = match in_the_way {
            Some(reason) => Err(self.in_the_way(builder.id, reason)),
            None => result,
        };
        match &result {
            Ok(written) => {
                if *written == Written::Published && self.unwritable.swap(false, Ordering::AcqRel) {
                    info!(store = self.core.parts.writer, "blocks are stored again");
                }
                let counted = match (*written, builder.alone) {
                    (Written::Present, None) => &self.core.stats.blocks_present,
                    (Written::Present, Some(_)) => &self.core.stats.sides_present,
                    (_, None) => &self.core.stats.blocks_published,
                    (_, Some(_)) => &self.core.stats.sides_published,
                };
                add(counted, 1);
                if *written == Written::Published {
                    self.core.refused.published(builder.id);
                    let len = options.map_or(0, |options| options.len);
                    add(&self.core.stats.bytes_published, len as u64);
                }
                let replaced = options.is_some_and(|options| options.replace);
                if replaced
                    && *written == Written::Published
                    && self.core.refused.clear_bad(builder.id)
                {
                    // Counted and not logged: after a root was lost, these are all its blocks.
                    add(&self.core.stats.records_replaced, 1);
                }
            }
            Err(error) => {
                add(&self.core.stats.publishes_failed, 1);
                if matches!(error.kind(), ErrorKind::Io | ErrorKind::Foreign)
                    && in_the_way.is_none()
                    && !self.unwritable.swap(true, Ordering::AcqRel)
                {
                    let (store, kind) = (self.core.parts.writer, error.kind().name());
                    let id = builder.id;
                    warn!(store, block = %id, error = kind, "a block could not be stored: {error}");
                }
            }
        }
        let result = result.map(|_| ());
        self.placed(builder);
        let waiting = {
            let mut inner = builder.inner.lock();
            inner.stage = Stage::Ended(result.clone());
            std::mem::take(&mut inner.waiting)
        };
        for (task, rows) in waiting {
            if let Err(error) = &result {
                rows.iter()
                    .for_each(|&row| task.fail_row(row, error.clone().with("block", builder.id)));
            }
            self.finish_rows(&task, rows.len());
        }
    }

    /// A dump found a record that this store cannot read and does not replace: the block is not
    /// stored, and the log says so once.
    fn in_the_way(&self, id: BlockId, reason: MissReason) -> Error {
        let text = match reason {
            MissReason::WrongKey => {
                "another key has encrypted the record under the name of this block, and it is not \
                 replaced: the block is not stored. Add that key behind the first one of this \
                 store, or use another root"
            }
            MissReason::NotEncrypted => {
                "the record under the name of this block is not encrypted: the block is not stored \
                 now, and its next dump replaces that record"
            }
            _ => {
                "a newer version has stored this block, and it is not replaced: the block is not \
                 stored. Upgrade, or use another root"
            }
        };
        if !self.in_the_way.swap(true, Ordering::AcqRel) {
            let (store, why) = (self.core.parts.writer, reason.name());
            warn!(store, block = %id, reason = why, "{text}; further blocks like this are not \
            named");
        }
        Error::new(ErrorKind::Foreign, text).with("reason", reason.name())
    }

    /// Drops a block that cannot be completed; false if it is complete, or was dropped before. No
    /// task waits for it: rows wait only for a block that is being published.
    fn give_up(&self, builder: &Arc<BlockBuilder>, error: &Error) -> bool {
        let slot = {
            let mut inner = builder.inner.lock();
            if !matches!(inner.stage, Stage::Filling) {
                return false;
            }
            inner.stage = Stage::Ended(Err(error.clone()));
            inner.slot.take() // or a copy that hangs has it, and drops it when it returns
        };
        // Still this one: it leaves the list once, here or when its publishing ended, and no other
        // takes its place before.
        self.builders.lock().remove(&builder.id);
        drop(slot);
        true
    }

    fn finish_rows(&self, task: &TaskState, rows: usize) {
        if task.rows_finished(rows) {
            self.core.stats.dump_latency.observe(self.elapsed(task));
        }
    }

    /// Drops blocks whose last shard was not dumped by their deadline.
    pub(super) fn drop_incomplete(&self, now: MonotonicTime) {
        let mut builders: Vec<_> = self.builders.lock().values().cloned().collect();
        builders.retain(|builder| builder.request.deadline <= now);
        for builder in builders {
            // Without its slot there it is being copied or published: then its pool keeps the
            // deadline.
            if builder.inner.lock().slot.is_some() {
                let text = "the block's other shards were not dumped in time";
                let error = Error::new(ErrorKind::Timeout, text).with("block", builder.id);
                let dropped = self.give_up(&builder, &error);
                add(&self.core.stats.blocks_incomplete, u64::from(dropped));
            }
        }
    }

    fn elapsed(&self, task: &TaskState) -> u64 {
        self.core.clock.now().since(task.started).as_nanos() as u64
    }
}

fn late() -> Error {
    let text = "the dump ran past its deadline, and nothing more is done for it";
    Error::new(ErrorKind::Timeout, text)
}
