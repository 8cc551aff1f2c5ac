//! Slots registered with the kernel, so that direct I/O need not look up and pin their pages each time.
//!
//! A pool's memory is registered piece by piece, each when a slot of it is first used, so that no operation waits for
//! gigabytes to be pinned. Where the kernel refuses (RLIMIT_MEMLOCK of an unprivileged process, an old kernel) the rest
//! stays as it is: registering saves time and changes nothing else.
#![allow(unsafe_code, reason = "tells the kernel which memory is ours")]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use io_uring::IoUring;
use ucm_device::{Slot, SlotPool};

/// Pieces at most; 16 GiB of slots.
const MAX_PIECES: usize = 256;
/// Bytes of a piece, rounded down to whole slots.
const PIECE: usize = 64 << 20;
/// Longest slot that is registered: what the kernel takes in one piece.
const LONGEST: usize = 1 << 30;

/// Which slots are registered under which number.
pub(super) struct Buffers {
    /// By the pool's address and the number of the piece in it.
    pieces: HashMap<(usize, usize), u16>,
    /// The pools of those pieces. A weak handle keeps the address from being used for another one.
    pools: Vec<Weak<SlotPool>>,
    free: Vec<u16>,
    on: bool,
}

impl Buffers {
    /// An empty table, if the kernel has such a thing (5.19 and newer).
    pub(super) fn new(ring: &IoUring) -> Self {
        let on = ring
            .submitter()
            .register_buffers_sparse(MAX_PIECES as u32)
            .is_ok();
        Self {
            pieces: HashMap::new(),
            pools: Vec::new(),
            free: (0..MAX_PIECES as u16).rev().collect(),
            on,
        }
    }

    /// The number under which this slot is registered, now or since earlier, and the bytes that this call registered.
    pub(super) fn number(&mut self, ring: &IoUring, slot: &Slot) -> (Option<u16>, u64) {
        let (pool, slot_len) = (slot.pool(), slot.len());
        if !self.on || slot_len > LONGEST {
            return (None, 0);
        }
        let slots = (PIECE / slot_len).max(1);
        let (piece, first) = (slot.index() / slots, slot.index() / slots * slots);
        let key = (Arc::as_ptr(pool) as usize, piece);
        if let Some(&number) = self.pieces.get(&key) {
            return (Some(number), 0);
        }
        if !self
            .pools
            .iter()
            .any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(pool)))
        {
            self.forget_dead(ring);
            self.pools.push(Arc::downgrade(pool));
        }
        let Some(number) = self.free.pop() else {
            return (None, 0);
        };
        let len = slots.min(pool.capacity() - first) * slot_len;
        // All slots of a pool lie in one row.
        let start = slot
            .as_slice()
            .as_ptr()
            .wrapping_sub((slot.index() - first) * slot_len);
        if self.set(ring, number, start, len) {
            self.pieces.insert(key, number);
            return (Some(number), len as u64);
        }
        self.free.push(number);
        self.on = false;
        (None, 0)
    }

    /// Gives the pinned memory of pools back that are gone.
    fn forget_dead(&mut self, ring: &IoUring) {
        let dead: Vec<usize> = self
            .pools
            .iter()
            .filter(|pool| pool.strong_count() == 0)
            .map(|pool| pool.as_ptr() as usize)
            .collect();
        let gone: Vec<((usize, usize), u16)> = self
            .pieces
            .iter()
            .filter(|((pool, _), _)| dead.contains(pool))
            .map(|(&key, &number)| (key, number))
            .collect();
        for (key, number) in gone {
            if self.set(ring, number, std::ptr::null(), 0) {
                self.pieces.remove(&key);
                self.free.push(number);
            }
        }
        // One whose pieces could not be given back keeps its address taken.
        let kept = &self.pieces;
        self.pools.retain(|pool| {
            let address = pool.as_ptr() as usize;
            pool.strong_count() > 0 || kept.keys().any(|(of, _)| *of == address)
        });
    }

    fn set(&self, ring: &IoUring, number: u16, start: *const u8, len: usize) -> bool {
        let piece = libc::iovec {
            iov_base: start.cast_mut().cast(),
            iov_len: len,
        };
        // SAFETY: the range is part of the arena that the pool of the caller's slot keeps mapped. The kernel pins the
        // pages themselves, so they outlive the mapping; and only calls for slots, which keep the pool, use the number.
        unsafe {
            ring.submitter()
                .register_buffers_update(u32::from(number), &[piece], None)
        }
        .is_ok()
    }
}
