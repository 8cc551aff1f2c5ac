//! CUDA's driver, found at run time. The primary context is torch's own, so streams and events of both may be mixed.
#![allow(unsafe_code, reason = "calls into the driver's library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};

use super::library;
use super::runtime::{Kernel, RawEvent, RawStream, Runtime};
use crate::numa;

/// The copy kernels, for every driver from 450 on: `tools/ptx.py` makes them from `kernels/copy.cu`.
const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/copy.ptx")),
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

/// What we call. A driver that lacks one of them is none for us: the bindings would panic at its first use.
const NEEDED: [&str; 36] = [
    "cuCtxGetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuGetErrorName",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
];

/// An error where a call did not succeed.
fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: the call writes one pointer, to a string that lives as long as the library.
    let named = unsafe { sys::cuGetErrorName(result, &raw mut name) };
    let name = if named == CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        format!("error {}", result as u32)
    };
    let kind = match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::NoSpace,
        CUresult::CUDA_ERROR_INVALID_VALUE => ErrorKind::InvalidInput,
        // A driver that finds no GPU, and what stands in for one where programs are linked.
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_STUB_LIBRARY => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    };
    let failed = Error::new(kind, "a call of the CUDA driver failed");
    Err(failed.with("call", call).with("answer", name))
}

/// Calls the driver and checks the answer; the call is made in the caller's `unsafe`.
macro_rules! driver {
    ($call:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($call), sys::$call($($argument),*))
    };
}

/// Loads the library, once in a process.
fn load() -> Result<()> {
    static LOADED: OnceLock<Result<()>> = OnceLock::new();
    LOADED.get_or_init(find).clone()
}

fn find() -> Result<()> {
    library::stand_in()?; // its name is that of the driver's, so the search below meets it
    // SAFETY: loads the driver's library, as torch does.
    if !unsafe { sys::is_culib_present() } {
        let none = "no CUDA driver is installed here: libcuda.so.1 cannot be loaded";
        return Err(Error::new(ErrorKind::Unsupported, none));
    }
    // SAFETY: it is there.
    let library = unsafe { sys::culib() };
    for name in NEEDED {
        // SAFETY: the symbol is looked up and not used.
        if unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err() {
            let lacks = "the CUDA driver is too old: it lacks a function that ucm calls";
            return Err(Error::new(ErrorKind::Unsupported, lacks).with("function", name));
        }
    }
    // SAFETY: the first call, as the driver wants it.
    unsafe { driver!(cuInit(0)) }
}

/// A device of CUDA.
pub(super) struct Cuda {
    device: sys::CUdevice,
    context: sys::CUcontext,
    description: String,
    /// Of the memory that is nearest.
    node: Option<u32>,
    /// The process that made it; the driver does not survive a fork.
    process: u32,
    kernels: Option<Kernels>,
}

/// The loaded kernels, in the order of [`Kernel`].
struct Kernels {
    module: sys::CUmodule,
    functions: [sys::CUfunction; 3],
}

// SAFETY: handles of the driver, which may be used by any thread; what depends on a thread is set by `bind`.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// Device number `ordinal`; `Unsupported` without a driver, `Config` for a number there is none of.
    pub(super) fn open(ordinal: u32) -> Result<Self> {
        load()?;
        let (mut count, mut device, mut version): (c_int, _, c_int) = (0, 0, 0);
        let (mut name, mut pci) = ([0 as c_char; 128], [0 as c_char; 32]);
        let mut context = null_mut();
        // SAFETY: writes one number.
        unsafe { driver!(cuDeviceGetCount(&raw mut count)) }?;
        if i64::from(ordinal) >= i64::from(count) {
            let none = Error::new(ErrorKind::Config, "the machine has no CUDA device of this number");
            return Err(none.with("device", ordinal).with("devices", count));
        }
        // SAFETY: each call writes one number, or at most so many bytes of a name with its end.
        unsafe {
            driver!(cuDeviceGet(&raw mut device, ordinal as c_int))?;
            driver!(cuDeviceGetName(
                name.as_mut_ptr(),
                name.len() as c_int - 1,
                device
            ))?;
            driver!(cuDriverGetVersion(&raw mut version))?;
            driver!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        // SAFETY: writes at most so many bytes of a text with its end.
        let placed = unsafe {
            driver!(cuDeviceGetPCIBusId(
                pci.as_mut_ptr(),
                pci.len() as c_int - 1,
                device
            ))
        };
        // SAFETY: the last byte is still zero.
        let pci = unsafe { CStr::from_ptr(pci.as_ptr()) }.to_string_lossy();
        // SAFETY: the last byte is still zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
        let mut cuda = Self {
            device,
            context,
            description: format!("{name}, CUDA driver {}.{}", version / 1000, version % 1000 / 10),
            node: placed.ok().and_then(|()| numa::node_of(&pci)),
            process: std::process::id(),
            kernels: None,
        };
        cuda.kernels = cuda
            .load_kernels()
            .inspect_err(|error| warn!(%error, "the copy kernels cannot be used: small copies are slow"))
            .ok();
        Ok(cuda)
    }

    fn load_kernels(&self) -> Result<Kernels> {
        let _bound = self.bind()?;
        let mut module = null_mut();
        // SAFETY: the text ends with a zero and is read during the call.
        unsafe { driver!(cuModuleLoadData(&raw mut module, PTX.as_ptr().cast())) }?;
        let mut functions = [null_mut(); 3];
        for (function, name) in functions.iter_mut().zip(KERNELS) {
            // SAFETY: the module was loaded just now, and the name ends with a zero.
            let found = unsafe { driver!(cuModuleGetFunction(function, module, name.as_ptr())) };
            if let Err(error) = found {
                // SAFETY: loaded just now, and nothing uses it. The answer would help nobody.
                let _ = unsafe { driver!(cuModuleUnload(module)) };
                return Err(error);
            }
        }
        Ok(Kernels { module, functions })
    }

    /// Makes the device current on this thread, until what is given ends where the thread had another one.
    fn bind(&self) -> Result<Bound> {
        library::check_process(self.process)?;
        let mut current = null_mut();
        // SAFETY: writes one handle.
        unsafe { driver!(cuCtxGetCurrent(&raw mut current)) }?;
        if current == self.context {
            return Ok(Bound(false));
        }
        // SAFETY: the context is ours until `drop`.
        unsafe {
            if current.is_null() {
                driver!(cuCtxSetCurrent(self.context))?;
            } else {
                driver!(cuCtxPushCurrent_v2(self.context))?;
            }
        }
        Ok(Bound(!current.is_null()))
    }
}

/// What a thread had current is current again when this ends, if it had something: torch's threads keep their device.
#[must_use]
struct Bound(bool);

impl Drop for Bound {
    fn drop(&mut self) {
        if self.0 {
            let mut ours = null_mut();
            // SAFETY: pops what `bind` pushed. The answer would help nobody.
            let _ = unsafe { driver!(cuCtxPopCurrent_v2(&raw mut ours)) };
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let Ok(_bound) = self.bind() {
            if let Some(kernels) = &self.kernels {
                // SAFETY: loaded in `open`; what launched its kernels has ended. The answer would help nobody.
                let _ = unsafe { driver!(cuModuleUnload(kernels.module)) };
            }
            // SAFETY: retained in `open`; nothing of ours uses it any more. The answer would help nobody.
            let _ = unsafe { driver!(cuDevicePrimaryCtxRelease_v2(self.device)) };
        }
    }
}

fn stream_of(stream: RawStream) -> sys::CUstream {
    with_exposed_provenance_mut(stream.0 as usize)
}

fn event_of(event: RawEvent) -> sys::CUevent {
    with_exposed_provenance_mut(event.0 as usize)
}

impl Runtime for Cuda {
    fn description(&self) -> &str {
        &self.description
    }

    fn node(&self) -> Option<u32> {
        self.node
    }

    fn make_stream(&self) -> Result<RawStream> {
        let _bound = self.bind()?;
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        let mut stream: sys::CUstream = null_mut();
        let apart = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the calls write two numbers and one handle.
        unsafe {
            driver!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
            driver!(cuStreamCreateWithPriority(&raw mut stream, apart, greatest))?;
        }
        Ok(RawStream(stream.expose_provenance() as u64))
    }

    fn end_stream(&self, stream: RawStream) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: a stream of ours that nobody uses any more; the driver ends it after its work.
            let _ = unsafe { driver!(cuStreamDestroy_v2(stream_of(stream))) };
        }
    }

    fn synchronize(&self, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours.
        unsafe { driver!(cuStreamSynchronize(stream_of(stream))) }
    }

    fn make_event(&self) -> Result<RawEvent> {
        let _bound = self.bind()?;
        let mut event: sys::CUevent = null_mut();
        // SAFETY: writes one handle.
        unsafe { driver!(cuEventCreate(&raw mut event, 0)) }?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    fn end_event(&self, event: RawEvent) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: an event of ours that nobody uses any more.
            let _ = unsafe { driver!(cuEventDestroy_v2(event_of(event))) };
        }
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: an event and a stream of ours.
        unsafe { driver!(cuEventRecord(event_of(event), stream_of(stream))) }
    }

    fn is_done(&self, event: RawEvent) -> Result<bool> {
        let _bound = self.bind()?;
        // SAFETY: an event of ours, or one whose maker keeps it while it is asked about.
        match unsafe { sys::cuEventQuery(event_of(event)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("cuEventQuery", other).map(|()| true),
        }
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Result<f32> {
        let _bound = self.bind()?;
        let mut elapsed = 0.0;
        // SAFETY: two events of ours; writes one number.
        unsafe { driver!(cuEventElapsedTime(&raw mut elapsed, event_of(from), event_of(to))) }?;
        Ok(elapsed)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let _bound = self.bind()?;
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { driver!(cuMemAlloc_v2(&raw mut address, bytes)) }?;
        Ok(address)
    }

    fn free(&self, address: u64) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: allocated above, and the caller says that nothing uses it any more.
            let _ = unsafe { driver!(cuMemFree_v2(address)) };
        }
    }

    unsafe fn to_device(&self, to: u64, from: *const u8, len: usize, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for both ranges until the stream's work is over.
        unsafe { driver!(cuMemcpyHtoDAsync_v2(to, from.cast(), len, stream_of(stream))) }
    }

    unsafe fn to_host(&self, to: *mut u8, from: u64, len: usize, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: as above.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(to.cast(), from, len, stream_of(stream))) }
    }

    unsafe fn to_device_now(&self, to: u64, from: *const u8, len: usize) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for both ranges.
        unsafe { driver!(cuMemcpyHtoD_v2(to, from.cast(), len)) }
    }

    unsafe fn to_host_now(&self, to: *mut u8, from: u64, len: usize) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: as above.
        unsafe { driver!(cuMemcpyDtoH_v2(to.cast(), from, len)) }
    }

    unsafe fn on_device(&self, to: u64, from: u64, len: usize, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: as above.
        unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, len, stream_of(stream))) }
    }

    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<Option<u64>> {
        let _bound = self.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller vouches for the range.
        unsafe { driver!(cuMemHostRegister_v2(start.cast(), len, flags)) }?;
        let mut address = 0;
        // SAFETY: registered just now; writes one address.
        let mapped = unsafe { driver!(cuMemHostGetDevicePointer_v2(&raw mut address, start.cast(), 0)) };
        Ok(mapped.is_ok().then_some(address))
    }

    fn unregister(&self, start: *mut u8) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: registered above, and the caller says that nothing uses it any more.
            let _ = unsafe { driver!(cuMemHostUnregister(start.cast())) };
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
        grid: [u32; 2],
        stream: RawStream,
    ) -> Result<()> {
        let Some(kernels) = &self.kernels else {
            return Err(Error::internal("a kernel was begun on a device without any"));
        };
        let _bound = self.bind()?;
        let mut parameters: [*mut c_void; 3] = [
            (&raw mut descriptors).cast(),
            (&raw mut count).cast(),
            (&raw mut base).cast(),
        ];
        // SAFETY: the function is that of a loaded module, which takes two or three words; the driver reads them during the
        // call. The caller vouches for what they name.
        unsafe {
            driver!(cuLaunchKernel(
                kernels.functions[kernel as usize],
                grid[0],
                grid[1],
                1,
                THREADS,
                1,
                1,
                0,
                stream_of(stream),
                parameters.as_mut_ptr(),
                null_mut(),
            ))
        }
    }
}
