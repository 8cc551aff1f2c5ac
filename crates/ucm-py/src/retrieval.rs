//! Sparse retrieval on tensors of the host for Python. Its public API is `ucm.sparse.retrieval`.
//!
//! The GIL is released during computation.
#![allow(unsafe_code, reason = "tensors come from Python as addresses")]
#![allow(
    clippy::too_many_arguments,
    reason = "Python passes each tensor and each word by itself"
)]

use pyo3::prelude::*;
use ucm_core::{Error, Result};
use ucm_retrieval::{
    Codes, DotScores, Element, Encoder, HammingScores, Heads, Ints, Isa, Metric, Output, Pages,
    Representations, Reps, Rerope, Rows, Scores, Selected, Team, Vectors, Windows,
};

use crate::convert::CallResult;
use crate::tensor::Tensor;

/// Settings of a call: unscored blocks at the ends, threads, instruction set.
#[derive(FromPyObject)]
pub(crate) struct Run(usize, usize, usize, String);

impl Run {
    fn windows(&self) -> Windows {
        Windows {
            init: self.0,
            local: self.1,
        }
    }

    fn how(&self) -> Result<(Isa, Team)> {
        Ok((Isa::from_name(&self.3)?, Team::new(self.2)?))
    }
}

/// Computes without the GIL.
fn computed(py: Python<'_>, work: impl FnOnce() -> Result<()> + Send) -> CallResult<()> {
    Ok(py.detach(work)?)
}

/// Rows of a batch.
///
/// # Safety
/// As for [`Tensor::ints`].
unsafe fn rows<'a>(table: &Tensor, tokens: &Tensor, block_size: usize) -> Result<Rows<'a>> {
    // SAFETY: as the caller vouches.
    unsafe { rows_of(table, tokens.ints("tokens")?.0, block_size) }
}

/// Rows of a batch with these numbers of tokens.
///
/// # Safety
/// As for [`Tensor::ints`].
unsafe fn rows_of<'a>(table: &Tensor, tokens: Ints<'a>, block_size: usize) -> Result<Rows<'a>> {
    // SAFETY: as the caller vouches.
    let (ids, stride) = unsafe { table.ints("table")? };
    let [count, _] = table.sizes("table")?;
    if count != tokens.len() {
        let error =
            Error::invalid("the block table has another number of rows than there are lengths");
        return Err(error.with("table", count).with("lengths", tokens.len()));
    }
    Rows::new(ids, stride, tokens, block_size)
}

/// Instruction sets of this processor, the smallest first.
#[pyfunction]
pub(crate) fn retrieval_isas() -> Vec<&'static str> {
    Isa::ALL
        .into_iter()
        .filter(|isa| isa.supported())
        .map(Isa::name)
        .collect()
}

/// True if calls with several threads use those of an OpenMP runtime of this process.
#[pyfunction]
pub(crate) fn retrieval_openmp() -> bool {
    ucm_retrieval::has_openmp()
}

/// Scores of blocks from products of queries and representations; see
/// `ucm.sparse.retrieval.dot_scores`.
#[pyfunction]
pub(crate) fn dot_scores(
    py: Python<'_>,
    query: Tensor,
    reps: Tensor,
    scales: Option<Tensor>,
    table: Tensor,
    blocks: Tensor,
    out: Tensor,
    words: (String, String, String),
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let (isa, team) = run.how()?;
        let element = reps.element("reps")?;
        let [_, count, heads, dim] = reps.sizes("reps")?;
        let (metric, over_reps, over_heads) = (&*words.0, &*words.1, &*words.2);
        let quest = over_reps == "quest";
        let reps_of = if quest { "sum" } else { over_reps };
        let metric = Metric::of_name(metric)
            .ok_or_else(|| Error::invalid("metric is dot or l2").with("metric", metric))?;
        let over_reps = Reps::of_name(reps_of).ok_or_else(|| {
            Error::invalid("over_reps is max, mean or sum").with("over_reps", over_reps)
        })?;
        let over_heads = Heads::of_name(over_heads).ok_or_else(|| {
            Error::invalid("over_heads is sum, mean, max or apart").with("over_heads", over_heads)
        })?;
        let [_, rep_stride, head_stride, _] = reps.strides[..] else {
            return Err(reps.wrong("reps", "a tensor has another number of dimensions"));
        };
        let span = |count: usize, stride: usize| count.saturating_sub(1).saturating_mul(stride);
        let span = span(count, rep_stride).saturating_add(span(heads, head_stride)) + dim;
        // SAFETY: Python guarantees that these tensors may be read; only this call writes `out`.
        let (rows, blocks_of, out_rows, queries) = unsafe {
            let rows = rows(&table, &blocks, 1)?;
            let blocks_of = reps.blocks("reps", element.size(), 3, span)?;
            out.is("out", "torch.float32")?;
            (
                rows,
                blocks_of,
                out.slice_mut::<f32>("out")?,
                mean_queries(&query, rows.len(), heads, dim)?,
            )
        };
        let scales = match &scales {
            None => None,
            Some(scales) => {
                scales.is("scales", "torch.float32")?;
                let [scaled, scaled_reps, scaled_heads] = scales.sizes("scales")?;
                scales.require(
                    "scales",
                    (scaled, scaled_reps, scaled_heads) == (reps.shape[0], count, heads),
                    "there is one scale for each representation of a head",
                )?;
                // SAFETY: as above.
                Some(unsafe { scales.blocks("scales", size_of::<f32>(), 1, count * heads)? })
            }
        };
        let queries = if quest {
            ucm_retrieval::quest_queries(&queries, heads * dim)
        } else {
            queries
        };
        reps.require(
            "reps",
            !quest || count == 2,
            "bounds are two for each block, the least key and the largest",
        )?;
        let spec = DotScores {
            rows,
            reps: Representations {
                blocks: blocks_of,
                element,
                count,
                heads,
                dim,
                stride: rep_stride,
                head_stride,
                scales,
            },
            queries: &queries,
            own_queries: quest,
            metric,
            over_reps,
            over_heads,
            windows: run.windows(),
        };
        let [_, _, stride] = out.sizes("out")?;
        ucm_retrieval::dot_scores(&spec, out_rows, stride, isa, team)
    })
}

/// Queries `[row, heads * group, dim]` as means of the groups.
///
/// # Safety
/// As for [`Tensor::vectors`].
unsafe fn mean_queries(query: &Tensor, rows: usize, heads: usize, dim: usize) -> Result<Vec<f32>> {
    // SAFETY: as the caller vouches.
    let queries = unsafe { query.vectors("query")? };
    if queries.tokens() != rows || queries.dim() != dim {
        let error = query.wrong(
            "query",
            "the queries do not fit the rows or the representations",
        );
        return Err(error.with("rows", rows).with("dim", dim));
    }
    ucm_retrieval::group_mean(&queries, heads)
}

/// Hash codes of vectors, into pages by slot or contiguous; see `ucm.sparse.retrieval.hash_encode`.
#[pyfunction]
pub(crate) fn hash_encode(
    py: Python<'_>,
    vectors: Tensor,
    weights: Tensor,
    codes: Tensor,
    slots: Option<Tensor>,
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let (isa, team) = run.how()?;
        let encoder = encoder(&weights)?;
        // SAFETY: Python guarantees that these tensors may be read.
        let vectors = unsafe { vectors.vectors("vectors")? };
        // SAFETY: Python guarantees that these tensors may be read.
        let slots = slots
            .as_ref()
            .map(|slots| unsafe { slots.ints("slots") })
            .transpose()?;
        let [blocks, block_size, code_heads, code_len] = codes.sizes("codes")?;
        codes.is("codes", "torch.uint8")?;
        codes.packed("codes", 2)?;
        codes.require(
            "codes",
            (code_heads, code_len) == (vectors.heads(), encoder.code_len()),
            "the output of codes has another shape than the codes",
        )?;
        let (base, strides) = (codes.at("codes")?, [codes.strides[0], codes.strides[1]]);
        let slots = slots.map(|(slots, _)| slots);
        // SAFETY: Python guarantees that only this call writes the codes, and that no slot is
        // repeated.
        let mut codes = unsafe { Codes::from_raw(base, [blocks, block_size], strides, slots) };
        ucm_retrieval::encode(&encoder, &vectors, &mut codes, isa, team)
    })
}

/// Directions `[dim, bits]` or `[heads, dim, bits]`.
fn encoder<'a>(weights: &Tensor) -> Result<Encoder<'a>> {
    weights.is("weights", "torch.float32")?;
    let (heads, dim, bits) = match weights.shape[..] {
        [dim, bits] => (1, dim, bits),
        [heads, dim, bits] => (heads, dim, bits),
        _ => return Err(weights.wrong("weights", "hash weights have two or three dimensions")),
    };
    // SAFETY: Python guarantees that these tensors may be read.
    Encoder::new(unsafe { weights.slice("weights")? }, heads, dim, bits)
}

/// Hash codes `[row, heads, bytes]` of queries, one for each KV head; see
/// `ucm.sparse.retrieval.hash_encode_query`.
#[pyfunction]
pub(crate) fn hash_encode_query(
    py: Python<'_>,
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let shape = codes.sizes("codes")?;
        codes.is("codes", "torch.uint8")?;
        // SAFETY: Python guarantees that these tensors may be read, and that only this call writes
        // the codes.
        unsafe {
            let made = query_codes(&query, &weights, shape, run.how()?)?;
            codes.slice_mut::<u8>("codes")?.copy_from_slice(&made);
        }
        Ok(())
    })
}

/// Codes `[row, heads, bytes]` of the means of the queries that share a head.
///
/// # Safety
/// Both may be read.
unsafe fn query_codes(
    query: &Tensor,
    weights: &Tensor,
    [rows, heads, code_len]: [usize; 3],
    (isa, team): (Isa, Team),
) -> Result<Vec<u8>> {
    let encoder = encoder(weights)?;
    if encoder.code_len() != code_len {
        let error = weights.wrong("weights", "hash weights make codes of another length");
        return Err(error.with("bytes", code_len));
    }
    let dim = weights.shape[weights.shape.len() - 2];
    // SAFETY: as the caller vouches.
    let means = unsafe { mean_queries(query, rows, heads, dim)? };
    // SAFETY: that many means exist, and they live long enough.
    let vectors = unsafe {
        let shape = [rows, heads, dim];
        Vectors::from_raw(
            means.as_ptr().cast(),
            Element::F32,
            shape,
            [heads * dim, dim],
        )
    };
    let mut made = vec![0; rows * heads * code_len];
    if !made.is_empty() {
        let mut codes = Codes::new(&mut made, heads * code_len)?;
        ucm_retrieval::encode(&encoder, &vectors, &mut codes, isa, team)?;
    }
    Ok(made)
}

/// Scores of blocks from queries and the hash codes of keys; see
/// `ucm.sparse.retrieval.hash_scores`.
#[pyfunction]
pub(crate) fn hash_scores(
    py: Python<'_>,
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    table: Tensor,
    blocks: Tensor,
    out: Tensor,
    heads_apart: bool,
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let scored = ScoredCodes(&codes, heads_apart, &run);
        let [_, block_size, heads, code_len] = codes.sizes("codes")?;
        let [count, _] = table.sizes("table")?;
        // SAFETY: Python guarantees that these tensors may be read, and that only this call writes
        // `out`.
        unsafe {
            let (blocks, _) = blocks.ints("blocks")?;
            let size = i64::try_from(block_size).unwrap_or(i64::MAX);
            let tokens: Vec<i64> = (0..blocks.len())
                .map(|row| blocks.get(row).saturating_mul(size))
                .collect();
            let rows = rows_of(&table, Ints::I64(&tokens), block_size)?;
            let queries = query_codes(&query, &weights, [count, heads, code_len], run.how()?)?;
            scored.score(rows, &queries, 1, room_for_scores(&out)?)
        }
    })
}

/// Scores of blocks from hash codes; see `ucm.sparse.retrieval.hamming_scores`.
#[pyfunction]
pub(crate) fn hamming_scores(
    py: Python<'_>,
    queries: Tensor,
    codes: Tensor,
    table: Tensor,
    tokens: Tensor,
    out: Tensor,
    heads_apart: bool,
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let scored = ScoredCodes(&codes, heads_apart, &run);
        let [_, block_size, heads, code_len] = codes.sizes("codes")?;
        queries.is("queries", "torch.uint8")?;
        let [count, query_heads, per_head, query_len] = queries.sizes("queries")?;
        // SAFETY: Python guarantees that these tensors may be read, and that only this call writes
        // `out`.
        unsafe {
            let rows = rows(&table, &tokens, block_size)?;
            queries.require(
                "queries",
                (count, query_heads, query_len) == (rows.len(), heads, code_len),
                "the codes of queries do not fit the rows or the codes of keys",
            )?;
            let queries = queries.slice::<u8>("queries")?;
            scored.score(rows, queries, per_head, room_for_scores(&out)?)
        }
    })
}

/// Hash codes of keys, whether each head has scores of its own, and the settings of the call.
struct ScoredCodes<'a>(&'a Tensor, bool, &'a Run);

impl ScoredCodes<'_> {
    /// Scores of blocks from `per_head` codes of queries for each row and head, `stride` for each
    /// row and head that has its own.
    ///
    /// # Safety
    /// The codes may be read.
    unsafe fn score(
        &self,
        rows: Rows<'_>,
        queries: &[u8],
        per_head: usize,
        (out, stride): (&mut [i32], usize),
    ) -> Result<()> {
        let Self(codes, heads_apart, run) = *self;
        let (isa, team) = run.how()?;
        let [_, block_size, heads, code_len] = codes.sizes("codes")?;
        codes.is("codes", "torch.uint8")?;
        // SAFETY: as the caller vouches.
        let codes = unsafe { codes.blocks("codes", 1, 1, block_size * heads * code_len)? };
        let spec = HammingScores {
            rows,
            codes,
            heads,
            code_len,
            queries,
            queries_per_head: per_head,
            heads_apart,
            windows: run.windows(),
        };
        ucm_retrieval::hamming_scores(&spec, out, stride, isa, team)
    }
}

/// The output of scores `[row, heads, places]`, and `places`.
///
/// # Safety
/// It may be written.
unsafe fn room_for_scores<'a>(out: &Tensor) -> Result<(&'a mut [i32], usize)> {
    out.is("out", "torch.int32")?;
    let [_, _, stride] = out.sizes("out")?;
    // SAFETY: as the caller vouches.
    Ok((unsafe { out.slice_mut::<i32>("out")? }, stride))
}

/// The blocks that rows keep, by the hash codes of their queries and of keys; see
/// `ucm.sparse.retrieval.hash_select`.
#[pyfunction]
pub(crate) fn hash_select(
    py: Python<'_>,
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    code_table: Tensor,
    table: Tensor,
    tokens: Tensor,
    budgets: Vec<usize>,
    kept: KeptTensors,
    heads_apart: bool,
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let scored = ScoredCodes(&codes, heads_apart, &run);
        let [_, block_size, heads, code_len] = codes.sizes("codes")?;
        let [count, stride] = code_table.sizes("code_table")?;
        let apart = if heads_apart { heads } else { 1 };
        let mut scores = vec![0; count * apart * stride];
        // SAFETY: Python guarantees that these tensors may be read, and that only this call writes
        // the outputs.
        unsafe {
            let queries = query_codes(&query, &weights, [count, heads, code_len], run.how()?)?;
            let asked = rows(&code_table, &tokens, block_size)?;
            scored.score(asked, &queries, 1, (&mut scores, stride))?;
            let rows = rows(&table, &tokens, block_size)?;
            kept.choose(Scores::I32(&scores), stride, apart, &rows, &budgets, &run)
        }
    })
}

/// The output of a selection: `ucm.sparse.retrieval.Kept`.
#[derive(FromPyObject)]
pub(crate) struct KeptTensors(Tensor, Tensor, Tensor, Tensor);

impl KeptTensors {
    /// Writes the best blocks of every row, by scores `[row, heads, stride]`.
    ///
    /// # Safety
    /// The outputs may be written.
    unsafe fn choose(
        &self,
        scores: Scores<'_>,
        stride: usize,
        heads: usize,
        rows: &Rows<'_>,
        budgets: &[usize],
        run: &Run,
    ) -> Result<()> {
        let (_, team) = run.how()?;
        let Self(table, logical, counts, tokens) = self;
        for (name, tensor) in [
            ("table", table),
            ("logical", logical),
            ("counts", counts),
            ("tokens", tokens),
        ] {
            tensor.is(name, "torch.int32")?;
        }
        let [_, _, width] = table.sizes("table")?;
        // SAFETY: as the caller vouches.
        let kept = unsafe {
            Selected {
                table: table.slice_mut("table")?,
                logical: logical.slice_mut("logical")?,
                counts: counts.slice_mut("counts")?,
                tokens: tokens.slice_mut("tokens")?,
                width,
            }
        };
        ucm_retrieval::select(
            scores,
            stride,
            heads,
            rows,
            budgets,
            run.windows(),
            kept,
            team,
        )
    }
}

/// The best blocks of every row; see `ucm.sparse.retrieval.select_blocks`.
#[pyfunction]
pub(crate) fn select_blocks(
    py: Python<'_>,
    scores: Tensor,
    table: Tensor,
    tokens: Tensor,
    block_size: usize,
    budgets: Vec<usize>,
    kept: KeptTensors,
    run: Run,
) -> CallResult<()> {
    computed(py, || {
        let [_, heads, stride] = scores.sizes("scores")?;
        // SAFETY: Python guarantees that the first three may be read, and that only this call
        // writes the outputs.
        unsafe {
            let rows = rows(&table, &tokens, block_size)?;
            let scores = match scores.dtype.as_str() {
                "torch.float32" => Scores::F32(scores.slice("scores")?),
                "torch.int32" => Scores::I32(scores.slice("scores")?),
                _ => return Err(scores.wrong("scores", "scores are float32 or int32")),
            };
            kept.choose(scores, stride, heads, &rows, &budgets, &run)
        }
    })
}

/// A rule of ReRoPE: the table of the rotation, the window, and the unit of the log scale.
#[derive(FromPyObject)]
pub(crate) struct Rule(Tensor, usize, f32);

/// Decode attention over a block table, by the rule where there is one; see
/// `ucm.sparse.retrieval.paged_attention`.
#[pyfunction]
#[pyo3(signature = (query, pages, table, tokens, out, scale, run, rule=None))]
pub(crate) fn paged_attention(
    py: Python<'_>,
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    tokens: Tensor,
    out: Tensor,
    scale: f32,
    run: Run,
    rule: Option<Rule>,
) -> CallResult<()> {
    computed(py, || {
        let (isa, team) = run.how()?;
        let [_, heads, block_size, both] = pages.sizes("pages")?;
        pages.require(
            "pages",
            both % 2 == 0,
            "a page holds keys and values of the same size",
        )?;
        let element = pages.element("pages")?;
        let [_, out_heads, out_dim] = out.sizes("out")?;
        out.packed("out", 2)?;
        let (out_base, out_element) = (out.at("out")?, out.element("out")?);
        // SAFETY: Python guarantees that these tensors may be read, and that only this call writes
        // `out`.
        let (queries, blocks, rows, mut target) = unsafe {
            let queries = query.vectors("query")?;
            let blocks = pages.blocks("pages", element.size(), 1, heads * block_size * both)?;
            let rows = rows(&table, &tokens, block_size)?;
            let strides = [out.strides[0], out.strides[1]];
            (
                queries,
                blocks,
                rows,
                Output::from_raw(out_base, out_element, out.shape[0], strides),
            )
        };
        out.require(
            "out",
            (out_heads, out_dim) == (queries.heads(), queries.dim()),
            "the result has the shape of the queries",
        )?;
        let pages = Pages {
            blocks,
            element,
            heads,
            dim: both / 2,
        };
        let Some(Rule(rotation, window, log_unit)) = &rule else {
            return ucm_retrieval::attention(
                &queries,
                &pages,
                &rows,
                scale,
                &mut target,
                isa,
                team,
            );
        };
        rotation.is("rotation", "torch.float32")?;
        // SAFETY: Python guarantees that this tensor may be read.
        let rule =
            unsafe { Rerope::new(rotation.slice("rotation")?, both / 2, *window, *log_unit)? };
        ucm_retrieval::rerope_attention(
            &queries,
            &pages,
            &rows,
            &rule,
            scale,
            &mut target,
            isa,
            team,
        )
    })
}
