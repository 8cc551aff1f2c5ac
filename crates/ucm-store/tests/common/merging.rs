//! Stores that merge their segments, and what they are filled with.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ucm_core::BlockId;
use ucm_io::Process;
use ucm_media::backend::Flush;
use ucm_media::segment::{Merging, SegmentConfig};

use super::shared::LONG;
use super::{Device, Fixture, Layout, Store, are_busy, eventually};

/// Looks for segments to merge all the time, and removes them after `grace`.
pub(crate) fn eager(grace: Duration) -> Fixture {
    Fixture {
        layout: Layout::merging(Merging {
            rate: u64::MAX,
            look: Duration::from_millis(12),
            grace,
        }),
        ..Fixture::default()
    }
}

/// Never merges; a segment is sealed at a flush.
pub(crate) fn filling() -> Fixture {
    let merging = Merging {
        rate: 0,
        ..Merging::default()
    };
    Fixture {
        layout: Layout::Segment(SegmentConfig {
            age: LONG,
            merging,
            ..SegmentConfig::default()
        }),
        ..Fixture::default()
    }
}

/// A process of this host that has ended.
pub(crate) fn gone() -> Process {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    Process {
        pid,
        started: 1, // no process is that old, should the number be used again
        ..Process::this()
    }
}

pub(crate) fn many(range: std::ops::Range<u16>) -> Vec<BlockId> {
    let id = |n: u16| {
        let bytes = n.to_le_bytes();
        BlockId(std::array::from_fn(|at| {
            bytes[at % 2].wrapping_mul(37).wrapping_add(at as u8)
        }))
    };
    range.map(id).collect()
}

/// Dumps blocks into one segment.
pub(crate) fn seal(store: &Store, device: &Device, blocks: &[BlockId]) {
    // Again while no room is granted.
    eventually("they are stored", || {
        let task = store.engine.dump(device.rows(blocks)).unwrap();
        eventually("they are written, or refused", || {
            !task.failures().is_empty() || finds(store, blocks).iter().all(|&found| found)
        });
        store.backend.flush(Flush::Now);
        let stored = store.outcome(&task);
        assert!(
            stored
                .as_ref()
                .err()
                .is_none_or(|failures| are_busy(failures))
        );
        stored.is_ok()
    });
}

/// Leaves these blocks below a root, one segment for each.
pub(crate) fn fill(root: &Path, fixture: &Fixture, blocks: &[BlockId]) {
    let store = Store::open(root, fixture.clone());
    let device = Device::filled(fixture, blocks);
    blocks
        .iter()
        .for_each(|block| seal(&store, &device, &[*block]));
    assert_eq!(store.segments().len(), blocks.len());
}

pub(crate) fn finds(store: &Store, blocks: &[BlockId]) -> Vec<bool> {
    store.engine.lookup(blocks).unwrap()
}

pub(crate) fn loads(store: &Store, blocks: &[BlockId]) -> bool {
    let device = Device::blank(&store.fixture, blocks);
    let loaded = store.load(&device, blocks).is_ok();
    let fine = |block: &BlockId| device.is_right(*block) || device.is_blank(*block);
    assert!(blocks.iter().all(fine), "wrong bytes on the device");
    assert!(!loaded || blocks.iter().all(|block| device.is_right(*block)));
    loaded
}

/// All of them, a few at a time: there are fewer slots.
pub(crate) fn loads_each(store: &Store, blocks: &[BlockId]) -> bool {
    blocks.chunks(8).all(|some| loads(store, some))
}

/// The records of all segments together, if none was added or removed between two listings.
pub(crate) fn there(store: &Store) -> BTreeSet<BlockId> {
    loop {
        let before = store.segments();
        let found = store.places().into_iter().map(|place| place.id).collect();
        if store.segments() == before {
            return found;
        }
    }
}

pub(crate) fn mtime(file: &Path) -> SystemTime {
    std::fs::metadata(file).unwrap().modified().unwrap()
}

/// Private files; one that a second listing does not find is none.
pub(crate) fn privates(store: &Store) -> Vec<PathBuf> {
    store
        .privates()
        .into_iter()
        .filter(|file| file.exists())
        .collect()
}
