//! A quota for each tenant: the blocks of one tenant in a level below memory are kept within it, by
//! removing the oldest of them.
//!
//! Blocks that this engine writes are counted when they are published. Those of others, and those
//! that were there before, are found by a scan that lists each tier now and then and reads the
//! headers that it does not know. Both go into the [`TenantUsage`] of the level. One thread scans
//! and removes, on the threads that tiers have for space, at the lowest priority.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, PAGE, Result, round_up};
use ucm_device::{ArenaOptions, Device, SlotPool};
use ucm_infra::{Completion, LANE_SPACE, MonotonicTime, Notify, begin_thread};
use ucm_io::IoJob;
use ucm_media::backend::{BlockRead, Listed, Outcome, Presence};
use ucm_media::quota::Capacity;
use ucm_record::RecordHeader;

use super::config::WritePolicy;
use super::level::TierTable;
use super::tenant_usage::{Age, MOST_BLOCKS, Owner, Stored, TenantUsage};
use super::tier::Tier;
use crate::stats::add;

/// Time between two scans at least, and how many times as long as a scan took.
const SCAN_AGAIN: Duration = Duration::from_secs(60);
const SCAN_SHARE: u32 = 10;
/// After something failed.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// How long a tier may take to list its records.
const LIST: Duration = Duration::from_secs(600);
/// Headers read, and blocks removed, by one operation.
const TOGETHER: usize = 64;
/// Time for that many headers at least; with it at most half of a thread reads, and about a
/// thousand headers in a second.
const PACE: Duration = Duration::from_millis(60);

/// The quota of the tenants of a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TenantQuota {
    /// Of each in a level; a share is one of the level's capacity.
    pub(crate) limit: Capacity,
    /// Nothing is removed where others would miss it.
    pub(crate) lookup_only: bool,
}

/// A record of a tenant, in a tier.
pub(super) struct Counted {
    stored: Stored,
    len: u64,
    owner: Owner,
}

/// See the module.
pub(super) struct Tenants {
    store: u64,
    table: Arc<TierTable>,
    quota: TenantQuota,
    /// How long an operation on a tier may take.
    deadline: Duration,
    levels: Vec<LevelQuota>,
    /// Slots for headers.
    headers: Arc<SlotPool>,
    /// Notified when a tenant has too much, and at the end.
    wake: Notify,
    closing: AtomicBool,
    /// Nothing is removed until then: a removal failed.
    try_again: Mutex<MonotonicTime>,
    /// Completes when the thread has ended.
    thread: Mutex<Option<Arc<Completion<()>>>>,
    logged: Logged,
}

/// Warnings that were logged already.
#[derive(Default)]
struct Logged {
    /// An operation fails.
    failed: AtomicBool,
    /// There are too many blocks.
    full: AtomicBool,
    /// The quota is a share of a capacity that is not known.
    limitless: AtomicBool,
}

/// Removals that failed in one turn, and are left to the next.
#[derive(Default)]
struct FailedRemovals {
    tiers: HashSet<u8>,
    blocks: HashSet<Stored>,
}

/// The usage and the quota of the tenants in one level.
struct LevelQuota {
    usage: Mutex<TenantUsage>,
    /// The quota in bytes; none while the capacity that it is a share of is not known.
    quota: AtomicU64,
}

impl Tenants {
    /// Keeps this quota in every level; an operation on a tier may take `deadline`.
    pub(super) fn new(
        quota: TenantQuota,
        table: &Arc<TierTable>,
        store: u64,
        deadline: Duration,
        (header_len, device): (usize, &dyn Device),
    ) -> Result<Self> {
        // A page more than those of the own parts: others may have some more layers.
        let longest = round_up(header_len as u64, PAGE) + PAGE;
        let len = RecordHeader::LONGEST.min(longest as usize);
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
            store,
            quota,
            deadline,
            levels: table.levels.iter().map(level_quota).collect(),
            table: Arc::clone(table),
            headers: SlotPool::new(arena, len)?,
            wake: Notify::new(),
            closing: AtomicBool::new(false),
            try_again: Mutex::default(),
            thread: Mutex::default(),
            logged: Logged::default(),
        })
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// When there is something to do before the next scan: a removal that failed is tried again, or
    /// a capacity was not known.
    fn next_turn(&self, now: MonotonicTime) -> MonotonicTime {
        let try_again = *self.try_again.lock();
        if now < try_again {
            return try_again;
        }
        let unknown = |level: &LevelQuota| level.quota.load(Ordering::Acquire) == u64::MAX;
        match self.levels.iter().any(unknown) {
            true => now.after(TRY_AGAIN),
            false => MonotonicTime::NEVER,
        }
    }

    /// Whether blocks of this tier are counted: not those of memory, and not where nothing is
    /// written or removed.
    fn counts(&self, tier: &Tier) -> bool {
        // A removal from an index in memory makes the block a miss for this process alone.
        let may_remove = !self.quota.lookup_only || tier.answers_from_index();
        !tier.is_memory() && tier.policy != WritePolicy::Never && may_remove
    }

    /// Begins to keep the quota.
    pub(super) fn begin(self: &Arc<Self>) {
        let (weak, ended) = (Arc::downgrade(self), Completion::new());
        let (clock, wake) = (Arc::clone(&self.table.clock), self.wake.clone());
        let end = Arc::clone(&ended);
        let body = move || {
            let mut due = MonotonicTime::default();
            loop {
                let seen = wake.seen();
                // Not held while it sleeps: the store may be dropped.
                let Some(tenants) = weak.upgrade() else { break };
                if tenants.is_closing() {
                    break;
                }
                if clock.now() >= due {
                    due = tenants.scan();
                }
                tenants.keep_quotas();
                let next = due.min(tenants.next_turn(clock.now()));
                drop(tenants);
                clock.sleep(&wake, seen, Some(next));
            }
            end.complete(());
        };
        match begin_thread("ucm-tenants", body) {
            Ok(_) => *self.thread.lock() = Some(ended),
            Err(error) => {
                let store = self.store;
                warn!(
                    store,
                    "no thread for tenant_quota, which is not kept: {error}"
                );
            }
        }
    }

    /// Ends it: the operation under way is waited for until then.
    pub(super) fn end(&self, until: MonotonicTime) {
        self.closing.store(true, Ordering::Release);
        self.wake.notify();
        if let Some(ended) = self.thread.lock().take() {
            ended.wait(&*self.table.clock, Some(until));
        }
    }

    /// What is to be counted of a record that is written to a tier, once it is published.
    pub(super) fn to_count(&self, number: usize, record: &[u8]) -> Option<Counted> {
        if !self.counts(&self.table.tiers[number]) {
            return None;
        }
        let header = RecordHeader::decode(record).ok()?; // else the medium will not take it either
        Some(Counted {
            stored: stored(number, header.meta.id),
            len: record.len() as u64,
            owner: Owner::of(&header.meta),
        })
    }

    /// A record was published.
    pub(super) fn count(&self, counted: Counted) {
        let Counted { stored, len, owner } = counted;
        let level = &self.levels[self.table.tiers[usize::from(stored.tier)].level];
        let mut usage = level.usage.lock();
        let known = usage.add(stored, len, &owner);
        let over = usage.is_over(&owner, level.quota.load(Ordering::Acquire));
        drop(usage);
        if !known {
            self.log_full();
        }
        if over {
            self.wake.notify();
        }
    }

    /// Finds blocks that others have stored or removed: when to do so again.
    fn scan(&self) -> MonotonicTime {
        let began = self.table.clock.now();
        let mut failed = None;
        for (level, level_quota) in self.table.levels.iter().zip(&self.levels) {
            level_quota.usage.lock().begin_scan();
            for number in level.members() {
                let tier = &self.table.tiers[number];
                if !self.counts(tier) || !tier.health.is_well() {
                    continue;
                }
                match self.scan_tier(level_quota, number) {
                    Ok(()) => level_quota.usage.lock().end_scan(stored_in(number)),
                    // Mooncake lists nothing, so there the own blocks count alone.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Closed) => {}
                    Err(error) => failed = Some(error.with("tier", tier.health.name())),
                }
            }
        }
        match failed {
            Some(error) => self.log_failed(&error),
            None => self.logged.failed.store(false, Ordering::Release),
        }
        let now = self.table.clock.now();
        now.after(SCAN_AGAIN.max(now.since(began) * SCAN_SHARE))
    }

    /// Computes the share of each level, once the capacity of all its members is known; a member
    /// that is not well counts too.
    fn find_quotas(&self) {
        for (level, level_quota) in self.table.levels.iter().zip(&self.levels) {
            let members = level.members().map(|number| &self.table.tiers[number]);
            let counted: Vec<_> = members.filter(|tier| self.counts(tier)).collect();
            if counted.is_empty() || !counted.iter().all(|tier| tier.health.is_well()) {
                continue;
            }
            let usages = counted.iter().map(|tier| tier.backend.stats().usage);
            let usages: Vec<_> = usages.collect();
            if usages.iter().all(|usage| usage.capacity > 0) {
                let capacity = usages.iter().map(|usage| usage.capacity).sum();
                let quota = self.quota.limit.bytes(capacity);
                level_quota.quota.store(quota, Ordering::Release);
            } else if usages.iter().all(|usage| usage.counted)
                && !self.quota.lookup_only
                && !self.logged.limitless.swap(true, Ordering::AcqRel)
            {
                let (store, tier) = (self.store, counted[0].health.name());
                warn!(
                    store,
                    tier,
                    "{tier} has no limit of its own that tenant_quota could be a share of, and \
                     none is kept there: write it in bytes"
                );
            }
        }
    }

    /// Finds new blocks in a tier, and marks known ones as seen.
    fn scan_tier(&self, level_quota: &LevelQuota, number: usize) -> Result<()> {
        let (tier, now) = (&self.table.tiers[number], self.table.clock.now());
        let (refreshed, deadline) = (Completion::new(), now.after(self.deadline));
        let done = Arc::clone(&refreshed);
        let done = Box::new(move |_: Result<()>| _ = done.complete(()));
        tier.backend.features().look(deadline, done);
        refreshed.wait(&*self.table.clock, Some(deadline));
        let backend = Arc::clone(&tier.backend);
        let until = self.table.clock.now().after(LIST);
        let mut listed = tier
            .pool
            .call(LANE_SPACE, until, move |io| backend.list(io))?;
        for some in listed.chunks_mut(TOGETHER * TOGETHER) {
            let mut usage = level_quota.usage.lock(); // not for long: writes wait for it
            for one in some {
                if usage.see(stored(number, one.id), one.len) {
                    one.len = 0; // its header is not read
                }
            }
        }
        listed.retain(|one| one.len > 0);
        for some in listed.chunks(TOGETHER) {
            let began = self.table.clock.now();
            if level_quota.usage.lock().is_full() {
                self.log_full();
                return Ok(()); // the others are not counted
            }
            let owners = self.read_owners(number, some)?;
            {
                let mut usage = level_quota.usage.lock();
                for (one, owner) in owners {
                    usage.add(stored(number, one.id), one.len, &owner);
                }
            }
            let took = self.table.clock.now().since(began);
            if some.len() == TOGETHER {
                self.pause(self.table.clock.now().after(took.max(PACE)))?;
            }
        }
        Ok(())
    }

    /// Leaves the tier to others for a while; blocks written in that time are kept in bounds.
    fn pause(&self, until: MonotonicTime) -> Result<()> {
        loop {
            let seen = self.wake.seen();
            if self.is_closing() {
                return Err(Error::new(ErrorKind::Closed, "the store is closing"));
            }
            self.keep_quotas();
            if self.table.clock.now() >= until {
                return Ok(());
            }
            self.table.clock.sleep(&self.wake, seen, Some(until));
        }
    }

    /// The owners of these blocks, by their headers: of those that are still there. A block that
    /// is no record of ours has no owner.
    fn read_owners(&self, number: usize, blocks: &[Listed]) -> Result<Vec<(Listed, Owner)>> {
        let tier = &self.table.tiers[number];
        let deadline = self.table.clock.now().after(self.deadline);
        let mut run = Vec::with_capacity(blocks.len());
        for block in blocks {
            let Some(slot) = self.headers.try_acquire() else {
                break; // a read hangs; the rest is for the next scan
            };
            run.push(BlockRead {
                looked: true,
                ..BlockRead::whole(block.id, slot, deadline)
            });
        }
        let backend = Arc::clone(&tier.backend);
        let work = move |io: &IoJob| Ok(backend.read(io, run));
        let outcomes = tier.pool.call(LANE_SPACE, deadline, work)?;
        let (mut owners, mut failed) = (Vec::with_capacity(blocks.len()), None);
        for (&block, outcome) in blocks.iter().zip(outcomes) {
            match outcome {
                Outcome::Read(Ok(read)) => {
                    let owner = match RecordHeader::decode(read.bytes()) {
                        Ok(header) if header.meta.id == block.id => Owner::of(&header.meta),
                        _ => Owner::default(),
                    };
                    owners.push((block, owner));
                }
                Outcome::Read(Err(error)) if error.kind() == ErrorKind::Foreign => {
                    owners.push((block, Owner::default()));
                }
                Outcome::Read(Err(error)) if error.kind() != ErrorKind::NotFound => {
                    failed = Some(error);
                }
                Outcome::Read(Err(_)) | Outcome::Moved(_) => {} // removed since
            }
        }
        // A block that cannot be read stops nothing; a tier that cannot be read ends the scan.
        match failed {
            Some(error) if owners.is_empty() => Err(error),
            _ => Ok(owners),
        }
    }

    /// Removes the oldest blocks of each tenant that has too much; not for a while after a removal
    /// failed.
    fn keep_quotas(&self) {
        if matches!(self.quota.limit, Capacity::Percent(_)) {
            self.find_quotas();
        }
        if self.table.clock.now() < *self.try_again.lock() {
            return;
        }
        for level_quota in &self.levels {
            let mut failed = FailedRemovals::default();
            while !self.is_closing() {
                let quota = level_quota.quota.load(Ordering::Acquire);
                let later = |stored: &Stored| {
                    failed.tiers.contains(&stored.tier) || failed.blocks.contains(stored)
                };
                let excess = level_quota.usage.lock().excess(quota, TOGETHER, later);
                if excess.is_empty() {
                    break;
                }
                self.remove_excess(level_quota, &excess, &mut failed);
            }
            if !(failed.tiers.is_empty() && failed.blocks.is_empty()) {
                *self.try_again.lock() = self.table.clock.now().after(TRY_AGAIN);
            }
        }
    }

    /// Removes these blocks, each where it lies, and notes failures.
    fn remove_excess(
        &self,
        level_quota: &LevelQuota,
        excess: &[(Stored, Age)],
        failed: &mut FailedRemovals,
    ) {
        for (tier, number) in self.table.tiers.iter().zip(0..) {
            let here = excess.iter().filter(|(stored, _)| stored.tier == number);
            let here: Vec<_> = here.collect();
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
                        self.log_failed(&error.with("tier", tier.health.name()));
                    }
                }
            }
        }
    }

    /// Removes blocks of one tier: how many, and, where those are not all, which are there still.
    fn remove_here(&self, tier: &Tier, ids: Vec<BlockId>) -> Result<(usize, Vec<Presence>)> {
        if !tier.health.is_well() {
            let text = "this tier is switched off for now";
            return Err(Error::new(ErrorKind::Unhealthy, text));
        }
        let deadline = self.table.clock.now().after(self.deadline);
        let backend = Arc::clone(&tier.backend);
        let work = move |io: &IoJob| {
            let removed = backend.delete(io, &ids)?;
            if removed == ids.len() {
                return Ok((removed, Vec::new()));
            }
            // Some were removed before, or could not be removed.
            Ok((removed, backend.lookup(io, &ids, false)?))
        };
        tier.pool.call(LANE_SPACE, deadline, work)
    }

    fn log_failed(&self, error: &Error) {
        if !self.logged.failed.swap(true, Ordering::AcqRel) {
            warn!(
                store = self.store,
                error = error.kind().name(),
                "tenants may have more than tenant_quota for now, it is tried again: {error}"
            );
        }
    }

    fn log_full(&self) {
        if !self.logged.full.swap(true, Ordering::AcqRel) {
            warn!(
                store = self.store,
                most = MOST_BLOCKS,
                "there are more blocks than the {MOST_BLOCKS} whose tenants are remembered; the \
                 others do not count for tenant_quota"
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
