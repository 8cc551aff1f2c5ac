//! Side shards: written with their blocks or alone, and read without the KV. Over every medium,
//! layout and codec.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use ucm_core::ErrorKind;
use ucm_media::memory::Policy;
use ucm_store::engine::{RowSides, SidesTask};
use ucm_testkit::OpKind;

use crate::common::device::side_content;
use crate::common::segments::patient;
use crate::common::sides::{
    CODES, MEAN, columns, default, dump, dump_alone, each_way, has_all, loads, plain, sided, sides,
};
use crate::common::{
    Above, Device, Fixture, Layout, Medium, Store, directory, eventually, id, ids, media, on,
};

#[test]
fn they_come_back_on_every_medium_by_block_and_by_layer() {
    for medium in media() {
        for fixture in each_way(&sided(on(medium))) {
            let dir = directory();
            let store = Store::open(dir.path(), fixture);
            dump(&store, &ids(4));
            assert!(has_all(&store, &ids(4)), "{medium:?}");
            assert_eq!(
                sides(&store, &[id(9), id(1), id(8)], MEAN),
                [false, true, false]
            );
            assert!(loads(&store, &ids(4)), "{medium:?}");
            dump_alone(&store, &[id(9)], &[CODES]);
            assert_eq!(
                sides(&store, &[id(9), id(1)], CODES),
                [true, true],
                "{medium:?}"
            );
            assert_eq!(sides(&store, &[id(9)], MEAN), [false]);
            assert!(!store.engine.lookup(&[id(9)]).unwrap()[0], "it is no block");
            assert_eq!(store.stat("sides_published"), 1);
        }
    }
}

#[test]
fn they_come_back_in_every_layout_under_every_codec_and_tier() {
    for fixture in columns() {
        let dir = directory();
        let root = dir.path().join("root");
        let what = format!(
            "{:?} {:?} {:?}",
            fixture.layout, fixture.compressed, fixture.above
        );
        let store = Store::open(&root, fixture.clone());
        dump(&store, &ids(4));
        dump_alone(&store, &[id(7)], &[MEAN, CODES]);
        assert!(has_all(&store, &[ids(4), vec![id(7)]].concat()), "{what}");
        drop(store);
        let store = Store::open(&root, fixture); // the memory is empty now
        assert!(has_all(&store, &[ids(4), vec![id(7)]].concat()), "{what}");
        assert_eq!(store.stat("blocks_loaded"), 0);
        assert!(loads(&store, &ids(4)), "{what}");
        assert!(
            has_all(&store, &ids(4)),
            "from where they were brought up to, {what}"
        );
        assert_eq!(
            (store.stat("records_refused"), store.stat("sides_refused")),
            (0, 0),
            "{what}"
        );
    }
}

#[test]
fn only_the_header_and_the_side_shard_are_read() {
    const BLOCKS: u8 = 12;
    const KV: u64 = 256 << 10;
    let large = Fixture {
        tensors: vec![KV / 2 / 4, KV / 2 / 4],
        layers: 4,
        layers_per_shard: 4,
        slots: 32,
        above: Above::Nothing,
        compressed: false,
        ..default()
    };
    let memory = Medium::Memory(32, Policy::Lru);
    let columns = [
        Fixture {
            layout: Layout::File,
            ..large.clone()
        },
        Fixture {
            layout: patient().layout,
            ..large.clone()
        },
        Fixture {
            medium: memory,
            ..large.clone()
        },
        Fixture {
            compressed: true,
            layout: Layout::segments(),
            ..large.clone()
        },
    ];
    for fixture in columns {
        let dir = directory();
        let what = format!(
            "{:?} {:?} {:?}",
            fixture.medium, fixture.layout, fixture.compressed
        );
        let store = Store::open(dir.path(), fixture.clone());
        dump(&store, &ids(BLOCKS));
        // Another process, which has nothing in its memory; one that reads the first one's, where
        // that is all there is.
        let reader = Store::open(dir.path(), fixture);
        eventually("the other's memory is found", || {
            reader
                .engine
                .lookup(&ids(BLOCKS))
                .unwrap()
                .iter()
                .all(|&found| found)
        });
        for (name, pages) in [(MEAN, 1), (CODES, 2)] {
            for store in [&store, &reader] {
                let before = store.tier(0, "bytes_read");
                assert!(
                    sides(store, &ids(BLOCKS), name).iter().all(|&found| found),
                    "{what}"
                );
                let read = store.tier(0, "bytes_read") - before;
                assert_eq!(read, u64::from(BLOCKS) * (1 + pages) * 4096, "{what}");
                assert!(
                    read * 10 <= u64::from(BLOCKS) * KV,
                    "at most a tenth of the KV, {what}"
                );
            }
        }
        assert_eq!(reader.tier(0, "sides_read"), 2 * u64::from(BLOCKS));
        assert_eq!(reader.tier(0, "blocks_read"), 0, "no KV was read, {what}");
        assert!(loads(&reader, &ids(8)), "{what}");
    }
}

#[test]
fn bytes_that_reach_the_medium_are_those_that_are_counted() {
    // By the twin of the system calls: a read of this many bytes that fails if more are read.
    for layout in [Layout::File, patient().layout] {
        let dir = directory();
        let fixture = Fixture {
            layout,
            above: Above::Nothing,
            compressed: false,
            tensors: vec![64 << 10],
            ..default()
        };
        let store = Store::open(dir.path(), fixture);
        dump(&store, &ids(3));
        store.faults.forget();
        assert_eq!(sides(&store, &ids(3), MEAN), [true; 3]);
        let reads: Vec<_> = store
            .faults
            .log()
            .into_iter()
            .filter(|seen| seen.kind == OpKind::Read)
            .collect();
        let most = if layout == Layout::File { 2 } else { 1 };
        assert_eq!(reads.len(), 3 * most, "a header and a page each, {reads:?}");
        // The bytes between them are damaged, and no load of a side shard fails.
        let kv = 4096..4096 + 3 * (64 << 10);
        for block in ids(3) {
            store.edit(block, |record| record[kv.clone()].fill(0xee));
        }
        assert_eq!(sides(&store, &ids(3), MEAN), [true; 3]);
        assert!(!loads(&store, &[id(0)]));
    }
}

#[test]
fn a_row_without_its_share_leaves_the_block_without() {
    let dir = directory();
    let fixture = Fixture {
        layers_per_shard: 1,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(2));
    let mut rows = device.rows(&ids(2));
    rows.iter_mut()
        .filter(|row| row.id == id(0) && row.shard == 2)
        .for_each(|row| row.sides = RowSides::None);
    let task = store.engine.dump(rows).unwrap();
    store.outcome(&task).unwrap();
    assert_eq!(sides(&store, &ids(2), MEAN), [false, true]);
    assert!(loads(&store, &ids(2)));
}

#[test]
fn dumps_at_once_and_in_parts_agree() {
    let dir = directory();
    for fixture in each_way(&default()) {
        let store = Store::open(dir.path(), fixture.clone());
        let device = Device::filled(&fixture, &ids(8));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for block in ids(8) {
                        let task = loop {
                            match store.engine.dump(device.rows(&[block])) {
                                Err(error) if error.kind() == ErrorKind::Busy => {
                                    std::thread::yield_now()
                                }
                                task => break task.unwrap(),
                            }
                        };
                        store.outcome(&task).unwrap();
                        assert!(has_all(&store, &[block]) && loads(&store, &[block]));
                    }
                });
                scope.spawn(|| {
                    for block in ids(8) {
                        let bytes = side_content(block, 0, 96);
                        let task = loop {
                            match store.engine.dump_sides(&[block], &[(MEAN, &bytes)]) {
                                Err(error) if error.kind() == ErrorKind::Busy => {
                                    std::thread::yield_now()
                                }
                                task => break task.unwrap(),
                            }
                        };
                        store.outcome(&task).unwrap();
                        assert_eq!(sides(&store, &[block], MEAN), [true]);
                    }
                });
            }
        });
    }
}

#[test]
fn more_than_there_are_slots_stream_through_a_few() {
    let dir = directory();
    let fixture = Fixture {
        slots: 4,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), fixture.clone());
    for block in ids(40) {
        dump(&store, &[block]);
    }
    let many: Vec<_> = ids(40).into_iter().chain(ids(40)).collect();
    assert!(sides(&store, &many, CODES).iter().all(|&found| found));
    // A row has ended before its slot is back.
    eventually("the slots come back", || store.stat("slots_free") == 4);
    assert_eq!(store.stat("sides_queued"), 0);
    let bytes = vec![0; 40 * 96];
    let busy = store
        .engine
        .dump_sides(&ids(40), &[(MEAN, &bytes)])
        .map(|_| ());
    assert_eq!(busy.unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(store.stat("slots_free"), 4);
}

#[test]
fn what_a_store_cannot_keep_is_refused_by_name() {
    let dir = directory();
    let fixture = Fixture {
        sides: vec![(MEAN, 96), (CODES, 100)],
        layers_per_shard: 1,
        ..Fixture::default()
    };
    let odd = Store::try_open(dir.path(), fixture)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        odd.contains("whole number") && odd.contains("codes") && odd.contains("shards=3"),
        "{odd}"
    );
    let store = Store::open(dir.path(), default());
    let error = |result: ucm_core::Result<_>| {
        let error = result.map(|_: SidesTask| ()).unwrap_err();
        (error.kind(), error.to_string())
    };
    let (kind, text) = error(store.engine.load_sides(ids(1), "no-such", None));
    assert!(
        kind == ErrorKind::InvalidInput
            && text.contains("no-such")
            && text.contains("mean-k, codes"),
        "{text}"
    );
    let wrong = store
        .engine
        .dump_sides(&ids(2), &[(MEAN, &[0; 96])])
        .map(|_| ())
        .unwrap_err();
    assert!(
        wrong.to_string().contains("mean-k") && wrong.to_string().contains("expected=192"),
        "{wrong}"
    );
    let mut rows = Device::filled(&store.fixture, &ids(1)).rows(&ids(1));
    rows[0].sides = RowSides::Beside(vec![0; 95].into());
    let wrong = store.engine.dump(rows).map(|_| ()).unwrap_err();
    assert!(wrong.to_string().contains("expected=6096"), "{wrong}");
    drop(store);
    let store = Store::open(dir.path(), plain(default()));
    let mut rows = Device::filled(&store.fixture, &ids(1)).rows(&ids(1));
    rows[0].sides = RowSides::Beside(vec![0; 96].into());
    assert!(
        store
            .engine
            .dump(rows)
            .map(|_| ())
            .unwrap_err()
            .to_string()
            .contains("without side shards")
    );
    let reader = Fixture {
        lookup_only: true,
        ..default()
    };
    let reader = Store::open(dir.path(), reader);
    assert_eq!(
        error(reader.engine.load_sides(ids(1), MEAN, None)).0,
        ErrorKind::Unsupported
    );
}
