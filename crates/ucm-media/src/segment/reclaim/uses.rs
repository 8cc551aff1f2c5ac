//! Which records are in use. On the medium a segment has one time for all its records, that of the
//! latest use.
//!
//! While room is short a few records in use must not keep all the others. Then they are only noted
//! here, by the pages at which they begin, so that records of any length are distinct; they are
//! appended again before their segment is removed. Once a good part of a segment is in use the time
//! of all of it is set and it is forgotten here, so a few bytes are kept for each record in use.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ucm_core::BlockId;
use ucm_core::sync::Mutex;
use ucm_infra::{LANE_SPACE, MonotonicTime};
use ucm_io::IoJob;

use crate::segment::cache::SegmentCache;
use crate::segment::files::SegmentFiles;
use crate::segment::index::{Hit, SegmentNumber, page};

/// Part of a segment's records that must be in use for the whole of it to count as used.
const SHARE: u64 = 4;

/// See the module.
#[derive(Default)]
pub(in crate::segment) struct Uses {
    /// Little is free: segments will be removed for room.
    short: AtomicBool,
    pages: Mutex<HashMap<SegmentNumber, BTreeSet<u32>>>,
}

impl Uses {
    /// Whether segments will be removed for room, by the last turn.
    pub(in crate::segment) fn is_room_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Room is short, or not any more; forgets segments that are not there.
    pub(super) fn room_is_short(&self, short: bool, there: impl Fn(SegmentNumber) -> bool) {
        self.short.store(short, Ordering::Relaxed);
        self.pages.lock().retain(|segment, _| there(*segment));
    }

    /// The record at this offset was used.
    pub(super) fn note(&self, segment: SegmentNumber, offset: u64) {
        let mut segments = self.pages.lock();
        segments.entry(segment).or_default().insert(page(offset));
    }

    /// Records of a segment that were used.
    pub(super) fn count(&self, segment: SegmentNumber) -> u64 {
        let segments = self.pages.lock();
        segments.get(&segment).map_or(0, BTreeSet::len) as u64
    }

    /// Whether the record at this offset was used.
    pub(super) fn has(&self, segment: SegmentNumber, offset: u64) -> bool {
        let segments = self.pages.lock();
        let pages = segments.get(&segment);
        pages.is_some_and(|pages| pages.contains(&page(offset)))
    }

    /// The segment has the time of its use now, or was removed.
    pub(super) fn forget(&self, segment: SegmentNumber) {
        self.pages.lock().remove(&segment);
    }

    /// Sets the time of every segment that these records are in and whose time was not set this
    /// minute. While room is short, only if much of it is in use.
    pub(in crate::segment) fn touch(
        &self,
        cache: &SegmentCache<SegmentFiles>,
        ids: &[(BlockId, u32)],
        deadline: MonotonicTime,
    ) {
        let (index, shared) = (&cache.index, &cache.blobs.shared);
        let short = self.is_room_short();
        // By the segment's name: a record of it, the least ordinal, and how many.
        let mut used: HashMap<BlockId, (Hit, u32, u64)> = HashMap::new();
        for &(id, ordinal) in ids {
            let Some(hit) = index.find(id).filter(|hit| !hit.private) else {
                continue;
            };
            if short {
                self.note(hit.segment, hit.offset);
            }
            let (_, least, blocks) = used.entry(hit.name.as_id()).or_insert((hit, ordinal, 0));
            (*least, *blocks) = ((*least).min(ordinal), *blocks + 1);
        }
        used.retain(|_, (hit, _, _)| {
            let whole = !short || self.count(hit.segment) * SHARE >= index.blocks_of(hit.segment);
            if whole {
                self.forget(hit.segment); // its time is about to be set
            }
            whole
        });
        let asked = used.iter().map(|(name, (_, ordinal, _))| (*name, *ordinal));
        let asked: Vec<_> = asked.collect();
        let due = shared.recency.due(&asked, shared.clock.wall_ns());
        let (mut files, mut blocks) = (Vec::new(), Vec::new());
        for (id, time) in due {
            if let Some((hit, _, count)) = used.get(&id) {
                index.used(hit.segment, time);
                files.push((shared.layout.segment(hit.name), time));
                blocks.push(*count);
            }
        }
        if files.is_empty() {
            return;
        }
        let root = Arc::clone(shared);
        let touch = move |io: &IoJob| {
            let touched = io.touch(&files)?.into_iter().zip(blocks);
            let there = touched.filter(|(file, _)| matches!(file, Ok(true)));
            root.recency.count(there.map(|(_, blocks)| blocks).sum());
            Ok(())
        };
        shared.io.job(LANE_SPACE, deadline, touch, |_| {});
    }
}

#[cfg(test)]
mod tests {
    use ucm_core::PAGE;

    use super::*;

    #[test]
    fn records_of_any_length_are_told_apart_and_counted_once() {
        let uses = Uses::default();
        for pages in [1, 3, 3, 4, 141] {
            uses.note(3, pages * PAGE);
        }
        assert_eq!(
            (uses.count(3), uses.count(4)),
            (4, 0),
            "side by side, a page each"
        );
        assert!(uses.has(3, 141 * PAGE) && uses.has(3, 4 * PAGE));
        assert!(!uses.has(3, 2 * PAGE) && !uses.has(3, 5 * PAGE) && !uses.has(4, PAGE));
        uses.room_is_short(true, |segment| segment != 3);
        assert!(uses.is_room_short() && !uses.has(3, PAGE));
    }
}
