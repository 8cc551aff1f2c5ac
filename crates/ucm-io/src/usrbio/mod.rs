//! Slots to and from 3FS by USRBIO, which bypasses FUSE: operations are submitted in batches
//! through rings in memory shared with its daemon; the bytes move by RDMA to and from registered
//! memory.
//!
//! 3FS's client library is loaded when a root is probed, and only data of slots on 3FS uses it:
//! names, lengths and everything else stay system calls on its mount. Without the library, without
//! 3FS or without a ring, reads and writes are plain ones, and the probe reports the reason
//! ([`Probe::rings`](crate::Probe)).
//!
//! A thread that waits for a ring is like one in a system call: it returns when all of its
//! operations have ended, however long that takes; past the deadline the pool writes it off. So no
//! late byte is written to memory that has another owner.

mod abi;
mod ring;

use std::ffi::{CStr, CString};
use std::fmt;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;

use rustix::io::Errno;
use ucm_core::sync::Mutex;

use abi::Library;
pub use ring::UsrbioOptions;
use ring::{BUFFER, Ring};

/// The rings of one engine.
pub(crate) struct Rings {
    options: UsrbioOptions,
    library: OnceLock<Arc<Library>>,
    /// The mount point, after a probe found that rings work there.
    mount: Mutex<Option<Arc<CStr>>>,
    /// For writes and for reads.
    pools: [Mutex<RingPool>; 2],
}

/// Rings of one direction.
#[derive(Default)]
struct RingPool {
    free: Vec<Ring>,
    /// Number of existing rings, in use or not, and of broken ones.
    count: usize,
}

impl fmt::Debug for Rings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rings")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Rings {
    pub(crate) fn new(options: UsrbioOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            library: OnceLock::new(),
            mount: Mutex::default(),
            pools: Default::default(),
        })
    }

    /// Probes whether rings can be used on the file system of this open file in this directory, and
    /// uses them from then on. Returns the most memory of the rings in bytes, or the reason as
    /// text.
    pub(crate) fn look(&self, dir: &Path, fd: &OwnedFd) -> Result<usize, String> {
        self.give_up();
        let library = self.load()?;
        if !library.is_on_3fs(fd.as_raw_fd()) {
            return Err("this is no mount of 3FS".to_owned());
        }
        let path = CString::new(dir.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        let mount = library
            .mount_point(&path)
            .ok_or("3FS's library finds no mount point above it")?;
        let mount: Arc<CStr> = mount.into();
        for for_read in [false, true] {
            let ring = Ring::new(&library, &mount, &self.options, for_read);
            let ring = ring.map_err(|errno| format!("no ring could be made: {errno}"))?;
            let mut pool = self.pools[usize::from(for_read)].lock();
            if pool.count < self.options.rings() {
                pool.count += 1;
                pool.free.push(ring);
            }
        }
        *self.mount.lock() = Some(mount);
        Ok(2 * self.options.rings() * BUFFER)
    }

    /// Uses no ring from now on.
    pub(crate) fn give_up(&self) {
        *self.mount.lock() = None;
        for pool in &self.pools {
            let free = {
                let mut state = pool.lock();
                state.count -= state.free.len();
                std::mem::take(&mut state.free)
            };
            drop(free); // with no lock held
        }
    }

    /// True if this is the current mount and not an earlier one at the same path.
    fn is_current(&self, mount: &Arc<CStr>) -> bool {
        let current = self.mount.lock();
        current.as_ref().is_some_and(|now| Arc::ptr_eq(now, mount))
    }

    fn load(&self) -> Result<Arc<Library>, String> {
        if let Some(library) = self.library.get() {
            return Ok(Arc::clone(library));
        }
        let loaded = Arc::new(Library::load(&self.options.library)?);
        Ok(Arc::clone(self.library.get_or_init(|| loaded)))
    }

    /// Registers an open file for rings; `None` if it is read and written by plain calls.
    pub(crate) fn register(self: &Arc<Self>, fd: &OwnedFd) -> Option<RingFile> {
        let mount = self.mount.lock().clone()?;
        let library = self.library.get()?;
        let fd = fd.as_raw_fd();
        library.register(fd).then(|| RingFile {
            rings: Arc::clone(self),
            library: Arc::clone(library),
            mount,
            fd,
        })
    }

    /// Calls a function with a ring of this direction; `None` if there is no free ring.
    fn with_ring<T>(
        &self,
        library: &Arc<Library>,
        mount: &Arc<CStr>,
        for_read: bool,
        work: impl FnOnce(&mut Ring) -> rustix::io::Result<T>,
    ) -> Option<rustix::io::Result<T>> {
        let pool = &self.pools[usize::from(for_read)];
        if !self.is_current(mount) {
            return None;
        }
        let taken = pool.lock().take(self.options.rings())?;
        let made = taken.map_or_else(|| Ring::new(library, mount, &self.options, for_read), Ok);
        let Ok(mut ring) = made else {
            pool.lock().count -= 1;
            return None;
        };
        let result = work(&mut ring);
        // A broken ring is dropped without freeing its memory, and still counts.
        if !ring.is_broken() {
            let mut state = pool.lock();
            if self.is_current(mount) {
                state.free.push(ring);
            } else {
                state.count -= 1; // of an earlier mount
            }
        }
        Some(result)
    }
}

impl RingPool {
    /// A ring, or permission to create one; `None` if there are too many.
    fn take(&mut self, most: usize) -> Option<Option<Ring>> {
        if self.free.is_empty() {
            self.count = Some(self.count + 1).filter(|&count| count <= most)?;
        }
        Some(self.free.pop())
    }
}

/// Registration of an open file for rings. It is dropped before the file is closed: the library
/// identifies files by descriptor number and accepts no other file of the same number until then.
pub(crate) struct RingFile {
    rings: Arc<Rings>,
    library: Arc<Library>,
    mount: Arc<CStr>,
    fd: RawFd,
}

impl fmt::Debug for RingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingFile")
            .field("fd", &self.fd)
            .finish_non_exhaustive()
    }
}

impl RingFile {
    /// As preadv(2); `None` if a plain call must be used.
    pub(crate) fn read(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        at: u64,
    ) -> Option<rustix::io::Result<usize>> {
        let read = |ring: &mut Ring| ring.read(self.fd, bufs, at);
        self.rings.with_ring(&self.library, &self.mount, true, read)
    }

    /// As pwrite(2); `None` if a plain call must be used.
    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> Option<rustix::io::Result<usize>> {
        if at > i64::MAX as u64 {
            return Some(Err(Errno::INVAL));
        }
        let write = |ring: &mut Ring| ring.write(self.fd, bytes, at);
        self.rings
            .with_ring(&self.library, &self.mount, false, write)
    }
}

impl Drop for RingFile {
    fn drop(&mut self) {
        self.library.deregister(self.fd);
    }
}
