//! Redis: one value per record, header and all, under a key that names namespace and id ([`keys`]).
//!
//! The server makes a value appear whole or not at all, removes it when its time is over
//! (`expire_after`) and refuses it when it is full (`maxmemory`), so there is neither index nor
//! collector here. Every record is verified by the engine as ever. A lookup asks the server for
//! lengths, all of a batch with one round trip, and only for what is not known to be there anyway
//! ([`known`]). [`connections`] has the client; the caller waits for it with the deadline of the
//! job.

mod address;
mod bounded;
mod connections;
mod info;
mod keys;
mod known;
mod place;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{Cmd, Value};
use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Part, Result, limits};
use ucm_device::Slot;
use ucm_infra::{Clock, LANE_LOOKUP, LANE_SPACE, MonotonicTime};
use ucm_io::{IoJob, IoPool};
use ucm_quota::layout::Manifest;
use ucm_quota::{Pause, Usage};
use ucm_record::{Expect, RecordHeader, verify_stored};

use crate::backend::{
    Backend, BlockRead, Done, Features, InPlace, Indexed, Lent, Listed, MediumStats, Outcome,
    Presence, ReadDone, WriteOptions, Written,
};
use crate::lengths::Lengths;
use crate::recency::Recency;
use crate::scope::Scope;
use address::Address;
pub use address::{Login, TlsFiles};
use bounded::IN_FLIGHT;
use connections::{Connections, Traffic, of_write};
use info::ServerInfo;
use keys::Keys;
use known::Known;
pub(crate) use place::RedisPlace;

/// Bytes of small records that one thread reads together.
const BATCH_BYTES: usize = 512 << 10;
/// Bytes of a record from which on it is asked for before it is sent.
const ASK_FIRST: usize = 128 << 10;
/// Bytes of a `SET` beside its key and its value.
const OF_SET: usize = 64;
/// Records that one step of a listing asks for.
const TOGETHER: usize = 1024;
/// How old what is known of the server's memory may be before somebody looks again, and how long a
/// look may take.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_secs(5);
/// How often the manifest is written again, so that it outlives the records.
const DESCRIBE_AGAIN: Duration = Duration::from_secs(600);

/// What the backend needs to know.
pub struct RedisConfig {
    /// Addresses as a user writes them: one server, or nodes of one cluster.
    pub addresses: Vec<String>,
    /// Who logs in.
    pub login: Login,
    /// Files for TLS.
    pub tls: TlsFiles,
    /// What every key begins with.
    pub prefix: String,
    /// Whose records it keeps.
    pub scope: Scope,
    /// How long a record lives after its last use, whole seconds.
    pub expire_after: Duration,
    /// Connections for records.
    pub connections: usize,
}

/// See the module.
pub struct RedisBackend {
    shared: Arc<Shared>,
    pool: Arc<IoPool>,
}

/// Shared with jobs in the background.
struct Shared {
    config: RedisConfig,
    clock: Arc<dyn Clock>,
    keys: Keys,
    connections: Connections,
    known: Known,
    lengths: Lengths,
    recency: Recency,
    pause: Mutex<Pause>,
    server: Mutex<Seen>,
}

/// What the server said of itself, and when.
#[derive(Default)]
struct Seen {
    info: ServerInfo,
    looked: MonotonicTime,
    described: MonotonicTime,
    /// The log was told that nothing but time bounds what is stored.
    warned: bool,
}

impl RedisBackend {
    /// A backend over these threads; nothing is touched before [`Backend::open`]. `Config` for
    /// addresses that are none.
    pub fn new(config: RedisConfig, pool: Arc<IoPool>, clock: Arc<dyn Clock>) -> Result<Self> {
        let addresses = config
            .addresses
            .iter()
            .map(|written| Address::parse(written, &config.login));
        let addresses: Vec<Address> = addresses.collect::<Result<_>>()?;
        if addresses.is_empty() {
            let text =
                "storage_backends names no server; write redis://host:port, or rediss:// for TLS";
            return Err(Error::new(ErrorKind::Config, text));
        }
        let (tls, connections) = (config.tls.clone(), config.connections);
        let shared = Shared {
            keys: Keys::new(&config.prefix, &config.scope.identity.namespace())?,
            connections: Connections::new(addresses, tls, connections, Arc::clone(&clock))?,
            known: Known::default(),
            lengths: config.scope.lengths(),
            recency: Recency::default(),
            pause: Mutex::default(),
            server: Mutex::default(),
            config,
            clock,
        };
        Ok(Self {
            shared: Arc::new(shared),
            pool,
        })
    }
}

impl Backend for RedisBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let info = self.shared.connections.discover(deadline)?;
        let is_cluster = info.is_cluster;
        self.shared.note(info);
        if !self.shared.config.scope.lookup_only {
            let now = self.shared.clock.now();
            let until = match is_cluster {
                true => now.after(deadline.since(now) / 2),
                false => deadline,
            };
            match self.shared.describe(&self.pool.here(LANE_SPACE, until)) {
                // The node that has this document may be the one that is gone; a use of a block
                // tries again.
                Err(error)
                    if is_cluster && matches!(error.kind(), ErrorKind::Io | ErrorKind::Timeout) => {
                }
                described => described?,
            }
        }
        Ok(self.shared.words())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "redis",
            waits_by_itself: true,
            index: Some(self),
            ..Features::default()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], _stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.shared.lookup(io, ids)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        self.shared.read(io, run)
    }

    fn write(
        &self,
        io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        done: Done<Written>,
    ) {
        let written = self
            .shared
            .write(io, id, &slot.as_slice()[..options.len], &options);
        drop(slot); // before the answer
        done(written);
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        let due = self.shared.recency.due(ids, self.shared.clock.wall_ns());
        if due.is_empty() || self.shared.config.scope.lookup_only {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let ids: Vec<BlockId> = due.into_iter().map(|(id, _)| id).collect();
        let touch = move |io: &IoJob| shared.touch(io, &ids);
        self.pool.job(LANE_SPACE, deadline, touch, |_| {});
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        ids.iter().for_each(|&id| self.shared.known.forget(id));
        let removed = self
            .shared
            .ask_each(io, ids, |key| question("UNLINK", &key))?;
        Ok(removed.into_iter().filter(|removed| *removed == 1).count())
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        self.shared.list(io)
    }

    fn stats(&self) -> MediumStats {
        self.look_again();
        let shared = &self.shared;
        let usage = {
            let server = shared.server.lock();
            Usage {
                used: server.info.used,
                capacity: server.info.limit.unwrap_or(0),
                counted: true,
                paused: shared.pause.lock().check(shared.clock.now()).is_err(),
                ..Usage::default()
            }
        };
        MediumStats {
            usage,
            blocks_touched: shared.recency.touched(),
            ..MediumStats::default()
        }
    }

    fn close(&self, drain: Duration) {
        self.pool.shutdown(drain);
    }
}

impl RedisBackend {
    /// Looks in the background what the server says of its memory, once in a while.
    fn look_again(&self) {
        let now = self.shared.clock.now();
        {
            let mut server = self.shared.server.lock();
            if server.looked == MonotonicTime::default() || now.since(server.looked) < LOOK_AGAIN {
                return; // it was never reached, or just looked at
            }
            server.looked = now;
        }
        let shared = Arc::clone(&self.shared);
        let look = move |io: &IoJob| {
            let info = shared.connections.info(io)?;
            shared.note(info);
            Ok(())
        };
        self.pool.job(LANE_LOOKUP, now.after(LOOK), look, |_| {});
    }
}

impl Indexed for RedisBackend {
    /// Small records in runs that one round trip brings, large ones each by itself, so that every
    /// thread has some.
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        let together = (BATCH_BYTES / self.shared.config.scope.record.record_len().max(1)).max(1);
        let share = reads.len().div_ceil(threads.max(1)).clamp(1, together);
        let numbers: Vec<usize> = (0..reads.len()).collect();
        numbers.chunks(share).map(<[usize]>::to_vec).collect()
    }

    fn look(&self, _deadline: MonotonicTime, done: Done<()>) {
        done(Ok(())); // every read asks the server
    }

    fn is_published(&self, _id: BlockId) -> bool {
        false // what is known may have gone since, and a dump that is not made must not be a hit
    }

    fn knows(&self, id: BlockId) -> bool {
        self.shared.known.is(id, self.shared.clock.now())
    }
}

impl Shared {
    fn note(&self, info: ServerInfo) {
        let mut server = self.server.lock();
        (server.info, server.looked) = (info, self.clock.now());
    }

    /// What is used and why, for the log.
    fn words(&self) -> String {
        let mut server = self.server.lock();
        let info = &server.info;
        let (version, bound) = (&info.version, info.bound());
        let what = if info.is_cluster {
            "a cluster"
        } else {
            "one server"
        };
        let (connections, expire) = (self.config.connections, self.config.expire_after.as_secs());
        let words = format!(
            "Redis {version}, {what}, {connections} connections for blocks, {bound}, blocks live \
             {expire} s after their last \
             use"
        );
        let unbounded = info.limit.is_none() && !info.version.is_empty();
        if unbounded
            && !self.config.scope.lookup_only
            && !std::mem::replace(&mut server.warned, true)
        {
            warn!(
                store = self.config.scope.writer,
                "the server has no maxmemory: nothing but expire_after ({expire} s) bounds what is \
                 stored there; give it one"
            );
        }
        words
    }

    /// Adds what this writer has to its part's manifest.
    fn describe(&self, io: &IoJob) -> Result<()> {
        let (config, key) = (&self.config, self.keys.manifest(self.config.scope.part));
        let mut manifest = self
            .manifest(io, config.scope.part)?
            .unwrap_or_else(|| Manifest::new(&config.scope.identity, config.scope.labels.clone()));
        manifest.add(
            config.scope.part,
            &config.scope.record,
            &config.scope.geometry,
        );
        self.lengths.learn_from(&manifest);
        let expire = config.expire_after.max(2 * DESCRIBE_AGAIN);
        match self.put(io, &key, &manifest.to_bytes(), expire, true) {
            // A server that takes no writes now can be read all the same, and may take them again.
            Err(error) if !matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Unhealthy) => {
                return Err(error);
            }
            _ => {}
        }
        self.server.lock().described = self.clock.now();
        Ok(())
    }

    /// The manifest of a part, if it can be read.
    fn manifest(&self, io: &IoJob, part: Part) -> Result<Option<Manifest>> {
        let key = self.keys.manifest(part);
        let answer = self.connections.ask_one(
            io,
            Traffic::Record,
            start_of(&key, limits::MAX_DOCUMENT_BYTES),
        );
        match answer {
            Ok(Value::BulkString(stored)) => Ok(serde_json::from_slice(&stored).ok()),
            Ok(_) => Ok(None),
            // a value of another type makes way
            Err(error) if error.kind() == ErrorKind::Foreign => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads which lengths records may have, where one was met whose length is not known and it is
    /// time for that: those of writers that keep other side shards. Whether there is news.
    fn learns_lengths(&self, io: &IoJob) -> bool {
        if !self.lengths.is_look_due(self.clock.now()) {
            return false;
        }
        let mut is_news = false;
        for part in self.lengths.parts() {
            // Where that fails, those that are not known stay misses for now.
            if let Ok(Some(manifest)) = self.manifest(io, part) {
                self.lengths.learn_from(&manifest);
                is_news = true;
            }
        }
        is_news
    }

    /// Stores a value; false where it was not to be replaced and there is one.
    fn put(
        &self,
        io: &IoJob,
        key: &str,
        value: &[u8],
        expire: Duration,
        replace: bool,
    ) -> Result<bool> {
        // With room for what follows the value, which would otherwise be copied once more to make
        // some.
        let mut put = Cmd::with_capacity(6, key.len() + value.len() + OF_SET);
        put.arg("SET")
            .arg(key)
            .arg(value)
            .arg("EX")
            .arg(expire.as_secs().max(1));
        if !replace {
            put.arg("NX");
        }
        let answer = self.connections.ask_one(io, Traffic::Record, put);
        Ok(answer.map_err(of_write)? != Value::Nil)
    }

    /// Asks the same of each record, for answers that are numbers; -1 where what has its key is no
    /// record.
    fn ask_each(
        &self,
        io: &IoJob,
        ids: &[BlockId],
        ask: impl Fn(String) -> Cmd,
    ) -> Result<Vec<i64>> {
        self.answers(io, ids, ask)?.into_iter().collect()
    }

    /// The same, each with its own error.
    fn answers(
        &self,
        io: &IoJob,
        ids: &[BlockId],
        ask: impl Fn(String) -> Cmd,
    ) -> Result<Vec<Result<i64>>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let questions = ids.iter().map(|&id| ask(self.keys.record(id)));
        let answers = self.connections.ask(io, Traffic::Short, questions)?;
        let number = |answer: Result<Value>| match answer {
            Ok(Value::Int(number)) => Ok(number),
            Ok(_) => Ok(-1),
            Err(error) if error.kind() == ErrorKind::Foreign => Ok(-1),
            Err(error) => Err(error),
        };
        Ok(answers.into_iter().map(number).collect())
    }

    /// Whether a value of so many bytes is one of our records whole and with KV.
    fn presence(&self, len: i64) -> Presence {
        match u64::try_from(len) {
            Ok(0) => Err(MissReason::Absent),
            Ok(len) => self.lengths.presence(len),
            Err(_) => Err(MissReason::WrongLength),
        }
    }

    /// Whether a value of so many bytes can be one of our records whole, with KV or without.
    fn is_ours(&self, len: i64) -> bool {
        u64::try_from(len).is_ok_and(|len| len > 0 && self.lengths.is_ours(len))
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId]) -> Result<Vec<Presence>> {
        let known = self.known.are(ids, self.clock.now());
        let unknown = ids.iter().zip(&known).filter(|(_, known)| !**known);
        let unknown: Vec<BlockId> = unknown.map(|(id, _)| *id).collect();
        let lengths = self.answers(io, &unknown, |key| question("STRLEN", &key))?;
        // What the node of a cluster that is gone has is a miss, unless nothing else is known.
        if let Some(Err(error)) = lengths.first()
            && lengths.len() == ids.len()
            && lengths.iter().all(Result::is_err)
        {
            return Err(error.clone());
        }
        let presence = |len: &Result<i64>| match len {
            Ok(len) => self.presence(*len),
            Err(_) => Err(MissReason::IoError),
        };
        let mut asked: Vec<Presence> = lengths.iter().map(presence).collect();
        if asked.contains(&Err(MissReason::WrongLength)) && self.learns_lengths(io) {
            asked = lengths.iter().map(presence).collect();
        }
        let there = unknown
            .iter()
            .zip(&asked)
            .filter(|(_, there)| there.is_ok());
        self.known.learn(there.map(|(id, _)| *id), self.clock.now());
        let mut asked = asked.into_iter();
        let mut place = |known: bool| match known {
            true => Ok(()),
            false => asked.next().unwrap_or(Err(MissReason::Absent)),
        };
        Ok(known.into_iter().map(&mut place).collect())
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let longest = self.lengths.longest();
        let all: Vec<usize> = (0..run.len()).collect();
        let mut answers = self.ask_for(io, &run, &all, longest);
        // A writer that keeps other side shards may have added a length since the manifest was
        // read.
        let longer = |&n: &usize| match &answers[n] {
            Ok(Value::BulkString(start)) => {
                let len = start.len() as u64;
                len > longest && !self.lengths.is_record(len)
            }
            _ => false,
        };
        let longer: Vec<usize> = all.into_iter().filter(longer).collect();
        if !longer.is_empty() && self.learns_lengths(io) {
            let again = self.ask_for(io, &run, &longer, self.lengths.longest());
            longer
                .into_iter()
                .zip(again)
                .for_each(|(n, answer)| answers[n] = answer);
        }
        let ended = |(read, answer)| Outcome::Came(self.came(read, answer));
        run.into_iter().zip(answers).map(ended).collect()
    }

    /// Answers for these reads of a run: as much of a record as there is room for where that is
    /// known to be less than all, else all of it, or one byte more than the longest record has of a
    /// value that is none.
    fn ask_for(
        &self,
        io: &IoJob,
        run: &[BlockRead],
        which: &[usize],
        longest: u64,
    ) -> Vec<Result<Value>> {
        let question = |&n: &usize| {
            let read = &run[n];
            let len = match self.wants_part(read) {
                true => read.slot.len(),
                false => usize::try_from(longest + 1).unwrap_or(usize::MAX),
            };
            start_of(&self.keys.record(read.id), len)
        };
        // Never more with one round trip than may be on the way at once.
        let most = (IN_FLIGHT / 2) as u64 / longest.max(1);
        let together = usize::try_from(most).unwrap_or(usize::MAX).max(1);
        let ask = |which: &[usize]| {
            let questions = which.iter().map(question);
            let answers = self.connections.ask(io, Traffic::Record, questions);
            answers.unwrap_or_else(|error| vec![Err(error); which.len()])
        };
        which.chunks(together).flat_map(ask).collect()
    }

    fn wants_part(&self, read: &BlockRead) -> bool {
        read.slot.len() < self.config.scope.record.kv_len()
    }

    /// What was answered, in the slot, unless the reader takes it as it is.
    fn came(&self, read: BlockRead, answer: Result<Value>) -> Result<ReadDone> {
        let BlockRead {
            id,
            mut slot,
            in_place,
            ..
        } = read;
        let mut record = match answer? {
            Value::BulkString(record) if !record.is_empty() => record,
            Value::Nil | Value::BulkString(_) => {
                self.known.forget(id);
                let text = "the server does not have this record (any more)";
                return Err(Error::new(ErrorKind::NotFound, text).with("block", id));
            }
            _ => {
                return Err(Error::internal(
                    "the server answered a question for a record with something else",
                ));
            }
        };
        self.known.learn([id], self.clock.now());
        let stored_len = record.len() as u64;
        record.truncate(slot.len()); // others may keep more beside the KV
        let len = record.len();
        let lent = if in_place == InPlace::Anywhere {
            Some(Lent::Answer(record))
        } else {
            slot.as_mut_slice()[..len].copy_from_slice(&record);
            None
        };
        Ok(ReadDone {
            slot,
            read: len,
            stored_len,
            lent,
        })
    }

    fn write(
        &self,
        io: &IoJob,
        id: BlockId,
        record: &[u8],
        options: &WriteOptions,
    ) -> Result<Written> {
        self.pause.lock().check(self.clock.now())?;
        let written = self.write_record(io, id, record, options);
        let now = self.clock.now();
        self.pause.lock().record(written.as_ref().err(), now);
        if let Ok(Written::Published | Written::Present) = written {
            self.known.learn([id], now);
        }
        written
    }

    /// Stores a record unless it is there; what has its name and is none makes way.
    fn write_record(
        &self,
        io: &IoJob,
        id: BlockId,
        record: &[u8],
        options: &WriteOptions,
    ) -> Result<Written> {
        let (key, expire) = (self.keys.record(id), self.config.expire_after);
        if !options.replace && (record.len() >= ASK_FIRST || self.known.is(id, self.clock.now())) {
            let there = self.ask_each(io, &[id], |key| question("STRLEN", &key))?;
            if there.into_iter().any(|len| self.is_ours(len)) {
                return Ok(Written::Present);
            }
        }
        if options.replace || !self.put(io, &key, record, expire, false)? {
            if let Some(stays) = self.stays(io, &key, options.replace)? {
                return Ok(stays);
            }
            self.put(io, &key, record, expire, true)?;
        }
        self.recency
            .published(id, options.ordinal, self.clock.wall_ns());
        if options.read_back {
            let back =
                self.connections
                    .ask_one(io, Traffic::Record, start_of(&key, record.len() + 1))?;
            return Ok(self
                .verify(id, &back)
                .map_or_else(Written::Unsound, |()| Written::Published));
        }
        Ok(Written::Published)
    }

    /// The outcome where what has this key is not replaced: a record of a newer version, or one
    /// that this store cannot read; or, unless it was `refused`, one that has the length of ours.
    fn stays(&self, io: &IoJob, key: &str, refused: bool) -> Result<Option<Written>> {
        let head = start_of(key, RecordHeader::LONGEST);
        let answers = self
            .connections
            .ask(io, Traffic::Record, [question("STRLEN", key), head])?;
        match <[Result<Value>; 2]>::try_from(answers) {
            Ok([Ok(Value::Int(len)), Ok(Value::BulkString(head))]) => {
                let newer = match RecordHeader::decode(&head) {
                    Ok(header) => {
                        // One that has as many bytes as it says is of a writer that keeps other
                        // side shards.
                        if u64::try_from(len).is_ok_and(|len| len == header.record_len) {
                            self.lengths.learn(header.record_len);
                        }
                        !header.codec.is_as_is() && !self.config.scope.shorter
                    }
                    Err(refusal) => refusal.reason == MissReason::NewerVersion,
                };
                if newer {
                    return Ok(Some(Written::InTheWay(MissReason::NewerVersion)));
                }
                Ok((!refused && self.is_ours(len)).then_some(Written::Present))
            }
            Ok([Err(error), _] | [_, Err(error)]) if error.kind() != ErrorKind::Foreign => {
                Err(error)
            }
            _ => Ok(None),
        }
    }

    /// Verifies a record that was just written, in whatever form it is stored.
    fn verify(&self, id: BlockId, back: &Value) -> Result<(), MissReason> {
        let Value::BulkString(record) = back else {
            return Err(MissReason::Absent);
        };
        let expect = Expect {
            id,
            namespace: *self.config.scope.identity.digest(),
            part: self.config.scope.part,
            layout: &self.config.scope.record,
        };
        verify_stored(record, record.len() as u64, &expect)?;
        Ok(())
    }

    /// These were used: their time begins anew.
    fn touch(&self, io: &IoJob, ids: &[BlockId]) -> Result<()> {
        let seconds = self.config.expire_after.as_secs().max(1);
        let touched = self.ask_each(io, ids, |key| {
            let mut expire = question("EXPIRE", &key);
            expire.arg(seconds);
            expire
        })?;
        let (there, gone): (Vec<_>, Vec<_>) = ids
            .iter()
            .zip(touched)
            .partition(|(_, touched)| *touched == 1);
        self.recency.count(there.len() as u64);
        self.known
            .learn(there.into_iter().map(|(id, _)| *id), self.clock.now());
        gone.into_iter().for_each(|(id, _)| self.known.forget(*id));
        let described = self.server.lock().described;
        if self.clock.now().since(described) >= DESCRIBE_AGAIN {
            self.describe(io)?;
        }
        Ok(())
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        let keys = self.connections.scan(io, &self.keys.pattern())?;
        let ids: Vec<BlockId> = keys.iter().filter_map(|key| self.keys.id(key)).collect();
        let now = i64::try_from(self.clock.wall_ns()).unwrap_or(i64::MAX);
        let life = i64::try_from(self.config.expire_after.as_millis()).unwrap_or(i64::MAX);
        let mut listed = Vec::with_capacity(ids.len());
        for ids in ids.chunks(TOGETHER) {
            let lengths = self.ask_each(io, ids, |key| question("STRLEN", &key))?;
            let left = self.ask_each(io, ids, |key| question("PTTL", &key))?;
            for ((&id, len), left) in ids.iter().zip(lengths).zip(left) {
                let unused = life.saturating_sub(left).max(0); // milliseconds since its last use
                let len = u64::try_from(len).unwrap_or(0);
                if len > 0 {
                    let used_ns = now.saturating_sub(unused.saturating_mul(1_000_000));
                    listed.push(Listed { id, len, used_ns });
                }
            }
        }
        Ok(listed)
    }
}

/// A question about one key.
fn question(name: &str, key: &str) -> Cmd {
    let mut question = Cmd::with_capacity(2, name.len() + key.len());
    question.arg(name).arg(key);
    question
}

/// A question about the first `len` bytes of a value, all of it where it has no more; empty where
/// there is none.
fn start_of(key: &str, len: usize) -> Cmd {
    let mut start = question("GETRANGE", key);
    start.arg(0).arg(len.saturating_sub(1));
    start
}
