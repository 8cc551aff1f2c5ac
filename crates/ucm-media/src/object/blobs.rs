//! Segments in a bucket as blobs: a read is a range of an object, and the bytes go straight into
//! the slots as they arrive.
//!
//! A segment grows in memory, where this process can read it, and is put when it is sealed, on a
//! thread of its own. At most one grows and a few are being put, so what a process keeps in memory
//! is bounded.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::stream::{StreamExt, TryStreamExt};
use object_store::path::Path;
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, PAGE, Result, round_up};
use ucm_infra::{MonotonicTime, WorkerPool};
use ucm_io::{IoJob, ReadMode};

use super::bucket::AT_ONCE;
use super::remote::{DEFAULT_CAPACITY, Remote};
use super::space::Space;
use crate::backend::Done;
use crate::blobs::{
    AppendBlobs, BlobMeta, BlobName, BlobPiece, Blobs, Buffers, Filled, ReadAt, Seal,
};
use crate::layout::SegmentName;
use crate::lengths::Lengths;
use crate::segment::writer::check_limit;

/// The lane on which segments are put, the last of the backend's.
pub(super) const LANE_UPLOAD: usize = 3;
/// Segments that are put at once, while others take records.
pub(super) const UPLOADS: usize = 2;

#[cfg(test)]
mod tests;

/// See the module.
pub(super) struct BucketBlobs {
    pub(super) remote: Arc<Remote>,
    pub(super) space: Space,
    lengths: Arc<Lengths>,
    /// Where segments are put.
    pool: Arc<WorkerPool>,
    /// Segments that were not put yet.
    in_memory: Mutex<HashMap<SegmentName, InMemory>>,
    sequence: AtomicU64,
}

/// Bytes of a segment in memory.
enum InMemory {
    Open(Vec<u8>),
    /// All of it, which is being put.
    Sealed(Bytes),
}

impl BucketBlobs {
    pub(super) fn new(
        remote: &Arc<Remote>,
        lengths: &Arc<Lengths>,
        pool: &Arc<WorkerPool>,
    ) -> Self {
        Self {
            remote: Arc::clone(remote),
            space: Space::new(remote),
            lengths: Arc::clone(lengths),
            pool: Arc::clone(pool),
            in_memory: Mutex::default(),
            sequence: AtomicU64::new(1),
        }
    }

    /// Makes below the prefix what a writer needs. `Unhealthy` where the keys may only read.
    pub(super) fn begin_writing(&self, deadline: MonotonicTime) -> Result<()> {
        self.remote.probe(deadline)?;
        let marker = self.remote.marker(deadline)?;
        let marked = marker.map(|marker| marker.storage_capacity);
        let limit = self.remote.config.capacity.or(marked);
        let limit = limit.unwrap_or(DEFAULT_CAPACITY);
        self.check_limit(limit)?;
        self.space.open(limit, deadline)?;
        self.remote.describe(&self.lengths, deadline)?;
        self.space.may_write.store(true, Ordering::Release);
        Ok(())
    }

    /// `Config` where the limit is too small.
    pub(super) fn check_limit(&self, limit: u64) -> Result<()> {
        let bucket = ("bucket", &*self.remote.config.place.url);
        check_limit(limit, &self.lengths, bucket)
    }

    /// Copies a stretch of a segment that was not put yet into buffers, one behind the other.
    fn copy(&self, at: &ReadAt, into: &mut Buffers<'_>) -> Result<usize> {
        let copy = |bytes: &[u8], into: &mut Buffers<'_>| {
            let mut start = usize::try_from(at.offset).ok()?;
            let mut copied = 0;
            for (buffer, len) in into {
                buffer[..*len].copy_from_slice(bytes.get(start..start + *len)?);
                (start, copied) = (start + *len, copied + *len);
            }
            Some(copied)
        };
        let in_memory = self.in_memory.lock();
        let copied = match in_memory.get(&at.blob.name) {
            Some(InMemory::Open(bytes)) => copy(bytes, into),
            Some(InMemory::Sealed(bytes)) => {
                let bytes = bytes.clone();
                drop(in_memory);
                copy(&bytes, into)
            }
            None => None,
        };
        copied.ok_or_else(not_open)
    }

    /// Fills buffers, one behind the other, with a stretch of an object; `filled` counts the bytes
    /// that arrived, also where it fails.
    async fn fill(
        &self,
        path: &Path,
        start: u64,
        into: &mut Buffers<'_>,
        filled: &mut usize,
    ) -> Result<()> {
        let bucket = &self.remote.bucket;
        let wanted: usize = into.iter().map(|(_, len)| len).sum();
        let mut stream = bucket.stream(path, start..start + wanted as u64).await?;
        let (mut number, mut within) = (0, 0);
        // Bytes behind the last buffer were not requested.
        while number < into.len() {
            let piece = stream.try_next().await;
            let piece = piece.map_err(|error| bucket.failed(path, &error))?;
            let Some(mut piece) = piece else { break };
            while !piece.is_empty()
                && let Some((buffer, want)) = into.get_mut(number)
            {
                let len = piece.len().min(*want - within);
                piece.copy_to_slice(&mut buffer[within..within + len]);
                (*filled, within) = (*filled + len, within + len);
                if within == *want {
                    (number, within) = (number + 1, 0);
                }
            }
        }
        Ok(())
    }
}

impl Blobs for BucketBlobs {
    const RUN: (usize, usize) = (1 << 20, 8 << 20);

    fn read(&self, io: &IoJob, at: ReadAt, mut into: Buffers<'_>, _mode: ReadMode) -> Filled {
        if at.open {
            return self.copy(&at, &mut into).into();
        }
        let (path, mut bytes) = (self.remote.names.segment(at.blob), 0);
        let fill = self.fill(&path, at.offset, &mut into, &mut bytes);
        let failed = io.wait(&self.remote.runtime, fill).err();
        Filled { bytes, failed }
    }

    fn read_pieces(
        &self,
        pieces: Vec<(BlobName, Range<u64>)>,
        _mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Vec<Result<BlobPiece>> {
        let count = pieces.len();
        let reads = pieces.into_iter().map(|(blob, range)| async move {
            let (path, end) = (self.remote.names.segment(blob), range.end);
            let bytes = self.remote.bucket.range(&path, range).await?;
            Ok((bytes, end))
        });
        let reads = futures_util::stream::iter(reads).buffered(AT_ONCE);
        let read = self
            .remote
            .call(deadline, async { Ok(reads.collect::<Vec<_>>().await) });
        match read {
            Ok(read) => read,
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        }
    }
}

impl AppendBlobs for BucketBlobs {
    /// Bytes that are granted.
    type Room = u64;
    const TAKES_ALL_ROOM: bool = false;
    const MOST_SEALING: usize = UPLOADS;
    const SPACING: Duration = Duration::from_millis(200);
    const QUARTERS: u32 = 2;

    fn next_name(&self) -> SegmentName {
        SegmentName {
            writer: self.remote.config.scope.writer,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn limit(&self) -> u64 {
        self.space.limit().unwrap_or(u64::MAX)
    }

    /// `Unhealthy` where the keys may only read. The store was opened like that; it begins to write
    /// with the first dump after they may.
    fn reserve(&self, io: &IoJob, bytes: u64, _needed: bool) -> Result<Option<u64>> {
        if !self.space.may_write() {
            self.begin_writing(io.deadline())?;
            self.space.wanted.notify();
            return Ok(None); // with the limit that was read now
        }
        self.space.take_room(io, bytes)?;
        Ok(Some(bytes))
    }

    fn commit(&self, room: u64, kept: u64, error: Option<&Error>) {
        self.space.commit_room(room, kept, error);
    }

    fn create(&self, _io: &IoJob, name: SegmentName, head: &[u8], room: u64) -> Result<()> {
        let mut bytes = Vec::with_capacity(usize::try_from(room).unwrap_or(0));
        bytes.extend_from_slice(head);
        let open = InMemory::Open(bytes);
        self.in_memory.lock().insert(name, open);
        Ok(())
    }

    fn append(&self, _io: &IoJob, name: SegmentName, offset: u64, record: &[u8]) -> Result<()> {
        let mut in_memory = self.in_memory.lock();
        let Some(InMemory::Open(bytes)) = in_memory.get_mut(&name) else {
            return Err(not_open());
        };
        // Most often it goes to the end; otherwise what comes before it is copied later.
        let start = offset as usize;
        bytes.resize(bytes.len().max(start), 0);
        let within = record.len().min(bytes.len() - start);
        bytes[start..start + within].copy_from_slice(&record[..within]);
        bytes.extend_from_slice(&record[within..]);
        bytes.resize(round_up(bytes.len() as u64, PAGE) as usize, 0);
        Ok(())
    }

    fn seal(self: &Arc<Self>, seal: Seal, done: Done<BlobMeta>) {
        let (name, sealed_ns) = (seal.name, seal.sealed_ns);
        let blob = BlobName { sealed_ns, name };
        let mut in_memory = self.in_memory.lock();
        let Some(InMemory::Open(bytes)) = in_memory.get_mut(&name) else {
            drop(in_memory);
            return done(Err(not_open()));
        };
        let mut bytes = std::mem::take(bytes);
        bytes.resize(seal.offset as usize, 0);
        bytes.extend_from_slice(&seal.footer);
        let bytes = Bytes::from(bytes);
        in_memory.insert(name, InMemory::Sealed(bytes.clone()));
        drop(in_memory);
        let meta = BlobMeta::of_object(blob, bytes.len() as u64);
        let (deadline, blobs) = (seal.deadline, Arc::clone(self));
        let put = move || {
            let remote = &blobs.remote;
            let (path, conditional) = (remote.names.segment(blob), remote.has_conditions());
            let put = remote.bucket.put_large(&path, bytes, conditional);
            remote.call(deadline, put)
        };
        let blobs = Arc::clone(self);
        let ended = move |put: Result<Result<()>>| {
            done(put.and_then(|put| put).map(|()| meta));
            blobs.in_memory.lock().remove(&name);
        };
        if let Err(refused) = self.pool.offer(LANE_UPLOAD, deadline, put, ended) {
            (refused.done)(Err(refused.error));
        }
    }

    fn discard(self: &Arc<Self>, name: SegmentName, _deadline: MonotonicTime, done: Done<()>) {
        self.in_memory.lock().remove(&name);
        done(Ok(()));
    }
}

impl BlobMeta {
    /// A segment's object as it was put or listed.
    pub(super) fn of_object(blob: BlobName, len: u64) -> Self {
        Self {
            blob,
            len,
            used_ns: i64::try_from(blob.sealed_ns).unwrap_or(i64::MAX),
            inode: 0,
        }
    }
}

fn not_open() -> Error {
    Error::new(ErrorKind::NotFound, "this segment is not open")
}
