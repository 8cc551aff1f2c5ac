//! What the region lends: slots to fill, and records to read where they are.
//!
//! Only a [`WriteLease`] writes to the words of a slot, and a slot that is pinned is not handed out
//! as one: so the bytes behind a [`Pinned`] stand still.
#![allow(
    unsafe_code,
    reason = "lends the bytes of pinned slots, which nobody writes"
)]

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use ucm_core::{BlockId, Error, Result};
use ucm_infra::seqlock;

use super::own::SharedRegion;
use super::table::{Field, describe};

/// A slot that is being filled. Dropped without [`WriteLease::publish`] it is free again.
pub struct WriteLease {
    pub(super) region: Arc<SharedRegion>,
    pub(super) slot: usize,
    pub(super) filled: usize,
}

impl WriteLease {
    /// Writes the record. `InvalidInput` when it is longer than the region's records.
    pub fn fill(&mut self, record: &[u8]) -> Result<()> {
        if record.is_empty() || record.len() > self.region.shape.record_len {
            return Err(
                Error::invalid("the record does not fit the slots of this region")
                    .with("len", record.len())
                    .with("record_len", self.region.shape.record_len),
            );
        }
        if let Some(words) = self.region.table().record(self.slot) {
            seqlock::fill(words, record);
        }
        self.filled = record.len();
        Ok(())
    }

    /// Gives it a name: from here on every process finds it. In place of a record of the same name,
    /// whose slot is the second answer. The first is its own.
    pub fn publish(self, id: BlockId, ordinal: u32) -> (u32, Option<u32>) {
        let (region, slot) = (&self.region, self.slot);
        let (table, number) = (region.table(), slot as u32);
        let Some(entry) = table.entry(slot) else {
            return (number, None);
        };
        describe(entry, id, self.filled, ordinal);
        seqlock::publish(&entry[Field::Generation as usize]);
        let before = region.name(id, slot);
        (number, before.map(|before| before as u32))
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.region.release(self.slot);
    }
}

/// A record of this process's own region that stays where it is until this is dropped.
pub struct Pinned {
    pub(super) region: Arc<SharedRegion>,
    pub(super) slot: usize,
    pub(super) id: BlockId,
    pub(super) len: usize,
    pub(super) ordinal: u32,
}

impl Pinned {
    /// The record's id.
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// Its position in its chain, as it was stored.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its slot.
    pub fn slot(&self) -> u32 {
        self.slot as u32
    }
}

impl Deref for Pinned {
    type Target = [u8];

    /// The record; nothing in a forked child.
    fn deref(&self) -> &[u8] {
        // SAFETY: only a `WriteLease` stores into the words of a slot, and no slot is handed out as
        // one while it is pinned.
        let bytes = unsafe {
            self.region
                .mapping
                .bytes(self.region.shape.record(self.slot))
        };
        bytes.get(..self.len).unwrap_or_default()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.region.release(self.slot);
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} of {} bytes)", self.id, self.len)
    }
}
