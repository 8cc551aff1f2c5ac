//! Sparse retrieval on a CPU: every kernel on every instruction set of this machine, compared with
//! plain Rust and with one `memcpy` of the same bytes, all on one thread.
//!
//! The shape is that of a model with 8 KV heads of size 128 and scattered blocks of 128 tokens. A
//! round reads one layer repeatedly, which stays in the caches as far as it fits and measures the
//! kernel; or the layers of a small model in turn, as in a decode step, which measures the memory.
//! Goals, for the best set of this machine: products of bf16 at least 10 times as fast as plain
//! Rust, and with 32 K tokens hash codes read at half of memcpy's bandwidth or more. Each row
//! states whether its goal is met.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use ucm_benches::{asked_for, in_turns_of};
use ucm_core::Result;
use ucm_retrieval::*;

const HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 128;
const CODE: usize = 16;
const LAYERS: usize = 8;

/// A kernel, measured beside one copy of the bytes that it reads.
struct Case<'a> {
    name: &'static str,
    tokens: usize,
    /// The bytes it reads of each layer.
    layers: &'a [Vec<u8>],
    /// Of the best set.
    goal: Option<Goal>,
}

/// The goal of a kernel, by one of the ratios: x scalar, x memcpy.
type Goal = (f64, &'static str);

fn main() -> ExitCode {
    if !asked_for("retrieval") {
        return ExitCode::SUCCESS;
    }
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    let sets: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.supported()).collect();
    println!(
        "one layer, {HEADS} KV heads of {DIM}, blocks of {BLOCK} tokens, one thread; fastest of \
         the rounds"
    );
    println!("kernel           tokens  layers  set      us/layer   GB/s  x scalar  x memcpy");
    for tokens in [4 << 10, 32 << 10, 128 << 10] {
        let blocks = tokens / BLOCK;
        let (of_blocks, of_tokens) = ([blocks as i32], [tokens as i32]);
        let table: Vec<i32> = scattered(blocks);
        for quest in [false, true] {
            let count = if quest { 2 } else { 1 };
            let len = count * HEADS * DIM * 2;
            let layers: Vec<Vec<u8>> = (0..LAYERS).map(|layer| bf16(blocks * len, layer)).collect();
            let queries: Vec<f32> = (0..HEADS * DIM).map(|i| (i as f32).sin()).collect();
            let queries = if quest {
                quest_queries(&queries, HEADS * DIM)
            } else {
                queries
            };
            let mut out = vec![0.0; blocks];
            let case = Case {
                name: if quest { "quest bf16" } else { "mean bf16" },
                tokens,
                layers: &layers,
                goal: (!quest).then_some((10.0, "scalar")),
            };
            case.measure(&sets, |layer, isa| {
                let spec = DotScores {
                    rows: Rows::new(Ints::I32(&table), blocks, Ints::I32(&of_blocks), 1)?,
                    reps: Representations {
                        blocks: Blocks::new(layer, len)?,
                        element: Element::Bf16,
                        count,
                        heads: HEADS,
                        dim: DIM,
                        stride: HEADS * DIM,
                        head_stride: DIM,
                        scales: None,
                    },
                    queries: &queries,
                    own_queries: quest,
                    metric: Metric::Dot,
                    over_reps: Reps::Sum,
                    over_heads: Heads::Sum,
                    windows: Windows::default(),
                };
                dot_scores(&spec, &mut out, blocks, isa, Team::ONE)
            })?;
        }
        let layers: Vec<Vec<u8>> = (0..LAYERS)
            .map(|layer| bytes(tokens * HEADS * CODE, layer))
            .collect();
        let query = bytes(HEADS * CODE, 99);
        let mut out = vec![0; blocks];
        let case = Case {
            name: "hamming",
            tokens,
            layers: &layers,
            goal: (tokens == 32 << 10).then_some((0.5, "memcpy")),
        };
        case.measure(&sets, |layer, isa| {
            let spec = HammingScores {
                rows: Rows::new(Ints::I32(&table), blocks, Ints::I32(&of_tokens), BLOCK)?,
                codes: Blocks::new(layer, BLOCK * HEADS * CODE)?,
                heads: HEADS,
                code_len: CODE,
                queries: &query,
                queries_per_head: 1,
                heads_apart: false,
                windows: Windows::default(),
            };
            hamming_scores(&spec, &mut out, blocks, isa, Team::ONE)
        })?;
    }
    Ok(())
}

impl Case<'_> {
    /// Runs a kernel over one layer repeatedly, and over all in turn.
    fn measure(&self, sets: &[Isa], mut run: impl FnMut(&[u8], Isa) -> Result<()>) -> Result<()> {
        for layers in [&self.layers[..1], self.layers] {
            Case { layers, ..*self }.measure_layers(sets, &mut run)?;
        }
        Ok(())
    }

    /// Runs a kernel on every set, in turns with a copy.
    fn measure_layers(
        &self,
        sets: &[Isa],
        mut run: impl FnMut(&[u8], Isa) -> Result<()>,
    ) -> Result<()> {
        let read: usize = self.layers.iter().map(Vec::len).sum();
        let rounds = ((64 << 20) / read).clamp(6, 60);
        let mut to = vec![1; self.layers[0].len()];
        let mut copy = || {
            for layer in self.layers {
                to.copy_from_slice(black_box(layer));
                black_box(&to);
            }
        };
        let mut failed = Ok(());
        let mut times = Vec::new();
        for &isa in sets {
            let mut kernel = || {
                for layer in self.layers {
                    if let Err(error) = run(layer, isa) {
                        failed = Err(error);
                    }
                }
            };
            times.push((isa, in_turns_of(rounds, [&mut kernel, &mut copy])));
        }
        failed?;
        let scalar = times[0].1[0];
        for (isa, [ours, copied]) in times {
            let of_scalar = scalar.as_secs_f64() / ours.as_secs_f64();
            let of_memcpy = copied.as_secs_f64() / ours.as_secs_f64();
            let verdict = match self.goal {
                Some((goal, unit)) if sets.last() == Some(&isa) => {
                    let found = if unit == "scalar" {
                        of_scalar
                    } else {
                        of_memcpy
                    };
                    let met = if found >= goal { "met" } else { "MISSED" };
                    format!("goal {goal} x {unit}: {met}")
                }
                _ => String::new(),
            };
            println!(
                "{:<15} {:>7} {:>7}  {:<7} {:>9.1} {:>6.1} {:>9.1} {:>9.2}  {}",
                self.name,
                self.tokens,
                self.layers.len(),
                isa.name(),
                micros(ours) / self.layers.len() as f64,
                read as f64 / ours.as_secs_f64() / 1e9,
                of_scalar,
                of_memcpy,
                verdict
            );
        }
        Ok(())
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Every number below `count`, in a pseudo-random order.
fn scattered(count: usize) -> Vec<i32> {
    (0..count as u64)
        .map(|i| (i * 0x9e37_79b1 % count.next_power_of_two() as u64) as i32 % count as i32)
        .collect()
}

fn bytes(count: usize, seed: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    let next = || {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Small positive and negative numbers: the exponent is that of a number near 1.
fn bf16(count: usize, seed: usize) -> Vec<u8> {
    let mut bytes = bytes(count, seed);
    for pair in bytes.chunks_exact_mut(2) {
        pair[1] = pair[1] & 0x80 | 0x3c;
    }
    bytes
}
