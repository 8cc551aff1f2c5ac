//! The store of a test: what lies below, what stands above, how large everything is.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use ucm_core::Part;
use ucm_device::Transfer;
use ucm_io::Process;
use ucm_media::layout::Modes;
use ucm_media::quota::{Capacity, Rules};
use ucm_media::segment::{Merging, SegmentConfig};
use ucm_record::{Keys, SideSpec};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::Deadlines;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::OpKind;

use super::servers::shared_redis;
use super::{Medium, SlowDevice};

/// What stands above the root of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Above {
    Nothing,
    /// A map of this many records; how the root below is written.
    Map(usize, WritePolicy),
    /// Memory for this many records; how the root below is written.
    Memory(u64, WritePolicy),
    /// Another root beside it, on an engine of its own.
    File,
}

/// Records in the memory above a root, where `UCM_TEST_TIERS` names one: more than most tests
/// have.
const MEMORY: u64 = 256;

impl Above {
    /// What stands above the root in most tests: nothing, unless `UCM_TEST_TIERS` says otherwise.
    /// `memory`: a memory tier, as in `Cache|Posix`. `map`: a memory that keeps nothing, so that
    /// all of it goes through a pipeline to the root.
    pub(crate) fn of_this_run() -> Self {
        match std::env::var("UCM_TEST_TIERS").as_deref() {
            Err(_) | Ok("none") => Self::Nothing,
            Ok("memory") => Self::Memory(MEMORY, WritePolicy::Through),
            Ok("map") => Self::Map(0, WritePolicy::Through),
            Ok(other) => unreachable!("UCM_TEST_TIERS is none, memory or map, not {other}"),
        }
    }
}

/// How a test wants its store.
#[derive(Clone)]
pub(crate) struct Fixture {
    pub(crate) above: Above,
    pub(crate) medium: Medium,
    pub(crate) tensors: Vec<u64>,
    pub(crate) layers: u32,
    pub(crate) layers_per_shard: u32,
    pub(crate) slots: u64,
    pub(crate) capacity: Option<u64>,
    pub(crate) rules: Rules,
    pub(crate) modes: Modes,
    pub(crate) process: Process,
    pub(crate) weights: &'static str,
    pub(crate) part: Part,
    /// The parts that the store loads and dumps beside the first.
    pub(crate) own_parts: Vec<PartShape>,
    /// Other parts of the namespace that are named to the store.
    pub(crate) other_parts: Vec<PartShape>,
    pub(crate) deadlines: Deadlines,
    pub(crate) breaker: BreakerConfig,
    pub(crate) lookup_only: bool,
    pub(crate) workers: usize,
    pub(crate) copy_threads: usize,
    pub(crate) device: Option<Arc<SlowDevice>>,
    /// How an accelerator copies.
    pub(crate) transfer: Transfer,
    /// How records lie below the root.
    pub(crate) layout: Layout,
    /// No layout is named: the root has records in it already.
    pub(crate) unnamed: bool,
    /// Options of a [`Medium::Kind`] beside those that it has for tests.
    pub(crate) options: Vec<(&'static str, Value)>,
    /// What blocks have beside their KV, by name and bytes; dumps bring it
    /// ([`super::side_content`]).
    pub(crate) sides: Vec<(&'static str, u64)>,
    /// What makes them shorter, which needs segments and records of more than a page;
    /// [`Fixture::compressed`].
    pub(crate) compressed: bool,
    /// What records are encrypted with below memory; [`Fixture::encrypted`].
    pub(crate) keys: Option<Arc<Keys>>,
    /// What each tenant may have below memory.
    pub(crate) tenant_quota: Option<Capacity>,
}

/// A part, and the sizes of its blocks.
#[derive(Clone)]
pub(crate) struct PartShape {
    pub(crate) part: Part,
    pub(crate) tensors: Vec<u64>,
    pub(crate) layers: u32,
    pub(crate) layers_per_shard: u32,
}

/// How records lie below the root.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Layout {
    File,
    Segment(SegmentConfig),
}

impl Layout {
    /// What most tests run over: files, unless `UCM_TEST_LAYOUT` is `segment`. With `unnamed-file`
    /// or `unnamed-segment` that is what the backend finds.
    pub(crate) fn of_this_run() -> Self {
        match std::env::var("UCM_TEST_LAYOUT").as_deref() {
            _ if compressed_in_this_run() => Self::segments(),
            Err(_) | Ok("file" | "unnamed-file") => Self::File,
            Ok("segment" | "unnamed-segment") => Self::segments(),
            Ok(other) => unreachable!("UCM_TEST_LAYOUT is no layout: {other}"),
        }
    }

    /// The operation by which the bytes of a record reach the medium.
    pub(crate) fn writing(self) -> OpKind {
        match self {
            Self::File => OpKind::Publish,
            Self::Segment(_) => OpKind::WriteAt,
        }
    }

    /// Segments that are sealed as soon as nothing is being written.
    pub(crate) fn segments() -> Self {
        Self::merging(Merging::default())
    }

    /// The same, merged like this.
    pub(crate) fn merging(merging: Merging) -> Self {
        Self::Segment(SegmentConfig {
            age: Duration::ZERO,
            merging,
            ..SegmentConfig::default()
        })
    }
}

/// Most tests compress if `UCM_TEST_COMPRESS` is set.
fn compressed_in_this_run() -> bool {
    std::env::var_os("UCM_TEST_COMPRESS").is_some()
}

/// A key that is made of this byte. With `UCM_TEST_ENCRYPT` most tests encrypt.
fn keys_of(key: u8) -> Arc<Keys> {
    Arc::new(Keys::parse(&format!("{key:02x}").repeat(32)).unwrap())
}

/// Pieces of one layer.
const TENSORS: [u64; 2] = [96, 32];
/// The same of records that can become shorter.
const LARGE_TENSORS: [u64; 2] = [6144, 2048];

impl Fixture {
    /// The address of the Redis server of a store.
    pub(crate) fn server(&self) -> String {
        let given = self
            .options
            .iter()
            .find(|(key, _)| *key == "storage_backends");
        match given {
            Some((_, addresses)) => addresses[0].as_str().unwrap_or_default().to_owned(),
            None => shared_redis().unwrap_or_default().to_owned(),
        }
    }

    /// For the real clock, on which a busy machine lets a thread wait for seconds: where a test
    /// names no deadline, none is near.
    pub(crate) fn unhurried(self) -> Self {
        let usual = Deadlines::default();
        let longer = |given, usual| match given == usual {
            true => Duration::from_secs(30),
            false => given,
        };
        Self {
            deadlines: Deadlines {
                load: longer(self.deadlines.load, usual.load),
                probe: longer(self.deadlines.probe, usual.probe),
                shutdown: longer(self.deadlines.shutdown, usual.shutdown),
                ..self.deadlines
            },
            ..self
        }
    }

    /// The fixture of a store of another part alone.
    pub(crate) fn shaped(&self, shape: &PartShape) -> Self {
        Self {
            part: shape.part,
            tensors: shape.tensors.clone(),
            layers: shape.layers,
            layers_per_shard: shape.layers_per_shard,
            sides: Vec::new(),
            ..self.clone()
        }
    }

    /// The fixture of a store of its part of this number alone.
    pub(crate) fn of_part(&self, number: usize) -> Self {
        match number.checked_sub(1) {
            Some(at) => self.shaped(&self.own_parts[at]),
            None => self.clone(),
        }
    }

    /// The side shards of blocks, as the settings of a store name them.
    pub(crate) fn side_specs(&self) -> Vec<SideSpec> {
        let spec = |&(name, len): &(&str, u64)| SideSpec {
            name: name.to_owned(),
            version: 1,
            len,
        };
        self.sides.iter().map(spec).collect()
    }

    /// Encrypted with a key that is made of this byte.
    pub(crate) fn encrypted(self, key: u8) -> Self {
        Self {
            keys: Some(keys_of(key)),
            ..self
        }
    }

    /// Larger records, compressed, in segments.
    pub(crate) fn compressed(self) -> Self {
        Self {
            compressed: true,
            tensors: LARGE_TENSORS.to_vec(),
            layout: match self.layout {
                Layout::File => Layout::segments(),
                layout => layout,
            },
            ..self
        }
    }
}

impl Default for Fixture {
    fn default() -> Self {
        let never = BreakerConfig {
            threshold: u32::MAX,
            cool_down: Duration::from_secs(1),
            window: Duration::from_secs(60),
            max_stuck: usize::MAX,
            damaged_per_minute: u32::MAX,
        };
        Self {
            above: Above::of_this_run(),
            medium: Medium::Posix,
            tensors: if compressed_in_this_run() {
                LARGE_TENSORS
            } else {
                TENSORS
            }
            .to_vec(),
            layers: 3,
            layers_per_shard: 3,
            slots: 16,
            capacity: Some(1 << 30),
            rules: Rules {
                // whatever else lies on the disk of the tests
                free_floor: Some(Capacity::Percent(0.0)),
                ..Rules::default()
            },
            modes: Modes::default(),
            process: Process::this(),
            weights: "w",
            part: Part::default(),
            own_parts: Vec::new(),
            other_parts: Vec::new(),
            // No test that is kept from running for a while misses what is there.
            deadlines: Deadlines {
                lookup: Duration::from_secs(20),
                load: Duration::from_secs(20),
                ..Deadlines::default()
            },
            breaker: never,
            lookup_only: false,
            workers: 4,
            copy_threads: 1,
            device: None,
            transfer: Transfer::Auto,
            layout: Layout::of_this_run(),
            sides: Vec::new(),
            unnamed: std::env::var("UCM_TEST_LAYOUT")
                .is_ok_and(|layout| layout.starts_with("unnamed")),
            options: Vec::new(),
            compressed: compressed_in_this_run(),
            keys: std::env::var_os("UCM_TEST_ENCRYPT").map(|_| keys_of(7)),
            tenant_quota: None,
        }
    }
}
