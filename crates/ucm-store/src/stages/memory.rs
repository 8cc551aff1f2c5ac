//! A stage of kind `cache`: memory that the processes of one host share.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::MachineMemory;

use super::{Common, Made, capacity, keys};
use crate::memory::{MemoryBackend, MemoryConfig, Policy, cache_bytes};

/// Threads that copy.
const THREADS: usize = 2;

/// The keys; sizes in bytes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    capacity_bytes: Option<u64>,
    capacity_percent: Option<f64>,
    /// Name of the eviction policy.
    policy: String,
    /// Processes of this host that will each have such a stage.
    processes: u32,
    /// Whether the scheduler half may run on another host.
    #[serde(default)]
    scheduler_elsewhere: bool,
}

pub(super) fn make(common: &Common<'_>, given: Map<String, Value>) -> Result<Made> {
    let given: Keys = keys("cache", given)?;
    if common.compressed {
        let wrong = "memory is faster than any codec; write the stage that compresses below Cache";
        return Err(Error::new(ErrorKind::Config, wrong));
    }
    let asked = capacity(given.capacity_bytes, given.capacity_percent)
        .ok_or_else(|| Error::new(ErrorKind::Config, "cache_size is nothing; give it a size"))?;
    let bytes = if common.lookup_only {
        None
    } else {
        Some(cache_bytes(asked, given.processes, &MachineMemory::now()?)?)
    };
    let config = MemoryConfig {
        policy: given.policy.parse::<Policy>()?,
        threads: THREADS,
        scheduler_elsewhere: given.scheduler_elsewhere,
        ..MemoryConfig::new(common.identity.clone(), common.part, common.record.clone(), bytes)
    };
    let backend = Arc::new(MemoryBackend::new(config, Arc::clone(&common.clock))?);
    Ok(Made {
        pool: Arc::clone(backend.pool()),
        backend,
        max_stuck: THREADS,
    })
}
