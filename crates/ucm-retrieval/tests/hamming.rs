//! Scores from hash codes against counting bit by bit.

use crate::common::{number, table, ways};
use proptest::prelude::*;
use ucm_retrieval::*;

const POOL: usize = 12;

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            number(&mut state);
            (state >> 56) as u8
        })
        .collect()
}

/// Sizes with and without specialised kernels.
fn code_lens() -> impl Strategy<Value = usize> {
    prop_oneof![
        Just(8),
        Just(16),
        Just(32),
        Just(64),
        Just(72),
        Just(4),
        1..150_usize
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn scores_are_the_least_distances(
        code_len in code_lens(),
        heads in 1..10_usize,
        queries_per_head in prop_oneof![3 => Just(1), 1 => 2..128_usize],
        block_size in prop_oneof![Just(16), 1..40_usize],
        lengths in prop::collection::vec(0..200_usize, 0..3),
        heads_apart: bool,
        (init, local) in (0..2_usize, 0..2_usize),
        seed: u64,
    ) {
        let queries_per_head = if code_len * heads > 300 { queries_per_head.min(3) } else { queries_per_head };
        let codes = bytes(POOL * block_size * heads * code_len, seed);
        let queries = bytes(lengths.len() * heads * queries_per_head * code_len, seed ^ 1);
        let (ids, stride) = table(&lengths, block_size, POOL, true, seed ^ 2);
        let tokens: Vec<i32> = lengths.iter().map(|&len| len as i32).collect();
        let spec = HammingScores {
            rows: Rows::new(Ints::I32(&ids), stride, Ints::I32(&tokens), block_size).unwrap(),
            codes: Blocks::new(&codes, block_size * heads * code_len).unwrap(),
            heads,
            code_len,
            queries: &queries,
            queries_per_head,
            heads_apart,
            windows: Windows { init, local },
        };
        let per_row = if heads_apart { heads } else { 1 };
        let distance = |row: usize, id: usize, slot: usize, head: usize| -> i32 {
            let at = ((id * block_size + slot) * heads + head) * code_len;
            let of_head = (row * heads + head) * queries_per_head * code_len;
            let asked = queries[of_head..of_head + queries_per_head * code_len].chunks(code_len);
            let bits = asked.flat_map(|query| query.iter().zip(&codes[at..at + code_len]));
            bits.map(|(a, b)| (a ^ b).count_ones() as i32).sum()
        };
        let right: Vec<i32> = (0..lengths.len() * per_row * stride).map(|place| {
            let (row, head, block) = (place / stride / per_row, place / stride % per_row, place % stride);
            let blocks = lengths[row].div_ceil(block_size);
            let id = ids[row * stride + block];
            if block >= blocks {
                return i32::MIN;
            }
            if block < init || block + local >= blocks {
                return i32::MAX;
            }
            if id < 0 {
                return i32::MIN;
            }
            let slots = block_size.min(lengths[row] - block * block_size);
            let heads = if heads_apart { head..head + 1 } else { 0..heads };
            let all = heads.flat_map(|head| (0..slots).map(move |slot| (slot, head)));
            -all.map(|(slot, head)| distance(row, id as usize, slot, head)).min().unwrap()
        }).collect();
        for (isa, team) in ways() {
            let mut out = vec![7; right.len()];
            hamming_scores(&spec, &mut out, stride, isa, team).unwrap();
            prop_assert_eq!(&out, &right, "on {}", isa.name());
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    static CODES: [u8; 64] = [0; 64];
    let fits = HammingScores {
        rows: Rows::new(Ints::I32(&[0, 1]), 2, Ints::I32(&[8]), 4).unwrap(),
        codes: Blocks::new(&CODES, 32).unwrap(),
        heads: 2,
        code_len: 4,
        queries: &[0; 8],
        queries_per_head: 1,
        heads_apart: false,
        windows: Windows::default(),
    };
    let refused = |spec: HammingScores<'_>| {
        hamming_scores(&spec, &mut [0; 2], 2, Isa::Scalar, Team::ONE).is_err()
    };
    assert!(!refused(fits));
    assert!(refused(HammingScores { heads: 1, ..fits }));
    assert!(refused(HammingScores {
        code_len: 8,
        ..fits
    }));
    assert!(refused(HammingScores {
        queries_per_head: 2,
        ..fits
    }));
    assert!(refused(HammingScores {
        queries: &[0; 1024],
        queries_per_head: 128,
        ..fits
    }));
    assert!(refused(HammingScores {
        codes: Blocks::new(&CODES[..32], 32).unwrap(),
        ..fits
    }));
    assert!(
        refused(HammingScores {
            heads_apart: true,
            ..fits
        }),
        "twice as many scores"
    );
}
