//! The one engine over every tier: tasks, staging slots, gather and scatter, checksums, joined
//! loads, deadlines, back-pressure, counters.
//!
//! [`Engine`] is the table of its parts, which share a [`Core`]. The five rules it keeps are those
//! of the design: no late bytes, block by block ([`load`]); two levels of a dump, staged and
//! published ([`dump`]); bounded queues; deadlines on every wait; verification of everything that
//! is read from a medium. Deadlines of I/O are kept by the backend's pool, those of tasks by the
//! caller that polls them.

mod block_builder;
mod config;
mod core;
mod dump;
mod inline_writers;
mod load;
mod lookup;
mod part;
mod reads;
mod rows;
mod side_reads;
mod task;
mod transfer;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, in_units};
use ucm_device::{ArenaOptions, Device, Event, SlotPool};
use ucm_infra::{Clock, MonotonicTime, WorkerPool};
use ucm_media::backend::{Flush, LocallyVisible};
use ucm_record::{RecordLayout, SideSpec};

use crate::records::{OwnParts, StoredRecords};
use crate::rejected::RejectedRecords;
use crate::stats::Stats;
use crate::tiers::{LevelConfig, Priority, TenantQuota, Tiers, TiersConfig, lane};

pub use config::{Deadlines, EngineConfig, Hint, OwnPart, Pieces, Row, RowSides};
use core::{COPY_REPLACEMENTS, Core, LEAST_SLOTS};
use dump::Dumps;
use lookup::Lookups;
pub use lookup::{Asked, Located, NOWHERE};
pub use part::EnginePart;
use reads::Loads;
use side_reads::SideLoads;
pub use side_reads::SidesTask;
pub use task::{Task, Until};
use transfer::{DeviceSide, Streams};

/// Threads for lookups that callers poll, and how many of these may be queued.
const ASK_THREADS: usize = 3;
const MOST_ASKED: usize = 1024;
/// Most memory of records that move between tiers, and most of them.
const SPARE_BYTES: usize = 64 << 20;
const SPARE_SLOTS: usize = 32;
/// Most copies queued, however large the arena.
const MAX_COPIES: usize = 1 << 20;

/// The engine. Dropping it closes it. For callers of one part it is its first part.
pub struct Engine {
    core: Arc<Core>,
    first: EnginePart,
    /// The other parts.
    parts: Vec<EnginePart>,
    dumps: Arc<Dumps>,
    loads: Arc<Loads>,
    side_loads: Arc<SideLoads>,
    lookups: Arc<Lookups>,
}

impl Deref for Engine {
    type Target = EnginePart;

    fn deref(&self) -> &EnginePart {
        &self.first
    }
}

impl Engine {
    /// Sets everything up and probes the tiers once within the probe deadline. One that does not
    /// answer is probed again later; until one does every lookup is a miss. `levels`: top first,
    /// each a tier or several side by side.
    pub fn open(
        config: EngineConfig,
        levels: impl IntoIterator<Item = impl Into<LevelConfig>>,
        device: Arc<dyn Device>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let (writer, keys, identity) = (config.writer, config.keys, config.identity);
        let records_of = |own: OwnPart, sides: Vec<SideSpec>| {
            let layout = RecordLayout::new(&own.geometry).describing(own.block_tokens, own.dtype);
            let layout = layout.with_sides(sides)?;
            let records = StoredRecords {
                geometry: own.geometry,
                layout: match keys {
                    Some(_) => layout.encrypted()?,
                    None => layout,
                },
                identity: identity.clone(),
                part: own.part,
            };
            records.check_shares().map(|()| Arc::new(records))
        };
        let first = OwnPart {
            part: config.part,
            geometry: config.geometry,
            block_tokens: config.block_tokens,
            dtype: config.dtype,
        };
        let first = records_of(first, config.sides)?;
        let others = config.own_parts.into_iter();
        let others: Result<Vec<_>> = others.map(|own| records_of(own, Vec::new())).collect();
        let parts = Arc::new(OwnParts::new(first, others?, writer)?);
        let slot_len = parts.record_len() as u64;
        let slots = config.staging_bytes / slot_len;
        if config.staging_bytes > 0 && slots < LEAST_SLOTS as u64 {
            return Err(Error::new(
                ErrorKind::Config,
                "staging_capacity must hold at least 4 blocks; raise it",
            )
            .with("staging_capacity", config.staging_bytes)
            .with("at_least", LEAST_SLOTS as u64 * slot_len));
        }
        let arena =
            device.make_arena((slots.max(1) * slot_len) as usize, ArenaOptions::default())?;
        let levels: Vec<LevelConfig> = levels.into_iter().map(Into::into).collect();
        let lends = levels
            .iter()
            .flat_map(|level| &level.tiers)
            .filter_map(|tier| tier.backend.features().memory?.region());
        let attached = lends.filter_map(|region| device.attach(region)).collect();
        let pages = arena.paging().name();
        let slots = SlotPool::new(arena, slot_len as usize)?;
        let reserved_slots = (slots.capacity() / 4).max(1);
        let staging = match slots.capacity() {
            few if few < LEAST_SLOTS => "lookups only".to_owned(),
            count => format!(
                "{count} staging slots of {} on {pages}, {reserved_slots} of them kept for loads",
                in_units(slot_len)
            ),
        };
        let below = TiersConfig {
            levels,
            store: writer,
            parts: Arc::clone(&parts),
            keys,
            tenant_quota: config.tenant_quota.map(|limit| TenantQuota {
                limit,
                lookup_only: config.staging_bytes == 0,
            }),
            breaker: config.breaker,
            probe: config.deadlines.probe,
            copy: config.deadlines.dump,
            spare_slots: (SPARE_BYTES / slot_len as usize).clamp(2, SPARE_SLOTS),
            staging,
        };
        let tiers = Arc::new(Tiers::new(below, &*device, Arc::clone(&clock))?);
        let copy_limit = (slots.capacity() * 2 + 64).min(MAX_COPIES);
        let copies = WorkerPool::builder("ucm-copy")
            .size(config.copy_threads.max(1))
            .lanes(&[lane("dump", copy_limit, config.copy_threads.max(1))])
            .max_replacements(COPY_REPLACEMENTS)
            .clock(Arc::clone(&clock))
            .build()?;
        let asks = WorkerPool::builder("ucm-ask")
            .size(ASK_THREADS + 1)
            .lanes(&[
                lane("lookup", MOST_ASKED, ASK_THREADS),
                // one job starts all reads that wait; lookups never hold the last thread
                lane("load", 1, ASK_THREADS + 1),
                lane("sides", 1, ASK_THREADS + 1),
            ])
            .max_replacements(ASK_THREADS)
            .clock(Arc::clone(&clock))
            .build()?;
        let core = Arc::new(Core {
            parts,
            deadlines: config.deadlines,
            clock,
            tiers,
            device: DeviceSide {
                streams: Streams::of(device),
                slots,
                reserved_slots,
                copies,
                _attached: attached,
            },
            asks,
            refused: RejectedRecords::default(),
            open_tasks: Arc::default(),
            stats: Stats::default(),
            overrun: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            pid: std::process::id(),
        });
        let dumps = Dumps::new(&core, copy_limit, config.copy_threads.max(1));
        let (loads, side_loads) = (Loads::new(&core), SideLoads::new(&core));
        let weak = (Arc::downgrade(&loads), Arc::downgrade(&side_loads));
        core.device.slots.on_release(move || {
            // a load may be waiting for this slot
            if let (Some(loads), Some(side_loads)) = (weak.0.upgrade(), weak.1.upgrade()) {
                loads.pump();
                side_loads.pump();
            }
        });
        let weak = Arc::downgrade(&dumps);
        let writes = &core.tiers.writes;
        writes.on_dump(Box::new(move |id, request, result| {
            if let Some(dumps) = weak.upgrade() {
                dumps.published(id, request, result);
            }
        }));
        core.tiers
            .open(core.clock.now().after(core.deadlines.probe));
        let part = |records: &Arc<StoredRecords>| EnginePart {
            records: Arc::clone(records),
            dumps: Arc::clone(&dumps),
            loads: Arc::clone(&loads),
            kv: Mutex::default(),
        };
        Ok(Self {
            first: part(&core.parts.first),
            parts: core.parts.all().skip(1).map(part).collect(),
            lookups: Arc::new(Lookups {
                core: Arc::clone(&core),
            }),
            core,
            dumps,
            loads,
            side_loads,
        })
    }

    /// One of its parts, by number: 0 is the first. `InvalidInput` for a number that it has not.
    pub fn part_at(&self, number: usize) -> Result<&EnginePart> {
        let other = number.checked_sub(1).map(|at| self.parts.get(at));
        let none = || {
            let none = Error::invalid("this store has no part of that number");
            none.with("part", number)
                .with("parts", self.parts.len() + 1)
        };
        other.unwrap_or(Some(&self.first)).ok_or_else(none)
    }

    /// An event of the device by its runtime's handle, for [`Row::ready`]; see
    /// [`Device::event_of`].
    pub fn event_of(&self, handle: u64) -> Result<Arc<dyn Event>> {
        self.device().event_of(handle)
    }

    /// Starts reading the side shard of that name of each block, without its KV. `deadline` as of
    /// [`EnginePart::load`]. A side shard that is missing, late or not sound fails its own row and
    /// no other.
    ///
    /// # Errors
    /// `InvalidInput` for a name that the store was not opened with, too many ids, or more than 1
    /// GiB of side shards.
    pub fn load_sides(
        &self,
        ids: Vec<BlockId>,
        name: &str,
        deadline: Option<Duration>,
    ) -> Result<SidesTask> {
        self.side_loads.load(ids, name, deadline)
    }

    /// Starts writing side shards of blocks that are stored without them, each as a record of its
    /// own: for each of these, by name, the bytes of every block, one behind the other. Or refuses
    /// at once, as [`EnginePart::dump`]. The task has a row for each, those of one name after those
    /// of another.
    ///
    /// # Errors
    /// `InvalidInput` for a name that the store was not opened with, and where there are not as
    /// many bytes as belong there.
    pub fn dump_sides(&self, ids: &[BlockId], sides: &[(&str, &[u8])]) -> Result<Task> {
        self.dump(self.records.side_rows(ids, sides)?)
    }

    /// Which of these blocks are stored whole, as far as the lookup deadline allows; exact per id.
    pub fn lookup(&self, ids: &[BlockId]) -> Result<Vec<bool>> {
        let (tiers, _) = self.locate(ids)?;
        Ok(tiers.into_iter().map(|tier| tier != NOWHERE).collect())
    }

    /// The tier, counted from the top, that each of these ids would be read from, [`NOWHERE`] for
    /// one that is no hit, and why the first of these is none. For ids that are no prefix of a
    /// chain, within the lookup deadline; where a record is may change until it is read.
    pub fn locate(&self, ids: &[BlockId]) -> Located {
        self.lookups.locate(ids)
    }

    /// The same on a thread of the engine; Busy when too many wait for it.
    pub fn begin_locate(&self, ids: Vec<BlockId>) -> Result<Asked> {
        self.lookups.begin(Lookups::locate, ids)
    }

    /// How many ids from the first on are stored without a gap. Every id counted was checked.
    pub fn lookup_on_prefix(&self, ids: &[BlockId]) -> Result<usize> {
        Ok(self.locate_on_prefix(ids)?.0.len())
    }

    /// The same, and why the next id is no hit; `None` if every id is one.
    pub fn explain_on_prefix(&self, ids: &[BlockId]) -> Result<(usize, Option<MissReason>)> {
        let (tiers, reason) = self.locate_on_prefix(ids)?;
        Ok((tiers.len(), reason))
    }

    /// The tier, counted from the top, that each id from the first on would be read from without a
    /// gap, and why the next one is no hit. Where a record is may change until it is read.
    pub fn locate_on_prefix(&self, ids: &[BlockId]) -> Located {
        self.lookups.locate_on_prefix(ids)
    }

    /// The same on a thread of the engine; Busy when too many wait for it.
    pub fn begin_locate_on_prefix(&self, ids: Vec<BlockId>) -> Result<Asked> {
        self.lookups.begin(Lookups::locate_on_prefix, ids)
    }

    /// Whether lookups are answered from memory, without a system call. May change: a layout is
    /// decided by the first writer.
    pub fn answers_at_once(&self) -> bool {
        self.core.tiers.table.answers_at_once()
    }

    /// Remembers hints for the headers of blocks that will be dumped.
    pub fn describe(&self, hints: impl IntoIterator<Item = (BlockId, Hint)>) -> Result<()> {
        self.core.check_open()?;
        self.dumps.describe(hints);
        Ok(())
    }

    /// These blocks, with their ordinals, were used by a request; with each its side shards,
    /// wherever they lie.
    pub fn touch(&self, ids: &[(BlockId, u32)]) -> Result<()> {
        self.touch_in(ids, false)
    }

    /// The same in places that this process alone can touch: its memory, and its index of the
    /// segments that it merges.
    pub fn touch_own(&self, ids: &[(BlockId, u32)]) -> Result<()> {
        self.touch_in(ids, true)
    }

    fn touch_in(&self, ids: &[(BlockId, u32)], own: bool) -> Result<()> {
        let core = &self.core;
        core.check_open()?;
        let deadline = core.clock.now().after(core.deadlines.dump);
        core.tiers
            .touch(&self.records.with_sides(ids), deadline, own);
        Ok(())
    }

    /// Whether [`Engine::touch_own`] does anything: whether another process's touches must be
    /// passed on to this one. May change until the store was ready once.
    pub fn wants_touch_own(&self) -> bool {
        self.core.tiers.wants_touch_own()
    }

    /// Copies these blocks, which will be wanted, to the upper tiers of a pipeline, when nothing
    /// more urgent is to be done. The answer counts those taken; without an upper tier that is
    /// none, nor in a store for lookups only, which keeps nothing.
    pub fn prefetch(&self, ids: &[BlockId], priority: Priority) -> Result<usize> {
        let core = &self.core;
        core.check_call("ids", ids.len())?;
        if core.is_lookup_only() || !core.tiers.table.is_ready() {
            return Ok(0);
        }
        Ok(core.tiers.prefetches.add(ids, priority))
    }

    /// These blocks need not be prefetched any more; counts those that were still waiting.
    pub fn cancel_prefetch(&self, ids: &[BlockId]) -> Result<usize> {
        self.core.check_open()?;
        Ok(self.core.tiers.prefetches.cancel(ids))
    }

    /// Publishes soon the dumped records that wait for others to be published with them (a
    /// segment). Never waits.
    pub fn flush(&self) -> Result<()> {
        self.core.check_open()?;
        self.dumps.flush();
        Ok(())
    }

    /// Has the tiers list soon what others have published, where they do so only now and then
    /// (segments, objects). Never waits.
    pub fn refresh(&self) -> Result<()> {
        self.core.check_open()?;
        let until = self.core.clock.now().after(self.core.deadlines.lookup);
        self.core.tiers.refresh(until);
        Ok(())
    }

    /// Records that became readable for this process before others can see them, and those that no
    /// longer are, since the last call.
    pub fn locally_visible(&self) -> Result<LocallyVisible> {
        self.core.check_open()?;
        Ok(self.core.tiers.locally_visible())
    }

    /// Another process of the same engine refused these records, or could not read them: they are
    /// no hits here until the next dump has replaced them, unless they are of a newer version.
    pub fn mark_bad(&self, ids: &[BlockId]) -> Result<()> {
        self.core.check_open()?;
        ids.iter().for_each(|&id| self.core.refused.mark_bad(id));
        Ok(())
    }

    /// Another process of the same engine replaces these records: refusals of them here are
    /// forgotten. A record that is still bad is refused again by the next load.
    pub fn clear_bad(&self, ids: &[BlockId]) -> Result<()> {
        self.core.check_open()?;
        self.core.tiers.clear_bad(ids);
        for &id in ids {
            self.core.refused.clear_bad(id);
        }
        Ok(())
    }

    /// How many more blocks a dump could take now.
    pub fn free_dump_slots(&self) -> usize {
        self.dumps.free_slots()
    }

    /// The device whose memory it loads into and dumps from; it makes the events of rows and tasks.
    pub fn device(&self) -> &dyn Device {
        self.core.device.streams.device()
    }

    /// The engine's clock, for waiting on its tasks.
    pub fn clock(&self) -> &dyn Clock {
        &*self.core.clock
    }

    /// Number that no other store has: in the headers of its records, and in the field `store` of
    /// its log lines.
    pub fn writer(&self) -> u64 {
        self.core.parts.writer
    }

    /// Side shards of this store, in order; those of blocks of its first part.
    pub fn sides(&self) -> &[SideSpec] {
        self.records.layout.sides()
    }

    /// Fails with `Forked` in a child process: nothing else of the store may be called there.
    pub fn check_process(&self) -> Result<()> {
        self.core.check_process()
    }

    /// Counters, histograms and gauges as one JSON object.
    pub fn stats(&self) -> serde_json::Value {
        let (core, tiers) = (&self.core, &self.core.tiers);
        self.dumps.drop_incomplete(core.clock.now());
        let base = tiers.table.base_stats();
        let usage = base.usage;
        let stuck = tiers.stuck() + core.copies_stuck() + core.asks.stuck();
        let healthy = tiers.table.is_well() && core.lost().is_none();
        let gauges = [
            ("records_removed", base.records_removed),
            ("bytes_removed", base.bytes_removed),
            ("blocks_touched", base.blocks_touched),
            ("storage_used_bytes", usage.used),
            ("storage_capacity_bytes", usage.capacity),
            ("storage_records", usage.records),
            ("storage_counted", u64::from(usage.counted)),
            ("storage_collector", u64::from(usage.collector)),
            ("storage_paused", u64::from(usage.paused)),
            ("slots", core.device.slots.capacity() as u64),
            ("slots_free", core.device.slots.available() as u64),
            ("slot_bytes", core.parts.record_len() as u64),
            ("loads_queued", self.loads.queued() as u64),
            ("sides_queued", self.side_loads.queued() as u64),
            (
                "reads_awaiting_a_look",
                tiers.reads.awaiting_refresh() as u64,
            ),
            ("blocks_in_flight", self.dumps.in_flight() as u64),
            ("workers_stuck", stuck as u64),
            ("breaker_opened", tiers.breaker_opened()),
            ("refused_now", core.refused.len() as u64),
            ("healthy", u64::from(healthy)),
        ];
        // Serde refuses nothing in these.
        let mut json = serde_json::to_value(&core.stats).unwrap_or_default();
        for (name, value) in gauges.into_iter().chain(base.more) {
            json[name] = value.into();
        }
        json["tiers"] = serde_json::to_value(tiers.stats()).unwrap_or_default();
        json
    }

    /// Ends the engine: no new work, operations under way get the shutdown deadline, then every
    /// task has ended. Idempotent; in a forked child it does nothing.
    pub fn close(&self) {
        let core = &self.core;
        if self.check_process().is_err() || core.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let until = core.clock.now().after(core.deadlines.shutdown);
        let left = || until.since(core.clock.now());
        // A record that is written after the last flush is published alone, so first the media get
        // those on their way.
        self.dumps.await_placed(core.clock.now().after(left() / 2));
        core.tiers.flush(Flush::Last);
        // First the tasks, then the pools: a task is many jobs, and a pool that ends takes no next
        // one.
        core.open_tasks.wait(&*core.clock, until);
        core.asks.shutdown(Duration::ZERO);
        core.device.copies.shutdown(left());
        core.tiers.shutdown(left());
        self.loads.await_pump();
        self.side_loads.await_pump();
        self.loads.end();
        self.side_loads.end();
        self.dumps.drop_incomplete(MonotonicTime::NEVER);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // A forked child has none of the threads, and their locks as they were: it must not
            // even drop them.
            let (loads, side_loads) = (Arc::clone(&self.loads), Arc::clone(&self.side_loads));
            let dumps = Arc::clone(&self.dumps);
            Box::leak(Box::new((Arc::clone(&self.core), dumps, loads, side_loads)));
        }
        self.close();
    }
}
