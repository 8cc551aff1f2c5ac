//! Reading and writing the space documents, every step with a deadline, on the keeper's thread.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Mono;
use ucm_io::{FileMeta, IoBuf, IoDone, IoOp, ReadMode};

use super::documents::{self, Name};
use super::{Root, Space};

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

impl Space {
    /// Lists the directory; makes it if there is none and the root is still ours.
    pub(super) fn look(&self, deadline: Mono) -> Result<Look> {
        let dir = self.directory();
        let listed = match self.call(deadline, IoOp::List { dir: dir.clone() }) {
            Ok(IoDone::List(entries)) => entries,
            Ok(_) => return Err(Error::internal("a listing answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.tend(deadline)?;
                self.call(
                    deadline,
                    IoOp::MakeDir {
                        path: dir,
                        mode: self.config.modes.dir,
                    },
                )?;
                Vec::new()
            }
            Err(error) => return Err(error),
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
    pub(super) fn tend(&self, deadline: Mono) -> Result<u64> {
        (self.below()?.tend)(deadline.min(self.clock.now().after(super::STEP)))
    }

    /// Whether the root is the one that was opened: the documents of another one are not ours to write.
    pub(super) fn check_root(&self, deadline: Mono) -> Result<()> {
        (self.below()?.check)(deadline.min(self.clock.now().after(super::STEP)))
    }

    /// Reads a document; `None` when it is gone, not whole, or of a newer format.
    pub(super) fn read<T: for<'de> Deserialize<'de>>(
        &self,
        name: Name,
        listed: u64,
        deadline: Mono,
    ) -> Result<Option<T>> {
        let len = listed.min(LONGEST).saturating_add(GROWTH) as usize;
        let op = IoOp::Read {
            path: self.path(name),
            offset: 0,
            len,
            buf: IoBuf::Heap(vec![0; len]),
            mode: ReadMode::Default,
        };
        match self.call(deadline, op) {
            Ok(IoDone::Read {
                buf: IoBuf::Heap(bytes),
                read,
                ..
            }) => Ok(bytes.get(..read).and_then(documents::parse)),
            Ok(_) => Err(Error::internal("a read answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes a document. The answer is false when it was not to be replaced and there is one.
    pub(super) fn write(
        &self,
        name: Name,
        document: &impl Serialize,
        replace: bool,
        deadline: Mono,
    ) -> Result<bool> {
        let bytes = documents::to_bytes(document);
        let op = IoOp::Publish {
            private: self.private(),
            target: self.path(name),
            replace,
            len: bytes.len(),
            buf: IoBuf::Heap(bytes),
            mode: self.config.modes.file,
            mtime_ns: None,
            durable: false,
        };
        match self.call(deadline, op) {
            Ok(IoDone::Published { .. }) => Ok(true),
            Ok(IoDone::Taken { .. }) => Ok(false),
            Ok(_) => Err(Error::internal("a publish answered with something else")),
            Err(error) => Err(error),
        }
    }

    /// Removes documents, best effort.
    pub(super) fn drop_documents(&self, names: &[Name], deadline: Mono) {
        if !names.is_empty() {
            let paths = names.iter().map(|name| self.path(*name)).collect();
            let _ = self.call(deadline, IoOp::Remove { paths }); // what stays is removed with a later count
        }
    }

    pub(super) fn path(&self, name: Name) -> PathBuf {
        self.directory().join(name.text())
    }

    /// A private name that nobody else uses; a leftover is swept by its age.
    fn private(&self) -> PathBuf {
        let (one, other) = (crate::random_u64(), crate::random_u64());
        self.directory().join(format!("{one:016x}-{other:016x}.tmp"))
    }
}
