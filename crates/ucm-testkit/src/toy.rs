//! The kind `toy`: a map in this process. It shows what a new kind of tier must define. No other
//! file names it, which its tests prove.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_quota::Usage;
use ucm_tier::backend::{
    Backend, BlockRead, Done, Features, Listed, MediumStats, Outcome, Presence, ReadDone,
    WriteOptions, Written,
};
use ucm_tier::registry::{self, BuildContext, BuiltTier, StoreName, TierKind};

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ToyOptions {
    /// most records in the map; further writes are refused
    #[schemars(
        range(min = 1, max = 1_000_000),
        extend("unit" = "records", "aliases" = ["toy_size"])
    )]
    toy_records: u32,
    /// stores of this process with the same name share one map; empty: a map of its own
    toy_name: String,
}

impl Default for ToyOptions {
    fn default() -> Self {
        Self {
            toy_records: 1000,
            toy_name: String::new(),
        }
    }
}

/// Adds the kind to the registry. Further calls do nothing.
pub fn register_toy() {
    // An error here means that it is registered already.
    let _ = registry::register(kind());
}

fn kind() -> TierKind {
    let name = StoreName::new("toy", "UcmToyStore", "in builds for tests only");
    TierKind::medium(name, make).tested_with(|scratch| json!({"toy_name": scratch}))
}

/// The maps by name, as long as a store uses them.
static MAPS: Mutex<BTreeMap<String, Weak<Records>>> = Mutex::new(BTreeMap::new());

type Records = Mutex<BTreeMap<BlockId, Vec<u8>>>;

fn make(context: &BuildContext<'_>, options: ToyOptions) -> Result<BuiltTier> {
    let mut maps = MAPS.lock();
    let known = maps.get(&options.toy_name).and_then(Weak::upgrade);
    let records = known
        .filter(|_| !options.toy_name.is_empty())
        .unwrap_or_default();
    maps.insert(options.toy_name, Arc::downgrade(&records));
    let limit = options.toy_records as usize;
    Ok(BuiltTier {
        backend: Arc::new(Toy { limit, records }),
        pool: context.pool("ucm-toy", 1, false)?,
        compressed: false,
        max_stuck: 1,
    })
}

/// Records by id, up to the limit.
struct Toy {
    limit: usize,
    records: Arc<Records>,
}

impl Toy {
    fn insert(&self, id: BlockId, record: &[u8], replace: bool) -> Result<Written> {
        let mut records = self.records.lock();
        if !replace && records.contains_key(&id) {
            return Ok(Written::Present);
        }
        if records.len() >= self.limit && !records.contains_key(&id) {
            return Err(
                Error::new(ErrorKind::Busy, "the map is full").with("toy_records", self.limit)
            );
        }
        records.insert(id, record.to_vec());
        Ok(Written::Published)
    }

    fn copy(&self, read: BlockRead) -> Result<ReadDone> {
        let BlockRead { id, mut slot, .. } = read;
        let records = self.records.lock();
        let absent = || Error::new(ErrorKind::NotFound, "not in the map");
        let record = records.get(&id).ok_or_else(absent)?;
        let len = record.len().min(slot.len());
        slot.as_mut_slice()[..len].copy_from_slice(&record[..len]);
        Ok(ReadDone {
            slot,
            read: len,
            stored_len: record.len() as u64,
            lent: None,
        })
    }
}

impl Backend for Toy {
    fn features(&self) -> Features<'_> {
        Features {
            name: "toy",
            ..Features::default()
        }
    }

    fn open(&self, _deadline: MonotonicTime) -> Result<String> {
        Ok(format!("a map of {} records", self.limit))
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], _stop: bool) -> Result<Vec<Presence>> {
        let records = self.records.lock();
        let there = |id| {
            records
                .contains_key(id)
                .then_some(())
                .ok_or(MissReason::Absent)
        };
        Ok(ids.iter().map(there).collect())
    }

    fn read(&self, _io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        run.into_iter()
            .map(|read| Outcome::Came(self.copy(read)))
            .collect()
    }

    fn write(
        &self,
        _io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        done: Done<Written>,
    ) {
        let written = self.insert(id, &slot.as_slice()[..options.len], options.replace);
        drop(slot);
        done(written);
    }

    fn touch(&self, _ids: &[(BlockId, u32)], _deadline: MonotonicTime) {}

    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let mut records = self.records.lock();
        Ok(ids
            .iter()
            .filter(|&id| records.remove(id).is_some())
            .count())
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        let records = self.records.lock();
        let listed = records.iter().map(|(&id, record)| Listed {
            id,
            len: record.len() as u64,
            used_ns: 0,
        });
        Ok(listed.collect())
    }

    fn stats(&self) -> MediumStats {
        let usage = Usage {
            records: self.records.lock().len() as u64,
            counted: true,
            ..Usage::default()
        };
        MediumStats {
            usage,
            ..MediumStats::default()
        }
    }

    fn close(&self, _drain: Duration) {}
}
