//! The choice of a method, measured by the software driver's clock, which models costs of an H100
//! and not real time: `auto` compared with each forced method, over fragments of 256 B to 4 MiB.
//! The results hold for that model.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use std::sync::Arc;

use common::{Driver, Memory, TO_DEVICE, TO_HOST, open};
use ucm_device::{ArenaOptions, Device, DeviceSpan, Piece, Slot, SlotPool, Stream, Transfer};

/// Bytes of a transfer.
const WHOLE: usize = 32 << 20;

/// Bytes of a descriptor of the kernels.
const DESCRIPTOR: u64 = 24;

const CALLS: [&str; 3] = [
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchKernel",
];

/// Cost of a transfer: nanoseconds of the model, calls by [`CALLS`], bytes by DMA to the device and
/// to the host.
#[derive(Clone, Copy, Debug)]
struct Took {
    ns: f64,
    calls: [u64; 3],
    bytes: [u64; 2],
}

/// A stream of a device with a forced method, or none, and a slot of its own.
struct Way {
    _device: Arc<dyn Device>,
    stream: Box<dyn Stream>,
    slot: Slot,
}

impl Way {
    fn new(driver: &Driver, transfer: Transfer, memory: &Memory) -> Self {
        let device = open(transfer);
        let arena = device.make_arena(WHOLE, ArenaOptions::default()).unwrap();
        let mut way = Self {
            stream: device.make_stream().unwrap(),
            _device: device,
            slot: SlotPool::new(arena, WHOLE).unwrap().try_acquire().unwrap(),
        };
        way.run(driver, &[memory.span(0, WHOLE)], TO_HOST); // pins, and makes the resources
        way
    }

    /// Moves pieces that lie end to end in the slot.
    fn run(&mut self, driver: &Driver, spans: &[DeviceSpan], direction: i32) -> Took {
        let mut at = 0;
        let pieces: Vec<Piece> = spans
            .iter()
            .map(|&span| {
                at += span.len() as usize;
                Piece {
                    at: at - span.len() as usize,
                    span,
                }
            })
            .collect();
        let counts = || {
            (
                CALLS.map(|call| driver.calls(call)),
                [TO_DEVICE, TO_HOST].map(|way| driver.bytes(way)),
            )
        };
        let (calls, bytes) = counts();
        let began = driver.now_ns();
        match direction {
            TO_HOST => self
                .stream
                .gather(&pieces, self.slot.as_mut_slice(), &mut |_, _| {}),
            _ => self.stream.scatter(self.slot.as_slice(), &pieces),
        }
        .unwrap();
        let ns = (driver.now_ns() - began) as f64;
        let after = counts();
        Took {
            ns,
            calls: std::array::from_fn(|i| after.0[i] - calls[i]),
            bytes: std::array::from_fn(|i| after.1[i] - bytes[i]),
        }
    }
}

/// Fragments with gaps on the device.
fn apart(memory: &Memory, len: usize, count: usize) -> Vec<DeviceSpan> {
    let step = (memory.len / count) & !15;
    (0..count).map(|i| memory.span(i * step, len)).collect()
}

/// Fragments (bytes, count): 32 MiB in total, and less. `UCM_TEST_LONG` adds the slow ones.
fn grid() -> Vec<(usize, usize)> {
    let (mut whole, mut fewer) = (vec![8 << 10, 64 << 10, 1 << 20], vec![512, 16 << 10]);
    if std::env::var_os("UCM_TEST_LONG").is_some() {
        whole = (8..=22).map(|bit| 1 << bit).collect();
        whole.extend([
            1000,
            3 << 10,
            12_345,
            48 << 10,
            100_000,
            127_000,
            200_000,
            3 << 20,
        ]);
        fewer.clone_from(&whole);
    }
    let whole = whole.into_iter().map(|len| (len, WHOLE / len));
    let fewer = fewer
        .into_iter()
        .flat_map(|len| [1, 3, 16, 64, 500].map(|count| (len, count)));
    whole
        .chain(fewer.filter(|(len, count)| len * count <= WHOLE))
        .collect()
}

#[test]
fn to_a_device_auto_is_as_fast_as_the_cheapest_method() {
    auto_is_as_fast_as_the_cheapest_method(TO_DEVICE);
}

#[test]
fn from_a_device_auto_is_as_fast_as_the_cheapest_method() {
    auto_is_as_fast_as_the_cheapest_method(TO_HOST);
}

fn auto_is_as_fast_as_the_cheapest_method(direction: i32) {
    let driver = Driver::load();
    driver.model(true);
    let memory = driver.memory(2 * WHOLE);
    let mut auto = Way::new(&driver, Transfer::Auto, &memory);
    let mut forced =
        [Transfer::Dma, Transfer::Sm, Transfer::Staging].map(|it| Way::new(&driver, it, &memory));
    let way = direction as usize;
    let one = auto.run(&driver, &[memory.span(0, WHOLE)], direction);
    for (len, count) in grid() {
        let spans = apart(&memory, len, count);
        let took = auto.run(&driver, &spans, direction);
        let others = forced
            .each_mut()
            .map(|it| it.run(&driver, &spans, direction).ns);
        let least = others.into_iter().fold(f64::INFINITY, f64::min);
        let of_large = one.ns / took.ns;
        let what = format!(
            "{count} of {len} bytes, {direction}: {took:?}, {of_large:.2}, others {others:?}"
        );
        // The costs do not model a second chunk of a round, and model a kernel on the device by
        // its bytes only.
        let most = if count <= 16 << 10 { 1.05 } else { 1.2 };
        assert!(took.ns <= most * least, "{what}");
        if len * count < WHOLE - len {
            continue;
        }
        let (n, bytes) = (count as u64, (len * count) as u64);
        if len <= 1 << 20 {
            let rounds = n.div_ceil(16 << 10);
            // Kernels over the bus, with DMA only for a round's descriptors; or one copy for
            // each 8 MiB and 16384 descriptors, a kernel for each copy, and the copies of the
            // descriptors.
            let is_mapped = took.bytes == [n * DESCRIPTOR, 0];
            let (moved, kernels) = match is_mapped {
                true => (0, rounds),
                false => (
                    bytes,
                    rounds * (bytes / rounds).div_ceil((8 << 20) - len as u64),
                ),
            };
            let mut expected = [0; 2];
            expected[way] = moved;
            expected[0] += n * DESCRIPTOR;
            assert_eq!(took.bytes, expected, "{what}");
            assert!(took.calls[2] <= kernels, "{what}");
            let copies = if is_mapped { 0 } else { took.calls[2] };
            assert_eq!(took.calls[0] + took.calls[1], copies + rounds, "{what}");
        }
        let goal = match len {
            ..8192 => 0.6,
            8192..32_768 => 0.8,
            _ => 0.9,
        };
        assert!(of_large >= goal, "{what}");
    }
}

/// Large and small fragments of one transfer use different methods.
#[test]
fn large_and_small_fragments_of_a_transfer_are_moved_apart() {
    let driver = Driver::load();
    driver.model(true);
    let memory = driver.memory(2 * WHOLE);
    let mut auto = Way::new(&driver, Transfer::Auto, &memory);
    let mut spans: Vec<DeviceSpan> = (0..3).map(|i| memory.span(i << 24, 8 << 20)).collect();
    spans.extend((0..1024).map(|i| memory.span((48 << 20) + (i << 14), 8 << 10)));
    for direction in [TO_DEVICE, TO_HOST] {
        let one = auto.run(&driver, &[memory.span(0, WHOLE)], direction);
        let took = auto.run(&driver, &spans, direction);
        assert!(one.ns / took.ns >= 0.9, "{took:?} beside {one:?}");
        // the large ones, the staged ones, descriptors
        assert_eq!(took.calls[0] + took.calls[1], 3 + 2, "{took:?}");
        assert_eq!(took.calls[2], 1, "{took:?}");
    }
}
