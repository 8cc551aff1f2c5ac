//! SIEVE (Zhang et al., NSDI 2024), for comparison: one queue by age, one bit a record, and a hand
//! that goes from the oldest to the youngest, clears the bit of what was used since it last came by
//! and stops at what was not.

use std::collections::BTreeMap;

use ucm_core::BlockId;
use ucm_tier::memory::eviction::Eviction;

/// SIEVE.
#[derive(Default)]
pub(crate) struct Sieve {
    /// Slots by when they came, with whether they were used.
    queue: BTreeMap<u64, (u32, bool)>,
    /// When each slot came.
    came: BTreeMap<u32, u64>,
    next: u64,
    hand: u64,
}

impl Eviction for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn inserted(&mut self, slot: u32, _id: BlockId, _ordinal: u32) {
        self.removed(slot);
        self.next += 1;
        self.queue.insert(self.next, (slot, false));
        self.came.insert(slot, self.next);
    }

    fn used(&mut self, slot: u32, _ordinal: u32) {
        if let Some(entry) = self
            .came
            .get(&slot)
            .and_then(|came| self.queue.get_mut(came))
        {
            entry.1 = true;
        }
    }

    fn removed(&mut self, slot: u32) {
        if let Some(came) = self.came.remove(&slot) {
            self.queue.remove(&came);
        }
    }

    fn victim(&mut self, held: &dyn Fn(u32) -> bool) -> Option<u32> {
        for _ in 0..3 {
            for (&came, (slot, used)) in self.queue.range_mut(self.hand..) {
                if !std::mem::take(used) && !held(*slot) {
                    self.hand = came;
                    return Some(*slot);
                }
            }
            self.hand = 0; // once more from the oldest
        }
        None
    }
}
