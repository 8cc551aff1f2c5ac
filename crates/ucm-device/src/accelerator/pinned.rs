//! Host memory that a device reaches at full speed: arenas, pinned in parts at the first use of
//! each part.
#![allow(
    unsafe_code,
    reason = "registers mappings that arenas own with the driver"
)]

use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{Error, Result};

use super::runtime::{Failed, Owned, Runtime};
use crate::arena::{ArenaOptions, HostArena, LetGo};
use crate::fork::Origin;
use crate::span::{DeviceSpan, HostSpan, Piece};

/// Bytes pinned at once. Pinning takes time (the driver touches every page), and the thread that
/// needs a slot waits for it.
const PART: usize = 64 << 20;

/// A range of host memory known to a device.
pub(super) struct Pinned {
    runtime: Arc<dyn Runtime>,
    /// Addresses of its first byte and of the byte behind its last.
    start: usize,
    end: usize,
    /// Pinned at once.
    part: usize,
    parts: Mutex<Vec<Part>>,
    /// True if the driver's refusal was logged.
    said: Arc<AtomicBool>,
    origin: Origin,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Untouched,
    /// With the device's address of it, if the device can reach it.
    Pinned(Option<u64>),
    /// The driver refused it, or it was unregistered.
    Not,
}

impl Pinned {
    fn holds(&self, address: usize, len: usize) -> bool {
        self.start <= address && address + len <= self.end
    }

    /// Pins the parts around `len` bytes (at least one) at `address` that are not pinned yet, until
    /// the driver refuses one. Returns the range of these parts.
    fn pin(&self, address: usize, len: usize) -> Range<usize> {
        let whole = self.part_of(address).start..self.part_of(address + len - 1).end;
        let mut parts = self.parts.lock();
        for number in self.part(address)..=self.part(address + len - 1) {
            if parts[number] != Part::Untouched {
                continue;
            }
            let start = self.start + number * self.part;
            let len = self.part.min(self.end - start);
            // SAFETY: inside the mapping, which outlives this; parts do not overlap, and this one
            // is not registered.
            let registered = unsafe {
                self.runtime
                    .register(with_exposed_provenance_mut(start), len)
            };
            match registered {
                Ok(mapped) => parts[number] = Part::Pinned(mapped),
                Err(Failed { error, .. }) => {
                    if !self.said.swap(true, Ordering::Relaxed) {
                        let device = self.runtime.description();
                        warn!(device, %error, bytes = len, "the driver does not pin host memory: \
                        copies are slower");
                    }
                    let untouched = parts.iter_mut().filter(|part| **part == Part::Untouched);
                    untouched.for_each(|part| *part = Part::Not);
                    break;
                }
            }
        }
        whole
    }

    fn part(&self, address: usize) -> usize {
        (address - self.start) / self.part
    }

    /// Begin and end of the part around `address`.
    pub(super) fn part_of(&self, address: usize) -> Range<usize> {
        let start = self.start + self.part(address) * self.part;
        start..self.end.min(start + self.part)
    }

    /// The device's address of the first byte of the part around `address`, if the device can reach
    /// it.
    pub(super) fn mapped(&self, address: usize) -> Option<u64> {
        match self.parts.lock()[self.part(address)] {
            Part::Pinned(first) => first,
            _ => None,
        }
    }

    /// Unpins all of it, for good, even if references remain; an error if the driver fails. A
    /// forked child does nothing: the memory is not mapped there, and a thread that the child does
    /// not have may hold the lock.
    fn let_go(&self) -> Result<()> {
        if !self.origin.here() {
            return Ok(());
        }
        let mut result = Ok(());
        for (number, part) in self.parts.lock().iter_mut().enumerate() {
            if let Part::Pinned(_) = std::mem::replace(part, Part::Not) {
                let start = with_exposed_provenance_mut(self.start + number * self.part);
                let ended = self.runtime.end(Owned::Pinned(start));
                result = result.and(ended.map_err(Error::from));
            }
        }
        result
    }
}

/// The single owner of pinned memory: after its drop the memory is unregistered.
pub(super) struct Owner(Arc<Pinned>);

impl LetGo for Owner {
    fn let_go(&self) -> bool {
        let refused = |error: &Error| {
            let (device, bytes) = (self.0.runtime.description(), self.0.end - self.0.start);
            warn!(device, %error, bytes, "the driver could not unregister host memory");
        };
        self.0.let_go().inspect_err(refused).is_ok()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// The host memory known to a device.
pub(super) struct Arenas {
    pub(super) runtime: Arc<dyn Runtime>,
    /// Memory with bytes in use is alive.
    known: Mutex<Vec<Weak<Pinned>>>,
    said: Arc<AtomicBool>,
    origin: Origin,
}

impl Arenas {
    /// None, of this device.
    pub(super) fn new(runtime: Arc<dyn Runtime>) -> Result<Self> {
        Ok(Self {
            runtime,
            known: Mutex::default(),
            said: Arc::default(),
            origin: Origin::this()?,
        })
    }

    /// An arena near the device, not pinned yet.
    pub(super) fn make(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>> {
        let node = options.node.or(self.runtime.node());
        let mut arena = HostArena::with(bytes, ArenaOptions { node, ..options })?;
        if let Some(arena) = Arc::get_mut(&mut arena) {
            // SAFETY: the arena keeps this and unmaps only after it has unpinned.
            let owner = unsafe { self.add(arena.at(0), arena.len()) };
            arena.keep(Box::new(owner));
        }
        Ok(arena)
    }

    /// `len` bytes at `start`, not pinned yet.
    ///
    /// # Safety
    /// The range stays mapped until the returned value is dropped, and for ever if the
    /// driver could not unregister it.
    pub(super) unsafe fn add(&self, start: *mut u8, len: usize) -> Owner {
        let parts = vec![Part::Untouched; len.div_ceil(PART)];
        self.know(start.expose_provenance(), len, PART, parts)
    }

    /// A caller's memory, at least one byte, pinned as a whole; it need not begin on a page. An
    /// error if the driver refuses, for example because a part of it is pinned already.
    pub(super) fn register(&self, host: HostSpan) -> Result<Owner> {
        let (start, len) = (host.addr() as usize, host.len() as usize);
        // SAFETY: the span's maker promised that it stays mapped; the driver refuses memory that is
        // registered already.
        let mapped = unsafe {
            self.runtime
                .register(with_exposed_provenance_mut(start), len)
        }?;
        Ok(self.know(start, len, len, vec![Part::Pinned(mapped)]))
    }

    fn know(&self, start: usize, len: usize, part: usize, parts: Vec<Part>) -> Owner {
        let pinned = Arc::new(Pinned {
            runtime: Arc::clone(&self.runtime),
            start,
            end: start + len,
            part,
            parts: Mutex::new(parts),
            said: Arc::clone(&self.said),
            origin: self.origin,
        });
        let mut known = self.known.lock();
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(&pinned));
        Owner(pinned)
    }

    /// The memory around these bytes, with the bytes pinned.
    pub(super) fn pin(&self, address: usize, len: usize) -> Option<Arc<Pinned>> {
        if len == 0 {
            return None;
        }
        let known = self.known.lock();
        let mut alive = known.iter().filter_map(Weak::upgrade);
        let pinned = alive.find(|pinned| pinned.holds(address, len))?;
        drop(known);
        pinned.pin(address, len);
        Some(pinned)
    }

    /// Pieces of a buffer at address zero, grouped by known memory (with their bytes pinned), and
    /// those in none.
    pub(super) fn split(
        &self,
        pairs: &[(DeviceSpan, HostSpan)],
    ) -> Vec<(Option<Arc<Pinned>>, Vec<Piece>)> {
        let mut parts: Vec<(Option<Arc<Pinned>>, Vec<Piece>)> = Vec::new();
        let mut last = (0, 0..0); // group of the previous piece, and the pinned range around it
        for &(span, host) in pairs.iter().filter(|(_, host)| !host.is_empty()) {
            let (at, len) = (host.addr() as usize, host.len() as usize);
            let piece = Piece { at, span };
            if last.1.start <= at && at + len <= last.1.end {
                parts[last.0].1.push(piece);
                continue;
            }
            let holds = |(pinned, _): &(Option<Arc<Pinned>>, _)| {
                pinned.as_ref().is_some_and(|pinned| pinned.holds(at, len))
            };
            if let Some(number) = parts.iter().position(holds)
                && let (Some(pinned), pieces) = &mut parts[number]
            {
                last = (number, pinned.pin(at, len));
                pieces.push(piece);
                continue;
            }
            let pinned = self.pin(at, len);
            match parts
                .iter_mut()
                .find(|(of, _)| of.is_none() && pinned.is_none())
            {
                Some((_, pieces)) => pieces.push(piece),
                None => parts.push((pinned, vec![piece])),
            }
        }
        parts
    }
}
