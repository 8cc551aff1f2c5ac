//! Copying blocks to upper tiers before a load wants them.
//!
//! A bounded queue of ids, the most urgent first. Loads go before: while one reads, only urgent ids
//! are begun. A few are read at a time, each into a spare slot, verified as a load verifies, and
//! kept by the tiers above.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, Result};
use ucm_device::Slot;
use ucm_infra::LANE_LOAD;
use ucm_io::IoJob;
use ucm_media::backend::{BlockRead, Outcome, ReadDone};

use super::config::{Request, WritePolicy};
use super::level::TierTable;
use super::probes::Probes;
use super::tier::Tier;
use super::write::Writes;
use crate::stats::add;

/// Most ids that wait.
pub const MAX_WAITING: usize = 4096;
/// Most reads at once.
const AT_ONCE: usize = 4;

ucm_core::named! {
    /// How soon a prefetched block will be wanted; the first is served first.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Priority {
        /// A request waits for it; read beside loads.
        Urgent = "urgent",
        /// The next batch will want it.
        NextBatch = "next_batch",
        /// It will be wanted.
        Normal = "normal",
        /// It may be wanted.
        Speculative = "speculative",
    }
}

/// The outcome of a read for a prefetch.
enum Fetched {
    /// The block is in the slot.
    Read(ReadDone),
    /// The block is in the top tier.
    AtTop,
    /// It is not there, or the lookup failed: a lower tier is next.
    Absent(Slot, Option<Error>),
}

impl Fetched {
    /// Reads a block from a tier, on a thread of it; `last`: there is none below it. A read that
    /// finds nothing would cost the slot, so a lookup goes before it where another tier could
    /// follow or a lookup is quick.
    fn read(io: &IoJob, tier: &Tier, id: BlockId, slot: Slot, last: bool) -> Result<Self> {
        if !last || tier.backend.features().answers_at_once {
            match tier.backend.lookup(io, &[id], false) {
                Ok(found) if found.first() != Some(&Ok(())) => return Ok(Self::Absent(slot, None)),
                Err(error) => return Ok(Self::Absent(slot, Some(error))),
                Ok(_) => {}
            }
        }
        if tier.level == 0 {
            return Ok(Self::AtTop);
        }
        let read = BlockRead::whole(id, slot, io.deadline());
        match tier.form.read(&*tier.backend, io, vec![read]).pop() {
            Some(Outcome::Read(read)) => read.map(Self::Read),
            Some(Outcome::Moved(read)) => Ok(Self::Absent(read.slot, None)),
            None => Err(Error::internal("a read has no outcome")),
        }
    }
}

/// The turn of an id that waits: the most urgent first, then the oldest.
type Turn = (Priority, u64);

/// Ids that wait, and those being read.
#[derive(Default)]
pub(super) struct Queue {
    waiting: BTreeMap<Turn, BlockId>,
    turns: HashMap<BlockId, Turn>,
    /// Ids that began to wait so far.
    count: u64,
    reading: Vec<BlockId>,
    /// A thread starts reads.
    pumping: bool,
    closed: bool,
}

impl Queue {
    /// Takes an id, or makes it more urgent; false if there is no room for it. The latest of the
    /// least urgent makes room for one that is more urgent.
    fn add(&mut self, id: BlockId, priority: Priority) -> bool {
        if self.reading.contains(&id) {
            return true;
        }
        match self.turns.get(&id) {
            Some((before, _)) if *before <= priority => return true,
            Some(turn) => _ = self.waiting.remove(turn),
            None if self.turns.len() >= MAX_WAITING => {
                let Some(last) = self.waiting.last_entry() else {
                    return false;
                };
                if last.key().0 <= priority {
                    return false;
                }
                self.turns.remove(&last.remove());
            }
            None => {}
        }
        self.count += 1;
        self.put(id, (priority, self.count));
        true
    }

    fn put(&mut self, id: BlockId, turn: Turn) {
        self.turns.insert(id, turn);
        self.waiting.insert(turn, id);
    }

    /// The next id that may be read, and its turn.
    fn next(&mut self, loading: bool) -> Option<(BlockId, Turn)> {
        if self.closed || self.reading.len() >= AT_ONCE {
            return None;
        }
        let first = self.waiting.first_entry()?;
        if loading && first.key().0 != Priority::Urgent {
            return None;
        }
        let (turn, id) = first.remove_entry();
        self.turns.remove(&id);
        self.reading.push(id);
        Some((id, turn))
    }

    /// It was not begun after all.
    fn put_back(&mut self, id: BlockId, turn: Turn) {
        self.reading.retain(|&reading| reading != id);
        self.put(id, turn);
    }

    fn cancel(&mut self, ids: &[BlockId]) -> usize {
        let before = self.turns.len();
        for id in ids {
            if let Some(turn) = self.turns.remove(id) {
                self.waiting.remove(&turn);
            }
        }
        before - self.turns.len()
    }
}

/// See the module.
pub(crate) struct Prefetches {
    pub(super) table: Arc<TierTable>,
    pub(super) probes: Arc<Probes>,
    pub(super) writes: Arc<Writes>,
    pub(super) queue: Mutex<Queue>,
    /// Reads of loads under way.
    pub(super) loading: AtomicUsize,
}

impl Prefetches {
    /// Copies these blocks to the upper tiers, if there are any, when nothing more urgent is to be
    /// done. The answer counts those taken, with those that wait already.
    pub(crate) fn add(self: &Arc<Self>, ids: &[BlockId], priority: Priority) -> usize {
        let Some((_, above)) = self.table.levels.split_last() else {
            return 0;
        };
        if above.iter().all(|level| level.policy == WritePolicy::Never) {
            return 0;
        }
        let taken = {
            let mut queue = self.queue.lock();
            ids.iter().filter(|&&id| queue.add(id, priority)).count()
        };
        self.pump();
        taken
    }

    /// These blocks need not be prefetched any more. The answer counts those that were still
    /// waiting.
    pub(crate) fn cancel(&self, ids: &[BlockId]) -> usize {
        self.queue.lock().cancel(ids)
    }

    /// No more is begun.
    pub(super) fn close(&self) {
        let mut queue = self.queue.lock();
        *queue = Queue {
            closed: true,
            reading: std::mem::take(&mut queue.reading),
            ..Queue::default()
        };
    }

    /// Reads of loads begin, which go before.
    pub(super) fn loads_begin(&self, count: usize) {
        self.loading.fetch_add(count, Ordering::AcqRel);
    }

    /// One of them ended.
    pub(super) fn load_ended(self: &Arc<Self>) {
        if self.loading.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pump();
        }
    }

    /// A spare slot was returned.
    pub(super) fn spare_freed(self: &Arc<Self>) {
        self.writes.moves.freed.notify();
        self.pump();
    }

    /// Starts every read that may start. One thread at a time: a call from inside has nothing to
    /// do, because that thread checks the queue again before it stops.
    pub(super) fn pump(self: &Arc<Self>) {
        {
            let mut queue = self.queue.lock();
            if queue.pumping || queue.waiting.is_empty() {
                return;
            }
            queue.pumping = true;
        }
        while let Some((id, slot)) = self.next() {
            self.fetch(id, slot, None);
        }
    }

    /// The next id with a slot to read it into; `None` ends the pumping. No slot is returned here,
    /// which would pump.
    fn next(&self) -> Option<(BlockId, Slot)> {
        let mut queue = self.queue.lock();
        let loading = self.loading.load(Ordering::Acquire) > 0;
        if let Some((id, turn)) = queue.next(loading) {
            match self.writes.moves.spare.try_acquire() {
                Some(slot) => return Some((id, slot)),
                None => queue.put_back(id, turn),
            }
        }
        queue.pumping = false;
        None
    }

    /// Reads a block in the first tier behind `after` that has it, unless that is at the top.
    fn fetch(self: &Arc<Self>, id: BlockId, slot: Slot, after: Option<usize>) {
        let now = self.table.clock.now();
        let request = self.table.request(now.after(self.writes.moves.deadline));
        let place = self.table.place(id, after, request.number);
        let Some(number) = place.filter(|&number| self.probes.admits(number, request, now)) else {
            drop(slot); // no tier is known to have it now
            return self.end(id);
        };
        let tier = &self.table.tiers[number];
        if tier.level == 0 && tier.is_memory() {
            drop(slot); // it is at the top already
            return self.end(id);
        }
        let (table, this) = (Arc::clone(&self.table), Arc::clone(self));
        let last = number + 1 == self.table.tiers.len();
        let work = move |io: &IoJob| Fetched::read(io, &table.tiers[number], id, slot, last);
        let ended = move |result| this.fetched(number, request, id, result);
        tier.pool.job(LANE_LOAD, request.deadline, work, ended);
    }

    /// A tier has read a block, or has not.
    fn fetched(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        id: BlockId,
        result: Result<Fetched>,
    ) {
        let tier = &self.table.tiers[number];
        match result {
            Ok(Fetched::Read(read)) => {
                tier.note(request, None);
                self.copy_up(number, id, read);
            }
            Ok(Fetched::Absent(slot, None)) => {
                tier.note_answer(request);
                self.fetch(id, slot, Some(number));
            }
            Ok(Fetched::Absent(slot, Some(error))) => {
                tier.note(request, Some(&error));
                self.fetch(id, slot, Some(number));
            }
            Ok(Fetched::AtTop) => {
                tier.note_answer(request);
                self.end(id);
            }
            Err(error) => {
                tier.note(request, Some(&error));
                self.end(id);
            }
        }
    }

    /// The tiers above `number` keep a block that was read there. One that is not sound is left to
    /// the next load, which reads it twice and logs it.
    fn copy_up(self: &Arc<Self>, number: usize, id: BlockId, read: ReadDone) {
        let record = &read.slot.as_slice()[..read.read];
        let records = self.writes.parts.of(record); // only the id was known
        let Ok(ordinal) = records.verify(id, record, read.stored_len) else {
            drop(read);
            return self.end(id);
        };
        let counts = &self.table.tiers[number].counts;
        add(&counts.blocks_read, 1);
        add(&counts.bytes_read, record.len() as u64);
        let under_way = CopyingUp {
            id,
            prefetches: Arc::clone(self),
        };
        self.writes
            .raise(number, id, read, ordinal, Box::new(under_way));
    }

    fn end(self: &Arc<Self>, id: BlockId) {
        self.queue.lock().reading.retain(|&reading| reading != id);
        self.pump();
    }
}

/// A block that was read, until the tiers above have it.
struct CopyingUp {
    id: BlockId,
    prefetches: Arc<Prefetches>,
}

impl Drop for CopyingUp {
    fn drop(&mut self) {
        self.prefetches.end(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: usize) -> BlockId {
        BlockId((n as u128).to_le_bytes())
    }

    fn order(queue: &mut Queue) -> Vec<BlockId> {
        let mut order = Vec::new();
        while let Some((id, _)) = queue.next(false) {
            queue.reading.clear();
            order.push(id);
        }
        order
    }

    #[test]
    fn the_most_urgent_first_and_each_once() {
        let mut queue = Queue::default();
        queue.add(id(1), Priority::Speculative);
        queue.add(id(2), Priority::Normal);
        queue.add(id(3), Priority::Urgent);
        queue.add(id(4), Priority::NextBatch);
        assert!(
            queue.add(id(1), Priority::NextBatch),
            "it may become more urgent"
        );
        assert!(queue.add(id(3), Priority::Speculative), "but never less");
        assert_eq!(order(&mut queue), [id(3), id(4), id(1), id(2)]);
    }

    #[test]
    fn while_a_load_reads_only_the_urgent() {
        let mut queue = Queue::default();
        queue.add(id(1), Priority::NextBatch);
        assert_eq!(queue.next(true), None);
        queue.add(id(2), Priority::Urgent);
        assert_eq!(queue.next(true).unwrap().0, id(2));
        assert_eq!(queue.next(false).unwrap().0, id(1));
    }

    #[test]
    fn only_a_few_are_read_at_once() {
        let mut queue = Queue::default();
        (0..2 * AT_ONCE).for_each(|n| assert!(queue.add(id(n), Priority::Normal)));
        assert_eq!(
            (0..2 * AT_ONCE).filter_map(|_| queue.next(false)).count(),
            AT_ONCE
        );
        assert!(
            queue.add(id(0), Priority::Urgent),
            "a block that is being read is taken already"
        );
        assert_eq!(queue.turns.len(), AT_ONCE);
    }

    #[test]
    fn bounded_and_the_urgent_push_the_others_out() {
        let mut queue = Queue::default();
        for n in 0..MAX_WAITING {
            assert!(queue.add(id(n), Priority::Normal));
        }
        assert!(!queue.add(id(MAX_WAITING), Priority::Normal));
        assert!(!queue.add(id(MAX_WAITING), Priority::Speculative));
        assert!(queue.add(id(MAX_WAITING), Priority::Urgent));
        assert_eq!(queue.turns.len(), MAX_WAITING);
        assert!(
            queue.turns.contains_key(&id(0)) && !queue.turns.contains_key(&id(MAX_WAITING - 1)),
            "the latest goes"
        );
    }

    #[test]
    fn cancelled_is_never_read() {
        let mut queue = Queue::default();
        queue.add(id(1), Priority::Normal);
        queue.add(id(2), Priority::Normal);
        assert_eq!(queue.cancel(&[id(1), id(9)]), 1);
        assert_eq!(order(&mut queue), [id(2)]);
    }
}
