//! The interface between a backend and files: execution of single operations.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ucm_core::Result;

use crate::fd_cache::KeptFile;
use crate::op::{FileMeta, Finish, Publish, Read, ReadMode, ReadPiece, SpaceInfo, StillWanted};
use crate::probe::Probe;

/// The caller of an operation.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    /// The lane of the job: 0 load, 1 prefetch and lookup, 2 dump, 3 space.
    pub lane: usize,
    /// Its job, which knows whether it is still wanted.
    pub wanted: StillWanted<'a>,
}

/// Selects kept descriptors ([`IoJob::read_into`](crate::IoJob::read_into)) to close.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close<'a> {
    /// Those of these removed files.
    Gone(&'a [PathBuf]),
    /// Those not used since the last such call.
    Unused,
    /// All.
    All,
}

/// Descriptors removed from the cache. Dropping this closes them, which may hang.
#[derive(Default)]
pub struct Closed(pub(crate) Vec<Arc<KeptFile>>);

/// Executes operations on files, each to its end on the calling thread. An operation that is no
/// longer wanted publishes and removes nothing and fails with `Timeout`. The methods of
/// [`IoJob`](crate::IoJob) document each operation and its result.
#[allow(
    missing_docs,
    reason = "documented at the methods of the same names of IoJob"
)]
pub trait IoEngine: Send + Sync {
    /// From now on no symbolic link below this directory is followed, on the way to a name or at
    /// its end; the directory itself may be reached by links. An operation that meets a link fails
    /// with `Foreign`, and the error names the link.
    fn keep_below(&self, root: &Path);

    fn read(
        &self,
        by: &Caller<'_>,
        path: &Path,
        offset: u64,
        len: usize,
        buf: &mut [u8],
        mode: ReadMode,
    ) -> Result<Read>;

    fn read_into(
        &self,
        by: &Caller<'_>,
        path: &Path,
        pieces: &mut [ReadPiece<'_>],
        keep: bool,
    ) -> Result<usize>;

    fn publish(&self, by: &Caller<'_>, publish: &Publish<'_>) -> Result<Option<FileMeta>>;

    fn create(&self, by: &Caller<'_>, path: &Path, head: &[u8], room: u64, mode: u32)
    -> Result<()>;

    fn write_at(
        &self,
        by: &Caller<'_>,
        path: &Path,
        offset: u64,
        bytes: &[u8],
        keep: bool,
    ) -> Result<()>;

    fn finish(&self, by: &Caller<'_>, finish: &Finish<'_>) -> Result<FileMeta>;

    fn stat(
        &self,
        by: &Caller<'_>,
        paths: &[PathBuf],
        stop_at_missing: bool,
    ) -> Result<Vec<Option<FileMeta>>>;

    fn touch(&self, by: &Caller<'_>, files: &[(PathBuf, i64)]) -> Result<Vec<Result<bool>>>;

    fn remove(&self, by: &Caller<'_>, paths: &[PathBuf]) -> Result<Vec<Result<bool>>>;

    fn rename(&self, by: &Caller<'_>, from: &Path, to: &Path, ino: u64) -> Result<bool>;

    fn list(&self, by: &Caller<'_>, dir: &Path) -> Result<Vec<(OsString, FileMeta)>>;

    fn make_dir(&self, by: &Caller<'_>, path: &Path, mode: u32) -> Result<bool>;

    fn space(&self, by: &Caller<'_>, path: &Path) -> Result<SpaceInfo>;

    fn probe(&self, by: &Caller<'_>, dir: &Path) -> Result<Probe>;

    /// Removes these descriptors from the cache. Never blocks.
    fn close(&self, _which: Close<'_>) -> Closed {
        Closed::default()
    }

    /// Descriptors kept open now.
    fn kept(&self) -> usize {
        0
    }
}
