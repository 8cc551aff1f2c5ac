//! Memory and rings.
#![allow(unsafe_code, reason = "the C ABI, and memory that callers name")]

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::{Condvar, Mutex};

use crate::files::{Registered, registered};
use crate::state::{MEMORY, RINGS, STATE, UNDER_WAY, await_release, called, count, mistake};

/// `struct hf3fs_iov`.
#[repr(C)]
#[allow(missing_docs, reason = "the fields of the header")]
pub struct Iov {
    pub base: *mut u8,
    pub iovh: *mut c_void,
    pub id: [u8; 16],
    pub mount_point: [c_char; 256],
    pub size: usize,
    pub block_size: usize,
    pub numa: c_int,
}

/// `struct hf3fs_ior`.
#[repr(C)]
#[allow(missing_docs, reason = "the fields of the header")]
pub struct Ior {
    pub iov: Iov,
    pub iorh: *mut c_void,
    pub mount_point: [c_char; 256],
    pub for_read: bool,
    pub io_depth: c_int,
    pub priority: c_int,
    pub timeout: c_int,
    pub flags: u64,
}

/// `struct hf3fs_cqe`.
#[repr(C)]
#[allow(missing_docs, reason = "the fields of the header")]
pub struct Cqe {
    pub index: i32,
    pub reserved: i32,
    pub result: i64,
    pub userdata: *const c_void,
}

/// One operation.
struct Operation {
    index: i32,
    address: usize,
    len: usize,
    file: Arc<Registered>,
    at: u64,
    userdata: usize,
}

#[derive(Default)]
struct Queues {
    /// Operations in the ring, until they are reaped.
    taken: usize,
    prepared: VecDeque<Operation>,
    ended: VecDeque<(i32, i64, usize)>,
    closed: bool,
}

struct Ring {
    entries: usize,
    depth: c_int,
    for_read: bool,
    queues: Mutex<Queues>,
    changed: Condvar,
    /// A thread is preparing or waiting.
    in_use: AtomicBool,
    next: AtomicU64,
}

impl Ring {
    fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.in_use.swap(true, Ordering::AcqRel) {
            mistake("two threads use one ring at the same time");
        }
        let done = work();
        self.in_use.store(false, Ordering::Release);
        done
    }

    /// The daemon's work for it.
    fn serve(&self) {
        loop {
            let mut batch = {
                let mut queues = self.queues.lock();
                let least = usize::try_from(self.depth).map_or(1, |depth| depth.max(1));
                self.changed.wait_while(&mut queues, |queues| {
                    !queues.closed && queues.prepared.len() < least
                });
                if queues.closed {
                    return;
                }
                drop(queues);
                await_release();
                let mut queues = self.queues.lock();
                let most = match self.depth {
                    0 => usize::MAX,
                    depth => depth.unsigned_abs() as usize,
                };
                let most = most.min(queues.prepared.len());
                queues.prepared.drain(..most).collect::<Vec<_>>()
            };
            {
                let mut state = STATE.lock();
                state.together = state.together.max(batch.len() as u64);
            }
            batch.reverse();
            for operation in batch {
                let result = self.run(&operation);
                count(UNDER_WAY, false);
                let mut queues = self.queues.lock();
                queues
                    .ended
                    .push_back((operation.index, result, operation.userdata));
                self.changed.notify_all();
            }
        }
    }

    fn run(&self, operation: &Operation) -> i64 {
        let name = if self.for_read { "read" } else { "write" };
        if let Some(errno) = called(name) {
            return -i64::from(errno);
        }
        let (start, len) = (operation.address as *mut u8, operation.len);
        let file = &operation.file.file;
        let moved = if self.for_read {
            // SAFETY: it lies in memory of this library, and the caller does not access it until
            // the operation has ended.
            file.read_at(
                unsafe { std::slice::from_raw_parts_mut(start, len) },
                operation.at,
            )
        } else {
            // SAFETY: as above.
            file.write_at(
                unsafe { std::slice::from_raw_parts(start, len) },
                operation.at,
            )
        };
        match moved {
            Ok(moved) => i64::try_from(moved).unwrap_or(i64::MAX),
            Err(error) => -i64::from(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

/// Copies a path into a structure; false if it is invalid.
unsafe fn put_mount(into: &mut [c_char; 256], mount: *const c_char) -> bool {
    if mount.is_null() {
        return false;
    }
    // SAFETY: it ends with a zero.
    let path = unsafe { CStr::from_ptr(mount) };
    let bytes = path.to_bytes_with_nul();
    let is_mount = path
        .to_str()
        .is_ok_and(|path| Path::new(path).join("3fs-virt").is_dir());
    if bytes.len() > into.len() || !is_mount {
        return false;
    }
    into.iter_mut()
        .zip(bytes)
        .for_each(|(to, from)| *to = from.cast_signed());
    true
}

/// Makes memory.
///
/// # Safety
/// The structure can be written, the path ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate(
    iov: *mut Iov,
    mount: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    static IDS: AtomicU64 = AtomicU64::new(1);
    if let Some(errno) = called("hf3fs_iovcreate") {
        return -errno;
    }
    // SAFETY: the caller's promise.
    let iov = unsafe { &mut *iov };
    // SAFETY: the caller's promise.
    if size == 0 || !unsafe { put_mount(&mut iov.mount_point, mount) } {
        return -libc::EINVAL;
    }
    // SAFETY: a mapping of its own.
    let base = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(
            std::ptr::null_mut(),
            size,
            access,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return -libc::ENOMEM;
    }
    (iov.base, iov.iovh) = (base.cast(), base);
    iov.id = [0; 16];
    iov.id[..8].copy_from_slice(&IDS.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    (iov.size, iov.block_size, iov.numa) = (size, block_size, numa);
    count(MEMORY, true);
    0
}

/// Gives memory back.
///
/// # Safety
/// It was made here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy(iov: *mut Iov) {
    called("hf3fs_iovdestroy");
    // SAFETY: the caller's promise.
    let iov = unsafe { &mut *iov };
    if iov.iovh.is_null() {
        return;
    }
    // Any later access faults. SAFETY: the mapping is ours.
    unsafe { libc::mprotect(iov.iovh, iov.size, libc::PROT_NONE) };
    iov.iovh = std::ptr::null_mut();
    count(MEMORY, false);
}

/// Makes a ring.
///
/// # Safety
/// The structure can be written, the path ends with a zero.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the header's list")]
pub unsafe extern "C" fn hf3fs_iorcreate4(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    timeout: c_int,
    numa: c_int,
    flags: u64,
) -> c_int {
    if let Some(errno) = called("hf3fs_iorcreate4") {
        return -errno;
    }
    // SAFETY: the caller's promise.
    let ior = unsafe { &mut *ior };
    // SAFETY: the caller's promise.
    let mounted = unsafe { put_mount(&mut ior.mount_point, mount) };
    let Some(entries) = usize::try_from(entries)
        .ok()
        .filter(|&entries| entries > 0 && timeout >= 0 && mounted)
    else {
        return -libc::EINVAL;
    };
    let ring = Arc::new(Ring {
        entries,
        depth: io_depth,
        for_read,
        queues: Mutex::default(),
        changed: Condvar::new(),
        in_use: AtomicBool::new(false),
        next: AtomicU64::new(0),
    });
    let served = Arc::clone(&ring);
    if std::thread::Builder::new()
        .name("soft3fs".into())
        .spawn(move || served.serve())
        .is_err()
    {
        return -libc::EAGAIN;
    }
    (ior.for_read, ior.io_depth, ior.priority) = (for_read, io_depth, 0);
    (ior.timeout, ior.flags, ior.iov.numa, ior.iov.size) = (timeout, flags, numa, entries);
    ior.iorh = Arc::into_raw(ring).cast_mut().cast();
    count(RINGS, true);
    0
}

/// The ring of a structure.
unsafe fn ring_of<'a>(ior: *const Ior) -> Option<&'a Ring> {
    // SAFETY: made by `hf3fs_iorcreate4` and not destroyed, the callers' promise.
    unsafe { ior.as_ref()?.iorh.cast::<Ring>().as_ref() }
}

/// Destroys a ring.
///
/// # Safety
/// It was made here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iordestroy(ior: *mut Ior) {
    called("hf3fs_iordestroy");
    // SAFETY: the caller's promise.
    let ior = unsafe { &mut *ior };
    if ior.iorh.is_null() {
        return;
    }
    // SAFETY: it came from `Arc::into_raw`, and is not used after this.
    let ring = unsafe { Arc::from_raw(ior.iorh.cast::<Ring>()) };
    ior.iorh = std::ptr::null_mut();
    let mut queues = ring.queues.lock();
    if queues.taken > 0 {
        mistake("a ring is destroyed while operations are under way");
    }
    queues.closed = true;
    ring.changed.notify_all();
    count(RINGS, false);
}

/// The entries of a ring.
///
/// # Safety
/// It was made here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_io_entries(ior: *const Ior) -> c_int {
    // SAFETY: the caller's promise.
    let ring = unsafe { ring_of(ior) };
    ring.map_or(0, |ring| {
        c_int::try_from(ring.entries).unwrap_or(c_int::MAX)
    })
}

/// Prepares an operation; it may begin at once.
///
/// # Safety
/// Ring and memory were made here.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the header's list")]
pub unsafe extern "C" fn hf3fs_prep_io(
    ior: *const Ior,
    iov: *const Iov,
    read: bool,
    ptr: *mut c_void,
    fd: c_int,
    off: usize,
    len: u64,
    userdata: *const c_void,
) -> c_int {
    if let Some(errno) = called("hf3fs_prep_io") {
        return -errno;
    }
    // SAFETY: the caller's promise.
    let (Some(ring), Some(iov)) = (unsafe { ring_of(ior) }, unsafe { iov.as_ref() }) else {
        return -libc::EINVAL;
    };
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let inside = ptr
        .addr()
        .checked_sub(iov.base.addr())
        .is_some_and(|at| at <= iov.size && len <= iov.size - at);
    if read != ring.for_read || len == 0 || !inside || iov.iovh.is_null() {
        return -libc::EINVAL;
    }
    let Some(file) = registered(fd) else {
        return -libc::EBADF;
    };
    if file.mode == (if read { libc::O_WRONLY } else { libc::O_RDONLY }) {
        return -libc::EACCES;
    }
    ring.alone(|| {
        let mut queues = ring.queues.lock();
        if queues.taken >= ring.entries {
            return -libc::EAGAIN;
        }
        queues.taken += 1;
        let index = (ring.next.fetch_add(1, Ordering::Relaxed) % ring.entries as u64) as i32;
        count(UNDER_WAY, true);
        queues.prepared.push_back(Operation {
            index,
            address: ptr.addr(),
            len,
            file,
            at: off as u64,
            userdata: userdata.addr(),
        });
        ring.changed.notify_all();
        index
    })
}

/// Hurries the daemon.
///
/// # Safety
/// The ring was made here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_submit_ios(ior: *const Ior) -> c_int {
    if let Some(errno) = called("hf3fs_submit_ios") {
        return -errno;
    }
    // SAFETY: the caller's promise.
    if unsafe { ring_of(ior) }.is_some() {
        0
    } else {
        -libc::EINVAL
    }
}

/// Waits for operations until a time of the real-time clock; returns the number of ended ones.
///
/// # Safety
/// The ring was made here, and the array has space for the entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_wait_for_ios(
    ior: *const Ior,
    cqes: *mut Cqe,
    cqec: c_int,
    min_results: c_int,
    abs_timeout: *const libc::timespec,
) -> c_int {
    if let Some(errno) = called("hf3fs_wait_for_ios") {
        return -errno;
    }
    // SAFETY: the caller's promise.
    let (ring, until) = unsafe { (ring_of(ior), abs_timeout.as_ref()) };
    let (Some(ring), Some(room)) = (ring, usize::try_from(cqec).ok().filter(|&room| room > 0))
    else {
        return -libc::EINVAL;
    };
    let least = usize::try_from(min_results).unwrap_or(0).min(room);
    let until = until.map(|until| {
        let (seconds, ns) = (until.tv_sec.unsigned_abs(), until.tv_nsec.unsigned_abs());
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_nanos(ns)
    });
    ring.alone(|| {
        let mut queues = ring.queues.lock();
        while queues.ended.len() < least {
            let left = match until.map(|until| until.duration_since(SystemTime::now())) {
                Some(Err(_)) => break,
                Some(Ok(left)) => left,
                None => Duration::from_secs(1),
            };
            ring.changed.wait_for(&mut queues, left);
        }
        let come = room.min(queues.ended.len());
        for (number, (index, result, userdata)) in queues.ended.drain(..come).enumerate() {
            let entry = Cqe {
                index,
                reserved: 0,
                result,
                userdata: std::ptr::without_provenance(userdata),
            };
            // SAFETY: the array has space for `room` entries.
            unsafe { cqes.add(number).write(entry) };
        }
        queues.taken -= come;
        c_int::try_from(come).unwrap_or(c_int::MAX)
    })
}
