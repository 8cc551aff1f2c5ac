//! Effects of a fork: the child has no region, arena or device of its parent.
//!
//! In a child, their memory is not mapped and other memory may have its addresses; one of their
//! locks may be held by a thread that the child does not have; and a vendor's library does not
//! work. So a fork handler increments a number by which the owner of an [`Origin`] detects that it
//! belongs to another process.
//!
//! A child would also inherit the descriptor with the lock of a registry file, and keep the lock
//! after its parent was killed. So the handler closes the descriptors registered here. Kept open
//! files are closed in the same way: a child would hold their space after they are removed.
//!
//! A fork must not happen between the creation of a descriptor or mapping and its registration with
//! the handler or the kernel. So forks of this process wait while one is created or closed
//! ([`hold_forks`]). If that needs file-system calls, which may hang, the number of forks
//! ([`forks`]) is compared afterwards instead, and after a fork the creation is repeated. Kept open
//! files do not delay forks: their close may hang, and a missed one costs the child one descriptor.
#![allow(
    unsafe_code,
    reason = "a fork handler, which may only call functions that are safe after a fork"
)]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use ucm_core::{Error, ErrorKind, Result};

/// Most such descriptors in one process: 256 for regions, the rest for kept open files.
const MOST: usize = 1024;
const FREE: i32 = -1;

/// Descriptors that the handler closes in a child.
static CLOSED_IN_CHILDREN: [AtomicI32; MOST] = [const { AtomicI32::new(FREE) }; MOST];
/// Number of forks between this process and the first one that made an [`Origin`].
static FORKS: AtomicU64 = AtomicU64::new(0);
/// Whether the handlers are installed, or the error number of the failure.
static HANDLER: OnceLock<i32> = OnceLock::new();
/// True while a fork is under way or held up.
static GATE: AtomicBool = AtomicBool::new(false);
/// Number of forks of this process.
static BEGUN: AtomicU64 = AtomicU64::new(0);
/// Polls of the gate, and their interval: a second in total, after which a rare leak is preferred
/// to a wait.
const LOOKS: u32 = 10_000;
const BETWEEN: libc::timespec = libc::timespec {
    tv_sec: 0,
    tv_nsec: 100_000,
};

thread_local! {
    /// True if the current fork of this thread closed the gate.
    static HAS_GATE: Cell<bool> = const { Cell::new(false) };
}

/// Closes the gate; false if another thread kept it closed for too long. Safe in a fork handler.
fn close_gate() -> bool {
    for _ in 0..LOOKS {
        if !GATE.swap(true, Ordering::Acquire) {
            return true;
        }
        // SAFETY: reads a constant; the remaining time is not requested.
        unsafe { libc::nanosleep(&BETWEEN, std::ptr::null_mut()) };
    }
    false
}

/// Forks of this process wait until this is dropped.
pub(crate) struct NoForks(bool);

/// Delays forks, for a few short system calls on memory. Never use it around file-system calls or
/// twice on one thread. Gives up after a second: then a fork may happen in between.
pub(crate) fn hold_forks() -> Result<NoForks> {
    Origin::this()?;
    Ok(NoForks(close_gate()))
}

impl Drop for NoForks {
    fn drop(&mut self) {
        if self.0 {
            GATE.store(false, Ordering::Release);
        }
    }
}

/// Number of forks of this process while none is under way. Two equal results mean that no fork
/// happened in between.
pub(crate) fn forks() -> Result<u64> {
    let _still = hold_forks()?;
    Ok(BEGUN.load(Ordering::Relaxed))
}

/// Runs before a fork, in the thread that makes it.
extern "C" fn before() {
    let has = close_gate();
    HAS_GATE.with(|gate| gate.set(has));
    BEGUN.fetch_add(1, Ordering::Relaxed);
}

/// Runs in the parent after a fork.
extern "C" fn in_parent() {
    if HAS_GATE.with(|gate| gate.replace(false)) {
        GATE.store(false, Ordering::Release);
    }
}

/// Runs in the child between fork and its return: atomics and close(2) only.
extern "C" fn in_child() {
    HAS_GATE.with(|gate| gate.set(false));
    GATE.store(false, Ordering::Release); // the thread that had it does not exist here
    FORKS.fetch_add(1, Ordering::Relaxed);
    for entry in &CLOSED_IN_CHILDREN {
        let fd = entry.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: the descriptor was open in the parent (it is removed from this list before it
            // is closed there), so it is open in the child, where nothing else uses it: its owner
            // checks `Origin::here` first.
            unsafe { libc::close(fd) };
        }
    }
}

/// The process in which a value was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin(u64);

impl Origin {
    /// This process. Installs the fork handlers. `Io` if the system refuses them.
    pub(crate) fn this() -> Result<Self> {
        let install = || {
            // SAFETY: the handlers only touch atomics and a thread-local byte, sleep, and close
            // descriptors; and they are never unloaded: this code is part of the program or of an
            // extension module, which Python does not unload.
            unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) }
        };
        match *HANDLER.get_or_init(install) {
            0 => Ok(Self(FORKS.load(Ordering::Relaxed))),
            code => Err(Error::from_io(
                std::io::Error::from_raw_os_error(code),
                "the system refuses a fork handler, without which a child could harm its parent's \
                 memory",
            )),
        }
    }

    /// True in the process in which it was made.
    pub(crate) fn here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }

    /// `Forked` with this message in another process.
    pub(crate) fn check(self, text: &'static str) -> Result<()> {
        if self.here() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, text))
    }
}

/// A descriptor that is closed in children of this process.
#[derive(Debug)]
pub struct OwnFd {
    fd: ManuallyDrop<OwnedFd>,
    /// Its index in the list.
    at: usize,
    origin: Origin,
    /// True if forks wait while it is closed.
    gated: bool,
}

impl OwnFd {
    /// Adds the descriptor of a kept open file to the list. `Busy` if the list is full, `Io` if the
    /// system refuses the handlers; it is closed then.
    pub fn of_file(fd: OwnedFd) -> Result<Self> {
        Self::listed(fd, false)
    }

    /// Adds an open descriptor to the list; the caller has held up forks since it was opened.
    /// Errors as of [`OwnFd::of_file`].
    pub(crate) fn new(fd: OwnedFd) -> Result<Self> {
        Self::listed(fd, true)
    }

    fn listed(fd: OwnedFd, gated: bool) -> Result<Self> {
        let origin = Origin::this()?;
        let free = |entry: &AtomicI32| {
            let (now, raw) = (Ordering::Relaxed, fd.as_raw_fd());
            entry.compare_exchange(FREE, raw, now, now).is_ok()
        };
        let at = CLOSED_IN_CHILDREN.iter().position(free).ok_or_else(|| {
            Error::new(
                ErrorKind::Busy,
                "too many memory regions and kept files in one process",
            )
            .with("most", MOST)
        })?;
        Ok(Self {
            fd: ManuallyDrop::new(fd),
            at,
            origin,
            gated,
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
        // In a child it was closed and removed, and its number and index may be in use again.
        if self.origin.here() {
            let _together = self.gated.then(|| NoForks(close_gate()));
            CLOSED_IN_CHILDREN[self.at].store(FREE, Ordering::Relaxed);
            // SAFETY: dropped here, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Runs this in a forked child. Returns 0 if it returned true, otherwise the status of
    /// waitpid(2). It may use memory but no thread.
    pub(crate) fn in_child(test: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child runs the test and ends without exit handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; a test that hangs ends by the alarm.
            unsafe {
                libc::alarm(60);
                libc::_exit(i32::from(!test()));
            }
        }
        let mut status = -1;
        // SAFETY: the child is ours; writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status
    }

    #[test]
    fn a_child_is_another_process_and_its_own() {
        let here = Origin::this().unwrap();
        assert!(here.here() && here.check("of another process").is_ok());
        let in_child = in_child(|| {
            let text = "of another process";
            let told = here
                .check(text)
                .is_err_and(|error| error.kind() == ErrorKind::Forked);
            told && !here.here() && Origin::this().is_ok_and(Origin::here)
        });
        assert_eq!(in_child, 0);
        assert!(here.here());
    }
}
