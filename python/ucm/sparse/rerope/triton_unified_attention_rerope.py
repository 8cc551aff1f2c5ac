"""Attention by the rule of ReRoPE on a GPU, in Triton, over a paged cache of unrotated keys.

A program computes some queries of a row for one KV head and all query heads that share it. A tile
of keys takes one branch: behind the windows of all its queries the far product, of the query
rotated by the window and the key as it is; within all windows the near one, of both rotated; only
the tiles between take both. So a cache of keys is read once, and keys are rotated in registers.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError

#: Rows of a tile (queries times the heads of a group), and keys of one. With 32 keys an A100 spills
#: registers, and Triton does not compile heads of 64 for AMD.
ROWS, TOKENS = 64, 16
WARPS = 4


@triton.jit(do_not_specialize=["window", "table_row"])
def rerope_tile(
    query,
    key,
    value,
    out,
    rotation,
    table,
    starts,
    tokens,
    scale,
    log_unit,
    window,
    table_row,
    query_row,
    query_head,
    key_block,
    key_slot,
    key_head,
    value_block,
    value_slot,
    value_head,
    out_row,
    out_head,
    group: tl.constexpr,
    size: tl.constexpr,
    block_size: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    """``out [t, heads * group, size]`` of ``query``, over ``key`` and ``value``, ``[n, block_size,
    heads, size]``. ``rotation [places, size]`` has cosines, then sines; ``log_unit`` is ``1 /
    ln(training length)``, or 0 without log scale; ``window`` is a place of the rotation.

    Programs: (``QUERIES`` queries, a row, a KV head).
    """
    row, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    length = tl.load(tokens + row)
    begin = tl.program_id(0) * QUERIES
    if begin >= count:
        return
    half: tl.constexpr = size // 2
    at = tl.arange(0, QUERIES * GROUP)
    place_in_row, member = begin + at // GROUP, at % GROUP
    real = (place_in_row < count) & (member < group)
    place = length - count + place_in_row
    low, high = tl.arange(0, HALF), half + tl.arange(0, HALF)
    there = low < half

    asked = (start + place_in_row).to(tl.int64) * query_row + (head * group + member) * query_head
    from_query, in_query = query + asked[:, None], real[:, None] & there[None, :]
    first = tl.load(from_query + low[None, :], mask=in_query, other=0.0).to(tl.float32)
    second = tl.load(from_query + high[None, :], mask=in_query, other=0.0).to(tl.float32)
    scales = scale * tl.maximum(tl.log((place + 1).to(tl.float32)) * log_unit, 1.0)
    first, second = first * scales[:, None], second * scales[:, None]
    of_place = rotation + place.to(tl.int64)[:, None] * size
    cos = tl.load(of_place + low[None, :], mask=in_query, other=0.0)
    sin = tl.load(of_place + high[None, :], mask=in_query, other=0.0)
    kind = key.dtype.element_ty
    near_low = (first * cos - second * sin).to(kind)
    near_high = (second * cos + first * sin).to(kind)
    at_window = rotation + window.to(tl.int64) * size
    amplitude = tl.load(rotation)
    cos = tl.load(at_window + low, mask=there, other=0.0)[None, :] * amplitude
    sin = tl.load(at_window + high, mask=there, other=0.0)[None, :] * amplitude
    far_low = (first * cos - second * sin).to(kind)
    far_high = (second * cos + first * sin).to(kind)

    channel = tl.arange(0, SIZE)
    most = tl.full((QUERIES * GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * GROUP,), tl.float32)
    sums = tl.zeros((QUERIES * GROUP, SIZE), tl.float32)
    earliest = length - count + begin
    end = tl.minimum(earliest + QUERIES, length)
    for behind in range(0, end, TOKENS):
        token = behind + tl.arange(0, TOKENS)
        seen = token < end
        block = tl.load(table + row * table_row + token // block_size, mask=seen, other=0)
        block, slot = block.to(tl.int64), token % block_size
        from_key = key + block * key_block + slot * key_slot + head * key_head
        in_key = seen[:, None] & there[None, :]
        key_low = tl.load(from_key[:, None] + low[None, :], mask=in_key, other=0.0)
        key_high = tl.load(from_key[:, None] + high[None, :], mask=in_key, other=0.0)
        logits = tl.zeros((QUERIES * GROUP, TOKENS), tl.float32)
        if end - 1 - behind >= window:
            logits = tl.dot(far_low, tl.trans(key_low), logits, input_precision="ieee")
            logits = tl.dot(far_high, tl.trans(key_high), logits, input_precision="ieee")
        if earliest - (behind + TOKENS - 1) < window:
            turn = rotation + token.to(tl.int64)[:, None] * size
            key_cos = tl.load(turn + low[None, :], mask=in_key, other=0.0)
            key_sin = tl.load(turn + high[None, :], mask=in_key, other=0.0)
            wide_low, wide_high = key_low.to(tl.float32), key_high.to(tl.float32)
            turned_low = (wide_low * key_cos - wide_high * key_sin).to(kind)
            turned_high = (wide_high * key_cos + wide_low * key_sin).to(kind)
            near = tl.dot(near_low, tl.trans(turned_low), input_precision="ieee")
            near = tl.dot(near_high, tl.trans(turned_high), near, input_precision="ieee")
            logits = tl.where(place[:, None] - token[None, :] < window, near, logits)
        logits = tl.where(seen[None, :] & (token[None, :] <= place[:, None]), logits, float("-inf"))
        before, most = most, tl.maximum(most, tl.max(logits, axis=1))
        weights = tl.exp(logits - most[:, None])
        kept = tl.exp(before - most)
        total = total * kept + tl.sum(weights, axis=1)
        from_value = value + block * value_block + slot * value_slot + head * value_head
        in_value = seen[:, None] & (channel < size)[None, :]
        values = tl.load(from_value[:, None] + channel[None, :], mask=in_value, other=0.0)
        added = tl.dot(weights.to(kind), values, input_precision="ieee")
        sums = sums * kept[:, None] + added

    to = out + (start + place_in_row).to(tl.int64) * out_row + (head * group + member) * out_head
    found = (sums / total[:, None]).to(out.dtype.element_ty)
    in_out = real[:, None] & (channel < size)[None, :]
    tl.store(to[:, None] + channel[None, :], found, mask=in_out)


def unified_attention_rerope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    softmax_scale: float,
    rerope_window: int,
    block_table: Tensor,
    rotation: Tensor,
    training_length: int | None = None,
) -> None:
    """Causal attention of a step's rows by the rule, into ``out [t, hq, d]``.

    ``q [t, hq, d]`` are queries and ``k``, ``v [n, b, h, d]`` the cache, none of them rotated; the
    original's second query and second key are computed here. ``cu_seqlens_q [r + 1]`` are the first
    queries of the rows, ``max_seqlen_q`` the most of a row, ``seqused_k [r]`` and ``block_table [r,
    N]`` their tokens and blocks (int32). ``rotation`` is the table of a
    :class:`~ucm.sparse.rerope.rule.RotationTable`, on the same device, with a place for each token
    of a row. With ``training_length`` queries beyond it are scaled by the logarithm. Raises
    :class:`~ucm.errors.InvalidInputError` for shapes that do not fit.
    """
    heads, dim = k.shape[2], k.shape[3]
    fits = q.shape == out.shape and q.shape[1] % heads == 0 and q.shape[2] == dim
    if not fits or dim % 2 or rotation.shape[1] != dim or v.shape != k.shape:
        shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "rotation": tuple(rotation.shape)}
        raise InvalidInputError("queries, cache and rotation do not fit each other", context=shapes)
    group = q.shape[1] // heads
    padded = triton.next_power_of_2(group)
    queries = max(1, ROWS // padded)
    grid = (triton.cdiv(max_seqlen_q, queries), block_table.shape[0], heads)
    rerope_tile[grid](
        q,
        k,
        v,
        out,
        rotation,
        block_table,
        cu_seqlens_q,
        seqused_k,
        softmax_scale,
        1 / math.log(training_length) if training_length is not None else 0.0,
        min(rerope_window, len(rotation) - 1),
        block_table.stride(0),
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:2],
        group=group,
        size=dim,
        block_size=k.shape[1],
        QUERIES=queries,
        GROUP=padded,
        TOKENS=TOKENS,
        HALF=max(16, triton.next_power_of_2(dim // 2)),
        SIZE=max(16, triton.next_power_of_2(dim)),
        num_warps=WARPS,
    )
