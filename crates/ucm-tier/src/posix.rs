//! The POSIX backend: one record per file below a marked root, on anything that mounts.
//!
//! A record is written to a private name, closed, renamed: it is there whole or not at all, and never written again.
//! Present means a length that this part's records can have. Every system call runs in the I/O engine's pool.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, Identity, MissReason, Part, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, LANE_SPACE, MonotonicTime};
use ucm_io::{FileMeta, IoJob, IoPool, Probe, Process};
use ucm_quota::evidence::QuarantineConfig;
use ucm_quota::layout::{Layout, Modes};
use ucm_quota::{Capacity, Quota, QuotaConfig, Rules, visit_records};
use ucm_record::RecordLayout;

use crate::backend::{
    Backend, BlockRead, Done, Features, Listed, MediumStats, Outcome, Presence, Quarantined, WriteOptions,
    Written,
};
use crate::quarantine::Waiting;
use crate::recency::Recency;
use crate::root_layout::{LayoutKind, RootLayout};
use crate::writing::Write;

/// How long making the namespace's directories again may take.
pub(crate) const MAKE_DIRS: Duration = Duration::from_secs(5);

/// What the POSIX backend needs to know.
pub struct PosixConfig {
    /// The root directory.
    pub root: PathBuf,
    /// Whose KV it is.
    pub identity: Identity,
    /// Words for the manifest, outside the digest.
    pub labels: BTreeMap<String, String>,
    /// Which part this backend's writer brings.
    pub part: Part,
    /// Sizes of that part.
    pub geometry: Geometry,
    /// Where things lie in that part's records.
    pub record: RecordLayout,
    /// Whether the I/O engine was asked to go past the page cache.
    pub direct: bool,
    /// Never writes: no directories, no marker, no collection.
    pub lookup_only: bool,
    /// The limit on bytes below the root; `None`: the marker's, or a share of the file system.
    pub capacity: Option<Capacity>,
    /// What is removed beside the oldest above the limit, and how much of the medium stays free.
    pub rules: Rules,
    /// The process that writes, normally [`Process::this`]: others take over at once when it is gone.
    pub process: Process,
    /// Number that tells this writer's private files and records from others'.
    pub writer: u64,
    /// Permissions of what is made below the root.
    pub modes: Modes,
    /// What is kept of damaged records.
    pub quarantine: QuarantineConfig,
}

/// One record per file.
pub struct PosixBackend {
    shared: Arc<Shared>,
}

/// One root as a backend over it knows it, whatever the layout of its records.
pub(crate) struct Shared {
    pub(crate) config: PosixConfig,
    pub(crate) layout: Layout,
    pub(crate) io: Arc<IoPool>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) root: Mutex<Root>,
    /// Somebody is looking whether the root is back.
    pub(crate) looking: AtomicBool,
    /// Which of the 256 record directories are known to exist.
    pub(crate) dirs: Mutex<[bool; 256]>,
    pub(crate) sequence: AtomicU64,
    pub(crate) space: Arc<Quota>,
    pub(crate) recency: Recency,
    pub(crate) waiting: Waiting,
}

/// What is known of the root itself.
#[derive(Default)]
pub(crate) struct Root {
    /// Its device when it was first seen; another one means that a share was unmounted.
    pub(crate) device: Option<u64>,
    /// Its mark, by which it is known again on another device (a share mounted anew).
    pub(crate) uuid: Option<String>,
    /// What the file system can do.
    pub(crate) probed: Option<Probe>,
    /// How records lie below it, once that is known.
    pub(crate) kind: Option<LayoutKind>,
    /// What its marker says of that, or is to say.
    pub(crate) layout: Option<RootLayout>,
}

impl PosixBackend {
    /// A backend over an I/O engine; nothing is touched before [`Backend::open`]. `Config` if the limit is too small.
    pub fn new(config: PosixConfig, io: Arc<IoPool>, clock: Arc<dyn Clock>) -> Result<Self> {
        Ok(Self {
            shared: Arc::new(Shared::new(config, Some(LayoutKind::File), io, clock)?),
        })
    }

    /// The same over a root that is known already.
    pub(crate) fn over(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl Shared {
    /// What both layouts go by; nothing is touched yet. `Config` if the limit is too small.
    pub(crate) fn new(
        config: PosixConfig,
        kind: Option<LayoutKind>,
        io: Arc<IoPool>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let layout = Layout::new(&config.root, &config.identity);
        let space = QuotaConfig {
            root: config.root.clone(),
            process: config.process.clone(),
            rules: config.rules,
            record_len: config.record.record_len() as u64,
            modes: config.modes,
        };
        let space = Quota::new(space, Arc::clone(&io), Arc::clone(&clock))?;
        let shared = Self {
            layout,
            io,
            clock,
            root: Mutex::new(Root {
                kind,
                ..Root::default()
            }),
            looking: AtomicBool::new(false),
            dirs: Mutex::new([false; 256]),
            sequence: AtomicU64::new(0),
            space,
            recency: Recency::default(),
            waiting: Waiting::default(),
            config,
        };
        if let (Some(Capacity::Bytes(limit)), false) = (shared.config.capacity, shared.config.lookup_only) {
            shared.check_limit(limit.get())?;
        }
        Ok(shared)
    }

    /// What the root holds, and what was removed of it.
    pub(crate) fn stats(&self) -> MediumStats {
        let (records_removed, bytes_removed) = self.space.removed();
        MediumStats {
            usage: self.space.usage(),
            records_removed,
            bytes_removed,
            blocks_touched: self.recency.touched(),
            ..MediumStats::default()
        }
    }

    /// What a look at a record's name says: it is there whole, or why it is no hit.
    pub(crate) fn presence(&self, meta: Option<FileMeta>) -> Presence {
        match meta {
            Some(meta) if meta.is_dir => Err(MissReason::Absent),
            Some(meta) if meta.len != self.config.record.record_len() as u64 => Err(MissReason::WrongLength),
            Some(_) => Ok(()),
            None => Err(MissReason::Absent),
        }
    }

    /// Whether writes to one file go one after the other, and several files are written side by side instead: only one
    /// thread at once can fill the pages of a file of a local file system (ext4 and XFS hold the inode's lock meanwhile),
    /// and the others would not sleep but spin. Not as long as nobody knows where the root lies.
    pub(crate) fn serializes_writes(&self) -> bool {
        let Some(probe) = self.root.lock().probed else {
            return false;
        };
        let direct = self.config.direct && probe.direct.is_some();
        !direct && !probe.fs.maybe_shared()
    }

    /// The marker is there and on the device it was on: writing is safe. Else `Foreign`: the medium answers, but it is
    /// not the root that was opened.
    pub(crate) fn check_root(&self, marker: Option<FileMeta>) -> Result<()> {
        let device = self.root.lock().device;
        if marker.is_some_and(|meta| Some(meta.dev) == device) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Foreign,
            "the root lost its marker or changed its device; writing stops",
        )
        .with("root", self.layout.root().display()))
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
            ..Features::default()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        let paths: Vec<_> = ids.iter().map(|&id| self.shared.layout.record(id)).collect();
        let metas = io.stat(&paths, stop_at_missing)?;
        Ok(metas.into_iter().map(|meta| self.shared.presence(meta)).collect())
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        run.into_iter()
            .map(|read| Outcome::Came(self.shared.read(io, read)))
            .collect()
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions, done: Done<Written>) {
        let write = Write {
            id,
            slot,
            options,
            deadline: io.deadline(),
            done,
        };
        self.shared.write(io, write);
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        let due = self.shared.recency.due(ids, self.shared.clock.wall_ns());
        if due.is_empty() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let touch = move |io: &IoJob| {
            let files = due.into_iter().map(|(id, time)| (shared.layout.record(id), time));
            let touched = io.touch(&files.collect::<Vec<_>>())?;
            let count = touched.iter().filter(|file| matches!(file, Ok(true))).count();
            shared.recency.count(count as u64);
            Ok(())
        };
        self.shared.io.job(LANE_SPACE, deadline, touch, |_| {});
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let shared = &self.shared;
        let paths: Vec<_> = ids.iter().map(|&id| shared.layout.record(id)).collect();
        let before = shared.space.counts();
        let removed = io.remove(&paths)?;
        let removed = removed.iter().filter(|file| matches!(file, Ok(true))).count();
        let freed = removed as u64 * shared.config.record.record_len() as u64;
        shared.space.deleted(freed, before);
        Ok(removed)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        let (namespace, mut records) = (self.shared.layout.namespace(), Vec::new());
        visit_records(&namespace, &mut |dir| io.list_if_there(&dir), &mut |id, meta| {
            records.push(Listed {
                id,
                len: meta.len,
                used_ns: meta.mtime_ns,
            });
        })?;
        Ok(records)
    }

    fn quarantine(&self, id: BlockId, done: Done<Quarantined>) {
        self.shared.quarantine(id, done);
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
