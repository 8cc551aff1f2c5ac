//! Random histories of jobs, releases and passing time: every job is reported exactly once, with
//! the right result.

use std::collections::BTreeMap;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use proptest::prelude::*;
use ucm_core::ErrorKind;

use super::{Rig, SECOND, lane};
use crate::clock::{Clock, MonotonicTime};

#[derive(Debug, Clone)]
enum Step {
    /// Submit a job to a lane, with a deadline in seconds from now.
    Submit(usize, Option<u32>),
    /// Release one of the held jobs.
    Release(prop::sample::Index),
    /// Advance the clock by seconds.
    Advance(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3_usize, prop::option::of(1..4_u32)).prop_map(|(lane, span)| Step::Submit(lane, span)),
        2 => any::<prop::sample::Index>().prop_map(Step::Release),
        1 => (1..3_u32).prop_map(Step::Advance),
    ]
}

/// The test's model of a submitted job.
struct Book {
    rig: Rig,
    deadlines: BTreeMap<u32, MonotonicTime>,
    held: BTreeMap<u32, Sender<()>>,
    told: BTreeMap<u32, Result<u32, ErrorKind>>,
}

impl Book {
    fn submit(&mut self, id: u32, lane: usize, span: Option<u32>) {
        let deadline = span.map_or(MonotonicTime::NEVER, |span| {
            self.rig.deadline(SECOND * span)
        });
        let (release, held) = channel::<()>();
        let work = move || {
            held.recv().ok();
            id
        };
        match self.rig.submit(lane, deadline, id, work) {
            Ok(()) => {
                self.deadlines.insert(id, deadline);
                self.held.insert(id, release);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Busy);
                let lane = self.rig.pool.stats().lanes[lane];
                assert!(lane.refused > 0);
            }
        }
    }

    /// Receives the report of one job and verifies it.
    fn hear(&mut self) {
        let (id, result) = self.rig.next();
        let due = self.deadlines[&id] <= self.rig.clock.now();
        match result {
            Ok(value) => assert!(
                value == id && !self.held.contains_key(&id),
                "{id} ended while held"
            ),
            Err(kind) => assert!(
                kind == ErrorKind::Timeout && due,
                "{id} ended with {kind:?}"
            ),
        }
        assert!(
            self.told.insert(id, result).is_none(),
            "{id} was reported twice"
        );
    }

    /// Time passes; every job held past its deadline must be reported by the pool itself.
    fn advance(&mut self, span: Duration) {
        self.rig.clock.advance(span);
        let now = self.rig.clock.now();
        let overdue: Vec<u32> = self
            .held
            .keys()
            .copied()
            .filter(|id| self.deadlines[id] <= now)
            .collect();
        while overdue.iter().any(|id| !self.told.contains_key(id)) {
            self.hear();
        }
    }

    fn check_bounds(&self) {
        let stats = self.rig.pool.stats();
        assert!(
            stats.live <= stats.size && stats.live + stats.stuck <= stats.size + 2,
            "{stats:?}"
        );
        let running: usize = stats.lanes.iter().map(|lane| lane.running).sum();
        assert_eq!(running + stats.idle, stats.live, "{stats:?}");
        for lane in &stats.lanes {
            assert!(lane.queued <= lane.lane.capacity, "{stats:?}");
            assert!(lane.running <= lane.lane.max_running, "{stats:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_accepted_job_is_told_exactly_once(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let lanes = [lane("load", 4, 3), lane("prefetch", 3, 2), lane("dump", 3, 1)];
        let mut book = Book {
            rig: Rig::new(|pool| pool.size(3).max_replacements(2).lanes(&lanes)),
            deadlines: BTreeMap::new(),
            held: BTreeMap::new(),
            told: BTreeMap::new(),
        };
        for (id, step) in (0..).zip(steps) {
            match step {
                Step::Submit(lane, span) => book.submit(id, lane, span),
                Step::Release(index) => {
                    let ids: Vec<u32> = book.held.keys().copied().collect();
                    if !ids.is_empty() {
                        book.held.remove(index.get(&ids));
                    }
                }
                Step::Advance(seconds) => book.advance(SECOND * seconds),
            }
            book.check_bounds();
        }
        // All jobs are released, stuck workers return, and time stands still: no job is left to
        // close.
        book.held.clear();
        prop_assert_eq!(book.rig.pool.shutdown(SECOND), 0);
        while book.told.len() < book.deadlines.len() {
            book.hear();
        }
        prop_assert!(book.rig.told.try_recv().is_err());
        for (id, deadline) in &book.deadlines {
            prop_assert!(*deadline != MonotonicTime::NEVER || book.told[id].is_ok());
        }
        let lanes = book.rig.pool.stats().lanes;
        let counted: u64 = lanes.iter().map(|lane| lane.completed + lane.timed_out).sum();
        prop_assert_eq!(counted, book.told.len() as u64);
    }
}
