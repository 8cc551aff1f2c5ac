//! Costs of copies on a device, measured by the device's own clock in a few milliseconds when it is
//! first opened.
#![allow(unsafe_code, reason = "copies between the buffers of a bench")]

use std::collections::HashMap;

use ucm_core::Result;
use ucm_core::sync::Mutex;

use super::check::{Bench, single};
use super::plan::{Costs, Method, Run};
use super::runtime::{Direction, Owned, RawEvent};

/// Bytes of the large copies.
const BYTES: usize = Bench::LEN;
/// Bytes of a fragment in a transfer of many.
const FRAGMENT: usize = 4 << 10;
/// Bytes of a short fragment, which a kernel moves more slowly over the bus.
const SHORT: usize = 1 << 10;
/// Difference of the two counts in the same number of bytes.
const SHORTER: usize = BYTES / 2 / SHORT - BYTES / 2 / FRAGMENT;
/// Number of small copies in sequence.
const CALLS: usize = 64;
/// Bytes of copies that take longer than their start, so that the bus never waits for the host.
const LONG: usize = 128 << 10;
/// Repetitions of each measurement, fewer if a value repeats; the fastest counts.
const ROUNDS: usize = 8;

/// Measurements of this process, by description of the device and its driver.
static KNOWN: Mutex<Option<HashMap<String, Costs>>> = Mutex::new(None);

/// The costs of a device; those of its kernels only if they may be used.
pub(super) fn costs(bench: &mut Bench<'_>, methods: &[Vec<Method>; 2]) -> Result<Costs> {
    let device = bench.runtime().description().to_owned();
    let known = KNOWN.lock().get_or_insert_default().get(&device).copied();
    if let Some(costs) = known {
        return Ok(costs);
    }
    let costs = Measure::new(bench)?.costs(methods)?; // may hang, so without the lock
    Ok(*KNOWN
        .lock()
        .get_or_insert_default()
        .entry(device)
        .or_insert(costs))
}

/// Two events around the measured work.
struct Measure<'a, 'b> {
    bench: &'a mut Bench<'b>,
    events: [RawEvent; 2],
}

impl<'a, 'b> Measure<'a, 'b> {
    fn new(bench: &'a mut Bench<'b>) -> Result<Self> {
        let runtime = bench.runtime();
        let first = runtime.make_event()?;
        let second = runtime
            .make_event()
            .inspect_err(|_| _ = runtime.end(Owned::Event(first)))?;
        Ok(Self {
            bench,
            events: [first, second],
        })
    }

    fn costs(&mut self, methods: &[Vec<Method>; 2]) -> Result<Costs> {
        let device = self.bench.device();
        let whole = |len| {
            vec![Run {
                at: 0,
                address: device,
                len,
            }]
        };
        // Half of the buffer as runs with gaps on the device, so that none are joined.
        let apart = |len: usize| -> Vec<Run> {
            (0..BYTES / len / 2)
                .map(|i| Run {
                    at: i * len,
                    address: device + (2 * i * len) as u64,
                    len,
                })
                .collect()
        };
        let (short, small, long) = (apart(SHORT), apart(FRAGMENT), apart(LONG));
        let tiny: Vec<Run> = small
            .iter()
            .take(CALLS)
            .map(|run| Run { len: 64, ..*run })
            .collect();
        let ways = [Direction::ToDevice, Direction::ToHost];
        let mut dma = [1.0; 2];
        for way in ways {
            let took = self.time(single(&methods[way as usize]), way, &whole(BYTES))?;
            dma[way as usize] = BYTES as f64 / took;
        }
        let copy = single(&methods[Direction::ToHost as usize]);
        let nothing = self.time(copy, Direction::ToHost, &[])?; // from one event to the next
        let calls = self.time(copy, Direction::ToHost, &tiny)?;
        let call = (calls - nothing).max(1.0) / CALLS as f64;
        let mut gap = [0.0; 2];
        for way in ways {
            let copy = single(&methods[way as usize]);
            let [many, one] =
                [&long, &whole(long.len() * LONG)].map(|runs| self.time(copy, way, runs));
            gap[way as usize] = ((many? - one?) / (long.len() - 1) as f64).max(0.0);
        }
        let mut costs = Costs {
            call,
            launch: call,
            dma,
            gap,
            piece: [0.0; 2],
            mapped: dma,
            device: f64::INFINITY,
        };
        for way in ways {
            let may = |method| methods[way as usize].contains(&method);
            if may(Method::Kernel) {
                let [one, few, many] =
                    [&tiny[..1], &small, &short].map(|runs| self.time(Method::Kernel, way, runs));
                let (one, few, many) = (one? - nothing, few?, many?);
                costs.launch = (one - call).max(0.0);
                let piece = ((many - few) / SHORTER as f64).max(0.0);
                costs.piece[way as usize] = piece;
                let rate = |ns: f64| bytes_of(&small) / ns.max(1.0);
                let (whole, rest) = (few - one, few - one - piece * small.len() as f64);
                // If the number of runs dominates the time, the rest does not measure the bus.
                costs.mapped[way as usize] = rate(rest).min(rate(whole).max(dma[way as usize]));
            }
            if may(Method::Staging) {
                let took = self.time(Method::Staging, way, &small)?;
                let without = Costs {
                    device: f64::INFINITY,
                    ..costs
                };
                let bytes = bytes_of(&small);
                let moved = without.of(Method::Staging, way, small.len(), 1, bytes as usize);
                costs.device = costs.device.min(bytes / (took - moved).max(bytes / MOST));
            }
        }
        Ok(costs)
    }

    /// Nanoseconds from the beginning to the end of a transfer.
    fn time(&mut self, method: Method, direction: Direction, runs: &[Run]) -> Result<f64> {
        let mut least = f64::INFINITY;
        for _ in 0..ROUNDS {
            let [first, second] = self.events;
            // SAFETY: only the bench uses the buffers, and they are kept until the lane's work is
            // over.
            self.bench.run(direction, |lane, host| unsafe {
                lane.record(first, direction)?;
                lane.begin(method, direction, runs, host)?;
                lane.record(second, direction)
            })?;
            let took = f64::from(self.bench.runtime().elapsed_ms(first, second)?) * 1e6;
            if took == least {
                break;
            }
            least = least.min(took);
        }
        Ok(least.max(1.0))
    }
}

/// Bytes a nanosecond beyond the memory rate of any device: a higher result is noise.
const MOST: f64 = 10_000.0;

fn bytes_of(runs: &[Run]) -> f64 {
    runs.iter().map(|run| run.len).sum::<usize>() as f64
}

impl Drop for Measure<'_, '_> {
    fn drop(&mut self) {
        for event in self.events {
            let _ = self.bench.runtime().end(Owned::Event(event));
        }
    }
}
