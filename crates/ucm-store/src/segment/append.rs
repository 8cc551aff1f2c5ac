//! The way of a record into an open segment: its turn, the write, the read back if that is wanted, and what came of it.
//!
//! Through the page cache of a local file system a segment is written by one thread at a time ([`Shared::takes_turns`]).
//! On a network each write waits for its server, and they go side by side.
//!
//! [`Shared::takes_turns`]: crate::posix::Shared::takes_turns

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Mono;
use ucm_io::{IoBuf, IoDone, IoOp, ReadMode};

use super::Segments;
use super::format::Entry;
use super::open::{Append, Next, OpenSegment};
use crate::backend::{Done, Written};
use crate::engine::LANE_DUMP;
use crate::writing::Write;

impl Segments {
    /// Writes a record to its place as soon as it is in turn.
    pub(super) fn enqueue(self: &Arc<Self>, open: &Arc<OpenSegment>, append: Append) {
        if !self.shared.takes_turns() {
            return self.write_into(open, append, false);
        }
        if open.enqueue(append) {
            self.seal_bell.ring(); // the timer keeps its deadline
        }
        self.go_on(open);
    }

    fn go_on(self: &Arc<Self>, open: &Arc<OpenSegment>) {
        open.start_writes(|append| self.write_into(open, append, true));
    }

    fn write_into(self: &Arc<Self>, open: &Arc<OpenSegment>, append: Append, queued: bool) {
        let Append { number, entry, write } = append;
        let Write {
            slot,
            options,
            deadline,
            done,
            ..
        } = write;
        let path = self.private(open.name);
        let op = IoOp::WriteAt {
            path: path.clone(),
            offset: entry.offset,
            buf: IoBuf::Slot(slot),
            len: options.len,
        };
        let (segments, open) = (Arc::clone(self), Arc::clone(open));
        let written = move |result: Result<IoDone>| {
            let result = match result {
                Ok(IoDone::Wrote { buf }) if options.read_back => Ok(Some(buf)),
                result => result.map(|_| None), // and the slot is free
            };
            if queued {
                open.write_ended();
                segments.go_on(&open);
            }
            match result {
                Ok(Some(buf)) => segments.read_back(path, open, (number, entry), buf, deadline, done),
                result => segments.written(&open, (number, entry), done, result.map(|_| Written::Published)),
            }
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(written));
    }

    /// Ends the writes that wait for their turn and whose time is over; when that of the next one is.
    pub(super) fn end_late_appends(self: &Arc<Self>, open: &Arc<OpenSegment>, now: Mono) -> Option<Mono> {
        let (late, next) = open.late_appends(now);
        for Append { number, entry, write } in late {
            drop(write.slot);
            let text = "the writes of other records to this segment did not end in time";
            let error = Error::new(ErrorKind::Timeout, text);
            self.written(open, (number, entry), write.done, Err(error));
        }
        next
    }

    /// Reads a record that was just written past every cache, and judges it.
    fn read_back(
        self: &Arc<Self>,
        path: PathBuf,
        open: Arc<OpenSegment>,
        place: (usize, Entry),
        mut buf: IoBuf,
        deadline: Mono,
        done: Done<Written>,
    ) {
        let entry = place.1;
        let len = entry.len as usize;
        if let IoBuf::Slot(slot) = &mut buf {
            slot.as_mut_slice()[..len].fill(0); // a read that brings nothing must not find the right bytes there
        }
        let op = IoOp::Read {
            path,
            offset: entry.offset,
            len,
            buf,
            mode: ReadMode::FreshDirect,
        };
        let segments = Arc::clone(self);
        let read = move |result: Result<IoDone>| {
            let judged = result.and_then(|answer| match answer {
                IoDone::Read { buf, read, .. } => {
                    Ok(segments.shared.judge(entry.id, &buf[..read], entry.len))
                }
                _ => Err(Error::internal("a read answered with something else")),
            });
            let judged = judged.map(|judged| judged.map_or_else(Written::Unsound, |()| Written::Published));
            segments.written(&open, place, done, judged);
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(read));
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
            Next::Begin => self.seal_bell.ring(),
            Next::Seal => {
                self.leave(open);
                self.seal(open);
            }
        }
    }
}
