"""From scores to the blocks that are kept, and from those to the block table that attention reads.

Only the last block of a request can be partial, and it is always kept, so an ordinary paged kernel
with the shorter table and length computes exactly ``softmax over the kept tokens of (q·k * scale) ·
v``. Ids stay ascending: the partial block stays last, and the result does not depend on the order
in which blocks were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ucm.sparse.policy import Policy

#: Fills rows of a table that are shorter than the longest.
NO_BLOCK = -1


def choose(
    policy: Policy, scores: Tensor, blocks: int, weights: Tensor | None = None
) -> list[Tensor]:
    """Of the candidates of a request of ``blocks`` blocks those that are kept: logical ids, one
    ascending int64 tensor for each row of ``scores [heads, blocks - windows]``.

    The highest scores win, of equal ones the lower id; NaN counts as the lowest score. ``weights``
    (same shape, not negative) are what a budget by mass adds up.
    """
    most, least = policy.budget(blocks), policy.least(blocks)
    if most <= 0:
        return [
            torch.empty(0, dtype=torch.int64, device=scores.device) for _ in range(scores.shape[0])
        ]
    middle = scores
    if middle.is_floating_point():
        middle = torch.nan_to_num(middle, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = torch.sort(middle, dim=-1, descending=True, stable=True).indices
    if policy.mass is None:
        return list(torch.sort(order[:, :most] + policy.init, dim=-1).values)
    if weights is None:
        raise ValueError("a budget by mass needs weights")
    mass = torch.nan_to_num(weights.double()).gather(1, order).cumsum(dim=-1)
    # The first place where what was gathered reaches the share; all blocks where the mass is zero
    # or not finite.
    reached = mass >= policy.mass * mass[:, -1:]
    count = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1) + 1, mass.shape[-1])
    return [
        torch.sort(row[: min(max(int(k), least), most)] + policy.init).values
        for row, k in zip(order, count, strict=True)
    ]


def select(
    policy: Policy, scores: Tensor, blocks: int, tokens: int, weights: Tensor | None = None
) -> list[Tensor]:
    """The blocks that a request of ``blocks`` blocks and ``tokens`` tokens keeps: windows and what
    :func:`choose` says, ascending, for each row of ``scores [heads, blocks]``; all of them where
    the policy calls the request dense. Scores of the windows, and beyond ``blocks``, are never
    looked at."""
    if policy.is_dense(blocks, tokens):
        return [torch.arange(blocks, device=scores.device)] * scores.shape[0]
    middle = slice(policy.init, blocks - policy.local)
    chosen = choose(
        policy, scores[:, middle], blocks, None if weights is None else weights[:, middle]
    )
    return [with_windows(policy, ids, blocks, blocks) for ids in chosen]


def with_windows(policy: Policy, middle: Tensor, chosen_at: int, blocks: int) -> Tensor:
    """``middle``, chosen when the request had ``chosen_at`` blocks, and the windows of a request
    that has ``blocks`` now.

    What was in the local window then, and what came since, stays until the next choice: no block is
    dropped that was never a candidate.
    """
    ids = torch.arange(blocks, device=middle.device)
    return torch.cat(
        [ids[: policy.init], middle, ids[max(policy.init, chosen_at - policy.local) :]]
    )


class Selection(NamedTuple):
    """The blocks that some rows of a batch keep; ``heads`` is 1 where all heads share a choice.
    Rows that are not named keep everything."""

    #: Places of the rows in the batch, ``[s]``.
    rows: Tensor
    #: Logical blocks, ascending, ``[s, heads, most]``, filled with :data:`NO_BLOCK`, and how many
    #: there are.
    ids: Tensor
    counts: Tensor
    #: How many blocks the rows have, ``[s]``.
    blocks: Tensor
    #: The physical blocks and the lengths that :func:`compact` would make, where a kernel has made
    #: them already.
    table: Tensor | None = None
    tokens: Tensor | None = None

    @classmethod
    def of(
        cls, kept: Sequence[Sequence[Tensor]], blocks: Sequence[int], rows: Tensor | None = None
    ) -> Selection:
        """From the ids that each row and head keeps; ``rows`` are their places, the first ones
        where none are given. There is at least one row."""
        counts = torch.tensor([[len(ids) for ids in row] for row in kept])
        device = kept[0][0].device
        table = torch.full(
            (*counts.shape, int(counts.max())), NO_BLOCK, dtype=torch.int64, device=device
        )
        for i, row in enumerate(kept):
            for j, ids in enumerate(row):
                table[i, j, : len(ids)] = ids
        places = torch.arange(len(kept), device=device) if rows is None else rows
        return cls(places, table, counts.to(device), torch.tensor(list(blocks), device=device))

    @property
    def dense(self) -> bool:
        """Whether every row keeps everything, so that the table and the lengths may stay as they
        are."""
        return bool((self.counts == self.blocks[:, None]).all())

    def kept(self, row: int, head: int = 0) -> Tensor:
        """The logical blocks of one of the rows, by its number among them."""
        return self.ids[row, head, : int(self.counts[row, head])].long()


def compact(
    selection: Selection, block_table: Tensor, seq_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """The block table and the lengths with which attention reads the kept blocks alone.

    ``block_table [rows, N]`` has physical ids, ``seq_lens [rows]`` tokens, the current one
    included. Returns ``[s, most]`` and ``[s]`` for the rows of the selection where the heads share
    a choice, else ``[s, heads, most]`` and ``[s, heads]``, in the types that came in. New tensors:
    nothing that came in is written to. Beyond a row's count the table repeats its last block, a
    valid id that no kernel reads.
    """
    if selection.table is not None and selection.tokens is not None:
        table, lens = selection.table.to(block_table.dtype), selection.tokens.to(seq_lens.dtype)
    else:
        last = (selection.counts - 1).clamp(min=0)[:, :, None]
        ids = torch.where(selection.ids < 0, selection.ids.gather(2, last), selection.ids)
        count, heads, most = ids.shape
        own = block_table[selection.rows]
        table = own.gather(1, ids.view(count, heads * most).to(own.device)).view(count, heads, most)
        counts = selection.counts.to(seq_lens.device, seq_lens.dtype)
        lens = (counts - 1) * block_size + ((seq_lens[selection.rows] - 1) % block_size + 1)[
            :, None
        ]
    return (table[:, 0], lens[:, 0]) if table.shape[1] == 1 else (table, lens)


def compact_rows(
    selection: Selection, block_table: Tensor, seq_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Block table and lengths of the whole batch with those of the selection's rows in them:
    :func:`compact`, as wide as what came in, for rows that keep everything are read from it as
    well; ``[rows, heads, N]`` where heads choose apart."""
    table, lens = compact(selection, block_table, seq_lens, block_size)
    if table.dim() == 3:
        heads = table.shape[1]
        block_table, seq_lens = (
            block_table[:, None].expand(-1, heads, -1),
            seq_lens[:, None].expand(-1, heads),
        )
    wide, lengths = block_table.clone(), seq_lens.clone()
    wide[selection.rows, ..., : table.shape[-1]] = table
    lengths[selection.rows] = lens
    return wide, lengths
