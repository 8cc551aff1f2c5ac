//! The seam between the engine and a medium.
//!
//! A backend moves named records between slots and one medium. It is called on a thread of a pool
//! that keeps the time (a lookup also on the caller's thread, see [`Features`]), and blocks that
//! thread: straight-line code that checks its [`IoJob`] before every effect, because a result past
//! its deadline is dropped. A function returns what happened. One outcome alone is known
//! later, that of a record which is published together with others: [`Written::Sealing`] names it
//! by a receipt. A backend owns a slot until the operation has really ended, never touches device
//! memory, and knows nothing of tasks, other media or vLLM. A new one is one file that implements
//! this trait.

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

/// What a read brought.
pub struct ReadDone {
    /// The slot, filled from its start.
    pub slot: Slot,
    /// Bytes read.
    pub read: usize,
    /// Length of the record on the medium: of one that ends before it should, where it ends. What
    /// the slot has behind that is none of the record.
    pub stored_len: u64,
    /// The record where it lies, in place of the slot's bytes; what a medium lends to those who ask
    /// so ([`BlockRead::in_place`]).
    pub lent: Option<Lent>,
}

/// A record where it lies, and is kept for as long as this lives.
pub enum Lent {
    /// In memory of this process that the device was told of ([`Memory::region`]).
    Region(Pinned),
    /// In what a client of a server answered.
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

/// From where a reader takes a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InPlace {
    /// From its slot.
    Never,
    /// From where it lies, if that is memory that the device was told of: [`Lent::Region`].
    Region,
    /// From wherever it lies in this process: any [`Lent`].
    Anywhere,
}

impl ReadDone {
    /// What was read.
    pub fn bytes(&self) -> &[u8] {
        match &self.lent {
            Some(lent) => lent,
            None => &self.slot.as_slice()[..self.read],
        }
    }
}

/// A part of a record that has arrived in its slot.
pub struct Part<'a> {
    /// The slot from its start, in which this part and those before it are.
    pub record: &'a [u8],
    /// Where it lies. One that begins at 0 begins the record anew.
    pub range: Range<usize>,
    /// Length of the record on the medium.
    pub stored_len: u64,
}

impl<'a> Part<'a> {
    /// What one operation brought; nothing begins the record anew.
    pub fn of(step: &[Range<usize>], record: &'a [u8], stored_len: u64) -> Self {
        let start = step.first().map_or(0, |first| first.start);
        Self {
            record,
            range: start..step.last().map_or(0, |last| last.end),
            stored_len,
        }
    }
}

/// Called with the parts of a record as they arrive, on the thread that reads. What it returns is
/// read too, after the steps that are left.
pub type Arrived = Box<dyn FnMut(&IoJob, Part<'_>) -> Option<Vec<Range<usize>>> + Send>;

/// How a record is read part by part. A medium without [`Features::reads_parts`] brings all at once
/// and calls nothing.
pub struct Parts {
    /// What each operation brings, in order: stretches, each to where it lies in the whole.
    pub steps: Vec<Vec<Range<usize>>>,
    /// Told of each.
    pub arrived: Arrived,
}

/// A record that is to be read.
pub struct BlockRead {
    /// The record id.
    pub id: BlockId,
    /// Where it goes, from the start.
    pub slot: Slot,
    /// Part by part; `None`: all of it at once, or as much as the slot has room for.
    pub parts: Option<Parts>,
    /// Its parts are the header and a side shard, a few pages: one thread reads many such.
    pub sides: bool,
    /// Past every cache (after a failed checksum).
    pub again: bool,
    /// When no one waits for it any more.
    pub deadline: MonotonicTime,
    /// [`Indexed::look`] has been since it was missed: what is missed again is not there.
    pub looked: bool,
    /// Whether the reader that reads takes the record where it lies: [`ReadDone::lent`].
    pub in_place: InPlace,
}

/// What a read came to.
pub enum Outcome {
    /// The record, or why it could not be read. The error is `Foreign` where something has the
    /// record's name that can never be read as one, so that nothing is wrong with the medium.
    Came(Result<ReadDone>),
    /// It is not where it was known to be: to be read again after [`Indexed::look`].
    Moved(BlockRead),
}

impl BlockRead {
    /// All of a record, through whatever is on the way.
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
    /// A caller waits for it; so seldom that not every block gets a file of its own.
    Soon,
    /// As soon as it is written.
    Now,
    /// The same, and from now on nothing waits any more: the store is about to close.
    Last,
}

/// Names a record that was written and is published later, together with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receipt(u64);

impl Receipt {
    /// One unlike all others of this process.
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
    /// Nothing was written, because what is there cannot be read here and is not replaced, for this
    /// reason.
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
    /// In place of what is there under that name (it was refused).
    pub replace: bool,
}

impl WriteOptions {
    /// Of a copy, which takes the place of none.
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
    pub gained: Vec<BlockId>,
    /// No longer only locally visible: published long enough ago for others to have found them, or
    /// gone.
    pub lost: Vec<BlockId>,
}

/// A record that a memory gives up to make room. It can be found and read there until this is
/// dropped, and stays if it was used meanwhile.
pub trait Victim: Send {
    /// Its id.
    fn id(&self) -> BlockId;

    /// The whole record.
    fn record(&self) -> &[u8];
}

/// Called with every record that is given up, on the thread that needs the room; must not wait.
pub type Evicted = Box<dyn Fn(Box<dyn Victim>) + Send + Sync>;

/// What a medium is and can do.
#[derive(Clone, Copy, Default)]
pub struct Features<'a> {
    /// Name in logs and metrics.
    pub name: &'static str,
    /// Lookups are answered from memory and without a system call, so that they may be asked on any
    /// thread.
    pub answers_at_once: bool,
    /// A lookup is one request to a server, however many ids it has, for whose answer the backend
    /// waits by the deadline of its job: the caller's own thread makes it.
    pub waits_by_itself: bool,
    /// Parts of a record can be read by themselves.
    pub reads_parts: bool,
    /// Writes fill memory, the page cache if nothing else, and wait for no device as long as all is
    /// well.
    pub writes_cached: bool,
    /// Uses that another process of the same engine has told its own medium must be told here too:
    /// they reach only what a process has to itself, such as its memory.
    pub own_touches: bool,
    /// The same as memory of this host, where it is that: it ends with the processes that use it.
    pub memory: Option<&'a dyn Memory>,
    /// Where its records lie, if it knows that without asking the medium.
    pub index: Option<&'a dyn Indexed>,
    /// What this process has of it before others, if there can be such.
    pub local: Option<&'a dyn Local>,
}

impl Features<'_> {
    /// See [`Indexed::runs`]; without an index each read by itself.
    pub fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        match self.index {
            Some(index) => index.runs(reads, threads),
            None => (0..reads.len()).map(|read| vec![read]).collect(),
        }
    }

    /// See [`Indexed::look`]; without an index every lookup asks the medium.
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

/// What a medium holds and did; counters since the start.
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

/// Memory of this host: what it is asked for is done before it answers, and nothing waits.
pub trait Memory {
    /// Copies a record, making room if need be. `Busy` when there is none now.
    fn insert(&self, id: BlockId, record: &[u8], options: WriteOptions) -> Result<Written>;

    /// Whether it has a record.
    fn has(&self, id: BlockId) -> bool;

    /// Sets, once, who is handed what is given up to make room. False where there is somebody
    /// already.
    fn on_evicted(&self, hook: Evicted) -> bool;

    /// This process's own memory, from which records are lent: a device copies from it at full
    /// speed once it knows of it.
    fn region(&self) -> Option<&Arc<SharedRegion>> {
        None
    }
}

/// An index in memory of what lies on a medium.
pub trait Indexed {
    /// Which of these reads one thread should do together, by their numbers, and in which order;
    /// each comes once at most. What is left out is not known to be here, and comes again after
    /// [`Indexed::look`]; with [`BlockRead::looked`] none is left out. Never waits. `threads`: how
    /// many there are for reads.
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>>;

    /// Finds what others have stored of late. Never waits: it calls back when that is done, with
    /// `Timeout` at the deadline.
    fn look(&self, deadline: MonotonicTime, done: Done<()>);

    /// Whether a write would only find this record there.
    fn is_published(&self, id: BlockId) -> bool;

    /// Whether it knows where this record lies, also one that only this process can read yet.
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
    /// Makes the medium usable or says why it is not, by the deadline; again after a failure. The
    /// answer is what it uses and why, in words for the log.
    fn open(&self, deadline: MonotonicTime) -> Result<String>;

    /// What it is and can do. May change until it was opened.
    fn features(&self) -> Features<'_>;

    /// Whether each record is present whole. With `stop_at_missing` the answer may end with the
    /// first that is not.
    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>>;

    /// Reads the records of one run: an outcome for each, in the same order, whatever became of the
    /// others.
    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome>;

    /// Writes a record privately and publishes it whole, or returns a receipt for that. Returns by
    /// the deadline of `io`, unless a system call hangs: the slot stays with it then. Without room
    /// it is refused at once with `Busy`; it waits only for a grant that the limit has room for. A
    /// record of a newer version stays.
    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written>;

    /// Sets, once and before [`Backend::open`], what is called with the outcomes of receipts. A
    /// medium that gives none has no use for it.
    fn on_sealed(&self, _hook: OnSealed) {}

    /// These records were used by a request: ids with their ordinals. Fire and forget, throttled by
    /// the backend.
    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime);

    /// Removes records by name; the answer counts those removed.
    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize>;

    /// Every record of this namespace that [`Backend::delete`] would find.
    fn list(&self, io: &IoJob) -> Result<Vec<Listed>>;

    /// Publishes what is written and waits for others to be published with it. Never blocks.
    fn flush(&self, _how: Flush) {}

    /// What it holds and did.
    fn stats(&self) -> MediumStats;

    /// Ends: finishes or fails what is under way within `drain`.
    fn close(&self, drain: Duration);
}
