"""Scores of blocks by their vectors on a GPU: dot products with means (ESA, GSA), distances, and
Quest's bounds.

A program takes some blocks of a row, reads their representations once, multiplies and adds up in
float32, in an order that is the same for every block: the score of a block depends on that block
and its row alone.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.kernels.words import power_of_2
from ucm.sparse.retrieval import OverHeads, OverReps

#: Elements that a program reads at a time.
ELEMENTS = 4096
WARPS = 4


@triton.jit(do_not_specialize=["places", "table_row", "init", "local"])
def dot_block(
    query,
    reps,
    scales,
    table,
    blocks,
    out,
    places,
    table_row,
    init,
    local,
    rep_block,
    scale_block,
    query_row: tl.constexpr,
    query_head: tl.constexpr,
    rep_one: tl.constexpr,
    rep_head: tl.constexpr,
    scale_one: tl.constexpr,
    scale_head: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    count: tl.constexpr,
    metric: tl.constexpr,
    over_reps: tl.constexpr,
    over_heads: tl.constexpr,
    scaled: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Scores ``out [rows, heads or 1, places]`` of the blocks ``table [rows, places]`` of ``reps
    [n, count, heads, size]`` (with ``scales [n, count, heads]``) for ``query [rows, heads * group,
    size]``.

    Programs: (``BLOCKS`` blocks, a row).
    """
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    number = tl.minimum(tl.load(blocks + row).to(tl.int32), places)
    block_id = tl.load(table + row * table_row + place, mask=place < number, other=-1).to(tl.int64)
    end = tl.maximum(number - local, 0)
    window = (place < tl.minimum(init, end)) | (place >= end)
    wanted = (block_id >= 0) & ~window

    head, channel = tl.arange(0, HEADS), tl.arange(0, SIZE)
    real = (head < heads)[:, None] & (channel < size)[None, :]
    mean = tl.zeros((HEADS, SIZE), tl.float32)
    for member in tl.static_range(group):
        asked = (
            query
            + row * query_row
            + (head * group + member)[:, None] * query_head
            + channel[None, :]
        )
        mean += tl.load(asked, mask=real, other=0.0).to(tl.float32)
    mean = (mean / group)[None, :, :]

    at = (
        reps
        + block_id[:, None, None] * rep_block
        + (head[:, None] * rep_head + channel[None, :])[None, :, :]
    )
    there = wanted[:, None, None] & real[None, :, :]
    if metric == "quest":
        low = tl.load(at, mask=there, other=0.0).to(tl.float32)
        high = tl.load(at + rep_one, mask=there, other=0.0).to(tl.float32)
        score = tl.sum(tl.maximum(mean * low, mean * high), axis=2)
    else:
        score = tl.full((BLOCKS, HEADS), float("-inf") if over_reps == "max" else 0.0, tl.float32)
        for one in range(count):
            found = tl.load(at + one * rep_one, mask=there, other=0.0).to(tl.float32)
            if scaled:
                of = (
                    scales
                    + block_id[:, None] * scale_block
                    + one * scale_one
                    + head[None, :] * scale_head
                )
                scale = tl.load(of, mask=wanted[:, None] & (head < heads)[None, :], other=0.0)
                found *= scale[:, :, None]
            if metric == "dot":
                each = tl.sum(mean * found, axis=2)
            else:
                apart = mean - found
                each = -tl.sqrt(tl.sum(apart * apart, axis=2))
            score = tl.maximum(score, each) if over_reps == "max" else score + each
        if over_reps == "mean":
            score = score / count

    kept = window & (place < number) & (block_id >= 0)
    if over_heads == "apart":
        score = tl.where(
            kept[:, None], float("inf"), tl.where(wanted[:, None], score, float("-inf"))
        )
        to = out + row * (heads * places) + head[None, :] * places + place[:, None]
        tl.store(to, score, mask=(place < places)[:, None] & (head < heads)[None, :])
    else:
        if over_heads == "max":
            joined = tl.max(tl.where((head < heads)[None, :], score, float("-inf")), axis=1)
        else:
            joined = tl.sum(tl.where((head < heads)[None, :], score, 0.0), axis=1)
            if over_heads == "mean":
                joined = joined / heads
        joined = tl.where(kept, float("inf"), tl.where(wanted, joined, float("-inf")))
        tl.store(out + row * places + place, joined, mask=place < places)


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
) -> Tensor:
    """:func:`ucm.sparse.retrieval.dot_scores`."""
    if reps.dim() == 3:
        reps = reps[:, None]
    if scales is not None and scales.dim() == 2:
        scales = scales[:, None]
    return _scores(query, reps, scales, table, blocks, metric, over_reps, over_heads, init, local)


def quest_scores(
    query: Tensor,
    bounds: Tensor,
    table: Tensor,
    blocks: Tensor,
    *,
    over_heads: OverHeads = "sum",
    init: int = 0,
    local: int = 0,
) -> Tensor:
    """:func:`ucm.sparse.retrieval.quest_scores`."""
    if bounds.dim() != 4 or bounds.shape[1] != 2:
        raise InvalidInputError(
            "Quest's bounds are [n, 2, h, d]", context={"bounds": tuple(bounds.shape)}
        )
    return _scores(query, bounds, None, table, blocks, "quest", "max", over_heads, init, local)


def _scores(
    query: Tensor,
    reps: Tensor,
    scales: Tensor | None,
    table: Tensor,
    blocks: Tensor,
    metric: str,
    over_reps: str,
    over_heads: str,
    init: int,
    local: int,
) -> Tensor:
    rows, query_heads, size = query.shape
    _, count, heads, channels = reps.shape
    shapes = {"query": tuple(query.shape), "reps": tuple(reps.shape), "table": tuple(table.shape)}
    if query_heads % heads or channels != size or table.shape[0] != rows or blocks.shape != (rows,):
        raise InvalidInputError(
            "queries, representations and block table do not fit each other", context=shapes
        )
    if scales is not None and scales.shape != reps.shape[:3]:
        raise InvalidInputError(
            "every vector has a scale", context={**shapes, "scales": tuple(scales.shape)}
        )
    if reps.stride(3) != 1 or table.stride(1) != 1:
        raise InvalidInputError("vectors, and rows of a block table, have no gaps", context=shapes)
    query, places = query.contiguous(), table.shape[1]
    out = torch.empty(
        (rows, heads if over_heads == "apart" else 1, places),
        dtype=torch.float32,
        device=query.device,
    )
    if not out.numel():
        return out
    wide = power_of_2(heads) * power_of_2(size)
    tile = max(1, ELEMENTS // wide)
    dot_block[(-(-places // tile), rows)](
        query,
        reps,
        reps if scales is None else scales,
        table,
        blocks,
        out,
        places,
        table.stride(0),
        init,
        local,
        reps.stride(0),
        0 if scales is None else scales.stride(0),
        query_row=query.stride(0),
        query_head=query.stride(1),
        rep_one=reps.stride(1),
        rep_head=reps.stride(2),
        scale_one=0 if scales is None else scales.stride(1),
        scale_head=0 if scales is None else scales.stride(2),
        heads=heads,
        group=query_heads // heads,
        size=size,
        count=count,
        metric=metric,
        over_reps=over_reps,
        over_heads=over_heads,
        scaled=scales is not None,
        BLOCKS=tile,
        HEADS=power_of_2(heads),
        SIZE=power_of_2(size),
        num_warps=WARPS,
    )
    return out
