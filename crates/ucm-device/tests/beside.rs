//! Other uses of devices in the process: graph captures, and threads with devices and contexts of
//! their own.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "names memory of the test's own")]

use std::ffi::{CStr, c_int};
use std::ptr::null;

use crate::common::{Driver, Memory, Random, copy_on, gather, open_named, slot};
use ucm_device::{Direction, HostSpan, Piece, Transfer};
use ucm_infra::begin_thread;

const DEVICES: [&str; 5] = ["cuda", "hip", "musa", "maca", "ascend"];

/// Opens a device, uses it in every way, closes it.
fn everything(memory: &Memory, name: &str, event: u64) {
    let content = Random::new(5).bytes(memory.len);
    memory.fill(&content);
    for transfer in [
        Transfer::Auto,
        Transfer::Dma,
        Transfer::Sm,
        Transfer::Staging,
    ] {
        let device = open_named(name, transfer);
        device.event_of(event).unwrap().wait(None).unwrap();
        let mut stream = device.make_stream().unwrap();
        let mut slot = slot(&*device, 1 << 20);
        let pieces: Vec<Piece> = (0..100)
            .map(|i| Piece {
                at: i * 3000,
                span: memory.span(i * 4096, 3000),
            })
            .collect();
        gather(&mut *stream, &pieces, slot.as_mut_slice()).unwrap();
        for piece in &pieces {
            let from = (piece.span.addr() - memory.address) as usize;
            assert!(slot.as_slice()[piece.at..piece.at + 3000] == content[from..from + 3000]);
        }
        stream.scatter(slot.as_slice(), &pieces).unwrap();
        let mut own = vec![0_u8; 3 * 4096];
        let first = own.as_mut_ptr().expose_provenance().next_multiple_of(4096) as u64;
        // SAFETY: inside the vector, which lives until the registration and the copy have ended.
        let span = unsafe { HostSpan::new(first, 4096) };
        let registered = device.register(span).unwrap();
        stream
            .transfer(Direction::ToHost, &[(memory.span(0, 4096), span)])
            .unwrap();
        drop(registered);
        drop(device.allocate(100).unwrap());
        memory.fill(&content);
    }
}

#[test]
fn a_graph_that_a_thread_captures_is_not_disturbed_and_disturbs_nothing() {
    let driver = Driver::load();
    for name in DEVICES {
        let memory = driver.memory(1 << 20); // and its context is this thread's
        let event = driver.recorded_event(&driver.memory(64));
        let captured = driver.begin_capture();
        everything(&memory, name, event); // this thread captures
        std::thread::scope(|scope| {
            scope.spawn(|| everything(&memory, name, event)); // and this one does not
        });
        assert_eq!(driver.end_capture(captured), 0, "{name}");
    }
}

/// A thread's previous context, or none, is current again: torch uses the device of the current
/// context.
#[test]
fn a_thread_keeps_the_context_that_it_had() {
    let driver = Driver::load();
    for name in ["cuda", "cuda:1"] {
        driver.memory(64);
        let own = driver.current();
        assert_ne!(own, 0);
        use_device(name);
        assert_eq!(driver.current(), own, "{name}");
        driver.clear_current();
        use_device(name);
        assert_eq!(driver.current(), 0, "{name}");
    }
}

/// Copies to a device's own memory and back, by this thread.
fn use_device(name: &str) {
    let device = open_named(name, Transfer::Auto);
    copy_on(&*device);
}

/// A thread of the caller keeps its device. A thread of ours does not switch back to the first
/// device, which on some runtimes would allocate memory there.
#[test]
fn threads_of_the_caller_keep_their_device_and_ours_take_no_other() {
    type Get = (&'static CStr, &'static CStr, &'static str);
    let driver = Driver::load();
    let vendors: [Get; 3] = [
        (c"hipGetDevice", c"hipSetDevice", "hip:1"),
        (c"musaGetDevice", c"musaSetDevice", "musa:1"),
        (c"mcGetDevice", c"mcSetDevice", "maca:1"),
    ];
    for (get, set, name) in vendors {
        let set_to = |device: c_int| assert_eq!(driver.call(set, device, ()), 0);
        let had = || {
            let mut device: c_int = 7;
            assert_eq!(driver.call(get, &raw mut device, ()), 0);
            device
        };
        for own in [0, 1] {
            set_to(own);
            use_device(name);
            assert_eq!(had(), own, "{name}");
        }
        let sets = driver.calls(set.to_str().unwrap());
        let device = open_named(name, Transfer::Auto); // on a thread of ours
        let opened = driver.calls(set.to_str().unwrap()) - sets;
        assert_eq!(
            opened, 1,
            "{name}: by the thread that opened it, and never back"
        );
        begin_thread("ours", move || copy_on(&*device))
            .unwrap()
            .join()
            .unwrap();
    }
    // ACL has contexts, of which a device may have several.
    assert!([0, 100_002].contains(&driver.call(c"aclInit", null::<u8>(), ())));
    let current = || {
        let mut context = 0_usize;
        assert_eq!(
            driver.call(c"aclrtGetCurrentContext", &raw mut context, ()),
            0
        );
        context
    };
    for (own, name) in [
        (0, "ascend"),
        (0, "ascend:1"),
        (1, "ascend"),
        (1, "ascend:1"),
    ] {
        let mut made = 0_usize;
        assert_eq!(
            driver.call(c"aclrtCreateContext", &raw mut made, own as c_int),
            0
        );
        assert_eq!(current(), made);
        use_device(name);
        assert_eq!(current(), made, "{name}");
    }
    driver.clear_current();
}
