//! Side shards on a root that others use too: stores without any or with others, those that merge,
//! clear away and remove.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::time::Duration;

use ucm_infra::MonotonicTime;
use ucm_media::backend::Flush;
use ucm_store::engine::Until;
use ucm_store::tiers::WritePolicy;

use crate::common::device::side_content;
use crate::common::merging::{eager, filling, gone, seal};
use crate::common::segments::{await_taken_over, die_at_seal, patient, quick};
use crate::common::sides::{
    CODES, MEAN, alone, begin, columns, come, default, dump, dump_alone, has_all, loads, plain,
    sided, sides,
};
use crate::common::{Above, Device, Fixture, Layout, Store, directory, eventually, id, ids};

#[test]
fn a_block_that_was_stored_without_is_never_written_again() {
    for fixture in columns() {
        let dir = directory();
        let root = dir.path().join("root");
        let store = Store::open(&root, plain(fixture.clone()));
        dump(&store, &ids(4));
        let before: Vec<_> = ids(4)
            .into_iter()
            .map(|block| store.record(block))
            .collect();
        drop(store);
        let store = Store::open(&root, fixture.clone());
        assert_eq!(store.engine.lookup(&ids(4)).unwrap(), [true; 4]);
        assert_eq!(sides(&store, &ids(4), MEAN), [false; 4]);
        dump(&store, &ids(4)); // with them this time
        assert_eq!(store.stat("blocks_present"), 4);
        // what stands above may have had no copy yet, and has one with them now
        let alone = fixture.above == Above::Nothing;
        assert!(!alone || sides(&store, &ids(4), MEAN) == [false; 4]);
        assert!(loads(&store, &ids(4)));
        dump_alone(&store, &ids(4), &[MEAN, CODES]);
        assert!(has_all(&store, &ids(4)), "{:?}", fixture.above);
        let after: Vec<_> = ids(4)
            .into_iter()
            .map(|block| store.record(block))
            .collect();
        assert_eq!(after, before);
        dump_alone(&store, &ids(4), &[MEAN]);
        assert_eq!(
            (store.stat("sides_published"), store.stat("sides_present")),
            (8, 4)
        );
        drop(store);
        let store = Store::open(&root, fixture);
        assert!(has_all(&store, &ids(4)) && loads(&store, &ids(4)));
    }
}

#[test]
fn a_store_without_side_shards_reads_the_blocks_of_one_that_has_them() {
    for fixture in columns()
        .into_iter()
        .filter(|fixture| fixture.above == Above::Nothing)
    {
        let dir = directory();
        let root = dir.path().join("root");
        // before anybody wrote records of another length
        let first = Store::open(&root, plain(fixture.clone()));
        dump(&first, &[id(9)]);
        let writer = Store::open(&root, fixture.clone());
        dump(&writer, &ids(4));
        dump_alone(&writer, &[id(9)], &[MEAN]);
        let before: Vec<_> = ids(4)
            .into_iter()
            .map(|block| writer.record(block))
            .collect();
        assert!(
            loads(&first, &ids(4)),
            "{:?} {:?}",
            fixture.layout,
            fixture.above
        );
        eventually("their lengths are known", || {
            first.engine.lookup(&ids(4)).unwrap() == [true; 4]
        });
        dump(&first, &ids(4));
        assert_eq!(
            first.stat("blocks_present"),
            4,
            "{:?} {:?}",
            fixture.layout,
            fixture.above
        );
        let other = Fixture {
            sides: vec![("other", 9000), (CODES, 6000)],
            ..fixture.clone()
        };
        let other = Store::open(&root, other);
        assert!(
            loads(&other, &ids(4)),
            "{:?} {:?}",
            fixture.layout,
            fixture.above
        );
        assert_eq!(
            sides(&other, &ids(4), CODES),
            [true; 4],
            "where the header says"
        );
        let task = begin(&other.engine, &ids(4), "other");
        assert_eq!(come(&other.engine, &task, 4), [None, None, None, None]);
        dump(&other, &ids(4));
        assert_eq!(other.stat("blocks_present"), 4);
        let after: Vec<_> = ids(4)
            .into_iter()
            .map(|block| writer.record(block))
            .collect();
        assert_eq!(after, before);
        assert!(has_all(&writer, &ids(4)) && loads(&writer, &ids(4)));
    }
}

#[test]
fn the_same_name_in_another_length_is_another_side_shard() {
    let dir = directory();
    let store = Store::open(
        dir.path(),
        Fixture {
            above: Above::Nothing,
            ..default()
        },
    );
    dump(&store, &ids(2));
    let longer = Fixture {
        sides: vec![(MEAN, 99)],
        above: Above::Nothing,
        ..Fixture::default()
    };
    let longer = Store::open(dir.path(), longer);
    let task = begin(&longer.engine, &ids(2), MEAN);
    assert_eq!(come(&longer.engine, &task, 2), [None, None]);
    assert!(loads(&longer, &ids(2)));
}

#[test]
fn touching_a_block_touches_its_side_shards() {
    let dir = directory();
    let fixture = Fixture {
        layout: Layout::File,
        compressed: false,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), fixture);
    dump(&store, &[id(0)]);
    dump_alone(&store, &[id(0), id(1)], &[MEAN]);
    let files = [id(0), alone(id(0), MEAN), alone(id(1), MEAN)].map(|id| store.file(id));
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(7200);
    for file in &files {
        std::fs::File::options()
            .write(true)
            .open(file)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
    }
    drop(store);
    let store = Store::open(
        dir.path(),
        Fixture {
            layout: Layout::File,
            compressed: false,
            above: Above::Nothing,
            ..default()
        },
    );
    store.engine.touch(&[(id(0), 3)]).unwrap();
    let young = |file: &std::path::PathBuf| {
        let age = std::fs::metadata(file)
            .unwrap()
            .modified()
            .unwrap()
            .elapsed();
        age.is_ok_and(|age| age < Duration::from_secs(600))
    };
    eventually("both are touched", || young(&files[0]) && young(&files[1]));
    assert!(!young(&files[2]));
    // It counts, and goes like a record.
    let used = store.stat("storage_used_bytes");
    dump_alone(&store, &[id(2)], &[MEAN]);
    eventually("it counts", || {
        store.stat("storage_used_bytes") == used + 2 * 4096
    });
    assert_eq!(
        std::fs::metadata(store.file(alone(id(2), MEAN)))
            .unwrap()
            .len(),
        2 * 4096
    );
}

#[test]
fn merging_keeps_side_shards_and_those_that_lie_alone() {
    for compressed in [false, true] {
        let with = |fixture: Fixture| match compressed {
            false => sided(fixture),
            true => sided(fixture).compressed(),
        };
        // A store without side shards merges them too: it knows their lengths.
        for merger in [
            with(eager(Duration::ZERO)),
            plain(with(eager(Duration::ZERO))),
        ] {
            let dir = directory();
            let store = Store::open(dir.path(), with(filling()));
            let device = Device::filled(&store.fixture, &ids(6));
            for block in ids(6) {
                seal(&store, &device, &[block]);
            }
            // Damage in a side shard is no reason to leave the block behind.
            store.edit(id(2), |record| *record.last_mut().unwrap() ^= 1);
            for block in [id(7), id(8)] {
                let bytes = side_content(block, 0, 96);
                let task = store
                    .engine
                    .dump_sides(&[block], &[(MEAN, &bytes)])
                    .unwrap();
                eventually("it is published", || {
                    store.backend.flush(Flush::Now);
                    task.wait(
                        store.engine.clock(),
                        Until::Published,
                        Some(MonotonicTime(0)),
                    )
                });
            }
            drop(store);
            let store = Store::open(dir.path(), merger);
            eventually("they are merged", || store.segments().len() == 1);
            assert_eq!(store.places().len(), 8);
            assert!(loads(&store, &ids(6)));
            drop(store);
            let store = Store::open(dir.path(), with(filling()));
            let (all_but_6, all_but_2) = (|n| n != 6, |n| n != 2);
            assert_eq!(
                sides(&store, &ids(9), MEAN),
                (0..9).map(all_but_6).collect::<Vec<_>>()
            );
            assert_eq!(
                sides(&store, &ids(6), CODES),
                (0..6).map(all_but_2).collect::<Vec<_>>()
            );
            assert!(loads(&store, &ids(6)));
        }
    }
}

#[test]
fn what_a_dead_writer_left_is_taken_over_with_its_side_shards() {
    for reader in [sided(quick()), plain(quick())] {
        let dir = directory();
        let dead = sided(Fixture {
            above: Above::Nothing,
            process: gone(),
            ..patient()
        });
        let device = Device::filled(&dead, &ids(4));
        die_at_seal(dir.path(), &dead, &device, &ids(4));
        let store = Store::open(dir.path(), reader);
        await_taken_over(&store);
        assert_eq!(store.engine.lookup(&ids(4)).unwrap(), [true; 4]);
        assert!(loads(&store, &ids(4)));
        drop(store);
        let store = Store::open(dir.path(), sided(quick()));
        assert!(has_all(&store, &ids(4)));
    }
}

#[test]
fn memory_gives_what_it_has_beside_the_kv_to_the_tier_below() {
    let dir = directory();
    let fixture = Fixture {
        above: Above::Memory(16, WritePolicy::Back),
        ..default()
    };
    let root = dir.path().join("root");
    let store = Store::open(&root, fixture.clone());
    dump(&store, &ids(5));
    dump_alone(&store, &[id(7), id(8)], &[MEAN]);
    assert_eq!(store.tier(1, "blocks_written"), 0);
    store.engine.close();
    assert_eq!(store.tier(1, "blocks_written"), 7);
    drop(store);
    let store = Store::open(&root, fixture);
    assert!(has_all(&store, &ids(5)) && loads(&store, &ids(5)));
    assert_eq!(
        sides(&store, &[id(6), id(7), id(8)], MEAN),
        [false, true, true]
    );
}

#[test]
fn a_record_of_its_own_takes_no_place_in_a_memory_above() {
    let dir = directory();
    let fixture = Fixture {
        above: Above::Memory(16, WritePolicy::Through),
        ..default()
    };
    let store = Store::open(&dir.path().join("root"), fixture);
    dump(&store, &ids(2));
    dump_alone(&store, &ids(9), &[MEAN]);
    let memory = store.memory.as_ref().unwrap();
    assert!(
        ids(9)
            .into_iter()
            .all(|block| !memory.contains(alone(block, MEAN)))
    );
    assert!(memory.contains(id(0)) && memory.contains(id(1)));
    assert_eq!(sides(&store, &ids(9), MEAN), [true; 9]);
}
