//! The virtual clock: one time for the host, one for each stream, and the DMA engines' books of
//! when they are busy.
//!
//! Each call takes host time. The cost model decides whether work in streams takes time too. The
//! real clock is never read, so figures are the same on every machine. They are those of an H100,
//! rounded, as measured by ucm at the opening of the device (`docs/devices.md`).

use std::collections::BTreeMap;

/// Host time of a call, in nanoseconds.
const CALL_NS: u64 = 1_500;

/// Host time of a kernel launch.
const LAUNCH_NS: u64 = 4_700;

/// Bytes that a DMA engine moves in a nanosecond (54 GB/s in each direction).
const DMA: u64 = 54;

/// Nanoseconds of a DMA engine to begin a copy, however early it was submitted.
const GAP_NS: u64 = 1_600;

/// Bytes of mapped host memory that a kernel reads or writes in a nanosecond (50 GB/s).
const KERNEL_HOST: u64 = 50;

/// Bytes of its own memory that a device reads or writes in a nanosecond (3 TB/s).
const DEVICE: u64 = 3_000;

/// The work of an operation of a stream.
#[derive(Clone, Copy)]
pub(crate) enum Cost {
    /// Took no time.
    None,
    /// Bytes moved from host to device by the DMA engine of that direction.
    ToDevice(u64),
    /// Bytes moved from device to host by the DMA engine of that direction.
    ToHost(u64),
    /// Bytes copied inside of device memory.
    OnDevice(u64),
    /// Bytes of device memory filled.
    Fill(u64),
    /// Bytes of mapped host memory and of device memory that a kernel read and wrote, at the same
    /// time.
    Kernel { host: u64, device: u64 },
}

/// The host's time and the engines' books.
pub(crate) struct Clock {
    host: u64,
    pub(crate) model: bool,
    to_device: Engine,
    to_host: Engine,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Self {
            host: 0,
            model: false,
            to_device: Engine::new(),
            to_host: Engine::new(),
        }
    }

    /// The host's time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.host
    }

    /// A call takes its time.
    pub(crate) fn call(&mut self, launch: bool) {
        self.host += if launch { LAUNCH_NS } else { CALL_NS };
    }

    /// Sets the host's time after a wait.
    pub(crate) fn waited(&mut self, until: u64) {
        self.host = self.host.max(until);
    }

    /// End of an operation that can begin at `ready`.
    pub(crate) fn spend(&mut self, ready: u64, cost: Cost) -> u64 {
        if !self.model {
            return ready;
        }
        match cost {
            Cost::None => ready,
            Cost::ToDevice(len) => self.to_device.place(ready, GAP_NS + len.div_ceil(DMA)),
            Cost::ToHost(len) => self.to_host.place(ready, GAP_NS + len.div_ceil(DMA)),
            Cost::OnDevice(len) => ready + (2 * len).div_ceil(DEVICE),
            Cost::Fill(len) => ready + len.div_ceil(DEVICE),
            Cost::Kernel { host, device } => {
                ready + host.div_ceil(KERNEL_HOST).max(device.div_ceil(DEVICE))
            }
        }
    }
}

/// A resource for one operation at a time: its busy intervals (begin, end). Operations take the
/// first sufficient gap, so that the order of the threads' reports does not matter.
struct Engine {
    busy: BTreeMap<u64, u64>,
}

impl Engine {
    const fn new() -> Self {
        Self {
            busy: BTreeMap::new(),
        }
    }

    /// Enters an operation of this length that can begin at `ready`; returns when it ends.
    fn place(&mut self, ready: u64, len: u64) -> u64 {
        let before = self.busy.range(..=ready).next_back();
        let mut begin = before.map_or(ready, |(_, &end)| end.max(ready));
        for (&at, &end) in self.busy.range(begin..) {
            if at - begin >= len {
                break;
            }
            begin = end;
        }
        let end = begin + len;
        // Intervals that touch become one.
        let until = self.busy.remove(&end).unwrap_or(end);
        let touching = self.busy.range_mut(..=begin).next_back();
        match touching.filter(|(_, end)| **end == begin) {
            Some((_, end)) => *end = until,
            None => {
                self.busy.insert(begin, until);
            }
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::Engine;

    #[test]
    fn an_engine_takes_the_first_gap_that_holds_the_operation() {
        let mut engine = Engine::new();
        assert_eq!(engine.place(100, 50), 150);
        assert_eq!(engine.place(120, 10), 160, "behind what is busy");
        assert_eq!(engine.place(0, 40), 40, "a gap before");
        assert_eq!(engine.place(10, 70), 230, "60 ns are not enough for 70");
        assert_eq!(engine.place(10, 60), 100, "they are for 60");
        assert_eq!(engine.busy, [(0, 230)].into());
        assert_eq!(engine.place(5, 1), 231);
    }
}
