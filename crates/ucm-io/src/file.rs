//! Reading and publishing files: open, transfer, checked close, rename.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Advice, AtFlags, FileType, OFlags, RenameFlags};
use rustix::io::Errno;
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, PAGE, Result};

use crate::below::{At, Roots};
use crate::bounce_buffer::BounceBuffer;
use crate::fd_cache::FdCache;
use crate::meta::{dated, failed, is_absent, stat_one};
use crate::op::to_meta;
use crate::op::{FileMeta, Publish, Read, ReadMode, StillWanted};
use crate::probe::{Stated, stated_align};
use crate::sys::{File, SECTOR, read_full, retry, write_full};
use crate::usrbio::Rings;
use crate::writeback::WritebackThrottle;

/// Flags for opening a file for reading.
const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NOCTTY);

// What went wrong.
pub(crate) const CANNOT_READ: &str = "cannot read the file";
pub(crate) const CANNOT_CREATE: &str = "cannot create the private file";
pub(crate) const CANNOT_WRITE: &str = "cannot write the file";
pub(crate) const CANNOT_NAME: &str = "cannot give the file its name";
pub(crate) const CANNOT_CLOSE: &str = "closing the written file failed";

/// Most devices remembered as refusing direct I/O.
const MAX_REFUSING: usize = 64;

/// State and counters of the file operations of one engine.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// The roots below which no symbolic link is followed.
    pub(crate) roots: Roots,
    /// True if reads and writes of slots bypass the page cache by default.
    pub(crate) direct: bool,
    /// Devices on which that failed, so that it is not tried again for every file.
    refusing: Mutex<Vec<u64>>,
    fallbacks: AtomicU64,
    /// The rings for slots on 3FS.
    pub(crate) rings: Option<Arc<Rings>>,
    pub(crate) dirty: WritebackThrottle,
    pub(crate) kept: FdCache,
}

impl Files {
    pub(crate) fn new(direct: bool) -> Self {
        Self {
            direct,
            ..Self::default()
        }
    }

    /// An open file, with rings if they can be used.
    pub(crate) fn with_ring(&self, file: File) -> File {
        let ring = self
            .rings
            .as_ref()
            .and_then(|rings| rings.register(file.fd()));
        file.through(ring)
    }

    /// How often direct I/O was wanted but the page cache was used.
    pub(crate) fn fallbacks(&self) -> u64 {
        self.fallbacks.load(Ordering::Relaxed)
    }

    pub(crate) fn read(
        &self,
        path: &Path,
        offset: u64,
        len: usize,
        buf: &mut [u8],
        mode: ReadMode,
    ) -> Result<Read> {
        let room = buf.len();
        check_read(path, offset, len, room)?;
        let fresh = mode == ReadMode::FreshDirect;
        let fits = fits_direct_read(buf, len, offset);
        let fail = |e| failed(e, CANNOT_READ, path);
        let file = self
            .open_for_read(path, fresh || (self.direct && fits), false)
            .map_err(fail)?;
        let mut file = self.with_ring(file);
        let stat = retry(|| rustix::fs::fstat(file.fd())).map_err(fail)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(not_regular(path));
        }
        let meta = to_meta(&stat);
        if file.is_direct() && !self.usable(meta.dev, || stated_align(file.fd())) {
            file.set_direct(false);
        }
        let read = if file.is_direct() && !fits {
            // Direct I/O with unaligned memory or offset uses a window of whole pages.
            let mut window = BounceBuffer::new(offset, len)?;
            let bytes = window.read(&mut file).map_err(fail)?;
            buf[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        } else {
            // Whole sectors for direct I/O.
            let ask = if file.is_direct() {
                len.next_multiple_of(SECTOR)
            } else {
                len
            };
            read_full(&mut file, &mut buf[..ask], offset, len).map_err(fail)?
        };
        self.note(&file, meta.dev, fresh || self.direct);
        Ok(Read {
            bytes: read.min(len),
            file_len: meta.len,
        })
    }

    pub(crate) fn publish(
        &self,
        job: &Publish<'_>,
        wanted: StillWanted<'_>,
    ) -> Result<Option<FileMeta>> {
        let mut walk = self.roots.walk();
        let private = walk
            .at(job.private)
            .map_err(|e| failed(e, CANNOT_CREATE, job.private))?;
        let target = walk
            .at(job.target)
            .map_err(|e| failed(e, CANNOT_NAME, job.target))?;
        // If this fails, a file of that name is not ours and must stay.
        let fd = private
            .create(job.mode)
            .map_err(|e| failed(e, CANNOT_CREATE, job.private))?;
        let filled = self.fill(self.with_ring(File::new(fd, false)), job);
        let how = (job.bytes.len() as u64, job.replace);
        let named = filled.and_then(|()| name(&private, &target, how, job.mtime_ns, wanted));
        if !matches!(named, Ok(Some(_))) {
            // Best effort: a remaining private file is removed later by its age.
            let _ = private.unlink();
        }
        named
    }

    /// Writes the private file and closes it.
    fn fill(&self, mut file: File, job: &Publish<'_>) -> Result<()> {
        let written = |e| failed(e, CANNOT_WRITE, job.private);
        self.write_open(&mut file, job.bytes, 0).map_err(written)?;
        if job.durable {
            retry(|| rustix::fs::fsync(file.fd())).map_err(written)?;
        }
        file.close()
            .map_err(|e| failed(e, CANNOT_CLOSE, job.private))
    }

    /// Writes at an offset of an open file, past the page cache if wanted and possible.
    pub(crate) fn write_open(
        &self,
        file: &mut File,
        bytes: &[u8],
        offset: u64,
    ) -> rustix::io::Result<()> {
        let len = bytes.len();
        let fits = on_a_page(bytes) && offset.is_multiple_of(PAGE) && len.is_multiple_of(SECTOR);
        let mut through_cache = true;
        if self.direct {
            let dev = to_meta(&retry(|| rustix::fs::fstat(file.fd()))?).dev;
            // Turned on after the open, because an open with O_DIRECT may create the file and then
            // fail.
            if fits && self.usable(dev, || stated_align(file.fd())) {
                through_cache = !file.set_direct(true);
            }
            let written = write_full(file, bytes, offset);
            self.note(file, dev, true);
            written?;
        } else {
            write_full(file, bytes, offset)?;
        }
        if through_cache && self.dirty.write(len as u64) {
            // Starts writing dirty pages back; best effort, the kernel would do it later anyway.
            let len = NonZeroU64::new(len as u64);
            let _ = rustix::fs::fadvise(file.fd(), offset, len, Advice::DontNeed);
        }
        Ok(())
    }

    /// Opens for reading, past the page cache if wanted and supported. Never waits for the other
    /// end if the name is a pipe. `often`: through a root that is kept open.
    pub(crate) fn open_for_read(
        &self,
        path: &Path,
        direct: bool,
        often: bool,
    ) -> rustix::io::Result<File> {
        let base = READ_FLAGS;
        let mut direct = direct;
        let mut wait = OFlags::NONBLOCK;
        loop {
            let how = if direct { base | OFlags::DIRECT } else { base };
            let opened = match often {
                true => self.roots.open_often(path, how | wait),
                false => self.roots.walk().open(path, how | wait),
            };
            match opened {
                Ok(fd) => return Ok(File::new(fd, direct)),
                Err(Errno::INVAL) if direct => direct = false,
                // A lease on the file is being revoked: worth waiting for, until our deadline.
                Err(Errno::AGAIN) if !wait.is_empty() => wait = OFlags::empty(),
                Err(error) => return Err(error),
            }
        }
    }

    /// True if direct I/O may be tried on an open file of this device, given the kernel's
    /// statement.
    pub(crate) fn usable(&self, dev: u64, stated: impl FnOnce() -> Stated) -> bool {
        if self.refusing.lock().contains(&dev) {
            return false;
        }
        match stated() {
            Stated::Works(align) => align.suits_slots(),
            Stated::Not => false,
            Stated::Unsaid => true,
        }
    }

    /// Counts the operation if it wanted direct I/O but used the page cache.
    pub(crate) fn count_fallback(&self, fell: bool) {
        if fell {
            self.fallbacks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts an operation that wanted direct I/O but did not use it, and remembers a file system
    /// that refused it.
    pub(crate) fn note(&self, file: &File, dev: u64, wanted: bool) {
        self.count_fallback(wanted && !file.is_direct());
        if file.refused() {
            let mut refusing = self.refusing.lock();
            if !refusing.contains(&dev) && refusing.len() < MAX_REFUSING {
                refusing.push(dev);
            }
        }
    }
}

/// Metadata of a file after its close, because only then a network file system has final length and
/// time.
pub(crate) fn look(at: &At<'_>) -> Result<FileMeta> {
    stat_one(at, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| failed(e, "cannot stat the written file", at.path))
}

/// Renames the closed file of `len` bytes to its name and then sets its time; `None` if the name is
/// taken and is not to be replaced. Under its private name it keeps the time of its last write, by
/// which others see that its writer is alive.
pub(crate) fn name(
    private: &At<'_>,
    target: &At<'_>,
    (len, replace): (u64, bool),
    mtime_ns: Option<i64>,
    wanted: StillWanted<'_>,
) -> Result<Option<FileMeta>> {
    let meta = look(private)?;
    if meta.len != len {
        let text = "the length of the file differs from the bytes written";
        return Err(Error::new(ErrorKind::Io, text)
            .with("path", private.path.display())
            .with("written", len)
            .with("found", meta.len));
    }
    if !wanted() {
        let text = "the file was written after its deadline and is not published";
        return Err(Error::new(ErrorKind::Timeout, text).with("path", target.path.display()));
    }
    let named = match replace {
        true => private.rename(target),
        false => name_once(private, target),
    };
    if is_named(named, private, target, &meta) {
        return Ok(Some(match mtime_ns {
            Some(mtime_ns) => dated(target, meta, mtime_ns),
            None => meta,
        }));
    }
    let errno = named.err().unwrap_or(Errno::IO);
    if !replace && errno == Errno::EXIST {
        return Ok(None);
    }
    Err(failed(errno, CANNOT_NAME, target.path))
}

/// A read must fit its buffer and the range of file offsets.
pub(crate) fn check_read(path: &Path, offset: u64, len: usize, room: usize) -> Result<()> {
    let end = offset.checked_add(len as u64);
    if len <= room && end.is_some_and(|end| end <= i64::MAX as u64) {
        return Ok(());
    }
    Err(
        Error::invalid("a read must fit its buffer and the range of file offsets")
            .with("path", path.display())
            .with("offset", offset)
            .with("len", len)
            .with("buffer", room),
    )
}

/// True if memory is aligned for direct I/O, as slots are.
fn on_a_page(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(PAGE as usize)
}

/// True if direct I/O can read `len` bytes from this offset into this memory as it is, with room
/// for whole sectors.
pub(crate) fn fits_direct_read(buf: &[u8], len: usize, offset: u64) -> bool {
    let room = len
        .checked_next_multiple_of(SECTOR)
        .is_some_and(|len| len <= buf.len());
    room && on_a_page(buf) && offset.is_multiple_of(PAGE)
}

/// The name is not a regular file. That is no fault of the medium.
pub(crate) fn not_regular(path: &Path) -> Error {
    Error::new(ErrorKind::Foreign, "not a regular file").with("path", path.display())
}

/// Renames a file to a free name (EXIST otherwise). On a local file system this is a rename. On
/// others it makes a hard link, which is exclusive on a server too, and removes the first name.
fn name_once(private: &At<'_>, target: &At<'_>) -> rustix::io::Result<()> {
    match retry(|| {
        rustix::fs::renameat_with(
            private.dir(),
            private.name(),
            target.dir(),
            target.name(),
            RenameFlags::NOREPLACE,
        )
    }) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return renamed,
    }
    match retry(|| {
        rustix::fs::linkat(
            private.dir(),
            private.name(),
            target.dir(),
            target.name(),
            AtFlags::empty(),
        )
    }) {
        Ok(()) => {
            // Best effort: the remaining name is private and is removed later by its age.
            let _ = private.unlink();
            Ok(())
        }
        Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP | Errno::MLINK) => {
            match stat_one(target, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Err(Errno::EXIST),
                Err(errno) if is_absent(errno) => private.rename(target),
                Err(errno) => Err(errno),
            }
        }
        failed => failed,
    }
}

/// True if the private file with this metadata has its final name now. A network file system may
/// repeat a call whose reply was lost, and then find the private name missing or the target
/// existing. The call has succeeded if the target is our file.
fn is_named(
    renamed: rustix::io::Result<()>,
    private: &At<'_>,
    target: &At<'_>,
    meta: &FileMeta,
) -> bool {
    let Err(errno) = renamed else {
        return true;
    };
    let ours = (is_absent(errno) || errno == Errno::EXIST)
        && stat_one(target, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|found| (found.dev, found.ino) == (meta.dev, meta.ino));
    if ours && errno == Errno::EXIST {
        let _ = private.unlink(); // a second name, which the repeated call left
    }
    ours
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(dir: &Path, wanted: bool) -> Result<Option<FileMeta>> {
        let job = Publish {
            private: &dir.join("private"),
            target: &dir.join("target"),
            replace: true,
            bytes: &[1, 2, 3],
            mode: 0o600,
            mtime_ns: None,
            durable: true,
        };
        Files::new(false).publish(&job, &|| wanted)
    }

    #[test]
    fn a_file_written_too_late_gets_no_name() {
        let place = tempfile::tempdir().unwrap();
        let error = publish(place.path(), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        publish(place.path(), true).unwrap();
        assert_eq!(
            std::fs::read(place.path().join("target")).unwrap(),
            [1, 2, 3]
        );
    }

    /// Its writer's clock may be an hour behind. With such a time, others would take the private
    /// file for that of a dead writer.
    #[test]
    fn a_private_file_keeps_the_time_of_its_last_byte() {
        let place = tempfile::tempdir().unwrap();
        let (private, target) = (place.path().join("private"), place.path().join("target"));
        let job = Publish {
            private: &private,
            target: &target,
            replace: true,
            bytes: &[1, 2, 3],
            mode: 0o600,
            mtime_ns: Some(5_000_000_000),
            durable: false,
        };
        let roots = Roots::default();
        let look =
            |path| stat_one(&roots.walk().at(path).unwrap(), AtFlags::SYMLINK_NOFOLLOW).unwrap();
        let time = |path| look(path).mtime_ns;
        let before_its_name = || time(&private) > 5_000_000_000;
        let meta = Files::new(false)
            .publish(&job, &before_its_name)
            .unwrap()
            .unwrap();
        assert_eq!(
            (meta.mtime_ns, time(&target)),
            (5_000_000_000, 5_000_000_000)
        );
    }

    #[test]
    fn a_rename_whose_answer_was_lost_counts_if_the_file_is_there() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("target");
        publish(place.path(), true).unwrap();
        let roots = Roots::default();
        let ours = stat_one(&roots.walk().at(&target).unwrap(), AtFlags::empty()).unwrap();
        let other = FileMeta {
            ino: ours.ino + 1,
            ..ours
        };
        let private = place.path().join("private");
        let named = |renamed, target: &Path, meta| {
            let mut walk = roots.walk();
            let (private, target) = (walk.at(&private).unwrap(), walk.at(target).unwrap());
            is_named(renamed, &private, &target, meta)
        };
        assert!(named(Err(Errno::NOENT), &target, &ours));
        std::fs::hard_link(&target, &private).unwrap();
        assert!(named(Err(Errno::EXIST), &target, &ours), "a repeated link");
        assert!(!private.exists() && target.exists(), "one name is left");
        std::fs::write(&private, b"another").unwrap();
        assert!(!named(Err(Errno::EXIST), &target, &other) && private.exists());
        assert!(!named(Err(Errno::NOENT), &target, &other));
        assert!(!named(
            Err(Errno::NOENT),
            &place.path().join("absent"),
            &ours
        ));
        assert!(!named(Err(Errno::ACCESS), &target, &ours));
        assert!(named(Ok(()), &target, &ours));
    }

    #[test]
    fn a_refusing_file_system_is_asked_once() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        std::fs::write(&path, [0; 4096]).unwrap();
        let files = Files::new(true);
        let file = files.open_for_read(&path, false, false).unwrap();
        let dev = to_meta(&rustix::fs::fstat(file.fd()).unwrap()).dev;
        let said = stated_align(file.fd());
        assert_eq!(
            files.usable(dev, || stated_align(file.fd())),
            said != Stated::Not
        );
        let mut refused = files.open_for_read(&path, false, false).unwrap();
        refused.note_refusal();
        files.note(&refused, dev, true);
        assert!(!files.usable(dev, || unreachable!("it refused")));
        assert_eq!(files.fallbacks(), 1);
    }
}
