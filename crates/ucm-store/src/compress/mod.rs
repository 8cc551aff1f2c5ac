//! The compression stage: records go to the medium below in a form that takes less room, and come back to the byte.
//!
//! A [`Backend`] around one other. A write is encoded by threads of this stage's own, in the slot it came in, and handed
//! on; a read is decoded by them before anybody sees it. Who called never waits for the codec, no lock is held while it
//! works, and what the medium holds may be of both kinds, record by record. The parts:
//!
//! * [`planes`], [`layers`]: the codec; the header of the stored form is the business of [`crate::record`];
//! * [`worth`]: whether it pays, from what [`meter`] says of the medium and what the codec takes;
//! * [`jobs`]: what the threads do.
//!
//! What was read is judged twice: here as it was stored, and by whoever asked as it is used, by the checksums that were
//! taken when it left the device. Stored bytes that are damaged are handed on as they are, to be refused as such.

mod jobs;
mod layers;
pub mod meter;
mod planes;
#[cfg(test)]
mod tests;
pub mod worth;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, DType, Error, ErrorKind, Identity, Part, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, Lane, MAX_QUEUE, Mono, WorkerPool};

use crate::backend::{
    Backend, BlockRead, Compression, Done, Early, Flush, Listed, Presence, Quarantined, ReadDone, Usage,
    WriteOptions, Written,
};
use crate::events::{Event, Events, Level};
use crate::record::{Codec, RecordLayout};
use jobs::Given;
use layers::Coder;
use meter::Meter;
use worth::{Average, Figures, Next, When, Worth};

/// Lane of what is being loaded; first.
const LANE_DECODE: usize = 0;
/// Lane of what is being dumped.
const LANE_ENCODE: usize = 1;
/// Times a thread that hangs is replaced. None should: nothing here waits.
const REPLACEMENTS: usize = 1;
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
    /// When records are compressed.
    pub when: When,
    /// Threads that encode and decode. One of several is never given to encoding.
    pub threads: usize,
    /// Most records that wait for a thread, for each of the two.
    pub queue: usize,
    /// What measures the medium below.
    pub meter: Arc<Meter>,
}

/// Compresses for the medium below it.
pub struct CompressBackend {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
    pool: Arc<WorkerPool>,
}

struct Shared {
    record: RecordLayout,
    identity: Identity,
    part: Part,
    codec: Codec,
    granule: u64,
    threads: usize,
    meter: Arc<Meter>,
    clock: Arc<dyn Clock>,
    /// As many as threads at most.
    tools: Mutex<Vec<Tools>>,
    state: Mutex<State>,
    counts: Counts,
    events: Events,
    /// Records that are being encoded, and whether somebody waits for what was handed over by now.
    encoding: AtomicUsize,
    hurried: AtomicBool,
}

/// What one thread works with.
struct Tools {
    /// Room for a record.
    scratch: Vec<u8>,
    coder: Coder,
}

struct State {
    worth: Worth,
    /// Bytes of records by seconds of one thread.
    encode: Average,
    decode: Average,
    /// Bytes of records by bytes as stored, those that did not shrink included.
    ratio: Average,
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
        if inner.is_memory() {
            let wrong = "memory is faster than any codec; Compress stands before a stage of segments";
            return Err(Error::new(ErrorKind::Config, wrong));
        }
        let lane = |name, max_running| Lane {
            name,
            capacity: config.queue.clamp(1, MAX_QUEUE),
            max_running,
        };
        let threads = config.threads.max(1);
        let pool = WorkerPool::builder("ucm-compress")
            .size(threads)
            .lanes(&[lane("decode", threads), lane("encode", (threads - 1).max(1))])
            .max_replacements(REPLACEMENTS)
            .clock(Arc::clone(&clock))
            .build()?;
        let shared = Arc::new(Shared {
            codec: codec_of(&config.record),
            granule: (config.record.payload_len() as u64 / LENGTHS).next_multiple_of(ucm_core::PAGE),
            record: config.record,
            identity: config.identity,
            part: config.part,
            threads,
            meter: config.meter,
            clock,
            tools: Mutex::default(),
            state: Mutex::new(State {
                worth: Worth::new(config.when),
                encode: Average::default(),
                decode: Average::default(),
                ratio: Average::default(),
            }),
            counts: Counts::default(),
            encoding: AtomicUsize::new(0),
            hurried: AtomicBool::new(false),
            events: Events::default(),
        });
        Ok(Self { inner, shared, pool })
    }
}

impl CompressBackend {
    /// What the medium below is to call with a record that it read: one that is compressed is decoded first.
    fn decoding(&self, id: BlockId, deadline: Mono, done: Done<ReadDone>) -> Done<ReadDone> {
        let (shared, pool) = (Arc::clone(&self.shared), Arc::clone(&self.pool));
        Box::new(move |result| match result {
            Ok(read) if jobs::is_encoded(&read) => {
                let given = Given::new(read);
                let work = Arc::clone(&given);
                let decode = move || work.take().and_then(|read| shared.decode(id, read));
                let told = move |result: Result<Result<ReadDone>>| done(result.and_then(|read| read));
                if let Err(refused) = pool.offer(LANE_DECODE, deadline, decode, told) {
                    drop(given.take()); // the slot, before anybody is told
                    (refused.done)(Err(refused.error));
                }
            }
            result => done(result),
        })
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

    /// What is known now.
    fn figures(&self, state: &State) -> Figures {
        let encoding = self.threads.saturating_sub(1).max(1) as f64;
        Figures {
            encode: state.encode.get().map(|rate| rate * encoding),
            decode: state.decode.get().map(|rate| rate * self.threads as f64),
            ratio: state.ratio.get(),
            write: self.meter.write_rate(),
            read: self.meter.read_rate(),
        }
    }

    /// Notes what was measured and thinks again; a change is told with the figures.
    fn learned(&self, note: impl FnOnce(&mut State)) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        note(&mut state);
        let figures = self.figures(&state);
        if !state.worth.judge(&figures, now) {
            return;
        }
        let does = if state.worth.is_on() {
            "records are compressed"
        } else {
            "records are stored as they are, because compressing them costs more than it gains"
        };
        drop(state);
        let text = format!(
            "namespace {}: {does}: {}",
            self.identity.namespace(),
            figures.words()
        );
        self.events.push(Level::Info, text, now);
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
        if kept.len() < self.threads {
            kept.push(tools);
        }
        Ok(result)
    }
}

impl Backend for CompressBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn describe(&self) -> String {
        let width = self.shared.codec.width();
        let (threads, inner) = (self.shared.threads, self.inner.describe());
        format!("compressed in {width} byte planes by {threads} threads, into {inner}")
    }

    fn probe(&self, deadline: Mono) -> Result<()> {
        self.inner.probe(deadline)
    }

    fn lookup(&self, ids: Vec<BlockId>, stop_at_missing: bool, deadline: Mono, done: Done<Vec<Presence>>) {
        self.inner.lookup(ids, stop_at_missing, deadline, done);
    }

    fn answers_at_once(&self) -> bool {
        self.inner.answers_at_once()
    }

    fn read(&self, stage: usize, reads: Vec<BlockRead>) {
        // Parts are of the record, not of its shorter form.
        let decoded = |read: BlockRead| BlockRead {
            parts: None,
            done: self.decoding(read.id, read.deadline, read.done),
            ..read
        };
        self.inner.read(stage, reads.into_iter().map(decoded).collect());
    }

    fn write(&self, id: BlockId, slot: Slot, options: WriteOptions, deadline: Mono, done: Done<Written>) {
        let there = !options.replace && self.inner.is_published(id);
        let next = if there {
            Next::AsIs
        } else {
            self.shared.state.lock().worth.next(self.shared.clock.now())
        };
        if next == Next::AsIs {
            self.shared
                .counts
                .as_is
                .fetch_add(u64::from(!there), Ordering::Relaxed);
            return self.inner.write(id, slot, options, deadline, done);
        }
        let given = Given::new((slot, options));
        let (work, shared) = (Arc::clone(&given), Arc::clone(&self.shared));
        let encode = move || {
            work.take().map(|(mut slot, options)| {
                let len = shared.encode(&mut slot, options, next == Next::Try);
                (slot, WriteOptions { len, ..options })
            })
        };
        let (inner, counted) = (Arc::clone(&self.inner), Arc::clone(&self.shared));
        counted.encoding.fetch_add(1, Ordering::SeqCst);
        let told = move |result: Result<Result<(Slot, WriteOptions)>>| {
            match result.and_then(|given| given) {
                Ok((slot, options)) => inner.write(id, slot, options, deadline, done),
                Err(error) => done(Err(error)),
            }
            counted.encoding.fetch_sub(1, Ordering::SeqCst);
            counted.hurry_on(&*inner);
        };
        if let Err(refused) = self.pool.offer(LANE_ENCODE, deadline, encode, told) {
            let error = refused.error;
            // More wait than should: then it goes as it is.
            let as_is = if error.kind() == ErrorKind::Busy {
                given.take()
            } else {
                drop(given.take());
                Err(error)
            };
            (refused.done)(Ok(as_is));
        }
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: Mono) {
        self.inner.touch(ids, deadline);
    }

    fn touch_own(&self, ids: &[(BlockId, u32)], deadline: Mono) {
        self.inner.touch_own(ids, deadline);
    }

    fn wants_touch_own(&self) -> bool {
        self.inner.wants_touch_own()
    }

    fn delete(&self, ids: Vec<BlockId>, deadline: Mono, done: Done<usize>) {
        self.inner.delete(ids, deadline, done);
    }

    fn list(&self, deadline: Mono, done: Done<Vec<Listed>>) {
        self.inner.list(deadline, done);
    }

    fn is_published(&self, id: BlockId) -> bool {
        self.inner.is_published(id)
    }

    fn early(&self) -> Early {
        self.inner.early()
    }

    fn flush(&self, how: Flush) {
        self.shared.hurried.store(true, Ordering::SeqCst);
        if how != Flush::Soon {
            self.inner.flush(how);
        }
        self.shared.hurry_on(&*self.inner);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.inner.counters()
    }

    fn quarantine(&self, id: BlockId, done: Done<Quarantined>) {
        self.inner.quarantine(id, done);
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn removed(&self) -> (u64, u64, u64) {
        self.inner.removed()
    }

    fn stuck(&self) -> usize {
        self.inner.stuck() + self.pool.stuck()
    }

    /// What waits to be encoded goes down first, as far as the time for that goes.
    fn shutdown(&self, drain: Duration) {
        let until = self.shared.clock.now().after(drain);
        self.pool.shutdown(drain / 4);
        self.inner.shutdown(until.since(self.shared.clock.now()));
    }

    fn may_have(&self, id: BlockId) -> bool {
        self.inner.may_have(id)
    }

    fn compression(&self) -> Option<Compression> {
        let (figures, active) = {
            let state = self.shared.state.lock();
            (self.shared.figures(&state), state.worth.is_on())
        };
        let counts = &self.shared.counts;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let whole = |figure: Option<f64>| figure.map_or(0, |figure| figure as u64);
        Some(Compression {
            active,
            records_compressed: get(&counts.encoded),
            records_as_is: get(&counts.as_is),
            records_decompressed: get(&counts.decoded),
            records_undecodable: get(&counts.undecodable),
            bytes_compressed: get(&counts.raw_bytes),
            bytes_stored: get(&counts.stored_bytes),
            ratio_permille: whole(figures.ratio.map(|ratio| ratio * 1000.0)),
            encode_bytes_per_s: whole(figures.encode),
            decode_bytes_per_s: whole(figures.decode),
            medium_write_bytes_per_s: whole(figures.write),
            medium_read_bytes_per_s: whole(figures.read),
        })
    }

    fn events(&self) -> Vec<Event> {
        let mut events = self.inner.events();
        events.extend(self.shared.events.drain());
        events
    }
}
