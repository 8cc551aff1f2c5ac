//! Reading records from their segments: neighbours with one operation, each straight into its own
//! slot.
//!
//! A record can be missing where the index has it: its segment was removed or sealed since, or it
//! was published too late for this process to have found it. Then the medium is listed once more
//! before the record counts as a miss. Where a read of several fails, each is read again by itself,
//! so that each has its own outcome.

use std::collections::VecDeque;
use std::ops::Range;

use ucm_core::{BlockId, Error, ErrorKind};
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, ReadMode};

use super::cache::SegmentCache;
use super::index::Hit;
use crate::backend::{BlockRead, Done, Indexed, Outcome, Parts, ReadDone, ReadPart};
use crate::blobs::{BlobName, Blobs, Filled, ReadAt};

/// Most records of one operation.
const MOST_RECORDS: usize = 256;

/// A record that was found, and how it is to be read.
struct Placed {
    hit: Hit,
    read: BlockRead,
}

impl<B: Blobs> Indexed for SegmentCache<B> {
    /// Which reads one thread does together: neighbours, in as many runs as there are threads, each
    /// of [`Blobs::RUN`] bytes. Side shards alone are divided among the threads. A record that the
    /// index does not have is left out until the medium was listed once more.
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        let (mut placed, mut sides, mut runs) =
            (Vec::with_capacity(reads.len()), Vec::new(), Vec::new());
        for (at, read) in reads.iter().enumerate() {
            match self.index.find(read.id) {
                Some(hit) if read.sides => sides.push((hit, at)),
                Some(_) if read.parts.is_some() => runs.push(vec![at]),
                Some(hit) => placed.push((hit, at)),
                None if read.looked => runs.push(vec![at]),
                None => {}
            }
        }
        for found in [&mut placed, &mut sides] {
            found.sort_by_key(|(hit, _)| (hit.segment, hit.offset));
        }
        // A few pages each, which no operation reads together.
        let each = sides.len().div_ceil(threads.max(1)).clamp(1, MOST_RECORDS);
        for some in sides.chunks(each) {
            runs.push(some.iter().map(|(_, at)| *at).collect());
        }
        let len = |(hit, at): &(Hit, usize)| hit.len_in(reads[*at].slot.len());
        let (least, most) = B::RUN;
        let bytes: usize = placed.iter().map(len).sum();
        let share = (bytes / threads.max(1)).clamp(least, most);
        let mut filled = 0;
        let mut before: Option<&(Hit, usize)> = None;
        for next in &placed {
            let follows = before
                .is_some_and(|(hit, at)| follows((hit, reads[*at]), (&next.0, reads[next.1])));
            match runs.last_mut() {
                Some(run) if follows && filled + len(next) <= share && run.len() < MOST_RECORDS => {
                    run.push(next.1);
                }
                _ => {
                    filled = 0;
                    runs.push(vec![next.1]);
                }
            }
            filled += len(next);
            before = Some(next);
        }
        runs
    }

    fn look(&self, deadline: MonotonicTime, done: Done<()>) {
        self.looks.add(self.clock.now(), deadline, done);
    }

    fn is_published(&self, id: BlockId) -> bool {
        let hit = self.index.find(id);
        hit.is_some_and(|hit| !hit.private && self.lengths.is_ours(hit.len))
    }

    fn knows(&self, id: BlockId) -> bool {
        self.index.find(id).is_some()
    }
}

impl<B: Blobs> SegmentCache<B> {
    /// Reads the records of a run.
    pub(crate) fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let found: Vec<Option<Hit>> = run.iter().map(|read| self.index.find(read.id)).collect();
        let are_neighbours = run.len() > 1
            && (1..run.len()).all(|at| match (&found[at - 1], &found[at]) {
                (Some(before), Some(hit)) => follows((before, &run[at - 1]), (hit, &run[at])),
                _ => false,
            });
        if !are_neighbours {
            return run
                .into_iter()
                .map(|read| self.read_alone(io, read))
                .collect();
        }
        let placed = found.into_iter().flatten().zip(run);
        self.read_neighbours(io, placed.map(|(hit, read)| Placed { hit, read }).collect())
    }

    /// Several records with one operation; those that it did not bring, each by itself.
    fn read_neighbours(&self, io: &IoJob, mut placed: Vec<Placed>) -> Vec<Outcome> {
        let Some(first) = placed.first().map(|first| first.hit) else {
            return Vec::new();
        };
        let into = placed.iter_mut().map(|one| {
            let want = one.want();
            (one.read.slot.as_mut_slice(), want)
        });
        let into = into.collect();
        let mut filled = self.blobs.read(io, first.at(), into, ReadMode::Default);
        self.forget_if_gone(placed[0].read.id, &first, &filled);
        let mut outcomes = Vec::with_capacity(placed.len());
        for one in placed {
            let (want, len) = (one.want(), one.hit.len);
            let got = filled.bytes.min(want);
            filled.bytes -= got;
            outcomes.push(if got == want {
                one.done(got, len)
            } else {
                self.read_alone(io, one.read)
            });
        }
        outcomes
    }

    /// One record, from wherever the index has it.
    fn read_alone(&self, io: &IoJob, mut read: BlockRead) -> Outcome {
        while let Some(hit) = self.index.find(read.id) {
            let mut one = Placed { hit, read };
            if let Some(bytes) = self.read_parts(io, &mut one) {
                return one.done(bytes, hit.len);
            }
            let mode = match one.read.again {
                true => ReadMode::FreshDirect,
                false => ReadMode::Default,
            };
            let want = one.want();
            let into = vec![(one.read.slot.as_mut_slice(), want)];
            let filled = self.blobs.read(io, hit.at(), into, mode);
            let gone = self.forget_if_gone(one.read.id, &hit, &filled);
            match filled.failed {
                // Its segment ends before it should.
                None if filled.bytes < want => return one.done(filled.bytes, filled.bytes as u64),
                None => return one.done(want, hit.len),
                Some(error) if !gone => return Outcome::Read(Err(error)),
                Some(_) => read = one.read,
            }
        }
        if !read.looked {
            return Outcome::Moved(read);
        }
        // The scheduler may take it for readable here.
        self.locally_visible.removed(read.id);
        let text = "this record is in no segment";
        let missing = Error::new(ErrorKind::NotFound, text).with("block", read.id);
        Outcome::Read(Err(missing))
    }

    /// Reads parts of a record to their places: the bytes that were read. None where all of it is
    /// to be read, because that is wanted or something went wrong with the parts.
    fn read_parts(&self, io: &IoJob, one: &mut Placed) -> Option<usize> {
        let as_is = || self.lengths.is_record(one.hit.len);
        if one.read.again || !(one.read.sides || as_is()) {
            return None;
        }
        let Parts { steps, mut arrived } = one.read.parts.take()?;
        let (mut bytes, mut steps) = (0, VecDeque::from(steps));
        while let Some(mut step) = steps.pop_front() {
            // A record may be without side shards.
            step.retain(|part| part.end as u64 <= one.hit.len);
            let want = step.iter().map(Range::len).sum::<usize>();
            let slot = one.read.slot.as_mut_slice();
            match self.blobs.read_parts(io, one.hit.at(), &step, slot) {
                Some(read) if read == want => {
                    steps.extend(arrived(io, ReadPart::of(&step, slot, one.hit.len)));
                }
                _ => {
                    // What was read before is read again.
                    arrived(io, ReadPart::of(&[], slot, one.hit.len));
                    return None;
                }
            }
            bytes += want;
        }
        Some(bytes)
    }

    /// True where a read of this record found no blob; then its segment leaves the index.
    fn forget_if_gone(&self, id: BlockId, hit: &Hit, filled: &Filled) -> bool {
        let gone = match &filled.failed {
            Some(error) => error.kind() == ErrorKind::NotFound,
            None => false,
        };
        // An open segment may have got its name since it was found.
        if gone && (!hit.private || self.index.find(id) == Some(*hit)) {
            self.index.vanished(hit.segment);
        }
        gone
    }
}

impl Placed {
    /// Bytes that are read of it.
    fn want(&self) -> usize {
        self.hit.len_in(self.read.slot.len())
    }

    /// It was read; `stored_len`: where it ends on the medium.
    fn done(self, read: usize, stored_len: u64) -> Outcome {
        Outcome::Read(Ok(ReadDone {
            slot: self.read.slot,
            read,
            stored_len,
            lent: None,
        }))
    }
}

impl Hit {
    /// The segment that it lies in.
    pub(crate) fn blob(&self) -> BlobName {
        BlobName {
            sealed_ns: self.sealed_ns,
            name: self.name,
        }
    }

    fn at(&self) -> ReadAt {
        ReadAt {
            blob: self.blob(),
            open: self.private,
            offset: self.offset,
        }
    }

    /// Bytes of it that a slot of that length has room for.
    fn len_in(&self, room: usize) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX).min(room)
    }
}

/// Whether a record follows another one directly, and one operation is to read both.
fn follows((before, first): (&Hit, &BlockRead), (hit, read): (&Hit, &BlockRead)) -> bool {
    hit.segment == before.segment
        && hit.private == before.private
        && hit.offset == before.offset + before.len
        && before.len_in(first.slot.len()) as u64 == before.len
        && read.deadline == first.deadline
        && [first, read]
            .iter()
            .all(|read| !read.again && read.parts.is_none())
}
