//! Devices of every vendor over the software driver, which has their functions too: correct bytes,
//! order, failures, threads.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;

use crate::common::{
    ALLOCATIONS, Driver, FIRST_STREAMS, Memory, REGISTRATIONS, Random, STREAMS, TO_DEVICE, TO_HOST,
    gather, open_named as open, slot, wait_late,
};
use ucm_core::ErrorKind;
use ucm_device::{Device, Piece, Transfer, open_device};
use ucm_infra::SystemClock;

/// Every vendor, on a thread's default device and on another.
const DEVICES: [&str; 8] = [
    "hip", "hip:1", "musa", "musa:1", "maca", "maca:1", "ascend", "ascend:1",
];

const MIB: usize = 1 << 20;

/// Pieces of random lengths, some of them neighbours on both sides.
fn pieces(random: &mut Random, memory: &Memory, host: usize) -> Vec<Piece> {
    let (mut at, mut address) = (random.below(100), random.below(100));
    let mut pieces = Vec::new();
    while pieces.len() < 60 {
        let len = [1, 7, 512, 4096, 40_000][random.below(5)];
        if at + len > host || address + len > memory.len {
            break;
        }
        pieces.push(Piece {
            at,
            span: memory.span(address, len),
        });
        let gap = [0, 0, 5, 64][random.below(4)];
        at += len + gap;
        address += len + gap * random.below(3);
    }
    pieces
}

/// Copies each piece from its place in one to its place in the other.
fn moved(pieces: &[Piece], memory: &Memory, direction: i32, from: &[u8], into: &[u8]) -> Vec<u8> {
    let mut into = into.to_vec();
    for piece in pieces {
        let (device, len) = (
            (piece.span.addr() - memory.address) as usize,
            piece.span.len() as usize,
        );
        let (from_at, to_at) = if direction == TO_HOST {
            (device, piece.at)
        } else {
            (piece.at, device)
        };
        into[to_at..to_at + len].copy_from_slice(&from[from_at..from_at + len]);
    }
    into
}

#[test]
fn every_vendor_moves_the_bytes_it_should_and_no_others() {
    let driver = Driver::load();
    let memory = driver.memory(MIB);
    for (number, name) in DEVICES.into_iter().enumerate() {
        for transfer in [Transfer::Auto, Transfer::Staging] {
            let device = open(name, transfer);
            let mut stream = device.make_stream().unwrap();
            let mut slot = slot(&*device, MIB);
            for round in 0..3 {
                let mut random = Random::new(1 + round + 50 * number as u64);
                driver.jitter(round, 50);
                let pieces = pieces(&mut random, &memory, slot.len());
                let (on_device, on_host) = (random.bytes(memory.len), random.bytes(slot.len()));
                memory.fill(&on_device);
                slot.as_mut_slice().copy_from_slice(&on_host);
                gather(&mut *stream, &pieces, slot.as_mut_slice()).unwrap();
                let right = moved(&pieces, &memory, TO_HOST, &on_device, &on_host);
                assert!(
                    slot.as_slice() == right,
                    "{name}, {transfer:?}, round {round}"
                );
                slot.as_mut_slice().copy_from_slice(&on_host);
                stream.scatter(slot.as_slice(), &pieces).unwrap();
                let right = moved(&pieces, &memory, TO_DEVICE, &on_host, &on_device);
                assert!(
                    memory.bytes() == right,
                    "{name}, {transfer:?}, round {round}"
                );
            }
            // Memory that the device does not pin.
            let mut random = Random::new(7);
            let mut ordinary = random.bytes(300_000);
            let pieces = pieces(&mut random, &memory, ordinary.len());
            let right = moved(&pieces, &memory, TO_HOST, &memory.bytes(), &ordinary);
            gather(&mut *stream, &pieces, &mut ordinary).unwrap();
            assert!(ordinary == right, "{name}");
            driver.jitter(0, 0);
        }
    }
}

/// Otherwise our copies would wait for the default stream, which is torch's, and run after the
/// model's computation.
#[test]
fn streams_have_the_highest_priority_and_wait_for_no_default_stream() {
    let driver = Driver::load();
    let memory = driver.memory(4096);
    for name in DEVICES.into_iter().chain(["cuda"]) {
        let before = [STREAMS, FIRST_STREAMS].map(|kind| driver.live(kind));
        let device = open(name, Transfer::Auto);
        let mut stream = device.make_stream().unwrap();
        let mut slot = slot(&*device, 4096);
        let span = memory.span(0, 4096);
        gather(&mut *stream, &[Piece { at: 0, span }], slot.as_mut_slice()).unwrap();
        let [all, first] = [STREAMS, FIRST_STREAMS].map(|kind| driver.live(kind));
        assert!(all > before[0], "{name}");
        assert_eq!(all - before[0], first - before[1], "{name}");
    }
}

/// The gather starts when the event of the caller's stream is done, by each vendor's codes.
#[test]
fn a_copy_waits_for_the_callers_event_and_not_longer_than_it_may() {
    let driver = Driver::load();
    let memory = driver.memory(4096);
    for name in ["hip", "musa", "maca", "ascend"] {
        let device = open(name, Transfer::Auto);
        memory.fill(&[1; 4096]);
        driver.hold();
        let event = device.event_of(driver.recorded_event(&memory)).unwrap();
        assert!(!event.done(), "{name}");
        // A query of an unfinished event leaves no error in the caller's runtime.
        if let Some(last_error) = driver.last_error(name) {
            assert_eq!(last_error, 0, "{name}");
        }
        assert_eq!(wait_late(&event, 2).kind(), ErrorKind::Timeout, "{name}");
        let waiting = std::thread::spawn({
            let event = Arc::clone(&event);
            move || event.wait(None)
        });
        driver.release();
        waiting.join().unwrap().unwrap();
        assert!(event.done(), "{name}");
        let mut host = vec![0; 4096];
        let whole = [Piece {
            at: 0,
            span: memory.span(0, 4096),
        }];
        let mut stream = device.make_stream().unwrap();
        gather(&mut *stream, &whole, &mut host).unwrap();
        assert_eq!(host, [0x5a; 4096], "{name}");
    }
}

/// Each call of a copy fails once: the copy fails or is correct, the next one is correct, and
/// nothing leaks.
#[test]
fn a_call_that_fails_costs_one_copy_and_leaves_nothing() {
    let driver = Driver::load();
    let memory = driver.memory(MIB);
    const WAIT: usize = 2;
    let of_shape = [
        "SetDevice",
        "MemcpyAsync",
        "StreamSynchronize",
        "StreamCreateWithPriority",
        "HostRegister",
    ];
    let of_acl = [
        "GetCurrentContext",
        "MemcpyAsync",
        "SynchronizeStream",
        "CreateStreamWithConfig",
        "HostRegisterV2",
    ];
    // One call fails during three gathers.
    let fails_once = |device: &dyn Device, wait: &str, function: &str, nth: u64| {
        let mut stream = device.make_stream().unwrap();
        let mut slot = slot(device, MIB);
        let mut random = Random::new(nth);
        let pieces = pieces(&mut random, &memory, slot.len());
        let (bytes, host) = (random.bytes(memory.len), random.bytes(slot.len()));
        memory.fill(&bytes);
        slot.as_mut_slice().copy_from_slice(&host);
        let right = moved(&pieces, &memory, TO_HOST, &bytes, &host);
        // The existing lane is not used again; creating another can fail too.
        driver.fail(wait, 1, 999);
        gather(&mut *stream, &[], &mut []).unwrap_err();
        let calls = driver.calls(function);
        driver.fail(function, nth, 999);
        let mut failed = 0;
        for _ in 0..3 {
            match gather(&mut *stream, &pieces, slot.as_mut_slice()) {
                Ok(()) => assert!(slot.as_slice() == right, "{function}, {nth}"),
                Err(_) => failed += 1,
            }
        }
        assert!(driver.calls(function) > calls, "{function}");
        driver.mend();
        assert!(failed < 2, "{function}, {nth}");
        gather(&mut *stream, &pieces, slot.as_mut_slice()).unwrap();
        assert!(slot.as_slice() == right, "{function}, {nth}");
    };
    let left = || [ALLOCATIONS, REGISTRATIONS, STREAMS].map(|kind| driver.live(kind));
    let before = left();
    let vendors = [
        ("hip:1", "hip", of_shape),
        ("musa:1", "musa", of_shape),
        ("maca:1", "mc", of_shape),
        ("ascend:1", "aclrt", of_acl),
    ];
    for (name, prefix, functions) in vendors {
        let device = open(name, Transfer::Auto);
        let functions = functions.map(|function| format!("{prefix}{function}"));
        for function in &functions {
            for nth in 1..5 {
                // Each on a thread of its own: a thread whose device could not be restored has
                // another one from then on.
                std::thread::scope(|scope| {
                    scope.spawn(|| fails_once(&*device, &functions[WAIT], function, nth));
                });
            }
        }
    }
    assert_eq!(left(), before);
}

#[test]
fn a_device_that_is_not_there_is_refused_by_its_name() {
    let driver = Driver::load();
    for (name, count) in [
        ("hip", "hipGetDeviceCount"),
        ("musa", "musaGetDeviceCount"),
        ("maca", "mcGetDeviceCount"),
    ] {
        driver.fail(count, 1, 100);
        let none = open_device(name, Transfer::Auto, SystemClock::shared())
            .err()
            .unwrap();
        assert_eq!(none.kind(), ErrorKind::Unsupported, "{none}"); // counts as no runtime
    }
    driver.fail("aclrtGetDeviceCount", 1, 207_004);
    let none = open_device("ascend", Transfer::Auto, SystemClock::shared())
        .err()
        .unwrap();
    assert_eq!(none.kind(), ErrorKind::Unsupported, "{none}");
    driver.mend();
    for name in ["hip:2", "musa:2", "maca:2", "ascend:2"] {
        let refused = open_device(name, Transfer::Auto, SystemClock::shared());
        let error = refused.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(
            text.contains(&format!("device={name}")) && text.contains("devices=2"),
            "{text}"
        );
    }
}

/// A call that fails while a device is opened is an error that names it, and the device can be
/// opened afterwards.
#[test]
fn a_device_that_does_not_answer_is_not_opened() {
    let driver = Driver::load();
    for (name, function) in [
        ("hip", "hipGetDeviceCount"),
        ("musa", "musaRuntimeGetVersion"),
        ("maca", "mcGetDeviceCount"),
        ("ascend", "aclInit"),
    ] {
        let fresh = format!("{name}:1");
        driver.fail(function, 1, 999);
        let opened = open_device(&fresh, Transfer::Auto, SystemClock::shared());
        driver.mend();
        let refused = opened.err().unwrap().to_string();
        assert!(refused.contains(function), "{refused}");
        open(&fresh, Transfer::Auto);
    }
}
