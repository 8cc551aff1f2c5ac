//! How fast a medium is, as seen by who uses it: an I/O engine that counts what goes through it.
//!
//! Bytes by the time in which at least one operation was under way, so that many at once count as what they are together,
//! and idle time as nothing. Only loads and dumps are counted; older figures fade.

use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::Result;
use ucm_infra::{Clock, Mono};
use ucm_io::{Close, Closed, IoDone, IoEngine, IoOp, Publish, StillWanted};

use crate::engine::{LANE_DUMP, LANE_LOAD};

/// Busy time after which what was measured counts half.
const HALF_LIFE_S: f64 = 2.0;
/// Bytes before which nothing is said.
const ENOUGH: f64 = (1 << 20) as f64;

/// The rates of one medium.
#[derive(Default)]
pub struct Meter {
    reading: Mutex<Flow>,
    writing: Mutex<Flow>,
}

#[derive(Default)]
struct Flow {
    under_way: usize,
    /// Up to when time was counted, while something is under way.
    since: Mono,
    bytes: f64,
    seconds: f64,
}

impl Flow {
    fn begin(&mut self, now: Mono) {
        self.count(now);
        self.under_way += 1;
    }

    fn end(&mut self, bytes: usize, now: Mono) {
        self.count(now);
        self.under_way = self.under_way.saturating_sub(1);
        self.bytes += bytes as f64;
        if self.seconds > HALF_LIFE_S {
            self.bytes /= 2.0;
            self.seconds /= 2.0;
        }
    }

    fn count(&mut self, now: Mono) {
        if self.under_way > 0 {
            self.seconds += now.since(self.since).as_secs_f64();
        }
        self.since = now;
    }

    fn rate(&self) -> Option<f64> {
        (self.bytes >= ENOUGH && self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }
}

impl Meter {
    /// Bytes read in a second, once enough were.
    pub fn read_rate(&self) -> Option<f64> {
        self.reading.lock().rate()
    }

    /// Bytes written in a second, once enough were.
    pub fn write_rate(&self) -> Option<f64> {
        self.writing.lock().rate()
    }
}

#[cfg(test)]
impl Meter {
    /// As if these rates had been measured, bytes a second.
    pub(super) fn pretend(&self, write: f64, read: f64) {
        for (flow, rate) in [(&self.writing, write), (&self.reading, read)] {
            let mut flow = flow.lock();
            (flow.bytes, flow.seconds) = (rate, 1.0);
        }
    }
}

/// An I/O engine whose loads and dumps are measured.
pub struct MeteredEngine {
    inner: Arc<dyn IoEngine>,
    meter: Arc<Meter>,
    clock: Arc<dyn Clock>,
}

impl MeteredEngine {
    /// Measures what goes through `inner`.
    pub fn new(inner: Arc<dyn IoEngine>, meter: Arc<Meter>, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { inner, meter, clock })
    }
}

impl IoEngine for MeteredEngine {
    fn run(&self, lane: usize, op: &mut IoOp<'_>, wanted: StillWanted<'_>) -> Result<IoDone> {
        let (flow, asked) = match (&*op, lane) {
            (IoOp::Read { .. } | IoOp::ReadInto { .. } | IoOp::ReadParts { .. }, LANE_LOAD) => {
                (&self.meter.reading, 0)
            }
            (IoOp::WriteAt { bytes, .. } | IoOp::Publish(Publish { bytes, .. }), LANE_DUMP) => {
                (&self.meter.writing, bytes.len())
            }
            _ => return self.inner.run(lane, op, wanted),
        };
        flow.lock().begin(self.clock.now());
        let result = self.inner.run(lane, op, wanted);
        let moved = match &result {
            Ok(IoDone::Read(read, _) | IoDone::ReadInto(read)) => *read,
            Ok(_) => asked,
            Err(_) => 0,
        };
        flow.lock().end(moved, self.clock.now());
        result
    }

    fn close(&self, which: Close<'_>) -> Closed {
        self.inner.close(which)
    }

    fn kept(&self) -> usize {
        self.inner.kept()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const MIB: usize = 1 << 20;

    #[test]
    fn what_overlaps_is_counted_once_and_idle_time_never() {
        let mut flow = Flow::default();
        assert_eq!(flow.rate(), None);
        flow.begin(Mono(10 * SECOND));
        flow.begin(Mono(10 * SECOND + SECOND / 2));
        flow.end(4 * MIB, Mono(11 * SECOND));
        flow.end(4 * MIB, Mono(11 * SECOND + SECOND / 2));
        assert_eq!(flow.rate(), Some((8 * MIB) as f64 / 1.5));
        flow.begin(Mono(99 * SECOND));
        flow.end(MIB / 2, Mono(99 * SECOND + SECOND / 2));
        assert_eq!(flow.rate(), Some((8.5 * MIB as f64) / 2.0));
    }

    #[test]
    fn old_figures_fade() {
        let mut flow = Flow::default();
        let mut now = 0;
        let mut second = |flow: &mut Flow, bytes| {
            flow.begin(Mono(now));
            now += SECOND;
            flow.end(bytes, Mono(now));
        };
        (0..20).for_each(|_| second(&mut flow, 64 * MIB));
        assert_eq!(flow.rate(), Some((64 * MIB) as f64));
        (0..40).for_each(|_| second(&mut flow, MIB));
        assert!(flow.rate().unwrap() < 1.1 * MIB as f64);
    }

    #[test]
    fn a_failure_moves_nothing() {
        let mut flow = Flow::default();
        flow.begin(Mono(0));
        flow.end(0, Mono(SECOND));
        assert_eq!(flow.rate(), None);
    }
}
