//! Pages and reservations of address space.
#![allow(unsafe_code, reason = "maps and unmaps memory of its own")]

use std::ptr::{null_mut, with_exposed_provenance_mut};

use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MS_ASYNC, PROT_NONE,
    PROT_READ, PROT_WRITE, c_int,
};

/// Size of a page.
pub(crate) const PAGE: usize = 4096;

/// Address space in which every access faults.
pub(crate) fn reserve(len: usize) -> Option<usize> {
    map(null_mut(), len, PROT_NONE, 0)
}

/// Pages of zeros.
pub(crate) fn pages(len: usize) -> Option<usize> {
    map(null_mut(), len, PROT_READ | PROT_WRITE, 0)
}

/// Frees the pages and keeps their addresses, so that a late access faults and never reaches other
/// memory.
///
/// # Safety
/// The range came from [`pages`] and is not used any more.
pub(crate) unsafe fn retire(at: usize, len: usize) {
    // If this fails the pages stay.
    let _ = map(with_exposed_provenance_mut(at), len, PROT_NONE, MAP_FIXED);
}

/// Gives pages and addresses back.
///
/// # Safety
/// As for [`retire`].
pub(crate) unsafe fn release(at: usize, len: usize) {
    // SAFETY: the caller guarantees that the mapping is whole and unused.
    let _ = unsafe { libc::munmap(with_exposed_provenance_mut(at), len) };
}

/// Whether every page of a range is mapped.
pub(crate) fn is_mapped(at: usize, len: usize) -> bool {
    let begin = at & !(PAGE - 1);
    // SAFETY: an asynchronous msync only checks the mappings; it fails if there is none.
    unsafe {
        libc::msync(
            with_exposed_provenance_mut(begin),
            at - begin + len,
            MS_ASYNC,
        ) == 0
    }
}

fn map(at: *mut libc::c_void, len: usize, protection: c_int, flags: c_int) -> Option<usize> {
    let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags;
    // SAFETY: a mapping of its own; `MAP_FIXED` comes from `retire` only, whose caller owns the
    // range.
    let mapped = unsafe { libc::mmap(at, len, protection, flags, -1, 0) };
    (mapped != MAP_FAILED).then(|| mapped.expose_provenance())
}
