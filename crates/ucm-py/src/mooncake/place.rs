//! A pool as tools see it.
//!
//! Mooncake's client lists no keys, and the master's HTTP service, which answers its metrics, does;
//! everything else goes through the client. The master does not report when a value was last used.

use std::sync::Arc;
use std::time::Duration;

use pyo3::PyResult;
use pyo3::prelude::*;
use ucm_core::{Error, ErrorKind, Result};
use ucm_device::{ArenaOptions, HostArena, SlotPool};
use ucm_infra::{Clock, MonotonicTime, SystemClock};
use ucm_media::place::{Item, Place, Room, record_path};

use super::calling;
use super::client::{Client, Work};
use super::library::{Pool, attached};

/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that are read at once, and at most as many reads.
const PIECE: usize = 4 << 20;
const READS: usize = 2;
/// Keys whose lengths are read at once.
const TOGETHER: usize = 256;
/// Longest answer of the HTTP service that is read, bytes.
const LONGEST: usize = 1 << 30;

/// See the module.
pub(super) struct MooncakePlace {
    client: Client,
    /// `host:port` of the master's HTTP service.
    http: String,
    slots: Arc<SlotPool>,
    clock: Arc<dyn Clock>,
}

impl MooncakePlace {
    /// The place of this pool, whose master answers HTTP at `http`. It is reached at once.
    pub(super) fn open(pool: Pool, http: String) -> Result<Self> {
        let clock: Arc<dyn Clock> = SystemClock::shared();
        let arena = HostArena::with(PIECE * READS, ArenaOptions::default())?;
        let place = Self {
            client: calling::begin(pool, Arc::clone(&clock))?,
            http,
            slots: SlotPool::new(arena, PIECE)?,
            clock,
        };
        place.client.call(Work::Open, place.deadline())?;
        Ok(place)
    }

    fn deadline(&self) -> MonotonicTime {
        self.clock.now().after(PATIENCE)
    }

    /// The answer of the HTTP service.
    fn get(&self, path: &str) -> Result<String> {
        let asked = attached(|py| {
            let client = py.import("http.client")?;
            let connection = client.getattr("HTTPConnection")?.call1((
                &self.http,
                py.None(),
                PATIENCE.as_secs(),
            ))?;
            let asked = ask(&connection, path);
            connection.call_method0("close")?;
            asked
        });
        match asked {
            Ok((200, text)) => Ok(text),
            Ok((status, _)) => Err(self.no_http().with("status", status)),
            Err(error) => Err(self.no_http().caused_by(error)),
        }
    }

    fn no_http(&self) -> Error {
        let text = "the keys of a pool of Mooncake are listed by its master's HTTP service, which \
                    does not answer; give its \
                    address (its --metrics_port): --option master_http_address=host:port";
        Error::new(ErrorKind::Io, text).with("master_http_address", &self.http)
    }

    /// The length of each of these values; none where there is none.
    fn lengths(&self, keys: &[String]) -> Result<Vec<Option<u64>>> {
        let work = |reply| Work::Lengths(keys.to_vec(), reply);
        self.client.call(work, self.deadline())
    }
}

fn ask(connection: &Bound<'_, PyAny>, path: &str) -> PyResult<(u16, String)> {
    connection.call_method1("request", ("GET", path))?;
    let response = connection.call_method0("getresponse")?;
    let status = response.getattr("status")?.extract()?;
    let body: Vec<u8> = response.call_method1("read", (LONGEST,))?.extract()?;
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

impl Place for MooncakePlace {
    fn room(&self) -> Result<Room> {
        let metrics = self.get("/metrics")?;
        let gauge = |name: &str| {
            let line = |line: &str| line.strip_prefix(name)?.trim().parse::<f64>().ok();
            metrics
                .lines()
                .find_map(line)
                .map_or(0, |value| value as u64)
        };
        Ok(Room {
            limit: gauge("master_total_capacity_bytes "),
            used: gauge("master_allocated_bytes "),
            words: "a pool of Mooncake, which evicts by itself, keeps no manifests and does not \
                    say when something was used"
                .to_owned(),
        })
    }

    fn list(&self) -> Result<Vec<Item>> {
        let mut keys: Vec<String> = self
            .get("/get_all_keys")?
            .lines()
            .filter(|key| !key.is_empty())
            .map(str::to_owned)
            .collect();
        keys.sort_unstable();
        keys.dedup(); // one key with several copies
        let mut items = Vec::with_capacity(keys.len());
        for keys in keys.chunks(TOGETHER) {
            for (key, len) in keys.iter().zip(self.lengths(keys)?) {
                items.extend(len.map(|len| Item {
                    path: path_of(key).unwrap_or_default(),
                    name: key.clone(),
                    len,
                    used_ns: 0,
                    version: String::new(),
                }));
            }
        }
        Ok(items)
    }

    fn read(&self, name: &str, start: u64, len: u64) -> Result<Option<Vec<u8>>> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let read = self
            .client
            .read(&self.slots, name, start, len, self.deadline());
        Ok(read?.map(|(_, bytes)| bytes))
    }

    fn remove(&self, item: &Item) -> Result<bool> {
        if path_of(&item.name).is_none() {
            let text = "this key is none of ours and is not removed";
            return Err(Error::new(ErrorKind::InvalidInput, text).with("key", &item.name));
        }
        let keys = vec![item.name.clone()];
        if self.lengths(&keys)? != [Some(item.len)] {
            return Ok(false); // removed, or replaced by another
        }
        let removed = self
            .client
            .call(|reply| Work::Remove(keys, reply), self.deadline())?;
        Ok(removed == 1)
    }
}

/// Where a record with this key would lie below a root; none for a key that is not ours.
fn path_of(key: &str) -> Option<String> {
    let (namespace, id) = key.strip_prefix("ucm:")?.split_once(':')?;
    record_path(namespace, id)
}
