//! Several roots side by side: which of them a new record goes to, and in which order they are
//! asked for one.
//!
//! The choice is made when a record is written. It is looked up in every root, so a root that is
//! lost, added or back again changes only where new records go; only roots that are asked file by
//! file are spared lookups of records that belong elsewhere ([`Spread::keeps_home`]).
//!
//! * `round_robin`: by rendezvous hashing of the record's id with the roots' UUIDs. A root that is
//!   added takes over its share of the ids, and no other id moves; the ids of a root that is lost
//!   go to each one's next.
//! * `random`: any of them.
//! * `tiered`: those of one level as for `round_robin`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use ucm_core::BlockId;

/// Most roots side by side.
pub const MAX_ROOTS: usize = 16;

/// How records are spread over several roots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoragePolicy {
    /// By a stable hash of the id.
    RoundRobin,
    /// Any.
    Random,
    /// By a stable hash over those of one level, above the colder levels.
    Tiered,
}

/// What the spread knows of a root: its marker's UUID, from which ids are hashed.
#[derive(Debug, Default)]
pub struct RootFacts {
    /// From its UUID; 0 before it was opened.
    seed: AtomicU64,
}

impl RootFacts {
    /// Notes the UUID of the root's marker.
    pub fn learn(&self, uuid: &str) {
        let digits = uuid.get(..16);
        let seed = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        self.seed.store(seed.unwrap_or(0), Ordering::Release);
    }
}

/// See the module.
#[derive(Debug)]
pub struct Spread {
    policy: StoragePolicy,
    members: Vec<Arc<RootFacts>>,
}

impl Spread {
    /// One root, or what is no root: nothing to choose.
    pub fn alone() -> Self {
        Self::of(StoragePolicy::RoundRobin, vec![Arc::default()])
    }

    /// Several roots, at most [`MAX_ROOTS`], as they were named.
    pub fn of(policy: StoragePolicy, members: Vec<Arc<RootFacts>>) -> Self {
        Self { policy, members }
    }

    /// How many there are.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// Their numbers in the order in which they are asked for this record.
    pub fn order(&self, id: BlockId) -> Vec<usize> {
        match self.policy {
            StoragePolicy::Random => (0..self.members.len()).collect(),
            StoragePolicy::RoundRobin | StoragePolicy::Tiered => self.by_hash(id),
        }
    }

    /// The same in which they are offered it when it is new.
    pub fn offers(&self, id: BlockId) -> Vec<usize> {
        let mut order = self.order(id);
        if self.policy == StoragePolicy::Random {
            let first = ucm_infra::random_u64() % order.len().max(1) as u64;
            order.rotate_left(usize::try_from(first).unwrap_or(0));
        }
        order
    }

    /// Whether a record lies in the first of its order that could take it when it was written, so
    /// that those which would have to be asked need not be asked for others.
    pub fn keeps_home(&self) -> bool {
        self.policy != StoragePolicy::Random
    }

    fn by_hash(&self, id: BlockId) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        let score = |&member: &usize| score(self.members[member].seed.load(Ordering::Acquire), id);
        order.sort_by_cached_key(|member| std::cmp::Reverse(score(member)));
        order
    }
}

/// How much a root wants an id; the same on every machine and in every version.
fn score(seed: u64, id: BlockId) -> u64 {
    let number = u128::from_le_bytes(id.0);
    mixed(mixed(seed ^ number as u64) ^ (number >> 64) as u64)
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the answer depends on
/// every bit of the number.
fn mixed(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(seed: u64) -> Arc<RootFacts> {
        let facts = RootFacts::default();
        facts.learn(&format!("{seed:016x}{:016x}", 0));
        Arc::new(facts)
    }

    fn hashed(seeds: &[u64]) -> Spread {
        let members = seeds.iter().map(|&seed| facts(seed));
        Spread::of(StoragePolicy::RoundRobin, members.collect())
    }

    fn ids() -> impl Iterator<Item = BlockId> {
        // alike, as ids never are: the hash has to tell them apart
        (0..4000u128).map(|n| BlockId(n.to_le_bytes()))
    }

    #[test]
    fn a_root_that_is_added_takes_its_share_and_no_other_id_moves() {
        let seeds = [0x1111, 0x2222_0000_0000, 0x3333, 0xffff_ffff_ffff_ffff];
        let (three, four) = (hashed(&seeds[..3]), hashed(&seeds));
        let mut shares = [0; 4];
        for id in ids() {
            let (before, after) = (three.order(id), four.order(id));
            shares[after[0]] += 1;
            let without: Vec<usize> = after.into_iter().filter(|&member| member != 3).collect();
            assert_eq!(without, before, "the others keep their order");
        }
        assert!(
            shares.iter().all(|share| (800..1200).contains(share)),
            "{shares:?}"
        );
    }

    #[test]
    fn where_an_id_goes_depends_on_the_roots_and_not_on_their_order() {
        let (one, other) = (hashed(&[7, 8, 9]), hashed(&[9, 7, 8]));
        for id in ids().take(100) {
            assert_eq!(one.order(id)[0], [2, 0, 1][other.order(id)[0]]);
        }
    }

    /// What a process of an earlier version stored is found where this one looks.
    #[test]
    fn the_hash_is_frozen() {
        let spread = hashed(&[1, 2, 3]);
        let firsts: Vec<usize> = ids().take(16).map(|id| spread.order(id)[0]).collect();
        assert_eq!(firsts, FIRSTS);
        assert_eq!(score(1, BlockId([0xab; 16])), SCORE);
    }

    const FIRSTS: [usize; 16] = [2, 1, 0, 2, 0, 1, 2, 1, 0, 1, 2, 1, 1, 0, 1, 2];
    const SCORE: u64 = 0xb340_b6cf_72d4_1d11;

    #[test]
    fn random_uses_all_and_asks_in_one_order() {
        let members = (0..3).map(facts).collect();
        let spread = Spread::of(StoragePolicy::Random, members);
        let mut seen = [0; 3];
        for id in ids().take(300) {
            assert_eq!(spread.order(id), [0, 1, 2]);
            let offers = spread.offers(id);
            seen[offers[0]] += 1;
            assert_eq!(offers.len(), 3);
        }
        assert!(seen.iter().all(|&count| count > 30), "{seen:?}");
    }
}
