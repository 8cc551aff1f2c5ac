//! Records leave memory for the tier below: those that it evicts and, at the end while there is
//! time, those that only memory has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::Slot;
use ucm_infra::{LANE_LOAD, LANE_SPACE, MonotonicTime, Notify};
use ucm_io::IoJob;
use ucm_media::backend::{BlockRead, Listed, Outcome, ReadDone, Victim};

use super::config::WritePolicy;
use super::tier::Tier;
use super::write::Writes;

impl Writes {
    /// The levels that are written back to, and the memory above each.
    fn written_back(&self) -> impl Iterator<Item = (&Tier, usize)> {
        let levels = &self.table.levels;
        let pairs = levels.iter().zip(1..).take(levels.len() - 1);
        let back = pairs.filter(|(_, level)| levels[*level].policy == WritePolicy::Back);
        back.map(|(above, level)| (&self.table.tiers[above.members().start], level))
    }

    /// Has the memory above each level that is written back to hand over the records it evicts.
    pub(super) fn take_evicted(self: &Arc<Self>) -> Result<()> {
        for (above, level) in self.written_back() {
            let weak = Arc::downgrade(self);
            let hook = Box::new(move |victim: Box<dyn Victim>| {
                if let Some(writes) = weak.upgrade() {
                    writes.demote(level, victim);
                }
            });
            let memory = above.backend.features().memory;
            if !memory.is_some_and(|memory| memory.on_evicted(hook)) {
                let wrong = "a tier is written back to from a memory directly above it";
                let below = &self.table.tiers[self.table.levels[level].members().start];
                return Err(Error::new(ErrorKind::Config, wrong).with("tier", below.health.name()));
            }
        }
        Ok(())
    }

    /// Writes back what this process's memories above tiers written back to still hold, the latest
    /// used first, until `until`.
    pub(super) fn write_back(self: &Arc<Self>, until: MonotonicTime) {
        for (above, level) in self.written_back() {
            let backend = Arc::clone(&above.backend);
            let listed = above
                .pool
                .call(LANE_SPACE, until, move |io| backend.list(io));
            let Ok(mut records) = listed else {
                continue;
            };
            records.sort_unstable_by_key(|record| std::cmp::Reverse(record.used_ns));
            self.write_back_to(level, &records, until);
        }
    }

    fn write_back_to(self: &Arc<Self>, level: usize, records: &[Listed], until: MonotonicTime) {
        let under_way = Arc::new(AtomicUsize::new(0));
        let mut begun = 0;
        for record in records {
            let slot = self.await_spare(until);
            let Some(slot) = slot.filter(|_| self.table.clock.now() < until) else {
                break;
            };
            begun += 1;
            under_way.fetch_add(1, Ordering::AcqRel);
            self.write_one_back(level, record, slot, until, &under_way);
        }
        self.await_until(until, || under_way.load(Ordering::Acquire) == 0);
        let left = records.len() - begun + under_way.load(Ordering::Acquire);
        if left > 0 {
            let below = self.table.levels[level].members().start;
            let (name, all) = (self.table.tiers[below].health.name(), records.len());
            warn!(
                store = self.store,
                tier = name,
                left,
                "{left} of {all} blocks in memory were not written back to {name} in the time for \
                 shutting down; they will \
                 be computed again"
            );
        }
    }

    fn write_one_back(
        self: &Arc<Self>,
        level: usize,
        record: &Listed,
        slot: Slot,
        until: MonotonicTime,
        under_way: &Arc<AtomicUsize>,
    ) {
        let id = record.id;
        let number = self.table.taker_of_copy(&self.table.levels[level], id);
        let (writes, request) = (Arc::clone(self), self.table.request(until));
        let under_way = UnderWay {
            count: Arc::clone(under_way),
            writes: Arc::clone(self),
            until,
        };
        let read = move |result: Result<Vec<Outcome>>| {
            let outcome = result.map(|mut read| read.pop());
            // Else it is not there any more.
            if let Ok(Some(Outcome::Read(Ok(ReadDone { slot, read, .. })))) = outcome {
                let held = Box::new(under_way);
                writes.move_down(number, id, slot, (read, false), request, held);
            }
        };
        let above = &self.table.tiers[self.table.levels[level - 1].members().start];
        let backend = Arc::clone(&above.backend);
        let work = move |io: &IoJob| Ok(backend.read(io, vec![BlockRead::whole(id, slot, until)]));
        above.pool.job(LANE_LOAD, until, work, read);
    }

    fn await_spare(&self, until: MonotonicTime) -> Option<Slot> {
        let mut slot = None;
        self.await_until(until, || {
            slot = slot.take().or_else(|| self.moves.spare.try_acquire());
            slot.is_some()
        });
        slot
    }

    fn await_until(&self, until: MonotonicTime, mut so: impl FnMut() -> bool) {
        let notify: &Notify = &self.moves.freed;
        loop {
            let seen = notify.seen();
            if so() || self.table.clock.now() >= until {
                return;
            }
            self.table.clock.sleep(notify, seen, Some(until));
        }
    }
}

/// A record that is written back, until that has ended.
struct UnderWay {
    count: Arc<AtomicUsize>,
    writes: Arc<Writes>,
    until: MonotonicTime,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // What has ended by its deadline only stays among those under way: it is not below.
        if self.writes.table.clock.now() < self.until {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        self.writes.moves.freed.notify();
    }
}
