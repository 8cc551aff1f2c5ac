//! The memory tier on its own, with records made by hand.

use std::path::Path;

use ucm_core::{BlockId, Part};
use ucm_infra::{MonotonicTime, SystemClock};
use ucm_media::backend::{Backend, Written};
use ucm_media::memory::{MemoryBackend, MemoryConfig, Policy};
use ucm_record::RecordMeta;

use super::{Fixture, Medium, identity, memory_config, shape};

pub(crate) fn fixture(records: u64) -> Fixture {
    Fixture {
        medium: Medium::Memory(records, Policy::Lru),
        ..Fixture::default()
    }
}

pub(crate) fn tier(
    dir: &Path,
    records: u64,
    change: impl FnOnce(&mut MemoryConfig),
) -> MemoryBackend {
    let mut config = memory_config(&Fixture::default(), (records > 0).then_some(records));
    config.registry = Some(dir.join("regions"));
    change(&mut config);
    let tier = MemoryBackend::new(config, SystemClock::shared()).unwrap();
    tier.open(MonotonicTime::NEVER).unwrap();
    tier
}

/// A sealed record of the default fixture.
pub(crate) fn record(id: BlockId) -> Vec<u8> {
    let layout = shape(&Fixture::default()).1;
    let mut record = vec![id.0[0]; layout.record_len()];
    let meta = RecordMeta {
        id,
        parent: BlockId::default(),
        ordinal: 0,
        namespace: *identity("w").digest(),
        part: Part::default(),
        tokens: 16,
        time_ns: 1,
        writer: 1,
        tenant: [0; 32],
    };
    layout.seal(&meta, &mut record).unwrap();
    record
}

pub(crate) fn keep(tier: &MemoryBackend, ids: impl IntoIterator<Item = BlockId>) {
    ids.into_iter()
        .for_each(|id| assert_eq!(tier.insert(id, &record(id), 0).unwrap(), Written::Published));
}
