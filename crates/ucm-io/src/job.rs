//! File operations of a job: one method for each.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Ticket, Visit};

use crate::engine::{Caller, IoEngine};
use crate::op::{FileMeta, Finish, Publish, Read, ReadMode, ReadPiece, SpaceInfo};
use crate::probe::Probe;

/// The file interface of a job, which is straight-line code on one thread. Every operation runs on
/// the calling thread. Once the job is written off, every operation fails with `Timeout` and has no
/// effect.
///
/// Errors of all operations: `NotFound` for ENOENT and ESTALE; `NoSpace` for a full medium or
/// quota; `Foreign` for a symbolic link that is not followed; `InvalidInput` for a length or offset
/// that does not fit its buffer or the range of file offsets; else `Io` with the error number of
/// the operating system.
///
/// ```
/// use std::path::PathBuf;
/// use ucm_infra::{LANE_LOAD, MonotonicTime};
/// use ucm_io::{IoOptions, IoPool};
///
/// let pool = IoPool::psync(false, &IoOptions::with_workers(1)).unwrap();
/// let found = pool.call(LANE_LOAD, MonotonicTime::NEVER, |io| {
///     io.still_wanted()?; // before every effect that no method of it makes
///     io.look(PathBuf::from("/no such file"))
/// });
/// assert!(found.unwrap().is_none());
/// ```
pub struct IoJob {
    engine: Arc<dyn IoEngine>,
    lane: usize,
    watch: JobWatch,
    /// Set where the thread is another pool's.
    _visit: Option<Visit>,
}

/// Says whether a job is still waited for, to code that keeps something of it.
#[derive(Clone)]
pub struct JobWatch(Option<Until>);

/// The clock, the deadline, and whether the end of the job was reported.
type Until = (Arc<dyn Clock>, MonotonicTime, Arc<Ticket>);

impl JobWatch {
    /// False from the deadline on, and once the end of the job was reported.
    pub fn is_wanted(&self) -> bool {
        let waits =
            |(clock, deadline, ticket): &Until| !ticket.is_over() && clock.now() < *deadline;
        self.0.as_ref().is_none_or(waits)
    }

    /// The deadline of the job.
    pub fn deadline(&self) -> MonotonicTime {
        self.0
            .as_ref()
            .map_or(MonotonicTime::NEVER, |(_, deadline, _)| *deadline)
    }
}

impl IoJob {
    /// `visit`: where the thread is another pool's.
    pub(crate) fn new(
        engine: &Arc<dyn IoEngine>,
        lane: usize,
        until: Option<Until>,
        visit: Option<Visit>,
    ) -> Self {
        Self {
            engine: Arc::clone(engine),
            lane,
            watch: JobWatch(until),
            _visit: visit,
        }
    }

    /// A job outside any pool, which is never written off.
    pub fn alone(engine: Arc<dyn IoEngine>) -> Self {
        Self::new(&engine, 0, None, None)
    }

    /// Says whether this job is still waited for, also once its thread went on.
    pub fn watch(&self) -> JobWatch {
        self.watch.clone()
    }

    /// True if the job is still wanted: not written off and before its deadline.
    pub fn is_wanted(&self) -> bool {
        self.watch.is_wanted()
    }

    /// Its deadline.
    pub fn deadline(&self) -> MonotonicTime {
        self.watch.deadline()
    }

    /// [`IoJob::is_wanted`] as a result. Call it before an effect outside of files.
    pub fn still_wanted(&self) -> Result<()> {
        let late = || {
            let text = "the job ran past its deadline and was written off";
            Error::new(ErrorKind::Timeout, text)
        };
        self.is_wanted().then_some(()).ok_or_else(late)
    }

    /// Runs `work` as a future of the process's runtime and waits for its end, until this job is no
    /// longer wanted: see [`Runtime::wait`](ucm_infra::Runtime::wait). Fails with `Timeout`,
    /// without effect, if the job is no longer wanted at the start.
    #[cfg(feature = "runtime")]
    pub fn wait<T>(
        &self,
        runtime: &ucm_infra::Runtime,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.still_wanted()?;
        match &self.watch.0 {
            Some((clock, deadline, _)) => runtime.wait(&**clock, *deadline, work),
            None => runtime.wait(&ucm_infra::SystemClock, MonotonicTime::NEVER, work),
        }
    }

    /// Runs one operation of the engine.
    fn run<T>(&self, op: impl FnOnce(&dyn IoEngine, &Caller<'_>) -> Result<T>) -> Result<T> {
        self.still_wanted()?;
        let by = Caller {
            lane: self.lane,
            wanted: &|| self.is_wanted(),
        };
        op(&*self.engine, &by)
    }

    /// Reads `len` bytes at `offset` into the start of `buf`. The last name of `path` must not be a
    /// symbolic link. The read bypasses the page cache if the engine is set up so and `buf` begins
    /// on a page, as slots do; bytes of `buf` behind `len`, up to a whole sector, may then be
    /// overwritten.
    pub fn read(
        &self,
        path: &Path,
        offset: u64,
        len: usize,
        buf: &mut [u8],
        mode: ReadMode,
    ) -> Result<Read> {
        self.run(|io, by| io.read(by, path, offset, len, buf, mode))
    }

    /// Reads one range of a file into several buffers: from `offset` on, the given number of bytes
    /// into the start of each buffer in turn. Returns the total; it is smaller only at the end of
    /// the file. `keep`: a file of this name never changes, so its descriptor may be kept open for
    /// the next such read; a file that has been removed since is still `NotFound`.
    pub fn read_into(
        &self,
        path: &Path,
        offset: u64,
        into: Vec<(&mut [u8], usize)>,
        keep: bool,
    ) -> Result<usize> {
        let mut pieces = ReadPiece::adjacent(offset, into);
        self.run(|io, by| io.read_into(by, path, &mut pieces, keep))
    }

    /// Reads parts of one range of a file to their positions: byte `n` of `buf` is byte `offset +
    /// n` of the file, and bytes between the parts stay unchanged. Parts are in order; the first
    /// one beyond the end of the file ends the read. Otherwise as [`IoJob::read_into`] with one
    /// buffer.
    pub fn read_parts(
        &self,
        path: &Path,
        offset: u64,
        parts: &[Range<usize>],
        buf: &mut [u8],
        keep: bool,
    ) -> Result<usize> {
        let mut pieces = ReadPiece::of_parts(offset, parts, buf)
            .map_err(|error| error.with("path", path.display()))?;
        self.run(|io, by| io.read_into(by, path, &mut pieces, keep))
    }

    /// Publishes a file. Returns its metadata at the close, or `None` if a file of that name
    /// exists, which then stays.
    pub fn publish(&self, publish: Publish<'_>) -> Result<Option<FileMeta>> {
        self.run(|io, by| io.publish(by, &publish))
    }

    /// Creates a private file to be filled by [`IoJob::write_at`] and named by [`IoJob::finish`]:
    /// writes its first bytes and preallocates up to `room` bytes, best effort. `mode`: permission
    /// bits, before the umask. After a failure no file of that name exists, or it is foreign.
    pub fn create(&self, path: &Path, head: &[u8], room: u64, mode: u32) -> Result<()> {
        self.run(|io, by| io.create(by, path, head, room, mode))
    }

    /// Writes at `offset` of an existing file, closes it and returns the error of the close.
    /// `keep`: the descriptor of the root may stay open for the next such write. Only a caller that
    /// also closes it ([`Close::Unused`](crate::Close::Unused)) passes true: an open root prevents
    /// an unmount.
    pub fn write_at(&self, path: &Path, offset: u64, bytes: &[u8], keep: bool) -> Result<()> {
        self.run(|io, by| io.write_at(by, path, offset, bytes, keep))
    }

    /// Writes the end of a filled private file and renames it to its name. Returns its metadata at
    /// the close.
    pub fn finish(&self, finish: Finish<'_>) -> Result<FileMeta> {
        self.run(|io, by| io.finish(by, &finish))
    }

    /// Metadata of each path. Links are followed outside of roots ([`IoEngine::keep_below`]); below
    /// a root a link is `None`. A name that does not exist (ENOENT, ENOTDIR, ESTALE) is `None` too.
    /// With `stop_at_missing` the result ends at the first `None`.
    pub fn stat(&self, paths: &[PathBuf], stop_at_missing: bool) -> Result<Vec<Option<FileMeta>>> {
        self.run(|io, by| io.stat(by, paths, stop_at_missing))
    }

    /// Metadata of one path, as in [`IoJob::stat`].
    pub fn look(&self, path: PathBuf) -> Result<Option<FileMeta>> {
        Ok(self.stat(&[path], false)?.into_iter().next().flatten())
    }

    /// Sets modification times (ns since 1970). Returns for each file whether it existed; an error
    /// does not stop the others.
    pub fn touch(&self, files: &[(PathBuf, i64)]) -> Result<Vec<Result<bool>>> {
        self.run(|io, by| io.touch(by, files))
    }

    /// Removes files, never directories. Returns for each whether it existed; an error does not
    /// stop the others.
    pub fn remove(&self, paths: &[PathBuf]) -> Result<Vec<Result<bool>>> {
        self.run(|io, by| io.remove(by, paths))
    }

    /// Renames the file with this inode on the same file system, replacing an existing target.
    /// False if the file does not exist or another file has its name.
    pub fn rename(&self, from: &Path, to: &Path, ino: u64) -> Result<bool> {
        self.run(|io, by| io.rename(by, from, to, ino))
    }

    /// Creates one directory, whose parent must exist; true if it is new. `mode`: permission bits,
    /// before the umask.
    pub fn make_dir(&self, path: &Path, mode: u32) -> Result<bool> {
        self.run(|io, by| io.make_dir(by, path, mode))
    }

    /// Names and metadata in one directory, links not followed, in no order; at most
    /// [`MAX_LIST`](crate::MAX_LIST).
    pub fn list(&self, dir: &Path) -> Result<Vec<(OsString, FileMeta)>> {
        self.run(|io, by| io.list(by, dir))
    }

    /// The same; empty if the directory does not exist.
    pub fn list_if_there(&self, dir: &Path) -> Result<Vec<(OsString, FileMeta)>> {
        match self.list(dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed,
        }
    }

    /// Reads `len` bytes of a file from `offset` on, fewer at its end. Returns them with the file's
    /// length; `None` if the file does not exist. For small reads: documents, headers and footers.
    pub fn read_piece(
        &self,
        path: &Path,
        offset: u64,
        len: usize,
        mode: ReadMode,
    ) -> Result<Option<(Vec<u8>, u64)>> {
        let mut bytes = vec![0; len];
        match self.read(path, offset, len, &mut bytes, mode) {
            Ok(read) => {
                bytes.truncate(read.bytes);
                Ok(Some((bytes, read.file_len)))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Size of the file system of this name.
    pub fn space(&self, path: &Path) -> Result<SpaceInfo> {
        self.run(|io, by| io.space(by, path))
    }

    /// Type and abilities of the file system of a directory. Writes and removes one nameless page
    /// in it.
    pub fn probe(&self, dir: &Path) -> Result<Probe> {
        self.run(|io, by| io.probe(by, dir))
    }
}
