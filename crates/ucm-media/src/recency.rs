//! Time of a record's last use, which the file system keeps; eviction removes the oldest first.

use std::sync::atomic::{AtomicU64, Ordering};

use hashlink::LruCache;
use ucm_core::BlockId;
use ucm_core::sync::Mutex;

/// Times of use, which are stored as modification times of files.
///
/// A time is rounded down to a minute, minus the block's ordinal in its chain in microseconds.
/// Within a minute a descendant is therefore older than its ancestors, and the deepest block is
/// removed first, without reading a header. A request touches its whole prefix, each block at most
/// once a minute.
#[derive(Default)]
pub struct Recency {
    noted: Mutex<Option<LruCache<BlockId, i64>>>,
    touched: AtomicU64,
}

/// Times of use are rounded down to a multiple of this.
const STEP_NS: i64 = 60_000_000_000;
/// Most blocks whose stored time is remembered.
const MOST_NOTED: usize = 1 << 17;

impl Recency {
    /// The time of use to store for a block at this ordinal of its chain that is used at `wall_ns`;
    /// both are ns of Unix time.
    pub fn time(ordinal: u32, wall_ns: u64) -> i64 {
        let now = i64::try_from(wall_ns).unwrap_or(i64::MAX);
        now - now % STEP_NS - i64::from(ordinal) * 1000
    }

    /// The time to give to a record being published.
    pub fn published(&self, id: BlockId, ordinal: u32, wall_ns: u64) -> i64 {
        let time = Self::time(ordinal, wall_ns);
        let mut noted = self.noted.lock();
        noted
            .get_or_insert_with(|| LruCache::new(MOST_NOTED))
            .insert(id, time);
        time
    }

    /// The blocks among these whose stored time must change, with the new time.
    pub fn due(&self, ids: &[(BlockId, u32)], wall_ns: u64) -> Vec<(BlockId, i64)> {
        let mut noted = self.noted.lock();
        let noted = noted.get_or_insert_with(|| LruCache::new(MOST_NOTED));
        let times = ids
            .iter()
            .map(|&(id, ordinal)| (id, Self::time(ordinal, wall_ns)));
        let due = times.filter(|&(id, time)| noted.insert(id, time).is_none_or(|last| last < time));
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
            "noted this minute"
        );
        let due = recency.due(&[(a, 0), (b, 1)], 6 * minute);
        assert_eq!(due.len(), 2);
        assert!(due[0].1 > due[1].1 && due[1].1 > first);
    }
}
