//! Lengths that the records of a part may have on a medium: those of the own layout, and those that other writers of
//! the namespace, who keep other side shards, have added to its manifest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use ucm_core::limits;
use ucm_infra::MonotonicTime;
use ucm_record::RecordLayout;

/// Time between two looks at the manifest, however many lengths are not known.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct Lengths {
    kv_len: u64,
    known: RwLock<Vec<u64>>,
    /// Whether a record was met whose length is not known.
    met_unknown: AtomicBool,
    /// When the manifest may be read again for that.
    next_look: Mutex<MonotonicTime>,
}

impl Lengths {
    pub(crate) fn of(layout: &RecordLayout) -> Self {
        Self {
            kv_len: layout.kv_len() as u64,
            known: RwLock::new(layout.record_lengths()),
            met_unknown: AtomicBool::new(false),
            next_look: Mutex::default(),
        }
    }

    /// Whether a record of this length can be whole, with KV or without.
    pub(crate) fn is_record(&self, len: u64) -> bool {
        let known = self.known.read().contains(&len);
        if !known {
            self.met_unknown.store(true, Ordering::Relaxed);
        }
        known
    }

    /// Whether a record of this length can have KV and be whole.
    pub(crate) fn has_kv(&self, len: u64) -> bool {
        len >= self.kv_len && self.is_record(len)
    }

    /// The length of the longest record.
    pub(crate) fn longest(&self) -> u64 {
        self.known.read().iter().copied().max().unwrap_or(0)
    }

    /// Records may have these lengths too.
    pub(crate) fn learn(&self, lengths: &[u64]) {
        let mut known = self.known.write();
        known.extend(
            lengths
                .iter()
                .filter(|len| **len <= self.kv_len + limits::MAX_SIDES_BYTES),
        );
        known.sort_unstable();
        known.dedup();
    }

    /// Whether a record was met whose length is not known, and it is time to look what the manifest says of that; the
    /// next time is some time later.
    pub(crate) fn is_look_due(&self, now: MonotonicTime) -> bool {
        let mut next = self.next_look.lock();
        let due = now >= *next && self.met_unknown.swap(false, Ordering::Relaxed);
        if due {
            *next = now.after(LOOK_AGAIN);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use ucm_core::Geometry;

    use super::*;

    #[test]
    fn what_is_not_known_is_looked_up_now_and_then() {
        let lengths = Lengths::of(&RecordLayout::new(&Geometry::new(vec![4096], 1, 1).unwrap()));
        let at = |seconds: u64| MonotonicTime(seconds * 1_000_000_000);
        assert!(lengths.has_kv(8192) && lengths.is_record(8192) && !lengths.is_look_due(at(1)));
        assert!(!lengths.has_kv(12288) && !lengths.has_kv(4096) && lengths.longest() == 8192);
        assert!(
            lengths.is_look_due(at(1)) && !lengths.is_look_due(at(1)),
            "nothing was met since"
        );
        assert!(!lengths.is_record(12288) && !lengths.is_look_due(at(10)) && lengths.is_look_due(at(11)));
        lengths.learn(&[12288, 4096, u64::MAX, 12288]);
        assert!(lengths.has_kv(12288) && lengths.is_record(4096) && lengths.longest() == 12288);
        assert!(!lengths.has_kv(4096), "too short for KV");
    }
}
