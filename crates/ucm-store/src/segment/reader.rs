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
use ucm_io::{IoBuf, IoDone, IoOp, ReadMode};

use super::Segments;
use super::index::Hit;
use crate::backend::{BlockRead, Done, ReadDone};
use crate::engine::LANE_LOAD;

/// Bytes of one operation for several records: at least so many that reading takes longer than starting another thread,
/// at most so many (four blocks of 256 KiB with their headers) that they are in a cache of the processor still when the
/// thread that has read them verifies them.
const LEAST: usize = 256 << 10;
const MOST: usize = 5 << 18;
/// Most records of one operation.
const MOST_RECORDS: usize = 256;

const LOST_SLOT: &str = "a slot went into a read and did not come out";

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

impl Read {
    fn of(read: BlockRead) -> (Slot, Self) {
        let BlockRead {
            id,
            slot,
            deadline,
            done,
        } = read;
        let len = slot.len();
        let read = Self {
            id,
            len,
            again: false,
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
    /// Whether its record follows another one's directly, so that one operation brings both.
    fn follows(&self, before: &Self) -> bool {
        self.hit.segment == before.hit.segment
            && self.hit.private == before.hit.private
            && self.hit.offset == before.hit.offset + before.hit.len
            && before.read.want(&before.hit) as u64 == before.hit.len
            && self.read.deadline == before.read.deadline
    }
}

impl Segments {
    /// Reads a record into a slot, from its start.
    pub(super) fn read(
        self: &Arc<Self>,
        id: BlockId,
        slot: Slot,
        again: bool,
        deadline: Mono,
        done: Done<ReadDone>,
    ) {
        let (slot, read) = Read::of(BlockRead {
            id,
            slot,
            deadline,
            done,
        });
        self.read_where_it_is(slot, Read { again, ..read });
    }

    /// Reads several records; neighbours together, but in so many operations that every thread for loads has some.
    pub(super) fn read_many(self: &Arc<Self>, reads: Vec<BlockRead>) {
        let mut placed = Vec::with_capacity(reads.len());
        for (slot, read) in reads.into_iter().map(Read::of) {
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
    pub(super) fn read_parts(self: &Arc<Self>, read: BlockRead, parts: Vec<Range<usize>>) {
        let (slot, read) = Read::of(read);
        let whole = self.shared.config.record.record_len() as u64;
        let Some(hit) = self.index.find(read.id).filter(|hit| hit.len == whole) else {
            return self.read_where_it_is(slot, read);
        };
        let (deadline, want) = (read.deadline, parts.iter().map(Range::len).sum::<usize>());
        let op = IoOp::ReadParts {
            path: self.path(&hit),
            offset: hit.offset,
            parts,
            buf: IoBuf::Slot(slot),
            keep: !hit.private,
        };
        let segments = Arc::clone(self);
        let answer = move |result: Result<IoDone>| match result {
            Ok(IoDone::ReadInto { mut bufs, read: got }) => match bufs.pop() {
                Some(IoBuf::Slot(slot)) if got.as_ref().is_ok_and(|&got| got == want) => {
                    (read.done)(Ok(ReadDone {
                        slot,
                        read: want,
                        stored_len: hit.len,
                    }));
                }
                Some(IoBuf::Slot(slot)) => segments.read_alone(Placed { hit, slot, read }),
                _ => (read.done)(Err(Error::internal(LOST_SLOT))),
            },
            Ok(_) => (read.done)(Err(Error::internal("a read answered with something else"))),
            Err(error) => (read.done)(Err(error)),
        };
        self.shared.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

    fn read_where_it_is(self: &Arc<Self>, slot: Slot, read: Read) {
        match self.index.find(read.id) {
            Some(hit) => self.read_alone(Placed { hit, slot, read }),
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

    fn read_alone(self: &Arc<Self>, placed: Placed) {
        if placed.read.again {
            self.read_again(placed);
        } else {
            self.read_group(vec![placed]);
        }
    }

    fn path(&self, hit: &Hit) -> PathBuf {
        if hit.private {
            self.private(hit.name)
        } else {
            self.shared.layout.segment(hit.name)
        }
    }

    /// Reads records that follow one another with one operation.
    fn read_group(self: &Arc<Self>, group: Vec<Placed>) {
        let Some(first) = group.first() else { return };
        let (path, offset, deadline) = (self.path(&first.hit), first.hit.offset, first.read.deadline);
        let keep = !first.hit.private;
        let (mut into, mut reads) = (Vec::with_capacity(group.len()), Vec::with_capacity(group.len()));
        for Placed { hit, slot, read } in group {
            into.push((IoBuf::Slot(slot), read.want(&hit)));
            reads.push((hit, read));
        }
        let op = IoOp::ReadInto {
            path: path.clone(),
            offset,
            into,
            keep,
        };
        let segments = Arc::clone(self);
        let answer = move |result: Result<IoDone>| match result {
            Ok(IoDone::ReadInto { bufs, read: Ok(read) }) => segments.share_out(bufs, reads, read),
            Ok(IoDone::ReadInto {
                bufs,
                read: Err(error),
            }) => segments.failed(path, bufs, reads, error),
            other => {
                let error = other.err();
                let error = error.unwrap_or_else(|| Error::internal("a read answered with something else"));
                for (_, read) in reads {
                    (read.done)(Err(error.clone()));
                }
            }
        };
        self.shared.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

    /// The second opinion on bytes that failed verification.
    fn read_again(self: &Arc<Self>, Placed { hit, slot, read }: Placed) {
        let path = self.path(&hit);
        let pool = Arc::clone(slot.pool());
        let op = IoOp::Read {
            path: path.clone(),
            offset: hit.offset,
            len: read.want(&hit),
            buf: IoBuf::Slot(slot),
            mode: ReadMode::FreshDirect,
        };
        let (segments, deadline) = (Arc::clone(self), read.deadline);
        let answer = move |result: Result<IoDone>| match result {
            Ok(IoDone::Read {
                buf: IoBuf::Slot(slot),
                read: count,
                ..
            }) => (read.done)(Ok(ReadDone {
                slot,
                read: count,
                stored_len: hit.len,
            })),
            Ok(_) => (read.done)(Err(Error::internal("a read answered with something else"))),
            Err(error) if error.kind() == ErrorKind::NotFound => match pool.try_acquire() {
                // The slot went with the read, so another one of its pool takes its place.
                Some(slot) => segments.missed(slot, read, hit),
                None => {
                    let text = "this record's segment is gone, and no slot is free to look for another copy";
                    (read.done)(Err(Error::new(ErrorKind::Busy, text).with("block", read.id)));
                }
            },
            Err(error) => segments.shared.explain(path, error, deadline, read.done),
        };
        self.shared.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

    /// A file could not be read: several records are read each by itself, one is told why.
    fn failed(self: &Arc<Self>, path: PathBuf, bufs: Vec<IoBuf>, reads: Vec<(Hit, Read)>, error: Error) {
        let missed = error.kind() == ErrorKind::NotFound;
        let alone = reads.len() == 1;
        for (buf, (hit, read)) in bufs.into_iter().zip(reads) {
            match buf {
                IoBuf::Slot(slot) if missed => self.missed(slot, read, hit),
                IoBuf::Slot(slot) if !alone => self.read_alone(Placed { hit, slot, read }),
                buf => {
                    drop(buf);
                    let (error, deadline) = (error.clone(), read.deadline);
                    self.shared.explain(path.clone(), error, deadline, read.done);
                }
            }
        }
    }

    /// The segment is not there.
    fn missed(self: &Arc<Self>, slot: Slot, read: Read, hit: Hit) {
        if hit.private {
            // Sealed since it was found, or about to be told so.
            let named = Hit {
                private: false,
                ..hit
            };
            return self.read_alone(Placed {
                hit: named,
                slot,
                read,
            });
        }
        self.index.vanished(hit.segment);
        self.read_where_it_is(slot, read);
    }

    /// Tells each what it got of `read` bytes that came for all; several that got too little are read each by itself.
    fn share_out(self: &Arc<Self>, bufs: Vec<IoBuf>, reads: Vec<(Hit, Read)>, read: usize) {
        let alone = reads.len() == 1;
        let mut left = read;
        for (buf, (hit, read)) in bufs.into_iter().zip(reads) {
            let want = read.want(&hit);
            let got = left.min(want);
            left -= got;
            match buf {
                IoBuf::Slot(slot) if alone || got == want => (read.done)(Ok(ReadDone {
                    slot,
                    read: got,
                    stored_len: hit.len,
                })),
                IoBuf::Slot(slot) => self.read_alone(Placed { hit, slot, read }),
                IoBuf::Heap(_) => (read.done)(Err(Error::internal(LOST_SLOT))),
            }
        }
    }
}
