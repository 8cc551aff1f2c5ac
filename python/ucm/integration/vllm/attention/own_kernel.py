"""Attention over chosen blocks by ucm's kernel, in place of vLLM's, on a CPU.

vLLM's kernel is made for rows of any number of queries. A row that chooses has one, which sees
every token of its table; for that :func:`ucm.sparse.retrieval.paged_attention` takes about half the
time (``docs/performance.md``). It reads pages where they lie, as vLLM packs them for its
instruction sets "vec" and "vec16", and writes to vLLM's output. Logits, probabilities and sums are
float32.

Only the rows that chose are computed by it. Rows that keep every block are computed by vLLM's
kernel as in a dense engine, also where both are in one step, so which kernel computes a row does
not depend on its neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ucm.integration.vllm.attention.rewriting import Rewriter, cpu_plan
from ucm.sparse import retrieval


def reads_pages_of(layers: Mapping[str, Any]) -> bool:
    """Whether the kernel can compute these layers (of vLLM, all of one KV cache group): an
    instruction set that it is written for, pages of a packing and type that it reads, and nothing
    that vLLM adds to a logit."""
    return retrieval.instruction_sets() != ("scalar",) and all(
        _reads(layer) for layer in layers.values()
    )


def _reads(layer: Any) -> bool:
    packed_for = getattr(layer, "isa", None)  # of the CPU backend alone
    if packed_for is None:
        return False
    impl, cache = layer.impl, layer.kv_cache
    plain = (
        impl.sinks is None
        and impl.alibi_slopes is None
        and not impl.logits_soft_cap
        and impl.sliding_window == -1
    )
    return (
        plain
        and impl.kv_cache_dtype == "auto"
        and cache.is_cpu
        and retrieval.can_attend(packed_for, cache.dtype, impl.head_size, int(cache.shape[2]))
    )


def attend(
    layer: Any,
    rows: Tensor,
    tables: tuple[Tensor, Tensor],
    metadata: Any,
    query: Tensor,
    output: Tensor,
    compute: Callable[[Tensor, Any, Tensor], Any],
    rewriter: Rewriter,
) -> None:
    """Computes a layer of a step into ``output [tokens, heads, d]``, for the queries ``query
    [tokens, heads, d]``.

    ``tables`` are the blocks and tokens of ``rows [s]``, which have one query each, ``[s, N]`` and
    ``[s]``, or one for each KV head, ``[s, heads, N]`` and ``[s, heads]``. All other rows are
    computed by vLLM's kernel, ``compute(query, metadata, output)``, with what ``metadata``, that of
    all rows of the step, says of them.
    """
    scale, count = float(layer.impl.scale), metadata.query_start_loc.shape[0] - 1
    if len(rows) == count:  # each has one query, so these are all queries
        retrieval.paged_attention(query[:count], layer.kv_cache, *tables, scale, output[:count])
        return
    places = metadata.query_start_loc[1:].index_select(0, rows).long() - 1
    output.index_copy_(
        0,
        places,
        retrieval.paged_attention(query.index_select(0, places), layer.kv_cache, *tables, scale),
    )
    others = _all_but(rows, count)
    tokens = _all_but(places, int(metadata.query_start_loc[-1]))
    asked = query.index_select(0, tokens)
    found = torch.empty_like(asked)
    compute(asked, _metadata_of(layer, metadata, others, rewriter), found)
    output.index_copy_(0, tokens, found)


def _all_but(some: Tensor, count: int) -> Tensor:
    """The numbers below ``count`` that are not among these."""
    left = torch.ones(count, dtype=torch.bool)
    left[some.long()] = False
    return left.nonzero()[:, 0]


def _metadata_of(layer: Any, original: Any, rows: Tensor, rewriter: Rewriter) -> Any:
    """The metadata of some rows of a step, of any number of queries."""
    impl, found = layer.impl, copy.copy(original)
    lengths = original.query_start_loc.diff().index_select(0, rows)
    found.query_start_loc = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(
        original.query_start_loc.dtype
    )
    found.num_actual_tokens = int(found.query_start_loc[-1])
    found.max_query_len = int(lengths.max())
    found.block_table = original.block_table.index_select(0, rows)
    found.seq_lens = original.seq_lens.index_select(0, rows)
    found.max_seq_len = int(found.seq_lens.max())
    found.scheduler_metadata = rewriter.planned(
        ("cpu", "some", impl.num_heads, impl.num_kv_heads, tuple(found.query_start_loc.tolist())),
        found.seq_lens,
        lambda lens: cpu_plan(impl, layer, found, lens, impl.num_heads, impl.num_kv_heads),
    )
    return found
