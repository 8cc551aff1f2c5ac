//! The plan of a transfer: its copies and their method.

use std::borrow::Cow;
use std::ops::Range;

use crate::span::Piece;

use super::runtime::Direction;

/// A contiguous copy between a host buffer and the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Offset in the host buffer.
    pub(super) at: usize,
    /// Address on the device.
    pub(super) address: u64,
    /// Bytes.
    pub(super) len: usize,
}

ucm_core::named! {
    /// How runs are moved.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(super) enum Method {
        /// One asynchronous copy each.
        Dma = "dma",
        /// One kernel that reads or writes the mapped host memory itself.
        Kernel = "sm",
        /// One kernel between the runs and a buffer on the device, and a copy of that buffer.
        Staging = "staging",
        /// One copy for each run, each ending before the next begins: for devices whose
        /// asynchronous copies are wrong.
        Plain = "plain",
    }
}

/// Pieces as runs in the order of the host buffer; pieces adjacent on both sides are joined. A
/// driver copies within one allocation only: `allocation` returns that of an address, if known, and
/// pieces of different allocations are not joined. If the buffer is pinned in parts, no run crosses
/// a border between two: `part` returns the part around an offset.
pub(super) fn runs(
    pieces: &[Piece],
    allocation: impl Fn(u64) -> Option<Range<u64>>,
    part: impl Fn(usize) -> Range<usize>,
) -> Vec<Run> {
    let mut sorted = Cow::Borrowed(pieces);
    if !pieces.is_sorted_by_key(|piece| piece.at) {
        sorted.to_mut().sort_by_key(|piece| piece.at);
    }
    let mut runs: Vec<Run> = Vec::with_capacity(pieces.len());
    // the last returned allocation and part
    let (mut known, mut inside) = (0..0, 0..0);
    let mut is_one = |first: u64, last: u64| {
        if !known.contains(&first) {
            known = allocation(first).unwrap_or_default();
        }
        known.contains(&first) && known.contains(&last)
    };
    for piece in sorted.iter().filter(|piece| !piece.span.is_empty()) {
        let (mut at, mut address, mut left) =
            (piece.at, piece.span.addr(), piece.span.len() as usize);
        while left > 0 {
            if !inside.contains(&at) {
                inside = part(at);
            }
            let len = left.min(inside.end - at);
            match runs.last_mut() {
                Some(last)
                    if last.at + last.len == at
                        && last.address + last.len as u64 == address
                        && inside.contains(&last.at)
                        && is_one(last.address, address + len as u64 - 1) =>
                {
                    last.len += len;
                }
                _ => runs.push(Run { at, address, len }),
            }
            (at, address, left) = (at + len, address + len as u64, left - len);
        }
    }
    runs
}

/// Measured costs of a device. Rates are bytes a nanosecond, that is GB/s.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Costs {
    /// Nanoseconds of the host to begin a copy.
    pub(super) call: f64,
    /// Nanoseconds of an empty kernel.
    pub(super) launch: f64,
    /// Of one large copy, to the device and to the host.
    pub(super) dma: [f64; 2],
    /// Nanoseconds of bus idle time between two copies, however early the second one was begun.
    pub(super) gap: [f64; 2],
    /// Of a kernel that reads the host's memory, and one that writes it.
    pub(super) mapped: [f64; 2],
    /// Nanoseconds of such a kernel for each run, beside its bytes.
    pub(super) piece: [f64; 2],
    /// Of a kernel between two ranges on the device; each byte is read and written.
    pub(super) device: f64,
}

/// Bytes of a descriptor on the device.
pub(super) const DESCRIPTOR: usize = 24;

/// Descriptors of one round. A transfer with more has several rounds in sequence.
pub(super) const DESCRIPTORS: usize = 16 << 10;

impl Costs {
    /// Nanoseconds of a transfer of `count` runs with `bytes` in total, which form `segments`
    /// contiguous parts of the host buffer.
    pub(super) fn of(
        &self,
        method: Method,
        direction: Direction,
        count: usize,
        segments: usize,
        bytes: usize,
    ) -> f64 {
        let rounds = match method {
            Method::Kernel | Method::Staging => count.div_ceil(DESCRIPTORS).max(1) as f64,
            Method::Dma | Method::Plain => 1.0,
        };
        let (n, bytes) = (count as f64 / rounds, bytes as f64 / rounds);
        let parts = (segments as f64 / rounds).max(1.0);
        rounds * self.round(method, direction, n, parts, bytes)
    }

    /// The same for at most one round of runs.
    fn round(&self, method: Method, direction: Direction, n: f64, parts: f64, bytes: f64) -> f64 {
        let way = direction as usize;
        let moved = bytes / self.dma[way];
        // Time of `count` copies: the host begins the next one while one is running.
        let copies = |n: f64| {
            let begun = n * self.call + moved / n.max(1.0);
            begun.max(self.call + moved + n * self.gap[way])
        };
        // A kernel begins when its descriptors have arrived and the host has launched it.
        let descriptors =
            self.call + n * DESCRIPTOR as f64 / self.dma[Direction::ToDevice as usize];
        let kernel = descriptors.max(self.call + self.launch);
        let (host, device) = match (method, direction) {
            (Method::Dma, _) => (n * self.call, copies(n)),
            (Method::Plain, _) => (0.0, n * self.call + moved),
            (Method::Kernel, _) => (
                self.call + self.launch,
                kernel + n * self.piece[way] + bytes / self.mapped[way],
            ),
            (Method::Staging, _) => {
                let host = self.call + self.launch + parts * self.call;
                let on_device = bytes / self.device;
                match direction {
                    Direction::ToHost => (
                        host,
                        (kernel + on_device + moved).max(kernel + copies(parts)),
                    ),
                    Direction::ToDevice => {
                        (host, (descriptors + copies(parts)).max(host) + on_device)
                    }
                }
            }
        };
        (host + self.call).max(device) // waiting costs a call too
    }

    /// The cheapest of `methods`.
    pub(super) fn cheapest(
        &self,
        methods: &[Method],
        direction: Direction,
        runs: &[Run],
    ) -> Method {
        let bytes = runs.iter().map(|run| run.len).sum();
        let segments = segments(runs);
        let cost = |method: &Method| self.of(*method, direction, runs.len(), segments, bytes);
        let cheapest = methods.iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
        cheapest.copied().unwrap_or(Method::Dma)
    }
}

/// Number of contiguous parts of the host buffer that the runs form.
fn segments(runs: &[Run]) -> usize {
    let broken = runs
        .windows(2)
        .filter(|two| two[0].at + two[0].len != two[1].at);
    broken.count() + usize::from(!runs.is_empty())
}

#[cfg(test)]
#[allow(unsafe_code, reason = "spans that are never read or written")]
mod tests {
    use super::*;
    use crate::span::DeviceSpan;

    fn piece(at: usize, address: u64, len: u64) -> Piece {
        // SAFETY: the span is never read or written.
        let span = unsafe { DeviceSpan::new(address, len) };
        Piece { at, span }
    }

    fn run(at: usize, address: u64, len: usize) -> Run {
        Run { at, address, len }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_run() {
        let pieces = [
            piece(200, 5000, 50),
            piece(0, 1000, 100),
            piece(100, 1100, 100),
            piece(250, 9000, 0),
            piece(250, 6000, 10),
        ];
        let (all, far) = (|_| Some(0..u64::MAX), |_| 0..usize::MAX);
        assert_eq!(
            runs(&pieces, all, far),
            [run(0, 1000, 200), run(200, 5000, 50), run(250, 6000, 10)]
        );
        assert_eq!(segments(&runs(&pieces, all, far)), 1);
        assert!(runs(&[], all, far).is_empty());
    }

    #[test]
    fn pieces_of_two_allocations_are_two_runs() {
        let (pieces, far) = ([piece(0, 1000, 100), piece(100, 1100, 100)], |_| {
            0..usize::MAX
        });
        let apart = [run(0, 1000, 100), run(100, 1100, 100)];
        assert_eq!(runs(&pieces, |_| Some(900..1200), far), [run(0, 1000, 200)]);
        assert_eq!(runs(&pieces, |_| Some(900..1199), far), apart);
        assert_eq!(
            runs(&pieces, |_| None, far),
            apart,
            "the ends of the allocations are unknown"
        );
    }

    #[test]
    fn no_run_crosses_a_border() {
        let part = |at: usize| at / 64 * 64..(at / 64 + 1) * 64;
        assert_eq!(
            runs(
                &[piece(60, 1000, 100), piece(160, 1100, 32)],
                |_| Some(0..u64::MAX),
                part
            ),
            [run(60, 1000, 4), run(64, 1004, 64), run(128, 1068, 64)]
        );
    }

    /// Published figures of an H100: no gap between copies.
    const PUBLISHED: Costs = Costs {
        call: 2300.0,
        launch: 5000.0,
        dma: [55.0; 2],
        gap: [0.0; 2],
        mapped: [35.0; 2],
        piece: [0.0; 2],
        device: 1500.0,
    };

    #[test]
    fn small_fragments_are_staged_and_large_ones_copied() {
        let all = [Method::Staging, Method::Kernel, Method::Dma];
        let of = |len: usize, count: usize| {
            let runs: Vec<_> = (0..count)
                .map(|i| run(i * len, (i * 3 * len) as u64, len))
                .collect();
            PUBLISHED.cheapest(&all, Direction::ToHost, &runs)
        };
        assert_eq!(of(8 << 10, 4096), Method::Staging);
        assert_eq!(of(32 << 10, 1024), Method::Staging);
        assert_eq!(of(1 << 20, 32), Method::Dma);
        assert_eq!(of(256, 4), Method::Kernel);
        assert_eq!(of(4096, 1), Method::Dma);
    }

    /// Figures of an H100, rounded, as measured by this crate.
    #[test]
    fn copies_with_gaps_between_them_are_for_long_runs() {
        let measured = Costs {
            call: 1500.0,
            launch: 4700.0,
            dma: [53.0; 2],
            gap: [1600.0; 2],
            mapped: [50.0; 2],
            piece: [0.0; 2],
            device: 1500.0,
        };
        let of = |len: usize, count: usize| {
            let runs: Vec<_> = (0..count)
                .map(|i| run(i * len, (i * 3 * len) as u64, len))
                .collect();
            measured.cheapest(
                &[Method::Staging, Method::Kernel, Method::Dma],
                Direction::ToDevice,
                &runs,
            )
        };
        assert_ne!(of(64 << 10, 64), Method::Dma);
        assert_ne!(of(256 << 10, 64), Method::Dma);
        assert_eq!(of(4 << 20, 8), Method::Dma);
    }
}
