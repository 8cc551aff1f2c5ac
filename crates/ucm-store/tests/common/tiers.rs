//! Stores of two tiers.

use ucm_core::BlockId;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use super::{Above, Device, Fixture, Store, directory, ids};

/// Memory with room above a root.
pub(crate) fn with_memory() -> Fixture {
    Fixture {
        above: Above::Map(100, WritePolicy::Through),
        ..Fixture::default()
    }
}

/// A root above a root.
pub(crate) fn with_file() -> Fixture {
    Fixture {
        above: Above::File,
        ..Fixture::default()
    }
}

/// A new store.
pub(crate) fn open(fixture: &Fixture) -> (tempfile::TempDir, Store) {
    let dir = directory();
    let store = Store::open(&dir.path().join("root"), fixture.clone());
    (dir, store)
}

/// A new store with the first `n` blocks.
pub(crate) fn dumped(fixture: &Fixture, n: u8) -> (tempfile::TempDir, Store) {
    let (dir, store) = open(fixture);
    store
        .dump(&Device::filled(fixture, &ids(n)), &ids(n))
        .unwrap();
    (dir, store)
}

/// Loads blocks and looks whether they are right.
pub(crate) fn load(store: &Store, blocks: &[BlockId]) {
    let device = Device::blank(&store.fixture, blocks);
    store.load(&device, blocks).unwrap();
    assert!(blocks.iter().all(|&block| device.is_right(block)));
}

/// This befalls the files of blocks only.
pub(crate) fn of_blocks(kind: OpKind, fault: Fault) -> Rule {
    Rule::on(kind, fault).path("/blocks/")
}

/// How often the files of the first `n` blocks were read.
pub(crate) fn reads(store: &Store, n: u8) -> usize {
    ids(n)
        .into_iter()
        .map(|id| store.asked(OpKind::Read, id))
        .sum()
}

/// Which blocks are hits.
pub(crate) fn lookup(store: &Store, blocks: &[BlockId]) -> Vec<bool> {
    store.engine.lookup(blocks).unwrap()
}
