//! How a record gets its name: is the root still ours, is the block there already, is there room, and only then the file.

use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::Slot;
use ucm_infra::Mono;
use ucm_io::{FileMeta, IoBuf, IoDone, IoOp, ReadMode};

use crate::backend::{Done, WriteOptions, Written};
use crate::engine::LANE_DUMP;
use crate::posix::{MAKE_DIRS, Shared};
use crate::record::RecordHeader;
use crate::space::Ticket;

/// A write on its way.
pub(crate) struct Write {
    pub(crate) id: BlockId,
    pub(crate) slot: Slot,
    pub(crate) options: WriteOptions,
    pub(crate) deadline: Mono,
    pub(crate) done: Done<Written>,
}

impl Write {
    /// Tells how it ended, the slot being free by then.
    pub(crate) fn end(self, result: Result<Written>) {
        drop(self.slot);
        (self.done)(result);
    }
}

impl Shared {
    /// Writes a record, unless it is there.
    pub(crate) fn write(self: &Arc<Self>, write: Write) {
        let (id, deadline) = (write.id, write.deadline);
        let shared = Arc::clone(self);
        let looked = move |result: Result<IoDone>| match result {
            Ok(IoDone::Stat(metas)) => {
                let mut metas = metas.into_iter();
                shared.write_checked(write, metas.next().flatten(), metas.next().flatten());
            }
            Ok(_) => write.end(Err(Error::internal("a stat answered with something else"))),
            Err(error) => write.end(Err(error)),
        };
        let op = IoOp::Stat {
            paths: vec![self.layout.marker(), self.layout.record(id)],
            stop_at_missing: false,
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(looked));
    }

    fn write_checked(self: &Arc<Self>, write: Write, marker: Option<FileMeta>, present: Option<FileMeta>) {
        if let Err(error) = self.check_root(marker) {
            self.look_again();
            return write.end(Err(error));
        }
        match present {
            Some(meta) if !write.options.replace && self.presence(Some(meta)).is_ok() => {
                write.end(Ok(Written::Present));
            }
            Some(meta) if !meta.is_dir => self.write_unless_newer(write),
            _ => self.write_into_room(write),
        }
    }

    /// Something else has the name. Only a record of a newer version stays: its writer knows what it is.
    fn write_unless_newer(self: &Arc<Self>, write: Write) {
        let (len, deadline) = (RecordHeader::LONGEST, write.deadline);
        let op = IoOp::Read {
            path: self.layout.record(write.id),
            offset: 0,
            len,
            buf: IoBuf::Heap(vec![0; len]),
            mode: ReadMode::Default,
        };
        let shared = Arc::clone(self);
        let looked = move |result: Result<IoDone>| match result {
            Ok(IoDone::Read { buf, read, .. }) if RecordHeader::is_newer(&buf[..read]) => {
                write.end(Ok(Written::Present));
            }
            // Nobody looked: it may be of a newer version.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Timeout | ErrorKind::Busy | ErrorKind::Closed
                ) =>
            {
                write.end(Err(error));
            }
            _ => shared.write_into_room(write), // what cannot be read is no record
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(looked));
    }

    fn write_into_room(self: &Arc<Self>, write: Write) {
        let (shared, bytes) = (Arc::clone(self), write.options.len as u64);
        let admitted = move |ticket: Result<Ticket>| match ticket {
            Ok(ticket) => shared.write_admitted(write, ticket),
            Err(error) => write.end(Err(error)),
        };
        self.space.admit(bytes, Box::new(admitted));
    }

    fn write_admitted(self: &Arc<Self>, write: Write, ticket: Ticket) {
        if self.dirs.lock()[usize::from(write.id.0[0])] {
            return self.publish(write, ticket);
        }
        let op = IoOp::MakeDir {
            path: self.layout.shard_dir(write.id),
            mode: self.config.modes.dir,
        };
        let (shared, deadline) = (Arc::clone(self), write.deadline);
        let made = move |result: Result<IoDone>| match result {
            Ok(_) => {
                shared.dirs.lock()[usize::from(write.id.0[0])] = true;
                shared.publish(write, ticket);
            }
            Err(error) => {
                shared.space.ended(ticket, Some(&error));
                shared.missed(&error);
                write.end(Err(error));
            }
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(made));
    }

    fn publish(self: &Arc<Self>, write: Write, ticket: Ticket) {
        let (shared, id) = (Arc::clone(self), write.id);
        self.waiting
            .write(id, Box::new(move || shared.publish_alone(write, ticket)));
    }

    fn publish_alone(self: &Arc<Self>, write: Write, ticket: Ticket) {
        let Write {
            id,
            slot,
            options,
            deadline,
            done,
        } = write;
        let op = IoOp::Publish {
            private: self.next_private(),
            target: self.layout.record(id),
            replace: true,
            buf: IoBuf::Slot(slot),
            len: options.len,
            mode: self.config.modes.file,
            mtime_ns: Some(self.recency.published(id, options.ordinal, self.clock.wall_ns())),
            durable: false,
        };
        let shared = Arc::clone(self);
        let published = move |result: Result<IoDone>| {
            let error = result.as_ref().err();
            shared.waiting.written(id);
            shared.space.ended(ticket, error);
            error.inspect(|error| shared.missed(error));
            match result {
                Ok(IoDone::Published { buf, .. }) if options.read_back => {
                    shared.read_back(id, buf, options.len, deadline, done);
                }
                result => done(result.map(|_| Written::Published)),
            }
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(published));
    }

    /// A write that finds no directory: somebody removed them, so they are made again for the next one, with the
    /// manifest.
    pub(crate) fn missed(self: &Arc<Self>, error: &Error) {
        if error.kind() != ErrorKind::NotFound {
            return;
        }
        *self.dirs.lock() = [false; 256];
        let deadline = self.clock.now().after(MAKE_DIRS);
        let shared = Arc::clone(self);
        let make = move || shared.furnish(deadline).map(|_| ());
        self.space.in_background(deadline, make, Box::new(|_| {}));
    }
}
