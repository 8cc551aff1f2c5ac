//! The driver under the names of other vendors' runtimes: their kinds of copies, results and rules
//! over the same core.
#![allow(unsafe_code, reason = "the vendors' C ABI")]
#![allow(non_snake_case, non_upper_case_globals, reason = "the vendors' names")]

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::call::{self, Export, abort, exports};
use crate::device::{self, put};
use crate::error::{
    self, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_READY, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_SUCCESS, CUresult, Outcome,
};
use crate::memory::PORTABLE;
use crate::state::{Handle, Locked, State};
use crate::stream::NON_BLOCKING;
use crate::{context, copy, event, exports as driver, memory, stream};

/// Kinds of copies, the same of all vendors here.
const TO_DEVICE: i32 = 1;
const TO_HOST: i32 = 2;
const ON_DEVICE: i32 = 3;

/// "Not ready", as MUSA may return it.
const MUSA_NOT_READY: CUresult = 34;

/// The reported versions of the runtimes.
const VERSION: i32 = 50_221_153;
const ACL_VERSION: [i32; 3] = [1, 17, 0];

const ACL_REPEAT_INITIALIZE: CUresult = 100_002;
const ACL_UNINITIALIZE: CUresult = 100_001;
const ACL_PARAM_INVALID: CUresult = 107_000;
const ACL_CONTEXT_NULL: CUresult = 107_002;
const ACL_CAPTURE_MODE_NOT_SUPPORT: CUresult = 107_030;
const ACL_MEMORY_ALLOCATION: CUresult = 207_001;
const ACL_INTERNAL: CUresult = 507_000;
const ACL_HOST_MEMORY_ALREADY_REGISTERED: CUresult = 507_910;

const ACL_LEAST_PRIORITY: u32 = 7;
/// The highest priority of streams of the runtimes shaped as CUDA's.
const GREATEST_PRIORITY: i32 = -1;
const ACL_STREAM_FAST: u32 = 3;
const ACL_EVENT_TIME_LINE: u32 = 8;
const ACL_EVENT_FLAGS: u32 = 1 | 2 | ACL_EVENT_TIME_LINE;
const ACL_HOST_MAPPED: u32 = 2;
const ACL_HOST_PINNED: u32 = 0x1000_0000;
const ACL_ALIGNED: u64 = 64;
const ACL_HOST_ALIGNED: usize = 4096;

static ACL_INITIALIZED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The last error of a runtime that is shaped as CUDA's.
    static LAST: Cell<CUresult> = const { Cell::new(CUDA_SUCCESS) };
}

/// A function of a runtime shaped as CUDA's under the names of its vendors.
macro_rules! vendors {
    ($names:ident: $($needs:ident [$($name:ident)*] $arguments:tt $with:tt => $does:expr;)*) => {
        exports! { $names: $($($needs $name $arguments $with => $does;)*)* }
    };
}

vendors! {
    VENDOR_NAMES:
    process [hipGetDeviceCount musaGetDeviceCount mcGetDeviceCount] (count: *mut i32) [_state] =>
        put(count, device::DEVICES as i32);
    process [hipRuntimeGetVersion musaRuntimeGetVersion mcRuntimeGetVersion] (version: *mut i32) [_state] =>
        put(version, VERSION);
    process [hipSetDevice musaSetDevice mcSetDevice] (device: i32) [state] => set_device(state, device).map(drop);
    process [hipGetDevice musaGetDevice mcGetDevice] (device: *mut i32) [state] =>
        put(device, context::device_of(state, context::top()?).unwrap_or(0));
    last [hipGetLastError musaGetLastError mcGetLastError] () [] => LAST.take();
    current [hipDeviceSynchronize musaDeviceSynchronize mcDeviceSynchronize] () [_state, _current] =>
        abort("a synchronization of the device waits for all work on it");
    current [hipDeviceReset musaDeviceReset mcDeviceReset] () [_state, _current] =>
        abort("a reset of the device ends all work on it");
    current [
        hipDeviceGetStreamPriorityRange musaDeviceGetStreamPriorityRange mcDeviceGetStreamPriorityRange
    ] (least: *mut i32, greatest: *mut i32) [_state, _current] => put(least, 1).and(put(greatest, GREATEST_PRIORITY));

    current [hipStreamCreateWithPriority musaStreamCreateWithPriority mcStreamCreateWithPriority]
    (stream: *mut Handle, flags: u32, priority: i32) [state, current] =>
        put(stream, stream::create(state, current, flags, priority == GREATEST_PRIORITY)?);
    current [hipStreamDestroy musaStreamDestroy mcStreamDestroy] (stream: Handle) [state, current] =>
        stream::destroy(state, current, stream);
    current [hipStreamSynchronize musaStreamSynchronize mcStreamSynchronize] (stream: Handle) [state, current] =>
        stream::synchronize(state, current, stream);
    current [hipStreamQuery mcStreamQuery] (stream: Handle) [state, current] => stream::query(state, current, stream);
    current [musaStreamQuery] (stream: Handle) [state, current] =>
        stream::query(state, current, stream).map_err(of_musa);
    process [hipThreadExchangeStreamCaptureMode musaThreadExchangeStreamCaptureMode mcThreadExchangeStreamCaptureMode]
    (mode: *mut u32) [_state] => driver::exchange_mode(mode);

    current [hipEventCreateWithFlags musaEventCreateWithFlags mcEventCreateWithFlags]
    (event: *mut Handle, flags: u32) [state, current] => put(event, event::create(state, current, flags)?);
    current [hipEventDestroy musaEventDestroy mcEventDestroy] (event: Handle) [state, current] =>
        event::destroy(state, current, event);
    current [hipEventRecord musaEventRecord mcEventRecord] (event: Handle, stream: Handle) [state, current] =>
        event::record(state, current, event, stream);
    current [hipEventQuery mcEventQuery] (event: Handle) [state, current] => event::query(state, current, event);
    current [musaEventQuery] (event: Handle) [state, current] =>
        event::query(state, current, event).map_err(of_musa);
    current [hipEventElapsedTime musaEventElapsedTime mcEventElapsedTime]
    (ms: *mut f32, start: Handle, end: Handle) [state, current] =>
        put(ms, event::elapsed(state, current, start, end)?);

    current [hipMalloc musaMalloc mcMalloc] (address: *mut u64, len: usize) [state, current] =>
        put(address, memory::alloc(state, current, len)?);
    current [hipFree musaFree mcFree] (address: u64) [state, _current] => memory::free(state, address);
    current [hipMemGetAddressRange mcMemGetAddressRange]
    (first: *mut u64, len: *mut usize, address: u64) [state, _current] => {
        let range = memory::range(state, address)?;
        put(first, range.0).and(put(len, range.1))
    };
    current [hipHostRegister musaHostRegister mcHostRegister]
    (address: usize, len: usize, flags: u32) [state, current] =>
        memory::register(state, current, address, len, flags);
    current [hipHostUnregister musaHostUnregister mcHostUnregister] (address: usize) [state, _current] =>
        memory::unregister(state, address);
    current [hipMemcpyAsync musaMemcpyAsync mcMemcpyAsync]
    (to: u64, from: u64, len: usize, kind: i32, stream: Handle) [state, current] =>
        copy_by_kind(state, current, to, from, len, kind, stream);

    current [hipMemcpy musaMemcpy mcMemcpy] (to: u64, from: u64, len: usize, kind: i32) [state, current] =>
        copy_now_by_kind(state, current, to, from, len, kind);
    process [hipDeviceGetPCIBusId musaDeviceGetPCIBusId mcDeviceGetPCIBusId]
    (text: *mut c_char, len: i32, device: i32) [_state] => device::bus_id(text, len, device);

    acl_first [aclInit] (config: *const c_char) [state] => acl_init(state, config);
    acl [aclrtGetDeviceCount] (count: *mut u32) [_state] => put(count, device::DEVICES as u32);
    acl [aclrtGetVersion] (major: *mut i32, minor: *mut i32, patch: *mut i32) [_state] =>
        put(major, ACL_VERSION[0]).and(put(minor, ACL_VERSION[1])).and(put(patch, ACL_VERSION[2]));
    acl [aclrtSetDevice] (device: i32) [state] => set_device(state, device).map(drop);
    acl_current [aclrtGetCurrentContext] (context: *mut Handle) [_state, current] => put(context, current);
    acl [aclrtSetCurrentContext] (context: Handle) [state] =>
        if context == 0 { Err(ACL_PARAM_INVALID) } else { context::set_current(state, context) };
    acl [aclrtCreateContext] (context: *mut Handle, device: i32) [state] =>
        put(context, context::create(state, device)?);
    acl [aclmdlRICaptureThreadExchangeMode] (mode: *mut u32) [_state] => driver::exchange_mode(mode);
    acl_current [aclrtGetDevice] (device: *mut i32) [state, current] =>
        put(device, context::device_of(state, current).unwrap_or(0));
    acl_current [aclrtSynchronizeDevice] () [_state, _current] =>
        abort("aclrtSynchronizeDevice waits for all work on the device");
    acl_current [aclrtResetDevice] (_device: i32) [_state, _current] =>
        abort("aclrtResetDevice ends all work on the device");
    acl_current [aclrtCreateStreamWithConfig] (stream: *mut Handle, priority: u32, flags: u32) [state, current] =>
        if priority > ACL_LEAST_PRIORITY || flags & !ACL_STREAM_FAST != 0 {
            Err(ACL_PARAM_INVALID)
        } else {
            put(stream, stream::create(state, current, NON_BLOCKING, priority == 0)?)
        };
    acl_current [aclrtDestroyStream] (stream: Handle) [state, current] => stream::destroy(state, current, stream);
    acl_current [aclrtSynchronizeStream] (stream: Handle) [state, current] =>
        stream::synchronize(state, current, stream);
    acl_current [aclrtStreamQuery] (stream: Handle, status: *mut i32) [state, current] =>
        match stream::query(state, current, stream) {
            Ok(()) => put(status, 0),
            Err(CUDA_ERROR_NOT_READY) => put(status, 1),
            Err(other) => Err(other),
        };
    acl_current [aclrtCreateEventWithFlag] (event: *mut Handle, flags: u32) [state, current] =>
        put(event, acl_event(state, current, flags)?);
    acl_current [aclrtDestroyEvent] (event: Handle) [state, current] => event::destroy(state, current, event);
    acl_current [aclrtRecordEvent] (event: Handle, stream: Handle) [state, current] =>
        event::record(state, current, event, stream);
    acl_current [aclrtQueryEventStatus] (event: Handle, status: *mut i32) [state, current] =>
        put(status, acl_is_done(state, current, event)?.into());
    acl_current [aclrtEventElapsedTime] (ms: *mut f32, start: Handle, end: Handle) [state, current] =>
        put(ms, event::elapsed(state, current, start, end)?);
    acl_current [aclrtMalloc] (address: *mut u64, len: usize, _policy: i32) [state, current] =>
        put(address, memory::alloc(state, current, len)?);
    acl_current [aclrtFree] (address: u64) [state, _current] => memory::free(state, address);
    acl_current [aclrtHostRegisterV2] (address: usize, len: u64, flags: u32) [state, current] =>
        if flags & !(ACL_HOST_MAPPED | ACL_HOST_PINNED) != 0
            || flags & ACL_HOST_PINNED == 0
            || !address.is_multiple_of(ACL_HOST_ALIGNED)
        {
            Err(ACL_PARAM_INVALID)
        } else {
            memory::register(state, current, address, len as usize, PORTABLE)
        };
    acl_current [aclrtHostUnregister] (address: usize) [state, _current] => memory::unregister(state, address);
    acl_current [aclrtMemcpyAsync]
    (to: u64, room: usize, from: u64, len: usize, kind: i32, stream: Handle) [state, current] =>
        if len > room || kind == ON_DEVICE && !(to.is_multiple_of(ACL_ALIGNED) && from.is_multiple_of(ACL_ALIGNED)) {
            Err(ACL_PARAM_INVALID)
        } else {
            copy_by_kind(state, current, to, from, len, kind, stream)
        };
    acl_current [aclrtMemcpy] (to: u64, room: usize, from: u64, len: usize, kind: i32) [state, current] =>
        if len > room {
            Err(ACL_PARAM_INVALID)
        } else {
            copy_now_by_kind(state, current, to, from, len, kind)
        };
}

/// Functions that name an answer, where there is one: as `cuGetErrorName` does.
macro_rules! error_names {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`, as its vendor's.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(code: CUresult) -> *const c_char {
                error::name(code).map_or(null(), CStr::as_ptr)
            }
        )*
    };
}

error_names!(hipGetErrorName musaGetErrorName mcGetErrorName);

/// `aclrtGetSocName`: the chip.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    c"SoftAscend".as_ptr()
}

/// A result as MUSA may return it.
fn of_musa(code: CUresult) -> CUresult {
    match code {
        CUDA_ERROR_NOT_READY => MUSA_NOT_READY,
        other => other,
    }
}

/// A call of a runtime shaped as CUDA's, which initializes itself at the first one.
fn process(export: &'static Export, act: impl FnOnce(&mut Locked) -> Outcome) -> CUresult {
    let code = call::before_init(export, |state| {
        if !state.initialized {
            driver::init(state, 0)?;
        }
        act(state)
    });
    if code != CUDA_SUCCESS {
        LAST.set(code);
    }
    code
}

/// One that needs a device: a thread that set none has the first.
fn current(export: &'static Export, act: impl FnOnce(&mut Locked, Handle) -> Outcome) -> CUresult {
    process(export, |state| {
        let current = match context::top()? {
            0 => set_device(state, 0)?,
            _ => context::current(state)?,
        };
        state.clock.call(false);
        act(state, current)
    })
}

/// The query of the thread's last error.
fn last(export: &'static Export, act: impl FnOnce() -> CUresult) -> CUresult {
    call::anywhere(export, || match act() {
        CUDA_SUCCESS => Ok(()),
        code => Err(code),
    })
}

/// `aclInit`, in ACL's answers.
fn acl_first(export: &'static Export, act: impl FnOnce(&mut Locked) -> Outcome) -> CUresult {
    acl_code(call::before_init(export, act))
}

/// A call after `aclInit`, with ACL's results.
fn acl(export: &'static Export, act: impl FnOnce(&mut Locked) -> Outcome) -> CUresult {
    acl_first(export, |state| {
        if !ACL_INITIALIZED.load(Ordering::Relaxed) {
            return Err(ACL_UNINITIALIZE);
        }
        act(state)
    })
}

/// One that needs a device, which the thread must have set.
fn acl_current(
    export: &'static Export,
    act: impl FnOnce(&mut Locked, Handle) -> Outcome,
) -> CUresult {
    acl(export, |state| {
        let current = context::current(state)?;
        state.clock.call(false);
        act(state, current)
    })
}

fn acl_code(code: CUresult) -> CUresult {
    match code {
        CUDA_SUCCESS => CUDA_SUCCESS,
        CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_INVALID_HANDLE => ACL_PARAM_INVALID,
        CUDA_ERROR_OUT_OF_MEMORY => ACL_MEMORY_ALLOCATION,
        CUDA_ERROR_NOT_INITIALIZED => ACL_UNINITIALIZE,
        CUDA_ERROR_INVALID_CONTEXT | CUDA_ERROR_CONTEXT_IS_DESTROYED => ACL_CONTEXT_NULL,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => ACL_CAPTURE_MODE_NOT_SUPPORT,
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => ACL_HOST_MEMORY_ALREADY_REGISTERED,
        own if own >= ACL_UNINITIALIZE => own,
        _ => ACL_INTERNAL,
    }
}

/// Sets the thread's device. Its primary context is kept for the life of the process.
fn set_device(state: &mut State, device: i32) -> Outcome<Handle> {
    let context = context::retain(state, device)?;
    context::set_current(state, context)?;
    Ok(context)
}

/// A copy whose ends match its kind; host-to-host and automatic kinds do not exist.
///
/// # Safety
/// As for the copies of [`copy`].
unsafe fn copy_by_kind(
    state: &mut Locked,
    context: Handle,
    to: u64,
    from: u64,
    len: usize,
    kind: i32,
    stream: Handle,
) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            TO_DEVICE => copy::to_device(state, context, to, from as usize, len, stream),
            TO_HOST => copy::to_host(state, context, to as usize, from, len, stream),
            ON_DEVICE => copy::on_device(state, context, to, from, len, stream),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// The same, over when it returns.
///
/// # Safety
/// As for the copies of [`copy`].
unsafe fn copy_now_by_kind(
    state: &mut Locked,
    context: Handle,
    to: u64,
    from: u64,
    len: usize,
    kind: i32,
) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            TO_DEVICE => copy::to_device_now(state, context, to, from as usize, len),
            TO_HOST => copy::to_host_now(state, context, to as usize, from, len),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

fn acl_init(state: &mut State, config: *const c_char) -> Outcome {
    if !config.is_null() {
        return Err(ACL_PARAM_INVALID);
    }
    if ACL_INITIALIZED.swap(true, Ordering::Relaxed) {
        return Err(ACL_REPEAT_INITIALIZE);
    }
    driver::init(state, 0)
}

/// An event has a timestamp if requested.
fn acl_event(state: &mut State, context: Handle, flags: u32) -> Outcome<Handle> {
    if flags == 0 || flags & !ACL_EVENT_FLAGS != 0 {
        return Err(ACL_PARAM_INVALID);
    }
    let flags = if flags & ACL_EVENT_TIME_LINE == 0 {
        event::DISABLE_TIMING
    } else {
        0
    };
    event::create(state, context, flags)
}

/// An event that was never recorded is not done.
fn acl_is_done(state: &mut State, context: Handle, event: Handle) -> Outcome<bool> {
    if !event::is_recorded(state, context, event)? {
        return Ok(false);
    }
    match event::query(state, context, event) {
        Err(CUDA_ERROR_NOT_READY) => Ok(false),
        done => done.map(|()| true),
    }
}
