//! Selection of the best blocks of every row, as a block table for attention.

use std::sync::Mutex;

use ucm_core::{Error, Result};

use crate::rows::{Rows, Windows};
use crate::team::Team;

/// Scores `[row, heads, stride]`, higher is better.
#[derive(Debug, Clone, Copy)]
pub enum Scores<'a> {
    /// Singles; NaN and `-inf` are never selected.
    F32(&'a [f32]),
    /// Integers; [`i32::MIN`] is never selected.
    I32(&'a [i32]),
}

/// The output of [`select`]. Every part has `width` places, or one, for each row and head.
#[derive(Debug)]
pub struct Selected<'a> {
    /// Physical ids of the kept blocks, in the order of their tokens; the last one is repeated to
    /// the end.
    pub table: &'a mut [i32],
    /// Positions of the kept blocks in the row's own table, ascending, then `-1` to the end.
    pub logical: &'a mut [i32],
    /// How many are kept.
    pub counts: &'a mut [i32],
    /// Tokens of the kept blocks: the length for attention.
    pub tokens: &'a mut [i32],
    /// Number of places of a row and head.
    pub width: usize,
}

/// Selects the `budgets[row]` best blocks between the windows, in addition to the windows; among
/// equal scores the lower position wins. A row with no more blocks than that keeps all.
///
/// Only the last block of a row can be partial, and it is always kept, so attention with the
/// shorter table and length is exact over the kept tokens:
/// `(kept - 1) * block_size + tokens of the last block`. For that a row's `local` window counts as
/// at least 1.
///
/// ```
/// use ucm_retrieval::*;
///
/// let rows = Rows::new(Ints::I32(&[9, 4, 7, 2]), 4, Ints::I32(&[60]), 16).unwrap();
/// let (mut table, mut logical, mut counts, mut tokens) = ([0; 3], [0; 3], [0], [0]);
/// let kept = Selected { table: &mut table, logical: &mut logical, counts: &mut counts, tokens: &mut tokens, width: 3 };
/// let windows = Windows { init: 1, local: 1 };
/// select(Scores::F32(&[0.0, 1.0, 2.0, 0.0]), 4, 1, &rows, &[1], windows, kept, Team::ONE).unwrap();
/// assert_eq!(logical, [0, 2, 3]);
/// assert_eq!(table, [9, 7, 2]);
/// assert_eq!(tokens, [2 * 16 + 12]);
/// ```
///
/// # Errors
///
/// `InvalidInput` for inconsistent sizes or if more blocks are kept than `width`.
#[allow(
    clippy::too_many_arguments,
    reason = "each is one tensor or one number of the caller"
)]
pub fn select(
    scores: Scores<'_>,
    stride: usize,
    heads: usize,
    rows: &Rows<'_>,
    budgets: &[usize],
    windows: Windows,
    kept: Selected<'_>,
    team: Team,
) -> Result<()> {
    let windows = Windows {
        init: windows.init,
        local: windows.local.max(1),
    };
    let width = kept.width;
    check(&scores, stride, heads, rows, budgets, windows, &kept)?;
    if width == 0 {
        return Ok(()); // no row has a block
    }
    let places = kept
        .table
        .chunks_exact_mut(width)
        .zip(kept.logical.chunks_exact_mut(width));
    let numbers = kept.counts.iter_mut().zip(kept.tokens.iter_mut());
    let targets: Vec<_> = places.zip(numbers).map(Mutex::new).collect();
    team.run(targets.len(), |item| {
        let row = item / heads;
        // Each lock is taken once, by the thread that fills it.
        let Ok(mut target) = targets[item].lock() else {
            return;
        };
        let ((table, logical), (count, tokens)) = &mut *target;
        let mut found = 0;
        let mut keep = |block: usize| {
            let id = rows.id(row, block);
            if id >= 0 {
                (table[found], logical[found]) = (id as i32, block as i32);
                found += 1;
            }
        };
        let blocks = rows.blocks(row);
        let middle = windows.middle(blocks);
        (0..middle.start).for_each(&mut keep);
        if budgets[row] >= middle.len() {
            middle.clone().for_each(&mut keep);
        } else {
            let first = item * stride;
            let range = first + middle.start..first + middle.end;
            let ranks = match scores {
                Scores::F32(all) => ranks(&all[range], of_single),
                Scores::I32(all) => ranks(&all[range], of_integer),
            };
            let least = least_of_best(ranks.clone(), budgets[row]);
            for (block, rank) in middle.clone().zip(ranks) {
                if rank >= least {
                    keep(block);
                }
            }
        }
        (middle.end..blocks).for_each(&mut keep);
        let last = found.checked_sub(1).map_or(0, |last| table[last]);
        table[found..].fill(last);
        logical[found..].fill(-1);
        **count = found as i32;
        **tokens = match found {
            0 => 0,
            _ => ((found - 1) * rows.block_size() + rows.last_len(row)) as i32,
        };
    })
}

fn check(
    scores: &Scores<'_>,
    stride: usize,
    heads: usize,
    rows: &Rows<'_>,
    budgets: &[usize],
    windows: Windows,
    kept: &Selected<'_>,
) -> Result<()> {
    let numbers = match scores {
        Scores::F32(scores) => scores.len(),
        Scores::I32(scores) => scores.len(),
    };
    let all = rows.len().checked_mul(heads);
    if heads == 0
        || all.and_then(|all| all.checked_mul(stride)) != Some(numbers)
        || rows.most_blocks() > stride
    {
        let error = Error::invalid("the scores have the wrong size").with("numbers", numbers);
        let error = error.with("rows", rows.len()).with("heads", heads);
        return Err(error
            .with("stride", stride)
            .with("most_blocks", rows.most_blocks()));
    }
    if budgets.len() != rows.len() {
        let error = Error::invalid("every row has one budget").with("rows", rows.len());
        return Err(error.with("budgets", budgets.len()));
    }
    let places = all.and_then(|all| all.checked_mul(kept.width));
    let right = Some(kept.table.len()) == places
        && Some(kept.logical.len()) == places
        && Some(kept.counts.len()) == all
        && Some(kept.tokens.len()) == all;
    if !right {
        let error = Error::invalid("the output of the kept blocks has the wrong size");
        let error = error
            .with("table", kept.table.len())
            .with("logical", kept.logical.len());
        let error = error
            .with("counts", kept.counts.len())
            .with("tokens", kept.tokens.len());
        return Err(error
            .with("rows", rows.len())
            .with("heads", heads)
            .with("width", kept.width));
    }
    rows.check_ids(i32::MAX as usize)?;
    for (row, &budget) in budgets.iter().enumerate() {
        let blocks = rows.blocks(row);
        let most = blocks - windows.middle(blocks).len() + budget.min(windows.middle(blocks).len());
        if most > kept.width {
            let error =
                Error::invalid("a row keeps more blocks than there are places").with("row", row);
            return Err(error.with("blocks", most).with("width", kept.width));
        }
        if blocks > 0 && rows.id(row, blocks - 1) < 0 {
            return Err(Error::invalid("the last block of a row is missing").with("row", row));
        }
    }
    Ok(())
}

/// Ranks of blocks by their scores, the lower position first among equals, unique within a row. 0:
/// never selected.
fn ranks<T: Copy>(scores: &[T], order: impl Fn(T) -> u32) -> Vec<u64> {
    let rank = |(&score, place): (&T, u32)| match order(score) {
        0 => 0,
        score => u64::from(score) << 32 | u64::from(u32::MAX - place),
    };
    scores.iter().zip(0..).map(rank).collect()
}

/// An integer in the order of singles; 0 for those that are never selected.
fn of_single(score: f32) -> u32 {
    if score.is_nan() || score == f32::NEG_INFINITY {
        return 0;
    }
    let bits = (score + 0.0).to_bits(); // both zeros are equal
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// An unsigned integer in the order of integers; 0 for those that are never selected.
fn of_integer(score: i32) -> u32 {
    score.cast_unsigned() ^ 1 << 31
}

/// The least of the `count` largest ranks; 1 if fewer can be selected.
fn least_of_best(mut ranks: Vec<u64>, count: usize) -> u64 {
    match count {
        0 => u64::MAX,
        _ => (*ranks.select_nth_unstable_by(count - 1, |a, b| b.cmp(a)).1).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_order_of_scores() {
        let scores = [
            f32::MIN,
            -2.0,
            -1.0e-30,
            -0.0,
            1.0e-30,
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        assert!(
            scores
                .windows(2)
                .all(|pair| of_single(pair[0]) < of_single(pair[1]))
        );
        assert_eq!(of_single(-0.0), of_single(0.0));
        assert_eq!((of_single(f32::NAN), of_single(f32::NEG_INFINITY)), (0, 0));
        let scores = [i32::MIN + 1, -1, 0, 1, i32::MAX];
        assert!(
            scores
                .windows(2)
                .all(|pair| of_integer(pair[0]) < of_integer(pair[1]))
        );
        assert_eq!(of_integer(i32::MIN), 0);
        let ranks = ranks(&[4, 5, 5, 0], |score| score);
        assert!(ranks[1] > ranks[2] && ranks[2] > ranks[0] && ranks[3] == 0);
    }
}
