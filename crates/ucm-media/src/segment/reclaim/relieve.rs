//! Records in use outlive their segment.
//!
//! While room is short a segment counts as used only where much of it is ([`super::uses`]). So a
//! segment of which little is in use grows old. When it is among the next to be removed, its
//! records in use are appended to a segment that is as young as their use. Where that fails, the
//! segment counts as used again, as it does while there is room.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use ucm_core::{PAGE, Result, round_up};

use super::claim::Claim;
use super::{Reclaim, Sources};
use crate::segment::index::stats::{CopyStatus, SegmentStats};

/// Use of the limit, in percent, from which on room is short: a removal leaves little more.
const SHORT: u64 = 70;
/// Part of the limit that is among the next to be removed: more than one removal takes.
const NEXT: u64 = 4;

/// The turn of a process whose room may be short.
pub(super) struct Relief<'a> {
    pub(super) reclaim: &'a Reclaim,
    /// Bytes of the segment that records in use are appended to.
    pub(super) room: u64,
}

impl Relief<'_> {
    /// Checks whether room is short, and appends records in use again.
    pub(super) fn turn(&self) {
        let (reclaim, shared) = (self.reclaim, &self.reclaim.shared);
        let usage = shared.space.usage();
        let quota = shared.config.rules.namespace_quota;
        let quota = quota.map_or(u64::MAX, |quota| quota.bytes(usage.capacity));
        let mut all = reclaim.index.stats();
        let stored: u64 = all.iter().map(|segment| segment.len).sum();
        let much = |limit: u64| limit / 100 * SHORT;
        let short = usage.counted && (usage.used >= much(usage.capacity) || stored >= much(quota));
        let uses = &reclaim.uses;
        uses.room_is_short(short, |segment| reclaim.index.file_len(segment).is_some());
        if !short {
            return;
        }
        all.sort_unstable_by_key(|segment| (segment.used_ns, segment.name));
        let (mut before, most) = (0, usage.capacity.min(quota) / NEXT);
        all.retain(|segment| {
            let next = before < most || self.expires_soon(segment);
            before += segment.len;
            next && segment.part == shared.config.scope.part && uses.count(segment.number) > 0
        });
        if all.is_empty() || reclaim.cache.looks.is_closed() {
            return;
        }
        // Several engines and ranks may use the same records, and know of it at the same time: one
        // of them copies.
        let claim = Claim::take(reclaim);
        let relieve = |claim: Option<_>| claim.map_or(Ok(()), |_claim| self.relieve_these(&all));
        let relieved = claim.and_then(relieve);
        if relieved.is_err() && !reclaim.cache.looks.is_closed() {
            let _ = self.renew(&all); // else they are removed for their age
        }
    }

    /// Whether half of the time after which it is removed for its age has passed.
    fn expires_soon(&self, segment: &SegmentStats) -> bool {
        let expires = self.reclaim.shared.config.rules.expire_after;
        expires.is_some_and(|after| {
            let half = i64::try_from(after.as_nanos() / 2).unwrap_or(i64::MAX);
            let now = i64::try_from(self.reclaim.shared.clock.wall_ns()).unwrap_or(i64::MAX);
            segment.used_ns < now.saturating_sub(half)
        })
    }

    fn relieve_these(&self, next: &[SegmentStats]) -> Result<()> {
        let (reclaim, mut sources, mut room) = (self.reclaim, Sources::default(), self.room);
        let uses = &reclaim.uses;
        let known = next.iter().map(|known| (known.number, known.used_ns));
        let known: HashMap<_, _> = known.collect();
        for segment in reclaim.with_times(next.to_vec())? {
            let used = known.get(&segment.number);
            // One that another process uses is not among the next.
            let footer = match used.is_some_and(|used| *used < segment.used_ns) {
                true => None,
                false => reclaim.footer_of(&segment)?,
            };
            let Some(footer) = footer else {
                uses.forget(segment.number);
                continue;
            };
            reclaim.add_source(&mut sources, segment, footer, |entry| {
                let (number, offset) = (segment.number, entry.offset);
                let status = reclaim.index.copy_status(entry.id, number, offset);
                let fits = reclaim.lengths.is_ours(entry.len) && entry.len <= room;
                let goes = status == CopyStatus::Current && fits && uses.has(number, offset);
                room -= if goes { entry.len } else { 0 };
                goes.then_some(true)
            });
        }
        if !sources.pieces.is_empty() {
            let made = reclaim.append_again(&sources, &[])?;
            let reinserted = &reclaim.reinserted;
            reinserted.fetch_add(made.records, Ordering::Relaxed);
            made.number.iter().for_each(|number| uses.forget(*number));
        }
        // Those that found no room in this turn are among the next still, with the records that are
        // left.
        if room >= round_up(reclaim.lengths.own_len(), PAGE) {
            let segments = sources.segments.iter();
            segments.for_each(|segment| uses.forget(segment.number));
        }
        Ok(())
    }

    /// Sets the times of these segments, as of use now.
    fn renew(&self, segments: &[SegmentStats]) -> Result<()> {
        let shared = &self.reclaim.shared;
        let (recency, wall) = (&shared.recency, shared.clock.wall_ns());
        let asked = segments.iter().map(|segment| (segment.name.as_id(), 0));
        let asked: Vec<_> = asked.collect();
        let due: HashMap<_, _> = recency.due(&asked, wall).into_iter().collect();
        let time = |segment: &SegmentStats| {
            self.reclaim.uses.forget(segment.number);
            Some((*segment, *due.get(&segment.name.as_id())?))
        };
        let used: Vec<_> = segments.iter().filter_map(time).collect();
        self.reclaim.note_used(&used)
    }
}
