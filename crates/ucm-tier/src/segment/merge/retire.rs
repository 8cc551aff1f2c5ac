//! Segments that wait for their removal after they were merged: readers that found them before still read there.

use std::collections::BTreeSet;

use ucm_core::Result;
use ucm_infra::MonotonicTime;
use ucm_io::FileMeta;

use super::State;
use crate::segment::Segments;
use crate::segment::index::SegmentNumber;
use crate::segment::index::census::SegmentStats;

/// Segments that go together.
pub(super) struct Retiring {
    due: MonotonicTime,
    segments: Vec<SegmentStats>,
    /// Segments that have what these had, all of them: while one of them is gone, these stay.
    relied: BTreeSet<SegmentNumber>,
}

impl Retiring {
    pub(super) fn new(
        due: MonotonicTime,
        segments: Vec<SegmentStats>,
        relied: BTreeSet<SegmentNumber>,
    ) -> Self {
        Self {
            due,
            segments,
            relied,
        }
    }

    /// What they take up.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = SegmentNumber> {
        self.segments.iter().map(|segment| segment.number)
    }
}

impl Segments {
    /// Removes those whose time has come. What cannot be removed is found again by a later look: nothing of it is needed.
    pub(super) fn retire_due(&self, state: &mut State, now: MonotonicTime) {
        let due = |retiring: &Retiring| retiring.due <= now;
        let all = std::mem::take(&mut state.retiring);
        let (due, wait) = all.into_iter().partition(due);
        state.retiring = wait;
        let due: Vec<Retiring> = due;
        for retiring in due {
            let _ = self.retire(&retiring);
        }
    }

    fn retire(&self, retiring: &Retiring) -> Result<()> {
        self.unless_closing()?;
        // Somebody may have removed what the others were copied to: then these are all there is.
        let mut relied = self.index.census();
        relied.retain(|segment| retiring.relied.contains(&segment.number));
        if relied.len() < retiring.relied.len() {
            return Ok(());
        }
        self.shared.check_marker(self.step())?;
        let there = self.look_at(&relied)?;
        let whole = |(meta, known): &(Option<FileMeta>, &SegmentStats)| {
            meta.is_some_and(|meta| meta.len == known.len)
        };
        let there: Vec<_> = there.into_iter().zip(&relied).filter(whole).collect();
        if there.len() < relied.len() {
            return Ok(());
        }
        let times: Vec<i64> = there
            .iter()
            .filter_map(|(meta, _)| Some((*meta)?.mtime_ns))
            .collect();
        self.pass_on_use(retiring, &relied, &times)?;
        let before = self.shared.space.counts();
        let path = |segment: &SegmentStats| self.shared.layout.segment(segment.name);
        let paths: Vec<_> = retiring.segments.iter().map(path).collect();
        let answers = self.shared.call(self.step(), move |io| io.remove(&paths))?;
        let mut freed = 0;
        for (segment, answer) in retiring.segments.iter().zip(answers) {
            match answer {
                Ok(true) => freed += segment.len,
                Ok(false) => {}
                Err(_) => continue,
            }
            self.index.vanished(segment.number);
            self.heat.forget(segment.number);
        }
        self.shared.space.deleted(freed, before);
        Ok(())
    }

    /// Who used one of these after it was copied meant the copy. `times`: those of the segments relied on.
    fn pass_on_use(&self, retiring: &Retiring, relied: &[SegmentStats], times: &[i64]) -> Result<()> {
        let now = self.look_at(&retiring.segments)?.into_iter().flatten();
        let used = now.map(|meta| meta.mtime_ns).max().unwrap_or(i64::MIN);
        let before = retiring.segments.iter().map(|segment| segment.used_ns).max();
        if before.is_none_or(|before| used <= before) {
            return Ok(());
        }
        let older = relied.iter().zip(times).filter(|(_, time)| **time < used);
        let mut files = Vec::new();
        for (segment, _) in older {
            self.index.used(segment.number, used);
            files.push((self.shared.layout.segment(segment.name), used));
        }
        if files.is_empty() {
            return Ok(());
        }
        self.shared
            .call(self.step(), move |io| io.touch(&files).map(|_| ()))
    }
}
