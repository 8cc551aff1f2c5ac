//! What the quota agent, the counts and the store share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use ucm_core::sync::Mutex;
use ucm_infra::{MonotonicTime, Notify};

use super::documents::Note;
use super::documents_io::SpaceFiles;
use super::grant_table::GrantTable;
use super::writer_quota::WriterQuota;
use crate::layout::FORMAT;

/// See the module.
pub(super) struct SpaceState {
    pub(super) files: Arc<SpaceFiles>,
    pub(super) writer_quota: Mutex<WriterQuota>,
    /// The collector's grant table; without meaning while another process is the collector.
    pub(super) grant_table: Mutex<GrantTable>,
    /// Term in which this process is the collector; 0: it is not.
    pub(super) term: AtomicU64,
    /// Wakes the quota agent.
    pub(super) notify: Notify,
    /// Notified after every turn of the agent.
    pub(super) granted: Notify,
    /// Nothing is written any more: the quota agent resigns, by then if it can, and ends.
    pub(super) leaving: OnceLock<MonotonicTime>,
}

impl SpaceState {
    /// Term in which this process is the collector; 0: it is not.
    pub(super) fn term(&self) -> u64 {
        self.term.load(Ordering::Acquire)
    }

    pub(super) fn set_term(&self, term: u64) {
        self.term.store(term, Ordering::Release);
    }

    /// This writer's id, and its note as of now.
    pub(super) fn my_note(&self, now: MonotonicTime, ahead: u64) -> (u64, Note) {
        let quota = self.writer_quota.lock();
        let note = Note {
            format: FORMAT,
            process: self.files.config.process.clone(),
            sequence: 0,
            reserved: quota.reserved,
            committed: quota.committed(),
            granted: quota.granted,
            wanted: match quota.is_low(ahead, now) {
                true => quota.unit.max(1), // bytes of the largest write
                false => 0,
            },
            full: quota.pause.full,
            closed: false,
        };
        (quota.writer, note)
    }

    /// Enters this writer into the collector's grant table.
    pub(super) fn enter_self(&self, table: &mut GrantTable) {
        let (writer, note) = self.my_note(self.files.clock.now(), table.ahead());
        table.note(writer, &note);
    }

    /// Copies what the grant table knows into the writer quota, which reports the usage.
    pub(super) fn show(&self, table: &GrantTable) {
        let mut quota = self.writer_quota.lock();
        (quota.report.others, quota.report.seen) = table.used_by_others(quota.writer);
        quota.report.records = table.records;
    }
}
