//! Operations on names: stat, touch, remove, list, make a directory, size of the file system.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, StatxFlags, Timespec, Timestamps};
use rustix::io::Errno;
use ucm_core::{Error, ErrorKind, Result};

use crate::op::StillWanted;
use crate::op::{FileMeta, MAX_LIST, SpaceInfo};
use crate::sys::retry;

/// Stats between two looks whether anybody still waits; they change nothing, and a look costs a twentieth of one.
const STATS_BETWEEN_LOOKS: usize = 16;
/// Fewest names for which a directory in common is opened: its opening costs as much as two of them.
const FEWEST_IN_COMMON: usize = 8;

/// An error of the operating system, with the name it is about.
pub(crate) fn failed(errno: Errno, what: &'static str, path: &Path) -> Error {
    Error::from_io(errno.into(), what).with("path", path.display())
}

/// Whether the error only says that the name does not exist (any more).
pub(crate) fn is_absent(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::STALE)
}

/// What we keep of a stat.
pub(crate) fn to_meta(stat: &Stat) -> FileMeta {
    FileMeta {
        len: u64::try_from(stat.st_size).unwrap_or(0),
        // The types differ between architectures.
        #[allow(clippy::unnecessary_cast, reason = "the types differ between architectures")]
        mtime_ns: (stat.st_mtime as i64)
            .saturating_mul(1_000_000_000)
            .saturating_add(stat.st_mtime_nsec as i64),
        #[allow(clippy::unnecessary_cast, reason = "the types differ between architectures")]
        ino: stat.st_ino as u64,
        #[allow(clippy::unnecessary_cast, reason = "the types differ between architectures")]
        dev: stat.st_dev as u64,
        is_dir: FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
    }
}

/// Metadata of one name, a link followed or not.
pub(crate) fn stat_one(path: &Path, flags: AtFlags) -> rustix::io::Result<FileMeta> {
    retry(|| rustix::fs::statat(CWD, path, flags)).map(|stat| to_meta(&stat))
}

/// Between two names of a long operation: whether anybody still waits. One whose deadline passed (a call in it hung)
/// must not go on to change files behind the back of those who were told that it failed.
fn go_on(wanted: StillWanted<'_>) -> Result<()> {
    if wanted() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Timeout,
        "stopped between two files after the deadline",
    ))
}

/// The names are looked up from the directory that they have in common, which the kernel then walks to once and not
/// for every name.
pub(crate) fn stat(
    paths: &[PathBuf],
    stop_at_missing: bool,
    wanted: StillWanted<'_>,
) -> Result<Vec<Option<FileMeta>>> {
    let mut found = Vec::with_capacity(paths.len());
    let common = Common::open(paths);
    for (number, path) in paths.iter().enumerate() {
        if number.is_multiple_of(STATS_BETWEEN_LOOKS) {
            go_on(wanted)?;
        }
        let meta = match common.stat(path) {
            Ok(meta) => Some(meta),
            Err(e) if is_absent(e) => None,
            Err(e) => return Err(failed(e, "cannot look up the file", path)),
        };
        found.push(meta);
        if meta.is_none() && stop_at_missing {
            break;
        }
    }
    Ok(found)
}

/// A directory that all names of one operation lie below, open for as long as that operation lasts: a descriptor kept
/// any longer would keep a share from being unmounted, and go on seeing it after it was.
struct Common {
    dir: Option<OwnedFd>,
    /// Bytes of a path up to the rest that is looked up from `dir`.
    len: usize,
}

impl Common {
    /// No directory where it would not pay, or cannot be opened: then every name tells by itself what is wrong.
    fn open(paths: &[PathBuf]) -> Self {
        let len = if paths.len() < FEWEST_IN_COMMON {
            0
        } else {
            common_dir(paths)
        };
        let prefix = paths
            .first()
            .and_then(|path| path.as_os_str().as_bytes().get(..len));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = prefix.filter(|prefix| !prefix.is_empty()).and_then(|prefix| {
            retry(|| rustix::fs::open(OsStr::from_bytes(prefix), flags, Mode::empty())).ok()
        });
        Self { dir, len }
    }

    fn stat(&self, path: &Path) -> rustix::io::Result<FileMeta> {
        let rest = path.as_os_str().as_bytes().get(self.len..).map(OsStr::from_bytes);
        match (&self.dir, rest) {
            (Some(dir), Some(rest)) => {
                retry(|| rustix::fs::statat(dir, rest, AtFlags::empty())).map(|stat| to_meta(&stat))
            }
            _ => stat_one(path, AtFlags::empty()),
        }
    }
}

/// Length of what all paths begin with, up to and with its last slash.
fn common_dir(paths: &[PathBuf]) -> usize {
    let Some((first, others)) = paths.split_first() else {
        return 0;
    };
    let first = first.as_os_str().as_bytes();
    let shared = |len: usize, other: &PathBuf| {
        let other = other.as_os_str().as_bytes();
        if other.starts_with(&first[..len]) {
            return len;
        }
        let both = first[..len].iter().zip(other);
        both.take_while(|(one, other)| one == other).count()
    };
    let len = others.iter().fold(first.len(), shared);
    let dir = first[..len]
        .iter()
        .rposition(|&byte| byte == b'/')
        .map_or(0, |at| at + 1);
    // A path that ends there has no name left to look up.
    let named = paths
        .iter()
        .all(|path| path.as_os_str().len() > dir && path.as_os_str().as_bytes()[dir] != b'/');
    if named { dir } else { 0 }
}

/// Whether a name was there for an operation on it.
fn was_there(done: rustix::io::Result<()>, what: &'static str, path: &Path) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(e) if is_absent(e) => Ok(false),
        Err(e) => Err(failed(e, what, path)),
    }
}

pub(crate) fn touch(files: &[(PathBuf, i64)], wanted: StillWanted<'_>) -> Vec<Result<bool>> {
    let one = |(path, mtime_ns): &(PathBuf, i64)| {
        go_on(wanted)?;
        was_there(set_mtime(path, *mtime_ns), "cannot set the file's time", path)
    };
    files.iter().map(one).collect()
}

/// Gives a named file its time, best effort: it is whole and has its name, and only its age would be wrong.
pub(crate) fn dated(path: &Path, meta: FileMeta, mtime_ns: i64) -> FileMeta {
    match set_mtime(path, mtime_ns) {
        Ok(()) => FileMeta { mtime_ns, ..meta },
        Err(_) => meta,
    }
}

/// Sets a file's modification time, in ns since 1970; the time of access stays.
pub(crate) fn set_mtime(path: &Path, mtime_ns: i64) -> rustix::io::Result<()> {
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT as _,
        },
        last_modification: Timespec {
            tv_sec: mtime_ns.div_euclid(1_000_000_000),
            tv_nsec: mtime_ns.rem_euclid(1_000_000_000) as _,
        },
    };
    retry(|| rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW))
}

pub(crate) fn remove(paths: &[PathBuf], wanted: StillWanted<'_>) -> Vec<Result<bool>> {
    let one = |path: &PathBuf| {
        go_on(wanted)?;
        was_there(retry(|| rustix::fs::unlink(path)), "cannot remove the file", path)
    };
    paths.iter().map(one).collect()
}

/// Renames `from`, which must be the file with this inode. Between the look and the rename another process may still
/// put another file there: callers keep their own away, and must be able to do without that one too.
pub(crate) fn rename(from: &Path, to: &Path, ino: u64, wanted: StillWanted<'_>) -> Result<bool> {
    match stat_one(from, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(meta) if meta.ino == ino && !meta.is_dir => {}
        Ok(_) => return Ok(false),
        Err(e) if is_absent(e) => return Ok(false),
        Err(e) => return Err(failed(e, "cannot look at the file", from)),
    }
    go_on(wanted)?;
    match retry(|| rustix::fs::rename(from, to)) {
        Ok(()) => Ok(true),
        Err(e) => Err(failed(e, "cannot rename the file", from).with("to", to.display())),
    }
}

pub(crate) fn list(dir: &Path, wanted: StillWanted<'_>) -> Result<Vec<(OsString, FileMeta)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fail = |e| failed(e, "cannot list the directory", dir);
    let fd = retry(|| rustix::fs::open(dir, flags, Mode::empty())).map_err(fail)?;
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(&fd).map_err(fail)? {
        go_on(wanted)?;
        let entry = entry.map_err(fail)?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        match retry(|| rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW)) {
            Ok(stat) => found.push((OsString::from(name), to_meta(&stat))),
            // Removed since it was listed.
            Err(e) if is_absent(e) => {}
            Err(e) => return Err(fail(e).with("name", name.display())),
        }
        if found.len() == MAX_LIST {
            break;
        }
    }
    Ok(found)
}

pub(crate) fn make_dir(path: &Path, mode: u32) -> Result<bool> {
    match retry(|| rustix::fs::mkdir(path, Mode::from_raw_mode(mode))) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => match stat_one(path, AtFlags::empty()) {
            Ok(meta) if meta.is_dir => Ok(false),
            Ok(_) => Err(failed(
                Errno::NOTDIR,
                "a file is where a directory should be",
                path,
            )),
            Err(e) => Err(failed(e, "cannot look at the directory", path)),
        },
        Err(e) => Err(failed(e, "cannot make the directory", path)),
    }
}

pub(crate) fn space(path: &Path) -> Result<SpaceInfo> {
    let fail = |e| failed(e, "cannot ask for the size of the file system", path);
    let vfs = retry(|| rustix::fs::statvfs(path)).map_err(fail)?;
    let meta = stat_one(path, AtFlags::empty()).map_err(fail)?;
    Ok(SpaceInfo {
        total: vfs.f_blocks.saturating_mul(vfs.f_frsize),
        free: vfs.f_bavail.saturating_mul(vfs.f_frsize),
        dev: meta.dev,
        mount: mount_of(path),
    })
}

/// Number of the mount that shows a name, where the kernel says it.
fn mount_of(path: &Path) -> Option<u64> {
    let said = retry(|| rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)).ok()?;
    (said.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(said.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn only_the_file_that_was_meant_is_renamed() {
        let place = tempfile::tempdir().unwrap();
        let [from, to] = ["a", "b"].map(|name| place.path().join(name));
        let renamed = |ino| rename(&from, &to, ino, &|| true).unwrap();
        assert!(!renamed(1), "not there");
        std::fs::write(&from, b"x").unwrap();
        let ino = stat_one(&from, AtFlags::empty()).unwrap().ino;
        assert!(!renamed(ino + 1) && from.exists(), "another file");
        assert!(
            rename(&from, &to, ino, &|| false).is_err() && from.exists(),
            "too late"
        );
        assert!(renamed(ino) && to.exists() && !from.exists());
        std::fs::create_dir(&from).unwrap();
        let ino = stat_one(&from, AtFlags::empty()).unwrap().ino;
        assert!(!renamed(ino), "no file");
    }

    #[test]
    fn what_names_have_in_common_ends_with_a_slash() {
        let common = |paths: &[&str]| common_dir(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(common(&["/r/blocks/ab/1", "/r/blocks/ac/1"]), "/r/blocks/".len());
        assert_eq!(
            common(&["/r/blocks/ab/1", "/r/blocks/ab/12"]),
            "/r/blocks/ab/".len()
        );
        assert_eq!(common(&["/r/one", "/r/one"]), "/r/".len());
        assert_eq!(common(&["/r", "/s"]), 1);
        assert_eq!(common(&["r/one", "r/two"]), 2);
        assert_eq!(common(&["one", "two"]), 0);
        for nameless in [&["/r/", "/r/one"][..], &["/r/one", "/r//one"], &["", "/r"], &[]] {
            assert_eq!(common(nameless), 0, "{nameless:?}");
        }
    }

    #[test]
    fn names_below_one_directory_are_found_as_each_alone() {
        let place = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..FEWEST_IN_COMMON * 4)
            .map(|number| place.path().join(format!("d{}/f{number}", number % 3)))
            .collect();
        let look = |paths: &[PathBuf], stop| stat(paths, stop, &|| true).unwrap();
        assert_eq!(
            look(&paths, false),
            vec![None; paths.len()],
            "not even their directories are there"
        );
        assert_eq!(look(&paths, true), [None]);
        for (number, path) in paths.iter().enumerate().filter(|(number, _)| number % 5 != 4) {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![0; number]).unwrap();
        }
        let found = look(&paths, false);
        let alone: Vec<_> = paths
            .iter()
            .map(|path| stat_one(path, AtFlags::empty()).ok())
            .collect();
        assert_eq!(found, alone);
        assert_eq!(found[3].unwrap().len, 3);
        assert_eq!(look(&paths, true), alone[..5]);
    }

    #[test]
    fn nothing_more_is_changed_once_no_one_waits() {
        let place = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = ["a", "b", "c"].map(|name| place.path().join(name)).into();
        for path in &paths {
            std::fs::write(path, b"x").unwrap();
        }
        // The deadline passes while the first is removed.
        let asked = Cell::new(0);
        let wanted = || asked.replace(asked.get() + 1) == 0;
        let done = remove(&paths, &wanted);
        assert!(*done[0].as_ref().unwrap());
        for late in &done[1..] {
            assert_eq!(late.as_ref().unwrap_err().kind(), ErrorKind::Timeout);
        }
        assert!(!paths[0].exists() && paths[1].exists() && paths[2].exists());
        let before = stat_one(&paths[1], AtFlags::empty()).unwrap();
        let done = touch(&[(paths[1].clone(), 5)], &|| false);
        assert!(done[0].is_err());
        assert_eq!(stat_one(&paths[1], AtFlags::empty()), Ok(before));
        assert!(stat(&paths, false, &|| false).is_err());
        assert!(list(place.path(), &|| false).is_err());
    }
}
