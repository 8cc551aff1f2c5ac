//! The tiers below an engine: memory above a file above a remote share, or any part of that; most
//! often one. A *level* is a tier, or several side by side over which records are spread
//! ([`level`]).
//!
//! *Lookup*: present in any tier; the upper one first, the lower ones for the records missing
//! there. *Read*: tier by tier; the engine reads from the next one when a copy was absent, damaged
//! or late, and a record that was read below and verified is promoted. *Write*: by the policy of
//! each tier ([`WritePolicy`]). Every tier has threads and a breaker of its own, so one that is
//! sick costs its bound once and the others work on. Copies between tiers delay no caller.

mod codec;
mod config;
mod drain;
mod form;
mod health;
mod level;
mod locally_visible;
mod lookup;
mod prefetch;
mod probes;
mod read;
mod tenant_usage;
mod tenants;
mod tier;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, MissReason, Result};
use ucm_device::{ArenaOptions, Device, SlotPool};
use ucm_infra::{Clock, LANE_DUMP, Lane, MonotonicTime, Notify, WorkerPool};
use ucm_media::backend::{Flush, LocallyVisible, ReadDone};
use ucm_record::{Keys, SideSpec};

use crate::breaker::BreakerConfig;
use crate::records::OwnParts;
use config::TierSetup;
use level::TierTable;
use locally_visible::LocallyVisibleIds;
use lookup::TierLookups;
use prefetch::Prefetches;
use probes::Probes;
use read::TierReads;
use tenants::Tenants;
use tier::{Tier, TierStats};
use write::{Moves, Receipts, Writes};

pub(crate) use config::{LookupResult, Request};
pub use config::{TierConfig, WritePolicy};
pub use level::{LevelConfig, MAX_LEVELS, MAX_TIERS};
pub(crate) use lookup::{LEAST_WINDOW, WINDOW};
pub use prefetch::{MAX_WAITING as MAX_PREFETCH, Priority};
pub(crate) use read::{Reader, TierRead};
pub(crate) use tenants::TenantQuota;
pub(crate) use write::{TierWrite, WriteTarget};

/// Times a thread that hangs is replaced.
const REPLACEMENTS: usize = 2;

/// The settings of the tiers of an engine.
pub(crate) struct TiersConfig {
    /// Top first; at most [`MAX_LEVELS`].
    pub(crate) levels: Vec<LevelConfig>,
    /// Number of the store in the log.
    pub(crate) store: u64,
    /// Copies are verified by them before they are kept.
    pub(crate) parts: Arc<OwnParts>,
    /// Encrypts records in every tier that is not memory.
    pub(crate) keys: Option<Arc<Keys>>,
    /// The quota of each tenant in a level.
    pub(crate) tenant_quota: Option<TenantQuota>,
    /// When the breaker of a tier opens; `max_stuck` is that of each tier.
    pub(crate) breaker: BreakerConfig,
    /// How long a probe of a tier may take.
    pub(crate) probe: Duration,
    /// How long a copy between tiers may take.
    pub(crate) copy: Duration,
    /// Records that can be on their way between tiers at once; each takes the memory of one.
    pub(crate) spare_slots: usize,
    /// What the log says of the engine when the first tier is usable.
    pub(crate) staging: String,
}

/// The tiers of one engine: the table of their parts.
pub(crate) struct Tiers {
    pub(crate) table: Arc<TierTable>,
    pub(crate) probes: Arc<Probes>,
    pub(crate) lookups: TierLookups,
    pub(crate) reads: Arc<TierReads>,
    pub(crate) writes: Arc<Writes>,
    pub(crate) prefetches: Arc<Prefetches>,
    tenants: Option<Arc<Tenants>>,
    locally_visible: LocallyVisibleIds,
}

impl Tiers {
    /// Puts tiers together; nothing is touched before [`Tiers::open`]. `Config` where they make no
    /// sense together.
    pub(crate) fn new(
        config: TiersConfig,
        device: &dyn Device,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let (store, parts) = (config.store, config.parts);
        let count = config.levels.iter().map(|level| level.tiers.len()).sum();
        let setup = TierSetup {
            headers: match config.keys {
                Some(_) => Some(header_slots(&config.levels, &parts, device)?),
                None => None,
            },
            store,
            parts: Arc::clone(&parts),
            keys: config.keys,
            breaker: config.breaker,
            clock,
            count,
        };
        let table = Arc::new(TierTable::new(config.levels, &setup)?);
        let spare = match count {
            1 => 1,
            _ => config.spare_slots.max(1),
        };
        let slot_len = parts.record_len();
        let spare_len = spare * slot_len.next_multiple_of(4096);
        let arena = device.make_arena(spare_len, ArenaOptions::default())?;
        let pool = WorkerPool::builder("ucm-tier")
            .size(count + 1)
            .lanes(&[lane("move", spare, 1), lane("probe", count, count)])
            .max_replacements(REPLACEMENTS)
            .clock(setup.clock)
            .build()?;
        let tenants = match config.tenant_quota {
            Some(quota) => {
                let made = (parts.header_len(), device);
                let tenants = Tenants::new(quota, &table, store, config.copy, made)?;
                Some(Arc::new(tenants))
            }
            None => None,
        };
        let probes = Arc::new(Probes {
            table: Arc::clone(&table),
            pool: Arc::clone(&pool),
            store,
            limit: config.probe,
            staging: config.staging,
            opening: AtomicBool::new(true),
            announced: AtomicBool::new(false),
        });
        let writes = Arc::new(Writes {
            table: Arc::clone(&table),
            probes: Arc::clone(&probes),
            store,
            parts,
            tenants: tenants.clone(),
            moves: Moves {
                spare: SlotPool::new(arena, slot_len)?,
                freed: Notify::new(),
                pool,
                deadline: config.copy,
            },
            receipts: Receipts::default(),
        });
        for tier in &table.tiers {
            tier.backend.on_sealed(writes.on_sealed());
        }
        writes.take_evicted()?;
        let prefetches = Arc::new(Prefetches {
            table: Arc::clone(&table),
            probes: Arc::clone(&probes),
            writes: Arc::clone(&writes),
            queue: Mutex::default(),
            loading: AtomicUsize::new(0),
        });
        let weak = Arc::downgrade(&prefetches);
        writes.moves.spare.on_release(move || {
            if let Some(prefetches) = weak.upgrade() {
                prefetches.spare_freed();
            }
        });
        Ok(Self {
            lookups: TierLookups {
                table: Arc::clone(&table),
                probes: Arc::clone(&probes),
            },
            reads: Arc::new(TierReads {
                table: Arc::clone(&table),
                probes: Arc::clone(&probes),
                prefetches: Arc::clone(&prefetches),
                awaiting_refresh: AtomicUsize::new(0),
            }),
            table,
            probes,
            writes,
            prefetches,
            tenants,
            locally_visible: LocallyVisibleIds::default(),
        })
    }

    /// Probes the tiers until `deadline`, and begins to keep the quota of tenants.
    pub(crate) fn open(&self, deadline: MonotonicTime) {
        self.probes.open(deadline);
        if let Some(tenants) = &self.tenants {
            tenants.begin();
        }
    }

    /// Another process replaces these records: copies that were refused in some tier are read
    /// again.
    pub(crate) fn clear_bad(&self, ids: &[BlockId]) {
        for tier in &self.table.tiers {
            ids.iter().for_each(|&id| tier.clear_bad(id));
        }
    }

    /// The copy in this tier was refused for this reason: it is no hit any more. One of a newer
    /// version is never replaced.
    pub(crate) fn discard(&self, number: usize, id: BlockId, reason: MissReason) {
        self.table.tiers[number].discard(id, reason);
    }

    /// Decrypts a side shard that was read from a tier with the header of its record.
    pub(crate) fn decrypt_side(
        &self,
        number: usize,
        id: BlockId,
        wanted: &SideSpec,
        read: &mut ReadDone,
    ) -> Result<()> {
        self.table.tiers[number].form.decrypt_side(id, wanted, read)
    }

    /// These records were used by a request; `own`: only tiers with something that this process
    /// alone can touch.
    pub(crate) fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime, own: bool) {
        for tier in &self.table.tiers {
            if tier.health.is_well() && (!own || tier.backend.features().own_touches) {
                tier.backend.touch(ids, deadline);
            }
        }
    }

    /// Whether [`Tiers::touch`] does anything for `own`.
    pub(crate) fn wants_touch_own(&self) -> bool {
        let own = |tier: &Tier| tier.backend.features().own_touches;
        self.table.tiers.iter().any(own)
    }

    /// Records that can be read here before others can see them, and those that no longer are,
    /// since the last call.
    pub(crate) fn locally_visible(&self) -> LocallyVisible {
        let tiers = self.table.tiers.iter();
        self.locally_visible
            .merge(tiers.map(|tier| tier.backend.features().locally_visible()))
    }

    /// Publishes records that wait for others to be published with them.
    pub(crate) fn flush(&self, how: Flush) {
        let tiers = self.table.tiers.iter();
        tiers.for_each(|tier| tier.backend.flush(how));
    }

    /// Has what others have published listed, by `until` or with a later call.
    pub(crate) fn refresh(&self, until: MonotonicTime) {
        for tier in &self.table.tiers {
            tier.backend.features().look(until, Box::new(|_| {}));
        }
    }

    /// Times a breaker opened.
    pub(crate) fn breaker_opened(&self) -> u64 {
        let tiers = self.table.tiers.iter();
        tiers.map(|tier| tier.health.opened()).sum()
    }

    /// Operations stuck past their deadline, each of which may hold a slot.
    pub(crate) fn stuck(&self) -> usize {
        let stuck: usize = self.table.tiers.iter().map(|tier| tier.pool.stuck()).sum();
        stuck + self.writes.moves.pool.stuck()
    }

    /// Threads of the engine among them, which hang in writes of their own.
    pub(crate) fn stuck_guests(&self) -> usize {
        let tiers = self.table.tiers.iter();
        tiers.map(|tier| tier.pool.stuck_guests()).sum()
    }

    /// Statistics of each tier, top first.
    pub(crate) fn stats(&self) -> Vec<TierStats<'_>> {
        self.table.tiers.iter().map(Tier::stats).collect()
    }

    /// Ends: finishes or fails operations under way within `drain`.
    pub(crate) fn shutdown(&self, drain: Duration) {
        let clock = &self.table.clock;
        let until = clock.now().after(drain);
        let left = || until.since(clock.now());
        self.prefetches.close();
        if let Some(tenants) = &self.tenants {
            tenants.end(clock.now().after(drain / 4));
        }
        self.writes.write_back(clock.now().after(drain / 2));
        self.writes.moves.pool.shutdown(left() / 4);
        for (number, tier) in self.table.tiers.iter().enumerate() {
            let share = left() / u32::try_from(self.table.tiers.len() - number).unwrap_or(1);
            tier.backend.close(share);
        }
    }
}

/// A lane of a pool.
pub(crate) fn lane(name: &'static str, capacity: usize, max_running: usize) -> Lane {
    Lane {
        name,
        capacity,
        max_running,
    }
}

/// A slot for the header of a record for every thread that writes.
fn header_slots(
    levels: &[LevelConfig],
    parts: &OwnParts,
    device: &dyn Device,
) -> Result<Arc<SlotPool>> {
    let tiers = levels.iter().flat_map(|level| &level.tiers);
    let threads: usize = tiers.map(|tier| tier.pool.width(LANE_DUMP)).sum();
    let (count, len) = (threads.max(1), parts.header_len());
    let arena = device.make_arena(count * len, ArenaOptions::default())?;
    SlotPool::with_slots(arena, len, count)
}
