//! Failures: planned ones, and faults that break a context.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use std::ffi::CStr;

use common::*;
use softcuda::*;

#[test]
fn the_nth_call_fails_and_does_nothing() {
    alone(|| {
        open(0);
        alloc(8);
        fail("cuMemAlloc_v2", 2, CUDA_ERROR_OUT_OF_MEMORY);
        fail("cuMemAlloc_v2", 3, CUDA_ERROR_ECC_UNCORRECTABLE);
        let codes = [0; 4].map(|_| {
            let mut memory = 0;
            cu!(cuMemAlloc_v2(&mut memory, 8))
        });
        assert_eq!(
            codes,
            [0, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_ECC_UNCORRECTABLE, 0]
        );
        assert_eq!(softcuda_live(0), 3);
        assert_eq!(calls("cuMemAlloc_v2"), 5);
        assert_eq!(calls("cuMemFree_v2"), 0);
    });
    aborts("no function \"cuMemAlloc\"", || fail("cuMemAlloc", 1, 2));
    aborts("softcuda_break", || softcuda_break(0, 700));
    aborts("no such stream", || softcuda_hold(4096));
}

#[test]
fn a_blocked_call_waits() {
    alone(|| {
        let context = open(0);
        // SAFETY: a name.
        unsafe { softcuda_block(c"cuMemAlloc_v2".as_ptr()) };
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| {
                ok(cu!(cuCtxSetCurrent(context)));
                alloc(8)
            });
            while calls("cuMemAlloc_v2") == 0 {
                std::thread::yield_now();
            }
            stream(); // others go on
            assert_eq!(softcuda_live(0), 0);
            // SAFETY: null ends it.
            unsafe { softcuda_block(std::ptr::null()) };
            assert!(blocked.join().is_ok());
        });
        assert_eq!(softcuda_live(0), 1);
    });
}

#[test]
fn a_context_that_is_broken_answers_nothing_else() {
    alone(|| {
        open(0);
        let (stream, memory) = (stream(), alloc(8));
        softcuda_hold(stream);
        ok(cu!(cuMemsetD8Async(memory, 9, 8, stream)));
        softcuda_break(0, CUDA_ERROR_LAUNCH_FAILED);
        for code in [cu!(cuStreamSynchronize(stream)), cu!(cuMemFree_v2(memory))] {
            assert_eq!(code, CUDA_ERROR_LAUNCH_FAILED);
        }
        assert_eq!(peek(memory, 8), [0; 8]);
        open(1);
        alloc(8);
    });
}

#[test]
fn a_kernel_that_leaves_its_memory_breaks_its_context() {
    alone(|| {
        open(0);
        let (stream, behind, memory) = (stream(), stream(), alloc(64));
        let (function, module) = copy8();
        let event = event();
        softcuda_hold(0);
        ok(launch(function, memory, memory + 60, stream));
        ok(cu!(cuMemsetD8Async(memory, 9, 64, stream)));
        ok(cu!(cuEventRecord(event, stream)));
        ok(cu!(cuStreamWaitEvent(behind, event, 0)));
        ok(cu!(cuMemsetD8Async(memory, 9, 64, behind)));
        let second = get!(Handle, cuDevicePrimaryCtxRetain(1));
        ok(cu!(cuCtxPushCurrent_v2(second)));
        let elsewhere = common::stream();
        ok(cu!(cuStreamWaitEvent(elsewhere, event, 0)));
        get!(Handle, cuCtxPopCurrent_v2());
        softcuda_release(0);

        let mut later = 0;
        for code in [
            cu!(cuStreamSynchronize(stream)),
            cu!(cuStreamQuery(behind)),
            cu!(cuEventQuery(event)),
            cu!(cuMemAlloc_v2(&mut later, 8)),
            cu!(cuModuleUnload(module)),
            cu!(cuStreamDestroy_v2(stream)),
        ] {
            assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
        }

        ok(cu!(cuCtxSetCurrent(second)));
        synchronize(elsewhere);
        alloc(8);
        assert_eq!(
            peek(memory, 64),
            [0; 64],
            "no work behind the fault was executed"
        );

        ok(cu!(cuDevicePrimaryCtxRelease_v2(0)));
        assert_eq!(softcuda_live(5), 1);
        open(0);
        alloc(8);
    });
}

#[test]
fn a_kernel_finds_freed_memory_gone() {
    alone(|| {
        open(0);
        let (stream, descriptors, memory) = (stream(), alloc(8), alloc(8));
        let function = get!(Handle, cuModuleGetFunction(module(), c"follow8".as_ptr()));
        poke(descriptors, &memory.to_le_bytes());
        ok(launch(function, descriptors, descriptors, stream));
        synchronize(stream);
        assert_eq!(peek(descriptors, 8), [0; 8]);

        poke(descriptors, &memory.to_le_bytes());
        softcuda_hold(stream);
        ok(launch(function, descriptors, descriptors, stream));
        ok(cu!(cuMemFree_v2(memory)));
        softcuda_release(stream);
        assert_eq!(cu!(cuStreamSynchronize(stream)), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn errors_have_names_and_texts() {
    let mut text = std::ptr::null();
    ok(cu!(cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &mut text)));
    assert_eq!(cu!(CStr::from_ptr(text)), c"CUDA_ERROR_ILLEGAL_ADDRESS");
    ok(cu!(cuGetErrorString(CUDA_ERROR_ILLEGAL_ADDRESS, &mut text)));
    assert_eq!(
        cu!(CStr::from_ptr(text)),
        c"an illegal memory access was encountered"
    );
    assert_eq!(
        cu!(cuGetErrorName(123_456, &mut text)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert!(text.is_null());
}
