//! Several roots side by side: which of them a new record goes to, and in which order they are
//! asked for one.
//!
//! The choice is made when a record is written. Looked for it is in every root, so a root that is
//! lost, added or back again changes where new records go and makes nothing unfindable; only roots
//! that have to be asked file by file are spared questions about records that belong elsewhere
//! ([`Spread::keeps_home`]).
//!
//! * `round_robin`: by rendezvous hashing of the record's id with the roots' UUIDs. A root that is
//!   added takes over its share of the ids, and no other id moves; the ids of a root that is lost
//!   go to each one's next.
//! * `random`: any of them.
//! * `tiered`: the hottest that has room. What a root would remove to make room goes to the next
//!   colder one first ([`crate::demotion`]), and what is read often in a colder one is brought up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use ucm_core::BlockId;
use ucm_infra::MonotonicTime;

/// Most roots side by side.
pub const MAX_ROOTS: usize = 16;
/// How much of the time that a move takes by the limit may be had ahead.
const BURST: Duration = Duration::from_secs(1);

/// How records are spread over several roots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoragePolicy {
    /// By a stable hash of the id.
    RoundRobin,
    /// Any.
    Random,
    /// The hottest with room.
    Tiered,
}

/// How fast a root is said to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Heat {
    /// The fastest.
    Hot,
    /// Of those for which nothing is said, too.
    Warm,
    /// The slowest.
    Cold,
}

/// What is known of a root to the store that spreads records over it and others: what its marker
/// says, and what came from there.
#[derive(Debug, Default)]
pub struct RootFacts {
    /// From its UUID; 0 before it was opened.
    seed: AtomicU64,
    /// What reading a MiB took, ns; 0: not measured.
    read_ns: AtomicU64,
    /// Records that other roots gave up: those that came here, and those that could not.
    moved_here: AtomicU64,
    moves_dropped: AtomicU64,
}

impl RootFacts {
    /// Notes what the root's marker says: its UUID, and what reading a MiB took when that was
    /// measured, ns.
    pub fn learn(&self, uuid: &str, read_ns: Option<u64>) {
        let seed = uuid
            .get(..16)
            .and_then(|digits| u64::from_str_radix(digits, 16).ok());
        self.seed.store(seed.unwrap_or(0), Ordering::Release);
        self.read_ns.store(read_ns.unwrap_or(0), Ordering::Release);
    }

    /// So many records that a root beside this one gave up came here, or could not.
    pub(crate) fn came(&self, records: u64, here: bool) {
        let count = if here {
            &self.moved_here
        } else {
            &self.moves_dropped
        };
        count.fetch_add(records, Ordering::Relaxed);
    }

    /// How many came, and how many could not.
    pub(crate) fn moved(&self) -> (u64, u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (get(&self.moved_here), get(&self.moves_dropped))
    }
}

/// One of the roots.
#[derive(Debug)]
struct Member {
    heat: Heat,
    facts: Arc<RootFacts>,
}

impl Member {
    /// What the hottest has the least of; those no one measured come last among those of their
    /// heat.
    fn coldness(&self) -> (Heat, u64) {
        let read_ns = self.facts.read_ns.load(Ordering::Acquire);
        (self.heat, if read_ns == 0 { u64::MAX } else { read_ns })
    }
}

/// When a record that is read in a colder root is brought up to a hotter one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    /// So many reads; 0: never.
    pub hits: u32,
    /// Within this time.
    pub window: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Spread {
    policy: StoragePolicy,
    members: Vec<Member>,
    promotion: Promotion,
    moves: Throttle,
}

impl Spread {
    /// One root, or what is no root: nothing to choose.
    pub fn alone() -> Self {
        Self::of(
            StoragePolicy::RoundRobin,
            vec![(Heat::Warm, Arc::default())],
        )
    }

    /// Several roots, at most [`MAX_ROOTS`], as they were named.
    pub fn of(policy: StoragePolicy, members: Vec<(Heat, Arc<RootFacts>)>) -> Self {
        let member = |(heat, facts)| Member { heat, facts };
        Self {
            policy,
            members: members.into_iter().map(member).collect(),
            promotion: Promotion {
                hits: 0,
                window: Duration::ZERO,
            },
            moves: Throttle::new(0),
        }
    }

    /// The same with records moved, where it is `tiered`: brought up like this, and so many bytes
    /// in a second at most.
    #[must_use]
    pub fn moving(mut self, promotion: Promotion, bytes_per_second: u64) -> Self {
        self.promotion = promotion;
        self.moves = Throttle::new(bytes_per_second);
        self
    }

    /// How many there are.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// Their numbers in the order in which they are asked for this record.
    pub fn order(&self, id: BlockId) -> Vec<usize> {
        match self.policy {
            StoragePolicy::RoundRobin if self.members.len() > 1 => self.by_hash(id),
            StoragePolicy::Tiered => self.by_heat(),
            StoragePolicy::RoundRobin | StoragePolicy::Random => (0..self.members.len()).collect(),
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

    /// The hottest first: by what was said of them, then by what was measured, then as they were
    /// named.
    pub fn by_heat(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        order.sort_by_key(|&member| self.members[member].coldness());
        order
    }

    /// Whether a record lies in the first of its order that could take it when it was written, so
    /// that those which would have to be asked need not be asked for others.
    pub fn keeps_home(&self) -> bool {
        self.policy == StoragePolicy::RoundRobin
    }

    /// Whether those with room are preferred.
    pub fn wants_room(&self) -> bool {
        self.policy == StoragePolicy::Tiered
    }

    /// Whether records are moved between them.
    pub fn moves_records(&self) -> bool {
        self.policy == StoragePolicy::Tiered && self.members.len() > 1 && self.moves.rate > 0
    }

    /// When a record is brought up; none where records stay where they are.
    pub fn promotion(&self) -> Option<Promotion> {
        Some(self.promotion).filter(|promotion| self.moves_records() && promotion.hits > 0)
    }

    /// What moves between them keep to.
    pub fn moves(&self) -> &Throttle {
        &self.moves
    }

    fn by_hash(&self, id: BlockId) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        let score =
            |&member: &usize| score(self.members[member].facts.seed.load(Ordering::Acquire), id);
        order.sort_by_cached_key(|member| std::cmp::Reverse(score(member)));
        order
    }
}

/// How much a root wants an id; the same on every machine and in every version.
fn score(seed: u64, id: BlockId) -> u64 {
    let (mut low, mut high) = ([0; 8], [0; 8]);
    low.copy_from_slice(&id.0[..8]);
    high.copy_from_slice(&id.0[8..]);
    mixed(mixed(seed ^ u64::from_le_bytes(low)) ^ u64::from_le_bytes(high))
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the answer depends on
/// every bit of the number.
fn mixed(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Bytes in a second at most.
#[derive(Debug)]
pub struct Throttle {
    rate: u64,
    /// When everything that was let pass is over, at that rate.
    busy_until: Mutex<MonotonicTime>,
}

impl Throttle {
    /// One of so many bytes in a second; 0: nothing passes.
    pub fn new(rate: u64) -> Self {
        Self {
            rate,
            busy_until: Mutex::default(),
        }
    }

    /// Lets these bytes pass if they may now.
    pub fn try_pass(&self, now: MonotonicTime, bytes: u64) -> bool {
        let mut busy_until = self.busy_until.lock();
        let free = self.rate > 0 && *busy_until <= now.after(BURST);
        if free {
            *busy_until = (*busy_until).max(now).after(self.span(bytes));
        }
        free
    }

    /// When these bytes may pass, which they then must; never where nothing does.
    pub fn pass_at(&self, now: MonotonicTime, bytes: u64) -> MonotonicTime {
        if self.rate == 0 {
            return MonotonicTime::NEVER;
        }
        let mut busy_until = self.busy_until.lock();
        let begin = (*busy_until).max(now);
        *busy_until = begin.after(self.span(bytes));
        begin
    }

    fn span(&self, bytes: u64) -> Duration {
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate.max(1));
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(seed: u64, read_ns: u64) -> Arc<RootFacts> {
        let facts = RootFacts::default();
        facts.learn(
            &format!("{seed:016x}{:016x}", 0),
            (read_ns > 0).then_some(read_ns),
        );
        Arc::new(facts)
    }

    fn hashed(seeds: &[u64]) -> Spread {
        let members = seeds.iter().map(|&seed| (Heat::Warm, facts(seed, 0)));
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
        let members = (0..3).map(|seed| (Heat::Warm, facts(seed, 0))).collect();
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

    #[test]
    fn what_is_said_of_a_root_counts_before_what_was_measured() {
        let of = |members: Vec<(Heat, u64)>| {
            let members = members
                .into_iter()
                .map(|(heat, read_ns)| (heat, facts(1, read_ns)));
            Spread::of(StoragePolicy::Tiered, members.collect()).by_heat()
        };
        let warm = Heat::Warm;
        assert_eq!(of(vec![(warm, 300), (warm, 100), (warm, 200)]), [1, 2, 0]);
        assert_eq!(of(vec![(warm, 0), (warm, 0)]), [0, 1], "as they were named");
        assert_eq!(of(vec![(warm, 0), (warm, 100)]), [1, 0]);
        assert_eq!(
            of(vec![(Heat::Cold, 1), (warm, 100), (Heat::Hot, 900)]),
            [2, 1, 0]
        );
    }

    #[test]
    fn moves_keep_to_their_rate() {
        let (throttle, second) = (Throttle::new(1000), 1_000_000_000);
        assert!(
            throttle.try_pass(MonotonicTime(0), 1500) && !throttle.try_pass(MonotonicTime(0), 1)
        );
        assert!(
            throttle.try_pass(MonotonicTime(second), 1),
            "a second ahead"
        );
        let at = throttle.pass_at(MonotonicTime(second), 1000);
        assert!(at > MonotonicTime(second) && at < MonotonicTime(2 * second));
        assert!(!Throttle::new(0).try_pass(MonotonicTime(0), 1));
        assert_eq!(
            Throttle::new(0).pass_at(MonotonicTime(0), 1),
            MonotonicTime::NEVER
        );
    }
}
