//! The directory a run has for itself, and what is done to files between turns.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, IFlags, OFlags};
use tempfile::TempDir;

use super::{Options, Result};

/// Free bytes left to others on the file system.
const LEFT_FREE: u64 = 1 << 30;

/// A directory that is removed at the end.
pub(super) struct Place {
    dir: TempDir,
    file: fs::File,
    direct: bool,
    made: Cell<usize>,
}

impl Place {
    /// Makes the directory; an error if the file system has too little room.
    pub(super) fn new(options: &Options) -> Result<Self> {
        Self::for_bytes(&options.dir, options.disk_bytes())
    }

    /// The same where so many bytes will lie at once.
    pub(super) fn for_bytes(dir: &Path, bytes: u64) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let vfs = rustix::fs::statvfs(dir)?;
        let (free, need) = (vfs.f_bavail * vfs.f_frsize, bytes + LEFT_FREE);
        if free < need {
            let (free, need) = (free >> 20, need >> 20);
            let at = dir.display();
            return Err(format!(
                "{at} has {free} MiB free and {need} are needed: choose another --dir or a smaller \
                 --mib"
            )
            .into());
        }
        let dir = tempfile::Builder::new()
            .prefix("ucm-bench-")
            .tempdir_in(dir)?;
        let file = fs::File::open(dir.path())?;
        let probe = dir.path().join("probe");
        let flags = OFlags::DIRECT.bits() as i32;
        let direct = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(flags)
            .open(&probe)
            .is_ok();
        // ext4 then puts what is made below far apart; other file systems know no such thing.
        let flags = rustix::fs::ioctl_getflags(&file).unwrap_or(IFlags::empty());
        let _ = rustix::fs::ioctl_setflags(&file, flags | IFlags::TOPDIR);
        let made = Cell::new(0);
        Ok(Self {
            dir,
            file,
            direct,
            made,
        })
    }

    /// The directory.
    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Whether files here can be opened with O_DIRECT.
    pub(super) fn direct(&self) -> bool {
        self.direct
    }

    /// A new directory in it, away from those before: ext4 passes over every inode that was freed
    /// in the last minutes, so that new files cost many times as much where others were removed
    /// just before.
    pub(super) fn make(&self, name: &str) -> Result<PathBuf> {
        let number = self.made.replace(self.made.get() + 1);
        let dir = self.dir().join(format!("{name}-{number}"));
        fs::create_dir(&dir)?;
        Ok(dir)
    }

    /// Writes out every dirty page of this file system.
    pub(super) fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(&self.file)?)
    }

    /// Makes the page cache take so much memory and give it back: on a virtual machine the first
    /// touch of memory is many times slower than any later one.
    pub(super) fn warm(&self, bytes: usize) -> Result<()> {
        let (path, piece) = (self.dir().join("warm"), vec![1; 1 << 20]);
        for _ in 0..2 {
            let mut file = fs::File::create(&path)?;
            for _ in 0..bytes.div_ceil(piece.len()) {
                std::io::Write::write_all(&mut file, &piece)?;
            }
            drop(file);
            fs::remove_file(&path)?;
        }
        Ok(())
    }
}

/// Makes a file with room for so many bytes, as a segment is made: allocated, and never written.
pub(super) fn preallocate(path: &Path, bytes: u64) -> Result<()> {
    let file = fs::File::create(path)?;
    Ok(rustix::fs::fallocate(
        &file,
        FallocateFlags::empty(),
        0,
        bytes,
    )?)
}

/// Gives back the blocks of files and the memory they take in the page cache, but not their inodes:
/// see [`Place::make`].
pub(super) fn hollow(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        fs::OpenOptions::new().write(true).open(path)?.set_len(0)?;
    }
    Ok(())
}

/// Asks the kernel to forget the clean pages of files. Whether the device behind it remembers is
/// not known.
pub(super) fn evict(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        rustix::fs::fadvise(fs::File::open(path)?, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}
