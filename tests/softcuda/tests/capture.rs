//! Graph captures, and the calls that disturb them.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use std::ptr::null;

use common::*;
use softcuda::*;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// The mode that this thread had before.
fn exchange(mut mode: u32) -> u32 {
    ok(cu!(cuThreadExchangeStreamCaptureMode(&mut mode)));
    mode
}

/// Calls that disturb a capture.
fn disturb(event: Handle, stream: Handle) -> [CUresult; 3] {
    let mut memory = 0;
    [
        cu!(cuMemAlloc_v2(&mut memory, 8)),
        cu!(cuEventQuery(event)),
        cu!(cuStreamSynchronize(stream)),
    ]
}

fn end(stream: Handle) -> CUresult {
    let mut graph = 0;
    cu!(cuStreamEndCapture(stream, &mut graph))
}

#[test]
fn what_a_stream_captures_is_not_done() {
    alone(|| {
        open(0);
        let (stream, memory) = (stream(), alloc(8));
        ok(cu!(cuStreamBeginCapture_v2(stream, GLOBAL)));
        assert_eq!(
            cu!(cuStreamBeginCapture_v2(stream, GLOBAL)),
            CUDA_ERROR_INVALID_VALUE
        );
        ok(cu!(cuMemsetD8Async(memory, 5, 8, stream)));
        ok(end(stream));
        synchronize(stream);
        assert_eq!(peek(memory, 8), [0; 8]);
        assert_eq!(end(stream), CUDA_ERROR_INVALID_VALUE);
        ok(cu!(cuMemsetD8Async(memory, 5, 8, stream)));
        synchronize(stream);
        assert_eq!(peek(memory, 8), [5; 8]);
    });
}

#[test]
fn a_call_that_disturbs_is_refused_and_spoils_the_capture() {
    const REFUSED: CUresult = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    // The capture's mode, the calling thread's mode, whether it is the capturing thread; whether
    // the call disturbs.
    let cases = [
        (GLOBAL, GLOBAL, false, true),
        (GLOBAL, THREAD_LOCAL, false, false),
        (GLOBAL, RELAXED, false, false),
        (THREAD_LOCAL, GLOBAL, false, false),
        (THREAD_LOCAL, THREAD_LOCAL, true, true),
        (THREAD_LOCAL, RELAXED, true, false),
        (RELAXED, GLOBAL, true, false),
    ];
    for (of_capture, own, same_thread, disturbs) in cases {
        alone(|| {
            let context = open(0);
            let (captured, other, event) = (stream(), stream(), event());
            ok(cu!(cuStreamBeginCapture_v2(captured, of_capture)));
            let call = || {
                ok(cu!(cuCtxSetCurrent(context)));
                assert_eq!(exchange(own), GLOBAL);
                let codes = disturb(event, other);
                assert_eq!(exchange(GLOBAL), own);
                codes
            };
            let codes = if same_thread {
                call()
            } else {
                std::thread::scope(|scope| scope.spawn(call).join().unwrap_or_default())
            };
            let expected = if disturbs {
                [REFUSED; 3]
            } else {
                [CUDA_SUCCESS; 3]
            };
            assert_eq!(codes, expected);
            let ended = end(captured);
            let expected = if disturbs {
                CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            } else {
                CUDA_SUCCESS
            };
            assert_eq!(ended, expected);
            assert_eq!(disturb(event, other), [CUDA_SUCCESS; 3], "it is over");
        });
    }
}

#[test]
fn each_vendor_has_it() {
    let exchanges = [
        hipThreadExchangeStreamCaptureMode,
        musaThreadExchangeStreamCaptureMode,
        mcThreadExchangeStreamCaptureMode,
        aclmdlRICaptureThreadExchangeMode,
    ];
    for exchange in exchanges {
        alone(|| {
            ok(cu!(aclInit(null())));
            ok(cu!(aclrtSetDevice(0)));
            let captured = stream();
            let wait = || {
                [
                    cu!(hipStreamSynchronize(0)),
                    cu!(musaStreamQuery(0)),
                    cu!(mcEventQuery(0)),
                    cu!(aclrtSynchronizeStream(0)),
                ]
            };
            ok(cu!(cuStreamBeginCapture_v2(captured, GLOBAL)));
            assert_eq!(wait(), [900, 900, 900, 107_030]);
            assert_eq!(end(captured), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            ok(cu!(cuStreamBeginCapture_v2(captured, GLOBAL)));
            let mut mode = RELAXED;
            ok(cu!(exchange(&mut mode)));
            assert_eq!(mode, GLOBAL);
            assert_eq!(wait(), [0, 0, CUDA_ERROR_INVALID_HANDLE, 0]);
            ok(end(captured));
            mode = 3;
            assert_ne!(cu!(exchange(&mut mode)), CUDA_SUCCESS);
        });
    }
}
