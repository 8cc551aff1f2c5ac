//! Common parts of the tests: safe wrappers of calls, and separate processes.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]
#![allow(clippy::unwrap_used, reason = "in a test a failure is a failure")]
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(unused_macros, reason = "each test file uses a part of it")]

use std::ffi::{CString, c_void};
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::ptr::{from_mut, null_mut};

use softcuda::*;

/// Calls a function of the driver.
macro_rules! cu {
    ($call:expr) => {{
        // SAFETY: the tests pass null or pointers to variables that live until the work is done.
        unsafe { $call }
    }};
}

/// Calls a function whose first argument receives the result, and returns it.
macro_rules! get {
    ($type:ty, $function:ident($($argument:expr),*)) => {{
        let mut answer = <$type>::default();
        crate::common::ok(cu!(softcuda::$function(&mut answer, $($argument),*)));
        answer
    }};
}

/// PTX of two kernels: one copies 8 bytes, the other copies 8 bytes from an address that it reads
/// from memory.
pub(crate) const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry copy8(
    .param .u64 copy8_param_0,
    .param .u64 copy8_param_1
)
{
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [copy8_param_0];
    ld.param.u64 %rd2, [copy8_param_1];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    ld.global.u64 %rd5, [%rd4];
    st.global.u64 [%rd3], %rd5;
    ret;
}

.visible .entry follow8(
    .param .u64 follow8_param_0,
    .param .u64 follow8_param_1
)
{
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [follow8_param_0];
    ld.param.u64 %rd2, [follow8_param_1];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    ld.global.u64 %rd5, [%rd4];
    ld.global.u64 %rd6, [%rd5];
    st.global.u64 [%rd3], %rd6;
    ret;
}
";

#[track_caller]
pub(crate) fn ok(code: CUresult) {
    assert_eq!(code, CUDA_SUCCESS);
}

/// Initializes the driver and makes a device's primary context current to this thread.
pub(crate) fn open(device: i32) -> Handle {
    ok(cu!(cuInit(0)));
    let context = get!(Handle, cuDevicePrimaryCtxRetain(device));
    ok(cu!(cuCtxSetCurrent(context)));
    context
}

/// A stream that does not wait for the legacy one.
pub(crate) fn stream() -> Handle {
    get!(Handle, cuStreamCreate(1))
}

pub(crate) fn event() -> Handle {
    get!(Handle, cuEventCreate(0))
}

pub(crate) fn alloc(len: usize) -> u64 {
    get!(u64, cuMemAlloc_v2(len))
}

/// The current bytes of device memory.
pub(crate) fn peek(address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ok(cu!(softcuda_read(address, bytes.as_mut_ptr(), len)));
    bytes
}

pub(crate) fn poke(address: u64, bytes: &[u8]) {
    ok(cu!(softcuda_write(address, bytes.as_ptr(), bytes.len())));
}

pub(crate) fn calls(function: &str) -> u64 {
    let name = CString::new(function).unwrap();
    cu!(softcuda_calls(name.as_ptr()))
}

pub(crate) fn fail(function: &str, nth: u64, result: CUresult) {
    let name = CString::new(function).unwrap();
    cu!(softcuda_fail(name.as_ptr(), nth, result));
}

pub(crate) fn host_to_device(to: u64, from: usize, len: usize, stream: Handle) {
    ok(cu!(cuMemcpyHtoDAsync_v2(to, from, len, stream)));
}

pub(crate) fn device_to_host(to: usize, from: u64, len: usize, stream: Handle) {
    ok(cu!(cuMemcpyDtoHAsync_v2(to, from, len, stream)));
}

pub(crate) fn synchronize(stream: Handle) {
    ok(cu!(cuStreamSynchronize(stream)));
}

/// The module of [`PTX`].
pub(crate) fn module() -> Handle {
    let text = CString::new(PTX).unwrap();
    get!(Handle, cuModuleLoadData(text.as_ptr().cast()))
}

/// The function that copies 8 bytes, and its module.
pub(crate) fn copy8() -> (Handle, Handle) {
    let module = module();
    let function = get!(Handle, cuModuleGetFunction(module, c"copy8".as_ptr()));
    (function, module)
}

/// Launches a function of two addresses with one thread.
pub(crate) fn launch(function: Handle, to: u64, from: u64, stream: Handle) -> CUresult {
    let (mut to, mut from) = (to, from);
    let mut params: [*mut c_void; 2] = [from_mut(&mut to).cast(), from_mut(&mut from).cast()];
    cu!(cuLaunchKernel(
        function,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        stream,
        params.as_mut_ptr(),
        null_mut()
    ))
}

/// Pinned host memory, on pages of its own. It stays registered until the test's process ends.
pub(crate) struct Pinned {
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl Pinned {
    pub(crate) fn new(len: usize) -> Self {
        let pinned = Self::pageable(len);
        ok(cu!(cuMemHostRegister_v2(pinned.at, len, 3)));
        pinned
    }

    /// Not registered yet.
    pub(crate) fn pageable(len: usize) -> Self {
        let pages = vec![0u8; len + 4096].leak();
        let at = (pages.as_mut_ptr().expose_provenance()).next_multiple_of(4096);
        Self { at, len }
    }

    pub(crate) fn device(&self) -> u64 {
        get!(u64, cuMemHostGetDevicePointer_v2(self.at, 0))
    }

    pub(crate) fn set(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.at);
        // SAFETY: the pages are never freed, and the bytes fit.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn bytes(&self, len: usize) -> Vec<u8> {
        assert!(len <= self.len);
        let from = std::ptr::with_exposed_provenance::<u8>(self.at);
        // SAFETY: the pages are never freed; the test has waited for copies to them.
        unsafe { std::slice::from_raw_parts(from, len) }.to_vec()
    }
}

/// How a forked process ended.
pub(crate) struct Ended {
    pub(crate) status: i32,
    /// Its standard error.
    pub(crate) said: String,
}

impl Ended {
    #[track_caller]
    pub(crate) fn by_signal(&self, signal: i32) {
        let got = libc::WIFSIGNALED(self.status).then(|| libc::WTERMSIG(self.status));
        assert_eq!(got, Some(signal), "{}", self.said);
    }
}

/// Runs a test in a process of its own, so that each begins with an unused driver.
#[track_caller]
pub(crate) fn alone(test: impl FnOnce()) {
    let ended = forked(test);
    assert_eq!(ended.status, 0, "{}", ended.said);
}

/// Checks that the driver ends a separate process because of an error.
#[track_caller]
pub(crate) fn aborts(reason: &str, mistake: impl FnOnce()) {
    let ended = forked(mistake);
    ended.by_signal(libc::SIGABRT);
    assert!(ended.said.contains(reason), "{}", ended.said);
}

/// Runs something in a forked process.
pub(crate) fn forked(body: impl FnOnce()) -> Ended {
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors.
    let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(made, 0);
    // SAFETY: both are new and owned here.
    let [reader, writer] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    // SAFETY: the child runs the test and ends; no other thread of this process uses the driver or
    // its locks.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: both descriptors are open.
        unsafe { libc::dup2(ends[1], 2) };
        set_hook(Box::new(|info| {
            let _ = writeln!(std::io::stderr(), "{info}");
        }));
        let failed = catch_unwind(AssertUnwindSafe(body)).is_err();
        // SAFETY: ends the process at once, with its threads.
        unsafe { libc::_exit(failed.into()) };
    }
    drop(writer);
    let mut said = String::new();
    std::fs::File::from(reader)
        .read_to_string(&mut said)
        .unwrap();
    let mut status = 0;
    // SAFETY: our own child, not waited for before.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    Ended { status, said }
}
