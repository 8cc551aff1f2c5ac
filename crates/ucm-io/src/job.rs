//! What a job does to files: a method for each operation.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Ticket};

use crate::engine::{Caller, IoEngine};
use crate::op::{FileMeta, Finish, Publish, Read, ReadMode, SpaceInfo};
use crate::probe::Probe;

/// Straight-line code on one thread, as the files see it. Everything is done on the thread that
/// calls; nothing more is done once no one waits for the job, and then everything fails with
/// `Timeout`.
///
/// The errors of all of them: `NotFound` for ENOENT and ESTALE, `NoSpace` for a full medium or
/// quota, `Foreign` for a symbolic link that is not followed, else `Io` with the number of the
/// operating system; `InvalidInput` for what does not fit its buffer or the offsets of a file.
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
    until: Option<Until>,
    /// On a thread of another pool.
    lent: bool,
}

/// The clock, the deadline, and whether the end of the job was told already.
type Until = (Arc<dyn Clock>, MonotonicTime, Arc<Ticket>);

impl IoJob {
    pub(crate) fn new(engine: Arc<dyn IoEngine>, lane: usize, until: Option<Until>) -> Self {
        let lent = false;
        Self {
            engine,
            lane,
            until,
            lent,
        }
    }

    /// A job on the thread of another pool, which brought what the job is about.
    pub(crate) fn lent(self) -> Self {
        Self { lent: true, ..self }
    }

    /// Whether the thread is another pool's ([`IoPool::lend`](crate::IoPool::lend)): it may wait
    /// for threads of this one.
    pub fn is_lent(&self) -> bool {
        self.lent
    }

    /// A job on no pool's thread, that no one writes off.
    pub fn alone(engine: Arc<dyn IoEngine>) -> Self {
        Self::new(engine, 0, None)
    }

    /// Whether somebody still waits for this job.
    pub fn is_wanted(&self) -> bool {
        let waits =
            |(clock, deadline, ticket): &Until| !ticket.is_over() && clock.now() < *deadline;
        self.until.as_ref().is_none_or(waits)
    }

    /// When no one waits for it any more.
    pub fn deadline(&self) -> MonotonicTime {
        self.until
            .as_ref()
            .map_or(MonotonicTime::NEVER, |(_, deadline, _)| *deadline)
    }

    /// [`IoJob::is_wanted`], or the error of one that is not: to be asked before an effect that is
    /// not on files.
    pub fn still_wanted(&self) -> Result<()> {
        let late = || {
            let text = "the job ran past its deadline, and nothing more is done for it";
            Error::new(ErrorKind::Timeout, text)
        };
        self.is_wanted().then_some(()).ok_or_else(late)
    }

    /// Does `work` here and now. `ended` hears exactly once how that ended: from this thread, or,
    /// where it is written off meanwhile, from the thread that keeps the time, with `Timeout`; what
    /// `work` brings after that is dropped.
    pub fn here<T>(
        &self,
        work: impl FnOnce(&Self) -> Result<T>,
        ended: impl FnOnce(Result<T>) + Send + 'static,
    ) where
        T: 'static,
    {
        match &self.until {
            Some((_, _, ticket)) => ticket.run(|| work(self), ended),
            None => ended(work(self)),
        }
    }

    /// Does `work` as a future of the process's runtime and waits for its end, until no one waits
    /// for this job any more: see [`Runtime::wait`](ucm_infra::Runtime::wait). Fails with
    /// `Timeout`, and does nothing, where that is so already.
    #[cfg(feature = "runtime")]
    pub fn wait<T>(
        &self,
        runtime: &ucm_infra::Runtime,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.still_wanted()?;
        match &self.until {
            Some((clock, deadline, _)) => runtime.wait(&**clock, *deadline, work),
            None => runtime.wait(&ucm_infra::SystemClock, MonotonicTime::NEVER, work),
        }
    }

    /// Asks the engine for one operation.
    fn run<T>(&self, op: impl FnOnce(&dyn IoEngine, &Caller<'_>) -> Result<T>) -> Result<T> {
        self.still_wanted()?;
        let by = Caller {
            lane: self.lane,
            wanted: &|| self.is_wanted(),
        };
        op(&*self.engine, &by)
    }

    /// Reads `len` bytes at `offset` into the start of `buf`. The last name of `path` must not be a
    /// symbolic link. Past the page cache where the engine is set up so and `buf` begins on a page,
    /// as slots do; what `buf` has room for behind `len` may be filled up to a whole sector then.
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

    /// Reads one stretch of a file into several buffers: so many bytes for the first from `offset`
    /// on, for the next what follows it, and so on, each into the start of its buffer. The answer
    /// counts all of them; they are fewer only at the end of the file. `keep`: what has this name
    /// never changes, so that its descriptor may be kept open for the next such read; a file that
    /// has lost its name since is `NotFound` all the same.
    pub fn read_into(
        &self,
        path: &Path,
        offset: u64,
        mut into: Vec<(&mut [u8], usize)>,
        keep: bool,
    ) -> Result<usize> {
        self.run(|io, by| io.read_into(by, path, offset, &mut into, keep))
    }

    /// Reads parts of one stretch of a file to where they lie in it: byte `n` of `buf` is byte
    /// `offset + n` of the file, and what lies between the parts stays as it is. Parts come in
    /// order; those behind the end of the file end it. Else as [`IoJob::read_into`] into one
    /// buffer.
    pub fn read_parts(
        &self,
        path: &Path,
        offset: u64,
        parts: &[Range<usize>],
        buf: &mut [u8],
        keep: bool,
    ) -> Result<usize> {
        self.run(|io, by| io.read_parts(by, path, offset, parts, buf, keep))
    }

    /// Publishes a file; its metadata as it was closed, or `None` where there was one of that name,
    /// which stays.
    pub fn publish(&self, publish: Publish<'_>) -> Result<Option<FileMeta>> {
        self.run(|io, by| io.publish(by, &publish))
    }

    /// Creates a private file that is to be filled by [`IoJob::write_at`] and named by
    /// [`IoJob::finish`]: with these first bytes, and room set aside up to a length of `room` bytes, best effort. `mode`: permission bits, before the umask.
    /// When it fails there is no such file, or it is that of somebody else.
    pub fn create(&self, path: &Path, head: &[u8], room: u64, mode: u32) -> Result<()> {
        self.run(|io, by| io.create(by, path, head, room, mode))
    }

    /// Writes at `offset` of a file that is there, and closes it with the error of the close seen.
    /// `keep`: the descriptor of the root above it may stay open for the next such write. Only a
    /// caller that also has it closed ([`Close::Unused`](crate::Close::Unused)) passes true: an
    /// open root keeps a share from being unmounted.
    pub fn write_at(&self, path: &Path, offset: u64, bytes: &[u8], keep: bool) -> Result<()> {
        self.run(|io, by| io.write_at(by, path, offset, bytes, keep))
    }

    /// Gives a filled private file its end and its name; its metadata as it was closed.
    pub fn finish(&self, finish: Finish<'_>) -> Result<FileMeta> {
        self.run(|io, by| io.finish(by, &finish))
    }

    /// Metadata of each path, links followed where no root is kept to ([`IoEngine::keep_below`]);
    /// below one a link in the place of a file is `None`. So is a name that does not exist (ENOENT,
    /// ENOTDIR, ESTALE). With `stop_at_missing` the answer ends with the first of these.
    pub fn stat(&self, paths: &[PathBuf], stop_at_missing: bool) -> Result<Vec<Option<FileMeta>>> {
        self.run(|io, by| io.stat(by, paths, stop_at_missing))
    }

    /// Metadata of one path, as of [`IoJob::stat`].
    pub fn look(&self, path: PathBuf) -> Result<Option<FileMeta>> {
        Ok(self.stat(&[path], false)?.into_iter().next().flatten())
    }

    /// Sets modification times (ns since 1970): for each file whether it was there; an error stops
    /// none of the others.
    pub fn touch(&self, files: &[(PathBuf, i64)]) -> Result<Vec<Result<bool>>> {
        self.run(|io, by| io.touch(by, files))
    }

    /// Removes files, never directories: for each whether it was there; an error stops none of the
    /// others.
    pub fn remove(&self, paths: &[PathBuf]) -> Result<Vec<Result<bool>>> {
        self.run(|io, by| io.remove(by, paths))
    }

    /// Gives the file with this inode another name on the same file system, over an existing one:
    /// whether it was done; not where the file is not there or another one has taken its name.
    pub fn rename(&self, from: &Path, to: &Path, ino: u64) -> Result<bool> {
        self.run(|io, by| io.rename(by, from, to, ino))
    }

    /// Makes one directory, whose parent must exist: whether it is new. `mode`: permission bits,
    /// before the umask.
    pub fn make_dir(&self, path: &Path, mode: u32) -> Result<bool> {
        self.run(|io, by| io.make_dir(by, path, mode))
    }

    /// Names and metadata in one directory, links not followed, in no order; at most
    /// [`MAX_LIST`](crate::MAX_LIST).
    pub fn list(&self, dir: &Path) -> Result<Vec<(OsString, FileMeta)>> {
        self.run(|io, by| io.list(by, dir))
    }

    /// The same, and nothing where there is no such directory.
    pub fn list_if_there(&self, dir: &Path) -> Result<Vec<(OsString, FileMeta)>> {
        match self.list(dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed,
        }
    }

    /// Reads `len` bytes of a file from `offset` on, fewer where it ends before, and its length;
    /// nothing where there is no such file. For what is small: documents, heads and footers.
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

    /// Size of the file system that has this name.
    pub fn space(&self, path: &Path) -> Result<SpaceInfo> {
        self.run(|io, by| io.space(by, path))
    }

    /// What the file system of a directory is and what it can do; writes and removes one nameless
    /// page in it.
    pub fn probe(&self, dir: &Path) -> Result<Probe> {
        self.run(|io, by| io.probe(by, dir))
    }
}
