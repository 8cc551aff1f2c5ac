//! The way of a record into an open segment: its turn, the write, the read back if that is wanted, and what came of it.
//!
//! Through the page cache of a local file system a segment is written by one thread at a time ([`Shared::serializes_writes`]).
//! On a network each write waits for its server, and they go side by side.
//!
//! [`Shared::serializes_writes`]: crate::posix::Shared::serializes_writes

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{LANE_DUMP, MonotonicTime};
use ucm_io::IoJob;

use super::Segments;
use super::format::Entry;
use super::open::{Append, Next, OpenSegment};
use crate::backend::{Done, Written};
use crate::writing::Write;

impl Segments {
    /// Writes a record to its place as soon as it is in turn.
    pub(super) fn enqueue(self: &Arc<Self>, open: &Arc<OpenSegment>, append: Append) {
        if !self.shared.serializes_writes() {
            return self.write_into(open, append, false);
        }
        if open.enqueue(append) {
            self.seal_notify.notify(); // the timer keeps its deadline
        }
        self.go_on(open);
    }

    fn go_on(self: &Arc<Self>, open: &Arc<OpenSegment>) {
        open.start_writes(|append| self.write_into(open, append, true));
    }

    fn write_into(self: &Arc<Self>, open: &Arc<OpenSegment>, append: Append, queued: bool) {
        let Append { number, entry, write } = append;
        let Write {
            mut slot,
            options,
            deadline,
            done,
            ..
        } = write;
        let (segments, path) = (Arc::clone(self), self.private(open.name));
        let work = move |io: &IoJob| {
            let whole = &mut slot.as_mut_slice()[..entry.len as usize];
            io.write_at(&path, entry.offset, &whole[..options.len])?;
            if options.read_back {
                let (shared, len) = (&segments.shared, Some(entry.len));
                return shared.read_back(io, entry.id, &path, entry.offset, len, whole);
            }
            Ok(Written::Published)
        };
        let (segments, open) = (Arc::clone(self), Arc::clone(open));
        let written = move |result: Result<Written>| {
            if queued {
                open.write_ended();
                segments.go_on(&open);
            }
            segments.written(&open, (number, entry), done, result);
        };
        self.shared.io.job(LANE_DUMP, deadline, work, written);
    }

    /// Ends the writes that wait for their turn and whose time is over; when that of the next one is.
    pub(super) fn end_late_appends(
        self: &Arc<Self>,
        open: &Arc<OpenSegment>,
        now: MonotonicTime,
    ) -> Option<MonotonicTime> {
        let (late, next) = open.late_appends(now);
        for Append { number, entry, write } in late {
            drop(write.slot);
            let text = "the writes of other records to this segment did not end in time";
            let error = Error::new(ErrorKind::Timeout, text);
            self.written(open, (number, entry), write.done, Err(error));
        }
        next
    }

    /// A write ended. Its slot is free by now.
    fn written(
        self: &Arc<Self>,
        open: &Arc<OpenSegment>,
        (number, entry): (usize, Entry),
        done: Done<Written>,
        result: Result<Written>,
    ) {
        let (at_once, now) = (self.seals_at_once(), self.shared.clock.now());
        let next = match result {
            Ok(Written::Published) => {
                self.index.add(open.number, &[entry]);
                let mut place = self.index.find(entry.id);
                while let Some(other) = place.filter(|hit| hit.private && hit.segment != open.number) {
                    self.index.drop_copy(entry.id, &other); // in a segment beside this one: the last written counts
                    place = self.index.find(entry.id);
                }
                if place.is_some_and(|hit| hit.segment == open.number) {
                    self.early.gained(entry.id); // else the index was full, and it cannot be read
                }
                open.written(number, done, now, at_once)
            }
            Ok(other) => {
                done(Ok(other));
                open.failed(&Error::internal("not published"), true, at_once, now)
            }
            Err(error) => {
                self.shared.missed(&error);
                let next = open.failed(&error, error.kind() == ErrorKind::Busy, at_once, now);
                done(Err(error));
                next
            }
        };
        match next {
            Next::Wait => {}
            Next::Begin => self.seal_notify.notify(),
            Next::Seal => {
                self.leave(open);
                self.seal(open);
            }
        }
    }
}
