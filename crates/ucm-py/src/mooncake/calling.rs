//! The one thread that calls Mooncake's client: it makes one call of what waits together
//! ([`client`](super::client)).
//!
//! There are two clients. The first lends this process's memory to the pool and moves nothing. The
//! second moves bytes: when one of its transfers failed midway, Mooncake may still write to its
//! buffers, so it is closed and set up anew, at no cost for what the first one lends.

use std::sync::Arc;

use pyo3::PyResult;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::{HostArena, Slot};
use ucm_infra::{Clock, begin_thread};

use super::client::{Client, Piece, Range, ReadReply, Reply, Shared, Work, Write};
use super::library::{
    Calls, FOUND, Handle, NO_VALUE, OK, Pool, WRONG_ARGUMENT, error_of, is_settled,
};

/// The least memory that Mooncake takes, bytes.
pub(super) const LEAST: u64 = 16 << 20;
/// Bytes for a client that moves no records: it looks up, or lends.
pub(super) const LEAST_BUFFER: u64 = LEAST;

/// Begins the thread; nothing is reached before [`Work::Open`].
pub(super) fn begin(pool: Pool, clock: Arc<dyn Clock>) -> Result<Client> {
    let shared = Arc::new(Shared::new(clock));
    let thread = Thread {
        shared: Arc::clone(&shared),
        pool,
        lender: None,
        mover: None,
    };
    let refused = |error| Error::from_io(error, "no thread can be begun for Mooncake's client");
    begin_thread("ucm-mooncake-py", move || thread.run()).map_err(refused)?;
    Ok(Client::of(shared))
}

/// The state of the thread.
struct Thread {
    shared: Arc<Shared>,
    pool: Pool,
    lender: Option<Handle>,
    mover: Option<Mover>,
}

/// The client that moves bytes, and the memory it knows of.
struct Mover {
    handle: Handle,
    registered: Vec<Arc<HostArena>>,
}

impl Thread {
    /// Works until the queue is closed.
    fn run(mut self) {
        while let Some(works) = self.shared.next() {
            self.work(works);
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

    /// Does this work, which is all of one sort.
    fn work(&mut self, works: Vec<Work>) {
        let (mut exist, mut read, mut new, mut replacing) = (vec![], vec![], vec![], vec![]);
        let (mut remove, mut lengths) = (vec![], vec![]);
        for work in works {
            match work {
                Work::Open(reply) => reply.send(self.open()),
                Work::Exist(keys, reply) => exist.push((keys, reply)),
                Work::Read(reads, reply) => read.push((reads, reply)),
                Work::Write(write, reply) if write.replace => replacing.push((write, reply)),
                Work::Write(write, reply) => new.push((write, reply)),
                Work::Remove(keys, reply) => remove.push((keys, reply)),
                Work::Lengths(keys, reply) => lengths.push((keys, reply)),
                Work::Piece(range, reply) => reply.send(self.piece(range)),
            }
        }
        self.of_keys(
            exist,
            |calls, keys| calls.exist(keys),
            |codes| match codes.iter().find(|&&code| code < OK) {
                Some(&code) => Err(error_of(code)),
                None => Ok(codes.iter().map(|&code| code == FOUND).collect()),
            },
        );
        self.of_keys(
            remove,
            |calls, keys| calls.remove(keys),
            |codes| Ok(codes.iter().filter(|&&code| code == OK).count()),
        );
        self.of_keys(
            lengths,
            |calls, keys| calls.lengths(keys),
            |codes| codes.iter().map(|&code| length_of(code)).collect(),
        );
        if !read.is_empty() {
            self.read(read);
        }
        if !new.is_empty() {
            self.put(new, false);
        }
        if !replacing.is_empty() {
            self.put(replacing, true);
        }
    }

    /// Sets up what is missing, and checks that the master answers.
    fn open(&mut self) -> Result<()> {
        self.batch(&[], |_| Ok(()))
    }

    /// Makes calls for one batch, whose slots lie in these arenas; sets up the client if need be.
    /// If Python raised, the client is closed: it may still be at work.
    fn batch<T>(
        &mut self,
        arenas: &[Arc<HostArena>],
        work: impl FnOnce(&Calls<'_>) -> PyResult<T>,
    ) -> Result<T> {
        let mover = self.mover()?;
        let unknown = arenas.iter().filter(|arena| !has(&mover.registered, arena));
        let unknown: Vec<_> = unknown.cloned().collect();
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
            Ok(None) => {
                let text = "Mooncake's client has lost its master";
                Err(Error::new(ErrorKind::Io, text))
            }
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
                let lent = self.pool.lent;
                self.lender = Some(Handle::set_up(&self.pool, &host, lent, LEAST_BUFFER)?);
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
    fn of_keys<T>(
        &mut self,
        items: Vec<(Vec<String>, Reply<T>)>,
        call: impl FnOnce(&Calls<'_>, &[&str]) -> PyResult<Vec<i64>>,
        interpret: impl Fn(&[i64]) -> Result<T>,
    ) {
        if items.is_empty() {
            return;
        }
        let keys = items.iter().flat_map(|(keys, _)| keys);
        let keys: Vec<&str> = keys.map(String::as_str).collect();
        let answered = self.batch(&[], |calls| call(calls, &keys));
        match answered.and_then(|codes| counted(codes, keys.len())) {
            Ok(codes) => {
                let mut codes = &codes[..];
                for (keys, reply) in items {
                    let (own, others) = codes.split_at(keys.len());
                    reply.send(interpret(own));
                    codes = others;
                }
            }
            Err(error) => refuse(items.into_iter().map(|(_, reply)| reply), &error),
        }
    }

    /// Reads values with one call.
    fn read(&mut self, items: Vec<(Vec<(String, Slot)>, ReadReply)>) {
        let (mut reads, mut replies) = (Vec::new(), Vec::new());
        for (own, reply) in items {
            replies.push((own.len(), reply));
            reads.extend(own);
        }
        let codes = match self.get(&mut reads) {
            Ok(codes) => codes,
            Err(error) => {
                drop(reads);
                return refuse(replies.into_iter().map(|(_, reply)| reply), &error);
            }
        };
        let mut unsettled = Vec::new();
        let mut done = Vec::new();
        for ((key, slot), code) in reads.into_iter().zip(codes) {
            done.push(match u64::try_from(code) {
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
        let mut done = done.into_iter();
        for (count, reply) in replies {
            reply.send(Ok(done.by_ref().take(count).collect()));
        }
        self.settle(unsettled);
    }

    /// As much of a value as its slot has room for, and the length of all of it: one that is longer
    /// than a record of ours may be that of a writer that keeps side shards behind the KV.
    fn beginning(&mut self, key: String, slot: Slot) -> Result<(Slot, u64)> {
        let (start, len) = (0, slot.len());
        let range = Range {
            key,
            slot,
            start,
            len,
        };
        match self.piece(range)? {
            Some(Piece { slot, read, whole }) if read == len => Ok((slot, whole)),
            Some(_) => {
                let text = "this value was replaced while it was read";
                Err(Error::new(ErrorKind::Busy, text))
            }
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

    /// Stores values: one call that finds which are there, unless they are replaced, and one for
    /// all that are not.
    fn put(&mut self, mut items: Vec<(Write, Reply<(Slot, bool)>)>, replace: bool) {
        let codes = match self.put_values(&mut items, replace) {
            Ok(codes) => codes,
            Err(error) => return refuse(items.into_iter().map(|(_, reply)| reply), &error),
        };
        let mut unsettled = Vec::new();
        for ((Write { slot, .. }, reply), code) in items.into_iter().zip(codes) {
            reply.send(match code {
                FOUND | OK => Ok((slot, code == OK)),
                code => {
                    if !is_settled(code) {
                        unsettled.push(slot);
                    }
                    Err(error_of(code))
                }
            });
        }
        self.settle(unsettled);
    }

    /// For each value 0 where it was stored, [`FOUND`] where there is one, or an error.
    fn put_values(
        &mut self,
        items: &mut [(Write, Reply<(Slot, bool)>)],
        replace: bool,
    ) -> Result<Vec<i64>> {
        let addresses: Vec<u64> = items
            .iter_mut()
            .map(|(write, _)| address(&mut write.slot))
            .collect();
        let writes: Vec<&Write> = items.iter().map(|(write, _)| write).collect();
        let keys: Vec<&str> = writes.iter().map(|write| &*write.key).collect();
        let arenas = arenas_of(writes.iter().map(|write| &write.slot));
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
            let lengths: Vec<usize> = absent.iter().map(|&n| writes[n].len).collect();
            let put = calls.put(&own, &some(&addresses), &lengths, replace)?;
            for (&n, code) in absent.iter().zip(put) {
                codes[n] = code;
            }
            Ok(codes)
        })?;
        self.shared.count(keys.len());
        counted(codes, keys.len()).inspect_err(|_| self.abandon())
    }

    /// Reads a piece of a value; none where there is no such value.
    fn piece(&mut self, range: Range) -> Result<Option<Piece>> {
        let Range {
            key,
            mut slot,
            start,
            len,
        } = range;
        let whole = self.batch(&[], |calls| calls.length(&key))?;
        let Some(whole) = length_of(whole)? else {
            return Ok(None);
        };
        let len = usize::try_from(whole.saturating_sub(start)).map_or(len, |left| left.min(len));
        if len == 0 {
            let read = 0;
            return Ok(Some(Piece { slot, read, whole }));
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

/// The length of a value from its code; none where there is no such value.
fn length_of(code: i64) -> Result<Option<u64>> {
    match u64::try_from(code) {
        Ok(len) => Ok(Some(len)),
        Err(_) => match error_of(code) {
            error if error.kind() == ErrorKind::NotFound => Ok(None),
            error => Err(error),
        },
    }
}

/// The answers, if there is one for each key.
fn counted(codes: Vec<i64>, expected: usize) -> Result<Vec<i64>> {
    if codes.len() == expected {
        return Ok(codes);
    }
    let text = "Mooncake's client gave a wrong number of answers";
    Err(Error::new(ErrorKind::Io, text))
}

/// Where the bytes of a slot lie. They belong to its owner, and nothing else of Rust reads or
/// writes them during a call.
fn address(slot: &mut Slot) -> u64 {
    slot.as_mut_slice().as_mut_ptr() as u64
}

/// Sends all of these the same error.
fn refuse<T>(replies: impl Iterator<Item = Reply<T>>, error: &Error) {
    for reply in replies {
        reply.send(Err(error.clone()));
    }
}
