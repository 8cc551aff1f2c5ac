//! Bringing blocks up before they are asked for.
//!
//! A bounded queue of ids, the most urgent first. Loads go before: while one reads, only urgent ids
//! are begun. A few are read at a time, each into a spare slot, verified as a load verifies, and
//! kept by the tiers above.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ucm_core::{BlockId, Error, Result};
use ucm_device::Slot;
use ucm_infra::LANE_LOAD;
use ucm_io::IoJob;
use ucm_tier::backend::{BlockRead, Outcome, ReadDone};

use super::tier::add;
use super::{Tiers, WritePolicy};

/// Most ids that wait.
pub const MAX_WAITING: usize = 4096;
/// Most reads at once.
const AT_ONCE: usize = 4;

/// How soon a prefetched block will be asked for; the first is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A request waits for it; read beside loads.
    Urgent,
    /// The next batch will want it.
    NextBatch,
    /// It will be wanted.
    Normal,
    /// It may be wanted.
    Speculative,
}

impl Priority {
    /// Every priority, the most urgent first.
    pub const ALL: [Self; 4] = [
        Self::Urgent,
        Self::NextBatch,
        Self::Normal,
        Self::Speculative,
    ];

    /// Name in the Python interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Urgent => "urgent",
            Self::NextBatch => "next_batch",
            Self::Normal => "normal",
            Self::Speculative => "speculative",
        }
    }
}

/// What came of fetching a block from a tier.
enum Fetched {
    /// It is in the slot.
    Here(ReadDone),
    /// It is there already, and there is nothing above.
    AtTop,
    /// It is not there, or the tier did not say: a lower one is asked.
    Below(Slot, Option<Error>),
}

/// Ids that wait, and those being read.
#[derive(Default)]
pub(super) struct Queue {
    waiting: [VecDeque<BlockId>; Priority::ALL.len()],
    /// What each id waits as; what a queue says otherwise is out of date.
    known: HashMap<BlockId, Priority>,
    reading: Vec<BlockId>,
    /// A thread starts reads.
    pumping: bool,
    closed: bool,
}

impl Queue {
    /// Takes an id on, or lets it wait more urgently; false if there is no room for it.
    fn add(&mut self, id: BlockId, priority: Priority) -> bool {
        if self.reading.contains(&id) {
            return true;
        }
        match self.known.get(&id).copied() {
            Some(before) if before <= priority => return true,
            Some(_) => {}
            None if self.known.len() >= MAX_WAITING && !self.drop_below(priority) => return false,
            None => {}
        }
        self.known.insert(id, priority);
        self.waiting[priority as usize].push_back(id);
        self.tidy();
        true
    }

    /// Makes room by dropping the latest of the least urgent, if that is less urgent than this.
    fn drop_below(&mut self, priority: Priority) -> bool {
        for lower in Priority::ALL
            .into_iter()
            .rev()
            .filter(|&lower| lower > priority)
        {
            while let Some(id) = self.waiting[lower as usize].pop_back() {
                if self.known.get(&id) == Some(&lower) {
                    self.known.remove(&id);
                    return true;
                }
            }
        }
        false
    }

    /// Entries that are out of date must not pile up.
    fn tidy(&mut self) {
        if self.waiting.iter().map(VecDeque::len).sum::<usize>() <= 2 * MAX_WAITING {
            return;
        }
        let (known, mut seen) = (&self.known, HashSet::new());
        for (queue, priority) in self.waiting.iter_mut().zip(Priority::ALL) {
            queue.retain(|id| known.get(id) == Some(&priority) && seen.insert(*id));
        }
    }

    /// The next id that may be read, and how urgently.
    fn next(&mut self, loading: bool) -> Option<(BlockId, Priority)> {
        if self.closed || self.reading.len() >= AT_ONCE {
            return None;
        }
        let may = if loading {
            &Priority::ALL[..1]
        } else {
            &Priority::ALL[..]
        };
        for &priority in may {
            while let Some(id) = self.waiting[priority as usize].pop_front() {
                if self.known.get(&id) == Some(&priority) {
                    self.known.remove(&id);
                    self.reading.push(id);
                    return Some((id, priority));
                }
            }
        }
        None
    }

    /// It was not begun after all.
    fn put_back(&mut self, id: BlockId, priority: Priority) {
        self.reading.retain(|&reading| reading != id);
        self.known.insert(id, priority);
        self.waiting[priority as usize].push_front(id);
    }

    fn cancel(&mut self, ids: &[BlockId]) -> usize {
        let before = self.known.len();
        ids.iter().for_each(|id| {
            self.known.remove(id);
        });
        before - self.known.len()
    }
}

impl Tiers {
    /// These blocks will be asked for: brings them into the upper tiers, if there are any, when
    /// nothing more urgent is to be done. The answer counts those taken on, those included that
    /// wait already.
    pub(crate) fn prefetch(self: &Arc<Self>, ids: &[BlockId], priority: Priority) -> usize {
        if !self.has_upper() {
            return 0;
        }
        let taken = {
            let mut queue = self.prefetch.lock();
            ids.iter().filter(|&&id| queue.add(id, priority)).count()
        };
        self.pump_prefetch();
        taken
    }

    /// These blocks need not be prefetched any more. The answer counts those that were still
    /// waiting.
    pub(crate) fn cancel_prefetch(&self, ids: &[BlockId]) -> usize {
        self.prefetch.lock().cancel(ids)
    }

    /// No more is begun.
    pub(super) fn end_prefetch(&self) {
        let mut queue = self.prefetch.lock();
        *queue = Queue {
            closed: true,
            reading: std::mem::take(&mut queue.reading),
            ..Queue::default()
        };
    }

    /// Whether there is a tier to bring blocks up to.
    fn has_upper(&self) -> bool {
        let above = &self.levels[..self.levels.len() - 1];
        above.iter().any(|level| level.policy != WritePolicy::Never)
    }

    /// Starts what may be started. One thread at a time: a call from inside has nothing to do,
    /// because that thread looks again before it stops.
    pub(super) fn pump_prefetch(self: &Arc<Self>) {
        {
            let mut queue = self.prefetch.lock();
            if queue.pumping || (queue.known.is_empty()) {
                return;
            }
            queue.pumping = true;
        }
        while let Some((id, slot)) = self.next_prefetch() {
            self.fetch(id, slot, None);
        }
    }

    /// The next id with a slot to read it into; `None` ends the pumping. No slot is let go here,
    /// which would pump.
    fn next_prefetch(&self) -> Option<(BlockId, Slot)> {
        let mut queue = self.prefetch.lock();
        let loading = self.tally.loading.load(Ordering::Acquire) > 0;
        if let Some((id, priority)) = queue.next(loading) {
            match self.moves.spare.try_acquire() {
                Some(slot) => return Some((id, slot)),
                None => queue.put_back(id, priority),
            }
        }
        queue.pumping = false;
        None
    }

    /// Reads a block in the first tier behind `after` that has it, unless that is at the top.
    fn fetch(self: &Arc<Self>, id: BlockId, slot: Slot, after: Option<usize>) {
        let request = self.request(self.clock.now().after(self.moves.deadline));
        let number = self.place(id, after, request.number);
        let Some(number) =
            number.filter(|&number| self.admits(number, request.number, self.clock.now()))
        else {
            drop(slot); // it is nowhere, as far as can be known now
            return self.fetched(id);
        };
        let tier = &self.tiers[number];
        let at_top = tier.level == 0;
        if at_top && tier.is_memory() {
            drop(slot); // it is at the top already
            return self.fetched(id);
        }
        let (tiers, backend) = (Arc::clone(self), Arc::clone(&tier.backend));
        let asks = number + 1 < self.tiers.len() || tier.backend.features().answers_at_once;
        let work = move |io: &IoJob| {
            // A read that finds nothing would cost the slot.
            match asks.then(|| backend.lookup(io, &[id], false)) {
                Some(Ok(found)) if found.first() != Some(&Ok(())) => {
                    return Ok(Fetched::Below(slot, None));
                }
                Some(Err(error)) => return Ok(Fetched::Below(slot, Some(error))),
                _ if at_top => return Ok(Fetched::AtTop),
                _ => {}
            }
            let mut read =
                tiers.read_here(number, io, vec![BlockRead::whole(id, slot, io.deadline())]);
            match read.pop() {
                Some(Outcome::Came(read)) => read.map(Fetched::Here),
                Some(Outcome::Moved(read)) => Ok(Fetched::Below(read.slot, None)),
                None => Err(Error::internal("a read has no outcome")),
            }
        };
        let tiers = Arc::clone(self);
        let told = move |result: Result<Fetched>| {
            let failed = match &result {
                Ok(Fetched::Below(_, error)) => error.as_ref(),
                Ok(_) => None,
                Err(error) => Some(error),
            };
            match &result {
                Ok(Fetched::Below(_, None) | Fetched::AtTop) => tiers.note_answer(number, request),
                _ => tiers.note(number, request, failed),
            }
            match result {
                Ok(Fetched::Here(read)) => tiers.insert_fetched(number, id, read),
                Ok(Fetched::Below(slot, _)) => tiers.fetch(id, slot, Some(number)),
                Ok(Fetched::AtTop) | Err(_) => tiers.fetched(id),
            }
        };
        tier.pool.job(LANE_LOAD, request.deadline, work, told);
    }

    /// A block was read in tier `number`: the tiers above keep it. What is not sound is left to the
    /// next load, which looks twice and says so.
    fn insert_fetched(self: &Arc<Self>, number: usize, id: BlockId, read: ReadDone) {
        let record = &read.slot.as_slice()[..read.read];
        let Ok(ordinal) = self.verify(id, record, read.stored_len) else {
            drop(read);
            return self.fetched(id);
        };
        let counts = &self.tiers[number].counts;
        add(&counts.blocks_read, 1);
        add(&counts.bytes_read, record.len() as u64);
        let tiers = Arc::clone(self);
        self.raise(number, id, read, ordinal, move || tiers.fetched(id));
    }

    fn fetched(self: &Arc<Self>, id: BlockId) {
        self.prefetch
            .lock()
            .reading
            .retain(|&reading| reading != id);
        self.pump_prefetch();
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
        assert_eq!(queue.next(true), Some((id(2), Priority::Urgent)));
        assert_eq!(queue.next(false), Some((id(1), Priority::NextBatch)));
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
            "what is being read is taken on already"
        );
        assert_eq!(queue.known.len(), AT_ONCE);
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
        assert_eq!(queue.known.len(), MAX_WAITING);
        assert!(
            queue.known.contains_key(&id(0)) && !queue.known.contains_key(&id(MAX_WAITING - 1)),
            "the latest goes"
        );
    }

    #[test]
    fn out_of_date_entries_do_not_pile_up() {
        let mut queue = Queue::default();
        for _ in 0..4 * MAX_WAITING {
            queue.add(id(1), Priority::Normal);
            queue.cancel(&[id(1)]);
            assert!(queue.waiting.iter().map(VecDeque::len).sum::<usize>() <= 2 * MAX_WAITING);
        }
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
