//! A store over several roots side by side, each with faults of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ucm_core::{BlockId, Error};
use ucm_infra::{Clock, MonotonicTime, Notify, SystemClock, log};
use ucm_io::{IoEngine, IoOptions, IoPool, PsyncEngine};
use ucm_media::directory::medium;
use ucm_media::layout_kind::LayoutKind;
use ucm_media::memory::{MemoryBackend, Policy};
use ucm_media::posix::RootSlot;
use ucm_media::segment::SegmentConfig;
use ucm_media::spread::{RootFacts, Spread, StoragePolicy};
use ucm_store::engine::{Engine, Until};
use ucm_store::tiers::{LevelConfig, TierConfig, WritePolicy};
use ucm_testkit::FaultyEngine;

use super::media::{engine_config, memory_config, posix_config};
use super::sides::begin_alone;
use super::{Device, Fixture, Layout, are_busy, eventually};

/// How a test wants several roots.
#[derive(Clone)]
pub(crate) struct Several {
    /// Capacity, layout and everything else that each root has.
    pub(crate) fixture: Fixture,
    pub(crate) policy: StoragePolicy,
    /// How many roots there are.
    pub(crate) roots: usize,
    /// Each root is a level: one below the other, and not side by side.
    pub(crate) stacked: bool,
    /// The limit of each, where it is not that of the fixture.
    pub(crate) capacities: Vec<u64>,
    /// Records in a memory above them, and how they are written then.
    pub(crate) memory: Option<(u64, WritePolicy)>,
}

impl Several {
    /// This many roots.
    pub(crate) fn new(policy: StoragePolicy, roots: usize) -> Self {
        Self {
            fixture: Fixture::default(),
            policy,
            roots,
            stacked: false,
            capacities: Vec::new(),
            memory: None,
        }
    }

    /// Hot above cold, each with room for this many records of a test.
    pub(crate) fn tiered(capacities: &[u64]) -> Self {
        Self {
            stacked: true,
            capacities: capacities
                .iter()
                .map(|records| records * super::shared::RECORD)
                .collect(),
            ..Self::new(StoragePolicy::RoundRobin, capacities.len())
        }
    }
}

/// The real clock, and on from there by leaps.
#[derive(Debug, Default)]
pub(crate) struct Leaping(AtomicU64);

impl Leaping {
    /// So much later, at once.
    pub(crate) fn leap(&self, span: Duration) {
        let span = u64::try_from(span.as_nanos()).unwrap();
        self.0.fetch_add(span, Ordering::AcqRel);
    }

    fn leapt(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Acquire))
    }
}

impl Clock for Leaping {
    fn now(&self) -> MonotonicTime {
        SystemClock.now().after(self.leapt())
    }

    fn wall_ns(&self) -> u64 {
        SystemClock.wall_ns()
    }

    fn sleep(&self, notify: &Notify, seen: u64, until: Option<MonotonicTime>) {
        let never = |until: &MonotonicTime| *until != MonotonicTime::NEVER;
        let until = until.filter(never).map(|until| {
            let left = until.since(self.now());
            SystemClock.now().after(left)
        });
        SystemClock.sleep(notify, seen, until);
    }
}

/// See the module.
pub(crate) struct Beside {
    pub(crate) engine: Engine,
    pub(crate) faults: Vec<Arc<FaultyEngine>>,
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) fixture: Fixture,
}

/// The roots below a directory.
pub(crate) fn roots(base: &Path, count: usize) -> Vec<PathBuf> {
    (0..count)
        .map(|number| base.join(format!("root{number}")))
        .collect()
}

impl Beside {
    /// A store over the roots `root0`, `root1`, ... below `base`.
    pub(crate) fn open(base: &Path, several: &Several) -> Self {
        let several = Several {
            fixture: several.fixture.clone().unhurried(),
            ..several.clone()
        };
        Self::over(roots(base, several.roots), &several, SystemClock::shared())
    }

    /// A store over these.
    pub(crate) fn over(roots: Vec<PathBuf>, several: &Several, clock: Arc<dyn Clock>) -> Self {
        log::keep();
        let fixture = several.fixture.clone();
        let writer = ucm_infra::random_u64();
        let facts: Vec<Arc<RootFacts>> = roots.iter().map(|_| Arc::default()).collect();
        let (mut faults, mut media) = (Vec::new(), Vec::new());
        for (number, root) in roots.iter().enumerate() {
            let mut config = posix_config(root, &fixture, writer);
            config.place = RootSlot {
                number: number as u16,
                facts: Arc::clone(&facts[number]),
            };
            if let Some(bytes) = several.capacities.get(number) {
                config.capacity =
                    std::num::NonZeroU64::new(*bytes).map(ucm_media::quota::Capacity::Bytes);
            }
            let engine = FaultyEngine::new(PsyncEngine::new(false), 1);
            let options = IoOptions {
                clock: Arc::clone(&clock),
                ..IoOptions::with_workers(fixture.workers)
            };
            let io = IoPool::new(Arc::clone(&engine) as Arc<dyn IoEngine>, &options).unwrap();
            faults.push(engine);
            let (layout, segments) = match fixture.layout {
                Layout::File => (LayoutKind::File, SegmentConfig::default()),
                Layout::Segment(config) => (LayoutKind::Segment, config),
            };
            let (pool, clock) = (Arc::clone(&io), Arc::clone(&clock));
            media.push((
                medium(config, Some(layout), segments, io, clock).unwrap(),
                pool,
            ));
        }
        let policy = several
            .memory
            .map_or(WritePolicy::Through, |(_, policy)| policy);
        let tier = |backend, pool, policy| TierConfig {
            backend,
            pool,
            policy,
            compressed: false,
            max_stuck: fixture.breaker.max_stuck,
        };
        let tiers = media
            .into_iter()
            .map(|(backend, pool)| tier(backend, pool, policy));
        let mut levels: Vec<LevelConfig> = if several.stacked {
            tiers.map(LevelConfig::from).collect()
        } else {
            vec![LevelConfig {
                tiers: tiers.collect(),
                spread: Arc::new(Spread::of(several.policy, facts)),
            }]
        };
        if let Some((records, _)) = several.memory {
            let config = memory_config(&fixture, Some(records));
            let config = ucm_media::memory::MemoryConfig {
                policy: Policy::default(),
                registry: Some(roots[0].with_file_name("regions")),
                ..config
            };
            let memory = Arc::new(MemoryBackend::new(config, Arc::clone(&clock)).unwrap());
            let pool = Arc::clone(memory.pool());
            levels.insert(0, tier(memory, pool, WritePolicy::Through).into());
        }
        let config = engine_config(&fixture, writer);
        let device = super::device::of_this_run(fixture.transfer, &clock).unwrap();
        let engine = Engine::open(config, levels, device, clock).unwrap();
        let store = Self {
            engine,
            faults,
            roots,
            fixture,
        };
        if store.stat("healthy") == 1 {
            eventually("the roots were counted", || {
                store.stat("storage_counted") == 1
            });
        }
        store
    }

    /// Dumps these blocks, each by itself, and waits; those that failed. A block that was refused
    /// because no room is granted yet is offered again.
    pub(crate) fn dump(&self, blocks: &[BlockId]) -> Vec<(BlockId, Error)> {
        let mut failed = Vec::new();
        for &block in blocks {
            let device = Device::filled(&self.fixture, &[block]);
            let mut failures = Vec::new();
            eventually("it is not refused", || {
                let task = self.engine.dump(device.rows(&[block])).unwrap();
                assert!(task.wait(self.engine.clock(), Until::Published, None));
                failures = task.failures();
                !are_busy(&failures)
            });
            failed.extend(failures.into_iter().map(|(_, error)| (block, error)));
        }
        failed
    }

    /// Stores side shards of these blocks, each alone, and waits.
    pub(crate) fn dump_alone(&self, blocks: &[BlockId], names: &[&'static str]) {
        eventually("they are stored", || {
            let task = begin_alone(&self.engine, &self.fixture, blocks, names);
            assert!(task.wait(self.engine.clock(), Until::Published, None));
            let failures = task.failures();
            assert!(failures.is_empty() || are_busy(&failures), "{failures:?}");
            failures.is_empty()
        });
    }

    /// Loads these blocks; which failed. What did not is right.
    pub(crate) fn load(&self, blocks: &[BlockId]) -> Vec<(BlockId, Error)> {
        let mut failed = Vec::new();
        for &block in blocks {
            let device = Device::blank(&self.fixture, &[block]);
            let task = self.engine.load(device.rows(&[block]), None).unwrap();
            assert!(task.wait(self.engine.clock(), Until::Published, None));
            match task.failures().pop() {
                Some((_, error)) => failed.push((block, error)),
                None => assert!(device.is_right(block), "wrong bytes of {block}"),
            }
        }
        failed
    }

    /// Which of these are hits.
    pub(crate) fn hits(&self, blocks: &[BlockId]) -> Vec<bool> {
        self.engine.lookup(blocks).unwrap()
    }

    /// Waits until all of these are hits, and loads them.
    pub(crate) fn await_all(&self, blocks: &[BlockId]) {
        eventually("all are hits", || self.hits(blocks).iter().all(|&hit| hit));
        let failed = self.load(blocks);
        assert!(failed.is_empty(), "{failed:?}");
    }

    /// The tier that has each block.
    pub(crate) fn places(&self, blocks: &[BlockId]) -> Vec<u8> {
        self.engine.locate_on_prefix(blocks).unwrap().0
    }

    pub(crate) fn stat(&self, name: &str) -> u64 {
        self.engine.stats()[name].as_u64().unwrap()
    }

    /// What a tier counted.
    pub(crate) fn tier(&self, number: usize, name: &str) -> u64 {
        let value = self.engine.stats()["tiers"][number][name].clone();
        value.as_u64().or(value.as_bool().map(u64::from)).unwrap()
    }
}
