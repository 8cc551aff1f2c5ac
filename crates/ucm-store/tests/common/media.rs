//! What a test's store keeps its records on.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use ucm_core::{DType, Geometry};
use ucm_infra::Clock;
use ucm_io::{IoEngine, IoOptions, IoPool};
use ucm_media::backend::Backend;
use ucm_media::directory::medium;
use ucm_media::layout_kind::LayoutKind;
use ucm_media::lengths::PartRecord;
use ucm_media::memory::{MemoryConfig, Policy};
use ucm_media::posix::{PosixConfig, RootSlot};
use ucm_media::quota::Capacity;
use ucm_media::registry::{self, BuildContext, TierKind};
use ucm_media::scope::Scope;
use ucm_media::segment::SegmentConfig;
use ucm_record::RecordLayout;
use ucm_store::engine::{EngineConfig, OwnPart};
use ucm_testkit::FaultyEngine;

use super::servers::{S3, shared_redis, shared_s3};
use super::{Fixture, Layout, PartShape, identity};

/// What a test's store keeps its records on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Medium {
    /// Files below the test's directory.
    Posix,
    /// Memory for this many records, announced below the test's directory.
    Memory(u64, Policy),
    /// The kind of the registry that goes by this word, with the options that it has for tests.
    Kind(&'static str),
}

/// What tests that need no faults of files run over: every medium of the registry, of which this
/// machine has the server. Files and memory are made so that a test can reach into them.
pub(crate) fn media() -> Vec<Medium> {
    let kinds = kinds().into_iter().filter(|kind| is_here(kind));
    let column = |kind: Arc<TierKind>| match kind.word() {
        "posix" => Medium::Posix,
        "cache" => Medium::Memory(64, Policy::Lru),
        other => Medium::Kind(other),
    };
    kinds.map(column).collect()
}

/// Every kind of the registry, the toy among them.
pub(crate) fn kinds() -> Vec<Arc<TierKind>> {
    ucm_testkit::register_toy();
    registry::kinds()
}

/// Whether a kind is a medium, and its server, if it has one, is on this machine.
pub(crate) fn is_here(kind: &TierKind) -> bool {
    kind.is_medium()
        && match kind.word() {
            "redis" => shared_redis().is_some(),
            "object" => shared_s3().is_some(),
            _ => true,
        }
}

/// What a test configures of a medium that is here.
pub(crate) fn sample(kind: &TierKind, root: &Path) -> Map<String, Value> {
    let mut options = kind.sample(root).unwrap(); // a medium without them is no column
    match kind.word() {
        "redis" => {
            options.insert(
                "storage_backends".to_owned(),
                json!([shared_redis().unwrap()]),
            );
        }
        "object" => {
            let told = shared_s3().map(S3::options).unwrap_or_default();
            options.extend(told.into_iter().map(|(key, value)| (key.to_owned(), value)));
        }
        "ds3fs" => {
            // by which its library knows 3FS
            std::fs::create_dir_all(root.join("3fs-virt")).unwrap();
            options.insert("hf3fs_library".into(), soft3fs().into());
        }
        _ => {}
    }
    options
}

/// 3FS's client library in software, where cargo puts it: beside or one above the test's own
/// program.
pub(crate) fn soft3fs() -> String {
    let program = std::env::current_exe().unwrap();
    let dirs = program.ancestors().skip(1).take(2);
    let mut found = dirs.map(|dir| dir.join("libsoft3fs.so"));
    let path = found.find(|path| path.exists()).unwrap();
    path.into_os_string().into_string().unwrap()
}

/// A backend as the registry makes it.
pub(super) fn of_kind(
    word: &str,
    root: &Path,
    fixture: &Fixture,
    writer: u64,
    clock: &Arc<dyn Clock>,
) -> ucm_core::Result<(Arc<dyn Backend>, Arc<IoPool>)> {
    let context = BuildContext {
        scope: scope(fixture, writer),
        slots: usize::try_from(fixture.slots).unwrap(),
        processes: 1,
        scheduler_elsewhere: false,
        clock: Arc::clone(clock),
    };
    let kind = registry::find(word)?;
    let mut options = sample(&kind, root);
    options.extend(
        fixture
            .options
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.clone())),
    );
    let built = kind.build(&context, options)?.remove(0).tiers.remove(0);
    Ok((built.backend, built.pool))
}

/// A store on this.
pub(crate) fn on(medium: Medium) -> Fixture {
    Fixture {
        medium,
        ..Fixture::default()
    }
}

/// The sizes of the blocks of a test and of their records.
pub(crate) fn shape(fixture: &Fixture) -> (Geometry, RecordLayout) {
    let geometry = Geometry::new(
        fixture.tensors.clone(),
        fixture.layers,
        fixture.layers_per_shard,
    )
    .unwrap();
    let record = RecordLayout::new(&geometry).describing(16, DType::F32);
    let record = record.with_sides(fixture.side_specs()).unwrap();
    let record = if fixture.keys.is_some() {
        record.encrypted().unwrap()
    } else {
        record
    };
    (geometry, record)
}

/// Bytes of the longest record of a test's store.
pub(crate) fn slot_len(fixture: &Fixture) -> u64 {
    let parts = (0..=fixture.own_parts.len()).map(|number| fixture.of_part(number));
    let lens = parts.map(|fixture| shape(&fixture).1.record_len());
    lens.max().unwrap() as u64
}

/// Whose records a test's store keeps.
pub(crate) fn scope(fixture: &Fixture, writer: u64) -> Scope {
    Scope {
        identity: identity(fixture.weights),
        labels: BTreeMap::new(),
        part: fixture.part,
        record: shape(fixture).1,
        other_parts: other_parts(fixture),
        shorter: fixture.compressed && matches!(fixture.layout, Layout::Segment(_)),
        lookup_only: fixture.lookup_only,
        writer,
    }
}

/// What a test's engine goes by.
pub(super) fn engine_config(fixture: &Fixture, writer: u64) -> EngineConfig {
    let own = |number| {
        let fixture = fixture.of_part(number);
        OwnPart {
            part: fixture.part,
            geometry: shape(&fixture).0,
            block_tokens: 16,
            dtype: DType::F32,
        }
    };
    EngineConfig {
        geometry: shape(fixture).0,
        identity: identity(fixture.weights),
        part: fixture.part,
        own_parts: (1..=fixture.own_parts.len()).map(own).collect(),
        block_tokens: 16,
        dtype: DType::F32,
        sides: fixture.side_specs(),
        staging_bytes: if fixture.lookup_only {
            0
        } else {
            fixture.slots * slot_len(fixture)
        },
        copy_threads: fixture.copy_threads,
        deadlines: fixture.deadlines,
        breaker: fixture.breaker,
        writer,
        keys: fixture.keys.clone(),
        tenant_quota: fixture.tenant_quota,
    }
}

/// The other parts of a test's store, and those that are named to it.
fn other_parts(fixture: &Fixture) -> Vec<PartRecord> {
    let record = |shape: &PartShape, own| PartRecord {
        part: shape.part,
        record: self::shape(&fixture.shaped(shape)).1,
        own,
    };
    let own = fixture.own_parts.iter().map(|shape| record(shape, true));
    let others = fixture.other_parts.iter().map(|shape| record(shape, false));
    own.chain(others).collect()
}

/// A memory tier for this many records of a test.
pub(crate) fn memory_config(fixture: &Fixture, records: Option<u64>) -> MemoryConfig {
    let slot_len = slot_len(fixture).next_multiple_of(4096);
    let bytes = |records| records * (slot_len + 64) + 3 * 4096;
    let capacity = records.map(bytes).and_then(std::num::NonZeroU64::new);
    let scope = Scope {
        shorter: false,
        ..scope(fixture, 0)
    };
    MemoryConfig::new(scope, capacity)
}

/// What a test's root goes by.
pub(super) fn posix_config(root: &Path, fixture: &Fixture, writer: u64) -> PosixConfig {
    PosixConfig {
        root: root.to_owned(),
        scope: scope(fixture, writer),
        direct: false,
        capacity: fixture
            .capacity
            .and_then(std::num::NonZeroU64::new)
            .map(Capacity::Bytes),
        rules: fixture.rules,
        process: fixture.process.clone(),
        modes: fixture.modes,
        place: RootSlot::default(),
    }
}

/// A backend over files.
pub(super) fn posix(
    root: &Path,
    fixture: &Fixture,
    writer: u64,
    faults: &Arc<FaultyEngine>,
    clock: &Arc<dyn Clock>,
) -> ucm_core::Result<(Arc<dyn Backend>, Arc<IoPool>)> {
    let posix = posix_config(root, fixture, writer);
    let (engine, clock) = (Arc::clone(faults) as Arc<dyn IoEngine>, Arc::clone(clock));
    let options = IoOptions {
        clock: Arc::clone(&clock),
        ..IoOptions::with_workers(fixture.workers)
    };
    let io = IoPool::new(engine, &options)?;
    let pool = Arc::clone(&io);
    if fixture.unnamed {
        return Ok((unnamed(posix, fixture, io, clock)?, pool));
    }
    let (layout, segments) = match fixture.layout {
        Layout::File => (LayoutKind::File, SegmentConfig::default()),
        Layout::Segment(config) => (LayoutKind::Segment, config),
    };
    Ok((medium(posix, Some(layout), segments, io, clock)?, pool))
}

/// A backend that finds out the layout by itself: segments, unless files lie in a namespace that no
/// test uses.
fn unnamed(
    posix: PosixConfig,
    fixture: &Fixture,
    io: Arc<IoPool>,
    clock: Arc<dyn Clock>,
) -> ucm_core::Result<Arc<dyn Backend>> {
    let segments = match fixture.layout {
        Layout::File => SegmentConfig::default(),
        Layout::Segment(config) => config,
    };
    let new = !posix.scope.lookup_only && !posix.root.join("ucm-root.json").exists();
    if new && fixture.layout == Layout::File {
        // Where nothing can be written yet nothing is found either.
        drop(std::fs::create_dir_all(
            posix.root.join("0".repeat(32)).join("blocks/00"),
        ));
    }
    medium(posix, None, segments, io, clock)
}
