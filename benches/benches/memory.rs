//! The memory tier beside memcpy: keeping a record, copying one out of the own region and out of
//! another process's (here: another store of this one, mapped read-only), and looking ids up.
//! Ratios of time, memcpy = 1, taken in turns.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints its table, and fails where it must"
)]

use std::num::NonZeroU64;
use std::time::Duration;

use ucm_benches::{asked_for, in_turns};
use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::{LANE_LOOKUP, MonotonicTime, SystemClock};
use ucm_record::RecordLayout;
use ucm_tier::backend::Backend;
use ucm_tier::memory::{MemoryBackend, MemoryConfig};

const IDENTITY: &str = "{\"format_version\":1,\"architecture\":\"A\",\"world_size\":1,\"dtype\":\"f16\",\"weights\":\"w\",\
     \"model_config\":{},\"position\":{},\"kv_dtype\":\"f16\",\"attention_backend\":\"a\",\"kv_packing\":{},\
     \"kv_layout\":\"l\",\"kv_groups\":[],\"block_tokens\":16,\"tensor_parallel\":1,\"pipeline_parallel\":1,\
     \"decode_context_parallel\":1}";
/// Bytes of records that take turns: more than the caches of most processors.
const BYTES: usize = 256 << 20;
/// Records moved in one turn.
const AT_ONCE: usize = 16;

fn id(n: u64) -> BlockId {
    let word = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    BlockId((u128::from(word) << 64 | u128::from(word.rotate_left(17))).to_le_bytes())
}

fn tier(dir: &std::path::Path, layout: &RecordLayout, bytes: Option<usize>) -> MemoryBackend {
    let capacity = bytes.and_then(|bytes| NonZeroU64::new(bytes as u64));
    let identity = Identity::parse(IDENTITY).unwrap();
    let config = MemoryConfig {
        registry: Some(dir.to_owned()),
        ..MemoryConfig::new(identity, Part::default(), layout.clone(), capacity)
    };
    let tier = MemoryBackend::new(config, SystemClock::shared()).unwrap();
    tier.open(MonotonicTime::NEVER).unwrap();
    tier
}

fn fill(tier: &MemoryBackend, records: u64, record: &[u8]) {
    for n in 0..records {
        tier.insert(id(n), record, 0).unwrap();
    }
}

fn main() {
    if !asked_for("memory") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    println!(
        "| record | memcpy GB/s | keep | copy own | copy of another process \
         |\n|---|---|---|---|---|"
    );
    for kib in [256u64, 1024, 2048] {
        let geometry = Geometry::new(vec![kib << 10], 1, 1).unwrap();
        let layout = RecordLayout::new(&geometry).describing(16, DType::F16);
        let len = layout.record_len();
        let count = BYTES / len;
        let own = tier(dir.path(), &layout, Some(BYTES + (BYTES >> 4)));
        let record = vec![1; len];
        fill(&own, count as u64, &record);
        let reader = tier(dir.path(), &layout, None);
        assert!(reader.contains(id(0)), "the reader sees it");
        // As the engine's slots lie: memcpy likes no other offset in a page on some processors.
        let slots =
            SlotPool::with_slots(HostArena::new(BYTES + 2 * len).unwrap(), len, count + 1).unwrap();
        let mut sources: Vec<Slot> = std::iter::from_fn(|| slots.try_acquire_above(1)).collect();
        // Written, or all of them would be one page of zeroes that is always in a cache.
        sources
            .iter_mut()
            .for_each(|source| source.as_mut_slice().fill(2));
        let mut slot = slots.try_acquire().unwrap();
        let out = &mut slot.as_mut_slice()[..len];
        out.fill(1);
        let (mut at, mut next) = ([0usize; 3], count as u64);
        assert_eq!(sources.len(), count);
        let mut turn = |which: usize| {
            at[which] = (at[which] + 1) % count;
            at[which]
        };
        let fastest = {
            let (turn, out) = (
                std::cell::RefCell::new(&mut turn),
                std::cell::RefCell::new(&mut *out),
            );
            in_turns([
                &mut || {
                    for _ in 0..AT_ONCE {
                        let source = &sources[turn.borrow_mut()(0)].as_slice()[..len];
                        out.borrow_mut()
                            .copy_from_slice(std::hint::black_box(source));
                    }
                },
                &mut || {
                    for _ in 0..AT_ONCE {
                        own.copy_out(id(turn.borrow_mut()(1) as u64), &mut out.borrow_mut())
                            .unwrap();
                    }
                },
                &mut || {
                    for _ in 0..AT_ONCE {
                        reader
                            .copy_out(id(turn.borrow_mut()(2) as u64), &mut out.borrow_mut())
                            .unwrap();
                    }
                },
            ])
        };
        // Keeping takes slots away, so it comes last.
        let [memcpy, keep] = in_turns([
            &mut || {
                for source in sources.iter().take(AT_ONCE) {
                    out.copy_from_slice(std::hint::black_box(&source.as_slice()[..len]));
                }
            },
            &mut || {
                for source in sources.iter().take(AT_ONCE) {
                    next += 1;
                    own.insert(id(next), std::hint::black_box(&source.as_slice()[..len]), 0)
                        .unwrap();
                }
            },
        ]);
        let gbps = (AT_ONCE * len) as f64 / fastest[0].as_secs_f64() / 1e9;
        let ratio = |time: Duration, of: Duration| time.as_secs_f64() / of.as_secs_f64();
        println!(
            "| {kib} KiB | {gbps:.1} | {:.2} | {:.2} | {:.2} |",
            ratio(keep, memcpy),
            ratio(fastest[1], fastest[0]),
            ratio(fastest[2], fastest[0])
        );
    }
    lookups(dir.path());
}

/// ns an id, with as many records as a large host has.
fn lookups(dir: &std::path::Path) {
    let geometry = Geometry::new(vec![64], 1, 1).unwrap();
    let layout = RecordLayout::new(&geometry).describing(16, DType::F16);
    let (records, record) = (30_000u64, vec![1; layout.record_len()]);
    let own = tier(dir, &layout, Some(records as usize * (record.len() + 128)));
    fill(&own, records, &record);
    let reader = tier(dir, &layout, None);
    let mut first = 0;
    let ids = |first: u64| {
        (0..1024)
            .map(move |n| id((first + n * 29) % records))
            .collect::<Vec<_>>()
    };
    let absent: Vec<BlockId> = (0..1024).map(|n| id(records + 1 + n)).collect();
    let ask = |tier: &MemoryBackend, ids: Vec<BlockId>, hits: usize| {
        let here = tier.pool().here(LANE_LOOKUP, MonotonicTime::NEVER);
        let found = tier.lookup(&here, &ids, false).unwrap();
        assert_eq!(found.iter().filter(|there| there.is_ok()).count(), hits);
    };
    let mut next = || {
        first = (first + 1024) % records;
        ids(first)
    };
    let next = std::cell::RefCell::new(&mut next);
    let times = in_turns([
        &mut || ask(&own, next.borrow_mut()(), 1024),
        &mut || ask(&reader, next.borrow_mut()(), 1024),
        &mut || ask(&reader, absent.clone(), 0),
        &mut || drop(std::hint::black_box(next.borrow_mut()())),
    ]);
    let ns = |time: Duration| time.as_nanos() as f64 / 1024.0;
    println!("\n| lookup of 1024 ids | ns an id |\n|---|---|");
    for (name, time) in [
        "own",
        "of another process",
        "absent",
        "of these, making the ids",
    ]
    .iter()
    .zip(times)
    {
        println!("| {name} | {:.0} |", ns(time));
    }
}
