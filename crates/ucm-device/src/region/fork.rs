//! What a fork does to regions: the child has none.
//!
//! A child would inherit the descriptor that holds the lock of a registry file, and keep the lock after its parent was
//! killed. So a fork handler closes, in the child, the descriptors registered here, and raises a number by which every
//! region sees that it belongs to another process (its memory is not even mapped there).
#![allow(
    unsafe_code,
    reason = "a fork handler, which may only call what is safe after a fork"
)]

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use ucm_core::{Error, ErrorKind, Result};

/// Most descriptors of regions in one process.
const MOST: usize = 256;
const FREE: i32 = -1;

/// Descriptors that a child must not keep.
static CLOSED_IN_CHILDREN: [AtomicI32; MOST] = [const { AtomicI32::new(FREE) }; MOST];
/// How many forks lie between this process and the first that used regions.
static FORKS: AtomicU64 = AtomicU64::new(0);
/// Whether the handler is installed, or the error number that says why not.
static HANDLER: OnceLock<i32> = OnceLock::new();

/// Runs in the child between fork and its return: atomics and close(2) only.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for entry in &CLOSED_IN_CHILDREN {
        let fd = entry.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: the descriptor was open in the parent (it is taken off this list before it is closed there), so
            // it is open in the child, where nothing else uses it: its owner asks `Origin::here` first.
            unsafe { libc::close(fd) };
        }
    }
}

/// The process something was made in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin(u64);

impl Origin {
    /// This process. Installs the fork handler. `Io` when the system refuses it.
    pub(crate) fn this() -> Result<Self> {
        let install = || {
            // SAFETY: the handler only touches atomics and closes descriptors, and is never unloaded: this code is
            // part of the program or of an extension module, which Python does not unload.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
        };
        match *HANDLER.get_or_init(install) {
            0 => Ok(Self(FORKS.load(Ordering::Relaxed))),
            code => Err(Error::from_io(
                std::io::Error::from_raw_os_error(code),
                "the system refuses a fork handler, without which memory cannot be shared",
            )),
        }
    }

    /// Whether this is still the process it was made in.
    pub(crate) fn here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}

/// A descriptor that children do not have.
#[derive(Debug)]
pub(crate) struct OwnFd {
    fd: ManuallyDrop<OwnedFd>,
    /// Its place on the list.
    at: usize,
    origin: Origin,
}

impl OwnFd {
    /// Puts an open descriptor on the list. `Busy` when the process has too many regions.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self> {
        let origin = Origin::this()?;
        let free = |entry: &AtomicI32| {
            let (now, raw) = (Ordering::Relaxed, fd.as_raw_fd());
            entry.compare_exchange(FREE, raw, now, now).is_ok()
        };
        let at = CLOSED_IN_CHILDREN.iter().position(free).ok_or_else(|| {
            Error::new(ErrorKind::Busy, "too many memory regions in one process").with("most", MOST / 2)
        })?;
        Ok(Self {
            fd: ManuallyDrop::new(fd),
            at,
            origin,
        })
    }
}

impl AsFd for OwnFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for OwnFd {
    fn drop(&mut self) {
        // In a child it was closed and taken off, and number and place may be another's.
        if self.origin.here() {
            CLOSED_IN_CHILDREN[self.at].store(FREE, Ordering::Relaxed);
            // SAFETY: dropped here, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}
