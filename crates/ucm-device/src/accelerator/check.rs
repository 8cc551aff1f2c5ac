//! Whether a device copies right: each method on random bytes, beside single copies, when it is opened.
#![allow(unsafe_code, reason = "copies of memory that is allocated here")]

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};

use super::lane::{Host, Lane};
use super::pinned::Pinned;
use super::plan::{Method, Run};
use super::runtime::{Direction, Runtime};
use super::switched_off;
use crate::arena::{ArenaOptions, HostArena};

/// Bytes of each side.
const BYTES: usize = 256 << 10;

/// What the target holds before.
const POISON: u8 = 0xa5;

/// What is copied: lengths with all alignments, a tail, and more than one tile.
const LENGTHS: [usize; 10] = [16, 4096, 1, 40 << 10, 7, 8, 12, 1000, 16 << 10, 33];

/// A host buffer and a device buffer of the same size, with a lane between them.
pub(super) struct Bench {
    pub(super) lane: Lane,
    runtime: Arc<dyn Runtime>,
    pub(super) device: u64,
    pub(super) pinned: Pinned,
    pub(super) arena: Arc<HostArena>,
}

impl Bench {
    pub(super) fn new(runtime: &Arc<dyn Runtime>, bytes: usize) -> Result<Self> {
        let arena = HostArena::with(bytes, ArenaOptions::default())?;
        // SAFETY: the arena is dropped after it.
        let pinned = unsafe { Pinned::new(Arc::clone(runtime), arena.at(0), arena.len()) };
        pinned.pin(arena.at(0).expose_provenance(), arena.len());
        Ok(Self {
            lane: Lane::new(Arc::clone(runtime))?,
            device: runtime.allocate(bytes)?,
            runtime: Arc::clone(runtime),
            pinned,
            arena,
        })
    }

    /// Begins to move runs, which lie inside the two buffers; whatever happens, `drop` waits for them.
    pub(super) fn begin(&mut self, method: Method, direction: Direction, runs: &[Run]) -> Result<()> {
        let host = Host {
            first: self.arena.at(0),
            pinned: Some(&self.pinned),
        };
        // SAFETY: the buffers are ours alone, and are kept until the lane's work is over.
        unsafe { self.lane.begin(method, direction, runs, host) }
    }

    /// Moves runs and waits.
    fn copy(&mut self, method: Method, direction: Direction, runs: &[Run]) -> Result<()> {
        let begun = self.begin(method, direction, runs);
        self.lane.wait(direction).and(begun)
    }

    fn host(&mut self) -> &mut [u8] {
        // SAFETY: the arena's bytes are mapped and zeroed, nobody claimed any, and nothing is under way on the lane.
        unsafe { std::slice::from_raw_parts_mut(self.arena.at(0), BYTES) }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for direction in [Direction::ToDevice, Direction::ToHost] {
            let _ = self.lane.wait(direction);
        }
        self.runtime.free(self.device);
    }
}

/// Runs that lie apart on the device and end to end, but for one gap, in the host buffer.
fn runs(device: u64) -> Vec<Run> {
    let (mut at, mut address) = (64, device + 128);
    let mut runs = Vec::new();
    for (number, len) in LENGTHS.into_iter().enumerate() {
        runs.push(Run { at, address, len });
        at += len + if number == 4 { 4096 } else { 0 };
        address += (len + 32 + number) as u64;
    }
    runs
}

/// Bytes that no pattern of a fault gives.
fn noise(buffer: &mut [u8], seed: u64) {
    let mut state = seed | 1;
    for byte in buffer {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = (state >> 32) as u8;
    }
}

const DIRECTIONS: [Direction; 2] = [Direction::ToDevice, Direction::ToHost];

/// The methods that give right bytes, by direction. Each is compared with single copies, in both directions: those of
/// streams where they are right, otherwise the driver's plain ones, which are used then. An error where not even those
/// are right.
pub(super) fn methods(runtime: &Arc<dyn Runtime>) -> Result<[Vec<Method>; 2]> {
    let judge = |method, direction, beside| {
        let mut bench = Bench::new(runtime, BYTES)?; // buffers of its own: one that failed is not used again
        bench.check(method, direction, beside)
    };
    let beside = |method| DIRECTIONS.iter().try_for_each(|&way| judge(method, way, method));
    let single = match beside(Method::Dma) {
        Ok(()) => Method::Dma,
        Err(error) => {
            beside(Method::Plain).map_err(|plain| error.caused_by(plain))?;
            Method::Plain
        }
    };
    let mut right = [Vec::new(), Vec::new()];
    for method in [Method::Dma, Method::Kernel, Method::Staging] {
        for direction in DIRECTIONS {
            let bench = Bench::new(runtime, BYTES)?;
            if !bench.lane.can(method) || method == Method::Kernel && !bench.is_mapped() {
                continue;
            }
            drop(bench);
            // What kernels read of what to do comes by a copy: were it wrong, they would write anywhere.
            let judged = match method {
                Method::Dma if single == Method::Dma => Ok(()),
                Method::Kernel | Method::Staging
                    if !right[Direction::ToDevice as usize].contains(&Method::Dma) =>
                {
                    Err(Error::new(ErrorKind::Corrupt, "copies to the device are wrong"))
                }
                _ => judge(method, direction, single),
            };
            let methods = &mut right[direction as usize];
            match judged {
                Ok(()) => methods.push(method),
                Err(error) => {
                    switched_off(&**runtime, method, direction, &error);
                    if method == Method::Dma {
                        methods.push(Method::Plain);
                    }
                }
            }
        }
    }
    Ok(right)
}

/// Whether copies on the device, by the driver, give right bytes.
pub(super) fn copies_on_device(runtime: &Arc<dyn Runtime>, single: Method) -> Result<()> {
    let mut bench = Bench::new(runtime, BYTES)?;
    let (first, second) = (bench.device, bench.device + (BYTES / 2) as u64);
    let whole = [Run {
        at: 0,
        address: first,
        len: BYTES,
    }];
    let half = BYTES / 2;
    noise(&mut bench.host()[..half], 5);
    bench.host()[half..].fill(POISON);
    let mut expected = bench.host().to_vec();
    bench.copy(single, Direction::ToDevice, &whole)?;
    for (at, len) in [(0, 4096), (8192, 100), (64 << 10, 40 << 10)] {
        // SAFETY: both ranges lie in the buffer, in different halves of it, and it is kept until the lane's work is over.
        unsafe { bench.lane.copy_on_device(second + at, first + at, len)? };
        let at = at as usize;
        expected.copy_within(at..at + len, half + at);
    }
    bench.lane.wait(Direction::ToDevice)?;
    bench.host().fill(0);
    bench.copy(single, Direction::ToHost, &whole)?;
    compare(bench.host(), &expected)
}

/// How a run is copied by itself where these methods are right.
pub(super) fn single(methods: &[Method]) -> Method {
    if methods.contains(&Method::Dma) {
        Method::Dma
    } else {
        Method::Plain
    }
}

impl Bench {
    fn is_mapped(&self) -> bool {
        self.pinned.mapped(self.arena.at(0).expose_provenance()).is_some()
    }

    /// Moves random bytes by a method, and everything else by single copies; all of the target is looked at.
    fn check(&mut self, method: Method, direction: Direction, single: Method) -> Result<()> {
        let runs = runs(self.device);
        let whole = [Run {
            at: 0,
            address: self.device,
            len: BYTES,
        }];
        let on_device = |run: &Run| (run.address - whole[0].address) as usize;
        let mut source = vec![0; BYTES];
        noise(&mut source, 2 + direction as u64);
        let mut expected = vec![POISON; BYTES];
        for run in &runs {
            let (from, to) = match direction {
                Direction::ToHost => (on_device(run), run.at),
                Direction::ToDevice => (run.at, on_device(run)),
            };
            expected[to..to + run.len].copy_from_slice(&source[from..from + run.len]);
        }
        match direction {
            Direction::ToHost => {
                self.host().copy_from_slice(&source);
                self.copy(single, Direction::ToDevice, &whole)?;
                self.host().fill(POISON);
                self.copy(method, direction, &runs)?;
            }
            Direction::ToDevice => {
                self.host().fill(POISON);
                self.copy(single, Direction::ToDevice, &whole)?;
                self.host().copy_from_slice(&source);
                self.copy(method, direction, &runs)?;
                self.host().fill(0);
                self.copy(single, Direction::ToHost, &whole)?;
            }
        }
        compare(self.host(), &expected)
    }
}

fn compare(copied: &[u8], expected: &[u8]) -> Result<()> {
    let pairs = copied.iter().zip(expected);
    let wrong = pairs.filter(|(is, should)| is != should).count();
    if wrong > 0 {
        let differ = Error::new(ErrorKind::Corrupt, "bytes that were copied differ");
        return Err(differ.with("bytes", wrong).with("of", expected.len()));
    }
    Ok(())
}
