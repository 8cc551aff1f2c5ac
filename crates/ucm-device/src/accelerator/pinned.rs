//! Host memory that a device reaches at full speed: arenas, pinned part by part when a part is first used.
#![allow(unsafe_code, reason = "tells the driver of mappings that arenas own")]

use std::ptr::with_exposed_provenance_mut;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tracing::warn;
use ucm_core::Result;

use super::runtime::Runtime;
use crate::span::{DeviceSpan, HostSpan, Piece};

/// Pinned at once: pinning takes time (the driver touches every page), and whoever needs a slot waits for it.
const PART: usize = 64 << 20;

/// What a device knows of the bytes of an arena.
pub(super) struct Pinned {
    runtime: Arc<dyn Runtime>,
    /// Addresses of its first byte and of the one behind its last.
    start: usize,
    end: usize,
    /// Pinned at once.
    part: usize,
    parts: Mutex<Vec<Part>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Untouched,
    /// With the device's address of it, where it can reach it.
    Pinned(Option<u64>),
    Refused,
}

impl Pinned {
    /// Of `len` bytes at `start`, nothing of them pinned.
    ///
    /// # Safety
    /// The range stays mapped for as long as what is made lives.
    pub(super) unsafe fn new(runtime: Arc<dyn Runtime>, start: *mut u8, len: usize) -> Self {
        let start = start.expose_provenance();
        Self {
            runtime,
            start,
            end: start + len,
            part: PART,
            parts: Mutex::new(vec![Part::Untouched; len.div_ceil(PART)]),
        }
    }

    /// Of a caller's memory, not none, all of it pinned at once: it need not begin at a page. An error where the driver
    /// refuses, as where a part of it is pinned already.
    pub(super) fn registered(runtime: Arc<dyn Runtime>, host: HostSpan) -> Result<Self> {
        let (start, len) = (host.addr() as usize, host.len() as usize);
        // SAFETY: the span's maker promised that it stays mapped; the driver refuses what is registered already.
        let mapped = unsafe { runtime.register(with_exposed_provenance_mut(start), len) }?;
        Ok(Self {
            runtime,
            start,
            end: start + len,
            part: len,
            parts: Mutex::new(vec![Part::Pinned(mapped)]),
        })
    }

    fn holds(&self, address: usize, len: usize) -> bool {
        self.start <= address && address + len <= self.end
    }

    /// Pins the parts that hold `len` bytes at `address`, those that are not yet.
    pub(super) fn pin(&self, address: usize, len: usize) {
        let mut parts = self.parts.lock();
        let (first, last) = (self.part(address), self.part(address + len.max(1) - 1));
        for (number, part) in parts.iter_mut().enumerate().take(last + 1).skip(first) {
            if *part == Part::Untouched {
                let start = self.start + number * self.part;
                let len = self.part.min(self.end - start);
                // SAFETY: inside the mapping, which outlives this; parts do not overlap, and this one is not registered.
                let registered = unsafe { self.runtime.register(with_exposed_provenance_mut(start), len) };
                *part = match registered {
                    Ok(mapped) => Part::Pinned(mapped),
                    Err(error) => {
                        warn!(%error, bytes = len, "the driver does not pin host memory: copies are slower");
                        Part::Refused
                    }
                };
            }
        }
        if parts[first] == Part::Refused {
            parts
                .iter_mut()
                .filter(|part| **part == Part::Untouched)
                .for_each(|part| *part = Part::Refused);
        }
    }

    fn part(&self, address: usize) -> usize {
        (address - self.start) / self.part
    }

    /// The device's address of a pinned byte, where it can reach it.
    pub(super) fn mapped(&self, address: usize) -> Option<u64> {
        match self.parts.lock()[self.part(address)] {
            Part::Pinned(Some(first)) => Some(first + ((address - self.start) % self.part) as u64),
            _ => None,
        }
    }

    /// Where the part that holds `address` ends.
    pub(super) fn next_border(&self, address: usize) -> usize {
        self.start + (self.part(address) + 1) * self.part
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        for (number, part) in self.parts.get_mut().iter().enumerate() {
            if matches!(part, Part::Pinned(_)) {
                self.runtime
                    .unregister(with_exposed_provenance_mut(self.start + number * self.part));
            }
        }
    }
}

/// The arenas of a device.
#[derive(Default)]
pub(super) struct Arenas(Mutex<Vec<Weak<Pinned>>>);

impl Arenas {
    pub(super) fn add(&self, arena: &Arc<Pinned>) {
        let mut arenas = self.0.lock();
        arenas.retain(|known| known.strong_count() > 0);
        arenas.push(Arc::downgrade(arena));
    }

    /// The arena that holds these bytes, with them pinned.
    pub(super) fn pin(&self, address: usize, len: usize) -> Option<Arc<Pinned>> {
        let arena = self
            .0
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .find(|arena| arena.holds(address, len))?;
        arena.pin(address, len);
        Some(arena)
    }

    /// Pieces of a buffer that begins at the address zero: those of each arena, with their bytes pinned, and those of
    /// none.
    pub(super) fn split(&self, pairs: &[(DeviceSpan, HostSpan)]) -> Vec<(Option<Arc<Pinned>>, Vec<Piece>)> {
        let arenas: Vec<Arc<Pinned>> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        let mut parts: Vec<(Option<Arc<Pinned>>, Vec<Piece>)> = arenas
            .into_iter()
            .map(|arena| (Some(arena), Vec::new()))
            .collect();
        parts.push((None, Vec::new()));
        let none = parts.len() - 1;
        for &(span, host) in pairs {
            let (at, len) = (host.addr() as usize, host.len() as usize);
            let holds = |(arena, _): &(Option<Arc<Pinned>>, _)| {
                arena.as_ref().is_some_and(|arena| arena.holds(at, len))
            };
            let part = parts.iter().position(holds).unwrap_or(none);
            let (arena, pieces) = &mut parts[part];
            if let Some(arena) = arena {
                arena.pin(at, len);
            }
            pieces.push(Piece { at, span });
        }
        parts.retain(|(_, pieces)| !pieces.is_empty());
        parts
    }
}
