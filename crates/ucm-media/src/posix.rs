//! The POSIX backend: one record per file below a marked root, on anything that mounts.
//!
//! A record is written to a private name, closed, renamed: it is there whole or not at all, and
//! never written again. Present means a length that this part's records can have. Every system call
//! runs in the I/O engine's pool.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{LANE_SPACE, MonotonicTime};
use ucm_io::{FileMeta, IoJob, Publish, ReadMode};
use ucm_record::{RecordHeader, verify_header};

use crate::backend::{
    Backend, BlockRead, Features, Listed, MediumStats, Outcome, Parts, Presence, ReadDone,
    ReadPart, WriteOptions, Written,
};
use crate::quota::visit_records;
pub use crate::shared::{PosixConfig, RootSlot};
use crate::shared::{Shared, explain};

/// One record per file.
pub(crate) struct PosixBackend {
    shared: Arc<Shared>,
}

impl PosixBackend {
    /// Over this root; nothing is touched before [`Backend::open`].
    pub(crate) fn over(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Whether a record is complete, by its file's metadata, or why it is no hit.
    fn presence(&self, meta: Option<FileMeta>) -> Presence {
        let file = meta.filter(|meta| !meta.is_dir).ok_or(MissReason::Absent)?;
        self.shared.lengths.presence(file.len)
    }

    /// Reads a record into its slot, from its start, or the parts of it that are wanted.
    fn read_one(&self, io: &IoJob, read: BlockRead) -> Result<ReadDone> {
        let (mut slot, path) = (read.slot, self.shared.layout.record(read.id));
        let len = self.shared.lengths.own_len() as usize;
        let mode = match read.again {
            true => ReadMode::FreshDirect,
            false => ReadMode::Default,
        };
        let whole = 0..len.min(slot.len());
        let Parts { steps, mut arrived } = read.parts.unwrap_or_else(|| Parts {
            steps: vec![vec![whole]],
            arrived: Box::new(|_, _| None),
        });
        let (mut brought, mut stored_len, mut steps) = (0, 0, VecDeque::from(steps));
        'steps: while let Some(step) = steps.pop_front() {
            for part in &step {
                let room = &mut slot.as_mut_slice()[part.start..];
                let done = io.read(&path, part.start as u64, part.len(), room, mode);
                let done = done.map_err(|error| explain(io, path.clone(), error))?;
                (brought, stored_len) = (brought + done.bytes, done.file_len);
                // A record may be without side shards, or have others that lie elsewhere.
                if done.bytes < part.len() && !read.sides {
                    break 'steps;
                }
            }
            let part = ReadPart::of(&step, slot.as_slice(), stored_len);
            steps.extend(arrived(io, part));
        }
        Ok(ReadDone {
            slot,
            read: brought,
            stored_len,
            lent: None,
        })
    }

    /// Writes a record, unless it is there: if the root is still ours and there is room, its file.
    fn write_new(&self, new: &NewRecord<'_>) -> Result<Written> {
        let (io, space, len) = (new.io, &self.shared.space, new.bytes.len() as u64);
        let room = loop {
            if let Some(there) = self.find_before_write(new)? {
                return Ok(there);
            }
            match space.reserve(len)? {
                Some(room) => break room,
                None => space.await_grant(len, io.deadline()),
            }
        };
        if let Err(late) = io.still_wanted() {
            space.commit(room, 0, None);
            return Err(late);
        }
        let published = self.publish(new);
        space.ended(room, published.as_ref().err());
        published.inspect_err(|error| self.shared.missed(error))?;
        Ok(Written::Published)
    }

    /// Checks that the root is still ours. The outcome where the record is not to be written,
    /// because of what has its name.
    fn find_before_write(&self, new: &NewRecord<'_>) -> Result<Option<Written>> {
        let paths = [self.shared.layout.marker(), new.path.clone()];
        let found = new.io.stat(&paths, false)?;
        let found = |at: usize| found.get(at).copied().flatten();
        let (marker, present, shared) = (found(0), found(1), &self.shared);
        shared
            .check_root(marker)
            .inspect_err(|_| shared.look_again())?;
        let Some(meta) = present.filter(|meta| !meta.is_dir) else {
            return Ok(None);
        };
        let len = new.bytes.len() as u64;
        let known = meta.len == len || self.shared.lengths.presence(meta.len).is_ok();
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
        let (lengths, scope) = (&self.shared.lengths, &self.shared.config.scope);
        let expected = lengths.expect(new.id, *scope.identity.digest(), &bytes);
        let header = verify_header(&bytes, &expected).ok();
        let sided = header.filter(|header| header.record_len == len);
        if let Some(header) = &sided {
            lengths.learn(header.meta.part, len);
        }
        Ok((sided.is_some() && !new.options.replace).then_some(Written::Present))
    }

    fn publish(&self, new: &NewRecord<'_>) -> Result<()> {
        let (shared, dir) = (&self.shared, usize::from(new.id.0[0]));
        if !shared.dirs.lock()[dir] {
            let path = shared.layout.shard_dir(new.id);
            new.io.make_dir(&path, shared.config.modes.dir)?;
            shared.dirs.lock()[dir] = true;
        }
        let (recency, now) = (&shared.recency, shared.clock.wall_ns());
        let publish = Publish {
            private: &shared.next_private(),
            target: &new.path,
            replace: true,
            bytes: new.bytes,
            mode: shared.config.modes.file,
            mtime_ns: Some(recency.published(new.id, new.options.ordinal, now)),
            durable: false,
        };
        new.io.publish(publish).map(drop)
    }
}

/// A record that is to be written, and its file.
struct NewRecord<'a> {
    io: &'a IoJob,
    id: BlockId,
    path: PathBuf,
    bytes: &'a [u8],
    options: WriteOptions,
}

impl Backend for PosixBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        self.shared.open_root(deadline)?;
        Ok(self.shared.words())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "posix",
            reads_parts: true,
            writes_cached: self.shared.writes_cached(),
            ..Features::default()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        let shared = &self.shared;
        let paths: Vec<_> = ids.iter().map(|&id| shared.layout.record(id)).collect();
        let metas = io.stat(&paths, stop_at_missing);
        let metas = metas.inspect_err(|error| shared.log_link(error))?;
        let presence = || metas.iter().map(|&meta| self.presence(meta)).collect();
        let found: Vec<_> = presence();
        if found.contains(&Err(MissReason::WrongLength)) && shared.has_lengths_to_learn() {
            shared.learn_lengths(io);
            return Ok(presence());
        }
        Ok(found)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        run.into_iter()
            .map(|read| Outcome::Read(self.read_one(io, read)))
            .collect()
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        self.write_new(&NewRecord {
            io,
            id,
            path: self.shared.layout.record(id),
            bytes: &slot.as_slice()[..options.len],
            options,
        })
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        let due = self.shared.recency.due(ids, self.shared.clock.wall_ns());
        if due.is_empty() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let touch = move |io: &IoJob| {
            let file = |(id, time)| (shared.layout.record(id), time);
            let files: Vec<_> = due.into_iter().map(file).collect();
            let touched = io.touch(&files)?.into_iter();
            let count = touched.filter(|file| matches!(file, Ok(true))).count();
            shared.recency.count(count as u64);
            Ok(())
        };
        self.shared.io.job(LANE_SPACE, deadline, touch, |_| {});
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let shared = &self.shared;
        let paths: Vec<_> = ids.iter().map(|&id| shared.layout.record(id)).collect();
        let before = shared.space.counts();
        let metas = io.stat(&paths, false)?;
        let (mut count, mut bytes) = (0, 0);
        for (removed, meta) in io.remove(&paths)?.into_iter().zip(metas) {
            if let Ok(true) = removed {
                (count, bytes) = (count + 1, bytes + meta.map_or(0, |meta| meta.len));
            }
        }
        shared.space.deleted(bytes, before, false);
        Ok(count)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        let (namespace, mut records) = (self.shared.layout.namespace(), Vec::new());
        let mut add = |id, meta: FileMeta| {
            let (len, used_ns) = (meta.len, meta.mtime_ns);
            records.push(Listed { id, len, used_ns });
        };
        visit_records(&namespace, &mut |dir| io.list_if_there(&dir), &mut add)?;
        Ok(records)
    }

    fn stats(&self) -> MediumStats {
        self.shared.stats()
    }

    fn close(&self, drain: Duration) {
        let until = self.shared.clock.now().after(drain);
        let left = || until.since(self.shared.clock.now());
        // First the space: it says to the others that it is not there any more.
        self.shared.space.shutdown(left() / 2);
        self.shared.io.shutdown(left());
    }
}
