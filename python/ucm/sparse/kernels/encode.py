"""Hash codes on a GPU: vectors times directions, the signs of that packed and written to their slots.

One program keeps the directions of a head in shared memory and passes over the tokens, so keys are read once and codes
written once, and nothing lies in memory between. A tile has the same shape however many tokens there are: the code of a
vector does not depend on what came with it. Products are those of single precision: on tensor cores in three passes
(``tf32x3``), by the multiplier's own instruction on AMD (``ieee``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.kernels.words import as_words

#: Tokens, channels and bits of a tile.
TOKENS, CHANNELS, BITS = 64, 128, 128
#: Programs of a launch: two for each multiprocessor of an H100.
PROGRAMS = 264
WARPS = 4


@triton.jit(do_not_specialize=["tokens", "slot_count"])
def encode_write(
    x,
    weights,
    codes,
    slots,
    tokens,
    slot_count,
    x_token,
    code_block,
    x_head: tl.constexpr,
    x_member: tl.constexpr,
    code_slot: tl.constexpr,
    code_head: tl.constexpr,
    block_size: tl.constexpr,
    members: tl.constexpr,
    size: tl.constexpr,
    bits: tl.constexpr,
    unit: tl.constexpr,
    by_slot: tl.constexpr,
    precision: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codes of the means over ``members`` of ``x [tokens, heads, members, size]`` by ``weights [size, bits]``, into
    ``codes [blocks, block_size, heads, bits / unit]`` at ``slots [tokens]``, or at the token's own number.

    Programs: (some of the tiles of tokens, a tile of bits, a head).
    """
    bit = tl.program_id(1) * BITS + tl.arange(0, BITS)
    head = tl.program_id(2)
    channel = tl.arange(0, CHANNELS)
    word = tl.program_id(1) * (BITS // unit) + tl.arange(0, BITS // unit)
    powers = (tl.full((unit,), 1, tl.uint32) << tl.arange(0, unit).to(tl.uint32))[None, None, :]
    at = weights + channel[:, None] * bits + bit[None, :]
    if size <= CHANNELS:
        seen = tl.load(at, mask=(channel[:, None] < size) & (bit[None, :] < bits), other=0.0)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        rows = x + token.to(tl.int64)[:, None] * x_token + head * x_head
        product = tl.zeros((TOKENS, BITS), tl.float32)
        for first in tl.static_range(0, size, CHANNELS):
            there = (token[:, None] < tokens) & (first + channel[None, :] < size)
            mean = tl.zeros((TOKENS, CHANNELS), tl.float32)
            for member in tl.static_range(members):
                part = rows + member * x_member + first + channel[None, :]
                mean += tl.load(part, mask=there, other=0.0).to(tl.float32)
            if size > CHANNELS:
                more = (first + channel[:, None] < size) & (bit[None, :] < bits)
                seen = tl.load(at + first * bits, mask=more, other=0.0)
            product = tl.dot(mean / members, seen, product, input_precision=precision)
        signs = tl.reshape((product > 0).to(tl.uint32), (TOKENS, BITS // unit, unit))
        packed = tl.sum(signs * powers, axis=2)
        slot = token.to(tl.int64)
        if by_slot:
            slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
        kept = (token < tokens) & (slot >= 0) & (slot < slot_count)
        to = codes + (slot // block_size) * code_block + (slot % block_size) * code_slot + head * code_head
        tl.store(
            to[:, None] + word[None, :],
            packed.to(codes.dtype.element_ty),
            mask=kept[:, None] & (word[None, :] < bits // unit),
        )


def hash_encode(vectors: Tensor, weights: Tensor, codes: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
    """:func:`ucm.sparse.retrieval.hash_encode`, for one set of directions ``[d, bits]``: codes of ``vectors [t, h, d]``
    into ``codes [n, b, h, bits / 8]`` by slot, or as ``[t, h, bits / 8]``. Slots behind the last one are left out
    too."""
    return encode_means(vectors[:, :, None], weights, codes, slots)


def hash_encode_query(query: Tensor, weights: Tensor, kv_heads: int) -> Tensor:
    """:func:`ucm.sparse.retrieval.hash_encode_query`: codes of the mean of the query heads that share a KV head."""
    return encode_means(query.unflatten(1, (kv_heads, -1)), weights)


def encode_means(
    vectors: Tensor, weights: Tensor, codes: Tensor | None = None, slots: Tensor | None = None
) -> Tensor:
    """Codes of the means over ``g`` of ``vectors [t, h, g, d]``, where :func:`hash_encode` writes them. ``codes`` may be
    a part of the bytes of longer codes, and lie in any order of blocks, slots and heads."""
    tokens, heads, members, size = vectors.shape
    bits = weights.shape[-1]
    if weights.shape != (size, bits) or bits % 8:
        raise InvalidInputError(
            "directions do not fit the vectors", context={"channels": size, "directions": tuple(weights.shape)}
        )
    made = None
    if codes is None:
        if slots is not None:
            raise InvalidInputError("slots are places in codes, which are missing")
        made = torch.empty((tokens, heads, bits // 8), dtype=torch.uint8, device=vectors.device)
        codes = made[:, None]
    elif slots is None:
        raise InvalidInputError("codes are written by slot, and the slots are missing")
    if codes.shape[2:] != (heads, bits // 8) or codes.stride(3) != 1:
        raise InvalidInputError("codes have another shape", context={"codes": tuple(codes.shape), "heads": heads})
    if vectors.stride(3) != 1:
        vectors = vectors.contiguous()
    [words] = as_words(codes)
    if tokens:
        tiles = triton.cdiv(bits, BITS)
        wide = triton.next_power_of_2(bits)
        encode_write[(min(triton.cdiv(tokens, TOKENS), max(1, PROGRAMS // (heads * tiles))), tiles, heads)](
            vectors,
            weights.contiguous(),
            words,
            words if slots is None else slots,
            tokens,
            codes.shape[0] * codes.shape[1],
            vectors.stride(0),
            words.stride(0),
            x_head=vectors.stride(1),
            x_member=vectors.stride(2),
            code_slot=words.stride(1),
            code_head=words.stride(2),
            block_size=codes.shape[1],
            members=members,
            size=size,
            bits=bits,
            unit=8 * words.element_size(),
            by_slot=slots is not None,
            precision="ieee" if torch.version.hip else "tf32x3",
            TOKENS=TOKENS,
            CHANNELS=min(CHANNELS, max(16, triton.next_power_of_2(size))),
            BITS=min(BITS, max(16, wide)),
            num_warps=WARPS,
        )
    return codes if made is None else made


@triton.jit(do_not_specialize=["slot_count"])
def scatter(codes, slots, cache, slot_count, block_size, elements, code_token, code_head, cache_block, cache_slot, cache_head, WORDS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Codes of one token, ``[heads, WORDS]``, into its slot. Programs: (a token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    element = tl.arange(0, ELEMENTS)
    head, word = element // WORDS, element % WORDS
    kept = (element < elements) & (slot >= 0) & (slot < slot_count)
    found = tl.load(codes + token * code_token + head * code_head + word, mask=kept, other=0)
    to = cache + (slot // block_size) * cache_block + (slot % block_size) * cache_slot + head * cache_head + word
    tl.store(to, found, mask=kept)


def scatter_codes(codes: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Write codes ``[t, h, bytes]`` into ``cache [n, b, h, bytes]`` by ``slots [t]``; those outside are left out."""
    tokens, heads, size = codes.shape
    if cache.shape[2:] != (heads, size) or slots.shape != (tokens,):
        raise InvalidInputError(
            "codes do not fit the cache", context={"codes": tuple(codes.shape), "cache": tuple(cache.shape)}
        )
    from_, to = as_words(codes, cache)
    if tokens and from_.numel():
        scatter[(tokens,)](
            from_,
            slots,
            to,
            cache.shape[0] * cache.shape[1],
            cache.shape[1],
            heads * from_.shape[2],
            *from_.stride()[:2],
            *to.stride()[:3],
            WORDS=from_.shape[2],
            ELEMENTS=triton.next_power_of_2(heads * from_.shape[2]),
        )
