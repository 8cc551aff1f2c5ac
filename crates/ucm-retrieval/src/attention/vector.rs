//! A part of attention with sixteen lanes.
//!
//! Keys are transposed, so a register has sixteen tokens and one element of a query is multiplied
//! with all of them. Values are not, so a register has sixteen elements of a value. A tile of query
//! heads by registers stays in registers during one pass over a block's keys; then the
//! probabilities of the whole part are computed, and a second pass over the blocks adds the values.
//! The next addresses are prefetched: a page ends before the processor's own prefetcher adapts.

use std::ops::Range;

use super::AttentionJob;
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
                asked.iter_mut().for_each(|value| *value *= job.scale);
            }
            let pass = Pass {
                job,
                place,
                tokens: tokens.clone(),
                width,
                asked: asked.as_ptr(),
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
    /// Queries `[members, dim]`, scaled.
    asked: *const f32,
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
                while at < count {
                    let next = next.wrapping_add(at * dim);
                    let (keys, logits) = (keys.add(at), logits.add(at));
                    at += WIDTH
                        * match (count - at) / WIDTH {
                            4.. if TILE >= 4 => self.keys::<L, N, MEMBERS, 4>(keys, logits, next),
                            2.. if TILE >= 2 => self.keys::<L, N, MEMBERS, 2>(keys, logits, next),
                            _ => self.keys::<L, N, MEMBERS, 1>(keys, logits, next),
                        };
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
