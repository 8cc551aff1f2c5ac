//! The segments of a root as files: where they lie, and the calls on them.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{LANE_LOOKUP, MonotonicTime};
use ucm_io::{FileMeta, Finish, IoJob, ReadMode};

use super::writer::SHARE;
use crate::backend::Done;
use crate::blobs::{
    AppendBlobs, BlobMeta, BlobName, BlobPiece, Blobs, Buffers, Filled, ReadAt, Seal,
};
use crate::layout::SegmentName;
use crate::quota::Reservation;
use crate::shared::{Shared, explain};

#[cfg(test)]
mod tests;

/// Most segments that take records side by side.
const STRIPES: usize = 4;
/// How long one step of a background thread may take.
const STEP: Duration = Duration::from_secs(30);

/// See the module.
pub(crate) struct SegmentFiles {
    pub(crate) shared: Arc<Shared>,
}

impl SegmentFiles {
    /// Where a segment lies that is being written, or that others see.
    fn path(&self, name: SegmentName, open: bool) -> PathBuf {
        match open {
            true => self.private(name),
            false => self.shared.layout.segment(name),
        }
    }

    pub(super) fn private(&self, name: SegmentName) -> PathBuf {
        self.shared.layout.private(name.writer, name.sequence)
    }

    /// Until when the next step of a background thread may take.
    pub(super) fn step(&self) -> MonotonicTime {
        self.shared.clock.now().after(STEP)
    }

    /// Reads a piece of a file; `None` when there is none.
    pub(super) fn read_piece(
        &self,
        path: PathBuf,
        offset: u64,
        len: usize,
        mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Result<Option<Vec<u8>>> {
        let read = move |io: &IoJob| io.read_piece(&path, offset, len, mode);
        Ok(self.shared.call(deadline, read)?.map(|(bytes, _)| bytes))
    }

    /// Makes a private file with these first bytes.
    pub(super) fn create_private(
        &self,
        path: PathBuf,
        head: Vec<u8>,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let mode = self.shared.config.modes.file;
        let create = move |io: &IoJob| io.create(&path, &head, 0, mode);
        self.shared.call(deadline, create)
    }

    /// Metadata of segments; `None` of one that was removed.
    pub(super) fn stat(
        &self,
        names: impl Iterator<Item = SegmentName>,
    ) -> Result<Vec<Option<FileMeta>>> {
        let paths: Vec<_> = names.map(|name| self.shared.layout.segment(name)).collect();
        self.shared
            .call(self.step(), move |io| io.stat(&paths, false))
    }

    /// The time of the file server: that of a file made just now.
    pub(super) fn server_time(&self, deadline: MonotonicTime) -> Result<i64> {
        let path = self.private(self.next_name());
        let mode = self.shared.config.modes.file;
        let stat = move |io: &IoJob| {
            io.create(&path, &[0], 0, mode)?;
            let meta = io.look(path.clone());
            let _ = io.remove(&[path]); // a file that stays is swept by its age
            meta
        };
        let gone = || Error::new(ErrorKind::NotFound, "a private file of our own was removed");
        let meta = self.shared.call(deadline, stat)?.ok_or_else(gone)?;
        Ok(meta.mtime_ns)
    }
}

impl BlobMeta {
    /// A segment's file as it was listed.
    pub(super) fn of_file(name: SegmentName, meta: &FileMeta) -> Self {
        Self {
            blob: BlobName { sealed_ns: 0, name },
            len: meta.len,
            used_ns: meta.mtime_ns,
            inode: meta.ino,
        }
    }
}

impl Blobs for SegmentFiles {
    /// Four blocks of 256 KiB with their headers at most: they are still in a cache of the
    /// processor when the thread that has read them verifies them.
    const RUN: (usize, usize) = (256 << 10, 5 << 18);

    fn read(&self, io: &IoJob, at: ReadAt, mut into: Buffers<'_>, mode: ReadMode) -> Filled {
        let mut open = at.open;
        loop {
            let path = self.path(at.blob.name, open);
            let read = match (&mut into[..], mode) {
                ([(bytes, len)], ReadMode::FreshDirect) => io
                    .read(&path, at.offset, *len, bytes, mode)
                    .map(|read| read.bytes),
                (buffers, _) => {
                    let into = buffers.iter_mut().map(|(bytes, len)| (&mut **bytes, *len));
                    io.read_into(&path, at.offset, into.collect(), !open)
                }
            };
            match read {
                // Sealed since it was found, or about to be.
                Err(error) if open && error.kind() == ErrorKind::NotFound => open = false,
                read => return read.map_err(|error| explain(io, path, error)).into(),
            }
        }
    }

    fn read_parts(
        &self,
        io: &IoJob,
        at: ReadAt,
        parts: &[Range<usize>],
        buf: &mut [u8],
    ) -> Option<usize> {
        let path = self.path(at.blob.name, at.open);
        io.read_parts(&path, at.offset, parts, buf, !at.open).ok()
    }

    fn read_pieces(
        &self,
        pieces: Vec<(BlobName, Range<u64>)>,
        mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Vec<Result<BlobPiece>> {
        let reads: Vec<_> = pieces
            .into_iter()
            .map(|(blob, range)| {
                let path = self.shared.layout.segment(blob.name);
                let len = (range.end - range.start) as usize;
                let read = move |io: &IoJob| match io.read_piece(&path, range.start, len, mode)? {
                    Some(piece) => Ok(piece),
                    None => Err(Error::new(ErrorKind::NotFound, "this segment was removed")),
                };
                self.shared.io.begin(LANE_LOOKUP, deadline, read)
            })
            .collect();
        reads.into_iter().map(|read| read.wait()).collect()
    }
}

/// A segment that grows is a private file, which is renamed when it is sealed; not in the lane of
/// dumps, whose threads may all wait for room that this gives back.
impl AppendBlobs for SegmentFiles {
    type Room = Reservation;
    const TAKES_ALL_ROOM: bool = true;
    const MOST_SEALING: usize = usize::MAX;
    const SPACING: Duration = Duration::from_millis(50);
    const QUARTERS: u32 = 3;

    fn next_name(&self) -> SegmentName {
        SegmentName {
            writer: self.shared.config.scope.writer,
            sequence: self.shared.sequence.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn limit(&self) -> u64 {
        self.shared.space.usage().capacity
    }

    /// Where one file is written by one thread at a time, no more than are a 64th of the limit
    /// together.
    fn side_by_side(&self, room: u64) -> usize {
        if !self.shared.writes_cached() {
            return 1;
        }
        let most = usize::try_from(self.limit() / SHARE / room.max(1)).unwrap_or(STRIPES);
        most.clamp(1, STRIPES)
    }

    /// `Foreign` where the root is no longer ours.
    fn reserve(&self, io: &IoJob, bytes: u64, needed: bool) -> Result<Option<Reservation>> {
        let (shared, space) = (&self.shared, &self.shared.space);
        let marker = io.look(shared.layout.marker())?;
        io.still_wanted()?; // before room is taken for a segment that stays empty
        shared
            .check_root(marker)
            .inspect_err(|_| shared.look_again())?;
        if !needed {
            return space.try_reserve(bytes).map(Some);
        }
        let reserved = space.reserve(bytes)?;
        if reserved.is_none() {
            space.await_grant(bytes, io.deadline());
        }
        Ok(reserved)
    }

    fn commit(&self, room: Reservation, kept: u64, error: Option<&Error>) {
        self.shared.space.commit(room, kept, error);
    }

    fn create(&self, io: &IoJob, name: SegmentName, head: &[u8], room: u64) -> Result<()> {
        let mode = self.shared.config.modes.file;
        io.create(&self.private(name), head, room, mode)
            .and_then(|()| io.still_wanted())
            .inspect_err(|error| self.shared.missed(error))
    }

    fn append(&self, io: &IoJob, name: SegmentName, offset: u64, bytes: &[u8]) -> Result<()> {
        io.write_at(&self.private(name), offset, bytes, true)
            .and_then(|()| io.still_wanted())
            .inspect_err(|error| self.shared.missed(error))
    }

    fn seal(self: &Arc<Self>, seal: Seal, done: Done<BlobMeta>) {
        let (shared, name, id) = (Arc::clone(&self.shared), seal.name, seal.name.as_id());
        let (private, target) = (self.private(name), shared.layout.segment(name));
        let recency = &shared.recency;
        let used_ns = recency.published(id, seal.first_ordinal, seal.sealed_ns);
        let finish = move |io: &IoJob| {
            io.finish(Finish {
                private: &private,
                target: &target,
                footer: &seal.footer,
                offset: seal.offset,
                mtime_ns: used_ns,
            })
        };
        let finished = move |finished: Result<FileMeta>| {
            let finished = finished.inspect_err(|error| shared.missed(error));
            done(finished.map(|meta| BlobMeta {
                used_ns,
                ..BlobMeta::of_file(name, &meta)
            }));
        };
        let io = &self.shared.io;
        io.job(LANE_LOOKUP, seal.deadline, finish, finished);
    }

    fn discard(self: &Arc<Self>, name: SegmentName, deadline: MonotonicTime, done: Done<()>) {
        let private = self.private(name);
        let remove = move |io: &IoJob| {
            let mut removed = io.remove(&[private])?.into_iter();
            removed.try_for_each(|removed| removed.map(|_| ()))
        };
        self.shared.io.job(LANE_LOOKUP, deadline, remove, done);
    }
}
