//! What the tests of the engines share: blocking calls, slots, file systems of their own.
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
use std::sync::Arc;
use std::sync::mpsc;

use ucm_core::{ErrorKind, Result};
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::Mono;
use ucm_io::{FileMeta, IoBuf, IoDone, IoOp, IoOptions, IoPool, PsyncEngine, ReadMode};

/// Directories on the file systems at hand: whatever holds temporary files, and a tmpfs where there is one.
pub fn places() -> Vec<tempfile::TempDir> {
    let shm = tempfile::tempdir_in("/dev/shm").ok();
    [tempfile::tempdir().unwrap()].into_iter().chain(shm).collect()
}

/// Two threads on the real clock.
pub fn pool() -> Arc<IoPool> {
    IoPool::psync(false, &IoOptions::with_workers(2)).unwrap()
}

/// The same past the page cache.
pub fn direct_pool() -> Arc<IoPool> {
    direct().1
}

/// The same with the engine, which counts what it could not do past the page cache.
pub fn direct() -> (Arc<PsyncEngine>, Arc<IoPool>) {
    let engine = PsyncEngine::new(true);
    let pool = IoPool::new(Arc::clone(&engine) as _, &IoOptions::with_workers(2)).unwrap();
    (engine, pool)
}

/// Submits and returns where the answer will come.
pub fn start(engine: &IoPool, lane: usize, deadline: Mono, op: IoOp) -> mpsc::Receiver<Result<IoDone>> {
    let (send, answer) = mpsc::channel();
    engine.submit(
        lane,
        deadline,
        op,
        Box::new(move |result| send.send(result).unwrap()),
    );
    answer
}

/// Submits without a deadline and waits.
pub fn call(engine: &IoPool, op: IoOp) -> Result<IoDone> {
    start(engine, 0, Mono::NEVER, op).recv().unwrap()
}

/// The kind of error a call fails with.
pub fn fails(engine: &IoPool, op: IoOp) -> ErrorKind {
    call(engine, op).unwrap_err().kind()
}

/// `slots` slots of `len` bytes.
pub fn slots(slots: usize, len: usize) -> Arc<SlotPool> {
    SlotPool::new(HostArena::new(slots * len).unwrap(), len).unwrap()
}

/// A slot filled with bytes that differ from place to place.
pub fn filled(pool: &Arc<SlotPool>, salt: u8) -> Slot {
    let mut slot = pool.try_acquire().unwrap();
    pattern(slot.as_mut_slice(), salt);
    slot
}

/// Fills `bytes` with bytes that differ from place to place.
pub fn pattern(bytes: &mut [u8], salt: u8) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i ^ (i >> 8)) as u8 ^ salt;
    }
}

pub fn publish_op(dir: &Path, name: &str, buf: impl Into<IoBuf>) -> IoOp {
    let buf = buf.into();
    IoOp::Publish {
        private: dir.join(format!(".{name}.private")),
        target: dir.join(name),
        replace: true,
        len: buf.len(),
        buf,
        mode: 0o600,
        mtime_ns: None,
        durable: false,
    }
}

pub fn read_op(path: impl Into<PathBuf>, offset: u64, len: usize, buf: impl Into<IoBuf>) -> IoOp {
    IoOp::Read {
        path: path.into(),
        offset,
        len,
        buf: buf.into(),
        mode: ReadMode::Default,
    }
}

pub fn stat_op(paths: &[PathBuf], stop_at_missing: bool) -> IoOp {
    IoOp::Stat {
        paths: paths.to_vec(),
        stop_at_missing,
    }
}

/// Publishes and returns the file's metadata.
pub fn publish(engine: &IoPool, dir: &Path, name: &str, buf: impl Into<IoBuf>) -> FileMeta {
    match call(engine, publish_op(dir, name, buf)).unwrap() {
        IoDone::Published { meta, .. } => meta,
        other => unreachable!("{other:?}"),
    }
}

/// Reads into ordinary memory and returns the bytes and the file's length.
pub fn read(engine: &IoPool, path: impl Into<PathBuf>, offset: u64, len: usize) -> Result<(Vec<u8>, u64)> {
    bytes_of(call(engine, read_op(path, offset, len, vec![0; len]))?)
}

/// The bytes of a read's answer and the file's length.
pub fn bytes_of(answer: IoDone) -> Result<(Vec<u8>, u64)> {
    match answer {
        IoDone::Read { buf, read, file_len } => Ok((buf[..read].to_vec(), file_len)),
        other => unreachable!("{other:?}"),
    }
}

/// Metadata of each path.
pub fn stat(engine: &IoPool, paths: &[PathBuf], stop_at_missing: bool) -> Vec<Option<FileMeta>> {
    match call(engine, stat_op(paths, stop_at_missing)).unwrap() {
        IoDone::Stat(found) => found,
        other => unreachable!("{other:?}"),
    }
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

/// Waits, without sleeping, for something that another thread is about to do.
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
            run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image))?;
            run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(dir))
        })
    }

    fn mount(make: impl FnOnce(&Path) -> Result<(), String>) -> Result<Self, String> {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("mnt");
        std::fs::create_dir(&dir).unwrap();
        make(&dir)?;
        Ok(Self { dir, base })
    }

    /// Stops every change of the file system until thawed: calls that would change it hang in the kernel.
    pub fn freeze(&self) -> Result<(), String> {
        // Never the machine's own file system, should the mount be gone.
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
        // A file system left frozen by a failed test would hold the machine's shutdown up.
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

/// What needs a privilege, or `None` after saying why the test is skipped. With `UCM_REQUIRE_ROOT_TESTS` in the
/// environment (as in CI) a skip is a failure.
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
