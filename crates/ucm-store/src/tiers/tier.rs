//! One tier: its medium and the threads that work on it, its health, the form in which it stores
//! records, the copies of it that were refused, and its counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use serde::Serialize;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, MissReason, Result};
use ucm_io::IoPool;
use ucm_media::backend::Backend;

use super::codec::Compression;
use super::config::{Request, TierConfig, TierSetup, WritePolicy};
use super::form::StoredForm;
use super::health::Health;
use crate::breaker::BreakerConfig;
use crate::rejected::RejectedRecords;
use crate::stats::add;

/// Most records from above that wait to be published together.
const TOGETHER: usize = 16;

/// Statistics of one tier; counters since the start, sizes in bytes.
#[derive(Serialize)]
pub(crate) struct TierStats<'a> {
    /// Its name, unlike those of the others.
    name: &'a str,
    /// Its level, counted from the top; tiers side by side have the same.
    level: usize,
    #[serde(flatten)]
    counts: &'a TierCounts,
    /// Operations that failed because of the medium: errors and deadlines that passed.
    failures: u64,
    /// Whether it is memory, which each process has of its own.
    memory: bool,
    /// Bytes used.
    used_bytes: u64,
    /// The limit.
    capacity_bytes: u64,
    /// Whether it is used now.
    healthy: bool,
    /// Whether it takes writes now.
    writable: bool,
    /// Of one with a codec.
    #[serde(skip_serializing_if = "Option::is_none")]
    compression: Option<Compression>,
}

/// The counters of one tier.
#[derive(Default, Serialize)]
pub(super) struct TierCounts {
    /// Ids found here by lookups.
    pub(super) hits: AtomicU64,
    /// Blocks read here for loads.
    pub(super) blocks_read: AtomicU64,
    /// Bytes read here for loads, of side shards too.
    pub(super) bytes_read: AtomicU64,
    /// Reads of side shards here: a header, and a side shard where the record has it.
    pub(super) sides_read: AtomicU64,
    /// Blocks written here, promoted ones included.
    pub(super) blocks_written: AtomicU64,
    /// Bytes written here.
    pub(super) bytes_written: AtomicU64,
    /// Copies read here that were refused.
    pub(super) copies_refused: AtomicU64,
    /// Blocks copied here from below after a load or by a prefetch.
    pub(super) promotions: AtomicU64,
    /// Blocks written here because the tier above evicted them.
    pub(super) demotions: AtomicU64,
    /// Copies for this tier that were not made: it was busy or not well, or the copy was damaged.
    pub(super) copies_dropped: AtomicU64,
    /// Blocks removed here because their tenant had more than its quota.
    pub(super) quota_removed: AtomicU64,
}

/// One tier.
pub(crate) struct Tier {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) pool: Arc<IoPool>,
    /// Its level, counted from the top.
    pub(super) level: usize,
    pub(super) policy: WritePolicy,
    pub(super) form: StoredForm,
    pub(super) health: Health,
    /// A probe of it is under way.
    pub(super) probing: AtomicBool,
    /// The text that it returned when it was opened.
    pub(super) description: Mutex<String>,
    /// Its copies that are no hits.
    refused: RejectedRecords,
    /// Records that the tier above gives up and that are not published here yet.
    demoting: AtomicUsize,
    pub(super) counts: TierCounts,
}

impl Tier {
    /// A tier of that level. `Unsupported` if it has a codec that this build has not.
    pub(super) fn new(
        config: TierConfig,
        name: String,
        level: usize,
        setup: &TierSetup,
    ) -> Result<Self> {
        let breaker = BreakerConfig {
            max_stuck: config.max_stuck,
            ..setup.breaker
        };
        let (store, clock) = (setup.store, Arc::clone(&setup.clock));
        Ok(Self {
            form: StoredForm::new(&config, &name, setup)?,
            health: Health::new(
                (store, name, setup.count == 1),
                breaker,
                Arc::clone(&config.pool),
                clock,
            ),
            backend: config.backend,
            pool: config.pool,
            level,
            policy: config.policy,
            probing: AtomicBool::new(false),
            description: Mutex::default(),
            refused: RejectedRecords::default(),
            demoting: AtomicUsize::new(0),
            counts: TierCounts::default(),
        })
    }

    /// Whether it answers at once and ends with its processes.
    pub(super) fn is_memory(&self) -> bool {
        self.backend.features().memory.is_some()
    }

    /// A record comes down from the tier above, which keeps it until it is published here; that few
    /// are on their way at once is the bound there. True where a medium that publishes many
    /// together should not wait for more.
    pub(super) fn demotion_begins(&self) -> bool {
        let before = self.demoting.fetch_add(1, Ordering::AcqRel);
        before % TOGETHER == TOGETHER - 1
    }

    /// It is published, or was dropped.
    pub(super) fn demotion_ended(&self) {
        self.demoting.fetch_sub(1, Ordering::AcqRel);
    }

    /// False only where it is known, without a question to the medium, that a record is not here.
    pub(super) fn may_have(&self, id: BlockId) -> bool {
        match self.backend.features().memory {
            Some(memory) => memory.has(id),
            None => true,
        }
    }

    /// Whether lookups are answered without a question to the medium, so that they say nothing of
    /// its health.
    pub(super) fn answers_from_index(&self) -> bool {
        !self.is_memory() && self.backend.features().answers_at_once
    }

    /// Notes that a request was answered, perhaps without a question to the medium.
    pub(super) fn note_answer(&self, request: Request) {
        if self.answers_from_index() {
            self.health.undecided();
        } else {
            self.health.note(request.number, None);
        }
    }

    /// Notes how an operation of a request ended.
    pub(super) fn note(&self, request: Request, error: Option<&Error>) {
        self.health.note(request.number, error);
    }

    /// This copy is no hit until another takes its place.
    pub(super) fn refuse(&self, id: BlockId, reason: MissReason) {
        self.form.forget_key(id);
        self.refused.add(id, reason);
    }

    /// The same for a copy that was read: it is counted, and damaged ones speak of the medium.
    pub(super) fn discard(&self, id: BlockId, reason: MissReason) {
        self.refuse(id, reason);
        add(&self.counts.copies_refused, 1);
        if reason.is_damage() {
            self.health.damaged();
        }
    }

    /// Another copy took the place of one that may have been refused.
    pub(super) fn clear_bad(&self, id: BlockId) {
        self.refused.forget(id);
    }

    /// Whether this copy is no hit.
    pub(super) fn has_refused(&self, id: BlockId) -> bool {
        self.refused.contains(id)
    }

    /// Whether the next copy takes the place of the one that is there.
    pub(super) fn replaces(&self, id: BlockId) -> bool {
        self.refused.replaces(id)
    }

    pub(super) fn stats(&self) -> TierStats<'_> {
        let usage = self.backend.stats().usage;
        TierStats {
            name: self.health.name(),
            level: self.level,
            counts: &self.counts,
            failures: self.health.failures(),
            memory: self.is_memory(),
            used_bytes: usage.used,
            capacity_bytes: usage.capacity,
            healthy: self.health.is_well(),
            writable: self.health.is_writable(),
            compression: self.form.compression(),
        }
    }
}
