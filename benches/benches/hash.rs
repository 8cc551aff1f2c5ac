//! Cost of block keys from a token array, as a ratio to the raw compressions of the same hash in
//! the same run.
//!
//! The reference runs the compression function alone over `ceil((16 + 4 * block_size + 9) / 64)`
//! pieces per block, the minimum of any implementation of the chain. The state continues from block
//! to block, as in one long message, because in a chain every compression waits for the previous
//! one. The goal for sha256 and md5 is a ratio of at most 1.3.
//!
//! BLAKE3 has no public compression function; its reference is one hash of a message of the block's
//! length.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::hint::black_box;
use std::process::ExitCode;

use ucm_benches::{asked_for, in_turns};
use ucm_core::{BlockHasher, HashMethod};

const TOKENS: usize = 1 << 15;
const GOAL: f64 = 1.3;

fn main() -> ExitCode {
    if !asked_for("hash") {
        return ExitCode::SUCCESS;
    }
    let tokens: Vec<u32> = (0..TOKENS as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) >> 15)
        .collect();
    println!("block keys of {TOKENS} tokens from a u32 array, fastest of the runs");
    println!("method  block_size  ns/token  raw ns/token  ratio  goal");
    for method in HashMethod::ALL {
        for block_size in [16, 32, 64, 128] {
            let Ok(hasher) = BlockHasher::new(&[7; 32], block_size, method) else {
                return ExitCode::FAILURE;
            };
            let mut ours = || {
                drop(black_box(hasher.hash_tail(
                    black_box(&tokens),
                    None,
                    0,
                    &[],
                )))
            };
            let [ours, raw] = in_turns([&mut ours, &mut raw(method, block_size)])
                .map(|time| time.as_nanos() as f64 / TOKENS as f64);
            let ratio = ours / raw;
            let goal = match method {
                HashMethod::Blake3 => "-",
                _ if ratio <= GOAL => "met",
                _ => "missed",
            };
            let name = method.name();
            println!("{name:<6}  {block_size:>10}  {ours:>8.2}  {raw:>12.2}  {ratio:>5.2}  {goal}");
        }
    }
    ExitCode::SUCCESS
}

/// The raw compressions of the keys of all blocks; the state continues from block to block.
fn raw(method: HashMethod, block_size: usize) -> Box<dyn FnMut()> {
    let blocks = TOKENS / block_size;
    let len = 16 + 4 * block_size;
    let pieces = vec![[0x5a; 64]; (len + 9).div_ceil(64)];
    match method {
        HashMethod::Sha256 => Box::new(move || {
            run(blocks, |state: &mut [u32; 8]| {
                sha2::block_api::compress256(state, black_box(&pieces));
            })
        }),
        HashMethod::Md5 => Box::new(move || {
            run(blocks, |state: &mut [u32; 4]| {
                md5::block_api::compress(state, black_box(&pieces));
            })
        }),
        HashMethod::Blake3 => Box::new(move || {
            run(blocks, |state: &mut [u32; 1]| {
                let hash = blake3::hash(black_box(&pieces.as_flattened()[..len]));
                state[0] ^= u32::from(hash.as_bytes()[0]);
            })
        }),
    }
}

fn run<const N: usize>(blocks: usize, compress: impl Fn(&mut [u32; N])) {
    let mut state = [1; N];
    for _ in 0..blocks {
        compress(&mut state);
    }
    black_box(state);
}
