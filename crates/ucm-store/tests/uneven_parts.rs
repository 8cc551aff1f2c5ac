//! Parts of one namespace whose blocks differ in size: a store that looks up finds the blocks of
//! each, on every medium.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

use std::path::Path;

use ucm_core::{BlockId, Part};

use crate::common::{
    Device, Fixture, Layout, Medium, PartShape, Store, directory, eventually, id, media, on,
};

/// Layers of the blocks of two ranks.
const LAYERS: [u32; 2] = [3, 1];

/// Every medium that is here, files in both layouts.
fn columns() -> Vec<Fixture> {
    let layouts = [Layout::File, Layout::segments()];
    let files = layouts.map(|layout| Fixture {
        layout,
        compressed: false,
        ..on(Medium::Posix)
    });
    let others = media()
        .into_iter()
        .filter(|medium| *medium != Medium::Posix);
    files.into_iter().chain(others.map(on)).collect()
}

/// A rank of a pipeline: its blocks have `layers` layers of a page each.
fn rank(column: &Fixture, number: u32, layers: u32) -> Fixture {
    Fixture {
        part: part(number),
        tensors: vec![4096],
        layers,
        layers_per_shard: layers,
        ..column.clone()
    }
}

fn part(pipeline_rank: u32) -> Part {
    Part {
        pipeline_rank,
        ..Part::default()
    }
}

/// What is named of the second rank.
fn other(layers: u32) -> PartShape {
    PartShape {
        part: part(1),
        tensors: vec![4096],
        layers,
        layers_per_shard: layers,
    }
}

/// Blocks of one rank.
fn blocks(number: u32) -> Vec<BlockId> {
    (0..4).map(|n| id(100 * number as u8 + n)).collect()
}

/// The stores of two ranks that have dumped their blocks.
fn dumped(root: &Path, column: &Fixture, layers: [u32; 2]) -> [Store; 2] {
    [0, 1].map(|number| {
        let store = Store::open(root, rank(column, number, layers[number as usize]));
        let device = Device::filled(&store.fixture, &blocks(number));
        store.dump(&device, &blocks(number)).unwrap();
        store
    })
}

#[test]
fn a_store_to_which_the_parts_are_named_finds_the_blocks_of_each() {
    for column in columns() {
        for (first, second) in [(LAYERS[0], LAYERS[1]), (LAYERS[1], LAYERS[0])] {
            let dir = directory();
            let root = dir.path().join("root");
            let _ranks = dumped(&root, &column, [first, second]);
            let scheduler = Fixture {
                lookup_only: true,
                other_parts: vec![other(second)],
                ..rank(&column, 0, first)
            };
            let scheduler = Store::open(&root, scheduler);
            for number in [0, 1] {
                let found = scheduler.engine.lookup_on_prefix(&blocks(number)).unwrap();
                assert_eq!(
                    found, 4,
                    "{:?} {:?}, part {number} of {first} and {second} layers",
                    column.medium, column.layout
                );
            }
            assert_eq!(scheduler.missed("wrong_length"), 0);
        }
    }
}

#[test]
fn a_store_to_which_no_part_is_named_learns_them_from_the_manifest() {
    for column in columns()
        .into_iter()
        .filter(|column| column.medium == Medium::Posix)
    {
        for layers in [LAYERS, [LAYERS[1], LAYERS[0]]] {
            let dir = directory();
            let root = dir.path().join("root");
            let _ranks = dumped(&root, &column, layers);
            let reader = Store::open(
                &root,
                Fixture {
                    lookup_only: true,
                    ..rank(&column, 0, layers[0])
                },
            );
            eventually("the manifest was read", || {
                reader.engine.lookup_on_prefix(&blocks(1)).unwrap() == 4
            });
            assert_eq!(reader.engine.lookup_on_prefix(&blocks(0)).unwrap(), 4);
        }
    }
}

#[test]
fn a_record_of_another_part_is_refused_by_its_header_and_replaced() {
    let column = Fixture {
        layout: Layout::File,
        compressed: false,
        ..Fixture::default()
    };
    let dir = directory();
    let root = dir.path().join("root");
    let [first, second] = dumped(&root, &column, LAYERS);
    // The length is that of the other part: the lookup counts it, and the load decides.
    std::fs::copy(second.file(blocks(1)[0]), first.file(blocks(0)[0])).unwrap();
    drop(first);
    let first = Fixture {
        other_parts: vec![other(LAYERS[1])],
        ..rank(&column, 0, LAYERS[0])
    };
    let first = Store::open(&root, first);
    assert_eq!(first.engine.lookup_on_prefix(&blocks(0)).unwrap(), 4);
    let device = Device::blank(&first.fixture, &blocks(0));
    assert!(first.load(&device, &blocks(0)).is_err());
    assert_eq!(first.engine.lookup(&blocks(0)[..1]).unwrap(), [false]);
    let device = Device::filled(&first.fixture, &blocks(0));
    first.dump(&device, &blocks(0)).unwrap();
    let device = Device::blank(&first.fixture, &blocks(0));
    first.load(&device, &blocks(0)).unwrap();
    assert!(blocks(0).into_iter().all(|block| device.is_right(block)));
    // A length that is of no part is none of a record.
    let file = first.file(blocks(0)[1]);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.extend([0; 4096]);
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(first.engine.lookup(&blocks(0)[1..2]).unwrap(), [false]);
    assert_eq!(first.missed("wrong_length"), 1);
}
