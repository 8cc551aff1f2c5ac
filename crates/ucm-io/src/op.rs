//! The words of the seam: what can be asked of an engine and what it answers.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ucm_core::Result;

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

/// Makes a file appear whole: creates `private` (which must not exist), writes `bytes`, closes it with the error of the
/// close seen, renames it. When anything fails `private` is removed and `target` is as before.
#[derive(Clone, Copy, Debug)]
pub struct Publish<'a> {
    /// A name on the same file system that only this writer uses.
    pub private: &'a Path,
    /// The name under which others find it.
    pub target: &'a Path,
    /// Whether a file of that name is replaced. If not, of several that publish one name at the same time exactly one
    /// does, on network file systems too; only a file system that knows neither hard links nor a rename without
    /// replacing leaves a gap between the look and the rename.
    pub replace: bool,
    /// The bytes.
    pub bytes: &'a [u8],
    /// Permission bits of the new file (0600), before the umask.
    pub mode: u32,
    /// Modification time it gets before it has its name (ns since 1970); `None` leaves the time of writing.
    pub mtime_ns: Option<i64>,
    /// Whether its bytes reach the medium before it has its name (`fsync`). Without, a power cut may leave the name and
    /// no bytes, which is enough for what carries a checksum and can be made again.
    pub durable: bool,
}

/// Makes `target` of a filled private file: writes `footer` at `offset`, cuts the file off behind it, closes it with the
/// error of the close seen, and renames it, never over another file. When anything fails the private file is removed.
/// Done already (a repeated call) is done.
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

/// One operation, as an engine is asked for it. Users have a method of [`IoJob`](crate::IoJob) for each, which says what
/// it does and answers.
#[derive(Debug)]
#[allow(missing_docs, reason = "the methods say what each field is")]
pub enum IoOp<'a> {
    Read {
        path: &'a Path,
        offset: u64,
        len: usize,
        buf: &'a mut [u8],
        mode: ReadMode,
    },
    ReadInto {
        path: &'a Path,
        offset: u64,
        into: Vec<(&'a mut [u8], usize)>,
        keep: bool,
    },
    ReadParts {
        path: &'a Path,
        offset: u64,
        parts: &'a [Range<usize>],
        buf: &'a mut [u8],
        keep: bool,
    },
    Publish(Publish<'a>),
    Create {
        path: &'a Path,
        head: &'a [u8],
        room: u64,
        mode: u32,
    },
    WriteAt {
        path: &'a Path,
        offset: u64,
        bytes: &'a [u8],
    },
    Finish(Finish<'a>),
    Stat {
        paths: &'a [PathBuf],
        stop_at_missing: bool,
    },
    Touch {
        files: &'a [(PathBuf, i64)],
    },
    Remove {
        paths: &'a [PathBuf],
    },
    Rename {
        from: &'a Path,
        to: &'a Path,
        ino: u64,
    },
    List {
        dir: &'a Path,
    },
    MakeDir {
        path: &'a Path,
        mode: u32,
    },
    Space {
        path: &'a Path,
    },
    Probe {
        dir: &'a Path,
    },
}

/// What an operation answers.
#[derive(Debug)]
pub enum IoDone {
    /// To [`IoOp::Read`]: bytes read, and the length of the whole file when it was opened.
    Read(usize, u64),
    /// To [`IoOp::ReadInto`] and [`IoOp::ReadParts`]: bytes read in all.
    ReadInto(usize),
    /// To [`IoOp::Publish`]: the file as it was closed; `None` where there was one of that name, which stays.
    Published(Option<FileMeta>),
    /// To [`IoOp::Create`] and [`IoOp::WriteAt`].
    Wrote,
    /// To [`IoOp::Finish`]: the file as it was closed.
    Finished(FileMeta),
    /// To [`IoOp::Stat`].
    Stat(Vec<Option<FileMeta>>),
    /// To [`IoOp::Touch`] and [`IoOp::Remove`].
    Each(Vec<Result<bool>>),
    /// To [`IoOp::Rename`] and [`IoOp::MakeDir`].
    Was(bool),
    /// To [`IoOp::List`].
    List(Vec<(OsString, FileMeta)>),
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

impl IoOp<'_> {
    /// Its kind.
    pub fn kind(&self) -> OpKind {
        match self {
            Self::Read { .. } | Self::ReadInto { .. } | Self::ReadParts { .. } => OpKind::Read,
            Self::Publish(_) => OpKind::Publish,
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
            Self::Finish(_) => OpKind::Finish,
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
            Self::Publish(Publish { target, .. }) | Self::Finish(Finish { target, .. }) => vec![target],
            Self::Rename { from, to, .. } => vec![from, to],
            Self::Stat { paths, .. } | Self::Remove { paths } => paths.iter().map(PathBuf::as_path).collect(),
            Self::Touch { files } => files.iter().map(|(path, _)| path.as_path()).collect(),
            Self::List { dir } | Self::Probe { dir } => vec![dir],
        }
    }
}
