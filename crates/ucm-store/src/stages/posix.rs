//! A stage of kind `posix`: records below a directory, one per file or many per segment, on anything that mounts.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Result};
use ucm_io::{IoOptions, IoPool, Process};

use super::{Common, Made, capacity, keys};
use crate::assemble::seconds;
use crate::auto::AutoBackend;
use crate::backend::Backend;
use crate::evidence::QuarantineConfig;
use crate::posix::{Modes, PosixBackend, PosixConfig};
use crate::segment::{Merging, SegmentBackend, SegmentConfig};
use crate::space::{Capacity, Rules};

/// The keys; sizes in bytes, times in seconds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    root: PathBuf,
    labels: BTreeMap<String, String>,
    io_direct: bool,
    io_threads: usize,
    layout: Layout,
    segment_size: u64,
    segment_age_s: f64,
    /// Bytes in a second.
    segment_merge_rate: u64,
    capacity_bytes: Option<u64>,
    capacity_percent: Option<f64>,
    floor_bytes: Option<u64>,
    floor_percent: Option<f64>,
    quota_bytes: Option<u64>,
    quota_percent: Option<f64>,
    expire_after_s: Option<u64>,
    file_mode: u32,
    dir_mode: u32,
    quarantine_enabled: bool,
    quarantine_max_per_minute: u32,
    quarantine_max_records: u32,
    quarantine_max_bytes: u64,
    quarantine_keep_s: f64,
}

/// How records lie below the root.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Layout {
    /// What the root has; segments on a new one.
    Auto,
    File,
    Segment,
}

pub(super) fn make(common: &Common<'_>, given: Map<String, Value>) -> Result<Made> {
    let given: Keys = keys("posix", given)?;
    if common.compressed && matches!(given.layout, Layout::File) {
        let wrong = "compressed records live in segments only, as the lengths of block files are fixed; give the stage \
                     below layout: segment, or leave the one that compresses out";
        return Err(Error::new(ErrorKind::Config, wrong).with("root", given.root.display()));
    }
    let rules = Rules {
        // No bytes: no floor, while nothing at all is the default.
        free_floor: capacity(given.floor_bytes, given.floor_percent).or(Some(Capacity::Percent(0.0))),
        namespace_quota: capacity(given.quota_bytes, given.quota_percent),
        expire_after: given.expire_after_s.map(Duration::from_secs),
    };
    let posix = PosixConfig {
        root: given.root,
        identity: common.identity.clone(),
        labels: given.labels,
        part: common.part,
        record: common.record.clone(),
        direct: given.io_direct,
        geometry: common.geometry.clone(),
        lookup_only: common.lookup_only,
        capacity: capacity(given.capacity_bytes, given.capacity_percent),
        rules,
        process: Process::this(),
        writer: common.writer,
        modes: Modes {
            file: given.file_mode,
            dir: given.dir_mode,
        },
        quarantine: QuarantineConfig {
            enabled: given.quarantine_enabled,
            max_per_minute: given.quarantine_max_per_minute,
            max_records: given.quarantine_max_records,
            max_bytes: given.quarantine_max_bytes,
            keep: seconds("quarantine_keep_s", given.quarantine_keep_s)?,
        },
    };
    let mut options = IoOptions {
        clock: Arc::clone(&common.clock),
        ..IoOptions::with_workers(given.io_threads)
    };
    // A block that has a slot has a place in the queue too, so that an accepted dump is never refused later.
    for lane in &mut options.lanes {
        lane.capacity = lane.capacity.max(common.slots.min(ucm_infra::MAX_QUEUE));
    }
    let io = IoPool::psync(given.io_direct, &options)?;
    let pool = Arc::clone(&io);
    let clock = Arc::clone(&common.clock);
    let segments = SegmentConfig {
        size: given.segment_size,
        age: seconds("segment_age_s", given.segment_age_s)?,
        merging: Merging {
            rate: given.segment_merge_rate,
            ..Merging::default()
        },
        compressed: common.compressed,
        ..SegmentConfig::default()
    };
    let backend: Arc<dyn Backend> = match given.layout {
        // Compressed records live in segments only.
        Layout::Auto if common.compressed => Arc::new(SegmentBackend::new(posix, segments, io, clock)?),
        Layout::Auto => Arc::new(AutoBackend::new(posix, segments, io, clock)?),
        Layout::File => Arc::new(PosixBackend::new(posix, io, clock)?),
        Layout::Segment => Arc::new(SegmentBackend::new(posix, segments, io, clock)?),
    };
    Ok(Made {
        backend,
        pool,
        // As many as are replaced: from there on workers are missing.
        max_stuck: given.io_threads.max(2),
    })
}
