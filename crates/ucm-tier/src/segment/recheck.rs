//! Footers of segments that are known are read again, a few at a time.
//!
//! A process that knows a segment reads its records whatever becomes of the footer. A process that
//! starts later has nothing but the footer, and would miss all of the segment's records for as long
//! as another process takes them for stored and does not dump them again. So every process that may
//! dump reads footers past every cache now and then. It forgets a segment whose footer can no
//! longer be used, and the next dumps store its blocks again.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;
use ucm_infra::MonotonicTime;
use ucm_io::ReadMode;
use ucm_quota::layout::SegmentName;

use super::cache::SegmentCache;
use super::files::SegmentFiles;
use super::index::SegmentNumber;
use crate::blobs::{BlobMeta, BlobName};

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
        let (index, shared) = (&cache.index, &cache.blobs.shared);
        let mut chosen = Vec::new();
        for (name, number) in self.choose(cache) {
            if let Some(len) = index.file_len(number) {
                let blob = BlobName { sealed_ns: 0, name };
                let meta = BlobMeta {
                    blob,
                    len,
                    used_ns: 0,
                    inode: 0,
                };
                chosen.push((number, meta));
            }
        }
        let metas: Vec<_> = chosen.iter().map(|(_, meta)| *meta).collect();
        let footers = cache.footers(&metas, ReadMode::FreshDirect, deadline);
        let mut bad = Vec::new();
        for ((number, meta), footer) in chosen.into_iter().zip(footers) {
            // After an error of the medium, or where the segment was removed, the next listing
            // decides.
            if matches!(footer, Ok(Err(_))) {
                index.vanished(number);
                bad.push(shared.layout.segment(meta.blob.name));
            }
        }
        if let Some(first) = bad.first() {
            let (first, count) = (first.display(), bad.len());
            warn!(
                store = shared.config.scope.writer,
                path = %first,
                count,
                "the index in {first} is damaged (one of {count} such segments): others miss its \
                 blocks, so they are stored \
                 again when they are next computed; check the medium"
            );
        }
    }

    /// The next ones in the order of their names, all around; none before it is time.
    fn choose(&self, cache: &SegmentCache<SegmentFiles>) -> Vec<(SegmentName, SegmentNumber)> {
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
        let known: BTreeMap<_, _> = cache.index.public().into_iter().collect();
        let after = before.map_or(Bound::Unbounded, Bound::Excluded);
        let rest = known.range((after, Bound::Unbounded));
        let some: Vec<_> = rest
            .chain(known.iter())
            .take(FOOTERS.min(known.len()))
            .map(|(name, number)| (*name, *number))
            .collect();
        last.1 = some.last().map(|(name, _)| *name);
        some
    }
}
