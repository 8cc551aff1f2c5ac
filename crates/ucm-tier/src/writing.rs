//! How a record gets its name: is the root still ours, is the block there already, is there room,
//! and only then the file.

use std::path::Path;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_io::{IoJob, Publish, ReadMode};
use ucm_record::{RecordHeader, verify_header};

use crate::backend::{WriteOptions, Written};
use crate::shared::{MAKE_DIRS, Shared};

impl Shared {
    /// Writes a record, unless it is there.
    pub(crate) fn write(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        bytes: &[u8],
        options: &WriteOptions,
    ) -> Result<Written> {
        let record = self.layout.record(id);
        let len = bytes.len() as u64;
        let room = loop {
            if let Some(there) = self.find_before_write(io, id, &record, len, options.replace)? {
                return Ok(there);
            }
            match self.space.reserve(len)? {
                Some(room) => break room,
                None => self.space.await_grant(len, io.deadline()),
            }
        };
        if let Err(late) = io.still_wanted() {
            self.space.commit(room, 0, None);
            return Err(late);
        }
        let published = self.publish(io, id, &record, bytes, options.ordinal);
        self.space.ended(room, published.as_ref().err());
        published.inspect_err(|error| self.missed(error))?;
        Ok(Written::Published)
    }

    /// Checks that the root is still ours. The outcome where the record is not to be written,
    /// because of what has its name.
    fn find_before_write(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        record: &Path,
        len: u64,
        replace: bool,
    ) -> Result<Option<Written>> {
        let found = io.stat(&[self.layout.marker(), record.to_owned()], false)?;
        let (marker, present) = (
            found.first().copied().flatten(),
            found.get(1).copied().flatten(),
        );
        self.check_root(marker).inspect_err(|_| self.look_again())?;
        let Some(meta) = present.filter(|meta| !meta.is_dir) else {
            return Ok(None);
        };
        let known = meta.len == len || self.lengths.presence(meta.len).is_ok();
        if !replace && known {
            return Ok(Some(Written::Present));
        }
        self.stays(io, id, record, meta.len, replace)
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
        let header = verify_header(&bytes, &self.expect(id, &bytes)).ok();
        let sided = header.filter(|header| header.record_len == len);
        if let Some(header) = &sided {
            self.lengths.learn(header.meta.part, len);
        }
        Ok((sided.is_some() && !replace).then_some(Written::Present))
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
