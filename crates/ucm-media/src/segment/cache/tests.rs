//! Segments over a medium in memory: what listings find, how often footers are read, which records
//! are read with one call, and outcomes of their own.

use std::collections::BTreeMap;
use std::ops::Range;

use ucm_core::{Geometry, PAGE, Part};
use ucm_device::{ArenaOptions, Slot, SlotPool, Transfer, open_device};
use ucm_infra::ManualClock;
use ucm_io::{IoJob, PsyncEngine};
use ucm_record::RecordLayout;

use super::super::format::{Entry, Owner, encode_footer};
use super::super::unread::{ListingAll, UnreadSegments};
use super::*;
use crate::backend::{BlockRead, Outcome};
use crate::blobs::{BlobName, BlobPiece, Buffers, Filled, ReadAt};
use crate::layout::SegmentName;

const NAMESPACE: [u8; 32] = [7; 32];

/// A medium in memory.
#[derive(Default)]
struct Shelf {
    blobs: Mutex<BTreeMap<SegmentName, Vec<u8>>>,
    /// Reads of records, and pieces that were read.
    reads: Mutex<(usize, usize)>,
    /// Reads into several buffers fail.
    fails: Mutex<bool>,
}

fn error(kind: ErrorKind) -> Error {
    Error::new(kind, "of the shelf")
}

impl Blobs for Shelf {
    const RUN: (usize, usize) = (0, 1 << 20);

    fn read(&self, _io: &IoJob, at: ReadAt, into: Buffers<'_>, _mode: ReadMode) -> Filled {
        self.reads.lock().0 += 1;
        let blobs = self.blobs.lock();
        let (mut bytes, mut start) = (0, at.offset as usize);
        let failed = match blobs.get(&at.blob.name) {
            None => Some(error(ErrorKind::NotFound)),
            Some(_) if into.len() > 1 && *self.fails.lock() => Some(error(ErrorKind::Io)),
            Some(blob) => {
                for (buffer, len) in into {
                    let len = len.min(blob.len().saturating_sub(start));
                    buffer[..len].copy_from_slice(&blob[start..start + len]);
                    (bytes, start) = (bytes + len, start + len);
                }
                None
            }
        };
        Filled { bytes, failed }
    }

    fn read_pieces(
        &self,
        pieces: Vec<(BlobName, Range<u64>)>,
        _mode: ReadMode,
        _deadline: MonotonicTime,
    ) -> Vec<Result<BlobPiece>> {
        self.reads.lock().1 += pieces.len();
        let blobs = self.blobs.lock();
        let read = pieces.into_iter().map(|(blob, range)| {
            let blob = blobs.get(&blob.name);
            let blob = blob.ok_or_else(|| error(ErrorKind::NotFound))?;
            let piece = &blob[range.start as usize..range.end as usize];
            Ok((piece.to_vec(), blob.len() as u64))
        });
        read.collect()
    }
}

struct Fixture {
    cache: Arc<SegmentCache<Shelf>>,
    unread: UnreadSegments,
    clock: Arc<ManualClock>,
}

fn name(sequence: u64) -> SegmentName {
    SegmentName {
        writer: 1,
        sequence,
    }
}

fn id(n: u8) -> BlockId {
    BlockId([n; 16])
}

/// A segment with these records, each of two pages that are full of its number.
fn segment(sequence: u64, records: &[u8]) -> Vec<u8> {
    let (mut bytes, mut entries) = (vec![0; PAGE as usize], Vec::new());
    for &n in records {
        entries.push(Entry {
            id: id(n),
            offset: bytes.len() as u64,
            len: 2 * PAGE,
        });
        bytes.resize(bytes.len() + 2 * PAGE as usize, n);
    }
    let owner = Owner {
        name: name(sequence),
        namespace: NAMESPACE,
        part: Part::default(),
        time_ns: sequence,
    };
    let footer = encode_footer(&owner, bytes.len() as u64, &entries);
    bytes.extend_from_slice(&footer);
    bytes
}

impl Fixture {
    fn new() -> Self {
        let geometry = Geometry::new(vec![4096], 1, 1).unwrap();
        let record = RecordLayout::new(&geometry);
        let lengths = Arc::new(Lengths::new(Part::default(), &record, &[], false));
        let clock = ManualClock::new();
        let of_cache = Arc::clone(&clock) as Arc<dyn Clock>;
        Self {
            cache: SegmentCache::new(Arc::default(), lengths, NAMESPACE, 100, &of_cache),
            unread: UnreadSegments::default(),
            clock,
        }
    }

    fn put(&self, sequence: u64, bytes: Vec<u8>) {
        self.cache.blobs.blobs.lock().insert(name(sequence), bytes);
    }

    /// Lists all of the shelf and reads footers: the segments that were removed.
    fn turn(&mut self) -> Vec<SegmentName> {
        let mut all = ListingAll::begin(&self.cache);
        let mut found = Vec::new();
        for (&name, bytes) in &*self.cache.blobs.blobs.lock() {
            found.push(BlobMeta {
                blob: BlobName { sealed_ns: 0, name },
                len: bytes.len() as u64,
                used_ns: 0,
                inode: 0,
            });
        }
        all.take(&self.cache, &mut self.unread, &found);
        let gone = all.end(&self.cache, &mut self.unread);
        let never = MonotonicTime::NEVER;
        let failed = self.unread.read(&self.cache, &*self.clock, never);
        assert!(failed.is_empty());
        gone
    }

    fn finds(&self, n: u8) -> bool {
        self.cache.lookup(&[id(n)], false) == [Ok(())]
    }

    /// Reads these records as one run.
    fn read(&self, ids: &[u8], looked: bool) -> Vec<Outcome> {
        let device = open_device("host", Transfer::Auto, self.clock.clone()).unwrap();
        let arena = device.make_arena(1 << 20, ArenaOptions::default()).unwrap();
        let slots = SlotPool::new(arena, 2 * PAGE as usize).unwrap();
        let read = |&n: &u8| {
            let slot: Slot = slots.try_acquire().unwrap();
            let read = BlockRead::whole(id(n), slot, MonotonicTime::NEVER);
            BlockRead { looked, ..read }
        };
        let io = IoJob::alone(PsyncEngine::new(false));
        self.cache.read(&io, ids.iter().map(read).collect())
    }
}

/// The byte that a record is full of.
fn content(outcome: &Outcome) -> u8 {
    let Outcome::Read(Ok(done)) = outcome else {
        panic!("it was not read")
    };
    assert_eq!((done.read, done.stored_len), (2 * PAGE as usize, 2 * PAGE));
    assert!(done.bytes().iter().all(|byte| *byte == done.bytes()[0]));
    done.bytes()[0]
}

#[test]
fn a_listing_adds_new_segments_and_removes_those_that_are_gone() {
    let mut fixture = Fixture::new();
    fixture.put(1, segment(1, &[1, 2]));
    fixture.put(2, segment(2, &[2, 3]));
    assert!(fixture.turn().is_empty());
    assert!(fixture.finds(1) && fixture.finds(2) && fixture.finds(3) && !fixture.finds(4));
    fixture.cache.blobs.blobs.lock().remove(&name(1));
    assert_eq!(fixture.turn(), [name(1)]);
    assert!(!fixture.finds(1) && fixture.finds(2) && fixture.finds(3));
    // Another segment under the same name.
    fixture.put(2, segment(2, &[4]));
    assert!(fixture.turn().is_empty());
    assert!(!fixture.finds(2) && fixture.finds(4));
}

#[test]
fn a_footer_that_cannot_be_used_is_read_a_few_times_until_it_changes() {
    let mut fixture = Fixture::new();
    let whole = segment(1, &[1]);
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    fixture.put(1, damaged);
    for _ in 0..10 {
        fixture.turn();
    }
    assert_eq!(fixture.cache.blobs.reads.lock().1, 3);
    assert!(!fixture.finds(1));
    fixture.put(1, segment(1, &[1, 2])); // longer, as when the rest becomes visible
    fixture.turn();
    assert!(fixture.finds(1) && fixture.finds(2));
}

#[test]
fn neighbours_are_one_read_and_each_has_an_outcome_of_its_own() {
    let mut fixture = Fixture::new();
    fixture.put(1, segment(1, &[1, 2, 3]));
    fixture.turn();
    let read = fixture.read(&[1, 2, 3], false);
    assert_eq!(read.iter().map(content).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(fixture.cache.blobs.reads.lock().0, 1);
    *fixture.cache.blobs.fails.lock() = true;
    let read = fixture.read(&[1, 2, 3], false);
    assert_eq!(read.iter().map(content).collect::<Vec<_>>(), [1, 2, 3]);
    // These are no neighbours.
    let read = fixture.read(&[3, 1], false);
    assert_eq!(read.iter().map(content).collect::<Vec<_>>(), [3, 1]);
    // The last one ends before it should.
    *fixture.cache.blobs.fails.lock() = false;
    let short = segment(1, &[1, 2, 3])[..6 * PAGE as usize].to_vec();
    fixture.put(1, short);
    let read = fixture.read(&[1, 2, 3], false);
    assert_eq!((content(&read[0]), content(&read[1])), (1, 2));
    let Outcome::Read(Ok(last)) = &read[2] else {
        panic!("it is no miss")
    };
    assert_eq!((last.read, last.stored_len), (PAGE as usize, PAGE));
}

#[test]
fn a_record_of_a_removed_segment_is_read_from_another_copy_or_listed_for_once() {
    let mut fixture = Fixture::new();
    fixture.put(1, segment(1, &[1, 2]));
    fixture.put(2, segment(2, &[2]));
    fixture.turn();
    fixture.cache.blobs.blobs.lock().remove(&name(2));
    assert_eq!(content(&fixture.read(&[2], false)[0]), 2);
    fixture.cache.blobs.blobs.lock().remove(&name(1));
    let read = fixture.read(&[1, 2], false);
    assert!(
        read.iter()
            .all(|outcome| matches!(outcome, Outcome::Moved(_)))
    );
    let read = fixture.read(&[1], true);
    let missing = |outcome: &Outcome| match outcome {
        Outcome::Read(Err(error)) => error.kind() == ErrorKind::NotFound,
        _ => false,
    };
    assert!(read.iter().all(missing));
}
