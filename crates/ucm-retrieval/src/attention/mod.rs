//! Decode attention over a block table, for pages as vLLM's CPU backend packs them.
//!
//! Each row has one query, that of the newest token, which attends to every token of the row's
//! table. So the only mask is the end of the last block. The page of a head holds its keys
//! transposed, `[dim, block_size]`, and behind them its values, `[block_size, dim]` (vLLM's
//! instruction sets "vec" and "vec16"; the packing of "amx" is not supported).
//!
//! ```text
//! out[x] = Σ_t p_t·v_t / Σ_t p_t,   p_t = exp(scale·q_x·k_t - m),   m the largest of the exponents
//! ```
//!
//! Logits, probabilities and sums are singles. A row is cut into parts of a fixed number of tokens.
//! One thread computes each part, and the parts are combined in order, so the result depends
//! neither on the batch nor on the number of threads. [`rerope_attention`] computes the same over
//! keys that are not rotated, by distances that end at a window ([`Rerope`]).
#![allow(
    unsafe_code,
    reason = "kernels that read pages by address and are compiled for instruction sets"
)]

mod rerope;
mod vector;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use ucm_core::{Error, Result};

use crate::element::{Element, to_bf16, to_f16};
use crate::isa::Isa;
use crate::lanes::{Lanes, Load, kernel};
use crate::rows::{Blocks, Rows};
use crate::team::Team;
use crate::vectors::Vectors;

pub use rerope::Rerope;
use rerope::Turns;

/// Pages `[block, heads, 2 * block_size * dim]`: for each head the keys, transposed, and then the
/// values.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    /// The page of each physical block, all heads.
    pub blocks: Blocks<'a>,
    /// Type of their elements: bf16, f16 or f32.
    pub element: Element,
    /// KV heads.
    pub heads: usize,
    /// Head size, a multiple of 16.
    pub dim: usize,
}

/// The output: `[row, query heads, dim]`, the last dimension without gaps.
#[derive(Debug)]
pub struct Output<'a> {
    base: *mut u8,
    element: Element,
    len: usize,
    strides: [usize; 2],
    held: PhantomData<&'a mut [u8]>,
}

// SAFETY: threads of a call write to different heads of it.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// An output without gaps in `bytes`; `shape` is rows, query heads, head size.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `bytes` has another length.
    pub fn new(bytes: &'a mut [u8], element: Element, shape: [usize; 3]) -> Result<Self> {
        let [rows, heads, dim] = shape;
        let size = shape
            .iter()
            .try_fold(element.size(), |size, &part| size.checked_mul(part));
        if size != Some(bytes.len()) {
            let error = Error::invalid("there are other bytes than the result needs")
                .with("bytes", bytes.len());
            return Err(error.with("shape", format!("{shape:?}")));
        }
        // SAFETY: all of it lies in `bytes`.
        Ok(unsafe { Self::from_raw(bytes.as_mut_ptr(), element, rows, [heads * dim, dim]) })
    }

    /// An output at an address; `strides` are the elements from one row, and from one head, to the
    /// next.
    ///
    /// # Safety
    ///
    /// For `'a` the elements of `rows` rows, of the query's number of heads, can be written at
    /// these strides, and nothing else reads or writes them.
    pub unsafe fn from_raw(
        base: *mut u8,
        element: Element,
        rows: usize,
        strides: [usize; 2],
    ) -> Self {
        Self {
            base,
            element,
            len: rows,
            strides,
            held: PhantomData,
        }
    }
}

/// Approximate number of tokens of a part, which one thread computes.
const PART: usize = 1024;

/// Attention of one query in each row over the tokens of its table.
///
/// If `rows` has one row for each query, the heads of a query share its table. If it has
/// `pages.heads` times as many, the table of KV head `h` of query `i` is row `i * pages.heads + h`.
/// A row without tokens yields zeros.
///
/// # Errors
///
/// `InvalidInput` for inconsistent sizes, an id beyond the last block or a missing block;
/// `Unsupported` for instructions that this processor lacks.
pub fn attention(
    queries: &Vectors<'_>,
    pages: &Pages<'_>,
    rows: &Rows<'_>,
    scale: f32,
    out: &mut Output<'_>,
    isa: Isa,
    team: Team,
) -> Result<()> {
    run(queries, pages, rows, None, scale, out, isa, team)
}

/// [`attention`] over unrotated keys, of queries that are not rotated either: the query of a row is
/// that of its last token, and distances are those of the rule.
///
/// # Errors
///
/// As [`attention`], and `InvalidInput` if the rule does not fit the pages or the longest row.
#[allow(
    clippy::too_many_arguments,
    reason = "those of `attention`, and the rule"
)]
pub fn rerope_attention(
    queries: &Vectors<'_>,
    pages: &Pages<'_>,
    rows: &Rows<'_>,
    rule: &Rerope<'_>,
    scale: f32,
    out: &mut Output<'_>,
    isa: Isa,
    team: Team,
) -> Result<()> {
    let longest = (0..rows.len()).map(|row| rows.tokens(row)).max();
    let turns = Turns::new(rule, pages.dim, rows.block_size(), longest.unwrap_or(0))?;
    run(queries, pages, rows, Some(&turns), scale, out, isa, team)
}

#[allow(
    clippy::too_many_arguments,
    reason = "those of `attention`, and the rule"
)]
fn run(
    queries: &Vectors<'_>,
    pages: &Pages<'_>,
    rows: &Rows<'_>,
    turns: Option<&Turns<'_>>,
    scale: f32,
    out: &mut Output<'_>,
    isa: Isa,
    team: Team,
) -> Result<()> {
    let isa = isa.checked()?;
    let heads_apart = check(queries, pages, rows, out)?;
    let part_size = (PART / rows.block_size()).max(1) * rows.block_size();
    let job = AttentionJob {
        queries,
        pages,
        rows,
        turns,
        scale,
        heads_apart,
        group: queries.heads() / pages.heads,
        part_size,
        parts: (rows.most_blocks() * rows.block_size())
            .div_ceil(part_size)
            .max(1),
    };
    let kernel = kernel(isa, pages.element);
    let places = queries.tokens() * pages.heads;
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.resize(places * job.parts * job.part_len(), 0.0);
        let parts = Parts(scratch.as_mut_ptr());
        team.run(places * job.parts, |item| {
            let (place, part) = (item / job.parts, item % job.parts);
            let tokens = job.tokens(place, part);
            if !tokens.is_empty() {
                // SAFETY: `check` has compared the sizes and the ids, `checked` the processor; each
                // part has its own place.
                unsafe { kernel(&job, place, tokens, parts.at(item * job.part_len())) };
            }
        })?;
        let out = &*out;
        let done = team.run(places, |place| {
            // SAFETY: nothing writes to the parts any more, and each thread writes to the heads of
            // its place.
            unsafe {
                let parts = parts.at(place * job.parts * job.part_len());
                put_together(&job, place, parts, out);
            }
        });
        scratch.truncate(MOST_KEPT);
        scratch.shrink_to(MOST_KEPT);
        done
    })
}

/// Most numbers of parts that a thread keeps allocated between calls: 16 MiB.
const MOST_KEPT: usize = 4 << 20;

thread_local! {
    /// Parts of the last call of this thread: a step calls for every layer, with the same sizes.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The memory of the parts: each thread of a team writes to its own.
struct Parts(*mut f32);

// SAFETY: each user states why accesses do not overlap.
unsafe impl Sync for Parts {}

impl Parts {
    /// # Safety
    ///
    /// The place is there.
    unsafe fn at(&self, place: usize) -> *mut f32 {
        // SAFETY: as the caller vouches.
        unsafe { self.0.add(place) }
    }
}

struct AttentionJob<'a> {
    queries: &'a Vectors<'a>,
    pages: &'a Pages<'a>,
    rows: &'a Rows<'a>,
    /// Distances, where keys are unrotated.
    turns: Option<&'a Turns<'a>>,
    scale: f32,
    heads_apart: bool,
    group: usize,
    /// Tokens of a part: whole blocks.
    part_size: usize,
    /// Parts of the longest row.
    parts: usize,
}

impl AttentionJob<'_> {
    /// Numbers of a part: for each query head the sums of values, the largest logit and the sum of
    /// probabilities.
    fn part_len(&self) -> usize {
        self.group * (self.pages.dim + 2)
    }

    /// Row of the table of a place (a query and a KV head).
    fn row(&self, place: usize) -> usize {
        if self.heads_apart {
            place
        } else {
            place / self.pages.heads
        }
    }

    /// Tokens of the row of a place.
    fn all_tokens(&self, place: usize) -> usize {
        self.rows.tokens(self.row(place))
    }

    /// The factor of a place's logits.
    fn scale(&self, place: usize) -> f32 {
        let turned = |turns: &Turns<'_>| turns.scale(self.all_tokens(place));
        self.scale * self.turns.map_or(1.0, turned)
    }

    /// The page of a place's head in a block of its row.
    ///
    /// # Safety
    ///
    /// The row has the block.
    #[inline(always)]
    unsafe fn page<N>(&self, place: usize, block: usize) -> *const N {
        let id = self.rows.id(self.row(place), block) as usize; // checked by `check`
        // SAFETY: as the caller vouches; a page contains all heads.
        unsafe {
            let page = self.pages.blocks.at(id).cast::<N>();
            page.add(place % self.pages.heads * 2 * self.rows.block_size() * self.pages.dim)
        }
    }

    /// The tokens of a part.
    fn tokens(&self, place: usize, part: usize) -> Range<usize> {
        let tokens = self.all_tokens(place);
        (part * self.part_size).min(tokens)..((part + 1) * self.part_size).min(tokens)
    }
}

/// True if every head has a table of its own.
fn check(
    queries: &Vectors<'_>,
    pages: &Pages<'_>,
    rows: &Rows<'_>,
    out: &Output<'_>,
) -> Result<bool> {
    let wrong = |message: &'static str| {
        let error = Error::invalid(message)
            .with("heads", pages.heads)
            .with("dim", pages.dim);
        error
            .with("block_size", rows.block_size())
            .with("queries", queries.tokens())
    };
    let (heads, dim) = (pages.heads, pages.dim);
    if heads == 0 || dim == 0 || !dim.is_multiple_of(16) || !rows.block_size().is_multiple_of(16) {
        return Err(wrong(
            "a head size and a block size are multiples of 16 here",
        ));
    }
    if pages.element == Element::I8 {
        return Err(wrong("pages hold bf16, f16 or f32 here"));
    }
    let page = [heads, 2, rows.block_size(), dim, pages.element.size()];
    let page = page
        .iter()
        .try_fold(1_usize, |size, &part| size.checked_mul(part));
    if page.is_none_or(|page| page > pages.blocks.len()) {
        return Err(
            wrong("a page has fewer bytes than its heads need").with("bytes", pages.blocks.len())
        );
    }
    if queries.dim() != dim || queries.heads() == 0 || !queries.heads().is_multiple_of(heads) {
        return Err(wrong("the queries do not fit the pages").with("query_heads", queries.heads()));
    }
    if out.len != queries.tokens() || out.element == Element::I8 {
        return Err(wrong("the shape of the output does not fit the queries").with("rows", out.len));
    }
    let heads_apart = rows.len() != queries.tokens();
    if heads_apart && rows.len() != queries.tokens() * heads {
        return Err(
            wrong("there is a table for each query, or for each of its KV heads")
                .with("rows", rows.len()),
        );
    }
    rows.check_ids(pages.blocks.count())?;
    for row in 0..rows.len() {
        if let Some(block) = (0..rows.blocks(row)).find(|&block| rows.id(row, block) < 0) {
            let error = Error::invalid("attention over a missing block").with("row", row);
            return Err(error.with("place", block));
        }
    }
    Ok(heads_apart)
}

/// Writes the result of a place from its parts.
///
/// # Safety
///
/// All parts are written, the output contains this place, and nothing else writes there.
unsafe fn put_together(job: &AttentionJob<'_>, place: usize, parts: *const f32, out: &Output<'_>) {
    let (dim, group) = (job.pages.dim, job.group);
    let (query, head) = (place / job.pages.heads, place % job.pages.heads);
    let count = (0..job.parts)
        .take_while(|&part| !job.tokens(place, part).is_empty())
        .count();
    // SAFETY: as the caller vouches.
    let part = |part: usize| unsafe {
        std::slice::from_raw_parts(parts.add(part * job.part_len()), job.part_len())
    };
    let most = |member: usize| move |part: &[f32]| part[group * dim + member];
    let sum = |member: usize| move |part: &[f32]| part[group * (dim + 1) + member];
    for member in 0..group {
        let largest = (0..count)
            .map(part)
            .map(most(member))
            .fold(f32::NEG_INFINITY, f32::max);
        let weight = |of: &[f32]| (most(member)(of) - largest).exp();
        let total: f32 = (0..count)
            .map(part)
            .map(|of| weight(of) * sum(member)(of))
            .sum();
        let share = if count == 0 { 0.0 } else { 1.0 / total };
        let at = query * out.strides[0] + (head * group + member) * out.strides[1];
        for column in 0..dim {
            let value: f32 = (0..count)
                .map(part)
                .map(|of| weight(of) * of[member * dim + column])
                .sum();
            let value = value * share;
            // SAFETY: as the caller vouches.
            unsafe {
                let half = |bits| {
                    let to = out.base.cast::<u16>().add(at + column);
                    to.write_unaligned(bits);
                };
                match out.element {
                    Element::Bf16 => half(to_bf16(value)),
                    Element::F16 => half(to_f16(value)),
                    Element::F32 | Element::I8 => {
                        let to = out.base.cast::<f32>().add(at + column);
                        to.write_unaligned(value);
                    }
                }
            }
        }
    }
}

/// Computes a part of a place.
///
/// # Safety
///
/// The sizes were checked, the processor has the instructions, and only this thread uses the place
/// of the part.
type Kernel = unsafe fn(&AttentionJob<'_>, usize, Range<usize>, *mut f32);

fn kernel(isa: Isa, element: Element) -> Kernel {
    kernel!(
        isa,
        element,
        part(job: &AttentionJob<'_>, place: usize, tokens: Range<usize>, to: *mut f32)
    )
}

/// See [`Kernel`].
#[inline(always)]
unsafe fn part<L: Lanes, N: Load>(
    job: &AttentionJob<'_>,
    place: usize,
    tokens: Range<usize>,
    to: *mut f32,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        match L::WIDTH {
            vector::WIDTH => vector::part::<L, N>(job, place, tokens, to),
            _ => plain::<N>(job, place, tokens, to),
        }
    }
}

/// See [`Kernel`]; one number after the other.
unsafe fn plain<N: Load>(job: &AttentionJob<'_>, place: usize, tokens: Range<usize>, to: *mut f32) {
    let (dim, group, size) = (job.pages.dim, job.group, job.rows.block_size());
    let (query, head) = (place / job.pages.heads, place % job.pages.heads);
    let (mut asked, mut turned) = (vec![0.0; dim], vec![0.0; dim]);
    let mut logits = vec![0.0; tokens.len()];
    for member in 0..group {
        // SAFETY: as the caller vouches.
        unsafe {
            job.queries.read(query, head * group + member, &mut asked);
            for (logit, token) in logits.iter_mut().zip(tokens.clone()) {
                let keys = job.page::<N>(place, token / size).add(token % size);
                let key = (0..dim).map(|at| keys.add(at * size).read_unaligned().to_f32());
                let asked = match job.turns {
                    Some(turns) => {
                        turns.whole(&asked, job.all_tokens(place) - 1 - token, &mut turned);
                        &turned
                    }
                    None => &asked,
                };
                let product: f32 = key.zip(asked).map(|(key, asked)| key * asked).sum();
                *logit = product * job.scale(place);
            }
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0;
            let sums = std::slice::from_raw_parts_mut(to.add(member * dim), dim);
            sums.fill(0.0);
            for (logit, token) in logits.iter().zip(tokens.clone()) {
                let probability = (logit - most).exp();
                total += probability;
                let values = job
                    .page::<N>(place, token / size)
                    .add((size + token % size) * dim);
                for (at, sum) in sums.iter_mut().enumerate() {
                    *sum += probability * values.add(at).read_unaligned().to_f32();
                }
            }
            to.add(group * dim + member).write(most);
            to.add(group * (dim + 1) + member).write(total);
        }
    }
}
