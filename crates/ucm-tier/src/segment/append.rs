//! The way of a record into an open segment: the write, the read back if that is wanted, and what
//! came of it.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::LANE_DUMP;
use ucm_io::IoJob;

use super::Segments;
use super::format::Entry;
use super::open::{Append, Next, OpenSegment};
use crate::backend::{Done, Written};
use crate::writing::Write;

impl Segments {
    /// Writes a record to its place, here.
    pub(super) fn write_into(
        self: &Arc<Self>,
        io: &IoJob,
        open: &Arc<OpenSegment>,
        append: Append,
    ) {
        let (write, written) = self.placed_write(open, append);
        io.here(write, written);
    }

    /// The same on a thread for dumps.
    pub(super) fn write_elsewhere(self: &Arc<Self>, open: &Arc<OpenSegment>, append: Append) {
        let deadline = append.write.deadline;
        let (write, written) = self.placed_write(open, append);
        self.shared.io.job(LANE_DUMP, deadline, write, written);
    }

    /// What writes a record that has its place, and what is told of it.
    fn placed_write(
        self: &Arc<Self>,
        open: &Arc<OpenSegment>,
        append: Append,
    ) -> (
        impl FnOnce(&IoJob) -> Result<Written> + Send + 'static,
        impl FnOnce(Result<Written>) + Send + 'static,
    ) {
        let Append {
            number,
            entry,
            write,
        } = append;
        let Write {
            mut slot,
            options,
            done,
            ..
        } = write;
        let (segments, path) = (Arc::clone(self), self.files.private(open.name));
        let write = move |io: &IoJob| {
            let whole = &mut slot.as_mut_slice()[..entry.len as usize];
            io.write_at(&path, entry.offset, &whole[..options.len], true)?;
            if options.read_back {
                let (shared, len) = (&segments.shared, Some(entry.len));
                return shared.read_back(io, entry.id, &path, entry.offset, len, whole);
            }
            Ok(Written::Published)
        };
        let (segments, open) = (Arc::clone(self), Arc::clone(open));
        let written = move |result| segments.written(&open, (number, entry), done, result);
        (write, written)
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
                if self.add_newest(open, &entry) {
                    // else the index was full, and it cannot be read
                    self.locally_visible.gained(entry.id);
                }
                open.written(number, done, now, at_once)
            }
            Ok(other) => {
                done(Ok(other));
                open.failed(&Error::internal("not published"), true, at_once)
            }
            Err(error) => {
                self.shared.missed(&error);
                let next = open.failed(&error, error.kind() == ErrorKind::Busy, at_once);
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

    /// Takes a record that was written into the index, the last written in place of copies in
    /// segments beside this one; whether it is found there.
    fn add_newest(&self, open: &OpenSegment, entry: &Entry) -> bool {
        let _one_at_a_time = self.writer.adding.lock(); // or two copies drop each other
        self.index.add(open.number, &[*entry]);
        let mut place = self.index.find(entry.id);
        while let Some(other) = place.filter(|hit| hit.private && hit.segment != open.number) {
            self.index.drop_copy(entry.id, &other);
            place = self.index.find(entry.id);
        }
        place.is_some_and(|hit| hit.segment == open.number)
    }
}
