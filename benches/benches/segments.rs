//! The two layouts side by side: dump until published, load to the verified slot, lookup, and what
//! finding the segments of others costs at 10^2, 10^3 and 10^4 of them.
//!
//! Both write the same records through the same engine with the same threads, in turns on one
//! directory (`UCM_BENCH_DIR`, else the temporary one); the fastest turn of each counts, and the
//! ratio is segment to file.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ucm_benches::cli::program;
use ucm_benches::store::Result;
use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::{Clock, Completion, LANE_DUMP, LANE_LOAD, LANE_LOOKUP, MonotonicTime, SystemClock};
use ucm_io::{IoJob, IoOptions, IoPool, Process};
use ucm_quota::evidence::QuarantineConfig;
use ucm_quota::layout::Modes;
use ucm_quota::{Capacity, Rules};
use ucm_record::{Expect, RecordLayout, RecordMeta, verify};
use ucm_tier::backend::{Backend, BlockRead, Outcome, WriteOptions, either};
use ucm_tier::posix::{Place, PosixBackend, PosixConfig};
use ucm_tier::segment::{SegmentBackend, SegmentConfig};

/// Threads of the I/O pool; dumps may use half.
const THREADS: usize = 4;
/// Layers of a block.
const LAYERS: usize = 32;

fn main() -> ExitCode {
    program("segments", run)
}

fn run() -> Result<()> {
    let full = std::env::var_os("UCM_BENCH_FULL").is_some();
    let (turn, rounds) = if full { (64 << 20, 7) } else { (8 << 20, 2) };
    println!(
        "dump until published and load to the verified slot, fastest of {rounds} turns of {} MiB",
        turn >> 20
    );
    println!("     KiB  mode      what    file MB/s  segment MB/s  ratio");
    for block in [256usize << 10, 1 << 20, 2 << 20] {
        for direct in [false, true] {
            contest(block, direct, turn, rounds)?;
        }
    }
    lookups(if full { 100_000 } else { 2_000 })?;
    println!("finding the segments of others: first look, and one look when nothing has changed");
    println!("segments  first ms  us/segment");
    for segments in if full {
        vec![100, 1000, 10_000]
    } else {
        vec![100]
    } {
        discovery(segments)?;
    }
    Ok(())
}

fn directory() -> Result<tempfile::TempDir> {
    Ok(match std::env::var_os("UCM_BENCH_DIR") {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    })
}

fn contest(block: usize, direct: bool, turn: usize, rounds: usize) -> Result<()> {
    let count = (turn / block).max(4);
    let mut best = [[f64::MAX; 2]; 2];
    for round in 0..rounds {
        for at in [round % 2, 1 - round % 2] {
            let dir = directory()?;
            let bench = Bench::open(dir.path(), block, direct, at == 1, count)?;
            let took = [bench.write(0, count)?, bench.read(0, count)?];
            for (best, took) in best[at].iter_mut().zip(took) {
                *best = best.min(took.as_secs_f64());
            }
            bench.end();
        }
    }
    let mode = if direct { "direct" } else { "buffered" };
    for (what, file, segment) in [
        ("dump", best[0][0], best[1][0]),
        ("load", best[0][1], best[1][1]),
    ] {
        let rate = |seconds: f64| (count * block) as f64 / seconds / 1e6;
        let (file, segment) = (rate(file), rate(segment));
        println!(
            "{:8}  {mode:8}  {what}  {file:11.0}  {segment:12.0}  {:5.2}",
            block >> 10,
            segment / file
        );
    }
    Ok(())
}

fn lookups(blocks: usize) -> Result<()> {
    let mut each = [0.0; 2];
    for (at, each) in each.iter_mut().enumerate() {
        let dir = directory()?;
        let bench = Bench::open(dir.path(), 4096, false, at == 1, 64)?;
        for first in (0..blocks).step_by(64) {
            bench.write(first, 64.min(blocks - first))?;
        }
        let ids: Vec<BlockId> = (0..blocks).map(id).collect();
        let mut best = f64::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            for ids in ids.chunks(1024) {
                let (backend, ids) = (Arc::clone(&bench.backend), ids.to_vec());
                let look = move |io: &IoJob| backend.lookup(io, &ids, false);
                bench.pool.call(LANE_LOOKUP, bench.deadline(), look)?;
            }
            best = best.min(start.elapsed().as_secs_f64() / blocks as f64);
        }
        *each = best * 1e9;
        bench.end();
    }
    println!(
        "lookup of {blocks} blocks that are there, 1024 at once: file {:.0} ns, segment {:.0} ns \
         per id",
        each[0], each[1]
    );
    Ok(())
}

fn discovery(segments: usize) -> Result<()> {
    let dir = directory()?;
    let writer = Bench::open(dir.path(), 4096, false, true, 4)?;
    for n in 0..segments {
        writer.write(n, 1)?; // sealed at once, so each is a segment of its own
    }
    let start = Instant::now();
    let reader = Bench::open(dir.path(), 4096, false, true, 4)?;
    let took = start.elapsed().as_secs_f64();
    println!(
        "{segments:8}  {:8.1}  {:10.1}",
        took * 1e3,
        took * 1e6 / segments as f64
    );
    reader.end();
    writer.end();
    Ok(())
}

fn id(n: usize) -> BlockId {
    let mixed = (n as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut id = [0; 16];
    id[..8].copy_from_slice(&mixed.to_be_bytes());
    id[8..].copy_from_slice(&mixed.rotate_left(31).to_be_bytes());
    BlockId(id)
}

/// A backend with filled slots for it.
struct Bench {
    backend: Arc<dyn Backend>,
    pool: Arc<IoPool>,
    slots: Arc<SlotPool>,
    record: RecordLayout,
    identity: Identity,
    clock: Arc<dyn Clock>,
}

impl Bench {
    fn open(root: &Path, block: usize, direct: bool, segment: bool, slots: usize) -> Result<Self> {
        let clock = SystemClock::shared();
        let layers = if block <= 4096 { 1 } else { LAYERS };
        let geometry = Geometry::new(vec![(block / layers) as u64], layers as u32, layers as u32)?;
        let record = RecordLayout::new(&geometry).describing(1, DType::F32);
        let text = format!(
            "{{\"format_version\":1,\"architecture\":\"\",\"world_size\":1,\"dtype\":\"\",\"weights\":\"{block}\",\
             \"model_config\":{{}},\"position\":{{}},\"kv_dtype\":\"\",\"attention_backend\":\"\",\"kv_packing\":{{}},\
             \"kv_layout\":\"\",\"kv_groups\":[],\"block_tokens\":1,\"tensor_parallel\":1,\"pipeline_parallel\":1,\
             \"decode_context_parallel\":1}}"
        );
        let identity = Identity::parse(&text)?;
        let config = PosixConfig {
            root: root.to_owned(),
            identity: identity.clone(),
            labels: BTreeMap::new(),
            part: Part::default(),
            record: record.clone(),
            other_parts: Vec::new(),
            shorter: false,
            geometry,
            direct,
            lookup_only: false,
            capacity: NonZeroU64::new(64 << 30).map(Capacity::Bytes),
            rules: Rules {
                free_floor: Some(Capacity::Percent(0.0)),
                ..Rules::default()
            },
            process: Process::this(),
            writer: ucm_infra::random_u64(),
            modes: Modes::default(),
            quarantine: QuarantineConfig::default(),
            place: Place::default(),
        };
        let io = IoPool::psync(
            direct,
            &IoOptions {
                clock: Arc::clone(&clock),
                ..IoOptions::with_workers(THREADS)
            },
        )?;
        // Sealed as soon as nothing is being written: the end of a turn is the end of its last
        // record.
        let segments = SegmentConfig {
            age: Duration::ZERO,
            ..SegmentConfig::default()
        };
        let pool = Arc::clone(&io);
        let backend: Arc<dyn Backend> = if segment {
            Arc::new(SegmentBackend::new(
                config,
                segments,
                io,
                Arc::clone(&clock),
            )?)
        } else {
            Arc::new(PosixBackend::new(config, io, Arc::clone(&clock))?)
        };
        backend.open(MonotonicTime::NEVER)?;
        let arena = HostArena::new(slots * record.record_len().next_multiple_of(4096))?;
        Ok(Self {
            backend,
            pool,
            slots: SlotPool::new(arena, record.record_len())?,
            record,
            identity,
            clock,
        })
    }

    fn deadline(&self) -> MonotonicTime {
        self.clock.now().after(Duration::from_secs(120))
    }

    fn write(&self, first: usize, count: usize) -> Result<Duration> {
        let mut slots = Vec::with_capacity(count);
        for n in first..first + count {
            let mut slot = self.slots.try_acquire().ok_or("too few slots")?;
            slot.as_mut_slice()[4096..].fill(n as u8);
            slots.push(slot);
        }
        let start = Instant::now();
        let mut waits = Vec::with_capacity(count);
        for (n, mut slot) in (first..).zip(slots) {
            let meta = RecordMeta {
                id: id(n),
                namespace: *self.identity.digest(),
                ..RecordMeta::default()
            };
            self.record.seal(&meta, slot.as_mut_slice())?;
            let options = WriteOptions {
                len: self.record.record_len(),
                ordinal: 0,
                replace: false,
                read_back: false,
            };
            let (over, answer) = answer();
            let backend = Arc::clone(&self.backend);
            let (done, ended) = either(Box::new(answer));
            let write = move |io: &IoJob| {
                backend.write(io, id(n), slot, options, done);
                Ok(())
            };
            self.pool.job(LANE_DUMP, self.deadline(), write, ended);
            waits.push(over);
        }
        for over in waits {
            over.wait(&*self.clock, None).ok_or("no answer")??;
        }
        Ok(start.elapsed())
    }

    fn read(&self, first: usize, count: usize) -> Result<Duration> {
        let slots: Vec<Slot> = (0..count)
            .filter_map(|_| self.slots.try_acquire())
            .collect();
        let start = Instant::now();
        let mut waits = Vec::with_capacity(count);
        for (n, slot) in (first..).zip(slots) {
            let (over, answer) = answer();
            let (record, namespace) = (self.record.clone(), *self.identity.digest());
            let judge = move |reads: ucm_core::Result<Vec<Outcome>>| {
                let read = reads.and_then(|mut reads| match reads.pop() {
                    Some(Outcome::Came(read)) => read,
                    _ => Err(ucm_core::Error::internal("a read has no outcome")),
                });
                answer(read.and_then(|read| {
                    let expect = Expect {
                        id: id(n),
                        namespace,
                        part: Part::default(),
                        layout: &record,
                    };
                    let judged =
                        verify(&read.slot.as_slice()[..read.read], read.stored_len, &expect);
                    judged.map(|_| ()).map_err(ucm_core::Error::from)
                }));
            };
            let (backend, deadline) = (Arc::clone(&self.backend), self.deadline());
            let read = move |io: &IoJob| {
                Ok(backend.read(io, vec![BlockRead::whole(id(n), slot, deadline)]))
            };
            self.pool.job(LANE_LOAD, deadline, read, judge);
            waits.push(over);
        }
        for over in waits {
            over.wait(&*self.clock, None).ok_or("no answer")??;
        }
        Ok(start.elapsed())
    }

    fn end(&self) {
        self.backend.close(Duration::from_secs(3));
    }
}

/// Something to wait for, and what to call with the answer.
#[allow(clippy::type_complexity, reason = "a completion and its end")]
fn answer<T: Clone + Send + 'static>() -> (
    Arc<Completion<ucm_core::Result<T>>>,
    impl FnOnce(ucm_core::Result<T>) + Send + 'static,
) {
    let over = Completion::new();
    let end = Arc::clone(&over);
    (over, move |result| {
        end.complete(result);
    })
}
