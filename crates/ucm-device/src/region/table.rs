//! Lock-free search and copy of a region's records, for readers and the writer.

use std::ops::Range;
use std::sync::atomic::Ordering;

use ucm_core::BlockId;
use ucm_infra::seqlock::{self, AtomicU64};

use super::shape::{ENTRY, MOVES, Shape, WORD, halves, whole};

/// Attempts of a search or copy that overlaps with a write.
const AGAIN: usize = 4;

/// Most buckets of a search in another process's region. In an index at most half full, as ours
/// are, a name lies further away once in 10^12 regions of 2^30 slots. In a full index a search
/// would read all of it.
pub(crate) const MOST_PROBES: usize = 256;

/// A found record, as of a moment ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) id: BlockId,
    pub(crate) slot: usize,
    pub(crate) len: usize,
    pub(crate) ordinal: u32,
    generation: u64,
}

/// The words of a region with its sizes. No content of the words makes this read past them or
/// panic.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a> {
    pub(crate) words: &'a [AtomicU64],
    pub(crate) shape: &'a Shape,
    /// Most buckets of a search.
    pub(crate) probes: usize,
}

/// One word of a slot's entry.
pub(crate) enum Field {
    Generation,
    Low,
    High,
    /// Length, and the ordinal above it.
    Size,
}

impl<'a> Table<'a> {
    pub(crate) fn entry(&self, slot: usize) -> Option<&'a [AtomicU64; ENTRY]> {
        if slot >= self.shape.slots {
            return None;
        }
        self.words.get(self.shape.entry(slot))?.first_chunk()
    }

    pub(crate) fn bucket(&self, bucket: usize) -> Option<&'a AtomicU64> {
        self.words.get(self.shape.index() + bucket)
    }

    pub(crate) fn record(&self, slot: usize) -> Option<&'a [AtomicU64]> {
        if slot >= self.shape.slots {
            return None;
        }
        self.words.get(self.shape.record(slot))
    }

    /// The buckets of an id in search order, with the bits of its index word.
    pub(crate) fn search(&self, id: BlockId) -> (impl Iterator<Item = usize> + use<>, u64) {
        let (first, tag) = self.shape.place(id);
        let buckets = self.shape.buckets;
        (
            (0..buckets.min(self.probes)).map(move |step| (first + step) & (buckets - 1)),
            tag,
        )
    }

    /// The record of an id, if it exists now.
    pub(crate) fn find(&self, id: BlockId) -> Option<Found> {
        let moves = self.moves()?;
        for _ in 0..AGAIN {
            let before = seqlock::enter(moves);
            if let Some(found) = self.find_once(id) {
                return Some(found);
            }
            // Not found; while index words were being moved, it may have been missed.
            if before.is_some_and(|before| seqlock::unchanged(moves, before)) {
                return None;
            }
        }
        None
    }

    fn find_once(&self, id: BlockId) -> Option<Found> {
        let (buckets, tag) = self.search(id);
        for bucket in buckets {
            let word = self.bucket(bucket)?.load(Ordering::Acquire);
            if word == 0 {
                return None;
            }
            if word >> 32 << 32 == tag
                && let Some(found) = self.look(word).filter(|found| found.id == id)
            {
                return Some(found);
            }
        }
        None
    }

    /// The generation of the index: odd while words are being moved.
    fn moves(&self) -> Option<&'a AtomicU64> {
        self.words.get(MOVES)
    }

    /// The record in the slot of an index word, if it is complete.
    fn look(&self, word: u64) -> Option<Found> {
        let slot = slot_of(word)?;
        let entry = self.entry(slot)?;
        let generation = seqlock::enter(&entry[Field::Generation as usize])?;
        let field = |field: Field| entry[field as usize].load(Ordering::Relaxed);
        let (id, size) = (
            whole([field(Field::Low), field(Field::High)]),
            field(Field::Size),
        );
        let len = usize::try_from(size & u64::from(u32::MAX)).ok()?;
        let found = Found {
            id,
            slot,
            len,
            ordinal: (size >> 32) as u32,
            generation,
        };
        let whole = seqlock::unchanged(&entry[Field::Generation as usize], generation);
        (whole && len <= self.shape.record_len).then_some(found)
    }

    /// Copies parts of a record, up to its end, each to its offset in the record. Returns the
    /// record's length, or `None` if it does not exist, was removed during the copy, or `out` is
    /// too short. Parts begin at words. All bytes are of one record of the writer, and their
    /// checksums must be verified.
    pub(crate) fn copy_parts(
        &self,
        id: BlockId,
        parts: &[Range<usize>],
        out: &mut [u8],
    ) -> Option<usize> {
        for _ in 0..AGAIN {
            let found = self.find(id)?;
            let (entry, words) = (self.entry(found.slot)?, self.record(found.slot)?);
            for part in parts {
                let part = part.start..part.end.min(found.len);
                if !part.is_empty() {
                    let from = words.get(part.start / WORD..)?;
                    seqlock::copy(from, out.get_mut(part)?);
                }
            }
            if seqlock::unchanged(&entry[Field::Generation as usize], found.generation) {
                return Some(found.len);
            }
        }
        None
    }

    /// Every named record; one whose index word is being moved may appear twice or not at all.
    pub(crate) fn iter(self) -> impl Iterator<Item = Found> + use<'a> {
        let buckets = 0..self.shape.buckets;
        buckets.filter_map(move |bucket| self.look(self.bucket(bucket)?.load(Ordering::Acquire)))
    }

    /// Enters a slot in the index, in place of slot `instead` if that had the name. Writer only.
    pub(crate) fn name(&self, id: BlockId, slot: usize, instead: Option<usize>) {
        let (buckets, tag) = self.search(id);
        let old = instead.map_or(0, |old| index_word(tag, old));
        let mut words = buckets.filter_map(|bucket| self.bucket(bucket));
        if let Some(word) = words.find(|word| word.load(Ordering::Relaxed) == old) {
            word.store(index_word(tag, slot), Ordering::Release);
        }
    }

    /// Removes a slot from the index. Writer only.
    ///
    /// There are no tombstones: words that a search would no longer reach are moved up, so searches
    /// stay as short as if the name had never existed. A word is stored in its new place before its
    /// old one is reused, and the generation of the index makes readers search again.
    pub(crate) fn unname(&self, id: BlockId, slot: usize) {
        let (mut buckets, tag) = self.search(id);
        let load = |bucket: usize| {
            self.bucket(bucket)
                .map_or(0, |word| word.load(Ordering::Relaxed))
        };
        let store = |bucket: usize, to: u64| {
            if let Some(word) = self.bucket(bucket) {
                word.store(to, Ordering::Release);
            }
        };
        let (ours, mask) = (index_word(tag, slot), self.shape.buckets - 1);
        let (Some(mut hole), Some(moves)) =
            (buckets.find(|&bucket| load(bucket) == ours), self.moves())
        else {
            return;
        };
        seqlock::begin(moves);
        let mut next = hole;
        loop {
            next = (next + 1) & mask;
            let word = load(next);
            if word == 0 {
                break;
            }
            // The first bucket of its search: the word may move up to the hole unless the hole lies
            // before that.
            let home = self
                .look(word)
                .map_or(next, |found| self.shape.place(found.id).0);
            if (next.wrapping_sub(home) & mask) >= (next.wrapping_sub(hole) & mask) {
                store(hole, word);
                hole = next;
            }
        }
        store(hole, 0);
        seqlock::publish(moves);
    }
}

fn index_word(tag: u64, slot: usize) -> u64 {
    tag | (slot as u64 + 1)
}

/// The slot of an index word that is not free.
fn slot_of(word: u64) -> Option<usize> {
    usize::try_from((word & u64::from(u32::MAX)).checked_sub(1)?).ok()
}

/// Writes an entry's fields, between `begin` and `publish` of its generation.
pub(crate) fn describe(entry: &[AtomicU64; ENTRY], id: BlockId, len: usize, ordinal: u32) {
    let [low, high] = halves(id);
    entry[Field::Low as usize].store(low, Ordering::Relaxed);
    entry[Field::High as usize].store(high, Ordering::Relaxed);
    entry[Field::Size as usize].store(len as u64 | u64::from(ordinal) << 32, Ordering::Relaxed);
}
