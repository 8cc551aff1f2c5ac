//! Queues of slots: doubly linked lists in two arrays, so that any slot leaves its queue at once and nothing allocates.

/// No slot.
const NONE: u32 = u32::MAX;

/// The neighbours of each slot in the one queue it is in. 8 bytes a slot.
pub(super) struct Links {
    older: Vec<u32>,
    younger: Vec<u32>,
}

impl Links {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            older: vec![NONE; slots],
            younger: vec![NONE; slots],
        }
    }
}

/// A queue, from the oldest to the youngest.
pub(super) struct Queue {
    oldest: u32,
    youngest: u32,
    len: usize,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            oldest: NONE,
            youngest: NONE,
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        some(self.oldest)
    }

    /// The slot that came right after this one.
    pub(super) fn after(links: &Links, slot: u32) -> Option<u32> {
        some(links.younger[slot as usize])
    }

    /// Adds a slot that is in no queue.
    pub(super) fn push(&mut self, links: &mut Links, slot: u32) {
        links.older[slot as usize] = self.youngest;
        links.younger[slot as usize] = NONE;
        match some(self.youngest) {
            Some(before) => links.younger[before as usize] = slot,
            None => self.oldest = slot,
        }
        self.youngest = slot;
        self.len += 1;
    }

    /// Takes out a slot that is in this queue.
    pub(super) fn remove(&mut self, links: &mut Links, slot: u32) {
        let (older, younger) = (links.older[slot as usize], links.younger[slot as usize]);
        match some(older) {
            Some(older) => links.younger[older as usize] = younger,
            None => self.oldest = younger,
        }
        match some(younger) {
            Some(younger) => links.older[younger as usize] = older,
            None => self.youngest = older,
        }
        self.len -= 1;
    }
}

fn some(slot: u32) -> Option<u32> {
    (slot != NONE).then_some(slot)
}
