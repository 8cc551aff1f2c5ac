//! What the quota agent remembers between two turns.

use std::collections::BTreeMap;
use std::time::Duration;

use ucm_core::Error;
use ucm_infra::MonotonicTime;
use ucm_io::FileMeta;

use super::documents::{Grants, Heartbeat, Note};

/// Time between heartbeats, and between two looks at the free space.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// How long after its last heartbeat a collector may grant.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// A note is read again after this, changed or not: a network file system may hide the change.
pub(super) const READ_AGAIN: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Default)]
pub(super) struct QuotaAgent {
    pub(super) watched: Watched,
    pub(super) heartbeat_sequence: u64,
    pub(super) heartbeat_at: MonotonicTime,
    /// Notes of others, as last read.
    pub(super) notes: BTreeMap<u64, Seen>,
    /// When each writer was last heard of.
    pub(super) heard: BTreeMap<u64, MonotonicTime>,
    /// This writer's last note, and when that was.
    pub(super) note: Note,
    pub(super) note_at: MonotonicTime,
    pub(super) published: Option<Grants>,
    pub(super) grants_read: Option<GrantsRead>,
    pub(super) medium: Medium,
    pub(super) counts: Counts,
}

/// What the quota agent knows of the room on the medium.
#[derive(Default)]
pub(super) struct Medium {
    /// When the free space was last asked for.
    pub(super) looked: Option<MonotonicTime>,
    /// It was full for a writer, and how often it had been for this writer.
    pub(super) full: bool,
    pub(super) own_full: u64,
    pub(super) below_floor: bool,
    /// Until when what was removed for the floor may not show yet.
    pub(super) settles_until: MonotonicTime,
}

/// The counts of this process as collector, and when the next one makes sense.
#[derive(Default)]
pub(super) struct Counts {
    /// One ended since this process opened the root.
    pub(super) done: bool,
    pub(super) last: MonotonicTime,
    pub(super) not_before: MonotonicTime,
    /// What all writers had begun when that was last seen to have changed, and when.
    pub(super) reserved: u64,
    pub(super) quiet_since: MonotonicTime,
    /// Counts in a row that could not do what was wanted.
    pub(super) vain: u32,
    pub(super) trouble: Option<Error>,
}

/// The grants as a writer last read them.
#[derive(Clone, Copy)]
pub(super) struct GrantsRead {
    pub(super) term: u64,
    pub(super) meta: FileMeta,
    pub(super) at: MonotonicTime,
}

impl GrantsRead {
    /// Whether there may be others by now.
    pub(super) fn is_old(&self, term: u64, meta: &FileMeta, now: MonotonicTime) -> bool {
        self.term != term || self.meta != *meta || now.since(self.at) >= READ_AGAIN
    }
}

impl QuotaAgent {
    /// Whether records should go because too little of the medium is free.
    pub(super) fn is_below_floor(&self, now: MonotonicTime) -> bool {
        self.medium.below_floor && now >= self.medium.settles_until
    }
}

/// A note of another writer, as last read.
pub(super) struct Seen {
    pub(super) meta: FileMeta,
    pub(super) read_at: MonotonicTime,
    pub(super) note: Note,
}

/// The collector in office as a writer sees it.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) term: u64,
    pub(super) sequence: u64,
    /// When its sequence moved last, on this clock.
    pub(super) moved: MonotonicTime,
    pub(super) heartbeat: Option<Heartbeat>,
    /// The writer of this process's last heartbeat.
    pub(super) said: String,
    /// A term this process owns and has not taken up yet.
    pub(super) claimed: Option<u64>,
}
