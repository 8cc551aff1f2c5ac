//! Checks that a device copies correctly: when it is opened, each method copies random bytes and is
//! compared with single copies.
#![allow(unsafe_code, reason = "copies of memory that is allocated here")]

use std::sync::Arc;

use tracing::error;
use ucm_core::{Error, ErrorKind, Result};

use super::lane::{Allocation, Host, Lane, Lanes};
use super::pinned::Pinned;
use super::plan::{Method, Run};
use super::runtime::{Direction, Runtime};
use crate::arena::{ArenaOptions, HostArena};

/// Bytes copied of each side.
const BYTES: usize = 256 << 10;

/// Initial bytes of the target.
const POISON: u8 = 0xa5;

/// Lengths of the copied pieces: all alignments, a tail, and more than one tile.
const LENGTHS: [usize; 10] = [16, 4096, 1, 40 << 10, 7, 8, 12, 1000, 16 << 10, 33];

/// A host buffer and a device buffer of the same size with a lane between them, for the checks at
/// the opening of a device. Fields are dropped in their order: after the lane, nothing uses the
/// buffers any more.
pub(super) struct Bench<'a> {
    lanes: &'a Lanes,
    pub(super) lane: Lane,
    memory: Allocation,
    pinned: Option<Arc<Pinned>>,
    arena: Arc<HostArena>,
}

impl<'a> Bench<'a> {
    /// Bytes of each buffer.
    pub(super) const LEN: usize = 4 << 20;

    pub(super) fn new(lanes: &'a Lanes) -> Result<Self> {
        let arena = lanes.arenas.make(Self::LEN, ArenaOptions::default())?;
        Ok(Self {
            lane: lanes.take()?,
            memory: Allocation::new(&lanes.arenas.runtime, Self::LEN)?,
            pinned: lanes
                .arenas
                .pin(arena.at(0).expose_provenance(), arena.len()),
            arena,
            lanes,
        })
    }

    /// Ends the checks; the lane becomes the device's first.
    pub(super) fn end(self) {
        self.lanes.give(self.lane);
    }

    pub(super) fn runtime(&self) -> &dyn Runtime {
        &*self.lanes.arenas.runtime
    }

    /// Address of the device's buffer.
    pub(super) fn device(&self) -> u64 {
        self.memory.address
    }

    /// Begins work on the lane and waits until it is over; a lane that failed is not used again.
    pub(super) fn run(
        &mut self,
        direction: Direction,
        begin: impl FnOnce(&mut Lane, Host<'_>) -> Result<()>,
    ) -> Result<()> {
        let host = Host {
            first: self.arena.at(0),
            pinned: self.pinned.as_deref(),
        };
        let begun = begin(&mut self.lane, host);
        let result = self.lane.wait(direction).and(begun);
        if result.is_err() {
            self.lane = self.lanes.take()?;
        }
        result
    }

    /// Moves runs, which lie inside the two buffers.
    fn copy(&mut self, method: Method, direction: Direction, runs: &[Run]) -> Result<()> {
        // SAFETY: the buffers belong to this bench only and are kept until the lane's work is over.
        self.run(direction, |lane, host| unsafe {
            lane.begin(method, direction, runs, host)
        })
    }

    /// The copied part of the host's buffer.
    fn host(&mut self) -> &mut [u8] {
        // SAFETY: the arena's bytes are mapped and zeroed, none is claimed, and nothing is under
        // way on the lane.
        unsafe { std::slice::from_raw_parts_mut(self.arena.at(0), BYTES) }
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

/// Random bytes, which no fault produces by accident.
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

/// The methods that copy correctly, by direction. Each is compared with single copies in both
/// directions: those of streams if they are correct, otherwise the driver's plain ones, which are
/// then used. An error if even those are wrong.
pub(super) fn methods(bench: &mut Bench<'_>) -> Result<[Vec<Method>; 2]> {
    let mut beside = |method| {
        DIRECTIONS
            .iter()
            .try_for_each(|&way| bench.check(method, way, method))
    };
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
            if !bench.can(method) {
                continue;
            }
            // Kernels read their descriptors from a copy. With a wrong copy they would write to any
            // address.
            let checked = match method {
                Method::Dma if single == Method::Dma => Ok(()),
                Method::Kernel | Method::Staging
                    if !right[Direction::ToDevice as usize].contains(&Method::Dma) =>
                {
                    Err(Error::new(
                        ErrorKind::Corrupt,
                        "copies to the device are wrong",
                    ))
                }
                _ => bench.check(method, direction, single),
            };
            let methods = &mut right[direction as usize];
            match checked {
                Ok(()) => methods.push(method),
                Err(error) => {
                    switched_off(bench.runtime(), method, direction, &error);
                    if method == Method::Dma {
                        methods.push(Method::Plain);
                    }
                }
            }
        }
    }
    Ok(right)
}

/// How a single run is copied, given the correct methods.
pub(super) fn single(methods: &[Method]) -> Method {
    if methods.contains(&Method::Dma) {
        Method::Dma
    } else {
        Method::Plain
    }
}

impl Bench<'_> {
    /// True if a method can be checked at all.
    fn can(&self, method: Method) -> bool {
        let mapped = |pinned: &Arc<Pinned>| pinned.mapped(self.arena.at(0).expose_provenance());
        self.lane.can(method)
            && (method != Method::Kernel || self.pinned.as_ref().and_then(mapped).is_some())
    }

    /// All that is copied.
    fn whole(&self) -> [Run; 1] {
        [Run {
            at: 0,
            address: self.device(),
            len: BYTES,
        }]
    }

    /// Moves random bytes by a method, and everything else by single copies; the whole target is
    /// compared.
    fn check(&mut self, method: Method, direction: Direction, single: Method) -> Result<()> {
        let (runs, whole) = (runs(self.device()), self.whole());
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
        let differ = Error::new(ErrorKind::Corrupt, "copied bytes differ");
        return Err(differ.with("bytes", wrong).with("of", expected.len()));
    }
    Ok(())
}

/// Logs that a method is not used.
fn switched_off(runtime: &dyn Runtime, method: Method, direction: Direction, reason: &Error) {
    error!(
        device = runtime.description(),
        method = method.name(),
        ?direction,
        %reason,
        "a copy method is wrong on this device and is not used"
    );
}
