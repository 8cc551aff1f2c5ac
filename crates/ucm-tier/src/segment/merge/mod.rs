//! Merging of segments, under readers: many small ones become one, and of a segment most of whose records have newer
//! copies only the rest is kept.
//!
//! Nothing that has a name is changed. Records are copied, each judged on its way, into a new segment; the old ones are
//! left to those who still read there for a minute and removed then, and until then they count as used. Whoever dies in
//! between leaves nothing behind: a private file is what dead writers leave in any case, and old segments all of whose
//! records have newer copies are what any merging removes.
//!
//! * [`choose`]: which ones, by size and age; [`claim`]: one merging at a time among all writers of a namespace and part;
//!   [`retire`]: what goes later; [`carry`]: records in use, taken forward before their segment is removed.
//!
//! A copy is never taken for newer than it is: its segment counts as sealed a moment after the youngest of those it was
//! made of, whatever any clock says. So all who see the same segments agree which copy is the newest, and that one is
//! removed by nobody who did not copy it, even where two merge the same segments at once.

mod choose;
mod claim;
mod look;
mod reinsert;
mod retire;

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;
use ucm_quota::layout::SegmentName;

use super::Segments;
use super::copy::{Carried, Copied, CopyOptions, Piece};
use super::index::SegmentNumber;
use super::index::census::{CopyStatus, SegmentStats};
use choose::choose;
use retire::Retiring;

/// Part of the time between two looks after which what is due is done and what is in use is looked after.
const TURNS: u32 = 12;
/// Most segments whose times are asked for in one look.
const MOST_ASKED: usize = 1024;
/// Part of the root's limit that may wait for removal beside what it was merged into, and must be free for a merging.
const SHARE: u64 = 64;
/// Use of the root's limit above which nothing is merged, in percent. With what writers are granted ahead of their use
/// that is where records are removed, and copies shall cost none its place.
const FULL: u64 = 82;

/// What merging goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merging {
    /// Bytes copied in a second at most; 0: nothing is merged or carried forward.
    pub rate: u64,
    /// Time between two looks for segments to merge, and how long a segment must be known before.
    pub look: Duration,
    /// How long segments stay after the one they were merged into has its name.
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

/// What merging did.
#[derive(Default)]
struct Merged {
    /// Segments that were merged into others, or had nothing left of their own.
    segments: AtomicU64,
    /// Records in use that were carried forward.
    carried: AtomicU64,
}

/// What the merging thread remembers.
#[derive(Default)]
pub(crate) struct Merger {
    state: Mutex<State>,
    /// Little is free: segments will be removed for room.
    pub(super) pressed: AtomicBool,
    done: Merged,
}

#[derive(Default)]
struct State {
    looked: Option<MonotonicTime>,
    /// The segments that were known at the last look.
    upto: SegmentNumber,
    /// Those that wait for their removal.
    retiring: Vec<Retiring>,
    /// Those that cannot be merged, as was seen when it was tried.
    unfit: HashSet<SegmentNumber>,
}

/// A segment to merge, with what its footer says.
struct Source {
    census: SegmentStats,
    sealed_ns: u64,
    /// Where its records begin among all pieces, and where they end.
    pieces: std::ops::Range<usize>,
}

impl Segments {
    /// One turn of the merging thread; when to make the next.
    pub(super) fn merge_turn(self: &Arc<Self>, now: MonotonicTime) -> MonotonicTime {
        let merging = self.config.merging;
        let next = now.after((merging.look / TURNS).max(Duration::from_millis(1)));
        if merging.rate == 0 || self.shared.config.lookup_only {
            return MonotonicTime::NEVER;
        }
        let mut state = self.merger.state.lock();
        self.retire_due(&mut state, now);
        self.carry_forward();
        if state.looked.is_some_and(|at| now.since(at) < merging.look) {
            return next;
        }
        // What fails is tried again with the next look.
        while let Ok(true) = self.merge_some(&mut state) {}
        state.looked = Some(now);
        state.upto = self.index.last();
        state.unfit.retain(|number| self.index.has(*number));
        next
    }

    /// Segments that were merged into others, and records in use that were carried forward, so far.
    pub(super) fn merged(&self) -> (u64, u64) {
        let Merged { segments, carried } = &self.merger.done;
        (segments.load(Ordering::Relaxed), carried.load(Ordering::Relaxed))
    }

    /// Bytes that may wait for removal beside their copies.
    fn most_waiting(&self) -> u64 {
        (self.shared.space.usage().capacity / SHARE).max(self.room())
    }

    /// Whether there is room for a copy of a whole segment that costs nobody else's records their place.
    fn has_room_to_merge(&self) -> bool {
        let usage = self.shared.space.usage();
        let full = usage.capacity / 100 * FULL;
        usage.counted && !usage.paused && usage.used.saturating_add(self.room()) <= full
    }

    /// Merges once, if there is anything to merge, it is nobody else's turn, and there is room. Whether it did.
    fn merge_some(self: &Arc<Self>, state: &mut State) -> Result<bool> {
        self.unless_closing()?;
        let waiting: u64 = state.retiring.iter().map(Retiring::bytes).sum();
        if waiting >= self.most_waiting() || !self.has_room_to_merge() {
            return Ok(false);
        }
        if choose(&self.worth_a_look(state), self.room()).is_empty() {
            return Ok(false);
        }
        let merged = self.in_turn(|| {
            let chosen = choose(&self.with_times(self.worth_a_look(state))?, self.room());
            match chosen.is_empty() {
                true => Ok(false),
                false => self.merge(state, chosen).map(|()| true),
            }
        })?;
        Ok(merged.unwrap_or(false))
    }

    /// Segments of this part that are small or sparse and were known at the last look, the youngest use first.
    fn worth_a_look(&self, state: &State) -> Vec<SegmentStats> {
        let waiting: HashSet<SegmentNumber> = state.retiring.iter().flat_map(Retiring::numbers).collect();
        let mut all = self.index.census();
        all.retain(|segment| {
            segment.number <= state.upto
                && segment.part == self.shared.config.part
                && (choose::is_small(segment, self.room()) || segment.is_sparse())
                && !waiting.contains(&segment.number)
                && !state.unfit.contains(&segment.number)
        });
        all.sort_unstable_by_key(|segment| std::cmp::Reverse((segment.used_ns, segment.name)));
        all.truncate(MOST_ASKED);
        all
    }

    /// Copies what is still taken from these segments into one, and has them removed after a while.
    fn merge(&self, state: &mut State, chosen: Vec<SegmentStats>) -> Result<()> {
        let (mut sources, mut pieces, mut relied) = (Vec::new(), Vec::new(), BTreeSet::new());
        for census in chosen {
            match self.pieces_of(&census, &mut relied)? {
                Some((sealed_ns, more)) => {
                    let begin = pieces.len();
                    pieces.extend(more);
                    sources.push(Source {
                        census,
                        sealed_ns,
                        pieces: begin..pieces.len(),
                    });
                }
                None => {
                    state.unfit.insert(census.number);
                }
            }
        }
        if !pieces.is_empty() {
            // The others could not be merged with it.
            if let [only] = &sources[..]
                && !only.census.is_sparse()
            {
                state.unfit.insert(only.census.number);
                return Ok(());
            }
            let segments: Vec<SegmentStats> = sources.iter().map(|source| source.census).collect();
            // As young as the youngest of them now: they were used meanwhile.
            let used = |_, _| {
                let times = self.look_at(&segments)?.into_iter().flatten();
                let known = segments.iter().map(|segment| segment.used_ns);
                Ok(times.map(|meta| meta.mtime_ns).chain(known).max().unwrap_or(0))
            };
            let made = self.copy_pieces(&sources, &pieces, &used)?;
            if made.number.is_none() && made.carried.iter().any(|carried| carried.entry().is_some()) {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    "the merged segment is gone already",
                ));
            }
            relied.extend(made.number);
            self.drop_unfit(state, &mut sources, &made.carried);
        }
        if sources.is_empty() {
            return Ok(());
        }
        let count = sources.len() as u64;
        let sources: Vec<SegmentStats> = sources.into_iter().map(|source| source.census).collect();
        let due = self.shared.clock.now().after(self.config.merging.grace);
        state.retiring.push(Retiring::new(due, sources, relied));
        self.merger.done.segments.fetch_add(count, Ordering::Relaxed);
        Ok(())
    }

    /// The records of a segment that are to be kept, and when it was sealed; `None` when it cannot be merged. Segments that
    /// have newer copies of the others are added to `relied`.
    fn pieces_of(
        &self,
        census: &SegmentStats,
        relied: &mut BTreeSet<SegmentNumber>,
    ) -> Result<Option<(u64, Vec<Piece>)>> {
        self.unless_closing()?;
        let Some(footer) = self.footer_of(census)? else {
            return Ok(None);
        };
        let mut pieces = Vec::new();
        for entry in footer.entries {
            if !self.is_ours(entry.len) {
                return Ok(None); // of another shape: not this writer's to judge
            }
            match self.index.standing(entry.id, census.number, entry.offset) {
                CopyStatus::Taken | CopyStatus::Aside | CopyStatus::Unknown => pieces.push(Piece {
                    from: self.shared.layout.segment(census.name),
                    entry,
                }),
                CopyStatus::Superseded(by) => {
                    relied.insert(by);
                }
                CopyStatus::Twice => {}
            }
        }
        Ok(Some((footer.sealed_ns, pieces)))
    }

    /// Copies these records of these segments at the pace of merging, and tells the index.
    fn copy_pieces(
        &self,
        sources: &[Source],
        pieces: &[Piece],
        used: &dyn Fn(SegmentName, u32) -> Result<i64>,
    ) -> Result<Made> {
        let sealed = sources.iter().map(|source| source.sealed_ns).max().unwrap_or(0);
        let begun = self.shared.clock.now();
        let copied = AtomicU64::new(0);
        let manner = CopyOptions {
            sealed_ns: Some(sealed.saturating_add(1)),
            used,
            pace: &|bytes| self.pace(begun, copied.fetch_add(bytes, Ordering::Relaxed) + bytes),
            needed: false,
            until: MonotonicTime::NEVER,
        };
        let known: Vec<bool> = pieces
            .iter()
            .map(|piece| self.index.find(piece.entry.id).is_some())
            .collect();
        let from = |at: usize| {
            let source = sources.iter().find(|source| source.pieces.contains(&at));
            source.map_or(0, |source| source.census.number)
        };
        let hot: Vec<bool> = (0..pieces.len())
            .map(|at| self.heat.is_hot(from(at), pieces[at].entry.offset))
            .collect();
        let copied = self.copy(pieces, &manner)?;
        Ok(self.take_up(copied, &known, &hot))
    }

    /// Tells the index of a segment made of copies: of those records that it knew, for the others were dropped here.
    fn take_up(&self, copied: Copied, known: &[bool], hot: &[bool]) -> Made {
        let Copied { known: made, carried } = copied;
        let number = made.and_then(|made| self.index.begin(made));
        if let Some(number) = number {
            let some = carried.iter().zip(known).filter(|(_, known)| **known);
            let entries: Vec<_> = some.filter_map(|(carried, _)| carried.entry()).collect();
            self.index.add(number, &entries);
            let some = carried.iter().zip(hot).filter(|(_, hot)| **hot);
            for entry in some.filter_map(|(carried, _)| carried.entry()) {
                self.heat.note(number, entry.offset);
            }
        }
        // The finder may have been faster.
        let number = number.or_else(|| made.and_then(|made| self.index.number_of(made.name)));
        Made { number, carried }
    }

    /// Takes out the segments that stay, for a record of theirs was not carried: it is damaged, as far as can be seen, or not
    /// for this writer to judge. They go by their age.
    fn drop_unfit(&self, state: &mut State, sources: &mut Vec<Source>, carried: &[Carried]) {
        sources.retain(|source| {
            let records = &carried[source.pieces.clone()];
            let unfit = records
                .iter()
                .any(|carried| matches!(carried, Carried::Unsound(_)));
            if unfit {
                state.unfit.insert(source.census.number);
            }
            !unfit
        });
    }

    /// Waits until so many bytes may have been copied since `begun`; an error when the store closes or room runs out.
    fn pace(&self, begun: MonotonicTime, bytes: u64) -> Result<()> {
        let span = u128::from(bytes) * 1_000_000_000 / u128::from(self.config.merging.rate.max(1));
        let until = begun.after(Duration::from_nanos(u64::try_from(span).unwrap_or(u64::MAX)));
        loop {
            let seen = self.merge_notify.seen();
            self.unless_closing()?;
            if self.shared.space.usage().paused {
                let text = "the medium is short of room; nothing is merged now";
                return Err(Error::new(ErrorKind::Busy, text));
            }
            if self.shared.clock.now() >= until {
                return Ok(());
            }
            self.shared.clock.sleep(&self.merge_notify, seen, Some(until));
        }
    }
}

/// A segment made of copies, as the index knows it.
struct Made {
    number: Option<SegmentNumber>,
    carried: Vec<Carried>,
}
