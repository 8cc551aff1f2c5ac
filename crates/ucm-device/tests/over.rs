//! The end of work: memory that the device may still access is not released before, whatever the
//! driver returns, and no wait exceeds its deadline.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::common::{
    ALLOCATIONS, Driver, Memory, REGISTRATIONS, Random, STREAMS, eventually, gather, open,
    open_named, slot,
};
use ucm_core::{ErrorKind, Result};
use ucm_device::{Piece, Transfer, open_device};
use ucm_infra::{Clock, ManualClock};

/// A device, with its calls to wait for a stream, to query it, and to become current on a thread.
const CALLS: [(&str, [&str; 3]); 5] = [
    (
        "cuda",
        [
            "cuStreamSynchronize",
            "cuStreamQuery",
            "cuCtxPushCurrent_v2",
        ],
    ),
    (
        "hip",
        ["hipStreamSynchronize", "hipStreamQuery", "hipGetDevice"],
    ),
    (
        "musa",
        ["musaStreamSynchronize", "musaStreamQuery", "musaGetDevice"],
    ),
    (
        "maca",
        ["mcStreamSynchronize", "mcStreamQuery", "mcGetDevice"],
    ),
    (
        "ascend",
        [
            "aclrtSynchronizeStream",
            "aclrtStreamQuery",
            "aclrtGetCurrentContext",
        ],
    ),
];

fn whole(memory: &Memory) -> [Piece; 1] {
    [Piece {
        at: 0,
        span: memory.span(0, memory.len),
    }]
}

/// Gathers while all streams are held, with failing calls; releases them after several calls of
/// `asked`. Checks that the gather did not return before, and returns its result.
fn gather_held(driver: &Driver, name: &str, asked: &str, fails: impl FnOnce()) -> Result<()> {
    let memory = driver.memory(4096);
    memory.fill(&[1; 4096]);
    let device = open_named(name, Transfer::Dma);
    let mut stream = device.make_stream().unwrap();
    let mut slot = slot(&*device, 4096);
    slot.as_mut_slice().fill(0xee);
    gather(&mut *stream, &whole(&memory), slot.as_mut_slice()).unwrap(); // pins, and has a lane
    slot.as_mut_slice().fill(0xee);
    driver.hold();
    let before = driver.calls(asked);
    fails();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let result = gather(&mut *stream, &whole(&memory), slot.as_mut_slice());
            // Later bytes would belong to another owner.
            slot.as_mut_slice().fill(7);
            tell.send(result).unwrap();
        });
        let returned = || told.try_recv().ok();
        eventually("its end is queried", || {
            assert!(
                returned().is_none(),
                "{name}: while the device could still write"
            );
            driver.calls(asked) >= before + 6
        });
        assert!(
            returned().is_none(),
            "{name}: while the device could still write"
        );
        driver.release();
    });
    driver.mend();
    let result = told.recv().unwrap();
    let mut stream = device.make_stream().unwrap();
    assert!(
        slot.as_slice().iter().all(|&byte| byte == 7),
        "{name}: late bytes"
    );
    gather(&mut *stream, &whole(&memory), slot.as_mut_slice()).unwrap();
    assert_eq!(slot.as_slice(), [1; 4096], "{name}");
    result
}

#[test]
fn a_wait_that_fails_says_nothing_of_the_work() {
    let driver = Driver::load();
    for (name, [wait, ask, bind]) in CALLS {
        let waits_fail = || {
            driver.fail_times(wait, 1, 3, 900);
            driver.fail_times(ask, 1, 4, 999);
        };
        let error = gather_held(&driver, name, ask, waits_fail).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        // The first is of the copy; then not even the query works.
        let error =
            gather_held(&driver, name, ask, || driver.fail_times(bind, 2, 5, 999)).unwrap_err();
        assert!(error.to_string().contains(bind), "{error}");
    }
}

/// With only plain copies correct, and memory unknown to the device.
#[test]
fn a_plain_copy_is_over_when_its_bytes_are_there() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    for (name, _) in CALLS {
        for wrong in [c"cuMemcpyHtoDAsync_v2", c"cuMemcpyDtoHAsync_v2"] {
            driver.corrupt(wrong);
        }
        let device = open_named(name, Transfer::Auto);
        driver.sound();
        let mut stream = device.make_stream().unwrap();
        for round in 1..6 {
            let mut random = Random::new(round);
            let content = random.bytes(7000);
            let pieces: Vec<Piece> = (0..7)
                .map(|i| Piece {
                    at: i * 1000,
                    span: memory.span(i * 3000, 1000),
                })
                .collect();
            memory.fill(&random.bytes(memory.len));
            driver.jitter(round, 5000);
            stream.scatter(&content, &pieces).unwrap();
            let there = memory.bytes();
            driver.jitter(round, 0);
            for piece in pieces {
                let to = (piece.span.addr() - memory.address) as usize;
                assert!(
                    there[to..to + 1000] == content[piece.at..piece.at + 1000],
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn a_device_that_does_not_answer_is_not_waited_for() {
    let driver = Driver::load();
    let left = || [ALLOCATIONS, REGISTRATIONS, STREAMS].map(|kind| driver.live(kind));
    let before = left();
    for (name, _) in CALLS {
        let clock = ManualClock::new();
        driver.hold();
        let opening = std::thread::spawn({
            let clock = Arc::clone(&clock);
            move || open_device(name, Transfer::Auto, clock).map(drop)
        });
        eventually("the time to open a device is over", || {
            clock.advance(Duration::from_secs(1));
            opening.is_finished()
        });
        let late = opening.join().unwrap().unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout);
        assert!(
            late.to_string().contains(&format!("device={name}:0")),
            "{late}"
        );
        driver.release();
        eventually("nothing is left of it", || left() == before);
        open_named(name, Transfer::Auto);
    }
}

/// Its caller may drop it after the deadline.
#[test]
fn a_callers_event_is_not_asked_about_at_its_deadline() {
    let driver = Driver::load();
    let memory = driver.memory(4096);
    let clock = ManualClock::new();
    let device = open_device("cuda", Transfer::Auto, Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    driver.hold();
    let event = device.event_of(driver.recorded_event(&memory)).unwrap();
    let deadline = clock.now().after(Duration::from_secs(10));
    let asked = driver.calls("cuEventQuery");
    let waiting = std::thread::spawn({
        let event = Arc::clone(&event);
        move || event.wait(Some(deadline))
    });
    eventually("it is asked", || driver.calls("cuEventQuery") > asked);
    clock.advance(Duration::from_millis(9990));
    eventually("the wait ends", || waiting.is_finished());
    assert_eq!(
        waiting.join().unwrap().unwrap_err().kind(),
        ErrorKind::Timeout
    );
    let asked = driver.calls("cuEventQuery");
    clock.advance(Duration::from_secs(1));
    assert_eq!(
        event.wait(Some(deadline)).unwrap_err().kind(),
        ErrorKind::Timeout
    );
    assert_eq!(driver.calls("cuEventQuery"), asked);
    driver.release();
    event.wait(None).unwrap();
}

/// A limited number of lanes has memory on the device; further ones copy each run by itself.
#[test]
fn transfers_at_once_take_little_memory_of_the_device() {
    const THREADS: usize = 9;
    const LEN: usize = 100;
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    memory.fill(&Random::new(3).bytes(memory.len));
    let device = open(Transfer::Staging);
    let pieces: Vec<Piece> = (0..50)
        .map(|i| Piece {
            at: i * LEN,
            span: memory.span(i * 3 * LEN, LEN),
        })
        .collect();
    let content = memory.bytes();
    let expected: Vec<u8> = (0..50)
        .flat_map(|i| content[i * 3 * LEN..][..LEN].to_vec())
        .collect();
    let before = [ALLOCATIONS, STREAMS].map(|kind| driver.live(kind));
    for _ in 0..3 {
        driver.hold();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let mut host = vec![0; 50 * LEN];
                    gather(&mut *device.make_stream().unwrap(), &pieces, &mut host).unwrap();
                    assert!(host == expected);
                });
            }
            // One lane existed before.
            let lanes = 2 * (THREADS as u64 - 1);
            eventually("all are under way", || {
                driver.live(STREAMS) >= before[1] + lanes
            });
            driver.release();
        });
        assert_eq!(driver.live(ALLOCATIONS), before[0] + 2 * 7);
        assert!(driver.live(STREAMS) <= before[1] + 2 * (THREADS as u64 - 1));
    }
}
