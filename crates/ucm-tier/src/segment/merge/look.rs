//! What merging asks of the file system before it does anything: is the root ours, when were segments used, what is in one.

use ucm_core::{PAGE, Result, round_up};
use ucm_io::{FileMeta, ReadMode};

use crate::segment::Segments;
use crate::segment::discovery::{Footer, TAIL};
use crate::segment::index::census::SegmentStats;

impl Segments {
    /// The same with the times that the file system has: others use them too.
    pub(super) fn with_times(&self, mut segments: Vec<SegmentStats>) -> Result<Vec<SegmentStats>> {
        let metas = self.look_at(&segments)?;
        let mut metas = metas.into_iter();
        segments.retain_mut(|segment| {
            let Some(meta) = metas.next().flatten() else {
                return false; // gone
            };
            segment.used_ns = meta.mtime_ns;
            self.index.used(segment.number, meta.mtime_ns);
            true
        });
        Ok(segments)
    }

    pub(super) fn look_at(&self, segments: &[SegmentStats]) -> Result<Vec<Option<FileMeta>>> {
        let path = |segment: &SegmentStats| self.shared.layout.segment(segment.name);
        let paths: Vec<_> = segments.iter().map(path).collect();
        self.shared.call(self.step(), move |io| io.stat(&paths, false))
    }

    /// Bytes of a record of this writer in a segment.
    pub(super) fn record_pages(&self) -> u64 {
        round_up(self.shared.config.record.record_len() as u64, PAGE)
    }

    /// The footer of a segment; `None` when it is gone or cannot be used.
    pub(super) fn footer_of(&self, census: &SegmentStats) -> Result<Option<Footer>> {
        let path = self.shared.layout.segment(census.name);
        let len = census.len.min(TAIL);
        let Some(tail) = self.read_piece(
            path,
            census.len - len,
            len as usize,
            ReadMode::Default,
            self.step(),
        )?
        else {
            return Ok(None);
        };
        Ok(self.footer(census.name, &tail, census.len, self.step())?.ok())
    }
}
