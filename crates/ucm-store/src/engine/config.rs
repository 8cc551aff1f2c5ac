//! The settings of an engine, and the types of its callers: deadlines, rows, hints.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_device::{DeviceSpan, Event, KvLayout};
use ucm_media::quota::Capacity;
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
    /// The first probe of a root.
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

/// The settings of an engine.
pub struct EngineConfig {
    /// Sizes of the first part's blocks.
    pub geometry: Geometry,
    /// Whose KV it is.
    pub identity: Identity,
    /// Which part of a block this engine moves, the first of several.
    pub part: Part,
    /// The other parts that it moves.
    pub own_parts: Vec<OwnPart>,
    /// Tokens in a block, for the header.
    pub block_tokens: u32,
    /// Element type, for the header.
    pub dtype: DType,
    /// Side shards that blocks of the first part may have beside their KV; each a whole number of
    /// bytes for every shard of a block.
    pub sides: Vec<SideSpec>,
    /// Bytes of host memory for staging; 0 opens the engine for lookups only.
    pub staging_bytes: u64,
    /// Threads that copy from the device.
    pub copy_threads: usize,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// When the breaker of a tier opens.
    pub breaker: BreakerConfig,
    /// Number that no other writer has.
    pub writer: u64,
    /// Encrypts records in tiers that are not memory, which then take no other records.
    pub keys: Option<Arc<Keys>>,
    /// The quota of the blocks of each tenant in every level below memory.
    pub tenant_quota: Option<Capacity>,
}

/// A part whose blocks an engine moves, beside its first.
pub struct OwnPart {
    /// Which part of a block.
    pub part: Part,
    /// Sizes of its blocks.
    pub geometry: Geometry,
    /// Tokens in a block, for the header.
    pub block_tokens: u32,
    /// Element type, for the header.
    pub dtype: DType,
}

/// One row of a load or dump: block, shard, and where the device pieces of that shard lie.
pub struct Row {
    /// The block's record id.
    pub id: BlockId,
    /// The shard's index.
    pub shard: u32,
    /// Where they lie.
    pub pieces: Pieces,
    /// Must be done before they are read or written; the row fails where it is not by the deadline
    /// of its task.
    pub ready: Option<Arc<dyn Event>>,
    /// Side shards that a dump brings; a load ignores them.
    pub sides: RowSides,
}

/// The side shards that a row of a dump brings.
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

impl Row {
    /// All of a block that has one shard, or is wanted in its slot.
    pub(super) fn whole(id: BlockId, pieces: Pieces) -> Self {
        Self {
            id,
            shard: 0,
            pieces,
            ready: None,
            sides: RowSides::None,
        }
    }
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

/// Facts for the record's header that ids do not contain.
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
