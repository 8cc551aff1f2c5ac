//! Devices of CUDA over the software driver: correct bytes by every method, order, failures, leaks.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;

use crate::common::{
    ALLOCATIONS, Driver, Memory, REGISTRATIONS, Random, STREAMS, gather, open, slot, wait_late,
};
use ucm_core::ErrorKind;
use ucm_device::{Piece, Transfer};

const TRANSFERS: [Transfer; 4] = [
    Transfer::Auto,
    Transfer::Dma,
    Transfer::Sm,
    Transfer::Staging,
];

/// Pieces of random lengths and alignments that do not overlap, in an order of its own.
fn pieces(random: &mut Random, memory: &Memory, host: usize) -> Vec<Piece> {
    let longest = [64, 1000, 20_000, 300_000][random.below(4)];
    let (mut at, mut address) = (random.below(100), random.below(100));
    let mut pieces = Vec::new();
    loop {
        let align = [1, 4, 8, 16, 64][random.below(5)];
        at = at.next_multiple_of(align);
        address = address.next_multiple_of(align);
        let len = random.below(longest + 1);
        if at + len > host || address + len > memory.len || pieces.len() == 200 {
            break;
        }
        pieces.push(Piece {
            at,
            span: memory.span(address, len),
        });
        at += len + [0, 0, 0, 7, 64][random.below(5)];
        address += len + [0, 16, 33, 4096][random.below(4)];
    }
    for i in (1..pieces.len()).rev().filter(|_| longest == 1000) {
        pieces.swap(i, random.below(i + 1));
    }
    pieces
}

fn place(memory: &Memory, piece: &Piece) -> usize {
    (piece.span.addr() - memory.address) as usize
}

/// Expected result of a gather.
fn gathered(pieces: &[Piece], memory: &Memory, device: &[u8], host: &[u8]) -> Vec<u8> {
    let mut host = host.to_vec();
    for piece in pieces {
        let (from, len) = (place(memory, piece), piece.span.len() as usize);
        host[piece.at..piece.at + len].copy_from_slice(&device[from..from + len]);
    }
    host
}

/// Expected bytes on the device after a scatter.
fn scattered(pieces: &[Piece], memory: &Memory, device: &[u8], host: &[u8]) -> Vec<u8> {
    let mut device = device.to_vec();
    for piece in pieces {
        let (to, len) = (place(memory, piece), piece.span.len() as usize);
        device[to..to + len].copy_from_slice(&host[piece.at..piece.at + len]);
    }
    device
}

#[test]
fn every_way_moves_the_bytes_it_should_and_no_others() {
    let driver = Driver::load();
    let memory = driver.memory(3 << 20);
    for (number, transfer) in TRANSFERS.into_iter().enumerate() {
        let device = open(transfer);
        let mut stream = device.make_stream().unwrap();
        let mut slot = slot(&*device, 2 << 20);
        for round in 0..12 {
            let mut random = Random::new(1 + round + 100 * number as u64);
            driver.jitter(round, 50);
            let pieces = pieces(&mut random, &memory, slot.len());
            let (before, host) = (random.bytes(memory.len), random.bytes(slot.len()));
            memory.fill(&before);
            slot.as_mut_slice().copy_from_slice(&host);
            gather(&mut *stream, &pieces, slot.as_mut_slice()).unwrap();
            assert!(
                slot.as_slice() == gathered(&pieces, &memory, &before, &host),
                "{transfer:?}, round {round}"
            );
            slot.as_mut_slice().copy_from_slice(&host);
            stream.scatter(slot.as_slice(), &pieces).unwrap();
            assert!(
                memory.bytes() == scattered(&pieces, &memory, &before, &host),
                "{transfer:?}, round {round}"
            );
        }
    }
}

/// A buffer that the device did not make is not pinned: kernels cannot reach it, and the driver
/// stages its copies.
#[test]
fn ordinary_memory_is_copied_too() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    for transfer in TRANSFERS {
        let device = open(transfer);
        let mut stream = device.make_stream().unwrap();
        let mut random = Random::new(5);
        let before = random.bytes(memory.len);
        let mut host = random.bytes(700_000);
        let pieces = pieces(&mut random, &memory, host.len());
        memory.fill(&before);
        let expected = gathered(&pieces, &memory, &before, &host);
        gather(&mut *stream, &pieces, &mut host).unwrap();
        assert!(host == expected, "{transfer:?}");
    }
}

/// The caller's stream writes the source of the gather; the copy begins when its event is done, or
/// never.
#[test]
fn a_copy_waits_for_the_callers_event_and_not_longer_than_it_may() {
    let driver = Driver::load();
    let memory = driver.memory(4096);
    memory.fill(&[1; 4096]);
    let device = open(Transfer::Auto);
    driver.hold();
    let event = device.event_of(driver.recorded_event(&memory)).unwrap();
    assert!(!event.done());
    assert_eq!(wait_late(&event, 5).kind(), ErrorKind::Timeout);
    let waiting = std::thread::spawn({
        let event = Arc::clone(&event);
        move || event.wait(None)
    });
    driver.release();
    waiting.join().unwrap().unwrap();
    let mut host = vec![0; 4096];
    let mut stream = device.make_stream().unwrap();
    let whole = [Piece {
        at: 0,
        span: memory.span(0, 4096),
    }];
    gather(&mut *stream, &whole, &mut host).unwrap();
    assert_eq!(host, [0x5a; 4096]);
    assert_eq!(
        device.event_of(0).err().unwrap().kind(),
        ErrorKind::InvalidInput
    );
}

/// Each call of a copy fails once, the first and later ones: the copy fails or is correct, the next
/// one is correct, and nothing leaks.
#[test]
fn a_call_that_fails_costs_one_copy_and_leaves_nothing() {
    const FAILING: [&str; 11] = [
        "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2",
        "cuLaunchKernel",
        "cuMemAlloc_v2",
        "cuMemHostGetDevicePointer_v2",
        "cuMemHostRegister_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamCreateWithPriority",
        "cuStreamSynchronize",
        "cuThreadExchangeStreamCaptureMode",
    ];
    const LEN: usize = 256 << 10;
    let driver = Driver::load();
    let memory = driver.memory(LEN);
    let left =
        |driver: &Driver| [ALLOCATIONS, REGISTRATIONS, STREAMS].map(|kind| driver.live(kind));
    let before = left(&driver);
    let mut calls = [0; FAILING.len()];
    for transfer in TRANSFERS {
        let device = open(transfer);
        let mut fails_once = |number: usize, nth: u64| {
            let function = FAILING[number];
            let mut stream = device.make_stream().unwrap();
            let mut slot = slot(&*device, LEN);
            let mut random = Random::new(number as u64 * 8 + nth);
            let pieces = pieces(&mut random, &memory, slot.len());
            let (bytes, host) = (random.bytes(memory.len), random.bytes(slot.len()));
            memory.fill(&bytes);
            slot.as_mut_slice().copy_from_slice(&host);
            // The existing lane is not used again; creating another can fail too.
            driver.fail("cuStreamSynchronize", 1, 999);
            gather(&mut *stream, &[], &mut []).unwrap_err();
            let made = driver.calls(function);
            driver.fail(function, nth, 999);
            let right = gathered(&pieces, &memory, &bytes, &host);
            let mut failed = 0;
            for _ in 0..3 {
                match gather(&mut *stream, &pieces, slot.as_mut_slice()) {
                    Ok(()) => assert!(slot.as_slice() == right, "{transfer:?}, {function}, {nth}"),
                    Err(_) => failed += 1,
                }
            }
            calls[number] += driver.calls(function) - made;
            driver.mend();
            assert!(failed < 2, "{transfer:?}, {function}, {nth}");
            gather(&mut *stream, &pieces, slot.as_mut_slice()).unwrap();
            assert!(slot.as_slice() == right, "{transfer:?}, {function}, {nth}");
        };
        for number in 0..FAILING.len() {
            for nth in 1..4 {
                // Each on a thread of its own: a thread whose context could not be restored keeps
                // it.
                std::thread::scope(|scope| {
                    scope.spawn(|| fails_once(number, nth));
                });
            }
        }
    }
    assert!(calls.iter().all(|&calls| calls > 0), "{calls:?}");
    assert_eq!(left(&driver), before);
}

/// On some drivers, freeing device memory waits for all work on the device.
#[test]
fn a_device_is_opened_with_one_set_of_buffers() {
    const CALLS: [&str; 4] = [
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
    ];
    let driver = Driver::load();
    let count = || CALLS.map(|call| driver.calls(call));
    let before = count();
    let device = open(Transfer::Auto);
    let opened = count();
    let since = |before: [u64; 4], after: [u64; 4]| -> [u64; 4] {
        std::array::from_fn(|i| after[i] - before[i])
    };
    // The allocations of the first lane are kept.
    assert_eq!(since(before, opened), [3, 1, 2, 1]);
    let memory = driver.memory(1 << 20);
    let memory_taken = count();
    let whole = [Piece {
        at: 0,
        span: memory.span(0, 1 << 20),
    }];
    let mut host = vec![0; 1 << 20];
    for _ in 0..3 {
        gather(&mut *device.make_stream().unwrap(), &whole, &mut host).unwrap();
    }
    assert_eq!(
        since(memory_taken, count()),
        [0; 4],
        "copies allocate and free nothing"
    );
    drop(device);
    assert_eq!(since(memory_taken, count()), [0, 2, 0, 1]);
}
