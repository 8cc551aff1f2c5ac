//! The memory tier: records kept in a region of shared memory that every process of the host can
//! read.
//!
//! A process that stores writes one region ([`ucm_device::SharedRegion`]) and reads those of the
//! others of its namespace; one that only looks up (the scheduler) has none of its own. A record
//! that was found is copied into a slot of the reader's own and verified there, by generation and
//! checksums. An [`eviction`] policy chooses what is evicted when the region is full.
//!
//! * Lookups read memory and nothing else. A thread lists the registry about once a second.
//! * A record is *published* when it lies in the region: others of this host find it. A medium
//!   below is not this backend's business: evicted records are passed to the caller that writes
//!   them there ([`Memory::on_evicted`]).
//! * A record being copied out, written down or otherwise pinned ([`MemoryBackend::pin`]) is not
//!   evicted.
//! * A process that dies leaves a file whose lock is free, which the next scan of another one
//!   removes; its memory is freed with the last process that maps it.
//!
//! A record of side shards alone has a slot like any other, so a store with a durable medium keeps
//! it there and not here.
//!
//! What a cached block costs beside its record, rounded up to pages: 48 to 64 bytes in the region,
//! and in its writer 12 for slots and times and what its policy needs (some 30 with LRU, 90 with
//! S3-FIFO); some 40 more while it is only locally visible.
//!
//! `touch` reaches the region of this process alone: no process writes what another one reads. So a
//! read counts as a use too, and a scheduler that knows of uses on the device reports them to its
//! workers.
//!
//! # Locally visible records
//! A scheduler on this host sees the records of a region by itself, as soon as it has found the
//! region, so [`Local::locally_visible`] names own records only while the region is not announced.
//! One on another host sees none of them: for an engine that spans hosts
//! [`MemoryConfig::scheduler_elsewhere`] has all of them named.

pub mod eviction;
mod peer_regions;
mod tier;

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::{MachineMemory, Pinned, SharedRegion, Slot};
use ucm_infra::{Clock, Lane, MonotonicTime};
use ucm_io::{IoJob, IoOptions, IoPool};

use crate::backend::{
    self, Backend, BlockRead, Evicted, Features, InPlace, Lent, Listed, Local, LocallyVisible,
    MediumStats, Memory, Outcome, Parts, Presence, ReadDone, WriteOptions, Written,
};
use crate::quota::Capacity;
pub use eviction::Policy;
use peer_regions::PeerRegions;
use tier::Tier;
pub use tier::{MemoryConfig, MemoryCounts};

/// The bytes of one process's region: as configured, or a share of the memory of machine and
/// container, divided among the `processes` of this host that will each have one. `Config` when
/// they cannot be had now.
pub fn cache_bytes(asked: Capacity, processes: u32, memory: &MachineMemory) -> Result<NonZeroU64> {
    let processes = u64::from(processes.max(1));
    let bytes = match asked {
        Capacity::Bytes(bytes) => bytes.get(),
        Capacity::Percent(_) => asked.bytes(memory.total) / processes,
    };
    memory.check("cache_size", bytes.saturating_mul(processes))?;
    let text = "cache_size is nothing; give bytes or a percentage above 0";
    NonZeroU64::new(bytes).ok_or_else(|| Error::new(ErrorKind::Config, text))
}

/// Records in memory that the host shares.
pub struct MemoryBackend {
    tier: Arc<Tier>,
    peers: Arc<PeerRegions>,
    pool: Arc<IoPool>,
    clock: Arc<dyn Clock>,
}

impl MemoryBackend {
    /// Makes the region (untouched memory) and starts the threads. `Config` when `capacity` holds
    /// less than 4 records, `Io` when the system refuses memory or threads.
    pub fn new(config: MemoryConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let threads = config.threads.max(1);
        let tier = Tier::new(config, Arc::clone(&clock))?;
        let lane = |name, max_running| Lane {
            name,
            capacity: QUEUE,
            max_running,
        };
        let (load, dump) = (lane("load", threads), lane("dump", threads));
        let options = IoOptions {
            name: "ucm-memory",
            lanes: vec![load, lane("lookup", 1), dump, lane("space", 1)],
            max_replacements: threads,
            clock: Arc::clone(&clock),
            ..IoOptions::with_workers(threads)
        };
        let pool = IoPool::psync(false, &options)?;
        let peers = PeerRegions::start(&tier, Arc::clone(&clock))?;
        Ok(Self {
            tier,
            peers,
            pool,
            clock,
        })
    }

    /// Keeps a copy of a sealed record. `InvalidInput` when it does not have the length of one,
    /// `Busy` when every slot is in use, `Unsupported` without an own region. Copies on the calling
    /// thread.
    pub fn insert(&self, id: BlockId, record: &[u8], ordinal: u32) -> Result<Written> {
        self.tier.put(id, record, ordinal, false)
    }

    /// Whether a record is there, here or in another process of the host. Reads memory only.
    pub fn contains(&self, id: BlockId) -> bool {
        self.tier.holds(id) || self.peers.contains(id)
    }

    /// Copies a record to the start of `out` and returns its length; `None` if it is not there, was
    /// evicted during the copy, or is longer. The bytes are a hint until their checksums are
    /// verified.
    pub fn copy_out(&self, id: BlockId, out: &mut [u8]) -> Option<usize> {
        let whole = 0..out.len();
        let len = self.copy_parts(id, &[whole], out)?;
        (len <= out.len()).then_some(len)
    }

    /// Holds a record of the own region where it is, to be read in place; it stays readable there
    /// if it is removed.
    pub fn pin(&self, id: BlockId) -> Option<Pinned> {
        self.tier.pin(id)
    }

    /// Counters.
    pub fn counts(&self) -> MemoryCounts {
        MemoryCounts {
            neighbours: self.peers.count() as u64,
            ..self.tier.counts()
        }
    }

    /// The number of the own region, as in the name of its file below the registry.
    pub fn region(&self) -> Option<u64> {
        self.tier.region.as_ref().map(|region| region.nonce())
    }

    /// Scans for regions of other processes at once. Does not wait.
    pub fn look_around(&self) {
        self.peers.look();
    }

    /// The threads that copy.
    pub fn pool(&self) -> &Arc<IoPool> {
        &self.pool
    }
}

/// Most jobs that wait in one lane.
const QUEUE: usize = 1 << 16;

impl MemoryBackend {
    /// Lends a record of the own region, or copies one into its slot: all of it, or the few pages
    /// that a side shard takes.
    fn copy(&self, io: &IoJob, read: BlockRead) -> Result<ReadDone> {
        let (id, mut slot) = (read.id, read.slot);
        let lent = match read.in_place {
            InPlace::Never => None,
            InPlace::Region | InPlace::Anywhere => self.tier.lend(id),
        };
        let (mut brought, mut stored_len) = (0, lent.as_ref().map(|record| record.len()));
        let whole = 0..slot.len();
        let Parts { steps, mut arrived } =
            read.parts.filter(|_| read.sides).unwrap_or_else(|| Parts {
                steps: vec![vec![whole]],
                arrived: Box::new(|_, _| None),
            });
        let mut steps = VecDeque::from(steps);
        while let Some(step) = steps.pop_front() {
            if lent.is_none() {
                stored_len = self.copy_parts(id, &step, slot.as_mut_slice());
            }
            let absent = || Error::new(ErrorKind::NotFound, "the record is not in memory any more");
            let len = stored_len.ok_or_else(|| absent().with("block", id))?;
            let lens = step
                .iter()
                .map(|part| part.end.min(len).saturating_sub(part.start));
            brought += lens.sum::<usize>();
            let record = lent.as_deref().unwrap_or(slot.as_slice());
            let part = backend::ReadPart::of(&step, record, len as u64);
            steps.extend(arrived(io, part));
        }
        Ok(ReadDone {
            slot,
            read: brought,
            stored_len: stored_len.unwrap_or(0) as u64,
            lent: lent.map(Lent::Region),
        })
    }

    /// Copies parts of a record from wherever it is, each to its place; the length of the record.
    fn copy_parts(&self, id: BlockId, parts: &[Range<usize>], out: &mut [u8]) -> Option<usize> {
        let own = self.tier.copy_parts(id, parts, out);
        own.or_else(|| self.peers.copy_parts(id, parts, out))
    }
}

impl Backend for MemoryBackend {
    /// Waits for the first scan of the registry.
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        self.peers.await_first(&*self.clock, deadline);
        Ok(format!("{}; {}", self.tier.words(), self.peers.words()))
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "memory",
            answers_at_once: true,
            writes_cached: true,
            own_touches: true,
            memory: Some(self),
            local: Some(self),
            ..Features::default()
        }
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        let views = self.peers.views();
        let mut answers = Vec::with_capacity(ids.len());
        for &id in ids {
            let there = self.tier.holds(id) || views.iter().any(|view| view.contains(id));
            answers.push(there.then_some(()).ok_or(MissReason::Absent));
            if stop_at_missing && !there {
                break;
            }
        }
        Ok(answers)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        run.into_iter()
            .map(|read| Outcome::Read(self.copy(io, read)))
            .collect()
    }

    fn write(&self, _: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        Memory::insert(self, id, &slot.as_slice()[..options.len], options)
    }

    fn touch(&self, ids: &[(BlockId, u32)], _deadline: MonotonicTime) {
        self.tier.touch(ids);
    }

    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        Ok(ids.iter().filter(|&&id| self.tier.delete(id)).count())
    }

    /// Records of the own region alone: those of others can be read, but only their writers can
    /// remove them.
    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        Ok(self.tier.list())
    }

    fn stats(&self) -> MediumStats {
        let counts = self.tier.counts();
        let records = counts.evicted.saturating_sub(counts.returned) + counts.deleted;
        MediumStats {
            usage: self.tier.usage(),
            records_removed: records,
            bytes_removed: records * self.tier.stride() as u64,
            blocks_touched: counts.touched,
            ..MediumStats::default()
        }
    }

    fn close(&self, drain: Duration) {
        let until = self.clock.now().after(drain);
        self.pool.shutdown(drain / 2);
        self.peers.stop();
        self.peers.await_end(&*self.clock, until);
    }
}

impl Local for MemoryBackend {
    fn locally_visible(&self) -> LocallyVisible {
        self.tier.locally_visible()
    }
}

impl Memory for MemoryBackend {
    fn insert(&self, id: BlockId, record: &[u8], options: WriteOptions) -> Result<Written> {
        if !options.replace && self.peers.contains(id) && !self.tier.holds(id) {
            return Ok(Written::Present);
        }
        self.tier.put(id, record, options.ordinal, options.replace)
    }

    fn has(&self, id: BlockId) -> bool {
        self.contains(id)
    }

    fn region(&self) -> Option<&Arc<SharedRegion>> {
        self.tier.region.as_ref()
    }

    /// Victims are verified before. At most an eighth of the slots and 64 are out at once; beyond
    /// that records are evicted without the hook.
    fn on_evicted(&self, hook: Evicted) -> bool {
        self.tier.hook.set(hook).is_ok()
    }
}

impl Drop for MemoryBackend {
    fn drop(&mut self) {
        self.peers.stop();
    }
}
