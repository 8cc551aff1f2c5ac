//! A directory whose layout no configuration names: the first opening that goes well decides on it
//! ([`crate::root_layout`]), and from then on everything is asked of the backend of that layout.
//!
//! Where what is there cannot be seen, that is files until the next start. Who only looks records
//! up decides nothing: it takes the root for one of files, which may not even exist yet, and reads
//! the marker again while it is asked for records.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{IoJob, IoPool};

use crate::backend::{
    Backend, BlockRead, Features, Flush, Listed, MediumStats, OnSealed, Outcome, Presence,
    WriteOptions, Written,
};
use crate::layout_kind::LayoutKind;
use crate::posix::PosixBackend;
use crate::root_layout::LayoutChoice;
use crate::segment::{SegmentBackend, SegmentConfig};
use crate::shared::{PosixConfig, Shared};

/// How soon a process that only looks up reads the marker again; the time between two looks
/// doubles, up to the other.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const LOOK_SELDOM: Duration = Duration::from_secs(60);
/// How long such a look may take.
const LOOK: Duration = Duration::from_secs(5);

/// The medium of a root whose records lie in this layout; none: in the one that it has, or in
/// segments. Nothing is touched before it is opened.
///
/// # Errors
/// `Config` where the limit is too small, or a segment too long.
pub fn medium(
    config: PosixConfig,
    layout: Option<LayoutKind>,
    segments: SegmentConfig,
    io: Arc<IoPool>,
    clock: Arc<dyn Clock>,
) -> Result<Arc<dyn Backend>> {
    let shared = Arc::new(Shared::new(config, layout, io, clock)?);
    Ok(match layout {
        None => Arc::new(DirectoryBackend::over(shared, segments)),
        Some(LayoutKind::File) => Arc::new(PosixBackend::over(shared)),
        Some(LayoutKind::Segment) => Arc::new(SegmentBackend::over(shared, segments)?),
    })
}

/// Records below a directory, in the layout that its root has.
struct DirectoryBackend(Arc<Directory>);

struct Directory {
    shared: Arc<Shared>,
    config: SegmentConfig,
    /// The backend of the layout `file`.
    files: PosixBackend,
    decided: OnceLock<Decided>,
    /// When the marker is read again, and how long after the last time that is.
    next_look: Mutex<(MonotonicTime, Duration)>,
}

struct Decided {
    segments: Option<SegmentBackend>,
    /// Which layout and why, for the log.
    words: String,
}

impl DirectoryBackend {
    fn over(shared: Arc<Shared>, segments: SegmentConfig) -> Self {
        Self(Arc::new(Directory {
            files: PosixBackend::over(Arc::clone(&shared)),
            shared,
            config: segments,
            decided: OnceLock::new(),
            next_look: Mutex::default(),
        }))
    }
}

impl Directory {
    /// The backend in use.
    fn layout(&self) -> &dyn Backend {
        let decided = self.decided.get();
        match decided.and_then(|decided| decided.segments.as_ref()) {
            Some(segments) => segments,
            None => &self.files,
        }
    }

    /// Decides, if that is possible now, and makes the root usable in the layout that was decided
    /// on.
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let Some(decision) = LayoutChoice(&self.shared).decide(deadline)? else {
            return self.files.open(deadline);
        };
        self.shared.root.lock().kind = Some(decision.kind);
        let shared = Arc::clone(&self.shared);
        let segments = match decision.kind {
            LayoutKind::File => None,
            LayoutKind::Segment => Some(SegmentBackend::over(shared, self.config)?),
        };
        let opened = match &segments {
            Some(segments) => segments.open(deadline)?,
            None => self.files.open(deadline)?,
        };
        let words = decision.words;
        let _ = self.decided.set(Decided { segments, words });
        Ok(opened)
    }

    /// Looks in the background whether the marker says more by now, seldom and while records are
    /// asked for.
    fn follow(self: &Arc<Self>) {
        if self.decided.get().is_some() || !self.shared.config.scope.lookup_only {
            return;
        }
        let now = self.shared.clock.now();
        {
            let mut next = self.next_look.lock();
            let (due, gap) = *next;
            if now < due {
                return;
            }
            let longer = (gap * 2).clamp(LOOK_AGAIN * 2, LOOK_SELDOM);
            *next = (now.after(gap.max(LOOK_AGAIN)), longer);
        }
        let (directory, deadline) = (Arc::clone(self), now.after(LOOK));
        let look = move || match directory.decided.get() {
            Some(_) => Ok(()),
            None => directory.open(deadline).map(|_| ()),
        };
        self.shared.space.in_background(deadline, look, |_| {});
    }
}

/// Methods that are the layout's alone.
macro_rules! of_the_layout {
    ($(fn $name:ident(&self $(, $arg:ident: $kind:ty)*) $(-> $answer:ty)?;)*) => {$(
        fn $name(&self $(, $arg: $kind)*) $(-> $answer)? {
            self.0.layout().$name($($arg),*)
        }
    )*};
}

impl Backend for DirectoryBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let opened = match self.0.decided.get() {
            Some(_) => self.0.layout().open(deadline)?,
            None => self.0.open(deadline)?,
        };
        let undecided = "layout not decided yet: by the first that writes here";
        let decided = self.0.decided.get();
        let words = decided.map_or(undecided, |decided| &decided.words);
        Ok(format!("{opened}; {words}"))
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.0.follow();
        self.0.layout().lookup(io, ids, stop_at_missing)
    }

    fn on_sealed(&self, hook: OnSealed) {
        let _ = self.0.shared.on_sealed.set(hook); // it is set once
    }

    of_the_layout! {
        fn features(&self) -> Features<'_>;
        fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome>;
        fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written>;
        fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime);
        fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize>;
        fn list(&self, io: &IoJob) -> Result<Vec<Listed>>;
        fn flush(&self, how: Flush);
        fn stats(&self) -> MediumStats;
        fn close(&self, drain: Duration);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// Most methods of the trait have a body: one that is not handed on would be another backend's
    /// default.
    #[test]
    fn every_method_of_a_backend_is_handed_on() {
        let methods = |source: &'static str, from: &str| -> BTreeSet<&'static str> {
            let body = source.split_once(from).unwrap().1;
            let body = body.split_once("\n}\n").unwrap().0;
            let lines = body
                .lines()
                .filter_map(|line| line.trim_start().strip_prefix("fn "));
            lines
                .filter_map(|line| line.split(['(', '<']).next())
                .collect()
        };
        let of_trait = methods(
            include_str!("backend.rs"),
            "pub trait Backend: Send + Sync {",
        );
        let handed_on = methods(
            include_str!("directory.rs"),
            "impl Backend for DirectoryBackend {",
        );
        assert!(of_trait.len() > 8, "{of_trait:?}");
        assert_eq!(handed_on, of_trait);
    }
}
