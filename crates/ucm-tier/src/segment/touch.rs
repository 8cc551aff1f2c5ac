//! Telling the file system what was used: a segment has one time for all its records, so that of the latest use.
//!
//! While room is short that would keep much for the sake of little. Then a segment is told to be in use only where a good
//! part of its records is, and of the others [`super::heat`] remembers which, to carry them forward.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ucm_core::BlockId;
use ucm_infra::{LANE_SPACE, MonotonicTime};
use ucm_io::IoJob;

use super::Segments;
use super::index::{Hit, SegmentNumber};

impl Segments {
    /// Whether segments will be removed for room, as was seen with the last turn.
    pub(super) fn is_room_short(&self) -> bool {
        self.merger.pressed.load(Ordering::Relaxed)
    }

    /// While room is short, use of a record is not use of its segment yet.
    pub(super) fn note_use(&self, hit: &Hit) {
        if self.is_room_short() {
            self.heat.note(hit.segment, hit.offset);
        }
    }

    /// Whether a segment counts as used whole, a record of it having been used. If so that is about to be told.
    pub(super) fn is_used_whole(&self, segment: SegmentNumber) -> bool {
        let whole = !self.is_room_short() || self.heat.is_used_whole(segment, self.index.blocks_of(segment));
        if whole {
            self.heat.forget(segment);
        }
        whole
    }

    /// Tells the file system, of every segment of which these records are and that was not told this minute, that it was
    /// used. While room is short, only if much of it is in use.
    pub(super) fn touch(self: &Arc<Self>, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        // By the segment's name: a record of it, the least ordinal, and how many.
        let mut used: HashMap<BlockId, (Hit, u32, u64)> = HashMap::new();
        for &(id, ordinal) in ids {
            let Some(hit) = self.index.find(id).filter(|hit| !hit.private) else {
                continue;
            };
            self.note_use(&hit);
            let (_, least, blocks) = used.entry(hit.name.as_id()).or_insert((hit, ordinal, 0));
            (*least, *blocks) = ((*least).min(ordinal), *blocks + 1);
        }
        used.retain(|_, (hit, _, _)| self.is_used_whole(hit.segment));
        let asked: Vec<_> = used
            .iter()
            .map(|(name, (_, ordinal, _))| (*name, *ordinal))
            .collect();
        let due = self.shared.recency.due(&asked, self.shared.clock.wall_ns());
        let (mut files, mut blocks) = (Vec::new(), Vec::new());
        for (id, time) in due {
            if let Some((hit, _, count)) = used.get(&id) {
                self.index.used(hit.segment, time);
                files.push((self.shared.layout.segment(hit.name), time));
                blocks.push(*count);
            }
        }
        if files.is_empty() {
            return;
        }
        let segments = Arc::clone(self);
        let touch = move |io: &IoJob| {
            let touched = io.touch(&files)?;
            let there = touched.iter().zip(blocks);
            let there = there.filter(|(file, _)| matches!(file, Ok(true)));
            segments
                .shared
                .recency
                .count(there.map(|(_, blocks)| blocks).sum());
            Ok(())
        };
        self.shared.io.job(LANE_SPACE, deadline, touch, |_| {});
    }
}
