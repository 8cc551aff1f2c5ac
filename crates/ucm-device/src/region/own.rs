//! The region that this process writes: slots are reserved, filled, published under an id, and
//! pinned while in use.
//!
//! A slot is written only between [`SharedRegion::reserve`] and [`WriteLease::publish`], and is
//! reused only when it has no name and no pin in this process. So the bytes behind a [`Pinned`] do
//! not change.
#![allow(
    unsafe_code,
    reason = "lends the bytes of pinned slots, which are not written"
)]

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use ucm_core::sync::{Mutex, MutexGuard};
use ucm_core::{BlockId, Error, Result};
use ucm_infra::seqlock;

use super::mapping::{Mapping, take_pages};
use super::notice::memfd_name;
use super::registry::{Announcement, Registry};
use super::shape::Shape;
use super::table::{Field, Table, describe};
use crate::fork::{OwnFd, hold_forks};

/// Configuration of a region.
#[derive(Clone, Copy, Debug)]
pub struct RegionOptions {
    /// Most bytes of the region in total.
    pub capacity: u64,
    /// Bytes of the longest record.
    pub record_len: usize,
    /// Digest of the identity of its records.
    pub namespace: [u8; 32],
    /// Request huge pages, if the system has them for shared memory.
    pub huge_pages: bool,
}

/// Memory that this process writes and others of this host can read. After the drop, the memory is
/// freed with the last process that maps it.
pub struct SharedRegion {
    pub(super) mapping: Mapping,
    pub(super) shape: Shape,
    slots: Mutex<Slots>,
    announced: Mutex<Option<Announcement>>,
    pub(super) fd: OwnFd,
}

/// The writer's state of its slots: 4 bytes each, and 4 more while a slot is free.
struct Slots {
    /// The most recently freed one on top: its pages are most likely in a cache, and untouched ones
    /// stay untouched.
    free: Vec<u32>,
    /// Number of users of each slot, plus [`NAMED`].
    state: Vec<u32>,
    named: usize,
}

/// The slot has a name: readers can find its record.
const NAMED: u32 = 1 << 31;

impl SharedRegion {
    /// A new region, empty, untouched and not announced. `Config` if not even four records fit,
    /// `Io` if the system refuses the memory. With strict overcommit (vm.overcommit_memory=2) all
    /// of it is allocated now: a page refused later would be a signal (SIGBUS) instead of an error.
    pub fn create(options: RegionOptions) -> Result<Arc<Self>> {
        let setting = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
        Self::make(options, setting.is_ok_and(|setting| setting.trim() == "2"))
    }

    /// `whole`: with every page allocated.
    pub(super) fn make(options: RegionOptions, whole: bool) -> Result<Arc<Self>> {
        let nonce = ucm_infra::random_u64();
        let shape = Shape::fitting(
            options.capacity,
            options.record_len,
            options.namespace,
            nonce,
        )?;
        let name = memfd_name(nonce);
        let together = hold_forks()?;
        let (fd, mapping) = Mapping::create(&name, shape.len())?;
        let fd = OwnFd::new(fd)?;
        drop(together);
        if whole {
            take_pages(&fd, shape.len())?;
        }
        if options.huge_pages {
            mapping.join_pages(shape.records()..shape.len() / 8);
        }
        // The last word is the generation of the index.
        for (word, value) in mapping
            .words()
            .iter()
            .zip(shape.header().into_iter().chain([2]))
        {
            word.store(value, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(Arc::new(Self {
            slots: Mutex::new(Slots {
                free: (0..shape.slots as u32).rev().collect(),
                state: vec![0; shape.slots],
                named: 0,
            }),
            announced: Mutex::new(None),
            shape,
            mapping,
            fd,
        }))
    }

    /// Announces it to the other processes of this host and user; again if its file was removed.
    /// Uses the file system.
    pub fn announce(&self, registry: &Registry) -> Result<()> {
        self.mapping.check_here()?;
        let mut announced = self.announced.lock();
        if !announced
            .as_ref()
            .is_some_and(|announcement| announcement.is_in(registry))
        {
            *announced = None;
            *announced = Some(registry.announce(&self.shape, self.fd.as_fd().as_raw_fd())?);
        }
        Ok(())
    }

    /// Removes it from the registry; processes that map it ignore it from their next scan on.
    pub fn withdraw(&self) {
        if self.mapping.here() {
            self.announced.lock().take();
        }
    }

    /// A slot to fill, or `None` if none is free (or in a forked child).
    pub fn reserve(self: &Arc<Self>) -> Option<WriteLease> {
        let slot = {
            let mut slots = self.slots()?;
            let slot = slots.free.pop()?;
            *slots.state.get_mut(slot as usize)? = 1;
            slot as usize
        };
        seqlock::begin(&self.table().entry(slot)?[Field::Generation as usize]);
        Some(WriteLease {
            region: Arc::clone(self),
            slot,
            filled: 0,
        })
    }

    /// True if it has the record; lock-free.
    pub fn contains(&self, id: BlockId) -> bool {
        self.table().find(id).is_some()
    }

    /// The slot of a record and its ordinal; lock-free.
    pub fn find(&self, id: BlockId) -> Option<(u32, u32)> {
        let found = self.table().find(id)?;
        Some((found.slot as u32, found.ordinal))
    }

    /// Pins a record, even if its name is removed later.
    pub fn pin(self: &Arc<Self>, id: BlockId) -> Option<Pinned> {
        let mut slots = self.slots()?;
        let found = self.table().find(id)?; // under the lock: named, so not reserved
        *slots.state.get_mut(found.slot)? += 1;
        drop(slots);
        Some(self.pinned(found.slot, id, found.len, found.ordinal))
    }

    /// True if the slot is pinned or being filled.
    pub fn is_pinned(&self, slot: u32) -> bool {
        let state = |slots: MutexGuard<'_, Slots>| slots.state.get(slot as usize).copied();
        let state = self.slots().and_then(state);
        state.is_some_and(|state| state & !NAMED > 0)
    }

    /// Removes the name of a record. The returned pin holds it; after that its slot is free. With
    /// `only`, removes it only from that slot.
    pub fn remove(self: &Arc<Self>, id: BlockId, only: Option<u32>) -> Option<Pinned> {
        let mut slots = self.slots()?;
        let found = self.table().find(id)?;
        if only.is_some_and(|only| only as usize != found.slot) {
            return None;
        }
        self.table().unname(id, found.slot);
        let state = slots.state.get_mut(found.slot)?;
        *state = (*state & !NAMED) + 1;
        slots.named -= 1;
        drop(slots);
        Some(self.pinned(found.slot, id, found.len, found.ordinal))
    }

    /// The id in a slot that has a name.
    pub fn id_of(&self, slot: u32) -> Option<BlockId> {
        let named = self.slots()?.state.get(slot as usize)? & NAMED != 0;
        let entry = self.table().entry(slot as usize).filter(|_| named)?;
        let field = |field: Field| entry[field as usize].load(std::sync::atomic::Ordering::Relaxed);
        Some(super::shape::whole([field(Field::Low), field(Field::High)]))
    }

    /// Ids of all records, in no order, with their lengths and slots.
    pub fn records(&self) -> Vec<(BlockId, usize, u32)> {
        // nothing is named or removed during this
        let _still = self.slots();
        let records = self.table().iter();
        records
            .map(|found| (found.id, found.len, found.slot as u32))
            .collect()
    }

    /// Number of record slots.
    pub fn capacity(&self) -> usize {
        self.shape.slots
    }

    /// Number of free slots.
    pub fn free(&self) -> usize {
        self.slots().map_or(0, |slots| slots.free.len())
    }

    /// Number of records that can be found.
    pub fn len(&self) -> usize {
        self.slots().map_or(0, |slots| slots.named)
    }

    /// True if there are no records.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of address space; only written pages use memory.
    pub fn bytes(&self) -> usize {
        self.shape.len()
    }

    /// Bytes from one record to the next, a multiple of 4096.
    pub fn stride(&self) -> usize {
        self.shape.stride()
    }

    /// Its mapping, which lives until this is dropped; `None` in a forked child.
    pub(crate) fn mapped(&self) -> (*mut u8, usize) {
        let words = self.mapping.words();
        (
            words.as_ptr().cast_mut().cast(),
            std::mem::size_of_val(words),
        )
    }

    /// The number that identifies this region.
    pub fn nonce(&self) -> u64 {
        self.shape.nonce
    }

    pub(super) fn table(&self) -> Table<'_> {
        Table {
            words: self.mapping.words(),
            shape: &self.shape,
            probes: self.shape.buckets,
        }
    }

    /// `None` in a forked child, where a thread that it does not have may hold the lock.
    fn slots(&self) -> Option<MutexGuard<'_, Slots>> {
        self.mapping.here().then(|| self.slots.lock())
    }

    fn pinned(self: &Arc<Self>, slot: usize, id: BlockId, len: usize, ordinal: u32) -> Pinned {
        Pinned {
            region: Arc::clone(self),
            slot,
            id,
            len,
            ordinal,
        }
    }

    /// Names a filled slot, in place of an older one, which is returned.
    pub(super) fn name(&self, id: BlockId, slot: usize) -> Option<usize> {
        let mut slots = self.slots.lock();
        let before = self.table().find(id).map(|found| found.slot);
        self.table().name(id, slot, before);
        if let Some(state) = slots.state.get_mut(slot) {
            *state |= NAMED; // the reservation ends when that is dropped
        }
        let Some(before) = before else {
            slots.named += 1;
            return None;
        };
        if let Some(state) = slots.state.get_mut(before) {
            *state &= !NAMED;
            if *state == 0 {
                slots.free.push(before as u32);
            }
        }
        Some(before)
    }

    /// Removes one user of a slot; without name and users it is free.
    pub(super) fn release(&self, slot: usize) {
        let Some(mut slots) = self.slots() else {
            return;
        };
        let Some(state) = slots.state.get_mut(slot) else {
            return;
        };
        *state -= 1;
        if *state == 0 {
            slots.free.push(slot as u32);
        }
    }
}

/// A slot being filled. Dropped without [`WriteLease::publish`] it is free again.
pub struct WriteLease {
    pub(super) region: Arc<SharedRegion>,
    pub(super) slot: usize,
    pub(super) filled: usize,
}

impl WriteLease {
    /// Writes the record. `InvalidInput` if it is longer than the region's records.
    pub fn fill(&mut self, record: &[u8]) -> Result<()> {
        if record.is_empty() || record.len() > self.region.shape.record_len {
            return Err(
                Error::invalid("the record does not fit the slots of this region")
                    .with("len", record.len())
                    .with("record_len", self.region.shape.record_len),
            );
        }
        if let Some(words) = self.region.table().record(self.slot) {
            seqlock::fill(words, record);
        }
        self.filled = record.len();
        Ok(())
    }

    /// Names it: from here on every process finds it. Returns its slot and that of a replaced
    /// record of the same name.
    pub fn publish(self, id: BlockId, ordinal: u32) -> (u32, Option<u32>) {
        let (region, slot) = (&self.region, self.slot);
        let (table, number) = (region.table(), slot as u32);
        let Some(entry) = table.entry(slot) else {
            return (number, None);
        };
        describe(entry, id, self.filled, ordinal);
        seqlock::publish(&entry[Field::Generation as usize]);
        let before = region.name(id, slot);
        (number, before.map(|before| before as u32))
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.region.release(self.slot);
    }
}

/// A record of this process's region that stays in place until this is dropped.
pub struct Pinned {
    pub(super) region: Arc<SharedRegion>,
    pub(super) slot: usize,
    pub(super) id: BlockId,
    pub(super) len: usize,
    pub(super) ordinal: u32,
}

impl Pinned {
    /// The record's id.
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// Its stored position in its chain.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its slot.
    pub fn slot(&self) -> u32 {
        self.slot as u32
    }
}

impl Deref for Pinned {
    type Target = [u8];

    /// The record; empty in a forked child.
    fn deref(&self) -> &[u8] {
        // SAFETY: only a `WriteLease` stores into the words of a slot, and a pinned slot has no
        // `WriteLease`.
        let bytes = unsafe {
            self.region
                .mapping
                .bytes(self.region.shape.record(self.slot))
        };
        bytes.get(..self.len).unwrap_or_default()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.region.release(self.slot);
    }
}
