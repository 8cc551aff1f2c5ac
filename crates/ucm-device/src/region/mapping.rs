//! The memory of a region: a memfd that can neither grow nor shrink nor be written by others,
//! mapped as atomic words.
//!
//! All that is unsafe about shared memory is here. The seal against shrinking rules out faults by a
//! truncated file. Faults by missing memory are possible only with strict overcommit, where every
//! page is allocated at once.
#![allow(
    unsafe_code,
    reason = "maps shared memory and hands it out as atomic words"
)]

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::seqlock::AtomicU64;

use super::shape::WORD;
use crate::fork::Origin;

/// The seals that rule out faults.
const SIZE_IS_FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Shared memory as atomic words. A forked child has none.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<AtomicU64>,
    words: usize,
    origin: Origin,
}

// SAFETY: the words are atomics, and the mapping lives as long as this value.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A new memfd of `len` bytes (a multiple of 4096), zeroed and touched only on use; `Io` if the
    /// system refuses it.
    pub(crate) fn create(name: &str, len: usize) -> Result<(OwnedFd, Self)> {
        let refused = |errno: Errno| {
            Error::from_io(
                errno.into(),
                "the system refuses shared memory; lower cache_size",
            )
            .with("bytes", len)
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // A kernel before 6.3 does not know the flag for a non-executable memfd.
        let fd = memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| memfd_create(name, flags));
        let fd = fd.map_err(refused)?;
        ftruncate(&fd, len as u64).map_err(refused)?;
        fcntl_add_seals(&fd, SIZE_IS_FIXED).map_err(refused)?;
        let mapping = Self::map(&fd, len, true).map_err(refused)?;
        // Our mapping stays writable and no other writable one can be made. A kernel before 5.1
        // cannot enforce that.
        let _ = fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        Ok((fd, mapping))
    }

    /// Maps another process's memfd read-only. `Foreign` unless it is a file of `len` bytes with
    /// our seals.
    pub(crate) fn attach(fd: &OwnedFd, len: usize) -> Result<Self> {
        let other = || {
            Error::new(
                ErrorKind::Foreign,
                "the descriptor is not the region that was announced",
            )
        };
        let sealed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SIZE_IS_FIXED));
        let size = fstat(fd)
            .map_err(|errno| other().caused_by(std::io::Error::from(errno)))?
            .st_size;
        if !sealed || size != len as i64 || len == 0 || !len.is_multiple_of(WORD) {
            return Err(other());
        }
        Self::map(fd, len, false).map_err(|errno| {
            Error::from_io(errno.into(), "a region of another process cannot be mapped")
        })
    }

    fn map(fd: &OwnedFd, len: usize, writable: bool) -> rustix::io::Result<Self> {
        let origin = Origin::this().map_err(|_| Errno::NOMEM)?;
        let write = if writable {
            ProtFlags::WRITE
        } else {
            ProtFlags::empty()
        };
        // SAFETY: a new mapping at an address the kernel chooses touches no memory in use. The file
        // cannot shrink (sealed), so every byte of it stays accessible.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | write,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )
        }?;
        let mapping = Self {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            words: len / WORD,
            origin,
        };
        // Without it a child would keep the memory alive. The caller holds forks up until here.
        mapping.advise(0..mapping.words, Advice::LinuxDontFork)?;
        let _ = mapping.advise(0..mapping.words, Advice::LinuxDontDump);
        Ok(mapping)
    }

    /// Permits the kernel to join these pages to huge ones, if it supports that for shared memory;
    /// a hint.
    pub(crate) fn join_pages(&self, words: Range<usize>) -> bool {
        self.advise(words, Advice::LinuxHugepage).is_ok()
    }

    fn advise(&self, words: Range<usize>, advice: Advice) -> rustix::io::Result<()> {
        if words.start > words.end || words.end > self.words {
            return Err(Errno::INVAL);
        }
        // SAFETY: the range lies in our mapping, and none of the advices used here changes a byte.
        unsafe {
            madvise(
                self.start.as_ptr().add(words.start).cast(),
                words.len() * WORD,
                advice,
            )
        }
    }

    /// The words; none in a forked child.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        if !self.origin.here() {
            return &[];
        }
        // SAFETY: the mapping is page aligned, `words` long, readable, initialised (zeroes at
        // first) and lives as long as `self`. It may be read-only: then only loads of at most 8
        // bytes use it, which `AtomicU64` allows (std::sync::atomic, "Atomic accesses to read-only
        // memory"). Only the type with a writable mapping stores.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }

    /// `Forked` in a child of the process that mapped it.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.origin
            .check("this region belongs to the parent of this process")
    }

    /// True in the process that mapped it.
    pub(crate) fn here(&self) -> bool {
        self.origin.here()
    }

    /// Some words as plain bytes; `None` in a forked child or beyond the end.
    ///
    /// # Safety
    /// While the bytes are borrowed, nothing in this process stores into these words. The
    /// seals and the single writable mapping exclude other processes.
    pub(crate) unsafe fn bytes(&self, words: Range<usize>) -> &[u8] {
        let Some(words) = self.words().get(words) else {
            return &[];
        };
        // SAFETY: initialised memory of that length inside the mapping, borrowed with `self`; the
        // caller promises that nothing writes it.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
    }
}

/// Allocates and zeroes every page of a memfd now; `Io` if the system refuses them.
pub(crate) fn take_pages(fd: impl AsFd, len: usize) -> Result<()> {
    fallocate(fd, FallocateFlags::empty(), 0, len as u64).map_err(|errno| {
        let text =
            "the system commits no more memory than it has, and has not as much as cache_size; \
             lower its size";
        Error::from_io(errno.into(), text).with("bytes", len)
    })
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.origin.here() {
            // SAFETY: the mapping is ours, and its borrows borrow `self`. In a forked child it is
            // not mapped, and another mapping may have the address.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * WORD) };
        }
    }
}
