//! Side shards: kept beside the KV or alone, read without it, and never wrong. Over every medium, layout and codec.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, IdMask};
use ucm_infra::MonotonicTime;
use ucm_io::{Fault, OpKind, Rule};
use ucm_record::Algorithm;
use ucm_store::engine::{RowSides, SidesTask, Until};
use ucm_store::tiers::WritePolicy;
use ucm_tier::backend::Flush;
use ucm_tier::memory::Policy;

use common::device::side_content;
use common::merging::{eager, filling, gone, seal};
use common::segments::{die_at_seal, patient, quick};
use common::{Above, Device, Layout, Medium, Setup, Store, directory, eventually, id, ids, media, on};

const MEAN: &str = "mean-k";
const CODES: &str = "codes";

/// With two side shards, one of which is longer than a page.
fn sided(setup: Setup) -> Setup {
    Setup {
        sides: vec![(MEAN, 96), (CODES, 6000)],
        ..setup
    }
}

fn plain(setup: Setup) -> Setup {
    Setup {
        sides: Vec::new(),
        ..setup
    }
}

fn default() -> Setup {
    sided(Setup::default())
}

/// The id under which a side shard of a block lies alone.
fn alone(block: BlockId, name: &str) -> BlockId {
    block.xor(IdMask::of_side(name, 1))
}

fn begin(store: &Store, blocks: &[BlockId], name: &str) -> SidesTask {
    store.engine.load_sides(blocks.to_vec(), name, None).unwrap()
}

/// Waits for side shards: those that are there.
fn come(store: &Store, task: &SidesTask, count: usize) -> Vec<Option<Vec<u8>>> {
    assert!(task.task.wait(store.engine.clock(), Until::Published, None));
    let bytes = task.bytes();
    let each = bytes.chunks_exact(bytes.len() / count).enumerate();
    each.map(|(row, side)| match task.task.shard_done(row) {
        true => Some(side.to_vec()),
        false => {
            assert!(side.iter().all(|&byte| byte == 0), "what is not there is zeros");
            None
        }
    })
    .collect()
}

/// Which of these side shards are there; those that are must be right.
fn sides(store: &Store, blocks: &[BlockId], name: &str) -> Vec<bool> {
    let found = come(store, &begin(store, blocks, name), blocks.len());
    let declared = default().sides;
    let number = declared.iter().position(|(side, _)| *side == name).unwrap();
    let right = |(&block, side): (&BlockId, Option<Vec<u8>>)| {
        if let Some(side) = &side {
            assert_eq!(
                *side,
                side_content(block, number, declared[number].1),
                "a wrong hit"
            );
        }
        side.is_some()
    };
    blocks.iter().zip(found).map(right).collect()
}

/// Whether all side shards of these blocks are there.
fn has_all(store: &Store, blocks: &[BlockId]) -> bool {
    [MEAN, CODES]
        .iter()
        .all(|name| sides(store, blocks, name).iter().all(|&found| found))
}

fn dump(store: &Store, blocks: &[BlockId]) {
    store.dump(&Device::filled(&store.setup, blocks), blocks).unwrap();
}

fn loads(store: &Store, blocks: &[BlockId]) -> bool {
    let device = Device::blank(&store.setup, blocks);
    let loaded = store.load(&device, blocks).is_ok();
    assert!(!loaded || blocks.iter().all(|&block| device.is_right(block)));
    loaded
}

/// Side shards of blocks made again, and stored alone.
fn dump_alone(store: &Store, blocks: &[BlockId], names: &[&'static str]) {
    let declared = &store.setup.sides;
    let bytes = |name: &&'static str| {
        let number = declared.iter().position(|(side, _)| side == name).unwrap();
        let of = |&block: &BlockId| side_content(block, number, declared[number].1);
        blocks.iter().flat_map(of).collect::<Vec<u8>>()
    };
    let bytes: Vec<_> = names.iter().map(bytes).collect();
    let sides: Vec<_> = names
        .iter()
        .zip(&bytes)
        .map(|(name, bytes)| (*name, &bytes[..]))
        .collect();
    let task = store.engine.dump_sides(blocks, &sides).unwrap();
    store.outcome(&task).unwrap();
}

fn each_way(setup: &Setup) -> [Setup; 2] {
    let layerwise = Setup {
        layers_per_shard: 1,
        ..setup.clone()
    };
    [setup.clone(), layerwise]
}

#[test]
fn they_come_back_on_every_medium_by_block_and_by_layer() {
    for medium in media() {
        for setup in each_way(&sided(on(medium))) {
            let dir = directory();
            let store = Store::open(dir.path(), setup);
            dump(&store, &ids(4));
            assert!(has_all(&store, &ids(4)), "{medium:?}");
            assert_eq!(sides(&store, &[id(9), id(1), id(8)], MEAN), [false, true, false]);
            assert!(loads(&store, &ids(4)), "{medium:?}");
            dump_alone(&store, &[id(9)], &[CODES]);
            assert_eq!(sides(&store, &[id(9), id(1)], CODES), [true, true], "{medium:?}");
            assert_eq!(sides(&store, &[id(9)], MEAN), [false]);
            assert!(!store.engine.lookup(&[id(9)]).unwrap()[0], "it is no block");
            assert_eq!(store.stat("sides_published"), 1);
        }
    }
}

/// Layouts, codecs and what stands above.
fn columns() -> Vec<Setup> {
    let below = [
        Setup::default(),
        Setup {
            layout: Layout::File,
            codec: None,
            ..Setup::default()
        },
        quick(),
        Setup::default().compressed_by(Algorithm::Zstd),
        Setup::default().compressed_by(Algorithm::Lz4),
    ];
    let above = [
        Above::Nothing,
        Above::Memory(64, WritePolicy::Through),
        Above::Map(64, WritePolicy::Through),
        Above::File,
    ];
    let on = |setup: Setup| {
        above.map(|above| {
            sided(Setup {
                above,
                ..setup.clone()
            })
        })
    };
    below.into_iter().flat_map(on).collect()
}

/// Those in which all that lasts is in one root.
fn of_one_root() -> impl Iterator<Item = Setup> {
    columns().into_iter().filter(|setup| setup.above != Above::File)
}

#[test]
fn they_come_back_in_every_layout_under_every_codec_and_tier() {
    for setup in columns() {
        let dir = directory();
        let root = dir.path().join("root");
        let what = format!("{:?} {:?} {:?}", setup.layout, setup.codec, setup.above);
        let store = Store::open(&root, setup.clone());
        dump(&store, &ids(4));
        dump_alone(&store, &[id(7)], &[MEAN, CODES]);
        assert!(has_all(&store, &[ids(4), vec![id(7)]].concat()), "{what}");
        drop(store);
        let store = Store::open(&root, setup); // what was in memory is gone
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
    let large = Setup {
        tensors: vec![KV / 2 / 4, KV / 2 / 4],
        layers: 4,
        layers_per_shard: 4,
        slots: 32,
        above: Above::Nothing,
        codec: None,
        ..default()
    };
    let memory = Medium::Memory(32, Policy::Lru);
    let columns = [
        Setup {
            layout: Layout::File,
            ..large.clone()
        },
        Setup {
            layout: patient().layout,
            ..large.clone()
        },
        Setup {
            medium: memory,
            ..large.clone()
        },
        Setup {
            codec: Some(Algorithm::Lz4),
            layout: Layout::segments(),
            ..large.clone()
        },
    ];
    for setup in columns {
        let dir = directory();
        let what = format!("{:?} {:?} {:?}", setup.medium, setup.layout, setup.codec);
        let store = Store::open(dir.path(), setup.clone());
        dump(&store, &ids(BLOCKS));
        // Another process, which has nothing in its memory; one that reads the first one's, where that is all there is.
        let reader = Store::open(dir.path(), setup);
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
    // By the twin of the system calls: a read of so many bytes that it fails if more are asked for.
    for layout in [Layout::File, patient().layout] {
        let dir = directory();
        let setup = Setup {
            layout,
            above: Above::Nothing,
            codec: None,
            tensors: vec![64 << 10],
            ..default()
        };
        let store = Store::open(dir.path(), setup);
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
        // All that lies between them is gone, and nobody notices.
        let kv = 4096..4096 + 3 * (64 << 10);
        for block in ids(3) {
            store.edit(block, |record| record[kv.clone()].fill(0xee));
        }
        assert_eq!(sides(&store, &ids(3), MEAN), [true; 3]);
        assert!(!loads(&store, &[id(0)]));
    }
}

#[test]
fn damage_in_a_side_shard_is_a_miss_of_that_one_alone() {
    for setup in of_one_root() {
        let (dir, block) = (directory(), id(3));
        let store = Store::open(&dir.path().join("root"), setup);
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
                store.setup.layout
            );
        }
        assert_eq!(sides(&store, &ids(5), MEAN), [true, true, true, false, true]);
        assert_eq!(store.engine.lookup(&ids(5)).unwrap(), [true; 5]);
        assert!(loads(&store, &ids(5)), "the KV is as good as before");
        assert_eq!(store.stat("sides_refused"), 2, "each once");
        let untouched = [
            "records_refused",
            "records_quarantined",
            "refused_now",
            "breaker_opened",
        ];
        assert!(untouched.iter().all(|name| store.stat(name) == 0));
        // It is made again, and lies alone; what is damaged stays as it is.
        let before = store.record(block);
        dump_alone(&store, &[block], &[MEAN]);
        assert_eq!(sides(&store, &ids(5), MEAN), [true; 5]);
        assert_eq!(sides(&store, &ids(5), CODES), [true, true, true, false, true]);
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
    for setup in of_one_root() {
        let (dir, block) = (directory(), id(2));
        let store = Store::open(&dir.path().join("root"), setup);
        dump(&store, &ids(4));
        store.edit(block, |record| record[4096 + 5] ^= 1);
        assert!(has_all(&store, &ids(4)));
        assert!(
            !loads(&store, &[block]),
            "{:?} {:?}",
            store.setup.layout,
            store.setup.above
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
        Setup {
            above: Above::Nothing,
            ..default()
        },
    );
    dump(&store, &ids(1));
    drop(store);
    let store = Store::open(
        dir.path(),
        Setup {
            above: Above::Nothing,
            ..default()
        },
    );
    for lie in 0..3 {
        store.fault(common::of_records(OpKind::Read, Fault::FlipRandom(1)).times(1));
        assert_eq!(sides(&store, &ids(1), CODES), [true], "{lie}");
    }
    assert_eq!(store.stat("sides_refused"), 0);
}

#[test]
fn a_block_that_was_stored_without_is_never_written_again() {
    for setup in columns() {
        let dir = directory();
        let root = dir.path().join("root");
        let store = Store::open(&root, plain(setup.clone()));
        dump(&store, &ids(4));
        let before: Vec<_> = ids(4).into_iter().map(|block| store.record(block)).collect();
        drop(store);
        let store = Store::open(&root, setup.clone());
        assert_eq!(store.engine.lookup(&ids(4)).unwrap(), [true; 4]);
        assert_eq!(sides(&store, &ids(4), MEAN), [false; 4]);
        dump(&store, &ids(4)); // with them this time
        assert_eq!(store.stat("blocks_present"), 4);
        let in_memory = matches!(setup.above, Above::Memory(..) | Above::Map(..)); // which had no copy yet
        assert_eq!(sides(&store, &ids(4), MEAN), [in_memory; 4]);
        assert!(loads(&store, &ids(4)));
        dump_alone(&store, &ids(4), &[MEAN, CODES]);
        assert!(has_all(&store, &ids(4)), "{:?}", setup.above);
        let after: Vec<_> = ids(4).into_iter().map(|block| store.record(block)).collect();
        assert_eq!(after, before);
        dump_alone(&store, &ids(4), &[MEAN]);
        assert_eq!(
            (store.stat("sides_published"), store.stat("sides_present")),
            (8, 4)
        );
        drop(store);
        let store = Store::open(&root, setup);
        assert!(has_all(&store, &ids(4)) && loads(&store, &ids(4)));
    }
}

#[test]
fn a_store_without_side_shards_reads_the_blocks_of_one_that_has_them() {
    for setup in columns()
        .into_iter()
        .filter(|setup| setup.above == Above::Nothing)
    {
        let dir = directory();
        let root = dir.path().join("root");
        let first = Store::open(&root, plain(setup.clone())); // before anybody wrote records of another length
        dump(&first, &[id(9)]);
        let writer = Store::open(&root, setup.clone());
        dump(&writer, &ids(4));
        dump_alone(&writer, &[id(9)], &[MEAN]);
        let before: Vec<_> = ids(4).into_iter().map(|block| writer.record(block)).collect();
        assert!(loads(&first, &ids(4)), "{:?} {:?}", setup.layout, setup.above);
        eventually("their lengths are known", || {
            first.engine.lookup(&ids(4)).unwrap() == [true; 4]
        });
        dump(&first, &ids(4));
        assert_eq!(
            first.stat("blocks_present"),
            4,
            "{:?} {:?}",
            setup.layout,
            setup.above
        );
        let other = Setup {
            sides: vec![("other", 9000), (CODES, 6000)],
            ..setup.clone()
        };
        let other = Store::open(&root, other);
        assert!(loads(&other, &ids(4)), "{:?} {:?}", setup.layout, setup.above);
        assert_eq!(sides(&other, &ids(4), CODES), [true; 4], "where the header says");
        let task = begin(&other, &ids(4), "other");
        assert_eq!(come(&other, &task, 4), [None, None, None, None]);
        dump(&other, &ids(4));
        assert_eq!(other.stat("blocks_present"), 4);
        let after: Vec<_> = ids(4).into_iter().map(|block| writer.record(block)).collect();
        assert_eq!(after, before);
        assert!(has_all(&writer, &ids(4)) && loads(&writer, &ids(4)));
    }
}

#[test]
fn the_same_name_in_another_length_is_another_side_shard() {
    let dir = directory();
    let store = Store::open(
        dir.path(),
        Setup {
            above: Above::Nothing,
            ..default()
        },
    );
    dump(&store, &ids(2));
    let longer = Setup {
        sides: vec![(MEAN, 99)],
        above: Above::Nothing,
        ..Setup::default()
    };
    let longer = Store::open(dir.path(), longer);
    let task = begin(&longer, &ids(2), MEAN);
    assert_eq!(come(&longer, &task, 2), [None, None]);
    assert!(loads(&longer, &ids(2)));
}

#[test]
fn a_torn_file_is_a_block_without_side_shards_or_none() {
    let dir = directory();
    let setup = Setup {
        layout: Layout::File,
        codec: None,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), setup);
    dump(&store, &ids(3));
    let whole = std::fs::metadata(store.file(id(0))).unwrap().len();
    for (block, len) in [(id(0), whole - 3 * 4096), (id(1), whole - 4096), (id(2), 5000)] {
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
fn a_row_without_its_share_leaves_the_block_without() {
    let dir = directory();
    let setup = Setup {
        layers_per_shard: 1,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), setup.clone());
    let device = Device::filled(&setup, &ids(2));
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
    for setup in each_way(&default()) {
        let store = Store::open(dir.path(), setup.clone());
        let device = Device::filled(&setup, &ids(8));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for block in ids(8) {
                        let task = loop {
                            match store.engine.dump(device.rows(&[block])) {
                                Err(error) if error.kind() == ErrorKind::Busy => std::thread::yield_now(),
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
                                Err(error) if error.kind() == ErrorKind::Busy => std::thread::yield_now(),
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
fn a_read_that_hangs_costs_its_deadline_and_nothing_else() {
    let dir = directory();
    let setup = Setup {
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), setup.clone());
    dump(&store, &ids(3));
    drop(store);
    let store = Store::open(dir.path(), setup);
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
    let setup = Setup {
        above: Above::Nothing,
        slots: 4, // one of them is for side shards
        deadlines: ucm_store::engine::Deadlines {
            shutdown: Duration::from_millis(200),
            ..Setup::default().deadlines
        },
        ..default()
    };
    let store = Store::open(dir.path(), setup);
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
fn more_than_there_are_slots_stream_through_a_few() {
    let dir = directory();
    let setup = Setup {
        slots: 4,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), setup.clone());
    for block in ids(40) {
        dump(&store, &[block]);
    }
    let many: Vec<_> = ids(40).into_iter().chain(ids(40)).collect();
    assert!(sides(&store, &many, CODES).iter().all(|&found| found));
    assert_eq!((store.stat("slots_free"), store.stat("sides_queued")), (4, 0));
    let bytes = vec![0; 40 * 96];
    let busy = store.engine.dump_sides(&ids(40), &[(MEAN, &bytes)]).map(|_| ());
    assert_eq!(busy.unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(store.stat("slots_free"), 4);
}

#[test]
fn a_record_that_is_read_back_is_judged_whole() {
    for layout in [Layout::File, Layout::segments()] {
        let dir = directory();
        let setup = Setup {
            layout,
            codec: None,
            above: Above::Nothing,
            paranoid: true,
            ..default()
        };
        let store = Store::open(dir.path(), setup);
        dump(&store, &ids(1));
        assert!(has_all(&store, &ids(1)));
        // The medium keeps something else than was written, behind the KV.
        let kind = store.setup.layout.writing();
        store.fault(Rule::on(kind, Fault::Flip(vec![8192 + 10])).times(1));
        let failed = store.dump(&Device::filled(&store.setup, &[id(1)]), &[id(1)]);
        assert_eq!(failed.unwrap_err()[0].1.kind(), ErrorKind::Corrupt);
        dump(&store, &[id(1)]);
        assert!(has_all(&store, &[id(1)]));
    }
}

#[test]
fn a_side_shard_that_lies_alone_is_refused_and_replaced_like_any_record() {
    for setup in [
        Setup {
            layout: Layout::File,
            codec: None,
            ..default()
        },
        Setup {
            layout: Layout::segments(),
            ..default()
        },
    ] {
        let (dir, block) = (directory(), id(5));
        let store = Store::open(
            dir.path(),
            Setup {
                above: Above::Nothing,
                ..setup
            },
        );
        dump_alone(&store, &[block], &[MEAN]);
        store.edit(alone(block, MEAN), |record| record[4096] ^= 1);
        assert_eq!(sides(&store, &[block], MEAN), [false]);
        eventually("it is kept as evidence", || {
            store.stat("records_quarantined") == 1
        });
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
fn touching_a_block_touches_its_side_shards() {
    let dir = directory();
    let setup = Setup {
        layout: Layout::File,
        codec: None,
        above: Above::Nothing,
        ..default()
    };
    let store = Store::open(dir.path(), setup);
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
        Setup {
            layout: Layout::File,
            codec: None,
            above: Above::Nothing,
            ..default()
        },
    );
    store.engine.touch(&[(id(0), 3)]).unwrap();
    let young = |file: &std::path::PathBuf| {
        let age = std::fs::metadata(file).unwrap().modified().unwrap().elapsed();
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
        std::fs::metadata(store.file(alone(id(2), MEAN))).unwrap().len(),
        2 * 4096
    );
}

#[test]
fn merging_keeps_side_shards_and_those_that_lie_alone() {
    for codec in [None, Some(Algorithm::Lz4)] {
        let with = |setup: Setup| match codec {
            None => sided(setup),
            Some(algorithm) => sided(setup).compressed_by(algorithm),
        };
        // A store without side shards merges them too: it knows their lengths.
        for merger in [with(eager(Duration::ZERO)), plain(with(eager(Duration::ZERO)))] {
            let dir = directory();
            let store = Store::open(dir.path(), with(filling()));
            let device = Device::filled(&store.setup, &ids(6));
            for block in ids(6) {
                seal(&store, &device, &[block]);
            }
            // Damage in a side shard is no reason to leave the block behind.
            store.edit(id(2), |record| *record.last_mut().unwrap() ^= 1);
            for block in [id(7), id(8)] {
                let bytes = side_content(block, 0, 96);
                let task = store.engine.dump_sides(&[block], &[(MEAN, &bytes)]).unwrap();
                eventually("it is published", || {
                    store.backend.flush(Flush::Now);
                    task.wait(store.engine.clock(), Until::Published, Some(MonotonicTime(0)))
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
        let dead = sided(Setup {
            process: gone(),
            ..patient()
        });
        let device = Device::filled(&dead, &ids(4));
        die_at_seal(dir.path(), &dead, &device, &ids(4));
        let store = Store::open(dir.path(), reader);
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
    let setup = Setup {
        above: Above::Memory(16, WritePolicy::Back),
        ..default()
    };
    let root = dir.path().join("root");
    let store = Store::open(&root, setup.clone());
    for block in ids(30) {
        dump(&store, &[block]);
        dump_alone(&store, &[block], &[MEAN]);
    }
    eventually("some went down", || store.tier(1, "blocks_written") > 20);
    store.engine.close();
    drop(store);
    let store = Store::open(&root, setup);
    let there = |name| {
        sides(&store, &ids(30), name)
            .iter()
            .filter(|&&found| found)
            .count()
    };
    assert!(there(CODES) > 10 && there(MEAN) > 10);
    assert_eq!(store.stat("sides_refused"), 0);
}

#[test]
fn a_record_of_its_own_takes_no_place_in_a_memory_above() {
    let dir = directory();
    let setup = Setup {
        above: Above::Memory(16, WritePolicy::Through),
        ..default()
    };
    let store = Store::open(&dir.path().join("root"), setup);
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

#[test]
fn what_a_store_cannot_keep_is_refused_by_name() {
    let dir = directory();
    let setup = Setup {
        sides: vec![(MEAN, 96), (CODES, 100)],
        layers_per_shard: 1,
        ..Setup::default()
    };
    let odd = Store::try_open(dir.path(), setup)
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
        kind == ErrorKind::InvalidInput && text.contains("no-such") && text.contains("mean-k, codes"),
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
    let mut rows = Device::filled(&store.setup, &ids(1)).rows(&ids(1));
    rows[0].sides = RowSides::Beside(vec![0; 95].into());
    let wrong = store.engine.dump(rows).map(|_| ()).unwrap_err();
    assert!(wrong.to_string().contains("expected=6096"), "{wrong}");
    drop(store);
    let store = Store::open(dir.path(), plain(default()));
    let mut rows = Device::filled(&store.setup, &ids(1)).rows(&ids(1));
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
    let reader = Setup {
        lookup_only: true,
        ..default()
    };
    let reader = Store::open(dir.path(), reader);
    assert_eq!(
        error(reader.engine.load_sides(ids(1), MEAN, None)).0,
        ErrorKind::Unsupported
    );
}

#[test]
fn a_block_with_the_id_of_anothers_side_shard_is_refused() {
    let dir = directory();
    let gate = ucm_io::Gate::new();
    let store = Store::open(
        dir.path(),
        Setup {
            above: Above::Nothing,
            ..default()
        },
    );
    store.fault(Rule::on(store.setup.layout.writing(), Fault::HangBefore(gate.clone())).times(1));
    let bytes = side_content(id(0), 0, 96);
    let task = store.engine.dump_sides(&[id(0)], &[(MEAN, &bytes)]).unwrap();
    let twin = alone(id(0), MEAN);
    let device = Device::filled(&store.setup, &[twin]);
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
