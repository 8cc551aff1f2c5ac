//! The selection of blocks against a full sort.

use crate::common::{number, table};
use proptest::prelude::*;
use ucm_retrieval::*;

/// The blocks kept for a row and head.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    table: Vec<i32>,
    logical: Vec<i32>,
    tokens: i32,
}

struct Kept {
    table: Vec<i32>,
    logical: Vec<i32>,
    counts: Vec<i32>,
    tokens: Vec<i32>,
}

impl Kept {
    fn new(rows: usize, width: usize) -> Self {
        Self {
            table: vec![-7; rows * width],
            logical: vec![-7; rows * width],
            counts: vec![-7; rows],
            tokens: vec![-7; rows],
        }
    }

    fn places(&mut self, width: usize) -> Selected<'_> {
        Selected {
            table: &mut self.table,
            logical: &mut self.logical,
            counts: &mut self.counts,
            tokens: &mut self.tokens,
            width,
        }
    }

    fn row(&self, row: usize, width: usize) -> Row {
        let count = self.counts[row] as usize;
        assert!(
            self.logical[row * width + count..(row + 1) * width]
                .iter()
                .all(|&place| place == -1)
        );
        Row {
            table: self.table[row * width..row * width + count].to_vec(),
            logical: self.logical[row * width..row * width + count].to_vec(),
            tokens: self.tokens[row],
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_best_between_the_windows_and_the_windows(
        lengths in prop::collection::vec(0..600_usize, 0..5),
        heads in 1..4_usize,
        block_size in 1..20_usize,
        (init, local) in (0..4_usize, 0..4_usize),
        budget in 0..30_usize,
        integers: bool,
        distinct in 1..100_i32,
        more in 0..3_usize,
        seed: u64,
    ) {
        let (mut ids, stride) = table(&lengths, block_size, 1000, true, seed);
        for (row, &len) in lengths.iter().enumerate() {
            if len > 0 {
                let last = &mut ids[row * stride + len.div_ceil(block_size) - 1];
                *last = last.abs();
            }
        }
        let tokens: Vec<i32> = lengths.iter().map(|&len| len as i32).collect();
        let rows = Rows::new(Ints::I32(&ids), stride, Ints::I32(&tokens), block_size).unwrap();
        let mut state = seed ^ 1;
        let scores: Vec<i32> = (0..lengths.len() * heads * stride).map(|_| {
            let drawn = (number(&mut state) * 16.0) as i32;
            if drawn == 31 { i32::MIN } else { drawn % distinct }
        }).collect();
        let singles: Vec<f32> = scores.iter().map(|&score| match score {
            i32::MIN => f32::NEG_INFINITY,
            score => score as f32 * 0.25,
        }).collect();
        let given = if integers { Scores::I32(&scores) } else { Scores::F32(&singles) };
        let budgets: Vec<usize> = (0..lengths.len()).map(|row| budget + row).collect();
        let windows = Windows { init, local };
        let width = init + local.max(1) + budget + lengths.len() + more;
        for team in [Team::ONE, Team::new(3).unwrap()] {
            let mut kept = Kept::new(lengths.len() * heads, width);
            select(given, stride, heads, &rows, &budgets, windows, kept.places(width), team).unwrap();
            for item in 0..lengths.len() * heads {
                let (row, len) = (item / heads, lengths[item / heads]);
                let blocks = len.div_ceil(block_size);
                let end = blocks.saturating_sub(local.max(1));
                let first = init.min(end);
                let score = |block: usize| scores[item * stride + block];
                let mut middle: Vec<usize> = (first..end).collect();
                if middle.len() > budgets[row] {
                    middle.retain(|&block| score(block) != i32::MIN);
                    middle.sort_by_key(|&block| (std::cmp::Reverse(score(block)), block));
                    middle.truncate(budgets[row]);
                }
                let mut places: Vec<usize> = (0..first).chain(middle).chain(end..blocks).collect();
                places.sort_unstable();
                places.retain(|&block| ids[row * stride + block] >= 0);
                let right = Row {
                    table: places.iter().map(|&block| ids[row * stride + block]).collect(),
                    logical: places.iter().map(|&block| block as i32).collect(),
                    tokens: match places.len() {
                        0 => 0,
                        count => ((count - 1) * block_size + (len - 1) % block_size + 1) as i32,
                    },
                };
                prop_assert_eq!(kept.row(item, width), right);
            }
        }
    }

    /// A larger budget keeps what a smaller one does, and everything once it is large enough.
    #[test]
    fn budgets_are_nested(blocks in 3..80_usize, seed: u64) {
        let ids: Vec<i64> = (0..blocks as i64).rev().collect();
        let tokens = [blocks as i64 * 4];
        let rows = Rows::new(Ints::I64(&ids), blocks, Ints::I64(&tokens), 4).unwrap();
        let scores = crate::common::numbers(blocks, seed);
        let mut before: Vec<i32> = Vec::new();
        for budget in 0..=blocks {
            let mut kept = Kept::new(1, blocks);
            let windows = Windows { init: 1, local: 1 };
            let places = kept.places(blocks);
            select(Scores::F32(&scores), blocks, 1, &rows, &[budget], windows, places, Team::ONE).unwrap();
            let now = kept.row(0, blocks).logical;
            prop_assert_eq!(now.len(), blocks.min(budget + 2));
            prop_assert!(before.iter().all(|place| now.contains(place)));
            before = now;
        }
        let all: Vec<i32> = (0..blocks as i32).collect();
        prop_assert_eq!(before, all);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let rows = Rows::new(Ints::I32(&[3, 4, -1]), 3, Ints::I32(&[8]), 4).unwrap();
    let refused =
        |scores: &[f32], heads: usize, budgets: &[usize], width: usize, rows: &Rows<'_>| {
            let mut kept = Kept::new(heads, width);
            let windows = Windows { init: 0, local: 1 };
            let places = kept.places(width);
            select(
                Scores::F32(scores),
                3,
                heads,
                rows,
                budgets,
                windows,
                places,
                Team::ONE,
            )
            .is_err()
        };
    assert!(!refused(&[0.0; 3], 1, &[1], 2, &rows));
    assert!(refused(&[0.0; 3], 1, &[1], 1, &rows), "no place for both");
    assert!(!refused(&[0.0; 3], 1, &[0], 1, &rows));
    assert!(refused(&[0.0; 3], 2, &[1], 2, &rows), "scores of one head");
    assert!(refused(&[0.0; 3], 0, &[1], 2, &rows));
    assert!(
        refused(&[0.0; 3], 1, &[1, 1], 2, &rows),
        "budgets of two rows"
    );
    let absent = Rows::new(Ints::I32(&[3, 4, -1]), 3, Ints::I32(&[9]), 4).unwrap();
    assert!(
        refused(&[0.0; 3], 1, &[2], 3, &absent),
        "the last block is missing"
    );
}
