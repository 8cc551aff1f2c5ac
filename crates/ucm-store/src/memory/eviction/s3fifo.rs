//! S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one for what was used again, and the names of
//! what left the small one unused: whoever comes back from there goes to the main queue at once.

use hashlink::LinkedHashSet;
use ucm_core::BlockId;

use super::Eviction;
use super::list::{Links, Queue};

/// The small queue has one slot in so many.
const SMALL: usize = 10;
/// Uses that are counted at the most.
const MOST_USES: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
}

/// S3-FIFO.
pub struct S3Fifo {
    links: Links,
    small: Queue,
    main: Queue,
    /// Hashes of records that went unused, the oldest first; as many as there are slots, some 40 bytes each.
    ghosts: LinkedHashSet<u64>,
    slots: Vec<Entry>,
}

#[derive(Clone, Copy)]
struct Entry {
    place: Place,
    uses: u8,
    hash: u64,
}

impl S3Fifo {
    /// For so many slots.
    pub fn new(slots: usize) -> Self {
        let nothing = Entry {
            place: Place::Nowhere,
            uses: 0,
            hash: 0,
        };
        Self {
            links: Links::new(slots),
            small: Queue::new(),
            main: Queue::new(),
            ghosts: LinkedHashSet::new(),
            slots: vec![nothing; slots],
        }
    }

    fn push(&mut self, slot: u32, place: Place) {
        let queue = match place {
            Place::Small => &mut self.small,
            _ => &mut self.main,
        };
        queue.push(&mut self.links, slot);
        self.slots[slot as usize].place = place;
    }

    fn pop(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        match std::mem::replace(&mut entry.place, Place::Nowhere) {
            Place::Small => self.small.remove(&mut self.links, slot),
            Place::Main => self.main.remove(&mut self.links, slot),
            Place::Nowhere => {}
        }
    }

    /// Looks at one slot: it may stay and is put where it belongs, or it is the victim.
    fn judge(&mut self, slot: u32) -> bool {
        let entry = self.slots[slot as usize];
        match entry.place {
            Place::Small if entry.uses > 0 => {
                self.pop(slot);
                self.slots[slot as usize].uses = 0;
                self.push(slot, Place::Main);
                false
            }
            Place::Main if entry.uses > 0 => {
                self.pop(slot);
                self.slots[slot as usize].uses -= 1;
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
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn inserted(&mut self, slot: u32, id: BlockId, _ordinal: u32) {
        self.pop(slot);
        let (low, high) = id.0.split_at(8);
        let word = |bytes: &[u8]| bytes.iter().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        let hash = word(low) ^ word(high).rotate_left(32);
        let place = if self.ghosts.remove(&hash) {
            Place::Main
        } else {
            Place::Small
        };
        self.slots[slot as usize] = Entry { place, uses: 0, hash };
        self.push(slot, place);
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
        // Each look moves a slot on or takes a use away, of which there are few.
        let rounds = (usize::from(MOST_USES) + 2) * self.slots.len() + 2;
        let mut passed = 0;
        for _ in 0..rounds {
            let small_is_full = self.small.len() * SMALL > self.slots.len() || self.main.len() == 0;
            let small = self.small.oldest().filter(|_| small_is_full);
            let slot = small.or(self.main.oldest()).or(self.small.oldest())?;
            if held(slot) {
                // To the end of its queue, so that it does not stand in the way.
                let place = self.slots[slot as usize].place;
                self.pop(slot);
                self.push(slot, place);
                passed += 1;
                if passed > self.small.len().max(self.main.len()) {
                    break;
                }
            } else if self.judge(slot) {
                return Some(slot);
            }
        }
        // Held ones filled the queue that was looked at: whatever is not held will do.
        let slots = 0..self.slots.len() as u32;
        let there = |slot: &u32| self.slots[*slot as usize].place != Place::Nowhere;
        slots.filter(there).find(|&slot| !held(slot))
    }
}
