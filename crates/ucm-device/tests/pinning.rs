//! Pinned host memory: pinned until its owner is dropped, and not longer; if the driver refuses, it
//! is used unpinned.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "names memory of the test's own")]

use crate::common::{Driver, REGISTRATIONS, Random, eventually, gather, open, open_named, slot};
use ucm_core::ErrorKind;
use ucm_device::{Direction, HostSpan, Piece, Transfer};
use ucm_infra::log;

const PAGE: usize = 4096;

/// Pages of ordinary memory, and a span of some of them.
fn pages(len: usize, from: usize) -> (Vec<u8>, HostSpan) {
    let mut bytes = vec![0_u8; len + PAGE];
    let first = bytes
        .as_mut_ptr()
        .expose_provenance()
        .next_multiple_of(PAGE);
    // SAFETY: inside the vector, which the tests keep until nothing uses it any more.
    let span = unsafe { HostSpan::new((first + from) as u64, (len - from) as u64) };
    (bytes, span)
}

/// While other memory is being pinned, which takes long.
#[test]
fn the_driver_has_let_go_when_the_owner_has_ended() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    let device = open(Transfer::Dma);
    let (_bytes, span) = pages(1 << 16, 0);
    let registered = device.register(span).unwrap();
    let mut ended = slot(&*device, 1 << 16);
    let whole = [Piece {
        at: 0,
        span: memory.span(0, 1 << 16),
    }];
    gather(
        &mut *device.make_stream().unwrap(),
        &whole,
        ended.as_mut_slice(),
    )
    .unwrap();
    let mut other = slot(&*device, 1 << 16);
    // SAFETY: the slot lives until the copy below is over.
    let to = unsafe {
        HostSpan::new(
            other.as_mut_slice().as_mut_ptr().expose_provenance() as u64,
            1 << 16,
        )
    };
    let before = driver.live(REGISTRATIONS);
    let pins = driver.calls("cuMemHostRegister_v2");
    driver.block(Some(c"cuMemHostRegister_v2"));
    let left = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = device.make_stream().unwrap();
            stream
                .transfer(Direction::ToHost, &[(memory.span(0, 1 << 16), to)])
                .unwrap();
        });
        eventually("it is being pinned", || {
            driver.calls("cuMemHostRegister_v2") > pins
        });
        drop(ended);
        let of_arena = driver.live(REGISTRATIONS);
        drop(registered);
        let of_caller = driver.live(REGISTRATIONS);
        driver.block(None);
        [of_arena, of_caller]
    });
    // Before the first is unmapped, and before the owner of the other may free it.
    assert_eq!(left, [before - 1, before - 2]);
    assert_eq!(driver.live(REGISTRATIONS), before - 1);
}

/// If the driver cannot unregister memory, the range stays reserved: copies to other memory there
/// would go wrong.
#[test]
fn memory_that_the_driver_keeps_is_never_unmapped() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    memory.fill(&Random::new(2).bytes(1 << 20));
    let device = open(Transfer::Dma);
    let whole = [Piece {
        at: 0,
        span: memory.span(0, 1 << 20),
    }];
    let mut stream = device.make_stream().unwrap();
    let is_mapped = |at: *mut u8| {
        // SAFETY: only tests for a mapping.
        unsafe { libc::msync(at.cast(), PAGE, libc::MS_ASYNC) == 0 }
    };
    let mut kept = slot(&*device, 1 << 20);
    gather(&mut *stream, &whole, kept.as_mut_slice()).unwrap();
    let at = kept.as_mut_slice().as_mut_ptr();
    driver.fail("cuMemHostUnregister", 1, 999);
    drop(kept);
    driver.mend();
    assert!(is_mapped(at));
    let mut unmapped = 0; // unless another mapping took the place
    for _ in 0..3 {
        let mut next = slot(&*device, 1 << 20);
        let at = next.as_mut_slice().as_mut_ptr();
        gather(&mut *stream, &whole, next.as_mut_slice()).unwrap();
        assert!(next.as_slice() == memory.bytes());
        drop(next);
        unmapped += usize::from(!is_mapped(at));
    }
    assert!(unmapped > 0);
}

#[test]
fn spans_of_no_byte_are_nowhere() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    let device = open(Transfer::Auto);
    let (bytes, span) = pages(2 * PAGE, 0);
    let _registered = device.register(span).unwrap();
    let mut stream = device.make_stream().unwrap();
    // SAFETY: of no byte.
    let behind = unsafe { HostSpan::new(span.addr() + span.len(), 0) };
    for direction in [Direction::ToDevice, Direction::ToHost] {
        stream
            .transfer(direction, &[(memory.span(0, 0), behind)])
            .unwrap();
    }
    drop(bytes);
    // An arena of whole parts ends at the border of a part.
    let mut whole = slot(&*device, 64 << 20);
    let behind = whole.as_mut_slice().split_at_mut(64 << 20).1;
    gather(&mut *stream, &[], behind).unwrap();
    stream.scatter(behind, &[]).unwrap();
}

#[test]
fn that_a_driver_does_not_pin_is_said_once() {
    log::keep();
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    let content = Random::new(9).bytes(1 << 20);
    memory.fill(&content);
    for (name, call) in [
        ("cuda", "cuMemHostRegister_v2"),
        ("hip", "hipHostRegister"),
        ("ascend", "aclrtHostRegisterV2"),
    ] {
        log::take(0);
        driver.fail_times(call, 1, 100, 999);
        let device = open_named(name, Transfer::Auto);
        let mut stream = device.make_stream().unwrap();
        for _ in 0..4 {
            let mut slot = slot(&*device, 1 << 20);
            let whole = [Piece {
                at: 0,
                span: memory.span(0, 1 << 20),
            }];
            gather(&mut *stream, &whole, slot.as_mut_slice()).unwrap();
            assert!(slot.as_slice() == content, "{name}");
        }
        let said = log::take(0).into_iter();
        let said: Vec<String> = said
            .map(|it| it.message)
            .filter(|message| message.contains("pin"))
            .collect();
        assert_eq!(
            said,
            ["the driver does not pin host memory: copies are slower"],
            "{name}"
        );
        let (_bytes, span) = pages(PAGE, 0);
        device.register(span).err().unwrap();
        driver.mend();
    }
}

/// Memory with another alignment is refused and copied unpinned.
#[test]
fn ascend_pins_what_begins_at_a_page() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 16);
    let content = Random::new(4).bytes(1 << 16);
    memory.fill(&content);
    let device = open_named("ascend", Transfer::Auto);
    let mut stream = device.make_stream().unwrap();
    let before = driver.live(REGISTRATIONS);
    for from in [1, 64, 512, 0] {
        let (bytes, span) = pages(8000, from);
        let registered = device.register(span);
        assert_eq!(driver.live(REGISTRATIONS), before + u64::from(from == 0));
        match &registered {
            Ok(_) => assert_eq!(from, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                assert!(error.to_string().contains("multiple of 4096"), "{error}");
            }
        }
        let len = span.len() as usize;
        stream
            .transfer(Direction::ToHost, &[(memory.span(0, len), span)])
            .unwrap();
        drop(registered);
        let at = (span.addr() - bytes.as_ptr().expose_provenance() as u64) as usize;
        assert!(bytes[at..at + len] == content[..len]);
    }
}
