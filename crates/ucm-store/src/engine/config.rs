//! What an engine is told, and the words its callers use: deadlines, rows, hints.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_device::{DeviceSpan, Event, KvLayout};
use ucm_quota::Capacity;
use ucm_record::{Keys, SideSpec};

use crate::breaker::BreakerConfig;

/// The deadlines of an engine; every one is a key of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// One lookup call.
    pub lookup: Duration,
    /// A load whose caller names no deadline.
    pub load: Duration,
    /// A dump, in the background.
    pub dump: Duration,
    /// The first look at a root.
    pub probe: Duration,
    /// Draining at shutdown.
    pub shutdown: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            lookup: Duration::from_millis(50),
            load: Duration::from_secs(5),
            dump: Duration::from_secs(30),
            probe: Duration::from_secs(5),
            shutdown: Duration::from_secs(3),
        }
    }
}

/// What an engine needs to know.
pub struct EngineConfig {
    /// Sizes of this part's blocks.
    pub geometry: Geometry,
    /// Whose KV it is.
    pub identity: Identity,
    /// Which part of a block this engine moves.
    pub part: Part,
    /// Tokens in a block, for the header.
    pub block_tokens: u32,
    /// Element type, for the header.
    pub dtype: DType,
    /// Side shards that blocks may have beside their KV; each a whole number of bytes for every
    /// shard of a block.
    pub sides: Vec<SideSpec>,
    /// Bytes of host memory for staging; 0 opens the engine for lookups only.
    pub staging_bytes: u64,
    /// Threads that copy from the device.
    pub copy_threads: usize,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// When the breaker of a tier opens.
    pub breaker: BreakerConfig,
    /// Tells this writer's records from others'.
    pub writer: u64,
    /// Encrypts what is written to tiers that are not memory, which then take nothing else.
    pub keys: Option<Arc<Keys>>,
    /// What the blocks of each tenant may come to in every level below memory, if that is bounded.
    pub tenant_quota: Option<Capacity>,
}

/// One row of a load or dump: block, shard, and where the device pieces of that shard lie.
pub struct Row {
    /// The block's record id.
    pub id: BlockId,
    /// The shard's index.
    pub shard: u32,
    /// Where they lie.
    pub pieces: Pieces,
    /// What must be done before they are read or written; the row fails where it is not by the
    /// deadline of its task.
    pub ready: Option<Arc<dyn Event>>,
    /// What a dump brings beside the KV; a load takes no notice of it.
    pub sides: RowSides,
}

/// What a row of a dump brings beside its KV.
#[derive(Debug, Default)]
pub enum RowSides {
    /// Nothing. A block has its side shards where every one of its rows brings them.
    #[default]
    None,
    /// Its share of every side shard of the store, in their order, one behind the other: the row of
    /// shard *i* of *n* brings the
    /// *i*-th *n*-th of each.
    Beside(Box<[u8]>),
    /// The side shard of this index, whole, for a record of its own and of this row's id; there is
    /// no KV.
    Alone(usize, Box<[u8]>),
}

impl RowSides {
    /// The side shard that is all of its record.
    pub(super) fn alone(&self) -> Option<usize> {
        match self {
            Self::Alone(index, _) => Some(*index),
            Self::None | Self::Beside(_) => None,
        }
    }
}

/// Where the pieces of a row lie on the device.
pub enum Pieces {
    /// One by one; as many and as long as the geometry says.
    Listed(Vec<DeviceSpan>),
    /// In the block of this number.
    Block(Arc<KvLayout>, u64),
    /// Nowhere: the whole block is wanted in its slot, or there is no KV to bring.
    Slot,
}

impl Pieces {
    /// Whether the block is wanted in its slot and nowhere else.
    pub(super) fn in_slot(&self) -> bool {
        matches!(self, Self::Slot)
    }

    /// The device pieces of a shard that has `count` of them.
    pub(super) fn spans(&self, shard: u32, count: usize) -> Cow<'_, [DeviceSpan]> {
        match self {
            Self::Listed(spans) => Cow::Borrowed(spans),
            Self::Block(layout, number) => {
                let first = shard as usize * count;
                Cow::Owned(layout.spans(*number, first..first + count).collect())
            }
            Self::Slot => Cow::Borrowed(&[]),
        }
    }
}

/// What ids do not say, for the record's header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hint {
    /// The block before it in its chain (zero: none or unknown).
    pub parent: BlockId,
    /// Position in the chain.
    pub ordinal: u32,
    /// Tokens in the block, 0 for the configured number.
    pub tokens: u32,
    /// Tag of the tenant it belongs to, zero for none.
    pub tenant: [u8; 32],
}
