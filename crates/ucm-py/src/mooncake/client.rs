//! How work gets to the one thread that calls Mooncake's client (`calling.rs`).
//!
//! A thread of the tier, or one that looks blocks up, puts its work in line and waits until its own
//! deadline, never longer. The thread that calls takes what waits together, of one sort and up to
//! [`BATCH`] bytes, and makes one call of it; it holds the slots while a call runs, which no
//! deadline ends. So a master that hangs costs each request its deadline, then the breaker opens; a
//! slot comes back when the call does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, MonotonicTime, Notify};

/// Most bytes of one call; a single record may be larger.
const BATCH: usize = 8 << 20;

/// Values that are to be read: keys, and where each goes.
pub(super) type Reads = Vec<(String, Slot)>;

/// What is asked of the client.
pub(super) enum Work {
    /// Sets up the clients, if that was not done, and sees whether they reach the master.
    Open,
    /// Which of these keys have a value.
    Exist(Vec<String>),
    /// Reads these values, each into its slot.
    Read(Reads),
    /// Stores a record.
    Write(Record),
    /// Removes these values.
    Remove(Vec<String>),
    /// How long these values are.
    Lengths(Vec<String>),
    /// Reads a piece of a value.
    Stretch(Stretch),
}

/// A piece of a value that is to be read.
pub(super) struct Stretch {
    /// Its key.
    pub(super) key: String,
    /// Where it goes.
    pub(super) slot: Slot,
    /// Where it begins.
    pub(super) start: u64,
    /// Bytes at most, no more than the slot has.
    pub(super) len: usize,
}

/// A record that is to be stored.
pub(super) struct Record {
    /// Its key.
    pub(super) key: String,
    /// Where it lies.
    pub(super) slot: Slot,
    /// Its length.
    pub(super) len: usize,
    /// In place of what has its key, unless a newer version wrote that.
    pub(super) replace: bool,
    /// The slot is to come back with what was read back.
    pub(super) read_back: bool,
}

/// What came of it.
pub(super) enum Answer {
    /// Of [`Work::Open`].
    Opened,
    /// A flag for each key.
    Exist(Vec<bool>),
    /// For each a slot, with as much of the value as it has room for, and the length of the value,
    /// or why there is none.
    Read(Vec<Result<(Slot, usize)>>),
    /// Of [`Work::Write`].
    Stored(Stored),
    /// How many there were.
    Removed(usize),
    /// Bytes of each value; none where there is none.
    Lengths(Vec<Option<u64>>),
    /// A slot and how many bytes of the value are in it, fewer where it ends before; none where
    /// there is no such value.
    Stretch(Option<(Slot, usize)>),
}

/// What became of a record.
pub(super) enum Stored {
    /// It is in the pool.
    Published,
    /// There is one already.
    Present,
    /// It is in the pool, and so many bytes of it were read back into its slot.
    ReadBack(Slot, usize),
}

/// The client, as those who ask see it.
pub(super) struct Client(Arc<Shared>);

/// What both sides have.
pub(super) struct Shared {
    clock: Arc<dyn Clock>,
    line: Mutex<Line>,
    news: Notify,
    ended: Notify,
    calls: AtomicU64,
    records: AtomicU64,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Item>,
    /// No more is taken.
    closed: bool,
    /// The thread has ended.
    over: bool,
}

/// Work that waits, and who is told what came of it.
pub(super) struct Item {
    pub(super) work: Work,
    deadline: MonotonicTime,
    pub(super) answer: Arc<Told>,
}

/// Where one answer comes to.
#[derive(Default)]
pub(super) struct Told {
    answer: Mutex<Option<Result<Answer>>>,
    news: Notify,
}

impl Told {
    pub(super) fn tell(&self, answer: Result<Answer>) {
        *self.answer.lock() = Some(answer);
        self.news.notify();
    }
}

impl Client {
    /// A client whose work lies in this line, and somebody takes it there.
    pub(super) fn of(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Hands `work` over and waits for the answer. `Timeout` at the deadline: what was not begun by
    /// then is not done, and what was keeps its slots until it has ended.
    pub(super) fn ask(&self, work: Work, deadline: MonotonicTime) -> Result<Answer> {
        let answer = Arc::new(Told::default());
        {
            let mut line = self.0.line.lock();
            if line.closed {
                return Err(closed());
            }
            line.waiting.push_back(Item {
                work,
                deadline,
                answer: Arc::clone(&answer),
            });
        }
        self.0.news.notify();
        loop {
            let seen = answer.news.seen();
            if let Some(told) = answer.answer.lock().take() {
                return told;
            }
            if self.0.clock.now() >= deadline {
                let given_up = {
                    let mut line = self.0.line.lock();
                    let own = line
                        .waiting
                        .iter()
                        .position(|item| Arc::ptr_eq(&item.answer, &answer));
                    own.and_then(|own| line.waiting.remove(own))
                };
                drop(given_up); // its slots go back with no lock held
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "Mooncake's client did not answer in time",
                ));
            }
            self.0.clock.sleep(&answer.news, seen, Some(deadline));
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

    /// Takes no more work and ends the client, waiting for that `drain` long; what is left of that
    /// time.
    pub(super) fn close(&self, drain: Duration) -> Duration {
        let until = self.0.clock.now().after(drain);
        let waiting = {
            let mut line = self.0.line.lock();
            line.closed = true;
            std::mem::take(&mut line.waiting)
        };
        for item in waiting {
            item.answer.tell(Err(closed()));
        }
        self.0.news.notify();
        loop {
            let seen = self.0.ended.seen();
            let left = until.since(self.0.clock.now());
            if left.is_zero() || self.0.line.lock().over {
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
            Self::Open => 0,
            Self::Exist(_) => 1,
            Self::Read(_) => 2,
            Self::Write(_) => 3,
            Self::Remove(_) => 4,
            Self::Lengths(_) => 5,
            Self::Stretch(_) => 6,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Read(reads) => reads.iter().map(|(_, slot)| slot.len()).sum(),
            Self::Write(record) => record.len,
            _ => 0,
        }
    }
}

impl Shared {
    /// An empty line.
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            line: Mutex::default(),
            news: Notify::new(),
            ended: Notify::new(),
            calls: AtomicU64::new(0),
            records: AtomicU64::new(0),
        }
    }

    /// What is to be done next, in one call: at least one item that is not late, all of one sort.
    /// `None` at the end.
    pub(super) fn next(&self) -> Option<Vec<Item>> {
        loop {
            let seen = self.news.seen();
            let taken = {
                let mut line = self.line.lock();
                if line.closed {
                    return None;
                }
                let rank = line.waiting.iter().map(|item| item.work.rank()).min();
                rank.map(|rank| line.take(rank))
            };
            let Some(mut items) = taken else {
                self.clock.sleep(&self.news, seen, None);
                continue;
            };
            let now = self.clock.now();
            items.retain(|item| now < item.deadline); // who waited for another is gone
            if !items.is_empty() {
                return Some(items);
            }
        }
    }

    /// A call was made for so many records.
    pub(super) fn count(&self, records: usize) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(records as u64, Ordering::Relaxed);
    }

    /// The thread has ended.
    pub(super) fn over(&self) {
        self.line.lock().over = true;
        self.ended.notify();
    }
}

impl Line {
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
