//! The queue of work for the one thread that calls Mooncake's client (`calling.rs`).
//!
//! A caller queues its work and waits until its own deadline, never longer. The thread takes what
//! waits together, of one sort and up to [`BATCH`] bytes, and makes one call of it; it holds the
//! slots while a call runs, which no deadline ends. So a master that hangs costs each request its
//! deadline, then the breaker opens; a slot is free again when the call returns.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::{Slot, SlotPool};
use ucm_infra::{Clock, MonotonicTime, Notify};

/// Most bytes of one call; a single record may be larger.
const BATCH: usize = 8 << 20;

/// A job for the client, and the receiver of its result.
pub(super) enum Work {
    /// Sets up the clients, if that was not done, and checks that they reach the master.
    Open(Reply<()>),
    /// Which of these keys have a value.
    Exist(Vec<String>, Reply<Vec<bool>>),
    /// Reads values, each into its slot.
    Read(Vec<(String, Slot)>, ReadReply),
    /// Stores a value; false where there is one already that was not to be replaced.
    Write(Write, Reply<(Slot, bool)>),
    /// Removes values; how many there were.
    Remove(Vec<String>, Reply<usize>),
    /// The length of each value; none where there is none.
    Lengths(Vec<String>, Reply<Vec<Option<u64>>>),
    /// Reads a piece of a value; none where there is no such value.
    Piece(Range, Reply<Option<Piece>>),
}

/// For each read the slot, and the length of the value.
pub(super) type ReadReply = Reply<Vec<Result<(Slot, u64)>>>;

/// Bytes of a value that are to be read.
pub(super) struct Range {
    /// Its key.
    pub(super) key: String,
    /// Where they go.
    pub(super) slot: Slot,
    /// Where they begin.
    pub(super) start: u64,
    /// How many at most, no more than the slot has.
    pub(super) len: usize,
}

/// A piece of a value, in a slot.
pub(super) struct Piece {
    pub(super) slot: Slot,
    /// Bytes of it; fewer than wanted where the value ends before.
    pub(super) read: usize,
    /// Bytes of the whole value.
    pub(super) whole: u64,
}

/// A value that is to be stored.
pub(super) struct Write {
    /// Its key.
    pub(super) key: String,
    /// Where it lies.
    pub(super) slot: Slot,
    /// Its length.
    pub(super) len: usize,
    /// In place of what has its key.
    pub(super) replace: bool,
}

/// The client, as its callers have it.
pub(super) struct Client(Arc<Shared>);

/// The state that both sides share.
pub(super) struct Shared {
    clock: Arc<dyn Clock>,
    queue: Mutex<Queue>,
    changed: Notify,
    ended: Notify,
    calls: AtomicU64,
    records: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Item>,
    /// Number of the last item.
    number: u64,
    /// No more is taken.
    closed: bool,
    /// The thread has ended.
    over: bool,
}

/// Work that waits.
struct Item {
    number: u64,
    work: Work,
    deadline: MonotonicTime,
}

/// Where the result of one piece of work goes: once, and `Closed` if it is dropped without.
pub(super) struct Reply<T>(Arc<Pending<T>>);

/// A result that a caller waits for.
struct Pending<T> {
    result: Mutex<Option<Result<T>>>,
    ready: Notify,
}

impl<T> Reply<T> {
    pub(super) fn send(self, result: Result<T>) {
        *self.0.result.lock() = Some(result);
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        self.0.result.lock().get_or_insert_with(|| Err(closed()));
        self.0.ready.notify();
    }
}

impl Client {
    /// A client whose work a thread takes from this queue.
    pub(super) fn of(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Queues work and waits for its result. `Timeout` at the deadline: what was not begun by then
    /// is not done, and what was keeps its slots until it has ended.
    pub(super) fn call<T>(
        &self,
        work: impl FnOnce(Reply<T>) -> Work,
        deadline: MonotonicTime,
    ) -> Result<T> {
        let pending = Arc::new(Pending {
            result: Mutex::new(None),
            ready: Notify::new(),
        });
        let work = work(Reply(Arc::clone(&pending)));
        let number = {
            let mut queue = self.0.queue.lock();
            if queue.closed {
                return Err(closed());
            }
            queue.number += 1;
            let number = queue.number;
            queue.waiting.push_back(Item {
                number,
                work,
                deadline,
            });
            number
        };
        self.0.changed.notify();
        loop {
            let seen = pending.ready.seen();
            if let Some(result) = pending.result.lock().take() {
                return result;
            }
            if self.0.clock.now() >= deadline {
                let own = self.0.queue.lock().remove(number);
                drop(own); // its slots are released with no lock held
                let text = "Mooncake's client did not answer in time";
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            self.0.clock.sleep(&pending.ready, seen, Some(deadline));
        }
    }

    /// The length of a value, and up to `len` bytes of it from `start` on, through these slots;
    /// none where there is no such value. `Busy` without a free slot.
    pub(super) fn read(
        &self,
        slots: &Arc<SlotPool>,
        key: &str,
        start: u64,
        len: usize,
        deadline: MonotonicTime,
    ) -> Result<Option<(u64, Vec<u8>)>> {
        let mut bytes = Vec::new();
        loop {
            let text = "earlier reads of this pool have not ended";
            let busy = || Error::new(ErrorKind::Busy, text);
            let range = Range {
                key: key.to_owned(),
                slot: slots.try_acquire().ok_or_else(busy)?,
                start: start.saturating_add(bytes.len() as u64),
                len: (len - bytes.len()).min(slots.slot_len()),
            };
            let wanted = range.len;
            let piece = self.call(|reply| Work::Piece(range, reply), deadline)?;
            let Some(Piece { slot, read, whole }) = piece else {
                return Ok(None);
            };
            bytes.extend_from_slice(&slot.as_slice()[..read]);
            if read < wanted || bytes.len() == len {
                return Ok(Some((whole, bytes)));
            }
        }
    }

    /// Calls of the client for records, and how many records they were for.
    pub(super) fn counts(&self) -> (u64, u64) {
        let Shared { calls, records, .. } = &*self.0;
        (
            calls.load(Ordering::Relaxed),
            records.load(Ordering::Relaxed),
        )
    }

    /// Takes no more work and ends the client, waiting for that for up to `drain`; what is left of
    /// that time.
    pub(super) fn close(&self, drain: Duration) -> Duration {
        let until = self.0.clock.now().after(drain);
        let waiting = {
            let mut queue = self.0.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.waiting)
        };
        drop(waiting);
        self.0.changed.notify();
        loop {
            let seen = self.0.ended.seen();
            let left = until.since(self.0.clock.now());
            if left.is_zero() || self.0.queue.lock().over {
                return left;
            }
            self.0.clock.sleep(&self.0.ended, seen, Some(until));
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _none = self.close(Duration::ZERO);
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "this Mooncake store was closed")
}

impl Work {
    /// Which sort goes first: what is short before what moves bytes, loads before dumps.
    fn rank(&self) -> u8 {
        match self {
            Self::Open(_) => 0,
            Self::Exist(..) => 1,
            Self::Read(..) => 2,
            Self::Write(..) => 3,
            Self::Remove(..) => 4,
            Self::Lengths(..) => 5,
            Self::Piece(..) => 6,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Read(reads, _) => reads.iter().map(|(_, slot)| slot.len()).sum(),
            Self::Write(write, _) => write.len,
            _ => 0,
        }
    }
}

impl Shared {
    /// An empty queue.
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            queue: Mutex::default(),
            changed: Notify::new(),
            ended: Notify::new(),
            calls: AtomicU64::new(0),
            records: AtomicU64::new(0),
        }
    }

    /// What is to be done next, in one call: at least one piece of work that is not late, all of
    /// one sort. `None` at the end.
    pub(super) fn next(&self) -> Option<Vec<Work>> {
        loop {
            let seen = self.changed.seen();
            let taken = {
                let mut queue = self.queue.lock();
                if queue.closed {
                    return None;
                }
                let rank = queue.waiting.iter().map(|item| item.work.rank()).min();
                rank.map(|rank| queue.take(rank))
            };
            let Some(mut items) = taken else {
                self.clock.sleep(&self.changed, seen, None);
                continue;
            };
            let now = self.clock.now();
            items.retain(|item| now < item.deadline); // the caller of another has left
            if !items.is_empty() {
                return Some(items.into_iter().map(|item| item.work).collect());
            }
        }
    }

    /// Counts a call for this many records.
    pub(super) fn count(&self, records: usize) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(records as u64, Ordering::Relaxed);
    }

    /// The thread has ended.
    pub(super) fn over(&self) {
        self.queue.lock().over = true;
        self.ended.notify();
    }
}

impl Queue {
    /// Takes out the item of this number, if it still waits.
    fn remove(&mut self, number: u64) -> Option<Item> {
        let own = self.waiting.iter().position(|item| item.number == number);
        self.waiting.remove(own?)
    }

    /// The first items of this sort, as many as go into one call.
    fn take(&mut self, rank: u8) -> Vec<Item> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        let mut left = VecDeque::with_capacity(self.waiting.len());
        for item in self.waiting.drain(..) {
            let more = bytes + item.work.bytes();
            if item.work.rank() == rank && (taken.is_empty() || more <= BATCH) {
                bytes = more;
                taken.push(item);
            } else {
                left.push_back(item);
            }
        }
        self.waiting = left;
        taken
    }
}
