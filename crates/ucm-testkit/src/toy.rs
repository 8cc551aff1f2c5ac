//! The kind `toy`: a map in this process. It shows what a new medium of the shape [`Values`] must
//! define. No other file names it, which its tests prove.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Part, Result};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_media::backend::{Listed, MediumStats, ReadDone};
use ucm_media::quota::Usage;
use ucm_media::registry::{self, BuildContext, BuiltTier, StoreName, TierKind};
use ucm_media::values::{Existing, Get, Put, Values, ValuesOpened, ValuesTraits};

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ToyOptions {
    /// how many records the map takes; what comes then is refused
    #[schemars(
        range(min = 1, max = 1_000_000),
        extend("unit" = "records", "aliases" = ["toy_size"])
    )]
    toy_records: u32,
    /// maps of this process that have the same name are one; empty: a map of its own
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

/// Adds the kind to the registry, once however often it is called.
pub fn register_toy() {
    // Refused when it was added before.
    let _ = registry::register(kind());
}

fn kind() -> TierKind {
    let name = StoreName::new("toy", "UcmToyStore", "built, in builds for tests alone");
    TierKind::medium(name, make).tested_with(|scratch| json!({"toy_name": scratch}))
}

/// The maps by name, as long as a store uses them.
static MAPS: Mutex<BTreeMap<String, Weak<ToyMap>>> = Mutex::new(BTreeMap::new());

fn make(context: &BuildContext, options: ToyOptions) -> Result<BuiltTier> {
    let mut maps = MAPS.lock();
    let known = maps.get(&options.toy_name).and_then(Weak::upgrade);
    let map = known
        .filter(|_| !options.toy_name.is_empty())
        .unwrap_or_default();
    maps.insert(options.toy_name, Arc::downgrade(&map));
    let values = ToyValues::new(options.toy_records as usize, map);
    let pool = context.pool("ucm-toy", 1, false)?;
    Ok(BuiltTier {
        backend: context.records(Box::new(values), &pool, false),
        pool,
        compressed: false,
        max_stuck: 1,
    })
}

/// What stores of one name share.
#[derive(Default)]
pub struct ToyMap {
    records: Mutex<BTreeMap<BlockId, Vec<u8>>>,
    manifests: Mutex<BTreeMap<Part, Vec<u8>>>,
}

/// Records by id, up to the limit.
pub struct ToyValues {
    limit: usize,
    map: Arc<ToyMap>,
}

impl ToyValues {
    /// At most `limit` records in this map.
    pub fn new(limit: usize, map: Arc<ToyMap>) -> Self {
        Self { limit, map }
    }

    fn copy(&self, get: Get) -> Result<ReadDone> {
        let mut slot = get.slot;
        let records = self.map.records.lock();
        let absent = || Error::new(ErrorKind::NotFound, "not in the map");
        let record = records.get(&get.id).ok_or_else(absent)?;
        let read = record.len().min(slot.len());
        slot.as_mut_slice()[..read].copy_from_slice(&record[..read]);
        Ok(ReadDone {
            slot,
            read,
            stored_len: record.len() as u64,
            lent: None,
        })
    }
}

impl Values for ToyValues {
    fn traits(&self) -> ValuesTraits {
        ValuesTraits {
            name: "toy",
            batch: 64 << 10,
            exists_first: usize::MAX,
            assumed: std::time::Duration::ZERO,
            manages_itself: true,
        }
    }

    fn open(&self, _deadline: MonotonicTime) -> Result<ValuesOpened> {
        Ok(ValuesOpened {
            text: format!("a map of {} records", self.limit),
            is_cluster: false,
        })
    }

    fn exists(&self, _io: &IoJob, ids: &[BlockId]) -> Result<Vec<Result<Existing>>> {
        let records = self.map.records.lock();
        let existing = |id| match records.get(id) {
            Some(record) => Ok(Existing::Len(record.len() as u64)),
            None => Ok(Existing::Absent),
        };
        Ok(ids.iter().map(existing).collect())
    }

    fn get(&self, _io: &IoJob, gets: Vec<Get>) -> Vec<Result<ReadDone>> {
        gets.into_iter().map(|get| self.copy(get)).collect()
    }

    fn start(&self, _io: &IoJob, id: BlockId, len: usize) -> Result<Option<(u64, Vec<u8>)>> {
        let records = self.map.records.lock();
        let start = |record: &Vec<u8>| {
            let start = &record[..len.min(record.len())];
            (record.len() as u64, start.to_vec())
        };
        Ok(records.get(&id).map(start))
    }

    fn put(&self, io: &IoJob, id: BlockId, slot: Slot, len: usize, replace: bool) -> Result<Put> {
        io.still_wanted()?;
        let mut records = self.map.records.lock();
        let is_there = records.contains_key(&id);
        if !is_there && records.len() >= self.limit {
            let full = Error::new(ErrorKind::Busy, "the map is full");
            return Err(full.with("toy_records", self.limit));
        }
        let stored = replace || !is_there;
        if stored {
            records.insert(id, slot.as_slice()[..len].to_vec());
        }
        Ok(Put { slot, stored })
    }

    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let mut records = self.map.records.lock();
        let removed = ids.iter().filter(|&id| records.remove(id).is_some());
        Ok(removed.count())
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        let records = self.map.records.lock();
        let listed = records.iter().map(|(&id, record)| Listed {
            id,
            len: record.len() as u64,
            used_ns: 0,
        });
        Ok(listed.collect())
    }

    fn manifest(&self, _io: &IoJob, part: Part) -> Result<Option<Vec<u8>>> {
        Ok(self.map.manifests.lock().get(&part).cloned())
    }

    fn put_manifest(&self, _io: &IoJob, part: Part, manifest: &[u8]) -> Result<()> {
        self.map.manifests.lock().insert(part, manifest.to_vec());
        Ok(())
    }

    fn stats(&self) -> MediumStats {
        let usage = Usage {
            records: self.map.records.lock().len() as u64,
            counted: true,
            ..Usage::default()
        };
        MediumStats {
            usage,
            ..MediumStats::default()
        }
    }
}
