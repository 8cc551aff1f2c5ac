"""From the queries of a layer to the block table that attention reads: scores, joined over heads
and ranks, the best blocks, and the windows.

Every choice is a function of its row alone. Kernels do it for all rows at once
(:meth:`Chooser.now`, and the scores of :meth:`Chooser.find`); torch does it row by row without
them, and is their reference. :class:`Step` holds the facts of a step for every layer: which rows
choose, and where their representations are.

Only the last block of a request can be partial, and it is always kept, so an ordinary paged kernel
with the shorter table and length computes exactly ``softmax over the kept tokens of (q·k * scale) ·
v``. Ids stay ascending: the partial block stays last, and the result does not depend on the order
in which blocks were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucm.sparse.base import SparseBatch, SparseRow
from ucm.sparse.policy import Policy
from ucm.sparse.rep_store import RepStore
from ucm.sparse.retrieval import Kept
from ucm.sparse.retriever import Middle, Rows
from ucm.sparse.selector import BlockSelector, Candidates, Combine

#: Of this many steps, two are sampled for the change of choices.
SAMPLE_EVERY = 32
#: Factor of a score before it becomes an integer that ranks add up.
FIXED_POINT = 1 << 20

#: Fills rows of a table that are shorter than the longest.
NO_BLOCK = -1


def choose(
    policy: Policy, scores: Tensor, blocks: int, weights: Tensor | None = None
) -> list[Tensor]:
    """The kept ones of the candidates of a request of ``blocks`` blocks: logical ids, one ascending
    int64 tensor for each row of ``scores [heads, blocks - windows]``.

    The highest scores win, of equal ones the lower id; NaN counts as the lowest score. ``weights``
    (same shape, not negative) are added up for a budget by mass.
    """
    most, least = policy.budget(blocks), policy.least(blocks)
    if most <= 0:
        return [torch.empty(0, dtype=torch.int64, device=scores.device)] * scores.shape[0]
    middle = scores
    if middle.is_floating_point():
        middle = torch.nan_to_num(middle, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = torch.sort(middle, dim=-1, descending=True, stable=True).indices
    if policy.mass is None:
        return list(torch.sort(order[:, :most] + policy.init, dim=-1).values)
    if weights is None:
        raise ValueError("a budget by mass needs weights")
    mass = torch.nan_to_num(weights.double()).gather(1, order).cumsum(dim=-1)
    # The first place where the sum reaches the share; all blocks where the mass is zero or not
    # finite.
    reached = mass >= policy.mass * mass[:, -1:]
    count = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1) + 1, mass.shape[-1])
    counts = [min(max(int(k), least), most) for k in count]
    pairs = zip(order, counts, strict=True)
    return [torch.sort(row[:k] + policy.init).values for row, k in pairs]


def select(
    policy: Policy, scores: Tensor, blocks: int, tokens: int, weights: Tensor | None = None
) -> list[Tensor]:
    """The blocks that a request of ``blocks`` blocks and ``tokens`` tokens keeps: windows and the
    result of :func:`choose`, ascending, for each row of ``scores [heads, blocks]``; all of them for
    a dense request. Scores of the windows, and beyond ``blocks``, are not read."""
    if policy.is_dense(blocks, tokens):
        return [torch.arange(blocks, device=scores.device)] * scores.shape[0]
    middle = slice(policy.init, blocks - policy.local)
    inner = None if weights is None else weights[:, middle]
    chosen = choose(policy, scores[:, middle], blocks, inner)
    return [with_windows(policy, ids, blocks, blocks) for ids in chosen]


def with_windows(policy: Policy, middle: Tensor, chosen_at: int, blocks: int) -> Tensor:
    """``middle``, chosen when the request had ``chosen_at`` blocks, and the windows of a request
    that has ``blocks`` now. Blocks in the local window then, and later ones, stay until the next
    choice: they were no candidates."""
    ids = torch.arange(blocks, device=middle.device)
    behind = ids[max(policy.init, chosen_at - policy.local) :]
    return torch.cat([ids[: policy.init], middle, behind])


class Selection(NamedTuple):
    """The blocks that some rows of a batch keep; ``heads`` is 1 for a shared choice. Other rows
    keep everything."""

    #: Places of the rows in the batch, ``[s]``.
    rows: Tensor
    #: Logical blocks, ascending, ``[s, heads, most]``, filled with :data:`NO_BLOCK`, and their
    #: number.
    ids: Tensor
    counts: Tensor
    #: Blocks of the rows, ``[s]``.
    blocks: Tensor
    #: Physical blocks and lengths as of :func:`compact`, where a kernel has made them.
    table: Tensor | None = None
    tokens: Tensor | None = None

    @classmethod
    def of(
        cls, kept: Sequence[Sequence[Tensor]], blocks: Sequence[int], rows: Tensor | None = None
    ) -> Selection:
        """From the ids that each row and head keeps; ``rows`` are their places, by default the
        first ones. There is at least one row."""
        counts = torch.tensor([[len(ids) for ids in row] for row in kept])
        device, shape = kept[0][0].device, (*counts.shape, int(counts.max()))
        table = torch.full(shape, NO_BLOCK, dtype=torch.int64, device=device)
        for i, row in enumerate(kept):
            for j, ids in enumerate(row):
                table[i, j, : len(ids)] = ids
        places = torch.arange(len(kept), device=device) if rows is None else rows
        return cls(places, table, counts.to(device), torch.tensor(list(blocks), device=device))

    @property
    def dense(self) -> bool:
        """Whether every row keeps everything."""
        return bool((self.counts == self.blocks[:, None]).all())

    def kept(self, row: int, head: int = 0) -> Tensor:
        """The logical blocks of one of the rows, by its number among them."""
        return self.ids[row, head, : int(self.counts[row, head])].long()


def compact(
    selection: Selection, block_table: Tensor, seq_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """The block table and the lengths of the kept blocks.

    ``block_table [rows, N]`` has physical ids, ``seq_lens [rows]`` tokens, the current one
    included. Returns new tensors ``[s, most]`` and ``[s]`` for the rows of the selection, or ``[s,
    heads, most]`` and ``[s, heads]`` where heads choose apart, in the types of the arguments.
    Beyond a row's count the table repeats its last block, a valid id that no kernel reads.
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
        of_last = (seq_lens[selection.rows] - 1) % block_size + 1
        lens = (counts - 1) * block_size + of_last[:, None]
    return (table[:, 0], lens[:, 0]) if table.shape[1] == 1 else (table, lens)


def compact_rows(
    selection: Selection, block_table: Tensor, seq_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Block table and lengths of the whole batch with those of the selection's rows
    (:func:`compact`), as wide as the arguments; ``[rows, heads, N]`` where heads choose apart."""
    table, lens = compact(selection, block_table, seq_lens, block_size)
    if table.dim() == 3:
        heads = table.shape[1]
        block_table = block_table[:, None].expand(-1, heads, -1)
        seq_lens = seq_lens[:, None].expand(-1, heads)
    wide, lengths = block_table.clone(), seq_lens.clone()
    wide[selection.rows, ..., : table.shape[-1]] = table
    lengths[selection.rows] = lens
    return wide, lengths


class Step:
    """The rows of one step that share a block table; made once for all layers."""

    def __init__(
        self,
        batch: SparseBatch,
        block_table: Tensor,
        policy: Policy,
        store: RepStore,
        rep_rows: Mapping[str, Tensor],
        break_even_tokens: int,
        agree: Callable[[list[bool]], list[bool]] | None = None,
    ) -> None:
        """``block_table [rows, N]`` has the physical blocks of the rows; ``rep_rows`` the rows of
        ``store`` of requests with offloaded blocks; requests below ``break_even_tokens`` are dense;
        ``agree`` gets for each long row whether it has its representations, and returns whether
        every rank has them that has to choose the same."""
        size = store.selector.geometry.block_size
        # With latent attention the table has only the rows of one token, which are the first ones.
        self.rows: list[SparseRow] = list(batch.rows[: block_table.shape[0]])
        #: Ends of the queries of each row, among those of the step.
        self.ends: list[int] = []
        for row in self.rows:
            self.ends.append(row.queries + (self.ends[-1] if self.ends else 0))
        blocks = [-(-row.tokens // size) for row in self.rows]
        gate, every = break_even_tokens, list(enumerate(self.rows))
        long = [i for i, row in every if row.decodes and row.tokens >= gate]
        long = [i for i in long if not policy.is_dense(blocks[i], self.rows[i].tokens)]
        if len(long) < policy.min_concurrency:
            long = []
        host = block_table.cpu()
        reps = {i: _rep_rows(self.rows[i], host[i, : blocks[i]], rep_rows) for i in long}
        there = [store.ready(reps[i][policy.init : blocks[i] - policy.local].numpy()) for i in long]
        if agree is not None and long:
            there = agree(there)
        #: Places of the rows that choose, and the number of others without representations.
        self.sparse = [i for i, ready in zip(long, there, strict=True) if ready]
        self.unready = len(long) - len(self.sparse)
        chosen = [self.rows[i] for i in self.sparse]
        #: Numbers among them of rows whose choices are compared with those of the step before.
        self.sampled = [n for n, row in enumerate(chosen) if row.step % SAMPLE_EVERY <= 1]
        #: Blocks of the rows that choose.
        self.blocks = [blocks[i] for i in self.sparse]
        budgets = [policy.budget(n) for n in self.blocks]
        #: Blocks of all of them, and of these the kept ones for a budget that is a number.
        self.seen = sum(self.blocks)
        self.kept = sum(budgets) + policy.windows * len(self.blocks)
        device = block_table.device

        def on_device(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        #: For kernels: place of each row, place of its last query, and its candidates.
        self.places = on_device(self.sparse, torch.int64)
        self.last = on_device([self.ends[i] - 1 for i in self.sparse], torch.int64)
        most = max(self.blocks, default=0)
        table = block_table[self.places, :most].int()
        moved = any(row.request_id in rep_rows for row in chosen)
        self.candidates = Candidates(
            _stacked([reps[i] for i in self.sparse], most).to(device) if moved else table,
            table,
            on_device(self.blocks),
            on_device([row.tokens for row in chosen]),
            budgets if device.type == "cpu" else on_device(budgets),
        )
        self._layers = len(store.layers)
        self._width = Kept.width(most, budgets, policy.init, policy.local)
        self._rooms: list[Kept] = []

    def room(self, heads: int) -> Kept:
        """Room for a kernel's choice of one more layer, in which ``heads`` heads choose apart."""
        if not self._rooms:
            rows, device = len(self.sparse), self.places.device
            self._rooms = Kept.rooms(self._layers, rows, heads, self._width, device)
        return self._rooms.pop()


def _rep_rows(row: SparseRow, table: Tensor, rep_rows: Mapping[str, Tensor]) -> Tensor:
    known = rep_rows.get(row.request_id)
    if known is None:
        return table
    found = table.clone()
    found[: len(known)] = known[: len(found)]
    return found


def _stacked(rows: list[Tensor], most: int) -> Tensor:
    """Rows of different lengths as ``[r, most]``, filled with zeros, which are not read."""
    found = torch.zeros(len(rows), most, dtype=torch.int32)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found


#: Returns the sum (or the maximum) of int64 scores over the tensor ranks, the same on every rank.
Reduce = Callable[[Tensor, Combine], Tensor]


class Chooser:
    """Chooses by one selector and policy from one store of representations."""

    def __init__(
        self, policy: Policy, selector: BlockSelector, store: RepStore, reduce: Reduce | None
    ) -> None:
        """``reduce`` joins the scores of several tensor ranks that share a choice."""
        self._policy, self._selector, self._store, self._reduce = policy, selector, store, reduce
        #: Whether kernels keep the heads apart: each has a choice of its own, or its scores become
        #: integers first.
        self._apart = policy.heads == "kv" or (policy.shared_ranks and not selector.exact)
        #: Whether kernels can make the whole choice.
        self.fixed = policy.mass is None and not policy.shared_ranks and selector.queries == 1

    def now(self, layer: int, step: Step, query: Tensor) -> Selection | None:
        """The blocks that the choosing rows of a step keep, for their queries ``[s, heads, d]``;
        None without a kernel for these tensors, or for this policy."""
        if not self.fixed:
            return None
        policy, of, reps = self._policy, step.candidates, self._store.all(layer)
        heads = self._selector.geometry.kv_heads if self._apart else 1
        how: dict[str, Any] = {"init": policy.init, "local": policy.local, "apart": self._apart}
        kept = self._selector.fused_select(layer, query, reps, of, **how, into=step.room(heads))
        if kept is None:
            return None
        return Selection(step.places, kept.logical, kept.counts, of.blocks, kept.table, kept.tokens)

    def find(self, layer: int, rows: Rows) -> list[Middle]:
        """The choice of each row between its windows."""
        policy, init, local = self._policy, self._policy.init, self._policy.local
        fused = None
        if self._selector.queries == 1:
            blocks = torch.tensor(rows.blocks, dtype=torch.int32, device=rows.table.device)
            fused = self._fused(layer, rows.query[:, -1], rows.table, blocks)
        scores = []
        for i, n in enumerate(rows.blocks):
            if fused is not None:
                scores.append(self._joined(fused[i, :, init : n - local]))
                continue
            reps = self._store.get(layer, rows.table[i, init : n - local])
            query = rows.query[i, rows.query.shape[1] - rows.queries[i] :]
            scores.append(self._joined(self._selector.score(layer, query, reps)))
        if policy.shared_ranks and self._reduce is not None:
            counts = [row.shape[1] for row in scores]
            joined = self._reduce(torch.cat(scores, dim=1), self._selector.combine)
            scores = list(joined.split(counts, dim=1))
        weights = [None if policy.mass is None else self._weights(row) for row in scores]
        every = zip(scores, rows.blocks, weights, strict=True)
        return [choose(policy, row, n, of_row) for row, n, of_row in every]

    def _fused(self, layer: int, query: Tensor, table: Tensor, blocks: Tensor) -> Tensor | None:
        policy, reps = self._policy, self._store.all(layer)
        how: dict[str, Any] = {"init": policy.init, "local": policy.local, "apart": self._apart}
        return self._selector.fused_scores(layer, query, reps, table, blocks, **how)

    def _joined(self, scores: Tensor) -> Tensor:
        """One score for all heads ``[1, n]``, unless each has its own; integers where ranks add
        them up."""
        if self._policy.shared_ranks and not self._selector.exact:
            limit = 2.0**52
            scores = torch.nan_to_num(scores.double() * FIXED_POINT, nan=-limit)
            scores = scores.clamp(-limit, limit).round().long()
        if self._policy.heads == "kv" or scores.shape[0] == 1:
            return scores.long() if self._policy.shared_ranks else scores
        if self._selector.combine == "max":
            found = scores.amax(dim=0, keepdim=True)
            return found.long() if self._policy.shared_ranks else found
        wide = scores.double() if scores.is_floating_point() else scores.long()
        summed = wide.sum(dim=0, keepdim=True)
        return summed.float() if summed.is_floating_point() else summed

    def _weights(self, scores: Tensor) -> Tensor:
        """Estimated attention mass of the candidates; that of the windows is not estimated."""
        scale = FIXED_POINT if self._policy.shared_ranks and not self._selector.exact else 1
        return self._selector.weights(scores / scale)
