//! A quota for each tenant: what one tenant has in a level below memory is kept within it, by
//! removing the oldest of its own blocks.
//!
//! What this engine writes is counted as it is published. What others write, and what was there
//! before, is found by a scan that lists each tier now and then and reads the headers that it does
//! not know. Both go into the [`TenantUsage`] of the level. One thread scans and removes, on the
//! threads that tiers have for space, behind everything else.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, PAGE, Result, round_up};
use ucm_device::{ArenaOptions, Device, SlotPool};
use ucm_infra::{Completion, LANE_SPACE, MonotonicTime, Notify, begin_thread};
use ucm_io::IoJob;
use ucm_quota::Capacity;
use ucm_record::{RecordHeader, RecordLayout};
use ucm_tier::backend::{BlockRead, Done, Listed, Outcome, Presence, Written};

use super::tenant_usage::{Age, MOST_BLOCKS, Owner, Stored, TenantUsage};
use super::tier::{Tier, add};
use super::{Tiers, WritePolicy};

/// Time between two scans at least, and how many times as long as a scan took.
const SCAN_AGAIN: Duration = Duration::from_secs(60);
const SCAN_SHARE: u32 = 10;
/// After what did not succeed.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// How long a tier may take to list what it has.
const LIST: Duration = Duration::from_secs(600);
/// Headers read, and blocks removed, by one operation.
const TOGETHER: usize = 64;
/// Time for so many headers at least; with it at most half of a thread reads, and about a thousand
/// headers in a second.
const PACE: Duration = Duration::from_millis(60);

/// What a store is told of tenants.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TenantQuota {
    /// What each may have in a level; a share is one of what the level may hold.
    pub(crate) limit: Capacity,
    /// Nothing is removed where others would miss it.
    pub(crate) lookup_only: bool,
}

/// See the module.
pub(super) struct Tenants {
    quota: TenantQuota,
    levels: Vec<LevelQuota>,
    /// Where headers are read to.
    headers: Arc<SlotPool>,
    /// Rung when a tenant has too much, and at the end.
    wake: Notify,
    closing: AtomicBool,
    /// Until then nothing is removed: something could not be.
    try_again: Mutex<MonotonicTime>,
    /// Completes when the thread has ended.
    thread: Mutex<Option<Arc<Completion<()>>>>,
    /// The log was told that something fails, that there are too many blocks, that a share is one
    /// of nothing.
    said_failed: AtomicBool,
    said_full: AtomicBool,
    said_limitless: AtomicBool,
}

/// What one turn could not remove, and leaves to the next.
#[derive(Default)]
struct Failed {
    tiers: HashSet<u8>,
    blocks: HashSet<Stored>,
}

/// What tenants have in one level, and may have.
struct LevelQuota {
    usage: Mutex<TenantUsage>,
    /// The quota in bytes; none while what it is a share of is not known.
    quota: AtomicU64,
}

impl Tenants {
    /// Keeps this quota in so many levels.
    pub(super) fn new(
        quota: TenantQuota,
        levels: usize,
        layout: &RecordLayout,
        device: &dyn Device,
    ) -> Result<Self> {
        // A page more than those of this part: others may have some more layers.
        let longest = round_up(layout.header_len() as u64, PAGE) + PAGE;
        let len = usize::try_from(longest)
            .map_or(RecordHeader::LONGEST, |len| len.min(RecordHeader::LONGEST));
        let arena = device.make_arena(len * TOGETHER, ArenaOptions::default())?;
        let bytes = match quota.limit {
            Capacity::Bytes(bytes) => bytes.get(),
            Capacity::Percent(_) => u64::MAX,
        };
        let level_quota = |_| LevelQuota {
            usage: Mutex::new(TenantUsage::new(MOST_BLOCKS)),
            quota: AtomicU64::new(bytes),
        };
        Ok(Self {
            quota,
            levels: (0..levels).map(level_quota).collect(),
            headers: SlotPool::new(arena, len)?,
            wake: Notify::new(),
            closing: AtomicBool::new(false),
            try_again: Mutex::default(),
            thread: Mutex::default(),
            said_failed: AtomicBool::new(false),
            said_full: AtomicBool::new(false),
            said_limitless: AtomicBool::new(false),
        })
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// When there is something to do before the next scan: what failed is due, or what a quota is a
    /// share of was not known.
    fn next_look(&self, now: MonotonicTime) -> MonotonicTime {
        let unknown =
            |level_quota: &LevelQuota| level_quota.quota.load(Ordering::Acquire) == u64::MAX;
        let try_again = *self.try_again.lock();
        match now < try_again {
            true => try_again,
            false if self.levels.iter().any(unknown) => now.after(TRY_AGAIN),
            false => MonotonicTime::NEVER,
        }
    }

    /// Whether blocks of this tier are counted: not those of memory, and not where nothing is
    /// written or removed.
    fn counts(&self, tier: &Tier) -> bool {
        // What is removed from an index in memory is missed by this process alone.
        let may_remove = !self.quota.lookup_only || tier.knows_by_itself();
        !tier.is_memory() && tier.policy != WritePolicy::Never && may_remove
    }
}

impl Tiers {
    /// Begins to keep the quota of tenants, where there is one.
    pub(super) fn begin_tenants(self: &Arc<Self>) {
        let Some(tenants) = &self.tenants else {
            return;
        };
        let (weak, clock, wake) = (
            Arc::downgrade(self),
            Arc::clone(&self.clock),
            tenants.wake.clone(),
        );
        let ended = Completion::new();
        let end = Arc::clone(&ended);
        let body = move || {
            let mut due = MonotonicTime::default();
            loop {
                let seen = wake.seen();
                // Not held while it sleeps: the store may be dropped.
                let Some(tiers) = weak.upgrade() else { break };
                let Some(tenants) = tiers
                    .tenants
                    .as_ref()
                    .filter(|tenants| !tenants.is_closing())
                else {
                    break;
                };
                if clock.now() >= due {
                    due = tiers.scan_tenants(tenants);
                }
                tiers.keep_quotas(tenants);
                let next = due.min(tenants.next_look(clock.now()));
                drop(tiers);
                clock.sleep(&wake, seen, Some(next));
            }
            end.complete(());
        };
        match begin_thread("ucm-tenants", body) {
            Ok(_) => *tenants.thread.lock() = Some(ended),
            Err(error) => {
                warn!(
                    store = self.records.writer,
                    "no thread for tenant_quota, which is not kept: {error}"
                );
            }
        }
    }

    /// Ends it: what is under way is waited for until then.
    pub(super) fn end_tenants(&self, until: MonotonicTime) {
        let Some(tenants) = &self.tenants else {
            return;
        };
        tenants.closing.store(true, Ordering::Release);
        tenants.wake.notify();
        if let Some(ended) = tenants.thread.lock().take() {
            ended.wait(&*self.clock, Some(until));
        }
    }

    /// Has a record counted when it is published.
    pub(super) fn count_for_tenant(
        self: &Arc<Self>,
        number: usize,
        record: &[u8],
        done: Done<Written>,
    ) -> Done<Written> {
        let counts = |tenants: &Tenants| tenants.counts(&self.tiers[number]);
        if !self.tenants.as_ref().is_some_and(counts) {
            return done;
        }
        let Ok(header) = RecordHeader::decode(record) else {
            return done; // the medium will not take it either
        };
        let (tiers, len, meta) = (Arc::clone(self), record.len() as u64, header.meta);
        Box::new(move |result| {
            if matches!(result, Ok(Written::Published))
                && let Some(tenants) = &tiers.tenants
            {
                let (level_quota, owner) =
                    (&tenants.levels[tiers.tiers[number].level], Owner::of(&meta));
                let mut usage = level_quota.usage.lock();
                let known = usage.add(stored(number, meta.id), len, &owner);
                let over = usage.is_over(&owner, level_quota.quota.load(Ordering::Acquire));
                drop(usage);
                if !known {
                    tiers.say_full(tenants);
                }
                if over {
                    tenants.wake.notify();
                }
            }
            done(result);
        })
    }

    /// Finds what others have stored, and what is gone: when to do so again.
    fn scan_tenants(&self, tenants: &Tenants) -> MonotonicTime {
        let began = self.clock.now();
        let mut failed = None;
        for (level, level_quota) in self.levels.iter().zip(&tenants.levels) {
            level_quota.usage.lock().begin_scan();
            for number in level.members() {
                let tier = &self.tiers[number];
                if !tenants.counts(tier) || !tier.is_well() {
                    continue;
                }
                match self.scan_tier(tenants, level_quota, number) {
                    Ok(()) => level_quota.usage.lock().end_scan(stored_in(number)),
                    // Mooncake lists nothing, so there it is the own blocks that count.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Closed) => {}
                    Err(error) => failed = Some(error.with("tier", &tier.name)),
                }
            }
        }
        if let Some(error) = failed {
            self.say_failed(tenants, &error);
        } else {
            tenants.said_failed.store(false, Ordering::Release);
        }
        let now = self.clock.now();
        now.after(SCAN_AGAIN.max(now.since(began) * SCAN_SHARE))
    }

    /// Learns what a share of each level is, once all of its members know what they may hold: what
    /// one that is not well has counts still.
    fn find_quotas(&self, tenants: &Tenants) {
        for (level, level_quota) in self.levels.iter().zip(&tenants.levels) {
            let members = level.members().map(|number| &self.tiers[number]);
            let counted: Vec<_> = members.filter(|tier| tenants.counts(tier)).collect();
            if counted.is_empty() || !counted.iter().all(|tier| tier.is_well()) {
                continue;
            }
            let usages: Vec<_> = counted
                .iter()
                .map(|tier| tier.backend.stats().usage)
                .collect();
            let capacity: u64 = usages.iter().map(|usage| usage.capacity).sum();
            if usages.iter().all(|usage| usage.capacity > 0) {
                let quota = tenants.quota.limit.bytes(capacity);
                level_quota.quota.store(quota, Ordering::Release);
            } else if usages.iter().all(|usage| usage.counted)
                && !tenants.quota.lookup_only
                && !tenants.said_limitless.swap(true, Ordering::AcqRel)
            {
                let name = &counted[0].name;
                warn!(
                    store = self.records.writer,
                    tier = name,
                    "{name} has no limit of its own that tenant_quota could be a share of, and \
                     none is kept there: write \
                     it in bytes"
                );
            }
        }
    }

    /// Finds what is new in a tier, and sees what is known.
    fn scan_tier(&self, tenants: &Tenants, level_quota: &LevelQuota, number: usize) -> Result<()> {
        let tier = &self.tiers[number];
        let looked = Completion::new();
        let (deadline, told) = (
            self.clock.now().after(self.moves.deadline),
            Arc::clone(&looked),
        );
        let look = Box::new(move |_: Result<()>| _ = told.complete(()));
        tier.backend.features().look(deadline, look);
        looked.wait(&*self.clock, Some(deadline));
        let backend = Arc::clone(&tier.backend);
        let until = self.clock.now().after(LIST);
        let mut listed = tier
            .pool
            .call(LANE_SPACE, until, move |io| backend.list(io))?;
        for some in listed.chunks_mut(TOGETHER * TOGETHER) {
            let mut usage = level_quota.usage.lock(); // not for long: writes wait for it
            for one in some {
                if usage.see(stored(number, one.id), one.len) {
                    one.len = 0; // nothing to learn of it
                }
            }
        }
        listed.retain(|one| one.len > 0);
        for some in listed.chunks(TOGETHER) {
            let began = self.clock.now();
            if level_quota.usage.lock().is_full() {
                self.say_full(tenants);
                return Ok(()); // what is not known is not counted
            }
            let owners = self.read_owners(tenants, number, some)?;
            {
                let mut usage = level_quota.usage.lock();
                for (one, owner) in owners {
                    usage.add(stored(number, one.id), one.len, &owner);
                }
            }
            let took = self.clock.now().since(began);
            if some.len() == TOGETHER {
                self.rest(tenants, self.clock.now().after(took.max(PACE)))?;
            }
        }
        Ok(())
    }

    /// Lets others have the tier for a while; what was written meanwhile is kept in bounds.
    fn rest(&self, tenants: &Tenants, until: MonotonicTime) -> Result<()> {
        loop {
            let seen = tenants.wake.seen();
            if tenants.is_closing() {
                return Err(Error::new(ErrorKind::Closed, "the store is closing"));
            }
            self.keep_quotas(tenants);
            if self.clock.now() >= until {
                return Ok(());
            }
            self.clock.sleep(&tenants.wake, seen, Some(until));
        }
    }

    /// Whose these blocks are, by their headers: of those that are still there. What is no record
    /// of ours has no owner.
    fn read_owners(
        &self,
        tenants: &Tenants,
        number: usize,
        blocks: &[Listed],
    ) -> Result<Vec<(Listed, Owner)>> {
        let (tier, deadline) = (
            &self.tiers[number],
            self.clock.now().after(self.moves.deadline),
        );
        let read = |block: &Listed| {
            let read = BlockRead::whole(block.id, tenants.headers.try_acquire()?, deadline);
            Some(BlockRead {
                looked: true,
                ..read
            })
        };
        // Fewer than there are blocks while a read hangs; the rest is for the next scan.
        let run: Vec<BlockRead> = blocks.iter().map_while(read).collect();
        let backend = Arc::clone(&tier.backend);
        let work = move |io: &IoJob| Ok(backend.read(io, run));
        let outcomes = tier.pool.call(LANE_SPACE, deadline, work)?;
        let (mut owners, mut failed) = (Vec::with_capacity(blocks.len()), None);
        for (block, outcome) in blocks.iter().zip(outcomes) {
            match outcome {
                Outcome::Came(Ok(came)) => {
                    let header = RecordHeader::decode(came.bytes()).ok();
                    let own = header.filter(|header| header.meta.id == block.id);
                    owners.push((
                        *block,
                        own.map(|own| Owner::of(&own.meta)).unwrap_or_default(),
                    ));
                }
                Outcome::Came(Err(error)) if error.kind() == ErrorKind::Foreign => {
                    owners.push((*block, Owner::default()));
                }
                Outcome::Came(Err(error)) if error.kind() != ErrorKind::NotFound => {
                    failed = Some(error)
                }
                Outcome::Came(Err(_)) | Outcome::Moved(_) => {} // gone
            }
        }
        // One that cannot be read stops nothing; a tier that cannot be is left until the next scan.
        match failed {
            Some(error) if owners.is_empty() => Err(error),
            _ => Ok(owners),
        }
    }

    /// Removes the oldest of each tenant that has too much; not for a while after something could
    /// not be removed.
    fn keep_quotas(&self, tenants: &Tenants) {
        if matches!(tenants.quota.limit, Capacity::Percent(_)) {
            self.find_quotas(tenants);
        }
        if self.clock.now() < *tenants.try_again.lock() {
            return;
        }
        for level_quota in &tenants.levels {
            let mut failed = Failed::default();
            while !tenants.is_closing() {
                let quota = level_quota.quota.load(Ordering::Acquire);
                let later = |stored: &Stored| {
                    failed.tiers.contains(&stored.tier) || failed.blocks.contains(stored)
                };
                let excess = level_quota.usage.lock().excess(quota, TOGETHER, later);
                if excess.is_empty() {
                    break;
                }
                self.remove_excess(tenants, level_quota, &excess, &mut failed);
            }
            if !(failed.tiers.is_empty() && failed.blocks.is_empty()) {
                *tenants.try_again.lock() = self.clock.now().after(TRY_AGAIN);
            }
        }
    }

    /// Removes these blocks, each where it lies, and notes what does not succeed.
    fn remove_excess(
        &self,
        tenants: &Tenants,
        level_quota: &LevelQuota,
        excess: &[(Stored, Age)],
        failed: &mut Failed,
    ) {
        for (tier, number) in self.tiers.iter().zip(0..) {
            let here: Vec<_> = excess
                .iter()
                .filter(|(stored, _)| stored.tier == number)
                .collect();
            if here.is_empty() {
                continue;
            }
            match self.remove_here(tier, here.iter().map(|(stored, _)| stored.id).collect()) {
                Ok((count, presences)) => {
                    add(&tier.counts.quota_removed, count as u64);
                    let mut usage = level_quota.usage.lock();
                    for (at, (stored, age)) in here.into_iter().enumerate() {
                        match presences.get(at) {
                            None | Some(Err(MissReason::Absent)) => usage.removed(*stored, *age),
                            Some(_) => _ = failed.blocks.insert(*stored),
                        }
                    }
                }
                Err(error) => {
                    failed.tiers.insert(number);
                    if error.kind() != ErrorKind::Closed {
                        self.say_failed(tenants, &error.with("tier", &tier.name));
                    }
                }
            }
        }
    }

    /// Removes blocks of one tier: how many, and, where those are not all, which are there still.
    fn remove_here(&self, tier: &Tier, ids: Vec<BlockId>) -> Result<(usize, Vec<Presence>)> {
        if !tier.is_well() {
            return Err(Error::new(
                ErrorKind::Unhealthy,
                "this tier is switched off for now",
            ));
        }
        let (backend, deadline) = (
            Arc::clone(&tier.backend),
            self.clock.now().after(self.moves.deadline),
        );
        let work = move |io: &IoJob| {
            let removed = backend.delete(io, &ids)?;
            // Some were gone already, or could not be removed.
            let left = match removed == ids.len() {
                true => Vec::new(),
                false => backend.lookup(io, &ids, false)?,
            };
            Ok((removed, left))
        };
        tier.pool.call(LANE_SPACE, deadline, work)
    }

    fn say_failed(&self, tenants: &Tenants, error: &Error) {
        if !tenants.said_failed.swap(true, Ordering::AcqRel) {
            warn!(
                store = self.records.writer,
                error = error.kind().name(),
                "tenants may have more than tenant_quota for now, it is tried again: {error}"
            );
        }
    }

    fn say_full(&self, tenants: &Tenants) {
        if !tenants.said_full.swap(true, Ordering::AcqRel) {
            warn!(
                store = self.records.writer,
                most = MOST_BLOCKS,
                "there are more blocks than the {MOST_BLOCKS} of which is remembered whose they \
                 are; the others do not \
                 count for tenant_quota"
            );
        }
    }
}

/// The number of a tier as it is counted: there are few ([`super::MAX_TIERS`]).
fn stored_in(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

fn stored(number: usize, id: BlockId) -> Stored {
    Stored {
        tier: stored_in(number),
        id,
    }
}
