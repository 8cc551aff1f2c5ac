//! The seam between the engine and a medium.
//!
//! A backend moves named records between slots and one medium. It is completion-based: a finished operation calls
//! back and nothing blocks a caller. It owns a slot until the operation has really ended, never touches device
//! memory, and knows nothing of tasks or vLLM. A new backend is one file that implements this trait.

use std::time::Duration;

use ucm_core::{BlockId, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::Mono;

/// Called exactly once with the outcome, on a thread of the backend.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Whether a record is there whole, or why it is no hit.
pub type Presence = std::result::Result<(), MissReason>;

/// What a read brought.
pub struct ReadDone {
    /// The slot, filled from its start.
    pub slot: Slot,
    /// Bytes read.
    pub read: usize,
    /// Length of the record on the medium.
    pub stored_len: u64,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The record is published.
    Published,
    /// It was stored already and nothing was written.
    Present,
    /// It was written, and what was read back is not what was written.
    Unsound(MissReason),
}

/// What became of a record that was refused for damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quarantined {
    /// It was moved aside, as evidence.
    Kept,
    /// It stays where it is, or is gone: nothing is kept here, it was replaced meanwhile, or it may yet be finished.
    LeftAlone,
    /// Too many are damaged of late: the medium is sick.
    Stopped,
}

/// What a medium holds, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of records and private files below the root, as last counted plus what was written since.
    pub used: u64,
    /// The limit.
    pub capacity: u64,
    /// Records as last counted.
    pub records: u64,
    /// Whether what lay there before was counted yet.
    pub counted: bool,
    /// Whether this process counts and removes for all writers of the root.
    pub collector: bool,
    /// Whether nothing is written for now: the medium was full, or too little of it is free.
    pub paused: bool,
}

/// How a record is written.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// Bytes of the slot that are the record.
    pub len: usize,
    /// Position in its chain; ancestors count as used later than descendants.
    pub ordinal: u32,
    /// Write even if a record of that name is present (it was refused).
    pub replace: bool,
    /// Read what was published past every cache and judge it before the write counts.
    pub read_back: bool,
}

/// One record found by [`Backend::list`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// The record id.
    pub id: BlockId,
    /// Its length on the medium.
    pub len: u64,
    /// Time of its last use, ns of Unix time.
    pub used_ns: i64,
}

/// Records that this process can read and others cannot see yet (in its memory, in a segment it has not sealed), as
/// changes since the last time they were asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Early {
    /// They can be read from now on.
    pub gained: Vec<BlockId>,
    /// They are published by now, or gone: in any case no longer early.
    pub lost: Vec<BlockId>,
}

/// A medium that keeps records.
pub trait Backend: Send + Sync {
    /// Name in logs and metrics.
    fn name(&self) -> &'static str;

    /// What it uses and why, in words for the log line at the start; asked after a successful probe.
    fn describe(&self) -> String;

    /// Makes the medium usable or says why it is not, by the deadline. Called again after a failure.
    fn probe(&self, deadline: Mono) -> Result<()>;

    /// Whether each record is present whole. With `stop_at_missing` the answer may end with the first that is not.
    fn lookup(&self, ids: Vec<BlockId>, stop_at_missing: bool, deadline: Mono, done: Done<Vec<Presence>>);

    /// Reads a record into a slot. `again`: past every cache (after a failed checksum). The error is `Foreign` where
    /// something has the record's name that can never be read as one, so that nothing is wrong with the medium.
    fn read(&self, id: BlockId, slot: Slot, again: bool, deadline: Mono, done: Done<ReadDone>);

    /// Writes a record privately and publishes it whole. A record of a newer version stays, and counts as present.
    fn write(&self, id: BlockId, slot: Slot, options: WriteOptions, deadline: Mono, done: Done<Written>);

    /// These records were used by a request: ids with their ordinals. Fire and forget, throttled by the backend.
    fn touch(&self, ids: &[(BlockId, u32)], deadline: Mono);

    /// Removes records by name; the answer counts those removed.
    fn delete(&self, ids: Vec<BlockId>, deadline: Mono, done: Done<usize>);

    /// Every record of this namespace.
    fn list(&self, deadline: Mono, done: Done<Vec<Listed>>);

    /// What became readable for this process before others can see it, and what no longer is, since the last call. Who
    /// asks is the scheduler of the same engine, through its workers; nobody else may count on these. At most as many
    /// ids as [`ucm_core::limits::MAX_IDS_PER_CALL`], the rest with the next call.
    fn early(&self) -> Early {
        Early::default()
    }

    /// Publishes soon what is written and waits for others to be published with it; with `last`, from now on nothing
    /// waits any more, for the store is about to close. Never blocks.
    fn flush(&self, _last: bool) {}

    /// A record was refused for damage: keeps it as evidence, where the medium can, later and best effort. Never
    /// blocks; nothing depends on it.
    fn quarantine(&self, _id: BlockId, done: Done<Quarantined>) {
        done(Ok(Quarantined::LeftAlone));
    }

    /// Bytes used and allowed.
    fn usage(&self) -> Usage;

    /// Counters of the backend's own: (records removed, bytes removed, blocks touched).
    fn removed(&self) -> (u64, u64, u64);

    /// Operations stuck past their deadline.
    fn stuck(&self) -> usize;

    /// Ends: finishes or fails what is under way within `drain`.
    fn shutdown(&self, drain: Duration);
}
