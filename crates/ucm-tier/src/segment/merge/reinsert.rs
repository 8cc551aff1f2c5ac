//! Records in use are carried forward before their segment is removed.
//!
//! While room is short a segment counts as used only where much of it is ([`crate::segment::heat`]). So one of which little
//! is in use grows old, and when it is among the next to go its records in use are copied into a segment that is as young
//! as their use. What does not succeed counts as used whole again, as it does while there is room.

use std::sync::atomic::Ordering;

use ucm_core::Result;

use super::Source;
use crate::segment::Segments;
use crate::segment::copy::{Carried, Piece};
use crate::segment::index::census::{CopyStatus, SegmentStats};

/// Use of the limit, in percent, from which on room is short: a removal leaves little more than that.
const PRESSED: u64 = 70;
/// Part of the limit that is among the next to go: what one removal takes, and more.
const NEXT: u64 = 4;

impl Segments {
    /// Looks whether room is short, and carries forward what has to be.
    pub(super) fn carry_forward(&self) {
        let usage = self.shared.space.usage();
        let quota = self.shared.config.rules.namespace_quota;
        let quota = quota.map_or(u64::MAX, |quota| quota.bytes(usage.capacity));
        let mut all = self.index.census();
        let stored: u64 = all.iter().map(|segment| segment.len).sum();
        let much = |limit: u64| limit / 100 * PRESSED;
        let pressed = usage.counted && (usage.used >= much(usage.capacity) || stored >= much(quota));
        self.merger.pressed.store(pressed, Ordering::Relaxed);
        self.heat.retain(|segment| self.index.has(segment));
        if !pressed || self.heat.is_empty() {
            return;
        }
        all.sort_unstable_by_key(|segment| (segment.used_ns, segment.name));
        let (mut before, most) = (0, usage.capacity.min(quota) / NEXT);
        all.retain(|segment| {
            let next = before < most || self.expires_soon(segment);
            before += segment.len;
            next && segment.part == self.shared.config.part && self.heat.count(segment.number) > 0
        });
        if all.is_empty() || self.unless_closing().is_err() {
            return;
        }
        // Several engines and ranks may use the same records, and know of it at the same time: one of them copies.
        let carried = self.in_turn(|| self.carry(all.clone()));
        if carried.is_err() && self.unless_closing().is_ok() {
            let _ = self.renew(&all); // what cannot be told either is removed for its age
        }
    }

    /// Whether half of the time after which it is removed for its age has passed.
    fn expires_soon(&self, segment: &SegmentStats) -> bool {
        let expires = self.shared.config.rules.expire_after;
        expires.is_some_and(|after| {
            let half = i64::try_from(after.as_nanos() / 2).unwrap_or(i64::MAX);
            segment.used_ns < self.now_ns().saturating_sub(half)
        })
    }

    fn carry(&self, next: Vec<SegmentStats>) -> Result<()> {
        let known = next.clone();
        let (mut sources, mut pieces) = (Vec::new(), Vec::new());
        let mut room = self.room();
        for census in self.with_times(next)? {
            let before = known.iter().find(|known| known.number == census.number);
            if before.is_some_and(|before| before.used_ns < census.used_ns) {
                self.heat.forget(census.number); // another one uses it, it is not among the next
                continue;
            }
            let Some(footer) = self.footer_of(&census)? else {
                self.heat.forget(census.number);
                continue;
            };
            let begin = pieces.len();
            for entry in footer.entries {
                let taken = self.index.standing(entry.id, census.number, entry.offset) == CopyStatus::Taken;
                let fits = self.is_ours(entry.len) && entry.len <= room;
                if taken && fits && self.heat.is_hot(census.number, entry.offset) {
                    room -= entry.len;
                    let from = self.shared.layout.segment(census.name);
                    pieces.push(Piece { from, entry });
                }
            }
            sources.push(Source {
                census,
                sealed_ns: footer.sealed_ns,
                pieces: begin..pieces.len(),
            });
        }
        if !pieces.is_empty() {
            let used = |name: ucm_quota::layout::SegmentName, ordinal| {
                let (recency, wall) = (&self.shared.recency, self.shared.clock.wall_ns());
                Ok(recency.published(name.as_id(), ordinal, wall))
            };
            let copied = self.copy_pieces(&sources, &pieces, &used)?;
            let carried = copied
                .carried
                .iter()
                .filter(|carried| matches!(carried, Carried::At(_)));
            let count = carried.count() as u64;
            self.merger.done.carried.fetch_add(count, Ordering::Relaxed);
            copied
                .number
                .into_iter()
                .for_each(|number| self.heat.forget(number));
        }
        // Those that found no room in this turn are among the next still, with the records that are left.
        for source in sources.iter().filter(|_| room >= self.record_pages()) {
            self.heat.forget(source.census.number);
        }
        Ok(())
    }

    /// Has these segments count as used whole.
    fn renew(&self, segments: &[SegmentStats]) -> Result<()> {
        let (recency, wall) = (&self.shared.recency, self.shared.clock.wall_ns());
        let asked: Vec<_> = segments.iter().map(|segment| (segment.name.as_id(), 0)).collect();
        let due = recency.due(&asked, wall);
        let mut files = Vec::new();
        for segment in segments {
            if let Some((_, time)) = due.iter().find(|(id, _)| *id == segment.name.as_id()) {
                self.index.used(segment.number, *time);
                files.push((self.shared.layout.segment(segment.name), *time));
            }
            self.heat.forget(segment.number);
        }
        self.shared
            .call(self.step(), move |io| io.touch(&files).map(|_| ()))
    }
}
