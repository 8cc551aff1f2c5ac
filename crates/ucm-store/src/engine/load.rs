//! The way of a block from the medium to the device.
//!
//! Every block of a load has its own slot, and each of its rows its own state (a [`LoadState`]):
//! *reading* until it was verified in the slot, then *scattering* for the length of the copy, then
//! done. At the first failure the rows of that block and of the blocks after it, in the order of
//! their first rows, that are still reading are cancelled; the blocks before it finish, because a
//! reader of a prefix can use them. When one of those fails too, the cut moves up to it. The load
//! is reported once, when nothing is reading or scattering, so no byte reaches the device after
//! that (rule 1). Loads of one block by several tasks join one read.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, MissReason, Result};
use ucm_device::Event;
use ucm_infra::{BlockState, Cancelled, LoadState, MonotonicTime};

use super::reads::MAX_PENDING;
use super::task::{Task, TaskState};
use super::verify::reason_of;
use super::{Core, Pieces, Row, RowSides};
use crate::stats::Stats;
use crate::tiers::Request;

/// The rows of one block in one load.
pub(super) struct BlockRows {
    pub(super) id: BlockId,
    rows: BlockRowList,
    /// The number of the first of them in the load's [`LoadState`], where the others follow.
    first: usize,
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

    fn states(&self) -> Range<usize> {
        self.first..self.first + self.rows.len()
    }
}

pub(super) struct LoadTask {
    pub(super) state: Arc<TaskState>,
    pub(super) request: Request,
    pub(super) blocks: Vec<BlockRows>,
    load_state: LoadState,
    cancelled: Mutex<Cuts>,
}

/// Longest deadline a load may be given: no wait is without one.
pub(super) const LONGEST_LOAD: Duration = Duration::from_secs(600);

/// Why blocks of a load were cancelled, for those that did not fail themselves: each cut lies
/// before the one that came earlier.
#[derive(Default)]
struct Cuts(Vec<Cut>);

struct Cut {
    /// The first block that is cancelled.
    first: usize,
    error: Error,
    /// What is counted for each.
    miss: Option<MissReason>,
}

impl LoadTask {
    /// Whether rows of a block are still to be read.
    pub(super) fn reads(&self, index: usize) -> bool {
        self.has(index, |state| state == BlockState::Reading)
    }

    /// Whether rows of a block went to the device, or are on their way there.
    pub(super) fn has_begun(&self, index: usize) -> bool {
        self.has(index, |state| {
            matches!(state, BlockState::Scattering | BlockState::Done)
        })
    }

    fn has(&self, index: usize, so: impl Fn(BlockState) -> bool) -> bool {
        let mut states = self.blocks[index].states();
        states.any(|at| self.load_state.state(at).is_some_and(&so))
    }

    /// Takes the rows of a block that are still wanted and are `ready`, by their places in it: who
    /// has them copies them, with [`Core::scatter`].
    pub(super) fn take(&self, index: usize, ready: impl Fn(&BlockRow) -> bool) -> Vec<usize> {
        let block = &self.blocks[index];
        let rows = block.rows.iter().enumerate().filter(|(_, row)| ready(row));
        let taken = rows.filter(|(at, _)| self.load_state.begin_scatter(block.first + at));
        taken.map(|(at, _)| at).collect()
    }
}

impl Cuts {
    /// Why this block was cancelled: by the first cut that it lies behind.
    fn cause(&self, index: usize) -> Option<&Cut> {
        self.0.iter().find(|cut| cut.first <= index)
    }
}

/// Number of a row, its shard, and its device pieces.
pub(super) type BlockRow = (usize, u32, Pieces);

/// The rows of one block, what some of them bring beside the KV (by shard), and the events that
/// copies of them wait for.
#[derive(Default)]
pub(super) struct BlockRowList {
    rows: Vec<BlockRow>,
    pub(super) sides: Vec<(u32, RowSides)>,
    pub(super) ready: Vec<Arc<dyn Event>>,
}

impl BlockRowList {
    /// Whether all of them bring this side shard and nothing else; `None`: whether all of them
    /// bring KV.
    pub(super) fn are_of(&self, alone: Option<usize>) -> bool {
        let brought = self.sides.iter().filter_map(|(_, sides)| sides.alone());
        match alone {
            Some(index) => brought.filter(|&one| one == index).count() == self.rows.len(),
            None => brought.count() == 0,
        }
    }
}

impl Deref for BlockRowList {
    type Target = [BlockRow];

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
        if !matches!(row.sides, RowSides::None) {
            block.sides.push((row.shard, row.sides));
        }
    }
    blocks
}

impl Core {
    /// Starts loading rows. A block that is absent, refused or late fails the task; see
    /// [`Task::failures`]. Blocks go by the order of their first rows: those before the first that
    /// failed arrive, of those after it what was still being read is given up. `deadline`: from
    /// now, the configured one if `None`, ten minutes at most; it ends all of them. A block whose
    /// row is wanted in its slot is read and verified whole, as by
    /// [`Engine::verify`](super::Engine::verify).
    pub fn load(self: &Arc<Self>, rows: Vec<Row>, deadline: Option<Duration>) -> Result<Task> {
        self.check_rows(&rows, true)?;
        let now = self.clock.now();
        let deadline = now.after(deadline.unwrap_or(self.deadlines.load).min(LONGEST_LOAD));
        let state = TaskState::new(rows.len(), now, deadline);
        let mut states = 0;
        let block = |(id, rows): (BlockId, BlockRowList)| {
            let first = states;
            states += rows.len();
            BlockRows { id, rows, first }
        };
        let blocks: Vec<BlockRows> = by_block(rows).into_iter().map(block).collect();
        let task = Arc::new(LoadTask {
            state: Arc::clone(&state),
            request: self.tiers.request(deadline),
            load_state: LoadState::new(states),
            blocks,
            cancelled: Mutex::default(),
        });
        let weak = (Arc::downgrade(self), Arc::downgrade(&task));
        let expire = Arc::new(move || {
            if let (Some(core), Some(task)) = (weak.0.upgrade(), weak.1.upgrade()) {
                core.expire_load(&task);
            }
        });
        self.life.open_tasks.add(&state);
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
        if let Err(error) = self.check_available(now) {
            self.stats
                .misses
                .add(reason_of(&error), task.blocks.len() as u64);
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
        // Either the thread that closes the engine has seen the blocks, or we see here that it is
        // closed.
        if let Err(closed) = self.usable() {
            self.end_load(task, closed);
        }
    }

    /// A task is past its deadline: what it still reads is cancelled.
    fn expire_load(self: &Arc<Self>, task: &Arc<LoadTask>) {
        if !(0..task.blocks.len()).any(|index| task.reads(index)) {
            return; // over, or only copies to the device are under way
        }
        let late = Error::new(
            ErrorKind::Timeout,
            "the load did not finish by its deadline",
        );
        if self
            .cancel_from(task, 0, late, Some(MissReason::Timeout))
            .last
        {
            self.report(task);
        }
    }

    /// Ends every load that still reads, because the engine is closed.
    pub(super) fn end_loads(self: &Arc<Self>) {
        let waiters = self.reads.blocks.lock().take_waiters();
        for (task, _) in waiters {
            self.end_load(&task, Error::new(ErrorKind::Closed, "the store is closed"));
        }
    }

    /// Copies verified rows of a block, read from `tier`, to the device, those that the caller has
    /// taken. True if that ended the load: the caller reports it.
    pub(super) fn scatter(
        &self,
        task: &LoadTask,
        index: usize,
        taken: &[usize],
        record: &[u8],
        tier: usize,
    ) -> bool {
        let block = &task.blocks[index];
        let rows = || taken.iter().map(|&at| &block.rows[at]);
        let copied = self.pieces(rows()).and_then(|pieces| {
            let ready = &block.rows.ready;
            self.device
                .streams
                .with(ready, task.state.deadline, |stream| {
                    stream.scatter(record, &pieces)
                })
        });
        match copied {
            Ok(()) => {
                task.state.rows_arrived(rows().map(|(row, _, _)| *row));
                let shards = rows().filter(|(_, _, pieces)| !pieces.in_slot()).count();
                Stats::add(&self.stats.bytes_loaded, shards as u64 * self.shard_len());
                if block
                    .rows
                    .iter()
                    .all(|(row, _, _)| task.state.has_arrived(*row))
                {
                    task.state.serve(tier);
                    let counted = match shards {
                        0 => &self.stats.blocks_verified,
                        _ => &self.stats.blocks_loaded,
                    };
                    Stats::add(counted, 1);
                }
            }
            Err(error) => {
                self.stats.misses.add(MissReason::IoError, 1);
                self.fail_from(task, index, index, error);
            }
        }
        let ended = taken
            .iter()
            .filter(|&&at| task.load_state.finish(block.first + at));
        ended.count() > 0
    }

    /// A read failed: that is this block's own failure if it was still wanted, and the end of the
    /// blocks after it; at the deadline of the load also of those before it. `miss` is counted and
    /// taken if so.
    pub(super) fn fail_block(
        self: &Arc<Self>,
        task: &Arc<LoadTask>,
        index: usize,
        error: Error,
        miss: &mut Option<MissReason>,
    ) {
        let mut states = task.blocks[index].states();
        let Some(held) = states.find(|&at| task.load_state.begin_fail(at)) else {
            return; // cancelled before, or of a load that is over
        };
        if let Some(reason) = miss.take() {
            self.stats.misses.add(reason, 1);
        }
        let late = error.kind() == ErrorKind::Timeout && self.clock.now() >= task.state.deadline;
        self.fail_from(task, index, if late { 0 } else { index }, error);
        if task.load_state.finish(held) {
            self.report(task);
        }
    }

    /// Records the failure of a block of which a row is still open, and gives up the blocks from
    /// `first` on. They are cut off first: who sees the failure knows that no later event, as the
    /// deadline, is the reason of theirs.
    fn fail_from(&self, task: &LoadTask, index: usize, first: usize, error: Error) {
        // never the last: a row is open
        let _ = self.cancel_from(task, first, given_up(error.clone()), None);
        self.record_failure(task, index, &error);
    }

    fn record_failure(&self, task: &LoadTask, index: usize, error: &Error) {
        let block = &task.blocks[index];
        for (row, _, _) in &*block.rows {
            task.state
                .fail_row(*row, error.clone().with("block", block.id));
        }
    }

    /// Cancels everything that is still reading; if nothing scatters, the task is over here.
    fn end_load(self: &Arc<Self>, task: &Arc<LoadTask>, error: Error) {
        if self.cancel_from(task, 0, error, None).last {
            self.report(task);
        }
    }

    /// Cancels what is still reading of the blocks from `first` on; for each `miss` is counted.
    fn cancel_from(
        &self,
        task: &LoadTask,
        first: usize,
        error: Error,
        miss: Option<MissReason>,
    ) -> Cancelled {
        let mut cancelled = task.cancelled.lock();
        if cancelled.0.last().is_none_or(|cut| first < cut.first) {
            cancelled.0.push(Cut { first, error, miss });
        }
        // the reason is there before the first block is cancelled: the thread that reports finds it
        drop(cancelled);
        task.load_state.cancel_from(task.blocks[first].first)
    }

    /// Runs once per load: names the rows that were cancelled, then lets the waiters go.
    pub(super) fn report(&self, task: &LoadTask) {
        let cancelled = task.cancelled.lock();
        let mut lost = 0;
        for (index, block) in task.blocks.iter().enumerate() {
            if task.state.failed(block.rows.first().map_or(0, |row| row.0)) {
                lost += 1; // by itself: its read or its copy to the device
            } else if task.has(index, |state| state == BlockState::Cancelled)
                && let Some(cut) = cancelled.cause(index)
            {
                lost += 1;
                self.record_failure(task, index, &cut.error);
                if let Some(miss) = cut.miss {
                    self.stats.misses.add(miss, 1);
                }
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

/// What the other blocks of a load are told that are cancelled when one has failed: what speaks of
/// time or of the whole store holds for them too, but one record's fault says nothing about theirs.
fn given_up(error: Error) -> Error {
    let kind = match error.kind() {
        kind @ (ErrorKind::Timeout | ErrorKind::Closed | ErrorKind::Unhealthy) => kind,
        _ => ErrorKind::Busy,
    };
    let given_up =
        Error::new(kind, "given up, because another block of this load failed").caused_by(error);
    match kind {
        ErrorKind::Busy => given_up.with("reason", MissReason::LoadFailed.name()),
        _ => given_up, // the kind says it
    }
}
