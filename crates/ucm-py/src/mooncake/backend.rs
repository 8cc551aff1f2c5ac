//! What the engine sees of a Mooncake pool.
//!
//! A value appears whole or not at all, is evicted by Mooncake when the pool is full, and goes with
//! the process whose memory it lies in; so there is neither index nor collector here, and what is
//! not there (any more) is a miss. Every record is verified by the engine as ever, also one that
//! was overwritten while it was read.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Part, Result};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, IoPool};
use ucm_record::{Expect, RecordLayout, verify_stored};
use ucm_tier::backend::{
    Backend, BlockRead, Done, Features, Indexed, Listed, MediumStats, Outcome, Presence, ReadDone,
    WriteOptions, Written,
};

use super::client::{Answer, Client, Record, Stored, Work};

/// Bytes of records that one thread asks for together.
const BATCH_BYTES: usize = 4 << 20;

/// Whose records these are, and what they look like.
pub(super) struct Whose {
    /// What every key begins with.
    pub(super) prefix: String,
    /// Digest of the identity.
    pub(super) namespace: [u8; 32],
    /// Which part of a block.
    pub(super) part: Part,
    /// Where things lie in a record.
    pub(super) layout: RecordLayout,
    /// Number of the store in the log.
    pub(super) writer: u64,
}

/// See the module.
pub(super) struct Mooncake {
    whose: Whose,
    client: Client,
    threads: Arc<IoPool>,
    /// The log was told of values in the form of safetensors.
    told: std::sync::Once,
}

impl Mooncake {
    pub(super) fn new(whose: Whose, client: Client, threads: Arc<IoPool>) -> Self {
        let told = std::sync::Once::new();
        Self {
            whose,
            client,
            threads,
            told,
        }
    }

    fn key(&self, id: BlockId) -> String {
        format!("{}{id}", self.whose.prefix)
    }

    fn keys(&self, ids: &[BlockId]) -> Vec<String> {
        ids.iter().map(|&id| self.key(id)).collect()
    }

    fn ask(&self, io: &IoJob, work: Work) -> Result<Answer> {
        io.still_wanted()?;
        self.client.ask(work, io.deadline())
    }

    /// What was read, or why it is none of ours.
    fn came(&self, id: BlockId, slot: Slot, len: usize) -> Result<ReadDone> {
        let read = len.min(slot.len()); // others may keep more beside the KV
        if is_safetensors(&slot.as_slice()[..read]) {
            let text = "this value is in the form of safetensors, which says neither whose it is \
                        nor whether it is \
                        whole; ucm keeps records of its own in Mooncake and does not read it";
            self.told
                .call_once(|| warn!(store = self.whose.writer, block = %id, "{text}"));
            return Err(Error::new(ErrorKind::Foreign, text).with("block", id));
        }
        Ok(ReadDone {
            slot,
            read,
            stored_len: len as u64,
            lent: None,
        })
    }

    fn store(
        &self,
        io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: &WriteOptions,
    ) -> Result<Written> {
        let record = Record {
            key: self.key(id),
            slot,
            len: options.len,
            replace: options.replace,
            read_back: options.read_back,
        };
        match self.ask(io, Work::Write(record))? {
            Answer::Stored(Stored::Published) => Ok(Written::Published),
            Answer::Stored(Stored::Present) => Ok(Written::Present),
            Answer::Stored(Stored::ReadBack(slot, len)) => {
                let expect = Expect {
                    id,
                    namespace: self.whose.namespace,
                    part: self.whose.part,
                    layout: &self.whose.layout,
                };
                let checked = verify_stored(&slot.as_slice()[..len], len as u64, &expect);
                Ok(checked.map_or_else(
                    |refusal| Written::Unsound(refusal.reason),
                    |_| Written::Published,
                ))
            }
            _ => Err(mixed_up()),
        }
    }
}

impl Backend for Mooncake {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        match self.client.ask(Work::Open, deadline)? {
            Answer::Opened => {
                Ok("Mooncake's client reaches its master; the pool evicts by itself".to_owned())
            }
            _ => Err(mixed_up()),
        }
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "mooncake",
            waits_by_itself: true,
            index: Some(self),
            ..Features::default()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], _stop_at_missing: bool) -> Result<Vec<Presence>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        match self.ask(io, Work::Exist(self.keys(ids)))? {
            Answer::Exist(there) => {
                let presence = |there: bool| there.then_some(()).ok_or(MissReason::Absent);
                Ok(there.into_iter().map(presence).collect())
            }
            _ => Err(mixed_up()),
        }
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let ids: Vec<BlockId> = run.iter().map(|read| read.id).collect();
        let reads = run
            .into_iter()
            .map(|read| (self.key(read.id), read.slot))
            .collect();
        let came = match self.ask(io, Work::Read(reads)) {
            Ok(Answer::Read(came)) => came,
            Ok(_) => ids.iter().map(|_| Err(mixed_up())).collect(),
            Err(error) => {
                let again = || Error::new(error.kind(), error.message().to_owned());
                ids.iter().map(|_| Err(again())).collect()
            }
        };
        let outcome = |(id, came): (BlockId, Result<(Slot, usize)>)| {
            let came = came.map_err(|error| error.with("block", id));
            Outcome::Came(came.and_then(|(slot, len)| self.came(id, slot, len)))
        };
        ids.into_iter().zip(came).map(outcome).collect()
    }

    fn write(
        &self,
        io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        done: Done<Written>,
    ) {
        done(self.store(io, id, slot, &options));
    }

    /// Mooncake notes by itself what is read.
    fn touch(&self, _ids: &[(BlockId, u32)], _deadline: MonotonicTime) {}

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        match self.ask(io, Work::Remove(self.keys(ids)))? {
            Answer::Removed(count) => Ok(count),
            _ => Err(mixed_up()),
        }
    }

    /// Its client cannot list what there is.
    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "Mooncake's client lists no keys",
        ))
    }

    fn stats(&self) -> MediumStats {
        let (calls, records) = self.client.counts();
        MediumStats {
            more: vec![("mooncake_calls", calls), ("mooncake_records", records)],
            ..MediumStats::default()
        }
    }

    fn close(&self, drain: Duration) {
        let left = self.client.close(drain);
        self.threads.shutdown(left);
    }
}

impl Indexed for Mooncake {
    /// Runs of some megabytes, so that one call brings many records and every thread has some.
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        let together = (BATCH_BYTES / self.whose.layout.record_len().max(1)).max(1);
        let share = reads.len().div_ceil(threads.max(1)).clamp(1, together);
        let numbers: Vec<usize> = (0..reads.len()).collect();
        numbers.chunks(share).map(<[usize]>::to_vec).collect()
    }

    fn look(&self, _deadline: MonotonicTime, done: Done<()>) {
        done(Ok(())); // every read asks the pool
    }

    fn is_published(&self, _id: BlockId) -> bool {
        false // what was there may have been evicted since
    }

    fn knows(&self, _id: BlockId) -> bool {
        true // it can only be asked
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

pub(super) fn mixed_up() -> Error {
    Error::internal("Mooncake's client answered another question than it was asked")
}
