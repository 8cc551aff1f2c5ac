//! Captures: a stream whose work goes into a graph instead of being executed, and the calls that
//! are forbidden to other threads during one.
//!
//! Such a call is refused and invalidates the capture, as in CUDA and HIP. A thread changes its own
//! mode to permit them. CUDA does not list the "potentially unsafe" calls; here they are those
//! known for CUDA or HIP: allocation and release of memory and modules, queries of events and
//! streams, and waits.

use std::cell::Cell;
use std::thread::ThreadId;

use crate::error::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, Outcome,
};
use crate::state::{Handle, State};
use crate::stream;

/// `CU_STREAM_CAPTURE_MODE_*`, the same of all vendors.
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// Prefixes of the vendors' names.
const PREFIXES: [&str; 5] = ["cu", "hip", "musa", "mc", "aclrt"];

/// Calls that disturb a capture, without the prefix.
const UNSAFE: [&str; 23] = [
    "EventQuery",
    "EventSynchronize",
    "Free",
    "HostRegister",
    "HostRegisterV2",
    "HostUnregister",
    "Malloc",
    "MemAlloc_v2",
    "MemFreeHost",
    "MemFree_v2",
    "MemHostAlloc",
    "MemHostRegister_v2",
    "MemHostUnregister",
    "Memcpy",
    "MemcpyDtoH_v2",
    "MemcpyHtoD_v2",
    "ModuleLoadData",
    "ModuleUnload",
    "QueryEventStatus",
    "StreamQuery",
    "StreamSynchronize",
    "SynchronizeEvent",
    "SynchronizeStream",
];

thread_local! {
    /// The thread's own mode.
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// A capture under way.
pub(crate) struct Capture {
    mode: u32,
    thread: ThreadId,
    is_invalid: bool,
}

/// `cuThreadExchangeStreamCaptureMode`: what the mode was.
pub(crate) fn exchange(mode: u32) -> Outcome<u32> {
    if mode > RELAXED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(MODE.replace(mode))
}

/// `cuStreamBeginCapture_v2`.
pub(crate) fn begin(state: &mut State, context: Handle, handle: Handle, mode: u32) -> Outcome {
    stream::check(state, context, handle)?;
    let stream = state.streams.get_mut(&handle);
    let stream = stream.filter(|stream| stream.capture.is_none() && mode <= RELAXED);
    stream.ok_or(CUDA_ERROR_INVALID_VALUE)?.capture = Some(Capture {
        mode,
        thread: std::thread::current().id(),
        is_invalid: false,
    });
    state.captures += 1;
    Ok(())
}

/// `cuStreamEndCapture`: a graph, which is never run here.
pub(crate) fn end(state: &mut State, context: Handle, handle: Handle) -> Outcome<Handle> {
    stream::check(state, context, handle)?;
    let found = state
        .streams
        .get_mut(&handle)
        .and_then(|stream| stream.capture.take());
    let capture = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    state.captures -= 1;
    if capture.is_invalid {
        return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    Ok(state.new_handle())
}

/// Refuses a call that disturbs a capture, and invalidates the capture.
pub(crate) fn check(state: &mut State, function: &str) -> Outcome {
    let is_unsafe = |prefix: &&str| {
        let rest = function.strip_prefix(*prefix);
        rest.is_some_and(|rest| UNSAFE.contains(&rest))
    };
    if state.captures == 0 || !PREFIXES.iter().any(is_unsafe) {
        return Ok(());
    }
    let (own, here) = (MODE.get(), std::thread::current().id());
    let mut result = Ok(());
    for capture in state
        .streams
        .values_mut()
        .filter_map(|stream| stream.capture.as_mut())
    {
        let of_this = capture.thread == here && capture.mode != RELAXED;
        let is_disturbed = match own {
            RELAXED => false,
            THREAD_LOCAL => of_this,
            _ => of_this || capture.mode == GLOBAL,
        };
        if is_disturbed {
            capture.is_invalid = true;
            result = Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    result
}
