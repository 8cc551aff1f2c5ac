//! Hit rates of the eviction policies on traces that look like use: the figures in docs/performance.md, and what the
//! choice among them rests on. Traces come from a generator with a fixed seed, so the figures are the same everywhere.
//!
//! A request asks for the chain of blocks of its prompt. The blocks present from the first on without a gap are hits;
//! the others are computed and stored, and all count as used, as the engine does it. What counts is blocks hit of blocks
//! asked for: a block behind a gap is worth nothing.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::collections::HashMap;

use ucm_core::BlockId;
use ucm_store::memory::Policy;

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

/// Conversations: each turn asks for all before it and some blocks more. `live` of them go on at the same time.
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

/// Every so many requests of another trace a long document that is read once, or twice at the most.
fn with_scans(dice: &mut Dice, others: Vec<Request>, every: usize) -> Vec<Request> {
    let mut all = Vec::new();
    for (n, request) in others.into_iter().enumerate() {
        all.push(request);
        if n % every == 0 {
            let document = Run {
                of: 2_000_000 + n as u32,
                blocks: 400 + dice.below(1200),
            };
            all.push(vec![document]);
            if dice.below(5) == 0 {
                all.push(vec![document]);
            }
        }
    }
    all
}

/// The blocks of a request. Those of the second run stand behind the first, so their chain names both.
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
fn hit_rate(policy: Policy, slots: usize, trace: &[Request]) -> f64 {
    let mut eviction = policy.build(slots);
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

#[test]
fn the_policies_on_traces_that_look_like_use() {
    let mut dice = Dice(5);
    let long = chat(&mut dice, 4000, 60, 40);
    let many = shared(&mut dice, 4000);
    let scanned = chat(&mut dice, 4000, 60, 40);
    let scanned = with_scans(&mut dice, scanned, 8);
    let documents = shared(&mut dice, 4000);
    let documents = with_scans(&mut dice, documents, 8);
    let traces = [
        ("chat", &long),
        ("shared prompts", &many),
        ("chat, and documents", &scanned),
        ("shared prompts, and documents", &documents),
    ];
    println!("| trace | slots | endless | lru | sieve | s3fifo |\n|---|---|---|---|---|---|");
    let mut lead = [0.0; 3];
    for (name, trace) in traces {
        for slots in [1000, 2000, 4000, 8000] {
            let endless = hit_rate(Policy::Lru, 3_000_000, trace);
            let rates = Policy::ALL.map(|policy| hit_rate(policy, slots, trace));
            let [lru, sieve, s3fifo] = rates;
            println!("| {name} | {slots} | {endless:.1} | {lru:.1} | {sieve:.1} | {s3fifo:.1} |");
            for (sum, rate) in lead.iter_mut().zip(rates) {
                *sum += rate - lru;
            }
            assert!(rates.iter().all(|&rate| rate <= endless));
        }
    }
    println!("mean lead over lru: {:?}", lead.map(|sum| sum / 16.0));
}
