//! Lets processes of one host and user find each other's regions: one small file for each, in a
//! directory of ours.
//!
//! A file `<nonce>.region` names process, start time, descriptor, namespace and sizes. Its writer
//! holds its `flock` from before the rename to that name until the process ends in any way. So if a
//! reader gets the lock, the writer is dead, and the file is removed. Files are written under a
//! private name and renamed, so readers see complete files.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, flock, fstat, open, openat, renameat, unlinkat,
};
use rustix::io::Errno;
use ucm_core::{Error, ErrorKind, Result};

use super::notice::{Notice, started};
use super::shape::Shape;
use super::view::RegionView;
use crate::fork::{Origin, OwnFd, forks};

/// Most bytes read of a registry file.
const LONGEST: usize = 1024;
/// Most names of the directory read in one scan.
const MOST_NAMES: usize = 4096;
/// Most regions of others mapped at once.
const MOST_VIEWS: usize = 64;
/// Attempts to create a file. One fails if, before the lock, another process took it for that of a
/// dead writer or this process forked.
const ATTEMPTS: usize = 8;
const ENDING: &str = ".region";
const PRIVATE: &str = ".new";

/// A directory of registry files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registry {
    dir: PathBuf,
}

/// Result of a scan of the registry.
#[derive(Debug, Default)]
pub struct Scan {
    /// The matching regions of live writers, including those known before.
    pub views: Vec<Arc<RegionView>>,
    /// Number of removed files of dead writers.
    pub swept: usize,
    /// Why a matching region cannot be used: no permission, another container.
    pub refused: Option<Error>,
}

/// The regions that a reader wants.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Digest of the identity.
    pub namespace: [u8; 32],
    /// Fewest and most bytes of its longest records.
    pub record_len: (usize, usize),
    /// The reader's own region, if it has one.
    pub own: Option<u64>,
}

impl Registry {
    /// The directory of this user: below `/run/user/<uid>` if that exists, else `/tmp/ucm-<uid>`.
    pub fn default_dir() -> PathBuf {
        let uid = rustix::process::geteuid().as_raw();
        let run = PathBuf::from(format!("/run/user/{uid}"));
        if run.is_dir() {
            run.join("ucm")
        } else {
            PathBuf::from(format!("/tmp/ucm-{uid}"))
        }
    }

    /// A registry in `dir`; nothing is touched yet.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Opens the directory and creates it if needed; an error unless it is ours and only we can
    /// change it.
    fn open(&self) -> Result<OwnedFd> {
        use std::os::unix::fs::DirBuilderExt as _;
        let refused = |error: std::io::Error| {
            Error::from_io(
                error,
                "the directory in which memory regions are announced cannot be used",
            )
            .with("dir", self.dir.display())
        };
        match std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&self.dir)
        {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(refused(error));
            }
            _ => {}
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = open(&self.dir, flags, Mode::empty()).map_err(|errno| refused(errno.into()))?;
        let meta = fstat(&dir).map_err(|errno| refused(errno.into()))?;
        if meta.st_uid != rustix::process::geteuid().as_raw() || meta.st_mode & 0o022 != 0 {
            let text = "the directory in which memory regions are announced belongs to another \
                        user, or others can write to it; remove it or configure another one";
            return Err(Error::new(ErrorKind::Foreign, text).with("dir", self.dir.display()));
        }
        Ok(dir)
    }

    /// Creates the file of a region; dropping the result removes it.
    pub(crate) fn announce(&self, shape: &Shape, fd: i32) -> Result<Announcement> {
        let dir = self.open()?;
        let (pid, name) = (std::process::id(), format!("{:016x}{ENDING}", shape.nonce));
        let notice = Notice {
            pid,
            started: started(pid),
            fd,
            nonce: shape.nonce,
            namespace: shape.namespace,
            record_len: shape.record_len,
            bytes: shape.len(),
        };
        let mut refused = Errno::AGAIN;
        for _ in 0..ATTEMPTS {
            match make(&dir, &name, &notice)? {
                Ok(file) => {
                    return Ok(Announcement {
                        registry: self.clone(),
                        dir,
                        name,
                        file,
                        origin: Origin::this()?,
                    });
                }
                Err(errno) => refused = errno,
            }
        }
        Err(
            Error::from_io(refused.into(), "a memory region cannot be announced")
                .with("dir", self.dir.display()),
        )
    }

    /// Scans once for regions that match `wanted`; those in `known` stay mapped. Removes files of
    /// dead writers. Uses the file system; `Io` if the directory cannot be read.
    pub fn scan(&self, wanted: &Wanted, known: &[Arc<RegionView>]) -> Result<Scan> {
        let dir = self.open()?;
        let unreadable = |errno: Errno| {
            Error::from_io(
                errno.into(),
                "the registry of memory regions cannot be read",
            )
            .with("dir", self.dir.display())
        };
        let mut scan = Scan::default();
        for entry in rustix::fs::Dir::read_from(&dir)
            .map_err(unreadable)?
            .take(MOST_NAMES)
        {
            let entry = entry.map_err(unreadable)?;
            let Some(nonce) = entry.file_name().to_str().ok().and_then(nonce_of) else {
                continue;
            };
            let Ok(file) = open_file(&dir, entry.file_name()) else {
                continue; // just removed, or none of ours
            };
            if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
                // Names are random and never reused, so this removes the file that was read.
                scan.swept +=
                    usize::from(unlinkat(&dir, entry.file_name(), AtFlags::empty()).is_ok());
                continue;
            }
            if wanted.own == Some(nonce) || scan.views.len() >= MOST_VIEWS {
                continue;
            }
            if let Some(view) = known.iter().find(|view| view.nonce() == nonce) {
                scan.views.push(Arc::clone(view));
                continue;
            }
            let Some(notice) = read(&file).filter(|notice| {
                notice.nonce == nonce
                    && notice.namespace == wanted.namespace
                    && (wanted.record_len.0..=wanted.record_len.1).contains(&notice.record_len)
            }) else {
                continue;
            };
            match notice
                .is_of_its_process()
                .and_then(|()| RegionView::attach(&notice))
            {
                Ok(view) => scan.views.push(Arc::new(view)),
                Err(error) => scan.refused = Some(error),
            }
        }
        Ok(scan)
    }
}

/// The registry file of a region, removed on drop.
#[derive(Debug)]
pub(crate) struct Announcement {
    registry: Registry,
    dir: OwnedFd,
    name: String,
    file: OwnFd,
    origin: Origin,
}

impl Announcement {
    /// True if it is in this registry and its file still exists (a cleaner of temporary files may
    /// have removed it).
    pub(crate) fn is_in(&self, registry: &Registry) -> bool {
        self.registry == *registry && fstat(&self.file).is_ok_and(|meta| meta.st_nlink > 0)
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if self.origin.here() {
            let _ = unlinkat(&self.dir, self.name.as_str(), AtFlags::empty());
        }
    }
}

/// Creates a file under a private name, locks it and renames it. The inner error: another process
/// removed it.
fn make(dir: &OwnedFd, name: &str, notice: &Notice) -> Result<Result<OwnFd, Errno>> {
    let private = format!("{:016x}{PRIVATE}", ucm_infra::random_u64());
    let before = forks()?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(dir, private.as_str(), flags, Mode::RUSR | Mode::WUSR);
    let file =
        made.map_err(|errno| Error::from_io(errno.into(), "a memory region cannot be announced"))?;
    // First registered for closing in children, then locked: no child ever has the lock.
    let file = OwnFd::new(file)?;
    if forks()? != before {
        let _ = unlinkat(dir, private.as_str(), AtFlags::empty());
        return Ok(Err(Errno::AGAIN)); // a child may have inherited it before it was on the list
    }
    let text = notice.to_string();
    let done = flock(&file, FlockOperation::NonBlockingLockExclusive)
        .and_then(|()| match rustix::io::write(&file, text.as_bytes())? {
            written if written == text.len() => Ok(()),
            _ => Err(Errno::NOSPC),
        })
        .and_then(|()| renameat(dir, private.as_str(), dir, name));
    if let Err(errno) = done {
        let _ = unlinkat(dir, private.as_str(), AtFlags::empty());
        return Ok(Err(errno));
    }
    Ok(Ok(file))
}

fn open_file(dir: &OwnedFd, name: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(dir, name, flags, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(Errno::INVAL),
    }
}

fn read(file: &OwnedFd) -> Option<Notice> {
    let mut text = [0; LONGEST];
    let len = rustix::io::pread(file, &mut text, 0).ok()?;
    Notice::parse(std::str::from_utf8(text.get(..len)?).ok()?)
}

/// The number in the name of a registry file, final or private; `None` for foreign names.
fn nonce_of(name: &str) -> Option<u64> {
    let digits = name
        .strip_suffix(ENDING)
        .or_else(|| name.strip_suffix(PRIVATE))?;
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (digits.len() == 16 && digits.bytes().all(hex))
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten()
}
