//! The arithmetic of the cost model.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use common::*;
use softcuda::*;

const CALL: u64 = 1_500;
const LAUNCH: u64 = 4_700;
const GAP: u64 = 1_600;
const MIB: usize = 1 << 20;

fn dma(bytes: usize) -> u64 {
    GAP + (bytes as u64).div_ceil(54)
}

/// Advance of the host's clock by this work.
fn took(work: impl FnOnce()) -> u64 {
    let begin = softcuda_now_ns();
    work();
    softcuda_now_ns() - begin
}

#[test]
fn without_the_model_calls_alone_take_time() {
    alone(|| {
        open(0);
        let (stream, memory, host) = (stream(), alloc(MIB), Pinned::new(MIB));
        let time = took(|| {
            host_to_device(memory, host.at, MIB, stream);
            synchronize(stream);
        });
        assert_eq!(time, 2 * CALL);
    });
}

#[test]
fn one_large_copy_takes_the_time_of_its_bytes() {
    alone(|| {
        open(0);
        softcuda_model(1);
        let (stream, memory, host) = (stream(), alloc(32 * MIB), Pinned::new(32 * MIB));
        let time = took(|| {
            host_to_device(memory, host.at, 32 * MIB, stream);
            synchronize(stream);
        });
        assert_eq!(time, CALL + GAP + 621_379);
        assert_eq!(softcuda_bytes(0), 32 << 20);
    });
}

#[test]
fn many_small_copies_take_the_time_of_their_gaps() {
    alone(|| {
        open(0);
        softcuda_model(1);
        let (stream, memory, host) = (stream(), alloc(32 * MIB), Pinned::new(32 * MIB));
        let piece = 32 << 10;
        let time = took(|| {
            for at in (0..32 * MIB).step_by(piece) {
                device_to_host(host.at + at, memory + at as u64, piece, stream);
            }
            synchronize(stream);
        });
        // The engine takes longer for a copy than the host to submit the next.
        assert!(dma(piece) > CALL);
        assert_eq!(time, CALL + 1024 * dma(piece));
        assert_eq!(softcuda_bytes(1), 32 << 20);
    });
}

#[test]
fn one_engine_for_each_direction() {
    alone(|| {
        open(0);
        softcuda_model(1);
        softcuda_jitter(5, 500);
        let (a, b, back) = (stream(), stream(), stream());
        let len = 8 * MIB;
        let (memory, host) = (alloc(3 * len), Pinned::new(3 * len));
        let at = |piece: usize| (memory + (piece * len) as u64, host.at + piece * len);
        let time = took(|| {
            host_to_device(at(0).0, at(0).1, len, a);
            host_to_device(at(1).0, at(1).1, len, b);
            device_to_host(at(2).1, at(2).0, len, back);
            for stream in [a, b, back] {
                synchronize(stream);
            }
        });
        // Two copies share an engine, the third has the other one.
        assert!(time >= 2 * dma(len), "{time}");
        assert!(time < 2 * dma(len) + 8 * CALL, "{time}");
    });
}

#[test]
fn events_carry_time_and_waits_move_it() {
    alone(|| {
        open(0);
        softcuda_model(1);
        let (a, b, memory, host) = (stream(), stream(), alloc(MIB), Pinned::new(MIB));
        let [start, copied, waited] = [0; 3].map(|_| event());
        ok(cu!(cuEventRecord(start, a)));
        host_to_device(memory, host.at, MIB, a);
        ok(cu!(cuEventRecord(copied, a)));
        ok(cu!(cuStreamWaitEvent(b, copied, 0)));
        ok(cu!(cuMemsetD8Async(memory, 1, MIB, b)));
        ok(cu!(cuEventRecord(waited, b)));
        ok(cu!(cuEventSynchronize(waited)));
        let between = |start, end| {
            let ms = get!(f32, cuEventElapsedTime_v2(start, end));
            assert_eq!(get!(f32, cuEventElapsedTime(start, end)), ms);
            (f64::from(ms) * 1e6).round() as u64
        };
        // The copy was submitted one call after the event.
        assert_eq!(between(start, copied), CALL + dma(MIB));
        assert_eq!(between(copied, waited), (MIB as u64).div_ceil(3_000));

        let silent = get!(Handle, cuEventCreate(2));
        ok(cu!(cuEventRecord(silent, a)));
        let mut ms = 0.0;
        let mut elapsed = |start, end| cu!(cuEventElapsedTime_v2(&mut ms, start, end));
        assert_eq!(elapsed(start, silent), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(elapsed(event(), copied), CUDA_ERROR_INVALID_HANDLE);
        softcuda_hold(a);
        ok(cu!(cuEventRecord(copied, a)));
        assert_eq!(elapsed(start, copied), CUDA_ERROR_NOT_READY);
    });
}

#[test]
fn launches_and_kernels_have_their_own_prices() {
    alone(|| {
        open(0);
        softcuda_model(1);
        let (stream, memory, host) = (stream(), alloc(16), Pinned::new(16));
        let (function, _) = copy8();
        let [start, mapped, device] = [0; 3].map(|_| event());
        let submit = took(|| ok(launch(function, memory, memory + 8, stream)));
        assert_eq!(submit, LAUNCH);
        softcuda_hold(stream);
        ok(cu!(cuEventRecord(start, stream)));
        let time = took(|| {
            for _ in 0..3 {
                ok(launch(function, memory, host.device(), stream));
            }
        });
        // The query of the address is a call too.
        assert_eq!(time, 3 * (LAUNCH + CALL));
        ok(cu!(cuEventRecord(mapped, stream)));
        ok(cu!(cuMemcpyDtoDAsync_v2(memory, memory + 8, 8, stream)));
        ok(cu!(cuEventRecord(device, stream)));
        softcuda_release(stream);
        ok(cu!(cuEventSynchronize(device)));
        assert_eq!([softcuda_bytes(3), softcuda_bytes(4)], [24, 40]);
        let ms = get!(f32, cuEventElapsedTime_v2(start, mapped));
        assert_eq!((f64::from(ms) * 1e6).round() as u64, time + CALL);
    });
}
