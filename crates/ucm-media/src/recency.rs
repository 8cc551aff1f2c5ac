//! When a record was used last, kept by the file system itself: what removal goes by.

use std::sync::atomic::{AtomicU64, Ordering};

use hashlink::LruCache;
use ucm_core::BlockId;
use ucm_core::sync::Mutex;

/// Time of use, told to the file system as a modification time.
///
/// The time is cut to a minute and the block's ordinal in its chain is taken off in microseconds:
/// within a minute a descendant is always older than its ancestors, so that removing the oldest
/// first is removing the deepest first, without reading a header. A request touches its whole
/// prefix, at most once a minute and block.
#[derive(Default)]
pub struct Recency {
    told: Mutex<Option<LruCache<BlockId, i64>>>,
    touched: AtomicU64,
}

/// Length of the step to which times of use are cut.
const STEP_NS: i64 = 60_000_000_000;
/// Most blocks remembered as told.
const TOLD: usize = 1 << 17;

impl Recency {
    /// What counts as the last use of a block at this ordinal of its chain that is used at this
    /// time, ns of Unix time.
    pub fn time(ordinal: u32, wall_ns: u64) -> i64 {
        let now = i64::try_from(wall_ns).unwrap_or(i64::MAX);
        now - now % STEP_NS - i64::from(ordinal) * 1000
    }

    /// The time to give to a record being published.
    pub fn published(&self, id: BlockId, ordinal: u32, wall_ns: u64) -> i64 {
        let time = Self::time(ordinal, wall_ns);
        let mut told = self.told.lock();
        told.get_or_insert_with(|| LruCache::new(TOLD))
            .insert(id, time);
        time
    }

    /// Which of these blocks need to be told to the file system, and what.
    pub fn due(&self, ids: &[(BlockId, u32)], wall_ns: u64) -> Vec<(BlockId, i64)> {
        let mut told = self.told.lock();
        let told = told.get_or_insert_with(|| LruCache::new(TOLD));
        let times = ids
            .iter()
            .map(|&(id, ordinal)| (id, Self::time(ordinal, wall_ns)));
        let due = times.filter(|&(id, time)| told.insert(id, time).is_none_or(|last| last < time));
        due.collect()
    }

    /// Counts blocks touched.
    pub fn count(&self, blocks: u64) {
        self.touched.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Blocks touched so far.
    pub fn touched(&self) -> u64 {
        self.touched.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_are_younger_than_descendants() {
        let recency = Recency::default();
        let minute = STEP_NS as u64;
        let (a, b) = (BlockId([1; 16]), BlockId([2; 16]));
        let first = recency.published(a, 0, 5 * minute + 7);
        let second = recency.published(b, 1, 5 * minute + 900);
        assert!(first > second, "written later, and still older");
        assert!(
            recency.due(&[(a, 0), (b, 1)], 5 * minute + 1000).is_empty(),
            "told this minute"
        );
        let due = recency.due(&[(a, 0), (b, 1)], 6 * minute);
        assert_eq!(due.len(), 2);
        assert!(due[0].1 > due[1].1 && due[1].1 > first);
    }
}
