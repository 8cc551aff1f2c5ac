//! The values of a Mooncake pool.
//!
//! A value appears whole or not at all, is evicted by Mooncake when the pool is full, and is lost
//! with the process whose memory it lies in; so there is neither index nor collector here, and an
//! evicted value is a miss.

use std::sync::{Arc, Once};
use std::time::Duration;

use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::{ArenaOptions, HostArena, Slot, SlotPool};
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_media::backend::{Listed, MediumStats, ReadDone};
use ucm_media::values::{Existing, Get, Put, Values, ValuesOpened, ValuesTraits};
use ucm_record::RecordHeader;

use super::client::{Client, Reply, Work, Write};

/// Threads that load and dump: as many batches wait for the client at once, and it takes what waits
/// together.
pub(super) const THREADS: usize = 32;

/// See the module.
pub(super) struct MooncakeValues {
    /// The prefix of every key.
    prefix: String,
    /// Number of the store in the log.
    writer: u64,
    client: Client,
    /// For headers of records that are in the way of a dump.
    headers: Arc<SlotPool>,
    /// A value in the form of safetensors was logged.
    warned: Once,
}

impl MooncakeValues {
    pub(super) fn new(prefix: String, writer: u64, client: Client) -> Result<Self> {
        let arena = HostArena::with(RecordHeader::LONGEST * THREADS, ArenaOptions::default())?;
        Ok(Self {
            prefix,
            writer,
            client,
            headers: SlotPool::new(arena, RecordHeader::LONGEST)?,
            warned: Once::new(),
        })
    }

    fn key(&self, id: BlockId) -> String {
        format!("{}{id}", self.prefix)
    }

    fn keys(&self, ids: &[BlockId]) -> Vec<String> {
        ids.iter().map(|&id| self.key(id)).collect()
    }

    fn call<T>(&self, io: &IoJob, work: impl FnOnce(Reply<T>) -> Work) -> Result<T> {
        io.still_wanted()?;
        self.client.call(work, io.deadline())
    }

    /// The value that was read, if it can be one of ours.
    fn read_done(&self, id: BlockId, slot: Slot, stored_len: u64) -> Result<ReadDone> {
        // others may keep more beside the KV
        let read = usize::try_from(stored_len).map_or(slot.len(), |len| len.min(slot.len()));
        if is_safetensors(&slot.as_slice()[..read]) {
            let text = "this value is in the form of safetensors, which says neither whose it is \
                        nor whether it is whole; ucm keeps records of its own in Mooncake and does \
                        not read it";
            self.warned
                .call_once(|| warn!(store = self.writer, block = %id, "{text}"));
            return Err(Error::new(ErrorKind::Foreign, text));
        }
        Ok(ReadDone {
            slot,
            read,
            stored_len,
            lent: None,
        })
    }
}

impl Values for MooncakeValues {
    fn traits(&self) -> ValuesTraits {
        ValuesTraits {
            name: "mooncake",
            batch: 4 << 20,
            exists_first: usize::MAX, // a put that does not replace checks it with the same call
            assumed: Duration::ZERO,
            manages_itself: true,
        }
    }

    fn open(&self, deadline: MonotonicTime) -> Result<ValuesOpened> {
        self.client.call(Work::Open, deadline)?;
        Ok(ValuesOpened {
            text: "Mooncake's client reaches its master; the pool evicts by itself".to_owned(),
            is_cluster: false,
        })
    }

    fn exists(&self, io: &IoJob, ids: &[BlockId]) -> Result<Vec<Result<Existing>>> {
        let keys = self.keys(ids);
        let existing = |there: bool| {
            Ok(if there {
                Existing::Unmeasured
            } else {
                Existing::Absent
            })
        };
        let there = self.call(io, |reply| Work::Exist(keys, reply))?;
        Ok(there.into_iter().map(existing).collect())
    }

    fn get(&self, io: &IoJob, gets: Vec<Get>) -> Vec<Result<ReadDone>> {
        let ids: Vec<BlockId> = gets.iter().map(|get| get.id).collect();
        let read = |get: Get| (self.key(get.id), get.slot);
        let reads = gets.into_iter().map(read).collect();
        let done = match self.call(io, |reply| Work::Read(reads, reply)) {
            Ok(done) => done,
            Err(error) => return ids.iter().map(|_| Err(error.clone())).collect(),
        };
        let done = done.into_iter().zip(ids).map(|(done, id)| {
            let (slot, len) = done?;
            self.read_done(id, slot, len)
        });
        done.collect()
    }

    fn start(&self, io: &IoJob, id: BlockId, len: usize) -> Result<Option<(u64, Vec<u8>)>> {
        io.still_wanted()?;
        let (key, deadline) = (self.key(id), io.deadline());
        self.client.read(&self.headers, &key, 0, len, deadline)
    }

    fn put(&self, io: &IoJob, id: BlockId, slot: Slot, len: usize, replace: bool) -> Result<Put> {
        let write = Write {
            key: self.key(id),
            slot,
            len,
            replace,
        };
        let (slot, stored) = self.call(io, |reply| Work::Write(write, reply))?;
        Ok(Put { slot, stored })
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let keys = self.keys(ids);
        self.call(io, |reply| Work::Remove(keys, reply))
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        let text = "Mooncake's client lists no keys";
        Err(Error::new(ErrorKind::Unsupported, text))
    }

    fn stats(&self) -> MediumStats {
        let (calls, records) = self.client.counts();
        MediumStats {
            more: vec![("mooncake_calls", calls), ("mooncake_records", records)],
            ..MediumStats::default()
        }
    }

    fn close(&self, drain: Duration) -> Duration {
        self.client.close(drain)
    }
}

/// Whether a value begins as a file of safetensors: the length of a JSON text, and that text.
fn is_safetensors(value: &[u8]) -> bool {
    let Some((len, text)) = value.split_first_chunk::<8>() else {
        return false;
    };
    let len = u64::from_le_bytes(*len);
    text.starts_with(b"{\"") && len <= text.len() as u64
}
