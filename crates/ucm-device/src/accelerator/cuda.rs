//! CUDA's driver, found at run time. The primary context is torch's own, so streams and events of
//! both can be mixed.
//!
//! The functions stand in a table of ours, whose types are compared with those of
//! [`cudarc::driver::sys`] at compile time. They are not called through cudarc (0.19), for three
//! reasons:
//!
//! 1. cudarc searches for the library by itself, `libcuda.so` before `libcuda.so.1`. The first
//!    name can be a stub that programs are linked with. The library of tests cannot be passed to
//!    it.
//! 2. A missing library or function is a panic there. Here it is an error, and the process
//!    continues without the device.
//! 3. Every function of it returns the enum [`CUresult`]. A newer driver can return a number that
//!    the enum does not have, which is undefined behaviour. Here a result is a number.
#![allow(unsafe_code, reason = "calls into the driver's library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult, CUstream,
    CUstreamCaptureMode,
};
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};

use super::library::{self, Places, functions};
use super::runtime::{
    Answer, Direction, Failed, Kernel, NO_KERNELS, Owned, RawCopy, RawEvent, RawStream, Runtime,
    ends_context, insist, pointer,
};
use crate::fork::Origin;
use crate::numa;

const VENDOR: &str = "cuda";

/// The name with the number is the driver. The name without it may be a stub for linking.
const LIBRARY: Places = Places {
    known_by: None, // a tool that traces driver calls may also have some of them
    names: &["libcuda.so.1", "libcuda.so"],
    below: None,
};

/// The copy kernels, for every driver from 450 on: `tools/ptx.py` makes them from
/// `kernels/copy.cu`.
const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(
        include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../kernels/copy.ptx"
        )),
        "\0"
    )
    .as_bytes(),
) {
    Ok(text) => text,
    Err(_) => c"",
};

/// Their names, in the order of [`Kernel`].
const KERNELS: [&CStr; 3] = [c"ucm_batch", c"ucm_gather", c"ucm_scatter"];

/// Threads of a block of theirs.
const THREADS: c_uint = 256;

/// The functions in use. Their result is a number: a newer driver may return one that the bindings
/// do not have.
macro_rules! driver_calls {
    ($($name:ident($($type:ty),*);)*) => {
        functions! {
            Calls { $($name($($type),*) -> c_uint;)* }
        }

        // Checks that the types above are those of the bindings.
        $(const _: unsafe fn($($type),*) -> CUresult = sys::$name;)*
    };
}

driver_calls! {
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxPushCurrent_v2(CUcontext);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDriverGetVersion(*mut c_int);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
    cuEventQuery(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuInit(c_uint);
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
    );
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy_v2(CUstream);
    cuStreamQuery(CUstream);
    cuStreamSynchronize(CUstream);
    cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
}

functions! {
    /// The function that returns the name of an error.
    Names {
        cuGetErrorName(c_uint, *mut *const c_char) -> c_uint;
    }
}

const SUCCESS: c_uint = CUresult::CUDA_SUCCESS as c_uint;
const INVALID_VALUE: c_uint = CUresult::CUDA_ERROR_INVALID_VALUE as c_uint;
const OUT_OF_MEMORY: c_uint = CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_uint;
/// In a process forked from one that had initialised the driver.
const NOT_INITIALIZED: c_uint = CUresult::CUDA_ERROR_NOT_INITIALIZED as c_uint;
/// From a driver without a GPU, and from the stub for linking.
const NO_DEVICE: [c_uint; 2] = [
    CUresult::CUDA_ERROR_NO_DEVICE as c_uint,
    CUresult::CUDA_ERROR_STUB_LIBRARY as c_uint,
];
const NOT_READY: c_uint = CUresult::CUDA_ERROR_NOT_READY as c_uint;

/// The driver's library.
struct Driver {
    calls: Calls,
    names: Names,
}

/// Calls the driver and checks the result; the call is made in the caller's `unsafe`.
macro_rules! call {
    ($driver:expr, $call:ident($($argument:expr),* $(,)?)) => {
        $driver.check(stringify!($call), ($driver.calls.$call)($($argument),*))
    };
}

impl Driver {
    /// The driver of this process, loaded and initialised once; looked for again if that failed.
    fn get() -> Result<&'static Self> {
        static LOADED: OnceLock<Driver> = OnceLock::new();
        let driver = match LOADED.get() {
            Some(driver) => driver,
            None => Self::load().map(|driver| LOADED.get_or_init(|| driver))?,
        };
        library::check_begun()?;
        Ok(driver)
    }

    fn load() -> Result<Self> {
        let library = library::find(VENDOR, &LIBRARY)?;
        let driver = Self {
            calls: Calls::load(&library, VENDOR, "")?,
            names: Names::load(&library, VENDOR, "")?,
        };
        library::check_begun()?;
        // SAFETY: the first call, as the driver requires.
        let answer = unsafe { (driver.calls.cuInit)(0) };
        if answer == NOT_INITIALIZED {
            // Torch or another library had initialised it before the fork.
            return Err(Error::new(ErrorKind::Forked, library::FORKED));
        }
        driver.check("cuInit", answer)?;
        library::begun()?;
        Ok(driver)
    }

    /// Interprets the result of a query whether work has ended.
    fn is_done(&self, call: &'static str, answer: c_uint) -> Answer<bool> {
        if answer == NOT_READY {
            return Ok(false);
        }
        self.check(call, answer).map(|()| true)
    }

    /// An error if a call failed.
    fn check(&self, call: &'static str, answer: c_uint) -> Answer {
        if answer == SUCCESS {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the call writes one pointer, to a string that lives as long as the library.
        let named = unsafe { (self.names.cuGetErrorName)(answer, &raw mut name) };
        let name = if named == SUCCESS && !name.is_null() {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        } else {
            format!("error {answer}")
        };
        let kind = match answer {
            OUT_OF_MEMORY => ErrorKind::NoSpace,
            INVALID_VALUE => ErrorKind::InvalidInput,
            none if NO_DEVICE.contains(&none) => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        let failed = Error::new(kind, "a call of the CUDA driver failed");
        Err(Failed {
            error: failed.with("call", call).with("answer", name),
            is_end: ends_context(answer),
        })
    }
}

/// A device of CUDA.
pub(super) struct Cuda {
    driver: &'static Driver,
    device: CUdevice,
    context: CUcontext,
    description: String,
    /// NUMA node of the nearest memory.
    node: Option<u32>,
    /// The process that made it; the driver does not survive a fork.
    origin: Origin,
    kernels: Option<Kernels>,
}

/// The loaded kernels, in the order of [`Kernel`].
struct Kernels {
    module: CUmodule,
    functions: [CUfunction; 3],
}

// SAFETY: handles of the driver, which any thread may use; `bind` sets the state of the thread.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// Device number `ordinal`; `Unsupported` without a driver, `Config` if there is no such
    /// device.
    pub(super) fn open(ordinal: u32) -> Result<Self> {
        let driver = Driver::get()?;
        let (mut count, mut device, mut version): (c_int, _, c_int) = (0, 0, 0);
        let (mut name, mut pci) = ([0 as c_char; 128], [0 as c_char; 32]);
        let mut context = null_mut();
        // SAFETY: writes one number.
        unsafe { call!(driver, cuDeviceGetCount(&raw mut count)) }?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(library::no_device(VENDOR, ordinal, count));
        }
        let (name_len, pci_len) = (name.len() as c_int - 1, pci.len() as c_int - 1);
        // SAFETY: each call writes one number, or at most the given number of bytes of a name with
        // its end.
        let placed = unsafe {
            call!(driver, cuDeviceGet(&raw mut device, ordinal as c_int))?;
            call!(driver, cuDeviceGetName(name.as_mut_ptr(), name_len, device))?;
            call!(driver, cuDriverGetVersion(&raw mut version))?;
            call!(driver, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            call!(
                driver,
                cuDeviceGetPCIBusId(pci.as_mut_ptr(), pci_len, device)
            )
        };
        // SAFETY: the last byte is still zero.
        let pci = unsafe { CStr::from_ptr(pci.as_ptr()) }.to_string_lossy();
        // SAFETY: the last byte is still zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
        let mut cuda = Self {
            driver,
            device,
            context,
            description: format!(
                "{name}, CUDA driver {}.{}",
                version / 1000,
                version % 1000 / 10
            ),
            node: placed.ok().and_then(|()| numa::node_of(&pci)),
            origin: Origin::this()?,
            kernels: None,
        };
        cuda.kernels = cuda
            .load_kernels()
            .inspect_err(
                |error| warn!(%error, "the copy kernels cannot be used: small copies are slow"),
            )
            .ok();
        Ok(cuda)
    }

    fn load_kernels(&self) -> Result<Kernels> {
        let _bound = self.bind()?;
        let (driver, text, mut module) = (self.driver, PTX.as_ptr().cast(), null_mut());
        // SAFETY: the text ends with a zero and is read during the call.
        unsafe { call!(driver, cuModuleLoadData(&raw mut module, text)) }?;
        let mut functions = [null_mut(); 3];
        for (function, name) in functions.iter_mut().zip(KERNELS.map(CStr::as_ptr)) {
            // SAFETY: the module has just been loaded, and the name ends with a zero.
            let found = unsafe { call!(driver, cuModuleGetFunction(function, module, name)) };
            if let Err(failed) = found {
                // SAFETY: just loaded, and nothing uses it. A failure cannot be handled here.
                let _ = unsafe { call!(driver, cuModuleUnload(module)) };
                return Err(failed.into());
            }
        }
        Ok(Kernels { module, functions })
    }

    /// Until the returned guard is dropped, the device is current on this thread, and calls of this
    /// thread do not disturb a graph capture of another thread.
    fn bind(&self) -> Answer<Bound> {
        self.origin
            .check(library::FORKED)
            .map_err(Failed::of_parent)?;
        let driver = self.driver;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges one number.
        unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        let mut bound = Bound {
            driver,
            mode,
            is_pushed: false,
        };
        // SAFETY: the context is ours until `drop`.
        unsafe { call!(driver, cuCtxPushCurrent_v2(self.context)) }?;
        bound.is_pushed = true;
        Ok(bound)
    }
}

/// On drop, the thread's previous context (or none) is current again, because torch uses the device
/// of the current context.
#[must_use]
struct Bound {
    driver: &'static Driver,
    /// The thread's previous capture mode.
    mode: CUstreamCaptureMode,
    is_pushed: bool,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let (driver, mode, mut ours) = (self.driver, &raw mut self.mode, null_mut());
        // SAFETY: undoes `bind`. A failure cannot be handled here.
        unsafe {
            if self.is_pushed {
                let _ = call!(driver, cuCtxPopCurrent_v2(&raw mut ours));
            }
            let _ = call!(driver, cuThreadExchangeStreamCaptureMode(mode));
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let Ok(_bound) = insist(|| self.bind()) {
            if let Some(kernels) = &self.kernels {
                // SAFETY: loaded in `open`; all work of its kernels has ended. A failure cannot be
                // handled here.
                let _ = unsafe { call!(self.driver, cuModuleUnload(kernels.module)) };
            }
            // SAFETY: retained in `open`; nothing of ours uses it any more. A failure cannot be
            // handled here.
            let _ = unsafe { call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device)) };
        }
    }
}

impl Runtime for Cuda {
    fn description(&self) -> &str {
        &self.description
    }

    fn node(&self) -> Option<u32> {
        self.node
    }

    fn make_stream(&self) -> Answer<RawStream> {
        let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
        let apart = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        let (driver, made) = (self.driver, &raw mut stream);
        let (low, high) = (&raw mut least, &raw mut greatest);
        let _bound = self.bind()?;
        // SAFETY: the calls write two numbers and one handle.
        unsafe {
            call!(driver, cuCtxGetStreamPriorityRange(low, high))?;
            call!(driver, cuStreamCreateWithPriority(made, apart, greatest))?;
        }
        Ok(RawStream(stream.expose_provenance() as u64))
    }

    fn synchronize(&self, stream: RawStream) -> Answer {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours, or the default one.
        unsafe { call!(self.driver, cuStreamSynchronize(stream.raw())) }
    }

    fn is_over(&self, stream: RawStream) -> Answer<bool> {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours, or the default one.
        let answer = unsafe { (self.driver.calls.cuStreamQuery)(stream.raw()) };
        self.driver.is_done("cuStreamQuery", answer)
    }

    fn make_event(&self) -> Answer<RawEvent> {
        let _bound = self.bind()?;
        let mut event: CUevent = null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self.driver, cuEventCreate(&raw mut event, 0)) }?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Answer {
        let _bound = self.bind()?;
        // SAFETY: an event and a stream of ours.
        unsafe { call!(self.driver, cuEventRecord(event.raw(), stream.raw())) }
    }

    fn is_done(&self, event: RawEvent) -> Answer<bool> {
        let _bound = self.bind()?;
        // SAFETY: an event of ours, or one whose maker keeps it while it is polled.
        let answer = unsafe { (self.driver.calls.cuEventQuery)(event.raw()) };
        self.driver.is_done("cuEventQuery", answer)
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Answer<f32> {
        let _bound = self.bind()?;
        let (mut elapsed, from, to) = (0.0, from.raw(), to.raw());
        // SAFETY: two events of ours; writes one number.
        unsafe { call!(self.driver, cuEventElapsedTime(&raw mut elapsed, from, to)) }?;
        Ok(elapsed)
    }

    fn allocate(&self, bytes: usize) -> Answer<u64> {
        let _bound = self.bind()?;
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { call!(self.driver, cuMemAlloc_v2(&raw mut address, bytes)) }?;
        Ok(address)
    }

    fn allocation(&self, address: u64) -> Option<Range<u64>> {
        let _bound = self.bind().ok()?;
        let (mut first, mut len) = (0, 0);
        let (driver, first_at, len_at) = (self.driver, &raw mut first, &raw mut len);
        // SAFETY: writes an address and a number.
        let found = unsafe { call!(driver, cuMemGetAddressRange_v2(first_at, len_at, address)) };
        found.ok()?;
        Some(first..first.checked_add(len as u64)?)
    }

    unsafe fn copy(&self, copy: RawCopy, stream: Option<RawStream>) -> Answer {
        let RawCopy { way, to, from, len } = copy;
        let (driver, on) = (self.driver, stream.map_or(null_mut(), RawStream::raw));
        let (host_to, host_from) = (pointer(to), pointer::<c_void>(from));
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for both ranges until the stream's work is over.
        unsafe {
            match (way, stream) {
                (Direction::ToDevice, None) => call!(driver, cuMemcpyHtoD_v2(to, host_from, len)),
                (Direction::ToHost, None) => call!(driver, cuMemcpyDtoH_v2(host_to, from, len)),
                (Direction::ToDevice, _) => {
                    call!(driver, cuMemcpyHtoDAsync_v2(to, host_from, len, on))
                }
                (Direction::ToHost, _) => {
                    call!(driver, cuMemcpyDtoHAsync_v2(host_to, from, len, on))
                }
            }
        }
    }

    unsafe fn register(&self, start: *mut u8, len: usize) -> Answer<Option<u64>> {
        let _bound = self.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let (driver, start, mut address) = (self.driver, start.cast(), 0);
        // SAFETY: the caller vouches for the range.
        unsafe { call!(driver, cuMemHostRegister_v2(start, len, flags)) }?;
        let found = &raw mut address;
        // SAFETY: just registered; writes one address.
        let mapped = unsafe { call!(driver, cuMemHostGetDevicePointer_v2(found, start, 0)) };
        Ok(mapped.is_ok().then_some(address))
    }

    fn end(&self, owned: Owned) -> Answer {
        let _bound = insist(|| self.bind())?;
        // SAFETY: made or registered above, and the caller says that nothing uses it any more.
        unsafe {
            match owned {
                Owned::Stream(stream) => call!(self.driver, cuStreamDestroy_v2(stream.raw())),
                Owned::Event(event) => call!(self.driver, cuEventDestroy_v2(event.raw())),
                Owned::Memory(address) => call!(self.driver, cuMemFree_v2(address)),
                Owned::Pinned(start) => call!(self.driver, cuMemHostUnregister(start.cast())),
            }
        }
    }

    fn has_kernels(&self) -> bool {
        self.kernels.is_some()
    }

    unsafe fn launch(
        &self,
        kernel: Kernel,
        mut descriptors: u64,
        mut count: u64,
        mut base: u64,
        [x, y]: [u32; 2],
        stream: RawStream,
    ) -> Answer {
        let Some(kernels) = &self.kernels else {
            return Err(Error::internal(NO_KERNELS).into());
        };
        let _bound = self.bind()?;
        let words = [&raw mut descriptors, &raw mut count, &raw mut base];
        let mut words = words.map(<*mut u64>::cast::<c_void>);
        let (kernel, on) = (kernels.functions[kernel as usize], stream.raw());
        let (words, none) = (words.as_mut_ptr(), null_mut());
        // SAFETY: the function is that of a loaded module, which takes two or three words; the
        // driver reads them during the call. The caller vouches for the ranges that they name.
        unsafe {
            call!(
                self.driver,
                cuLaunchKernel(kernel, x, y, 1, THREADS, 1, 1, 0, on, words, none)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::library::tests::stub;

    #[test]
    fn a_function_that_is_missing_is_named() {
        for missing in Calls::NAMES.iter().step_by(9) {
            let there = Calls::NAMES.iter().copied().filter(|name| name != missing);
            let (_directory, library) = stub("", there);
            let error = Calls::load(&library, VENDOR, "").err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let text = error.to_string();
            assert!(text.contains(&format!("function={missing}")), "{text}");
        }
        let (_directory, whole) = stub("", Calls::NAMES.iter().copied());
        assert!(Calls::load(&whole, VENDOR, "").is_ok());
        let unnamed = Names::load(&whole, VENDOR, "").err().unwrap().to_string();
        assert!(unnamed.contains(Names::NAMES[0]), "{unnamed}");
    }
}
