//! Arguments and results of the engine's operations.

use std::ops::Range;
use std::path::Path;

use rustix::fs::{FileType, Stat};
use ucm_core::{Error, Result};

/// Whether the result of an operation is still wanted. Checked between its steps and before every
/// irreversible one.
pub type StillWanted<'a> = &'a dyn Fn() -> bool;

/// Most entries of one `List`; the rest appears in a later call, after some were removed.
pub const MAX_LIST: usize = 1 << 20;

/// Metadata of one name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileMeta {
    /// Length in bytes.
    pub len: u64,
    /// Time of the last change, nanoseconds since 1970 (the file server's clock, not ours).
    pub mtime_ns: i64,
    /// Inode number.
    pub ino: u64,
    /// Device number.
    pub dev: u64,
    /// True for a directory.
    pub is_dir: bool,
}

/// The fields of a stat that we use.
#[allow(
    clippy::unnecessary_cast,
    reason = "the types differ between architectures"
)]
pub(crate) fn to_meta(stat: &Stat) -> FileMeta {
    FileMeta {
        len: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_ns: (stat.st_mtime as i64)
            .saturating_mul(1_000_000_000)
            .saturating_add(stat.st_mtime_nsec as i64),
        ino: stat.st_ino as u64,
        dev: stat.st_dev as u64,
        is_dir: FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
    }
}

/// The result of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Read {
    /// Bytes in the buffer; fewer than requested only at the end of the file.
    pub bytes: usize,
    /// Length of the whole file when it was opened.
    pub file_len: u64,
}

/// One of the pieces that a read brings: `len` bytes from `offset` of the file on, to the start of
/// `buf`.
#[derive(Debug)]
pub struct ReadPiece<'a> {
    /// Where they begin in the file.
    pub offset: u64,
    /// Where they go.
    pub buf: &'a mut [u8],
    /// How many.
    pub len: usize,
}

impl<'a> ReadPiece<'a> {
    /// One range of a file, from `offset` on, for several buffers.
    pub(crate) fn adjacent(mut offset: u64, into: Vec<(&'a mut [u8], usize)>) -> Vec<Self> {
        let mut pieces = Vec::with_capacity(into.len());
        for (buf, len) in into {
            pieces.push(Self { offset, buf, len });
            offset = offset.saturating_add(len as u64);
        }
        pieces
    }

    /// Parts of one buffer, whose first byte is at `offset` of the file.
    pub(crate) fn of_parts(
        offset: u64,
        parts: &[Range<usize>],
        buf: &'a mut [u8],
    ) -> Result<Vec<Self>> {
        let (mut pieces, mut rest, mut before) = (Vec::with_capacity(parts.len()), buf, 0);
        for part in parts {
            let gap = part.start.checked_sub(before);
            let found = gap.and_then(|gap| rest.split_at_mut_checked(gap));
            let found = found.and_then(|(_, rest)| rest.split_at_mut_checked(part.len()));
            let Some((buf, behind)) = found.filter(|_| part.start <= part.end) else {
                let wrong = "the parts of a read come in order and fit its buffer";
                return Err(Error::invalid(wrong));
            };
            let (offset, len) = (offset.saturating_add(part.start as u64), part.len());
            pieces.push(Self { offset, buf, len });
            (rest, before) = (behind, part.end);
        }
        Ok(pieces)
    }
}

/// How a file is opened for reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReadMode {
    /// By the engine's configuration.
    #[default]
    Default,
    /// Past the page cache (O_DIRECT on a new open), buffered only if the file system does not
    /// support it. For repeated reads after a failed verification.
    FreshDirect,
}

/// Publishes a complete file: creates `private` (which must not exist), writes `bytes`, closes it,
/// checks the error of the close, and renames it. On any failure `private` is removed and `target`
/// is unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Publish<'a> {
    /// A name on the same file system, used by this writer only.
    pub private: &'a Path,
    /// The published name.
    pub target: &'a Path,
    /// True to replace a file of that name. If false, exactly one of several concurrent writers of
    /// one name succeeds, on network file systems too. Only a file system with neither hard links
    /// nor a rename without replacement leaves a gap between the check and the rename.
    pub replace: bool,
    /// The bytes.
    pub bytes: &'a [u8],
    /// Permission bits of the new file (0600), before the umask.
    pub mode: u32,
    /// Modification time to set (ns since 1970); `None` keeps the time of writing.
    pub mtime_ns: Option<i64>,
    /// True to `fsync` before the rename. Without it a power cut may leave the name without bytes,
    /// which is acceptable for data with a checksum that can be produced again.
    pub durable: bool,
}

/// Publishes a filled private file as `target`: writes `footer` at `offset`, truncates the file
/// behind it, closes it, checks the error of the close, and renames it, never over another file. On
/// any failure the private file is removed. A repeated call after success succeeds.
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a> {
    /// The private file.
    pub private: &'a Path,
    /// The published name.
    pub target: &'a Path,
    /// The last bytes of the file.
    pub footer: &'a [u8],
    /// Their offset in bytes.
    pub offset: u64,
    /// Modification time to set (ns since 1970).
    pub mtime_ns: i64,
}

/// Size of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpaceInfo {
    /// Bytes in all.
    pub total: u64,
    /// Bytes available to an unprivileged writer.
    pub free: u64,
    /// Device number of the name.
    pub dev: u64,
    /// Number of its mount, which distinguishes two mounts of one file system; `None` if the kernel
    /// (before 5.8) does not report it.
    pub mount: Option<u64>,
}
