//! The times of the stages of a load and of a dump: kept from [`keep_stages`] on, on the clock of
//! the store.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_infra::{Clock, ManualClock};
use ucm_store::engine::Task;
use ucm_store::stats::keep_stages;
use ucm_testkit::OpKind;

use crate::common::{Device, Fixture, Layout, Store, directory, id, only_over};

/// A store and its clock.
struct Timed {
    store: Store,
    fixture: Fixture,
    clock: Arc<ManualClock>,
}

impl Timed {
    fn open(dir: &std::path::Path) -> Self {
        let (fixture, clock) = (Fixture::default(), ManualClock::new());
        let shared = Arc::clone(&clock) as Arc<dyn Clock>;
        let store = Store::with_clock(dir, fixture.clone(), shared);
        Self {
            store,
            fixture,
            clock,
        }
    }

    /// A task of which an operation of this kind takes five milliseconds, finished.
    fn slow(&self, kind: OpKind, begin: impl FnOnce(&Self) -> Task) -> Task {
        let gate = self.store.hang(kind);
        let task = begin(self);
        gate.await_waiting(1);
        self.clock.advance(Duration::from_millis(5));
        gate.open();
        self.store.outcome(&task).unwrap();
        self.store.faults.clear();
        task
    }

    fn dump(&self, number: u8) -> Task {
        let block = [id(number)];
        let device = Device::filled(&self.fixture, &block);
        self.store.engine.dump(device.rows(&block)).unwrap()
    }
}

#[test]
fn each_stage_has_its_begin_its_end_and_its_sum() {
    only_over!(OneMedium, "memory above is read and written first");
    let dir = directory();
    let timed = Timed::open(dir.path());
    let device = Device::blank(&timed.fixture, &[id(0)]);
    let load = |timed: &Timed| {
        let rows = device.rows(&[id(0)]);
        timed.store.engine.load(rows, None).unwrap()
    };
    let before = timed.dump(0);
    timed.store.outcome(&before).unwrap();
    assert!(before.stages().is_empty(), "no clock is read for them");
    keep_stages();
    let task = timed.slow(OpKind::Read, load);
    let stages: Vec<_> = task.stages().into_iter().collect();
    let (none, all) = ([0.005, 0.005, 0.0], [0.0, 0.005, 0.005]);
    assert_eq!(stages, [("read", all), ("scatter", none), ("verify", none)]);
    let task = timed.slow(Layout::of_this_run().writing(), |timed| timed.dump(1));
    let stages: Vec<_> = task.stages().into_iter().collect();
    assert_eq!(stages, [("copy", [0.0; 3]), ("write", all)]);
}
