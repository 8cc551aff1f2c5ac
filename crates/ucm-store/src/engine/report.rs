//! What an engine tells of itself: counters and gauges, and messages for the log.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Core;
use crate::backend::{Health, TierStats, Usage};
use crate::events::Event;

impl Core {
    /// Counters, histograms and gauges as one JSON object.
    pub fn stats(&self) -> serde_json::Value {
        self.drop_incomplete(self.clock.now());
        let mut json = self.stats.to_json();
        let usage = self.backend.usage();
        let (records_removed, bytes_removed, blocks_touched) = self.backend.removed();
        let gauges = [
            ("records_removed", records_removed),
            ("bytes_removed", bytes_removed),
            ("blocks_touched", blocks_touched),
            ("storage_used_bytes", usage.used),
            ("storage_capacity_bytes", usage.capacity),
            ("storage_records", usage.records),
            ("storage_counted", u64::from(usage.counted)),
            ("storage_collector", u64::from(usage.collector)),
            ("storage_paused", u64::from(usage.paused)),
            ("slots", self.slots.capacity() as u64),
            ("slots_free", self.slots.available() as u64),
            ("slot_bytes", self.layout.record_len() as u64),
            ("loads_queued", self.reads.lock().queued() as u64),
            ("blocks_in_flight", self.assemblies.lock().len() as u64),
            (
                "workers_stuck",
                (self.backend.stuck() + self.copies.stuck() + self.asks.stuck()) as u64,
            ),
            ("refused_now", self.refused.len() as u64),
            ("healthy", u64::from(self.is_healthy())),
        ];
        let tiers = serde_json::to_value(self.tiers(&usage)).unwrap_or_default();
        if let Some(map) = json.as_object_mut() {
            map.extend(gauges.map(|(name, value)| (name.to_owned(), value.into())));
            let own = self.backend.counters().into_iter();
            map.extend(own.map(|(name, value)| (name.to_owned(), value.into())));
            map.insert("tiers".to_owned(), tiers);
        }
        json
    }

    fn is_healthy(&self) -> bool {
        let down = self.backend.health() == Some(Health::Down);
        self.ready.load(Ordering::Acquire) && self.breaker.is_closed() && !down
    }

    /// The stages, top first; a medium alone is one, and what the engine counted is its.
    fn tiers(&self, usage: &Usage) -> Vec<TierStats> {
        let tiers = self.backend.tiers();
        if !tiers.is_empty() {
            return tiers;
        }
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![TierStats {
            name: self.backend.name().to_owned(),
            hits: get(&self.stats.lookup_hits),
            blocks_read: get(&self.stats.blocks_loaded),
            bytes_read: get(&self.stats.bytes_loaded),
            blocks_written: get(&self.stats.blocks_published),
            bytes_written: get(&self.stats.bytes_published),
            failures: get(&self.stats.publishes_failed),
            copies_refused: get(&self.stats.records_refused),
            memory: self.backend.is_memory(),
            used_bytes: usage.used,
            capacity_bytes: usage.capacity,
            healthy: self.is_healthy(),
            compression: self.backend.compression(),
            ..TierStats::default()
        }]
    }

    /// Messages for the log since the last call; none in a forked child.
    pub fn events(&self) -> Vec<Event> {
        if self.check_process().is_err() {
            return Vec::new();
        }
        let mut events = self.events.drain();
        events.extend(self.backend.events());
        events
    }
}
