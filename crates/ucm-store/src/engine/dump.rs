//! The way of a block from the device to the medium.
//!
//! A dump takes its slots at once or is refused (Busy, source untouched). Its rows are gathered into the slot with
//! their checksums; a task is *staged* when all its rows are. The shard that completes a block sends it to the
//! backend; the tasks that brought that shard are *published* with it. A block still incomplete at its deadline is
//! dropped and counted.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::Slot;
use ucm_infra::Mono;

use super::load::{BlockRowList, by_block};
use super::task::{Task, TaskState};
use super::{Core, Hint, LANE_DUMP, Row};
use crate::backend::{WriteOptions, Written};
use crate::events::Level;
use crate::record::{RecordMeta, encode_header};
use crate::stats::Stats;

/// One block being put together from its shards.
pub(super) struct Assembly {
    id: BlockId,
    deadline: Mono,
    inner: Mutex<Inner>,
}

struct Inner {
    /// The record in the making; gone once it was handed to the backend or given up.
    slot: Option<Slot>,
    /// Which shards were gathered.
    have: Vec<bool>,
    layer_crcs: Vec<u32>,
    /// Rows that end when the block is published.
    waiting: Vec<(Arc<TaskState>, Vec<usize>)>,
    /// How the publishing ended, once it has.
    ended: Option<Result<()>>,
}

/// What became of the rows of one block.
enum Gathered {
    /// Other shards are still to come.
    Incomplete,
    /// The record is whole: its slot and the checksums of its layers.
    Complete(Slot, Vec<u32>),
    /// The record is with the backend already: these rows bring nothing new and end with it.
    Joined,
}

/// Blocks being put together or published, by id.
pub(super) type Assemblies = Mutex<HashMap<BlockId, Arc<Assembly>>>;

impl Core {
    pub(super) fn start_dump(self: &Arc<Self>, rows: Vec<Row>, deadline: Mono) -> Result<Task> {
        let now = self.clock.now();
        self.admit(now)?;
        self.drop_incomplete(now);
        let state = TaskState::new(rows.len(), now, deadline);
        let work = self.take_slots(by_block(rows), deadline)?;
        Stats::add(&self.stats.dump_tasks, 1);
        for (assembly, rows) in work {
            let numbers: Vec<usize> = rows.iter().map(|(row, _, _)| *row).collect();
            let (core, target) = (Arc::clone(self), Arc::clone(&assembly));
            let gather = move || core.gather(&target, &rows);
            let (core, target, task, ended) = (
                Arc::clone(self),
                Arc::clone(&assembly),
                Arc::clone(&state),
                numbers.clone(),
            );
            let done = move |result: Result<Result<Gathered>>| {
                core.gathered(&target, &task, ended, result.and_then(|inner| inner));
            };
            if let Err(error) = self.copies.submit(LANE_DUMP, deadline, gather, done) {
                self.give_up(&assembly, &error);
                self.fail_rows(&state, &numbers, &error);
            }
        }
        Ok(Task {
            state,
            expire: Arc::new(|| {}),
        })
    }

    /// An assembly with a slot for every block, or Busy and nothing changed.
    fn take_slots(
        &self,
        blocks: Vec<(BlockId, BlockRowList)>,
        deadline: Mono,
    ) -> Result<Vec<(Arc<Assembly>, BlockRowList)>> {
        let mut assemblies = self.assemblies.lock();
        let mut work = Vec::with_capacity(blocks.len());
        let mut fresh = Vec::new();
        for (id, rows) in blocks {
            let assembly = match assemblies.get(&id) {
                Some(assembly) => Arc::clone(assembly),
                None => {
                    let Some(slot) = self.slots.try_acquire_above(self.reserved_slots) else {
                        Stats::add(&self.stats.dumps_refused, 1);
                        return Err(
                            Error::new(ErrorKind::Busy, "no staging slot is free for this dump")
                                .with("blocks", work.len() + 1)
                                .with("slots", self.slots.capacity()),
                        );
                    };
                    let assembly = Arc::new(Assembly {
                        id,
                        deadline,
                        inner: Mutex::new(Inner {
                            slot: Some(slot),
                            have: vec![false; self.geometry.shards() as usize],
                            layer_crcs: vec![0; self.geometry.layers() as usize],
                            waiting: Vec::new(),
                            ended: None,
                        }),
                    });
                    fresh.push(Arc::clone(&assembly));
                    assembly
                }
            };
            work.push((assembly, rows));
        }
        assemblies.extend(fresh.into_iter().map(|assembly| (assembly.id, assembly)));
        Ok(work)
    }

    /// Copies rows from the device into the record and checksums them. Only memory is touched here: a copy that
    /// returns late, after its pool has written it off, changes nothing but its slot's freedom.
    fn gather(&self, assembly: &Assembly, rows: &BlockRowList) -> Result<Gathered> {
        let mut guard = assembly.inner.lock();
        let inner = &mut *guard;
        let Some(slot) = &mut inner.slot else {
            return Ok(Gathered::Joined);
        };
        for (_, shard, spans) in rows {
            if inner.have[*shard as usize] {
                continue;
            }
            self.with_stream(|stream| {
                for (layer, pieces) in self.layers_of(*shard, spans) {
                    let data = self.layout.layer_data(layer);
                    stream.gather(pieces, &mut slot.as_mut_slice()[data])?;
                    inner.layer_crcs[layer as usize] = self.layout.seal_layer(slot.as_mut_slice(), layer);
                }
                Ok(())
            })?;
            inner.have[*shard as usize] = true;
            Stats::add(&self.stats.bytes_staged, self.shard_len());
        }
        match inner.slot.take_if(|_| inner.have.iter().all(|&have| have)) {
            Some(slot) => Ok(Gathered::Complete(slot, std::mem::take(&mut inner.layer_crcs))),
            None => Ok(Gathered::Incomplete),
        }
    }

    /// Runs once for the rows of one block: counts them, and sends a whole record on its way.
    fn gathered(
        self: &Arc<Self>,
        assembly: &Arc<Assembly>,
        task: &Arc<TaskState>,
        rows: Vec<usize>,
        result: Result<Gathered>,
    ) {
        let gathered = match result {
            Ok(gathered) => gathered,
            Err(error) => {
                self.give_up(assembly, &error);
                return self.fail_rows(task, &rows, &error);
            }
        };
        let count = rows.len();
        let finished = match gathered {
            Gathered::Incomplete => true,
            Gathered::Complete(slot, crcs) => {
                assembly.inner.lock().waiting.push((Arc::clone(task), rows));
                self.publish(assembly, slot, &crcs);
                false
            }
            Gathered::Joined => {
                let mut inner = assembly.inner.lock();
                match &inner.ended {
                    None => {
                        inner.waiting.push((Arc::clone(task), rows));
                        false
                    }
                    Some(Ok(())) => true,
                    Some(Err(error)) => {
                        rows.iter().for_each(|&row| task.fail_row(row, error.clone()));
                        true
                    }
                }
            }
        };
        if task.rows_staged(count) {
            self.stats.stage_latency.observe(self.elapsed(task));
        }
        if finished && task.rows_finished(count) {
            self.stats.dump_latency.observe(self.elapsed(task));
        }
    }

    fn publish(self: &Arc<Self>, assembly: &Arc<Assembly>, mut slot: Slot, layer_crcs: &[u32]) {
        let hint = self.hints.lock().get(&assembly.id).copied().unwrap_or_default();
        let Hint {
            parent,
            ordinal,
            tokens,
        } = hint;
        let meta = RecordMeta {
            id: assembly.id,
            parent,
            ordinal,
            namespace: *self.identity.digest(),
            part: self.part,
            tokens: if tokens == 0 {
                self.layout.block_tokens()
            } else {
                tokens
            },
            time_ns: self.clock.wall_ns(),
            writer: self.writer,
        };
        if let Err(error) = encode_header(&self.layout, &meta, layer_crcs, slot.as_mut_slice()) {
            return self.write_done(assembly, false, Err(error));
        }
        let replace = self.replaces(assembly.id);
        let options = WriteOptions {
            len: self.layout.record_len(),
            ordinal,
            replace,
        };
        let (core, done_for) = (Arc::clone(self), Arc::clone(assembly));
        let done = Box::new(move |result| core.write_done(&done_for, replace, result));
        self.backend
            .write(assembly.id, slot, options, assembly.deadline, done);
    }

    fn write_done(self: &Arc<Self>, assembly: &Arc<Assembly>, replaced: bool, result: Result<Written>) {
        self.assemblies.lock().remove(&assembly.id);
        self.hints.lock().remove(&assembly.id);
        match &result {
            Ok(written) => {
                self.healthy();
                if *written == Written::Present {
                    Stats::add(&self.stats.blocks_present, 1);
                } else {
                    Stats::add(&self.stats.blocks_published, 1);
                    Stats::add(&self.stats.bytes_published, self.layout.record_len() as u64);
                }
                if replaced && self.forgive(assembly.id) {
                    Stats::add(&self.stats.records_replaced, 1);
                    self.events.push(
                        Level::Info,
                        format!("a refused record was replaced: {}", assembly.id),
                    );
                }
            }
            Err(error) => {
                Stats::add(&self.stats.publishes_failed, 1);
                self.observe(error);
            }
        }
        let result = result.map(|_| ());
        let waiting = {
            let mut inner = assembly.inner.lock();
            inner.ended = Some(result.clone());
            std::mem::take(&mut inner.waiting)
        };
        for (task, rows) in waiting {
            if let Err(error) = &result {
                rows.iter()
                    .for_each(|&row| task.fail_row(row, error.clone().with("block", assembly.id)));
            }
            if task.rows_finished(rows.len()) {
                self.stats.dump_latency.observe(self.elapsed(&task));
            }
        }
    }

    /// Drops a block that cannot be completed; rows that waited for it fail.
    fn give_up(&self, assembly: &Arc<Assembly>, error: &Error) {
        self.assemblies.lock().remove(&assembly.id);
        // A stuck copy may hold the lock (and with it the slot) until it returns: then it answers for itself.
        if let Some(mut inner) = assembly.inner.try_lock() {
            inner.slot = None;
            inner.ended = Some(Err(error.clone()));
            for (task, rows) in std::mem::take(&mut inner.waiting) {
                self.fail_rows(&task, &rows, error);
            }
        }
    }

    fn fail_rows(&self, task: &TaskState, rows: &[usize], error: &Error) {
        rows.iter().for_each(|&row| task.fail_row(row, error.clone()));
        task.rows_finished(rows.len());
        task.rows_staged(rows.len());
    }

    /// Drops blocks whose last shard did not come by their deadline.
    pub(super) fn drop_incomplete(&self, now: Mono) {
        let late: Vec<Arc<Assembly>> = self
            .assemblies
            .lock()
            .values()
            .filter(|assembly| assembly.deadline <= now)
            .cloned()
            .collect();
        for assembly in late {
            let abandoned = assembly
                .inner
                .try_lock()
                .is_some_and(|inner| inner.slot.is_some());
            if abandoned {
                Stats::add(&self.stats.blocks_incomplete, 1);
                let error = Error::new(
                    ErrorKind::Timeout,
                    "the block's other shards did not come in time",
                );
                self.give_up(&assembly, &error.with("block", assembly.id));
            }
        }
    }

    fn elapsed(&self, task: &TaskState) -> u64 {
        self.clock.now().since(task.started).as_nanos() as u64
    }
}
