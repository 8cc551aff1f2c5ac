//! A load: its rows by block, how far each is, and how it ends.
//!
//! Every block of a load has its own slot, and each of its rows its own state (a [`LoadState`]):
//! *reading* until it was verified in the slot, then *scattering* for the length of the copy, then
//! done. At the first failure the rows of that block and of the blocks after it, in the order of
//! their first rows, that are still reading are cancelled; the blocks before it finish, because a
//! reader of a prefix can use them. When one of those fails too, the cut moves up to it. The load
//! is reported once, when nothing is reading or scattering, so no byte reaches the device after
//! that (rule 1).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, MissReason};
use ucm_infra::{BlockState, LoadState};

use super::config::Row;
use super::core::Core;
use super::rows::{BlockRow, BlockRowList, by_block};
use super::task::{Task, TaskState};
use crate::records::StoredRecords;
use crate::stats::{add, stage_time};
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

/// See the module.
pub(super) struct LoadTask {
    core: Arc<Core>,
    /// Those of the part of its blocks.
    pub(super) records: Arc<StoredRecords>,
    pub(super) state: Arc<TaskState>,
    pub(super) request: Request,
    pub(super) blocks: Vec<BlockRows>,
    load_state: LoadState,
    /// Why blocks were cancelled that did not fail themselves: each cut lies before the one that
    /// was made earlier.
    cuts: Mutex<Vec<Cut>>,
}

struct Cut {
    /// The first block that is cancelled.
    first: usize,
    error: Error,
    /// The reason that is counted for each cancelled block; `None`: none is.
    miss: Option<MissReason>,
}

impl LoadTask {
    /// A load of rows that were checked.
    pub(super) fn new(
        core: &Arc<Core>,
        records: &Arc<StoredRecords>,
        rows: Vec<Row>,
        deadline: Option<Duration>,
    ) -> Arc<Self> {
        let (state, request) = core.begin_load(rows.len(), deadline);
        add(&core.stats.load_tasks, 1);
        let (mut blocks, mut first) = (Vec::new(), 0);
        for (id, rows) in by_block(rows) {
            let count = rows.len();
            blocks.push(BlockRows { id, rows, first });
            first += count;
        }
        Arc::new(Self {
            core: Arc::clone(core),
            records: Arc::clone(records),
            state,
            request,
            load_state: LoadState::new(first),
            blocks,
            cuts: Mutex::default(),
        })
    }

    /// The handle of the caller, by which it ends at its deadline.
    pub(super) fn handle(self: &Arc<Self>) -> Task {
        let weak = Arc::downgrade(self);
        let expire = move || {
            if let Some(task) = weak.upgrade() {
                task.expire();
            }
        };
        Task {
            state: Arc::clone(&self.state),
            expire: Arc::new(expire),
            flush_soon: Arc::new(|| {}),
        }
    }

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

    /// Takes the rows of a block that are still wanted and are `ready`, by their places in it: the
    /// caller copies them, with [`LoadTask::scatter`].
    pub(super) fn take(&self, index: usize, ready: impl Fn(&BlockRow) -> bool) -> Vec<usize> {
        let block = &self.blocks[index];
        let rows = block.rows.iter().enumerate().filter(|(_, row)| ready(row));
        let taken = rows.filter(|(at, _)| self.load_state.begin_scatter(block.first + at));
        taken.map(|(at, _)| at).collect()
    }

    /// Copies verified rows of a block, read from `tier`, to the device, those that the caller has
    /// taken. True if that ended the load: the caller reports it.
    pub(super) fn scatter(
        &self,
        index: usize,
        taken: &[usize],
        record: &[u8],
        tier: usize,
    ) -> bool {
        let (block, stats) = (&self.blocks[index], &self.core.stats);
        let rows = || taken.iter().map(|&at| &block.rows[at]);
        let began = stage_time(&*self.core.clock);
        let copied = self.records.pieces(rows()).and_then(|pieces| {
            let streams = &self.core.device.streams;
            streams.with(&block.rows.ready, self.state.deadline, |stream| {
                stream.scatter(record, &pieces)
            })
        });
        self.state
            .note_stage("scatter", began.zip(stage_time(&*self.core.clock)));
        match copied {
            Ok(()) => {
                self.state.rows_arrived(rows().map(|(row, _, _)| *row));
                let shards = rows().filter(|(_, _, pieces)| !pieces.in_slot()).count();
                let geometry = &self.records.geometry;
                let shard_len = geometry.layer_len() * u64::from(geometry.layers_per_shard());
                add(&stats.bytes_loaded, shards as u64 * shard_len);
                if block.rows.iter().all(|row| self.state.has_arrived(row.0)) {
                    self.state.serve(tier);
                    let counter = match shards {
                        0 => &stats.blocks_verified,
                        _ => &stats.blocks_loaded,
                    };
                    add(counter, 1);
                }
            }
            Err(error) => {
                stats.misses.add(MissReason::IoError, 1);
                self.fail_from(index, index, error);
            }
        }
        let ends = |&&at: &&usize| self.load_state.finish(block.first + at);
        taken.iter().filter(ends).count() > 0
    }

    /// A read failed: that is this block's own failure if it was still wanted, and the end of the
    /// blocks after it; at the deadline of the load also of those before it. `miss` is counted and
    /// taken if so.
    pub(super) fn fail_block(&self, index: usize, error: Error, miss: &mut Option<MissReason>) {
        let mut states = self.blocks[index].states();
        let Some(held) = states.find(|&at| self.load_state.begin_fail(at)) else {
            return; // cancelled before, or of a load that is over
        };
        if let Some(reason) = miss.take() {
            self.core.stats.misses.add(reason, 1);
        }
        let late =
            error.kind() == ErrorKind::Timeout && self.core.clock.now() >= self.state.deadline;
        self.fail_from(index, if late { 0 } else { index }, error);
        if self.load_state.finish(held) {
            self.report();
        }
    }

    /// Records the failure of a block of which a row is still open, and cancels the blocks from
    /// `first` on. They are cut off first: a caller that sees the failure knows that no later
    /// event, as the deadline, is the reason of theirs.
    fn fail_from(&self, index: usize, first: usize, error: Error) {
        // never the last: a row is open
        let _ = self.cancel_from(first, given_up(error.clone()), None);
        self.record_failure(index, &error);
    }

    fn record_failure(&self, index: usize, error: &Error) {
        let block = &self.blocks[index];
        for (row, _, _) in &*block.rows {
            self.state
                .fail_row(*row, error.clone().with("block", block.id));
        }
    }

    /// The load is past its deadline: blocks that it still reads are cancelled.
    fn expire(&self) {
        if (0..self.blocks.len()).any(|index| self.reads(index)) {
            let text = "the load did not finish by its deadline";
            let error = Error::new(ErrorKind::Timeout, text);
            self.cancel(error, Some(MissReason::Timeout));
        }
    }

    /// Cancels everything that is still reading.
    pub(super) fn end(&self, error: Error) {
        self.cancel(error, None);
    }

    fn cancel(&self, error: Error, miss: Option<MissReason>) {
        if self.cancel_from(0, error, miss) {
            self.report(); // nothing scatters
        }
    }

    /// Cancels the blocks from `first` on that are still reading; `miss` is counted for each. True
    /// if that ended the load: the caller reports it.
    fn cancel_from(&self, first: usize, error: Error, miss: Option<MissReason>) -> bool {
        let mut cuts = self.cuts.lock();
        if cuts.last().is_none_or(|cut| first < cut.first) {
            cuts.push(Cut { first, error, miss });
        }
        // the reason is there before the first block is cancelled: the thread that reports finds it
        drop(cuts);
        self.load_state.cancel_from(self.blocks[first].first)
    }

    /// Runs once per load: names the rows that were cancelled, then ends the waits for it.
    pub(super) fn report(&self) {
        let (cuts, stats) = (self.cuts.lock(), &self.core.stats);
        let (mut failed, mut rows) = (0, 0);
        for (index, block) in self.blocks.iter().enumerate() {
            rows += block.rows.len();
            if self.state.failed(block.rows.first().map_or(0, |row| row.0)) {
                failed += 1; // by itself: its read or its copy to the device
            } else if self.has(index, |state| state == BlockState::Cancelled)
                && let Some(cut) = cuts.iter().find(|cut| cut.first <= index)
            {
                failed += 1;
                self.record_failure(index, &cut.error);
                if let Some(miss) = cut.miss {
                    stats.misses.add(miss, 1);
                }
            }
        }
        drop(cuts);
        add(&stats.blocks_failed, failed);
        self.state.rows_staged(rows);
        if self.state.rows_finished(rows) {
            let took = self.core.clock.now().since(self.state.started);
            stats.load_latency.observe(took.as_nanos() as u64);
        }
    }
}

/// The error of the blocks of a load that are cancelled because another failed: an error of time or
/// of the whole store is theirs too, but the damage of one record says nothing about theirs.
fn given_up(error: Error) -> Error {
    let text = "given up, because another block of this load failed";
    match error.kind() {
        kind @ (ErrorKind::Timeout | ErrorKind::Closed | ErrorKind::Unhealthy) => {
            Error::new(kind, text).caused_by(error)
        }
        _ => {
            let busy = Error::new(ErrorKind::Busy, text).caused_by(error);
            busy.with("reason", MissReason::LoadFailed.name())
        }
    }
}
