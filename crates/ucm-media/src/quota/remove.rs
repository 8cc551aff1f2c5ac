//! Limits as a user writes them; which records a count removes, and in which order.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use ucm_core::BlockId;

use crate::layout::{BLOCKS, SEGMENTS, SegmentName};

/// Share of the limit above which records are removed, and down to which.
const HIGH: f64 = 0.95;
const LOW: f64 = 0.85;

/// A limit as configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Capacity {
    /// A number of bytes.
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

/// Rules of eviction for one root, beside its limit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rules {
    /// Least that stays free on the file system; `None`: 5 % of it.
    pub free_floor: Option<Capacity>,
    /// Most bytes of one namespace (percent: of the limit); `None`: the limit alone.
    pub namespace_quota: Option<Capacity>,
    /// Records not used for this long are removed; `None`: never for their age alone.
    pub expire_after: Option<Duration>,
}

/// Bytes of the file system that stay free by default.
const FLOOR: Capacity = Capacity::Percent(5.0);

impl Rules {
    /// Bytes that stay free on a file system of `total` bytes.
    pub fn floor(&self, total: u64) -> u64 {
        self.free_floor.unwrap_or(FLOOR).bytes(total)
    }
}

/// Kind of a file that a count found; it is removed whole or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// One record, named after its id.
    Record,
    /// A segment with about this many records; its name is used as an id.
    Segment(u32),
}

/// One file found by the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: Kind,
    pub(super) id: BlockId,
    pub(super) len: u64,
    /// Time of its last use, ns of Unix time.
    pub(super) used_ns: i64,
    /// Index of its namespace.
    pub(super) namespace: u32,
}

impl Found {
    /// Records in it; for a segment that was not read, estimated from its length.
    pub(super) fn records(&self) -> u64 {
        match self.kind {
            Kind::Record => 1,
            Kind::Segment(records) => u64::from(records),
        }
    }

    pub(super) fn path(&self, namespaces: &[PathBuf]) -> PathBuf {
        let namespace = &namespaces[self.namespace as usize];
        match self.kind {
            Kind::Segment(_) => {
                let name = SegmentName::from_id(self.id).file_name();
                namespace.join(SEGMENTS).join(name)
            }
            Kind::Record => {
                namespace.join(format!("{BLOCKS}/{:02x}/{}.bin", self.id.0[0], self.id))
            }
        }
    }
}

/// Use of the limit above which the collector starts.
pub(super) fn high(limit: u64) -> u64 {
    (limit as f64 * HIGH) as u64
}

/// Use down to which it removes.
pub(super) fn low(limit: u64) -> u64 {
    (limit as f64 * LOW) as u64
}

/// How much has to be removed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Need {
    /// Bytes to free, of the oldest use in the whole root.
    pub(super) surplus: u64,
    /// Most bytes of one namespace.
    pub(super) quota: Option<u64>,
    /// Records used before this time go, ns of Unix time.
    pub(super) expired_before: Option<i64>,
}

/// The files to remove, oldest use first (so descendants before their ancestors), and no more than
/// is needed.
pub(super) fn plan(mut records: Vec<Found>, namespaces: usize, need: &Need) -> Vec<Found> {
    if need.surplus == 0 && need.quota.is_none() && need.expired_before.is_none() {
        return Vec::new();
    }
    let mut over = vec![0u64; namespaces];
    for record in &records {
        over[record.namespace as usize] += record.len;
    }
    for bytes in &mut over {
        *bytes = need.quota.map_or(0, |quota| bytes.saturating_sub(quota));
    }
    records.sort_unstable_by_key(|record| (record.used_ns, record.id));
    // First files over their age or their namespace's quota: they make room, so that fewer others
    // are removed.
    let mut surplus = need.surplus;
    let goes = |over: &mut [u64], record: &Found| {
        let over = &mut over[record.namespace as usize];
        let expired = need.expired_before.is_some_and(|at| record.used_ns < at);
        let goes = expired || *over > 0;
        if goes {
            *over = over.saturating_sub(record.len);
        }
        goes
    };
    let mut before = over.clone();
    for record in &records {
        if goes(&mut before, record) {
            surplus = surplus.saturating_sub(record.len);
        }
    }
    records.retain(|record| {
        if goes(&mut over, record) {
            return true;
        }
        let oldest = surplus > 0;
        if oldest {
            surplus = surplus.saturating_sub(record.len);
        }
        oldest
    });
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(n: u8, used_ns: i64, namespace: u32) -> Found {
        Found {
            kind: Kind::Record,
            id: BlockId([n; 16]),
            len: 10,
            used_ns,
            namespace,
        }
    }

    fn removed(need: Need) -> Vec<u8> {
        let all = vec![
            found(1, 50, 0),
            found(2, 10, 1),
            found(3, 30, 0),
            found(4, 20, 0),
            found(5, 40, 1),
        ];
        plan(all, 2, &need)
            .iter()
            .map(|record| record.id.0[0])
            .collect()
    }

    #[test]
    fn the_oldest_go_and_no_more_than_needed() {
        assert!(removed(Need::default()).is_empty());
        let surplus = |surplus| Need {
            surplus,
            ..Need::default()
        };
        assert_eq!(removed(surplus(1)), [2]);
        assert_eq!(removed(surplus(21)), [2, 4, 3]);
        assert_eq!(removed(surplus(1000)).len(), 5);
    }

    #[test]
    fn a_namespace_keeps_to_its_quota_and_the_old_expire() {
        let quota = Need {
            quota: Some(20),
            ..Need::default()
        };
        assert_eq!(removed(quota), [4], "the oldest of the larger namespace");
        let expired = Need {
            expired_before: Some(30),
            ..Need::default()
        };
        assert_eq!(removed(expired), [2, 4]);
        let all = Need {
            surplus: 10,
            quota: Some(10),
            expired_before: Some(20),
        };
        assert_eq!(
            removed(all),
            [2, 4, 3],
            "what one rule removes helps the others"
        );
        let over = Need {
            surplus: 10,
            quota: Some(20),
            expired_before: None,
        };
        assert_eq!(
            removed(over),
            [4],
            "nothing else goes for room that a quota makes"
        );
    }

    #[test]
    fn limits_in_bytes_and_percent() {
        assert_eq!(Capacity::Percent(50.0).bytes(1000), 500);
        assert_eq!(Capacity::default_bytes(1000, 1000), 200);
        assert_eq!(Capacity::default_bytes(1000, 100), 80);
    }
}
