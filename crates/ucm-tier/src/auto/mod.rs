//! A root whose layout nobody named: a root keeps what it has, a new one gets segments.
//!
//! The look at the root that every backend begins with decides ([`decide`]): what the marker says counts; where it says
//! nothing, the records that are there; where there are none, segments, and the marker says so from then on. Whoever cannot
//! see what is there uses files until its next start. Who only looks records up decides nothing: it takes the
//! root for one of files, which may not even exist yet, and reads the marker again while it is asked for records.
//!
//! From then on everything is handed to the backend of that layout.

mod decide;
mod kept;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ucm_core::{BlockId, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{IoJob, IoPool};
use ucm_quota::layout::{BLOCKS, SEGMENTS};

use crate::backend::{
    Backend, BlockRead, Done, Features, Flush, Listed, LocallyVisible, MediumStats, Memory, Outcome,
    Presence, Quarantined, WriteOptions, Written,
};
use crate::posix::{PosixBackend, PosixConfig, Shared};
use crate::segment::{SegmentBackend, SegmentConfig};

pub(crate) use kept::Kept;
pub use kept::LayoutKind;

/// How soon a process that only looks up reads the marker again; the time between two looks doubles, up to the other.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const LOOK_SELDOM: Duration = Duration::from_secs(60);
/// How long such a look may take.
const LOOK: Duration = Duration::from_secs(5);

/// Records below a root in the layout that it has.
pub struct AutoBackend {
    auto: Arc<Auto>,
}

struct Auto {
    shared: Arc<Shared>,
    segments: SegmentConfig,
    /// What is used while nothing is decided.
    files: PosixBackend,
    chosen: OnceLock<Chosen>,
    /// When the marker is read again, and how long after that once more; ns.
    next_look: AtomicU64,
    next_gap: AtomicU64,
}

struct Chosen {
    backend: Box<dyn Backend>,
    /// Which layout and why, for the log.
    words: String,
}

/// What came of deciding.
enum Decision {
    /// As it stands in the marker.
    Kept(Kept),
    /// Files, until the next start: why.
    Files(String),
    /// Nobody who writes decided yet; this process does not.
    Open,
}

impl AutoBackend {
    /// A backend over an I/O engine; nothing is touched before [`Backend::open`]. `Config` if the limit is too small.
    pub fn new(
        config: PosixConfig,
        segments: SegmentConfig,
        io: Arc<IoPool>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::new(config, None, io, clock)?);
        Ok(Self {
            auto: Arc::new(Auto {
                files: PosixBackend::over(Arc::clone(&shared)),
                shared,
                segments,
                chosen: OnceLock::new(),
                next_look: AtomicU64::new(0),
                next_gap: AtomicU64::new(0),
            }),
        })
    }

    fn now(&self) -> &dyn Backend {
        self.auto.now()
    }
}

impl Auto {
    /// The backend in use.
    fn now(&self) -> &dyn Backend {
        match self.chosen.get() {
            Some(chosen) => &*chosen.backend,
            None => &self.files,
        }
    }

    /// Decides, if that is possible now, and makes the root usable in the layout that was chosen.
    fn look(&self, deadline: MonotonicTime) -> Result<String> {
        let (kind, words) = match self.decide(deadline)? {
            Decision::Kept(kept) => (kept.kind, kept.words()),
            Decision::Files(why) => (LayoutKind::File, format!("layout file for now (auto: {why})")),
            Decision::Open => return self.files.open(deadline),
        };
        let below = match kind {
            LayoutKind::File => BLOCKS,
            LayoutKind::Segment => SEGMENTS,
        };
        let backend: Box<dyn Backend> = match kind {
            LayoutKind::File => Box::new(PosixBackend::over(Arc::clone(&self.shared))),
            LayoutKind::Segment => Box::new(SegmentBackend::over(Arc::clone(&self.shared), self.segments)?),
        };
        *self.shared.below.lock() = Some(below);
        let opened = backend.open(deadline)?;
        let _ = self.chosen.set(Chosen { backend, words });
        Ok(opened)
    }

    /// Whether the marker says more by now; looked up in the background, seldom and while records are asked for.
    fn follow(self: &Arc<Self>) {
        if self.chosen.get().is_some() || !self.shared.config.lookup_only {
            return;
        }
        let (now, due) = (self.shared.clock.now(), self.next_look.load(Ordering::Acquire));
        if now.0 < due {
            return;
        }
        let gap = Duration::from_nanos(self.next_gap.load(Ordering::Acquire))
            .max(LOOK_AGAIN)
            .min(LOOK_SELDOM);
        let swap =
            self.next_look
                .compare_exchange(due, now.after(gap).0, Ordering::AcqRel, Ordering::Acquire);
        if swap.is_err() {
            return; // somebody else looks
        }
        let doubled = u64::try_from((gap * 2).as_nanos()).unwrap_or(u64::MAX);
        self.next_gap.store(doubled, Ordering::Release);
        let (auto, deadline) = (Arc::clone(self), now.after(LOOK));
        let look = move || match auto.chosen.get() {
            Some(_) => Ok(()),
            None => auto.look(deadline).map(|_| ()),
        };
        self.shared.space.in_background(deadline, look, Box::new(|_| {}));
    }
}

impl Backend for AutoBackend {
    fn name(&self) -> &'static str {
        self.now().name()
    }

    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let opened = match self.auto.chosen.get() {
            Some(chosen) => chosen.backend.open(deadline)?,
            None => self.auto.look(deadline)?,
        };
        Ok(match self.auto.chosen.get() {
            Some(chosen) => format!("{opened}; {}", chosen.words),
            None => format!("{opened}; layout not decided yet (auto: by the first that writes here)"),
        })
    }

    fn features(&self) -> Features {
        self.now().features()
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.auto.follow();
        self.now().lookup(io, ids, stop_at_missing)
    }

    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        self.now().runs(reads, threads)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        self.now().read(io, run)
    }

    fn look(&self, deadline: MonotonicTime, done: Done<()>) {
        self.now().look(deadline, done);
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions, done: Done<Written>) {
        self.now().write(io, id, slot, options, done);
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        self.now().touch(ids, deadline);
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        self.now().delete(io, ids)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        self.now().list(io)
    }

    fn is_published(&self, id: BlockId) -> bool {
        self.now().is_published(id)
    }

    fn early(&self) -> LocallyVisible {
        self.now().early()
    }

    fn flush(&self, how: Flush) {
        self.now().flush(how);
    }

    fn quarantine(&self, id: BlockId, done: Done<Quarantined>) {
        self.now().quarantine(id, done);
    }

    fn stats(&self) -> MediumStats {
        self.now().stats()
    }

    fn close(&self, drain: Duration) {
        self.now().close(drain);
    }

    fn memory(&self) -> Option<&dyn Memory> {
        self.now().memory()
    }
}

#[cfg(test)]
mod tests {
    /// Most methods of the trait have a body: one that is not handed on would be another backend's default.
    #[test]
    fn every_method_of_a_backend_is_handed_on() {
        let methods = |source: &'static str, from: &str| -> Vec<&'static str> {
            let body = source.split_once(from).unwrap().1;
            let body = body.split_once("\n}\n").unwrap().0;
            let lines = body.lines().filter_map(|line| line.strip_prefix("    fn "));
            lines.filter_map(|line| line.split(['(', '<']).next()).collect()
        };
        let of_trait = methods(include_str!("../backend.rs"), "pub trait Backend: Send + Sync {");
        let handed_on = methods(include_str!("mod.rs"), "impl Backend for AutoBackend {");
        assert!(of_trait.len() > 15, "{of_trait:?}");
        assert_eq!(handed_on, of_trait);
    }
}
