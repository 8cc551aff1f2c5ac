//! Work runs later than the call, in the order of its stream; events order streams.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use softcuda::*;

#[test]
fn pinned_memory_is_copied_when_the_stream_comes_to_it() {
    alone(|| {
        open(0);
        let (stream, memory, host) = (stream(), alloc(8), Pinned::new(8));
        softcuda_hold(stream);
        host.set(b"in time!");
        host_to_device(memory, host.at, 8, stream);
        assert_eq!(peek(memory, 8), [0; 8]);
        assert_eq!(cu!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
        softcuda_release(stream);
        synchronize(stream);
        assert_eq!(peek(memory, 8), b"in time!");
        ok(cu!(cuStreamQuery(stream)));
    });
}

#[test]
fn host_memory_of_a_queued_copy_must_stay_as_it_is() {
    let prepare = || {
        open(0);
        let (stream, memory, host) = (stream(), alloc(64), Pinned::new(128));
        host.set(&[1; 128]);
        softcuda_hold(stream);
        (stream, memory, host)
    };
    let changes = |host: &Pinned, stream| {
        host.set(b"too soon");
        softcuda_release(stream);
        synchronize(stream);
    };
    aborts("cuMemcpyHtoDAsync_v2: the host changed its memory", || {
        let (stream, memory, host) = prepare();
        host_to_device(memory, host.at, 64, stream);
        changes(&host, stream);
    });
    aborts("cuMemcpyDtoHAsync_v2: the host changed its memory", || {
        let (stream, memory, host) = prepare();
        device_to_host(host.at, memory, 64, stream);
        changes(&host, stream);
    });
    aborts("the host changed its memory", || {
        let (stream, memory, host) = prepare();
        // The names of another vendor with the same copies.
        ok(cu!(hipMemcpyAsync(memory, host.at as u64, 64, 1, stream)));
        changes(&host, stream);
    });
    alone(|| {
        let (stream, memory, host) = prepare();
        // Outside of the copy's bytes, and after its end.
        host_to_device(memory, host.at + 64, 64, stream);
        changes(&host, stream);
        host.set(&[2; 128]);
        softcuda_hold(stream);
        // Writes by the driver are not changes by the host: a copy, a kernel, a test's own write.
        let (function, _) = copy8();
        device_to_host(host.at, memory, 64, stream);
        host_to_device(memory, host.at, 64, stream);
        ok(launch(function, host.device() + 64, memory, stream));
        host_to_device(memory + 8, host.at + 64, 8, stream);
        host_to_device(memory + 16, host.at + 72, 8, stream);
        poke(host.device() + 72, b"a test's");
        softcuda_release(stream);
        synchronize(stream);
        assert_eq!(
            peek(memory, 24),
            *b"\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01a test's"
        );
    });
}

#[test]
fn bytes_of_pageable_memory_are_taken_before_the_call_returns() {
    alone(|| {
        open(0);
        let (stream, memory) = (stream(), alloc(8));
        softcuda_hold(0);
        let host = Pinned::pageable(8);
        host.set(b"original");
        host_to_device(memory, host.at, 8, stream);
        host.set(b"changed!");
        assert_eq!(peek(memory, 8), [0; 8]);
        softcuda_release(0);
        synchronize(stream);
        assert_eq!(peek(memory, 8), b"original");
    });
}

#[test]
fn a_copy_to_pageable_memory_returns_when_it_is_there() {
    alone(|| {
        let context = open(0);
        let (stream, memory) = (stream(), alloc(8));
        poke(memory, b"too soon");
        softcuda_hold(stream);
        let host = Pinned::pageable(8);
        std::thread::scope(|threads| {
            let copied = threads.spawn(|| {
                ok(cu!(cuCtxSetCurrent(context)));
                device_to_host(host.at, memory, 8, stream);
                host.bytes(8)
            });
            while cu!(cuStreamQuery(stream)) != CUDA_ERROR_NOT_READY && !copied.is_finished() {
                std::thread::yield_now();
            }
            poke(memory, b"in time!");
            softcuda_release(stream);
            assert_eq!(copied.join().unwrap(), b"in time!");
        });
    });
}

#[test]
fn operations_of_a_stream_run_in_order() {
    alone(|| {
        open(0);
        let (stream, a, b) = (stream(), alloc(4), alloc(4));
        let host = Pinned::new(4);
        softcuda_jitter(7, 200);
        softcuda_hold(stream);
        for value in 1..=100 {
            ok(cu!(cuMemsetD8Async(a, value, 4, stream)));
            ok(cu!(cuMemcpyDtoDAsync_v2(b, a, 4, stream)));
        }
        ok(cu!(cuMemsetD8Async(a, 0, 4, stream)));
        device_to_host(host.at, b, 4, stream);
        softcuda_release(stream);
        synchronize(stream);
        assert_eq!(host.bytes(4), [100; 4]);
        assert_eq!(peek(a, 4), [0; 4]);
        assert_eq!(softcuda_bytes(2), 400);
        assert_eq!(softcuda_bytes(1), 4);
    });
}

#[test]
fn events_order_streams_and_a_missing_one_shows() {
    alone(|| {
        open(0);
        let (first, second, event) = (stream(), stream(), event());
        let (memory, from, to) = (alloc(8), Pinned::new(8), Pinned::new(8));
        from.set(b"the word");
        softcuda_hold(first);
        host_to_device(memory, from.at, 8, first);
        ok(cu!(cuEventRecord(event, first)));

        device_to_host(to.at, memory, 8, second);
        synchronize(second);
        assert_eq!(to.bytes(8), [0; 8], "without an event it is too early");

        ok(cu!(cuStreamWaitEvent(second, event, 0)));
        device_to_host(to.at, memory, 8, second);
        assert_eq!(cu!(cuStreamQuery(second)), CUDA_ERROR_NOT_READY);
        softcuda_release(first);
        synchronize(second);
        assert_eq!(to.bytes(8), b"the word");
    });
}

#[test]
fn an_event_is_its_last_recording_and_outlives_its_handle() {
    alone(|| {
        open(0);
        let (first, second, event) = (stream(), stream(), event());
        let memory = alloc(1);
        ok(cu!(cuEventQuery(event)));
        ok(cu!(cuStreamWaitEvent(second, event, 0)));
        synchronize(second);

        ok(cu!(cuEventRecord(event, first)));
        ok(cu!(cuEventSynchronize(event)));
        ok(cu!(cuEventQuery(event)));
        softcuda_hold(first);
        ok(cu!(cuMemsetD8Async(memory, 5, 1, first)));
        ok(cu!(cuEventRecord(event, first)));
        assert_eq!(cu!(cuEventQuery(event)), CUDA_ERROR_NOT_READY);
        ok(cu!(cuStreamWaitEvent(second, event, 0)));
        ok(cu!(cuEventDestroy_v2(event)));
        assert_eq!(cu!(cuEventQuery(event)), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(cu!(cuStreamQuery(second)), CUDA_ERROR_NOT_READY);
        softcuda_release(first);
        synchronize(second);
        assert_eq!(peek(memory, 1), [5]);
    });
}

#[test]
fn a_destroyed_stream_still_does_what_it_was_given() {
    alone(|| {
        open(0);
        let (first, second, event, memory) = (stream(), stream(), event(), alloc(1));
        softcuda_hold(first);
        ok(cu!(cuMemsetD8Async(memory, 5, 1, first)));
        ok(cu!(cuEventRecord(event, first)));
        ok(cu!(cuStreamDestroy_v2(first)));
        assert_eq!(cu!(cuStreamQuery(first)), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(softcuda_live(2), 1);
        ok(cu!(cuStreamWaitEvent(second, event, 0)));
        softcuda_release(first);
        synchronize(second);
        assert_eq!(peek(memory, 1), [5]);
    });
}

#[test]
fn many_streams_keep_their_order_whatever_the_delays() {
    alone(|| {
        open(0);
        softcuda_jitter(3, 300);
        let streams: Vec<Handle> = (0..4).map(|_| stream()).collect();
        let (memory, host) = (alloc(64), Pinned::new(64));
        for round in 0..40u8 {
            // Each round is done by another stream, after the one before.
            let stream = streams[usize::from(round) % 4];
            ok(cu!(cuMemsetD8Async(memory, round, 64, stream)));
            let event = event();
            ok(cu!(cuEventRecord(event, stream)));
            ok(cu!(cuStreamWaitEvent(
                streams[(usize::from(round) + 1) % 4],
                event,
                0
            )));
            ok(cu!(cuEventDestroy_v2(event)));
        }
        device_to_host(host.at, memory, 64, streams[0]);
        synchronize(streams[0]);
        assert_eq!(host.bytes(64), [39; 64]);
        assert_eq!(softcuda_live(3), 0);
    });
}

#[test]
fn copies_without_a_stream_wait_for_blocking_streams_only() {
    alone(|| {
        open(0);
        let (blocking, other, memory) = (get!(Handle, cuStreamCreate(0)), stream(), alloc(8));
        softcuda_jitter(1, 2000);
        softcuda_hold(other);
        ok(cu!(cuMemsetD8Async(memory + 4, 9, 4, other)));
        ok(cu!(cuMemsetD8Async(memory, 5, 4, blocking)));
        let mut bytes = [1u8; 8];
        ok(cu!(cuMemcpyDtoH_v2(
            bytes.as_mut_ptr().expose_provenance(),
            memory,
            8
        )));
        assert_eq!(bytes, [5, 5, 5, 5, 0, 0, 0, 0]);
        softcuda_release(other);
        synchronize(other);
        bytes = *b"straight";
        ok(cu!(cuMemcpyHtoD_v2(
            memory,
            bytes.as_ptr().expose_provenance(),
            8
        )));
        synchronize(0);
        assert_eq!(peek(memory, 8), b"straight");
    });
}

#[test]
fn a_copy_of_memory_that_is_not_pinned_ends_after_its_call() {
    alone(|| {
        open(0);
        let (memory, host) = (alloc(8), Pinned::new(8));
        let mut bytes = *b"pageable";
        softcuda_hold(0);
        ok(cu!(cuMemcpyHtoD_v2(
            memory,
            bytes.as_ptr().expose_provenance(),
            8
        )));
        bytes.fill(0); // they were taken
        assert_eq!(peek(memory, 8), [0; 8]);
        assert_eq!(cu!(cuStreamQuery(0)), CUDA_ERROR_NOT_READY);
        softcuda_release(0);
        synchronize(0);
        ok(cu!(cuStreamQuery(0)));
        assert_eq!(peek(memory, 8), b"pageable");
        host.set(b"pinned!!");
        ok(cu!(cuMemcpyHtoD_v2(memory, host.at, 8)));
        assert_eq!(peek(memory, 8), b"pinned!!");
        assert_eq!(softcuda_live(2), 0, "the default stream is nobody's");
    });
}

static CALLED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn note(data: *mut c_void) {
    CALLED.store(data.addr() as u64, Ordering::Release);
}

unsafe extern "C" fn call_the_driver(_data: *mut c_void) {
    cu!(cuInit(0));
}

#[test]
fn callbacks_run_in_order_and_must_not_call_the_driver() {
    alone(|| {
        open(0);
        let (stream, memory) = (stream(), alloc(1));
        softcuda_hold(stream);
        ok(cu!(cuMemsetD8Async(memory, 1, 1, stream)));
        let data = std::ptr::without_provenance_mut(77);
        ok(cu!(cuLaunchHostFunc(stream, Some(note), data)));
        assert_eq!(CALLED.load(Ordering::Acquire), 0);
        softcuda_release(stream);
        synchronize(stream);
        assert_eq!(CALLED.load(Ordering::Acquire), 77);
    });
    aborts("cuInit was called from inside", || {
        open(0);
        let stream = stream();
        ok(cu!(cuLaunchHostFunc(
            stream,
            Some(call_the_driver),
            std::ptr::null_mut()
        )));
        synchronize(stream);
    });
}
