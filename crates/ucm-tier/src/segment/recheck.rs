//! Footers of segments that are known are read again, a few at a time.
//!
//! Who knows a segment knows its records by heart: it reads on, whatever becomes of the footer. Who
//! comes later has nothing but the footer, and would miss all of the segment's records for as long
//! as somebody else takes them for stored and dumps none of them again. So every process that may
//! dump looks, past every cache, whether a newcomer would find what it knows itself; a segment
//! whose footer says no more what is in it is forgotten here too, and the next dumps store its
//! blocks anew.

use std::ops::Bound;
use std::time::Duration;

use tracing::warn;
use ucm_infra::MonotonicTime;
use ucm_io::ReadMode;
use ucm_quota::layout::SegmentName;

use super::Segments;
use super::footer::TAIL;
use super::index::SegmentNumber;

/// Time between two looks, and footers that are read in each: about a MiB a minute at most.
const AGAIN: Duration = Duration::from_secs(30);
const FOOTERS: usize = 16;

/// Which footers were last read again, and when.
#[derive(Default)]
pub(crate) struct Rechecked {
    at: Option<MonotonicTime>,
    last: Option<SegmentName>,
}

impl Segments {
    /// Reads some footers again if it is time to, and forgets segments of which no one could read
    /// them now.
    pub(super) fn recheck_footers(&self, deadline: MonotonicTime) {
        let chosen = self.footers_to_recheck();
        let reads: Vec<_> = chosen
            .into_iter()
            .filter_map(|(name, number)| {
                let file_len = self.index.file_len(number)?;
                let len = file_len.min(TAIL);
                let read =
                    self.begin_read(name, file_len - len, len, ReadMode::FreshDirect, deadline);
                Some((name, number, read))
            })
            .collect();
        let mut bad = Vec::new();
        for (name, number, read) in reads {
            let found = read
                .wait()
                .and_then(|(tail, file_len)| self.footer(name, &tail, file_len, deadline));
            // An error is the medium's, or the segment was removed: the next listing tells.
            if matches!(found, Ok(Err(_))) {
                self.index.vanished(number);
                bad.push(self.shared.layout.segment(name));
            }
        }
        if let Some(first) = bad.first() {
            let (first, count) = (first.display(), bad.len());
            warn!(
                store = self.shared.config.writer,
                path = %first,
                count,
                "the index in {first} is damaged (one of {count} such segments): others miss its \
                 blocks, so they are stored \
                 again when they are next computed; check the medium"
            );
        }
    }

    /// The next ones in the order of their names, all around; none before it is time, and none
    /// where no one dumps.
    fn footers_to_recheck(&self) -> Vec<(SegmentName, SegmentNumber)> {
        let now = self.shared.clock.now();
        let mut rechecked = self.discovery.rechecked.lock();
        let due = rechecked.at.is_some_and(|at| now.since(at) >= AGAIN);
        if due || rechecked.at.is_none() {
            rechecked.at = Some(now);
        }
        if !due || self.shared.config.lookup_only {
            return Vec::new();
        }
        let known: std::collections::BTreeMap<_, _> = self.index.public().into_iter().collect();
        let after = rechecked.last.map_or(Bound::Unbounded, Bound::Excluded);
        let rest = known.range((after, Bound::Unbounded));
        let some: Vec<_> = rest
            .chain(known.iter())
            .take(FOOTERS.min(known.len()))
            .map(|(name, number)| (*name, *number))
            .collect();
        rechecked.last = some.last().map(|(name, _)| *name);
        some
    }
}
