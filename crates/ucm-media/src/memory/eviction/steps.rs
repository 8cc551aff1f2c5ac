//! Time as the policies count it, in which a chain is older towards its end.
//!
//! A step is a sixteenth of the slots filled. A chain that is stored or read from its beginning on
//! would otherwise have the oldest use at its beginning, and lose that first; within a step the
//! order is by ordinal instead.

/// Steps in which as many records are stored as there are slots.
const STEPS: usize = 16;

/// The step now.
pub(super) struct Steps {
    /// Records in a step.
    len: usize,
    inserted: usize,
    now: u32,
}

impl Steps {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            len: slots.div_ceil(STEPS).max(1),
            inserted: 0,
            now: 0,
        }
    }

    /// A record was stored.
    pub(super) fn inserted(&mut self) {
        self.inserted += 1;
        if self.inserted >= self.len {
            self.inserted = 0;
            self.now = self.now.saturating_add(1);
        }
    }

    /// The key of a record that is used now: the smallest is evicted first. Never all ones.
    pub(super) fn key(&self, ordinal: u32) -> u64 {
        u64::from(self.now) << 32 | u64::from(u32::MAX - ordinal.max(1))
    }
}
