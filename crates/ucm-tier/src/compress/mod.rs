//! The compression stage: records go to the medium below in a form that takes less room, and come back to the byte.
//!
//! A [`Backend`] around one other. A write is encoded by a thread of the medium's, in the slot it came in, and handed on; a
//! read is decoded by the thread that has read it, before anybody sees it. What the medium holds may be of both kinds, record
//! by record. The parts:
//!
//! * [`planes`], [`layers`]: the codec; the header of the stored form is the business of [`ucm_record`];
//! * [`coding`]: a record to its stored form and back.
//!
//! What was read is judged twice: here as it was stored, and by whoever asked as it is used, by the checksums that were
//! taken when it left the device. Stored bytes that are damaged are handed on as they are, to be refused as such.

mod coding;
mod layers;
mod planes;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, DType, Error, ErrorKind, Identity, Part, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, LANE_LOAD, MonotonicTime, Notify};
use ucm_io::{IoJob, IoPool};
use ucm_record::{Codec, RecordLayout};

use crate::backend::{
    Backend, BlockRead, Compression, Done, Features, Flush, Listed, LocallyVisible, MediumStats, Outcome,
    Presence, Quarantined, ReadDone, WriteOptions, Written,
};
use layers::Coder;

/// Different lengths that stored records may have, about: an index of places keeps a table of them.
const LENGTHS: u64 = 256;

/// What the stage needs to know.
pub struct CompressConfig {
    /// Where things lie in the records.
    pub record: RecordLayout,
    /// Whose KV it is.
    pub identity: Identity,
    /// Which part of a block.
    pub part: Part,
    /// The store, as its log lines name it.
    pub writer: u64,
    /// The threads of the medium below, which encode what they are about to write.
    pub io: Arc<IoPool>,
}

/// Compresses for the medium below it.
pub struct CompressBackend {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

struct Shared {
    record: RecordLayout,
    identity: Identity,
    part: Part,
    writer: u64,
    codec: Codec,
    granule: u64,
    clock: Arc<dyn Clock>,
    /// As many as threads work at once, at most.
    tools: Mutex<Vec<Tools>>,
    most_tools: usize,
    counts: Counts,
    /// Records that are being encoded, rung when one was; and whether somebody waits for what was handed over by now.
    encoding: AtomicUsize,
    encoded: Notify,
    hurried: AtomicBool,
}

/// What one thread works with.
struct Tools {
    /// Room for a record.
    scratch: Vec<u8>,
    coder: Coder,
}

#[derive(Default)]
struct Counts {
    encoded: AtomicU64,
    as_is: AtomicU64,
    decoded: AtomicU64,
    undecodable: AtomicU64,
    raw_bytes: AtomicU64,
    stored_bytes: AtomicU64,
}

impl CompressBackend {
    /// Puts the stage before `inner`, whose segments may hold records in another form. `Config` where there is nothing to
    /// work with.
    pub fn new(config: CompressConfig, inner: Arc<dyn Backend>, clock: Arc<dyn Clock>) -> Result<Self> {
        if inner.memory().is_some() {
            let wrong = "memory is faster than any codec; Compress stands before a stage of segments";
            return Err(Error::new(ErrorKind::Config, wrong).with("below", inner.name()));
        }
        let shared = Arc::new(Shared {
            codec: codec_of(&config.record),
            granule: (config.record.payload_len() as u64 / LENGTHS).next_multiple_of(ucm_core::PAGE),
            record: config.record,
            identity: config.identity,
            part: config.part,
            writer: config.writer,
            clock,
            tools: Mutex::default(),
            most_tools: config.io.width(LANE_LOAD),
            counts: Counts::default(),
            encoding: AtomicUsize::new(0),
            encoded: Notify::new(),
            hurried: AtomicBool::new(false),
        });
        Ok(Self { inner, shared })
    }
}

impl CompressBackend {
    /// A record that the medium below has read: one that is compressed is decoded.
    fn decoded(&self, id: BlockId, read: ReadDone) -> Result<ReadDone> {
        match coding::is_encoded(&read) {
            true => self.shared.decode(id, read),
            false => Ok(read),
        }
    }
}

/// The codec for elements of this type. Layers that are no whole number of them are taken byte by byte.
fn codec_of(record: &RecordLayout) -> Codec {
    let width = match record.dtype() {
        DType::F16 | DType::Bf16 => 2,
        DType::F32 => 4,
        _ => 1,
    };
    let layer = record.layer_data(0).len() as u64;
    let mut codecs = [Codec::planes(width), Codec::planes(1)].into_iter().flatten();
    codecs.find(|codec| codec.fits(layer)).unwrap_or(Codec::AS_IS)
}

impl Shared {
    /// Tells the medium that somebody waits, once it was handed all that was being encoded.
    fn hurry_on(&self, inner: &dyn Backend) {
        if self.encoding.load(Ordering::SeqCst) == 0 && self.hurried.swap(false, Ordering::SeqCst) {
            inner.flush(Flush::Soon);
        }
    }

    fn with_tools<T>(&self, work: impl FnOnce(&mut Tools) -> T) -> Result<T> {
        let kept = self.tools.lock().pop();
        let mut tools = match kept {
            Some(tools) => tools,
            None => Tools {
                scratch: vec![0; self.record.kv_len()],
                coder: Coder::new(self.record.layer_data(0).len())?,
            },
        };
        let result = work(&mut tools);
        let mut kept = self.tools.lock();
        if kept.len() < self.most_tools {
            kept.push(tools);
        }
        Ok(result)
    }
}

impl Backend for CompressBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let (width, inner) = (self.shared.codec.width(), self.inner.open(deadline)?);
        Ok(format!("compressed in {width} byte planes, into {inner}"))
    }

    /// Parts are of the record, not of its shorter form.
    fn features(&self) -> Features {
        Features {
            reads_parts: false,
            ..self.inner.features()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.inner.lookup(io, ids, stop_at_missing)
    }

    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        self.inner.runs(reads, threads)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let ids: Vec<_> = run.iter().map(|read| read.id).collect();
        let read = self.inner.read(io, run).into_iter();
        let decoded = read.zip(ids).map(|(outcome, id)| match outcome {
            Outcome::Came(Ok(read)) => Outcome::Came(self.decoded(id, read)),
            outcome => outcome,
        });
        decoded.collect()
    }

    fn look(&self, deadline: MonotonicTime, done: Done<()>) {
        self.inner.look(deadline, done);
    }

    fn write(&self, io: &IoJob, id: BlockId, mut slot: Slot, options: WriteOptions, done: Done<Written>) {
        if !options.replace && self.inner.is_published(id) {
            return self.inner.write(io, id, slot, options, done);
        }
        let shared = &self.shared;
        shared.encoding.fetch_add(1, Ordering::SeqCst);
        let len = shared.encode(&mut slot, options);
        self.inner
            .write(io, id, slot, WriteOptions { len, ..options }, done);
        shared.encoding.fetch_sub(1, Ordering::SeqCst);
        shared.encoded.notify();
        shared.hurry_on(&*self.inner);
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        self.inner.touch(ids, deadline);
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        self.inner.delete(io, ids)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        self.inner.list(io)
    }

    fn is_published(&self, id: BlockId) -> bool {
        self.inner.is_published(id)
    }

    fn early(&self) -> LocallyVisible {
        self.inner.early()
    }

    fn flush(&self, how: Flush) {
        self.shared.hurried.store(true, Ordering::SeqCst);
        if how != Flush::Soon {
            self.inner.flush(how);
        }
        self.shared.hurry_on(&*self.inner);
    }

    fn quarantine(&self, id: BlockId, done: Done<Quarantined>) {
        self.inner.quarantine(id, done);
    }

    fn stats(&self) -> MediumStats {
        let counts = &self.shared.counts;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let compression = Compression {
            records_compressed: get(&counts.encoded),
            records_as_is: get(&counts.as_is),
            records_decompressed: get(&counts.decoded),
            records_undecodable: get(&counts.undecodable),
            bytes_compressed: get(&counts.raw_bytes),
            bytes_stored: get(&counts.stored_bytes),
        };
        MediumStats {
            compression: Some(compression),
            ..self.inner.stats()
        }
    }

    /// What waits to be encoded goes down first, as far as the time for that goes.
    fn close(&self, drain: Duration) {
        let (shared, now) = (&self.shared, self.shared.clock.now());
        let (until, quarter) = (now.after(drain), now.after(drain / 4));
        loop {
            let seen = shared.encoded.seen();
            if shared.encoding.load(Ordering::SeqCst) == 0 || shared.clock.now() >= quarter {
                break;
            }
            shared.clock.sleep(&shared.encoded, seen, Some(quarter));
        }
        self.inner.close(until.since(shared.clock.now()));
    }
}
