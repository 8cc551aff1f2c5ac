//! The directory of a run, and operations on its files between turns.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, IFlags, OFlags};
use tempfile::TempDir;

use super::Result;

/// Free bytes to leave on the file system.
const LEFT_FREE: u64 = 1 << 30;

/// A directory that is removed at the end.
pub(super) struct Scratch {
    dir: TempDir,
    file: fs::File,
    direct: bool,
    made: Cell<usize>,
}

impl Scratch {
    /// Makes the directory; an error if `bytes` do not fit the file system.
    pub(super) fn new(dir: &Path, bytes: u64) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let vfs = rustix::fs::statvfs(dir)?;
        let (free, need) = (vfs.f_bavail * vfs.f_frsize, bytes + LEFT_FREE);
        if free < need {
            let text = format!(
                "{} has {} MiB free and {} are needed: choose another --dir or a smaller --mib",
                dir.display(),
                free >> 20,
                need >> 20
            );
            return Err(text.into());
        }
        let dir = tempfile::Builder::new()
            .prefix("ucm-bench-")
            .tempdir_in(dir)?;
        let file = fs::File::open(dir.path())?;
        let mut probe = fs::OpenOptions::new();
        probe
            .write(true)
            .create_new(true)
            .custom_flags(OFlags::DIRECT.bits() as i32);
        let direct = probe.open(dir.path().join("probe")).is_ok();
        // ext4 then places the directories below far apart; other file systems ignore it.
        let flags = rustix::fs::ioctl_getflags(&file).unwrap_or(IFlags::empty());
        let _ = rustix::fs::ioctl_setflags(&file, flags | IFlags::TOPDIR);
        Ok(Self {
            dir,
            file,
            direct,
            made: Cell::new(0),
        })
    }

    /// True if files here can be opened with O_DIRECT.
    pub(super) fn direct(&self) -> bool {
        self.direct
    }

    /// A new directory in it, far from earlier ones: ext4 skips every inode that was freed in the
    /// last minutes, so new files are many times slower where others were just removed.
    pub(super) fn make(&self, name: &str) -> Result<PathBuf> {
        let number = self.made.replace(self.made.get() + 1);
        let dir = self.dir.path().join(format!("{name}-{number}"));
        fs::create_dir(&dir)?;
        Ok(dir)
    }

    /// Writes out every dirty page of this file system.
    pub(super) fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(&self.file)?)
    }

    /// Makes the page cache allocate memory and free it: on a virtual machine the first touch of
    /// memory is many times slower than any later one.
    pub(super) fn warm(&self, bytes: usize) -> Result<()> {
        let path = self.dir.path().join("warm");
        for _ in 0..2 {
            fs::write(&path, vec![1; bytes])?;
            fs::remove_file(&path)?;
        }
        Ok(())
    }
}

/// Makes the kernel drop the clean pages of all files below a directory.
pub(super) fn evict(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let (entry, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
        if kind.is_dir() {
            evict(&entry)?;
        } else if kind.is_file() {
            rustix::fs::fadvise(fs::File::open(entry)?, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}
