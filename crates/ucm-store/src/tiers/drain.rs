//! The end: what only memory has and a lower stage is to have goes down while there is time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ucm_core::{BlockId, Result};
use ucm_device::Slot;
use ucm_infra::{Bell, Completion, Mono};

use super::{Shared, WritePolicy};
use crate::backend::{BlockRead, Listed, ReadDone};
use crate::events::Level;

impl Shared {
    /// Writes back what this process's memories above stages written back to still hold, the latest used first, until
    /// `until`.
    pub(super) fn write_back(self: &Arc<Self>, until: Mono) {
        for number in 1..self.stages.len() {
            if self.stages[number].policy != WritePolicy::Back {
                continue;
            }
            let listed = Completion::new();
            let answer = Arc::clone(&listed);
            let done = move |result: Result<Vec<Listed>>| {
                answer.complete(result);
            };
            let above = &self.stages[number - 1].backend;
            above.list(until, Box::new(done));
            let Some(Ok(mut records)) = listed.wait(&*self.clock, Some(until)) else {
                continue;
            };
            records.sort_unstable_by_key(|record| std::cmp::Reverse(record.used_ns));
            self.write_back_to(number, &records, until);
        }
    }

    fn write_back_to(self: &Arc<Self>, number: usize, records: &[Listed], until: Mono) {
        let under_way = Arc::new(AtomicUsize::new(0));
        let mut begun = 0;
        for record in records {
            let slot = self.await_spare(until);
            let Some(slot) = slot.filter(|_| self.clock.now() < until) else {
                break;
            };
            begun += 1;
            under_way.fetch_add(1, Ordering::AcqRel);
            self.write_one_back(number, record.id, slot, until, &under_way);
        }
        self.await_until(until, || under_way.load(Ordering::Acquire) == 0);
        let left = records.len() - begun + under_way.load(Ordering::Acquire);
        if left > 0 {
            let name = &self.stages[number].name;
            let text = format!(
                "{left} of {} blocks in memory were not written back to {name} in the time for shutting down; they will \
                 be computed again",
                records.len()
            );
            self.say(Level::Warning, text);
        }
    }

    fn write_one_back(
        self: &Arc<Self>,
        number: usize,
        id: BlockId,
        slot: Slot,
        until: Mono,
        under_way: &Arc<AtomicUsize>,
    ) {
        let (shared, under_way) = (Arc::clone(self), Arc::clone(under_way));
        let read = move |result: Result<ReadDone>| {
            let ended = Arc::clone(&shared);
            let over = move || {
                // What has ended by its deadline only stays among those under way: it is not below.
                if ended.clock.now() < until {
                    under_way.fetch_sub(1, Ordering::AcqRel);
                }
                ended.freed.ring();
            };
            match result {
                Ok(ReadDone { slot, read, .. }) => shared.move_down(number, id, slot, read, until, over),
                Err(_) => over(), // it went meanwhile
            }
        };
        self.stages[number - 1]
            .backend
            .read(0, vec![BlockRead::whole(id, slot, until, Box::new(read))]);
    }

    fn await_spare(&self, until: Mono) -> Option<Slot> {
        let mut slot = None;
        self.await_until(until, || {
            slot = slot.take().or_else(|| self.spare.try_acquire());
            slot.is_some()
        });
        slot
    }

    fn await_until(&self, until: Mono, mut so: impl FnMut() -> bool) {
        let bell: &Bell = &self.freed;
        loop {
            let seen = bell.seen();
            if so() || self.clock.now() >= until {
                return;
            }
            self.clock.sleep(bell, seen, Some(until));
        }
    }
}
