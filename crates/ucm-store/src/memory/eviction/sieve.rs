//! SIEVE (Zhang et al., NSDI 2024): one queue by age, one bit a record, and a hand that goes from the oldest to the
//! youngest, clears the bit of what was used since it last came by and stops at what was not.

use ucm_core::BlockId;

use super::Eviction;
use super::list::{Links, Queue};

/// SIEVE.
pub struct Sieve {
    links: Links,
    queue: Queue,
    /// Whether each slot is taken, and was used; 2 bytes a slot.
    taken: Vec<bool>,
    used: Vec<bool>,
    /// Where the hand stands; `None`: at the oldest.
    hand: Option<u32>,
}

impl Sieve {
    /// For so many slots.
    pub fn new(slots: usize) -> Self {
        Self {
            links: Links::new(slots),
            queue: Queue::new(),
            taken: vec![false; slots],
            used: vec![false; slots],
            hand: None,
        }
    }
}

impl Eviction for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn inserted(&mut self, slot: u32, _id: BlockId, _ordinal: u32) {
        self.removed(slot);
        self.taken[slot as usize] = true;
        self.used[slot as usize] = false;
        self.queue.push(&mut self.links, slot);
    }

    fn used(&mut self, slot: u32, _ordinal: u32) {
        if let Some(used) = self.used.get_mut(slot as usize) {
            *used = true;
        }
    }

    fn removed(&mut self, slot: u32) {
        if std::mem::take(&mut self.taken[slot as usize]) {
            if self.hand == Some(slot) {
                self.hand = Queue::after(&self.links, slot);
            }
            self.queue.remove(&mut self.links, slot);
        }
    }

    fn victim(&mut self, held: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.hand.or(self.queue.oldest())?;
        // Twice around at the most: the first time every bit is cleared.
        for _ in 0..2 * self.queue.len() + 1 {
            if !held(at) && !std::mem::take(&mut self.used[at as usize]) {
                self.hand = Some(at);
                return Some(at);
            }
            at = Queue::after(&self.links, at).or(self.queue.oldest())?;
        }
        None
    }
}
