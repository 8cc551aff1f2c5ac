//! The codec of the compression stage on numbers like those of a KV cache: how much shorter they become, what one core
//! encodes and decodes, beside memcpy in the same run, and the medium at which it breaks even.
//!
//! Values are normally distributed, with a scale of their own for each channel, as keys and values of attention are; a layer
//! has 64 KiB, a block 1 MiB. The fastest of some rounds counts, taken in turns. A medium below `(1 - 1/ratio) * rate` gains.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::collections::HashMap;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ucm_benches::cli::program;
use ucm_benches::store::Result;
use ucm_core::{BlockId, DType, Error, ErrorKind, Geometry, Identity, MissReason, Part};
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::{MonotonicTime, SystemClock};
use ucm_io::{IoJob, IoOptions, IoPool, PsyncEngine};
use ucm_record::{Expect, RecordLayout, RecordMeta, verify};
use ucm_tier::backend::{
    Backend, BlockRead, Done, Listed, MediumStats, Outcome, Presence, ReadDone, WriteOptions, Written,
};
use ucm_tier::compress::{CompressBackend, CompressConfig};

const LAYER: usize = 64 << 10;
const LAYERS: usize = 16;
const BLOCK: usize = LAYER * LAYERS;
/// Channels of a head: each has its own scale.
const CHANNELS: usize = 128;

fn main() -> ExitCode {
    program("compress", run)
}

fn run() -> Result<()> {
    let full = std::env::var_os("UCM_BENCH_FULL").is_some();
    let (blocks, rounds) = if full { (64, 9) } else { (8, 3) };
    println!(
        "blocks of {} KiB, {blocks} a round, fastest of {rounds} rounds, one core",
        BLOCK >> 10
    );
    println!(
        "type       ratio  encode MB/s  decode MB/s  memcpy MB/s  encode  decode   even writing  even reading MB/s"
    );
    for dtype in [DType::Bf16, DType::F16, DType::F32, DType::Fp8E4m3] {
        let numbers = numbers(dtype);
        let (mut ratio, mut encode, mut decode, mut copy) = (0.0, 0f64, 0f64, 0f64);
        for _ in 0..rounds {
            copy = copy.max(memcpy(blocks));
            let round = contest(dtype, &numbers, blocks)?;
            (ratio, encode, decode) = (round[0], encode.max(round[1]), decode.max(round[2]));
        }
        let gain = (1.0 - 1.0 / ratio).max(0.0);
        println!(
            "{:9}  {ratio:5.2}  {:11.0}  {:11.0}  {:11.0}  {:6.3}  {:6.3}  {:13.0}  {:12.0}",
            dtype.name(),
            encode / 1e6,
            decode / 1e6,
            copy / 1e6,
            encode / copy,
            decode / copy,
            gain * encode / 1e6,
            gain * decode / 1e6
        );
    }
    Ok(())
}

/// Bytes in a second of copying as many blocks, from memory to memory.
fn memcpy(blocks: usize) -> f64 {
    let (from, mut to) = (vec![1u8; BLOCK * blocks], vec![0u8; BLOCK * blocks]);
    to.copy_from_slice(black_box(&from)); // touches every page
    let start = Instant::now();
    to.copy_from_slice(black_box(&from));
    black_box(&to);
    (BLOCK * blocks) as f64 / start.elapsed().as_secs_f64()
}

/// Ratio, and bytes in a second that one thread encodes and decodes, a copy to the shelf and from it included.
fn contest(dtype: DType, numbers: &[u8], blocks: usize) -> Result<[f64; 3]> {
    let geometry = Geometry::new(vec![LAYER as u64], LAYERS as u32, LAYERS as u32)?;
    let record = RecordLayout::new(&geometry).describing(16, dtype);
    let identity = Identity::parse(concat!(
        r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"#,
        r#""position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"#,
        r#""block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#
    ))?;
    let slots = SlotPool::new(HostArena::new(2 * record.record_len())?, record.record_len())?;
    let shelf = Arc::new(Shelf(Mutex::default(), Arc::clone(&slots)));
    let config = CompressConfig {
        record: record.clone(),
        identity: identity.clone(),
        writer: 1,
        part: Part::default(),
        io: IoPool::psync(false, &IoOptions::with_workers(2))?,
    };
    let stage = CompressBackend::new(config, shelf, SystemClock::shared())?;
    let here = IoJob::alone(PsyncEngine::new(false));
    let mut sealed = vec![0; record.record_len()];
    let (mut encoding, mut decoding) = (Duration::ZERO, Duration::ZERO);
    for block in 0..blocks {
        let id = BlockId((block as u128 + 1).to_le_bytes());
        for layer in 0..LAYERS {
            let from = ((block + layer) * 4096) % (numbers.len() - LAYER);
            sealed[record.layer_data(layer as u32)].copy_from_slice(&numbers[from..from + LAYER]);
        }
        let meta = RecordMeta {
            id,
            namespace: *identity.digest(),
            ..RecordMeta::default()
        };
        record.seal(&meta, &mut sealed)?;
        let mut slot = slots.try_acquire().ok_or("no slot")?;
        slot.as_mut_slice()[..sealed.len()].copy_from_slice(&sealed);
        let options = WriteOptions {
            len: sealed.len(),
            ordinal: 0,
            replace: false,
            read_back: false,
        };
        let (tell, hear) = channel();
        let written = Box::new(move |result| drop(tell.send(result)));
        let began = Instant::now();
        stage.write(id, slot, options, MonotonicTime::NEVER, written);
        hear.recv()??;
        encoding += began.elapsed();
        let slot = slots.try_acquire().ok_or("no slot")?;
        let began = Instant::now();
        let read = stage
            .read(&here, vec![BlockRead::whole(id, slot, MonotonicTime::NEVER)])
            .pop();
        let Some(Outcome::Came(read)) = read else {
            return Err("no outcome".into());
        };
        let read = read?;
        decoding += began.elapsed();
        let expect = Expect {
            id,
            namespace: *identity.digest(),
            part: Part::default(),
            layout: &record,
        };
        verify(&read.slot.as_slice()[..read.read], read.stored_len, &expect)
            .map_err(|refusal| format!("what came back: {refusal}"))?;
    }
    let told = stage.stats().compression.ok_or("no figures")?;
    stage.close(Duration::from_secs(10));
    let ratio = match told.records_compressed {
        0 => 1.0,
        _ => told.bytes_compressed as f64 / told.bytes_stored as f64,
    };
    let rate = |took: Duration| (blocks * record.record_len()) as f64 / took.as_secs_f64();
    Ok([ratio, rate(encoding), rate(decoding)])
}

/// Four blocks of numbers of a type, little endian.
fn numbers(dtype: DType) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let scales: Vec<f64> = (0..CHANNELS).map(|_| (2.0 * uniform() - 1.0).exp2()).collect();
    let mut bytes = Vec::with_capacity(4 * BLOCK);
    let mut at = 0;
    while bytes.len() < 4 * BLOCK {
        let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let number = (normal * scales[at % CHANNELS]) as f32;
        at += 1;
        match dtype {
            DType::Bf16 => bytes.extend(((number.to_bits() + 0x8000) >> 16).to_le_bytes()[..2].iter()),
            DType::F16 => bytes.extend(small(number, 5, 10).to_le_bytes()),
            DType::F32 => bytes.extend(number.to_le_bytes()),
            _ => bytes.push(small(number, 4, 3) as u8),
        }
    }
    bytes
}

/// A number with so many bits of exponent and mantissa: cut off, and zero or the largest where it does not fit.
fn small(number: f32, exponent: u32, mantissa: u32) -> u16 {
    let bits = number.to_bits();
    let sign = (bits >> 31) << (exponent + mantissa);
    let bias = (1i32 << (exponent - 1)) - 1;
    let power = ((bits >> 23) & 0xff) as i32 - 127 + bias;
    let most = (1i32 << exponent) - 2;
    let value = match power {
        ..=0 => 0,
        power if power > most => (most as u32) << mantissa,
        power => (power as u32) << mantissa | (bits & 0x7f_ffff) >> (23 - mantissa),
    };
    (sign | value) as u16
}

/// A medium that keeps what it is given, as it is given.
struct Shelf(Mutex<HashMap<BlockId, Vec<u8>>>, Arc<SlotPool>);

impl Backend for Shelf {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn open(&self, _deadline: MonotonicTime) -> ucm_core::Result<String> {
        Ok(format!("a shelf, {} slots", self.1.capacity()))
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], _stop: bool) -> ucm_core::Result<Vec<Presence>> {
        let kept = self.0.lock();
        let there = |id| kept.contains_key(id).then_some(()).ok_or(MissReason::Absent);
        Ok(ids.iter().map(there).collect())
    }

    fn read(&self, _io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let take = |BlockRead { id, mut slot, .. }: BlockRead| -> ucm_core::Result<ReadDone> {
            let absent = || Error::new(ErrorKind::NotFound, "not on the shelf");
            let record = self.0.lock().get(&id).cloned().ok_or_else(absent)?;
            let read = record.len();
            slot.as_mut_slice()[..read].copy_from_slice(&record);
            Ok(ReadDone {
                slot,
                read,
                stored_len: read as u64,
            })
        };
        run.into_iter().map(|read| Outcome::Came(take(read))).collect()
    }

    fn write(
        &self,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        _deadline: MonotonicTime,
        done: Done<Written>,
    ) {
        let record = slot.as_slice()[..options.len].to_vec();
        self.0.lock().insert(id, record);
        drop(slot);
        done(Ok(Written::Published));
    }

    fn touch(&self, _ids: &[(BlockId, u32)], _deadline: MonotonicTime) {}

    fn delete(&self, _io: &IoJob, _ids: &[BlockId]) -> ucm_core::Result<usize> {
        Ok(0)
    }

    fn list(&self, _io: &IoJob) -> ucm_core::Result<Vec<Listed>> {
        Ok(Vec::new())
    }

    fn stats(&self) -> MediumStats {
        MediumStats::default()
    }

    fn close(&self, _drain: Duration) {}
}
