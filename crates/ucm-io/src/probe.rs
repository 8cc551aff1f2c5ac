//! Properties of a file system, probed once per root: its type, whether files can be read and
//! written past the page cache, and with which alignment.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use ucm_core::{PAGE, Result};

use crate::below::Roots;
use crate::bounce_buffer::page_slots;
use crate::meta::failed;
use crate::op::to_meta;
use crate::sys::{File, SECTOR, read_full, retry, write_full};
use crate::usrbio::Rings;

/// Type of a file system, from the number that statfs returns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FsType(pub u64);

/// Numbers from linux/magic.h and the file systems' own headers, with their usual names.
const KNOWN: &[(u64, &str, bool)] = &[
    (0xEF53, "ext4", false),
    (0x5846_5342, "xfs", false),
    (0x9123_683E, "btrfs", false),
    (0x2FC1_2FC1, "zfs", false),
    (0xF2F5_2010, "f2fs", false),
    (0x0102_1994, "tmpfs", false),
    (0x8584_58F6, "ramfs", false),
    (0x794C_7630, "overlayfs", false),
    (0x6969, "nfs", true),
    (0xFF53_4D42, "cifs", true),
    (0xFE53_4D42, "smb2", true),
    (0x6573_5546, "fuse", true),
    (0x0BD0_0BD0, "lustre", true),
    (0x00C3_6400, "ceph", true),
    (0x4750_4653, "gpfs", true),
    (0x1983_0326, "beegfs", true),
    (0x0102_1997, "9p", true),
];

impl FsType {
    /// Its name, or "unknown".
    pub fn name(self) -> &'static str {
        self.known().map_or("unknown", |(_, name, _)| name)
    }

    /// True if other hosts may see the same files. Unknown types count as shared, which is the safe
    /// assumption.
    pub fn maybe_shared(self) -> bool {
        self.known().is_none_or(|&(_, _, shared)| shared)
    }

    fn known(self) -> Option<&'static (u64, &'static str, bool)> {
        KNOWN.iter().find(|(magic, ..)| *magic == self.0)
    }
}

/// Alignment of buffers and offsets for direct I/O, in bytes (powers of two).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectAlign {
    /// Of the buffer's address.
    pub memory: u32,
    /// Of the offset in the file and the length.
    pub offset: u32,
}

impl DirectAlign {
    /// An alignment that nearly every file system accepts; slots have it.
    pub const PAGE: Self = Self {
        memory: PAGE as u32,
        offset: PAGE as u32,
    };

    /// True if buffers aligned to 4096 are enough.
    pub(crate) fn suits_slots(self) -> bool {
        self.memory <= PAGE as u32 && self.offset <= PAGE as u32
    }
}

/// The findings of a probe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Probe {
    /// Type of the file system.
    pub fs: FsType,
    /// Device number.
    pub dev: u64,
    /// Alignment of direct I/O; `None` where it does not work.
    pub direct: Option<DirectAlign>,
    /// For slots through the rings of 3FS, if configured: the most memory of the rings (bytes), or
    /// the reason why they are not used.
    pub rings: Option<Result<usize, String>>,
}

/// The kernel's statement about direct I/O on an open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stated {
    /// It works with this alignment.
    Works(DirectAlign),
    /// It does not work on this file.
    Not,
    /// This kernel or file system makes no statement.
    Unsaid,
}

/// Queries the kernel (6.1 and newer) about direct I/O on an open file.
pub(crate) fn stated_align(fd: &OwnedFd) -> Stated {
    match retry(|| rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)) {
        Ok(said) => stated(&said),
        Err(_) => Stated::Unsaid,
    }
}

/// The statement about direct I/O in a result of statx.
pub(crate) fn stated(x: &Statx) -> Stated {
    if x.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Stated::Unsaid;
    }
    match (x.stx_dio_mem_align, x.stx_dio_offset_align) {
        (0, _) | (_, 0) => Stated::Not,
        (memory, offset) => Stated::Works(DirectAlign { memory, offset }),
    }
}

/// Probes the file system of `dir`: writes one page to a private file there, past the page cache if
/// possible, reads it back and removes it. Fails if the directory cannot be written.
pub(crate) fn probe(roots: &Roots, dir: &Path, rings: Option<&Arc<Rings>>) -> Result<Probe> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!(
        ".ucm-probe-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let path = dir.join(name);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let no_file = |e| failed(e, "cannot create a file in the directory", dir);
    let at = roots.walk().at(&path).map_err(no_file)?;
    let fd = retry(|| rustix::fs::openat(at.dir(), at.name(), flags, Mode::RUSR | Mode::WUSR))
        .map_err(no_file)?;
    // Nameless from here on: a crash leaves nothing behind.
    at.unlink()
        .map_err(|e| failed(e, "cannot remove the probe's file", &path))?;
    let fail = |e| failed(e, "the directory's file system cannot be used", dir);
    let fs = retry(|| rustix::fs::fstatfs(&fd)).map_err(fail)?;
    let stat = retry(|| rustix::fs::fstat(&fd)).map_err(fail)?;
    let mut file = File::new(fd, false);
    let direct = trial(&mut file)?.map_err(fail)?;
    let mut rings_work = None;
    if let Some(rings) = rings {
        let (found, tried) = try_rings(rings, dir, file);
        (rings_work, file) = (Some(found), tried);
    }
    // Network file systems report a failed write only here.
    file.close().map_err(fail)?;
    Ok(Probe {
        // The sign and width of the field differ between architectures; the number has 32 bits.
        fs: FsType(fs.f_type as u64 & 0xFFFF_FFFF),
        dev: to_meta(&stat).dev,
        direct,
        rings: rings_work,
    })
}

/// Whether rings can be used on the file system of an open file of this directory: a page must be
/// read back as it was written.
fn try_rings(rings: &Arc<Rings>, dir: &Path, file: File) -> (Result<usize, String>, File) {
    let (_, fd) = file.into_parts();
    let memory = match rings.look(dir, &fd) {
        Ok(memory) => memory,
        Err(why) => return (Err(why), File::new(fd, false)),
    };
    let Some(ring) = rings.register(&fd) else {
        rings.give_up();
        let why = "3FS's library does not accept a file of it";
        return (Err(why.to_owned()), File::new(fd, false));
    };
    let (written, mut back) = ([0x5A; SECTOR], [0; SECTOR]);
    let tried = match ring.write(&written, 0) {
        Some(Ok(_)) => ring.read(&mut [IoSliceMut::new(&mut back)], 0),
        other => other,
    };
    let works = match tried {
        Some(Ok(_)) if back == written => Ok(memory),
        Some(Err(errno)) => Err(format!(
            "a page could not be written and read by a ring: {errno}"
        )),
        Some(Ok(_)) | None => Err("a page written by a ring was read back differently".to_owned()),
    };
    if works.is_err() {
        rings.give_up();
    }
    (works, File::new(fd, false).through(Some(ring)))
}

/// Writes and reads one page, direct if the file system supports it. The outer error is ours
/// (memory), the inner one the file system's.
fn trial(file: &mut File) -> Result<rustix::io::Result<Option<DirectAlign>>> {
    let [mut page, mut back] = page_slots(SECTOR)?;
    page.as_mut_slice().fill(0xA5);
    let stated = stated_align(file.fd());
    if stated != Stated::Not {
        file.set_direct(true);
    }
    let io = write_full(file, page.as_slice(), 0)
        .and_then(|()| read_full(file, back.as_mut_slice(), 0, SECTOR));
    Ok(io.and_then(|_| {
        if back.as_slice() != page.as_slice() {
            return Err(Errno::IO);
        }
        Ok(file.is_direct().then_some(match stated {
            Stated::Works(align) => align,
            _ => DirectAlign::PAGE,
        }))
    }))
}
