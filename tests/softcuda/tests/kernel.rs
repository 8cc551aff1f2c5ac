//! Modules and launches.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use std::ptr::null_mut;

use common::*;
use softcuda::*;

#[test]
fn kernels_reach_device_memory_and_mapped_host_memory() {
    alone(|| {
        open(0);
        let (stream, memory, host) = (stream(), alloc(16), Pinned::new(16));
        let (function, module) = copy8();
        host.set(b"from the host...");
        softcuda_hold(stream);
        ok(launch(function, memory + 8, host.device(), stream));
        ok(launch(function, memory, memory + 8, stream));
        ok(launch(function, host.device() + 8, memory, stream));
        ok(cu!(cuModuleUnload(module)));
        assert_eq!(peek(memory, 16), [0; 16]);
        softcuda_release(stream);
        synchronize(stream);
        assert_eq!(peek(memory, 16), b"from thefrom the");
        assert_eq!(host.bytes(16), b"from thefrom the");
        assert_eq!(
            [0, 1, 2, 3, 4].map(|kind| softcuda_bytes(kind)),
            [0, 0, 0, 16, 32]
        );
    });
}

#[test]
fn a_kernel_does_not_reach_the_other_device_nor_host_addresses() {
    for foreign in [true, false] {
        alone(|| {
            open(0);
            let (memory, host) = (alloc(8), Pinned::new(8));
            let second = get!(Handle, cuDevicePrimaryCtxRetain(1));
            ok(cu!(cuCtxSetCurrent(second)));
            let (stream, own) = (stream(), alloc(8));
            let (function, _) = copy8();
            ok(launch(function, own, host.device(), stream));
            synchronize(stream);
            let from = if foreign { memory } else { host.at as u64 };
            ok(launch(function, own, from, stream));
            assert_eq!(cu!(cuStreamSynchronize(stream)), CUDA_ERROR_ILLEGAL_ADDRESS);
        });
    }
}

#[test]
fn bad_modules_and_launches_are_refused() {
    alone(|| {
        open(0);
        let (stream, memory, mut handle) = (stream(), alloc(8), 0);
        let nonsense = cu!(cuModuleLoadData(&mut handle, c"nonsense".as_ptr().cast()));
        assert_eq!(nonsense, CUDA_ERROR_INVALID_PTX);
        let (function, module) = copy8();
        let missing = cu!(cuModuleGetFunction(&mut handle, module, c"copy9".as_ptr()));
        assert_eq!(missing, CUDA_ERROR_NOT_FOUND);
        let launch = |grid: [u32; 3], block: [u32; 3], shared| {
            let (mut to, mut from) = (memory, memory);
            let mut params = [(&raw mut to).cast(), (&raw mut from).cast()];
            let ([x, y, z], [u, v, w]) = (grid, block);
            let params = params.as_mut_ptr();
            cu!(cuLaunchKernel(
                function,
                x,
                y,
                z,
                u,
                v,
                w,
                shared,
                stream,
                params,
                null_mut()
            ))
        };
        ok(launch([3, 2, 1], [8, 4, 2], 0));
        for (grid, block, shared) in [
            ([0, 1, 1], [1, 1, 1], 0),
            ([1, 65_536, 1], [1, 1, 1], 0),
            ([1, 1, 1], [1, 0, 1], 0),
            ([1, 1, 1], [1, 1, 65], 0),
            ([1, 1, 1], [1024, 2, 1], 0),
            ([1, 1, 1], [1, 1, 1], 1 << 20),
        ] {
            assert_eq!(launch(grid, block, shared), CUDA_ERROR_INVALID_VALUE);
        }
        let none = cu!(cuLaunchKernel(
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            stream,
            null_mut(),
            null_mut()
        ));
        assert_eq!(none, CUDA_ERROR_INVALID_VALUE);
        synchronize(stream);
        assert_eq!(softcuda_live(4), 1);
        ok(cu!(cuModuleUnload(module)));
        assert_eq!(softcuda_live(4), 0);
    });
}
