"""Sparse retrieval on a CPU: the weight of each block for a query, the best of them, and their
block table.

The Rust kernels behind this (``crates/ucm-retrieval``) work on tensors of the host in place, are
written for AVX-512, AVX2 and plain Rust (chosen at run time), share a call among ``threads``
threads (the calling one and, where the process has an OpenMP runtime, that runtime's), and run
without the GIL. A block's score and a row's choice are computed from that block and that row alone,
in one order: they depend neither on the batch nor on the number of threads. AVX2 and AVX-512 give
the same bits.

Shapes: ``r`` rows of a batch, ``N`` places of a row in a table, ``hq`` query heads, ``h`` KV heads
(``hq`` is a multiple of it), ``d`` head size, ``n`` physical blocks, ``b`` tokens of a block, ``t``
tokens. Tables and lengths are int32 or int64. A table's ids are places in the representations (or
in the codes, or in the KV); a negative one stands for a missing block.

Scores are higher for blocks that matter more. The first ``init`` and the last ``local`` blocks of a
row are always kept and get the largest number. Missing blocks, and places behind a row's last
block, get the smallest.

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
    """The blocks that each row keeps, for each head that chooses (``heads`` is 1 for a shared
    choice)."""

    #: Physical ids in the order of their tokens, int32 ``[r, heads, width]``; the last one is
    #: repeated behind them.
    table: Tensor
    #: Their places in the row's own table, ascending, int32 ``[r, heads, width]``; -1 behind them.
    logical: Tensor
    #: Their number, int32 ``[r, heads]``.
    counts: Tensor
    #: Their tokens: the length for attention, int32 ``[r, heads]``.
    tokens: Tensor

    @staticmethod
    def width(places: int, budgets: Sequence[int], init: int, local: int) -> int:
        """Most blocks that rows of ``places`` places keep with these budgets and windows."""
        return min(places, init + max(local, 1) + max(budgets, default=0))

    @classmethod
    def rooms(
        cls, count: int, rows: int, heads: int, width: int, device: torch.device | str | None = None
    ) -> list[Kept]:
        """Unfilled room for ``count`` choices of ``rows`` rows and ``heads`` heads, which keep at
        most ``width`` blocks each. Making it for all layers of a step at once is faster."""
        per_choice = (count, rows, heads)
        sizes = [(*per_choice, width), (*per_choice, width), per_choice, per_choice]
        parts = [torch.empty(size, dtype=torch.int32, device=device).unbind() for size in sizes]
        return [cls(*each) for each in zip(*parts, strict=True)]


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of this processor with kernels, the poorest first; ``auto`` is the last."""
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
    N]`` and ``blocks [r]`` are the blocks of each row and their number. With ``metric="l2"`` minus
    the distance ``|q_h - r_jh|`` replaces the product.
    """
    if reps.dim() == 3:
        reps = reps[:, None]
    if scales is not None and scales.dim() == 2:
        scales = scales[:, None]
    heads = reps.shape[2] if reps.dim() == 4 and over_heads == "apart" else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.float32)
    words, run = (metric, over_reps, over_heads), _run(init, local, threads, isa)
    _core.dot_scores(query, reps, scales, table, blocks.contiguous(), out, words, run)
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
    words, run = ("dot", "quest", over_heads), _run(init, local, threads, isa)
    _core.dot_scores(query, bounds, None, table, blocks.contiguous(), out, words, run)
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
    0``, and is bit ``j % 8`` of byte ``j // 8``. The same on every instruction set, in every batch
    and on every machine.

    ``weights`` are float32 ``[d, bits]``, or ``[h, d, bits]`` for other directions in each head;
    ``bits`` is a multiple of 8. Returns uint8 ``[t, h, bits / 8]``. With ``codes [n, b, h, bits /
    8]`` and ``slots [t]`` the code of a token is written to its slot (block times ``b`` plus place;
    a negative one is left out) instead, and ``codes`` is returned. No slot may be named twice.
    """
    made: Tensor | None = None
    if codes is None:
        if slots is not None:
            raise InvalidInputError("slots are places in codes, which are missing")
        made = torch.empty((*vectors.shape[:2], weights.shape[-1] // 8), dtype=torch.uint8)
        codes = made[None]
    elif slots is None:
        raise InvalidInputError("codes are written by slot, and the slots are missing")
    _core.hash_encode(vectors, weights, codes, slots, _run(0, 0, threads, isa))
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
    """:func:`hamming_scores` of the codes of :func:`hash_encode_query` of ``query [r, hq, d]``, in
    one call. Every slot of the ``blocks [r]`` of a row counts."""
    heads = codes.shape[2] if codes.dim() == 4 and heads_apart else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.int32)
    blocks, run = blocks.contiguous(), _run(init, local, threads, isa)
    _core.hash_scores(query, weights, codes, table, blocks, out, heads_apart, run)
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
    ``codes [n, b, h, bytes]`` are those of the keys. ``tokens [r]`` is the number of tokens of each
    row of ``table [r, N]``; of its last block only their slots count.
    """
    if queries.dim() == 3:
        queries = queries[:, :, None]
    heads = codes.shape[2] if codes.dim() == 4 and heads_apart else 1
    out = torch.empty((table.shape[0], heads, table.shape[1]), dtype=torch.int32)
    tokens, run = tokens.contiguous(), _run(init, local, threads, isa)
    _core.hamming_scores(queries, codes, table, tokens, out, heads_apart, run)
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
    [r]`` the tokens of a row. A row with no more blocks than windows and budget keeps all. Blocks
    with the smallest score are never chosen, and missing ones never kept. ``local`` is at least 1:
    the last block may be partial.

    The choice is written to ``into`` (one of :meth:`Kept.rooms`) where it is given, else to new
    tensors as wide as the row that keeps most.
    """
    if into is None:
        rows, heads, places = scores.shape
        (into,) = Kept.rooms(1, rows, heads, Kept.width(places, budgets, init, local))
    tokens, run = tokens.contiguous(), _run(init, local, threads, "auto")
    _core.select_blocks(scores, table, tokens, block_size, budgets, into, run)
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
    """:func:`select_blocks` by :func:`hash_scores`, in one call. ``code_table [r, N]`` are the
    places of the codes of each block, ``table [r, N]`` those of its KV."""
    if into is None:
        heads = codes.shape[2] if codes.dim() == 4 and heads_apart else 1
        width = Kept.width(table.shape[1], budgets, init, local)
        (into,) = Kept.rooms(1, table.shape[0], heads, width)
    tables = (code_table, table, tokens.contiguous())
    run = _run(init, local, threads, isa)
    _core.hash_select(query, weights, codes, *tables, budgets, into, heads_apart, run)
    return into


def can_attend(packed_for: str, dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether :func:`paged_attention` reads pages that vLLM's CPU backend packed for an instruction
    set (its ``layer.isa``)."""
    whole = head_size % 16 == 0 and block_size % 16 == 0
    read = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return packed_for in ("vec", "vec16") and read and whole


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    tokens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    rule: tuple[Tensor, int, float] | None = None,
    threads: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """Attention of one query in each row over the tokens of its table, ``[r, hq, d]``: a decode
    step without masks.

    ``query [r, hq, d]`` are the newest tokens' queries; ``kv_cache [n, h, b, 2 * d]`` pages as
    vLLM's CPU backend packs them for its instruction sets "vec" and "vec16": of each head the keys
    as ``[d, b]``, then the values as ``[b, d]``. Pages packed for others ("amx", "neon") have the
    same shape and must not be given. ``table [r, N]`` and ``tokens [r]`` are the blocks of a row
    and the tokens in them, or ``[r, h, N]`` and ``[r, h]`` for blocks of each KV head; a row
    without tokens gives zeros. Head size and block size are multiples of 16. Logits, probabilities
    and sums are float32. The result is written to ``out`` where it is given. With ``rule``, the
    table of a :class:`ucm.sparse.rerope.rule.RotationTable`, a window and ``1 / ln(training
    length)`` or 0, queries and keys are unrotated, and distances are those of ReRoPE.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if table.dim() == 3:
        table, tokens = table.flatten(0, 1), tokens.flatten()
    run = _run(0, 0, threads, isa)
    _core.paged_attention(query, kv_cache, table, tokens.contiguous(), out, scale, run, rule)
    return out


def _run(init: int, local: int, threads: int | None, isa: str) -> tuple[int, int, int, str]:
    """The core's argument of how a call is run."""
    return init, local, torch.get_num_threads() if threads is None else threads, isa
