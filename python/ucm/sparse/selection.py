"""From scores to the blocks that are kept, and from those to the block table that attention reads.

Only the last block of a request can be partial, and it is always kept, so an ordinary paged kernel with the shorter
table and length computes exactly ``softmax over the kept tokens of (q·k * scale) · v``. Ids stay ascending: the partial
block stays last, and the result does not depend on the order in which blocks were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ucm.sparse.policy import Policy

#: Fills rows of a table that are shorter than the longest.
NO_BLOCK = -1


def choose(policy: Policy, scores: Tensor, blocks: int, weights: Tensor | None = None) -> list[Tensor]:
    """Of the candidates of a request of ``blocks`` blocks those that are kept: logical ids, one ascending int64 tensor
    for each row of ``scores [heads, blocks - windows]``.

    The highest scores win, of equal ones the lower id; NaN counts as the lowest score. ``weights`` (same shape, not
    negative) are what a budget by mass adds up.
    """
    most, least = policy.budget(blocks), policy.least(blocks)
    if most <= 0:
        return [torch.empty(0, dtype=torch.int64, device=scores.device) for _ in range(scores.shape[0])]
    middle = scores
    if middle.is_floating_point():
        middle = torch.nan_to_num(middle, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = torch.sort(middle, dim=-1, descending=True, stable=True).indices
    if policy.mass is None:
        return list(torch.sort(order[:, :most] + policy.init, dim=-1).values)
    if weights is None:
        raise ValueError("a budget by mass needs weights")
    mass = torch.nan_to_num(weights.double()).gather(1, order).cumsum(dim=-1)
    # The first place where what was gathered reaches the share; all blocks where the mass is zero or not finite.
    reached = mass >= policy.mass * mass[:, -1:]
    count = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1) + 1, mass.shape[-1])
    return [
        torch.sort(row[: min(max(int(k), least), most)] + policy.init).values
        for row, k in zip(order, count, strict=True)
    ]


def select(policy: Policy, scores: Tensor, blocks: int, tokens: int, weights: Tensor | None = None) -> list[Tensor]:
    """The blocks that a request of ``blocks`` blocks and ``tokens`` tokens keeps: windows and what :func:`choose` says,
    ascending, for each row of ``scores [heads, blocks]``; all of them where the policy calls the request dense. Scores
    of the windows, and beyond ``blocks``, are never looked at."""
    if policy.is_dense(blocks, tokens):
        return [torch.arange(blocks, device=scores.device)] * scores.shape[0]
    middle = slice(policy.init, blocks - policy.local)
    chosen = choose(policy, scores[:, middle], blocks, None if weights is None else weights[:, middle])
    return [with_windows(policy, ids, blocks, blocks) for ids in chosen]


def with_windows(policy: Policy, middle: Tensor, chosen_at: int, blocks: int) -> Tensor:
    """``middle``, chosen when the request had ``chosen_at`` blocks, and the windows of a request that has ``blocks``
    now.

    What was in the local window then, and what came since, stays until the next choice: no block is dropped that was
    never a candidate.
    """
    ids = torch.arange(blocks, device=middle.device)
    return torch.cat([ids[: policy.init], middle, ids[max(policy.init, chosen_at - policy.local) :]])


@dataclass(frozen=True, slots=True)
class Selection:
    """The blocks kept by each row of a batch: ``ids [rows, heads, most]``, ascending, filled with :data:`NO_BLOCK`;
    ``counts [rows, heads]``, ``blocks [rows]`` how many there are. ``heads`` is 1 where all heads share a choice."""

    ids: Tensor
    counts: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tensor]], blocks: Sequence[int]) -> Selection:
        """From the ids of each row and head. There is at least one row."""
        counts = torch.tensor([[len(ids) for ids in row] for row in rows])
        device = rows[0][0].device
        table = torch.full((*counts.shape, int(counts.max())), NO_BLOCK, dtype=torch.int64, device=device)
        for i, row in enumerate(rows):
            for j, ids in enumerate(row):
                table[i, j, : len(ids)] = ids
        return cls(table, counts.to(device), torch.tensor(list(blocks), device=device))

    @property
    def dense(self) -> bool:
        """Whether every row keeps everything, so that the table and the lengths may stay as they are."""
        return bool((self.counts == self.blocks[:, None]).all())

    def mask(self) -> Tensor:
        """Whether a block is kept, ``[rows, heads, most blocks]``."""
        rows, heads, _ = self.ids.shape
        mask = torch.zeros(rows, heads, int(self.blocks.max()) + 1, dtype=torch.bool, device=self.ids.device)
        mask.scatter_(2, torch.where(self.ids < 0, mask.shape[2] - 1, self.ids), value=True)
        return mask[:, :, :-1]


def compact(selection: Selection, block_table: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The block table and the lengths with which attention reads the kept blocks alone.

    ``block_table [rows, N]`` has physical ids, ``seq_lens [rows]`` tokens, the current one included. Returns ``[rows,
    most]`` and ``[rows]`` where the heads share a choice, else ``[rows, heads, most]`` and ``[rows, heads]``, in the
    types that came in. New tensors: nothing that came in is written to. Beyond a row's count the table repeats its last
    block, a valid id that no kernel reads.
    """
    last = (selection.counts - 1).clamp(min=0)[:, :, None]
    ids = torch.where(selection.ids < 0, selection.ids.gather(2, last), selection.ids)
    rows, heads, most = ids.shape
    table = block_table.gather(1, ids.view(rows, heads * most).to(block_table.device)).view(rows, heads, most)
    counts = selection.counts.to(seq_lens.device, seq_lens.dtype)
    lens = (counts - 1) * block_size + ((seq_lens - 1) % block_size + 1)[:, None]
    return (table[:, 0], lens[:, 0]) if heads == 1 else (table, lens)
