//! A composition seen from above: what the engine asks of it, and which stages that goes to.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{Completion, Mono};

use super::gather::{Question, union};
use super::stage::{Stage, add};
use super::{LANE_PROBE, Tiers};
use crate::backend::{
    Backend, BlockRead, Done, Early, Flush, Health, Listed, Place, Presence, Priority, Quarantined,
    TierStats, Usage, WriteOptions, Written,
};
use crate::events::Event;
use crate::evidence::is_damage;

impl Backend for Tiers {
    fn name(&self) -> &'static str {
        "tiers"
    }

    fn describe(&self) -> String {
        self.shared.described.store(true, Ordering::Release);
        let words = self.shared.stages.iter().map(|stage| {
            let (name, policy) = (&stage.name, stage.policy.name());
            if stage.ready.load(Ordering::Acquire) {
                format!("{name} (written {policy}): {}", stage.backend.describe())
            } else {
                format!("{name} (written {policy}): not usable yet")
            }
        });
        words.collect::<Vec<_>>().join("; below it ")
    }

    /// Looks at every stage at once; one that is usable is enough.
    fn probe(&self, deadline: Mono) -> Result<()> {
        let looks: Vec<_> = (0..self.shared.stages.len())
            .filter(|&number| !self.shared.stages[number].ready.load(Ordering::Acquire))
            .map(|number| {
                let looked = Completion::new();
                let (shared, answer) = (Arc::clone(&self.shared), Arc::clone(&looked));
                let look = move || shared.probe_stage(number, deadline);
                let done = move |result: Result<Result<()>>| {
                    answer.complete(result.and_then(|looked| looked));
                };
                if let Err(refused) = self.shared.pool.submit(LANE_PROBE, deadline, look, done) {
                    looked.complete(Err(refused));
                }
                looked
            })
            .collect();
        let mut failed = None;
        for look in looks {
            let late = || Err(Error::new(ErrorKind::Timeout, "a tier did not answer in time"));
            if let Err(error) = look
                .wait(&*self.shared.clock, Some(deadline))
                .unwrap_or_else(late)
            {
                failed.get_or_insert(error);
            }
        }
        let usable = self
            .shared
            .stages
            .iter()
            .any(|stage| stage.ready.load(Ordering::Acquire));
        match failed {
            Some(error) if !usable => Err(error),
            _ => Ok(()),
        }
    }

    fn lookup(&self, ids: Vec<BlockId>, stop_at_missing: bool, deadline: Mono, done: Done<Vec<Presence>>) {
        let there = |found: Vec<Place>| found.into_iter().map(|place| place.map(|_| ())).collect();
        let answered = move |result: Result<Vec<Place>>| done(result.map(there));
        self.shared
            .locate(ids, stop_at_missing, deadline, Box::new(answered));
    }

    fn answers_at_once(&self) -> bool {
        self.shared
            .stages
            .iter()
            .all(|stage| stage.backend.answers_at_once())
    }

    fn read(&self, stage: usize, reads: Vec<BlockRead>) {
        let now = self.shared.clock.now(); // one time for all: who is to be read together has one deadline
        let reads = reads.into_iter();
        let admitted: Vec<_> = reads
            .filter_map(|read| self.shared.admit_read(stage, read, now))
            .collect();
        if !admitted.is_empty() {
            self.shared.stages[stage].backend.read(0, admitted);
        }
    }

    fn write(&self, id: BlockId, slot: Slot, options: WriteOptions, deadline: Mono, done: Done<Written>) {
        self.shared.write(id, slot, options, deadline, done);
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: Mono) {
        for stage in self.shared.stages.iter().filter(|stage| stage.is_well()) {
            stage.backend.touch(ids, deadline);
        }
    }

    /// Removes them from every stage that can be reached; counts those of the stage that had most.
    fn delete(&self, ids: Vec<BlockId>, deadline: Mono, done: Done<usize>) {
        let ask = move |stage: &Stage, done: Done<usize>| stage.backend.delete(ids.clone(), deadline, done);
        let question = Question {
            ask: Box::new(ask),
            join: usize::max,
            deadline,
        };
        self.shared.gather(question, done);
    }

    fn list(&self, deadline: Mono, done: Done<Vec<Listed>>) {
        let ask = move |stage: &Stage, done: Done<Vec<Listed>>| stage.backend.list(deadline, done);
        let question = Question {
            ask: Box::new(ask),
            join: union,
            deadline,
        };
        self.shared.gather(question, done);
    }

    fn early(&self) -> Early {
        let stages = self.shared.stages.iter();
        self.shared.early.merge(stages.map(|stage| stage.backend.early()))
    }

    fn flush(&self, how: Flush) {
        self.shared
            .stages
            .iter()
            .for_each(|stage| stage.backend.flush(how));
    }

    fn usage(&self) -> Usage {
        self.shared.base().backend.usage()
    }

    fn removed(&self) -> (u64, u64, u64) {
        self.shared.base().backend.removed()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.shared.base().backend.counters()
    }

    fn stuck(&self) -> usize {
        let stages = self.shared.stages.iter();
        stages.map(|stage| stage.backend.stuck()).sum::<usize>() + self.shared.pool.stuck()
    }

    fn shutdown(&self, drain: Duration) {
        let shared = &self.shared;
        let until = shared.clock.now().after(drain);
        let left = || until.since(shared.clock.now());
        shared.end_prefetch();
        shared.write_back(shared.clock.now().after(drain / 2));
        shared.pool.shutdown(left() / 4);
        for (number, stage) in shared.stages.iter().enumerate() {
            let share = left() / u32::try_from(shared.stages.len() - number).unwrap_or(1);
            stage.backend.shutdown(share);
        }
    }

    fn touch_own(&self, ids: &[(BlockId, u32)], deadline: Mono) {
        for stage in self.shared.stages.iter().filter(|stage| stage.is_well()) {
            stage.backend.touch_own(ids, deadline);
        }
    }

    fn wants_touch_own(&self) -> bool {
        let mut stages = self.shared.stages.iter();
        stages.any(|stage| stage.backend.wants_touch_own())
    }

    fn locate(&self, ids: Vec<BlockId>, stop_at_missing: bool, deadline: Mono, done: Done<Vec<Place>>) {
        self.shared.locate(ids, stop_at_missing, deadline, done);
    }

    fn place(&self, id: BlockId, from: usize) -> Option<usize> {
        self.shared.place(id, from)
    }

    fn promote(&self, stage: usize, id: BlockId, record: &[u8], ordinal: u32) {
        self.shared.promote(stage, id, record, ordinal);
    }

    fn discard(&self, stage: usize, id: BlockId, reason: MissReason, done: Done<Quarantined>) {
        let refused = &self.shared.stages[stage];
        refused.refuse(id, reason);
        add(&refused.counts.copies_refused, 1);
        if !is_damage(reason) {
            return done(Ok(Quarantined::LeftAlone));
        }
        let shared = Arc::clone(&self.shared);
        let ended = move |ended: Result<Quarantined>| {
            if let Ok(Quarantined::Stopped) = ended {
                let sick = Error::new(ErrorKind::Corrupt, "too many damaged records in a minute");
                let held = shared.stages[stage].breaker.hold(shared.clock.now());
                shared.changed(stage, held, Some(&sick));
            }
            done(ended);
        };
        refused.backend.quarantine(id, Box::new(ended));
    }

    /// What was read back and is not sound: that copy was refused when it was written.
    fn quarantine(&self, id: BlockId, done: Done<Quarantined>) {
        let stages = self.shared.stages.iter();
        match stages.rev().find(|stage| stage.has_refused(id)) {
            Some(stage) => stage.backend.quarantine(id, done),
            None => done(Ok(Quarantined::LeftAlone)),
        }
    }

    fn forgive(&self, ids: &[BlockId]) {
        for stage in &self.shared.stages {
            ids.iter().for_each(|&id| stage.forgive(id));
        }
    }

    fn prefetch(&self, ids: &[BlockId], priority: Priority) -> usize {
        self.shared.prefetch(ids, priority)
    }

    fn cancel_prefetch(&self, ids: &[BlockId]) -> usize {
        self.shared.cancel_prefetch(ids)
    }

    fn health(&self) -> Option<Health> {
        let well = self.shared.stages.iter().filter(|stage| stage.is_well()).count();
        Some(match well {
            0 => Health::Down,
            n if n == self.shared.stages.len() => Health::Well,
            _ => Health::Partly,
        })
    }

    fn tiers(&self) -> Vec<TierStats> {
        self.shared.stages.iter().map(Stage::stats).collect()
    }

    fn events(&self) -> Vec<Event> {
        let mut events = self.shared.events.drain();
        for stage in &self.shared.stages {
            let told = stage.backend.events().into_iter();
            events.extend(told.map(|event| Event {
                text: format!("tier {}: {}", stage.name, event.text),
                ..event
            }));
        }
        events
    }
}
