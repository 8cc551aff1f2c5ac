//! What a fork does: the child has no region, no arena and no device of its parent's.
//!
//! Their memory is not mapped in a child, where something else may lie at its addresses, a lock of
//! theirs may be held by a thread that the child does not have, and a vendor's library does not
//! work there. So a fork handler raises a number by which whatever keeps an [`Origin`] sees that it
//! belongs to another process.
//!
//! A child would also inherit the descriptor that holds the lock of a registry file, and keep the
//! lock after its parent was killed. So the handler closes the descriptors registered here. Files
//! that are kept open are closed in the same way: a child that lives on would hold their space when
//! they are removed.
//!
//! Between the making of a descriptor or a mapping and the moment at which the handler knows of it,
//! or the kernel that no child is to have it, a fork would slip through. So forks of this process
//! wait while something is made or closed ([`hold_forks`]); where that takes calls on a file
//! system, which may hang, it is asked afterwards whether there was a fork ([`forks`]), and made
//! anew. Files that are kept open hold up no fork: their closing may hang, and what slips through
//! costs a child one descriptor.
#![allow(
    unsafe_code,
    reason = "a fork handler, which may only call what is safe after a fork"
)]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use ucm_core::{Error, ErrorKind, Result};

/// Most such descriptors in one process: 256 for regions, the rest for files kept open.
const MOST: usize = 1024;
const FREE: i32 = -1;

/// Descriptors that a child must not keep.
static CLOSED_IN_CHILDREN: [AtomicI32; MOST] = [const { AtomicI32::new(FREE) }; MOST];
/// How many forks lie between this process and the first that asked for an [`Origin`].
static FORKS: AtomicU64 = AtomicU64::new(0);
/// Whether the handlers are installed, or the error number that says why not.
static HANDLER: OnceLock<i32> = OnceLock::new();
/// A fork is under way, or somebody holds them up.
static GATE: AtomicBool = AtomicBool::new(false);
/// Forks that this process began.
static BEGUN: AtomicU64 = AtomicU64::new(0);
/// Looks at the gate, and the time between two of them: a second in all, after which the rare leak
/// is preferred.
const LOOKS: u32 = 10_000;
const BETWEEN: libc::timespec = libc::timespec {
    tv_sec: 0,
    tv_nsec: 100_000,
};

thread_local! {
    /// Whether the fork that this thread makes has the gate.
    static HAS_GATE: Cell<bool> = const { Cell::new(false) };
}

/// Closes the gate; false when it stayed closed by another for too long. Safe in a fork handler.
fn close_gate() -> bool {
    for _ in 0..LOOKS {
        if !GATE.swap(true, Ordering::Acquire) {
            return true;
        }
        // SAFETY: reads a constant; the time that was left is not asked for.
        unsafe { libc::nanosleep(&BETWEEN, std::ptr::null_mut()) };
    }
    false
}

/// Forks of this process wait until it is dropped.
pub(crate) struct NoForks(bool);

/// Holds forks up: for a few short system calls on memory, never on a file system, and never twice
/// on one thread. Gives up after a second: then a fork may come in between.
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

/// How many forks this process began, none of them being under way. Two equal answers: none came in
/// between.
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
    GATE.store(false, Ordering::Release); // another thread that had it is not here
    FORKS.fetch_add(1, Ordering::Relaxed);
    for entry in &CLOSED_IN_CHILDREN {
        let fd = entry.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: the descriptor was open in the parent (it is taken off this list before it is
            // closed there), so it is open in the child, where nothing else uses it: its owner asks
            // `Origin::here` first.
            unsafe { libc::close(fd) };
        }
    }
}

/// The process something was made in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin(u64);

impl Origin {
    /// This process. Installs the fork handlers. `Io` when the system refuses them.
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

    /// Whether this is still the process it was made in.
    pub(crate) fn here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }

    /// `Forked`, with this sentence, where it is not.
    pub(crate) fn check(self, text: &'static str) -> Result<()> {
        if self.here() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, text))
    }
}

/// A descriptor that children of this process do not have.
#[derive(Debug)]
pub struct OwnFd {
    fd: ManuallyDrop<OwnedFd>,
    /// Its place on the list.
    at: usize,
    origin: Origin,
    /// Whether forks wait while it is closed.
    gated: bool,
}

impl OwnFd {
    /// Puts the descriptor of a file that is kept open on the list. `Busy` when the process has too
    /// many on it, `Io` when the system refuses the handlers; it is closed then.
    pub fn of_file(fd: OwnedFd) -> Result<Self> {
        Self::listed(fd, false)
    }

    /// Puts an open descriptor on the list; forks are to be held up since it was opened. Errors as
    /// of [`OwnFd::of_file`].
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
        // In a child it was closed and taken off, and number and place may be another's.
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

    /// Runs this in a forked child; 0 where it was true, otherwise what waitpid(2) says. It may use
    /// memory, and no thread.
    pub(crate) fn in_child(test: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child runs the test, and ends without what a process does at its end.
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
