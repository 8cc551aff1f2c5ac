//! The memory tier compared with memcpy: storing a record, copying one out of the own region and
//! out of another process's (here: another store of this one, mapped read-only), and looking up
//! ids. Ratios of time, memcpy = 1, measured in turns.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints its table, and fails where it must"
)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::num::NonZeroU64;
use std::time::Duration;

use ucm_benches::{asked_for, identity, in_turns};
use ucm_core::{BlockId, DType, Geometry, Identity, Part};
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::{LANE_LOOKUP, MonotonicTime, SystemClock};
use ucm_media::backend::Backend;
use ucm_media::memory::{MemoryBackend, MemoryConfig};
use ucm_media::scope::Scope;
use ucm_record::RecordLayout;

/// Bytes of the records in rotation: more than the caches of most processors.
const BYTES: usize = 256 << 20;
/// Records moved in one turn.
const AT_ONCE: usize = 16;

fn id(n: u64) -> BlockId {
    let word = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    BlockId((u128::from(word) << 64 | u128::from(word.rotate_left(17))).to_le_bytes())
}

fn tier(dir: &std::path::Path, layout: &RecordLayout, bytes: Option<usize>) -> MemoryBackend {
    let capacity = bytes.and_then(|bytes| NonZeroU64::new(bytes as u64));
    let scope = Scope {
        identity: Identity::parse(&identity("w")).unwrap(),
        labels: BTreeMap::new(),
        part: Part::default(),
        record: layout.clone(),
        other_parts: Vec::new(),
        shorter: false,
        lookup_only: false,
        writer: 1,
    };
    let config = MemoryConfig {
        registry: Some(dir.to_owned()),
        ..MemoryConfig::new(scope, capacity)
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
        // Aligned like the engine's slots: on some processors memcpy is slower at other offsets in
        // a page.
        let slots =
            SlotPool::with_slots(HostArena::new(BYTES + 2 * len).unwrap(), len, count + 1).unwrap();
        let mut sources: Vec<Slot> = std::iter::from_fn(|| slots.try_acquire_above(1)).collect();
        // Written once; otherwise all of them would be one cached page of zeroes.
        sources
            .iter_mut()
            .for_each(|source| source.as_mut_slice().fill(2));
        let mut slot = slots.try_acquire().unwrap();
        let out = &mut slot.as_mut_slice()[..len];
        out.fill(1);
        assert_eq!(sources.len(), count);
        // A turn of the first three continues where the previous one ended.
        let out = RefCell::new(out);
        let turns: [Cell<usize>; 3] = Default::default();
        let ids = |turn: &Cell<usize>| {
            let first = turn.replace((turn.get() + AT_ONCE) % count);
            (first..first + AT_ONCE).map(move |at| at % count)
        };
        let copied = |tier: &MemoryBackend, turn| {
            for at in ids(turn) {
                tier.copy_out(id(at as u64), &mut out.borrow_mut()).unwrap();
            }
        };
        let fastest = in_turns([
            &mut || {
                for at in ids(&turns[0]) {
                    let source = &sources[at].as_slice()[..len];
                    out.borrow_mut().copy_from_slice(black_box(source));
                }
            },
            &mut || copied(&own, &turns[1]),
            &mut || copied(&reader, &turns[2]),
        ]);
        // Storing uses up slots, so it is last.
        let mut next = count as u64;
        let [memcpy, keep] = in_turns([
            &mut || {
                for source in sources.iter().take(AT_ONCE) {
                    out.borrow_mut()
                        .copy_from_slice(black_box(&source.as_slice()[..len]));
                }
            },
            &mut || {
                for source in sources.iter().take(AT_ONCE) {
                    next += 1;
                    own.insert(id(next), black_box(&source.as_slice()[..len]), 0)
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
    let first = Cell::new(0);
    let next = || -> Vec<BlockId> {
        let first = first.replace((first.get() + 1024) % records);
        (0..1024).map(|n| id((first + n * 29) % records)).collect()
    };
    let absent: Vec<BlockId> = (0..1024).map(|n| id(records + 1 + n)).collect();
    let ask = |tier: &MemoryBackend, ids: &[BlockId], hits: usize| {
        let here = tier.pool().here(LANE_LOOKUP, MonotonicTime::NEVER);
        let found = tier.lookup(&here, ids, false).unwrap();
        assert_eq!(found.iter().filter(|there| there.is_ok()).count(), hits);
    };
    let times = in_turns([
        &mut || ask(&own, &next(), 1024),
        &mut || ask(&reader, &next(), 1024),
        &mut || ask(&reader, &absent, 0),
        &mut || drop(black_box(next())),
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
