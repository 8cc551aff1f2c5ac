//! The one engine over every tier: tasks, staging slots, gather and scatter, checksums, joined
//! loads, deadlines, back-pressure, counters.
//!
//! The five rules it keeps are those of the design: no late bytes, block by block ([`load`]); two
//! levels of a dump, staged and published ([`dump`]); bounded queues; deadlines on every wait;
//! verification of everything that comes from a medium. Deadlines of I/O are kept by the backend's
//! pool, those of tasks by the caller that looks at them.

mod availability;
mod block_builder;
mod config;
mod dump;
mod inline_writers;
mod load;
mod lookup;
mod reads;
mod rejected;
mod report;
mod side_reads;
mod sides;
mod task;
mod transfer;
mod verify;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, Result, limits};
use ucm_device::{ArenaOptions, Device, Event, KvLayout, SlotPool};
use ucm_infra::{Clock, Lane, MonotonicTime, WorkerPool};
use ucm_record::RecordLayout;
use ucm_tier::backend::{Flush, LocallyVisible};

use crate::records::StoredRecords;
use crate::stats::Stats;
use crate::tiers::{LevelConfig, Priority, TenantQuota, Tiers, TiersConfig};

use availability::Life;
pub use config::{Deadlines, EngineConfig, Hint, Pieces, Row, RowSides};
use dump::Dumps;
pub use lookup::{Asked, Located};
use rejected::RejectedRecords;
pub use side_reads::SidesTask;
pub use task::{Task, Until};
use transfer::{DeviceSide, Streams};

/// Threads for lookups that no one waits for, and how many of these may be queued.
const ASK_THREADS: usize = 3;
const MOST_ASKED: usize = 1024;
/// Lanes of the pool for what needs a thread of its own for a moment: lookups, and starting the
/// reads of loads.
const LANE_ASK: usize = 0;
const LANE_PUMP: usize = 1;

/// Fewest slots of an engine that moves blocks.
const LEAST_SLOTS: usize = 4;
/// Most memory of records on their way between tiers, and most of them.
const SPARE_BYTES: usize = 64 << 20;
const SPARE_SLOTS: usize = 32;
/// Times a copy worker that hangs is replaced; as many stuck copies open the breaker.
const COPY_REPLACEMENTS: usize = 4;
/// Most copies queued, however large the arena.
const MAX_COPIES: usize = 1 << 20;

/// The engine; a handle over its shared core. Dropping it closes it.
pub struct Engine(Arc<Core>);

/// Shared by the handle and the callbacks under way.
pub struct Core {
    records: Arc<StoredRecords>,
    deadlines: Deadlines,
    clock: Arc<dyn Clock>,
    tiers: Arc<Tiers>,
    device: DeviceSide,
    asks: Arc<WorkerPool>,
    reads: ReadQueues,
    dumps: Dumps,
    refused: RejectedRecords,
    life: Life,
    stats: Stats,
}

/// What waits for a slot to be read into, and what is being read.
#[derive(Default)]
struct ReadQueues {
    blocks: Mutex<reads::Reads>,
    sides: Mutex<side_reads::SideReads>,
}

impl Deref for Engine {
    type Target = Arc<Core>;

    fn deref(&self) -> &Arc<Core> {
        &self.0
    }
}

impl Engine {
    /// Sets everything up and looks at the tiers once, top first, within the probe deadline. One
    /// that does not answer is retried later; until one does every lookup is a miss. `levels`: top
    /// first, each a tier or several side by side.
    pub fn open(
        config: EngineConfig,
        levels: impl IntoIterator<Item = impl Into<LevelConfig>>,
        device: Arc<dyn Device>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let layout =
            RecordLayout::new(&config.geometry).describing(config.block_tokens, config.dtype);
        let layout = layout.with_sides(config.sides)?;
        let layout = if config.keys.is_some() {
            layout.encrypted()?
        } else {
            layout
        };
        sides::check_shares(&layout, &config.geometry)?;
        let slot_len = layout.record_len() as u64;
        let records = Arc::new(StoredRecords {
            geometry: config.geometry,
            layout,
            identity: config.identity,
            part: config.part,
            writer: config.writer,
        });
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
                "{count} staging slots of {slot_len} bytes on {pages}, {reserved_slots} of them \
                 kept for loads"
            ),
        };
        let below = TiersConfig {
            levels,
            records: Arc::clone(&records),
            keys: config.keys,
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
        let tiers = Tiers::new(below, &*device, Arc::clone(&clock))?;
        let copy_limit = (slots.capacity() * 2 + 64).min(MAX_COPIES);
        let copies = WorkerPool::builder("ucm-copy")
            .on_demand()
            .size(config.copy_threads.max(1))
            .lanes(&[Lane {
                name: "dump",
                capacity: copy_limit,
                max_running: config.copy_threads.max(1),
            }])
            .max_replacements(COPY_REPLACEMENTS)
            .clock(Arc::clone(&clock))
            .build()?;
        let asks = WorkerPool::builder("ucm-ask")
            .on_demand()
            .size(ASK_THREADS + 1)
            .lanes(&[
                Lane {
                    name: "lookup",
                    capacity: MOST_ASKED,
                    max_running: ASK_THREADS,
                },
                Lane {
                    name: "load",
                    capacity: 1, // it starts what all who came before it want
                    // one at a time does something; lookups never hold the last thread
                    max_running: ASK_THREADS + 1,
                },
            ])
            .max_replacements(ASK_THREADS)
            .clock(Arc::clone(&clock))
            .build()?;
        let core = Arc::new(Core {
            records,
            deadlines: config.deadlines,
            clock,
            tiers,
            device: DeviceSide {
                streams: Streams::of(device),
                slots,
                reserved_slots,
                copies,
                kv: Mutex::default(),
                _attached: attached,
            },
            asks,
            reads: ReadQueues::default(),
            dumps: Dumps::new(copy_limit, config.copy_threads.max(1), slot_len),
            refused: RejectedRecords::default(),
            life: Life::new(),
            stats: Stats::default(),
        });
        let weak = Arc::downgrade(&core);
        core.device.slots.on_release(move || {
            if let Some(core) = weak.upgrade() {
                core.pump(); // a load may be waiting for this slot
                core.pump_sides();
            }
        });
        core.tiers
            .open(core.clock.now().after(core.deadlines.probe));
        Ok(Self(core))
    }

    /// An event of the device by its runtime's handle, for [`Row::ready`]; see
    /// [`Device::event_of`].
    pub fn event_of(&self, handle: u64) -> Result<Arc<dyn Event>> {
        self.device.streams.device().event_of(handle)
    }

    /// Learns where the KV lies whose blocks [`Engine::rows_of_blocks`] names by number, in place
    /// of what was told before. Tasks under way keep what they began with.
    ///
    /// # Errors
    /// `InvalidInput` where its pieces are not those of the geometry.
    pub fn register_kv(&self, layout: KvLayout) -> Result<()> {
        let sizes = self.records.geometry.tensors();
        let expected = sizes.len() * self.records.geometry.layers() as usize;
        let lengths = layout.spans(0, 0..layout.pieces()).map(|span| span.len());
        if layout.pieces() != expected || !lengths.eq(sizes.iter().copied().cycle().take(expected))
        {
            return Err(Error::invalid(
                "the KV must have the pieces that the store was opened for",
            )
            .with("pieces", layout.pieces())
            .with("expected", expected));
        }
        *self.device.kv.lock() = Some(Arc::new(layout));
        Ok(())
    }

    /// Rows of whole blocks, each with its number in the KV that was registered.
    ///
    /// # Errors
    /// `InvalidInput` before [`Engine::register_kv`], `Unsupported` where a block has several
    /// shards.
    pub fn rows_of_blocks(
        &self,
        blocks: impl IntoIterator<Item = (BlockId, u64)>,
    ) -> Result<Vec<Row>> {
        let Some(layout) = self.device.kv.lock().clone() else {
            return Err(Error::invalid(
                "no KV is registered with this store: name addresses, or register it first",
            ));
        };
        if self.records.geometry.shards() > 1 {
            let text =
                "this store splits its blocks into shards, which are named with their addresses";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .with("shards", self.records.geometry.shards()));
        }
        let row = |(id, number)| Row {
            id,
            shard: 0,
            pieces: Pieces::Block(Arc::clone(&layout), number),
            ready: None,
            sides: RowSides::None,
        };
        Ok(blocks.into_iter().map(row).collect())
    }

    /// Loads whole blocks into staging slots and no further: they are read and verified as for a
    /// load, which fails where that one would and leaves behind what that one would (a refused
    /// record is no hit any more), and no device memory is touched. `deadline` as of
    /// [`Core::load`].
    pub fn verify(&self, ids: &[BlockId], deadline: Option<Duration>) -> Result<Task> {
        let row = |&id| Row {
            id,
            shard: 0,
            pieces: Pieces::Slot,
            ready: None,
            sides: RowSides::None,
        };
        self.load(ids.iter().map(row).collect(), deadline)
    }

    /// Ends the engine: no new work, what is under way gets the shutdown deadline, then every task
    /// has ended. Idempotent; in a forked child it does nothing.
    pub fn close(&self) {
        if self.check_process().is_err() || self.life.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let until = self.clock.now().after(self.deadlines.shutdown);
        let left = || until.since(self.clock.now());
        // What comes after the last flush is published alone, so first the media have what is on
        // its way to them.
        self.await_placed(self.clock.now().after(left() / 2));
        self.tiers.flush(Flush::Last);
        // First the tasks, then the pools: a task is many jobs, and a pool that ends takes no next
        // one.
        self.life.open_tasks.wait(&*self.clock, until);
        self.asks.shutdown(Duration::ZERO);
        self.device.copies.shutdown(left());
        self.tiers.shutdown(left());
        self.await_pump();
        self.end_loads();
        self.end_side_loads();
        self.drop_incomplete(MonotonicTime::NEVER);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // A forked child has none of the threads, and their locks as they were: it must not
            // even drop them.
            Box::leak(Box::new(Arc::clone(&self.0)));
        }
        self.close();
    }
}

impl Core {
    /// Remembers what the ids of a coming dump do not say.
    pub fn describe(&self, hints: impl IntoIterator<Item = (BlockId, Hint)>) -> Result<()> {
        self.usable()?;
        let mut known = self.dumps.hints.lock();
        for (id, hint) in hints {
            known.insert(id, hint);
        }
        Ok(())
    }

    /// These blocks, with their ordinals, were used by a request; with each its side shards,
    /// wherever they lie.
    pub fn touch(&self, ids: &[(BlockId, u32)]) -> Result<()> {
        self.usable()?;
        let deadline = self.clock.now().after(self.deadlines.dump);
        self.tiers.touch(&self.with_sides(ids), deadline);
        Ok(())
    }

    /// The same for what this process alone can touch: its memory, and what it knows of the
    /// segments that it merges.
    pub fn touch_own(&self, ids: &[(BlockId, u32)]) -> Result<()> {
        self.usable()?;
        let deadline = self.clock.now().after(self.deadlines.dump);
        self.tiers.touch_own(&self.with_sides(ids), deadline);
        Ok(())
    }

    /// Whether [`Core::touch_own`] does anything: whether this process is to be told what another
    /// one's touch does not reach. May change until the store was ready once.
    pub fn wants_touch_own(&self) -> bool {
        self.tiers.wants_touch_own()
    }

    /// These blocks will be asked for: brings them into the upper tiers of a pipeline, when nothing
    /// more urgent is to be done. The answer counts those taken on; without an upper tier that is
    /// none, nor in a store for lookups only, which keeps nothing.
    pub fn prefetch(&self, ids: &[BlockId], priority: Priority) -> Result<usize> {
        self.usable()?;
        if ids.len() > limits::MAX_IDS_PER_CALL {
            return Err(Error::invalid("too many ids in one call")
                .with("ids", ids.len())
                .with("most", limits::MAX_IDS_PER_CALL));
        }
        if self.looks_up_only() || !self.tiers.is_ready() {
            return Ok(0);
        }
        Ok(self.tiers.prefetch(ids, priority))
    }

    /// These blocks need not be prefetched any more; counts those that were still waiting.
    pub fn cancel_prefetch(&self, ids: &[BlockId]) -> Result<usize> {
        self.usable()?;
        Ok(self.tiers.cancel_prefetch(ids))
    }

    /// Publishes soon what was dumped and waits for more to be published with it (a segment). Never
    /// waits.
    pub fn flush(&self) -> Result<()> {
        self.usable()?;
        self.dumps
            .flushed
            .fetch_max(self.clock.now().0 + 1, Ordering::AcqRel);
        self.tiers.flush(Flush::Now);
        Ok(())
    }

    /// What became readable for this process before others can see it, and what no longer is, since
    /// the last call.
    pub fn locally_visible(&self) -> Result<LocallyVisible> {
        self.usable()?;
        Ok(self.tiers.locally_visible())
    }

    /// Another process of the same engine refused these records, or could not read them: they are
    /// no hits here until the next dump has replaced them, unless they are of a newer version.
    pub fn mark_bad(&self, ids: &[BlockId]) -> Result<()> {
        self.usable()?;
        ids.iter().for_each(|&id| self.refused.mark_bad(id));
        Ok(())
    }

    /// Another process of the same engine replaces these records: what was refused of them here is
    /// forgotten. Nothing is believed by this: a record that is still bad is refused again by the
    /// next load.
    pub fn clear_bad(&self, ids: &[BlockId]) -> Result<()> {
        self.usable()?;
        self.tiers.clear_bad(ids);
        for &id in ids {
            self.refused.clear_bad(id);
        }
        Ok(())
    }

    /// How many more blocks a dump could take now.
    pub fn free_dump_slots(&self) -> usize {
        self.drop_incomplete(self.clock.now());
        self.device
            .slots
            .available()
            .saturating_sub(self.device.reserved_slots)
    }

    /// The device whose memory it loads into and dumps from; it makes the events of rows and tasks.
    pub fn device(&self) -> &dyn Device {
        self.device.streams.device()
    }

    /// The engine's clock, for waiting on its tasks.
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Number that tells this store from all others: in the header of what it writes, and in the
    /// field `store` of what it logs.
    pub fn writer(&self) -> u64 {
        self.records.writer
    }

    /// The sizes the engine was opened with.
    pub fn geometry(&self) -> &Geometry {
        &self.records.geometry
    }

    /// Bytes of one record on the medium.
    pub fn record_len(&self) -> usize {
        self.records.layout.record_len()
    }

    /// Fails with `Forked` in a child process: nothing else of the store may be called there.
    pub fn check_process(&self) -> Result<()> {
        if self.life.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this store was opened before a fork; open another in the child",
        ))
    }

    fn usable(&self) -> Result<()> {
        self.check_process()?;
        if self.life.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed"));
        }
        Ok(())
    }

    fn check_count(&self, rows: usize) -> Result<()> {
        self.usable()?;
        if rows > limits::MAX_IDS_PER_CALL {
            return Err(Error::invalid("too many rows in one call")
                .with("rows", rows)
                .with("most", limits::MAX_IDS_PER_CALL));
        }
        if self.looks_up_only() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this store was opened for lookups only (device_id -1)",
            ));
        }
        Ok(())
    }

    /// Whether these rows can be loaded or dumped; `in_slots`: whether they may be wanted in their
    /// slots alone.
    fn check_rows(&self, rows: &[Row], in_slots: bool) -> Result<()> {
        self.check_count(rows.len())?;
        let (shards, pieces) = (
            self.records.geometry.shards(),
            self.records.geometry.tensors_per_shard(),
        );
        for (number, row) in rows.iter().enumerate() {
            if row.shard >= shards {
                return Err(Error::invalid("shard index out of range")
                    .with("row", number)
                    .with("shard", row.shard)
                    .with("shards", shards));
            }
            let given = match &row.pieces {
                Pieces::Listed(spans) => spans.len(),
                Pieces::Block(layout, _) => layout.pieces() / shards as usize,
                Pieces::Slot if in_slots || row.sides.alone().is_some() => pieces,
                Pieces::Slot => 0,
            };
            if given != pieces {
                return Err(Error::invalid("a row must name every tensor of its shard")
                    .with("row", number)
                    .with("given", given)
                    .with("expected", pieces));
            }
            self.check_sides(number, row)?;
            match &row.pieces {
                Pieces::Block(layout, block) if *block >= layout.blocks() => {
                    return Err(Error::invalid("there is no device block of that number")
                        .with("row", number)
                        .with("block", block)
                        .with("blocks", layout.blocks()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether it was opened for lookups only, with one slot for what a lookup may need.
    fn looks_up_only(&self) -> bool {
        self.device.slots.capacity() < LEAST_SLOTS
    }

    fn shard_len(&self) -> u64 {
        self.records.geometry.layer_len() * u64::from(self.records.geometry.layers_per_shard())
    }
}
