//! The way of a block from the medium to the device.
//!
//! Every block of a load has its own slot and its own state (a [`LoadState`]): *reading* until it was verified in its
//! slot, then *scattering*, then done. At the first failure the blocks after the failed one, in the order of their first
//! rows, that are still reading are cancelled; those before it finish, because a reader of a prefix can use them. When one
//! of those fails too, the cut moves up to it. The load is reported once, when none is reading or scattering, so no byte
//! reaches the device after that (rule 1). Loads of one block by several tasks join one read.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, MissReason, Result};
use ucm_device::Event;
use ucm_infra::{BlockState, Cancelled, LoadState, MonotonicTime};

use super::audit::compare;
use super::guard::reason_of;
use super::reads::MAX_PENDING;
use super::task::{Task, TaskState};
use super::{Core, Pieces, Row};
use crate::stats::Stats;
use crate::tiers::Request;

/// The rows of one block in one load.
pub(super) struct BlockRows {
    pub(super) id: BlockId,
    rows: BlockRowList,
}

impl BlockRows {
    /// The layers from the first that is wanted to the last.
    pub(super) fn layers(&self, geometry: &Geometry) -> Range<u32> {
        if self.rows.iter().any(|(_, _, pieces)| pieces.in_slot()) {
            return 0..geometry.layers();
        }
        let per_shard = geometry.layers_per_shard();
        let shards = self.rows.iter().map(|(_, shard, _)| *shard);
        let first = shards.clone().min().unwrap_or(0);
        let end = shards.max().map_or(0, |last| last + 1);
        first * per_shard..end * per_shard
    }
}

pub(super) struct LoadTask {
    pub(super) state: Arc<TaskState>,
    pub(super) request: Request,
    pub(super) blocks: Vec<BlockRows>,
    gate: LoadState,
    cancelled: Mutex<Cuts>,
}

/// Why blocks of a load were cancelled, for those that did not fail themselves: the first block of each cut, and its reason;
/// each lies before the one that came earlier.
#[derive(Default)]
struct Cuts(Vec<(usize, Error)>);

impl LoadTask {
    /// Whether a block is still to be read.
    pub(super) fn reads(&self, index: usize) -> bool {
        self.gate.state(index) == Some(BlockState::Reading)
    }
}

impl Cuts {
    /// Why this block was cancelled: by the first cut that it lies behind.
    fn cause(&self, index: usize) -> Error {
        let cut = self.0.iter().find(|(first, _)| *first <= index);
        cut.map_or_else(
            || Error::internal("a load ended without a cause"),
            |(_, error)| error.clone(),
        )
    }
}

/// The rows of one block: (row number, shard, device pieces); and the events that copies of them wait for.
#[derive(Default)]
pub(super) struct BlockRowList {
    rows: Vec<(usize, u32, Pieces)>,
    pub(super) ready: Vec<Arc<dyn Event>>,
}

impl Deref for BlockRowList {
    type Target = [(usize, u32, Pieces)];

    fn deref(&self) -> &Self::Target {
        &self.rows
    }
}

/// Groups rows by block, keeping the order of first appearance.
pub(super) fn by_block(rows: Vec<Row>) -> Vec<(BlockId, BlockRowList)> {
    let mut index: HashMap<BlockId, usize> = HashMap::with_capacity(rows.len());
    let mut blocks: Vec<(BlockId, BlockRowList)> = Vec::new();
    for (number, row) in rows.into_iter().enumerate() {
        let at = *index.entry(row.id).or_insert_with(|| {
            blocks.push((row.id, BlockRowList::default()));
            blocks.len() - 1
        });
        let block = &mut blocks[at].1;
        block.rows.push((number, row.shard, row.pieces));
        block.ready.extend(row.ready);
    }
    blocks
}

impl Core {
    pub(super) fn start_load(self: &Arc<Self>, rows: Vec<Row>, deadline: MonotonicTime) -> Result<Task> {
        let now = self.clock.now();
        let state = TaskState::new(rows.len(), now, deadline);
        let blocks: Vec<BlockRows> = by_block(rows)
            .into_iter()
            .map(|(id, rows)| BlockRows { id, rows })
            .collect();
        let task = Arc::new(LoadTask {
            state: Arc::clone(&state),
            request: self.tiers.request(deadline),
            gate: LoadState::new(blocks.len()),
            blocks,
            cancelled: Mutex::default(),
        });
        let weak = (Arc::downgrade(self), Arc::downgrade(&task));
        let expire = Arc::new(move || {
            if let (Some(core), Some(task)) = (weak.0.upgrade(), weak.1.upgrade()) {
                core.expire_load(&task);
            }
        });
        self.open_tasks.add(&state);
        Stats::add(&self.stats.load_tasks, 1);
        if !task.blocks.is_empty() {
            self.begin_load(&task, now);
        }
        Ok(Task {
            state,
            expire,
            flush_soon: Arc::new(|| {}),
        })
    }

    /// Lets the blocks of a load wait for their reads, or ends it here.
    fn begin_load(self: &Arc<Self>, task: &Arc<LoadTask>, now: MonotonicTime) {
        if let Err(error) = self.admit(now) {
            self.stats.misses.add(reason_of(&error), task.blocks.len() as u64);
            return self.end_load(task, error);
        }
        if let Some(index) = task
            .blocks
            .iter()
            .position(|block| self.refused.contains(block.id))
        {
            let (kind, reason) = self.refused.again(task.blocks[index].id);
            self.stats.misses.add(reason, 1);
            let known = "this record was refused before and not replaced yet";
            let refused = Error::new(kind, known).with("reason", reason.name());
            self.fail_block(task, index, refused, &mut None);
            if index == 0 {
                return; // nothing lies before it
            }
        }
        if !self.enqueue(task) {
            let full = Error::new(ErrorKind::Busy, "too many blocks wait for a staging slot");
            return self.end_load(task, full.with("most", MAX_PENDING));
        }
        self.pump_elsewhere();
        // Either whoever closes the engine has seen the blocks, or we see here that it is closed.
        if let Err(closed) = self.usable() {
            self.end_load(task, closed);
        }
    }

    /// A task is past its deadline: what it still reads is cancelled.
    fn expire_load(self: &Arc<Self>, task: &Arc<LoadTask>) {
        if !(0..task.blocks.len()).any(|index| task.reads(index)) {
            return; // over, or only copies to the device are under way
        }
        let late = Error::new(ErrorKind::Timeout, "the load did not finish by its deadline");
        let killed = self.cancel_from(task, 0, late);
        self.stats.misses.add(MissReason::Timeout, killed.count as u64);
        if killed.last {
            self.report(task);
        }
    }

    /// Ends every load that still reads, because the engine is closed.
    pub(super) fn end_loads(self: &Arc<Self>) {
        let waiters = self.reads.lock().take_waiters();
        for (task, _) in waiters {
            self.end_load(&task, Error::new(ErrorKind::Closed, "the store is closed"));
        }
    }

    /// Copies one verified block, read from `tier`, to the device, if the task still wants it there. True if that ended the load: the caller
    /// reports it.
    pub(super) fn scatter(&self, task: &LoadTask, index: usize, record: &[u8], tier: usize) -> bool {
        if !task.gate.begin_scatter(index) {
            return false;
        }
        let rows = &task.blocks[index].rows;
        let copied = self.pieces(&**rows).and_then(|pieces| {
            self.streams.with(&rows.ready, task.state.deadline, |stream| {
                stream.scatter(record, &pieces)?;
                if self.paranoid {
                    compare(stream, &pieces, record)?;
                }
                Ok(())
            })
        });
        match copied {
            Ok(()) => {
                task.state.serve(tier);
                let shards = rows.iter().filter(|(_, _, pieces)| !pieces.in_slot()).count();
                if shards == 0 {
                    Stats::add(&self.stats.blocks_verified, 1);
                } else {
                    Stats::add(&self.stats.blocks_loaded, 1);
                    Stats::add(&self.stats.bytes_loaded, shards as u64 * self.shard_len());
                }
            }
            Err(error) => {
                self.record_failure(task, index, &error);
                self.stats.misses.add(MissReason::IoError, 1);
                let _ = self.cancel_from(task, index + 1, given_up(error)); // never the last: this block is still open
            }
        }
        task.gate.finish(index)
    }

    /// A read failed: that is this block's own failure if it was still wanted, and the end of the blocks after it; at the
    /// deadline of the load also of those before it. `miss` is counted and taken if so.
    pub(super) fn fail_block(
        self: &Arc<Self>,
        task: &Arc<LoadTask>,
        index: usize,
        error: Error,
        miss: &mut Option<MissReason>,
    ) {
        if !task.gate.begin_fail(index) {
            return; // cancelled before, or of a load that is over
        }
        if let Some(reason) = miss.take() {
            self.stats.misses.add(reason, 1);
        }
        self.record_failure(task, index, &error);
        let late = error.kind() == ErrorKind::Timeout && self.clock.now() >= task.state.deadline;
        let first = if late { 0 } else { index + 1 };
        let _ = self.cancel_from(task, first, given_up(error)); // never the last: this block is still open
        if task.gate.finish(index) {
            self.report(task);
        }
    }

    fn record_failure(&self, task: &LoadTask, index: usize, error: &Error) {
        let block = &task.blocks[index];
        for (row, _, _) in &*block.rows {
            task.state.fail_row(*row, error.clone().with("block", block.id));
        }
    }

    /// Cancels everything that is still reading; if nothing scatters, the task is over here.
    fn end_load(self: &Arc<Self>, task: &Arc<LoadTask>, error: Error) {
        if self.cancel_from(task, 0, error).last {
            self.report(task);
        }
    }

    /// Cancels the blocks from `first` on that are still reading.
    fn cancel_from(&self, task: &LoadTask, first: usize, error: Error) -> Cancelled {
        let mut cancelled = task.cancelled.lock();
        if cancelled.0.last().is_none_or(|(cut, _)| first < *cut) {
            cancelled.0.push((first, error));
        }
        drop(cancelled); // the reason is there before the first block is cancelled: whoever reports finds it
        task.gate.cancel_from(first)
    }

    /// Runs once per load: names the rows that were cancelled, then lets the waiters go.
    pub(super) fn report(&self, task: &LoadTask) {
        let cancelled = task.cancelled.lock();
        let mut lost = 0;
        for (index, block) in task.blocks.iter().enumerate() {
            if task.gate.state(index) == Some(BlockState::Cancelled) {
                lost += 1;
                self.record_failure(task, index, &cancelled.cause(index));
            } else if task.state.failed(block.rows.first().map_or(0, |row| row.0)) {
                lost += 1; // by itself: its read or its copy to the device
            }
        }
        drop(cancelled);
        Stats::add(&self.stats.blocks_failed, lost);
        let rows = task.blocks.iter().map(|block| block.rows.len()).sum();
        task.state.rows_staged(rows);
        if task.state.rows_finished(rows) {
            self.stats
                .load_latency
                .observe(self.clock.now().since(task.state.started).as_nanos() as u64);
        }
    }
}

/// What the other blocks of a load are told that are cancelled when one has failed: what speaks of time or of the whole
/// store holds for them too, but one record's fault says nothing about theirs.
fn given_up(error: Error) -> Error {
    let kind = match error.kind() {
        kind @ (ErrorKind::Timeout | ErrorKind::Closed | ErrorKind::Unhealthy) => kind,
        _ => ErrorKind::Busy,
    };
    let given_up = Error::new(kind, "given up, because another block of this load failed").caused_by(error);
    match kind {
        ErrorKind::Busy => given_up.with("reason", MissReason::LoadFailed.name()),
        _ => given_up, // the kind says it
    }
}
