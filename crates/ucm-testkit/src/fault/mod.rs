//! The fault-injecting twin of the real I/O engine. It wraps an engine and, by script, fails
//! operations, drops results, tears and flips bytes, hangs and hides files. The same seed and the
//! same order of operations give the same faults. It serves our tests and those of backends in
//! other crates.

mod gate;
mod harm;
mod hidden;
mod rule;

use std::backtrace::Backtrace;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_io::{
    Caller, Close, Closed, FileMeta, Finish, IoEngine, Probe, Publish, Read, ReadMode, ReadPiece,
    SpaceInfo,
};

pub use gate::Gate;
pub use rule::{Fault, OpKind, Rule, Tail, errno};

use harm::{Harm, died, os_error};
use hidden::Hidden;
use rule::{Active, draw};

/// Most operations in the log; older ones are dropped.
const MAX_LOG: usize = 1 << 16;

/// Number of a rule, in order of addition.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RuleId(usize);

/// One operation in the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Its kind.
    pub kind: OpKind,
    /// Its lane.
    pub lane: usize,
    /// The names it was called with.
    pub paths: Vec<PathBuf>,
    /// Name of the fault that was applied.
    pub fault: Option<&'static str>,
}

/// An engine that fails by script.
pub struct FaultyEngine {
    inner: Arc<dyn IoEngine>,
    seed: u64,
    state: Mutex<State>,
    hidden: Mutex<Hidden>,
}

#[derive(Default)]
struct State {
    rules: Vec<Active>,
    ops: u64,
    counts: [u64; OpKind::ALL.len()],
    log: VecDeque<Seen>,
    /// The kind of operation whose callers are recorded, and their backtraces.
    traced: Option<OpKind>,
    traces: Vec<String>,
}

impl FaultyEngine {
    /// Wraps `inner`. Without rules it only counts and logs.
    pub fn new(inner: Arc<dyn IoEngine>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            inner,
            seed,
            state: Mutex::default(),
            hidden: Mutex::default(),
        })
    }

    /// Adds a rule. The first rule that applies to an operation decides its fault.
    pub fn add(&self, rule: Rule) -> RuleId {
        let mut state = self.state.lock();
        state.rules.push(Active::new(rule));
        RuleId(state.rules.len() - 1)
    }

    /// How often a rule applied.
    pub fn hits(&self, rule: RuleId) -> u64 {
        self.state
            .lock()
            .rules
            .get(rule.0)
            .map_or(0, |rule| rule.hits)
    }

    /// Removes all rules; their numbers become invalid.
    pub fn clear(&self) {
        self.state.lock().rules.clear();
    }

    /// Makes every hidden file visible.
    pub fn reveal(&self) {
        self.hidden.lock().clear();
    }

    /// Number of operations of this kind so far.
    pub fn count(&self, kind: OpKind) -> u64 {
        self.state.lock().counts[kind as usize]
    }

    /// The latest operations, oldest first (at most 65536).
    pub fn log(&self) -> Vec<Seen> {
        self.state.lock().log.iter().cloned().collect()
    }

    /// Records the backtrace of every operation of this kind from now on.
    pub fn trace(&self, kind: OpKind) {
        let mut state = self.state.lock();
        state.traced = Some(kind);
        state.traces.clear();
    }

    /// The backtraces since [`FaultyEngine::trace`].
    pub fn traces(&self) -> Vec<String> {
        self.state.lock().traces.clone()
    }

    /// Forgets the log and the counts, not the rules.
    pub fn forget(&self) {
        let mut state = self.state.lock();
        state.log.clear();
        state.counts = Default::default();
    }

    /// Logs the operation. Returns its fault and a random number for that fault.
    fn next_fault(&self, lane: usize, kind: OpKind, paths: &[&Path]) -> (Option<Fault>, u64) {
        let mut state = self.state.lock();
        let number = state.ops;
        state.ops += 1;
        state.counts[kind as usize] += 1;
        if state.traced == Some(kind) {
            state.traces.push(Backtrace::force_capture().to_string());
        }
        let fault =
            state.rules.iter_mut().zip(1u64..).find_map(|(rule, salt)| {
                rule.strike(lane, kind, paths, draw(self.seed, number, salt))
            });
        if state.log.len() == MAX_LOG {
            state.log.pop_front();
        }
        state.log.push_back(Seen {
            kind,
            lane,
            paths: paths.iter().map(|path| path.to_path_buf()).collect(),
            fault: fault.as_ref().map(Fault::name),
        });
        (fault, draw(self.seed, number, 0))
    }

    /// Runs the operation `act` on these names with the fault that applies. `act` receives the
    /// faults of its bytes.
    fn befall<T>(
        &self,
        by: &Caller<'_>,
        kind: OpKind,
        paths: &[&Path],
        mut act: impl FnMut(&Harm) -> Result<T>,
    ) -> Result<T> {
        let (fault, random) = self.next_fault(by.lane, kind, paths);
        let mut pass = || act(&Harm(None, random));
        match fault {
            Some(Fault::Errno(code)) => Err(os_error(code)),
            Some(Fault::Busy) => Err(Error::new(ErrorKind::Busy, "the lane is full (scripted)")),
            Some(Fault::LostReply(code)) => pass().and(Err(os_error(code))),
            Some(Fault::HangBefore(gate)) => {
                gate.pass();
                if (by.wanted)() {
                    return pass();
                }
                Err(Error::new(
                    ErrorKind::Timeout,
                    "it hung too long (scripted)",
                ))
            }
            Some(Fault::HangAfter(gate)) => {
                let result = pass();
                gate.pass();
                result
            }
            Some(Fault::Replay) => {
                let first = pass()?;
                // A client that has its bytes does not read them again.
                if kind == OpKind::Read {
                    Ok(first)
                } else {
                    pass()
                }
            }
            of_bytes => act(&Harm(of_bytes, random)),
        }
    }

    /// Reads the bytes that are visible now.
    fn see<T>(&self, path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.hidden.lock().misses(path) {
            return Err(os_error(errno::ENOENT));
        }
        read()
    }
}

/// The names of an operation.
fn names<'a, T>(items: &'a [T], name: impl Fn(&'a T) -> &'a PathBuf) -> Vec<&'a Path> {
    items.iter().map(|item| name(item).as_path()).collect()
}

impl IoEngine for FaultyEngine {
    fn keep_below(&self, root: &Path) {
        self.inner.keep_below(root);
    }

    fn read(
        &self,
        by: &Caller<'_>,
        path: &Path,
        offset: u64,
        len: usize,
        buf: &mut [u8],
        mode: ReadMode,
    ) -> Result<Read> {
        self.befall(by, OpKind::Read, &[path], |harm| {
            let mut read = self.see(path, || self.inner.read(by, path, offset, len, buf, mode))?;
            harm.flip(&mut buf[..read.bytes]);
            read.bytes = harm.arriving(read.bytes);
            Ok(read)
        })
    }

    fn read_into(
        &self,
        by: &Caller<'_>,
        path: &Path,
        pieces: &mut [ReadPiece<'_>],
        keep: bool,
    ) -> Result<usize> {
        self.befall(by, OpKind::Read, &[path], |harm| {
            let read = self.see(path, || self.inner.read_into(by, path, pieces, keep))?;
            harm.flip_all(pieces, read);
            Ok(harm.arriving(read))
        })
    }

    fn publish(&self, by: &Caller<'_>, publish: &Publish<'_>) -> Result<Option<FileMeta>> {
        self.befall(by, OpKind::Publish, &[publish.target], |harm| {
            let bytes = &*harm.written(publish.bytes);
            if harm.kills() {
                let mut name = publish.private.as_os_str().to_owned();
                name.push(".dying");
                let left = Publish {
                    private: name.as_ref(),
                    target: publish.private,
                    replace: true,
                    bytes,
                    mtime_ns: None,
                    durable: false,
                    ..*publish
                };
                return self.inner.publish(by, &left).and(died());
            }
            let mut published = self.inner.publish(by, &Publish { bytes, ..*publish })?;
            if let Some(meta) = &mut published {
                meta.len = publish.bytes.len() as u64; // as if all of them existed
            }
            self.hidden.lock().hide(publish.target, harm.hides());
            Ok(published)
        })
    }

    fn create(
        &self,
        by: &Caller<'_>,
        path: &Path,
        head: &[u8],
        room: u64,
        mode: u32,
    ) -> Result<()> {
        let create = |_: &Harm| self.inner.create(by, path, head, room, mode);
        self.befall(by, OpKind::Create, &[path], create)
    }

    fn write_at(
        &self,
        by: &Caller<'_>,
        path: &Path,
        offset: u64,
        bytes: &[u8],
        keep: bool,
    ) -> Result<()> {
        self.befall(by, OpKind::WriteAt, &[path], |harm| {
            self.inner
                .write_at(by, path, offset, &harm.written(bytes), keep)?;
            if harm.kills() { died() } else { Ok(()) }
        })
    }

    fn finish(&self, by: &Caller<'_>, finish: &Finish<'_>) -> Result<FileMeta> {
        self.befall(by, OpKind::Finish, &[finish.target], |harm| {
            let footer = &*harm.written(finish.footer);
            if harm.kills() {
                let at = finish.offset;
                let left = self.inner.write_at(by, finish.private, at, footer, false);
                return left.and(died());
            }
            let meta = self.inner.finish(by, &Finish { footer, ..*finish })?;
            self.hidden.lock().hide(finish.target, harm.hides());
            Ok(meta)
        })
    }

    fn stat(
        &self,
        by: &Caller<'_>,
        paths: &[PathBuf],
        stop_at_missing: bool,
    ) -> Result<Vec<Option<FileMeta>>> {
        self.befall(by, OpKind::Stat, &names(paths, |path| path), |_| {
            let mut hidden = self.hidden.lock();
            let unseen: Vec<bool> = paths.iter().map(|path| hidden.misses(path)).collect();
            drop(hidden);
            let mut found = self.inner.stat(by, paths, stop_at_missing)?;
            for (meta, unseen) in found.iter_mut().zip(unseen) {
                if unseen {
                    *meta = None;
                }
            }
            if stop_at_missing && let Some(first) = found.iter().position(Option::is_none) {
                found.truncate(first + 1);
            }
            Ok(found)
        })
    }

    fn touch(&self, by: &Caller<'_>, files: &[(PathBuf, i64)]) -> Result<Vec<Result<bool>>> {
        let paths = names(files, |(path, _)| path);
        self.befall(by, OpKind::Touch, &paths, |_| self.inner.touch(by, files))
    }

    fn remove(&self, by: &Caller<'_>, paths: &[PathBuf]) -> Result<Vec<Result<bool>>> {
        let remove = |_: &Harm| self.inner.remove(by, paths);
        self.befall(by, OpKind::Remove, &names(paths, |path| path), remove)
    }

    fn rename(&self, by: &Caller<'_>, from: &Path, to: &Path, ino: u64) -> Result<bool> {
        let rename = |_: &Harm| self.inner.rename(by, from, to, ino);
        self.befall(by, OpKind::Rename, &[from, to], rename)
    }

    fn list(&self, by: &Caller<'_>, dir: &Path) -> Result<Vec<(OsString, FileMeta)>> {
        self.befall(by, OpKind::List, &[dir], |_| {
            let unseen = self.hidden.lock().unseen_in(dir);
            let mut found = self.inner.list(by, dir)?;
            found.retain(|(name, _)| !unseen.contains(&dir.join(name)));
            Ok(found)
        })
    }

    fn make_dir(&self, by: &Caller<'_>, path: &Path, mode: u32) -> Result<bool> {
        self.befall(by, OpKind::MakeDir, &[path], |_| {
            self.inner.make_dir(by, path, mode)
        })
    }

    fn space(&self, by: &Caller<'_>, path: &Path) -> Result<SpaceInfo> {
        self.befall(by, OpKind::Space, &[path], |_| self.inner.space(by, path))
    }

    fn probe(&self, by: &Caller<'_>, dir: &Path) -> Result<Probe> {
        self.befall(by, OpKind::Probe, &[dir], |_| self.inner.probe(by, dir))
    }

    fn close(&self, which: Close<'_>) -> Closed {
        self.inner.close(which)
    }

    fn kept(&self) -> usize {
        self.inner.kept()
    }
}
