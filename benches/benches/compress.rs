//! The codecs on numbers like those of a KV cache: how much shorter they become, what one core
//! encodes and decodes, beside memcpy in the same run, and the medium at which it breaks even.
//!
//! Values are normally distributed, with a scale of their own for each channel, as keys and values
//! of attention are; a layer has 64 KiB, a block 1 MiB. The fastest of some rounds counts, taken in
//! turns. A medium below `(1 - 1/ratio) * rate` gains.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ucm_benches::cli::program;
use ucm_benches::store::Result;
use ucm_core::{BlockId, DType, Geometry, Part};
use ucm_record::{Algorithm, Codec, Coder, Expect, RecordLayout, RecordMeta, stored_form, verify};

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
        "codec  type       ratio  encode MB/s  decode MB/s  memcpy MB/s  encode  decode   even \
         writing  even reading MB/s"
    );
    let dtypes = [DType::Bf16, DType::F16, DType::F32, DType::Fp8E4m3];
    for (algorithm, dtype) in Algorithm::ALL
        .into_iter()
        .flat_map(|of| dtypes.map(|dtype| (of, dtype)))
    {
        let numbers = numbers(dtype);
        let (mut ratio, mut encode, mut decode, mut copy) = (0.0, 0f64, 0f64, 0f64);
        for _ in 0..rounds {
            copy = copy.max(memcpy(blocks));
            let round = contest(algorithm, dtype, &numbers, blocks)?;
            (ratio, encode, decode) = (round[0], encode.max(round[1]), decode.max(round[2]));
        }
        let gain = (1.0 - 1.0 / ratio).max(0.0);
        println!(
            "{:5}  {:9}  {ratio:5.2}  {:11.0}  {:11.0}  {:11.0}  {:6.3}  {:6.3}  {:13.0}  {:12.0}",
            algorithm.name(),
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

/// Ratio, and bytes in a second that one thread encodes and decodes in place, verifying what is
/// stored included.
fn contest(algorithm: Algorithm, dtype: DType, numbers: &[u8], blocks: usize) -> Result<[f64; 3]> {
    let geometry = Geometry::new(vec![LAYER as u64], LAYERS as u32, LAYERS as u32)?;
    let record = RecordLayout::new(&geometry).describing(16, dtype);
    let (codec, mut coder) = (Codec::of(algorithm, &record), Coder::new(&record)?);
    let mut bytes = vec![0; record.record_len()];
    let (mut encoding, mut decoding, mut stored) = (Duration::ZERO, Duration::ZERO, 0);
    for block in 0..blocks {
        let meta = RecordMeta {
            id: BlockId((block as u128 + 1).to_le_bytes()),
            ..RecordMeta::default()
        };
        for layer in 0..LAYERS {
            let from = ((block + layer) * 4096) % (numbers.len() - LAYER);
            bytes[record.layer_data(layer as u32)].copy_from_slice(&numbers[from..from + LAYER]);
        }
        record.seal(&meta, &mut bytes)?;
        let began = Instant::now();
        let len = coder
            .encode(codec, &mut bytes, false)?
            .unwrap_or(record.record_len());
        encoding += began.elapsed();
        stored += len;
        let expect = Expect {
            id: meta.id,
            namespace: meta.namespace,
            part: Part::default(),
            layout: &record,
        };
        let began = Instant::now();
        if let Some(header) = stored_form(&bytes[..len], len as u64, &expect) {
            coder.decode(&header, &mut bytes, len);
        }
        decoding += began.elapsed();
        verify(&bytes, bytes.len() as u64, &expect)
            .map_err(|reason| format!("what came back is {}", reason.reason.name()))?;
    }
    let all = (blocks * record.record_len()) as f64;
    let rate = |took: Duration| all / took.as_secs_f64();
    Ok([all / stored as f64, rate(encoding), rate(decoding)])
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
    let scales: Vec<f64> = (0..CHANNELS)
        .map(|_| (2.0 * uniform() - 1.0).exp2())
        .collect();
    let mut bytes = Vec::with_capacity(4 * BLOCK);
    let mut at = 0;
    while bytes.len() < 4 * BLOCK {
        let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let number = (normal * scales[at % CHANNELS]) as f32;
        at += 1;
        match dtype {
            DType::Bf16 => {
                bytes.extend(((number.to_bits() + 0x8000) >> 16).to_le_bytes()[..2].iter())
            }
            DType::F16 => bytes.extend(small(number, 5, 10).to_le_bytes()),
            DType::F32 => bytes.extend(number.to_le_bytes()),
            _ => bytes.push(small(number, 4, 3) as u8),
        }
    }
    bytes
}

/// A number with so many bits of exponent and mantissa: cut off, and zero or the largest where it
/// does not fit.
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
