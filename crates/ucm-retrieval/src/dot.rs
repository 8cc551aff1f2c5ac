//! Scores from products: a query against the representations of blocks.
//!
//! A block `b` has representations `r[b, j, h]`, `j` of them for each of `h` KV heads (its mean
//! key; several representative keys; the least and the largest key). With the query `q[h]` of a
//! head (the mean of the query heads that share it), its score is
//!
//! ```text
//! over heads ( over representations ( q[h] · r[b, j, h] ) )        or  -|q[h] - r[b, j, h]|  in place of the product
//! ```
//!
//! where *over* is a sum, a mean or the largest, and heads may also stay apart. Quest's bound
//! `Σ_d max(q_d·min_d, q_d·max_d)` is a sum of products too: of the negative part of the query with
//! the least key and of its positive part with the largest, so it is two representations whose
//! queries differ ([`DotScores::own_queries`]).
#![allow(
    unsafe_code,
    reason = "kernels that read blocks by address and are compiled for instruction sets"
)]

use std::ops::Range;

use ucm_core::{Error, Result};

use crate::element::Element;
use crate::isa::Isa;
use crate::lanes::{Lanes, Load, kernel, reduce};
use crate::rows::{Blocks, Rows, ScoreRows, Windows};
use crate::team::Team;

ucm_core::named! {
    /// The measure between a query and a representation.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Metric {
        /// Their product `q · r`.
        #[default]
        Dot = "dot",
        /// Minus their distance, `-|q - r|`.
        L2 = "l2",
    }
}

ucm_core::named! {
    /// How the scores of a block's representations are combined for a head.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Reps {
        /// The largest.
        #[default]
        Max = "max",
        /// The mean.
        Mean = "mean",
        /// The sum.
        Sum = "sum",
    }
}

ucm_core::named! {
    /// How the heads' scores are combined.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Heads {
        /// The sum.
        #[default]
        Sum = "sum",
        /// The mean.
        Mean = "mean",
        /// The largest.
        Max = "max",
        /// Not combined: each head has scores of its own.
        Apart = "apart",
    }
}

/// Representations of blocks, `[block, count, heads, dim]`, the last dimension without gaps.
#[derive(Debug, Clone, Copy)]
pub struct Representations<'a> {
    /// The representations of each block, by its physical id.
    pub blocks: Blocks<'a>,
    /// Type of their elements.
    pub element: Element,
    /// Representations of a block.
    pub count: usize,
    /// KV heads.
    pub heads: usize,
    /// Length of a representation of a head.
    pub dim: usize,
    /// Elements from one representation of a block to the next.
    pub stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
    /// Scales of the heads' representations: singles `[block, count, heads]`.
    pub scales: Option<Blocks<'a>>,
}

/// Arguments of [`dot_scores`].
#[derive(Debug, Clone, Copy)]
pub struct DotScores<'a> {
    /// The rows to score. Their ids are indices in `reps`.
    pub rows: Rows<'a>,
    /// The representations of the blocks.
    pub reps: Representations<'a>,
    /// Queries `[row, heads, dim]`, or `[row, count, heads, dim]` with [`DotScores::own_queries`].
    pub queries: &'a [f32],
    /// True if each representation of a block has a query of its own.
    pub own_queries: bool,
    /// The way in which vectors are compared.
    pub metric: Metric,
    /// How the scores of a head's representations are combined.
    pub over_reps: Reps,
    /// How the heads' scores are combined.
    pub over_heads: Heads,
    /// Blocks that need no score.
    pub windows: Windows,
}

/// Blocks that one thread scores at a time.
const CHUNK: usize = 64;
/// Prefetch distance in blocks, and most prefetched bytes of a block; the processor prefetches the
/// rest by itself.
const AHEAD: usize = 2;
const MOST_AHEAD: usize = 4096;

/// Scores of every block of every row, into `out [row, 1, stride]`, or `[row, heads, stride]` if
/// heads are not combined.
///
/// Blocks of the windows get `+inf`; missing blocks (a negative id) and places behind a row's end
/// get `-inf`.
///
/// ```
/// use ucm_retrieval::*;
///
/// // Three blocks, one head of two numbers each; a row that has blocks 2 and 0, in this order.
/// let reps: Vec<u8> = [1.0f32, 0.0, 0.0, 1.0, 3.0, 4.0].iter().flat_map(|x| x.to_ne_bytes()).collect();
/// let spec = DotScores {
///     rows: Rows::new(Ints::I32(&[2, 0]), 2, Ints::I32(&[32]), 16).unwrap(),
///     reps: Representations {
///         blocks: Blocks::new(&reps, 8).unwrap(),
///         element: Element::F32,
///         count: 1,
///         heads: 1,
///         dim: 2,
///         stride: 2,
///         head_stride: 2,
///         scales: None,
///     },
///     queries: &[10.0, 1.0],
///     own_queries: false,
///     metric: Metric::Dot,
///     over_reps: Reps::Max,
///     over_heads: Heads::Sum,
///     windows: Windows::default(),
/// };
/// let mut scores = [0.0; 2];
/// dot_scores(&spec, &mut scores, 2, Isa::best(), Team::ONE).unwrap();
/// assert_eq!(scores, [34.0, 10.0]);
/// ```
///
/// # Errors
///
/// `InvalidInput` for inconsistent sizes or an id beyond the last block, `Unsupported` for
/// instructions that this processor lacks.
pub fn dot_scores(
    spec: &DotScores<'_>,
    out: &mut [f32],
    stride: usize,
    isa: Isa,
    team: Team,
) -> Result<()> {
    let kernel = kernel(isa.checked()?, spec.reps.element);
    check(spec)?;
    let per_row = match spec.over_heads {
        Heads::Apart => spec.reps.heads,
        _ => 1,
    };
    let out = ScoreRows::new(out, &spec.rows, per_row, stride)?;
    let job = DotJob {
        spec,
        out: &out,
        flat: flat(spec),
    };
    let ends = [f32::INFINITY, f32::NEG_INFINITY];
    out.each_part(&spec.rows, spec.windows, CHUNK, ends, team, |row, part| {
        // SAFETY: `check` has compared the sizes and the ids, `checked` the processor; only this
        // thread writes to these places.
        unsafe { kernel(&job, row, part) };
    })
}

/// The two queries of Quest's bound for each of `queries [row, dim]`: `[row, 2, dim]`, the negative
/// part for the least key of a block, and the positive part for the largest.
///
/// ```
/// assert_eq!(ucm_retrieval::quest_queries(&[1.0, -2.0], 2), [0.0, -2.0, 1.0, 0.0]);
/// ```
pub fn quest_queries(queries: &[f32], dim: usize) -> Vec<f32> {
    let mut parts = Vec::with_capacity(2 * queries.len());
    for query in queries.chunks(dim.max(1)) {
        parts.extend(query.iter().map(|value| value.min(0.0)));
        parts.extend(query.iter().map(|value| value.max(0.0)));
    }
    parts
}

/// Checks that the kernels may read everything within the sizes.
fn check(spec: &DotScores<'_>) -> Result<()> {
    let wrong = |message: &'static str| {
        let error = Error::invalid(message).with("count", spec.reps.count);
        error
            .with("heads", spec.reps.heads)
            .with("dim", spec.reps.dim)
    };
    let (reps, heads, dim) = (spec.reps.count, spec.reps.heads, spec.reps.dim);
    if reps == 0 || heads == 0 || dim == 0 {
        return Err(wrong("a representation has at least one element"));
    }
    let bytes = || {
        let rep = spec.reps.stride.checked_mul(reps - 1)?;
        let head = spec.reps.head_stride.checked_mul(heads - 1)?;
        let end = rep.checked_add(head)?.checked_add(dim)?;
        end.checked_mul(spec.reps.element.size())
    };
    if bytes().is_none_or(|bytes| bytes > spec.reps.blocks.len()) {
        return Err(
            wrong("a block has fewer bytes than its representations need")
                .with("bytes", spec.reps.blocks.len()),
        );
    }
    let queries = if spec.own_queries { reps } else { 1 };
    if spec.queries.len() != spec.rows.len() * queries * heads * dim {
        return Err(
            wrong("there are not as many queries as rows").with("numbers", spec.queries.len())
        );
    }
    if let Some(scales) = &spec.reps.scales
        && (scales.len() != reps * heads * size_of::<f32>()
            || scales.count() < spec.reps.blocks.count())
    {
        return Err(
            wrong("there is one scale for each representation of a head")
                .with("bytes", scales.len()),
        );
    }
    if spec.reps.element == Element::I8 && spec.reps.scales.is_none() {
        return Err(wrong("int8 representations need their scales"));
    }
    spec.rows.check_ids(spec.reps.blocks.count())
}

/// If the score is one sum of products over contiguous elements: their number and the factor of the
/// sum.
fn flat(spec: &DotScores<'_>) -> Option<(usize, f32)> {
    let heads_side_by_side = spec.reps.heads == 1 || spec.reps.head_stride == spec.reps.dim;
    let len = spec.reps.heads * spec.reps.dim;
    let reps_side_by_side = spec.reps.count == 1 || (spec.own_queries && spec.reps.stride == len);
    let linear =
        spec.metric == Metric::Dot && (spec.reps.count == 1 || spec.over_reps != Reps::Max);
    let scale = match spec.over_heads {
        Heads::Sum => 1.0,
        Heads::Mean => 1.0 / spec.reps.heads as f32,
        _ if spec.reps.heads == 1 => 1.0,
        Heads::Max | Heads::Apart => return None,
    };
    let scale = match spec.over_reps {
        Reps::Mean => scale / spec.reps.count as f32,
        _ => scale,
    };
    let flat = spec.reps.scales.is_none() && linear && heads_side_by_side && reps_side_by_side;
    flat.then_some((len * spec.reps.count, scale))
}

struct DotJob<'a> {
    spec: &'a DotScores<'a>,
    out: &'a ScoreRows<f32>,
    flat: Option<(usize, f32)>,
}

/// Scores a range of blocks of a row.
///
/// # Safety
///
/// The specification was checked, the processor has the instructions, and nothing else writes to
/// these places.
type Kernel = unsafe fn(&DotJob<'_>, usize, Range<usize>);

fn kernel(isa: Isa, element: Element) -> Kernel {
    kernel!(isa, element, score(job: &DotJob<'_>, row: usize, blocks: Range<usize>))
}

/// See [`Kernel`].
#[inline(always)]
unsafe fn score<L: Lanes, N: Load>(job: &DotJob<'_>, row: usize, blocks: Range<usize>) {
    let spec = job.spec;
    let per_row = spec.queries.len() / spec.rows.len();
    // SAFETY: every row has that many queries; ids were compared with the number of blocks, and a
    // block's bytes with its shape.
    unsafe {
        let query = spec.queries.as_ptr().add(row * per_row);
        let end = blocks.end;
        for block in blocks {
            let out = job.out.at(row, block);
            let Ok(id) = usize::try_from(spec.rows.id(row, block)) else {
                let apart = if spec.over_heads == Heads::Apart {
                    spec.reps.heads
                } else {
                    1
                };
                for head in 0..apart {
                    out.add(head * job.out.stride()).write(f32::NEG_INFINITY);
                }
                continue;
            };
            // Blocks are scattered: the next ones are prefetched while these are summed.
            if block + AHEAD < end
                && let Ok(next) = usize::try_from(spec.rows.id(row, block + AHEAD))
            {
                let next = spec.reps.blocks.at(next);
                for line in (0..spec.reps.blocks.len().min(MOST_AHEAD)).step_by(64) {
                    L::prefetch(next.add(line));
                }
            }
            let reps = spec.reps.blocks.at(id).cast::<N>();
            if let Some((len, scale)) = job.flat {
                out.write(reduce::<L, N, false>(query, reps, 1.0, len) * scale);
                continue;
            }
            let scales = spec.reps.scales.map(|scales| scales.at(id).cast::<f32>());
            one_by_one::<L, N>(job, query, reps, scales, out);
        }
    }
}

/// The score of a block from its representations in turn.
#[inline(always)]
unsafe fn one_by_one<L: Lanes, N: Load>(
    job: &DotJob<'_>,
    query: *const f32,
    reps: *const N,
    scales: Option<*const f32>,
    out: *mut f32,
) {
    let spec = job.spec;
    let own = if spec.own_queries {
        spec.reps.heads * spec.reps.dim
    } else {
        0
    };
    let mut total = if spec.over_heads == Heads::Max {
        f32::NEG_INFINITY
    } else {
        0.0
    };
    // SAFETY: as the caller vouches.
    unsafe {
        for head in 0..spec.reps.heads {
            let mut value = if spec.over_reps == Reps::Max {
                f32::NEG_INFINITY
            } else {
                0.0
            };
            for rep in 0..spec.reps.count {
                let query = query.add(rep * own + head * spec.reps.dim);
                let from = reps.add(rep * spec.reps.stride + head * spec.reps.head_stride);
                let scale = scales.map_or(1.0, |scales| {
                    scales.add(rep * spec.reps.heads + head).read_unaligned()
                });
                let found = match spec.metric {
                    Metric::Dot => reduce::<L, N, false>(query, from, 1.0, spec.reps.dim) * scale,
                    Metric::L2 => -reduce::<L, N, true>(query, from, scale, spec.reps.dim).sqrt(),
                };
                value = match spec.over_reps {
                    Reps::Max => value.max(found),
                    Reps::Mean | Reps::Sum => value + found,
                };
            }
            if spec.over_reps == Reps::Mean {
                value /= spec.reps.count as f32;
            }
            match spec.over_heads {
                Heads::Apart => out.add(head * job.out.stride()).write(value),
                Heads::Max => total = total.max(value),
                Heads::Sum | Heads::Mean => total += value,
            }
        }
        match spec.over_heads {
            Heads::Apart => {}
            Heads::Mean => out.write(total / spec.reps.heads as f32),
            Heads::Sum | Heads::Max => out.write(total),
        }
    }
}
