//! Whether an engine takes work: since when it is whose, and whether too much is lost in calls that
//! do not return.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{info, warn};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::task::OpenTasks;
use super::{COPY_REPLACEMENTS, Core};

/// How an engine lives: since when it is whose, what is under way in it, and whether it goes on.
pub(super) struct Life {
    pub(super) open_tasks: Arc<OpenTasks>,
    /// So much is lost in calls that do not return that nothing more is begun.
    overrun: AtomicBool,
    pub(super) closed: AtomicBool,
    /// The process that opened it.
    pub(super) pid: u32,
}

impl Life {
    pub(super) fn new() -> Self {
        Self {
            open_tasks: Arc::default(),
            overrun: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            pid: std::process::id(),
        }
    }
}

impl Core {
    /// Whether work may go to the tiers now: one of them may answer, and not too much is lost.
    pub(super) fn check_available(&self, now: MonotonicTime) -> Result<()> {
        self.usable()?;
        let lost = self.lost();
        let was = self.life.overrun.swap(lost.is_some(), Ordering::AcqRel);
        match &lost {
            Some(error) if !was => {
                let kind = error.kind().name();
                let text =
                    "the store is switched off until enough of them have, every lookup misses";
                warn!(store = self.records.writer, error = kind, "{error}: {text}");
            }
            None if was => info!(store = self.records.writer, "the store answers again"),
            _ => {}
        }
        if lost.is_none() && self.tiers.may_answer(now) {
            return Ok(());
        }
        let text = "the storage does not answer; treated as empty for now";
        Err(Error::new(ErrorKind::Unhealthy, text))
    }

    /// The error that says that too many slots are lost in calls that do not return: each of these
    /// may hold one, and half of them is too many.
    pub(super) fn lost(&self) -> Option<Error> {
        let (slots, io, copies) = (
            self.device.slots.capacity(),
            self.tiers.stuck(),
            self.copies_stuck(),
        );
        let too_many = !self.looks_up_only() && io > slots / 2 || copies >= COPY_REPLACEMENTS;
        too_many.then(|| {
            Error::new(ErrorKind::Timeout, "too many operations never returned")
                .with("stuck", io + copies)
                .with("slots", slots)
        })
    }

    /// Threads that hang in copies from the device. Those that hang in a write that they carried on
    /// with are their tier's.
    pub(super) fn copies_stuck(&self) -> usize {
        self.device
            .copies
            .stuck()
            .saturating_sub(self.tiers.lent_stuck())
    }
}
