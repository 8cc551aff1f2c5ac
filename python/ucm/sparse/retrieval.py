"""Sparse retrieval on a CPU: how much each block matters to a query, the best of them, and their
block table.

The Rust kernels behind this (``crates/ucm-retrieval``) work on tensors of the host where they lie,
are written for AVX-512, AVX2 and plain Rust (chosen at run time), share a call among ``threads``
threads (the calling one and, where the process has an OpenMP runtime, that runtime's), and run
without the GIL. A block's score and a row's choice are computed from that block and that row alone,
in one order: they depend neither on the batch nor on the number of threads. AVX2 and AVX-512 give
the same bits.

Shapes: ``r`` rows of a batch, ``N`` places of a row in a table, ``hq`` query heads, ``h`` KV heads
(``hq`` is a multiple of it), ``d`` head size, ``n`` physical blocks, ``b`` tokens of a block, ``t``
tokens. Tables and lengths are int32 or int64. A table's ids are places in the representations (or
in the codes, or in the KV); a negative one stands for a block that is not there.

Scores are higher for blocks that matter more. The first ``init`` and the last ``local`` blocks of a
row need none, because they are always kept: they get the largest number. Blocks that are not there,
and the places of a row behind its last block, get the smallest.

Every function raises :class:`~ucm.errors.InvalidInputError` for tensors that do not fit each other,
and :class:`~ucm.errors.UnsupportedError` for an instruction set that this processor lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ucm import _core
from ucm.errors import InvalidInputError

#: How the scores of several heads become one, or that they stay apart.
OverHeads = Literal["sum", "mean", "max", "apart"]
#: How the scores of a block's representations become one.
OverReps = Literal["max", "mean", "sum"]


class Kept(NamedTuple):
    """The blocks that each row keeps, for each head that chooses (``heads`` is 1 where they share a
    choice)."""

    #: Physical ids in the order of their tokens, int32 ``[r, heads, width]``; behind them the last
    #: one is repeated.
    table: Tensor
    #: Their places in the row's own table, ascending, int32 ``[r, heads, width]``; behind them -1.
    logical: Tensor
    #: How many, int32 ``[r, heads]``.
    counts: Tensor
    #: How many tokens they hold: the length that attention is given, int32 ``[r, heads]``.
    tokens: Tensor

    @staticmethod
    def width(places: int, budgets: Sequence[int], init: int, local: int) -> int:
        """Most blocks that rows of ``places`` places keep with these budgets and windows."""
        return min(places, init + max(local, 1) + max(budgets, default=0))

    @classmethod
    def rooms(
        cls, count: int, rows: int, heads: int, width: int, device: torch.device | str | None = None
    ) -> list[Kept]:
        """Room for ``count`` choices of ``rows`` rows and ``heads`` heads, which keep at most
        ``width`` blocks each. Unfilled; to make it for all layers of a step at once takes a small
        part of the time."""
        of_blocks, of_heads = (count, rows, heads, width), (count, rows, heads)
        parts = (
            torch.empty(shape, dtype=torch.int32, device=device)
            for shape in (of_blocks, of_blocks, of_heads, of_heads)
        )
        return [cls(*each) for each in zip(*(part.unbind() for part in parts), strict=True)]


def instruction_sets() -> tuple[str, ...]:
    """Those of this processor that kernels are written for, the poorest first; ``auto`` is the
    last."""
    return tuple(_core.retrieval_isas())


def dot_scores(
    query: Tensor,
    reps: Tensor,
    table: Tensor,
    blocks: Tensor,
    *,
    scales: Tensor | None = None,
    metric: Literal["dot", "l2"] = "dot",
    over_reps: OverReps = "max",
    over_heads: OverHeads = "sum",
    init: int = 0,
    local: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """Scores of blocks by their representations: ``over_heads(over_reps(q_h · r_jh))``, float32
    ``[r, 1, N]``, or ``[r, h, N]`` with ``over_heads="apart"``.

    ``query [r, hq, d]`` is one query of each row (bf16, fp16, fp32); ``q_h`` is the mean of the
    query heads that share a KV head. ``reps [n, h, d]``, or ``[n, j, h, d]`` with ``j`` of each
    block, are bf16, fp16, fp32 or int8, which needs ``scales [n, j, h]`` (float32). ``table [r,
    N]`` and ``blocks [r]`` say which blocks a row has. With ``metric="l2"`` minus the distance
    ``|q_h - r_jh|`` stands for the product.
    """
    if reps.dim() == 3:
        reps = reps[:, None]
    if scales is not None and scales.dim() == 2:
        scales = scales[:, None]
    heads = reps.shape[2] if reps.dim() == 4 and over_heads == "apart" else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.float32)
    _core.dot_scores(
        query,
        reps,
        scales,
        table,
        blocks.contiguous(),
        out,
        (metric, over_reps, over_heads),
        _run(init, local, threads, isa),
    )
    return out


def quest_scores(
    query: Tensor,
    bounds: Tensor,
    table: Tensor,
    blocks: Tensor,
    *,
    over_heads: OverHeads = "sum",
    init: int = 0,
    local: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """Quest's bound of a block: ``over_heads(Σ_d max(q_hd · min_hd, q_hd · max_hd))``, float32
    ``[r, 1, N]`` or ``[r, h, N]``.

    ``bounds [n, 2, h, d]`` are the least and the largest value of each channel of a block's keys;
    ``query`` and the rest as for :func:`dot_scores`.
    """
    heads = bounds.shape[2] if bounds.dim() == 4 and over_heads == "apart" else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.float32)
    _core.dot_scores(
        query,
        bounds,
        None,
        table,
        blocks.contiguous(),
        out,
        ("dot", "quest", over_heads),
        _run(init, local, threads, isa),
    )
    return out


def hash_encode(
    vectors: Tensor,
    weights: Tensor,
    codes: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """Hash codes of ``vectors [t, h, d]`` (bf16, fp16, fp32): bit ``j`` is whether ``Σ_d x_d·W_dj >
    0``, and is bit ``j % 8`` of byte ``j // 8``.

    ``weights`` are float32 ``[d, bits]``, or ``[h, d, bits]`` for other directions in each head;
    ``bits`` is a multiple of 8. Returns uint8 ``[t, h, bits / 8]``. With ``codes [n, b, h, bits /
    8]`` and ``slots [t]`` the code of a token is written to its slot (block times ``b`` plus place;
    a negative one is left out) instead, and ``codes`` is returned. No slot may be named twice.

    The codes of a vector are the same on every instruction set, in every batch and on every
    machine.
    """
    made: Tensor | None = None
    if codes is None:
        if slots is not None:
            raise InvalidInputError("slots are places in codes, which are missing")
        made = torch.empty((*vectors.shape[:2], weights.shape[-1] // 8), dtype=torch.uint8)
        codes = made[None]
    elif slots is None:
        raise InvalidInputError("codes are written by slot, and the slots are missing")
    _core.hash_encode(
        vectors,
        weights,
        codes,
        slots,
        _run(0, 0, threads, isa),
    )
    return codes if made is None else made


def hash_encode_query(
    query: Tensor, weights: Tensor, kv_heads: int, *, threads: int | None = None, isa: str = "auto"
) -> Tensor:
    """Hash codes of the mean of the query heads that share a KV head: ``query [r, hq, d]`` becomes
    uint8 ``[r, kv_heads, bits / 8]``; ``weights`` as for :func:`hash_encode`."""
    codes = torch.empty((query.shape[0], kv_heads, weights.shape[-1] // 8), dtype=torch.uint8)
    _core.hash_encode_query(query, weights, codes, _run(0, 0, threads, isa))
    return codes


def hash_scores(
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    table: Tensor,
    blocks: Tensor,
    *,
    heads_apart: bool = False,
    init: int = 0,
    local: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """:func:`hamming_scores` of the codes that :func:`hash_encode_query` makes of ``query [r, hq,
    d]``, in one call. Every slot of the ``blocks [r]`` that a row has counts."""
    heads = codes.shape[2] if codes.dim() == 4 and heads_apart else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.int32)
    _core.hash_scores(
        query,
        weights,
        codes,
        table,
        blocks.contiguous(),
        out,
        heads_apart,
        _run(init, local, threads, isa),
    )
    return out


#: Most queries of a head that :func:`hamming_scores` takes.
MOST_QUERIES = 127


def hamming_scores(
    queries: Tensor,
    codes: Tensor,
    table: Tensor,
    tokens: Tensor,
    *,
    heads_apart: bool = False,
    init: int = 0,
    local: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """Scores of blocks by hash codes: minus the least distance of any of its tokens in any head,
    int32 ``[r, 1, N]``, or ``[r, h, N]`` with ``heads_apart``.

    ``queries`` are codes ``[r, h, bytes]`` of one query for each KV head, or ``[r, h, q, bytes]``
    of several, whose distances add up (latent attention: one head, and the reduced query heads).
    ``codes [n, b, h, bytes]`` are those of the keys. ``tokens [r]`` says how many tokens each row
    of ``table [r, N]`` has; of its last block only their slots count.
    """
    if queries.dim() == 3:
        queries = queries[:, :, None]
    heads = codes.shape[2] if codes.dim() == 4 and heads_apart else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.int32)
    _core.hamming_scores(
        queries,
        codes,
        table,
        tokens.contiguous(),
        out,
        heads_apart,
        _run(init, local, threads, isa),
    )
    return out


def select_blocks(
    scores: Tensor,
    table: Tensor,
    tokens: Tensor,
    block_size: int,
    budgets: Sequence[int],
    *,
    init: int = 0,
    local: int = 1,
    into: Kept | None = None,
    threads: int | None = None,
) -> Kept:
    """The ``budgets[row]`` best blocks between the windows of every row, and the windows.

    ``scores [r, heads, N]`` (float32 or int32) are those of one of the functions above; among equal
    ones the lower place wins. ``table [r, N]`` are the ids to keep from, those of the KV; ``tokens
    [r]`` how many tokens a row has. A row with no more blocks than windows and budget keeps all.
    Blocks with the smallest score are never chosen, and those that the table says are not there are
    never kept. ``local`` is at least 1: the last block may be partial.

    The choice is written to ``into`` (one of :meth:`Kept.rooms`) where it is given, else to new
    tensors as wide as the row that keeps most.
    """
    if into is None:
        rows, heads, places = scores.shape
        (into,) = Kept.rooms(1, rows, heads, Kept.width(places, budgets, init, local))
    _core.select_blocks(
        scores,
        table,
        tokens.contiguous(),
        block_size,
        budgets,
        into,
        _run(init, local, threads, "auto"),
    )
    return into


def hash_select(
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    code_table: Tensor,
    table: Tensor,
    tokens: Tensor,
    budgets: Sequence[int],
    *,
    heads_apart: bool = False,
    init: int = 0,
    local: int = 1,
    into: Kept | None = None,
    threads: int | None = None,
    isa: str = "auto",
) -> Kept:
    """:func:`select_blocks` by :func:`hash_scores`, in one call. ``code_table [r, N]`` says where
    the codes of each block are, ``table [r, N]`` where its KV is."""
    if into is None:
        heads = codes.shape[2] if codes.dim() == 4 and heads_apart else 1
        (into,) = Kept.rooms(
            1, table.shape[0], heads, Kept.width(table.shape[1], budgets, init, local)
        )
    _core.hash_select(
        query,
        weights,
        codes,
        code_table,
        table,
        tokens.contiguous(),
        budgets,
        into,
        heads_apart,
        _run(init, local, threads, isa),
    )
    return into


def can_attend(packed_for: str, dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether :func:`paged_attention` reads pages that vLLM's CPU backend packed for an instruction
    set (its ``layer.isa`` ). Where it does not, vLLM's own attention with the same table is what
    there is."""
    return (
        packed_for in ("vec", "vec16")
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and head_size % 16 == 0
        and block_size % 16 == 0
    )


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    tokens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """Attention of one query in each row over the tokens of its table, ``[r, hq, d]``: a decode
    step without the masks that only longer queries need.

    ``query [r, hq, d]`` are the newest tokens' queries; ``kv_cache [n, h, b, 2 * d]`` pages as
    vLLM's CPU backend packs them for its instruction sets "vec" and "vec16": of each head the keys
    as ``[d, b]``, behind them the values as ``[b, d]``. Pages it packs for others ("amx", "neon")
    must not be given: they look the same and hold something else. ``table [r, N]`` and ``tokens
    [r]`` are the blocks of a row and the tokens in them, or ``[r, h, N]`` and ``[r, h]`` where
    every KV head has blocks of its own; a row without tokens gives zeros. Head size and block size
    are multiples of 16. Logits, probabilities and sums are float32. The result is written to
    ``out`` where it is given.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if table.dim() == 3:
        table, tokens = table.flatten(0, 1), tokens.flatten()
    _core.paged_attention(
        query,
        kv_cache,
        table,
        tokens.contiguous(),
        out,
        scale,
        _run(0, 0, threads, isa),
    )
    return out


def _run(init: int, local: int, threads: int | None, isa: str) -> tuple[int, int, int, str]:
    """How a call is run, as the core takes it."""
    if threads is None:
        threads = torch.get_num_threads()
    return init, local, threads, isa
