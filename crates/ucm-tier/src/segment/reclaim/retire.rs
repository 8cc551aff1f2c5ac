//! Segments that wait for their removal after what they had was appended again: readers that found
//! them before still read there.

use std::collections::BTreeSet;

use ucm_core::Result;
use ucm_infra::MonotonicTime;

use super::State;
use crate::segment::Segments;
use crate::segment::index::SegmentNumber;
use crate::segment::index::stats::SegmentStats;

/// Segments that go together.
pub(super) struct Retiring {
    pub(super) due: MonotonicTime,
    pub(super) segments: Vec<SegmentStats>,
    /// Segments that have what these had, all of them: while one of them is gone, these stay.
    pub(super) relied: BTreeSet<SegmentNumber>,
}

impl Segments {
    /// Removes those whose time has come. What cannot be removed is found again by a later look:
    /// nothing of it is needed.
    pub(super) fn retire_due(&self, state: &mut State, now: MonotonicTime) {
        for retiring in state
            .retiring
            .extract_if(.., |retiring| retiring.due <= now)
        {
            let _ = self.retire(&retiring);
        }
    }

    fn retire(&self, retiring: &Retiring) -> Result<()> {
        self.unless_closing()?;
        self.shared.check_marker(self.step())?;
        // Somebody may have removed what the others were copied to: then these are all there is.
        let mut relied = self.index.stats();
        relied.retain(|segment| retiring.relied.contains(&segment.number));
        let there = self.look_at(&relied)?;
        let times: Vec<i64> = there
            .into_iter()
            .zip(&relied)
            .filter_map(|(meta, known)| meta.filter(|meta| meta.len == known.len))
            .map(|meta| meta.mtime_ns)
            .collect();
        if times.len() < retiring.relied.len() {
            return Ok(());
        }
        self.pass_on_use(retiring, relied, &times)?;
        let before = self.shared.space.counts();
        let path = |segment: &SegmentStats| self.shared.layout.segment(segment.name);
        let paths: Vec<_> = retiring.segments.iter().map(path).collect();
        let answers = self.shared.call(self.step(), move |io| io.remove(&paths))?;
        let mut freed = 0;
        for (segment, answer) in retiring.segments.iter().zip(answers) {
            let Ok(removed) = answer else { continue };
            freed += if removed { segment.len } else { 0 };
            self.index.vanished(segment.number);
            self.reclaim.uses.forget(segment.number);
        }
        self.shared.space.deleted(freed, before);
        Ok(())
    }

    /// Who used one of these after it was copied meant the copy. `times`: those of the segments
    /// relied on.
    fn pass_on_use(
        &self,
        retiring: &Retiring,
        relied: Vec<SegmentStats>,
        times: &[i64],
    ) -> Result<()> {
        let now = self.look_at(&retiring.segments)?.into_iter().flatten();
        let used = now.map(|meta| meta.mtime_ns).max().unwrap_or(i64::MIN);
        let before = retiring
            .segments
            .iter()
            .map(|segment| segment.used_ns)
            .max();
        if before.is_none_or(|before| used <= before) {
            return Ok(());
        }
        let older = relied
            .into_iter()
            .zip(times)
            .filter(|(_, time)| **time < used);
        self.tell_used(
            &older
                .map(|(segment, _)| (segment, used))
                .collect::<Vec<_>>(),
        )
    }
}
