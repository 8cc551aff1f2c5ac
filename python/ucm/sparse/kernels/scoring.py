"""Scores of blocks on a GPU: by their vectors (dot products with means for ESA and GSA, distances,
and Quest's bounds), and by hash codes.

A program takes some blocks of a row and reads their representations once. Vectors are multiplied
and added up in float32, in the same order for every block: the score of a block depends on that
block and its row alone. Of codes the least distance of any token and head is kept in registers;
distances are 32-bit integers.

Where the distances of many queries to one key add up (latent attention: 64 heads and more, one
latent), the sum depends only on how many queries have each bit set. With ``c_j`` of ``Q`` queries
having bit ``j``, and ``k`` the code of a key::

    Σ_q popcount(q xor k) = Σ_j c_j + Q popcount(k) - 2 Σ_j c_j k_j
                          = Σ_j c_j + Q popcount(k) - 2 Σ_s 2^s popcount(k & slice_s)

where bit ``j`` of ``slice_s`` is bit ``s`` of ``c_j``. So 64 queries become seven slices, and a key
costs eight counts of bits instead of 64.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.kernels.encode import as_words, power_of_2
from ucm.sparse.retrieval import OverHeads, OverReps

#: Elements, or words (16 KiB), that a program reads at a time.
ELEMENTS = WORDS = 4096
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
        of_head = query + row * query_row + (head * group + member)[:, None] * query_head
        mean += tl.load(of_head + channel[None, :], mask=real, other=0.0).to(tl.float32)
    mean = (mean / group)[None, :, :]

    inner = (head[:, None] * rep_head + channel[None, :])[None, :, :]
    at = reps + block_id[:, None, None] * rep_block + inner
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
                first = scales + block_id[:, None] * scale_block + one * scale_one
                of = first + head[None, :] * scale_head
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
        shapes["scales"] = tuple(scales.shape)
        raise InvalidInputError("every vector has a scale", context=shapes)
    if reps.stride(3) != 1 or table.stride(1) != 1:
        raise InvalidInputError("vectors, and rows of a block table, have no gaps", context=shapes)
    query, places = query.contiguous(), table.shape[1]
    shape = (rows, heads if over_heads == "apart" else 1, places)
    out = torch.empty(shape, dtype=torch.float32, device=query.device)
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


@triton.jit
def popcount(words):
    """How many bits of each word (uint32) are set; compilers make one instruction of this form."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["places", "table_row", "init", "local"])
def hamming_block(
    queries,
    codes,
    table,
    tokens,
    out,
    places,
    table_row,
    init,
    local,
    code_block,
    code_slot: tl.constexpr,
    code_head: tl.constexpr,
    block_size: tl.constexpr,
    heads: tl.constexpr,
    words: tl.constexpr,
    count: tl.constexpr,
    slices: tl.constexpr,
    apart: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Scores ``out [rows, heads or 1, places]`` of the blocks ``table [rows, places]`` of
    ``codes``, for ``queries [rows, heads, slices or 1, words]`` of ``count`` queries in each head.

    Programs: (``BLOCKS`` blocks, a row).
    """
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    length = tl.load(tokens + row).to(tl.int32)
    blocks = tl.minimum((length + block_size - 1) // block_size, places)
    block_id = tl.load(table + row * table_row + place, mask=place < blocks, other=-1).to(tl.int64)
    end = tl.maximum(blocks - local, 0)
    window = (place < tl.minimum(init, end)) | (place >= end)
    wanted = (block_id >= 0) & ~window

    head = tl.arange(0, HEADS)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    real = (head < heads) & (word < words)
    wide = tl.maximum(slices, 1) * words
    own = queries + row * (heads * wide) + head * wide + word
    nearest = tl.full((BLOCKS, HEADS), 2147483647, tl.int32)
    if slices == 0:
        query = tl.load(own, mask=real, other=0).to(tl.uint32)
    for first in range(0, block_size, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        inside = place[:, None] * block_size + slot[None, :] < length
        there = wanted[:, None] & (slot < block_size)[None, :] & inside
        at = codes + block_id[:, None] * code_block + slot[None, :] * code_slot
        at = at[:, :, None, None] + (head * code_head + word)[None, None, :, :]
        seen = there[:, :, None, None] & real[None, None, :, :]
        key = tl.load(at, mask=seen, other=0).to(tl.uint32)
        if slices == 0:
            differ = popcount(key ^ query[None, None, :, :])
        else:
            differ = count * popcount(key)
            for number in tl.static_range(slices):
                one = tl.load(own + number * words, mask=real, other=0).to(tl.uint32)
                one = one[None, None, :, :]
                differ += (popcount(one) - 2 * popcount(key & one)) << number
        distance = tl.sum(differ, axis=3)
        counted = there[:, :, None] & (tl.arange(0, HEADS) < heads)[None, None, :]
        distance = tl.where(counted, distance, 2147483647)
        nearest = tl.minimum(nearest, tl.min(distance, axis=1))

    if apart:
        score = tl.where(wanted[:, None], -nearest, -2147483648)
        score = tl.where((window & (place < blocks) & (block_id >= 0))[:, None], 2147483647, score)
        to = out + row * (heads * places) + tl.arange(0, HEADS)[None, :] * places + place[:, None]
        tl.store(to, score, mask=(place < places)[:, None] & (tl.arange(0, HEADS) < heads)[None, :])
    else:
        score = tl.where(wanted, -tl.min(nearest, axis=1), -2147483648)
        score = tl.where(window & (place < blocks) & (block_id >= 0), 2147483647, score)
        tl.store(out + row * places + place, score, mask=place < places)


@triton.jit
def count_bits(
    queries,
    out,
    count,
    words,
    slices,
    BITS: tl.constexpr,
    SLICES: tl.constexpr,
    QUERIES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Slices ``out [rows, slices, words]`` of how many of ``queries [rows, count, words]`` have
    each bit set. ``BITS`` are those of a word. Programs: (a row)."""
    row = tl.program_id(0).to(tl.int64)
    query, number = tl.arange(0, QUERIES)[:, None], tl.arange(0, SLICES)[:, None]
    word = tl.arange(0, WORDS)
    own = queries + (row * count + query) * words + word[None, :]
    codes = tl.load(own, mask=(query < count) & (word < words)[None, :], other=0).to(tl.uint32)
    made = tl.zeros((SLICES, WORDS), tl.uint32)
    for bit in range(BITS):
        ones = tl.sum(((codes >> bit) & 1).to(tl.int32), axis=0)
        made |= ((ones[None, :] >> number) & 1).to(tl.uint32) << bit
    to = out + (row * slices + number) * words + word[None, :]
    tl.store(to, made.to(out.dtype.element_ty), mask=(number < slices) & (word < words)[None, :])


def hamming_scores(
    queries: Tensor,
    codes: Tensor,
    table: Tensor,
    tokens: Tensor,
    *,
    heads_apart: bool = False,
    init: int = 0,
    local: int = 0,
) -> Tensor:
    """:func:`ucm.sparse.retrieval.hamming_scores`. ``codes [n, b, h, bytes]`` may be in any order
    of blocks, slots and heads (``NHD`` or ``HND``); the bytes of a code have no gaps."""
    if queries.dim() == 3:
        queries = queries[:, :, None]
    rows, heads, count, size = queries.shape
    gaps = codes.stride(3) != 1 or table.stride(-1) != 1
    if codes.shape[2:] != (heads, size) or gaps or table.shape[0] != rows:
        named = {"queries": queries, "codes": codes, "table": table}
        raise InvalidInputError(
            "queries, codes and block table do not fit each other",
            context={name: tuple(each.shape) for name, each in named.items()},
        )
    places, block_size = table.shape[1], codes.shape[1]
    shape = (rows, heads if heads_apart else 1, places)
    out = torch.empty(shape, dtype=torch.int32, device=codes.device)
    if not out.numel():
        return out
    packed, keys = as_words(queries.contiguous(), codes)
    words, slices = packed.shape[3], count.bit_length() if count > 1 else 0
    if slices:
        packed = _slices(packed, slices)
    wide = power_of_2(heads) * power_of_2(words)
    slots = min(power_of_2(block_size), max(1, WORDS // wide))
    blocks = max(1, WORDS // (wide * slots)) if slots >= block_size else 1
    hamming_block[(-(-places // blocks), rows)](
        packed,
        keys,
        table,
        tokens,
        out,
        places,
        table.stride(0),
        init,
        local,
        keys.stride(0),
        code_slot=keys.stride(1),
        code_head=keys.stride(2),
        block_size=block_size,
        heads=heads,
        words=words,
        count=count,
        slices=slices,
        apart=heads_apart,
        BLOCKS=blocks,
        SLOTS=slots,
        HEADS=power_of_2(heads),
        WORDS=power_of_2(words),
        num_warps=WARPS,
    )
    return out


def _slices(queries: Tensor, slices: int) -> Tensor:
    """Of ``queries [r, h, q, words]`` the slices ``[r, h, slices, words]`` of the counts of each
    bit."""
    rows, heads, count, words = queries.shape
    out = torch.empty((rows, heads, slices, words), dtype=queries.dtype, device=queries.device)
    count_bits[(rows * heads,)](
        queries,
        out,
        count,
        words,
        slices,
        BITS=8 * queries.element_size(),
        SLICES=power_of_2(slices),
        QUERIES=power_of_2(count),
        WORDS=power_of_2(words),
        num_warps=WARPS,
    )
    return out
