//! Reading records from their segments: those that begin together and lie next to one another with one operation, each
//! straight into its own slot.
//!
//! A record that is not where it should be was removed with its segment, moved by its own writer's seal between the look
//! and the open, or published so lately that nobody here has seen it: another look at the directory tells, once. What
//! goes wrong with several at once is asked again for each by itself, so that each has an outcome of its own.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::Slot;
use ucm_infra::Mono;
use ucm_io::{IoJob, ReadMode};

use super::Segments;
use super::index::Hit;
use crate::backend::{BlockRead, Done, ReadDone};
use crate::engine::LANE_LOAD;
use crate::reading::explain;

/// Bytes of one operation for several records: at least so many that reading takes longer than starting another thread,
/// at most so many (four blocks of 256 KiB with their headers) that they are in a cache of the processor still when the
/// thread that has read them verifies them.
const LEAST: usize = 256 << 10;
const MOST: usize = 5 << 18;
/// Most records of one operation.
const MOST_RECORDS: usize = 256;

/// A read on its way.
struct Read {
    id: BlockId,
    len: usize,
    /// Past every cache, for a second opinion.
    again: bool,
    deadline: Mono,
    done: Done<ReadDone>,
    /// The directory was looked at since the record was missed.
    looked: bool,
}

/// A read whose record was found, and the slot for it.
struct Placed {
    hit: Hit,
    slot: Slot,
    read: Read,
}

/// A record as a thread reads it.
struct Wanted {
    hit: Hit,
    slot: Slot,
    /// Bytes of it that there is room for.
    want: usize,
    again: bool,
}

/// What reading a record where it was found came to.
enum Got {
    Read(ReadDone),
    /// It did not come with its neighbours.
    Alone(Hit, Slot),
    /// Its segment is gone.
    Gone(Slot),
}

impl Wanted {
    fn read(self, read: usize) -> Got {
        Got::Read(ReadDone {
            slot: self.slot,
            read,
            stored_len: self.hit.len,
        })
    }
}

impl Read {
    fn of(read: BlockRead) -> (Slot, Self) {
        let BlockRead {
            id,
            slot,
            again,
            deadline,
            done,
            ..
        } = read;
        let read = Self {
            id,
            len: slot.len(),
            again,
            deadline,
            done,
            looked: false,
        };
        (slot, read)
    }

    /// Bytes of its record that there is room for.
    fn want(&self, hit: &Hit) -> usize {
        usize::try_from(hit.len).unwrap_or(usize::MAX).min(self.len)
    }
}

impl Placed {
    fn split(self) -> (Wanted, Read) {
        let Self { hit, slot, read } = self;
        let wanted = Wanted {
            want: read.want(&hit),
            again: read.again,
            hit,
            slot,
        };
        (wanted, read)
    }

    /// Whether its record follows another one's directly, so that one operation brings both.
    fn follows(&self, before: &Self) -> bool {
        self.hit.segment == before.hit.segment
            && self.hit.private == before.hit.private
            && self.hit.offset == before.hit.offset + before.hit.len
            && before.read.want(&before.hit) as u64 == before.hit.len
            && self.read.deadline == before.read.deadline
            && !self.read.again
            && !before.read.again
    }
}

impl Segments {
    /// Reads records; neighbours together, but in so many operations that every thread for loads has some.
    pub(super) fn read(self: &Arc<Self>, reads: Vec<BlockRead>) {
        let mut placed = Vec::with_capacity(reads.len());
        for mut read in reads {
            let parts = read.parts.take().filter(|_| !read.again);
            if let Some(parts) = parts {
                self.read_parts(read, parts);
                continue;
            }
            let (slot, read) = Read::of(read);
            match self.index.find(read.id) {
                Some(hit) => placed.push(Placed { hit, slot, read }),
                None => self.read_where_it_is(slot, read),
            }
        }
        placed.sort_by_key(|placed| (placed.hit.segment, placed.hit.offset));
        let bytes: usize = placed.iter().map(|placed| placed.read.want(&placed.hit)).sum();
        let share = (bytes / self.shared.io.width(LANE_LOAD).max(1)).clamp(LEAST, MOST);
        let (mut group, mut filled) = (Vec::new(), 0);
        for next in placed {
            let len = next.read.want(&next.hit);
            let joins = group.last().is_some_and(|last| next.follows(last))
                && filled + len <= share
                && group.len() < MOST_RECORDS;
            if !joins {
                self.read_group(std::mem::take(&mut group));
                filled = 0;
            }
            filled += len;
            group.push(next);
        }
        self.read_group(group);
    }

    /// Reads parts of a record to their places. Whatever is odd about it or goes wrong, the whole is read.
    fn read_parts(self: &Arc<Self>, read: BlockRead, parts: Vec<Range<usize>>) {
        let (slot, read) = Read::of(read);
        let whole = self.shared.config.record.record_len() as u64;
        let Some(hit) = self.index.find(read.id).filter(|hit| hit.len == whole) else {
            return self.read_where_it_is(slot, read);
        };
        let (mut wanted, read) = Placed { hit, slot, read }.split();
        let (deadline, segments) = (read.deadline, Arc::clone(self));
        let work = move |io: &IoJob| {
            let (path, bytes) = (segments.path(&hit), wanted.slot.as_mut_slice());
            let want = parts.iter().map(Range::len).sum::<usize>();
            match io.read_parts(&path, hit.offset, &parts, bytes, !hit.private) {
                Ok(read) if read == want => Ok(wanted.read(want)),
                _ => segments.read_one(io, wanted),
            }
        };
        let segments = Arc::clone(self);
        let told = move |result| segments.tell(read, result);
        self.shared.io.job(LANE_LOAD, deadline, work, told);
    }

    fn read_where_it_is(self: &Arc<Self>, slot: Slot, read: Read) {
        match self.index.find(read.id) {
            Some(hit) => self.read_group(vec![Placed { hit, slot, read }]),
            None if read.looked => {
                drop(slot);
                self.early.lost(read.id); // whoever was told that it can be read here
                let text = "this record is in no segment";
                (read.done)(Err(Error::new(ErrorKind::NotFound, text).with("block", read.id)));
            }
            None => {
                let segments = Arc::clone(self);
                let read = Read { looked: true, ..read };
                self.after_look(Box::new(move || segments.read_where_it_is(slot, read)));
            }
        }
    }

    pub(super) fn path(&self, hit: &Hit) -> PathBuf {
        if hit.private {
            self.private(hit.name)
        } else {
            self.shared.layout.segment(hit.name)
        }
    }

    /// Reads records that follow one another, on one thread.
    fn read_group(self: &Arc<Self>, group: Vec<Placed>) {
        let Some(deadline) = group.first().map(|first| first.read.deadline) else {
            return;
        };
        let (wanted, reads): (Vec<_>, Vec<_>) = group.into_iter().map(Placed::split).unzip();
        let segments = Arc::clone(self);
        let work = move |io: &IoJob| Ok(segments.read_neighbours(io, wanted));
        let segments = Arc::clone(self);
        let told = move |result: Result<Vec<Result<Got>>>| match result {
            Ok(got) => reads
                .into_iter()
                .zip(got)
                .for_each(|(read, got)| segments.tell(read, got)),
            Err(error) => reads.into_iter().for_each(|read| (read.done)(Err(error.clone()))),
        };
        self.shared.io.job(LANE_LOAD, deadline, work, told);
    }

    /// Tells how a read ended, or goes on where else the record is.
    fn tell(self: &Arc<Self>, read: Read, got: Result<Got>) {
        match got {
            Ok(Got::Read(done)) => (read.done)(Ok(done)),
            Ok(Got::Alone(hit, slot)) => self.read_group(vec![Placed { hit, slot, read }]),
            Ok(Got::Gone(slot)) => self.read_where_it_is(slot, read),
            Err(error) => (read.done)(Err(error)),
        }
    }

    /// Several records with one operation. Those that it did not bring are read each by itself, so that each has an outcome
    /// of its own.
    fn read_neighbours(&self, io: &IoJob, mut wanted: Vec<Wanted>) -> Vec<Result<Got>> {
        let [first, _, ..] = &wanted[..] else {
            return wanted.into_iter().map(|one| self.read_one(io, one)).collect();
        };
        let (path, offset, keep) = (self.path(&first.hit), first.hit.offset, !first.hit.private);
        let into = wanted.iter_mut().map(|one| (one.slot.as_mut_slice(), one.want));
        let read = io.read_into(&path, offset, into.collect(), keep);
        let mut left = read.unwrap_or_default();
        let outcome = |one: Wanted| {
            let (want, got) = (one.want, left.min(one.want));
            left -= got;
            Ok(match got == want {
                true => one.read(want),
                false => Got::Alone(one.hit, one.slot),
            })
        };
        wanted.into_iter().map(outcome).collect()
    }

    /// One record, from where it was found.
    fn read_one(&self, io: &IoJob, mut one: Wanted) -> Result<Got> {
        loop {
            let (path, offset, keep) = (self.path(&one.hit), one.hit.offset, !one.hit.private);
            let (bytes, want) = (one.slot.as_mut_slice(), one.want);
            let read = if one.again {
                let read = io.read(&path, offset, want, bytes, ReadMode::FreshDirect);
                read.map(|read| read.bytes)
            } else {
                io.read_into(&path, offset, vec![(bytes, want)], keep)
            };
            match read {
                Ok(read) => return Ok(one.read(read)),
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(explain(io, path, error)),
                // Sealed since it was found, or about to be told so.
                Err(_) if one.hit.private => one.hit.private = false,
                Err(_) => {
                    self.index.vanished(one.hit.segment);
                    return Ok(Got::Gone(one.slot));
                }
            }
        }
    }
}
