"""Hash codes on a GPU: vectors times directions, the signs packed and written to their slots.

A program keeps the directions of a head and passes over the tokens, so keys are read once, codes
are written once, and no product is stored between. Directions of more than 128 channels (latent
attention) do not fit: those are read again for every tile, from the GPU's cache. A tile has the
same shape for any number of tokens: the code of a vector does not depend on the others.

Products are as exact as those of single precision, on any matrix unit that multiplies bf16: a
number is the sum of up to three of bf16, products of two of these are exact in float32, and the
least of them are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError


def as_words(*codes: Tensor) -> list[Tensor]:
    """Codes (uint8, without gaps in the last dimension) as int32, four bytes in each, where all of
    them divide so; else as they are."""
    for each in codes:
        steps = (each.shape[-1], each.storage_offset(), each.data_ptr(), *each.stride()[:-1])
        if any(step % 4 for step in steps):
            return list(codes)
    return [each.view(torch.int32) for each in codes]


def power_of_2(number: int) -> int:
    """The least power of 2 that is no smaller. Triton's own takes some microseconds a call."""
    return 1 << (number - 1).bit_length()


#: Tokens, channels and bits of a tile, where the directions of a head are kept and where they are
#: too many for that, and the warps of a program. Where a code has more bits than a tile, a vector
#: is read once for each tile of bits, from the GPU's cache.
NVIDIA = ((32, 128, 128), (64, 32, 128), 8)
AMD = ((32, 128, 32), (64, 32, 64), 4)
#: Programs of a launch: two for each multiprocessor of an H100.
PROGRAMS = 264


@triton.jit
def in_parts(x):
    """A float32 tensor as the sum of three of bf16, the largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def exact_dot(x, high, middle, low, total, parts: tl.constexpr):
    """``total + x @ (high + middle + low)``, the smallest products first. ``parts``: numbers of
    bf16 that each of ``x`` is the sum of."""
    first, second, third = in_parts(x)
    if parts > 2:
        total = tl.dot(third, high, total)
    if parts > 1:
        total = tl.dot(second, middle, total)
    total = tl.dot(first, low, total)
    if parts > 1:
        total = tl.dot(second, high, total)
    total = tl.dot(first, middle, total)
    return tl.dot(first, high, total)


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
    code_slot: tl.constexpr,
    code_head: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    bits: tl.constexpr,
    unit: tl.constexpr,
    by_slot: tl.constexpr,
    parts: tl.constexpr,
    keep: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codes of ``x [tokens, heads, size]`` by ``weights [size, bits]``, into ``codes [blocks,
    block_size, heads, bits / unit]`` at ``slots [tokens]``, or at the token's own number. Programs:
    (some of the tiles of tokens, a tile of bits, a head)."""
    bit = tl.program_id(1) * BITS + tl.arange(0, BITS)
    head = tl.program_id(2)
    channel = tl.arange(0, CHANNELS)
    word = tl.program_id(1) * (BITS // unit) + tl.arange(0, BITS // unit)
    powers = (tl.full((unit,), 1, tl.uint32) << tl.arange(0, unit).to(tl.uint32))[None, None, :]
    at = weights + channel[:, None] * bits + bit[None, :]
    if keep:
        wanted = (channel[:, None] < size) & (bit[None, :] < bits)
        high, middle, low = in_parts(tl.load(at, mask=wanted, other=0.0).to(tl.float32))
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        rows = x + token.to(tl.int64)[:, None] * x_token + head * x_head
        product = tl.zeros((TOKENS, BITS), tl.float32)
        if keep:
            seen = (token[:, None] < tokens) & (channel[None, :] < size)
            vectors = tl.load(rows + channel[None, :], mask=seen, other=0.0).to(tl.float32)
            product = exact_dot(vectors, high, middle, low, product, parts)
        else:
            for first in range(0, size, CHANNELS):
                seen = (token[:, None] < tokens) & (first + channel[None, :] < size)
                vectors = tl.load(rows + first + channel[None, :], mask=seen, other=0.0)
                wanted = (first + channel[:, None] < size) & (bit[None, :] < bits)
                found = tl.load(at + first * bits, mask=wanted, other=0.0)
                high, middle, low = in_parts(found.to(tl.float32))
                vectors = vectors.to(tl.float32)
                product = exact_dot(vectors, high, middle, low, product, parts)
        signs = tl.reshape((product > 0).to(tl.uint32), (TOKENS, BITS // unit, unit))
        packed = tl.sum(signs * powers, axis=2)
        slot = token.to(tl.int64)
        if by_slot:
            slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
        kept = (token < tokens) & (slot >= 0) & (slot < slot_count)
        to = codes + (slot // block_size) * code_block + (slot % block_size) * code_slot
        to += head * code_head
        inside = kept[:, None] & (word[None, :] < bits // unit)
        tl.store(to[:, None] + word[None, :], packed.to(codes.dtype.element_ty), mask=inside)


def hash_encode(
    vectors: Tensor, weights: Tensor, codes: Tensor | None = None, slots: Tensor | None = None
) -> Tensor:
    """:func:`ucm.sparse.retrieval.hash_encode`, for one set of directions ``[d, bits]``: codes of
    ``vectors [t, h, d]`` into ``codes [n, b, h, bits / 8]`` by slot, or as ``[t, h, bits / 8]``.
    Slots behind the last one are left out too; ``codes`` may be a part of the bytes of longer
    codes, and in any order of blocks, slots and heads."""
    tokens, heads, size = vectors.shape
    bits = weights.shape[-1]
    if weights.shape != (size, bits) or bits % 8:
        raise InvalidInputError(
            "directions do not fit the vectors",
            context={"channels": size, "directions": tuple(weights.shape)},
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
        wrong = {"codes": tuple(codes.shape), "heads": heads}
        raise InvalidInputError("codes have another shape", context=wrong)
    if vectors.stride(2) != 1:
        vectors = vectors.contiguous()
    [words] = as_words(codes)
    if tokens:
        kept, passed, warps = AMD if torch.version.hip else NVIDIA
        keep = size <= kept[1]
        tile, channels, wide = kept if keep else passed
        parts = {torch.bfloat16: 1, torch.float16: 2}.get(vectors.dtype, 3)
        tile = tile if parts == 1 else tile // 2
        wide = min(wide, max(32, power_of_2(bits)))
        tiles = -(-bits // wide)
        programs = min(-(-tokens // tile), max(1, PROGRAMS // (heads * tiles)))
        encode_write[(programs, tiles, heads)](
            vectors,
            weights.contiguous(),
            words,
            words if slots is None else slots,
            tokens,
            codes.shape[0] * codes.shape[1],
            vectors.stride(0),
            words.stride(0),
            x_head=vectors.stride(1),
            code_slot=words.stride(1),
            code_head=words.stride(2),
            block_size=codes.shape[1],
            size=size,
            bits=bits,
            unit=8 * words.element_size(),
            by_slot=slots is not None,
            parts=parts,
            keep=keep,
            TOKENS=tile,
            CHANNELS=min(channels, max(16, power_of_2(size))),
            BITS=wide,
            num_warps=warps,
            num_stages=2 if parts == 1 else 1,
        )
    return codes if made is None else made


def hash_encode_query(query: Tensor, weights: Tensor, kv_heads: int) -> Tensor:
    """:func:`ucm.sparse.retrieval.hash_encode_query`: codes of the mean of the query heads of a KV
    head."""
    rows, heads, size = query.shape
    mean = query.view(rows, kv_heads, heads // kv_heads, size).mean(dim=2, dtype=torch.float32)
    return hash_encode(mean, weights)


@triton.jit(do_not_specialize=["slot_count"])
def scatter(
    codes,
    slots,
    cache,
    slot_count,
    block_size,
    elements,
    code_token,
    code_head,
    cache_block,
    cache_slot,
    cache_head,
    WORDS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Codes of one token, ``[heads, WORDS]``, into its slot. Programs: (a token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    element = tl.arange(0, ELEMENTS)
    head, word = element // WORDS, element % WORDS
    kept = (element < elements) & (slot >= 0) & (slot < slot_count)
    found = tl.load(codes + token * code_token + head * code_head + word, mask=kept, other=0)
    to = cache + (slot // block_size) * cache_block + (slot % block_size) * cache_slot
    to += head * cache_head + word
    tl.store(to, found, mask=kept)


def scatter_codes(codes: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Write codes ``[t, h, bytes]`` into ``cache [n, b, h, bytes]`` by ``slots [t]``; those outside
    are left out."""
    tokens, heads, size = codes.shape
    if cache.shape[2:] != (heads, size) or slots.shape != (tokens,):
        shapes = {"codes": tuple(codes.shape), "cache": tuple(cache.shape)}
        raise InvalidInputError("codes do not fit the cache", context=shapes)
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
            ELEMENTS=power_of_2(heads * from_.shape[2]),
        )
