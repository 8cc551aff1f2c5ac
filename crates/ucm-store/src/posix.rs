//! The POSIX backend: one record per file below a marked root, on anything that mounts.
//!
//! A record is written to a private name, closed, renamed: it is there whole or not at all, and never written again.
//! Present means a length that this part's records can have. Every system call runs in the I/O engine's pool.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, Identity, Part, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, Completion, Mono};
use ucm_io::{FileMeta, IoBuf, IoDone, IoEngine, IoOp, ReadMode};

use crate::backend::{Backend, Done, Listed, ReadDone, Usage, WriteOptions, Written};
use crate::engine::{LANE_DUMP, LANE_LOAD, LANE_LOOKUP, LANE_SPACE};
use crate::layout::{Layout, Manifest, Marker};
use crate::record::RecordLayout;
use crate::space::{Capacity, Recency, Space};

/// Bits of files and directories we make.
const FILE_MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;

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
    /// Never writes: no directories, no marker, no collection.
    pub lookup_only: bool,
    /// The limit on bytes below the root; `None`: the marker's, or a share of the file system.
    pub capacity: Option<Capacity>,
    /// Number that tells this writer's private files from others'.
    pub writer: u64,
}

/// One record per file.
pub struct PosixBackend {
    shared: Arc<Shared>,
}

struct Shared {
    config: PosixConfig,
    layout: Layout,
    io: Arc<dyn IoEngine>,
    clock: Arc<dyn Clock>,
    /// Device of the root when it was first seen; another one means that a share was unmounted.
    device: Mutex<Option<u64>>,
    /// Which of the 256 record directories are known to exist.
    dirs: Mutex<[bool; 256]>,
    sequence: AtomicU64,
    space: Arc<Space>,
    recency: Recency,
}

impl PosixBackend {
    /// A backend over an I/O engine; nothing is touched before [`Backend::probe`].
    pub fn new(config: PosixConfig, io: Arc<dyn IoEngine>, clock: Arc<dyn Clock>) -> Result<Self> {
        let layout = Layout::new(&config.root, &config.identity);
        let space = Space::new(config.root.clone(), Arc::clone(&io), Arc::clone(&clock))?;
        let shared = Shared {
            layout,
            io,
            clock,
            device: Mutex::new(None),
            dirs: Mutex::new([false; 256]),
            sequence: AtomicU64::new(0),
            space,
            recency: Recency::default(),
            config,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

/// Runs one operation and waits for it; for the control path only.
pub(crate) fn call(
    io: &dyn IoEngine,
    clock: &dyn Clock,
    lane: usize,
    deadline: Mono,
    op: IoOp,
) -> Result<IoDone> {
    let completion: Arc<Completion<Answer>> = Completion::new();
    let answer = Arc::clone(&completion);
    io.submit(
        lane,
        deadline,
        op,
        Box::new(move |result| {
            answer.complete(Arc::new(Mutex::new(Some(result))));
        }),
    );
    let late = || Error::new(ErrorKind::Timeout, "the file system did not answer in time");
    let answer = completion
        .wait(clock, Some(deadline.after(Duration::from_millis(100))))
        .ok_or_else(late)?;
    let answer = answer.lock().take();
    answer.unwrap_or_else(|| Err(Error::internal("an answer was taken twice")))
}

/// An answer that is handed on once although completions are shared.
type Answer = Arc<Mutex<Option<Result<IoDone>>>>;

impl Shared {
    fn call(&self, deadline: Mono, op: IoOp) -> Result<IoDone> {
        call(&*self.io, &*self.clock, LANE_SPACE, deadline, op)
    }

    fn read_document(&self, path: PathBuf, deadline: Mono) -> Result<Option<Vec<u8>>> {
        let len = 64 << 10;
        let at = path.display().to_string();
        let buf = IoBuf::Heap(vec![0; len]);
        match self.call(
            deadline,
            IoOp::Read {
                path,
                offset: 0,
                len,
                buf,
                mode: ReadMode::Default,
            },
        ) {
            Ok(IoDone::Read {
                buf: IoBuf::Heap(mut bytes),
                read,
                file_len,
            }) if file_len <= len as u64 => {
                bytes.truncate(read);
                Ok(Some(bytes))
            }
            Ok(_) => {
                Err(Error::new(ErrorKind::Config, "this document is too long to be ours").with("path", at))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn publish_document(
        &self,
        private: PathBuf,
        target: PathBuf,
        bytes: Vec<u8>,
        deadline: Mono,
    ) -> Result<()> {
        let len = bytes.len();
        let op = IoOp::Publish {
            private,
            target,
            buf: IoBuf::Heap(bytes),
            len,
            mode: FILE_MODE,
            mtime_ns: None,
        };
        self.call(deadline, op).map(|_| ())
    }

    fn make_dir(&self, path: PathBuf, deadline: Mono) -> Result<()> {
        self.call(deadline, IoOp::MakeDir { path, mode: DIR_MODE })
            .map(|_| ())
    }

    fn next_private(&self) -> PathBuf {
        self.layout
            .private(self.config.writer, self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    fn stat(&self, path: PathBuf, deadline: Mono) -> Result<Option<FileMeta>> {
        match self.call(
            deadline,
            IoOp::Stat {
                paths: vec![path],
                stop_at_missing: false,
            },
        )? {
            IoDone::Stat(metas) => Ok(metas.into_iter().next().flatten()),
            _ => Err(Error::internal("a stat answered with something else")),
        }
    }

    /// Marks the root (or checks its mark), makes the namespace, writes its manifest, starts the first count.
    fn open_root(&self, deadline: Mono) -> Result<()> {
        let root = self.layout.root().to_owned();
        let known = *self.device.lock();
        if known.is_none() && !self.config.lookup_only {
            for dir in self.missing_ancestors(&root, deadline)? {
                self.make_dir(dir, deadline)?;
            }
        }
        let marker = self.read_document(self.layout.marker(), deadline)?;
        let meta = self.stat(root.clone(), deadline)?;
        if known.is_some_and(|device| marker.is_none() || meta.is_none_or(|meta| meta.dev != device)) {
            let lost = Error::new(
                ErrorKind::Io,
                "the root lost its marker or changed its device; is it mounted?",
            );
            return Err(lost.with("root", root.display()));
        }
        if self.config.lookup_only {
            return Ok(()); // nothing there yet means that nothing is stored yet
        }
        let meta =
            meta.ok_or_else(|| Error::new(ErrorKind::Io, "the root is gone").with("root", root.display()))?;
        let marker = match marker {
            Some(bytes) => Marker::parse(&bytes).map_err(|error| error.with("root", root.display()))?,
            None => self.mark(deadline)?,
        };
        for dir in [
            self.layout.namespace(),
            self.layout.tmp(),
            self.layout.namespace().join("blocks"),
        ] {
            self.make_dir(dir, deadline)?;
        }
        self.describe_part(deadline)?;
        let capacity = match self.config.capacity {
            Some(capacity) => capacity.bytes(self.space_info(deadline)?.0),
            None => marker.storage_capacity,
        };
        *self.device.lock() = Some(meta.dev);
        self.space.open(capacity);
        Ok(())
    }

    /// The directories to make before the root exists, outermost first.
    fn missing_ancestors(&self, root: &Path, deadline: Mono) -> Result<Vec<PathBuf>> {
        let mut paths: Vec<PathBuf> = root.ancestors().map(Path::to_owned).collect();
        paths.retain(|path| !path.as_os_str().is_empty());
        paths.reverse();
        let op = IoOp::Stat {
            paths: paths.clone(),
            stop_at_missing: false,
        };
        match self.call(deadline, op)? {
            IoDone::Stat(metas) => Ok(paths
                .into_iter()
                .zip(metas)
                .filter(|(_, meta)| meta.is_none())
                .map(|(path, _)| path)
                .collect()),
            _ => Err(Error::internal("a stat answered with something else")),
        }
    }

    fn space_info(&self, deadline: Mono) -> Result<(u64, u64)> {
        match self.call(
            deadline,
            IoOp::Space {
                path: self.layout.root().to_owned(),
            },
        )? {
            IoDone::Space(space) => Ok((space.total, space.free)),
            _ => Err(Error::internal("a space query answered with something else")),
        }
    }

    fn mark(&self, deadline: Mono) -> Result<Marker> {
        let (total, free) = self.space_info(deadline)?;
        let marker = Marker {
            format: crate::layout::FORMAT,
            uuid: crate::random_hex(),
            created: self.clock.wall_ns() / 1_000_000_000,
            storage_capacity: match self.config.capacity {
                Some(capacity) => capacity.bytes(total),
                None => Capacity::default_bytes(total, free),
            },
        };
        let private = self.layout.root().join(format!(".{}.tmp", marker.uuid));
        self.publish_document(private, self.layout.marker(), marker.to_bytes(), deadline)?;
        Ok(marker)
    }

    /// Adds this part to the manifest. Ranks do so at the same time: whoever finds its part lost adds it again.
    fn describe_part(&self, deadline: Mono) -> Result<()> {
        let config = &self.config;
        for _ in 0..8 {
            let stored = self.read_document(self.layout.manifest(), deadline)?;
            let mut manifest = stored
                .and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok())
                .unwrap_or_else(|| Manifest::new(&config.identity, config.labels.clone()));
            if !manifest.add(config.part, &config.record, &config.geometry) {
                return Ok(());
            }
            self.publish_document(
                self.next_private(),
                self.layout.manifest(),
                manifest.to_bytes(),
                deadline,
            )?;
        }
        Ok(()) // explains only; records are checked by their own header
    }

    fn is_record(&self, meta: Option<FileMeta>) -> bool {
        meta.is_some_and(|meta| !meta.is_dir && meta.len == self.config.record.record_len() as u64)
    }

    /// The marker is there and on the device it was on: writing is safe.
    fn check_root(&self, marker: Option<FileMeta>) -> Result<()> {
        let device = *self.device.lock();
        if marker.is_some_and(|meta| Some(meta.dev) == device) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Io,
            "the root lost its marker or changed its device; writing stops",
        )
        .with("root", self.layout.root().display()))
    }

    fn write_checked(self: &Arc<Self>, write: Write, marker: Option<FileMeta>, present: Option<FileMeta>) {
        if let Err(error) = self.check_root(marker) {
            return (write.done)(Err(error));
        }
        if !write.options.replace && self.is_record(present) {
            return (write.done)(Ok(Written::Present));
        }
        if let Err(error) = self.space.admit(write.options.len as u64) {
            return (write.done)(Err(error));
        }
        if self.dirs.lock()[usize::from(write.id.0[0])] {
            return self.publish(write);
        }
        let op = IoOp::MakeDir {
            path: self.layout.shard_dir(write.id),
            mode: DIR_MODE,
        };
        let (shared, deadline) = (Arc::clone(self), write.deadline);
        let made = move |result: Result<IoDone>| match result {
            Ok(_) => {
                shared.dirs.lock()[usize::from(write.id.0[0])] = true;
                shared.publish(write);
            }
            Err(error) => {
                shared.space.ended(write.options.len as u64, Some(&error));
                (write.done)(Err(error));
            }
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(made));
    }

    fn publish(self: &Arc<Self>, write: Write) {
        let Write {
            id,
            slot,
            options,
            deadline,
            done,
        } = write;
        let op = IoOp::Publish {
            private: self.next_private(),
            target: self.layout.record(id),
            buf: IoBuf::Slot(slot),
            len: options.len,
            mode: FILE_MODE,
            mtime_ns: Some(self.recency.published(id, options.ordinal, self.clock.wall_ns())),
        };
        let shared = Arc::clone(self);
        let published = move |result: Result<IoDone>| {
            let error = result.as_ref().err();
            shared.space.ended(options.len as u64, error);
            if error.is_some_and(|error| error.kind() == ErrorKind::NotFound) {
                shared.dirs.lock()[usize::from(id.0[0])] = false; // somebody removed the directory
            }
            done(result.map(|_| Written::Published));
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(published));
    }
}

/// A write on its way.
struct Write {
    id: BlockId,
    slot: Slot,
    options: WriteOptions,
    deadline: Mono,
    done: Done<Written>,
}

impl Backend for PosixBackend {
    fn name(&self) -> &'static str {
        "posix"
    }

    fn probe(&self, deadline: Mono) -> Result<()> {
        self.shared.open_root(deadline)
    }

    fn lookup(&self, ids: Vec<BlockId>, stop_at_missing: bool, deadline: Mono, done: Done<Vec<bool>>) {
        let paths = ids.iter().map(|&id| self.shared.layout.record(id)).collect();
        let shared = Arc::clone(&self.shared);
        let answer = move |result: Result<IoDone>| {
            done(result.and_then(|answer| match answer {
                IoDone::Stat(metas) => Ok(metas.into_iter().map(|meta| shared.is_record(meta)).collect()),
                _ => Err(Error::internal("a stat answered with something else")),
            }));
        };
        self.shared.io.submit(
            LANE_LOOKUP,
            deadline,
            IoOp::Stat {
                paths,
                stop_at_missing,
            },
            Box::new(answer),
        );
    }

    fn read(&self, id: BlockId, slot: Slot, again: bool, deadline: Mono, done: Done<ReadDone>) {
        let path = self.shared.layout.record(id);
        let mode = if again {
            ReadMode::FreshDirect
        } else {
            ReadMode::Default
        };
        let len = self.shared.config.record.record_len().min(slot.len());
        let op = IoOp::Read {
            path,
            offset: 0,
            len,
            buf: IoBuf::Slot(slot),
            mode,
        };
        let answer = move |result: Result<IoDone>| {
            done(result.and_then(|answer| match answer {
                IoDone::Read {
                    buf: IoBuf::Slot(slot),
                    read,
                    file_len,
                } => Ok(ReadDone {
                    slot,
                    read,
                    stored_len: file_len,
                }),
                _ => Err(Error::internal("a read answered with something else")),
            }));
        };
        self.shared.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

    fn write(&self, id: BlockId, slot: Slot, options: WriteOptions, deadline: Mono, done: Done<Written>) {
        let write = Write {
            id,
            slot,
            options,
            deadline,
            done,
        };
        let paths = vec![self.shared.layout.marker(), self.shared.layout.record(id)];
        let shared = Arc::clone(&self.shared);
        let looked = move |result: Result<IoDone>| match result {
            Ok(IoDone::Stat(metas)) => {
                let mut metas = metas.into_iter();
                shared.write_checked(write, metas.next().flatten(), metas.next().flatten());
            }
            Ok(_) => (write.done)(Err(Error::internal("a stat answered with something else"))),
            Err(error) => (write.done)(Err(error)),
        };
        let op = IoOp::Stat {
            paths,
            stop_at_missing: false,
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(looked));
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: Mono) {
        let due = self.shared.recency.due(ids, self.shared.clock.wall_ns());
        if due.is_empty() {
            return;
        }
        let files = due
            .into_iter()
            .map(|(id, time)| (self.shared.layout.record(id), time))
            .collect();
        let shared = Arc::clone(&self.shared);
        let counted = move |result| {
            if let Ok(IoDone::Touched(files)) = result {
                let touched = files.iter().filter(|file| matches!(file, Ok(true))).count();
                shared.recency.count(touched as u64);
            }
        };
        self.shared
            .io
            .submit(LANE_SPACE, deadline, IoOp::Touch { files }, Box::new(counted));
    }

    fn delete(&self, ids: Vec<BlockId>, deadline: Mono, done: Done<usize>) {
        let paths = ids.iter().map(|&id| self.shared.layout.record(id)).collect();
        let (space, len) = (
            Arc::clone(&self.shared.space),
            self.shared.config.record.record_len() as u64,
        );
        let answer = move |result: Result<IoDone>| {
            done(result.and_then(|answer| match answer {
                IoDone::Removed(files) => {
                    let removed = files.iter().filter(|file| matches!(file, Ok(true))).count();
                    space.give_back(removed as u64 * len);
                    Ok(removed)
                }
                _ => Err(Error::internal("a removal answered with something else")),
            }));
        };
        self.shared
            .io
            .submit(LANE_SPACE, deadline, IoOp::Remove { paths }, Box::new(answer));
    }

    fn list(&self, deadline: Mono, done: Done<Vec<Listed>>) {
        let namespace = self.shared.layout.namespace();
        let space = Arc::clone(&self.shared.space);
        let list = move || {
            let mut records = Vec::new();
            space.list_namespace(&namespace, deadline, &mut |id, meta: FileMeta| {
                records.push(Listed {
                    id,
                    len: meta.len,
                    used_ns: meta.mtime_ns,
                });
            })?;
            Ok(records)
        };
        self.shared.space.in_background(deadline, list, done);
    }

    fn usage(&self) -> Usage {
        self.shared.space.usage()
    }

    fn removed(&self) -> (u64, u64, u64) {
        let (records, bytes) = self.shared.space.removed();
        (records, bytes, self.shared.recency.touched())
    }

    fn stuck(&self) -> usize {
        self.shared.io.stuck()
    }

    fn shutdown(&self, drain: Duration) {
        let until = self.shared.clock.now().after(drain);
        self.shared.io.shutdown(drain);
        self.shared.space.shutdown(until.since(self.shared.clock.now()));
    }
}
