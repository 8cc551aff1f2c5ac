"""The best blocks of every row on a GPU, and the block table that attention reads them by.

Scores become whole numbers in the same order. The number of the last block that is kept is found
digit by digit, eight bits at a time: a histogram of the digits, of those scores whose higher digits
are known to be right, says in which bin the budget ends. Only digits in which the scores of a row
differ are read: one histogram for Hamming distances of up to 255 bits, up to four for floats. Then
one pass writes what is kept in the order of places, so of equal scores the lower place is kept.
Exact, linear in the number of blocks, and independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.retrieval import Kept

#: Blocks that a program reads together.
TILE = 1024
WARPS = 4


@triton.jit
def ordered(score, real):
    """Scores as int64 numbers of 32 bits in the same order; 0 for those that are never chosen: the
    smallest, and what is no number."""
    if score.dtype == tl.float32:
        bits = score.to(tl.uint32, bitcast=True)
        bits = tl.where(score == 0, 0, bits)  # both zeros are the same
        number = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        number = tl.where((score != score) | (score == float("-inf")), 0, number)
    else:
        number = score.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(real, number, 0).to(tl.int64)


@triton.jit(do_not_specialize=["places", "table_row", "width", "init", "local"])
def select_row(
    scores,
    table,
    tokens,
    budgets,
    kept_table,
    logical,
    counts,
    lengths,
    places,
    table_row,
    width,
    init,
    local,
    heads: tl.constexpr,
    block_size: tl.constexpr,
    TILE: tl.constexpr,
):
    """What ``scores [rows, heads, places]`` keep of ``table [rows, places]``, into tables ``[rows,
    heads, width]``.

    Programs: (a row and head).
    """
    item = tl.program_id(0).to(tl.int64)
    row = item // heads
    scores += item * places
    table += row * table_row
    kept_table += item * width
    logical += item * width
    length = tl.load(tokens + row).to(tl.int32)
    blocks = tl.minimum((length + block_size - 1) // block_size, places)
    last = blocks - tl.minimum(local, blocks)
    first = tl.minimum(init, last)
    budget = tl.load(budgets + row).to(tl.int32)
    place = tl.arange(0, TILE)

    # The least and the greatest number between the windows, of those that may be chosen, and how
    # many those are.
    least = tl.full((), 0x100000000, tl.int64)
    most = tl.full((), 0, tl.int64)
    able = tl.full((), 0, tl.int32)
    choosing = budget < last - first
    if choosing:
        for start in range(0, blocks, TILE):
            here = start + place
            real = (here >= first) & (here < last)
            number = ordered(tl.load(scores + here, mask=real, other=0), real)
            least = tl.minimum(least, tl.min(tl.where(number > 0, number, 0x100000000)))
            most = tl.maximum(most, tl.max(number))
            able += tl.sum((number > 0).to(tl.int32))
    choosing = choosing & (budget < able)

    # The number of the last block that the budget holds, and how many blocks of that number it
    # holds.
    known = tl.full((), 0, tl.int64)
    left = budget
    if choosing & (budget > 0):
        span = most - least
        digits = (span > 0).to(tl.int32) + (span > 0xFF).to(tl.int32) + (span > 0xFFFF).to(tl.int32)
        digits += (span > 0xFFFFFF).to(tl.int32)
        for step in range(digits):
            shift = (8 * (digits - 1 - step)).to(tl.int64)
            bins = tl.zeros((256,), tl.int32)
            for start in range(0, blocks, TILE):
                here = start + place
                real = (here >= first) & (here < last)
                number = ordered(tl.load(scores + here, mask=real, other=0), real)
                rest = number - least
                right = (number > 0) & ((rest >> (shift + 8)) == known)
                digit = tl.where(right, (rest >> shift) & 0xFF, 0).to(tl.int32)
                bins += tl.histogram(digit, 256, mask=right)
            # Bin by bin: how many have a digit that is at least as large.
            value = tl.arange(0, 256)
            at_least = tl.cumsum(bins, axis=0, reverse=True)
            chosen = tl.max(tl.where(at_least >= left, value, 0))
            left -= tl.sum(tl.where(value > chosen, bins, 0))
            known = (known << 8) + chosen.to(tl.int64)
    bound = known + least

    found = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    end = tl.full((), -1, tl.int32)
    for start in range(0, blocks, TILE):
        here = start + place
        there = here < blocks
        middle = (here >= first) & (here < last)
        block_id = tl.load(table + here, mask=there, other=-1).to(tl.int32)
        kept = there & ~middle
        if choosing:
            if budget > 0:
                number = ordered(tl.load(scores + here, mask=middle, other=0), middle)
                same = middle & (number == bound)
                rank = equal + tl.cumsum(same.to(tl.int32), axis=0)
                kept = kept | (middle & (number > bound)) | (same & (rank <= left))
                equal += tl.sum(same.to(tl.int32))
        elif budget >= last - first:
            kept = kept | middle
        else:
            kept = kept | (ordered(tl.load(scores + here, mask=middle, other=0), middle) > 0)
        kept = kept & (block_id >= 0)
        to = found + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(kept_table + to, block_id, mask=kept & (to < width))
        tl.store(logical + to, here, mask=kept & (to < width))
        found += tl.sum(kept.to(tl.int32))
        end = tl.maximum(end, tl.max(tl.where(kept, here, -1)))

    behind = tl.load(table + end, mask=end >= 0, other=0).to(tl.int32)
    for start in range(0, width, TILE):
        here = start + place
        rest = (here >= found) & (here < width)
        tl.store(kept_table + here, tl.zeros((TILE,), tl.int32) + behind, mask=rest)
        tl.store(logical + here, tl.full((TILE,), -1, tl.int32), mask=rest)
    tl.store(counts + item, found)
    of_last = length - (blocks - 1) * block_size
    tl.store(lengths + item, tl.where(found > 0, (found - 1) * block_size + of_last, 0))


def select_blocks(
    scores: Tensor,
    table: Tensor,
    tokens: Tensor,
    block_size: int,
    budgets: Sequence[int] | Tensor,
    *,
    init: int = 0,
    local: int = 1,
    into: Kept | None = None,
) -> Kept:
    """:func:`ucm.sparse.retrieval.select_blocks`, without waiting for the GPU: lengths and ids are
    not checked, a row has at most as many blocks as the table has places. Budgets may lie on the
    GPU (int32); then ``into`` must have room for them."""
    rows, heads, places = scores.shape
    fits = table.shape == (rows, places) and tokens.shape == (rows,) and len(budgets) == rows
    if not fits or table.stride(1) != 1:
        named = {"scores": scores, "table": table, "tokens": tokens}
        raise InvalidInputError(
            "scores, block table, lengths and budgets do not fit each other",
            context={name: tuple(tensor.shape) for name, tensor in named.items()},
        )
    if scores.dtype not in (torch.float32, torch.int32):
        raise InvalidInputError("scores are float32 or int32", context={"scores": scores.dtype})
    local = max(local, 1)
    if isinstance(budgets, Tensor):
        if into is None:
            raise InvalidInputError(
                "how much room budgets on the GPU need is not known here, and none was given"
            )
        needed = 0
    else:
        needed = Kept.width(places, budgets, init, local)
        budgets = torch.tensor(list(budgets), dtype=torch.int32, device=scores.device)
    if into is None:
        (into,) = Kept.rooms(1, rows, heads, needed, scores.device)
    width = into.table.shape[2]
    if into.table.shape[:2] != (rows, heads) or width < needed:
        raise InvalidInputError(
            "rows keep more blocks than there are places",
            context={"places": tuple(into.table.shape), "needed": (rows, heads, needed)},
        )
    if rows and heads:
        select_row[(rows * heads,)](
            scores.contiguous(),
            table,
            tokens,
            budgets,
            *into,
            places,
            table.stride(0),
            width,
            init,
            local,
            heads=heads,
            block_size=block_size,
            TILE=TILE,
            num_warps=WARPS,
        )
    return into
