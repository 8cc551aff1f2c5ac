//! Fixed-size leases of arena memory. A slot returns to its pool when it is dropped, on any thread.
//! So a slot inside a hanging system call is out of use until the call returns.
//!
//! A lease gets its memory only when its bytes are first used, and then the most recently returned
//! one. So a batch that leases all its slots at once and fills them in turn reuses the few that are
//! in the processor's caches, instead of passing once through the whole arena.
#![allow(
    unsafe_code,
    reason = "turns a leased range of the arena into a slice; the lease is unique"
)]

use std::sync::{Arc, OnceLock};

use ucm_core::sync::Mutex;
use ucm_core::{Error, PAGE, Result, round_up};

use crate::arena::HostArena;

/// Callback of a pool after a slot was returned.
type ReleaseHook = Box<dyn Fn() + Send + Sync>;

/// A pool of equal slots cut from one range of an arena.
///
/// ```
/// use ucm_device::{ArenaOptions, SlotPool, Transfer, open_device};
/// use ucm_infra::SystemClock;
///
/// let device = open_device("host", Transfer::Auto, SystemClock::shared()).unwrap();
/// let arena = device.make_arena(8192, ArenaOptions::default()).unwrap();
/// let slots = SlotPool::new(arena, 4000).unwrap();
/// let mut slot = slots.try_acquire().unwrap();
/// slot.as_mut_slice().fill(1);
/// assert_eq!((slots.slot_len(), slots.available()), (4096, 1));
/// drop(slot);
/// assert_eq!(slots.available(), 2);
/// ```
pub struct SlotPool {
    arena: Arc<HostArena>,
    /// Offset of the first slot in the arena.
    start: usize,
    slot_len: usize,
    capacity: usize,
    free: Mutex<Free>,
    on_release: OnceLock<ReleaseHook>,
}

/// The free slots.
struct Free {
    /// The most recently returned on top: its bytes are most likely still in the processor's
    /// caches.
    places: Vec<u32>,
    /// Number of leases without memory yet; at most the free ones.
    promised: usize,
}

impl Free {
    fn unpromised(&self) -> usize {
        self.places.len() - self.promised
    }
}

impl SlotPool {
    /// Cuts the rest of `arena` into slots of `slot_len` bytes (rounded up to 4096, for direct
    /// I/O). `InvalidInput` if not even one fits.
    pub fn new(arena: Arc<HostArena>, slot_len: usize) -> Result<Arc<Self>> {
        let stride = Self::stride(slot_len)?;
        let slots = arena.unclaimed() / stride;
        Self::with_slots(arena, slot_len, slots)
    }

    /// Cuts `slots` slots from the rest of `arena`. `InvalidInput` if they do not fit or the number
    /// is zero.
    pub fn with_slots(arena: Arc<HostArena>, slot_len: usize, slots: usize) -> Result<Arc<Self>> {
        let stride = Self::stride(slot_len)?;
        let no_room = || {
            Error::invalid("the host arena has no room for these slots")
                .with("slot_len", stride)
                .with("slots", slots)
                .with("unclaimed", arena.unclaimed())
        };
        let count = u32::try_from(slots)
            .ok()
            .filter(|&n| n > 0)
            .ok_or_else(no_room)?;
        let bytes = stride.checked_mul(slots).ok_or_else(no_room)?;
        let range = arena.claim(bytes).ok_or_else(no_room)?;
        Ok(Arc::new(Self {
            start: range.start,
            slot_len: stride,
            capacity: slots,
            // Descending, so that the first slots are used first.
            free: Mutex::new(Free {
                places: (0..count).rev().collect(),
                promised: 0,
            }),
            on_release: OnceLock::new(),
            arena,
        }))
    }

    fn stride(slot_len: usize) -> Result<usize> {
        if slot_len == 0 || slot_len > isize::MAX as usize - PAGE as usize {
            return Err(Error::invalid("a slot has at least one byte").with("slot_len", slot_len));
        }
        Ok(round_up(slot_len as u64, PAGE) as usize)
    }

    /// A free slot, or `None`. Its bytes are those of its last owner (zero at first).
    pub fn try_acquire(self: &Arc<Self>) -> Option<Slot> {
        self.try_acquire_above(0)
    }

    /// A free slot, but only if at least `reserved` others stay free. This keeps a part of the
    /// slots away from dumps.
    pub fn try_acquire_above(self: &Arc<Self>, reserved: usize) -> Option<Slot> {
        let mut free = self.free.lock();
        if free.unpromised() <= reserved {
            return None;
        }
        free.promised += 1;
        Some(Slot {
            pool: Arc::clone(self),
            place: OnceLock::new(),
        })
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Current number of free slots.
    pub fn available(&self) -> usize {
        self.free.lock().unpromised()
    }

    /// Current number of leased slots, including those in stuck operations.
    pub fn out(&self) -> usize {
        self.capacity - self.available()
    }

    /// Bytes of one slot, a multiple of 4096.
    pub fn slot_len(&self) -> usize {
        self.slot_len
    }

    /// The arena the slots are cut from.
    pub fn arena(&self) -> &Arc<HostArena> {
        &self.arena
    }

    /// Sets, once, the callback after a slot was returned. It runs on the thread that dropped the
    /// slot, without a lock held, and must not block. `false` if one is set already.
    pub fn on_release(&self, hook: impl Fn() + Send + Sync + 'static) -> bool {
        self.on_release.set(Box::new(hook)).is_ok()
    }

    /// Keeps a promise.
    fn place(&self) -> u32 {
        let mut free = self.free.lock();
        free.promised -= 1;
        let last = free.places.len() - 1;
        free.places.swap_remove(last)
    }

    fn address(&self, index: u32) -> *mut u8 {
        self.arena.at(self.start + index as usize * self.slot_len)
    }
}

/// The lease of one slot. It keeps its pool and the memory alive and returns the slot on drop.
pub struct Slot {
    pool: Arc<SlotPool>,
    /// Its number in the pool, after its bytes were first used.
    place: OnceLock<u32>,
}

impl Slot {
    /// Length in bytes, a multiple of 4096.
    #[allow(clippy::len_without_is_empty, reason = "a slot is never empty")]
    pub fn len(&self) -> usize {
        self.pool.slot_len
    }

    /// The bytes, for reading.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range belongs to this pool (claimed once) and to this lease (its number left
        // the free list for this lease only and returns in drop); mapped zeroed, so always
        // initialised; borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.pool.address(self.place()), self.pool.slot_len) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes this the only borrow of the lease.
        unsafe {
            std::slice::from_raw_parts_mut(self.pool.address(self.place()), self.pool.slot_len)
        }
    }

    /// The pool it belongs to.
    pub fn pool(&self) -> &Arc<SlotPool> {
        &self.pool
    }

    /// Its number in the pool, 0 to capacity - 1. Assigns its memory if it has none.
    pub fn index(&self) -> usize {
        self.place() as usize
    }

    fn place(&self) -> u32 {
        *self.place.get_or_init(|| self.pool.place())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let mut free = self.pool.free.lock();
            match self.place.take() {
                Some(place) => free.places.push(place),
                None => free.promised -= 1,
            }
        }
        if let Some(hook) = self.pool.on_release.get() {
            hook();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn pool(slots: usize) -> Arc<SlotPool> {
        SlotPool::new(HostArena::new(slots * 4096).unwrap(), 4096).unwrap()
    }

    #[test]
    fn slots_are_aligned_disjoint_and_writable() {
        let pool = SlotPool::new(HostArena::new(64 << 10).unwrap(), 5000).unwrap();
        assert_eq!((pool.slot_len(), pool.capacity()), (8192, 8));
        let mut slots: Vec<_> = (0..8).map(|_| pool.try_acquire().unwrap()).collect();
        assert!(pool.try_acquire().is_none());
        for (i, slot) in slots.iter_mut().enumerate() {
            assert!((slot.as_slice().as_ptr() as usize).is_multiple_of(4096));
            slot.as_mut_slice().fill(i as u8);
        }
        for (i, slot) in slots.iter().enumerate() {
            assert!(slot.as_slice().iter().all(|&byte| byte == i as u8));
        }
    }

    #[test]
    fn two_pools_on_one_arena_never_share_a_byte() {
        let arena = HostArena::new(4 * 4096).unwrap();
        let first = SlotPool::with_slots(Arc::clone(&arena), 4096, 2).unwrap();
        let second = SlotPool::new(Arc::clone(&arena), 4096).unwrap();
        assert_eq!(second.capacity(), 2);
        assert!(SlotPool::new(arena, 4096).is_err());
        let mut a = [first.try_acquire().unwrap(), first.try_acquire().unwrap()];
        let b = [second.try_acquire().unwrap(), second.try_acquire().unwrap()];
        a.iter_mut().for_each(|slot| slot.as_mut_slice().fill(1));
        assert!(
            b.iter()
                .all(|slot| slot.as_slice().iter().all(|&byte| byte == 0))
        );
    }

    #[test]
    fn the_reserve_is_kept() {
        let pool = pool(3);
        let one = pool.try_acquire_above(2).unwrap();
        assert!(pool.try_acquire_above(2).is_none());
        let two = pool.try_acquire().unwrap();
        assert_eq!((pool.available(), pool.out()), (1, 2));
        drop((one, two));
        assert_eq!(pool.available(), 3);
        assert!(pool.try_acquire_above(3).is_none());
        assert!(pool.try_acquire_above(usize::MAX).is_none());
    }

    #[test]
    fn a_batch_of_leases_goes_through_the_memory_that_came_back_last() {
        let pool = pool(4);
        let batch: Vec<_> = (0..4).map(|_| pool.try_acquire().unwrap()).collect();
        assert!(
            pool.try_acquire().is_none(),
            "a lease without memory counts"
        );
        let used: Vec<_> = batch
            .into_iter()
            .map(|mut slot| {
                slot.as_mut_slice()[0] = 1;
                slot.index()
            })
            .collect();
        assert_eq!(used, [0; 4]);
        let (one, two) = (pool.try_acquire().unwrap(), pool.try_acquire().unwrap());
        assert_ne!(one.index(), two.index());
        drop((one, two, pool.try_acquire()));
        assert_eq!(pool.available(), 4, "also one whose bytes were never used");
    }

    #[test]
    fn a_lease_outlives_the_handle_of_its_pool() {
        let pool = pool(1);
        let mut slot = pool.try_acquire().unwrap();
        drop(pool);
        slot.as_mut_slice()[0] = 7;
        assert_eq!(slot.as_slice()[0], 7);
    }

    #[test]
    fn returning_a_slot_calls_the_hook_after_it_is_free() {
        let pool = pool(1);
        let seen = Arc::new(AtomicUsize::new(0));
        let (weak, count) = (Arc::downgrade(&pool), Arc::clone(&seen));
        assert!(pool.on_release(move || {
            count.store(
                weak.upgrade().map_or(0, |pool| pool.available()),
                Ordering::SeqCst,
            );
        }));
        assert!(!pool.on_release(|| ()));
        drop(pool.try_acquire());
        assert_eq!(seen.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn many_threads_never_hold_the_same_slot() {
        let pool = pool(4);
        std::thread::scope(|scope| {
            for thread in 1..=4u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let Some(mut slot) = pool.try_acquire() else {
                            continue;
                        };
                        slot.as_mut_slice()[..64].fill(thread);
                        std::thread::yield_now();
                        assert!(slot.as_slice()[..64].iter().all(|&byte| byte == thread));
                    }
                });
            }
        });
        assert_eq!(pool.available(), 4);
    }

    #[test]
    fn impossible_pools_are_errors() {
        let arena = HostArena::new(4096).unwrap();
        assert!(SlotPool::new(Arc::clone(&arena), 0).is_err());
        assert!(SlotPool::new(Arc::clone(&arena), 8192).is_err());
        assert!(SlotPool::new(Arc::clone(&arena), usize::MAX).is_err());
        assert!(SlotPool::with_slots(Arc::clone(&arena), 4096, usize::MAX).is_err());
        assert!(SlotPool::with_slots(arena, 4096, 1).is_ok());
    }
}
