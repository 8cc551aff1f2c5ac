"""Scores of blocks by hash codes on a GPU.

A program takes some blocks of a row, reads their codes once, and keeps the least distance of any
token and head in registers. Distances are whole numbers of 32 bits.

Where the distances of many queries to one key add up (latent attention: 64 heads and more, one
latent), the sum depends only on how many queries have each bit set. With ``c_j`` of ``Q`` queries
having bit ``j``, and ``k`` the code of a key::

    Σ_q popcount(q xor k) = Σ_j c_j + Q popcount(k) - 2 Σ_j c_j k_j
                          = Σ_j c_j + Q popcount(k) - 2 Σ_s 2^s popcount(k & slice_s)

where bit ``j`` of ``slice_s`` is bit ``s`` of ``c_j``. So 64 queries become seven slices, and a key
costs eight counts of bits instead of 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.kernels.words import as_words, popcount, power_of_2

#: Words that a program reads at a time: 16 KiB.
WORDS = 4096
WARPS = 4


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
    asked = (
        queries
        + row * (heads * tl.maximum(slices, 1) * words)
        + head * (tl.maximum(slices, 1) * words)
        + word
    )
    nearest = tl.full((BLOCKS, HEADS), 2147483647, tl.int32)
    if slices == 0:
        query = tl.load(asked, mask=real, other=0).to(tl.uint32)
    for first in range(0, block_size, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        there = (
            wanted[:, None]
            & (slot < block_size)[None, :]
            & (place[:, None] * block_size + slot[None, :] < length)
        )
        at = codes + block_id[:, None] * code_block + slot[None, :] * code_slot
        at = at[:, :, None, None] + (head * code_head + word)[None, None, :, :]
        key = tl.load(at, mask=there[:, :, None, None] & real[None, None, :, :], other=0).to(
            tl.uint32
        )
        if slices == 0:
            differ = popcount(key ^ query[None, None, :, :])
        else:
            differ = count * popcount(key)
            for number in tl.static_range(slices):
                one = tl.load(asked + number * words, mask=real, other=0).to(tl.uint32)[
                    None, None, :, :
                ]
                differ += (popcount(one) - 2 * popcount(key & one)) << number
        distance = tl.sum(differ, axis=3)
        distance = tl.where(
            there[:, :, None] & (tl.arange(0, HEADS) < heads)[None, None, :], distance, 2147483647
        )
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
    query, number, word = (
        tl.arange(0, QUERIES)[:, None],
        tl.arange(0, SLICES)[:, None],
        tl.arange(0, WORDS),
    )
    asked = queries + (row * count + query) * words + word[None, :]
    codes = tl.load(asked, mask=(query < count) & (word < words)[None, :], other=0).to(tl.uint32)
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
    """:func:`ucm.sparse.retrieval.hamming_scores`. ``codes [n, b, h, bytes]`` may lie in any order
    of blocks, slots and heads (``NHD`` or ``HND``); the bytes of a code have no gaps."""
    if queries.dim() == 3:
        queries = queries[:, :, None]
    rows, heads, count, size = queries.shape
    if (
        codes.shape[2:] != (heads, size)
        or codes.stride(3) != 1
        or table.stride(-1) != 1
        or table.shape[0] != rows
    ):
        raise InvalidInputError(
            "queries, codes and block table do not fit each other",
            context={
                "queries": tuple(queries.shape),
                "codes": tuple(codes.shape),
                "table": tuple(table.shape),
            },
        )
    places, block_size = table.shape[1], codes.shape[1]
    out = torch.empty(
        (rows, heads if heads_apart else 1, places), dtype=torch.int32, device=codes.device
    )
    if not out.numel():
        return out
    asked, keys = as_words(queries.contiguous(), codes)
    words, slices = asked.shape[3], count.bit_length() if count > 1 else 0
    if slices:
        asked = _slices(asked, slices)
    wide = power_of_2(heads) * power_of_2(words)
    slots = min(power_of_2(block_size), max(1, WORDS // wide))
    blocks = max(1, WORDS // (wide * slots)) if slots >= block_size else 1
    hamming_block[(-(-places // blocks), rows)](
        asked,
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
    """Of ``queries [r, h, q, words]`` the slices ``[r, h, slices, words]`` of how many have each
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
