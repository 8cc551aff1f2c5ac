//! Reclaiming, under readers: a segment goes, and what of it is still wanted is appended again
//! before.
//!
//! * [`gather`]: many small segments become one, and of a segment most of whose records have newer
//!   copies only the rest is kept ([`choose`]: which ones, by size and age).
//! * [`relieve`]: while room is short, records in use ([`uses`]) outlive the segment that is next
//!   to go for its age.
//! * [`claim`]: one of all writers of a namespace and part at a time; [`reinsert`]: the new
//!   segment; [`retire`]: the old ones, a minute later.
//!
//! Nothing that has a name is changed. The old segments are left to those who still read there, and
//! until they go they count as used. A process that dies in between leaves nothing behind: a
//! private file is what dead writers leave in any case, and old segments all of whose records have
//! newer copies are what any gathering removes.
//!
//! A copy is never taken for newer than it is: its segment counts as sealed a moment after the
//! youngest of those it was made of, whatever any clock says. So all who see the same segments
//! agree which copy is the newest, and that one is removed by no one who did not copy it, even
//! where two gather the same segments at once.

mod choose;
mod claim;
mod gather;
pub(super) mod reinsert;
mod relieve;
mod retire;
mod uses;

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::{FileMeta, ReadMode};

use super::Segments;
use super::footer::{Footer, TAIL};
use super::format::Entry;
use super::index::SegmentNumber;
use super::index::stats::SegmentStats;
use reinsert::{Piece, Reinserted, Reinsertion};
use retire::Retiring;
use uses::Uses;

/// Part of the time between two looks after which what is due is done and what is in use is looked
/// after.
const TURNS: u32 = 12;

/// What reclaiming goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merging {
    /// Bytes copied in a second at most; 0: nothing is.
    pub rate: u64,
    /// Time between two looks for segments to gather, and how long a segment must be known before.
    pub look: Duration,
    /// How long segments stay after the one they were gathered into has its name.
    pub grace: Duration,
}

impl Default for Merging {
    fn default() -> Self {
        Self {
            rate: 32 << 20,
            look: Duration::from_secs(60),
            grace: Duration::from_secs(60),
        }
    }
}

/// What reclaiming remembers.
#[derive(Default)]
pub(super) struct Reclaim {
    state: Mutex<State>,
    pub(super) uses: Uses,
    /// Rung when it is to end.
    pub(super) notify: Notify,
    /// Segments that were gathered into others, or had nothing left of their own.
    pub(super) gathered: AtomicU64,
    /// Records in use that outlived their segment.
    pub(super) reinserted: AtomicU64,
}

/// What only its thread knows.
#[derive(Default)]
struct State {
    looked: Option<MonotonicTime>,
    /// The segments that were known at the last look.
    upto: SegmentNumber,
    /// Those that wait for their removal.
    retiring: Vec<Retiring>,
    /// Those that cannot be gathered, as was seen when it was tried.
    unfit: HashSet<SegmentNumber>,
}

impl State {
    /// Segments that wait for their removal.
    fn waiting(&self) -> impl Iterator<Item = &SegmentStats> {
        self.retiring.iter().flat_map(|retiring| &retiring.segments)
    }
}

/// Segments that go, and what of them is appended again.
#[derive(Default)]
struct Sources {
    segments: Vec<SegmentStats>,
    pieces: Vec<Piece>,
    /// When the youngest of them was sealed.
    sealed_ns: u64,
}

impl Segments {
    /// One turn of the thread that reclaims; when to make the next.
    pub(super) fn reclaim_turn(&self, now: MonotonicTime) -> MonotonicTime {
        let merging = self.config.merging;
        if merging.rate == 0 || self.shared.config.lookup_only {
            return MonotonicTime::NEVER;
        }
        let mut state = self.reclaim.state.lock();
        self.retire_due(&mut state, now);
        self.relieve();
        if state.looked.is_none_or(|at| now.since(at) >= merging.look) {
            // What fails is tried again with the next look.
            while let Ok(true) = self.gather(&mut state) {}
            state.looked = Some(now);
            state.upto = self.index.last();
            state
                .unfit
                .retain(|number| self.index.file_len(*number).is_some());
        }
        now.after((merging.look / TURNS).max(Duration::from_millis(1)))
    }

    /// Adds a segment to those that go. `keep`: whether a record of it is appended again, and can
    /// be found then.
    fn add_source(
        &self,
        sources: &mut Sources,
        stats: SegmentStats,
        footer: Footer,
        mut keep: impl FnMut(&Entry) -> Option<bool>,
    ) {
        let path = self.shared.layout.segment(stats.name);
        let piece = |entry: Entry| {
            Some(Piece {
                from: path.clone(),
                entry,
                source: Some(stats.number),
                found: keep(&entry)?,
            })
        };
        sources
            .pieces
            .extend(footer.entries.into_iter().filter_map(piece));
        sources.sealed_ns = sources.sealed_ns.max(footer.sealed_ns);
        sources.segments.push(stats);
    }

    /// Appends what is kept of these segments again. `as_young_as`: as of [`Reinsertion`].
    fn append_again(&self, sources: &Sources, as_young_as: &[SegmentStats]) -> Result<Reinserted> {
        let begun = self.shared.clock.now();
        let reinsertion = Reinsertion {
            segments: self,
            sealed_ns: Some(sources.sealed_ns.saturating_add(1)),
            as_young_as,
            pace: &|bytes| self.pace(begun, bytes),
            needed: false,
            until: MonotonicTime::NEVER,
        };
        reinsertion.append(&sources.pieces)
    }

    /// Waits until so many bytes may have been copied since `begun`; an error when the store closes
    /// or room runs out.
    fn pace(&self, begun: MonotonicTime, bytes: u64) -> Result<()> {
        let span = u128::from(bytes) * 1_000_000_000 / u128::from(self.config.merging.rate.max(1));
        let until = begun.after(Duration::from_nanos(
            u64::try_from(span).unwrap_or(u64::MAX),
        ));
        loop {
            let seen = self.reclaim.notify.seen();
            self.unless_closing()?;
            if self.shared.space.usage().paused {
                let text = "the medium is short of room; nothing is copied now";
                return Err(Error::new(ErrorKind::Busy, text));
            }
            if self.shared.clock.now() >= until {
                return Ok(());
            }
            self.shared
                .clock
                .sleep(&self.reclaim.notify, seen, Some(until));
        }
    }

    /// The same with the times that the file system has: others use them too.
    fn with_times(&self, mut segments: Vec<SegmentStats>) -> Result<Vec<SegmentStats>> {
        let mut metas = self.look_at(&segments)?.into_iter();
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

    fn look_at(&self, segments: &[SegmentStats]) -> Result<Vec<Option<FileMeta>>> {
        let path = |segment: &SegmentStats| self.shared.layout.segment(segment.name);
        let paths: Vec<_> = segments.iter().map(path).collect();
        self.shared
            .call(self.step(), move |io| io.stat(&paths, false))
    }

    /// Has these segments count as used at these times.
    fn tell_used(&self, used: &[(SegmentStats, i64)]) -> Result<()> {
        if used.is_empty() {
            return Ok(());
        }
        let file = |(segment, time): &(SegmentStats, i64)| {
            self.index.used(segment.number, *time);
            (self.shared.layout.segment(segment.name), *time)
        };
        let files: Vec<_> = used.iter().map(file).collect();
        self.shared
            .call(self.step(), move |io| io.touch(&files).map(|_| ()))
    }

    /// The footer of a segment; `None` when it is gone or cannot be used.
    fn footer_of(&self, segment: &SegmentStats) -> Result<Option<Footer>> {
        let (path, len) = (
            self.shared.layout.segment(segment.name),
            segment.len.min(TAIL),
        );
        let (mode, step) = (ReadMode::Default, self.step());
        let Some(tail) = self.read_piece(path, segment.len - len, len as usize, mode, step)? else {
            return Ok(None);
        };
        Ok(self
            .footer(segment.name, &tail, segment.len, self.step())?
            .ok())
    }
}
