//! Evicts what was used longest ago, and of what was used at about the same time the end of a chain
//! before its beginning.
//!
//! A record used again within a step ([`super::steps`]) costs one comparison.

use std::collections::BTreeSet;

use ucm_core::BlockId;

use super::Eviction;
use super::steps::Steps;

/// A slot that holds nothing.
const EMPTY: u64 = u64::MAX;

/// Least recently used.
pub struct Lru {
    /// Step of the last use above the bits of the ordinal, inverted: the smallest is evicted first.
    /// 8 bytes a slot.
    keys: Vec<u64>,
    /// The same in order; some 20 bytes a record.
    order: BTreeSet<(u64, u32)>,
    steps: Steps,
}

impl Lru {
    /// For `slots` slots.
    pub fn new(slots: usize) -> Self {
        Self {
            keys: vec![EMPTY; slots],
            order: BTreeSet::new(),
            steps: Steps::new(slots),
        }
    }

    fn place(&mut self, slot: u32, ordinal: u32) {
        let key = self.steps.key(ordinal);
        let Some(old) = self.keys.get_mut(slot as usize) else {
            return;
        };
        if *old != key {
            self.order.remove(&(*old, slot));
            self.order.insert((key, slot));
            *old = key;
        }
    }
}

impl Eviction for Lru {
    fn inserted(&mut self, slot: u32, _id: BlockId, ordinal: u32) {
        self.steps.inserted();
        self.place(slot, ordinal);
    }

    fn used(&mut self, slot: u32, ordinal: u32) {
        let key = self.keys.get(slot as usize);
        if key.is_some_and(|&key| key != EMPTY) {
            self.place(slot, ordinal);
        }
    }

    fn removed(&mut self, slot: u32) {
        if let Some(key) = self.keys.get_mut(slot as usize) {
            self.order.remove(&(*key, slot));
            *key = EMPTY;
        }
    }

    fn victim(&mut self, held: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut slots = self.order.iter().map(|&(_, slot)| slot);
        slots.find(|&slot| !held(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go(lru: &mut Lru) -> Option<u32> {
        let victim = lru.victim(&|_| false)?;
        lru.removed(victim);
        Some(victim)
    }

    #[test]
    fn the_oldest_use_goes_first_and_the_end_of_a_chain_before_its_beginning() {
        let mut lru = Lru::new(64); // a step is four records
        (0..16).for_each(|slot| lru.inserted(slot, BlockId::default(), slot));
        (0..8).rev().for_each(|slot| lru.used(slot, slot));
        let order: Vec<u32> = std::iter::from_fn(|| go(&mut lru)).collect();
        assert_eq!(
            order,
            [10, 9, 8, 14, 13, 12, 11, 15, 7, 6, 5, 4, 3, 2, 0, 1]
        );
    }
}
