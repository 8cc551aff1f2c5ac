//! The host cannot access device memory, and ranges keep their kind.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use common::*;
use softcuda::*;

/// Reads a byte as the host.
fn touch(address: u64) {
    let byte = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the test expects this to fault.
    std::hint::black_box(unsafe { byte.read_volatile() });
}

#[test]
fn the_host_faults_on_device_addresses() {
    let touched = forked(|| {
        open(0);
        touch(alloc(4096));
    });
    touched.by_signal(libc::SIGSEGV);
    let touched = forked(|| {
        open(0);
        touch(Pinned::new(4096).device());
    });
    touched.by_signal(libc::SIGSEGV);
    let touched = forked(|| {
        open(0);
        let host = get!(usize, cuMemHostAlloc(4096, 3));
        touch(host as u64);
        ok(cu!(cuMemFreeHost(host)));
        let _ = std::io::Write::write_all(&mut std::io::stderr(), b"freed");
        touch(host as u64);
    });
    touched.by_signal(libc::SIGSEGV);
    assert_eq!(touched.said, "freed");
}

#[test]
fn allocations_are_aligned_to_512_and_no_more_and_never_reused() {
    alone(|| {
        open(0);
        let mut before = 0;
        for _ in 0..20 {
            let memory = alloc(1 << 20);
            assert_eq!(memory % 512, 0);
            assert_ne!(memory % 1024, 0);
            assert_ne!(memory, before);
            let mut byte = 0;
            for behind in [1, 256, 4096] {
                let read = cu!(softcuda_read(memory + (1 << 20) + behind - 1, &mut byte, 1));
                assert_eq!(read, CUDA_ERROR_INVALID_VALUE, "nothing lies behind it");
            }
            ok(cu!(cuMemFree_v2(memory)));
            assert_eq!(
                cu!(softcuda_read(memory, &mut byte, 1)),
                CUDA_ERROR_INVALID_VALUE
            );
            assert_eq!(cu!(cuMemFree_v2(memory)), CUDA_ERROR_INVALID_VALUE);
            before = memory;
        }
        assert_eq!(softcuda_live(0), 0);
        let mut memory = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&mut memory, 0)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(
            cu!(cuMemAlloc_v2(&mut memory, 1 << 40)),
            CUDA_ERROR_OUT_OF_MEMORY
        );
    });
}

#[test]
fn copies_stay_inside_of_one_range() {
    alone(|| {
        open(0);
        let (stream, memory, host) = (stream(), alloc(100), Pinned::new(100));
        let copy = |to, from, len| cu!(cuMemcpyHtoDAsync_v2(to, from, len, stream));
        ok(copy(memory, host.at, 100));
        ok(copy(memory + 99, host.at + 99, 1));
        ok(copy(0, 0, 0));
        for (to, from, len) in [
            (memory, host.at, 101),
            (memory + 1, host.at, 100),
            (memory - 1, host.at, 1),
            (0, host.at, 1),
            (memory, host.at + 50, 51),
            (memory, host.at - 1, 2),
            (memory, memory as usize, 1),
            (memory, host.device() as usize, 1),
            (host.at as u64, host.at, 1),
            (u64::MAX - 3, host.at, 8),
        ] {
            assert_eq!(
                copy(to, from, len),
                CUDA_ERROR_INVALID_VALUE,
                "{to:#x} {from:#x} {len}"
            );
        }
        let fill = |at, len| cu!(cuMemsetD8Async(at, 0, len, stream));
        assert_eq!(fill(memory, 101), CUDA_ERROR_INVALID_VALUE);
        let back = |to, from, len| cu!(cuMemcpyDtoHAsync_v2(to, from, len, stream));
        assert_eq!(back(host.at, memory, 101), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(back(host.at + 1, memory, 100), CUDA_ERROR_INVALID_VALUE);
        let inside = |to, from, len| cu!(cuMemcpyDtoDAsync_v2(to, from, len, stream));
        assert_eq!(inside(memory, memory + 50, 51), CUDA_ERROR_INVALID_VALUE);
        synchronize(stream);
    });
}

#[test]
fn registered_memory_has_another_address_on_the_device() {
    alone(|| {
        open(0);
        let (stream, memory) = (stream(), alloc(8192));
        let host = Pinned::pageable(3 * 4096);
        let device = |at| {
            let mut device = 0;
            (
                cu!(cuMemHostGetDevicePointer_v2(&mut device, at, 0)),
                device,
            )
        };
        assert_eq!(device(host.at).0, CUDA_ERROR_INVALID_VALUE);
        assert_eq!(
            cu!(cuMemHostUnregister(host.at)),
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        );
        ok(cu!(cuMemHostRegister_v2(host.at, 4096, 3)));
        ok(cu!(cuMemHostRegister_v2(host.at + 4096, 4096, 3)));
        for (at, len) in [(host.at, 4096), (host.at + 100, 1), (host.at + 8000, 4096)] {
            let twice = cu!(cuMemHostRegister_v2(at, len, 3));
            assert_eq!(twice, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        assert_eq!(softcuda_live(1), 2);
        let (code, first) = device(host.at + 16);
        ok(code);
        assert_ne!(first, host.at as u64 + 16);
        assert_eq!(first % 4096, 16);

        host.set(&[b'x'; 32]);
        ok(cu!(cuMemcpyDtoDAsync_v2(memory, first, 8, stream)));
        synchronize(stream);
        assert_eq!(peek(memory, 8), b"xxxxxxxx");
        let across = cu!(cuMemcpyHtoDAsync_v2(memory, host.at + 4090, 10, stream));
        assert_eq!(
            across, CUDA_ERROR_INVALID_VALUE,
            "two registrations are two ranges"
        );

        assert_eq!(
            cu!(cuMemHostUnregister(host.at + 1)),
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        );
        ok(cu!(cuMemHostUnregister(host.at)));
        assert_eq!(device(host.at).0, CUDA_ERROR_INVALID_VALUE);
        ok(cu!(cuMemHostUnregister(host.at + 4096)));
        assert_eq!(softcuda_live(1), 0);

        ok(cu!(cuMemHostRegister_v2(host.at, 4096, 1)));
        assert_eq!(
            device(host.at).0,
            CUDA_ERROR_INVALID_VALUE,
            "it was not mapped for devices"
        );
        assert_eq!(
            cu!(cuMemHostRegister_v2(4096, 4096, 3)),
            CUDA_ERROR_INVALID_VALUE
        );
    });
}

#[test]
fn accepted_memory_is_device_memory() {
    alone(|| {
        open(0);
        let (stream, tensor, host) = (stream(), Pinned::pageable(4096), Pinned::new(4096));
        let at = tensor.at as u64;
        host.set(b"from here");
        let copy = || cu!(cuMemcpyHtoDAsync_v2(at, host.at, 9, stream));
        assert_eq!(copy(), CUDA_ERROR_INVALID_VALUE);
        ok(softcuda_accept(tensor.at, 4096));
        assert_eq!(
            softcuda_accept(tensor.at + 4095, 2),
            CUDA_ERROR_INVALID_VALUE
        );
        assert_eq!(softcuda_accept(host.at, 1), CUDA_ERROR_INVALID_VALUE);
        ok(copy());
        synchronize(stream);
        assert_eq!(tensor.bytes(9), b"from here");
        let as_host = cu!(cuMemcpyHtoDAsync_v2(at, tensor.at, 9, stream));
        assert_eq!(as_host, CUDA_ERROR_INVALID_VALUE);
        ok(softcuda_forget(tensor.at));
        assert_eq!(copy(), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(softcuda_forget(tensor.at), CUDA_ERROR_INVALID_VALUE);
    });
}

#[test]
fn pointers_know_what_they_are() {
    alone(|| {
        open(0);
        let second = get!(Handle, cuDevicePrimaryCtxRetain(1));
        ok(cu!(cuCtxPushCurrent_v2(second)));
        let (memory, host) = (alloc(64), Pinned::new(64));
        let tensor = Pinned::pageable(64);
        ok(softcuda_accept(tensor.at, 64));
        let ask = |attribute, address| {
            let mut value = -1i32;
            let to = std::ptr::from_mut(&mut value).cast();
            let code = cu!(cuPointerGetAttribute(to, attribute, address));
            (code, value)
        };
        assert_eq!(ask(2, memory + 63), (CUDA_SUCCESS, 2));
        assert_eq!(ask(9, memory), (CUDA_SUCCESS, 1));
        assert_eq!(ask(2, host.at as u64), (CUDA_SUCCESS, 1));
        assert_eq!(ask(2, host.device() + 1), (CUDA_SUCCESS, 1));
        assert_eq!(ask(2, tensor.at as u64), (CUDA_SUCCESS, 2));
        assert_eq!(ask(9, tensor.at as u64), (CUDA_SUCCESS, 0));
        assert_eq!(ask(2, memory + 64), (CUDA_ERROR_INVALID_VALUE, -1));
        assert_eq!(ask(3, memory), (CUDA_ERROR_NOT_SUPPORTED, -1));
    });
}

#[test]
fn memory_that_queued_work_uses_must_stay() {
    let prepare = || {
        open(0);
        softcuda_hold(0);
        (stream(), alloc(64), Pinned::new(64))
    };
    aborts("cuMemFree: queued work still uses", || {
        let (stream, memory, host) = prepare();
        host_to_device(memory, host.at, 8, stream);
        ok(cu!(cuMemFree_v2(memory)));
    });
    aborts("cuMemHostUnregister: queued work still uses", || {
        let (stream, memory, host) = prepare();
        host_to_device(memory, host.at, 8, stream);
        ok(cu!(cuMemHostUnregister(host.at)));
    });
    aborts("cuMemFreeHost: queued work still uses", || {
        let (stream, memory, _) = prepare();
        let host = get!(usize, cuMemHostAlloc(64, 3));
        device_to_host(host, memory, 8, stream);
        ok(cu!(cuMemFreeHost(host)));
    });
    aborts("softcuda_forget: queued work still uses", || {
        let (stream, memory, _) = prepare();
        let tensor = Pinned::pageable(64);
        ok(softcuda_accept(tensor.at, 64));
        ok(cu!(cuMemcpyDtoDAsync_v2(
            tensor.at as u64,
            memory,
            8,
            stream
        )));
        ok(softcuda_forget(tensor.at));
    });
    aborts("cuMemFree: queued work still uses", || {
        let (stream, memory, host) = prepare();
        let (function, _) = copy8();
        ok(launch(function, memory + 8, host.device(), stream));
        ok(cu!(cuMemFree_v2(memory)));
    });
    alone(|| {
        let (stream, memory, host) = prepare();
        host_to_device(memory, host.at, 8, stream);
        softcuda_release(0);
        synchronize(stream);
        ok(cu!(cuMemFree_v2(memory)));
        ok(cu!(cuMemHostUnregister(host.at)));
    });
}
