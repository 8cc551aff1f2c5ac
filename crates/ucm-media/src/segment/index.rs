//! Where every record of a namespace lies, in memory: a lookup needs no system call.
//!
//! A block costs 24 bytes in a hash table (its id, the number of its segment, its page there and a
//! small number for its length) and one byte of the table's own: 25 bytes at 7/8 full, 57 right
//! after the table doubled, so at most 64 with everything else that grows with blocks. Tables are
//! split by id, so that growing one copies a 64th.
//!
//! A segment that was removed leaves at once, its blocks later: a thread that finds a block of such
//! a segment takes it out, and a sweep takes out the rest. Of several copies the newest counts, by
//! the time its segment was sealed and then by that segment's name, so that all processes that know
//! the same segments read the same copy. [`stats`]: how much of a segment is still read.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ucm_core::sync::{Mutex, RwLock};
use ucm_core::{BlockId, PAGE, Part};

use super::format::Entry;
use crate::layout::SegmentName;

pub(crate) mod stats;
#[cfg(test)]
mod tests;

/// Tables the ids are spread over.
const SHARDS: usize = 64;
/// Bits of a place that are the page; a segment is at most 4 GiB long.
const PAGE_BITS: u32 = 20;
/// Other copies remembered for one block.
const MAX_COPIES: usize = 3;

/// Blocks of removed segments below which nothing is swept.
const FEW_DEAD: u64 = 1024;

/// Number of a segment in this process; never used again.
pub(crate) type SegmentNumber = u32;

/// Where a record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Location {
    segment: SegmentNumber,
    /// Its page in the segment, and above that the number of its length.
    packed: u32,
}

/// A record that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hit {
    pub(crate) segment: SegmentNumber,
    pub(crate) name: SegmentName,
    /// Whether only its writer knows the segment yet.
    pub(crate) private: bool,
    /// From the start of the file.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// When its segment was sealed, by its writer's clock, ns of Unix time; the end of time while
    /// it is not.
    pub(crate) sealed_ns: u64,
}

/// A segment as it is added.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    pub(crate) name: SegmentName,
    /// The part that its writer brought.
    pub(crate) part: Part,
    /// Whether only its writer knows it yet.
    pub(crate) private: bool,
    /// When it was sealed, as of [`Hit::sealed_ns`]: of two copies the later one is the newer.
    pub(crate) sealed_ns: u64,
    /// Last use of any of its records, ns of Unix time, as far as is known here.
    pub(crate) used_ns: i64,
    /// Length of the file, bytes; 0 while it is private.
    pub(crate) len: u64,
}

/// A segment in the index.
#[derive(Debug)]
struct Segment {
    known: Known,
    blocks: u64,
    /// Blocks of it that are not taken from here: another copy counts, or this one was dropped.
    passed_over: AtomicU64,
    /// Pages of its records that were removed: gathering leaves them out.
    removed: Mutex<HashSet<u32>>,
}

impl Segment {
    /// The greater of two is the newer copy.
    fn order(&self) -> (u64, SegmentName) {
        (self.known.sealed_ns, self.known.name)
    }

    fn pass_over(&self) {
        self.passed_over.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Segments {
    known: HashMap<SegmentNumber, Segment>,
    by_name: HashMap<SegmentName, SegmentNumber>,
    last: SegmentNumber,
}

/// See the module.
pub(crate) struct Index {
    shards: [RwLock<HashMap<BlockId, Location>>; SHARDS],
    /// Older copies of blocks that have several, the newest last.
    copies: Mutex<HashMap<BlockId, Vec<Location>>>,
    segments: RwLock<Segments>,
    /// Lengths that records have, each once.
    lengths: RwLock<Vec<u64>>,
    blocks: AtomicUsize,
    /// Blocks of segments that went since the last sweep.
    dead: AtomicU64,
    most: usize,
    /// Records not added because there were too many, or because their place cannot be packed.
    left_out: AtomicU64,
    /// Of these, those for which there was no room.
    no_room: AtomicU64,
}

impl Index {
    /// An index of at most `most` blocks.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::default()),
            copies: Mutex::default(),
            segments: RwLock::default(),
            lengths: RwLock::default(),
            blocks: AtomicUsize::new(0),
            dead: AtomicU64::new(0),
            most,
            left_out: AtomicU64::new(0),
            no_room: AtomicU64::new(0),
        }
    }

    fn shard(&self, id: BlockId) -> &RwLock<HashMap<BlockId, Location>> {
        // The last byte: ids of tests and of other stores may begin alike.
        &self.shards[usize::from(id.0[15]) % SHARDS]
    }

    /// Adds a segment: its number. `None` where one of that name is known, which stays.
    pub(crate) fn begin(&self, known: Known) -> Option<SegmentNumber> {
        let mut segments = self.segments.write();
        if segments.by_name.contains_key(&known.name) {
            return None;
        }
        segments.last += 1;
        let number = segments.last;
        segments.by_name.insert(known.name, number);
        let segment = Segment {
            known,
            blocks: 0,
            passed_over: AtomicU64::new(0),
            removed: Mutex::default(),
        };
        segments.known.insert(number, segment);
        Some(number)
    }

    /// Whether there is a place for this block.
    pub(crate) fn has_room(&self, id: BlockId) -> bool {
        self.blocks.load(Ordering::Relaxed) < self.most || self.shard(id).read().contains_key(&id)
    }

    /// Adds records to a segment.
    pub(crate) fn add(&self, number: SegmentNumber, entries: &[Entry]) {
        let mut added = 0;
        for entry in entries {
            let Some(packed) = self.pack(entry) else {
                self.left_out.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            added += 1;
            let segment = number;
            self.insert(entry.id, Location { segment, packed });
        }
        if let Some(segment) = self.segments.write().known.get_mut(&number) {
            segment.blocks += added;
        }
    }

    fn insert(&self, id: BlockId, place: Location) {
        let segments = self.segments.read();
        let order = |place: &Location| segments.known.get(&place.segment).map(Segment::order);
        let mut shard = self.shard(id).write();
        let Some(known) = shard.get_mut(&id) else {
            if self.blocks.load(Ordering::Relaxed) >= self.most {
                self.left_out.fetch_add(1, Ordering::Relaxed);
                self.no_room.fetch_add(1, Ordering::Relaxed);
                return;
            }
            self.blocks.fetch_add(1, Ordering::Relaxed);
            shard.insert(id, place);
            return;
        };
        let older = if order(known) <= order(&place) {
            std::mem::replace(known, place)
        } else {
            place
        };
        let Some(segment) = segments.known.get(&older.segment) else {
            return; // it was removed
        };
        segment.pass_over();
        let mut copies = self.copies.lock();
        let others = copies.entry(id).or_default();
        others.push(older);
        others.sort_by_key(|place| order(place));
        if others.len() > MAX_COPIES {
            others.remove(0);
        }
    }

    /// The place in four bytes; `None` where it does not fit.
    fn pack(&self, entry: &Entry) -> Option<u32> {
        let page = page(entry.offset);
        if page >> PAGE_BITS != 0 {
            return None;
        }
        let known = self.lengths.read().iter().position(|&len| len == entry.len);
        let number = known.or_else(|| {
            let mut lengths = self.lengths.write();
            if let Some(number) = lengths.iter().position(|&len| len == entry.len) {
                return Some(number);
            }
            if lengths.len() >> (u32::BITS - PAGE_BITS) != 0 {
                return None;
            }
            lengths.push(entry.len);
            Some(lengths.len() - 1)
        })?;
        let fits = number >> (u32::BITS - PAGE_BITS) == 0;
        fits.then_some((number as u32) << PAGE_BITS | page)
    }

    /// Where a record lies, the newest copy of it.
    pub(crate) fn find(&self, id: BlockId) -> Option<Hit> {
        loop {
            let place = *self.shard(id).read().get(&id)?;
            if let Some(hit) = self.hit(place) {
                return Some(hit);
            }
            self.forget(id, place);
        }
    }

    fn hit(&self, place: Location) -> Option<Hit> {
        let segments = self.segments.read();
        let segment = segments.known.get(&place.segment)?;
        let lengths = self.lengths.read();
        Some(Hit {
            segment: place.segment,
            name: segment.known.name,
            private: segment.known.private,
            sealed_ns: segment.known.sealed_ns,
            offset: u64::from(place.packed & ((1 << PAGE_BITS) - 1)) * PAGE,
            len: *lengths.get((place.packed >> PAGE_BITS) as usize)?,
        })
    }

    /// Takes one place of a block out; the newest of its other copies takes its place.
    fn forget(&self, id: BlockId, place: Location) {
        let segments = self.segments.read();
        let mut shard = self.shard(id).write();
        if shard.get(&id) != Some(&place) {
            return;
        }
        if let Some(segment) = segments.known.get(&place.segment) {
            segment.pass_over();
        }
        let mut copies = self.copies.lock();
        while let Some(others) = copies.get_mut(&id) {
            match others.pop() {
                Some(next) => {
                    if let Some(segment) = segments.known.get(&next.segment) {
                        segment.passed_over.fetch_sub(1, Ordering::Relaxed);
                        shard.insert(id, next);
                        return;
                    }
                }
                None => {
                    copies.remove(&id);
                }
            }
        }
        shard.remove(&id);
        self.blocks.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes out a copy that was refused, or never written.
    pub(crate) fn drop_copy(&self, id: BlockId, hit: &Hit) {
        let (segment, offset, len) = (hit.segment, hit.offset, hit.len);
        if let Some(packed) = self.pack(&Entry { id, offset, len }) {
            self.forget(id, Location { segment, packed });
        }
    }

    /// Removes a record with all its copies; where their segments are gathered they are left out.
    /// False where there was none.
    pub(crate) fn remove(&self, id: BlockId) -> bool {
        let mut any = false;
        while let Some(hit) = self.find(id) {
            self.of(hit.segment, |segment| {
                segment.removed.lock().insert(page(hit.offset))
            });
            self.drop_copy(id, &hit);
            any = true;
        }
        any
    }

    /// A private segment got its name: when it was sealed and used, and the length of its file.
    pub(crate) fn named(&self, number: SegmentNumber, sealed_ns: u64, used_ns: i64, len: u64) {
        if let Some(segment) = self.segments.write().known.get_mut(&number) {
            let known = &mut segment.known;
            (known.private, known.sealed_ns, known.len) = (false, sealed_ns, len);
            known.used_ns = known.used_ns.max(used_ns);
        }
    }

    /// A segment was removed; its blocks leave when they are found, or with the next sweep.
    pub(crate) fn vanished(&self, number: SegmentNumber) {
        let mut segments = self.segments.write();
        if let Some(segment) = segments.known.remove(&number) {
            segments.by_name.remove(&segment.known.name);
            self.dead.fetch_add(segment.blocks, Ordering::Relaxed);
        }
    }

    /// Sweeps when an eighth of the blocks is of removed segments.
    pub(crate) fn sweep_if_due(&self) {
        let dead = self.dead.load(Ordering::Relaxed);
        if dead > FEW_DEAD && dead > self.blocks() as u64 / 8 {
            self.sweep();
        }
    }

    /// Takes out blocks of removed segments; table by table, so that no lookup waits long.
    fn sweep(&self) {
        self.dead.store(0, Ordering::Relaxed);
        for shard in &self.shards {
            let mut gone = Vec::new();
            let segments = self.segments.read();
            for (&id, &place) in &*shard.read() {
                if !segments.known.contains_key(&place.segment) {
                    gone.push((id, place));
                }
            }
            drop(segments);
            gone.into_iter()
                .for_each(|(id, place)| self.forget(id, place));
        }
    }

    /// Whether a segment of that name is known.
    pub(crate) fn knows(&self, name: SegmentName) -> bool {
        self.segments.read().by_name.contains_key(&name)
    }

    /// Something of a segment; `None` of one that is not known any more.
    fn of<T>(&self, number: SegmentNumber, of: impl FnOnce(&Segment) -> T) -> Option<T> {
        self.segments.read().known.get(&number).map(of)
    }

    /// Length of a segment's file; `None` for one that is not known any more.
    pub(crate) fn file_len(&self, number: SegmentNumber) -> Option<u64> {
        self.of(number, |segment| segment.known.len)
    }

    /// A segment was used at this time (ns of Unix time).
    pub(crate) fn used(&self, number: SegmentNumber, used_ns: i64) {
        if let Some(segment) = self.segments.write().known.get_mut(&number) {
            segment.known.used_ns = segment.known.used_ns.max(used_ns);
        }
    }

    /// Every block with its length and its time of use.
    pub(crate) fn list(&self) -> Vec<(BlockId, u64, i64)> {
        let mut all = Vec::with_capacity(self.blocks());
        for shard in &self.shards {
            let places = shard.read().clone();
            for (id, place) in places {
                if let Some(hit) = self.hit(place) {
                    let used = self.of(hit.segment, |segment| segment.known.used_ns);
                    all.push((id, hit.len, used.unwrap_or(0)));
                }
            }
        }
        all
    }

    /// Blocks in the tables, those of vanished segments included.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Segments that are known.
    pub(crate) fn segments(&self) -> usize {
        self.segments.read().known.len()
    }
}

/// The page at which a record lies; one that no place can name where it is too far from the start.
pub(super) fn page(offset: u64) -> u32 {
    u32::try_from(offset / PAGE).unwrap_or(u32::MAX)
}
