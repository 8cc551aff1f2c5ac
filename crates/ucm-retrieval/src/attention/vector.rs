//! A part of attention with sixteen lanes.
//!
//! Keys are transposed, so a register has sixteen tokens and one element of a query is multiplied
//! with all of them. Values are not, so a register has sixteen elements of a value. A tile of query
//! heads by registers stays in registers during one pass over a block's keys; then the
//! probabilities of the whole part are computed, and a second pass over the blocks adds the values.
//! The next addresses are prefetched: a page ends before the processor's own prefetcher adapts.

use std::ops::Range;

use super::AttentionJob;
use super::rerope::Turns;
use crate::lanes::{Lanes, Load, exp};

/// Lanes of a register, which the kernels here rely on.
pub(super) const WIDTH: usize = 16;

/// See [`super::Kernel`].
#[inline(always)]
pub(super) unsafe fn part<L: Lanes, N: Load>(
    job: &AttentionJob<'_>,
    place: usize,
    tokens: Range<usize>,
    to: *mut f32,
) {
    let (dim, group) = (job.pages.dim, job.group);
    let (query, head) = (place / job.pages.heads, place % job.pages.heads);
    let most = if L::REGISTERS == 32 { 8 } else { 4 };
    let width = tokens.len().next_multiple_of(WIDTH);
    let mut logits = vec![0.0_f32; most.min(group) * width];
    let mut asked = vec![0.0_f32; most.min(group) * dim];
    // Queries for the keys behind the window and within it.
    let room = job.turns.map_or(0, |_| asked.len());
    let (mut behind, mut near) = (vec![0.0_f32; room], vec![0.0_f32; room]);
    let scale = job.scale(place);
    let mut first = 0;
    while first < group {
        let members = match group - first {
            8.. if most == 8 => 8,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
        // SAFETY: as the caller vouches.
        unsafe {
            for member in 0..members {
                let asked = &mut asked[member * dim..(member + 1) * dim];
                job.queries
                    .read(query, head * group + first + member, asked);
                asked.iter_mut().for_each(|value| *value *= scale);
                if let Some(turns) = job.turns {
                    turns.behind(asked, &mut behind[member * dim..(member + 1) * dim]);
                }
            }
            let pass = Pass {
                job,
                place,
                tokens: tokens.clone(),
                width,
                asked: job.turns.map_or(asked.as_ptr(), |_| behind.as_ptr()),
                plain: asked.as_ptr(),
                near: near.as_mut_ptr(),
                logits: logits.as_mut_ptr(),
                sums: to.add(first * dim),
                most: to.add(group * dim + first),
                total: to.add(group * (dim + 1) + first),
            };
            match members {
                8 => pass.run::<L, N, 8, 2>(),
                4 if L::REGISTERS == 32 => pass.run::<L, N, 4, 4>(),
                4 => pass.run::<L, N, 4, 1>(),
                2 if L::REGISTERS == 32 => pass.run::<L, N, 2, 4>(),
                2 => pass.run::<L, N, 2, 2>(),
                _ => pass.run::<L, N, 1, 4>(),
            }
        }
        first += members;
    }
}

/// Some query heads of a part.
struct Pass<'a> {
    job: &'a AttentionJob<'a>,
    place: usize,
    tokens: Range<usize>,
    /// Their number, rounded up to whole registers.
    width: usize,
    /// Queries `[members, dim]`, scaled; with turns those for the keys behind the window.
    asked: *const f32,
    /// The scaled queries, unrotated.
    plain: *const f32,
    /// Room for queries rotated for a block, with turns.
    near: *mut f32,
    /// Logits and then probabilities, `[members, width]`.
    logits: *mut f32,
    /// Output of the sums of values, `[members, dim]`.
    sums: *mut f32,
    /// Output of the largest logits, `[members]`.
    most: *mut f32,
    /// Output of the sums of probabilities, `[members]`.
    total: *mut f32,
}

impl Pass<'_> {
    /// `MEMBERS` query heads, in tiles of at most `TILE` registers each.
    ///
    /// # Safety
    ///
    /// As for [`super::Kernel`].
    #[inline(always)]
    unsafe fn run<L: Lanes, N: Load, const MEMBERS: usize, const TILE: usize>(&self) {
        let (size, dim) = (self.job.rows.block_size(), self.job.pages.dim);
        let blocks = self.tokens.start / size..self.tokens.end.div_ceil(size);
        // SAFETY: as the caller vouches; every block is one of the row, and a block is a whole
        // number of registers.
        unsafe {
            let page = |block: usize| self.job.page::<N>(self.place, block);
            for block in blocks.clone() {
                let next = if block + 1 < blocks.end {
                    page(block + 1)
                } else {
                    page(blocks.start).add(size * dim)
                };
                let first = block * size - self.tokens.start;
                let count = (self.width - first).min(size);
                let (keys, logits) = (page(block), self.logits.add(first));
                let mut at = 0;
                let tokens = self.job.all_tokens(self.place);
                let far = self
                    .job
                    .turns
                    .map_or(count, |turns| turns.far(tokens, block));
                let whole = far.min(count) / WIDTH * WIDTH;
                while at < whole {
                    let next = next.wrapping_add(at * dim);
                    let (keys, logits) = (keys.add(at), logits.add(at));
                    at += WIDTH
                        * match (whole - at) / WIDTH {
                            4.. if TILE >= 4 => self.keys::<L, N, MEMBERS, 4>(keys, logits, next),
                            2.. if TILE >= 2 => self.keys::<L, N, MEMBERS, 2>(keys, logits, next),
                            _ => self.keys::<L, N, MEMBERS, 1>(keys, logits, next),
                        };
                }
                if let (Some(turns), true) = (self.job.turns, at < count) {
                    let distance = tokens - 1 - block * size;
                    self.turn::<MEMBERS>(turns, distance);
                    while at < count {
                        let (keys, logits) = (keys.add(at), logits.add(at));
                        let behind = far.saturating_sub(at).min(WIDTH);
                        self.near_keys::<L, N, MEMBERS>(turns, at, behind, keys, logits);
                        at += WIDTH;
                    }
                }
            }
            for member in 0..MEMBERS {
                self.probabilities::<L>(member);
                for at in (0..dim).step_by(WIDTH) {
                    L::splat(0.0).store(self.sums.add(member * dim + at));
                }
            }
            for block in blocks.clone() {
                let next = page((block + 1).min(blocks.end - 1)).add(size * dim);
                let first = block * size - self.tokens.start;
                let count = (self.tokens.len() - first).min(size);
                let (values, probabilities) = (page(block).add(size * dim), self.logits.add(first));
                let mut at = 0;
                while at < dim {
                    let next = next.wrapping_add(at * size);
                    let from = (values.add(at), probabilities.cast_const(), count);
                    let sums = self.sums.add(at);
                    at += WIDTH
                        * match (dim - at) / WIDTH {
                            4.. if TILE >= 4 => self.values::<L, N, MEMBERS, 4>(from, sums, next),
                            2.. if TILE >= 2 => self.values::<L, N, MEMBERS, 2>(from, sums, next),
                            _ => self.values::<L, N, MEMBERS, 1>(from, sums, next),
                        };
                }
            }
        }
    }

    /// Logits of `TILE` registers of tokens. Returns their number.
    #[inline(always)]
    unsafe fn keys<L: Lanes, N: Load, const MEMBERS: usize, const TILE: usize>(
        &self,
        keys: *const N,
        logits: *mut f32,
        next: *const N,
    ) -> usize {
        let (size, dim) = (self.job.rows.block_size(), self.job.pages.dim);
        // SAFETY: as the caller vouches.
        unsafe {
            let mut sums = [[L::splat(0.0); TILE]; MEMBERS];
            for at in 0..dim {
                ask::<L, N, TILE>(next, at);
                let tile: [L; TILE] =
                    std::array::from_fn(|i| N::load::<L>(keys.add(at * size + i * WIDTH)));
                for (member, sums) in sums.iter_mut().enumerate() {
                    let asked = L::splat(*self.asked.add(member * dim + at));
                    for (sum, keys) in sums.iter_mut().zip(tile) {
                        *sum = sum.add_product(asked, keys);
                    }
                }
            }
            for (member, sums) in sums.into_iter().enumerate() {
                for (i, sum) in sums.into_iter().enumerate() {
                    sum.store(logits.add(member * self.width + i * WIDTH));
                }
            }
        }
        TILE
    }

    /// Rotates the queries for a block whose first token is at this distance.
    #[inline(always)]
    unsafe fn turn<const MEMBERS: usize>(&self, turns: &Turns<'_>, distance: usize) {
        let dim = self.job.pages.dim;
        for member in 0..MEMBERS {
            // SAFETY: there is room for the members, and only this pass uses it.
            let (from, to) = unsafe {
                let from = std::slice::from_raw_parts(self.plain.add(member * dim), dim);
                let to = std::slice::from_raw_parts_mut(self.near.add(member * dim), dim);
                (from, to)
            };
            turns.near(from, distance, to);
        }
    }

    /// Logits of one register of tokens, from slot `at` of their block, of which the first `behind`
    /// are behind the window.
    #[inline(always)]
    unsafe fn near_keys<L: Lanes, N: Load, const MEMBERS: usize>(
        &self,
        turns: &Turns<'_>,
        at: usize,
        behind: usize,
        keys: *const N,
        logits: *mut f32,
    ) {
        let (size, dim) = (self.job.rows.block_size(), self.job.pages.dim);
        let half = dim / 2;
        let [cos, sin, minus] = turns.slots(at);
        // SAFETY: as the caller vouches; the tables have `half` channels of a block's slots.
        unsafe {
            let mut kept = [[0.0_f32; WIDTH]; MEMBERS];
            if behind > 0 {
                self.keys::<L, N, MEMBERS, 1>(keys, logits, keys);
                for (member, kept) in kept.iter_mut().enumerate() {
                    L::load_f32(logits.add(member * self.width)).store(kept.as_mut_ptr());
                }
            }
            let mut sums = [[L::splat(0.0); 2]; MEMBERS];
            for channel in 0..half {
                let low = N::load::<L>(keys.add(channel * size));
                let high = N::load::<L>(keys.add((half + channel) * size));
                let turn = |table: *const f32| L::load_f32(table.add(channel * size));
                let (cos, sin, minus, none) = (turn(cos), turn(sin), turn(minus), L::splat(0.0));
                let turned_low = none.add_product(low, cos).add_product(high, minus);
                let turned_high = none.add_product(high, cos).add_product(low, sin);
                for (member, sums) in sums.iter_mut().enumerate() {
                    let asked = self.near.add(member * dim + channel);
                    sums[0] = sums[0].add_product(L::splat(*asked), turned_low);
                    sums[1] = sums[1].add_product(L::splat(*asked.add(half)), turned_high);
                }
            }
            for (member, (sums, kept)) in sums.into_iter().zip(kept).enumerate() {
                let logits = logits.add(member * self.width);
                sums[0].add(sums[1]).store(logits);
                std::ptr::copy_nonoverlapping(kept.as_ptr(), logits, behind);
            }
        }
    }

    /// Turns the logits of a query head into probabilities, relative to the largest.
    #[inline(always)]
    unsafe fn probabilities<L: Lanes>(&self, member: usize) {
        // SAFETY: as the caller vouches.
        unsafe {
            let logits = self.logits.add(member * self.width);
            for at in self.tokens.len()..self.width {
                logits.add(at).write(f32::NEG_INFINITY);
            }
            let mut most = L::load_f32(logits);
            for at in (WIDTH..self.width).step_by(WIDTH) {
                most = most.max(L::load_f32(logits.add(at)));
            }
            let most = most.most();
            let mut total = L::splat(0.0);
            for at in (0..self.width).step_by(WIDTH) {
                let probability = exp(L::load_f32(logits.add(at)).add(L::splat(-most)));
                probability.store(logits.add(at));
                total = total.add(probability);
            }
            self.most.add(member).write(most);
            self.total.add(member).write(total.sum());
        }
    }

    /// Adds `count` values, each times its probability, in `TILE` registers of elements. Returns
    /// their number.
    #[inline(always)]
    unsafe fn values<L: Lanes, N: Load, const MEMBERS: usize, const TILE: usize>(
        &self,
        (values, probabilities, count): (*const N, *const f32, usize),
        to: *mut f32,
        next: *const N,
    ) -> usize {
        let dim = self.job.pages.dim;
        // SAFETY: as the caller vouches.
        unsafe {
            let mut sums: [[L; TILE]; MEMBERS] = std::array::from_fn(|member| {
                std::array::from_fn(|i| L::load_f32(to.add(member * dim + i * WIDTH)))
            });
            for token in 0..count {
                ask::<L, N, TILE>(next, token);
                let tile: [L; TILE] =
                    std::array::from_fn(|i| N::load::<L>(values.add(token * dim + i * WIDTH)));
                for (member, sums) in sums.iter_mut().enumerate() {
                    let probability = L::splat(*probabilities.add(member * self.width + token));
                    for (sum, values) in sums.iter_mut().zip(tile) {
                        *sum = sum.add_product(probability, values);
                    }
                }
            }
            for (member, sums) in sums.into_iter().enumerate() {
                for (i, sum) in sums.into_iter().enumerate() {
                    sum.store(to.add(member * dim + i * WIDTH));
                }
            }
        }
        TILE
    }
}

/// Prefetches the next `TILE` registers, the length of the current step.
#[inline(always)]
unsafe fn ask<L: Lanes, N, const TILE: usize>(next: *const N, step: usize) {
    let from = next.wrapping_add(step * TILE * WIDTH).cast::<u8>();
    for line in (0..TILE * WIDTH * size_of::<N>()).step_by(64) {
        // SAFETY: a prefetched address need not be mapped.
        unsafe { L::prefetch(from.wrapping_add(line)) };
    }
}
