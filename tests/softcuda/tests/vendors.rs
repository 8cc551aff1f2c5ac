//! The driver under the names of other vendors: their kinds, results and rules.
#![allow(unsafe_code, reason = "calls the driver, whose functions are C's")]

#[macro_use]
mod common;

use std::ptr::null;

use common::{Pinned, aborts, alone, calls, fail, ok, peek, poke};
use softcuda::*;

/// Answers of ACL.
const REPEAT_INITIALIZE: CUresult = 100_002;
const UNINITIALIZE: CUresult = 100_001;
const PARAM_INVALID: CUresult = 107_000;
const CONTEXT_NULL: CUresult = 107_002;

/// The functions of a vendor whose runtime is shaped as CUDA's.
struct Vendor {
    set_device: unsafe extern "C" fn(i32) -> CUresult,
    device: unsafe extern "C" fn(*mut i32) -> CUresult,
    last_error: unsafe extern "C" fn() -> CUresult,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> CUresult,
    stream: unsafe extern "C" fn(*mut Handle, u32, i32) -> CUresult,
    copy: unsafe extern "C" fn(u64, u64, usize, i32, Handle) -> CUresult,
    wait: unsafe extern "C" fn(Handle) -> CUresult,
    event: unsafe extern "C" fn(*mut Handle, u32) -> CUresult,
    record: unsafe extern "C" fn(Handle, Handle) -> CUresult,
    query: unsafe extern "C" fn(Handle) -> CUresult,
    synchronize_device: unsafe extern "C" fn() -> CUresult,
    not_ready: CUresult,
    allocate_name: &'static str,
}

macro_rules! vendor {
    ($not_ready:literal $($field:ident $function:ident)*; $allocate:ident) => {
        Vendor {
            $($field: softcuda::$function,)*
            allocate: softcuda::$allocate,
            allocate_name: stringify!($allocate),
            not_ready: $not_ready,
        }
    };
}

const VENDORS: [Vendor; 3] = [
    vendor!(600 set_device hipSetDevice device hipGetDevice last_error hipGetLastError
        stream hipStreamCreateWithPriority copy hipMemcpyAsync wait hipStreamSynchronize event hipEventCreateWithFlags
        record hipEventRecord query hipEventQuery synchronize_device hipDeviceSynchronize; hipMalloc),
    vendor!(34 set_device musaSetDevice device musaGetDevice last_error musaGetLastError
        stream musaStreamCreateWithPriority copy musaMemcpyAsync wait musaStreamSynchronize
        event musaEventCreateWithFlags
        record musaEventRecord query musaEventQuery synchronize_device musaDeviceSynchronize; musaMalloc),
    vendor!(600 set_device mcSetDevice device mcGetDevice last_error mcGetLastError
        stream mcStreamCreateWithPriority copy mcMemcpyAsync wait mcStreamSynchronize event mcEventCreateWithFlags
        record mcEventRecord query mcEventQuery synchronize_device mcDeviceSynchronize; mcMalloc),
];

#[test]
fn copies_are_of_the_kind_that_is_named() {
    for vendor in VENDORS {
        alone(|| {
            let (mut address, mut stream) = (0, 0);
            ok(cu!((vendor.allocate)(&mut address, 4096)));
            ok(cu!((vendor.stream)(&mut stream, 1, 0)));
            let host = Pinned::new(64);
            host.set(&[7; 64]);
            let at = host.at as u64;
            ok(cu!((vendor.copy)(address, at, 64, 1, stream)));
            ok(cu!((vendor.copy)(address + 64, address, 64, 3, stream)));
            ok(cu!((vendor.copy)(at, address + 64, 32, 2, stream)));
            ok(cu!((vendor.wait)(stream)));
            assert_eq!(peek(address, 128), [7; 128]);
            assert_eq!(host.bytes(64), [7; 64]);
            for (to, from, kind) in [
                (address, at, 2),
                (at, address, 1),
                (address, at, 3),
                (address, at, 0),
                (address, at, 4),
            ] {
                let refused = cu!((vendor.copy)(to, from, 64, kind, stream));
                assert_eq!(refused, CUDA_ERROR_INVALID_VALUE, "kind {kind}");
                assert_eq!(cu!((vendor.last_error)()), refused);
                assert_eq!(cu!((vendor.last_error)()), CUDA_SUCCESS);
            }
        });
    }
}

#[test]
fn a_thread_has_the_first_device_until_it_sets_another() {
    for vendor in VENDORS {
        alone(|| {
            let mut device = 7;
            ok(cu!((vendor.device)(&mut device)));
            assert_eq!(device, 0);
            ok(cu!((vendor.set_device)(1)));
            ok(cu!((vendor.device)(&mut device)));
            assert_eq!(device, 1);
            let mut stream = 0;
            ok(cu!((vendor.stream)(&mut stream, 1, 0)));
            let elsewhere = std::thread::scope(|scope| {
                let waiting = scope.spawn(|| cu!((vendor.wait)(stream)));
                waiting.join().unwrap_or(CUDA_SUCCESS)
            });
            assert_eq!(elsewhere, CUDA_ERROR_INVALID_HANDLE);
            assert_eq!(cu!((vendor.set_device)(2)), CUDA_ERROR_INVALID_DEVICE);
        });
    }
}

#[test]
fn events_calls_and_forbidden_calls_answer_as_the_vendors() {
    for vendor in VENDORS {
        alone(|| {
            let (mut stream, mut event, mut address) = (0, 0, 0);
            ok(cu!((vendor.stream)(&mut stream, 1, 0)));
            ok(cu!((vendor.event)(&mut event, 0)));
            softcuda_hold(stream);
            ok(cu!((vendor.record)(event, stream)));
            assert_eq!(cu!((vendor.query)(event)), vendor.not_ready);
            softcuda_release(stream);
            ok(cu!((vendor.wait)(stream)));
            ok(cu!((vendor.query)(event)));
            let before = calls(vendor.allocate_name);
            fail(vendor.allocate_name, 1, CUDA_ERROR_OUT_OF_MEMORY);
            let failed = cu!((vendor.allocate)(&mut address, 64));
            assert_eq!(failed, CUDA_ERROR_OUT_OF_MEMORY);
            ok(cu!((vendor.allocate)(&mut address, 64)));
            assert_eq!(calls(vendor.allocate_name), before + 2);
        });
        aborts("waits for all work on it", || {
            cu!((vendor.synchronize_device)());
        });
        aborts("the legacy stream", || {
            cu!((vendor.record)(0, 0));
        });
    }
}

/// Begins ACL with a device on this thread.
fn begin() {
    ok(cu!(aclInit(null())));
    ok(cu!(aclrtSetDevice(0)));
}

fn acl_stream() -> Handle {
    get!(Handle, aclrtCreateStreamWithConfig(0, 3))
}

#[test]
fn acl_begins_once_and_wants_a_device_on_each_thread() {
    alone(|| {
        let mut device = 7;
        assert_eq!(cu!(aclrtSetDevice(0)), UNINITIALIZE);
        ok(cu!(aclInit(null())));
        assert_eq!(cu!(aclInit(null())), REPEAT_INITIALIZE);
        assert_eq!(cu!(aclrtGetDevice(&mut device)), CONTEXT_NULL);
        let mut stream = 0;
        assert_eq!(
            cu!(aclrtCreateStreamWithConfig(&mut stream, 0, 3)),
            CONTEXT_NULL
        );
        ok(cu!(aclrtSetDevice(1)));
        assert_eq!(get!(i32, aclrtGetDevice()), 1);
        let stream = acl_stream();
        let elsewhere = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| cu!(aclrtSynchronizeStream(stream)));
            waiting.join().unwrap_or(CUDA_SUCCESS)
        });
        assert_eq!(elsewhere, CONTEXT_NULL);
    });
}

#[test]
fn acl_copies_name_the_room_and_their_kind() {
    alone(|| {
        begin();
        let stream = acl_stream();
        let address = get!(u64, aclrtMalloc(4096, 0));
        poke(address, &[9; 4096]);
        let host = Pinned::pageable(4096);
        ok(cu!(aclrtHostRegisterV2(host.at, 4096, 0x1000_0000)));
        let at = host.at as u64;
        ok(cu!(aclrtMemcpyAsync(at, 4096, address, 100, 2, stream)));
        ok(cu!(aclrtMemcpyAsync(
            address + 64,
            64,
            address,
            64,
            3,
            stream
        )));
        ok(cu!(aclrtSynchronizeStream(stream)));
        assert_eq!(host.bytes(100), [9; 100]);
        for (to, room, from, kind) in [
            (at, 99, address, 2),
            (at, 100, address, 1),
            (address, 100, at, 2),
            (address + 64, 100, address + 8, 3),
        ] {
            let refused = cu!(aclrtMemcpyAsync(to, room, from, 100, kind, stream));
            assert_eq!(refused, PARAM_INVALID, "room {room}, kind {kind}");
        }
        ok(cu!(aclrtHostUnregister(host.at)));
        for flags in [0, 2, 1] {
            assert_eq!(
                cu!(aclrtHostRegisterV2(host.at, 4096, flags)),
                PARAM_INVALID
            );
        }
    });
}

#[test]
fn acl_pins_pages() {
    alone(|| {
        begin();
        let host = Pinned::pageable(8192);
        for at in [1, 64, 512] {
            let refused = cu!(aclrtHostRegisterV2(host.at + at, 4096, 0x1000_0000));
            assert_eq!(refused, PARAM_INVALID, "{at}");
        }
        ok(cu!(aclrtHostRegisterV2(host.at + 4096, 100, 0x1000_0000)));
    });
}

#[test]
fn acl_has_contexts_besides_a_devices_own() {
    alone(|| {
        ok(cu!(aclInit(null())));
        let mut current = 0;
        assert_eq!(cu!(aclrtGetCurrentContext(&mut current)), CONTEXT_NULL);
        ok(cu!(aclrtSetDevice(0)));
        let own = get!(Handle, aclrtGetCurrentContext());
        let other = get!(Handle, aclrtCreateContext(0));
        assert_eq!(get!(Handle, aclrtGetCurrentContext()), other);
        assert_eq!(get!(i32, aclrtGetDevice()), 0);
        let stream = acl_stream();
        ok(cu!(aclrtSetDevice(0)));
        assert_eq!(get!(Handle, aclrtGetCurrentContext()), own);
        assert_eq!(cu!(aclrtSynchronizeStream(stream)), PARAM_INVALID);
        ok(cu!(aclrtSetCurrentContext(other)));
        ok(cu!(aclrtSynchronizeStream(stream)));
        assert_eq!(cu!(aclrtSetCurrentContext(0)), PARAM_INVALID);
    });
}

#[test]
fn streams_say_whether_they_are_over() {
    alone(|| {
        begin();
        let stream = acl_stream();
        let event = get!(Handle, aclrtCreateEventWithFlag(8));
        softcuda_hold(stream);
        ok(cu!(aclrtRecordEvent(event, stream)));
        let acl = || {
            let mut status = 7;
            ok(cu!(aclrtStreamQuery(stream, &mut status)));
            status
        };
        assert_eq!(acl(), 1);
        let asked = [
            cu!(hipStreamQuery(stream)),
            cu!(musaStreamQuery(stream)),
            cu!(mcStreamQuery(stream)),
        ];
        assert_eq!(asked, [600, 34, 600]);
        softcuda_release(stream);
        ok(cu!(aclrtSynchronizeStream(stream)));
        assert_eq!(acl(), 0);
        ok(cu!(musaStreamQuery(stream)));
    });
}

#[test]
fn acl_says_one_of_an_event_that_is_done() {
    alone(|| {
        begin();
        let stream = acl_stream();
        let event = get!(Handle, aclrtCreateEventWithFlag(8));
        let status = || {
            let mut status = 7;
            ok(cu!(aclrtQueryEventStatus(event, &mut status)));
            status
        };
        assert_eq!(status(), 0); // never recorded
        softcuda_hold(stream);
        ok(cu!(aclrtRecordEvent(event, stream)));
        assert_eq!(status(), 0);
        softcuda_release(stream);
        ok(cu!(aclrtSynchronizeStream(stream)));
        assert_eq!(status(), 1);
    });
    aborts("aclrtSynchronizeDevice", || {
        begin();
        cu!(aclrtSynchronizeDevice());
    });
}
