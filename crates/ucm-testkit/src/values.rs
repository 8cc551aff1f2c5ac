//! Tests of every implementation of [`Values`], for its author to run.

#![allow(clippy::unwrap_used, reason = "it is a test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, Part, Result};
use ucm_device::{ArenaOptions, HostArena, Slot, SlotPool};
use ucm_infra::{LANE_SPACE, SystemClock, random_u64};
use ucm_io::{IoJob, IoOptions, IoPool};
use ucm_media::backend::{InPlace, ReadDone};
use ucm_media::values::{Existing, Get, Put, Values};

/// Bytes of a slot.
const SLOT: usize = 64 << 10;
/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Panics where an implementation is wrong. `make` returns values that lie at the same place each
/// time, in a namespace of the test's own.
pub fn check_values(make: &dyn Fn() -> Result<Box<dyn Values>>) {
    let suite = Suite::open(make().unwrap());
    suite.what_is_absent();
    suite.a_value_is_stored_and_replaced();
    suite.a_value_is_longer_than_its_slot();
    suite.many_are_read_in_order();
    suite.uses_and_manifests();
    suite.a_late_put_stores_nothing();
    let other = Suite::open(make().unwrap());
    let shared = suite.stored(500);
    assert_eq!(other.read(shared, SLOT).unwrap(), bytes(shared, 500));
    assert_eq!(other.delete(&[shared, id()]), 1);
    assert!(!suite.is_there(shared));
    for suite in [suite, other] {
        assert!(suite.values.close(PATIENCE) <= PATIENCE);
        suite.pool.shutdown(PATIENCE);
    }
}

struct Suite {
    values: Box<dyn Values>,
    pool: Arc<IoPool>,
    slots: Arc<SlotPool>,
}

fn id() -> BlockId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random_u64().to_le_bytes());
    BlockId(id)
}

/// What a test stores under an id: other bytes for another length.
fn bytes(id: BlockId, len: usize) -> Vec<u8> {
    let byte = |n: usize| id.0[n % 8] ^ (n + len) as u8 | 1;
    (0..len).map(byte).collect()
}

impl Suite {
    fn open(values: Box<dyn Values>) -> Self {
        let arena = HostArena::with(8 * SLOT, ArenaOptions::default()).unwrap();
        let suite = Self {
            values,
            pool: IoPool::psync(false, &IoOptions::with_workers(1)).unwrap(),
            slots: SlotPool::new(arena, SLOT).unwrap(),
        };
        let deadline = SystemClock::shared().now().after(PATIENCE);
        assert!(!suite.values.open(deadline).unwrap().text.is_empty());
        assert!(!suite.values.traits().name.is_empty());
        suite
    }

    fn job(&self, time: Duration) -> IoJob {
        let deadline = SystemClock::shared().now().after(time);
        self.pool.here(LANE_SPACE, deadline)
    }

    fn io(&self) -> IoJob {
        self.job(PATIENCE)
    }

    fn slot(&self, content: &[u8]) -> Slot {
        let mut slot = self.slots.try_acquire().unwrap();
        slot.as_mut_slice()[..content.len()].copy_from_slice(content);
        slot
    }

    fn put(&self, id: BlockId, content: &[u8], replace: bool) -> bool {
        let slot = self.slot(content);
        let put = self
            .values
            .put(&self.io(), id, slot, content.len(), replace);
        let Put { slot, stored } = put.unwrap();
        assert_eq!(&slot.as_slice()[..content.len()], content, "it comes back");
        stored
    }

    /// A new value of this length.
    fn stored(&self, len: usize) -> BlockId {
        let id = id();
        assert!(self.put(id, &bytes(id, len), false));
        id
    }

    fn get(&self, id: BlockId, most: usize) -> Get {
        Get {
            id,
            slot: self.slot(&[0; SLOT]),
            most,
            in_place: InPlace::Never,
        }
    }

    fn read(&self, id: BlockId, most: usize) -> std::result::Result<Vec<u8>, ErrorKind> {
        let mut done = self.values.get(&self.io(), vec![self.get(id, most)]);
        assert_eq!(done.len(), 1);
        let done: ReadDone = done.remove(0).map_err(|error| error.kind())?;
        assert!(done.stored_len >= done.read as u64);
        Ok(done.bytes().to_vec())
    }

    fn exists(&self, ids: &[BlockId]) -> Vec<Existing> {
        let existing = self.values.exists(&self.io(), ids).unwrap();
        existing.into_iter().map(Result::unwrap).collect()
    }

    fn is_there(&self, id: BlockId) -> bool {
        self.exists(&[id]) != [Existing::Absent]
    }

    fn delete(&self, ids: &[BlockId]) -> usize {
        self.values.delete(&self.io(), ids).unwrap()
    }

    fn what_is_absent(&self) {
        let (id, other) = (id(), id());
        assert_eq!(self.exists(&[id, other]), [Existing::Absent; 2]);
        assert_eq!(self.read(id, SLOT), Err(ErrorKind::NotFound));
        assert!(self.values.start(&self.io(), id, 100).unwrap().is_none());
        assert_eq!(self.delete(&[id, other]), 0);
    }

    fn a_value_is_stored_and_replaced(&self) {
        let id = self.stored(1000);
        assert!(!self.put(id, &bytes(id, 700), false), "there is one");
        for len in [1000, 3000, 700] {
            assert!(len == 1000 || self.put(id, &bytes(id, len), true));
            let measured = [Existing::Len(len as u64), Existing::Unmeasured];
            assert!(measured.contains(&self.exists(&[id])[0]));
            assert_eq!(self.read(id, SLOT).unwrap(), bytes(id, len));
            for most in [10, len, len + 10] {
                let start = self.values.start(&self.io(), id, most).unwrap();
                let expected = bytes(id, len)[..most.min(len)].to_vec();
                assert_eq!(start, Some((len as u64, expected)), "{most} of {len}");
            }
        }
        match self.values.list(&self.io()) {
            Ok(listed) => assert!(listed.iter().any(|one| (one.id, one.len) == (id, 700))),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported),
        }
        assert_eq!(self.delete(&[id]), 1);
        assert!(!self.is_there(id));
        assert_eq!(self.read(id, SLOT), Err(ErrorKind::NotFound));
    }

    fn a_value_is_longer_than_its_slot(&self) {
        let arena = HostArena::with(4096, ArenaOptions::default()).unwrap();
        let short = SlotPool::new(arena, 4096).unwrap();
        let id = self.stored(9000);
        for most in [4096, 8000, SLOT] {
            let get = Get {
                slot: short.try_acquire().unwrap(),
                ..self.get(id, most)
            };
            let done = self.values.get(&self.io(), vec![get]).remove(0).unwrap();
            assert_eq!(done.bytes(), &bytes(id, 9000)[..4096]);
            assert!(done.stored_len >= 9000.min(most as u64), "{most}");
        }
        assert_eq!(self.delete(&[id]), 1);
    }

    fn many_are_read_in_order(&self) {
        let mut ids: Vec<BlockId> = [100, 200, 300].map(|len| self.stored(len)).into();
        ids.insert(1, id());
        let gets = ids.iter().map(|&id| self.get(id, SLOT)).collect();
        let done = self.values.get(&self.io(), gets);
        let lengths: Vec<Option<usize>> = done
            .iter()
            .map(|done| done.as_ref().ok().map(|done| done.bytes().len()))
            .collect();
        assert_eq!(lengths, [Some(100), None, Some(200), Some(300)]);
        drop(done);
        let there = ids.iter().map(|&id| self.is_there(id));
        assert_eq!(there.collect::<Vec<_>>(), [true, false, true, true]);
        assert_eq!(self.delete(&ids), 3);
    }

    fn uses_and_manifests(&self) {
        let id = self.stored(100);
        let touched = self.values.touch(&self.io(), &[id, BlockId([1; 16])]);
        let touched = touched.unwrap();
        assert!(touched.is_empty() || touched == [true, false]);
        assert_eq!(self.delete(&[id]), 1);
        let part = Part {
            pipeline_rank: 7,
            ..Part::default()
        };
        let read = |part| self.values.manifest(&self.io(), part).unwrap();
        let before = read(Part::default());
        for text in ["{}", r#"{"a": 1}"#] {
            let put = self.values.put_manifest(&self.io(), part, text.as_bytes());
            put.unwrap();
            let stored = read(part);
            assert!(stored.is_none_or(|stored| stored == text.as_bytes()));
        }
        assert_eq!(read(Part::default()), before, "each part has its own");
    }

    fn a_late_put_stores_nothing(&self) {
        let id = id();
        let late = self.job(Duration::ZERO);
        let put = self.values.put(&late, id, self.slot(b"late"), 4, false);
        assert_eq!(put.err().unwrap().kind(), ErrorKind::Timeout);
        assert!(!self.is_there(id));
        assert_eq!(
            self.slots.available(),
            self.slots.capacity(),
            "every slot is back"
        );
    }
}
