//! The counters of an engine: plain atomics and fixed-bucket histograms, readable at any time by a
//! snapshot.
//!
//! Names here are the names in `ucm inspect`, in logs and (prefixed `ucm_`) in Prometheus.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use ucm_core::MissReason;
use ucm_infra::{Clock, MonotonicTime};

/// Upper bounds of the latency buckets, in seconds; a last bucket takes longer times.
pub const LATENCY_BOUNDS: [f64; 14] = [
    0.0001, 0.0003, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5, 1.0, 3.0, 10.0,
];

/// Whether tasks keep the times of their stages.
static STAGES_KEPT: AtomicBool = AtomicBool::new(false);

/// The tasks of this process keep the times of their stages from now on, for a profile.
pub fn keep_stages() {
    STAGES_KEPT.store(true, Ordering::Relaxed);
}

/// Begin and end of a stage of one block, where times of stages are kept.
pub(crate) type StageSpan = Option<(MonotonicTime, MonotonicTime)>;

/// Now, where times of stages are kept: without a profile no clock is read.
pub(crate) fn stage_time(clock: &dyn Clock) -> Option<MonotonicTime> {
    STAGES_KEPT.load(Ordering::Relaxed).then(|| clock.now())
}

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
        add(&self.buckets[bucket], 1);
        add(&self.sum_ns, ns);
    }
}

impl Serialize for Histogram {
    /// The number of durations, their sum, the bounds in seconds, and the number in each bucket:
    /// one entry more, not cumulative.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let buckets = self.buckets.each_ref().map(get);
        let mut map = serializer.serialize_struct("Histogram", 4)?;
        map.serialize_field("count", &buckets.iter().sum::<u64>())?;
        map.serialize_field("sum_seconds", &(get(&self.sum_ns) as f64 / 1e9))?;
        map.serialize_field("bounds", &LATENCY_BOUNDS)?;
        map.serialize_field("buckets", &buckets)?;
        map.end()
    }
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
        add(&self.0[reason.index()], n);
    }

    /// How many blocks were missed for a reason.
    pub fn get(&self, reason: MissReason) -> u64 {
        get(&self.0[reason.index()])
    }
}

impl Serialize for Misses {
    /// The reasons seen, by name.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let seen = MissReason::ALL
            .into_iter()
            .filter(|&reason| self.get(reason) > 0);
        serializer.collect_map(seen.map(|reason| (reason.name(), self.get(reason))))
    }
}

/// All counters of one engine.
#[derive(Default, Serialize)]
pub struct Stats {
    /// Lookup calls.
    pub lookups: AtomicU64,
    /// Ids in lookups.
    pub lookup_ids: AtomicU64,
    /// Ids found in lookups.
    pub lookup_hits: AtomicU64,
    /// Load tasks started.
    pub load_tasks: AtomicU64,
    /// Blocks delivered to the device, verified.
    pub blocks_loaded: AtomicU64,
    /// Blocks read and verified for tasks that wanted no more than that.
    pub blocks_verified: AtomicU64,
    /// Blocks of load tasks that were not delivered, or not verified.
    pub blocks_failed: AtomicU64,
    /// Bytes of KV delivered to the device.
    pub bytes_loaded: AtomicU64,
    /// Loads of a block that joined a read already under way.
    pub loads_joined: AtomicU64,
    /// Second reads through a fresh direct open after a failed checksum.
    pub second_reads: AtomicU64,
    /// Dump tasks accepted.
    pub dump_tasks: AtomicU64,
    /// Dump calls refused because no slot was free.
    pub dumps_refused: AtomicU64,
    /// Blocks published, with side shards or without.
    pub blocks_published: AtomicU64,
    /// Blocks of dumps that were stored already.
    pub blocks_present: AtomicU64,
    /// Blocks whose publish failed.
    pub publishes_failed: AtomicU64,
    /// Blocks dropped because their last shard was not dumped in time.
    pub blocks_incomplete: AtomicU64,
    /// Side shards read, verified and handed over.
    pub sides_loaded: AtomicU64,
    /// Side shards that were wanted and are stored nowhere, or could not be read in time.
    pub sides_missing: AtomicU64,
    /// Copies of side shards that are not sound; another is read.
    pub sides_refused: AtomicU64,
    /// Side shards published in records of their own.
    pub sides_published: AtomicU64,
    /// Side shards of dumps that were stored in records of their own already.
    pub sides_present: AtomicU64,
    /// Bytes of KV read from the device.
    pub bytes_staged: AtomicU64,
    /// Bytes of records published.
    pub bytes_published: AtomicU64,
    /// Records refused in this process.
    pub records_refused: AtomicU64,
    /// Refused records that a dump replaced.
    pub records_replaced: AtomicU64,
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

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// The value of a counter.
pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
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
        let json = serde_json::to_value(histogram).unwrap();
        assert_eq!(json["count"], 4);
        let buckets = [
            &json["buckets"][0],
            &json["buckets"][1],
            &json["buckets"][14],
        ];
        assert_eq!(buckets, [2, 1, 1]);
    }

    #[test]
    fn json_names_only_reasons_seen() {
        let stats = Stats::default();
        stats.misses.add(MissReason::Absent, 3);
        let json = serde_json::to_value(stats).unwrap();
        assert_eq!(json["misses"], serde_json::json!({"absent": 3}));
        assert_eq!(json["lookups"], 0);
    }
}
