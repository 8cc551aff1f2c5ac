//! Common parts of the engines' tests: jobs on the test's own thread, pools, slots, temporary file
//! systems.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "shared by test files that each use a part; tests unwrap, and say why they skip"
)]

pub mod fuse;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};

use ucm_core::{ErrorKind, Result};
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::{Clock, ManualClock, MonotonicTime};
use ucm_io::{FileMeta, IoEngine, IoJob, IoOptions, IoPool, PsyncEngine, Publish, ReadMode};

/// Directories on the available file systems: that of temporary files, and a tmpfs if there is one.
pub fn places() -> Vec<tempfile::TempDir> {
    let shm = tempfile::tempdir_in("/dev/shm").ok();
    [tempfile::tempdir().unwrap()]
        .into_iter()
        .chain(shm)
        .collect()
}

/// A job on this thread.
pub fn plain() -> IoJob {
    IoJob::alone(PsyncEngine::new(false))
}

/// The same past the page cache, with its engine, which counts operations that used the cache.
pub fn direct() -> (Arc<PsyncEngine>, IoJob) {
    let engine = PsyncEngine::new(true);
    (Arc::clone(&engine), IoJob::alone(engine))
}

/// Through the page cache and past it.
pub fn both() -> [IoJob; 2] {
    [plain(), direct().1]
}

/// A pool with `threads` threads and as many replacements, on a manual clock.
pub fn clocked(engine: Arc<dyn IoEngine>, workers: usize) -> (Arc<IoPool>, Arc<ManualClock>) {
    let clock = ManualClock::new();
    let options = IoOptions {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        max_replacements: workers,
        ..IoOptions::with_workers(workers)
    };
    (IoPool::new(engine, &options).unwrap(), clock)
}

/// Starts a job and returns the receiver of its result.
pub fn start<T: Send + 'static>(
    pool: &IoPool,
    lane: usize,
    deadline: MonotonicTime,
    work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
) -> mpsc::Receiver<Result<T>> {
    let (send, answer) = mpsc::channel();
    pool.job(lane, deadline, work, move |result| {
        send.send(result).unwrap()
    });
    answer
}

/// Starts a job that owns a slot and publishes it.
pub fn start_publish(
    pool: &IoPool,
    lane: usize,
    deadline: MonotonicTime,
    dir: &Path,
    name: &str,
    slot: Slot,
) -> mpsc::Receiver<Result<Option<FileMeta>>> {
    let (dir, name) = (dir.to_owned(), name.to_owned());
    start(pool, lane, deadline, move |io| {
        try_publish(io, &dir, &name, slot.as_slice())
    })
}

/// The kind of the error of a failed call.
pub fn fails<T>(result: Result<T>) -> ErrorKind {
    result.map(drop).unwrap_err().kind()
}

/// `slots` slots of `len` bytes.
pub fn slots(slots: usize, len: usize) -> Arc<SlotPool> {
    SlotPool::new(HostArena::new(slots * len).unwrap(), len).unwrap()
}

/// A slot filled with bytes that differ from position to position.
pub fn filled(pool: &Arc<SlotPool>, salt: u8) -> Slot {
    let mut slot = pool.try_acquire().unwrap();
    slot.as_mut_slice()
        .copy_from_slice(&pattern(pool.slot_len(), salt));
    slot
}

/// `len` bytes that differ from position to position.
pub fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8)) as u8 ^ salt).collect()
}

/// Publishes these bytes over whatever has the name.
pub fn to_publish<'a>(private: &'a Path, target: &'a Path, bytes: &'a [u8]) -> Publish<'a> {
    Publish {
        private,
        target,
        replace: true,
        bytes,
        mode: 0o600,
        mtime_ns: None,
        durable: false,
    }
}

pub fn try_publish(io: &IoJob, dir: &Path, name: &str, bytes: &[u8]) -> Result<Option<FileMeta>> {
    let private = dir.join(format!(".{name}.private"));
    io.publish(to_publish(&private, &dir.join(name), bytes))
}

/// Publishes and returns the file's metadata.
pub fn publish(io: &IoJob, dir: &Path, name: &str, bytes: &[u8]) -> FileMeta {
    try_publish(io, dir, name, bytes).unwrap().unwrap()
}

/// Reads into ordinary memory and returns the bytes and the file's length.
pub fn read(io: &IoJob, path: &Path, offset: u64, len: usize) -> Result<(Vec<u8>, u64)> {
    let mut buf = vec![0; len];
    let read = io.read(path, offset, len, &mut buf, ReadMode::Default)?;
    buf.truncate(read.bytes);
    Ok((buf, read.file_len))
}

/// Names in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Waits, without sleeping, for a condition that another thread will make true.
pub fn eventually(what: impl Fn() -> bool) {
    while !what() {
        std::thread::yield_now();
    }
}

/// A small file system of its own, unmounted when dropped.
pub struct Mounted {
    pub dir: PathBuf,
    base: tempfile::TempDir,
}

impl Mounted {
    /// A tmpfs of `bytes`, or why there is none.
    pub fn tmpfs(bytes: usize) -> Result<Self, String> {
        Self::mount(|dir| {
            run(Command::new("mount")
                .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "ucm-test"])
                .arg(dir))
        })
    }

    /// An ext4 of `bytes` in a loop file, or why there is none.
    pub fn ext4(bytes: u64) -> Result<Self, String> {
        Self::mount(|dir| {
            let image = dir.with_file_name("image");
            let file = std::fs::File::create(&image).map_err(|e| e.to_string())?;
            file.set_len(bytes).map_err(|e| e.to_string())?;
            run(Command::new("mkfs.ext4")
                .args(["-q", "-m", "0"])
                .arg(&image))?;
            run(Command::new("mount")
                .args(["-o", "loop"])
                .arg(&image)
                .arg(dir))
        })
    }

    fn mount(make: impl FnOnce(&Path) -> Result<(), String>) -> Result<Self, String> {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("mnt");
        std::fs::create_dir(&dir).unwrap();
        make(&dir)?;
        Ok(Self { dir, base })
    }

    /// Stops every change of the file system until thawed: calls that would change it hang in the
    /// kernel.
    pub fn freeze(&self) -> Result<(), String> {
        // Never the machine's own file system, if the mount is missing.
        let dev = |path: &Path| {
            std::fs::metadata(path)
                .map(|meta| meta.dev())
                .map_err(|e| e.to_string())
        };
        if dev(&self.dir)? == dev(self.base.path())? {
            return Err("nothing is mounted there".into());
        }
        run(Command::new("fsfreeze").arg("-f").arg(&self.dir))
    }

    /// Lets them go on.
    pub fn thaw(&self) -> Result<(), String> {
        run(Command::new("fsfreeze").arg("-u").arg(&self.dir))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A file system left frozen by a failed test would block the machine's shutdown.
        let _ = self.thaw();
        // Lazily: a test that failed may have left a file open.
        let _ = run(Command::new("umount").arg("-l").arg(&self.dir));
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

/// A value that needs a privilege, or `None` after printing why the test is skipped. With
/// `UCM_REQUIRE_ROOT_TESTS` in the environment (as in CI) a skip is a failure.
pub fn or_skip<T>(test: &str, made: Result<T, String>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(reason) => {
            assert!(
                std::env::var_os("UCM_REQUIRE_ROOT_TESTS").is_none(),
                "{test} may not be skipped here: {reason}"
            );
            eprintln!("{test} is skipped: {reason}");
            None
        }
    }
}
