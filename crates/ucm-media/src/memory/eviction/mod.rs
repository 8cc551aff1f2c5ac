//! Which record is evicted when a new one needs its slot: one trait, two policies.
//!
//! Policies know slots by number and records by id and ordinal (position in the chain of their
//! prompt). A prefix is worth nothing without its beginning, so a policy should evict descendants
//! before their ancestors. Every call is short and made under the lock of the tier; none allocates
//! more than its share of a bound that the number of slots sets. [`Policy`] names them;
//! docs/performance.md has their hit rates.

mod lru;
mod s3fifo;
mod steps;

use serde::{Deserialize, Serialize};
use ucm_core::BlockId;

pub use lru::Lru;
pub use s3fifo::S3Fifo;

/// A policy.
pub trait Eviction: Send {
    /// A record was stored in a free slot.
    fn inserted(&mut self, slot: u32, id: BlockId, ordinal: u32);

    /// The record in a slot was used, or is part of a prefix that was.
    fn used(&mut self, slot: u32, ordinal: u32);

    /// The record in a slot was removed, because it was chosen or for another reason. No effect on
    /// an empty slot.
    fn removed(&mut self, slot: u32);

    /// The slot whose record should be evicted next, never one that is `held`; `None` when all are.
    /// It stays until [`Eviction::removed`].
    fn victim(&mut self, held: &dyn Fn(u32) -> bool) -> Option<u32>;
}

ucm_core::named! {
    /// The policies by name.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Policy {
        /// The record that was used longest ago, descendants before ancestors.
        #[default]
        Lru = "lru",
        /// Three queues: what is not used again soon is evicted first.
        S3Fifo = "s3fifo",
    }
}

impl Policy {
    /// A policy for `slots` slots, empty.
    pub fn build(self, slots: usize) -> Box<dyn Eviction> {
        match self {
            Self::Lru => Box::new(Lru::new(slots)),
            Self::S3Fifo => Box::new(S3Fifo::new(slots)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn id(n: u32) -> BlockId {
        BlockId((u128::from(n) << 64 | u128::from(n)).to_le_bytes())
    }

    /// Ten records that are asked for again and again, and chains that are read once; how many of
    /// the ten stay.
    fn survivors(policy: Policy) -> usize {
        let (mut eviction, mut held) = (policy.build(40), [None::<u32>; 40]);
        let mut free: Vec<u32> = (0..40).collect();
        let mut ask = |n: u32, ordinal: u32, held: &mut [Option<u32>; 40]| {
            if let Some(slot) = held.iter().position(|there| *there == Some(n)) {
                return eviction.used(slot as u32, ordinal);
            }
            let slot = free.pop().or_else(|| eviction.victim(&|_| false)).unwrap();
            eviction.removed(slot);
            held[slot as usize] = Some(n);
            eviction.inserted(slot, id(n), ordinal);
        };
        for round in 0..20 {
            (0..10).chain(0..10).for_each(|n| ask(n, n, &mut held));
            (0..100).for_each(|n| ask(1000 + round * 100 + n, n, &mut held));
        }
        held.iter().flatten().filter(|&&n| n < 10).count()
    }

    #[test]
    fn only_one_of_them_keeps_what_is_used_again_and_again_from_what_is_read_once() {
        assert_eq!((survivors(Policy::Lru), survivors(Policy::S3Fifo)), (0, 10));
    }

    proptest! {
        /// Whatever happens, a victim is a record that is there and not held, and there is one if
        /// there can be.
        #[test]
        fn victims_are_there_and_not_held(
            policy in prop::sample::select(Policy::ALL.to_vec()),
            acts in prop::collection::vec((0..5u8, 0..8u32, 0..4u32), 1..200),
        ) {
            let mut eviction = policy.build(8);
            let (mut there, mut held) = (BTreeSet::new(), BTreeSet::new());
            for (act, slot, ordinal) in acts {
                match act {
                    0 | 1 if there.insert(slot) => eviction.inserted(slot, id(slot * 4 + ordinal), ordinal),
                    0 | 1 => eviction.used(slot, ordinal),
                    2 => {
                        there.remove(&slot);
                        eviction.removed(slot);
                    }
                    3 => {
                        if !held.remove(&slot) {
                            held.insert(slot);
                        }
                    }
                    _ => {
                        let victim = eviction.victim(&|slot| held.contains(&slot));
                        match victim {
                            Some(victim) => {
                                prop_assert!(there.remove(&victim) && !held.contains(&victim));
                                eviction.removed(victim);
                            }
                            None => prop_assert!(there.is_subset(&held)),
                        }
                    }
                }
            }
        }
    }
}
