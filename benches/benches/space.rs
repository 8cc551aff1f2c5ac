//! Cost of looking after the space of a root: one count of 10^4, 10^5 and (with `UCM_BENCH_FULL=1`)
//! 10^6 blocks, from opening a store until it has counted, as a ratio to a plain walk (read each
//! directory, stat each name) of the same root in the same run. Block files are sparse, of the
//! length of a record.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ucm_benches::cli::program;
use ucm_benches::store::Result;
use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_infra::{MonotonicTime, SystemClock};
use ucm_io::{IoOptions, IoPool, Process};
use ucm_quota::evidence::QuarantineConfig;
use ucm_quota::layout::Layout;
use ucm_quota::layout::Modes;
use ucm_quota::{Capacity, Rules};
use ucm_record::RecordLayout;
use ucm_tier::backend::Backend;
use ucm_tier::posix::{Place, PosixBackend, PosixConfig};

/// Rounds of which the fastest counts.
const ROUNDS: usize = 3;
/// Bytes of the KV of one block.
const BLOCK: u64 = 4096;

fn main() -> ExitCode {
    program("space", run)
}

fn run() -> Result<()> {
    println!("one count of a root, fastest of {ROUNDS}");
    println!("  blocks  walk ms  count ms  ratio  us/block");
    let full = std::env::var_os("UCM_BENCH_FULL").is_some();
    for blocks in [10_000u64, 100_000, 1_000_000] {
        if blocks > 100_000 && !full {
            println!("{blocks:8}  (with UCM_BENCH_FULL=1)");
            continue;
        }
        let dir = tempfile::tempdir()?;
        fill(dir.path(), blocks)?;
        let (mut walked, mut counted) = (Duration::MAX, Duration::MAX);
        walk(dir.path())?;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let found = walk(dir.path())?;
            walked = start.elapsed().min(walked);
            counted = count(dir.path(), blocks)?.min(counted);
            if found < blocks {
                return Err("the walk missed blocks".into());
            }
        }
        let (walk_ms, count_ms) = (walked.as_secs_f64() * 1e3, counted.as_secs_f64() * 1e3);
        let (ratio, each) = (count_ms / walk_ms, count_ms * 1e3 / blocks as f64);
        println!("{blocks:8}  {walk_ms:7.0}  {count_ms:8.0}  {ratio:5.2}  {each:8.2}");
    }
    Ok(())
}

fn identity() -> ucm_core::Result<Identity> {
    Identity::parse(
        "{\"format_version\":1,\"architecture\":\"\",\"world_size\":1,\"dtype\":\"\",\"weights\":\"bench\",\
         \"model_config\":{},\"position\":{},\"kv_dtype\":\"\",\"attention_backend\":\"\",\"kv_packing\":{},\
         \"kv_layout\":\"\",\"kv_groups\":[],\"block_tokens\":1,\"tensor_parallel\":1,\"pipeline_parallel\":1,\
         \"decode_context_parallel\":1}",
    )
}

fn geometry() -> ucm_core::Result<Geometry> {
    Geometry::new(vec![BLOCK], 1, 1)
}

/// Makes the files of blocks, evenly spread.
fn fill(root: &Path, blocks: u64) -> Result<()> {
    let layout = Layout::new(root, &identity()?);
    let len = RecordLayout::new(&geometry()?).record_len() as u64;
    for shard in 0..=255 {
        fs::create_dir_all(layout.shard_dir(BlockId([shard; 16])))?;
    }
    for n in 0..blocks {
        let mut id = [0; 16];
        id[0] = n as u8;
        id[8..].copy_from_slice(&n.to_be_bytes());
        File::create(layout.record(BlockId(id)))?.set_len(len)?;
    }
    Ok(())
}

/// Names found by the least that any count has to do.
fn walk(dir: &Path) -> io::Result<u64> {
    let mut found = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.metadata()?.is_dir() {
            found += walk(&entry.path())?;
        } else {
            found += 1;
        }
    }
    Ok(found)
}

/// Time from a store's first look at its root to its first count.
fn count(root: &Path, blocks: u64) -> Result<Duration> {
    let clock = SystemClock::shared();
    let geometry = geometry()?;
    let config = PosixConfig {
        root: root.to_owned(),
        identity: identity()?,
        labels: BTreeMap::new(),
        part: Part::default(),
        record: RecordLayout::new(&geometry).describing(1, DType::Opaque),
        other_parts: Vec::new(),
        shorter: false,
        geometry,
        direct: false,
        lookup_only: false,
        capacity: Some(Capacity::Percent(100.0)),
        rules: Rules {
            free_floor: Some(Capacity::Percent(0.0)),
            ..Rules::default()
        },
        process: Process::this(),
        writer: 1,
        modes: Modes::default(),
        quarantine: QuarantineConfig::default(),
        place: Place::default(),
    };
    let io = IoPool::psync(false, &IoOptions::default())?;
    let backend = PosixBackend::new(config, io, Arc::clone(&clock))?;
    let start = Instant::now();
    backend.open(MonotonicTime::NEVER)?;
    while !backend.stats().usage.counted {
        std::thread::sleep(Duration::from_micros(200));
    }
    let time = start.elapsed();
    let records = backend.stats().usage.records;
    backend.close(Duration::from_secs(3));
    if records != blocks {
        return Err(format!("counted {records} of {blocks} blocks").into());
    }
    Ok(time)
}
