//! The counters of an engine: plain atomics and fixed-bucket histograms, readable at any time by a
//! snapshot.
//!
//! Names here are the names in `ucm inspect`, in logs and (prefixed `ucm_`) in Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use ucm_core::MissReason;

/// Upper bounds of the latency buckets, in seconds; a last bucket takes longer times.
pub const LATENCY_BOUNDS: [f64; 14] = [
    0.0001, 0.0003, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5, 1.0, 3.0, 10.0,
];

/// A histogram of durations with the bounds of [`LATENCY_BOUNDS`].
#[derive(Default)]
pub struct Histogram {
    buckets: [AtomicU64; LATENCY_BOUNDS.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    /// Counts one duration.
    pub fn observe(&self, ns: u64) {
        let seconds = ns as f64 / 1e9;
        let bucket = LATENCY_BOUNDS.partition_point(|&bound| bound < seconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// The counts now.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let buckets: Vec<u64> = self
            .buckets
            .iter()
            .map(|b| b.load(Ordering::Relaxed))
            .collect();
        HistogramSnapshot {
            count: buckets.iter().sum(),
            sum_seconds: self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9,
            bounds: LATENCY_BOUNDS.to_vec(),
            buckets,
        }
    }
}

/// A histogram at one moment; `buckets` has one entry more than `bounds`, not cumulative.
#[derive(Serialize, Debug, Clone)]
pub struct HistogramSnapshot {
    /// Number of observations.
    pub count: u64,
    /// Their sum in seconds.
    pub sum_seconds: f64,
    /// Upper bounds in seconds.
    pub bounds: Vec<f64>,
    /// Observations per bucket.
    pub buckets: Vec<u64>,
}

/// One counter per miss reason.
pub struct Misses([AtomicU64; MissReason::ALL.len()]);

impl Default for Misses {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Misses {
    /// Counts `n` blocks missed for a reason.
    pub fn add(&self, reason: MissReason, n: u64) {
        self.0[reason.index()].fetch_add(n, Ordering::Relaxed);
    }

    /// How many blocks were missed for a reason.
    pub fn get(&self, reason: MissReason) -> u64 {
        self.0[reason.index()].load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),+ $(,)?) => {
        /// All counters of one engine.
        #[derive(Default)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            /// Blocks not served, by reason.
            pub misses: Misses,
            /// Time from submission to the end of a load task.
            pub load_latency: Histogram,
            /// Time from submission to staged.
            pub stage_latency: Histogram,
            /// Time from submission to published.
            pub dump_latency: Histogram,
            /// Time of one lookup call.
            pub lookup_latency: Histogram,
        }

        impl Stats {
            /// Everything as one JSON object (histograms nested, misses as a map of the reasons
            /// seen).
            pub fn to_json(&self) -> serde_json::Value {
                let mut map = serde_json::Map::new();
                $(map.insert(stringify!($name).into(), self.$name.load(Ordering::Relaxed).into());)+
                let misses = MissReason::ALL.into_iter().filter(|&r| self.misses.get(r) > 0);
                let misses: serde_json::Map<_, _> =
                    misses.map(|r| (r.name().to_owned(), self.misses.get(r).into())).collect();
                map.insert("misses".into(), misses.into());
                for (name, histogram) in [
                    ("load_latency", &self.load_latency),
                    ("stage_latency", &self.stage_latency),
                    ("dump_latency", &self.dump_latency),
                    ("lookup_latency", &self.lookup_latency),
                ] {
                    let value = serde_json::to_value(histogram.snapshot()).unwrap_or_default();
                    map.insert(name.into(), value);
                }
                map.into()
            }
        }
    };
}

counters! {
    /// Lookup calls.
    lookups,
    /// Ids in lookups.
    lookup_ids,
    /// Ids found in lookups.
    lookup_hits,
    /// Load tasks started.
    load_tasks,
    /// Blocks delivered to the device, verified.
    blocks_loaded,
    /// Blocks read and verified for tasks that wanted no more than that.
    blocks_verified,
    /// Blocks of load tasks that were not delivered, or not verified.
    blocks_failed,
    /// Bytes of KV delivered to the device.
    bytes_loaded,
    /// Loads of a block that joined a read already under way.
    loads_joined,
    /// Second reads through a fresh direct open after a failed checksum.
    second_reads,
    /// Dump tasks accepted.
    dump_tasks,
    /// Dump calls refused because no slot was free.
    dumps_refused,
    /// Blocks published, with side shards or without.
    blocks_published,
    /// Blocks of dumps that were stored already.
    blocks_present,
    /// Blocks whose publish failed.
    publishes_failed,
    /// Blocks dropped because their last shard was not dumped in time.
    blocks_incomplete,
    /// Side shards read, verified and handed over.
    sides_loaded,
    /// Side shards that were wanted and are stored nowhere, or could not be read in time.
    sides_missing,
    /// Copies of side shards that are not sound; another is read.
    sides_refused,
    /// Side shards published in records of their own.
    sides_published,
    /// Side shards of dumps that were stored in records of their own already.
    sides_present,
    /// Bytes of KV read from the device.
    bytes_staged,
    /// Bytes of records published.
    bytes_published,
    /// Records refused in this process.
    records_refused,
    /// Refused records that a dump replaced.
    records_replaced,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_count_at_their_bounds() {
        let histogram = Histogram::default();
        for ns in [0, 100_000, 100_001, 20_000_000_000] {
            histogram.observe(ns);
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count, 4);
        assert_eq!((snapshot.buckets[0], snapshot.buckets[1]), (2, 1));
        assert_eq!(snapshot.buckets.last(), Some(&1));
    }

    #[test]
    fn json_names_only_reasons_seen() {
        let stats = Stats::default();
        stats.misses.add(MissReason::Absent, 3);
        let json = stats.to_json();
        assert_eq!(json["misses"], serde_json::json!({"absent": 3}));
        assert_eq!(json["lookups"], 0);
    }
}
