//! One store of several parts: blocks of each are dumped, found, loaded, moved between tiers,
//! merged and taken over, whatever their shape. A record of one part never passes for another's.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, Part};
use ucm_media::backend::{Flush, Memory};
use ucm_store::engine::{NOWHERE, Row, Task};
use ucm_store::tiers::{Priority, WritePolicy};
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::media::slot_len;
use crate::common::merging::{eager, filling, gone};
use crate::common::segments::{await_taken_over, patient, places};
use crate::common::shared::stored;
use crate::common::{
    Above, Device, Fixture, Layout, Medium, PartShape, Store, directory, eventually, id, identity,
    ids, media, on, only_over, shape,
};

const PARTS: usize = 3;

fn part(group: u32) -> Part {
    Part {
        group,
        ..Part::default()
    }
}

/// With parts of three shapes: of three shards, of one long shard, and of less than a page.
fn three(fixture: Fixture) -> Fixture {
    let own = |group, tensors: &[u64], layers, layers_per_shard| PartShape {
        part: part(group),
        tensors: tensors.to_vec(),
        layers,
        layers_per_shard,
    };
    Fixture {
        tensors: vec![3072, 1024],
        layers: 3,
        layers_per_shard: 1,
        own_parts: vec![own(1, &[20480], 5, 5), own(2, &[48, 16], 2, 1)],
        ..fixture
    }
}

/// The ids of blocks of a part.
fn of_part(number: usize, blocks: &[BlockId]) -> Vec<BlockId> {
    let mask = part(number as u32).mask();
    blocks.iter().map(|block| block.xor(mask)).collect()
}

/// Files and segments, alone, below a memory and below other files, with a codec and with keys; and
/// every other medium that is here.
fn columns() -> Vec<Fixture> {
    let plain = Fixture {
        keys: None,
        compressed: false,
        unnamed: false,
        ..Fixture::default()
    };
    let mut columns = Vec::new();
    for layout in [Layout::File, Layout::segments()] {
        let memory = Above::Memory(32, WritePolicy::Through);
        for above in [Above::Nothing, memory, Above::File] {
            columns.push(Fixture {
                above,
                layout,
                ..plain.clone()
            });
        }
    }
    let alone = |layout| Fixture {
        above: Above::Nothing,
        layout,
        ..plain.clone()
    };
    columns.push(alone(Layout::segments()).compressed());
    columns.push(alone(Layout::segments()).compressed().encrypted(1));
    columns.push(alone(Layout::File).encrypted(1));
    let others = media().into_iter();
    let others = others.filter(|medium| *medium != Medium::Posix).map(on);
    columns.extend(others);
    columns.into_iter().map(three).collect()
}

fn words(fixture: &Fixture) -> String {
    let kept = (fixture.compressed, fixture.keys.is_some());
    format!(
        "{:?} {:?} {:?} {kept:?}",
        fixture.medium, fixture.layout, fixture.above
    )
}

fn rows(store: &Store, number: usize, device: &Device, blocks: &[BlockId]) -> Vec<Row> {
    let shards = store.fixture.of_part(number);
    let shards = shards.layers / shards.layers_per_shard;
    let blocks = of_part(number, blocks).into_iter();
    blocks
        .flat_map(|block| (0..shards).map(move |shard| device.row(block, shard)))
        .collect()
}

fn filled(store: &Store, number: usize, blocks: &[BlockId]) -> Device {
    Device::filled(&store.fixture.of_part(number), &of_part(number, blocks))
}

/// Starts a dump of blocks of a part.
fn begin(store: &Store, number: usize, device: &Device, blocks: &[BlockId]) -> Task {
    let part = store.engine.part_at(number).unwrap();
    part.dump(rows(store, number, device, blocks)).unwrap()
}

fn dump(store: &Store, number: usize, blocks: &[BlockId]) {
    let device = filled(store, number, blocks);
    let task = begin(store, number, &device, blocks);
    store.outcome(&task).unwrap();
}

/// Loads blocks of a part: the tiers that had them, or the first failure. Exact, or untouched.
fn load(store: &Store, number: usize, blocks: &[BlockId]) -> Result<[u64; 2], Error> {
    let ids = of_part(number, blocks);
    let device = Device::blank(&store.fixture.of_part(number), &ids);
    let rows = rows(store, number, &device, blocks);
    let part = store.engine.part_at(number).unwrap();
    let task = part.load(rows, None).unwrap();
    let loaded = store.outcome(&task);
    let fine = |block: &BlockId| device.is_right(*block) || device.is_right_as_far(*block);
    assert!(ids.iter().all(fine), "wrong bytes on the device");
    match loaded {
        Ok(()) => assert!(ids.iter().all(|block| device.is_right(*block))),
        Err(mut failures) => return Err(failures.remove(0).1),
    }
    let served = task.served();
    Ok([served[0], served[1]])
}

fn loads_all(store: &Store, blocks: &[BlockId]) {
    for number in 0..PARTS {
        load(store, number, blocks).unwrap();
    }
}

/// The ids of these blocks in all parts, mixed.
fn mixed(blocks: &[BlockId]) -> Vec<BlockId> {
    let parts: Vec<_> = (0..PARTS).map(|number| of_part(number, blocks)).collect();
    (0..blocks.len())
        .flat_map(|at| parts.iter().map(move |part| part[at]).collect::<Vec<_>>())
        .collect()
}

fn opened(fixture: Fixture) -> (tempfile::TempDir, Store) {
    let dir = directory();
    let store = Store::open(&dir.path().join("root"), fixture);
    (dir, store)
}

#[test]
fn blocks_of_every_part_come_back_over_every_medium_and_after_a_restart() {
    for fixture in columns() {
        let what = words(&fixture);
        let (_dir, store) = opened(fixture.clone());
        for number in 0..PARTS {
            dump(&store, number, &ids(3));
            load(&store, number, &ids(3)).unwrap();
        }
        let mut asked = mixed(&ids(3));
        assert_eq!(store.engine.lookup_on_prefix(&asked).unwrap(), 9, "{what}");
        asked.insert(4, id(9));
        let (tiers, _) = store.engine.locate(&asked).unwrap();
        let absent = tiers.iter().position(|&tier| tier == NOWHERE);
        assert_eq!((absent, tiers.len()), (Some(4), 10), "{what}");
        let task = store.engine.part_at(1).unwrap();
        let task = task.verify(&of_part(1, &ids(3)), None).unwrap();
        store.outcome(&task).unwrap();
        assert_eq!(store.stat("blocks_verified"), 3, "{what}");
        // Another process, which only looks up, knows the parts by name.
        let looking = Fixture {
            lookup_only: true,
            own_parts: Vec::new(),
            other_parts: fixture.own_parts.clone(),
            ..fixture.clone()
        };
        let looking = Store::open(&store.root, looking); // with it a map of this process stays
        eventually(&what, || {
            looking.engine.lookup_on_prefix(&mixed(&ids(3))).unwrap() == 9
        });
        assert_eq!(store.stat("records_refused"), 0, "{what}");
        if matches!(fixture.medium, Medium::Memory(..)) {
            continue; // its records end with it
        }
        let root = store.root.clone();
        drop(store);
        let store = Store::open(&root, fixture.clone());
        eventually(&what, || {
            store.engine.lookup_on_prefix(&mixed(&ids(3))).unwrap() == 9
        });
        loads_all(&store, &ids(3));
        // As a store of that part alone would have written it.
        drop(store);
        for number in 0..PARTS {
            let alone = Fixture {
                own_parts: Vec::new(),
                ..fixture.of_part(number)
            };
            let store = Store::open(&root, alone);
            let blocks = of_part(number, &ids(3));
            let device = Device::blank(&store.fixture, &blocks);
            eventually("they are found", || {
                store.engine.lookup_on_prefix(&blocks).unwrap() == 3
            });
            store.load(&device, &blocks).unwrap();
            assert!(blocks.iter().all(|block| device.is_right(*block)), "{what}");
        }
    }
}

#[test]
fn a_block_is_complete_when_all_shards_of_its_own_part_are_there() {
    let (_dir, store) = opened(three(Fixture::default()));
    let (device, block) = (filled(&store, 0, &ids(1)), ids(1));
    let mut all = rows(&store, 0, &device, &block);
    let last = all.split_off(2);
    let first = store.engine.dump(all).unwrap();
    store.outcome(&first).unwrap();
    dump(&store, 1, &block);
    let found = store.engine.lookup(&mixed(&block)).unwrap();
    assert_eq!(found, [false, true, false]);
    store.outcome(&store.engine.dump(last).unwrap()).unwrap();
    dump(&store, 2, &block);
    loads_all(&store, &block);
}

#[test]
fn a_damaged_record_of_one_part_is_refused_alone_and_replaced() {
    for number in 0..PARTS {
        let (_dir, store) = opened(three(Fixture::default()));
        (0..PARTS).for_each(|number| dump(&store, number, &ids(2)));
        let harmed = of_part(number, &ids(1))[0];
        store.edit(harmed, |record| {
            let last = record.len() - 4096;
            record[last] ^= 1; // in the payload, also where that is compressed or encrypted
        });
        let refused = load(&store, number, &ids(1)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
        let expected: Vec<bool> = mixed(&ids(2)).iter().map(|id| *id != harmed).collect();
        assert_eq!(store.engine.lookup(&mixed(&ids(2))).unwrap(), expected);
        for other in (0..PARTS).filter(|&other| other != number) {
            load(&store, other, &ids(2)).unwrap();
        }
        dump(&store, number, &ids(1));
        assert_eq!(store.stat("records_replaced"), 1);
        loads_all(&store, &ids(2));
    }
}

#[test]
fn a_record_of_another_own_part_is_refused() {
    only_over!(FilesUnkept, "it exchanges the files of blocks");
    let (_dir, store) = opened(three(Fixture::default()));
    (0..PARTS).for_each(|number| dump(&store, number, &ids(1)));
    let files: Vec<_> = mixed(&ids(1)).iter().map(|id| store.file(*id)).collect();
    std::fs::copy(&files[2], &files[1]).unwrap();
    let refused = load(&store, 1, &ids(1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Foreign, "{refused}");
    let named = |(key, value): &(&str, String)| *key == "reason" && value == "foreign_part";
    assert!(refused.context().iter().any(named), "{refused}");
    dump(&store, 1, &ids(1));
    loads_all(&store, &ids(1));
}

#[test]
fn an_id_belongs_to_one_part_at_a_time() {
    only_over!(FilesUnkept, "it hangs the read of a block file");
    let (_dir, store) = opened(three(Fixture::default()));
    dump(&store, 1, &ids(1));
    let block = of_part(1, &ids(1));
    let long = store.engine.part_at(1).unwrap();
    let short = store.engine.part_at(2).unwrap();
    let gate = store.hang(OpKind::Read);
    let (right, wrong) = (store.fixture.of_part(1), store.fixture.of_part(2));
    let right = Device::blank(&right, &block);
    let loading = long.load(right.rows(&block), None).unwrap();
    gate.await_waiting(1);
    let wrong = Device::blank(&wrong, &block);
    let clash = short.load(wrong.rows(&block), None).unwrap();
    let failed = store.outcome(&clash).unwrap_err();
    assert_eq!(failed[0].1.kind(), ErrorKind::InvalidInput);
    gate.open();
    store.outcome(&loading).unwrap();
    assert!(right.is_right(block[0]) && wrong.is_blank(block[0]));
    // A block in the making too.
    let device = filled(&store, 0, &ids(2));
    let mut all = rows(&store, 0, &device, &[id(1)]);
    let last = all.split_off(1);
    store.outcome(&store.engine.dump(all).unwrap()).unwrap();
    let block = of_part(0, &[id(1)]);
    let other = Device::filled(&store.fixture.of_part(2), &block);
    let free = store.engine.free_dump_slots();
    let refused = short.dump(other.rows(&block)).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert_eq!(store.engine.free_dump_slots(), free, "nothing was taken");
    store.outcome(&store.engine.dump(last).unwrap()).unwrap();
    load(&store, 0, &[id(1)]).unwrap();
}

#[test]
fn every_part_is_promoted_prefetched_and_written_down() {
    for layout in [Layout::File, Layout::segments()] {
        let fixture = |records, policy| {
            three(Fixture {
                above: Above::Memory(records, policy),
                layout,
                unnamed: false,
                ..Fixture::default()
            })
        };
        // Fewer fit into the memory than are dumped: they go down, the rest at the end.
        let (_dir, store) = opened(fixture(8, WritePolicy::Back));
        let memory = Arc::clone(store.memory.as_ref().unwrap());
        let mut dumped = 0;
        for block in ids(4) {
            for number in 0..PARTS {
                dump(&store, number, &[block]);
                dumped += 1;
                // more than are on their way down at once would be dropped
                eventually(
                    "those that were given up are below, their slots free",
                    || {
                        let handed = memory.counts().handed;
                        let free =
                            Memory::region(&*memory).map_or(0, |region| region.free() as u64);
                        handed == store.tier(1, "demotions") && free + dumped == 8 + handed
                    },
                );
            }
        }
        let counts = memory.counts();
        assert!(counts.handed >= 4 && counts.damaged == 0, "{counts:?}");
        let root = store.root.clone();
        drop((store, memory));
        let store = Store::open(&root, fixture(64, WritePolicy::Through));
        let wanted = mixed(&ids(4));
        eventually("all are below", || {
            store.engine.locate(&wanted).unwrap().0 == [1; 12]
        });
        let taken = store.engine.prefetch(&wanted[..9], Priority::Normal);
        assert_eq!(taken.unwrap(), 9);
        eventually("they are above", || store.tier(0, "promotions") == 9);
        let mut tiers = vec![0; 9];
        tiers.extend([1; 3]);
        assert_eq!(store.engine.locate(&wanted).unwrap().0, tiers);
        for number in 0..PARTS {
            assert_eq!(load(&store, number, &ids(4)).unwrap(), [3, 1], "{number}");
        }
        eventually("a load brings up the last ones", || {
            store.engine.locate(&wanted).unwrap().0 == [0; 12]
        });
        for number in 0..PARTS {
            assert_eq!(load(&store, number, &ids(4)).unwrap(), [4, 0], "{number}");
        }
        assert_eq!(store.stat("records_refused"), 0);
    }
}

/// Leaves a segment for each part of these blocks.
fn fill(root: &Path, blocks: &[BlockId]) {
    let store = Store::open(root, three(filling()));
    for block in blocks {
        for number in 0..PARTS {
            let device = filled(&store, number, &[*block]);
            let task = begin(&store, number, &device, &[*block]);
            let id = of_part(number, &[*block]);
            eventually("it is written", || {
                store.engine.lookup(&id).unwrap() == [true]
            });
            store.backend.flush(Flush::Now);
            store.outcome(&task).unwrap();
        }
    }
}

#[test]
fn segments_with_records_of_several_parts_are_merged() {
    let dir = directory();
    fill(dir.path(), &ids(8));
    let store = Store::open(dir.path(), three(eager(Duration::ZERO)));
    let has_all_parts = |file: &PathBuf| {
        let there: Vec<_> = places(file).iter().map(|place| place.id).collect();
        let has = |number| there.contains(&of_part(number, &ids(1))[0]);
        (0..PARTS).all(has)
    };
    eventually("they are merged", || {
        store.segments().iter().any(has_all_parts)
    });
    loads_all(&store, &ids(8));
    drop(store);
    let store = Store::open(dir.path(), three(filling()));
    loads_all(&store, &ids(8));
    assert_eq!(store.stat("records_refused"), 0);
}

#[test]
fn records_of_every_part_of_a_dead_writer_are_taken_over() {
    let dir = directory();
    let dead = Fixture {
        process: gone(),
        ..three(patient())
    };
    let store = Store::open(dir.path(), dead);
    let begun = |number| {
        let device = filled(&store, number, &ids(2));
        let task = begin(&store, number, &device, &ids(2));
        (device, task)
    };
    let begun: Vec<_> = (0..PARTS).map(begun).collect();
    eventually("they are written", || {
        store.engine.lookup_on_prefix(&mixed(&ids(2))).unwrap() == 6
    });
    store.fault(Rule::on(OpKind::Finish, Fault::Killed { keep: 50 }));
    store.backend.flush(Flush::Now);
    for (_, task) in &begun {
        assert!(store.outcome(task).is_err());
    }
    drop(store);
    let store = Store::open(dir.path(), three(patient()));
    await_taken_over(&store);
    loads_all(&store, &ids(2));
}

#[test]
fn the_limit_of_the_root_holds_for_all_parts_together() {
    only_over!(Files, "it adds up the files of blocks");
    let fixture = three(Fixture::default());
    let limit = slot_len(&fixture) * 12;
    let fixture = Fixture {
        capacity: Some(limit),
        ..fixture
    };
    let (_dir, store) = opened(fixture);
    for block in ids(30) {
        for number in 0..PARTS {
            let device = filled(&store, number, &[block]);
            eventually("it is stored", || {
                let task = begin(&store, number, &device, &[block]);
                store.outcome(&task).is_ok()
            });
            assert!(stored(&store.root) <= limit);
        }
    }
    assert!(store.stat("records_removed") > 0);
    // All were used in one minute, which counts as one time: any of them may be evicted.
    for number in 0..PARTS {
        let left = ids(30)
            .into_iter()
            .filter(|&block| load(&store, number, &[block]).is_ok());
        assert!(left.count() > 0, "of part {number}");
    }
}

#[test]
fn the_manifest_has_an_entry_for_every_part() {
    let (_dir, store) = opened(three(Fixture::default()));
    dump(&store, 2, &ids(1));
    let path = store
        .root
        .join(identity("w").namespace())
        .join("manifest.json");
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let parts: BTreeMap<String, serde_json::Value> =
        serde_json::from_value(manifest["parts"].clone()).unwrap();
    let names: Vec<_> = parts.keys().collect();
    assert_eq!(names, ["g0p0t0", "g1p0t0", "g2p0t0"]);
    for (number, entry) in parts.values().enumerate() {
        let fixture = store.fixture.of_part(number);
        let record_len = shape(&fixture).1.record_len();
        assert_eq!(entry["record_lengths"], serde_json::json!([record_len]));
        assert_eq!(entry["tensors"], serde_json::json!(fixture.tensors));
        assert_eq!(entry["layers"], serde_json::json!(fixture.layers));
    }
}

#[test]
fn a_part_is_named_once_and_has_its_own_shape() {
    let (_dir, store) = opened(three(Fixture::default()));
    let none = store.engine.part_at(3).err().unwrap();
    assert_eq!(none.kind(), ErrorKind::InvalidInput);
    let lens = [0, 1, 2].map(|number| store.engine.part_at(number).unwrap().record_len());
    let own = [0, 1, 2].map(|number| shape(&store.fixture.of_part(number)).1.record_len());
    assert_eq!(lens, own);
    assert_eq!(store.stat("slot_bytes"), slot_len(&store.fixture));
    // A row of one part is none of another.
    let device = filled(&store, 1, &ids(1));
    let refused = store.engine.dump(device.rows(&of_part(1, &ids(1))));
    assert_eq!(refused.err().unwrap().kind(), ErrorKind::InvalidInput);
    let mut twice = three(Fixture::default());
    twice.own_parts[1].part = part(1);
    let twice = Store::try_open(&directory().path().join("root"), twice);
    assert_eq!(twice.err().unwrap().kind(), ErrorKind::Config);
}
