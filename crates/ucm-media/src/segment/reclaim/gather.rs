//! The turns of the thread that reclaims. Many small segments become one, and sparse ones are
//! thinned out: never those of other namespaces and parts, and only within room that is granted
//! already, so that no record is removed for a copy.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::Result;
use ucm_infra::MonotonicTime;

use super::choose::{choose, is_small};
use super::claim::Claim;
use super::relieve::Relief;
use super::{Reclaim, Retiring, Sources, State};
use crate::segment::format::Entry;
use crate::segment::index::SegmentNumber;
use crate::segment::index::stats::{CopyStatus, SegmentStats};

/// Turns in the time between two searches for segments to gather.
const TURNS: u32 = 12;
/// Most segments whose times are read in one turn.
const MOST_ASKED: usize = 1024;
/// Part of the root's limit that gathered segments may take while they wait for their removal.
const SHARE: u64 = 64;
/// Use of the root's limit above which nothing is gathered, in percent. With the grants of writers
/// records are removed from there on, and copies must not displace any.
const FULL: u64 = 82;

impl Reclaim {
    /// One turn of the thread that reclaims; when to make the next. `room`: length at which
    /// segments are sealed now, bytes.
    pub(in crate::segment) fn turn(&self, now: MonotonicTime, room: u64) -> MonotonicTime {
        let merging = self.config;
        if merging.rate == 0 || self.shared.config.scope.lookup_only {
            return MonotonicTime::NEVER;
        }
        let mut state = self.state.lock();
        let is_due = |retiring: &mut Retiring| retiring.due <= now;
        for retiring in state.retiring.extract_if(.., is_due) {
            let _ = retiring.remove(self); // a later turn finds the rest again
        }
        let reclaim = self;
        Relief { reclaim, room }.turn();
        if state.looked.is_none_or(|at| now.since(at) >= merging.look) {
            // A failure is tried again with the next search.
            while let Ok(true) = self.gather(&mut state, room) {}
            state.looked = Some(now);
            state.upto = self.index.last();
            let is_there = |number: &SegmentNumber| self.index.file_len(*number).is_some();
            state.unfit.retain(is_there);
        }
        now.after((merging.look / TURNS).max(Duration::from_millis(1)))
    }

    /// Gathers once, if there are segments to gather, no other writer does, and there is room.
    /// Whether it did.
    fn gather(&self, state: &mut State, room: u64) -> Result<bool> {
        self.cache.looks.unless_closed()?;
        if !self.has_room_to_gather(state, room)
            || choose(&self.candidates(state, room), room).is_empty()
        {
            return Ok(false);
        }
        let Some(_claim) = Claim::take(self)? else {
            return Ok(false);
        };
        match choose(&self.with_times(self.candidates(state, room))?, room) {
            chosen if chosen.is_empty() => Ok(false),
            chosen => self.gather_these(state, chosen).map(|()| true),
        }
    }

    /// Whether there is room for a copy of a whole segment that displaces no records.
    fn has_room_to_gather(&self, state: &State, room: u64) -> bool {
        let usage = self.shared.space.usage();
        let waiting: u64 = state.waiting().map(|segment| segment.len).sum();
        let free = usage.used.saturating_add(room) <= usage.capacity / 100 * FULL;
        waiting < (usage.capacity / SHARE).max(room) && usage.counted && !usage.paused && free
    }

    /// Segments of this part that are small or sparse and were known at the last turn, the youngest
    /// use first.
    fn candidates(&self, state: &State, room: u64) -> Vec<SegmentStats> {
        let waiting: HashSet<SegmentNumber> =
            state.waiting().map(|segment| segment.number).collect();
        let mut all = self.index.stats();
        all.retain(|segment| {
            segment.number <= state.upto
                && segment.part == self.shared.config.scope.part
                && (is_small(segment, room) || segment.is_sparse())
                && !waiting.contains(&segment.number)
                && !state.unfit.contains(&segment.number)
        });
        all.sort_unstable_by_key(|segment| std::cmp::Reverse((segment.used_ns, segment.name)));
        all.truncate(MOST_ASKED);
        all
    }

    /// Appends the records that are still read from these segments again, and has the segments
    /// removed after a while.
    fn gather_these(&self, state: &mut State, chosen: Vec<SegmentStats>) -> Result<()> {
        let (mut sources, mut relied) = (Sources::default(), BTreeSet::new());
        for segment in chosen {
            self.cache.looks.unless_closed()?;
            // One with a record of another shape is not this writer's to verify.
            let is_ours = |entry: &Entry| self.lengths.is_ours(entry.len);
            let footer = self.footer_of(&segment)?;
            let Some(footer) = footer.filter(|footer| footer.entries.iter().all(is_ours)) else {
                state.unfit.insert(segment.number);
                continue;
            };
            let number = segment.number;
            self.add_source(&mut sources, segment, footer, |entry| {
                match self.index.copy_status(entry.id, number, entry.offset) {
                    CopyStatus::Superseded(by) => {
                        relied.insert(by);
                        None
                    }
                    CopyStatus::Twice | CopyStatus::Removed => None,
                    status => Some(status != CopyStatus::Unknown),
                }
            });
        }
        if !sources.pieces.is_empty() {
            // The others could not be gathered with it.
            if let [only] = &sources.segments[..]
                && !only.is_sparse()
            {
                state.unfit.insert(only.number);
                return Ok(());
            }
            // As young as the youngest of them: they may be used until then.
            let made = self.append_again(&sources, &sources.segments)?;
            relied.extend(made.number);
            // Segments that look damaged, or that this writer cannot verify, are removed by age.
            let is_sound = |segment: &SegmentStats| !made.unsound.contains(&segment.number);
            sources.segments.retain(is_sound);
            state.unfit.extend(made.unsound);
        }
        if !sources.segments.is_empty() {
            let count = sources.segments.len() as u64;
            let due = self.shared.clock.now().after(self.config.grace);
            state.retiring.push(Retiring {
                due,
                segments: sources.segments,
                relied,
            });
            self.gathered.fetch_add(count, Ordering::Relaxed);
        }
        Ok(())
    }
}
