//! What a tier is made of and called with: its configuration, the state that all tiers of a store
//! share, requests and lanes.

use std::sync::Arc;

use ucm_core::MissReason;
use ucm_device::SlotPool;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::IoPool;
use ucm_media::backend::Backend;
use ucm_record::Keys;

use crate::breaker::BreakerConfig;
use crate::records::OwnParts;

/// Lane of records that are moved between tiers.
pub(super) const LANE_MOVE: usize = 0;
/// Lane of probes.
pub(super) const LANE_PROBE: usize = 1;

ucm_core::named! {
    /// When a dumped record is written to a tier.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum WritePolicy {
        /// At once. A dump is published when the lowest such tier that outlives the process has it.
        Through = "through",
        /// When the tier above evicts it, and at shutdown as far as there is time.
        Back = "back",
        /// Never: the tier is only read.
        Never = "never",
    }
}

/// One tier.
pub struct TierConfig {
    /// The medium.
    pub backend: Arc<dyn Backend>,
    /// The threads that work on it.
    pub pool: Arc<IoPool>,
    /// When it is written to.
    pub policy: WritePolicy,
    /// True if its records are compressed; only for a medium that takes such.
    pub compressed: bool,
    /// Workers lost in operations stuck past their deadline that switch it off at once.
    pub max_stuck: usize,
}

/// A request to the tiers: its failures count as one failure of a tier, and all of it is let
/// through to a tier that may be usable again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// Unlike those of all others.
    pub(crate) number: u64,
    /// When the answer is not wanted any more.
    pub(crate) deadline: MonotonicTime,
}

/// The tier that has a record whole, counted from the top, or why it is no hit.
pub(crate) type LookupResult = ucm_core::Result<u8, MissReason>;

/// The state that the tiers of one store share.
pub(super) struct TierSetup {
    pub(super) store: u64,
    pub(super) parts: Arc<OwnParts>,
    /// Encrypts what is written to every tier that is not memory.
    pub(super) keys: Option<Arc<Keys>>,
    /// Where headers are read that are compared with a dump; none where nothing is encrypted.
    pub(super) headers: Option<Arc<SlotPool>>,
    pub(super) breaker: BreakerConfig,
    pub(super) clock: Arc<dyn Clock>,
    /// How many tiers there are.
    pub(super) count: usize,
}
