//! The shared library from its users' side.
#![allow(unsafe_code, reason = "opens the library and calls into it")]
#![allow(clippy::unwrap_used, reason = "in a test a failure is a failure")]

mod common;

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr::null;

use common::{alone, ok};

const DRIVER: &str = "cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString cuDeviceGetCount \
                      cuDeviceGet \
    cuDeviceGetName cuDeviceGetPCIBusId cuDeviceGetAttribute cuDevicePrimaryCtxRetain \
    cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxGetState cuCtxSetCurrent cuCtxGetCurrent \
    cuCtxPushCurrent_v2 \
    cuCtxPopCurrent_v2 cuCtxGetDevice cuCtxGetStreamPriorityRange cuCtxSynchronize \
    cuStreamCreateWithPriority \
    cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamQuery cuStreamWaitEvent \
    cuStreamBeginCapture_v2 cuStreamEndCapture cuThreadExchangeStreamCaptureMode cuEventCreate \
    cuEventDestroy_v2 \
    cuEventRecord cuEventQuery cuEventSynchronize cuEventElapsedTime cuEventElapsedTime_v2 \
    cuMemAlloc_v2 \
    cuMemFree_v2 cuMemGetAddressRange_v2 cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 \
    cuMemHostUnregister \
    cuMemHostGetDevicePointer_v2 cuPointerGetAttribute cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 \
    cuMemcpyDtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemsetD8Async cuLaunchHostFunc \
    cuModuleLoadData \
    cuModuleUnload cuModuleGetFunction cuLaunchKernel cuGetProcAddress_v2";

const CONTROLS: &str = "softcuda_fail softcuda_block softcuda_break softcuda_corrupt softcuda_hold \
    softcuda_release softcuda_jitter softcuda_side_by_side softcuda_accept softcuda_forget \
    softcuda_read softcuda_write softcuda_calls \
    softcuda_bytes softcuda_now_ns softcuda_model softcuda_live";

/// Functions of other vendors that return a text; they cannot fail on demand.
const VENDORS: &str = "hipGetErrorName musaGetErrorName mcGetErrorName aclrtGetSocName";

/// The library, opened by its path.
fn open() -> *mut c_void {
    let test = std::env::current_exe().unwrap();
    let built = test.with_file_name("libsoftcuda.so");
    let path = CString::new(built.as_os_str().as_bytes()).unwrap();
    // SAFETY: loads our own library, which runs nothing at once.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{}", built.display());
    library
}

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: an open library and a name.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

#[test]
fn who_asks_for_a_driver_by_name_does_not_find_it() {
    alone(|| {
        let library = open();
        for name in [c"libcuda.so", c"libcuda.so.1", c"libamdhip64.so"] {
            // SAFETY: loads nothing.
            let found = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
            assert_ne!(found, library);
        }
    });
}

#[test]
fn it_exports_every_name_and_tells_addresses() {
    alone(|| {
        let library = open();
        let unlisted = VENDORS
            .split_whitespace()
            .chain(softcuda::VENDOR_NAMES.iter().copied());
        for name in DRIVER
            .split_whitespace()
            .chain(CONTROLS.split_whitespace())
            .chain(unlisted)
        {
            assert!(!symbol(library, name).is_null(), "{name}");
        }
        let mut names: Vec<&str> = DRIVER.split_whitespace().collect();
        let mut known = softcuda::NAMES.to_vec();
        names.sort_unstable();
        known.sort_unstable();
        assert_eq!(names, known);

        type GetProcAddress =
            unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64, *mut u32) -> u32;
        // SAFETY: this is that function's type.
        let get: GetProcAddress =
            unsafe { std::mem::transmute(symbol(library, "cuGetProcAddress_v2")) };
        let ask = |name: &CStr| {
            let (mut found, mut status) = (null(), 7);
            // SAFETY: a name and two variables.
            let code = unsafe { get(name.as_ptr(), &mut found, 12_080, 0, &mut status) };
            (code, found, status)
        };
        for (asked, meant) in [(c"cuMemAlloc", "cuMemAlloc_v2"), (c"cuInit", "cuInit")] {
            assert_eq!(ask(asked), (0, symbol(library, meant).cast_const(), 0));
        }
        let missing = ask(c"cuMemcpyBatchAsync");
        assert_eq!(missing, (softcuda::CUDA_ERROR_NOT_FOUND, null(), 1));

        type Init = unsafe extern "C" fn(u32) -> u32;
        // SAFETY: this is that function's type.
        let init: Init = unsafe { std::mem::transmute(symbol(library, "cuInit")) };
        // SAFETY: the driver's first call.
        ok(unsafe { init(0) });
    });
}
