//! How a record gets its name: is the root still ours, is the block there already, is there room,
//! and only then the file.

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_io::{IoJob, Publish, ReadMode};
use ucm_record::{RecordHeader, verify_header};

use crate::backend::{WriteOptions, Written};
use crate::shared::{MAKE_DIRS, Shared};

/// A record that is to be written, and its file.
struct NewRecord<'a> {
    io: &'a IoJob,
    id: BlockId,
    path: PathBuf,
    bytes: &'a [u8],
    options: WriteOptions,
}

impl Shared {
    /// Writes a record, unless it is there.
    pub(crate) fn write(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        bytes: &[u8],
        options: WriteOptions,
    ) -> Result<Written> {
        let path = self.layout.record(id);
        let new = NewRecord {
            io,
            id,
            path,
            bytes,
            options,
        };
        let len = bytes.len() as u64;
        let room = loop {
            if let Some(there) = self.find_before_write(&new)? {
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
        let published = self.publish(&new);
        self.space.ended(room, published.as_ref().err());
        published.inspect_err(|error| self.missed(error))?;
        Ok(Written::Published)
    }

    /// Checks that the root is still ours. The outcome where the record is not to be written,
    /// because of what has its name.
    fn find_before_write(self: &Arc<Self>, new: &NewRecord<'_>) -> Result<Option<Written>> {
        let paths = [self.layout.marker(), new.path.clone()];
        let found = new.io.stat(&paths, false)?;
        let found = |at: usize| found.get(at).copied().flatten();
        let (marker, present) = (found(0), found(1));
        self.check_root(marker).inspect_err(|_| self.look_again())?;
        let Some(meta) = present.filter(|meta| !meta.is_dir) else {
            return Ok(None);
        };
        let len = new.bytes.len() as u64;
        let known = meta.len == len || self.lengths.presence(meta.len).is_ok();
        if !new.options.replace && known {
            return Ok(Some(Written::Present));
        }
        self.stays(new, meta.len)
    }

    /// The outcome where what has a record's name is not written over: one of a newer version,
    /// whose writer knows what it is, or, unless it is to be replaced, this record with other side
    /// shards, as long as it says itself. An error where the name could not be read in time, since
    /// it may be such a record. What cannot be read is no record.
    fn stays(&self, new: &NewRecord<'_>, len: u64) -> Result<Option<Written>> {
        let most = RecordHeader::LONGEST;
        let late = [ErrorKind::Timeout, ErrorKind::Busy, ErrorKind::Closed];
        let bytes = match new.io.read_piece(&new.path, 0, most, ReadMode::Default) {
            Ok(found) => found.map(|(bytes, _)| bytes).unwrap_or_default(),
            Err(error) if late.contains(&error.kind()) => return Err(error),
            Err(_) => return Ok(None),
        };
        if RecordHeader::is_newer(&bytes) {
            return Ok(Some(Written::InTheWay(MissReason::NewerVersion)));
        }
        let header = verify_header(&bytes, &self.expect(new.id, &bytes)).ok();
        let sided = header.filter(|header| header.record_len == len);
        if let Some(header) = &sided {
            self.lengths.learn(header.meta.part, len);
        }
        Ok((sided.is_some() && !new.options.replace).then_some(Written::Present))
    }

    fn publish(&self, new: &NewRecord<'_>) -> Result<()> {
        let dir = usize::from(new.id.0[0]);
        if !self.dirs.lock()[dir] {
            let path = self.layout.shard_dir(new.id);
            new.io.make_dir(&path, self.config.modes.dir)?;
            self.dirs.lock()[dir] = true;
        }
        let (recency, now) = (&self.recency, self.clock.wall_ns());
        let publish = Publish {
            private: &self.next_private(),
            target: &new.path,
            replace: true,
            bytes: new.bytes,
            mode: self.config.modes.file,
            mtime_ns: Some(recency.published(new.id, new.options.ordinal, now)),
            durable: false,
        };
        new.io.publish(publish).map(drop)
    }

    /// After a write without a directory: the directories were removed, so they are made again for
    /// the next write, with the manifest. Not if the root is lost: they would be on another file
    /// system.
    pub(crate) fn missed(self: &Arc<Self>, error: &Error) {
        if error.kind() != ErrorKind::NotFound {
            return;
        }
        *self.dirs.lock() = [false; 256];
        let deadline = self.clock.now().after(MAKE_DIRS);
        let shared = Arc::clone(self);
        let make = move || {
            shared.own_marker(deadline)?;
            shared.make_namespace(deadline).map(|_| ())
        };
        self.space.in_background(deadline, make, |_| {});
    }
}
