//! Reading and writing the space documents, every step with a deadline, on the quota agent's
//! thread.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{FileMeta, IoJob, Publish, ReadMode};

use super::documents::{self, Name};
use super::{Quota, Root};

/// Room beyond the listed length when a document is read: it may have grown since.
const GROWTH: u64 = 4096;
/// Longest document that is read.
const LONGEST: u64 = 4 << 20;

/// What lies in the directory.
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

impl Quota {
    /// Lists the directory; makes it if there is none and the root is still ours.
    pub(super) fn look(&self, deadline: MonotonicTime) -> Result<Look> {
        let dir = self.directory();
        let listed = match self.call(deadline, {
            let dir = dir.clone();
            move |io| io.list(&dir)
        }) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.tend(deadline)?;
                let mode = self.config.modes.dir;
                self.call(deadline, move |io| io.make_dir(&dir, mode))?;
                Vec::new()
            }
            listed => listed?,
        };
        let files = listed.into_iter().filter(|(_, meta)| !meta.is_dir);
        Ok(Look {
            files: files
                .filter_map(|(name, meta)| Some((Name::parse(&name)?, meta)))
                .collect(),
        })
    }

    fn below(&self) -> Result<&Root> {
        self.below
            .get()
            .ok_or_else(|| Error::internal("the root was not opened"))
    }

    /// Looks after the root and answers the limit.
    pub(super) fn tend(&self, deadline: MonotonicTime) -> Result<u64> {
        (self.below()?.tend)(deadline.min(self.clock.now().after(super::STEP)))
    }

    /// Whether the root is the one that was opened: the documents of another one are not ours to
    /// write.
    pub(super) fn check_root(&self, deadline: MonotonicTime) -> Result<()> {
        (self.below()?.check)(deadline.min(self.clock.now().after(super::STEP)))
    }

    /// Reads a document; `None` when it is gone, not whole, or of a newer format.
    pub(super) fn read<T: for<'de> Deserialize<'de>>(
        &self,
        name: Name,
        listed: u64,
        deadline: MonotonicTime,
    ) -> Result<Option<T>> {
        let len = listed.min(LONGEST).saturating_add(GROWTH) as usize;
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
        self.call(deadline, publish)
            .map(|published| published.is_some())
    }

    /// Removes documents, best effort.
    pub(super) fn drop_documents(&self, names: &[Name], deadline: MonotonicTime) {
        if !names.is_empty() {
            let paths: Vec<_> = names.iter().map(|name| self.path(*name)).collect();
            // what stays is removed with a later count
            let _ = self.call(deadline, move |io| io.remove(&paths));
        }
    }

    pub(super) fn path(&self, name: Name) -> PathBuf {
        self.directory().join(name.text())
    }

    /// A private name that no other process uses; a leftover is swept by its age.
    fn private(&self) -> PathBuf {
        let (one, other) = (ucm_infra::random_u64(), ucm_infra::random_u64());
        self.directory()
            .join(format!("{one:016x}-{other:016x}.tmp"))
    }
}
