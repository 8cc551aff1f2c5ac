//! One block of a dump on its way from shards to a record, and how far it is.

use std::collections::HashMap;
use std::sync::Arc;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Result};
use ucm_device::Slot;
use ucm_media::backend::WriteOptions;

use super::task::TaskState;
use crate::records::StoredRecords;
use crate::tiers::Request;

/// One block being put together from its shards.
pub(super) struct BlockBuilder {
    pub(super) id: BlockId,
    /// Those of its part.
    pub(super) records: Arc<StoredRecords>,
    /// The side shard that is all of its record, where that is no block's.
    pub(super) alone: Option<usize>,
    /// The dump that brought its first shard.
    pub(super) request: Request,
    /// Held while shards are copied from the device, perhaps for ever; never taken for anything
    /// else.
    pub(super) copying: Mutex<()>,
    /// Held for moments only.
    pub(super) inner: Mutex<Inner>,
}

pub(super) struct Inner {
    /// The record that is being filled; `None` while a thread copies into it, and after it was
    /// passed to the backend or given up.
    pub(super) slot: Option<Slot>,
    /// Which shards were gathered.
    pub(super) have: Vec<bool>,
    pub(super) layer_crcs: Vec<u32>,
    /// Which of them brought their share of the side shards.
    pub(super) sided: Vec<bool>,
    /// How the record is written, once it is whole.
    pub(super) options: Option<WriteOptions>,
    /// Rows that end when the block is published.
    pub(super) waiting: Vec<(Arc<TaskState>, Vec<usize>)>,
    /// The medium has it, or never will.
    pub(super) placed: bool,
    pub(super) stage: Stage,
}

/// How far a block is.
pub(super) enum Stage {
    /// Shards are still to come.
    Filling,
    /// The record is complete and with the backend, which will report the outcome.
    Publishing,
    /// Published, or given up.
    Ended(Result<()>),
}

/// The next step for rows that were gathered.
pub(super) enum After {
    /// They end here.
    Ended(Result<()>),
    /// They end with their block.
    Wait,
    /// They completed their block: its record, the checksums of its layers, and whether it has its
    /// side shards.
    Publish(Slot, Vec<u32>, bool),
}

/// Blocks being put together or published, by id.
pub(super) type BlockBuilders = Mutex<HashMap<BlockId, Arc<BlockBuilder>>>;

impl BlockBuilder {
    /// An empty one, with the slot its record is made in; `alone`: for a side shard and nothing
    /// else.
    pub(super) fn new(
        id: BlockId,
        records: &Arc<StoredRecords>,
        alone: Option<usize>,
        request: Request,
        slot: Slot,
    ) -> Self {
        let geometry = &records.geometry;
        let shards = if alone.is_some() {
            1
        } else {
            geometry.shards() as usize
        };
        Self {
            id,
            records: Arc::clone(records),
            alone,
            request,
            copying: Mutex::new(()),
            inner: Mutex::new(Inner {
                slot: Some(slot),
                have: vec![false; shards],
                sided: vec![false; shards],
                layer_crcs: vec![0; geometry.layers() as usize],
                options: None,
                waiting: Vec::new(),
                placed: false,
                stage: Stage::Filling,
            }),
        }
    }

    /// The next step for rows that were gathered into this block.
    pub(super) fn after(&self, task: &Arc<TaskState>, rows: &[usize]) -> After {
        let mut inner = self.inner.lock();
        let whole = inner.have.iter().all(|&have| have);
        match &inner.stage {
            Stage::Ended(ended) => return After::Ended(ended.clone()),
            Stage::Publishing => {}
            Stage::Filling if !whole => return After::Ended(Ok(())),
            Stage::Filling => {}
        }
        inner.waiting.push((Arc::clone(task), rows.to_vec()));
        if inner.placed {
            task.rows_placed(rows.len());
        }
        match inner.slot.take() {
            Some(slot) => {
                inner.stage = Stage::Publishing;
                let sided = inner.sided.iter().all(|&sided| sided);
                After::Publish(slot, std::mem::take(&mut inner.layer_crcs), sided)
            }
            None => After::Wait,
        }
    }
}
