//! One ring of USRBIO and the registered memory that its operations go through.
//!
//! A ring is used by one thread at a time: it prepares a batch of operations, submits them, and
//! waits for all of them. When it returns, no operation is under way and the memory is free again.
//! If that is not certain, the ring is never used again and its memory is never freed, because the
//! daemon may still write there.

use std::ffi::{CStr, OsString, c_int};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;

use super::abi::{Cqe, Ior, Iov, Library};

/// Most bytes of one operation, and bytes of a ring's memory; their quotient is the number of
/// concurrent operations.
pub(super) const PIECE: usize = 256 << 10;
pub(super) const BUFFER: usize = 4 << 20;
/// Most operations of a batch.
const BATCH: usize = BUFFER / PIECE;
/// How long one call waits. The wait is repeated until all operations have ended, as in a system
/// call.
const WAIT_S: i64 = 1;

/// How 3FS is used.
#[derive(Debug, Clone)]
pub struct UsrbioOptions {
    /// 3FS's client library, by its name or path.
    pub library: OsString,
    /// Entries of a ring, at least 1.
    pub entries: u32,
    /// Most operations that 3FS's daemon begins together; the sign is ignored; 0: all. To the
    /// library a positive number means batches of exactly that size, and a smaller batch would wait
    /// for ever, so the negative number is passed.
    pub depth: i32,
    /// NUMA node of the memory; negative: any.
    pub numa: i32,
    /// Most memory of all rings together, in bytes. Each has 4 MiB; half of them are for reads and
    /// half for writes, at least one each. A thread that finds no free ring makes a plain system
    /// call.
    pub memory: usize,
}

impl UsrbioOptions {
    /// Most rings for reads; the same number for writes.
    pub(super) fn rings(&self) -> usize {
        (self.memory / BUFFER / 2).max(1)
    }
}

impl Default for UsrbioOptions {
    fn default() -> Self {
        Self {
            library: "libhf3fs_api_shared.so".into(),
            entries: 1024,
            depth: -32,
            numa: 0,
            memory: 256 << 20,
        }
    }
}

/// See the module.
pub(super) struct Ring {
    library: Arc<Library>,
    memory: Iov,
    ring: Ior,
    for_read: bool,
    /// Operations of a batch.
    batch: usize,
    /// Operations may still be under way.
    broken: bool,
    /// A child of a fork has the structures but neither the memory nor the ring.
    process: u32,
}

// SAFETY: the library's calls on a ring may be made from any thread, one at a time, which `&mut
// self` ensures. The structures point to memory of the library or of this ring only.
#[allow(unsafe_code, reason = "raw pointers in the structures of a C library")]
unsafe impl Send for Ring {}

#[allow(unsafe_code, reason = "calls of a C library")]
impl Ring {
    /// A ring for reads or for writes on this mount, with its memory.
    pub(super) fn new(
        library: &Arc<Library>,
        mount: &CStr,
        options: &UsrbioOptions,
        for_read: bool,
    ) -> rustix::io::Result<Self> {
        let mut memory = MaybeUninit::<Iov>::zeroed();
        // SAFETY: the structure is ours to be filled, the path ends with a zero.
        let made = unsafe {
            (library.iovcreate)(memory.as_mut_ptr(), mount.as_ptr(), BUFFER, 0, options.numa)
        };
        check(made)?;
        // SAFETY: all zeros are a valid `Iov`, and the call has filled it.
        let mut memory = unsafe { memory.assume_init() };
        let mut ring = MaybeUninit::<Ior>::zeroed();
        let entries = c_int::try_from(options.entries).unwrap_or(c_int::MAX);
        let depth = options.depth.saturating_abs().saturating_neg();
        // SAFETY: as above.
        let made = unsafe {
            let (ring, mount) = (ring.as_mut_ptr(), mount.as_ptr());
            (library.iorcreate4)(ring, mount, entries, for_read, depth, 0, options.numa, 0)
        };
        if let Err(errno) = check(made) {
            // SAFETY: it was made above, and no ring uses it.
            unsafe { (library.iovdestroy)(&raw mut memory) };
            return Err(errno);
        }
        // SAFETY: all zeros are a valid `Ior`, and the call has filled it.
        let ring = unsafe { ring.assume_init() };
        // SAFETY: the ring was made.
        let room = unsafe { (library.io_entries)(&raw const ring) };
        Ok(Self {
            library: Arc::clone(library),
            memory,
            ring,
            for_read,
            batch: usize::try_from(room).unwrap_or(0).clamp(1, BATCH),
            broken: false,
            process: std::process::id(),
        })
    }

    /// True if it must not be used again.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// As preadv(2).
    pub(super) fn read(
        &mut self,
        fd: RawFd,
        bufs: &mut [IoSliceMut<'_>],
        at: u64,
    ) -> rustix::io::Result<usize> {
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        let mut into = bufs.iter_mut();
        let mut room: &mut [u8] = &mut [];
        let mut done = 0;
        while done < wanted {
            let asked = (wanted - done).min(self.batch * PIECE);
            let read = match self.batch(fd, at + done as u64, asked) {
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break, // the next call meets it first
                Ok(read) => read,
            };
            // SAFETY: the memory is `BUFFER` bytes long, no operation is under way, and these were
            // read.
            let mut came = unsafe { std::slice::from_raw_parts(self.memory.base, read) };
            while !came.is_empty() {
                if room.is_empty() {
                    let Some(next) = into.next() else { break };
                    room = next;
                    continue;
                }
                let len = came.len().min(room.len());
                let (here, rest) = std::mem::take(&mut room).split_at_mut(len);
                here.copy_from_slice(&came[..len]);
                (room, came) = (rest, &came[len..]);
            }
            done += read;
            if read < asked {
                break;
            }
        }
        Ok(done)
    }

    /// As pwrite(2).
    pub(super) fn write(&mut self, fd: RawFd, bytes: &[u8], at: u64) -> rustix::io::Result<usize> {
        let asked = bytes.len().min(self.batch * PIECE);
        // SAFETY: the memory is `BUFFER` bytes long, which is no less than a batch, and no
        // operation is under way.
        let memory = unsafe { std::slice::from_raw_parts_mut(self.memory.base, asked) };
        memory.copy_from_slice(&bytes[..asked]);
        self.batch(fd, at, asked)
    }

    /// Moves `len` bytes between the start of the memory and the file; returns the number of bytes
    /// before the first failed one.
    fn batch(&mut self, fd: RawFd, at: u64, len: usize) -> rustix::io::Result<usize> {
        if self.broken {
            return Err(Errno::IO);
        }
        let pieces = len.div_ceil(PIECE);
        let mut results = [0i64; BATCH];
        let (mut begun, mut refused) = (0, None);
        while begun < pieces {
            let offset = begun * PIECE;
            let piece = PIECE.min(len - offset);
            // SAFETY: the piece lies in the memory, which stays until the operation has ended: it
            // is waited for below, or the ring is broken and is never given back.
            let prepared = unsafe {
                (self.library.prep_io)(
                    &raw const self.ring,
                    &raw const self.memory,
                    self.for_read,
                    self.memory.base.add(offset).cast(),
                    fd,
                    usize::try_from(at).unwrap_or(usize::MAX) + offset,
                    piece as u64,
                    ptr::without_provenance(begun),
                )
            };
            if let Err(errno) = check(prepared) {
                refused = Some(errno);
                break;
            }
            begun += 1;
        }
        // Prepared operations may have begun, so they are waited for even if the rest failed.
        if begun > 0 {
            self.wait(begun, &mut results)?;
        }
        let mut done = 0;
        for (number, &result) in results[..begun].iter().enumerate() {
            let piece = PIECE.min(len - number * PIECE);
            match usize::try_from(result) {
                Ok(moved) if moved >= piece => done += piece,
                Ok(moved) => return Ok(done + moved),
                Err(_) if done > 0 => return Ok(done),
                Err(_) => return Err(errno_of(result)),
            }
        }
        match refused {
            Some(errno) if done == 0 => Err(errno),
            _ => Ok(done),
        }
    }

    /// Submits the prepared operations and waits for all of them.
    fn wait(&mut self, begun: usize, results: &mut [i64; BATCH]) -> rustix::io::Result<()> {
        // SAFETY: the ring is there.
        let submitted = unsafe { (self.library.submit_ios)(&raw const self.ring) };
        // It is only a hint; the operations are under way without it.
        let _ = check(submitted);
        let nothing = Cqe {
            index: 0,
            reserved: 0,
            result: 0,
            userdata: ptr::null(),
        };
        let (mut ended, mut entries) = (0, [nothing; BATCH]);
        while ended < begun {
            let left = c_int::try_from(begun - ended).unwrap_or(c_int::MAX);
            let until = in_a_while();
            // SAFETY: the buffer has room for the requested number of entries.
            let came = unsafe {
                (self.library.wait_for_ios)(
                    &raw const self.ring,
                    entries.as_mut_ptr(),
                    left,
                    left,
                    &raw const until,
                )
            };
            match check(came) {
                Ok(came) => {
                    for entry in &entries[..came.min(begun - ended)] {
                        if let Some(result) = results.get_mut(entry.userdata.addr()) {
                            *result = entry.result;
                        }
                    }
                    ended += came;
                }
                Err(Errno::INTR | Errno::AGAIN | Errno::TIMEDOUT) => {}
                Err(errno) => {
                    self.broken = true;
                    return Err(errno);
                }
            }
        }
        Ok(())
    }
}

#[allow(unsafe_code, reason = "calls of a C library")]
impl Drop for Ring {
    fn drop(&mut self) {
        if self.broken || self.process != std::process::id() {
            return;
        }
        // SAFETY: both were made here, nothing is under way, and neither is used after this.
        unsafe {
            (self.library.iordestroy)(&raw mut self.ring);
            (self.library.iovdestroy)(&raw mut self.memory);
        }
    }
}

/// The result of a function: a number, or a negative error number.
fn check(answer: c_int) -> rustix::io::Result<usize> {
    usize::try_from(answer).map_err(|_| errno_of(i64::from(answer)))
}

/// The error of a negative result. Numbers outside the kernel's range are 3FS's own and count as an
/// error of the medium.
fn errno_of(answer: i64) -> Errno {
    match i32::try_from(answer.unsigned_abs()) {
        Ok(number) if number < 134 => Errno::from_raw_os_error(number),
        _ => Errno::IO,
    }
}

/// The end of one call's wait, on the library's clock.
fn in_a_while() -> libc::timespec {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    libc::timespec {
        tv_sec: now.tv_sec + WAIT_S,
        tv_nsec: now.tv_nsec,
    }
}
