//! Reclaiming, under readers: a segment is removed after its records that are still in use were
//! appended to another one.
//!
//! * [`gather`]: many small segments become one, and of a segment most of whose records have newer
//!   copies only the rest is kept ([`choose`]: which ones, by size and age).
//! * [`relieve`]: while room is short, records in use ([`uses`]) outlive a segment that is about to
//!   be removed for its age.
//! * [`claim`]: one of all writers of a namespace and part at a time; [`reinsert`]: the new
//!   segment; [`retire`]: the old ones, a minute later.
//!
//! Nothing that has a name is changed. The old segments stay for readers for a while, and count as
//! used until then. A process that dies in between does no harm: its private file is recovered like
//! that of any dead writer, and old segments all of whose records have newer copies are removed by
//! any later gathering.
//!
//! A copy is never taken for newer than it is: its segment counts as sealed a moment after the
//! youngest of its sources, whatever the clock is. So all processes that see the same segments
//! agree which copy is the newest, and only a process that copied it removes it, even where two
//! gather the same segments at once.

mod choose;
mod claim;
mod gather;
pub(super) mod reinsert;
mod relieve;
mod retire;
pub(super) mod uses;

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::ReadMode;

use super::cache::SegmentCache;
use super::discovery::SegmentDiscovery;
use super::files::SegmentFiles;
use super::footer::Footer;
use super::format::Entry;
use super::index::stats::SegmentStats;
use super::index::{Index, SegmentNumber};
use crate::lengths::Lengths;
use crate::shared::Shared;
use reinsert::{Piece, Reinserted, Reinsertion};
use uses::Uses;

/// How segments are reclaimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merging {
    /// Most bytes copied in a second; 0: nothing is.
    pub rate: u64,
    /// Time between two searches for segments to gather, and how long a segment must be known
    /// before.
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

/// Reclaims segments of one writer's part.
pub(super) struct Reclaim {
    cache: Arc<SegmentCache<SegmentFiles>>,
    files: Arc<SegmentFiles>,
    index: Arc<Index>,
    lengths: Arc<Lengths>,
    shared: Arc<Shared>,
    discovery: Arc<SegmentDiscovery>,
    config: Merging,
    state: Mutex<State>,
    pub(super) uses: Uses,
    /// Notified when the thread is to end.
    pub(super) notify: Notify,
    /// Segments that were gathered into others, or had nothing left of their own.
    pub(super) gathered: AtomicU64,
    /// Records in use that outlived their segment.
    pub(super) reinserted: AtomicU64,
}

/// The state of its thread.
#[derive(Default)]
struct State {
    looked: Option<MonotonicTime>,
    /// The last segment that was known at the last search.
    upto: SegmentNumber,
    /// Those that wait for their removal.
    retiring: Vec<Retiring>,
    /// Those that could not be gathered when it was tried.
    unfit: HashSet<SegmentNumber>,
}

/// Segments that are removed together.
struct Retiring {
    due: MonotonicTime,
    segments: Vec<SegmentStats>,
    /// Segments that have their records now: where one of these is missing, none is removed.
    relied: BTreeSet<SegmentNumber>,
}

impl State {
    /// Segments that wait for their removal.
    fn waiting(&self) -> impl Iterator<Item = &SegmentStats> {
        self.retiring.iter().flat_map(|retiring| &retiring.segments)
    }
}

/// Segments that are to be removed, and their records that are appended again.
#[derive(Default)]
struct Sources {
    segments: Vec<SegmentStats>,
    pieces: Vec<Piece>,
    /// When the youngest of them was sealed.
    sealed_ns: u64,
}

impl Reclaim {
    pub(super) fn new(
        cache: &Arc<SegmentCache<SegmentFiles>>,
        discovery: &Arc<SegmentDiscovery>,
        config: Merging,
    ) -> Self {
        Self {
            cache: Arc::clone(cache),
            files: Arc::clone(&cache.blobs),
            index: Arc::clone(&cache.index),
            lengths: Arc::clone(&cache.lengths),
            shared: Arc::clone(&cache.blobs.shared),
            discovery: Arc::clone(discovery),
            config,
            state: Mutex::default(),
            uses: Uses::default(),
            notify: Notify::new(),
            gathered: AtomicU64::new(0),
            reinserted: AtomicU64::new(0),
        }
    }

    /// Adds a segment to those that are removed. `keep`: whether a record can be found when it is
    /// appended again; none: it is not.
    fn add_source(
        &self,
        sources: &mut Sources,
        stats: SegmentStats,
        footer: Footer,
        mut keep: impl FnMut(&Entry) -> Option<bool>,
    ) {
        let path = self.shared.layout.segment(stats.name);
        for entry in footer.entries {
            if let Some(found) = keep(&entry) {
                let (from, source) = (path.clone(), Some(stats.number));
                sources.pieces.push(Piece {
                    from,
                    entry,
                    source,
                    found,
                });
            }
        }
        sources.sealed_ns = sources.sealed_ns.max(footer.sealed_ns);
        sources.segments.push(stats);
    }

    /// Appends the records that are kept again. `as_young_as`: as of [`Reinsertion`].
    fn append_again(&self, sources: &Sources, as_young_as: &[SegmentStats]) -> Result<Reinserted> {
        let begun = self.shared.clock.now();
        let reinsertion = Reinsertion {
            cache: &self.cache,
            uses: &self.uses,
            sealed_ns: Some(sources.sealed_ns.saturating_add(1)),
            as_young_as,
            pace: &|bytes| self.pace(begun, bytes),
            needed: false,
            until: MonotonicTime::NEVER,
        };
        reinsertion.append(&sources.pieces)
    }

    /// Waits until `bytes` may have been copied since `begun`; an error when the store closes or
    /// room runs out.
    fn pace(&self, begun: MonotonicTime, bytes: u64) -> Result<()> {
        let span = u128::from(bytes) * 1_000_000_000 / u128::from(self.config.rate.max(1));
        let span = Duration::from_nanos(u64::try_from(span).unwrap_or(u64::MAX));
        let until = begun.after(span);
        loop {
            let seen = self.notify.seen();
            self.cache.looks.unless_closed()?;
            if self.shared.space.usage().paused {
                let text = "the medium is short of room; nothing is copied now";
                return Err(Error::new(ErrorKind::Busy, text));
            }
            if self.shared.clock.now() >= until {
                return Ok(());
            }
            self.shared.clock.sleep(&self.notify, seen, Some(until));
        }
    }

    /// The same with the times of the file system, which other processes set too.
    fn with_times(&self, mut segments: Vec<SegmentStats>) -> Result<Vec<SegmentStats>> {
        let names = segments.iter().map(|segment| segment.name);
        let mut metas = self.files.stat(names)?.into_iter();
        segments.retain_mut(|segment| {
            let Some(meta) = metas.next().flatten() else {
                return false; // removed since
            };
            segment.used_ns = meta.mtime_ns;
            self.index.used(segment.number, meta.mtime_ns);
            true
        });
        Ok(segments)
    }

    /// Sets the times of use of these segments.
    fn note_used(&self, used: &[(SegmentStats, i64)]) -> Result<()> {
        if used.is_empty() {
            return Ok(());
        }
        let file = |(segment, time): &(SegmentStats, i64)| {
            self.index.used(segment.number, *time);
            (self.shared.layout.segment(segment.name), *time)
        };
        let files: Vec<_> = used.iter().map(file).collect();
        self.shared
            .call(self.files.step(), move |io| io.touch(&files).map(|_| ()))
    }

    /// The footer of a segment; `None` when it was removed or cannot be used.
    fn footer_of(&self, segment: &SegmentStats) -> Result<Option<Footer>> {
        let (file, step) = ([segment.file()], self.files.step());
        match self.cache.footers(&file, ReadMode::Default, step).pop() {
            Some(Ok(footer)) => Ok(footer.ok()),
            Some(Err(error)) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(None),
        }
    }
}
