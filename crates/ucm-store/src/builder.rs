//! From a description to an open engine: its tiers by name, one medium or several as one.

mod tier_spec;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use ucm_core::{DType, Error, ErrorKind, Geometry, Identity, Part, Result};
use ucm_device::{DEFAULT_DEVICE, MachineMemory, Transfer, open_device};
use ucm_infra::Clock;
use ucm_media::lengths::PartRecord;
use ucm_media::registry::{Amount, BuildContext, seconds};
use ucm_media::scope::Scope;
use ucm_record::{Keys, RecordLayout, SideSpec};

use crate::breaker::BreakerConfig;
use crate::engine::{Deadlines, Engine, EngineConfig, OwnPart};
use crate::tiers::{LevelConfig, TierConfig};

pub use tier_spec::TierSpec;
use tier_spec::make_all;

/// The description of a store; sizes in bytes, times in seconds.
///
/// ```
/// use ucm_core::BlockId;
/// use ucm_device::DeviceSpan;
/// use ucm_infra::SystemClock;
/// use ucm_store::builder::StoreSpec;
/// use ucm_store::engine::{Pieces, Row, RowSides, Until};
///
/// let identity =
/// r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},
///     "position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],
///     "block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#
///     .replace("\n    ", "");
/// let spec = serde_json::json!({
///     "stages": [{"kind": "cache", "cache_size": 1 << 22}], "identity": identity, "part": [0, 0, 0], "tensor_sizes": [4096],
///     "shard_size": 4096, "block_size": 4096, "block_tokens": 16, "dtype": "f32", "labels": {}, "processes": 1,
///     "scheduler_elsewhere": false, "lookup_only": false, "staging_bytes": 1 << 20, "copy_threads": 1,
///     "lookup_s": 20.0, "load_s": 5.0, "dump_s": 30.0, "probe_s": 5.0, "shutdown_s": 3.0,
///     "breaker_threshold": 4, "breaker_window_s": 60.0, "breaker_cool_down_s": 10.0,
///     "breaker_damaged_per_minute": 16,
/// });
/// let engine = StoreSpec::parse(&spec.to_string()).unwrap().open(SystemClock::shared()).unwrap();
///
/// let (id, mut page) = (BlockId([7; 16]), vec![7u8; 4096]);
/// let rows = |page: &mut Vec<u8>| {
///     // SAFETY: the page outlives the tasks below, and is not touched before they ended.
///     let span = unsafe { DeviceSpan::new(page.as_mut_ptr() as u64, page.len() as u64) };
///     vec![Row { id, shard: 0, pieces: Pieces::Listed(vec![span]), ready: None, sides: RowSides::None }]
/// };
/// let dump = engine.dump(rows(&mut page)).unwrap();
/// assert!(dump.wait(engine.clock(), Until::Published, None) && dump.failures().is_empty());
/// assert_eq!(engine.lookup(&[id, BlockId([8; 16])]).unwrap(), [true, false]);
///
/// page.fill(0);
/// let load = engine.load(rows(&mut page), None).unwrap();
/// assert!(load.wait(engine.clock(), Until::Published, None) && load.failures().is_empty());
/// assert_eq!(page, vec![7; 4096]);
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreSpec {
    /// The tiers, top first.
    #[serde(rename = "stages")]
    pub tiers: Vec<TierSpec>,
    /// Name of the device whose memory blocks are loaded into and dumped from; the host by default.
    #[serde(default = "default_device")]
    pub device: String,
    /// How a device that has a choice copies: auto, dma, sm or staging.
    #[serde(default = "default_transfer")]
    pub transfer: String,
    /// The identity's JSON text.
    pub identity: String,
    /// KV group, pipeline rank, tensor rank; of the first part, where the store has several.
    pub part: Part,
    /// The other parts whose blocks the store loads and dumps.
    #[serde(default)]
    pub own_parts: Vec<PartSpec>,
    /// Parts of the namespace whose sizes differ from those of this one: a store that looks up
    /// finds their blocks too.
    #[serde(default)]
    pub parts: Vec<PartSpec>,
    /// Bytes of each piece of one layer.
    pub tensor_sizes: Vec<u64>,
    /// Bytes of one row of a load or dump.
    pub shard_size: u64,
    /// Bytes of KV in one block.
    pub block_size: u64,
    /// Tokens in a block, for the header.
    pub block_tokens: u32,
    /// Name of the element type, for the header.
    pub dtype: String,
    /// Side shards that blocks may have beside their KV: name, version of the content, bytes.
    #[serde(default)]
    pub sides: Vec<(String, u32, u64)>,
    /// Descriptions of the records for people, outside the identity.
    pub labels: BTreeMap<String, String>,
    /// Processes of this host that will each have such a store.
    pub processes: u32,
    /// Whether the scheduler side may run on another host.
    pub scheduler_elsewhere: bool,
    /// Opens the store for lookups only.
    pub lookup_only: bool,
    /// Host memory for staging; by default it holds the blocks of two steps, within a share of the
    /// memory.
    #[serde(default)]
    pub staging_bytes: Option<u64>,
    /// Bytes of the blocks that one step of the engine can compute at most; 0 where that is not
    /// known.
    #[serde(default)]
    pub step_bytes: u64,
    /// Threads that copy from the device.
    pub copy_threads: usize,
    /// Deadline of a lookup.
    pub lookup_s: f64,
    /// Deadline of a load whose caller names none.
    pub load_s: f64,
    /// Deadline of a dump.
    pub dump_s: f64,
    /// Deadline of the first probe of the tiers.
    pub probe_s: f64,
    /// Deadline of draining.
    pub shutdown_s: f64,
    /// File of the keys that records are encrypted with ([`Keys::parse`]); without one the keys are
    /// in `UCM_ENCRYPTION_KEY` of the environment, or nothing is encrypted.
    #[serde(default)]
    pub encryption_key_file: Option<PathBuf>,
    /// The quota of each tenant in every level below memory: bytes, or a share of the capacity of
    /// the level.
    #[serde(default)]
    pub tenant_quota: Option<Amount>,
    /// Failures in a row that open the breaker.
    pub breaker_threshold: u32,
    /// Failures further apart than this are not in a row.
    pub breaker_window_s: f64,
    /// How long it stays open.
    pub breaker_cool_down_s: f64,
    /// Damaged records within a minute that it tolerates.
    pub breaker_damaged_per_minute: u32,
}

/// A part of the namespace beside the first, and its sizes, in bytes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartSpec {
    /// KV group, pipeline rank, tensor rank.
    pub part: Part,
    /// Bytes of each piece of one layer.
    pub tensor_sizes: Vec<u64>,
    /// Bytes of one row of a load or dump.
    pub shard_size: u64,
    /// Bytes of KV in one block.
    pub block_size: u64,
    /// Tokens in a block; of a part that is only looked up it may be left out.
    #[serde(default)]
    pub block_tokens: u32,
    /// Element type; of a part that is only looked up it may be left out.
    #[serde(default = "default_dtype")]
    pub dtype: String,
}

impl PartSpec {
    fn sizes(self) -> Result<OwnPart> {
        Ok(OwnPart {
            part: self.part,
            geometry: Geometry::from_sizes(self.tensor_sizes, self.shard_size, self.block_size)?,
            block_tokens: self.block_tokens,
            dtype: DType::from_name(&self.dtype),
        })
    }
}

/// Where things lie in the records of a part. `encrypted`: with room for what encryption adds.
fn record_of(sizes: &OwnPart, own: bool, encrypted: bool) -> Result<PartRecord> {
    let record = RecordLayout::new(&sizes.geometry).describing(sizes.block_tokens, sizes.dtype);
    Ok(PartRecord {
        part: sizes.part,
        record: with_room(record, encrypted)?,
        own,
    })
}

/// A layout with room for what encryption adds, if records are `encrypted`.
fn with_room(record: RecordLayout, encrypted: bool) -> Result<RecordLayout> {
    if encrypted {
        record.encrypted()
    } else {
        Ok(record)
    }
}

/// Least staging of a process, and the default.
const STAGING: u64 = 256 << 20;
/// The staging of all processes is at most this part of the memory of machine and container.
const STAGING_SHARE: u64 = 16;

/// The staging of a process, one of `processes` on this host, whose engine computes `step_bytes` of
/// blocks in a step. All blocks of a step are offered at once, and those without a slot only when
/// their request takes another step: there is room for two steps, of which a quarter is kept for
/// loads.
fn staging(step_bytes: u64, processes: u32, memory: Option<&MachineMemory>) -> u64 {
    let most = memory.map_or(0, |memory| {
        memory.total / STAGING_SHARE / u64::from(processes.max(1))
    });
    step_bytes.saturating_mul(2).min(most).max(STAGING)
}

impl StoreSpec {
    /// Reads a description. `Config` where a key is missing, unknown or wrong.
    pub fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|error| {
            let text = "the description of a store is not what it should be";
            Error::new(ErrorKind::Config, text).caused_by(error)
        })
    }

    /// Opens the engine over its tiers.
    pub fn open(self, clock: Arc<dyn Clock>) -> Result<Engine> {
        ucm_infra::threads_begin_with(ucm_io::use_batch_policy);
        // A store for lookups copies nothing and opens no device, which may belong to other
        // processes.
        let device = match self.lookup_only {
            true => DEFAULT_DEVICE,
            false => &self.device,
        };
        let transfer = Transfer::from_word(&self.transfer)?;
        let device = open_device(device, transfer, Arc::clone(&clock))?;
        let identity = Identity::parse(&self.identity)?;
        let geometry = Geometry::from_sizes(self.tensor_sizes, self.shard_size, self.block_size)?;
        let dtype = DType::from_name(&self.dtype);
        let sides = self.sides.into_iter();
        let sides = sides.map(|(name, version, len)| SideSpec { name, version, len });
        let sides: Vec<SideSpec> = sides.collect();
        let record = RecordLayout::new(&geometry).describing(self.block_tokens, dtype);
        let record = record.with_sides(sides.clone())?;
        let keys = encryption_keys(self.encryption_key_file.as_deref())?;
        let record = with_room(record, keys.is_some())?;
        let (mut own_parts, mut other_parts) = (Vec::new(), Vec::new());
        for own in self.own_parts {
            let own = own.sizes()?;
            other_parts.push(record_of(&own, true, keys.is_some())?);
            own_parts.push(own);
        }
        for other in self.parts {
            let other = record_of(&other.sizes()?, false, keys.is_some())?;
            if other_parts.iter().all(|own| own.part != other.part) {
                other_parts.push(other);
            }
        }
        let lens = other_parts.iter().filter(|other| other.own);
        let lens = lens.map(|own| own.record.record_len());
        let longest = lens.fold(record.record_len(), usize::max);
        let staging_bytes = match self.staging_bytes {
            _ if self.lookup_only => 0,
            Some(bytes) => bytes,
            None => {
                let memory = MachineMemory::now().ok();
                staging(self.step_bytes, self.processes, memory.as_ref())
            }
        };
        let deadlines = Deadlines {
            lookup: seconds("lookup_s", self.lookup_s)?,
            load: seconds("load_s", self.load_s)?,
            dump: seconds("dump_s", self.dump_s)?,
            probe: seconds("probe_s", self.probe_s)?,
            shutdown: seconds("shutdown_s", self.shutdown_s)?,
        };
        let breaker = BreakerConfig {
            threshold: self.breaker_threshold,
            window: seconds("breaker_window_s", self.breaker_window_s)?,
            cool_down: seconds("breaker_cool_down_s", self.breaker_cool_down_s)?,
            damaged_per_minute: self.breaker_damaged_per_minute,
            ..BreakerConfig::default()
        };
        let writer = ucm_infra::random_u64();
        let context = BuildContext {
            scope: Scope {
                identity: identity.clone(),
                labels: self.labels,
                part: self.part,
                record,
                other_parts,
                shorter: false,
                lookup_only: self.lookup_only,
                writer,
            },
            slots: usize::try_from(staging_bytes / longest as u64).unwrap_or(usize::MAX),
            processes: self.processes,
            scheduler_elsewhere: self.scheduler_elsewhere,
            clock: Arc::clone(&clock),
        };
        let mut levels = Vec::new();
        for (built, policy) in make_all(self.tiers, &context)? {
            let tiers = built.tiers.into_iter().map(|built| TierConfig {
                backend: built.backend,
                pool: built.pool,
                policy,
                compressed: built.compressed && !self.lookup_only, // which moves no record
                max_stuck: built.max_stuck,
            });
            levels.push(LevelConfig {
                tiers: tiers.collect(),
                spread: built.spread,
            });
        }
        let config = EngineConfig {
            geometry,
            identity,
            part: self.part,
            own_parts,
            block_tokens: self.block_tokens,
            dtype,
            sides,
            staging_bytes,
            copy_threads: self.copy_threads,
            deadlines,
            breaker,
            writer,
            keys,
            tenant_quota: self.tenant_quota.and_then(Amount::limit),
        };
        Engine::open(config, levels, device, clock)
    }
}

/// The keys of this file, or else of the environment. `Config` where they cannot be read or are not
/// keys.
fn encryption_keys(file: Option<&Path>) -> Result<Option<Arc<Keys>>> {
    const VARIABLE: &str = "UCM_ENCRYPTION_KEY";
    let (text, origin) = match file {
        Some(path) => {
            let origin = format!("encryption_key_file {}", path.display());
            let bytes = ucm_media::secret_file::read(path, "encryption_key_file")?;
            (String::from_utf8_lossy(&bytes).into_owned(), origin)
        }
        None => match std::env::var(VARIABLE) {
            Ok(text) if !text.trim().is_empty() => (text, format!("environment {VARIABLE}")),
            _ => return Ok(None),
        },
    };
    let keys = Keys::parse(&text).map_err(|error| error.with("from", origin))?;
    Ok(Some(Arc::new(keys)))
}

fn default_dtype() -> String {
    "opaque".to_owned()
}

fn default_transfer() -> String {
    "auto".to_owned()
}

fn default_device() -> String {
    DEFAULT_DEVICE.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_holds_two_steps_within_a_share_of_the_memory() {
        let memory = |total| MachineMemory {
            total,
            available: total,
            limited_by: "the machine".to_owned(),
        };
        let gib = 1 << 30;
        assert_eq!(staging(0, 1, None), STAGING);
        assert_eq!(staging(gib, 1, None), STAGING);
        assert_eq!(staging(1 << 20, 1, Some(&memory(128 * gib))), STAGING);
        assert_eq!(staging(gib, 1, Some(&memory(128 * gib))), 2 * gib);
        assert_eq!(staging(gib, 8, Some(&memory(128 * gib))), gib);
        assert_eq!(staging(u64::MAX, 0, Some(&memory(32 * gib))), 2 * gib);
        assert_eq!(staging(gib, 8, Some(&memory(gib))), STAGING);
    }
}
