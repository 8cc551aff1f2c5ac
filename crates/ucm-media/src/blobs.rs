//! Named immutable bytes: the one shape that a directory and a bucket have in common.
//!
//! A medium that keeps segments implements [`Blobs`] to read them and [`AppendBlobs`] to write
//! them. Neither knows anything of records: reading, writing, footers, index and lookups stand once
//! above them, in [`crate::segment`]. Every call blocks until its deadline at the latest. Names,
//! clocks, retries and listings that lag are the medium's own. `conformance` has the tests of every
//! medium.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{Error, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, ReadMode};

use crate::backend::Done;
use crate::layout::SegmentName;

#[cfg(test)]
pub(crate) mod conformance;

/// A segment as a medium names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlobName {
    /// When it was sealed, ns of Unix time. Names in a bucket begin with it; 0 in a directory,
    /// where names have no time.
    pub(crate) sealed_ns: u64,
    pub(crate) name: SegmentName,
}

/// A segment as a listing shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlobMeta {
    pub(crate) blob: BlobName,
    /// Bytes.
    pub(crate) len: u64,
    /// When it was last used, as far as a listing shows it, ns of Unix time.
    pub(crate) used_ns: i64,
    /// Another number for another file of the same name; 0 where the medium has none.
    pub(crate) inode: u64,
}

/// Where a read begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadAt {
    pub(crate) blob: BlobName,
    /// It is still being written by this process, and has no name that others see.
    pub(crate) open: bool,
    /// Bytes from its beginning.
    pub(crate) offset: u64,
}

/// The outcome of a read.
pub(crate) struct Filled {
    /// Bytes that arrived, from the first on.
    pub(crate) bytes: usize,
    /// Why no more did; none where the blob ends there, or all arrived.
    pub(crate) failed: Option<Error>,
}

impl From<Result<usize>> for Filled {
    fn from(read: Result<usize>) -> Self {
        let (bytes, failed) = match read {
            Ok(bytes) => (bytes, None),
            Err(error) => (0, Some(error)),
        };
        Self { bytes, failed }
    }
}

/// Buffers that are filled one behind the other, each with as many bytes, from its start on.
pub(crate) type Buffers<'a> = Vec<(&'a mut [u8], usize)>;

/// A piece of a blob in memory, and the blob's length; of a medium that does not return it the end
/// of what was wanted.
pub(crate) type BlobPiece = (Vec<u8>, u64);

/// See the module.
pub(crate) trait Blobs: Send + Sync + 'static {
    /// Fewest and most bytes of one read for several records, if there are enough of them. The
    /// fewest take longer to read than another thread takes to start.
    const RUN: (usize, usize);

    /// Reads one stretch, from `at` on, into buffers. `NotFound` where there is no such blob. Past
    /// every cache with [`ReadMode::FreshDirect`], where the medium has one; then there is one
    /// buffer.
    fn read(&self, io: &IoJob, at: ReadAt, into: Buffers<'_>, mode: ReadMode) -> Filled;

    /// Reads parts of a stretch to where they lie in it; the bytes that arrived. None where that
    /// failed, or is not possible, and all of the record is to be read.
    fn read_parts(
        &self,
        _io: &IoJob,
        _at: ReadAt,
        _parts: &[Range<usize>],
        _buf: &mut [u8],
    ) -> Option<usize> {
        None
    }

    /// Reads a piece of each of these blobs, as many at once as is good for the medium: an answer
    /// for each, in the same order. For threads that are not a pool's own.
    fn read_pieces(
        &self,
        pieces: Vec<(BlobName, Range<u64>)>,
        mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Vec<Result<BlobPiece>>;
}

/// The end of a blob that is being written.
pub(crate) struct Seal {
    pub(crate) name: SegmentName,
    /// When it is sealed, ns of Unix time.
    pub(crate) sealed_ns: u64,
    /// Where its last bytes lie, and the bytes.
    pub(crate) offset: u64,
    pub(crate) footer: Vec<u8>,
    /// The place nearest to the start of a chain of all its records.
    pub(crate) first_ordinal: u32,
    pub(crate) deadline: MonotonicTime,
}

/// A medium on which blobs are written: each grows at its end, can be read by its writer at once,
/// and gets its name when it is sealed. Nothing that has a name is changed.
pub(crate) trait AppendBlobs: Blobs {
    /// Room that was reserved for a blob.
    type Room: Copy + Send + Sync;
    /// Until it is sealed, a blob takes all of its room on the medium.
    const TAKES_ALL_ROOM: bool;
    /// Most blobs that are sealed while others grow; a write waits for one of them.
    const MOST_SEALING: usize;
    /// Least time between two times that blobs are sealed because a caller waits.
    const SPACING: Duration;
    /// When a blob is sealed for a record whose outcome is awaited: quarters of its time.
    const QUARTERS: u32;

    /// A name that was never used.
    fn next_name(&self) -> SegmentName;

    /// Bytes that may be stored.
    fn limit(&self) -> u64;

    /// How many blobs of `room` bytes may grow side by side.
    fn side_by_side(&self, _room: u64) -> usize {
        1
    }

    /// Room for a blob; `None` where a grant was awaited, or the limit has become known, and the
    /// caller tries again. `needed`: it
    /// is worth a wait, since the record has no other place. `Busy` where there is no room now.
    fn reserve(&self, io: &IoJob, bytes: u64, needed: bool) -> Result<Option<Self::Room>>;

    /// A blob has ended, well or with this error: `kept` bytes of it are there, or may be.
    fn commit(&self, room: Self::Room, kept: u64, error: Option<&Error>);

    /// Makes a blob with these first bytes, which may grow to `room` bytes.
    fn create(&self, io: &IoJob, name: SegmentName, head: &[u8], room: u64) -> Result<()>;

    /// Writes the bytes at this offset of a blob that is not sealed; several threads may write to
    /// one, each to its place. `NotFound` where there is none. What lies between the bytes and the
    /// next page is zero.
    fn append(&self, io: &IoJob, name: SegmentName, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Writes the end of a blob and gives it its name, on a thread of the medium. Until `done` has
    /// returned it can be read as one that is open.
    fn seal(self: &Arc<Self>, seal: Seal, done: Done<BlobMeta>);

    /// Removes a blob that is not sealed.
    fn discard(self: &Arc<Self>, name: SegmentName, deadline: MonotonicTime, done: Done<()>);
}
