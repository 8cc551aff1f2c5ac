//! Contexts belong to threads, handles to contexts, and the driver to one process.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use common::*;
use softcuda::*;

#[test]
fn nothing_works_before_init() {
    alone(|| {
        let mut count = 0;
        assert_eq!(
            cu!(cuDeviceGetCount(&mut count)),
            CUDA_ERROR_NOT_INITIALIZED
        );
        assert_eq!(cu!(cuStreamSynchronize(0)), CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(get!(i32, cuDriverGetVersion()), 12080);
        ok(cu!(cuInit(0)));
        assert_eq!(get!(i32, cuDeviceGetCount()), 2);
        let mut device = 0;
        assert_eq!(cu!(cuDeviceGet(&mut device, 2)), CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(cu!(cuDeviceGet(&mut device, -1)), CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(get!(i32, cuDeviceGet(1)), 1);
        assert_eq!(get!(i32, cuDeviceGetAttribute(91, 0)), 0);
        assert!(get!(i32, cuDeviceGetAttribute(16, 1)) > 0);
        let mut name = [1; 9];
        ok(cu!(cuDeviceGetName(name.as_mut_ptr(), 9, 0)));
        assert_eq!(name.map(|letter| letter as u8), *b"Software\0");
    });
}

#[test]
fn a_thread_needs_a_context_of_its_own() {
    alone(|| {
        ok(cu!(cuInit(0)));
        let mut memory = 0;
        assert_eq!(
            cu!(cuMemAlloc_v2(&mut memory, 8)),
            CUDA_ERROR_INVALID_CONTEXT
        );
        assert_eq!(cu!(cuCtxSetCurrent(12345)), CUDA_ERROR_INVALID_CONTEXT);
        let context = open(0);
        alloc(8);
        std::thread::spawn(move || {
            let mut memory = 0;
            assert_eq!(get!(Handle, cuCtxGetCurrent()), 0);
            assert_eq!(
                cu!(cuMemAlloc_v2(&mut memory, 8)),
                CUDA_ERROR_INVALID_CONTEXT
            );
            ok(cu!(cuCtxSetCurrent(context)));
            ok(cu!(cuMemAlloc_v2(&mut memory, 8)));
        })
        .join()
        .unwrap();
        assert_eq!(softcuda_live(0), 2);
    });
}

#[test]
fn contexts_stack() {
    alone(|| {
        let first = open(0);
        let second = get!(Handle, cuDevicePrimaryCtxRetain(1));
        assert_eq!(get!(i32, cuCtxGetDevice()), 0);
        ok(cu!(cuCtxPushCurrent_v2(second)));
        assert_eq!(get!(i32, cuCtxGetDevice()), 1);
        assert_eq!(get!(Handle, cuCtxPopCurrent_v2()), second);
        assert_eq!(get!(Handle, cuCtxGetCurrent()), first);
        ok(cu!(cuCtxSetCurrent(0)));
        assert_eq!(get!(Handle, cuCtxGetCurrent()), 0);
        let mut context = 0;
        assert_eq!(
            cu!(cuCtxPopCurrent_v2(&mut context)),
            CUDA_ERROR_INVALID_CONTEXT
        );
        let (mut least, mut greatest) = (1, 1);
        ok(cu!(cuCtxSetCurrent(first)));
        ok(cu!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest)));
        assert!(greatest < least);
    });
}

#[test]
fn handles_are_of_one_context_and_are_never_valid_again() {
    alone(|| {
        open(0);
        let (stream, event, memory) = (stream(), event(), alloc(8));
        let (function, module) = copy8();
        let second = get!(Handle, cuDevicePrimaryCtxRetain(1));
        ok(cu!(cuCtxPushCurrent_v2(second)));
        let other = common::stream();
        for code in [
            cu!(cuStreamQuery(stream)),
            cu!(cuStreamDestroy_v2(stream)),
            cu!(cuMemsetD8Async(memory, 0, 8, stream)),
            cu!(cuEventRecord(event, other)),
            cu!(cuEventQuery(event)),
            cu!(cuModuleUnload(module)),
            launch(function, memory, memory, other),
            cu!(cuStreamQuery(event)),
            cu!(cuStreamQuery(4096)),
        ] {
            assert_eq!(code, CUDA_ERROR_INVALID_HANDLE);
        }
        // A stream may wait for an event of another context.
        ok(cu!(cuStreamWaitEvent(other, event, 0)));
        get!(Handle, cuCtxPopCurrent_v2());
        ok(cu!(cuStreamDestroy_v2(stream)));
        assert_eq!(cu!(cuStreamDestroy_v2(stream)), CUDA_ERROR_INVALID_HANDLE);
        ok(cu!(cuEventDestroy_v2(event)));
        assert_eq!(cu!(cuEventDestroy_v2(event)), CUDA_ERROR_INVALID_HANDLE);
        ok(cu!(cuModuleUnload(module)));
        assert_eq!(
            launch(function, memory, memory, common::stream()),
            CUDA_ERROR_INVALID_HANDLE
        );
    });
}

#[test]
fn the_last_release_ends_the_context_and_all_in_it() {
    alone(|| {
        let context = open(0);
        assert_eq!(get!(Handle, cuDevicePrimaryCtxRetain(0)), context);
        let (stream, host) = (stream(), Pinned::new(8));
        event();
        copy8();
        let memory = alloc(8);
        get!(usize, cuMemHostAlloc(8, 0));
        host_to_device(memory, host.at, 8, stream);
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|kind| softcuda_live(kind)),
            [2, 1, 1, 1, 1, 1]
        );
        let active = || {
            let (mut flags, mut active) = (7, 7);
            ok(cu!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active)));
            active
        };
        ok(cu!(cuDevicePrimaryCtxRelease_v2(0)));
        assert_eq!(active(), 1);
        alloc(8);
        ok(cu!(cuDevicePrimaryCtxRelease_v2(0)));
        assert_eq!(active(), 0);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|kind| softcuda_live(kind)), [0; 6]);
        let mut memory = 0;
        assert_eq!(
            cu!(cuMemAlloc_v2(&mut memory, 8)),
            CUDA_ERROR_CONTEXT_IS_DESTROYED
        );
        assert_eq!(
            cu!(cuDevicePrimaryCtxRelease_v2(0)),
            CUDA_ERROR_INVALID_CONTEXT
        );
        assert_eq!(cu!(cuCtxSetCurrent(context)), CUDA_ERROR_INVALID_CONTEXT);
        open(0);
        alloc(8);
    });
}

#[test]
fn a_forked_process_has_no_driver() {
    alone(|| {
        let context = open(0);
        let stream = stream();
        let child = forked(|| {
            let mut count = 0;
            assert_eq!(cu!(cuInit(0)), CUDA_ERROR_NOT_INITIALIZED);
            assert_eq!(
                cu!(cuDeviceGetCount(&mut count)),
                CUDA_ERROR_NOT_INITIALIZED
            );
            assert_eq!(cu!(cuCtxSetCurrent(context)), CUDA_ERROR_NOT_INITIALIZED);
            assert_eq!(cu!(cuStreamSynchronize(stream)), CUDA_ERROR_NOT_INITIALIZED);
            let mut text = std::ptr::null();
            ok(cu!(cuGetErrorString(CUDA_ERROR_NOT_INITIALIZED, &mut text)));
        });
        assert_eq!(child.status, 0, "{}", child.said);
        synchronize(stream);
    });
}

#[test]
fn waiting_for_everybody_is_a_mistake() {
    aborts("cuCtxSynchronize", || {
        open(0);
        cu!(cuCtxSynchronize());
    });
    for legacy in 0..=2 {
        aborts("the legacy stream", || {
            open(0);
            cu!(cuMemsetD8Async(alloc(8), 0, 8, legacy));
        });
    }
    aborts("the legacy stream", || {
        open(0);
        cu!(cuEventRecord(event(), 0));
    });
}
