//! A server as tools see it.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, LANE_SPACE, SystemClock};
use ucm_io::{IoJob, IoOptions, IoPool};

use super::address::Address;
use super::connections::{Connections, Traffic};
use super::keys::path_of;
use super::{RedisConfig, TOGETHER, command};
use crate::lengths::LONGEST_RECORD;
use crate::place::{Item, Place, Room};

/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much later than it was listed something must have been used to count as used since.
const USED_SINCE_NS: u64 = 1_000_000_000;

/// See the module.
pub(crate) struct RedisPlace {
    config: RedisConfig,
    connections: Connections,
    pool: Arc<IoPool>,
    clock: Arc<dyn Clock>,
}

impl RedisPlace {
    /// A place with these values, of any namespace. It is reached at once.
    pub(crate) fn open(config: RedisConfig) -> Result<Self> {
        let addresses = Address::parse_all(&config.addresses, &config.login)?;
        let (clock, tls) = (SystemClock::shared(), config.tls.clone());
        let connections = Connections::new(addresses, tls, 1, Arc::clone(&clock))?;
        connections.discover(clock.now().after(PATIENCE))?;
        Ok(Self {
            config,
            connections,
            pool: IoPool::psync(false, &IoOptions::with_workers(1))?,
            clock,
        })
    }

    fn job(&self) -> IoJob {
        self.pool.here(LANE_SPACE, self.clock.now().after(PATIENCE))
    }

    /// The answers to one command about each key: a number; -1 for what is no value.
    fn numbers(&self, io: &IoJob, keys: &[String], name: &str) -> Result<Vec<i64>> {
        let commands = keys.iter().map(|key| command(name, key));
        let numbers = self.connections.numbers(io, commands)?;
        let number = |number: Result<Option<i64>>| Ok(number?.unwrap_or(-1));
        numbers.into_iter().map(number).collect()
    }

    /// The last use of a value that has this many milliseconds to live.
    fn used_ns(&self, left: i64) -> u64 {
        let left = Duration::from_millis(u64::try_from(left).unwrap_or(0));
        let unused = self.config.expire_after.saturating_sub(left).as_nanos();
        let unused = u64::try_from(unused).unwrap_or(u64::MAX);
        self.clock.wall_ns().saturating_sub(unused)
    }
}

impl Place for RedisPlace {
    fn room(&self) -> Result<Room> {
        let info = self.connections.info(&self.job())?;
        Ok(Room {
            limit: info.limit.unwrap_or(0),
            used: info.used,
            words: format!("Redis {}, {}", info.version, info.bound()),
        })
    }

    fn list(&self) -> Result<Vec<Item>> {
        let io = self.job();
        let pattern = format!("{}:*", self.config.prefix);
        let keys = self.connections.scan(&io, &pattern)?.into_iter();
        let keys = keys.filter_map(|key| String::from_utf8(key).ok());
        let keys: Vec<String> = keys.collect();
        let mut items = Vec::with_capacity(keys.len());
        for keys in keys.chunks(TOGETHER) {
            let left = self.numbers(&io, keys, "PTTL")?;
            let lengths = self.numbers(&io, keys, "STRLEN")?;
            for ((key, left), len) in keys.iter().zip(left).zip(lengths) {
                items.push(Item {
                    path: path_of(&self.config.prefix, key).unwrap_or_default(),
                    name: key.clone(),
                    len: u64::try_from(len).unwrap_or(0),
                    used_ns: self.used_ns(left),
                    version: String::new(),
                });
            }
        }
        items.sort_by(|one, other| one.name.cmp(&other.name));
        items.dedup_by(|one, other| one.name == other.name); // a node may list a key twice
        Ok(items)
    }

    fn read(&self, name: &str, start: u64, len: u64) -> Result<Option<Vec<u8>>> {
        let len = len.min(LONGEST_RECORD); // the server may have reported a false length
        let (mut range, end) = (command("GETRANGE", name), start.saturating_add(len));
        range.arg(start).arg(end.saturating_sub(1));
        let commands = [command("STRLEN", name), range];
        let answers = self
            .connections
            .ask(&self.job(), Traffic::Record, commands)?;
        match <[Result<Value>; 2]>::try_from(answers) {
            Ok([Ok(Value::Int(0)), _]) => Ok(None),
            Ok([Ok(_), Ok(Value::BulkString(bytes))]) => Ok(Some(bytes)),
            Ok([Err(error), _] | [_, Err(error)]) if error.kind() != ErrorKind::Foreign => {
                Err(error)
            }
            _ => Ok(None),
        }
    }

    fn remove(&self, item: &Item) -> Result<bool> {
        if path_of(&self.config.prefix, &item.name).is_none() {
            let text = "this key is none of ours and is not removed";
            return Err(Error::new(ErrorKind::InvalidInput, text).with("key", &item.name));
        }
        let (io, key) = (self.job(), [item.name.clone()]);
        let left = self.numbers(&io, &key, "PTTL")?;
        let used = left.first().map_or(0, |left| self.used_ns(*left));
        if used > item.used_ns.saturating_add(USED_SINCE_NS) {
            return Ok(false);
        }
        Ok(self.numbers(&io, &key, "UNLINK")? == [1])
    }
}
