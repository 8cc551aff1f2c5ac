//! How much of each segment is still read, by the index: which records are read from newer copies,
//! and where one record stands among its copies.

use std::sync::atomic::Ordering;

use ucm_core::{BlockId, PAGE, Part};

use super::{Index, Segment, SegmentNumber, page};
use crate::blobs::{BlobMeta, BlobName};
use crate::layout::SegmentName;

/// A segment that others can see too, as the index knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentStats {
    pub(crate) number: SegmentNumber,
    pub(crate) name: SegmentName,
    pub(crate) part: Part,
    /// As of [`Known`](super::Known).
    pub(crate) len: u64,
    pub(crate) used_ns: i64,
    pub(crate) blocks: u64,
    /// Blocks of it of which another copy counts, or that were dropped here.
    pub(crate) passed_over: u64,
}

impl SegmentStats {
    /// Bytes of its records that are still taken from here, about.
    pub(crate) fn live(&self) -> u64 {
        let taken = self.blocks.saturating_sub(self.passed_over);
        let records = self.len.saturating_sub(2 * PAGE); // head and footer
        let share = u128::from(records) * u128::from(taken) / u128::from(self.blocks.max(1));
        u64::try_from(share).unwrap_or(self.len)
    }

    /// Whether most of its records are taken from elsewhere.
    pub(crate) fn is_sparse(&self) -> bool {
        self.passed_over * 2 > self.blocks || self.blocks == 0
    }

    /// Its file below a root, of which the footer can be read.
    pub(crate) fn file(&self) -> BlobMeta {
        let (sealed_ns, name) = (0, self.name);
        BlobMeta {
            blob: BlobName { sealed_ns, name },
            len: self.len,
            used_ns: self.used_ns,
            inode: 0,
        }
    }
}

/// Where the copy of a record in one segment stands among all that are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyStatus {
    /// This is the copy that is read.
    Current,
    /// A newer one in this segment, which others can see too, is read in its place.
    Superseded(SegmentNumber),
    /// The same segment has it once more, and that one is read.
    Twice,
    /// An older one, or one that only this process sees, is read: this one was dropped here, or
    /// was found when an open segment had it already.
    Aside,
    /// It was removed here, and no other is known.
    Removed,
    /// None is known: all were dropped here, or there was no room for it.
    Unknown,
}

impl Index {
    /// Every segment that others can see too.
    pub(crate) fn stats(&self) -> Vec<SegmentStats> {
        let segments = self.segments.read();
        let all = segments.known.iter();
        let public = all.filter(|(_, segment)| !segment.known.private);
        let take = |(number, segment): (&SegmentNumber, &Segment)| SegmentStats {
            number: *number,
            name: segment.known.name,
            part: segment.known.part,
            len: segment.known.len,
            used_ns: segment.known.used_ns,
            blocks: segment.blocks,
            passed_over: segment.passed_over.load(Ordering::Relaxed),
        };
        public.map(take).collect()
    }

    /// Records that were not added.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Of these, records for which there was no room, and the most blocks there is room for.
    pub(crate) fn no_room(&self) -> (u64, usize) {
        (self.no_room.load(Ordering::Relaxed), self.most)
    }

    /// The number of the segment that was added last.
    pub(crate) fn last(&self) -> SegmentNumber {
        self.segments.read().last
    }

    /// The number of a segment, if one of that name is known.
    pub(crate) fn number_of(&self, name: SegmentName) -> Option<SegmentNumber> {
        self.segments.read().by_name.get(&name).copied()
    }

    /// Blocks of a segment.
    pub(crate) fn blocks_of(&self, number: SegmentNumber) -> u64 {
        self.of(number, |segment| segment.blocks).unwrap_or(0)
    }

    /// Where the copy at this place stands.
    pub(crate) fn copy_status(
        &self,
        id: BlockId,
        number: SegmentNumber,
        offset: u64,
    ) -> CopyStatus {
        let Some(hit) = self.find(id) else {
            let page = page(offset);
            return match self.of(number, |segment| segment.removed.lock().contains(&page)) {
                Some(true) => CopyStatus::Removed,
                _ => CopyStatus::Unknown,
            };
        };
        if hit.segment == number {
            return match hit.offset == offset {
                true => CopyStatus::Current,
                false => CopyStatus::Twice,
            };
        }
        let segments = self.segments.read();
        let order = |number| segments.known.get(&number).map(Segment::order);
        match order(hit.segment) {
            Some(other) if !hit.private && order(number).is_none_or(|own| own < other) => {
                CopyStatus::Superseded(hit.segment)
            }
            _ => CopyStatus::Aside,
        }
    }
}
