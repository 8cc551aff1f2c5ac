//! How fast a root is, where records are spread by that: what reading a MiB takes, past the caches
//! that can be passed.
//!
//! It is measured once, by the first process that has to know, and stands in the root's marker from
//! then on: all who use the root go by one number, so that no two move records to and fro between
//! two roots.

use ucm_core::Result;
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, Publish, ReadMode};
use ucm_quota::layout::Marker;

use crate::shared::Shared;

/// Bytes that are read, and how often; the fastest counts.
const BYTES: usize = 1 << 20;
const TIMES: usize = 3;

impl Shared {
    /// Tells the store that spreads records over this root and others what its marker says.
    pub(crate) fn told_by(&self, marker: &Marker) {
        self.config.place.facts.learn(&marker.uuid, marker.read_ns);
    }

    /// The marker, with how fast the root is where that has to be known and can be found out.
    pub(crate) fn measured(&self, marker: Marker, deadline: MonotonicTime) -> Result<Marker> {
        if !self.config.place.measured || marker.read_ns.is_some() {
            return Ok(marker);
        }
        // One that is full or cannot be written is used as it is, and comes after those that were
        // measured.
        let Ok(read_ns) = self.measure(deadline) else {
            return Ok(marker);
        };
        let there = self.read_marker(deadline)?.unwrap_or(marker);
        let with = Marker {
            read_ns: there.read_ns.or(Some(read_ns)),
            ..there
        };
        Ok(match self.publish_marker(&with, true, deadline) {
            Ok(()) => self.read_marker(deadline)?.unwrap_or(with),
            Err(_) => with, // for this process
        })
    }

    /// What reading a MiB takes, ns.
    fn measure(&self, deadline: MonotonicTime) -> Result<u64> {
        let (private, target, mode) = (
            self.next_private(),
            self.next_private(),
            self.config.modes.file,
        );
        let clock = std::sync::Arc::clone(&self.clock);
        let measure = move |io: &IoJob| {
            io.publish(Publish {
                private: &private,
                target: &target,
                replace: true,
                bytes: &noise(),
                mode,
                mtime_ns: None,
                durable: true, // else it lies in a cache of the writer
            })?;
            let times = (0..TIMES).map(|_| {
                let begun = clock.now();
                io.read_piece(&target, 0, BYTES, ReadMode::FreshDirect)?;
                let took = clock.now().since(begun);
                Ok(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1))
            });
            let fastest = times.collect::<Result<Vec<u64>>>();
            let _ = io.remove(&[target]); // what stays is swept by its age
            Ok(fastest?.into_iter().min().unwrap_or(u64::MAX))
        };
        self.call(deadline, measure)
    }
}

/// Bytes that no medium makes shorter.
fn noise() -> Vec<u8> {
    let mut state = ucm_infra::random_u64() | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..BYTES / 8).flat_map(|_| next()).collect()
}
