//! Operations on names: stat, touch, remove, list, make a directory, size of the file system.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;
use ucm_core::{Error, ErrorKind, Result};

use crate::below::{At, Roots, link_on, place_of};
use crate::op::{FileMeta, MAX_LIST, SpaceInfo, StillWanted, to_meta};
use crate::sys::retry;

/// Stats between two checks whether the job is still wanted. A stat changes nothing, and a check
/// costs a twentieth of one.
const STATS_BETWEEN_LOOKS: usize = 16;

/// An error of the operating system, with the path. If a link was not followed, it names the link.
pub(crate) fn failed(errno: Errno, what: &'static str, path: &Path) -> Error {
    let link = (errno == Errno::LOOP).then(|| link_on(path)).flatten();
    let Some(link) = link else {
        return Error::from_io(errno.into(), what).with("path", path.display());
    };
    let text = format!(
        "{what}: {} is a symbolic link, and below a root none is followed; remove the link, or \
         give \
         storage_backends the directory that holds the blocks",
        link.display()
    );
    Error::new(ErrorKind::Foreign, text)
        .caused_by(std::io::Error::from(errno))
        .with("path", path.display())
}

/// True if the error only means that the name does not exist (any more).
pub(crate) fn is_absent(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::STALE)
}

/// Metadata of one name, with or without following a link.
pub(crate) fn stat_one(at: &At<'_>, flags: AtFlags) -> rustix::io::Result<FileMeta> {
    retry(|| rustix::fs::statat(at.dir(), at.name(), flags)).map(|stat| to_meta(&stat))
}

/// Metadata of one name. Below a root a link is not followed: it is no file of ours.
fn stat_found(at: &At<'_>) -> rustix::io::Result<FileMeta> {
    let mut flags = AtFlags::empty();
    flags.set(AtFlags::SYMLINK_NOFOLLOW, at.is_below());
    let stat = retry(|| rustix::fs::statat(at.dir(), at.name(), flags))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => Err(Errno::NOENT),
        _ => Ok(to_meta(&stat)),
    }
}

/// Checked between two names of a long operation: whether it is still wanted. After its deadline (a
/// call in it hung) it must not change further files, because it was reported as failed.
fn go_on(wanted: StillWanted<'_>) -> Result<()> {
    if wanted() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Timeout,
        "stopped between two files after the deadline",
    ))
}

/// The indices of these paths, sorted by directory, so that a walk opens each directory once.
fn by_directory<'p>(paths: impl Iterator<Item = &'p Path>) -> Vec<usize> {
    let numbered = paths
        .map(|path| path.parent().map(Path::as_os_str))
        .zip(0..);
    let mut order: Vec<(Option<&OsStr>, usize)> = numbered.collect();
    order.sort_unstable();
    order.into_iter().map(|(_, number)| number).collect()
}

pub(crate) fn stat(
    roots: &Roots,
    paths: &[PathBuf],
    stop_at_missing: bool,
    wanted: StillWanted<'_>,
) -> Result<Vec<Option<FileMeta>>> {
    let mut found = Vec::with_capacity(paths.len());
    let mut walk = roots.walk();
    for (number, path) in paths.iter().enumerate() {
        if number.is_multiple_of(STATS_BETWEEN_LOOKS) {
            go_on(wanted)?;
        }
        let looked = walk.above(path).and_then(|at| match stat_found(&at)? {
            _ if walk.is_by_link(&at) => Err(Errno::LOOP),
            meta => Ok(meta),
        });
        found.push(match looked {
            Ok(meta) => Some(meta),
            Err(e) if is_absent(e) => None,
            Err(e) => return Err(failed(e, "cannot stat the file", path)),
        });
        if stop_at_missing && matches!(found[..], [.., None]) {
            break;
        }
    }
    Ok(found)
}

/// True if a name existed for an operation on it.
fn was_there(done: rustix::io::Result<()>, what: &'static str, path: &Path) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(e) if is_absent(e) => Ok(false),
        Err(e) => Err(failed(e, what, path)),
    }
}

pub(crate) fn touch(
    roots: &Roots,
    files: &[(PathBuf, i64)],
    wanted: StillWanted<'_>,
) -> Vec<Result<bool>> {
    let mut walk = roots.walk();
    let mut one = |(path, mtime_ns): &(PathBuf, i64)| {
        go_on(wanted)?;
        let set = walk.at(path).and_then(|at| set_mtime(&at, *mtime_ns));
        was_there(set, "cannot set the file's time", path)
    };
    let order = by_directory(files.iter().map(|(path, _)| path.as_path()));
    let mut done: Vec<_> = order
        .into_iter()
        .map(|number| (number, one(&files[number])))
        .collect();
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, set)| set).collect()
}

/// Sets the time of a published file, best effort: a failure makes only its age wrong.
pub(crate) fn dated(at: &At<'_>, meta: FileMeta, mtime_ns: i64) -> FileMeta {
    match set_mtime(at, mtime_ns) {
        Ok(()) => FileMeta { mtime_ns, ..meta },
        Err(_) => meta,
    }
}

/// Sets a file's modification time, in ns since 1970, and keeps its access time.
fn set_mtime(at: &At<'_>, mtime_ns: i64) -> rustix::io::Result<()> {
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
    retry(|| rustix::fs::utimensat(at.dir(), at.name(), &times, AtFlags::SYMLINK_NOFOLLOW))
}

pub(crate) fn remove(
    roots: &Roots,
    paths: &[PathBuf],
    wanted: StillWanted<'_>,
) -> Vec<Result<bool>> {
    let mut walk = roots.walk();
    let one = |path: &PathBuf| {
        go_on(wanted)?;
        let removed = walk.at(path).and_then(|at| at.unlink());
        was_there(removed, "cannot remove the file", path)
    };
    paths.iter().map(one).collect()
}

/// Renames `from`, which must be the file with this inode. Between the check and the rename another
/// process may put another file there. Callers must prevent that for their own processes and
/// tolerate it from others.
pub(crate) fn rename(
    roots: &Roots,
    from: &Path,
    to: &Path,
    ino: u64,
    wanted: StillWanted<'_>,
) -> Result<bool> {
    let mut walk = roots.walk();
    let found = walk.at(from).and_then(|old| {
        let meta = stat_one(&old, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((meta, old))
    });
    let old = match found {
        Ok((meta, old)) if meta.ino == ino && !meta.is_dir => old,
        Ok(_) => return Ok(false),
        Err(e) if is_absent(e) => return Ok(false),
        Err(e) => return Err(failed(e, "cannot stat the file", from)),
    };
    let new = walk
        .at(to)
        .map_err(|e| failed(e, "cannot rename the file", to))?;
    go_on(wanted)?;
    match old.rename(&new) {
        Ok(()) => Ok(true),
        Err(e) => Err(failed(e, "cannot rename the file", from).with("to", to.display())),
    }
}

pub(crate) fn list(
    roots: &Roots,
    dir: &Path,
    wanted: StillWanted<'_>,
) -> Result<Vec<(OsString, FileMeta)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fail = |e| failed(e, "cannot list the directory", dir);
    let fd = roots.walk().open(dir, flags).map_err(fail)?;
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
            // Removed since the listing.
            Err(e) if is_absent(e) => {}
            Err(e) => return Err(fail(e).with("name", name.display())),
        }
        if found.len() == MAX_LIST {
            break;
        }
    }
    Ok(found)
}

pub(crate) fn make_dir(roots: &Roots, path: &Path, mode: u32) -> Result<bool> {
    let fail = |e| failed(e, "cannot make the directory", path);
    let at = roots.walk().at(path).map_err(fail)?;
    match retry(|| rustix::fs::mkdirat(at.dir(), at.name(), Mode::from_raw_mode(mode))) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => match stat_found(&at) {
            // The name exists but cannot be resolved: a link below a root.
            Err(Errno::NOENT) if at.is_below() => Err(fail(Errno::LOOP)),
            Ok(meta) if meta.is_dir => Ok(false),
            Ok(_) => Err(failed(Errno::NOTDIR, "a file is in its place", path)),
            Err(e) => Err(failed(e, "cannot stat the directory", path)),
        },
        Err(e) => Err(fail(e)),
    }
}

pub(crate) fn space(roots: &Roots, path: &Path) -> Result<SpaceInfo> {
    let fail = |e| failed(e, "cannot read the size of the file system", path);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = roots.walk().open(path, flags).map_err(fail)?;
    let vfs = retry(|| rustix::fs::fstatvfs(&dir)).map_err(fail)?;
    let meta = to_meta(&retry(|| rustix::fs::fstat(&dir)).map_err(fail)?);
    Ok(SpaceInfo {
        total: vfs.f_blocks.saturating_mul(vfs.f_frsize),
        free: vfs.f_bavail.saturating_mul(vfs.f_frsize),
        dev: meta.dev,
        mount: place_of(dir.as_fd()).and_then(|[.., mount]| (mount > 0).then_some(mount)),
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn only_the_file_that_was_meant_is_renamed() {
        let place = tempfile::tempdir().unwrap();
        let [from, to] = ["a", "b"].map(|name| place.path().join(name));
        let roots = Roots::default();
        let renamed = |ino| rename(&roots, &from, &to, ino, &|| true).unwrap();
        let ino_of = |path: &Path| {
            stat_one(&roots.walk().at(path).unwrap(), AtFlags::empty())
                .unwrap()
                .ino
        };
        assert!(!renamed(1), "not there");
        std::fs::write(&from, b"x").unwrap();
        let ino = ino_of(&from);
        assert!(!renamed(ino + 1) && from.exists(), "another file");
        assert!(
            rename(&roots, &from, &to, ino, &|| false).is_err() && from.exists(),
            "too late"
        );
        assert!(renamed(ino) && to.exists() && !from.exists());
        std::fs::create_dir(&from).unwrap();
        let ino = ino_of(&from);
        assert!(!renamed(ino), "no file");
    }

    #[test]
    fn names_below_one_directory_are_found_as_each_alone() {
        let place = tempfile::tempdir().unwrap();
        let roots = Roots::default();
        let paths: Vec<PathBuf> = (0..32)
            .map(|number| place.path().join(format!("d{}/f{number}", number % 3)))
            .collect();
        let look = |paths: &[PathBuf], stop| stat(&roots, paths, stop, &|| true).unwrap();
        assert_eq!(
            look(&paths, false),
            vec![None; paths.len()],
            "not even their directories exist"
        );
        assert_eq!(look(&paths, true), [None]);
        for (number, path) in paths
            .iter()
            .enumerate()
            .filter(|(number, _)| number % 5 != 4)
        {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![0; number]).unwrap();
        }
        let found = look(&paths, false);
        let alone: Vec<_> = paths
            .iter()
            .map(|path| stat_found(&roots.walk().at(path).unwrap()).ok())
            .collect();
        assert_eq!(found, alone);
        assert_eq!(found[3].unwrap().len, 3);
        assert_eq!(look(&paths, true), alone[..5]);
    }

    #[test]
    fn one_operation_opens_each_directory_once_and_answers_in_order() {
        let place = tempfile::tempdir().unwrap();
        let roots = Roots::default();
        roots.add(place.path());
        // Consecutive names lie in different directories, as records do.
        let paths: Vec<PathBuf> = (0..64)
            .map(|number| {
                place
                    .path()
                    .join(format!("ns/d{}/f{number}", number * 5 % 8))
            })
            .collect();
        for (number, path) in paths.iter().enumerate() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![0; number]).unwrap();
        }
        let above = place.path().join("ns");
        let set_changed = |time| {
            let above = std::fs::File::open(&above).unwrap();
            above.set_modified(time).unwrap();
        };
        // Just now, however long the following takes.
        set_changed(std::time::SystemTime::now() + std::time::Duration::from_secs(3600));
        let opened = || roots.opened.swap(0, std::sync::atomic::Ordering::Relaxed);
        for stop in [false, true] {
            let found = stat(&roots, &paths, stop, &|| true).unwrap();
            let lengths: Vec<_> = found.iter().map(|meta| meta.unwrap().len).collect();
            assert_eq!(lengths, (0..64).collect::<Vec<_>>());
            assert_eq!(opened(), 1, "the one above all of them");
        }
        let files: Vec<_> = paths.iter().cloned().zip(1_000_000_000..).collect();
        std::fs::remove_file(&paths[40]).unwrap();
        let touched = touch(&roots, &files, &|| true);
        let there: Vec<_> = touched.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            there,
            (0..64).map(|number| number != 40).collect::<Vec<_>>()
        );
        assert_eq!(opened(), 8);
        for (path, time) in files.iter().filter(|(path, _)| path.exists()) {
            assert_eq!(to_meta(&rustix::fs::stat(path).unwrap()).mtime_ns, *time);
        }
        // What was found to be no link is looked at again once the directory above has changed.
        assert!(
            roots.plain.read().above.is_none(),
            "it has just been changed"
        );
        set_changed(std::time::SystemTime::UNIX_EPOCH);
        assert_eq!(stat(&roots, &paths, false, &|| true).unwrap().len(), 64);
        assert!(roots.plain.read().above.is_some());
        // The first missing name ends the result, and the first failure is the error.
        std::fs::remove_file(&paths[20]).unwrap();
        assert_eq!(stat(&roots, &paths, true, &|| true).unwrap().len(), 21);
        assert_eq!(stat(&roots, &paths, false, &|| true).unwrap().len(), 64);
        let dir = paths[21].parent().unwrap();
        std::fs::rename(dir, place.path().join("ns/moved")).unwrap();
        std::os::unix::fs::symlink("moved", dir).unwrap();
        let first = (0..64)
            .find(|number| paths[*number].starts_with(dir))
            .unwrap();
        for stop in [false, true] {
            let error = stat(&roots, &paths, stop, &|| true).unwrap_err();
            let said = format!("path={}", paths[first].display());
            assert!(error.to_string().contains(&said), "{error}");
        }
        let cut: Vec<_> = [20, first].map(|number| paths[number].clone()).into();
        assert_eq!(stat(&roots, &cut, true, &|| true).unwrap(), [None]);
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
        let roots = Roots::default();
        let done = remove(&roots, &paths, &wanted);
        assert!(*done[0].as_ref().unwrap());
        for late in &done[1..] {
            assert_eq!(late.as_ref().unwrap_err().kind(), ErrorKind::Timeout);
        }
        assert!(!paths[0].exists() && paths[1].exists() && paths[2].exists());
        let time = || std::fs::metadata(&paths[1]).unwrap().modified().unwrap();
        let before = time();
        let done = touch(&roots, &[(paths[1].clone(), 5)], &|| false);
        assert!(done[0].is_err());
        assert_eq!(time(), before);
        assert!(stat(&roots, &paths, false, &|| false).is_err());
        assert!(list(&roots, place.path(), &|| false).is_err());
    }
}
