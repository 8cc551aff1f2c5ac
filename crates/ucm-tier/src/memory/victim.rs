//! A record that the policy chose to go, on its way to the tier that wants to keep it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use ucm_core::BlockId;
use ucm_device::Pinned;

use super::tier::Tier;
use crate::backend;

/// The record of a victim, verified. It can be found and read until this is dropped; then it is
/// gone, unless it was used meanwhile.
pub struct Victim {
    tier: Arc<Tier>,
    record: Pinned,
}

impl Victim {
    pub(super) fn new(tier: Arc<Tier>, record: Pinned) -> Self {
        Self { tier, record }
    }

    /// The record's id.
    pub fn id(&self) -> BlockId {
        self.record.id()
    }

    /// Its position in its chain, as it was stored.
    pub fn ordinal(&self) -> u32 {
        self.record.ordinal()
    }
}

impl backend::Victim for Victim {
    fn id(&self) -> BlockId {
        self.record.id()
    }

    fn record(&self) -> &[u8] {
        self
    }
}

impl Deref for Victim {
    type Target = [u8];

    /// The sealed record.
    fn deref(&self) -> &[u8] {
        &self.record
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.tier.left(&self.record);
    }
}

impl fmt::Debug for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Victim({})", self.record.id())
    }
}
