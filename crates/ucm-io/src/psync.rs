//! The engine of plain system calls: right for every file system, the only sane one for network mounts.

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::Result;

use crate::append::Finish;
use crate::engine::{IoEngine, StillWanted};
use crate::file::{Files, Publish};
use crate::meta;
use crate::op::{IoDone, IoOp};
use crate::probe::probe;

/// Plain system calls.
pub struct PsyncEngine {
    files: Files,
}

impl PsyncEngine {
    /// One engine; with `direct` slots are read and written past the page cache where the file system can.
    pub fn new(direct: bool) -> Arc<Self> {
        Arc::new(Self {
            files: Files::new(direct),
        })
    }

    /// How many operations wanted direct I/O and went through the page cache.
    pub fn direct_fallbacks(&self) -> u64 {
        self.files.fallbacks()
    }
}

impl IoEngine for PsyncEngine {
    fn run(&self, _lane: usize, op: IoOp, wanted: StillWanted<'_>) -> Result<IoDone> {
        let files = &self.files;
        match op {
            IoOp::Read {
                path,
                offset,
                len,
                buf,
                mode,
            } => files.read(&path, offset, len, buf, mode),
            IoOp::ReadInto {
                path,
                offset,
                into,
                keep,
            } => Ok(files.read_into(&path, offset, into, keep)),
            IoOp::ReadParts {
                path,
                offset,
                parts,
                buf,
                keep,
            } => Ok(files.read_parts(&path, offset, &parts, buf, keep)),
            IoOp::Publish {
                private,
                target,
                replace,
                buf,
                len,
                mode,
                mtime_ns,
                durable,
            } => {
                let job = Publish {
                    private: &private,
                    target: &target,
                    replace,
                    len,
                    mode,
                    mtime_ns,
                    durable,
                };
                files.publish(&job, buf, wanted)
            }
            IoOp::Stat {
                paths,
                stop_at_missing,
            } => meta::stat(&paths, stop_at_missing, wanted),
            IoOp::Touch { files } => Ok(meta::touch(&files, wanted)),
            IoOp::Remove { paths } => {
                let removed = meta::remove(&paths, wanted);
                drop(files.kept.take(&paths, false));
                Ok(removed)
            }
            IoOp::Rename { from, to, ino } => meta::rename(&from, &to, ino, wanted),
            IoOp::List { dir } => meta::list(&dir, wanted),
            IoOp::MakeDir { path, mode } => meta::make_dir(&path, mode),
            IoOp::Space { path } => meta::space(&path),
            IoOp::Probe { dir } => probe(&dir).map(IoDone::Probe),
            IoOp::Create {
                path,
                head,
                room,
                mode,
            } => files.create(&path, &head, room, mode),
            IoOp::WriteAt {
                path,
                offset,
                buf,
                len,
            } => files.write_at(&path, offset, buf, len),
            IoOp::Finish {
                private,
                target,
                foot,
                offset,
                mtime_ns,
            } => {
                let job = Finish {
                    private: &private,
                    target: &target,
                    foot: &foot,
                    offset,
                    mtime_ns,
                };
                files.finish(&job, wanted)
            }
        }
    }

    fn close_kept(&self, gone: &[PathBuf], unused: bool) {
        drop(self.files.kept.take(gone, unused));
    }

    fn close_all(&self) {
        drop(self.files.kept.take_all());
    }

    fn kept(&self) -> usize {
        self.files.kept.count()
    }
}
