//! Finding and copying records of a region without a lock, as every reader does it, its writer too.

use std::ops::Range;
use std::sync::atomic::Ordering;

use ucm_core::BlockId;
use ucm_infra::seqlock::{self, AtomicU64};

use super::shape::{ENTRY, MOVES, Shape, halves, whole};

/// Times a search or a copy is tried when the writer was at work there meanwhile.
const AGAIN: usize = 4;

/// Most buckets that a search of a region of another process looks at. In an index that is half
/// full at most, as ours are, a name lies further away once in 10^12 regions of 2^30 slots; one
/// that is full would have a search look at all of it.
pub(crate) const MOST_PROBES: usize = 256;

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// A record that was there a moment ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) id: BlockId,
    pub(crate) slot: usize,
    pub(crate) len: usize,
    pub(crate) ordinal: u32,
    generation: u64,
}

/// The words of a region with its sizes. Whatever stands in the words, nothing here reads past them
/// or panics.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a> {
    pub(crate) words: &'a [AtomicU64],
    pub(crate) shape: &'a Shape,
    /// Most buckets that a search looks at.
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

    /// The buckets of an id in the order in which they are searched, with the bits its index word
    /// has.
    pub(crate) fn search(&self, id: BlockId) -> (impl Iterator<Item = usize> + use<>, u64) {
        let (first, tag) = self.shape.place(id);
        let buckets = self.shape.buckets;
        (
            (0..buckets.min(self.probes)).map(move |step| (first + step) & (buckets - 1)),
            tag,
        )
    }

    /// The record of an id, if it is there now.
    pub(crate) fn find(&self, id: BlockId) -> Option<Found> {
        let moves = self.moves()?;
        for _ in 0..AGAIN {
            let before = seqlock::enter(moves);
            if let Some(found) = self.find_once(id) {
                return Some(found);
            }
            // Not there; unless index words were being moved, when it may have been passed by.
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

    /// What the slot of an index word holds, if it is whole.
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

    /// Copies a record to the start of `out`; its length, or `None` if it is not there, went
    /// meanwhile, or is longer than `out`. The bytes are those its writer put there; whether they
    /// are right their checksums say.
    pub(crate) fn copy_out(&self, id: BlockId, out: &mut [u8]) -> Option<usize> {
        let whole = 0..out.len();
        let len = self.copy_parts(id, &[whole], out)?;
        (len <= out.len()).then_some(len)
    }

    /// Copies parts of a record, as far as it goes, each to where it lies in the whole; the
    /// record's length, or `None` if it is not there, went meanwhile, or `out` is too short. Parts
    /// begin at words. The bytes are all of one record, those its writer put there.
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

    /// Every record that has a name now; one whose index word is being moved may come twice or not.
    pub(crate) fn iter(self) -> impl Iterator<Item = Found> + use<'a> {
        let buckets = 0..self.shape.buckets;
        buckets.filter_map(move |bucket| self.look(self.bucket(bucket)?.load(Ordering::Acquire)))
    }

    /// Gives a slot a name in the index, in place of slot `instead` if it had this name. The writer
    /// only.
    pub(crate) fn name(&self, id: BlockId, slot: usize, instead: Option<usize>) {
        let (buckets, tag) = self.search(id);
        let old = instead.map_or(0, |old| index_word(tag, old));
        let mut words = buckets.filter_map(|bucket| self.bucket(bucket));
        if let Some(word) = words.find(|word| word.load(Ordering::Relaxed) == old) {
            word.store(index_word(tag, slot), Ordering::Release);
        }
    }

    /// Takes the name of a slot away. The writer only.
    ///
    /// No mark is left behind: what a search would no longer reach is moved up, so searches stay as
    /// short as if the name had never been there. A word is stored in its new place before its old
    /// one is given to the next, and the generation of the index tells readers that passed by.
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
            // Where a search for it begins: it may move up to the hole unless that lies before.
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
