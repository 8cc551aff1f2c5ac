//! Memory of the tests: a map with a limit, the least recently used goes first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_media::backend::{
    Backend, BlockRead, Evicted, Features, Listed, Local, LocallyVisible, MediumStats, Memory,
    Outcome, Presence, ReadDone, Victim, WriteOptions, Written,
};
use ucm_media::quota::Usage;

/// Keeps records until there are too many.
pub(crate) struct MapBackend {
    limit: usize,
    inner: Mutex<Inner>,
    hook: Mutex<Option<Arc<Evicted>>>,
    /// Evicted, and still there for readers while they are written below.
    leaving: Mutex<Vec<(BlockId, Arc<Vec<u8>>)>>,
    /// It has no room for anything.
    busy: AtomicBool,
    kept: AtomicU64,
}

#[derive(Default)]
struct Inner {
    /// The least recently used first.
    records: Vec<(BlockId, Vec<u8>)>,
    early: LocallyVisible,
}

impl MapBackend {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            inner: Mutex::default(),
            hook: Mutex::default(),
            leaving: Mutex::default(),
            busy: AtomicBool::new(false),
            kept: AtomicU64::new(0),
        })
    }

    pub(crate) fn has(&self, id: BlockId) -> bool {
        self.inner
            .lock()
            .records
            .iter()
            .any(|(kept, _)| *kept == id)
            || self.leaving(id).is_some()
    }

    fn leaving(&self, id: BlockId) -> Option<Arc<Vec<u8>>> {
        let leaving = self.leaving.lock();
        let found = leaving.iter().find(|(gone, _)| *gone == id);
        found.map(|(_, record)| Arc::clone(record))
    }

    pub(crate) fn len(&self) -> usize {
        self.inner.lock().records.len()
    }

    /// Forgets everything, handing nothing over.
    pub(crate) fn forget(&self) {
        self.inner.lock().records.clear();
    }

    /// Changes what is kept of a record.
    pub(crate) fn change(&self, id: BlockId, change: impl FnOnce(&mut [u8])) {
        let mut inner = self.inner.lock();
        let found = inner.records.iter_mut().find(|(kept, _)| *kept == id);
        change(&mut found.unwrap().1);
    }

    /// From now on it has no room, or has room again.
    pub(crate) fn busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Release);
    }

    /// How often a record was kept.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Acquire)
    }

    fn insert(self: &Arc<Self>, id: BlockId, record: &[u8], replace: bool) -> Result<Written> {
        if self.busy.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Busy, "no room in memory now"));
        }
        let victim = {
            let mut inner = self.inner.lock();
            let at = inner.records.iter().position(|(kept, _)| *kept == id);
            if at.is_some() && !replace {
                return Ok(Written::Present);
            }
            match at {
                Some(at) => drop(inner.records.remove(at)),
                None => inner.early.added.push(id),
            }
            inner.records.push((id, record.to_vec()));
            let full = inner.records.len() > self.limit;
            let victim = full.then(|| inner.records.remove(0));
            victim.map(|(id, record)| {
                inner.early.removed.push(id);
                let record = Arc::new(record);
                self.leaving.lock().push((id, Arc::clone(&record)));
                Leaving {
                    id,
                    record,
                    map: Arc::clone(self),
                }
            })
        };
        self.kept.fetch_add(1, Ordering::AcqRel);
        let hook = self.hook.lock().clone();
        if let (Some(victim), Some(hook)) = (victim, hook) {
            hook(Box::new(victim));
        }
        Ok(Written::Published)
    }
}

/// What was given up.
struct Leaving {
    id: BlockId,
    record: Arc<Vec<u8>>,
    map: Arc<MapBackend>,
}

impl Victim for Leaving {
    fn id(&self) -> BlockId {
        self.id
    }

    fn record(&self) -> &[u8] {
        &self.record
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut leaving = self.map.leaving.lock();
        leaving.retain(|(_, record)| !Arc::ptr_eq(record, &self.record));
    }
}

/// The map as a tier, while the test holds on to it too.
pub(crate) struct MapTier(pub(crate) Arc<MapBackend>);

impl MapTier {
    fn read_one(&self, read: BlockRead) -> Result<ReadDone> {
        let BlockRead { id, mut slot, .. } = read;
        let mut inner = self.0.inner.lock();
        let record = match inner.records.iter().position(|(kept, _)| *kept == id) {
            Some(at) => {
                let used = inner.records.remove(at);
                let record = used.1.clone();
                inner.records.push(used);
                Some(record)
            }
            None => self.0.leaving(id).map(|record| record.to_vec()),
        };
        drop(inner);
        let record = record.ok_or_else(|| Error::new(ErrorKind::NotFound, "not in the map"))?;
        let len = record.len();
        slot.as_mut_slice()[..len].copy_from_slice(&record);
        Ok(ReadDone {
            slot,
            read: len,
            stored_len: len as u64,
            lent: None,
        })
    }
}

impl Backend for MapTier {
    fn features(&self) -> Features<'_> {
        Features {
            name: "map",
            memory: Some(self),
            local: Some(self),
            ..Features::default()
        }
    }

    fn open(&self, _deadline: MonotonicTime) -> Result<String> {
        Ok(format!("a map of {} records", self.0.limit))
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], stop: bool) -> Result<Vec<Presence>> {
        let mut found: Vec<Presence> = ids
            .iter()
            .map(|&id| {
                if self.0.has(id) {
                    Ok(())
                } else {
                    Err(MissReason::Absent)
                }
            })
            .collect();
        if let (true, Some(first)) = (stop, found.iter().position(std::result::Result::is_err)) {
            found.truncate(first + 1);
        }
        Ok(found)
    }

    fn read(&self, _io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        run.into_iter()
            .map(|read| Outcome::Read(self.read_one(read)))
            .collect()
    }

    fn write(
        &self,
        _io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
    ) -> Result<Written> {
        let record = &slot.as_slice()[..options.len];
        self.0.insert(id, record, options.replace)
    }

    fn touch(&self, _ids: &[(BlockId, u32)], _deadline: MonotonicTime) {}

    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let mut inner = self.0.inner.lock();
        let before = inner.records.len();
        inner.records.retain(|(kept, _)| !ids.contains(kept));
        Ok(before - inner.records.len())
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        let records = self.0.inner.lock().records.clone();
        let listed = (1..).zip(records).map(|(used_ns, (id, record))| Listed {
            id,
            len: record.len() as u64,
            used_ns,
        });
        Ok(listed.collect())
    }

    fn stats(&self) -> MediumStats {
        let usage = Usage {
            records: self.0.len() as u64,
            ..Usage::default()
        };
        MediumStats {
            usage,
            ..MediumStats::default()
        }
    }

    fn close(&self, _drain: Duration) {}
}

impl Local for MapTier {
    fn locally_visible(&self) -> LocallyVisible {
        std::mem::take(&mut self.0.inner.lock().early)
    }
}

impl Memory for MapTier {
    fn insert(&self, id: BlockId, record: &[u8], options: WriteOptions) -> Result<Written> {
        self.0.insert(id, record, options.replace)
    }

    fn has(&self, id: BlockId) -> bool {
        self.0.has(id)
    }

    fn on_evicted(&self, hook: Evicted) -> bool {
        let mut before = self.0.hook.lock();
        before.is_none() && before.replace(Arc::new(hook)).is_none()
    }
}
