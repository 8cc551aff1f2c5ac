//! Stores whose blocks have side shards, and what a test knows of these.

use ucm_core::{BlockId, IdMask};
use ucm_store::engine::{Engine, SidesTask, Task, Until};
use ucm_store::tiers::WritePolicy;

use super::device::side_content;
use super::segments::{Place, change, quick};
use super::{Above, Device, Fixture, Layout, Store, id};

pub(crate) const MEAN: &str = "mean-k";
pub(crate) const CODES: &str = "codes";

/// With two side shards, one of which is longer than a page. The layout is named.
pub(crate) fn sided(fixture: Fixture) -> Fixture {
    Fixture {
        sides: vec![(MEAN, 96), (CODES, 6000)],
        unnamed: false,
        ..fixture
    }
}

pub(crate) fn plain(fixture: Fixture) -> Fixture {
    Fixture {
        sides: Vec::new(),
        ..fixture
    }
}

pub(crate) fn default() -> Fixture {
    sided(Fixture::default())
}

/// The id under which a side shard of a block lies alone.
pub(crate) fn alone(block: BlockId, name: &str) -> BlockId {
    block.xor(IdMask::of_side(name, 1))
}

pub(crate) fn begin(engine: &Engine, blocks: &[BlockId], name: &str) -> SidesTask {
    engine.load_sides(blocks.to_vec(), name, None).unwrap()
}

/// Waits for side shards: those that are there.
pub(crate) fn come(engine: &Engine, task: &SidesTask, count: usize) -> Vec<Option<Vec<u8>>> {
    assert!(task.task.wait(engine.clock(), Until::Published, None));
    let bytes = task.bytes();
    let each = bytes.chunks_exact(bytes.len() / count).enumerate();
    each.map(|(row, side)| match task.task.shard_done(row) {
        true => Some(side.to_vec()),
        false => {
            assert!(
                side.iter().all(|&byte| byte == 0),
                "what is not there is zeros"
            );
            None
        }
    })
    .collect()
}

/// Which of these side shards are there; those that are must be right.
pub(crate) fn sides(store: &Store, blocks: &[BlockId], name: &str) -> Vec<bool> {
    sides_in(&store.engine, blocks, name)
}

/// The same of an engine.
pub(crate) fn sides_in(engine: &Engine, blocks: &[BlockId], name: &str) -> Vec<bool> {
    let found = come(engine, &begin(engine, blocks, name), blocks.len());
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
pub(crate) fn has_all(store: &Store, blocks: &[BlockId]) -> bool {
    [MEAN, CODES]
        .iter()
        .all(|name| sides(store, blocks, name).iter().all(|&found| found))
}

pub(crate) fn dump(store: &Store, blocks: &[BlockId]) {
    store
        .dump(&Device::filled(&store.fixture, blocks), blocks)
        .unwrap();
}

pub(crate) fn loads(store: &Store, blocks: &[BlockId]) -> bool {
    let device = Device::blank(&store.fixture, blocks);
    let loaded = store.load(&device, blocks).is_ok();
    assert!(!loaded || blocks.iter().all(|&block| device.is_right(block)));
    loaded
}

/// Lengths at which a record with side shards may end: in its header, at its end, and in the
/// first side shard.
pub(crate) const CUTS: [usize; 5] = [64, 134, 4095, 4096, 2 * 4096 + 4095];

/// A record whose segment ends after this many of its bytes has no side shard, whatever the slot it
/// is read into held: here the same of another block, a moment before.
pub(crate) fn assert_cut(store: &Store, len: usize) {
    let (cut, whole) = (id(1), id(3));
    dump(store, &[cut]);
    dump(store, &[whole]);
    let places = store.places();
    let place = places.iter().find(|place| place.id == cut).unwrap();
    let beside = |other: &Place| other.id != cut && other.file == place.file;
    assert!(!places.iter().any(beside), "each has a segment");
    change(&place.file, |bytes| bytes.truncate(place.offset + len));
    for name in [MEAN, CODES] {
        assert_eq!(sides(store, &[whole], name), [true]);
        assert_eq!(
            sides(store, &[cut], name),
            [false],
            "{name}, cut after {len} bytes"
        );
    }
    dump_alone(store, &[cut], &[MEAN, CODES]);
    assert!(has_all(store, &[cut, whole]), "made again, they lie alone");
}

/// Side shards of blocks made again, and stored alone.
pub(crate) fn dump_alone(store: &Store, blocks: &[BlockId], names: &[&'static str]) {
    let task = begin_alone(&store.engine, &store.fixture, blocks, names);
    store.outcome(&task).unwrap();
}

/// The same begun in an engine.
pub(crate) fn begin_alone(
    engine: &Engine,
    fixture: &Fixture,
    blocks: &[BlockId],
    names: &[&'static str],
) -> Task {
    let declared = &fixture.sides;
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
    engine.dump_sides(blocks, &sides).unwrap()
}

pub(crate) fn each_way(fixture: &Fixture) -> [Fixture; 2] {
    let layerwise = Fixture {
        layers_per_shard: 1,
        ..fixture.clone()
    };
    [fixture.clone(), layerwise]
}

/// Layouts, codecs and what stands above.
pub(crate) fn columns() -> Vec<Fixture> {
    let below = [
        Fixture::default(),
        Fixture {
            layout: Layout::File,
            compressed: false,
            ..Fixture::default()
        },
        quick(),
        Fixture::default().compressed(),
    ];
    let above = [
        Above::Nothing,
        Above::Memory(64, WritePolicy::Through),
        Above::Map(64, WritePolicy::Through),
        Above::File,
    ];
    let on = |fixture: Fixture| {
        above.map(|above| {
            sided(Fixture {
                above,
                ..fixture.clone()
            })
        })
    };
    below.into_iter().flat_map(on).collect()
}

/// Those in which all that lasts is in one root.
pub(crate) fn of_one_root() -> impl Iterator<Item = Fixture> {
    columns()
        .into_iter()
        .filter(|fixture| fixture.above != Above::File)
}
