//! S3-FIFO (Yang et al., SOSP 2023) for chains: a small queue for what is new, a main one for what
//! was used again, and the names of what left the small one unused; a record that is stored again
//! from there enters the main queue at once.
//!
//! Unlike the original its queues are not by time alone: as with [`super::Lru`], of what was stored
//! at about the same time the end of a chain is evicted before its beginning. In plain order of
//! time the beginning is evicted first, and the rest of the chain is worth nothing.

use std::collections::BTreeSet;

use hashlink::LinkedHashSet;
use ucm_core::BlockId;

use super::Eviction;
use super::steps::Steps;

/// The small queue has one slot in this many.
const SMALL: usize = 10;
/// Uses that are counted at the most.
const MOST_USES: u8 = 3;
/// Records checked for one victim, under the lock of the tier. If all of them were used, the next
/// is evicted all the same; by then each of them has lost a use.
const LOOKS: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
}

/// S3-FIFO, with chains kept in order.
pub struct S3Fifo {
    steps: Steps,
    small: BTreeSet<(u64, u32)>,
    main: BTreeSet<(u64, u32)>,
    /// Hashes of records that went unused, the oldest first; as many as there are slots, some 40
    /// bytes each.
    ghosts: LinkedHashSet<u64>,
    slots: Vec<Entry>,
}

/// 24 bytes a slot, and some 20 for its place in a queue.
#[derive(Clone, Copy)]
struct Entry {
    place: Place,
    uses: u8,
    ordinal: u32,
    key: u64,
    hash: u64,
}

impl S3Fifo {
    /// For `slots` slots.
    pub fn new(slots: usize) -> Self {
        let nothing = Entry {
            place: Place::Nowhere,
            uses: 0,
            ordinal: 0,
            key: 0,
            hash: 0,
        };
        Self {
            steps: Steps::new(slots),
            small: BTreeSet::new(),
            main: BTreeSet::new(),
            ghosts: LinkedHashSet::new(),
            slots: vec![nothing; slots],
        }
    }

    fn queue(&mut self, place: Place) -> Option<&mut BTreeSet<(u64, u32)>> {
        match place {
            Place::Small => Some(&mut self.small),
            Place::Main => Some(&mut self.main),
            Place::Nowhere => None,
        }
    }

    fn push(&mut self, slot: u32, place: Place) {
        let key = self.steps.key(self.slots[slot as usize].ordinal);
        let entry = &mut self.slots[slot as usize];
        (entry.place, entry.key) = (place, key);
        if let Some(queue) = self.queue(place) {
            queue.insert((key, slot));
        }
    }

    fn pop(&mut self, slot: u32) {
        let Some(entry) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let place = std::mem::replace(&mut entry.place, Place::Nowhere);
        let key = entry.key;
        if let Some(queue) = self.queue(place) {
            queue.remove(&(key, slot));
        }
    }

    /// Checks one slot: its record is moved to its queue, or it is the victim.
    fn keep_or_evict(&mut self, slot: u32) -> bool {
        let entry = self.slots[slot as usize];
        match entry.place {
            Place::Small | Place::Main if entry.uses > 0 => {
                self.pop(slot);
                self.slots[slot as usize].uses = match entry.place {
                    Place::Small => 0,
                    _ => entry.uses - 1,
                };
                self.push(slot, Place::Main);
                false
            }
            Place::Small => {
                self.ghosts.insert(entry.hash);
                if self.ghosts.len() > self.slots.len() {
                    self.ghosts.pop_front();
                }
                true
            }
            _ => true,
        }
    }
}

impl Eviction for S3Fifo {
    fn inserted(&mut self, slot: u32, id: BlockId, ordinal: u32) {
        self.pop(slot);
        self.steps.inserted();
        let number = u128::from_be_bytes(id.0);
        let hash = (number >> 64) as u64 ^ (number as u64).rotate_left(32);
        let place = match self.ghosts.remove(&hash) {
            true => Place::Main,
            false => Place::Small,
        };
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            (entry.uses, entry.ordinal, entry.hash) = (0, ordinal, hash);
            self.push(slot, place);
        }
    }

    fn used(&mut self, slot: u32, _ordinal: u32) {
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            entry.uses = (entry.uses + 1).min(MOST_USES);
        }
    }

    fn removed(&mut self, slot: u32) {
        self.pop(slot);
    }

    fn victim(&mut self, held: &dyn Fn(u32) -> bool) -> Option<u32> {
        let first = |queue: &BTreeSet<(u64, u32)>| {
            let mut slots = queue.iter().map(|&(_, slot)| slot);
            slots.find(|&slot| !held(slot))
        };
        // Each check moves a record or takes a use away, of which there are few.
        for _ in 0..LOOKS.min((usize::from(MOST_USES) + 2) * self.slots.len()) {
            let small_is_full = self.small.len() * SMALL > self.slots.len();
            let small = small_is_full.then(|| first(&self.small)).flatten();
            let slot = small
                .or_else(|| first(&self.main))
                .or_else(|| first(&self.small))?;
            if self.keep_or_evict(slot) {
                return Some(slot);
            }
        }
        first(&self.main).or_else(|| first(&self.small))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_victim_among_many_records_that_were_all_used_is_found_after_a_bounded_search() {
        let slots = 20_000;
        let mut policy = S3Fifo::new(slots as usize);
        for slot in 0..slots {
            policy.inserted(slot, BlockId(u128::from(slot).to_le_bytes()), slot % 100);
            (0..MOST_USES).for_each(|_| policy.used(slot, slot % 100));
        }
        for _ in 0..40 {
            let looks = std::cell::Cell::new(0);
            let held = |_: u32| {
                looks.set(looks.get() + 1);
                false
            };
            let victim = policy.victim(&held).unwrap();
            assert!(looks.get() <= LOOKS + 2, "{}", looks.get());
            policy.removed(victim);
        }
    }
}
