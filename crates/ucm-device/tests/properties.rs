//! Random transfers over the software driver with late work and failing calls: successful transfers
//! are correct, nothing outside of the destinations is written, the stream works afterwards, and
//! nothing leaks.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of tests may fail the test"
)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::common::{
    ALLOCATIONS, Driver, EVENTS, MODULES, Memory, REGISTRATIONS, Random, STREAMS, host_pairs,
};
use ucm_core::Result;
use ucm_device::{ArenaOptions, Device, DeviceSpan, Direction, Piece, SlotPool, Stream, Transfer};
use ucm_infra::SystemClock;

const TRANSFERS: [Transfer; 4] = [
    Transfer::Auto,
    Transfer::Dma,
    Transfer::Sm,
    Transfer::Staging,
];

/// Calls that fail at times, once or a few in a row.
const FAILING: [&str; 17] = [
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreateWithPriority",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuMemAlloc_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuMemHostRegister_v2",
    "cuMemHostGetDevicePointer_v2",
];

/// Errors of failing calls: out of memory, not permitted during a capture, an unknown number.
const ANSWERS: [i32; 3] = [2, 900, 999];

/// Calls that do not report the end of work may also return an illegal address. For those that do
/// it would be false: after that error all work of a context has ended.
const ILLEGAL_ADDRESS: i32 = 700;
const SAY_WHAT_IS_OVER: [&str; 3] = [
    "cuCtxPushCurrent_v2",
    "cuStreamQuery",
    "cuThreadExchangeStreamCaptureMode",
];

/// Bytes of the device's memory and of a slot.
const DEVICE: usize = 3 << 19;
const SLOT: usize = 1 << 20;

/// Lengths of pieces, up to the largest of some size, and where each begins: behind the one before
/// it or some bytes later, on the host and on the device, where their order may be another one.
fn pieces(random: &mut Random, memory: &Memory, host: usize) -> Vec<Piece> {
    let most = [1, 3, 20, 300][random.below(4)];
    let longest = [16, 300, 5000, 70_000, 600_000][random.below(5)];
    let align = [1, 1, 4, 8, 16, 256][random.below(6)];
    let lens: Vec<usize> = (0..1 + random.below(most))
        .map(|_| random.below(longest + 1).next_multiple_of(align))
        .collect();
    let mut order: Vec<usize> = (0..lens.len()).collect();
    if random.below(3) == 0 {
        (1..order.len())
            .rev()
            .for_each(|i| order.swap(i, random.below(i + 1)));
    }
    let gaps = [[0, 0, 0, 0], [0, 0, 1, 4096], [16, 33, 64, 7]];
    let (on_host, on_device) = (gaps[random.below(3)], gaps[random.below(3)]);
    let mut addresses = vec![None; lens.len()];
    let mut address = random.below(64);
    for number in order {
        if address + lens[number] <= memory.len {
            addresses[number] = Some(address);
            address += lens[number] + on_device[random.below(4)];
        }
    }
    let mut at = random.below(64);
    let mut pieces = Vec::new();
    for (&len, address) in lens.iter().zip(addresses) {
        if let Some(address) = address.filter(|_| at + len <= host) {
            let span = memory.span(address, len);
            pieces.push(Piece { at, span });
            at += len + on_host[random.below(4)];
        }
    }
    if random.below(4) == 0 {
        pieces.reverse();
    }
    pieces
}

fn range(memory: &Memory, span: DeviceSpan) -> std::ops::Range<usize> {
    let first = (span.addr() - memory.address) as usize;
    first..first + span.len() as usize
}

/// A device with a stream and the host buffers that it copies to and from.
struct Bench {
    device: Arc<dyn Device>,
    stream: Box<dyn Stream>,
    pool: Arc<SlotPool>,
    /// An event of the caller that is done.
    event: u64,
}

impl Bench {
    fn new(device: Arc<dyn Device>, event: u64) -> Result<Self> {
        let arena = device.make_arena(SLOT, ArenaOptions::default())?;
        Ok(Self {
            stream: device.make_stream()?,
            pool: SlotPool::new(arena, SLOT)?,
            event,
            device,
        })
    }

    /// One random transfer; true if it succeeded. Its bytes are verified in both cases.
    fn transfer(&mut self, random: &mut Random, memory: &Memory) -> bool {
        let before = random.bytes(memory.len);
        memory.fill(&before);
        let event = self.device.event_of(self.event).unwrap();
        if random.below(3) == 0 && event.wait(None).is_err() {
            return false;
        }
        match random.below(2) {
            0 => self.gather(random, memory, &before),
            _ => self.scatter(random, memory, &before),
        }
    }

    /// Copies by the stream's thread, and waits for that.
    fn copy_there(&mut self, way: Direction, pieces: &[Piece], host: &mut [u8]) -> Result<()> {
        let (done, told) = mpsc::channel();
        let tell = Box::new(move |result| done.send(result).unwrap());
        let pairs = host_pairs(pieces, host);
        self.stream.transfer_async(way, pairs, tell)?;
        told.recv().unwrap()
    }

    fn gather(&mut self, random: &mut Random, memory: &Memory, before: &[u8]) -> bool {
        let len = [SLOT, SLOT, 100_001][random.below(3)];
        let host = random.bytes(len);
        let src = pieces(random, memory, host.len());
        let (mut slot, mut own) = (self.pool.try_acquire().unwrap(), host.clone());
        let buffer = if len == SLOT {
            slot.as_mut_slice()
        } else {
            &mut own[..]
        };
        buffer.copy_from_slice(&host);
        let result = if random.below(3) == 0 {
            self.copy_there(Direction::ToHost, &src, buffer)
        } else {
            self.stream.gather(&src, buffer, &mut |_, _| {})
        };
        assert!(memory.bytes() == before, "a gather wrote to the device");
        let mut expected = host;
        for piece in &src {
            let to = piece.at..piece.at + piece.span.len() as usize;
            match &result {
                Ok(()) => expected[to].copy_from_slice(&before[range(memory, piece.span)]),
                Err(_) => expected[to.clone()].copy_from_slice(&buffer[to]),
            }
        }
        assert!(buffer == expected, "a gather that gave {result:?}");
        result.is_ok()
    }

    fn scatter(&mut self, random: &mut Random, memory: &Memory, before: &[u8]) -> bool {
        let len = [SLOT, SLOT, 100_001][random.below(3)];
        let host = random.bytes(len);
        let dst = pieces(random, memory, host.len());
        let (mut slot, mut own) = (self.pool.try_acquire().unwrap(), host.clone());
        let buffer = if len == SLOT {
            slot.as_mut_slice()
        } else {
            &mut own[..]
        };
        buffer.copy_from_slice(&host);
        let result = if random.below(3) == 0 {
            self.copy_there(Direction::ToDevice, &dst, buffer)
        } else {
            self.stream.scatter(buffer, &dst)
        };
        assert!(buffer == host, "a scatter wrote to the host");
        let sources: Vec<_> = dst
            .iter()
            .map(|piece| {
                let from = piece.at..piece.at + piece.span.len() as usize;
                (&host[from], range(memory, piece.span))
            })
            .collect();
        check_memory(memory, before, &sources, &result);
        result.is_ok()
    }
}

/// Verifies the device's memory after copies of `sources` to ranges of it.
fn check_memory(
    memory: &Memory,
    before: &[u8],
    sources: &[(&[u8], std::ops::Range<usize>)],
    result: &Result<()>,
) {
    let after = memory.bytes();
    let mut expected = before.to_vec();
    for (bytes, to) in sources {
        match result {
            Ok(()) => expected[to.clone()].copy_from_slice(bytes),
            Err(_) => expected[to.clone()].copy_from_slice(&after[to.clone()]),
        }
    }
    assert!(
        after == expected,
        "copies to the device that gave {result:?}"
    );
}

/// One device, opened, used and closed, with failing calls. Returns the number of failed transfers.
fn round(driver: &Driver, memory: &Memory, event: u64, random: &mut Random) -> u64 {
    let transfer = TRANSFERS[random.below(4)];
    driver.jitter(
        random.below(1 << 30) as u64,
        [0, 0, 30, 300][random.below(4)],
    );
    let fail = |random: &mut Random, within: usize| {
        let call = FAILING[random.below(FAILING.len())];
        let mut answer = ANSWERS[random.below(3)];
        if !SAY_WHAT_IS_OVER.contains(&call) && random.below(3) == 0 {
            answer = ILLEGAL_ADDRESS;
        }
        let (nth, times) = (
            1 + random.below(within) as u64,
            [1, 1, 2, 4][random.below(4)],
        );
        driver.fail_times(call, nth, times, answer);
    };
    let ends_early = random.below(8) == 0;
    if ends_early {
        fail(random, 20);
    }
    let opened = ucm_device::open_device("cuda", transfer, SystemClock::shared());
    let opened = opened.and_then(|device| Bench::new(device, event));
    driver.mend();
    let Ok(mut bench) = opened else {
        assert!(ends_early, "{:?}", opened.err());
        return 1;
    };
    let mut failed = 0;
    for _ in 0..1 + random.below(4) {
        if random.below(2) == 0 {
            fail(random, 4);
        }
        failed += u64::from(!bench.transfer(random, memory));
        driver.mend();
        assert!(
            bench.transfer(random, memory),
            "a stream of {} after a failure",
            bench.device.name()
        );
    }
    failed
}

/// `UCM_TEST_LONG`: a thousand rounds. `UCM_TEST_SEED`: those from this seed on; a failure names
/// its own.
#[test]
fn random_transfers_with_delays_and_failures_give_right_bytes_or_an_error() {
    let driver = Driver::load();
    let memory = driver.memory(DEVICE);
    let event = driver.recorded_event(&memory);
    let left =
        || [ALLOCATIONS, REGISTRATIONS, STREAMS, EVENTS, MODULES].map(|kind| driver.live(kind));
    let before = left();
    let rounds = if std::env::var_os("UCM_TEST_LONG").is_some() {
        1000
    } else {
        40
    };
    let first: u64 = std::env::var("UCM_TEST_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut failed = 0;
    for seed in first..first + rounds {
        let mut random = Random::new(seed);
        match catch_unwind(AssertUnwindSafe(|| {
            round(&driver, &memory, event, &mut random)
        })) {
            Ok(some) => failed += some,
            Err(panic) => {
                eprintln!("UCM_TEST_SEED={seed} shows it");
                resume_unwind(panic);
            }
        }
        // The thread of a stream may still be about to end.
        let until = Instant::now() + Duration::from_secs(60);
        while left() != before && Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(left(), before, "left behind after seed {seed}");
    }
    driver.jitter(1, 0);
    assert!(failed > rounds / 10, "only {failed} transfers failed");
}
