//! The kind `cache`: memory that the processes of one host share.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::MachineMemory;

use crate::kind::{Amount, BuildContext, BuiltTier, StoreName, TierKind};
use crate::memory::{MemoryBackend, MemoryConfig, Policy, cache_bytes};

/// Threads that copy, at least and at most. Beside a GPU one loads 7 GB/s and eight 34, of the 54
/// that the bus takes.
const THREADS: [usize; 2] = [2, 8];

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct CacheOptions {
    /// bytes in each process that stores, or a share of the machine's (or container's) memory for
    /// all ranks of the engine on this host together (replicas of a dense model are engines of
    /// their own: divide); a size that is not available is refused at start
    #[schemars(extend("aliases_gib" = ["size_gb", "cache_buffer_capacity_gb"]))]
    cache_size: Amount,
    /// which blocks are evicted first; s3fifo soon evicts a block that is not used a second time
    cache_policy: Policy,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            cache_size: Amount::Bytes(1 << 30),
            cache_policy: Policy::Lru,
        }
    }
}

pub(super) fn kind() -> TierKind {
    let summary = "built: memory of this host; its blocks are lost with the last process";
    TierKind::medium(StoreName::new("cache", "UcmCacheStore", summary), make)
        .in_memory()
        .tested_with(|_| json!({"cache_size": 1 << 22}))
}

fn make(context: &BuildContext, options: CacheOptions) -> Result<BuiltTier> {
    let nothing = || Error::new(ErrorKind::Config, "cache_size is nothing; give it a size");
    let asked = options.cache_size.limit().ok_or_else(nothing)?;
    let bytes = match context.scope.lookup_only {
        true => None,
        false => Some(cache_bytes(
            asked,
            context.processes,
            &MachineMemory::now()?,
        )?),
    };
    let processors = available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = threads(processors, context.processes);
    let config = MemoryConfig {
        policy: options.cache_policy,
        threads,
        scheduler_elsewhere: context.scheduler_elsewhere,
        ..MemoryConfig::new(context.scope(false), bytes)
    };
    let backend = Arc::new(MemoryBackend::new(config, Arc::clone(&context.clock))?);
    Ok(BuiltTier {
        pool: Arc::clone(backend.pool()),
        backend,
        compressed: false,
        max_stuck: threads,
    })
}

/// Half of the processors that the thread which opens a store may use, shared by the engine's
/// processes on this host.
fn threads(processors: usize, processes: u32) -> usize {
    (processors / 2 / processes.max(1) as usize).clamp(THREADS[0], THREADS[1])
}

#[cfg(test)]
mod tests {
    use super::threads;

    #[test]
    fn threads_follow_the_processors_of_a_process() {
        for (processors, processes, expected) in [
            (1, 1, 2),
            (2, 0, 2),
            (12, 1, 6),
            (16, 1, 8),
            (64, 8, 4),
            (256, 1, 8),
        ] {
            assert_eq!(
                threads(processors, processes),
                expected,
                "{processors} for {processes}"
            );
        }
    }
}
