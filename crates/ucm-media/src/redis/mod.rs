//! Redis: one value per record, header and all, under a key that names namespace and id ([`keys`]).
//!
//! The server makes a value appear whole or not at all, removes it when its time is over
//! (`expire_after`) and refuses it when it is full (`maxmemory`), so there is neither index nor
//! collector here. [`RedisValues`] has the calls, [`connections`] the client; the caller waits with
//! the deadline of its job. What a value must be to be a record is decided above
//! ([`crate::values`]).

mod address;
mod bounded;
mod connections;
mod info;
mod keys;
mod place;

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Part, Result, limits};
use ucm_device::Slot;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::IoJob;

use crate::backend::{InPlace, Lent, Listed, MediumStats, ReadDone};
use crate::quota::Usage;
use crate::values::{DESCRIBE_AGAIN, Existing, Get, Put, Values, ValuesOpened, ValuesTraits};
use address::Address;
pub use address::{Login, TlsFiles};
use bounded::IN_FLIGHT;
use connections::{Connections, Traffic, of_write};
use info::ServerInfo;
use keys::Keys;
pub(crate) use place::RedisPlace;

/// Bytes of a `SET` beside its key and its value.
const OF_SET: usize = 64;
/// Keys that one step of a listing measures.
const TOGETHER: usize = 1024;

/// Where the values are and how they are kept.
#[derive(Clone)]
pub struct RedisConfig {
    /// Addresses as a user writes them: one server, or nodes of one cluster.
    pub addresses: Vec<String>,
    /// Name and password.
    pub login: Login,
    /// Files for TLS.
    pub tls: TlsFiles,
    /// The prefix of every key.
    pub prefix: String,
    /// The namespace of the records.
    pub namespace: String,
    /// How long a record lives after its last use, whole seconds.
    pub expire_after: Duration,
    /// Connections for records.
    pub connections: usize,
    /// Number of the store in the log; none for a store that writes nothing.
    pub writer: Option<u64>,
}

/// See the module.
pub struct RedisValues {
    config: RedisConfig,
    clock: Arc<dyn Clock>,
    keys: Keys,
    connections: Connections,
    info: Mutex<ServerInfo>,
}

impl RedisValues {
    /// Nothing is reached before [`Values::open`]. `Config` for a wrong address or prefix.
    pub fn new(config: RedisConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let addresses = Address::parse_all(&config.addresses, &config.login)?;
        let (tls, connections) = (config.tls.clone(), config.connections);
        Ok(Self {
            keys: Keys::new(&config.prefix, &config.namespace)?,
            connections: Connections::new(addresses, tls, connections, Arc::clone(&clock))?,
            info: Mutex::default(),
            config,
            clock,
        })
    }

    /// A text for the log: what is used, and why.
    fn describe(&self, info: &ServerInfo) -> String {
        let (version, bound) = (&info.version, info.bound());
        let what = match info.is_cluster {
            true => "a cluster",
            false => "one server",
        };
        let (connections, expire) = (self.config.connections, self.config.expire_after.as_secs());
        format!(
            "Redis {version}, {what}, {connections} connections for blocks, {bound}, blocks live \
             {expire} s after their last use"
        )
    }

    /// Warns if nothing but time bounds what is stored.
    fn warn_of_no_limit(&self, info: &ServerInfo) {
        let is_known = !info.version.is_empty();
        if let Some(store) = self.config.writer
            && info.limit.is_none()
            && is_known
        {
            let expire = self.config.expire_after.as_secs();
            warn!(
                store,
                "the server has no maxmemory: nothing but expire_after ({expire} s) bounds what is \
                 stored there; give it one"
            );
        }
    }

    /// The first bytes of each of these values, with one round trip.
    fn get_together(&self, io: &IoJob, gets: Vec<Get>) -> Vec<Result<ReadDone>> {
        let key = |get: &Get| self.keys.record(get.id);
        let commands = gets.iter().map(|get| start_of(&key(get), get.most));
        match self.connections.ask(io, Traffic::Record, commands) {
            Ok(answers) => gets.into_iter().zip(answers).map(filled).collect(),
            Err(error) => gets.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Stores a value; false where it was not to be replaced and there is one.
    fn set(
        &self,
        io: &IoJob,
        key: &str,
        value: &[u8],
        expire: Duration,
        replace: bool,
    ) -> Result<bool> {
        // With room for what follows the value, which would otherwise be copied once more to make
        // some.
        let mut set = Cmd::with_capacity(6, key.len() + value.len() + OF_SET);
        set.arg("SET").arg(key).arg(value);
        set.arg("EX").arg(expire.as_secs().max(1));
        if !replace {
            set.arg("NX");
        }
        let answer = self.connections.ask_one(io, Traffic::Record, set);
        Ok(answer.map_err(of_write)? != Value::Nil)
    }

    /// The answers to one command about each record: a number, or none where something else than a
    /// value has its key.
    fn numbers(
        &self,
        io: &IoJob,
        ids: &[BlockId],
        command: impl Fn(String) -> Cmd,
    ) -> Result<Vec<Result<Option<i64>>>> {
        let commands = ids.iter().map(|&id| command(self.keys.record(id)));
        self.connections.numbers(io, commands)
    }
}

impl Values for RedisValues {
    fn traits(&self) -> ValuesTraits {
        ValuesTraits {
            name: "redis",
            batch: 512 << 10,
            exists_first: 128 << 10,
            assumed: Duration::from_secs(30),
            manages_itself: false,
        }
    }

    fn open(&self, deadline: MonotonicTime) -> Result<ValuesOpened> {
        let info = self.connections.discover(deadline)?;
        let (text, is_cluster) = (self.describe(&info), info.is_cluster);
        let before = std::mem::replace(&mut *self.info.lock(), info.clone());
        if before.version.is_empty() {
            self.warn_of_no_limit(&info);
        }
        Ok(ValuesOpened { text, is_cluster })
    }

    fn exists(&self, io: &IoJob, ids: &[BlockId]) -> Result<Vec<Result<Existing>>> {
        let existing = |len: Result<Option<i64>>| {
            Ok(match len?.map(u64::try_from) {
                Some(Ok(0)) => Existing::Absent,
                Some(Ok(len)) => Existing::Len(len),
                _ => Existing::Foreign,
            })
        };
        let lengths = self.numbers(io, ids, |key| command("STRLEN", &key))?;
        Ok(lengths.into_iter().map(existing).collect())
    }

    fn get(&self, io: &IoJob, gets: Vec<Get>) -> Vec<Result<ReadDone>> {
        // Never more with one round trip than may be in flight at once.
        let longest = gets.iter().map(|get| get.most).max().unwrap_or(0);
        let together = (IN_FLIGHT / 2 / longest.max(1)).max(1);
        let mut gets = gets.into_iter().peekable();
        let mut done = Vec::new();
        while gets.peek().is_some() {
            let some = gets.by_ref().take(together).collect();
            done.extend(self.get_together(io, some));
        }
        done
    }

    fn start(&self, io: &IoJob, id: BlockId, len: usize) -> Result<Option<(u64, Vec<u8>)>> {
        let key = self.keys.record(id);
        let commands = [command("STRLEN", &key), start_of(&key, len)];
        let answers = self.connections.ask(io, Traffic::Record, commands)?;
        let mut answers = answers.into_iter();
        match (answers.next().transpose()?, answers.next().transpose()?) {
            (Some(Value::Int(len)), Some(Value::BulkString(start))) if len > 0 => {
                Ok(Some((u64::try_from(len).unwrap_or(0), start)))
            }
            _ => Ok(None),
        }
    }

    fn put(&self, io: &IoJob, id: BlockId, slot: Slot, len: usize, replace: bool) -> Result<Put> {
        let (key, expire) = (self.keys.record(id), self.config.expire_after);
        let stored = self.set(io, &key, &slot.as_slice()[..len], expire, replace)?;
        Ok(Put { slot, stored })
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let mut count = 0;
        for removed in self.numbers(io, ids, |key| command("UNLINK", &key))? {
            count += usize::from(removed? == Some(1));
        }
        Ok(count)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        let keys = self.connections.scan(io, &self.keys.pattern())?;
        let ids: Vec<BlockId> = keys.iter().filter_map(|key| self.keys.id(key)).collect();
        let now = i64::try_from(self.clock.wall_ns()).unwrap_or(i64::MAX);
        let life = i64::try_from(self.config.expire_after.as_millis()).unwrap_or(i64::MAX);
        let mut listed = Vec::with_capacity(ids.len());
        for ids in ids.chunks(TOGETHER) {
            let lengths = self.numbers(io, ids, |key| command("STRLEN", &key))?;
            let left = self.numbers(io, ids, |key| command("PTTL", &key))?;
            for ((&id, len), left) in ids.iter().zip(lengths).zip(left) {
                let len = u64::try_from(len?.unwrap_or(0)).unwrap_or(0);
                let unused_ms = life.saturating_sub(left?.unwrap_or(-1)).max(0);
                if len > 0 {
                    let used_ns = now.saturating_sub(unused_ms.saturating_mul(1_000_000));
                    listed.push(Listed { id, len, used_ns });
                }
            }
        }
        Ok(listed)
    }

    /// The time that each lives begins anew.
    fn touch(&self, io: &IoJob, ids: &[BlockId]) -> Result<Vec<bool>> {
        let seconds = self.config.expire_after.as_secs().max(1);
        let touched = self.numbers(io, ids, |key| {
            let mut expire = command("EXPIRE", &key);
            expire.arg(seconds);
            expire
        })?;
        let is_there = |touched: Result<_>| Ok(touched? == Some(1));
        touched.into_iter().map(is_there).collect()
    }

    fn manifest(&self, io: &IoJob, part: Part) -> Result<Option<Vec<u8>>> {
        let start = start_of(&self.keys.manifest(part), limits::MAX_DOCUMENT_BYTES);
        match self.connections.ask_one(io, Traffic::Record, start) {
            Ok(Value::BulkString(stored)) => Ok(Some(stored)),
            Ok(_) => Ok(None),
            // a value of another type is replaced
            Err(error) if error.kind() == ErrorKind::Foreign => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn put_manifest(&self, io: &IoJob, part: Part, manifest: &[u8]) -> Result<()> {
        let expire = self.config.expire_after.max(2 * DESCRIBE_AGAIN);
        let key = self.keys.manifest(part);
        self.set(io, &key, manifest, expire, true).map(drop)
    }

    fn refresh(&self, io: &IoJob) -> Result<()> {
        *self.info.lock() = self.connections.info(io)?;
        Ok(())
    }

    fn stats(&self) -> MediumStats {
        let info = self.info.lock();
        let usage = Usage {
            used: info.used,
            capacity: info.limit.unwrap_or(0),
            counted: true,
            ..Usage::default()
        };
        MediumStats {
            usage,
            ..MediumStats::default()
        }
    }
}

/// The value of a read, in its slot, unless the reader takes it as it is.
fn filled((get, answer): (Get, Result<Value>)) -> Result<ReadDone> {
    let Get {
        mut slot, in_place, ..
    } = get;
    let mut record = match answer? {
        Value::BulkString(record) if !record.is_empty() => record,
        Value::Nil | Value::BulkString(_) => {
            let text = "the server does not have this record (any more)";
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        _ => {
            let text = "the server answered the read of a record with something else";
            return Err(Error::internal(text));
        }
    };
    let stored_len = record.len() as u64;
    record.truncate(slot.len()); // others may keep more beside the KV
    let read = record.len();
    let lent = if in_place == InPlace::Anywhere {
        Some(Lent::Answer(record))
    } else {
        slot.as_mut_slice()[..read].copy_from_slice(&record);
        None
    };
    Ok(ReadDone {
        slot,
        read,
        stored_len,
        lent,
    })
}

/// A command about one key.
fn command(name: &str, key: &str) -> Cmd {
    let mut command = Cmd::with_capacity(2, name.len() + key.len());
    command.arg(name).arg(key);
    command
}

/// Reads the first `len` bytes of a value, all of it where it has no more; the answer is empty
/// where there is none.
fn start_of(key: &str, len: usize) -> Cmd {
    let mut start = command("GETRANGE", key);
    start.arg(0).arg(len.saturating_sub(1));
    start
}
