//! The one thread that calls Mooncake's client: it makes one call of what waits together
//! ([`client`](super::client)).
//!
//! There are two clients. The first lends this process's memory to the pool and moves nothing. The
//! second moves bytes: when a transfer of it failed half-way, Mooncake may still write to its
//! buffers, so it is closed and set up anew, at no cost for what the first one lends.

use std::sync::Arc;

use pyo3::PyResult;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::{ArenaOptions, HostArena, Slot, SlotPool};
use ucm_infra::{Clock, begin_thread};
use ucm_record::RecordHeader;

use super::LEAST_BUFFER;
use super::client::{Answer, Client, Item, Reads, Record, Shared, Stored, Stretch, Told, Work};
use super::library::{
    Calls, FOUND, Handle, NO_VALUE, OK, Pool, WRONG_ARGUMENT, error_of, is_settled,
};

/// Begins the thread; nothing is reached before [`Work::Open`].
pub(super) fn begin(pool: Pool, clock: Arc<dyn Clock>) -> Result<Client> {
    let shared = Arc::new(Shared::new(clock));
    let thread = Thread {
        shared: Arc::clone(&shared),
        pool,
        scratch: None,
        lender: None,
        mover: None,
    };
    let refused = |error| Error::from_io(error, "no thread can be begun for Mooncake's client");
    begin_thread("ucm-mooncake-py", move || thread.run()).map_err(refused)?;
    Ok(Client::of(shared))
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

/// A piece of a value, in a slot.
struct Piece {
    slot: Slot,
    /// Bytes of it.
    read: usize,
    /// Those of all of the value.
    whole: usize,
}

/// The client that moves bytes, and the memory it knows of.
struct Mover {
    handle: Handle,
    registered: Vec<Arc<HostArena>>,
}

impl Thread {
    /// Works until the line is closed.
    fn run(mut self) {
        while let Some(items) = self.shared.next() {
            self.work(items);
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
        self.shared.over();
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
                Work::Stretch(stretch) => {
                    let read = self.stretch(stretch);
                    answer.tell(
                        read.map(|piece| {
                            Answer::Stretch(piece.map(|piece| (piece.slot, piece.read)))
                        }),
                    );
                }
            }
        }
        if !exist.is_empty() {
            self.ask_all(
                exist,
                |calls, keys| calls.exist(keys),
                |codes| match codes.iter().find(|&&code| code < OK) {
                    Some(&code) => Err(error_of(code)),
                    None => Ok(Answer::Exist(
                        codes.iter().map(|&code| code == FOUND).collect(),
                    )),
                },
            );
        }
        if !remove.is_empty() {
            self.ask_all(
                remove,
                |calls, keys| calls.remove(keys),
                |codes| {
                    Ok(Answer::Removed(
                        codes.iter().filter(|&&code| code == OK).count(),
                    ))
                },
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

    /// Makes calls for one batch, whose slots lie in these arenas; sets up the client if need be.
    /// Where Python raised, the client is closed: nothing says what it still does.
    fn batch<T>(
        &mut self,
        arenas: &[Arc<HostArena>],
        work: impl FnOnce(&Calls<'_>) -> PyResult<T>,
    ) -> Result<T> {
        let mover = self.mover()?;
        let unknown = mover.unknown(arenas);
        let done = mover.handle.batch(|calls| {
            for arena in &unknown {
                // what cannot be registered fails as a transfer
                calls.register(arena.address(), arena.len())?;
            }
            work(calls)
        });
        match done {
            Ok(Some(done)) => {
                mover.registered.extend(unknown);
                Ok(done)
            }
            Ok(None) => Err(Error::new(
                ErrorKind::Io,
                "Mooncake's client has lost its master",
            )),
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
                self.lender = Some(Handle::set_up(
                    &self.pool,
                    &host,
                    self.pool.lent,
                    LEAST_BUFFER,
                )?);
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
        interpret: impl Fn(&[i64]) -> Result<Answer>,
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
                    answer.tell(interpret(own));
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
        let mut came = Vec::new();
        for ((key, slot), code) in reads.into_iter().zip(codes) {
            came.push(match usize::try_from(code) {
                Ok(len) => Ok((slot, len)),
                Err(_) if code == WRONG_ARGUMENT => self.beginning(key, slot),
                Err(_) => {
                    if !is_settled(code) {
                        unsettled.push(slot);
                    }
                    Err(error_of(code))
                }
            });
        }
        let mut came = came.into_iter();
        for (count, answer) in answers {
            answer.tell(Ok(Answer::Read(came.by_ref().take(count).collect())));
        }
        self.settle(unsettled);
    }

    /// As much of a value as its slot has room for, and the length of all of it: one that is longer
    /// than a record of ours may be that of a writer that keeps side shards behind the KV.
    fn beginning(&mut self, key: String, slot: Slot) -> Result<(Slot, usize)> {
        let (start, len) = (0, slot.len());
        let read = self.stretch(Stretch {
            key,
            slot,
            start,
            len,
        })?;
        match read {
            Some(Piece { slot, read, whole }) if read == len => Ok((slot, whole)),
            Some(_) => Err(Error::new(
                ErrorKind::Busy,
                "this value was replaced while it was read",
            )),
            None => Err(error_of(NO_VALUE)),
        }
    }

    /// The lengths of values that were read into these slots.
    fn get(&mut self, reads: &mut [(String, Slot)]) -> Result<Vec<i64>> {
        let addresses: Vec<u64> = reads.iter_mut().map(|(_, slot)| address(slot)).collect();
        let (keys, room): (Vec<_>, Vec<_>) =
            reads.iter().map(|(key, slot)| (&**key, slot.len())).unzip();
        let arenas = arenas_of(reads.iter().map(|(_, slot)| slot));
        let codes = self.batch(&arenas, |calls| calls.get(&keys, &addresses, &room))?;
        self.shared.count(keys.len());
        counted(codes, keys.len()).inspect_err(|_| self.abandon())
    }

    /// Stores records: one call that asks which are there, one for all that are not. Those that
    /// replace others have calls of their own.
    fn write(&mut self, items: Vec<(Record, Arc<Told>)>) {
        let (replacing, new): (Vec<_>, Vec<_>) =
            items.into_iter().partition(|(record, _)| record.replace);
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
    fn put_records(
        &mut self,
        items: &mut [(Record, Arc<Told>)],
        replace: bool,
    ) -> Result<Vec<i64>> {
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
        self.shared.count(keys.len());
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

    /// Whether what has this key is a record of a newer version. One of ours has `len` bytes; what
    /// is shorter than the header that is asked for is no record.
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
    fn stretch(&mut self, stretch: Stretch) -> Result<Option<Piece>> {
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
        let whole = usize::try_from(whole).unwrap_or(usize::MAX);
        if len == 0 {
            return Ok(Some(Piece {
                slot,
                read: 0,
                whole,
            }));
        }
        let to = address(&mut slot);
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        let code = self.batch(&arenas_of([&slot]), |calls| {
            calls.piece(&key, to, start, len)
        })?;
        if !is_settled(code) {
            self.settle(vec![slot]);
            return Err(error_of(code));
        }
        let piece = |read| {
            let read = usize::try_from(read).map_or(len, |read: usize| read.min(len));
            Piece { slot, read, whole }
        };
        Ok(length_of(code)?.map(piece))
    }

    /// Closes the client where Mooncake may still use one of these slots; only then do they go
    /// back.
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

/// Where the bytes of a slot lie. Who holds the slot holds them, and nothing else of Rust looks at
/// them during a call.
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
        let error = first
            .take()
            .unwrap_or_else(|| Error::new(kind, text.clone()));
        answer.tell(Err(error));
    }
}
