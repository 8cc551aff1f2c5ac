//! The one thread that calls Mooncake's client, and how threads of the tier hand it their work.
//!
//! A thread of the tier puts its work in line and waits until its own deadline, never longer. The thread here takes
//! what waits together, of one sort and up to [`BATCH`] bytes, and makes one call of it; it holds the slots while a
//! call runs, which no deadline ends. So a master that hangs costs each request its deadline, then the breaker opens;
//! a slot comes back when the call does.
//!
//! There are two clients. The first lends this process's memory to the pool and moves nothing. The second moves bytes:
//! when a transfer of it failed half-way, Mooncake may still write to its buffers, so it is closed and set up anew, at
//! no cost for what the first one lends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::PyResult;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::{ArenaOptions, HostArena, Slot, SlotPool};
use ucm_infra::{Clock, MonotonicTime, Notify, begin_thread};
use ucm_record::RecordHeader;

use super::LEAST_BUFFER;
use super::library::{Calls, FOUND, Handle, OK, Pool, error_of, is_settled};

/// Most bytes of one call; a single record may be larger.
const BATCH: usize = 8 << 20;

/// Values that are to be read: keys, and where each goes.
type Reads = Vec<(String, Slot)>;

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
    /// A slot and the length of the value for each, or why there is none.
    Read(Vec<Result<(Slot, usize)>>),
    /// Of [`Work::Write`].
    Stored(Stored),
    /// How many there were.
    Removed(usize),
    /// Bytes of each value; none where there is none.
    Lengths(Vec<Option<u64>>),
    /// A slot and how many bytes of the value are in it, fewer where it ends before; none where there is no such value.
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

/// The client, as threads of the tier see it.
pub(super) struct Client(Arc<Shared>);

struct Shared {
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

struct Item {
    work: Work,
    deadline: MonotonicTime,
    answer: Arc<Told>,
}

#[derive(Default)]
struct Told {
    answer: Mutex<Option<Result<Answer>>>,
    news: Notify,
}

impl Told {
    fn tell(&self, answer: Result<Answer>) {
        *self.answer.lock() = Some(answer);
        self.news.notify();
    }
}

impl Client {
    /// Begins the thread; nothing is reached before [`Work::Open`].
    pub(super) fn begin(pool: Pool, clock: Arc<dyn Clock>) -> Result<Self> {
        let shared = Arc::new(Shared {
            clock,
            line: Mutex::default(),
            news: Notify::new(),
            ended: Notify::new(),
            calls: AtomicU64::new(0),
            records: AtomicU64::new(0),
        });
        let thread = Thread {
            shared: Arc::clone(&shared),
            pool,
            scratch: None,
            lender: None,
            mover: None,
        };
        let refused = |error| Error::from_io(error, "no thread can be begun for Mooncake's client");
        begin_thread("ucm-mooncake-py", move || thread.run()).map_err(refused)?;
        Ok(Self(shared))
    }

    /// Hands `work` over and waits for the answer. `Timeout` at the deadline: what was not begun by then is not done,
    /// and what was keeps its slots until it has ended.
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
        (calls.load(Ordering::Relaxed), records.load(Ordering::Relaxed))
    }

    /// Takes no more work and ends the client, waiting for that `drain` long; what is left of that time.
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
    /// What is to be done next, in one call: at least one item, all of one sort. `None` at the end.
    fn next(&self) -> Option<Vec<Item>> {
        loop {
            let seen = self.news.seen();
            {
                let mut line = self.line.lock();
                if line.closed {
                    return None;
                }
                if let Some(rank) = line.waiting.iter().map(|item| item.work.rank()).min() {
                    return Some(line.take(rank));
                }
            }
            self.clock.sleep(&self.news, seen, None);
        }
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

/// What the thread owns.
struct Thread {
    shared: Arc<Shared>,
    pool: Pool,
    /// For the header of a record that may be newer.
    scratch: Option<Slot>,
    lender: Option<Handle>,
    mover: Option<Mover>,
}

/// The client that moves bytes, and the memory it knows of.
struct Mover {
    handle: Handle,
    registered: Vec<Arc<HostArena>>,
}

impl Thread {
    fn run(mut self) {
        while let Some(items) = self.shared.next() {
            let now = self.shared.clock.now();
            let (items, late): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| now < item.deadline);
            drop(late); // who waited for it is gone
            if !items.is_empty() {
                self.work(items);
            }
        }
        let mover = self.mover.take().map(|mover| mover.handle);
        let clients: Vec<Handle> = mover.into_iter().chain(self.lender.take()).collect();
        if !clients.is_empty() {
            // Closing one holds the GIL until the master has answered.
            let end = match self.pool.host() {
                Ok(_) => Handle::close,
                Err(_) => Handle::leave,
            };
            clients.into_iter().for_each(end);
        }
        self.shared.line.lock().over = true;
        self.shared.ended.notify();
    }

    /// Does what these ask for, which is all of one sort.
    fn work(&mut self, items: Vec<Item>) {
        let (mut exist, mut read, mut write) = (Vec::new(), Vec::new(), Vec::new());
        let (mut remove, mut lengths) = (Vec::new(), Vec::new());
        for Item { work, answer, .. } in items {
            match work {
                Work::Open => answer.tell(self.open().map(|()| Answer::Opened)),
                Work::Exist(keys) => exist.push((keys, answer)),
                Work::Read(reads) => read.push((reads, answer)),
                Work::Write(record) => write.push((record, answer)),
                Work::Remove(keys) => remove.push((keys, answer)),
                Work::Lengths(keys) => lengths.push((keys, answer)),
                Work::Stretch(stretch) => answer.tell(self.stretch(stretch).map(Answer::Stretch)),
            }
        }
        if !exist.is_empty() {
            self.ask_all(
                exist,
                |calls, keys| calls.exist(keys),
                |codes| match codes.iter().find(|&&code| code < OK) {
                    Some(&code) => Err(error_of(code)),
                    None => Ok(Answer::Exist(codes.iter().map(|&code| code == FOUND).collect())),
                },
            );
        }
        if !remove.is_empty() {
            self.ask_all(
                remove,
                |calls, keys| calls.remove(keys),
                |codes| Ok(Answer::Removed(codes.iter().filter(|&&code| code == OK).count())),
            );
        }
        if !lengths.is_empty() {
            self.ask_all(
                lengths,
                |calls, keys| keys.iter().map(|key| calls.length(key)).collect(),
                |codes| {
                    codes
                        .iter()
                        .map(|&code| length_of(code))
                        .collect::<Result<_>>()
                        .map(Answer::Lengths)
                },
            );
        }
        if !read.is_empty() {
            self.read(read);
        }
        if !write.is_empty() {
            self.write(write);
        }
    }

    /// Sets up what is not there, and asks whether the master is.
    fn open(&mut self) -> Result<()> {
        self.batch(&[], |_| Ok(()))
    }

    /// Makes calls for one batch, whose slots lie in these arenas; sets up the client if need be. Where Python
    /// raised, the client is closed: nothing says what it still does.
    fn batch<T>(
        &mut self,
        arenas: &[Arc<HostArena>],
        work: impl FnOnce(&Calls<'_>) -> PyResult<T>,
    ) -> Result<T> {
        let mover = self.mover()?;
        let unknown = mover.unknown(arenas);
        let done = mover.handle.batch(|calls| {
            for arena in &unknown {
                calls.register(arena.address(), arena.len())?; // what cannot be registered fails as a transfer
            }
            work(calls)
        });
        match done {
            Ok(Some(done)) => {
                mover.registered.extend(unknown);
                Ok(done)
            }
            Ok(None) => Err(Error::new(ErrorKind::Io, "Mooncake's client has lost its master")),
            Err(error) => {
                self.abandon();
                Err(error)
            }
        }
    }

    /// The client that moves bytes; set up if need be, the one that lends before it.
    fn mover(&mut self) -> Result<&mut Mover> {
        if self.mover.is_none() {
            let host = self.pool.host()?;
            if self.lender.is_none() && self.pool.lent > 0 {
                self.lender = Some(Handle::set_up(&self.pool, &host, self.pool.lent, LEAST_BUFFER)?);
            }
            let handle = Handle::set_up(&self.pool, &host, 0, self.pool.buffer)?;
            self.mover = Some(Mover {
                handle,
                registered: Vec::new(),
            });
        }
        self.mover
            .as_mut()
            .ok_or_else(|| Error::internal("a client was set up and is not there"))
    }

    /// One call for the keys of all of these.
    fn ask_all(
        &mut self,
        items: Vec<(Vec<String>, Arc<Told>)>,
        call: impl FnOnce(&Calls<'_>, &[&str]) -> PyResult<Vec<i64>>,
        judge: impl Fn(&[i64]) -> Result<Answer>,
    ) {
        let keys: Vec<&str> = items
            .iter()
            .flat_map(|(keys, _)| keys)
            .map(String::as_str)
            .collect();
        let answered = self.batch(&[], |calls| call(calls, &keys));
        match answered.and_then(|codes| counted(codes, keys.len())) {
            Ok(codes) => {
                let mut codes = &codes[..];
                for (keys, answer) in &items {
                    let (own, others) = codes.split_at(keys.len());
                    answer.tell(judge(own));
                    codes = others;
                }
            }
            Err(error) => refuse(items.into_iter().map(|(_, answer)| answer), error),
        }
    }

    /// Reads values with one call.
    fn read(&mut self, items: Vec<(Reads, Arc<Told>)>) {
        let (mut reads, mut answers) = (Vec::new(), Vec::new());
        for (own, answer) in items {
            answers.push((own.len(), answer));
            reads.extend(own);
        }
        let codes = self.get(&mut reads);
        let codes = match codes {
            Ok(codes) => codes,
            Err(error) => {
                drop(reads);
                return refuse(answers.into_iter().map(|(_, answer)| answer), error);
            }
        };
        let mut unsettled = Vec::new();
        let mut came = reads
            .into_iter()
            .zip(codes)
            .map(|((_, slot), code)| match usize::try_from(code) {
                Ok(len) => Ok((slot, len)),
                Err(_) => {
                    if !is_settled(code) {
                        unsettled.push(slot);
                    }
                    Err(error_of(code))
                }
            });
        let each: Vec<_> = answers
            .into_iter()
            .map(|(count, answer)| (answer, came.by_ref().take(count).collect::<Vec<_>>()))
            .collect();
        drop(came);
        for (answer, own) in each {
            answer.tell(Ok(Answer::Read(own)));
        }
        self.settle(unsettled);
    }

    /// The lengths of values that were read into these slots.
    fn get(&mut self, reads: &mut [(String, Slot)]) -> Result<Vec<i64>> {
        let addresses: Vec<u64> = reads.iter_mut().map(|(_, slot)| address(slot)).collect();
        let (keys, room): (Vec<_>, Vec<_>) = reads.iter().map(|(key, slot)| (&**key, slot.len())).unzip();
        let arenas = arenas_of(reads.iter().map(|(_, slot)| slot));
        let codes = self.batch(&arenas, |calls| calls.get(&keys, &addresses, &room))?;
        self.count(keys.len());
        counted(codes, keys.len()).inspect_err(|_| self.abandon())
    }

    /// Stores records: one call that asks which are there, one for all that are not. Those that replace others have
    /// calls of their own.
    fn write(&mut self, items: Vec<(Record, Arc<Told>)>) {
        let (replacing, new): (Vec<_>, Vec<_>) = items.into_iter().partition(|(record, _)| record.replace);
        if !new.is_empty() {
            self.put(new, false);
        }
        for (record, answer) in replacing {
            match self.is_newer(&record.key, record.len) {
                Ok(true) => answer.tell(Ok(Answer::Stored(Stored::Present))),
                Ok(false) => self.put(vec![(record, answer)], true),
                Err(error) => answer.tell(Err(error)),
            }
        }
    }

    fn put(&mut self, mut items: Vec<(Record, Arc<Told>)>, replace: bool) {
        let codes = match self.put_records(&mut items, replace) {
            Ok(codes) => codes,
            Err(error) => return refuse(items.into_iter().map(|(_, answer)| answer), error),
        };
        let mut unsettled = Vec::new();
        for ((record, answer), code) in items.into_iter().zip(codes) {
            let stored = match code {
                FOUND => Ok(Stored::Present),
                OK if record.read_back => self.read_back(record),
                OK => Ok(Stored::Published),
                code => {
                    if !is_settled(code) {
                        unsettled.push(record.slot);
                    }
                    Err(error_of(code))
                }
            };
            answer.tell(stored.map(Answer::Stored));
        }
        self.settle(unsettled);
    }

    /// For each record 0 where it was stored, [`FOUND`] where there is one, or an error.
    fn put_records(&mut self, items: &mut [(Record, Arc<Told>)], replace: bool) -> Result<Vec<i64>> {
        let addresses: Vec<u64> = items
            .iter_mut()
            .map(|(record, _)| address(&mut record.slot))
            .collect();
        let records: Vec<&Record> = items.iter().map(|(record, _)| record).collect();
        let keys: Vec<&str> = records.iter().map(|record| &*record.key).collect();
        let arenas = arenas_of(records.iter().map(|record| &record.slot));
        let codes = self.batch(&arenas, |calls| {
            let mut codes = if replace {
                vec![OK; keys.len()]
            } else {
                calls.exist(&keys)?
            };
            let absent: Vec<usize> = (0..codes.len()).filter(|&n| codes[n] == OK).collect();
            if absent.is_empty() || codes.len() != keys.len() {
                return Ok(codes);
            }
            let some = |of: &[u64]| absent.iter().map(|&n| of[n]).collect::<Vec<_>>();
            let own: Vec<&str> = absent.iter().map(|&n| keys[n]).collect();
            let lengths: Vec<usize> = absent.iter().map(|&n| records[n].len).collect();
            let put = calls.put(&own, &some(&addresses), &lengths, replace)?;
            for (&n, code) in absent.iter().zip(put) {
                codes[n] = code;
            }
            Ok(codes)
        })?;
        self.count(keys.len());
        counted(codes, keys.len()).inspect_err(|_| self.abandon())
    }

    /// Reads a record that was just stored into the slot it came from, which is cleared before.
    fn read_back(&mut self, record: Record) -> Result<Stored> {
        let Record { key, mut slot, .. } = record;
        slot.as_mut_slice().fill(0);
        let mut reads = vec![(key, slot)];
        let code = self.get(&mut reads)?.first().copied().unwrap_or(OK);
        let slots = reads.into_iter().map(|(_, slot)| slot);
        match usize::try_from(code) {
            Ok(len) => slots
                .map(|slot| Stored::ReadBack(slot, len))
                .next()
                .ok_or_else(miscounted),
            Err(_) => {
                if !is_settled(code) {
                    self.settle(slots.collect());
                }
                Err(error_of(code))
            }
        }
    }

    /// Whether what has this key is a record of a newer version. One of ours has `len` bytes; what is shorter than the
    /// header that is asked for is no record.
    fn is_newer(&mut self, key: &str, len: usize) -> Result<bool> {
        let len = len.min(RecordHeader::LONGEST);
        if self.scratch.is_none() {
            let arena = HostArena::with(RecordHeader::LONGEST, ArenaOptions::default())?;
            self.scratch = SlotPool::new(arena, RecordHeader::LONGEST)?.try_acquire();
        }
        let Some(mut slot) = self.scratch.take() else {
            return Err(Error::internal("a pool of one slot has none"));
        };
        slot.as_mut_slice().fill(0);
        let to = address(&mut slot);
        let code = self.batch(&arenas_of([&slot]), |calls| calls.piece(key, to, 0, len))?;
        if !is_settled(code) {
            self.settle(vec![slot]);
            return Err(error_of(code));
        }
        let newer = code > OK && RecordHeader::is_newer(slot.as_slice());
        self.scratch = Some(slot);
        Ok(newer)
    }

    /// Reads a piece of a value; none where there is no such value.
    fn stretch(&mut self, stretch: Stretch) -> Result<Option<(Slot, usize)>> {
        let Stretch {
            key,
            mut slot,
            start,
            len,
        } = stretch;
        let whole = self.batch(&[], |calls| calls.length(&key))?;
        let Some(whole) = length_of(whole)? else {
            return Ok(None);
        };
        let len = usize::try_from(whole.saturating_sub(start)).map_or(len, |left| left.min(len));
        if len == 0 {
            return Ok(Some((slot, 0)));
        }
        let to = address(&mut slot);
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        let code = self.batch(&arenas_of([&slot]), |calls| calls.piece(&key, to, start, len))?;
        if !is_settled(code) {
            self.settle(vec![slot]);
            return Err(error_of(code));
        }
        Ok(length_of(code)?.map(|read| (slot, usize::try_from(read).map_or(len, |read| read.min(len)))))
    }

    fn count(&self, records: usize) {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
        self.shared.records.fetch_add(records as u64, Ordering::Relaxed);
    }

    /// Closes the client where Mooncake may still use one of these slots; only then do they go back.
    fn settle(&mut self, unsettled: Vec<Slot>) {
        if !unsettled.is_empty() {
            self.abandon();
        }
        drop(unsettled);
    }

    /// Closes the client that moves bytes; the next work sets up another.
    fn abandon(&mut self) {
        if let Some(mover) = self.mover.take() {
            mover.handle.close();
        }
    }
}

impl Mover {
    /// Those of these arenas that the client does not know of.
    fn unknown(&self, arenas: &[Arc<HostArena>]) -> Vec<Arc<HostArena>> {
        let unknown = arenas.iter().filter(|arena| !has(&self.registered, arena));
        unknown.cloned().collect()
    }
}

fn has(arenas: &[Arc<HostArena>], arena: &Arc<HostArena>) -> bool {
    arenas.iter().any(|known| Arc::ptr_eq(known, arena))
}

/// The arenas in which these slots lie, each once.
fn arenas_of<'a>(slots: impl IntoIterator<Item = &'a Slot>) -> Vec<Arc<HostArena>> {
    let mut arenas = Vec::new();
    for slot in slots {
        let arena = slot.pool().arena();
        if !has(&arenas, arena) {
            arenas.push(Arc::clone(arena));
        }
    }
    arenas
}

/// The length of a value, as it is answered; none where there is no such value.
fn length_of(code: i64) -> Result<Option<u64>> {
    match u64::try_from(code) {
        Ok(len) => Ok(Some(len)),
        Err(_) => {
            let error = error_of(code);
            if error.kind() == ErrorKind::NotFound {
                Ok(None)
            } else {
                Err(error)
            }
        }
    }
}

/// As many answers as there were questions.
fn counted(codes: Vec<i64>, asked: usize) -> Result<Vec<i64>> {
    if codes.len() == asked {
        Ok(codes)
    } else {
        Err(miscounted())
    }
}

/// Where the bytes of a slot lie. Who holds the slot holds them, and nothing else of Rust looks at them during a call.
fn address(slot: &mut Slot) -> u64 {
    slot.as_mut_slice().as_mut_ptr() as u64
}

fn miscounted() -> Error {
    Error::new(
        ErrorKind::Io,
        "Mooncake's client gave another number of answers than it was asked for",
    )
}

/// Tells all of these the same.
fn refuse(answers: impl Iterator<Item = Arc<Told>>, error: Error) {
    let (kind, text) = (error.kind(), error.message().to_owned());
    let mut first = Some(error);
    for answer in answers {
        let error = first.take().unwrap_or_else(|| Error::new(kind, text.clone()));
        answer.tell(Err(error));
    }
}
