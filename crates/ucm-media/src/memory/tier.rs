//! The own region of the memory tier: its records, their eviction and their uses.
//!
//! One lock guards policy, times and changes; it is held for table work only, never while bytes are
//! copied or verified, and never over a system call. The region's own short lock is taken inside of
//! it. Names are added and removed under this lock, so policy and region always agree about which
//! slots hold records.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, in_units};
use ucm_device::{Pinned, RegionOptions, SharedRegion, WriteLease};
use ucm_infra::{Clock, MonotonicTime};
use ucm_record::verify_stored;

use super::eviction::{Eviction, Policy};
use crate::backend::{Evicted, Listed, LocallyVisible, Victim, Written};
use crate::lengths::Lengths;
use crate::locally_visible::LocalChanges;
use crate::quota::Usage;
use crate::scope::Scope;

/// Most victims that are out at once, and the share of the slots that may be.
const MOST_OUT: usize = 64;
const SHARE_OUT: usize = 8;
/// Slots kept free ahead of need while victims are passed to the hook, so that storing need not
/// wait for them.
const AHEAD: usize = 4;
/// Touches for which the lock is held at once.
const AT_ONCE: usize = 256;

/// Configuration of the memory tier.
#[derive(Clone)]
pub struct MemoryConfig {
    /// Whose records it keeps.
    pub scope: Scope,
    /// Bytes of the own region, see [`cache_bytes`](super::cache_bytes); `None`: it has none.
    pub capacity: Option<NonZeroU64>,
    /// The policy of eviction.
    pub policy: Policy,
    /// Where regions are announced; `None`: the user's own directory
    /// ([`Registry::default_dir`](ucm_device::Registry)).
    pub registry: Option<PathBuf>,
    /// Whether the region is announced and others are read.
    pub shared: bool,
    /// Whether the engine's scheduler side may run on another host.
    pub scheduler_elsewhere: bool,
    /// Threads that copy.
    pub threads: usize,
    /// Ask for huge pages, where the system has them for shared memory.
    pub huge_pages: bool,
}

impl MemoryConfig {
    /// For these records, with everything else as it is by default.
    pub fn new(scope: Scope, capacity: Option<NonZeroU64>) -> Self {
        Self {
            scope,
            capacity,
            policy: Policy::default(),
            registry: None,
            shared: true,
            scheduler_elsewhere: false,
            threads: 2,
            huge_pages: true,
        }
    }
}

/// Counters of the tier since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryCounts {
    /// Records chosen for eviction because another one needed the slot.
    pub evicted: u64,
    /// Of these, those that were passed to the hook.
    pub handed: u64,
    /// Of these, those whose checksums were wrong before they were passed.
    pub damaged: u64,
    /// Of those that were passed, those that were used before the hook released them, and stayed.
    pub returned: u64,
    /// Records that were removed by name.
    pub deleted: u64,
    /// Uses reported by [`Backend::touch`](crate::backend::Backend::touch).
    pub touched: u64,
    /// Reads that took a record where it lies.
    pub lent: u64,
    /// Regions of other processes that are mapped.
    pub neighbours: u64,
}

/// The own region and its state; without a region it has no records.
pub(super) struct Tier {
    pub(super) config: MemoryConfig,
    clock: Arc<dyn Clock>,
    pub(super) region: Option<Arc<SharedRegion>>,
    pub(super) lengths: Lengths,
    state: Mutex<State>,
    /// The hook that victims are passed to.
    pub(super) hook: OnceLock<Evicted>,
}

struct State {
    policy: Box<dyn Eviction>,
    /// Second of the last use, Unix time, by slot.
    used: Vec<u32>,
    changes: LocalChanges,
    /// Whether own records are reported as locally visible.
    telling: bool,
    /// Slots of the victims that the hook holds, and whether each was used since.
    out: HashMap<u32, bool>,
    counts: MemoryCounts,
}

impl Tier {
    pub(super) fn new(config: MemoryConfig, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let lengths = config.scope.lengths();
        let region = config.capacity.map(|capacity| {
            SharedRegion::create(RegionOptions {
                capacity: capacity.get(),
                record_len: lengths.own_len() as usize,
                namespace: *config.scope.identity.digest(),
                huge_pages: config.huge_pages,
            })
        });
        let region = region.transpose()?;
        let slots = region.as_ref().map_or(0, |region| region.capacity());
        Ok(Arc::new(Self {
            state: Mutex::new(State {
                policy: config.policy.build(slots),
                used: vec![0; slots],
                changes: LocalChanges::default(),
                telling: true, // until the region is announced
                out: HashMap::new(),
                counts: MemoryCounts::default(),
            }),
            lengths,
            config,
            clock,
            region,
            hook: OnceLock::new(),
        }))
    }

    /// Whether the own region has it; takes no lock.
    pub(super) fn holds(&self, id: BlockId) -> bool {
        let region = self.region.as_ref();
        region.is_some_and(|region| region.contains(id))
    }

    pub(super) fn pin(&self, id: BlockId) -> Option<Pinned> {
        self.region.as_ref()?.pin(id)
    }

    /// Keeps a record, in place of one of the same name if that is to be replaced.
    pub(super) fn put(
        self: &Arc<Self>,
        id: BlockId,
        record: &[u8],
        ordinal: u32,
        replace: bool,
    ) -> Result<Written> {
        let region = self.region.as_ref().ok_or_else(|| {
            let text = "this memory tier was opened for lookups only";
            Error::new(ErrorKind::Unsupported, text)
        })?;
        if !self.lengths.is_copy(record.len() as u64) {
            let wrong = Error::invalid("these are not as many bytes as a record has");
            let wrong = wrong.with("len", record.len());
            return Err(wrong.with("record_len", self.lengths.own_len()));
        }
        if !replace && self.use_one(id, ordinal) {
            return Ok(Written::Present);
        }
        let mut blank = self.room(region)?;
        blank.fill(record)?;
        let now = self.now();
        let mut state = self.state.lock();
        if !replace && region.contains(id) {
            return Ok(Written::Present); // another thread was faster
        }
        let (slot, before) = blank.publish(id, ordinal);
        if let Some(before) = before {
            state.policy.removed(before);
        } else if state.telling {
            state.changes.added(id);
        }
        state.policy.inserted(slot, id, ordinal);
        if let Some(used) = state.used.get_mut(slot as usize) {
            *used = now;
        }
        drop(state);
        self.hand_ahead(region);
        Ok(Written::Published)
    }

    /// A slot to fill; records are evicted if there is none.
    fn room(self: &Arc<Self>, region: &Arc<SharedRegion>) -> Result<WriteLease> {
        for _ in 0..=region.capacity() {
            if let Some(blank) = region.reserve() {
                return Ok(blank);
            }
            if !self.send_away(region) {
                break;
            }
        }
        let text = "every slot of the memory tier is in use; raise cache_size";
        Err(Error::new(ErrorKind::Busy, text).with("slots", region.capacity()))
    }

    /// While victims are passed to the hook, a few slots are freed before they are needed.
    fn hand_ahead(self: &Arc<Self>, region: &Arc<SharedRegion>) {
        let ahead = AHEAD.min(region.capacity() / SHARE_OUT);
        for _ in 0..ahead {
            if self.hook.get().is_none() || region.free() + self.state.lock().out.len() >= ahead {
                return;
            }
            self.send_away(region);
        }
    }

    /// Evicts one record that the policy chooses; false if there is none.
    fn send_away(self: &Arc<Self>, region: &Arc<SharedRegion>) -> bool {
        let mut state = self.state.lock();
        let Some(slot) = state.policy.victim(&|slot| region.is_pinned(slot)) else {
            return false;
        };
        state.policy.removed(slot);
        let Some(id) = region.id_of(slot) else {
            return true; // cannot be; the policy knows no better now
        };
        let most_out = (region.capacity() / SHARE_OUT).clamp(1, MOST_OUT);
        let hook = self.hook.get().filter(|_| state.out.len() < most_out);
        let gone = match hook {
            Some(_) => region.pin(id),
            None => region.remove(id, Some(slot)),
        };
        let Some(record) = gone else { return true };
        state.counts.evicted += 1;
        let Some(hook) = hook else {
            if state.telling {
                state.changes.removed(id);
            }
            return true;
        };
        state.out.insert(record.slot(), false);
        drop(state);
        let sound = self.verify(id, &record).is_ok();
        let tier = Arc::clone(self);
        let victim = Box::new(EvictedRecord { tier, record });
        if sound {
            self.state.lock().counts.handed += 1;
            hook(victim);
        } else {
            self.state.lock().counts.damaged += 1;
        }
        true
    }

    /// The hook has released this victim: it is evicted, unless it was stored anew. One that was
    /// used since stays, whatever the hook did: a dump that found it here has returned that it is
    /// stored.
    fn left(&self, record: &Pinned) {
        let Some(region) = &self.region else { return };
        let (id, slot) = (record.id(), record.slot());
        let mut state = self.state.lock();
        let used = state.out.remove(&slot).unwrap_or(false);
        if used && region.find(id).is_some_and(|(there, _)| there == slot) {
            state.policy.inserted(slot, id, record.ordinal());
            state.counts.returned += 1;
            return;
        }
        let gone = region.remove(id, Some(slot));
        if gone.is_some() && state.telling {
            state.changes.removed(id);
        }
    }

    /// Copies parts of a record of the own region, as far as it goes, each to where it lies in the
    /// whole: the record's length. That counts as a use.
    pub(super) fn copy_parts(
        &self,
        id: BlockId,
        parts: &[Range<usize>],
        out: &mut [u8],
    ) -> Option<usize> {
        let record = self.pin(id)?;
        for part in parts {
            let part = part.start..part.end.min(record.len());
            if !part.is_empty() {
                out.get_mut(part.clone())?.copy_from_slice(&record[part]);
            }
        }
        self.used(&record);
        Some(record.len())
    }

    /// Lends a record of the own region, which counts as a use.
    pub(super) fn lend(&self, id: BlockId) -> Option<Pinned> {
        let record = self.pin(id)?;
        self.used(&record);
        self.state.lock().counts.lent += 1;
        Some(record)
    }

    fn used(&self, record: &Pinned) {
        let now = self.now();
        self.state.lock().uses(record.slot(), record.ordinal(), now);
    }

    /// Verifies a record, with KV or without.
    fn verify(&self, id: BlockId, record: &[u8]) -> Result<(), MissReason> {
        let namespace = *self.config.scope.identity.digest();
        let expect = self.lengths.expect(id, namespace, record);
        verify_stored(record, record.len() as u64, &expect)?;
        Ok(())
    }

    /// Counts a use; false if it is not there.
    fn use_one(&self, id: BlockId, ordinal: u32) -> bool {
        let now = self.now();
        let mut state = self.state.lock();
        let found = self.region.as_ref().and_then(|region| region.find(id));
        if let Some((slot, _)) = found {
            state.uses(slot, ordinal, now);
        }
        found.is_some()
    }

    pub(super) fn touch(&self, ids: &[(BlockId, u32)]) {
        let Some(region) = &self.region else { return };
        let now = self.now();
        for ids in ids.chunks(AT_ONCE) {
            let mut state = self.state.lock();
            for &(id, ordinal) in ids {
                if let Some((slot, _)) = region.find(id) {
                    state.uses(slot, ordinal, now);
                    state.counts.touched += 1;
                }
            }
        }
    }

    /// Removes a record by name; false if there was none.
    pub(super) fn delete(&self, id: BlockId) -> bool {
        let mut state = self.state.lock();
        let region = self.region.as_ref();
        let Some(gone) = region.and_then(|region| region.remove(id, None)) else {
            return false;
        };
        state.policy.removed(gone.slot());
        if state.telling {
            state.changes.removed(id);
        }
        state.counts.deleted += 1;
        true
    }

    pub(super) fn list(&self) -> Vec<Listed> {
        let records = self.region.as_ref().map(|region| region.records());
        let state = self.state.lock();
        let used = |slot: u32| state.used.get(slot as usize).copied().unwrap_or(0);
        let records = records.into_iter().flatten();
        let listed = records.map(|(id, len, slot)| Listed {
            id,
            len: len as u64,
            used_ns: i64::from(used(slot)) * 1_000_000_000,
        });
        listed.collect()
    }

    /// Whether others of this host can see the own region now.
    pub(super) fn set_visible(&self, visible: bool) {
        let telling = self.config.scheduler_elsewhere || !visible;
        let mut state = self.state.lock();
        if state.telling == telling {
            return;
        }
        state.telling = telling;
        for (id, ..) in self.region.iter().flat_map(|region| region.records()) {
            if telling {
                state.changes.added(id);
            } else {
                state.changes.removed(id);
            }
        }
    }

    pub(super) fn locally_visible(&self) -> LocallyVisible {
        // No record here is published later: the time does not count.
        self.state.lock().changes.take(MonotonicTime::default())
    }

    pub(super) fn stride(&self) -> usize {
        self.region.as_ref().map_or(0, |region| region.stride())
    }

    pub(super) fn usage(&self) -> Usage {
        let region = self.region.as_ref();
        let (records, slots) = region.map_or((0, 0), |region| (region.len(), region.capacity()));
        Usage {
            used: (records * self.stride()) as u64,
            capacity: (slots * self.stride()) as u64,
            records: records as u64,
            counted: true,
            ..Usage::default()
        }
    }

    pub(super) fn counts(&self) -> MemoryCounts {
        self.state.lock().counts
    }

    /// For the log.
    pub(super) fn words(&self) -> String {
        match &self.region {
            Some(region) => format!(
                "memory for {} records of {}, {} in all, eviction {}",
                region.capacity(),
                in_units(region.stride() as u64),
                in_units(region.bytes() as u64),
                self.config.policy.name()
            ),
            None => "memory of other processes only".to_owned(),
        }
    }

    fn now(&self) -> u32 {
        u32::try_from(self.clock.wall_ns() / 1_000_000_000).unwrap_or(u32::MAX)
    }
}

impl State {
    fn uses(&mut self, slot: u32, ordinal: u32, now: u32) {
        self.policy.used(slot, ordinal);
        if let Some(used) = self.out.get_mut(&slot) {
            *used = true;
        }
        if let Some(used) = self.used.get_mut(slot as usize) {
            *used = now;
        }
    }
}

/// The record of a victim, verified. It can be found and read until this is dropped; then it is
/// evicted, unless it was used since.
struct EvictedRecord {
    tier: Arc<Tier>,
    record: Pinned,
}

impl Victim for EvictedRecord {
    fn id(&self) -> BlockId {
        self.record.id()
    }

    fn record(&self) -> &[u8] {
        &self.record
    }
}

impl Drop for EvictedRecord {
    fn drop(&mut self) {
        self.tier.left(&self.record);
    }
}
