//! The POSIX backend: one record per file below a marked root, on anything that mounts.
//!
//! A record is written to a private name, closed, renamed: it is there whole or not at all, and
//! never written again. Present means a length that this part's records can have. Every system call
//! runs in the I/O engine's pool.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{LANE_SPACE, MonotonicTime};
use ucm_io::{FileMeta, IoJob};

use crate::backend::{
    Backend, BlockRead, Features, Listed, MediumStats, Outcome, Presence, WriteOptions, Written,
};
use crate::quota::visit_records;
use crate::shared::Shared;
pub use crate::shared::{PosixConfig, RootSlot};

/// One record per file.
pub(crate) struct PosixBackend {
    shared: Arc<Shared>,
}

impl PosixBackend {
    /// Over this root; nothing is touched before [`Backend::open`].
    pub(crate) fn over(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl Backend for PosixBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        self.shared.open_root(deadline)?;
        Ok(self.shared.words())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "posix",
            reads_parts: true,
            writes_cached: self.shared.writes_cached(),
            ..Features::default()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        let shared = &self.shared;
        let paths: Vec<_> = ids.iter().map(|&id| shared.layout.record(id)).collect();
        let metas = io.stat(&paths, stop_at_missing);
        let metas = metas.inspect_err(|error| shared.log_link(error))?;
        let presence = || metas.iter().map(|&meta| shared.presence(meta)).collect();
        let found: Vec<_> = presence();
        if found.contains(&Err(MissReason::WrongLength)) && shared.has_lengths_to_learn() {
            shared.learn_lengths(io);
            return Ok(presence());
        }
        Ok(found)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        run.into_iter()
            .map(|read| Outcome::Read(self.shared.read(io, read)))
            .collect()
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        let record = &slot.as_slice()[..options.len];
        self.shared.write(io, id, record, options)
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        let due = self.shared.recency.due(ids, self.shared.clock.wall_ns());
        if due.is_empty() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let touch = move |io: &IoJob| {
            let file = |(id, time)| (shared.layout.record(id), time);
            let files: Vec<_> = due.into_iter().map(file).collect();
            let touched = io.touch(&files)?.into_iter();
            let count = touched.filter(|file| matches!(file, Ok(true))).count();
            shared.recency.count(count as u64);
            Ok(())
        };
        self.shared.io.job(LANE_SPACE, deadline, touch, |_| {});
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let shared = &self.shared;
        let paths: Vec<_> = ids.iter().map(|&id| shared.layout.record(id)).collect();
        let before = shared.space.counts();
        let metas = io.stat(&paths, false)?;
        let (mut count, mut bytes) = (0, 0);
        for (removed, meta) in io.remove(&paths)?.into_iter().zip(metas) {
            if let Ok(true) = removed {
                (count, bytes) = (count + 1, bytes + meta.map_or(0, |meta| meta.len));
            }
        }
        shared.space.deleted(bytes, before, false);
        Ok(count)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        let (namespace, mut records) = (self.shared.layout.namespace(), Vec::new());
        let mut add = |id, meta: FileMeta| {
            let (len, used_ns) = (meta.len, meta.mtime_ns);
            records.push(Listed { id, len, used_ns });
        };
        visit_records(&namespace, &mut |dir| io.list_if_there(&dir), &mut add)?;
        Ok(records)
    }

    fn stats(&self) -> MediumStats {
        self.shared.stats()
    }

    fn close(&self, drain: Duration) {
        let until = self.shared.clock.now().after(drain);
        let left = || until.since(self.shared.clock.now());
        // First the space: it says to the others that it is not there any more.
        self.shared.space.shutdown(left() / 2);
        self.shared.io.shutdown(left());
    }
}
