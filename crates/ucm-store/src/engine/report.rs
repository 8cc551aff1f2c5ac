//! What an engine tells of itself: counters and gauges.

use super::Core;

impl Core {
    /// Counters, histograms and gauges as one JSON object.
    pub fn stats(&self) -> serde_json::Value {
        self.drop_incomplete(self.clock.now());
        let mut json = self.stats.to_json();
        let base = self.tiers.base_stats();
        let usage = base.usage;
        let gauges = [
            ("records_removed", base.records_removed),
            ("bytes_removed", base.bytes_removed),
            ("blocks_touched", base.blocks_touched),
            ("storage_used_bytes", usage.used),
            ("storage_capacity_bytes", usage.capacity),
            ("storage_records", usage.records),
            ("storage_counted", u64::from(usage.counted)),
            ("storage_collector", u64::from(usage.collector)),
            ("storage_paused", u64::from(usage.paused)),
            ("slots", self.device.slots.capacity() as u64),
            ("slots_free", self.device.slots.available() as u64),
            ("slot_bytes", self.records.layout.record_len() as u64),
            ("loads_queued", self.reads.blocks.lock().queued() as u64),
            ("sides_queued", self.reads.sides.lock().queued() as u64),
            ("reads_awaiting_a_look", self.tiers.awaiting_look() as u64),
            ("blocks_in_flight", self.dumps.builders.lock().len() as u64),
            (
                "workers_stuck",
                (self.tiers.stuck() + self.copies_stuck() + self.asks.stuck()) as u64,
            ),
            ("breaker_opened", self.tiers.breaker_opened()),
            ("refused_now", self.refused.len() as u64),
            ("healthy", u64::from(self.is_healthy())),
        ];
        let tiers = serde_json::to_value(self.tiers.stats()).unwrap_or_default();
        if let Some(map) = json.as_object_mut() {
            map.extend(gauges.map(|(name, value)| (name.to_owned(), value.into())));
            let own = base.more.into_iter();
            map.extend(own.map(|(name, value)| (name.to_owned(), value.into())));
            map.insert("tiers".to_owned(), tiers);
        }
        json
    }

    fn is_healthy(&self) -> bool {
        self.tiers.is_well() && self.lost().is_none()
    }
}
