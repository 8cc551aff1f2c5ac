//! The tiers below an engine: memory above a file above a remote share, or any part of that; most
//! often one. A *level* is a tier, or several side by side over which records are spread
//! ([`level`]).
//!
//! *Lookup*: present in any tier; the upper one is asked first, the lower ones for what is missing.
//! *Read*: tier by tier, as the engine asks for the next one when a copy was absent, damaged or
//! late; a record that came from below and was verified is promoted. *Write*: by the policy of each
//! tier ([`WritePolicy`]). Every tier has threads and a breaker of its own, so one that is sick
//! costs its bound once and the others work on. No one ever waits for a copy that is made between
//! tiers.

mod cipher;
mod codec;
mod drain;
mod level;
mod locally_visible;
mod lookup;
mod prefetch;
mod read;
mod tenant_usage;
mod tenants;
mod tier;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tracing::{info, warn};
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::{ArenaOptions, Device, SlotPool};
use ucm_infra::{Clock, Completion, LANE_DUMP, Lane, MonotonicTime, Notify, WorkerPool};
use ucm_io::IoPool;
use ucm_record::{Expect, Keys, verify_stored};
use ucm_tier::backend::{Backend, Flush, LocallyVisible, MediumStats, Victim};

use crate::breaker::{BreakerConfig, Change};
use crate::records::StoredRecords;
use level::{Level, names};
use locally_visible::Merged;
use tenants::Tenants;
use tier::{Admission, Tier, add};

pub use codec::Compression;
pub use level::{LevelConfig, MAX_LEVELS, MAX_TIERS};
pub(crate) use lookup::{LEAST_WINDOW, WINDOW};
pub use prefetch::{MAX_WAITING as MAX_PREFETCH, Priority};
pub(crate) use read::TierRead;
pub(crate) use tenants::TenantQuota;
pub(crate) use write::TierWrite;

/// Lane of records that are moved between tiers.
const LANE_MOVE: usize = 0;
/// Lane of looks at tiers that are not usable.
const LANE_PROBE: usize = 1;
/// How long after its time the first look has to say so.
const GRACE: Duration = Duration::from_millis(100);
/// Times a thread that hangs is replaced.
const REPLACEMENTS: usize = 2;

/// When a dumped record is written to a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePolicy {
    /// At once. A dump is published when the lowest such tier that outlives the process has it.
    Through,
    /// When the tier above gives it up, and at shutdown as far as the time for that goes.
    Back,
    /// Never: the tier is only read.
    Never,
}

impl WritePolicy {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Through, Self::Back, Self::Never];

    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Through => "through",
            Self::Back => "back",
            Self::Never => "never",
        }
    }
}

/// One tier.
pub struct TierConfig {
    /// The medium.
    pub backend: Arc<dyn Backend>,
    /// The threads on which it is asked.
    pub pool: Arc<IoPool>,
    /// When it is written to.
    pub policy: WritePolicy,
    /// True if its records are compressed; only for a medium that takes such.
    pub compressed: bool,
    /// Workers lost in operations stuck past their deadline that switch it off at once.
    pub max_stuck: usize,
}

/// Who asks the tiers for something: what fails of one request is one failure of a tier, and all of
/// one request is let through to a tier that may be back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// Unlike those of all others.
    pub(crate) number: u64,
    /// When no one waits for the answer any more.
    pub(crate) deadline: MonotonicTime,
}

/// The tier that has a record whole, counted from the top, or why it is no hit.
pub type Place = std::result::Result<u8, MissReason>;

/// What one tier did and holds; counters since the start, sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// Its name, unlike those of the others.
    pub name: String,
    /// Its level, counted from the top; tiers side by side have the same.
    pub level: usize,
    /// Ids found here by lookups.
    pub hits: u64,
    /// Blocks read here for loads.
    pub blocks_read: u64,
    /// Bytes read here for loads, of side shards too.
    pub bytes_read: u64,
    /// Reads of side shards here: a header, and a side shard where the record has it.
    pub sides_read: u64,
    /// Blocks written here, promoted ones included.
    pub blocks_written: u64,
    /// Bytes written here.
    pub bytes_written: u64,
    /// Operations that failed for the medium's sake: errors and deadlines that passed.
    pub failures: u64,
    /// Copies read here that were refused.
    pub copies_refused: u64,
    /// Blocks brought here from below after a load or by a prefetch.
    pub promotions: u64,
    /// Blocks brought here because the tier above gave them up.
    pub demotions: u64,
    /// Copies for this tier that were not made: it was busy or not well, or the copy was no longer
    /// sound.
    pub copies_dropped: u64,
    /// Blocks removed here because their tenant had more than its quota.
    pub quota_removed: u64,
    /// Whether it is memory, which each process has of its own.
    pub memory: bool,
    /// Bytes used.
    pub used_bytes: u64,
    /// The limit.
    pub capacity_bytes: u64,
    /// Whether it is used now.
    pub healthy: bool,
    /// Whether it takes what is written now.
    pub writable: bool,
    /// Of one with a codec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
}

/// What the tiers need to know of the engine above them.
pub(crate) struct TiersConfig {
    /// Top first; at most [`MAX_LEVELS`].
    pub(crate) levels: Vec<LevelConfig>,
    /// What the records are; copies are verified by it before they are kept.
    pub(crate) records: Arc<StoredRecords>,
    /// What records are encrypted with in every tier that is not memory, if anything.
    pub(crate) keys: Option<Arc<Keys>>,
    /// What each tenant may have in a level, if that is bounded.
    pub(crate) tenant_quota: Option<TenantQuota>,
    /// When the breaker of a tier opens; `max_stuck` is that of each tier.
    pub(crate) breaker: BreakerConfig,
    /// How long a look at a tier may take.
    pub(crate) probe: Duration,
    /// How long a copy between tiers may take.
    pub(crate) copy: Duration,
    /// Records that can be on their way between tiers at once; each takes the memory of one.
    pub(crate) spare_slots: usize,
    /// What the log says of the engine when the first tier is usable.
    pub(crate) staging: String,
}

/// The tiers of one engine.
pub(crate) struct Tiers {
    tiers: Vec<Tier>,
    levels: Vec<Level>,
    clock: Arc<dyn Clock>,
    records: Arc<StoredRecords>,
    /// Where headers are read that are compared with a dump; none where nothing is encrypted.
    headers: Option<Arc<SlotPool>>,
    moves: Moves,
    prefetch: Mutex<prefetch::Queue>,
    locally_visible: Merged,
    tenants: Option<Tenants>,
    start: Start,
    tally: Tally,
}

/// What records move between tiers by.
struct Moves {
    /// A record on its way has one of these.
    spare: Arc<SlotPool>,
    /// Rung when one came back.
    freed: Notify,
    pool: Arc<WorkerPool>,
    /// How long one may take.
    deadline: Duration,
}

/// The first look at the tiers.
struct Start {
    /// How long a look may take.
    probe: Duration,
    /// What the log says of the engine when the first tier is usable.
    staging: String,
    /// Somebody waits for all tiers to be looked at for the first time.
    opening: AtomicBool,
    /// The log was told what is used; tiers that become usable later are told of apart.
    announced: AtomicBool,
}

/// What is counted of all of them together.
#[derive(Default)]
struct Tally {
    /// Reads of loads under way, and those of them that wait for a look.
    loading: AtomicUsize,
    awaiting_look: AtomicUsize,
    /// Requests so far.
    requests: AtomicU64,
    /// Times a breaker opened.
    opened: AtomicU64,
}

impl Tiers {
    /// Puts tiers together; nothing is touched before [`Tiers::open`]. `Config` where they make no
    /// sense together.
    pub(crate) fn new(
        config: TiersConfig,
        device: &dyn Device,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>> {
        let levels = Level::of(&config.levels)?;
        let slot_len = config.records.layout.record_len();
        let headers = match config.keys {
            Some(_) => Some(header_slots(&config, device)?),
            None => None,
        };
        let count = config.levels.iter().map(|level| level.tiers.len()).sum();
        let spare = if count == 1 {
            1
        } else {
            config.spare_slots.max(1)
        };
        let spare_len = spare * slot_len.next_multiple_of(4096);
        let arena = device.make_arena(spare_len, ArenaOptions::default())?;
        let pool = WorkerPool::builder("ucm-tier")
            .on_demand()
            .size(count + 1)
            .lanes(&[
                Lane {
                    name: "move",
                    capacity: spare,
                    max_running: 1,
                },
                Lane {
                    name: "probe",
                    capacity: count,
                    max_running: count,
                },
            ])
            .max_replacements(REPLACEMENTS)
            .clock(Arc::clone(&clock))
            .build()?;
        let tenants = config.tenant_quota.map(|quota| {
            let layout = &config.records.layout;
            Tenants::new(quota, levels.len(), layout, device)
        });
        let mut names = names(config.levels.iter().flat_map(|level| &level.tiers)).into_iter();
        let made = config
            .levels
            .into_iter()
            .zip(0..)
            .flat_map(|(level, number)| {
                let tiers = level.tiers.into_iter();
                tiers.map(move |tier| (tier, number))
            });
        let made = made.map(|(tier, level)| {
            let name = names.next().unwrap_or_default();
            let keys = config.keys.clone();
            Tier::new(
                tier,
                name,
                level,
                config.breaker,
                &config.records.layout,
                keys,
            )
        });
        let tiers = made.collect::<Result<Vec<_>>>()?;
        let tiers = Arc::new(Self {
            tiers,
            levels,
            clock,
            records: config.records,
            headers,
            moves: Moves {
                spare: SlotPool::new(arena, slot_len)?,
                freed: Notify::new(),
                pool,
                deadline: config.copy,
            },
            prefetch: Mutex::default(),
            locally_visible: Merged::default(),
            tenants: tenants.transpose()?,
            start: Start {
                probe: config.probe,
                staging: config.staging,
                opening: AtomicBool::new(true),
                announced: AtomicBool::new(false),
            },
            tally: Tally::default(),
        });
        let weak = Arc::downgrade(&tiers);
        tiers.moves.spare.on_release(move || {
            if let Some(tiers) = weak.upgrade() {
                tiers.moves.freed.notify();
                tiers.pump_prefetch();
            }
        });
        for (above, level) in tiers.levels.iter().zip(1..).take(tiers.levels.len() - 1) {
            if tiers.levels[level].policy != WritePolicy::Back {
                continue;
            }
            let weak = Arc::downgrade(&tiers);
            let hook = Box::new(move |victim: Box<dyn Victim>| {
                if let Some(tiers) = weak.upgrade() {
                    tiers.demote(level, victim);
                }
            });
            let above = tiers.tiers[above.members().start].backend.features().memory;
            if !above.is_some_and(|memory| memory.on_evicted(hook)) {
                let wrong = "a tier is written back to from a memory directly above it";
                let below = &tiers.tiers[tiers.levels[level].members().start];
                return Err(Error::new(ErrorKind::Config, wrong).with("tier", &below.name));
            }
        }
        Ok(tiers)
    }

    /// A new request that is waited for until `deadline`.
    pub(crate) fn request(&self, deadline: MonotonicTime) -> Request {
        let number = self.tally.requests.fetch_add(1, Ordering::Relaxed);
        Request { number, deadline }
    }

    /// Looks at every tier at once, and waits for that until `deadline`; one that is usable is
    /// enough.
    pub(crate) fn open(self: &Arc<Self>, deadline: MonotonicTime) {
        if let [_] = &self.tiers[..] {
            // it keeps its time by itself, and takes no thread
            self.look(0, deadline, MonotonicTime::NEVER);
        } else {
            let looks = (0..self.tiers.len()).map(|number| self.look_at(number, deadline));
            for look in looks.collect::<Vec<_>>() {
                look.wait(&*self.clock, Some(deadline.after(GRACE)));
            }
        }
        self.start.opening.store(false, Ordering::Release);
        self.announce();
        self.begin_tenants();
    }

    /// Looks at a tier in the background, unless somebody does.
    fn look_later(self: &Arc<Self>, number: usize) {
        if !self.tiers[number].state.probing.load(Ordering::Acquire) {
            self.look_at(number, self.clock.now().after(self.start.probe));
        }
    }

    /// Looks at a tier on a thread, which has until `deadline` and is written off some time after
    /// that.
    fn look_at(self: &Arc<Self>, number: usize, deadline: MonotonicTime) -> Arc<Completion<()>> {
        let looked = Completion::new();
        if self.tiers[number]
            .state
            .probing
            .swap(true, Ordering::AcqRel)
        {
            looked.complete(());
            return looked;
        }
        let (tiers, ended, answer) = (Arc::clone(self), Arc::clone(self), Arc::clone(&looked));
        let late = deadline.after(self.start.probe.max(GRACE));
        let look = move || tiers.look(number, deadline, late);
        let done = move |_: Result<()>| {
            ended.tiers[number]
                .state
                .probing
                .store(false, Ordering::Release);
            answer.complete(());
        };
        if let Err(refused) = self.moves.pool.offer(LANE_PROBE, late, look, done) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
        looked
    }

    /// Looks at a tier, and notes whether it is usable; not what comes when the look was written
    /// off.
    fn look(&self, number: usize, deadline: MonotonicTime, late: MonotonicTime) {
        let tier = &self.tiers[number];
        let opened = tier.backend.open(deadline).map(|words| tier.told(words));
        let now = self.clock.now();
        match opened {
            Ok(words) => {
                *tier.state.words.lock() = words.clone();
                let first = !tier.state.ready.swap(true, Ordering::AcqRel);
                // One whose time off is over is let through by this; one that is held off longer
                // stays off.
                tier.breaker.allows(self.request(deadline).number, now);
                self.changed(number, tier.answered(), None);
                if first && self.start.announced.load(Ordering::Acquire) {
                    let name = &tier.name;
                    info!(
                        store = self.records.writer,
                        tier = name,
                        "open: {name}: {words}"
                    );
                } else if !self.start.opening.load(Ordering::Acquire) {
                    self.announce();
                }
            }
            Err(error) if now < late => self.changed(number, tier.breaker.trip(now), Some(&error)),
            Err(_) => {}
        }
    }

    /// Says in the log what is used and why, once, as soon as a tier is usable.
    fn announce(&self) {
        if !self.is_ready() || self.start.announced.swap(true, Ordering::AcqRel) {
            return;
        }
        let words_of = |number: usize| {
            let tier = &self.tiers[number];
            let (name, policy) = (&tier.name, tier.policy.name());
            match tier.state.ready.load(Ordering::Acquire) {
                true if self.tiers.len() == 1 => tier.state.words.lock().clone(),
                true => format!("{name} (written {policy}): {}", tier.state.words.lock()),
                false => format!("{name} (written {policy}): not usable yet"),
            }
        };
        let levels = self.levels.iter().map(|level| {
            let beside = level.members().map(words_of).collect::<Vec<_>>();
            beside.join("; beside it ")
        });
        let words = levels.collect::<Vec<_>>().join("; below it ");
        info!(
            store = self.records.writer,
            "open: {words}; {}", self.start.staging
        );
    }

    /// Whether a tier was usable once.
    pub(crate) fn is_ready(&self) -> bool {
        self.tiers
            .iter()
            .any(|tier| tier.state.ready.load(Ordering::Acquire))
    }

    /// Whether what a dump writes costs a processor and waits for no device as long as all is well.
    pub(crate) fn writes_cached(&self) -> bool {
        let through = |tier: &&Tier| tier.policy == WritePolicy::Through;
        let cached = |tier: &Tier| !tier.recodes() && tier.backend.features().writes_cached;
        self.tiers.iter().filter(through).all(cached)
    }

    /// Whether there is a tier that everything passes to.
    pub(crate) fn is_well(&self) -> bool {
        self.tiers.iter().any(Tier::is_well)
    }

    /// Whether everything passes to every tier.
    pub(crate) fn is_all_well(&self) -> bool {
        self.tiers.iter().all(Tier::is_well)
    }

    /// Whether a new request may be answered by a tier. One that was never usable is looked at
    /// again, in the background.
    pub(crate) fn may_answer(self: &Arc<Self>, now: MonotonicTime) -> bool {
        let mut any = false;
        for (number, tier) in self.tiers.iter().enumerate() {
            self.changed(number, tier.trip_if_overrun(now), None);
            any |= tier.may(u64::MAX, now);
            if !tier.state.ready.load(Ordering::Acquire) {
                self.admits(number, u64::MAX, now);
            }
        }
        any
    }

    /// Whether an operation may go to a tier now; what it brings must be told by [`Tiers::note`].
    fn admits(self: &Arc<Self>, number: usize, request: u64, now: MonotonicTime) -> bool {
        let (admission, change) = self.tiers[number].admit(request, now);
        self.changed(number, change, None);
        if admission == Admission::Look {
            self.look_later(number);
        }
        admission == Admission::Yes
    }

    /// The same of a write; what it brings must be told by [`Tiers::note_write`] too.
    fn admits_write(self: &Arc<Self>, number: usize, request: u64, now: MonotonicTime) -> bool {
        let writes = &self.tiers[number].state.writes.breaker;
        writes.would_allow(request, now)
            && self.admits(number, request, now)
            && writes.allows(request, now)
    }

    /// Whether a dump may be stored now: in a tier that outlives this process, or in memory alone
    /// while those tiers are off. One that is read and refuses writes would refuse each block after
    /// memory has copied it, so no dump begins then.
    pub(crate) fn may_take_dumps(&self, now: MonotonicTime) -> bool {
        let (mut memory_takes, mut refuses) = (false, false);
        for tier in &self.tiers {
            if tier.policy != WritePolicy::Through {
                continue;
            }
            let takes = tier.may_write(u64::MAX, now);
            if takes && !tier.is_memory() {
                return true;
            }
            memory_takes |= takes;
            refuses |= !tier.is_memory() && tier.is_well();
        }
        memory_takes && !refuses
    }

    /// Notes how a write of a request ended, for what is written after it; `None` where that says
    /// nothing of writes.
    fn note_write(&self, number: usize, request: Request, ended: Option<Result<(), &Error>>) {
        let (tier, now) = (&self.tiers[number], self.clock.now());
        let name = &tier.name;
        match ended {
            Some(Ok(())) => {
                if tier.wrote().is_some() {
                    let text = "takes blocks again";
                    info!(store = self.records.writer, tier = name, "{name} {text}");
                }
            }
            Some(Err(error)) => {
                if tier.write_failed(error, request.number, now) {
                    let kind = error.kind().name();
                    warn!(
                        store = self.records.writer,
                        tier = name,
                        error = kind,
                        "{name} takes no blocks for now, what it has is read; it is tried again \
                         now and then: {error}"
                    );
                }
            }
            None => tier.state.writes.breaker.undecided(now),
        }
    }

    /// Notes that a request was answered, where that may say nothing of the medium.
    fn note_answer(&self, number: usize, request: Request) {
        let tier = &self.tiers[number];
        if tier.knows_by_itself() {
            tier.breaker.undecided(self.clock.now());
        } else {
            self.note(number, request, None);
        }
    }

    /// Notes how an operation of a request ended.
    fn note(&self, number: usize, request: Request, error: Option<&Error>) {
        let tier = &self.tiers[number];
        match error {
            None => self.changed(number, tier.answered(), None),
            Some(error) => {
                let (of_medium, change) = tier.failed(error, request.number, self.clock.now());
                add(&tier.counts.failures, u64::from(of_medium));
                self.changed(number, change, Some(error));
            }
        }
    }

    fn changed(&self, number: usize, change: Option<Change>, error: Option<&Error>) {
        let name = &self.tiers[number].name;
        let (tier, rest) = match self.tiers.len() {
            1 => ("", "every lookup misses"),
            _ => ("tier ", "the others are used without it"),
        };
        match change {
            Some(Change::Opened) => {
                add(&self.tally.opened, 1);
                let why = error.map_or_else(
                    || "too many operations never returned".to_owned(),
                    ToString::to_string,
                );
                let kind = error.map_or("timeout", |error| error.kind().name());
                let text = match self.tiers[number].state.ready.load(Ordering::Acquire) {
                    true => format!("is switched off for now, {rest}: {why}"),
                    false => format!(
                        "is switched off until it can be used, {rest}, and nothing is stored \
                         there: {why}; mend that, or \
                         configure another place. It is tried again by itself"
                    ),
                };
                warn!(
                    store = self.records.writer,
                    tier = name,
                    error = kind,
                    "{tier}{name} {text}"
                );
            }
            Some(Change::Recovered) => {
                info!(
                    store = self.records.writer,
                    tier = name,
                    "{tier}{name} answers again"
                );
            }
            None => {}
        }
    }

    /// Verifies a record that was read, with KV or without; its ordinal if it is sound and in the
    /// form in which it is used.
    fn verify(&self, id: BlockId, bytes: &[u8], stored_len: u64) -> Result<u32, MissReason> {
        let header = verify_stored(bytes, stored_len, &self.expect(id))?;
        if header.key.is_some() {
            return Err(MissReason::WrongKey);
        }
        let used = header.codec.is_as_is().then_some(header.meta.ordinal);
        used.ok_or(MissReason::NewerVersion)
    }

    /// What a record is verified by.
    fn expect(&self, id: BlockId) -> Expect<'_> {
        Expect {
            id,
            namespace: *self.records.identity.digest(),
            part: self.records.part,
            layout: &self.records.layout,
        }
    }

    /// The copy in this tier was refused for this reason: it is no hit any more. One of a newer
    /// version is never replaced.
    pub(crate) fn discard(&self, number: usize, id: BlockId, reason: MissReason) {
        let tier = &self.tiers[number];
        tier.refuse(id, reason);
        add(&tier.counts.copies_refused, 1);
        if reason.is_damage() {
            let sick = Error::new(ErrorKind::Corrupt, "too many damaged records in a minute");
            let change = tier.breaker.damaged(self.clock.now());
            self.changed(number, change, Some(&sick));
        }
    }

    /// Another process replaces these records: copies that were refused in some tier are read
    /// again.
    pub(crate) fn clear_bad(&self, ids: &[BlockId]) {
        for tier in &self.tiers {
            ids.iter().for_each(|&id| tier.clear_bad(id));
        }
    }

    /// These records were used by a request.
    pub(crate) fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        for tier in self.tiers.iter().filter(|tier| tier.is_well()) {
            tier.backend.touch(ids, deadline);
        }
    }

    /// The same for what this process alone can touch.
    pub(crate) fn touch_own(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        for tier in self.tiers.iter().filter(|tier| tier.is_well()) {
            if tier.backend.features().own_touches {
                tier.backend.touch(ids, deadline);
            }
        }
    }

    /// Whether [`Tiers::touch_own`] does anything.
    pub(crate) fn wants_touch_own(&self) -> bool {
        self.tiers
            .iter()
            .any(|tier| tier.backend.features().own_touches)
    }

    /// What can be read here before others can see it, and what no longer is, since the last call.
    pub(crate) fn locally_visible(&self) -> LocallyVisible {
        let tiers = self.tiers.iter();
        self.locally_visible
            .merge(tiers.map(|tier| tier.backend.features().locally_visible()))
    }

    /// Publishes what waits for others to be published with it.
    pub(crate) fn flush(&self, how: Flush) {
        self.tiers.iter().for_each(|tier| tier.backend.flush(how));
    }

    /// What the level holds and did whose space is that of the whole: the lowest that outlives this
    /// process.
    pub(crate) fn base_stats(&self) -> MediumStats {
        let lasting = self.levels.iter().rev().find(|level| !level.memory);
        let mut members = lasting.unwrap_or(&self.levels[0]).members();
        let stats = |number: usize| self.tiers[number].backend.stats();
        let first = members.next().map(stats).unwrap_or_default();
        members.map(stats).fold(first, together)
    }

    /// Times a breaker opened.
    pub(crate) fn breaker_opened(&self) -> u64 {
        self.tally.opened.load(Ordering::Relaxed)
    }

    /// Operations stuck past their deadline, each of which may hold a slot.
    pub(crate) fn stuck(&self) -> usize {
        self.tiers
            .iter()
            .map(|tier| tier.pool.stuck())
            .sum::<usize>()
            + self.moves.pool.stuck()
    }

    /// Threads of the engine among them, which hang in writes of their own.
    pub(crate) fn lent_stuck(&self) -> usize {
        self.tiers.iter().map(|tier| tier.pool.lent_stuck()).sum()
    }

    /// What each tier did and holds, top first.
    pub(crate) fn stats(&self) -> Vec<TierStats> {
        self.tiers.iter().map(Tier::stats).collect()
    }

    /// Ends: finishes or fails what is under way within `drain`.
    pub(crate) fn shutdown(self: &Arc<Self>, drain: Duration) {
        let until = self.clock.now().after(drain);
        let left = || until.since(self.clock.now());
        self.end_prefetch();
        self.end_tenants(self.clock.now().after(drain / 4));
        self.write_back(self.clock.now().after(drain / 2));
        self.moves.pool.shutdown(left() / 4);
        for (number, tier) in self.tiers.iter().enumerate() {
            let share = left() / u32::try_from(self.tiers.len() - number).unwrap_or(1);
            tier.backend.close(share);
        }
    }
}

/// A slot for the header of a record for every thread that writes.
fn header_slots(config: &TiersConfig, device: &dyn Device) -> Result<Arc<SlotPool>> {
    let tiers = config.levels.iter().flat_map(|level| &level.tiers);
    let threads: usize = tiers.map(|tier| tier.pool.width(LANE_DUMP)).sum();
    let (count, len) = (threads.max(1), config.records.layout.header_len());
    let arena = device.make_arena(count * len, ArenaOptions::default())?;
    SlotPool::with_slots(arena, len, count)
}

/// What two media side by side hold and did.
fn together(mut one: MediumStats, other: MediumStats) -> MediumStats {
    let (sum, of) = (&mut one.usage, other.usage);
    sum.used += of.used;
    sum.capacity += of.capacity;
    sum.records += of.records;
    sum.counted &= of.counted;
    sum.collector |= of.collector;
    sum.paused &= of.paused;
    one.records_removed += other.records_removed;
    one.bytes_removed += other.bytes_removed;
    one.blocks_touched += other.blocks_touched;
    for (name, count) in other.more {
        match one.more.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += count,
            None => one.more.push((name, count)),
        }
    }
    one
}
