//! Which records of a segment this process used since the segment's own time of use was last told to the file system: the
//! pages at which they begin, so that records of any length are told apart.
//!
//! A segment has one time for all its records. While room is short, a few of them in use shall not keep all the others:
//! then only they are noted, and carried forward before their segment goes. Once a good part of a segment is in use it
//! counts as used whole and is forgotten here, so that what is kept is a few bytes for each record in use.

use std::collections::{BTreeSet, HashMap};

use parking_lot::Mutex;
use ucm_core::PAGE;

use super::index::SegmentNumber;

/// Part of a segment's records that must be in use for the whole of it to count as used.
const SHARE: u64 = 4;

/// See the module.
#[derive(Default)]
pub(crate) struct Heat(Mutex<HashMap<SegmentNumber, BTreeSet<u32>>>);

/// The page at which a record begins: a segment is at most 4 GiB long.
fn page(offset: u64) -> u32 {
    u32::try_from(offset / PAGE).unwrap_or(u32::MAX)
}

impl Heat {
    /// The record at this offset was used.
    pub(crate) fn note(&self, segment: SegmentNumber, offset: u64) {
        self.0.lock().entry(segment).or_default().insert(page(offset));
    }

    /// Whether so many records of a segment of `blocks` are in use that it counts as used whole.
    pub(crate) fn is_used_whole(&self, segment: SegmentNumber, blocks: u64) -> bool {
        self.count(segment) * SHARE >= blocks
    }

    /// Records of a segment that were used.
    pub(crate) fn count(&self, segment: SegmentNumber) -> u64 {
        self.0.lock().get(&segment).map_or(0, |pages| pages.len() as u64)
    }

    /// Whether the record at this offset was used.
    pub(crate) fn is_hot(&self, segment: SegmentNumber, offset: u64) -> bool {
        let segments = self.0.lock();
        segments
            .get(&segment)
            .is_some_and(|pages| pages.contains(&page(offset)))
    }

    /// The segment's own time says it now, or it is gone.
    pub(crate) fn forget(&self, segment: SegmentNumber) {
        self.0.lock().remove(&segment);
    }

    /// Keeps what is known of these segments.
    pub(crate) fn retain(&self, keep: impl Fn(SegmentNumber) -> bool) {
        self.0.lock().retain(|segment, _| keep(*segment));
    }

    /// Whether nothing is known of any.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_any_length_are_told_apart_and_counted_once() {
        let heat = Heat::default();
        for pages in [1, 3, 3, 4, 141] {
            heat.note(3, pages * PAGE);
        }
        assert_eq!(
            (heat.count(3), heat.count(4)),
            (4, 0),
            "side by side, a page each"
        );
        assert!(heat.is_hot(3, 141 * PAGE) && heat.is_hot(3, 4 * PAGE));
        assert!(!heat.is_hot(3, 2 * PAGE) && !heat.is_hot(3, 5 * PAGE) && !heat.is_hot(4, PAGE));
        assert!(heat.is_used_whole(3, 16) && !heat.is_used_whole(3, 17));
        heat.retain(|segment| segment != 3);
        assert!(heat.is_empty() && !heat.is_hot(3, PAGE));
    }
}
