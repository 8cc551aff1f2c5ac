//! The files below a root that the quota reads, writes and removes: space documents and
//! directories. Every operation has a deadline.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, LANE_SPACE, MonotonicTime};
use ucm_io::{ELOOP, FileMeta, IoJob, IoPool, Process, Publish, ReadMode};

use super::documents::{self, Name};
use super::remove::Rules;
use crate::layout::Modes;

/// Names and metadata in a directory; none where there is no such directory.
pub type Entries = Vec<(std::ffi::OsString, FileMeta)>;

/// Configuration of the space below a root.
#[derive(Debug, Clone, Default)]
pub struct QuotaConfig {
    /// The root.
    pub root: PathBuf,
    /// The process, to tell a dead collector from a slow one.
    pub process: Process,
    /// What is removed beside the oldest above the limit.
    pub rules: Rules,
    /// Bytes of one record of this writer.
    pub record_len: u64,
    /// Permissions of what is made.
    pub modes: Modes,
}

/// How long one operation may take.
pub(super) const STEP: Duration = Duration::from_secs(30);
/// Room beyond the listed length when a document is read: it may have grown since.
const GROWTH: u64 = 4096;
/// Longest document that is read.
const LONGEST: u64 = 4 << 20;

/// The documents of a root.
#[derive(Default)]
pub(super) struct Look {
    pub(super) files: BTreeMap<Name, FileMeta>,
}

impl Look {
    /// The highest term that was taken.
    pub(super) fn highest(&self) -> Option<u64> {
        self.files.keys().rev().find_map(|name| match name {
            Name::Collector(term) => Some(*term),
            _ => None,
        })
    }

    /// Terms with grants, highest first.
    pub(super) fn grants(&self) -> impl Iterator<Item = u64> {
        self.files.keys().rev().filter_map(|name| match name {
            Name::Grants(term) => Some(*term),
            _ => None,
        })
    }

    /// Notes of writers.
    pub(super) fn writers(&self) -> impl Iterator<Item = (u64, FileMeta)> {
        self.files.iter().filter_map(|(name, meta)| match name {
            Name::Writer(id) => Some((*id, *meta)),
            _ => None,
        })
    }
}

/// Functions that the backend provides for its root.
pub(super) struct Root {
    /// Fails if the root is not the one that was opened.
    pub(super) check: Box<dyn Fn(MonotonicTime) -> Result<()> + Send + Sync>,
    /// Checks it before every count and returns the limit.
    pub(super) tend: Box<dyn Fn(MonotonicTime) -> Result<u64> + Send + Sync>,
}

/// See the module.
pub(super) struct SpaceFiles {
    pub(super) config: QuotaConfig,
    pub(super) io: Arc<IoPool>,
    pub(super) clock: Arc<dyn Clock>,
    /// Set when the root was opened.
    pub(super) root: OnceLock<Root>,
    /// Nothing is listed any more.
    pub(super) closing: AtomicBool,
}

impl SpaceFiles {
    /// Does `work` on a thread for files.
    pub(super) fn call<T: Send + 'static>(
        &self,
        deadline: MonotonicTime,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let deadline = deadline.min(self.clock.now().after(STEP));
        self.io.call(LANE_SPACE, deadline, work)
    }

    /// The entries of a directory; none if it does not exist.
    pub(super) fn entries(&self, dir: PathBuf) -> Result<Entries> {
        if self.closing.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed"));
        }
        match self.call(MonotonicTime::NEVER, move |io| io.list_if_there(&dir)) {
            // What a symbolic link leads to is not ours to count or to remove.
            Err(error) if error.os_code() == Some(ELOOP) => Ok(Vec::new()),
            listed => listed,
        }
    }

    /// Bytes free on the file system, and how many shall stay so.
    pub(super) fn free_and_floor(&self, deadline: MonotonicTime) -> Result<(u64, u64)> {
        let path = self.config.root.clone();
        let space = self.call(deadline, move |io| io.space(&path))?;
        Ok((space.free, self.config.rules.floor(space.total)))
    }

    /// Where the space documents lie.
    pub(super) fn directory(&self) -> PathBuf {
        self.config.root.join(documents::DIRECTORY)
    }

    /// Lists the directory; makes it if there is none and the root is still ours.
    pub(super) fn look(&self, deadline: MonotonicTime) -> Result<Look> {
        let dir = self.directory();
        let path = dir.clone();
        let listed = match self.call(deadline, move |io| io.list(&path)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.tend(deadline)?;
                let mode = self.config.modes.dir;
                self.call(deadline, move |io| io.make_dir(&dir, mode))?;
                Vec::new()
            }
            listed => listed?,
        };
        let files = listed.into_iter().filter(|(_, meta)| !meta.is_dir);
        let files = files.filter_map(|(name, meta)| Some((Name::parse(&name)?, meta)));
        Ok(Look {
            files: files.collect(),
        })
    }

    fn root(&self) -> Result<&Root> {
        let root = self.root.get();
        root.ok_or_else(|| Error::internal("the root was not opened"))
    }

    /// Checks the root and returns the limit.
    pub(super) fn tend(&self, deadline: MonotonicTime) -> Result<u64> {
        (self.root()?.tend)(deadline.min(self.clock.now().after(STEP)))
    }

    /// Fails if the root is not the one that was opened: no documents are written into another.
    pub(super) fn check_root(&self, deadline: MonotonicTime) -> Result<()> {
        (self.root()?.check)(deadline.min(self.clock.now().after(STEP)))
    }

    /// Reads a document; `None` if it was removed, is not whole, or has a newer format.
    pub(super) fn read<T: for<'de> Deserialize<'de>>(
        &self,
        listed: &Look,
        name: Name,
        deadline: MonotonicTime,
    ) -> Result<Option<T>> {
        let len = listed.files.get(&name).map_or(0, |meta| meta.len);
        let len = len.min(LONGEST).saturating_add(GROWTH) as usize;
        let path = self.path(name);
        let read = self.call(deadline, move |io| {
            io.read_piece(&path, 0, len, ReadMode::Default)
        })?;
        Ok(read.and_then(|(bytes, _)| documents::parse(&bytes)))
    }

    /// Writes a document. The answer is false when it was not to be replaced and there is one.
    pub(super) fn write(
        &self,
        name: Name,
        document: &impl Serialize,
        replace: bool,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let (private, target) = (self.private(), self.path(name));
        let (bytes, mode) = (documents::to_bytes(document), self.config.modes.file);
        let publish = move |io: &IoJob| {
            io.publish(Publish {
                private: &private,
                target: &target,
                replace,
                bytes: &bytes,
                mode,
                mtime_ns: None,
                durable: false,
            })
        };
        Ok(self.call(deadline, publish)?.is_some())
    }

    /// Removes documents, best effort: what stays is removed with a later count.
    pub(super) fn drop_documents(&self, names: &[Name], deadline: MonotonicTime) {
        let paths = names.iter().map(|name| self.path(*name)).collect();
        let _ = self.remove(paths, deadline);
    }

    /// Removes files; for each whether it was there.
    pub(super) fn remove(
        &self,
        paths: Vec<PathBuf>,
        deadline: MonotonicTime,
    ) -> Result<Vec<Result<bool>>> {
        if paths.is_empty() {
            return Ok(Vec::new());
        }
        self.call(deadline, move |io| io.remove(&paths))
    }

    pub(super) fn path(&self, name: Name) -> PathBuf {
        self.directory().join(name.text())
    }

    /// A private name that no other process uses; a leftover is swept by its age.
    fn private(&self) -> PathBuf {
        let (one, other) = (ucm_infra::random_u64(), ucm_infra::random_u64());
        let name = format!("{one:016x}-{other:016x}.tmp");
        self.directory().join(name)
    }
}
