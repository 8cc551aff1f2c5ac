//! The way of a block from the medium to the device.
//!
//! Every block of a load has its own slot and its own state (a [`LoadGate`]): *reading* until it was verified in its
//! slot, then *scattering*, then done. At the first failure all blocks still reading are put to death, so that no
//! byte reaches the device after the load was reported (rule 1). Loads of one block by several tasks join one read.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::{DeviceSpan, Slot};
use ucm_infra::{BlockState, LoadGate, Mono};

use super::task::{Task, TaskState};
use super::{Core, Row};
use crate::backend::ReadDone;
use crate::stats::Stats;

/// The rows of one block in one load.
struct BlockRows {
    id: BlockId,
    rows: BlockRowList,
}

pub(super) struct LoadTask {
    state: Arc<TaskState>,
    blocks: Vec<BlockRows>,
    gate: LoadGate,
    /// Why the blocks were put to death, for those that did not fail themselves.
    cause: Mutex<Option<Error>>,
}

/// Reads under way or waiting for a slot, with the (task, block index) pairs that joined them.
#[derive(Default)]
pub(super) struct Reads {
    waiters: HashMap<BlockId, Vec<(Arc<LoadTask>, usize)>>,
    /// Blocks waiting for a slot, oldest first.
    pending: VecDeque<BlockId>,
    /// A thread is starting reads.
    pumping: bool,
    /// Something may have changed since that thread looked.
    again: bool,
}

impl Reads {
    pub(super) fn queued(&self) -> usize {
        self.pending.len()
    }
}

/// The rows of one block: (row number, shard, device pieces).
pub(super) type BlockRowList = Vec<(usize, u32, Vec<DeviceSpan>)>;

/// Groups rows by block, keeping the order of first appearance.
pub(super) fn by_block(rows: Vec<Row>) -> Vec<(BlockId, BlockRowList)> {
    let mut index: HashMap<BlockId, usize> = HashMap::with_capacity(rows.len());
    let mut blocks: Vec<(BlockId, BlockRowList)> = Vec::new();
    for (number, row) in rows.into_iter().enumerate() {
        let at = *index.entry(row.id).or_insert_with(|| {
            blocks.push((row.id, Vec::new()));
            blocks.len() - 1
        });
        blocks[at].1.push((number, row.shard, row.spans));
    }
    blocks
}

impl Core {
    pub(super) fn start_load(self: &Arc<Self>, rows: Vec<Row>, deadline: Mono) -> Result<Task> {
        let now = self.clock.now();
        let state = TaskState::new(rows.len(), now, deadline);
        let blocks: Vec<BlockRows> = by_block(rows)
            .into_iter()
            .map(|(id, rows)| BlockRows { id, rows })
            .collect();
        let task = Arc::new(LoadTask {
            state: Arc::clone(&state),
            gate: LoadGate::new(blocks.len()),
            blocks,
            cause: Mutex::new(None),
        });
        Stats::add(&self.stats.load_tasks, 1);
        let weak = (Arc::downgrade(self), Arc::downgrade(&task));
        let expire = Arc::new(move || {
            if let (Some(core), Some(task)) = (weak.0.upgrade(), weak.1.upgrade()) {
                let late = Error::new(ErrorKind::Timeout, "the load did not finish by its deadline");
                core.stats.misses.add(MissReason::Timeout, 1);
                core.end_load(&task, late);
            }
        });
        if let Err(error) = self.admit(now) {
            self.end_load(&task, error);
        } else if let Some(refused) = task.blocks.iter().find(|block| self.is_refused(block.id)) {
            self.stats.misses.add(MissReason::Refused, 1);
            let error = Error::new(
                ErrorKind::Corrupt,
                "this record was refused before and not replaced yet",
            );
            self.end_load(&task, error.with("block", refused.id));
        } else {
            let mut reads = self.reads.lock();
            for (index, block) in task.blocks.iter().enumerate() {
                let waiter = (Arc::clone(&task), index);
                if let Some(waiters) = reads.waiters.get_mut(&block.id) {
                    waiters.push(waiter);
                    Stats::add(&self.stats.loads_joined, 1);
                } else {
                    reads.waiters.insert(block.id, vec![waiter]);
                    reads.pending.push_back(block.id);
                }
            }
            drop(reads);
            self.pump();
        }
        Ok(Task { state, expire })
    }

    /// Starts waiting reads while slots are free; drops those that nobody waits for any more. One thread pumps at a
    /// time: a call from inside (an operation that failed at once) or beside only asks it for another round.
    pub(super) fn pump(self: &Arc<Self>) {
        {
            let mut reads = self.reads.lock();
            reads.again = reads.pumping;
            if std::mem::replace(&mut reads.pumping, true) {
                return;
            }
        }
        while let Some((id, slot, deadline)) = self.next_read() {
            let core = Arc::clone(self);
            let done = Box::new(move |result| core.read_done(id, false, deadline, result));
            self.backend.read(id, slot, false, deadline, done);
        }
    }

    /// The next read that can start; `None` ends the pumping.
    fn next_read(&self) -> Option<(BlockId, Slot, Mono)> {
        let mut reads = self.reads.lock();
        loop {
            let Some(&id) = reads.pending.front() else {
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
            if let Some(slot) = self.slots.try_acquire() {
                reads.pending.pop_front();
                return Some((id, slot, deadline));
            }
            if !std::mem::take(&mut reads.again) {
                reads.pumping = false;
                return None;
            }
        }
    }

    fn read_done(self: &Arc<Self>, id: BlockId, again: bool, deadline: Mono, result: Result<ReadDone>) {
        let outcome = match result {
            Err(error) => {
                self.observe(&error);
                self.stats.misses.add(reason_of(&error), 1);
                Err(error)
            }
            Ok(read) => {
                self.healthy();
                match self.verify(id, &read) {
                    Ok(()) => Ok(read.slot),
                    Err(MissReason::BadChecksum | MissReason::BadHeader) if !again => {
                        // The medium or the way from it? A second read past every cache tells.
                        Stats::add(&self.stats.second_reads, 1);
                        let core = Arc::clone(self);
                        let done = Box::new(move |result| core.read_done(id, true, deadline, result));
                        return self.backend.read(id, read.slot, true, deadline, done);
                    }
                    Err(reason) => Err(self.refuse(id, reason)),
                }
            }
        };
        let waiters = self.reads.lock().waiters.remove(&id).unwrap_or_default();
        match outcome {
            Ok(slot) => {
                let scattered =
                    |(task, index): &(Arc<LoadTask>, usize)| self.scatter(task, *index, slot.as_slice());
                let over: Vec<_> = waiters.into_iter().filter(scattered).collect();
                drop(slot); // whoever learns that its load is over finds the slot free
                over.iter().for_each(|(task, _)| self.report(task));
            }
            Err(error) => {
                for (task, index) in waiters {
                    self.fail_block(&task, index, error.clone());
                }
            }
        }
    }

    /// Copies one verified block to the device, if the task still wants it. True if that ended the load: the caller
    /// reports it.
    fn scatter(&self, task: &LoadTask, index: usize, record: &[u8]) -> bool {
        if !task.gate.begin_scatter(index) {
            return false;
        }
        let copied = self.with_stream(|stream| {
            for (_, shard, spans) in &task.blocks[index].rows {
                for (layer, pieces) in self.layers_of(*shard, spans) {
                    stream.scatter(&record[self.layout.layer_data(layer)], pieces)?;
                }
            }
            Ok(())
        });
        match copied {
            Ok(()) => {
                Stats::add(&self.stats.blocks_loaded, 1);
                let shards = task.blocks[index].rows.len() as u64;
                Stats::add(&self.stats.bytes_loaded, shards * self.shard_len());
            }
            Err(error) => {
                self.record_failure(task, index, &error);
                self.kill(task, error);
            }
        }
        task.gate.finish(index)
    }

    /// A read failed: that is this block's own failure if it was still wanted, and the end of the load.
    fn fail_block(self: &Arc<Self>, task: &Arc<LoadTask>, index: usize, error: Error) {
        let killed = task.gate.kill(index);
        if killed.count == 0 {
            return; // put to death before, or of a load that is over
        }
        self.record_failure(task, index, &error);
        if self.kill(task, error) || killed.last {
            self.report(task);
        }
    }

    fn record_failure(&self, task: &LoadTask, index: usize, error: &Error) {
        let block = &task.blocks[index];
        for (row, _, _) in &block.rows {
            task.state.fail_row(*row, error.clone().with("block", block.id));
        }
    }

    /// Puts to death what is still reading; if nothing scatters, the task is over here.
    fn end_load(self: &Arc<Self>, task: &Arc<LoadTask>, error: Error) {
        if self.kill(task, error) {
            self.report(task);
        }
    }

    fn kill(&self, task: &LoadTask, error: Error) -> bool {
        task.cause.lock().get_or_insert(error);
        task.gate.kill_reading().last
    }

    /// Runs once per load: names the rows that were put to death, then lets the waiters go.
    fn report(&self, task: &LoadTask) {
        let cause = task.cause.lock().clone();
        let mut lost = 0;
        for (index, block) in task.blocks.iter().enumerate() {
            if task.gate.state(index) == Some(BlockState::Dead) {
                lost += 1;
                for (row, _, _) in &block.rows {
                    let cause = cause
                        .clone()
                        .unwrap_or_else(|| Error::internal("a load ended without a cause"));
                    let error = Error::new(
                        cause.kind(),
                        "given up, because another block of this load failed",
                    );
                    task.state
                        .fail_row(*row, error.caused_by(cause).with("block", block.id));
                }
            }
        }
        Stats::add(&self.stats.blocks_failed, lost);
        let rows = task.blocks.iter().map(|block| block.rows.len()).sum();
        if task.state.rows_finished(rows) {
            task.state.rows_staged(rows);
            self.stats
                .load_latency
                .observe(self.clock.now().since(task.state.started).as_nanos() as u64);
        }
    }
}

/// The miss reason of a failed read that did not reach verification.
fn reason_of(error: &Error) -> MissReason {
    match error.kind() {
        ErrorKind::NotFound => MissReason::Absent,
        ErrorKind::Timeout => MissReason::Timeout,
        ErrorKind::Busy => MissReason::Busy,
        ErrorKind::Unhealthy => MissReason::Unhealthy,
        _ => MissReason::IoError,
    }
}
