//! Making a ring: what this kernel knows and what this process is allowed.

use std::io;

use io_uring::{Builder, IoUring, Probe, cqueue, opcode, squeue};
use ucm_core::{Error, ErrorKind, Result};

/// Most entries of a submission queue that a kernel gives.
const MAX_ENTRIES: u32 = 32768;

/// The calls that are made through the ring. A kernel that lacks one (before 5.11) is left to the thread pool.
const NEEDED: &[(u8, &str)] = &[
    (opcode::OpenAt::CODE, "openat"),
    (opcode::Read::CODE, "read"),
    (opcode::ReadFixed::CODE, "read_fixed"),
    (opcode::Write::CODE, "write"),
    (opcode::WriteFixed::CODE, "write_fixed"),
    (opcode::Fadvise::CODE, "fadvise"),
    (opcode::Close::CODE, "close"),
    (opcode::UnlinkAt::CODE, "unlinkat"),
    (opcode::AsyncCancel::CODE, "async_cancel"),
];

type Flags = fn(&mut Builder<squeue::Entry, cqueue::Entry>);

/// From what suits one submitting thread best (6.1 and newer) down to what every kernel has.
const ATTEMPTS: &[Flags] = &[
    |builder| {
        builder.setup_single_issuer().setup_defer_taskrun();
    },
    |builder| {
        builder.setup_coop_taskrun();
    },
    |_| {},
];

/// A ring in which `calls` calls and as many cancellations fit. To be called by the thread that will submit. For calls
/// that would make the submitter wait the kernel has threads of its own, four for each core; fewer are not asked for,
/// because one that hangs is not replaced. The error says that io_uring cannot be used here: refused (EPERM, ENOSYS:
/// seccomp, a sysctl, an old kernel) or incomplete.
pub(super) fn make(calls: usize) -> Result<IoUring> {
    let refused = |error: io::Error| Error::from_io(error, "this system refuses io_uring");
    let entries = u32::try_from(2 * calls + 1)
        .ok()
        .filter(|&entries| entries <= MAX_ENTRIES)
        .ok_or_else(|| Error::invalid("a ring has room for at most 16383 calls").with("calls", calls))?;
    let ring = build(entries).map_err(refused)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(refused)?;
    match NEEDED.iter().find(|(code, _)| !probe.is_supported(*code)) {
        None => Ok(ring),
        Some((_, name)) => {
            let text = "this kernel's io_uring lacks a call that is needed";
            Err(Error::new(ErrorKind::Io, text).with("call", name))
        }
    }
}

fn build(entries: u32) -> io::Result<IoUring> {
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for flags in ATTEMPTS {
        let mut builder = IoUring::builder();
        flags(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return Ok(ring),
            // A flag that this kernel does not know.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}
