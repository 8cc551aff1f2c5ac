//! A context that is broken for good: every later call fails at once, and everything can be closed.
//! In a process of its own, because its contexts stay broken.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "names memory that is not there")]

mod common;

use std::sync::Arc;

use common::{Driver, eventually, gather, open_named, slot};
use ucm_core::{Error, Result};
use ucm_device::{ArenaOptions, Device, DeviceSpan, Piece, Stream, Transfer, open_device};
use ucm_infra::SystemClock;

const LEN: usize = 1 << 16;

/// Every call on a broken device fails, and none hangs.
fn all_fail(
    name: &str,
    device: &Arc<dyn Device>,
    stream: &mut dyn Stream,
    page: DeviceSpan,
    answer: &str,
) {
    let mut slot = slot(&**device, LEN);
    let piece = [Piece { at: 0, span: page }];
    let mut failures: Vec<Option<Error>> = vec![
        gather(stream, &piece, slot.as_mut_slice()).err(),
        stream.scatter(slot.as_slice(), &piece).err(),
        device.allocate(64).err(),
        device.event_of(1 << 52).unwrap().wait(None).err(),
        open_device(name, Transfer::Auto, SystemClock::shared()).err(),
    ];
    let again = device.make_stream();
    failures.push(
        again
            .and_then(|mut stream| stream.scatter(slot.as_slice(), &piece))
            .err(),
    );
    for (number, failure) in failures.into_iter().enumerate() {
        let text = failure.unwrap().to_string();
        assert!(text.contains(answer), "{name}, {number}: {text}");
    }
    // Host memory is still available.
    device.make_arena(LEN, ArenaOptions::default()).unwrap();
}

/// A gather into a slot on a stopped device, until its context is broken.
fn broken_meanwhile(
    driver: &Driver,
    device: &dyn Device,
    page: DeviceSpan,
    breaks: impl FnOnce(),
) -> Result<()> {
    let mut slot = slot(device, LEN);
    let mut stream = device.make_stream().unwrap();
    let piece = [Piece { at: 0, span: page }];
    gather(&mut *stream, &piece, slot.as_mut_slice()).unwrap();
    driver.hold();
    let result = std::thread::scope(|scope| {
        let copied = scope.spawn(|| gather(&mut *stream, &piece, slot.as_mut_slice()));
        breaks();
        copied.join().unwrap()
    });
    driver.release();
    result
}

#[test]
fn a_broken_context_fails_every_call_at_once_and_closes() {
    let driver = Driver::load();
    for (number, (name, waits)) in [
        ("cuda", "cuStreamSynchronize"),
        ("hip:1", "hipStreamSynchronize"),
    ]
    .into_iter()
    .enumerate()
    {
        let device = open_named(name, Transfer::Sm);
        let memory = device.allocate(LEN).unwrap();
        // SAFETY: the memory lives until the end.
        let page = unsafe { DeviceSpan::new(memory.address(), LEN as u64) };
        let mut stream = device.make_stream().unwrap();
        let mut host = slot(&*device, LEN);
        gather(
            &mut *stream,
            &[Piece { at: 0, span: page }],
            host.as_mut_slice(),
        )
        .unwrap();
        let answer = if number == 0 {
            // By a kernel of ours that accesses unmapped memory. SAFETY: no memory is mapped there,
            // which is the purpose.
            let wild = unsafe { DeviceSpan::new(memory.address() + (1 << 40), 64) };
            let pieces = [Piece { at: 0, span: wild }];
            gather(&mut *stream, &pieces, host.as_mut_slice()).unwrap_err();
            "CUDA_ERROR_ILLEGAL_ADDRESS"
        } else {
            let before = driver.calls(waits);
            let result = broken_meanwhile(&driver, &*device, page, || {
                eventually("it waits", || driver.calls(waits) > before + 1);
                driver.break_context(1, 719);
            });
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains(waits) && error.contains("CUDA_ERROR_LAUNCH_FAILED"),
                "{error}"
            );
            "CUDA_ERROR_LAUNCH_FAILED"
        };
        all_fail(name, &device, &mut *stream, page, answer);
        drop((stream, host, memory, device));
    }
}
