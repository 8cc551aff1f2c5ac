//! Segments that wait for their removal after their records were appended again: readers that found
//! them before still read there.

use ucm_core::Result;

use super::{Reclaim, Retiring};
use crate::segment::index::stats::SegmentStats;

impl Retiring {
    /// Removes them. Those that cannot be removed are found again by a later turn: nothing of them
    /// is needed.
    pub(super) fn remove(&self, reclaim: &Reclaim) -> Result<()> {
        let (files, shared) = (&reclaim.files, &reclaim.shared);
        reclaim.cache.looks.unless_closed()?;
        shared.check_marker(files.step())?;
        // The segment that they were copied to may have been removed: then only these are left.
        let mut relied = reclaim.index.stats();
        relied.retain(|segment| self.relied.contains(&segment.number));
        let there = files.stat(relied.iter().map(|segment| segment.name))?;
        let same = there.into_iter().zip(&relied);
        let same = same.filter_map(|(meta, known)| meta.filter(|meta| meta.len == known.len));
        let times: Vec<i64> = same.map(|meta| meta.mtime_ns).collect();
        if times.len() < self.relied.len() {
            return Ok(());
        }
        self.pass_on_use(reclaim, relied, &times)?;
        let before = shared.space.counts();
        let path = |segment: &SegmentStats| shared.layout.segment(segment.name);
        let paths: Vec<_> = self.segments.iter().map(path).collect();
        let answers = shared.call(files.step(), move |io| io.remove(&paths))?;
        let mut freed = 0;
        for (segment, answer) in self.segments.iter().zip(answers) {
            let Ok(removed) = answer else { continue };
            freed += if removed { segment.len } else { 0 };
            reclaim.index.vanished(segment.number);
            reclaim.uses.forget(segment.number);
        }
        shared.space.deleted(freed, before, false);
        Ok(())
    }

    /// A use of one of these after it was copied is a use of the copy. `times`: those of the
    /// segments relied on.
    fn pass_on_use(
        &self,
        reclaim: &Reclaim,
        relied: Vec<SegmentStats>,
        times: &[i64],
    ) -> Result<()> {
        let names = self.segments.iter().map(|segment| segment.name);
        let now = reclaim.files.stat(names)?.into_iter().flatten();
        let used = now.map(|meta| meta.mtime_ns).max().unwrap_or(i64::MIN);
        let before = self.segments.iter().map(|segment| segment.used_ns).max();
        if before.is_none_or(|before| used <= before) {
            return Ok(());
        }
        let older = relied.into_iter().zip(times);
        let older = older.filter(|(_, time)| **time < used);
        let older: Vec<_> = older.map(|(segment, _)| (segment, used)).collect();
        reclaim.note_used(&older)
    }
}
