//! The words of the seam: what can be asked of an engine and what it answers.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ucm_core::{Error, Result};
pub use ucm_device::HostBuf as IoBuf;

use crate::probe::Probe;

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

/// How a file is opened for reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReadMode {
    /// As the engine is set up.
    #[default]
    Default,
    /// Past the page cache (O_DIRECT on a fresh open), buffered only where the file system knows no such thing: a
    /// second opinion on bytes that failed verification.
    FreshDirect,
}

/// One operation. It owns its buffer until its last system call has really returned.
#[derive(Debug)]
pub enum IoOp {
    /// Reads `len` bytes at `offset` into the start of `buf`; fewer only at the end of the file. `InvalidInput` when
    /// `buf` is shorter than `len`, `NotFound` for ENOENT and ESTALE. Answer: [`IoDone::Read`].
    Read {
        /// The file; its last name must not be a symbolic link.
        path: PathBuf,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Bytes wanted.
        len: usize,
        /// Where they go.
        buf: IoBuf,
        /// Through or past the page cache.
        mode: ReadMode,
    },
    /// Reads one stretch of a file into several buffers: bytes for the first from `offset` on, for the next what follows
    /// it, and so on, each into the start of its buffer. A file that cannot be read brings the buffers back, so that
    /// each stretch can be read by itself. Answer: [`IoDone::ReadInto`].
    ReadInto {
        /// The file; its last name must not be a symbolic link.
        path: PathBuf,
        /// Offset in the file, in bytes.
        offset: u64,
        /// The buffers, and how many bytes each of them gets.
        into: Vec<(IoBuf, usize)>,
        /// What has this name never changes: its descriptor may be kept open for the next such read. A file that has
        /// lost its name since is `NotFound` all the same.
        keep: bool,
    },
    /// Reads parts of one stretch of a file to where they lie in it: byte `n` of `buf` is byte `offset + n` of the file,
    /// and what lies between the parts stays as it is. In everything else, its answer too, as [`IoOp::ReadInto`] into
    /// one buffer; parts behind the end of the file end it.
    ReadParts {
        /// The file; its last name must not be a symbolic link.
        path: PathBuf,
        /// Where in the file the buffer's first byte lies.
        offset: u64,
        /// The parts, in order.
        parts: Vec<Range<usize>>,
        /// Where they go.
        buf: IoBuf,
        /// As of [`IoOp::ReadInto`].
        keep: bool,
    },
    /// Makes `target` appear whole: creates `private` (which must not exist), writes the first `len` bytes of `buf`,
    /// closes it with the error of the close seen, renames it. When anything fails `private` is removed and `target`
    /// is as before. Answer: [`IoDone::Published`], or [`IoDone::Taken`] where there was such a file and `replace` is
    /// false.
    Publish {
        /// A name on the same file system that only this writer uses.
        private: PathBuf,
        /// The name under which others find it.
        target: PathBuf,
        /// Whether a file of that name is replaced. If not, of several that publish one name at the same time exactly
        /// one does, on network file systems too; only a file system that knows neither hard links nor a rename
        /// without replacing leaves a gap between the look and the rename.
        replace: bool,
        /// The bytes.
        buf: IoBuf,
        /// How many of them.
        len: usize,
        /// Permission bits of the new file (0600), before the umask.
        mode: u32,
        /// Modification time it gets before it has its name (ns since 1970); `None` leaves the time of writing.
        mtime_ns: Option<i64>,
        /// Whether its bytes reach the medium before it has its name (`fsync`). Without, a power cut may leave the name and
        /// no bytes, which is enough for what carries a checksum and can be made again.
        durable: bool,
    },
    /// Creates a private file that is to be filled by [`IoOp::WriteAt`] and named by [`IoOp::Finish`]. Answer:
    /// [`IoDone::Created`]. When it fails there is no such file, or it is that of somebody else.
    Create {
        /// The file, which must not exist.
        path: PathBuf,
        /// Its first bytes.
        head: Vec<u8>,
        /// Length up to which the file system is asked to set room aside, bytes; best effort.
        room: u64,
        /// Permission bits (0600), before the umask.
        mode: u32,
    },
    /// Writes the first `len` bytes of `buf` at `offset` of a file that is there, and closes it with the error of the
    /// close seen. Answer: [`IoDone::Wrote`].
    WriteAt {
        /// The file; its last name must not be a symbolic link.
        path: PathBuf,
        /// Offset in the file, bytes.
        offset: u64,
        /// The bytes.
        buf: IoBuf,
        /// How many of them.
        len: usize,
    },
    /// Makes `target` of a filled private file: writes `foot` at `offset`, cuts the file off behind it, closes it with
    /// the error of the close seen, and renames it, never over another file. When anything fails the private file is
    /// removed. Done already (a repeated call) is done. Answer: [`IoDone::Finished`].
    Finish {
        /// The private file.
        private: PathBuf,
        /// The name under which others find it.
        target: PathBuf,
        /// The last bytes of the file.
        foot: Vec<u8>,
        /// Where they go, bytes from the start.
        offset: u64,
        /// Modification time it gets before it has its name (ns since 1970).
        mtime_ns: i64,
    },
    /// Metadata of each path, links followed; a name that does not exist (ENOENT, ENOTDIR, ESTALE) is `None`.
    /// Answer: [`IoDone::Stat`].
    Stat {
        /// The names, in order.
        paths: Vec<PathBuf>,
        /// Stop at the first missing one; the answer then ends with its `None`.
        stop_at_missing: bool,
    },
    /// Sets modification times (ns since 1970). Answer: [`IoDone::Touched`].
    Touch {
        /// Files and their new times.
        files: Vec<(PathBuf, i64)>,
    },
    /// Removes files, never directories. Answer: [`IoDone::Removed`].
    Remove {
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// Gives a file another name on the same file system, unless another file has taken its name since. Answer:
    /// [`IoDone::Renamed`].
    Rename {
        /// The file.
        from: PathBuf,
        /// Its new name; an existing file is replaced.
        to: PathBuf,
        /// The inode that `from` must have.
        ino: u64,
    },
    /// Names and metadata in one directory, links not followed, in no order. Answer: [`IoDone::List`].
    List {
        /// The directory.
        dir: PathBuf,
    },
    /// Makes one directory. Answer: [`IoDone::MadeDir`].
    MakeDir {
        /// The directory; its parent must exist.
        path: PathBuf,
        /// Permission bits (0700), before the umask.
        mode: u32,
    },
    /// Size of the file system. Answer: [`IoDone::Space`].
    Space {
        /// Any name on it.
        path: PathBuf,
    },
    /// What a file system is and what it can do; writes and removes one nameless page. Answer: [`IoDone::Probe`].
    Probe {
        /// A directory on it, writable.
        dir: PathBuf,
    },
}

/// What an operation answers.
#[derive(Debug)]
pub enum IoDone {
    /// To [`IoOp::Read`].
    Read {
        /// The buffer, its first `read` bytes filled.
        buf: IoBuf,
        /// Bytes read; fewer than asked for only at the end of the file.
        read: usize,
        /// Length of the whole file when it was opened.
        file_len: u64,
    },
    /// To [`IoOp::ReadInto`] and [`IoOp::ReadParts`].
    ReadInto {
        /// The buffers, in order, filled as far as was read.
        bufs: Vec<IoBuf>,
        /// Bytes read in all, fewer than asked for only at the end of the file; or why none count: `InvalidInput` when
        /// a buffer is too short, `NotFound` for ENOENT and ESTALE.
        read: Result<usize>,
    },
    /// To [`IoOp::Publish`].
    Published {
        /// The buffer, its bytes unchanged.
        buf: IoBuf,
        /// The file as it was closed.
        meta: FileMeta,
    },
    /// To [`IoOp::Publish`] without `replace`: there was a file of that name, which stays.
    Taken {
        /// The buffer, its bytes unchanged.
        buf: IoBuf,
    },
    /// To [`IoOp::Create`].
    Created,
    /// To [`IoOp::WriteAt`].
    Wrote {
        /// The buffer, its bytes unchanged.
        buf: IoBuf,
    },
    /// To [`IoOp::Finish`]: the file as it was closed.
    Finished(FileMeta),
    /// To [`IoOp::Stat`]: one entry for each path, fewer when stopped at a missing one.
    Stat(Vec<Option<FileMeta>>),
    /// To [`IoOp::Touch`]: for each file whether it was there; an error stops none of the others.
    Touched(Vec<Result<bool>>),
    /// To [`IoOp::Remove`]: for each file whether it was there; an error stops none of the others.
    Removed(Vec<Result<bool>>),
    /// To [`IoOp::Rename`]: whether it was done; `false` when the file is not there or is another one.
    Renamed(bool),
    /// To [`IoOp::List`]: at most [`MAX_LIST`] entries.
    List(Vec<(OsString, FileMeta)>),
    /// To [`IoOp::MakeDir`]: whether it is new; `false` when the directory was there already.
    MadeDir(bool),
    /// To [`IoOp::Space`].
    Space(SpaceInfo),
    /// To [`IoOp::Probe`].
    Probe(Probe),
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
}

/// Kind of an operation, for counters and fault scripts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpKind {
    /// [`IoOp::Read`], [`IoOp::ReadInto`] and [`IoOp::ReadParts`].
    Read,
    /// [`IoOp::Publish`].
    Publish,
    /// [`IoOp::Stat`].
    Stat,
    /// [`IoOp::Touch`].
    Touch,
    /// [`IoOp::Remove`].
    Remove,
    /// [`IoOp::Rename`].
    Rename,
    /// [`IoOp::List`].
    List,
    /// [`IoOp::MakeDir`].
    MakeDir,
    /// [`IoOp::Space`].
    Space,
    /// [`IoOp::Probe`].
    Probe,
    /// [`IoOp::Create`].
    Create,
    /// [`IoOp::WriteAt`].
    WriteAt,
    /// [`IoOp::Finish`].
    Finish,
}

impl OpKind {
    /// Every kind, in order.
    pub const ALL: [Self; 13] = [
        Self::Read,
        Self::Publish,
        Self::Stat,
        Self::Touch,
        Self::Remove,
        Self::Rename,
        Self::List,
        Self::MakeDir,
        Self::Space,
        Self::Probe,
        Self::Create,
        Self::WriteAt,
        Self::Finish,
    ];

    /// Name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Publish => "publish",
            Self::Stat => "stat",
            Self::Touch => "touch",
            Self::Remove => "remove",
            Self::Rename => "rename",
            Self::List => "list",
            Self::MakeDir => "make_dir",
            Self::Space => "space",
            Self::Probe => "probe",
            Self::Create => "create",
            Self::WriteAt => "write_at",
            Self::Finish => "finish",
        }
    }
}

impl IoOp {
    /// Its kind.
    pub fn kind(&self) -> OpKind {
        match self {
            Self::Read { .. } | Self::ReadInto { .. } | Self::ReadParts { .. } => OpKind::Read,
            Self::Publish { .. } => OpKind::Publish,
            Self::Stat { .. } => OpKind::Stat,
            Self::Touch { .. } => OpKind::Touch,
            Self::Remove { .. } => OpKind::Remove,
            Self::Rename { .. } => OpKind::Rename,
            Self::List { .. } => OpKind::List,
            Self::MakeDir { .. } => OpKind::MakeDir,
            Self::Space { .. } => OpKind::Space,
            Self::Probe { .. } => OpKind::Probe,
            Self::Create { .. } => OpKind::Create,
            Self::WriteAt { .. } => OpKind::WriteAt,
            Self::Finish { .. } => OpKind::Finish,
        }
    }

    /// The names it is about (of a publish and of a finish: the target), in order.
    pub fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Read { path, .. }
            | Self::ReadInto { path, .. }
            | Self::ReadParts { path, .. }
            | Self::MakeDir { path, .. }
            | Self::Space { path }
            | Self::Create { path, .. }
            | Self::WriteAt { path, .. } => vec![path],
            Self::Publish { target, .. } | Self::Finish { target, .. } => vec![target],
            Self::Rename { from, to, .. } => vec![from, to],
            Self::Stat { paths, .. } | Self::Remove { paths } => paths.iter().map(PathBuf::as_path).collect(),
            Self::Touch { files } => files.iter().map(|(path, _)| path.as_path()).collect(),
            Self::List { dir } | Self::Probe { dir } => vec![dir],
        }
    }

    /// The answer of an operation that failed before it began: with the buffers, where those come back.
    pub(crate) fn failed(self, error: Error) -> Result<IoDone> {
        match self {
            Self::ReadInto { into, .. } => Ok(IoDone::ReadInto {
                bufs: into.into_iter().map(|(buf, _)| buf).collect(),
                read: Err(error),
            }),
            Self::ReadParts { buf, .. } => Ok(IoDone::ReadInto {
                bufs: vec![buf],
                read: Err(error),
            }),
            _ => Err(error),
        }
    }
}

impl IoDone {
    /// The answer in whose place an error is told.
    pub(crate) fn failed(self, error: Error) -> Result<Self> {
        match self {
            Self::ReadInto { bufs, .. } => Ok(Self::ReadInto {
                bufs,
                read: Err(error),
            }),
            _ => Err(error),
        }
    }
}
