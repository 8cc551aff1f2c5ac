//! How much each tenant has stored in one level of tiers, and which of its blocks are the oldest.
//!
//! The owner of a block is the tenant's tag in its header, so each block costs one read, and none
//! to be counted again. Blocks without a tag are only remembered as such. The number of blocks is
//! bounded: where there is no room for a block with a tag, one without is forgotten, to be read
//! again.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use ucm_core::BlockId;
use ucm_media::recency::Recency;
use ucm_record::RecordMeta;

/// Most blocks of a level that are remembered; each takes 50 to 200 bytes, most of them about 150.
pub(super) const MOST_BLOCKS: usize = 1 << 20;

/// A tenant's tag, as it stands in the header.
type Tag = [u8; 32];

/// How old a block is, by its header alone, so that all engines agree: the oldest first, within a
/// minute the end of a chain before its beginning ([`Recency`]), then by the time of writing.
pub(super) type Age = (i64, u64);

/// A block where it lies: the number of the tier, and its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Stored {
    pub(super) tier: u8,
    pub(super) id: BlockId,
}

/// The owner of a block and its age, by its header.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Owner {
    tenant: Tag,
    age: Age,
}

impl Owner {
    /// Whose a record is.
    pub(super) fn of(meta: &RecordMeta) -> Self {
        Self {
            tenant: meta.tenant,
            age: (Recency::time(meta.ordinal, meta.time_ns), meta.time_ns),
        }
    }

    fn is_untagged(&self) -> bool {
        self.tenant == Tag::default()
    }
}

/// A block of a tenant.
struct Block {
    tenant: Arc<Tag>,
    age: Age,
    len: u64,
    /// The scan in which it was there last.
    seen: u32,
}

/// The blocks of a tenant.
#[derive(Default)]
struct Tenant {
    bytes: u64,
    blocks: BTreeSet<(Age, Stored)>,
}

/// See the module.
pub(super) struct TenantUsage {
    most: usize,
    blocks: HashMap<Stored, Block>,
    /// Blocks without a tag, and the scan in which each was there last.
    untagged: HashMap<Stored, u32>,
    tenants: HashMap<Arc<Tag>, Tenant>,
    scan: u32,
}

impl TenantUsage {
    /// A usage of at most this many blocks.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            blocks: HashMap::new(),
            untagged: HashMap::new(),
            tenants: HashMap::new(),
            scan: 0,
        }
    }

    /// Adds a block of `len` bytes, in place of one that was known there. False where there are too
    /// many: it is not counted.
    pub(super) fn add(&mut self, stored: Stored, len: u64, owner: &Owner) -> bool {
        self.forget(stored);
        if self.is_full()
            && !owner.is_untagged()
            && let Some(&other) = self.untagged.keys().next()
        {
            self.untagged.remove(&other);
        }
        if self.is_full() {
            return false;
        }
        if owner.is_untagged() {
            self.untagged.insert(stored, self.scan);
            return true;
        }
        let known = self.tenants.get_key_value(&owner.tenant);
        let tag = known.map_or_else(|| Arc::new(owner.tenant), |(tag, _)| Arc::clone(tag));
        let tenant = self.tenants.entry(Arc::clone(&tag)).or_default();
        tenant.bytes += len;
        tenant.blocks.insert((owner.age, stored));
        let block = Block {
            tenant: tag,
            age: owner.age,
            len,
            seen: self.scan,
        };
        self.blocks.insert(stored, block);
        true
    }

    /// Whether as many blocks are remembered as may be.
    pub(super) fn is_full(&self) -> bool {
        self.blocks.len() + self.untagged.len() >= self.most
    }

    /// A block of the owner that was added: whether its tenant has more than this now.
    pub(super) fn is_over(&self, owner: &Owner, quota: u64) -> bool {
        let tenant = self.tenants.get(&owner.tenant);
        tenant.is_some_and(|tenant| tenant.bytes > quota)
    }

    /// A scan of the level begins: known blocks that are not seen by its end were removed.
    pub(super) fn begin_scan(&mut self) {
        self.scan = self.scan.wrapping_add(1);
    }

    /// A block is there, with this length. False where its owner is not known.
    pub(super) fn see(&mut self, stored: Stored, len: u64) -> bool {
        if let Some(seen) = self.untagged.get_mut(&stored) {
            *seen = self.scan;
            return true;
        }
        let Some(block) = self.blocks.get_mut(&stored) else {
            return false;
        };
        if let Some(tenant) = self.tenants.get_mut(&block.tenant) {
            tenant.bytes = tenant.bytes - block.len + len;
        }
        (block.seen, block.len) = (self.scan, len);
        true
    }

    /// All of a tier was seen: the other blocks known there were removed.
    pub(super) fn end_scan(&mut self, tier: u8) {
        let scan = self.scan;
        self.untagged
            .retain(|stored, seen| stored.tier != tier || *seen == scan);
        let mut removed = Vec::new();
        for (stored, block) in &self.blocks {
            if stored.tier == tier && block.seen != scan {
                removed.push(*stored);
            }
        }
        removed.into_iter().for_each(|stored| self.forget(stored));
    }

    /// The oldest blocks of each tenant that has more than its quota, as many as must be removed;
    /// at most `most` of all, and none for which `skip` is true: they are removed later.
    pub(super) fn excess(
        &self,
        quota: u64,
        most: usize,
        skip: impl Fn(&Stored) -> bool,
    ) -> Vec<(Stored, Age)> {
        let mut excess = Vec::new();
        for tenant in self.tenants.values() {
            let mut left = tenant.bytes;
            for &(age, stored) in &tenant.blocks {
                if left <= quota {
                    break;
                }
                if excess.len() == most {
                    return excess;
                }
                left -= self.blocks.get(&stored).map_or(0, |block| block.len);
                if !skip(&stored) {
                    excess.push((stored, age));
                }
            }
        }
        excess
    }

    /// A block was removed, unless another of its name was stored since.
    pub(super) fn removed(&mut self, stored: Stored, age: Age) {
        let block = self.blocks.get(&stored);
        if block.is_some_and(|block| block.age == age) {
            self.forget(stored);
        }
    }

    fn forget(&mut self, stored: Stored) {
        self.untagged.remove(&stored);
        let Some(block) = self.blocks.remove(&stored) else {
            return;
        };
        if let Some(tenant) = self.tenants.get_mut(&block.tenant) {
            tenant.bytes -= block.len;
            tenant.blocks.remove(&(block.age, stored));
            if tenant.blocks.is_empty() {
                self.tenants.remove(&block.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000_000_000;

    fn stored(n: u8) -> Stored {
        Stored {
            tier: 0,
            id: BlockId([n; 16]),
        }
    }

    fn owner(tenant: u8, ordinal: u32, time_ns: u64) -> Owner {
        Owner::of(&RecordMeta {
            tenant: [tenant; 32],
            ordinal,
            time_ns,
            ..RecordMeta::default()
        })
    }

    fn excess(usage: &TenantUsage, quota: u64) -> Vec<u8> {
        let excess = usage.excess(quota, usize::MAX, |_| false).into_iter();
        excess.map(|(stored, _)| stored.id.0[0]).collect()
    }

    #[test]
    fn only_the_oldest_blocks_of_tenants_above_their_quota_are_removed() {
        let mut usage = TenantUsage::new(100);
        for n in 0..6 {
            assert!(usage.add(stored(n), 10, &owner(1, 0, u64::from(n) + 1)));
            assert!(usage.add(stored(10 + n), 10, &owner(0, 0, 1)));
        }
        usage.add(stored(20), 30, &owner(2, 0, 1));
        assert!(usage.is_over(&owner(1, 0, 0), 35) && !usage.is_over(&owner(2, 0, 0), 35));
        assert_eq!(excess(&usage, 35), [0, 1, 2]);
        assert_eq!(usage.excess(35, 2, |_| false).len(), 2);
        let not_yet = |block: &Stored| *block == stored(0);
        assert_eq!(
            usage.excess(35, 9, not_yet).len(),
            2,
            "no younger one is removed in its place"
        );
        assert!(excess(&usage, 60).is_empty());
        for (stored, age) in usage.excess(35, 2, |_| false) {
            usage.removed(stored, age);
        }
        assert_eq!(excess(&usage, 35), [2]);
    }

    #[test]
    fn within_a_minute_the_end_of_a_chain_is_removed_before_its_beginning() {
        let mut usage = TenantUsage::new(100);
        for n in 0..4 {
            usage.add(
                stored(n),
                10,
                &owner(1, n.into(), 5 * MINUTE + u64::from(n)),
            );
        }
        usage.add(stored(9), 10, &owner(1, 9, 6 * MINUTE));
        assert_eq!(excess(&usage, 20), [3, 2, 1]);
    }

    #[test]
    fn blocks_that_a_scan_does_not_see_are_forgotten_and_new_ones_stay() {
        let mut usage = TenantUsage::new(100);
        for n in 0..3 {
            usage.add(stored(n), 10, &owner(1, 0, n.into()));
        }
        let elsewhere = Stored {
            tier: 1,
            ..stored(0)
        };
        usage.add(elsewhere, 10, &owner(1, 0, 1));
        usage.add(stored(5), 10, &Owner::default());
        usage.begin_scan();
        assert!(usage.see(stored(1), 30) && !usage.see(stored(7), 10));
        usage.add(stored(8), 10, &owner(1, 0, 1));
        usage.end_scan(0);
        assert!(usage.is_over(&owner(1, 0, 0), 49) && !usage.is_over(&owner(1, 0, 0), 50));
        assert!(
            !usage.see(stored(0), 10) && !usage.see(stored(5), 10),
            "read anew"
        );
        usage.begin_scan();
        usage.end_scan(0);
        usage.end_scan(1);
        assert!(usage.blocks.is_empty() && usage.untagged.is_empty() && usage.tenants.is_empty());
    }

    #[test]
    fn a_block_that_is_stored_again_counts_once_and_outlives_the_removal_of_the_one_before() {
        let mut usage = TenantUsage::new(100);
        usage.add(stored(0), 10, &owner(1, 0, 1));
        let (before, age) = usage.excess(0, 1, |_| false)[0];
        usage.add(stored(0), 20, &owner(1, 0, 2));
        usage.removed(before, age);
        assert!(usage.is_over(&owner(1, 0, 0), 19) && !usage.is_over(&owner(1, 0, 0), 20));
    }

    #[test]
    fn blocks_remembered_are_bounded_and_those_without_a_tag_are_forgotten_first() {
        let mut usage = TenantUsage::new(4);
        for n in 0..4 {
            assert!(usage.add(stored(n), 10, &Owner::default()));
        }
        assert!(!usage.add(stored(9), 10, &Owner::default()));
        for n in 10..14 {
            assert!(usage.add(stored(n), 10, &owner(1, 0, n.into())));
            assert_eq!(usage.blocks.len() + usage.untagged.len(), 4);
        }
        assert!(!usage.add(stored(14), 10, &owner(1, 0, 14)));
        assert_eq!(usage.blocks.len(), 4);
        assert_eq!(
            excess(&usage, 20),
            [10, 11],
            "known blocks are kept in bounds"
        );
    }
}
