//! How a record gets its name: is the root still ours, is the block there already, is there room,
//! and only then the file.

use std::path::Path;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{LANE_DUMP, MonotonicTime};
use ucm_io::{IoJob, Publish, ReadMode};
use ucm_quota::Room;
use ucm_record::{RecordHeader, verify_header};

use crate::backend::{Done, WriteOptions, Written, either};
use crate::shared::{MAKE_DIRS, Shared};

/// A write on its way.
pub(crate) struct Write {
    pub(crate) id: BlockId,
    pub(crate) slot: Slot,
    pub(crate) options: WriteOptions,
    pub(crate) deadline: MonotonicTime,
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
    pub(crate) fn write(self: &Arc<Self>, io: &IoJob, write: Write) {
        self.write_with(io, write, Room::new(&self.space));
    }

    fn write_with(self: &Arc<Self>, io: &IoJob, write: Write, room: Arc<Room>) {
        let Write {
            id,
            mut slot,
            options,
            deadline,
            done,
        } = write;
        let (shared, taken) = (Arc::clone(self), Arc::clone(&room));
        let work = move |io: &IoJob| {
            let bytes = &mut slot.as_mut_slice()[..options.len];
            let written = shared.write_record(io, id, bytes, &options, &taken)?;
            Ok(written.ok_or(slot))
        };
        let shared = Arc::clone(self);
        let ended = move |result: Result<Result<Written, Slot>>| match result {
            Ok(Ok(written)) => {
                // where it was made, and somebody else had written the record meanwhile
                room.commit(0, None);
                done(Ok(written));
            }
            Ok(Err(slot)) => {
                let write = Write {
                    id,
                    slot,
                    options,
                    deadline,
                    done,
                };
                shared.make_room(write, room);
            }
            Err(error) => {
                room.end(Some(&error)); // where its thread was written off, and still has it
                done(Err(error));
            }
        };
        io.here(work, ended);
    }

    /// Waits for room, on no one's thread, and begins again on one of ours.
    fn make_room(self: &Arc<Self>, write: Write, room: Arc<Room>) {
        let (shared, held) = (Arc::clone(self), Arc::clone(&room));
        let deadline = write.deadline;
        room.reserve(write.options.len as u64, deadline, move |made| match made {
            Ok(()) => {
                let (again, made, done) = (Arc::clone(&shared), Arc::clone(&held), write.done);
                let done: Done<Written> = Box::new(move |result| {
                    made.commit(0, None); // where no thread had begun with it
                    done(result);
                });
                let write = Write { done, ..write };
                shared.on_a_thread(write, move |io, write| again.write_with(io, write, held));
            }
            Err(error) => write.end(Err(error)),
        });
    }

    /// Goes on with a write on a thread for dumps; where there is none, or not in time, the write
    /// ends.
    pub(crate) fn on_a_thread(
        &self,
        write: Write,
        go_on: impl FnOnce(&IoJob, Write) + Send + 'static,
    ) {
        let deadline = write.deadline;
        let (done, ended) = either(write.done);
        let write = Write { done, ..write };
        let work = move |io: &IoJob| {
            go_on(io, write);
            Ok(())
        };
        self.io.job(LANE_DUMP, deadline, work, ended);
    }

    /// Looks, takes room, publishes; `None`: room has to be made first.
    fn write_record(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        bytes: &mut [u8],
        options: &WriteOptions,
        room: &Room,
    ) -> Result<Option<Written>> {
        let record = self.layout.record(id);
        let found = io.stat(&[self.layout.marker(), record.clone()], false)?;
        let (marker, present) = (
            found.first().copied().flatten(),
            found.get(1).copied().flatten(),
        );
        self.check_root(marker).inspect_err(|_| self.look_again())?;
        if let Some(meta) = present.filter(|meta| !meta.is_dir) {
            let known = meta.len == bytes.len() as u64 || self.lengths.presence(meta.len).is_ok();
            if !options.replace && known {
                return Ok(Some(Written::Present));
            }
            if let Some(stays) = self.stays(io, id, &record, meta.len, options.replace)? {
                return Ok(Some(stays));
            }
        }
        if !room.take(bytes.len() as u64)? {
            return Ok(None);
        }
        let published = self.publish(io, id, &record, bytes, options.ordinal);
        room.end(published.as_ref().err());
        published.inspect_err(|error| self.missed(error))?;
        if options.read_back {
            return self.read_back(io, id, &record, 0, None, bytes).map(Some);
        }
        Ok(Some(Written::Published))
    }

    /// The outcome where what has a record's name is not written over: one of a newer version,
    /// whose writer knows what it is, or, unless it is to be replaced, this record with other side
    /// shards, as long as it says itself. An error where the name could not be read in time, since
    /// it may be such a record. What cannot be read is no record.
    fn stays(
        &self,
        io: &IoJob,
        id: BlockId,
        record: &Path,
        len: u64,
        replace: bool,
    ) -> Result<Option<Written>> {
        let bytes = match io.read_piece(record, 0, RecordHeader::LONGEST, ReadMode::Default) {
            Ok(found) => found.map(|(bytes, _)| bytes).unwrap_or_default(),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Timeout | ErrorKind::Busy | ErrorKind::Closed
                ) =>
            {
                return Err(error);
            }
            Err(_) => return Ok(None),
        };
        if RecordHeader::is_newer(&bytes) {
            return Ok(Some(Written::InTheWay(MissReason::NewerVersion)));
        }
        let sided =
            verify_header(&bytes, &self.expect(id)).is_ok_and(|header| header.record_len == len);
        if sided {
            self.lengths.learn(len);
        }
        Ok((sided && !replace).then_some(Written::Present))
    }

    fn publish(
        &self,
        io: &IoJob,
        id: BlockId,
        record: &Path,
        bytes: &[u8],
        ordinal: u32,
    ) -> Result<()> {
        let dir = usize::from(id.0[0]);
        if !self.dirs.lock()[dir] {
            io.make_dir(&self.layout.shard_dir(id), self.config.modes.dir)?;
            self.dirs.lock()[dir] = true;
        }
        let publish = Publish {
            private: &self.next_private(),
            target: record,
            replace: true,
            bytes,
            mode: self.config.modes.file,
            mtime_ns: Some(self.recency.published(id, ordinal, self.clock.wall_ns())),
            durable: false,
        };
        io.publish(publish).map(|_| ())
    }

    /// A write that finds no directory: somebody removed them, so they are made again for the next
    /// one, with the manifest. Not where the root is lost: they would lie on another file system.
    pub(crate) fn missed(self: &Arc<Self>, error: &Error) {
        if error.kind() != ErrorKind::NotFound {
            return;
        }
        *self.dirs.lock() = [false; 256];
        let deadline = self.clock.now().after(MAKE_DIRS);
        let shared = Arc::clone(self);
        let make = move || {
            shared.own_marker(deadline)?;
            shared.furnish(deadline).map(|_| ())
        };
        self.space.in_background(deadline, make, Box::new(|_| {}));
    }
}
