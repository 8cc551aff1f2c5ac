//! The words of the seam: what an engine is told and what it answers.

use std::path::Path;

/// Whether the result of an operation is still wanted; asked between its steps and before what
/// cannot be undone.
pub type StillWanted<'a> = &'a dyn Fn() -> bool;

/// Most entries one `List` returns; the rest shows on a later call, after some were removed.
pub const MAX_LIST: usize = 1 << 20;

/// What the file system says about one name.
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
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// What a read brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Read {
    /// Bytes in the buffer; fewer than asked for only at the end of the file.
    pub bytes: usize,
    /// Length of the whole file when it was opened.
    pub file_len: u64,
}

/// How a file is opened for reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReadMode {
    /// As the engine is set up.
    #[default]
    Default,
    /// Past the page cache (O_DIRECT on a fresh open), buffered only where the file system knows no
    /// such thing: a second opinion on bytes that failed verification.
    FreshDirect,
}

/// Makes a file appear whole: creates `private` (which must not exist), writes `bytes`, closes it
/// with the error of the close seen, renames it. When anything fails `private` is removed and
/// `target` is as before.
#[derive(Clone, Copy, Debug)]
pub struct Publish<'a> {
    /// A name on the same file system that only this writer uses.
    pub private: &'a Path,
    /// The name under which others find it.
    pub target: &'a Path,
    /// Whether a file of that name is replaced. If not, of several that publish one name at the
    /// same time exactly one does, on network file systems too; only a file system that knows
    /// neither hard links nor a rename without replacing leaves a gap between the look and the
    /// rename.
    pub replace: bool,
    /// The bytes.
    pub bytes: &'a [u8],
    /// Permission bits of the new file (0600), before the umask.
    pub mode: u32,
    /// Modification time it gets before it has its name (ns since 1970); `None` leaves the time of
    /// writing.
    pub mtime_ns: Option<i64>,
    /// Whether its bytes reach the medium before it has its name (`fsync`). Without, a power cut
    /// may leave the name and no bytes, which is enough for what carries a checksum and can be made
    /// again.
    pub durable: bool,
}

/// Makes `target` of a filled private file: writes `footer` at `offset`, cuts the file off behind
/// it, closes it with the error of the close seen, and renames it, never over another file. When
/// anything fails the private file is removed. Done already (a repeated call) is done.
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a> {
    /// The private file.
    pub private: &'a Path,
    /// The name under which others find it.
    pub target: &'a Path,
    /// The last bytes of the file.
    pub footer: &'a [u8],
    /// Where they go, bytes from the start.
    pub offset: u64,
    /// Modification time it gets before it has its name (ns since 1970).
    pub mtime_ns: i64,
}

/// Size of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpaceInfo {
    /// Bytes in all.
    pub total: u64,
    /// Bytes an unprivileged writer can still have.
    pub free: u64,
    /// Device number of the name asked for.
    pub dev: u64,
    /// Number of the mount that shows it there, by which two mounts of one file system differ;
    /// `None` where the kernel (before 5.8) does not say.
    pub mount: Option<u64>,
}
