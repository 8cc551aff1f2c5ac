//! The seam between the engine and a medium.
//!
//! A backend moves named records between slots and one medium. It is called on a thread of a pool
//! with deadlines (a lookup also on the caller's thread, see [`Features`]) and may block it. It is
//! straight-line code that checks its [`IoJob`] before every effect, because a result past its
//! deadline is dropped. A function returns the outcome. Only the outcome of a record that is
//! published together with others is known later: [`Written::Sealing`] names it by a receipt. A
//! backend owns a slot until the operation has really ended, never touches device memory, and knows
//! nothing of tasks, other media or vLLM. A new one is one file that implements this trait.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ucm_core::{BlockId, MissReason, Result};
use ucm_device::{Pinned, SharedRegion, Slot};
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;

use crate::quota::Usage;

/// Called exactly once with the outcome of [`Indexed::look`], on a thread of the backend.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Called once for each receipt with its outcome, on a thread of the backend. Must not wait.
pub type OnSealed = Box<dyn Fn(Receipt, Result<()>) + Send + Sync>;

/// Whether a record is there whole, or why it is no hit.
pub type Presence = std::result::Result<(), MissReason>;

/// A record that was read.
pub struct ReadDone {
    /// The slot, filled from its start.
    pub slot: Slot,
    /// Bytes read.
    pub read: usize,
    /// Length of the record on the medium; a truncated record is shorter than it should be. Bytes
    /// of the slot behind it do not belong to the record.
    pub stored_len: u64,
    /// The record in the medium's own memory, instead of the slot's bytes. Only for a reader that
    /// accepts that ([`BlockRead::in_place`]).
    pub lent: Option<Lent>,
}

/// A record in the medium's own memory, which stays there until this value is dropped.
pub enum Lent {
    /// In memory of this process that is registered with the device ([`Memory::region`]).
    Region(Pinned),
    /// In the answer of a server.
    Answer(Vec<u8>),
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Region(record) => record,
            Self::Answer(record) => record,
        }
    }
}

/// Which records a reader accepts outside of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InPlace {
    /// None.
    Never,
    /// Those in memory that is registered with the device: [`Lent::Region`].
    Region,
    /// Those anywhere in this process: any [`Lent`].
    Anywhere,
}

impl ReadDone {
    /// The record's bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.lent {
            Some(lent) => lent,
            None => &self.slot.as_slice()[..self.read],
        }
    }
}

/// A part of a record that has arrived in its slot.
pub struct ReadPart<'a> {
    /// The slot from its start. It contains this part and the earlier ones.
    pub record: &'a [u8],
    /// Its place in the record. A part that begins at 0 restarts the record.
    pub range: Range<usize>,
    /// Length of the record on the medium.
    pub stored_len: u64,
}

impl<'a> ReadPart<'a> {
    /// The bytes of one operation; an operation without bytes restarts the record.
    pub fn of(step: &[Range<usize>], record: &'a [u8], stored_len: u64) -> Self {
        let start = step.first().map_or(0, |first| first.start);
        Self {
            record,
            range: start..step.last().map_or(0, |last| last.end),
            stored_len,
        }
    }
}

/// Called with each part of a record when it has been read, on the thread that reads. The ranges
/// that it returns are read after the remaining steps.
pub type Arrived = Box<dyn FnMut(&IoJob, ReadPart<'_>) -> Option<Vec<Range<usize>>> + Send>;

/// How a record is read part by part. A medium without [`Features::reads_parts`] reads the whole
/// record and does not call `arrived`.
pub struct Parts {
    /// The byte ranges of each operation, in order. Each is read to the same place in the slot.
    pub steps: Vec<Vec<Range<usize>>>,
    /// Called after each operation.
    pub arrived: Arrived,
}

/// A record that is to be read.
pub struct BlockRead {
    /// The record id.
    pub id: BlockId,
    /// The record is read to the start of this slot.
    pub slot: Slot,
    /// Part by part. `None`: all of it at once, or as much as the slot has room for.
    pub parts: Option<Parts>,
    /// Only the header and a side shard are read, a few pages: one thread reads many of these.
    pub sides: bool,
    /// Without any cache, because a checksum failed.
    pub again: bool,
    /// Time after which the caller no longer waits for it.
    pub deadline: MonotonicTime,
    /// [`Indexed::look`] has run since the record was missed: if it is missed again it is absent.
    pub looked: bool,
    /// Which memory the reader accepts for [`ReadDone::lent`].
    pub in_place: InPlace,
}

/// The outcome of a read.
pub enum Outcome {
    /// The record, or why it could not be read. The error is `Foreign` if the record's name belongs
    /// to something that can never be a record; the medium itself is healthy then.
    Read(Result<ReadDone>),
    /// The record is not where the index has it: to be read again after [`Indexed::look`].
    Moved(BlockRead),
}

impl BlockRead {
    /// A read of a whole record, through the caches.
    pub fn whole(id: BlockId, slot: Slot, deadline: MonotonicTime) -> Self {
        Self {
            id,
            slot,
            parts: None,
            sides: false,
            again: false,
            deadline,
            looked: false,
            in_place: InPlace::Never,
        }
    }
}

/// How soon records that wait for others are to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// A caller waits for it. Calls are rare enough that not every block gets its own file.
    Soon,
    /// As soon as it is written.
    Now,
    /// The same, and later records do not wait either: the store is about to close.
    Last,
}

/// Names a record that was written and is published later, together with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receipt(u64);

impl Receipt {
    /// A receipt that is unique in this process.
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The record is published.
    Published,
    /// It was stored already and nothing was written.
    Present,
    /// Nothing was written: the stored record cannot be read here, for this reason, and is not
    /// replaced.
    InTheWay(MissReason),
    /// The medium has the record, and this process can read it. By the deadline of the write
    /// [`Backend::on_sealed`] reports with this receipt whether it was published, or lost.
    Sealing(Receipt),
}

/// How a record is written.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// Bytes of the slot that are the record.
    pub len: usize,
    /// Position in its chain; ancestors count as used later than descendants.
    pub ordinal: u32,
    /// Replace the stored record of this id (it was refused).
    pub replace: bool,
}

impl WriteOptions {
    /// Options for a copy, which replaces no record.
    pub fn of_copy(len: usize, ordinal: u32) -> Self {
        Self {
            len,
            ordinal,
            replace: false,
        }
    }
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

/// Changes of the records that this process can read and others cannot see yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocallyVisible {
    /// They can be read from now on.
    pub added: Vec<BlockId>,
    /// No longer only locally visible: removed, or published long enough ago for others to have
    /// found them.
    pub removed: Vec<BlockId>,
}

/// A record that a memory evicts to make room. It can be found and read there until this value is
/// dropped, and stays if it is used before that.
pub trait Victim: Send {
    /// Its id.
    fn id(&self) -> BlockId;

    /// The whole record.
    fn record(&self) -> &[u8];
}

/// Called with every record that is evicted, on the thread that needs the room; must not wait.
pub type Evicted = Box<dyn Fn(Box<dyn Victim>) + Send + Sync>;

/// The features of a medium.
#[derive(Clone, Copy, Default)]
pub struct Features<'a> {
    /// Name in logs and metrics.
    pub name: &'static str,
    /// Lookups are answered from memory and without a system call, so any thread may call them.
    pub answers_at_once: bool,
    /// A lookup is one request to a server, for any number of ids, and the backend waits for the
    /// answer until the deadline of its job. The caller's own thread makes it.
    pub waits_by_itself: bool,
    /// Single parts of a record can be read.
    pub reads_parts: bool,
    /// Writes fill memory, such as the page cache, and normally wait for no device.
    pub writes_cached: bool,
    /// A use that another process of the same engine reported to its own medium must be reported to
    /// this one too, because the medium belongs to one process, as its memory does.
    pub own_touches: bool,
    /// Its functions as memory of this host, which ends with the processes that use it.
    pub memory: Option<&'a dyn Memory>,
    /// Its index in memory, if it has one.
    pub index: Option<&'a dyn Indexed>,
    /// Its records that only this process can read yet, if there can be any.
    pub local: Option<&'a dyn Local>,
}

impl Features<'_> {
    /// See [`Indexed::runs`]; without an index each read is a run.
    pub fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        match self.index {
            Some(index) => index.runs(reads, threads),
            None => (0..reads.len()).map(|read| vec![read]).collect(),
        }
    }

    /// See [`Indexed::look`]; without an index every lookup reads the medium anyway.
    pub fn look(&self, deadline: MonotonicTime, done: Done<()>) {
        match self.index {
            Some(index) => index.look(deadline, done),
            None => done(Ok(())),
        }
    }

    /// See [`Indexed::is_published`]; without an index that is not known.
    pub fn is_published(&self, id: BlockId) -> bool {
        self.index.is_some_and(|index| index.is_published(id))
    }

    /// See [`Local::locally_visible`].
    pub fn locally_visible(&self) -> LocallyVisible {
        self.local.map(Local::locally_visible).unwrap_or_default()
    }
}

/// The use of a medium, and counters since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MediumStats {
    /// Bytes used and allowed.
    pub usage: Usage,
    /// Records removed to make room.
    pub records_removed: u64,
    /// Their bytes.
    pub bytes_removed: u64,
    /// Blocks whose use was noted.
    pub blocks_touched: u64,
    /// Further counters and gauges of its own, by name.
    pub more: Vec<(&'static str, u64)>,
}

/// Memory of this host: a call has done its work when it returns, and never waits.
pub trait Memory {
    /// Copies a record, and makes room for it. `Busy` if there is none now.
    fn insert(&self, id: BlockId, record: &[u8], options: WriteOptions) -> Result<Written>;

    /// Whether it has a record.
    fn has(&self, id: BlockId) -> bool;

    /// Sets, once, the hook that is called with evicted records. False if one is set already.
    fn on_evicted(&self, hook: Evicted) -> bool;

    /// This process's own memory, from which records are lent. A device copies from it at full
    /// speed once it is registered there.
    fn region(&self) -> Option<&Arc<SharedRegion>> {
        None
    }
}

/// An index in memory of the records on a medium.
pub trait Indexed {
    /// Which of these reads one thread should do together, by their numbers, and in which order;
    /// each at most once. A record that is left out is not in the index, and is passed again after
    /// [`Indexed::look`]; with [`BlockRead::looked`] none is left out. Never waits. `threads` is
    /// the number of threads for reads.
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>>;

    /// Refreshes the index with records that other processes stored. Never waits: it calls `done`
    /// afterwards, with `Timeout` at the deadline.
    fn look(&self, deadline: MonotonicTime, done: Done<()>);

    /// Whether this record is published, so that a write of it would do nothing.
    fn is_published(&self, id: BlockId) -> bool;

    /// Whether this record is in the index, even if only this process can read it yet.
    fn knows(&self, id: BlockId) -> bool;
}

/// Records that this process can read and others cannot see yet.
pub trait Local {
    /// The changes since the last call, for the scheduler of the same engine alone. At most as many
    /// ids as [`ucm_core::limits::MAX_IDS_PER_CALL`], the rest with the next call.
    fn locally_visible(&self) -> LocallyVisible;
}

/// A medium that keeps records. It knows nothing of other media or of engines.
///
/// A medium that is a map from ids to bytes implements [`Values`](crate::values::Values) instead.
pub trait Backend: Send + Sync {
    /// Makes the medium usable by the deadline, or fails with the reason; called again after a
    /// failure. Returns a text for the log: what it uses, and why.
    fn open(&self, deadline: MonotonicTime) -> Result<String>;

    /// Its features. They may change until it was opened.
    fn features(&self) -> Features<'_>;

    /// Whether each record is complete. With `stop_at_missing` the answer may end with the first
    /// one that is not.
    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>>;

    /// Reads the records of one run: an outcome for each, in the same order; one that fails does
    /// not end the others.
    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome>;

    /// Writes a record privately and publishes it whole, or returns a receipt for that. Returns by
    /// the deadline of `io`, unless a system call hangs: the slot stays with it then. Without room
    /// it is refused at once with `Busy`; it waits only for a grant that the limit has room for. A
    /// record of a newer version stays.
    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written>;

    /// Sets, once and before [`Backend::open`], the hook for the outcomes of receipts. A medium
    /// without receipts ignores it.
    fn on_sealed(&self, _hook: OnSealed) {}

    /// Notes that a request used these records: ids with their ordinals. Does not wait, and is
    /// throttled by the backend.
    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime);

    /// Removes records by name; the answer counts those removed.
    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize>;

    /// Every record of this namespace that [`Backend::delete`] would find.
    fn list(&self, io: &IoJob) -> Result<Vec<Listed>>;

    /// Publishes records that are written and wait to be published with others. Never blocks.
    fn flush(&self, _how: Flush) {}

    /// Its use and its counters.
    fn stats(&self) -> MediumStats;

    /// Closes it: operations in progress complete or fail within `drain`.
    fn close(&self, drain: Duration);
}
