//! Reading records from their segments: those that lie next to one another with one operation, each
//! straight into its own slot.
//!
//! A record that is not where it should be was removed with its segment, moved by its own writer's
//! seal between the look and the open, or published so lately that no one here has seen it: another
//! look at the directory tells, once. What goes wrong with several at once is asked again for each
//! by itself, so that each has an outcome of its own.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;

use ucm_core::{Error, ErrorKind};
use ucm_io::{IoJob, ReadMode};

use super::Segments;
use super::index::Hit;
use super::runs::{follows, runs, want};
use crate::backend::{BlockRead, Outcome, Part, Parts, ReadDone};
use crate::reading::explain;

/// Bytes of one operation for several records: at least so many that reading takes longer than
/// starting another thread, at most so many (four blocks of 256 KiB with their headers) that they
/// are in a cache of the processor still when the thread that has read them verifies them.
const LEAST: usize = 256 << 10;
const MOST: usize = 5 << 18;

/// A record that was found, and what is to be read of it.
struct Placed {
    hit: Hit,
    read: BlockRead,
}

impl Placed {
    fn read(self, read: usize, stored_len: u64) -> ReadDone {
        ReadDone {
            slot: self.read.slot,
            read,
            stored_len,
            lent: None,
        }
    }
}

impl Segments {
    /// See [`runs()`].
    pub(super) fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        runs(&self.index, reads, threads, (LEAST, MOST))
    }

    /// Reads the records of a run.
    pub(super) fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let found: Option<Vec<_>> = run.iter().map(|read| self.index.find(read.id)).collect();
        let Some(found) = found.filter(|found| found.len() > 1) else {
            return run
                .into_iter()
                .map(|read| self.read_alone(io, read))
                .collect();
        };
        let placed = found.into_iter().zip(run);
        let placed: Vec<_> = placed.map(|(hit, read)| Placed { hit, read }).collect();
        let both =
            |pair: &[Placed]| follows((&pair[0].hit, &pair[0].read), (&pair[1].hit, &pair[1].read));
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
        // for the scheduler, which was told that it can be read here
        self.locally_visible.lost(read.id);
        let text = "this record is in no segment";
        Outcome::Came(Err(
            Error::new(ErrorKind::NotFound, text).with("block", read.id)
        ))
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
            // a record may be without side shards
            step.retain(|part| part.end as u64 <= one.hit.len);
            let want = step.iter().map(Range::len).sum::<usize>();
            let slot = one.read.slot.as_mut_slice();
            match io.read_parts(&path, one.hit.offset, &step, slot, !one.hit.private) {
                Ok(read) if read == want => {
                    steps.extend(arrived(io, Part::of(&step, slot, one.hit.len)))
                }
                _ => {
                    // what was read before is read again
                    arrived(io, Part::of(&[], slot, one.hit.len));
                    return self.read_one(io, one);
                }
            }
            brought += want;
        }
        let len = one.hit.len;
        Outcome::Came(Ok(one.read(brought, len)))
    }

    pub(super) fn path(&self, hit: &Hit) -> PathBuf {
        if hit.private {
            self.private(hit.name)
        } else {
            self.shared.layout.segment(hit.name)
        }
    }

    /// Several records with one operation. Those that it did not bring are read each by itself, so
    /// that each has an outcome of its own.
    fn read_neighbours(&self, io: &IoJob, mut placed: Vec<Placed>) -> Vec<Outcome> {
        let Some(first) = placed.first().map(|first| first.hit) else {
            return Vec::new();
        };
        let into = placed.iter_mut().map(|one| {
            let want = want(&one.hit, one.read.slot.len());
            (one.read.slot.as_mut_slice(), want)
        });
        let read = io.read_into(
            &self.path(&first),
            first.offset,
            into.collect(),
            !first.private,
        );
        let mut left = read.unwrap_or_default();
        let outcome = |one: Placed| {
            let (want, len) = (want(&one.hit, one.read.slot.len()), one.hit.len);
            let got = left.min(want);
            left -= got;
            match got == want {
                true => Outcome::Came(Ok(one.read(want, len))),
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
                // Fewer bytes came only where its file ends before it should.
                Ok(read) => {
                    let len = if read < want {
                        read as u64
                    } else {
                        one.hit.len
                    };
                    return Outcome::Came(Ok(one.read(read, len)));
                }
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
