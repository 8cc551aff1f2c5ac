//! Hit rates of the eviction policies on traces that look like use: what the choice among them
//! rests on. No time is measured; traces come from a generator with a fixed seed, so the figures
//! are the same everywhere.
//!
//! A request asks for the chain of blocks of its prompt. The blocks present from the first on
//! without a gap are hits; the others are computed and stored, and all count as used, as the engine
//! does it. What counts is blocks hit of blocks asked for: a block behind a gap is worth nothing.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench prints, and fails where it must"
)]

mod sieve;

use std::collections::{HashMap, HashSet};

use ucm_benches::asked_for;
use ucm_core::BlockId;
use ucm_tier::memory::Policy;
use ucm_tier::memory::eviction::Eviction;

use sieve::Sieve;

/// Blocks of a chain: whose they are, and how many there are of it.
#[derive(Clone, Copy)]
struct Run {
    of: u32,
    blocks: u32,
}

/// A prompt: runs of blocks, one after the other.
type Request = Vec<Run>;

/// A generator that gives the same numbers everywhere.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }

    /// Small numbers more often than large ones: about 1 / (n + 1).
    fn skewed(&mut self, n: u32) -> u32 {
        let uniform = f64::from(self.below(1 << 20)) / f64::from(1 << 20);
        ((f64::from(n) + 1.0).powf(uniform) - 1.0) as u32
    }
}

/// Conversations: each turn asks for all before it and some blocks more. `live` of them go on at
/// the same time.
fn chat(dice: &mut Dice, requests: usize, live: usize, system: u32) -> Vec<Request> {
    let mut next = 1_000;
    let mut conversations: Vec<(u32, u32)> = Vec::new();
    let request = |_| {
        while conversations.len() < live {
            next += 1;
            conversations.push((next, 0));
        }
        let at = dice.skewed(live as u32) as usize % live;
        conversations[at].1 += 4 + dice.below(40);
        let (of, blocks) = conversations[at];
        if dice.below(12) == 0 {
            conversations.remove(at); // over; those who speak often stay in front
        }
        let system = Run {
            of: dice.below(4),
            blocks: system,
        };
        vec![
            system,
            Run {
                of: of * 4 + system.of,
                blocks,
            },
        ]
    };
    (0..requests).map(request).collect()
}

/// Short questions behind one of some long prompts that many share.
fn shared(dice: &mut Dice, requests: usize) -> Vec<Request> {
    let request = |n: usize| {
        let prompt = dice.skewed(60);
        let question = Run {
            of: 1_000_000 + n as u32,
            blocks: 1 + dice.below(12),
        };
        vec![
            Run {
                of: prompt,
                blocks: 40 + prompt * 13 % 80,
            },
            question,
        ]
    };
    (0..requests).map(request).collect()
}

/// Among the requests of another trace, one in eight, a long document that is asked for so many
/// times, one after the other.
fn with_documents(dice: &mut Dice, others: Vec<Request>, times: usize) -> Vec<Request> {
    let mut all = Vec::new();
    for (n, request) in others.into_iter().enumerate() {
        all.push(request);
        if n % 8 == 0 {
            let document = Run {
                of: 2_000_000 + n as u32,
                blocks: 400 + dice.below(1200),
            };
            all.extend((0..times).map(|_| vec![document]));
        }
    }
    all
}

/// The blocks of a request. Those of the second run stand behind the first, so their chain names
/// both.
fn blocks(request: &Request) -> Vec<BlockId> {
    let mut chain = 0u64;
    let mut ids = Vec::new();
    for run in request {
        chain = chain.wrapping_mul(1_000_003) ^ u64::from(run.of);
        let id = |n: u32| BlockId((u128::from(chain) << 64 | u128::from(n)).to_le_bytes());
        ids.extend((0..run.blocks).map(id));
    }
    ids
}

/// Blocks hit in a hundred blocks asked for.
fn hit_rate(eviction: &mut dyn Eviction, slots: usize, trace: &[Request]) -> f64 {
    let mut there: HashMap<BlockId, u32> = HashMap::new();
    let mut held: Vec<Option<BlockId>> = vec![None; slots];
    let mut free: Vec<u32> = (0..slots as u32).rev().collect();
    let (mut hits, mut asked) = (0usize, 0usize);
    for request in trace {
        let ids = blocks(request);
        let known = ids.iter().take_while(|id| there.contains_key(id)).count();
        asked += ids.len();
        hits += known;
        for (ordinal, &id) in ids.iter().enumerate() {
            if let Some(&slot) = there.get(&id) {
                eviction.used(slot, ordinal as u32);
                continue;
            }
            let slot = free.pop().unwrap_or_else(|| {
                let victim = eviction.victim(&|_| false).unwrap();
                eviction.removed(victim);
                there.remove(&held[victim as usize].unwrap());
                victim
            });
            eviction.inserted(slot, id, ordinal as u32);
            held[slot as usize] = Some(id);
            there.insert(id, slot);
        }
    }
    100.0 * hits as f64 / asked as f64
}

/// The same with memory without end.
fn endless(trace: &[Request]) -> f64 {
    let (mut there, mut hits, mut asked) = (HashSet::new(), 0usize, 0usize);
    for request in trace {
        let ids = blocks(request);
        hits += ids.iter().take_while(|id| there.contains(*id)).count();
        asked += ids.len();
        there.extend(ids);
    }
    100.0 * hits as f64 / asked as f64
}

fn main() {
    if !asked_for("eviction") {
        return;
    }
    // `cargo test` and CI ask for the short form.
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let (mut dice, requests) = (Dice(5), if quick { 200 } else { 6000 });
    let long = chat(&mut dice, requests, 30, 40);
    let many = shared(&mut dice, requests);
    let once = {
        let others = chat(&mut dice, requests, 30, 40);
        with_documents(&mut dice, others, 1)
    };
    let both = {
        let others = shared(&mut dice, requests);
        with_documents(&mut dice, others, 1)
    };
    let twice = {
        let others = chat(&mut dice, requests, 30, 40);
        with_documents(&mut dice, others, 2)
    };
    let traces = [
        ("chat", &long),
        ("shared prompts", &many),
        ("chat, documents read once", &once),
        ("shared prompts, documents read once", &both),
        ("chat, documents asked about twice", &twice),
    ];
    println!("| trace | blocks kept | endless | lru | s3fifo | sieve |\n|---|---|---|---|---|---|");
    for (name, trace) in traces {
        let endless = endless(trace);
        for slots in [1000, 2000, 4000, 8000] {
            let [lru, s3fifo] =
                Policy::ALL.map(|policy| hit_rate(&mut *policy.build(slots), slots, trace));
            let sieve = hit_rate(&mut Sieve::default(), slots, trace);
            println!("| {name} | {slots} | {endless:.0} | {lru:.0} | {s3fifo:.0} | {sieve:.0} |");
        }
    }
}
