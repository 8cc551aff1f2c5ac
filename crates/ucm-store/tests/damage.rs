//! Damaged records: each is refused, counted and replaced by the next dump, and too many of them
//! within a minute open the breaker of their medium.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, crc32c};
use ucm_infra::{Clock, ManualClock};
use ucm_store::breaker::BreakerConfig;
use ucm_testkit::{Fault, OpKind};

use crate::common::only_over;
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, id, ids, of_records};

/// A store on a manual clock, with a device that holds what its blocks stand for.
struct Bench {
    store: Store,
    device: Device,
    clock: Arc<ManualClock>,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn new(damaged_per_minute: u32) -> Self {
        let (dir, clock, fixture) = (directory(), ManualClock::new(), Fixture::default());
        let fixture = Fixture {
            breaker: BreakerConfig {
                damaged_per_minute,
                ..fixture.breaker
            },
            ..fixture
        };
        let device = Device::filled(&fixture, &ids(5));
        let store = Store::with_clock(dir.path(), fixture, Arc::clone(&clock) as Arc<dyn Clock>);
        store.dump(&device, &ids(5)).unwrap();
        Self {
            store,
            device,
            clock,
            _dir: dir,
        }
    }

    fn refuse(&self, block: BlockId) {
        let target = Device::blank(&self.store.fixture, &[block]);
        self.store.load(&target, &[block]).unwrap_err();
        assert!(target.is_blank(block));
    }

    fn heals(&self, block: BlockId) {
        self.store.dump(&self.device, &[block]).unwrap();
        let target = Device::blank(&self.store.fixture, &[block]);
        self.store.load(&target, &[block]).unwrap();
        assert!(target.is_right(block));
    }
}

#[test]
fn damage_of_every_kind_is_refused_and_replaced() {
    type Change = fn(&mut Vec<u8>);
    let damages: [(&str, Change); 6] = [
        ("bad_checksum", |bytes| bytes[5000] ^= 1),
        ("bad_header", |bytes| bytes[100] ^= 1),
        ("not_a_record", |bytes| bytes.fill(0)),
        ("truncated", |bytes| bytes.truncate(4500)),
        ("truncated", |bytes| bytes.truncate(0)),
        ("wrong_length", |bytes| bytes.push(0)),
    ];
    // A record in a segment keeps its length.
    let fitting = if Layout::of_this_run() == Layout::File {
        6
    } else {
        3
    };
    for (reason, change) in damages.into_iter().take(fitting) {
        let bench = Bench::new(1);
        let damaged = bench.store.edit(id(0), change);
        bench.refuse(id(0));
        assert_eq!(bench.store.missed(reason), 1, "{reason}");
        assert_eq!(bench.store.stat("records_refused"), 1);
        assert_eq!(bench.store.record(id(0)), damaged, "it stays where it is");
        bench.heals(id(0));
        assert_eq!(bench.store.stat("records_replaced"), 1);
        assert_eq!(bench.store.stat("healthy"), 1);
    }
}

#[test]
fn whole_records_that_belong_elsewhere_do_not_count_as_damage() {
    let bench = Bench::new(0); // the first damaged record would open the breaker
    let newer = bench.store.edit(id(0), |bytes| {
        bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
        let crc = crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    });
    let other = bench.store.record(id(2));
    bench.store.edit(id(1), |bytes| bytes.clone_from(&other));
    bench.refuse(id(0));
    bench.refuse(id(1));
    assert_eq!(
        (
            bench.store.missed("newer_version"),
            bench.store.missed("foreign_id")
        ),
        (1, 1)
    );
    assert_eq!(bench.store.record(id(0)), newer);
    assert_eq!(bench.store.stat("healthy"), 1);
    assert_eq!(bench.store.stat("breaker_opened"), 0);
}

#[test]
fn too_much_damage_opens_the_breaker() {
    only_over!(OneMedium, "each tier has a breaker of its own");
    let bench = Bench::new(3);
    for block in ids(5) {
        bench.store.edit(block, |bytes| bytes[5000] ^= 1);
    }
    ids(3).into_iter().for_each(|block| bench.refuse(block));
    assert_eq!(bench.store.stat("healthy"), 1);
    bench.refuse(id(3));
    assert_eq!(
        (
            bench.store.stat("healthy"),
            bench.store.stat("breaker_opened")
        ),
        (0, 1)
    );
    assert_eq!(bench.store.engine.lookup(&ids(5)).unwrap(), [false; 5]);
    assert_eq!(bench.store.missed("unhealthy"), 5);
    let said = bench.store.said();
    let opened = said
        .iter()
        .filter(|text| text.contains("too many damaged records"));
    assert_eq!(opened.count(), 1, "{said:?}");
    // A minute later all is as before, without help.
    bench.clock.advance(Duration::from_secs(60));
    assert_eq!(
        bench.store.engine.lookup(&ids(5)).unwrap(),
        [false, false, false, false, true]
    );
    eventually("it is well again", || bench.store.stat("healthy") == 1);
    bench.refuse(id(4));
    assert_eq!(bench.store.stat("healthy"), 1, "few again");
    ids(5).into_iter().for_each(|block| bench.heals(block));
}

#[test]
fn a_lie_about_a_write_is_found_by_the_first_reader() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let bench = Bench::new(1);
    let store = &bench.store;
    let device = Device::filled(&store.fixture, &[id(7)]);
    store.faults.forget();
    store.fault(of_records(Layout::of_this_run().writing(), Fault::Flip(vec![5000])).times(1));
    store.dump(&device, &[id(7)]).unwrap();
    assert_eq!(store.asked(OpKind::Read, id(7)), 0, "a dump reads nothing");
    assert_eq!(store.engine.lookup(&[id(7)]).unwrap(), [true]);
    bench.refuse(id(7));
    assert_eq!(store.stat("records_refused"), 1);
}
