//! The limit on bytes below a root, and what is known of their use.

use std::num::NonZeroU64;

use ucm_core::{Error, ErrorKind};

/// A limit as configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Capacity {
    /// So many bytes.
    Bytes(NonZeroU64),
    /// A share of the file system, in percent.
    Percent(f64),
}

impl Capacity {
    /// The limit in bytes on a file system of `total` bytes.
    pub fn bytes(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.get(),
            Self::Percent(percent) => (total as f64 * percent.clamp(0.0, 100.0) / 100.0) as u64,
        }
    }

    /// The default: 20 % of the file system, at most 80 % of what is free at the first start.
    pub fn default_bytes(total: u64, free: u64) -> u64 {
        (total / 5).min(free / 5 * 4)
    }
}

/// Share of the limit above which the collector starts, and down to which it removes.
const HIGH: f64 = 0.95;
const LOW: f64 = 0.85;

/// What is known of the bytes below the root; all of it changes together, so that never too little is counted.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) limit: u64,
    /// Bytes as last counted plus what was admitted since.
    pub(crate) used: u64,
    /// Records as last counted.
    pub(crate) records: u64,
    /// Bytes admitted whose write has not ended.
    pub(crate) pending: u64,
    /// Bytes admitted since the last count began; bounds what is written on an old count.
    pub(crate) since_count: u64,
    /// Counts begun and ended so far; odd while one is under way. None was ended: what lies there is not known.
    pub(crate) counts: u64,
    pub(crate) removed_records: u64,
    pub(crate) removed_bytes: u64,
    /// Why the last count failed, if it did.
    pub(crate) trouble: Option<Error>,
}

impl Ledger {
    /// Whether a count has ended.
    pub(crate) fn counted(&self) -> bool {
        self.counts > 1
    }

    /// Takes off bytes deleted in an operation begun at `before`, unless a count may have missed them already.
    pub(crate) fn deleted(&mut self, bytes: u64, before: u64) {
        if before == self.counts && before.is_multiple_of(2) {
            self.used = self.used.saturating_sub(bytes);
        }
    }

    /// Use above which the collector starts.
    pub(crate) fn high(&self) -> u64 {
        share(self.limit, HIGH)
    }

    /// Use down to which it removes.
    pub(crate) fn low(&self) -> u64 {
        share(self.limit, LOW)
    }

    pub(crate) fn full(&self, counted: bool) -> Error {
        let text = if counted {
            "the configured storage_capacity is used up; making room"
        } else {
            "what lies below the root is still being counted"
        };
        let error = Error::new(ErrorKind::NoSpace, text)
            .with("limit", self.limit)
            .with("used", self.used);
        match &self.trouble {
            Some(trouble) => error.caused_by(trouble.clone()),
            None => error,
        }
    }
}

fn share(limit: u64, part: f64) -> u64 {
    (limit as f64 * part) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_in_bytes_and_percent() {
        assert_eq!(Capacity::Percent(50.0).bytes(1000), 500);
        assert_eq!(Capacity::default_bytes(1000, 1000), 200);
        assert_eq!(Capacity::default_bytes(1000, 100), 80);
    }

    #[test]
    fn what_a_count_may_have_missed_is_not_taken_off_again() {
        let mut ledger = Ledger {
            used: 10,
            counts: 2,
            ..Ledger::default()
        };
        ledger.deleted(4, 2);
        assert_eq!(ledger.used, 6);
        ledger.counts = 3; // one is under way
        ledger.deleted(4, 2);
        ledger.deleted(4, 3);
        ledger.counts = 4; // one came in between
        ledger.deleted(4, 2);
        assert_eq!(ledger.used, 6);
        ledger.deleted(9, 4);
        assert_eq!(ledger.used, 0);
    }
}
