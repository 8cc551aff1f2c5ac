//! Files on 3FS, and files registered for rings.
#![allow(unsafe_code, reason = "the C ABI")]

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use crate::state::{FILES, called, count};

/// A registered file: the file of the number at that time, by a descriptor of its own, and its open
/// mode.
pub(crate) struct Registered {
    pub(crate) file: File,
    pub(crate) mode: c_int,
}

static REGISTERED: LazyLock<Mutex<HashMap<c_int, Arc<Registered>>>> = LazyLock::new(Mutex::default);

fn mount_above(path: &Path) -> Option<PathBuf> {
    let mount = path.ancestors().find(|dir| dir.join("3fs-virt").is_dir())?;
    Some(mount.to_owned())
}

/// True if an open file lies below a directory that counts as 3FS.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_is_hf3fs(fd: c_int) -> bool {
    called("hf3fs_is_hf3fs");
    std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|path| mount_above(&path).is_some())
}

/// The directory that counts as the mount point; its length and one, or -1.
///
/// # Safety
/// The path ends with a zero; the buffer has space for the given bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_extract_mount_point(
    into: *mut c_char,
    size: c_int,
    path: *const c_char,
) -> c_int {
    called("hf3fs_extract_mount_point");
    // SAFETY: the caller's promise.
    let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
    let Some(mount) = Path::new(path)
        .canonicalize()
        .ok()
        .and_then(|path| mount_above(&path))
    else {
        return -1;
    };
    let bytes = mount.as_os_str().as_bytes();
    if usize::try_from(size).is_ok_and(|size| bytes.len() < size) {
        // SAFETY: the buffer has space for the bytes and a zero.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), into.cast(), bytes.len());
            *into.add(bytes.len()) = 0;
        }
    }
    c_int::try_from(bytes.len() + 1).unwrap_or(-1)
}

/// Registers an open file; not above 0, or an error number.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_reg_fd(fd: c_int, _flags: u64) -> c_int {
    if let Some(errno) = called("hf3fs_reg_fd") {
        return errno;
    }
    if !hf3fs_is_hf3fs(fd) {
        return libc::EBADF;
    }
    let mut registered = REGISTERED.lock();
    if registered.contains_key(&fd) {
        return libc::EINVAL;
    }
    // SAFETY: it is open, as just checked.
    let (file, mode) = unsafe {
        let file = BorrowedFd::borrow_raw(fd).try_clone_to_owned();
        (file, libc::fcntl(fd, libc::F_GETFL) & libc::O_ACCMODE)
    };
    let Ok(file) = file.map(File::from) else {
        return libc::EMFILE;
    };
    let own = file.as_raw_fd();
    registered.insert(fd, Arc::new(Registered { file, mode }));
    count(FILES, true);
    -own
}

/// Takes it out again.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_dereg_fd(fd: c_int) {
    called("hf3fs_dereg_fd");
    if hf3fs_is_hf3fs(fd) && REGISTERED.lock().remove(&fd).is_some() {
        count(FILES, false);
    }
}

pub(crate) fn registered(fd: c_int) -> Option<Arc<Registered>> {
    REGISTERED.lock().get(&fd.wrapping_abs()).cloned()
}
