//! The engine of plain system calls: right for every file system, the only sane one for network mounts.

use std::sync::Arc;

use ucm_core::Result;

use crate::engine::{Close, Closed, IoEngine, StillWanted};
use crate::file::Files;
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
    fn run(&self, _lane: usize, op: &mut IoOp<'_>, wanted: StillWanted<'_>) -> Result<IoDone> {
        let files = &self.files;
        match op {
            IoOp::Read {
                path,
                offset,
                len,
                buf,
                mode,
            } => files
                .read(path, *offset, *len, buf, *mode)
                .map(|(read, len)| IoDone::Read(read, len)),
            IoOp::ReadInto {
                path,
                offset,
                into,
                keep,
            } => files.read_into(path, *offset, into, *keep).map(IoDone::ReadInto),
            IoOp::ReadParts {
                path,
                offset,
                parts,
                buf,
                keep,
            } => files
                .read_parts(path, *offset, parts, buf, *keep)
                .map(IoDone::ReadInto),
            IoOp::Publish(job) => files.publish(job, wanted).map(IoDone::Published),
            IoOp::Create {
                path,
                head,
                room,
                mode,
            } => files.create(path, head, *room, *mode).map(|()| IoDone::Wrote),
            IoOp::WriteAt { path, offset, bytes } => {
                files.write_at(path, *offset, bytes).map(|()| IoDone::Wrote)
            }
            IoOp::Finish(job) => files.finish(job, wanted).map(IoDone::Finished),
            IoOp::Stat {
                paths,
                stop_at_missing,
            } => meta::stat(paths, *stop_at_missing, wanted).map(IoDone::Stat),
            IoOp::Touch { files } => Ok(IoDone::Each(meta::touch(files, wanted))),
            IoOp::Remove { paths } => {
                let removed = meta::remove(paths, wanted);
                drop(files.kept.take(paths, false));
                Ok(IoDone::Each(removed))
            }
            IoOp::Rename { from, to, ino } => meta::rename(from, to, *ino, wanted).map(IoDone::Was),
            IoOp::List { dir } => meta::list(dir, wanted).map(IoDone::List),
            IoOp::MakeDir { path, mode } => meta::make_dir(path, *mode).map(IoDone::Was),
            IoOp::Space { path } => meta::space(path).map(IoDone::Space),
            IoOp::Probe { dir } => probe(dir).map(IoDone::Probe),
        }
    }

    fn close(&self, which: Close<'_>) -> Closed {
        let kept = &self.files.kept;
        Closed(match which {
            Close::Gone(paths) => kept.take(paths, false),
            Close::Unused => kept.take(&[], true),
            Close::All => kept.take_all(),
        })
    }

    fn kept(&self) -> usize {
        self.files.kept.count()
    }
}
