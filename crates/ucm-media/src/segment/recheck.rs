//! Footers of segments that are known are read again, a few at a time.
//!
//! A process that knows a segment reads its records whatever becomes of the footer. A process that
//! starts later has nothing but the footer, and would miss all of the segment's records for as long
//! as another process takes them for stored and does not dump them again. So every process that may
//! dump reads footers past every cache now and then. It forgets a segment whose footer can no
//! longer be used, and the next dumps store its blocks again.

use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_infra::MonotonicTime;
use ucm_io::ReadMode;

use super::cache::SegmentCache;
use super::files::SegmentFiles;
use super::index::stats::SegmentStats;
use crate::layout::SegmentName;

/// Time between two turns, and footers that are read in each: about a MiB a minute at most.
const AGAIN: Duration = Duration::from_secs(30);
const FOOTERS: usize = 16;

/// See the module.
#[derive(Default)]
pub(crate) struct Recheck {
    /// When the last turn was, and the last segment of it.
    last: Mutex<(Option<MonotonicTime>, Option<SegmentName>)>,
}

impl Recheck {
    /// Reads some footers again if it is time to, and forgets segments whose footers cannot be used
    /// any more.
    pub(super) fn turn(&self, cache: &SegmentCache<SegmentFiles>, deadline: MonotonicTime) {
        let shared = &cache.blobs.shared;
        let chosen = self.choose(cache);
        let files: Vec<_> = chosen.iter().map(SegmentStats::file).collect();
        let footers = cache.footers(&files, ReadMode::FreshDirect, deadline);
        let mut bad = Vec::new();
        for (segment, footer) in chosen.into_iter().zip(footers) {
            // After an error of the medium, or where the segment was removed, the next listing
            // decides.
            if matches!(footer, Ok(Err(_))) {
                cache.index.vanished(segment.number);
                bad.push(shared.layout.segment(segment.name));
            }
        }
        if let Some(first) = bad.first() {
            let (first, count) = (first.display(), bad.len());
            warn!(
                store = shared.config.scope.writer,
                path = %first,
                count,
                "the index in {first} is damaged (one of {count} such segments): others miss its \
                 blocks, so they are stored again when they are next computed; check the medium"
            );
        }
    }

    /// The next ones in the order of their names, all around; none before it is time.
    fn choose(&self, cache: &SegmentCache<SegmentFiles>) -> Vec<SegmentStats> {
        let now = cache.blobs.shared.clock.now();
        let mut last = self.last.lock();
        let (at, before) = *last;
        let due = at.is_some_and(|at| now.since(at) >= AGAIN);
        if due || at.is_none() {
            last.0 = Some(now);
        }
        if !due {
            return Vec::new();
        }
        let mut known = cache.index.stats();
        known.sort_unstable_by_key(|segment| segment.name);
        let next = known.partition_point(|segment| Some(segment.name) <= before);
        known.rotate_left(next);
        known.truncate(FOOTERS);
        last.1 = known.last().map(|segment| segment.name);
        known
    }
}
