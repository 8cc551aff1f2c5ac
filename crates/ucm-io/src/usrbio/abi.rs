//! The C interface of 3FS's client library (`hf3fs_usrbio.h`), looked up in the library when it is
//! loaded.
//!
//! The structures are the caller's memory, which the library reads and writes, so their layout is
//! checked at compile time.

use std::error::Error;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::os::fd::RawFd;

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW, Symbol};

/// Room for the path of a mount point, in structures and results.
pub(super) const MOUNT_POINT: usize = 256;

/// `struct hf3fs_iov`: memory that 3FS's daemon can reach.
#[repr(C)]
pub(super) struct Iov {
    pub(super) base: *mut u8,
    pub(super) handle: *mut c_void,
    pub(super) id: [u8; 16],
    pub(super) mount_point: [c_char; MOUNT_POINT],
    pub(super) size: usize,
    pub(super) block_size: usize,
    pub(super) numa: c_int,
}

/// `struct hf3fs_ior`: a ring, for reads or for writes.
#[repr(C)]
pub(super) struct Ior {
    pub(super) iov: Iov,
    pub(super) handle: *mut c_void,
    pub(super) mount_point: [c_char; MOUNT_POINT],
    pub(super) for_read: bool,
    pub(super) io_depth: c_int,
    pub(super) priority: c_int,
    pub(super) timeout: c_int,
    pub(super) flags: u64,
}

/// `struct hf3fs_cqe`: the result of one operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Cqe {
    pub(super) index: i32,
    pub(super) reserved: i32,
    /// Bytes, or a negative error number.
    pub(super) result: i64,
    pub(super) userdata: *const c_void,
}

const _: () = {
    assert!(size_of::<Iov>() == 312 && size_of::<Ior>() == 600 && size_of::<Cqe>() == 24);
    assert!(offset_of!(Iov, id) == 16 && offset_of!(Iov, mount_point) == 32);
    assert!(offset_of!(Iov, size) == 288 && offset_of!(Iov, block_size) == 296);
    assert!(offset_of!(Iov, numa) == 304 && offset_of!(Ior, handle) == 312);
    assert!(offset_of!(Ior, mount_point) == 320 && offset_of!(Ior, for_read) == 576);
    assert!(offset_of!(Ior, io_depth) == 580 && offset_of!(Ior, flags) == 592);
    assert!(offset_of!(Cqe, result) == 8 && offset_of!(Cqe, userdata) == 16);
};

/// The functions in use, and their library.
pub(super) struct Library {
    is_hf3fs: unsafe extern "C" fn(c_int) -> bool,
    extract_mount_point: unsafe extern "C" fn(*mut c_char, c_int, *const c_char) -> c_int,
    pub(super) iovcreate:
        unsafe extern "C" fn(*mut Iov, *const c_char, usize, usize, c_int) -> c_int,
    pub(super) iovdestroy: unsafe extern "C" fn(*mut Iov),
    pub(super) iorcreate4: unsafe extern "C" fn(
        *mut Ior,
        *const c_char,
        c_int,
        bool,
        c_int,
        c_int,
        c_int,
        u64,
    ) -> c_int,
    pub(super) iordestroy: unsafe extern "C" fn(*mut Ior),
    reg_fd: unsafe extern "C" fn(c_int, u64) -> c_int,
    dereg_fd: unsafe extern "C" fn(c_int),
    pub(super) io_entries: unsafe extern "C" fn(*const Ior) -> c_int,
    pub(super) prep_io: unsafe extern "C" fn(
        *const Ior,
        *const Iov,
        bool,
        *mut c_void,
        c_int,
        usize,
        u64,
        *const c_void,
    ) -> c_int,
    pub(super) submit_ios: unsafe extern "C" fn(*const Ior) -> c_int,
    pub(super) wait_for_ios:
        unsafe extern "C" fn(*const Ior, *mut Cqe, c_int, c_int, *const libc::timespec) -> c_int,
    /// Never unloaded, because it has threads and tables of its own.
    _loaded: std::mem::ManuallyDrop<Loaded>,
}

#[allow(unsafe_code, reason = "calls of a C library")]
impl Library {
    /// Loads the library and resolves every function in use. Returns the loader's message on
    /// failure.
    pub(super) fn load(name: &OsStr) -> Result<Self, String> {
        let cannot = |error: libloading::Error| {
            let why = error
                .source()
                .map_or_else(|| error.to_string(), ToString::to_string);
            format!("{} cannot be used: {why}", name.display())
        };
        // SAFETY: the user names 3FS's client library, whose initialisation sets up its own logging
        // and tables.
        let loaded = unsafe { Loaded::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(cannot)?;
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the types of the fields are those of the header, and the library stays
                // loaded.
                let found: Symbol<_> = unsafe { loaded.get($name) }.map_err(cannot)?;
                *found
            }};
        }
        Ok(Self {
            is_hf3fs: function!(b"hf3fs_is_hf3fs\0"),
            extract_mount_point: function!(b"hf3fs_extract_mount_point\0"),
            iovcreate: function!(b"hf3fs_iovcreate\0"),
            iovdestroy: function!(b"hf3fs_iovdestroy\0"),
            iorcreate4: function!(b"hf3fs_iorcreate4\0"),
            iordestroy: function!(b"hf3fs_iordestroy\0"),
            reg_fd: function!(b"hf3fs_reg_fd\0"),
            dereg_fd: function!(b"hf3fs_dereg_fd\0"),
            io_entries: function!(b"hf3fs_io_entries\0"),
            prep_io: function!(b"hf3fs_prep_io\0"),
            submit_ios: function!(b"hf3fs_submit_ios\0"),
            wait_for_ios: function!(b"hf3fs_wait_for_ios\0"),
            _loaded: std::mem::ManuallyDrop::new(loaded),
        })
    }

    /// True if an open file lies on 3FS.
    pub(super) fn is_on_3fs(&self, fd: RawFd) -> bool {
        // SAFETY: takes any number.
        unsafe { (self.is_hf3fs)(fd) }
    }

    /// The mount point of 3FS above a path.
    pub(super) fn mount_point(&self, path: &CStr) -> Option<CString> {
        let mut found = [0u8; MOUNT_POINT];
        // SAFETY: the path ends with a zero, and `found` has the bytes whose number is passed.
        let len = unsafe {
            (self.extract_mount_point)(
                found.as_mut_ptr().cast(),
                MOUNT_POINT as c_int,
                path.as_ptr(),
            )
        };
        // Its length plus one, or the length of a path that is too long.
        let fits = usize::try_from(len).is_ok_and(|len| (2..=MOUNT_POINT).contains(&len));
        let found = fits
            .then(|| CStr::from_bytes_until_nul(&found).ok())
            .flatten()?;
        Some(found.to_owned())
    }

    /// Registers an open file for rings; false if that is not possible.
    pub(super) fn register(&self, fd: RawFd) -> bool {
        // SAFETY: takes any number. An error is positive here, success is not.
        unsafe { (self.reg_fd)(fd, 0) <= 0 }
    }

    /// Removes the registration, before the file is closed.
    pub(super) fn deregister(&self, fd: RawFd) {
        // SAFETY: takes any number.
        unsafe { (self.dereg_fd)(fd) }
    }
}
