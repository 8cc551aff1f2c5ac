//! The functions that the library exports under the driver's names, each in one line;
//! [`crate::call`] has what they share.
#![allow(unsafe_code, reason = "the driver's C ABI")]
#![allow(non_snake_case, non_upper_case_globals, reason = "the driver's names")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;

use crate::call::{abort, anywhere, before_init, context, exports, initialized, process};
use crate::device::{self, put};
use crate::error::{
    self, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, CUresult,
    Outcome,
};
use crate::memory::Region;
use crate::state::{Handle, State};
use crate::stream::{HostFunction, Work};
use crate::{capture, context, copy, event, memory, module, stream};

exports! {
    NAMES:
    before_init cuInit(flags: u32) [state] => init(state, flags);
    before_init cuDriverGetVersion(version: *mut i32) [_state] => put(version, VERSION);
    anywhere cuGetErrorName(code: CUresult, text: *mut *const c_char) [] => put_text(text, error::name(code));
    anywhere cuGetErrorString(code: CUresult, text: *mut *const c_char) [] =>
        put_text(text, error::text(code));
    before_init cuGetProcAddress_v2(
        symbol: *const c_char, function: *mut *const c_void, version: i32, flags: u64, status: *mut u32,
    ) [_state] => proc_address(symbol, function, version, flags, status);

    process cuDeviceGetCount(count: *mut i32) [_state] => put(count, device::DEVICES as i32);
    process cuDeviceGet(device: *mut i32, ordinal: i32) [_state] =>
        device::index(ordinal).and_then(|_| put(device, ordinal));
    process cuDeviceGetName(name: *mut c_char, len: i32, device: i32) [_state] =>
        device::name(name, len, device);
    process cuDeviceGetPCIBusId(text: *mut c_char, len: i32, device: i32) [_state] =>
        device::bus_id(text, len, device);
    process cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) [_state] =>
        put(value, device::attribute(attribute, device)?);

    process cuDevicePrimaryCtxRetain(context: *mut Handle, device: i32) [state] =>
        put(context, context::retain(state, device)?);
    process cuDevicePrimaryCtxRelease_v2(device: i32) [state] => context::release(state, device);
    process cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) [state] =>
        put(flags, 0).and(put(active, context::is_active(state, device)?.into()));
    process cuCtxSetCurrent(context: Handle) [state] => context::set_current(state, context);
    process cuCtxGetCurrent(context: *mut Handle) [_state] => put(context, context::top()?);
    process cuCtxPushCurrent_v2(context: Handle) [state] => context::push(state, context);
    process cuCtxPopCurrent_v2(context: *mut Handle) [_state] => put(context, context::pop()?);
    context cuCtxGetDevice(device: *mut i32) [state, current] =>
        put(device, context::device_of(state, current).unwrap_or(0));
    context cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) [_state, _current] =>
        put_if(least, 0).and(put_if(greatest, GREATEST_PRIORITY));
    context cuCtxSynchronize() [_state, _current] =>
        abort("cuCtxSynchronize waits for the work of the whole context");

    context cuStreamCreate(stream: *mut Handle, flags: u32) [state, current] =>
        put(stream, stream::create(state, current, flags, false)?);
    context cuStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: i32) [state, current] =>
        put(stream, stream::create(state, current, flags, priority == GREATEST_PRIORITY)?);
    context cuStreamDestroy_v2(stream: Handle) [state, current] => stream::destroy(state, current, stream);
    context cuStreamSynchronize(stream: Handle) [state, current] =>
        stream::synchronize(state, current, stream);
    context cuStreamBeginCapture_v2(stream: Handle, mode: u32) [state, current] =>
        capture::begin(state, current, stream, mode);
    context cuStreamEndCapture(stream: Handle, graph: *mut Handle) [state, current] =>
        put(graph, capture::end(state, current, stream)?);
    process cuThreadExchangeStreamCaptureMode(mode: *mut u32) [_state] => exchange_mode(mode);
    context cuStreamQuery(stream: Handle) [state, current] => stream::query(state, current, stream);
    context cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) [state, current] =>
        event::stream_wait(state, current, stream, event, flags);
    context cuLaunchHostFunc(stream: Handle, function: Option<HostFunction>, data: *mut c_void) [state, current] =>
        host_function(state, current, stream, function, data);

    context cuEventCreate(event: *mut Handle, flags: u32) [state, current] =>
        put(event, event::create(state, current, flags)?);
    context cuEventDestroy_v2(event: Handle) [state, current] => event::destroy(state, current, event);
    context cuEventRecord(event: Handle, stream: Handle) [state, current] =>
        event::record(state, current, event, stream);
    context cuEventQuery(event: Handle) [state, current] => event::query(state, current, event);
    context cuEventSynchronize(event: Handle) [state, current] => event::synchronize(state, current, event);
    context cuEventElapsedTime(ms: *mut f32, start: Handle, end: Handle) [state, current] =>
        put(ms, event::elapsed(state, current, start, end)?);
    context cuEventElapsedTime_v2(ms: *mut f32, start: Handle, end: Handle) [state, current] =>
        put(ms, event::elapsed(state, current, start, end)?);

    context cuMemAlloc_v2(address: *mut u64, len: usize) [state, current] =>
        put(address, memory::alloc(state, current, len)?);
    context cuMemFree_v2(address: u64) [state, _current] => memory::free(state, address);
    context cuMemGetAddressRange_v2(first: *mut u64, len: *mut usize, address: u64) [state, _current] => {
        let range = memory::range(state, address)?;
        put(first, range.0).and(put(len, range.1))
    };
    context cuMemHostAlloc(address: *mut usize, len: usize, flags: u32) [state, current] =>
        put(address, memory::host_alloc(state, current, len, flags)?);
    context cuMemFreeHost(address: usize) [state, _current] => memory::host_free(state, address);
    context cuMemHostRegister_v2(address: usize, len: usize, flags: u32) [state, current] =>
        memory::register(state, current, address, len, flags);
    context cuMemHostUnregister(address: usize) [state, _current] => memory::unregister(state, address);
    context cuMemHostGetDevicePointer_v2(device: *mut u64, address: usize, flags: u32) [state, current] =>
        put(device, memory::device_pointer(state, current, address, flags)?);
    process cuPointerGetAttribute(value: *mut c_void, attribute: u32, address: u64) [state] =>
        pointer_attribute(state, value, attribute, address);

    context cuMemcpyHtoDAsync_v2(to: u64, from: usize, len: usize, stream: Handle) [state, current] =>
        copy::to_device(state, current, to, from, len, stream);
    context cuMemcpyDtoHAsync_v2(to: usize, from: u64, len: usize, stream: Handle) [state, current] =>
        copy::to_host(state, current, to, from, len, stream);
    context cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: Handle) [state, current] =>
        copy::on_device(state, current, to, from, len, stream);
    context cuMemcpyHtoD_v2(to: u64, from: usize, len: usize) [state, current] =>
        copy::to_device_now(state, current, to, from, len);
    context cuMemcpyDtoH_v2(to: usize, from: u64, len: usize) [state, current] =>
        copy::to_host_now(state, current, to, from, len);
    context cuMemsetD8Async(to: u64, value: u8, len: usize, stream: Handle) [state, current] =>
        copy::fill(state, current, to, value, len, stream);

    context cuModuleLoadData(module: *mut Handle, image: *const c_void) [state, current] =>
        put(module, module::load(state, current, image)?);
    context cuModuleUnload(module: Handle) [state, current] => module::unload(state, current, module);
    context cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) [state, current] =>
        put(function, module::function(state, current, module, name)?);
    context cuLaunchKernel(
        function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void,
    ) [state, current] => module::launch(
        state, current, function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared, stream, params, extra,
    );
}

/// The reported version: CUDA 12.8.
const VERSION: i32 = 12_080;

/// The highest priority of streams; the least is 0.
const GREATEST_PRIORITY: i32 = -5;

/// `CUmemorytype` of host and device memory.
const MEMORY_TYPE_HOST: u32 = 1;
const MEMORY_TYPE_DEVICE: u32 = 2;

/// `cuInit`.
pub(crate) fn init(state: &mut State, flags: u32) -> Outcome {
    if flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    initialized();
    state.initialized = true;
    Ok(())
}

/// `cuThreadExchangeStreamCaptureMode`, and what is like it.
///
/// # Safety
/// `mode` is null or may be read and written.
pub(crate) unsafe fn exchange_mode(mode: *mut u32) -> Outcome {
    if mode.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { put(mode, capture::exchange(*mode)?) }
}

/// Writes a result if the pointer is not null.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn put_if<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { put(to, value) }
}

/// Writes a text, or null and an error if there is none.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn put_text(to: *mut *const c_char, text: Option<&'static CStr>) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe { put(to, text.map_or(null(), CStr::as_ptr)) }?;
    text.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// `cuGetProcAddress_v2`: names come without their version; the newest one is meant.
///
/// # Safety
/// `symbol` is a text with its end; the others are null or may be written.
unsafe fn proc_address(
    symbol: *const c_char,
    function: *mut *const c_void,
    _version: i32,
    _flags: u64,
    status: *mut u32,
) -> Outcome {
    if symbol.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller promises a text with its end.
    let symbol = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let address = |name: &str| Some((EXPORTS.iter().find(|known| known.name == name)?.address)());
    let found = address(&format!("{symbol}_v2")).or_else(|| address(&symbol));
    // SAFETY: the caller's promise.
    unsafe { put(function, found.unwrap_or(null())) }?;
    // SAFETY: the caller's promise. 0 says that it was found, 1 that it was not.
    unsafe { put_if(status, u32::from(found.is_none())) }?;
    found.map(drop).ok_or(CUDA_ERROR_NOT_FOUND)
}

fn host_function(
    state: &mut State,
    current: Handle,
    stream: Handle,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> Outcome {
    stream::check(state, current, stream)?;
    let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let data = data.expose_provenance();
    stream::submit(state, stream, Work::Call { function, data });
    Ok(())
}

/// `cuPointerGetAttribute` for the kind of memory and its device.
///
/// # Safety
/// `value` is null or may be written with what the attribute is.
unsafe fn pointer_attribute(
    state: &State,
    value: *mut c_void,
    attribute: u32,
    address: u64,
) -> Outcome {
    let region: &Region = state
        .memory
        .region_of(address)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let kind = if region.is_host() {
        MEMORY_TYPE_HOST
    } else {
        MEMORY_TYPE_DEVICE
    };
    match attribute {
        // SAFETY: CU_POINTER_ATTRIBUTE_MEMORY_TYPE is an unsigned int.
        2 => unsafe { put(value.cast(), kind) },
        // SAFETY: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is an int.
        9 => unsafe { put(value.cast(), memory::ordinal(state, region)) },
        _ => Err(CUDA_ERROR_NOT_SUPPORTED),
    }
}
