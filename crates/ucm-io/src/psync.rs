//! The engine of plain system calls. It works on every file system and is the right one for network
//! mounts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ucm_core::Result;

use crate::engine::{Caller, Close, Closed, IoEngine};
use crate::file::Files;
use crate::meta;
use crate::op::{FileMeta, Finish, Publish, Read, ReadMode, ReadPiece, SpaceInfo};
use crate::probe::{Probe, probe};
use crate::usrbio::{Rings, UsrbioOptions};

/// Plain system calls, and rings for slots on 3FS.
pub struct PsyncEngine {
    files: Files,
}

impl PsyncEngine {
    /// An engine; with `direct` slots are read and written past the page cache if the file system
    /// supports it.
    pub fn new(direct: bool) -> Arc<Self> {
        Arc::new(Self {
            files: Files::new(direct),
        })
    }

    /// The same, with slots through the rings of 3FS if a probe finds the directory on 3FS.
    pub fn over_3fs(direct: bool, options: UsrbioOptions) -> Arc<Self> {
        let mut files = Files::new(direct);
        files.rings = Some(Rings::new(options));
        Arc::new(Self { files })
    }

    /// The same as on a system without `openat2`.
    #[cfg(feature = "test-utils")]
    pub fn without_openat2(direct: bool) -> Arc<Self> {
        let engine = Self::new(direct);
        engine.files.roots.forget_openat2();
        engine
    }

    /// Number of operations that wanted direct I/O but used the page cache.
    pub fn direct_fallbacks(&self) -> u64 {
        self.files.fallbacks()
    }
}

impl IoEngine for PsyncEngine {
    fn keep_below(&self, root: &Path) {
        self.files.roots.add(root);
    }

    fn read(
        &self,
        _by: &Caller<'_>,
        path: &Path,
        offset: u64,
        len: usize,
        buf: &mut [u8],
        mode: ReadMode,
    ) -> Result<Read> {
        self.files.read(path, offset, len, buf, mode)
    }

    fn read_into(
        &self,
        _by: &Caller<'_>,
        path: &Path,
        pieces: &mut [ReadPiece<'_>],
        keep: bool,
    ) -> Result<usize> {
        self.files.read_into(path, pieces, keep)
    }

    fn publish(&self, by: &Caller<'_>, publish: &Publish<'_>) -> Result<Option<FileMeta>> {
        self.files.publish(publish, by.wanted)
    }

    fn create(
        &self,
        _by: &Caller<'_>,
        path: &Path,
        head: &[u8],
        room: u64,
        mode: u32,
    ) -> Result<()> {
        self.files.create(path, head, room, mode)
    }

    fn write_at(
        &self,
        _by: &Caller<'_>,
        path: &Path,
        offset: u64,
        bytes: &[u8],
        keep: bool,
    ) -> Result<()> {
        self.files.write_at(path, offset, bytes, keep)
    }

    fn finish(&self, by: &Caller<'_>, finish: &Finish<'_>) -> Result<FileMeta> {
        self.files.finish(finish, by.wanted)
    }

    fn stat(
        &self,
        by: &Caller<'_>,
        paths: &[PathBuf],
        stop_at_missing: bool,
    ) -> Result<Vec<Option<FileMeta>>> {
        meta::stat(&self.files.roots, paths, stop_at_missing, by.wanted)
    }

    fn touch(&self, by: &Caller<'_>, files: &[(PathBuf, i64)]) -> Result<Vec<Result<bool>>> {
        Ok(meta::touch(&self.files.roots, files, by.wanted))
    }

    fn remove(&self, by: &Caller<'_>, paths: &[PathBuf]) -> Result<Vec<Result<bool>>> {
        let removed = meta::remove(&self.files.roots, paths, by.wanted);
        drop(self.files.kept.take(paths, false));
        Ok(removed)
    }

    fn rename(&self, by: &Caller<'_>, from: &Path, to: &Path, ino: u64) -> Result<bool> {
        meta::rename(&self.files.roots, from, to, ino, by.wanted)
    }

    fn list(&self, by: &Caller<'_>, dir: &Path) -> Result<Vec<(OsString, FileMeta)>> {
        meta::list(&self.files.roots, dir, by.wanted)
    }

    fn make_dir(&self, _by: &Caller<'_>, path: &Path, mode: u32) -> Result<bool> {
        meta::make_dir(&self.files.roots, path, mode)
    }

    fn space(&self, _by: &Caller<'_>, path: &Path) -> Result<SpaceInfo> {
        meta::space(&self.files.roots, path)
    }

    fn probe(&self, _by: &Caller<'_>, dir: &Path) -> Result<Probe> {
        probe(&self.files.roots, dir, self.files.rings.as_ref())
    }

    fn close(&self, which: Close<'_>) -> Closed {
        let (kept, roots) = (&self.files.kept, &self.files.roots);
        let (mut closed, root) = match which {
            Close::Gone(paths) => (kept.take(paths, false), None),
            Close::Unused => (kept.take(&[], true), roots.take_kept(true)),
            Close::All => (kept.take_all(), roots.take_kept(false)),
        };
        closed.extend(root);
        Closed(closed)
    }

    fn kept(&self) -> usize {
        self.files.kept.count()
    }
}
