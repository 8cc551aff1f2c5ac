//! Host memory that a device reaches at full speed: arenas, pinned part by part when a part is
//! first used.
#![allow(unsafe_code, reason = "tells the driver of mappings that arenas own")]

use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tracing::warn;
use ucm_core::{Error, Result};

use super::runtime::Runtime;
use crate::arena::{ArenaOptions, HostArena, LetGo};
use crate::fork::Origin;
use crate::span::{DeviceSpan, HostSpan, Piece};

/// Pinned at once: pinning takes time (the driver touches every page), and the thread that needs a
/// slot waits for it.
const PART: usize = 64 << 20;

/// What a device knows of some host memory.
pub(super) struct Pinned {
    runtime: Arc<dyn Runtime>,
    /// Addresses of its first byte and of the one behind its last.
    start: usize,
    end: usize,
    /// Pinned at once.
    part: usize,
    parts: Mutex<Vec<Part>>,
    /// Whether the device's log has said that the driver refuses.
    said: Arc<AtomicBool>,
    origin: Origin,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Untouched,
    /// With the device's address of it, where it can reach it.
    Pinned(Option<u64>),
    /// The driver refused, or has let go.
    Not,
}

impl Pinned {
    fn holds(&self, address: usize, len: usize) -> bool {
        self.start <= address && address + len <= self.end
    }

    /// Pins the parts that hold `len` bytes at `address`, those that are not yet, until the driver
    /// refuses one; the range of these parts. There is at least one byte.
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
                Err(error) => {
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

    /// Where the part that holds `address` begins and ends.
    pub(super) fn part_of(&self, address: usize) -> Range<usize> {
        let start = self.start + self.part(address) * self.part;
        start..self.end.min(start + self.part)
    }

    /// The device's address of the first byte of the part that holds `address`, where it can reach
    /// it.
    pub(super) fn mapped(&self, address: usize) -> Option<u64> {
        match self.parts.lock()[self.part(address)] {
            Part::Pinned(first) => first,
            _ => None,
        }
    }

    /// Nothing of it is pinned any more, now and later, whatever still holds it; an error where the
    /// driver did not let go. In a forked child there is nothing to do: the memory is not mapped,
    /// and a thread that the child does not have may hold the lock.
    fn let_go(&self) -> Result<()> {
        if !self.origin.here() {
            return Ok(());
        }
        let mut result = Ok(());
        for (number, part) in self.parts.lock().iter_mut().enumerate() {
            if let Part::Pinned(_) = std::mem::replace(part, Part::Not) {
                let start = with_exposed_provenance_mut(self.start + number * self.part);
                result = result.and(self.runtime.unregister(start));
            }
        }
        result
    }
}

/// The one owner of pinned memory: when it ends, the driver has let go.
pub(super) struct Owner(Arc<Pinned>);

impl LetGo for Owner {
    fn let_go(&self) -> bool {
        let refused = |error: &Error| {
            let (device, bytes) = (self.0.runtime.description(), self.0.end - self.0.start);
            warn!(device, %error, bytes, "the driver did not let go of host memory");
        };
        self.0.let_go().inspect_err(refused).is_ok()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// The host memory that a device knows.
pub(super) struct Arenas {
    pub(super) runtime: Arc<dyn Runtime>,
    known: Mutex<Vec<Known>>,
    said: Arc<AtomicBool>,
    origin: Origin,
}

/// Memory that may be gone: who finds its bytes in use knows that it is not.
struct Known {
    start: usize,
    end: usize,
    pinned: Weak<Pinned>,
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

    /// An arena near the device, nothing of it pinned yet.
    pub(super) fn make(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>> {
        let node = options.node.or(self.runtime.node());
        let mut arena = HostArena::with(bytes, ArenaOptions { node, ..options })?;
        if let Some(arena) = Arc::get_mut(&mut arena) {
            // SAFETY: the arena keeps it, and unmaps when it has let go.
            let owner = unsafe { self.add(arena.at(0), arena.len()) };
            arena.keep(Box::new(owner));
        }
        Ok(arena)
    }

    /// `len` bytes at `start`, nothing of them pinned yet.
    ///
    /// # Safety
    /// The range stays mapped until what is given has ended, and so where the driver did not let
    /// go.
    pub(super) unsafe fn add(&self, start: *mut u8, len: usize) -> Owner {
        let parts = vec![Part::Untouched; len.div_ceil(PART)];
        self.know(start.expose_provenance(), len, PART, parts)
    }

    /// A caller's memory, not none, all of it pinned at once: it need not begin at a page. An error
    /// where the driver refuses, as where a part of it is pinned already.
    pub(super) fn register(&self, host: HostSpan) -> Result<Owner> {
        let (start, len) = (host.addr() as usize, host.len() as usize);
        // SAFETY: the span's maker promised that it stays mapped; the driver refuses what is
        // registered already.
        let mapped = unsafe {
            self.runtime
                .register(with_exposed_provenance_mut(start), len)
        }?;
        Ok(self.know(start, len, len, vec![Part::Pinned(mapped)]))
    }

    fn know(&self, start: usize, len: usize, part: usize, parts: Vec<Part>) -> Owner {
        let end = start + len;
        let pinned = Arc::new(Pinned {
            runtime: Arc::clone(&self.runtime),
            start,
            end,
            part,
            parts: Mutex::new(parts),
            said: Arc::clone(&self.said),
            origin: self.origin,
        });
        let mut known = self.known.lock();
        known.retain(|known| known.pinned.strong_count() > 0);
        known.push(Known {
            start,
            end,
            pinned: Arc::downgrade(&pinned),
        });
        Owner(pinned)
    }

    /// The memory that holds these bytes, with them pinned.
    pub(super) fn pin(&self, address: usize, len: usize) -> Option<Arc<Pinned>> {
        if len == 0 {
            return None;
        }
        let holds = |known: &&Known| known.start <= address && address + len <= known.end;
        let pinned = self
            .known
            .lock()
            .iter()
            .filter(holds)
            .find_map(|known| known.pinned.upgrade())?;
        pinned.pin(address, len);
        Some(pinned)
    }

    /// Pieces of a buffer that begins at the address zero: those in each known memory, with their
    /// bytes pinned, and those in none.
    pub(super) fn split(
        &self,
        pairs: &[(DeviceSpan, HostSpan)],
    ) -> Vec<(Option<Arc<Pinned>>, Vec<Piece>)> {
        let mut parts: Vec<(Option<Arc<Pinned>>, Vec<Piece>)> = Vec::new();
        let mut last = (0, 0..0); // where the piece before went, and what around it is pinned
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
