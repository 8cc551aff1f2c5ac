//! Lengths that the records of a part may have on a medium: those of the own layout, and those that other writers of the
//! namespace, who keep other side shards, have added to its manifest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use ucm_core::limits;
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, ReadMode};
use ucm_quota::layout::Manifest;
use ucm_record::RecordLayout;

use crate::shared::Shared;

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
}

impl Shared {
    /// Whether a record was met whose length is not known, and it is time to look what the manifest says of that.
    pub(crate) fn has_lengths_to_learn(&self) -> bool {
        let now = self.clock.now();
        let mut next = self.lengths.next_look.lock();
        let due = now >= *next && self.lengths.met_unknown.swap(false, Ordering::Relaxed);
        if due {
            *next = now.after(LOOK_AGAIN);
        }
        due
    }

    /// Reads which lengths records may have. Where that fails, those that are not known stay misses for now.
    pub(crate) fn learn_lengths(&self, io: &IoJob) {
        let read = io.read_piece(
            &self.layout.manifest(),
            0,
            limits::MAX_DOCUMENT_BYTES,
            ReadMode::Default,
        );
        if let Ok(Some((bytes, _))) = read
            && let Ok(manifest) = serde_json::from_slice::<Manifest>(&bytes)
        {
            self.lengths.learn(manifest.lengths(self.config.part));
        }
    }
}
