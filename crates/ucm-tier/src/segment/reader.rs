//! Reading records from their segments: those that lie next to one another with one operation, each straight into its own
//! slot.
//!
//! A record that is not where it should be was removed with its segment, moved by its own writer's seal between the look
//! and the open, or published so lately that nobody here has seen it: another look at the directory tells, once. What
//! goes wrong with several at once is asked again for each by itself, so that each has an outcome of its own.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;

use ucm_core::{Error, ErrorKind};
use ucm_io::{IoJob, ReadMode};

use super::Segments;
use super::index::Hit;
use crate::backend::{BlockRead, Outcome, Part, Parts, ReadDone};
use crate::reading::explain;

/// Bytes of one operation for several records: at least so many that reading takes longer than starting another thread,
/// at most so many (four blocks of 256 KiB with their headers) that they are in a cache of the processor still when the
/// thread that has read them verifies them.
const LEAST: usize = 256 << 10;
const MOST: usize = 5 << 18;
/// Most records of one operation.
const MOST_RECORDS: usize = 256;

/// A record that was found, and what is to be read of it.
struct Placed {
    hit: Hit,
    read: BlockRead,
}

/// Bytes of a record that a slot of that length has room for.
fn want(hit: &Hit, room: usize) -> usize {
    usize::try_from(hit.len).unwrap_or(usize::MAX).min(room)
}

/// Whether a record follows another one directly, and one operation is to bring both.
fn follows((before, first): (&Hit, &BlockRead), (hit, read): (&Hit, &BlockRead)) -> bool {
    hit.segment == before.segment
        && hit.private == before.private
        && hit.offset == before.offset + before.len
        && want(before, first.slot.len()) as u64 == before.len
        && read.deadline == first.deadline
        && [first, read]
            .iter()
            .all(|read| !read.again && read.parts.is_none())
}

impl Placed {
    fn read(self, read: usize) -> ReadDone {
        ReadDone {
            slot: self.read.slot,
            read,
            stored_len: self.hit.len,
            lent: None,
        }
    }
}

impl Segments {
    /// Neighbours together, but in so many runs that every thread for loads has some; what is not known to be here is left
    /// out until somebody has looked.
    pub(super) fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        let (mut placed, mut sides, mut runs) = (Vec::with_capacity(reads.len()), Vec::new(), Vec::new());
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
        // A few pages each, which no operation brings together: as many for each thread.
        let each = sides.len().div_ceil(threads.max(1)).clamp(1, MOST_RECORDS);
        let shared_out = sides
            .chunks(each)
            .map(|some| some.iter().map(|(_, at)| *at).collect());
        runs.extend(shared_out);
        let len = |(hit, at): &(Hit, usize)| want(hit, reads[*at].slot.len());
        let bytes: usize = placed.iter().map(len).sum();
        let share = (bytes / threads.max(1)).clamp(LEAST, MOST);
        let mut filled = 0;
        for (at, next) in placed.iter().enumerate() {
            let before = at.checked_sub(1).map(|before| &placed[before]);
            let joins = before.is_some_and(|(hit, last)| {
                follows((hit, reads[*last]), (&next.0, reads[next.1]))
                    && filled + len(next) <= share
                    && runs
                        .last()
                        .is_some_and(|run: &Vec<usize>| run.len() < MOST_RECORDS)
            });
            match runs.last_mut() {
                Some(run) if joins => run.push(next.1),
                _ => {
                    filled = 0;
                    runs.push(vec![next.1]);
                }
            }
            filled += len(next);
        }
        runs
    }

    /// Reads the records of a run.
    pub(super) fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let found: Option<Vec<_>> = run.iter().map(|read| self.index.find(read.id)).collect();
        let Some(found) = found.filter(|found| found.len() > 1) else {
            return run.into_iter().map(|read| self.read_alone(io, read)).collect();
        };
        let placed = found.into_iter().zip(run);
        let placed: Vec<_> = placed.map(|(hit, read)| Placed { hit, read }).collect();
        let both = |pair: &[Placed]| follows((&pair[0].hit, &pair[0].read), (&pair[1].hit, &pair[1].read));
        if placed.windows(2).all(both) {
            return self.read_neighbours(io, placed);
        }
        let alone = placed.into_iter().map(|one| self.read_alone(io, one.read));
        alone.collect()
    }

    /// One record, from wherever the index knows it to be.
    fn read_alone(&self, io: &IoJob, mut read: BlockRead) -> Outcome {
        while let Some(hit) = self.index.find(read.id) {
            let parts = read
                .parts
                .take_if(|_| !read.again && (read.sides || self.is_as_is(&hit)));
            let got = match parts {
                Some(parts) => self.read_parts(io, Placed { hit, read }, parts),
                None => self.read_one(io, Placed { hit, read }),
            };
            match got {
                Outcome::Moved(gone) => read = gone,
                came => return came,
            }
        }
        if !read.looked {
            return Outcome::Moved(read);
        }
        self.early.lost(read.id); // whoever was told that it can be read here
        let text = "this record is in no segment";
        Outcome::Came(Err(Error::new(ErrorKind::NotFound, text).with("block", read.id)))
    }

    /// Whether a record is stored in the form in which it is used, by its length.
    fn is_as_is(&self, hit: &Hit) -> bool {
        self.shared.lengths.is_record(hit.len)
    }

    /// Parts of a record, to their places. Whatever goes wrong with them, the whole is read.
    fn read_parts(&self, io: &IoJob, mut one: Placed, parts: Parts) -> Outcome {
        let Parts { steps, mut arrived } = parts;
        let (path, mut brought, mut steps) = (self.path(&one.hit), 0, VecDeque::from(steps));
        while let Some(mut step) = steps.pop_front() {
            step.retain(|part| part.end as u64 <= one.hit.len); // a record may be without side shards
            let want = step.iter().map(Range::len).sum::<usize>();
            let slot = one.read.slot.as_mut_slice();
            match io.read_parts(&path, one.hit.offset, &step, slot, !one.hit.private) {
                Ok(read) if read == want => steps.extend(arrived(io, Part::of(&step, slot, one.hit.len))),
                _ => {
                    arrived(io, Part::of(&[], slot, one.hit.len)); // what was read before is read again
                    return self.read_one(io, one);
                }
            }
            brought += want;
        }
        Outcome::Came(Ok(one.read(brought)))
    }

    pub(super) fn path(&self, hit: &Hit) -> PathBuf {
        if hit.private {
            self.private(hit.name)
        } else {
            self.shared.layout.segment(hit.name)
        }
    }

    /// Several records with one operation. Those that it did not bring are read each by itself, so that each has an outcome
    /// of its own.
    fn read_neighbours(&self, io: &IoJob, mut placed: Vec<Placed>) -> Vec<Outcome> {
        let Some(first) = placed.first().map(|first| first.hit) else {
            return Vec::new();
        };
        let into = placed.iter_mut().map(|one| {
            let want = want(&one.hit, one.read.slot.len());
            (one.read.slot.as_mut_slice(), want)
        });
        let read = io.read_into(&self.path(&first), first.offset, into.collect(), !first.private);
        let mut left = read.unwrap_or_default();
        let outcome = |one: Placed| {
            let want = want(&one.hit, one.read.slot.len());
            let got = left.min(want);
            left -= got;
            match got == want {
                true => Outcome::Came(Ok(one.read(want))),
                false => self.read_alone(io, one.read),
            }
        };
        placed.into_iter().map(outcome).collect()
    }

    /// One record, from where it was found; it has moved where its segment is gone.
    fn read_one(&self, io: &IoJob, mut one: Placed) -> Outcome {
        loop {
            let (path, offset, keep) = (self.path(&one.hit), one.hit.offset, !one.hit.private);
            let want = want(&one.hit, one.read.slot.len());
            let bytes = one.read.slot.as_mut_slice();
            let read = if one.read.again {
                let read = io.read(&path, offset, want, bytes, ReadMode::FreshDirect);
                read.map(|read| read.bytes)
            } else {
                io.read_into(&path, offset, vec![(bytes, want)], keep)
            };
            match read {
                Ok(read) => return Outcome::Came(Ok(one.read(read))),
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Outcome::Came(Err(explain(io, path, error)));
                }
                // Sealed since it was found, or about to be told so.
                Err(_) if one.hit.private => one.hit.private = false,
                Err(_) => {
                    self.index.vanished(one.hit.segment);
                    return Outcome::Moved(one.read);
                }
            }
        }
    }
}
