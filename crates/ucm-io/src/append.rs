//! Files that are written in pieces: created under a private name, filled at offsets, finished and
//! named.
//!
//! Every operation opens the file by its name, closes it and checks the error of the close: a
//! network file system reports failed writes there. Also, the removal of a private file by another
//! process is noticed at once.

use std::path::Path;

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use ucm_core::{Error, Result};

use crate::below::Roots;
use crate::file::{CANNOT_CLOSE, CANNOT_CREATE, CANNOT_NAME, CANNOT_WRITE, Files, look, name};
use crate::meta::{failed, is_absent};
use crate::op::{FileMeta, Finish, StillWanted};
use crate::sys::{File, read_full, retry, write_full};

/// Flags for opening a file for writing. They never create a file and never wait for the other end
/// if the name is a pipe.
const WRITE_FLAGS: OFlags = OFlags::WRONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NOCTTY)
    .union(OFlags::NONBLOCK);

impl Files {
    /// Creates a private file, preallocates space for it, and writes its first bytes.
    pub(crate) fn create(&self, path: &Path, head: &[u8], room: u64, mode: u32) -> Result<()> {
        let fail = |e| failed(e, CANNOT_CREATE, path);
        let at = self.roots.walk().at(path).map_err(fail)?;
        // If this fails, a file of that name is not ours and must stay.
        let fd = at.create(mode).map_err(fail)?;
        let mut file = File::new(fd, false);
        // Without preallocation the file grows as it is written. Space allocated before the medium
        // was full is released.
        if room > 0
            && retry(|| rustix::fs::fallocate(file.fd(), FallocateFlags::empty(), 0, room)).is_err()
        {
            let _ = retry(|| rustix::fs::ftruncate(file.fd(), 0));
        }
        let filled = write_full(&mut file, head, 0)
            .map_err(|e| failed(e, "cannot write the private file", path))
            .and_then(|()| {
                file.close()
                    .map_err(|e| failed(e, "closing the private file failed", path))
            });
        if filled.is_err() {
            let _ = at.unlink(); // best effort: swept by its age
        }
        filled
    }

    /// Writes into an existing file. `keep`: through a root that stays open for the next such
    /// write.
    pub(crate) fn write_at(
        &self,
        path: &Path,
        offset: u64,
        bytes: &[u8],
        keep: bool,
    ) -> Result<()> {
        let len = bytes.len();
        let end = offset
            .checked_add(len as u64)
            .filter(|&end| end <= i64::MAX as u64);
        if end.is_none() {
            return Err(Error::invalid("a write must fit the range of file offsets")
                .with("path", path.display())
                .with("offset", offset)
                .with("len", len));
        }
        let fail = |e| failed(e, CANNOT_WRITE, path);
        let opened = match keep {
            true => self.roots.open_often(path, WRITE_FLAGS),
            false => self.roots.walk().open(path, WRITE_FLAGS),
        };
        let mut file = self.with_ring(File::new(opened.map_err(fail)?, false));
        self.write_open(&mut file, bytes, offset).map_err(fail)?;
        file.close().map_err(|e| failed(e, CANNOT_CLOSE, path))
    }

    /// Writes the end of a private file and renames it to its final name.
    pub(crate) fn finish(&self, job: &Finish<'_>, wanted: StillWanted<'_>) -> Result<FileMeta> {
        let named = self.end_and_name(job, wanted);
        // By a walk of its own: the other may have failed before it got there.
        if named.is_err()
            && let Ok(private) = self.roots.walk().at(job.private)
        {
            let _ = private.unlink(); // best effort: swept by its age
        }
        named
    }

    fn end_and_name(&self, job: &Finish<'_>, wanted: StillWanted<'_>) -> Result<FileMeta> {
        let mut walk = self.roots.walk();
        let target = walk
            .at(job.target)
            .map_err(|e| failed(e, CANNOT_NAME, job.target))?;
        let no_private = |e| failed(e, "cannot open the private file", job.private);
        let file = match walk.open(job.private, WRITE_FLAGS) {
            Ok(fd) => File::new(fd, false),
            Err(e) if is_absent(e) && is_finished(&self.roots, job) => return look(&target),
            Err(e) => return Err(no_private(e)),
        };
        let private = walk.at(job.private).map_err(no_private)?;
        let len = end(file, job)?;
        let named = name(&private, &target, (len, false), Some(job.mtime_ns), wanted)?;
        named.ok_or_else(|| failed(Errno::EXIST, CANNOT_NAME, job.target))
    }
}

/// Writes the end of a filled file and closes it; returns its length.
fn end(mut file: File, job: &Finish<'_>) -> Result<u64> {
    let fail = |e| failed(e, "cannot write the end of the file", job.private);
    let len = job.offset + job.footer.len() as u64;
    write_full(&mut file, job.footer, job.offset).map_err(fail)?;
    retry(|| rustix::fs::ftruncate(file.fd(), len)).map_err(fail)?;
    let closed = file.close();
    closed.map_err(|e| failed(e, CANNOT_CLOSE, job.private))?;
    Ok(len)
}

/// True if an earlier call did everything: the file has its name, its length and its last bytes.
fn is_finished(roots: &Roots, job: &Finish<'_>) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let Ok(fd) = roots.walk().open(job.target, flags) else {
        return false;
    };
    let mut tail = vec![0; job.footer.len() + 1];
    let read = read_full(
        &mut File::new(fd, false),
        &mut tail,
        job.offset,
        job.footer.len() + 1,
    );
    read == Ok(job.footer.len()) && tail[..job.footer.len()] == *job.footer
}

#[cfg(test)]
mod tests {
    use ucm_core::ErrorKind;

    use super::*;

    struct Place {
        dir: tempfile::TempDir,
        files: Files,
    }

    impl Place {
        fn new() -> Self {
            let place = Self {
                dir: tempfile::tempdir().unwrap(),
                files: Files::new(false),
            };
            place
                .files
                .create(&place.private(), b"head", 1 << 16, 0o600)
                .unwrap();
            place
        }

        fn private(&self) -> std::path::PathBuf {
            self.dir.path().join("private")
        }

        fn target(&self) -> std::path::PathBuf {
            self.dir.path().join("target")
        }

        fn finish(&self, wanted: bool) -> Result<FileMeta> {
            self.finish_as(&self.target(), wanted)
        }

        fn finish_as(&self, target: &Path, wanted: bool) -> Result<FileMeta> {
            let private = self.private();
            let job = Finish {
                private: &private,
                target,
                footer: b"foot",
                offset: 8192,
                mtime_ns: 5_000_000_000,
            };
            let at = Roots::default();
            let at = at.walk().at(&private).unwrap();
            // by which others see that its writer is alive
            let early = || look(&at).unwrap().mtime_ns > job.mtime_ns;
            self.files.finish(&job, &|| wanted && early())
        }
    }

    #[test]
    fn a_file_is_filled_cut_off_and_named() {
        let place = Place::new();
        place
            .files
            .write_at(&place.private(), 4096, b"data", false)
            .unwrap();
        let meta = place.finish(true).unwrap();
        assert_eq!((meta.len, meta.mtime_ns), (8196, 5_000_000_000));
        let bytes = std::fs::read(place.target()).unwrap();
        assert_eq!(
            (&bytes[..4], &bytes[4096..4100], &bytes[8192..]),
            (&b"head"[..], &b"data"[..], &b"foot"[..])
        );
        assert!(!place.private().exists());
        place.finish(true).unwrap(); // again
        std::fs::write(place.target(), b"other").unwrap();
        assert_eq!(place.finish(true).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn what_is_too_late_or_taken_gets_no_name() {
        let place = Place::new();
        assert_eq!(place.finish(false).unwrap_err().kind(), ErrorKind::Timeout);
        assert!(!place.private().exists() && !place.target().exists());
        let place = Place::new();
        std::fs::write(place.target(), b"other").unwrap();
        assert!(place.finish(true).is_err() && !place.private().exists());
        assert_eq!(std::fs::read(place.target()).unwrap(), b"other");
    }

    #[test]
    fn without_a_directory_for_its_name_nothing_is_left() {
        let place = Place::new();
        place.files.roots.add(place.dir.path());
        let missing = place.dir.path().join("not made yet").join("target");
        let error = place.finish_as(&missing, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(!place.private().exists());
    }

    #[test]
    fn only_what_was_created_is_written() {
        let place = Place::new();
        let error = place
            .files
            .create(&place.private(), b"", 0, 0o600)
            .unwrap_err();
        assert_eq!(error.os_code(), Some(17));
        let write = |path: &Path, at| {
            place
                .files
                .write_at(path, at, b"data", false)
                .unwrap_err()
                .kind()
        };
        assert_eq!(write(&place.target(), 0), ErrorKind::NotFound);
        assert_eq!(write(&place.private(), u64::MAX), ErrorKind::InvalidInput);
        let error = place
            .files
            .create(&place.target().join("x"), b"", 0, 0o600)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
}
