//! Side shards under faults: what is wrong with one is a miss of that one, and what is wrong with
//! the KV none of it.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::time::Duration;

use ucm_core::ErrorKind;
use ucm_store::engine::Until;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::device::side_content;
use crate::common::segments::quick;
use crate::common::sides::{
    CODES, CUTS, MEAN, alone, assert_cut, default, dump, dump_alone, has_all, loads, of_one_root,
    sided, sides,
};
use crate::common::{Above, Device, Fixture, Layout, Store, directory, eventually, id, ids};

#[test]
fn damage_in_a_side_shard_is_a_miss_of_that_one_alone() {
    for fixture in of_one_root() {
        let (dir, block) = (directory(), id(3));
        let store = Store::open(&dir.path().join("root"), fixture);
        dump(&store, &ids(5));
        for name in [MEAN, CODES] {
            let last = if name == CODES { 1 } else { 2 * 4096 + 4000 }; // the last page of each
            store.edit(block, |record| {
                let at = record.len() - last;
                record[at] ^= 1;
            });
            let left = if name == MEAN {
                [true; 5]
            } else {
                [true, true, true, false, true]
            };
            assert_eq!(
                sides(&store, &ids(5), CODES),
                left,
                "{name} {:?}",
                store.fixture.layout
            );
        }
        assert_eq!(
            sides(&store, &ids(5), MEAN),
            [true, true, true, false, true]
        );
        assert_eq!(store.engine.lookup(&ids(5)).unwrap(), [true; 5]);
        assert!(loads(&store, &ids(5)), "the KV is as good as before");
        assert_eq!(store.stat("sides_refused"), 2, "each once");
        let untouched = ["records_refused", "refused_now", "breaker_opened"];
        assert!(untouched.iter().all(|name| store.stat(name) == 0));
        // It is made again, and lies alone; what is damaged stays as it is.
        let before = store.record(block);
        dump_alone(&store, &[block], &[MEAN]);
        assert_eq!(sides(&store, &ids(5), MEAN), [true; 5]);
        assert_eq!(
            sides(&store, &ids(5), CODES),
            [true, true, true, false, true]
        );
        dump(&store, &[block]);
        assert_eq!(
            store.record(block),
            before,
            "no byte of a record is written again"
        );
    }
}

#[test]
fn damage_in_the_kv_is_none_of_the_side_shards() {
    for fixture in of_one_root() {
        let (dir, block) = (directory(), id(2));
        let store = Store::open(&dir.path().join("root"), fixture);
        dump(&store, &ids(4));
        store.edit(block, |record| record[4096 + 5] ^= 1);
        assert!(has_all(&store, &ids(4)));
        assert!(
            !loads(&store, &[block]),
            "{:?} {:?}",
            store.fixture.layout,
            store.fixture.above
        );
        assert_eq!(store.stat("sides_refused"), 0);
        dump(&store, &[block]);
        assert!(loads(&store, &ids(4)) && has_all(&store, &ids(4)));
    }
}

#[test]
fn what_is_read_wrong_once_is_read_once_more() {
    let dir = directory();
    let store = Store::open(
        dir.path(),
        Fixture {
            above: Above::Nothing,
            ..default()
        },
    );
    dump(&store, &ids(1));
    drop(store);
    let store = Store::open(
        dir.path(),
        Fixture {
            above: Above::Nothing,
            ..default()
        },
    );
    for lie in 0..3 {
        store.fault(crate::common::of_records(OpKind::Read, Fault::FlipRandom(1)).times(1));
        assert_eq!(sides(&store, &ids(1), CODES), [true], "{lie}");
    }
    assert_eq!(store.stat("sides_refused"), 0);
}

#[test]
fn a_torn_file_is_a_block_without_side_shards_or_none() {
    let dir = directory();
    let fixture = Fixture {
        layout: Layout::File,
        compressed: false,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), fixture);
    dump(&store, &ids(3));
    let whole = std::fs::metadata(store.file(id(0))).unwrap().len();
    for (block, len) in [
        (id(0), whole - 3 * 4096),
        (id(1), whole - 4096),
        (id(2), 5000),
    ] {
        std::fs::File::options()
            .write(true)
            .open(store.file(block))
            .unwrap()
            .set_len(len)
            .unwrap();
    }
    assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [true, false, false]);
    assert_eq!(
        sides(&store, &ids(3), MEAN),
        [false, true, false],
        "as far as it goes"
    );
    assert_eq!(sides(&store, &ids(3), CODES), [false; 3]);
    assert!(loads(&store, &[id(0)]));
    dump(&store, &ids(3));
    assert_eq!(
        (store.stat("blocks_present"), store.stat("blocks_published")),
        (1, 5)
    );
    assert_eq!(sides(&store, &ids(3), CODES), [false, true, true]);
}

#[test]
fn a_segment_that_ends_inside_a_header_has_no_side_shard() {
    for len in CUTS {
        let dir = directory();
        let fixture = Fixture {
            above: Above::Nothing,
            ..sided(quick())
        };
        assert_cut(&Store::open(dir.path(), fixture), len);
    }
}

#[test]
fn a_read_that_hangs_costs_its_deadline_and_nothing_else() {
    let dir = directory();
    let fixture = Fixture {
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    dump(&store, &ids(3));
    drop(store);
    let store = Store::open(dir.path(), fixture);
    let gate = store.gate();
    store.hang_record(id(1), &gate);
    let until = Some(Duration::from_millis(300));
    let task = store.engine.load_sides(ids(3), MEAN, until).unwrap();
    assert!(task.task.wait(store.engine.clock(), Until::Published, None));
    let failures = task.task.failures();
    assert!(
        failures
            .iter()
            .all(|(_, error)| error.kind() == ErrorKind::Timeout),
        "{failures:?}"
    );
    assert!(failures.iter().any(|(row, _)| *row == 1));
    let before = task.bytes();
    gate.open();
    assert_eq!(sides(&store, &ids(3), MEAN), [true; 3]);
    assert_eq!(task.bytes(), before, "what comes late is dropped");
}

#[test]
fn closing_ends_what_waits() {
    let dir = directory();
    let fixture = Fixture {
        above: Above::Nothing,
        slots: 4, // one of them is for side shards
        deadlines: ucm_store::engine::Deadlines {
            shutdown: Duration::from_millis(200),
            ..Fixture::default().deadlines
        },
        ..default()
    };
    let store = Store::open(dir.path(), fixture);
    dump(&store, &ids(3));
    let gate = store.gate();
    store.hang_record(id(0), &gate);
    let task = store
        .engine
        .load_sides(ids(3), MEAN, Some(Duration::from_secs(60)))
        .unwrap();
    eventually("it hangs", || gate.waiting() > 0);
    store.engine.close();
    eventually("it has ended", || {
        task.task.check(store.engine.clock(), Until::Published)
    });
    assert!(!task.task.failures().is_empty());
    assert!(store.engine.load_sides(ids(3), MEAN, None).is_err());
    gate.open();
}

#[test]
fn a_side_shard_that_lies_alone_is_refused_and_replaced_like_any_record() {
    for fixture in [
        Fixture {
            layout: Layout::File,
            compressed: false,
            ..default()
        },
        Fixture {
            layout: Layout::segments(),
            ..default()
        },
    ] {
        let (dir, block) = (directory(), id(5));
        let store = Store::open(
            dir.path(),
            Fixture {
                above: Above::Nothing,
                ..fixture
            },
        );
        dump_alone(&store, &[block], &[MEAN]);
        store.edit(alone(block, MEAN), |record| record[4096] ^= 1);
        assert_eq!(sides(&store, &[block], MEAN), [false]);
        assert_eq!(
            (store.stat("sides_refused"), store.stat("records_refused")),
            (1, 1)
        );
        dump_alone(&store, &[block], &[MEAN]);
        assert_eq!(sides(&store, &[block], MEAN), [true]);
        assert_eq!(store.stat("records_replaced"), 1);
    }
}

#[test]
fn a_block_with_the_id_of_anothers_side_shard_is_refused() {
    let dir = directory();
    let gate = ucm_testkit::Gate::new();
    let store = Store::open(
        dir.path(),
        Fixture {
            above: Above::Nothing,
            ..default()
        },
    );
    store.fault(
        Rule::on(
            store.fixture.layout.writing(),
            Fault::HangBefore(gate.clone()),
        )
        .times(1),
    );
    let bytes = side_content(id(0), 0, 96);
    let task = store
        .engine
        .dump_sides(&[id(0)], &[(MEAN, &bytes)])
        .unwrap();
    let twin = alone(id(0), MEAN);
    let device = Device::filled(&store.fixture, &[twin]);
    let mixed = store.engine.dump(device.rows(&[twin])).unwrap();
    assert!(mixed.wait(store.engine.clock(), Until::Staged, None));
    gate.open();
    store.outcome(&task).unwrap();
    assert_eq!(
        store.outcome(&mixed).unwrap_err()[0].1.kind(),
        ErrorKind::InvalidInput
    );
    assert_eq!(sides(&store, &[id(0)], MEAN), [true]);
    assert!(!loads(&store, &[twin]), "a side shard is no KV");
}
