//! The times of the stages of a load and of a dump: kept from [`keep_stages`] on, on the clock of
//! the store.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_infra::{Clock, ManualClock};
use ucm_store::engine::Task;
use ucm_store::stats::keep_stages;
use ucm_testkit::OpKind;

use crate::common::{Device, Layout, Setup, Store, directory, id, only_over};

/// A store and its clock.
struct Fixture {
    store: Store,
    setup: Setup,
    clock: Arc<ManualClock>,
}

impl Fixture {
    fn open(dir: &std::path::Path) -> Self {
        let (setup, clock) = (Setup::default(), ManualClock::new());
        let shared = Arc::clone(&clock) as Arc<dyn Clock>;
        let store = Store::with_clock(dir, setup.clone(), shared);
        Self {
            store,
            setup,
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
        let device = Device::filled(&self.setup, &block);
        self.store.engine.dump(device.rows(&block)).unwrap()
    }
}

#[test]
fn each_stage_has_its_begin_its_end_and_its_sum() {
    only_over!(OneMedium, "memory above is read and written first");
    let dir = directory();
    let fixture = Fixture::open(dir.path());
    let device = Device::blank(&fixture.setup, &[id(0)]);
    let load = |fixture: &Fixture| {
        let rows = device.rows(&[id(0)]);
        fixture.store.engine.load(rows, None).unwrap()
    };
    let before = fixture.dump(0);
    fixture.store.outcome(&before).unwrap();
    assert!(before.stages().is_empty(), "no clock is read for them");
    keep_stages();
    let task = fixture.slow(OpKind::Read, load);
    let stages: Vec<_> = task.stages().into_iter().collect();
    let (none, all) = ([0.005, 0.005, 0.0], [0.0, 0.005, 0.005]);
    assert_eq!(stages, [("read", all), ("scatter", none), ("verify", none)]);
    let task = fixture.slow(Layout::of_this_run().writing(), |fixture| fixture.dump(1));
    let stages: Vec<_> = task.stages().into_iter().collect();
    assert_eq!(stages, [("copy", [0.0; 3]), ("write", all)]);
}
