"""What holds for every layer of a step: which of its rows choose blocks, and where their
representations are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ucm.sparse.batch import SparseBatch, SparseRow
from ucm.sparse.policy import Policy
from ucm.sparse.rep_store import RepStore
from ucm.sparse.retrieval import Kept
from ucm.sparse.selector import Candidates

#: Of so many steps, two are looked at to see how much a choice changes.
SAMPLE_EVERY = 32


class Step:
    """The rows of one step that share a block table; made once, read in every layer."""

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
        ``store`` of requests whose representations are not where their blocks are; requests below
        ``break_even_tokens`` are dense; ``agree`` is told for each long row whether its
        representations are there, and answers whether they are on every rank that has to choose the
        same."""
        size = store.selector.geometry.block_size
        # With latent attention the table is that of the rows of one token alone, which come first.
        self.rows: list[SparseRow] = list(batch.rows[: block_table.shape[0]])
        #: Where the queries of each row end, among those of the step.
        self.ends: list[int] = []
        for row in self.rows:
            self.ends.append(row.queries + (self.ends[-1] if self.ends else 0))
        blocks = [-(-row.tokens // size) for row in self.rows]
        long = [
            i
            for i, row in enumerate(self.rows)
            if row.decodes
            and row.tokens >= break_even_tokens
            and not policy.is_dense(blocks[i], row.tokens)
        ]
        if len(long) < policy.min_concurrency:
            long = []
        host = block_table.cpu()
        reps = {i: _rep_rows(self.rows[i], host[i, : blocks[i]], rep_rows) for i in long}
        there = [store.ready(reps[i][policy.init : blocks[i] - policy.local].numpy()) for i in long]
        if agree is not None and long:
            there = agree(there)
        #: Places of the rows that choose, and how many there are besides of which representations
        #: are missing.
        self.sparse = [i for i, ready in zip(long, there, strict=True) if ready]
        self.unready = len(long) - len(self.sparse)
        #: Of those, by their number among them, the ones whose choices are compared with those of
        #: the step before.
        self.sampled = [
            number for number, i in enumerate(self.sparse) if self.rows[i].step % SAMPLE_EVERY <= 1
        ]
        #: How many blocks the rows that choose have.
        self.blocks = [blocks[i] for i in self.sparse]
        budgets = [policy.budget(n) for n in self.blocks]
        #: Blocks of all of them, and how many are kept by a budget that is a number.
        self.seen = sum(self.blocks)
        self.kept = sum(budgets) + policy.windows * len(self.blocks)
        device = block_table.device
        #: The same for kernels: place of each row, place of its last query, and what it chooses
        #: from.
        self.places = torch.tensor(self.sparse, dtype=torch.int64, device=device)
        self.last = torch.tensor(
            [self.ends[i] - 1 for i in self.sparse], dtype=torch.int64, device=device
        )
        most = max(self.blocks, default=0)
        table = block_table[self.places, :most].int()
        moved = any(self.rows[i].request_id in rep_rows for i in self.sparse)
        self.candidates = Candidates(
            _stacked([reps[i] for i in self.sparse], most).to(device) if moved else table,
            table,
            torch.tensor(self.blocks, dtype=torch.int32, device=device),
            torch.tensor(
                [self.rows[i].tokens for i in self.sparse], dtype=torch.int32, device=device
            ),
            (
                budgets
                if device.type == "cpu"
                else torch.tensor(budgets, dtype=torch.int32, device=device)
            ),
        )
        self._layers = len(store.layers)
        self._width = Kept.width(most, budgets, policy.init, policy.local)
        self._rooms: list[Kept] = []

    def room(self, heads: int) -> Kept:
        """Where a kernel may write the choice of one more layer, in which so many heads choose
        apart."""
        if not self._rooms:
            self._rooms = Kept.rooms(
                self._layers, len(self.sparse), heads, self._width, self.places.device
            )
        return self._rooms.pop()


def _rep_rows(row: SparseRow, table: Tensor, rep_rows: Mapping[str, Tensor]) -> Tensor:
    known = rep_rows.get(row.request_id)
    if known is None:
        return table
    found = table.clone()
    found[: len(known)] = known[: len(found)]
    return found


def _stacked(rows: list[Tensor], most: int) -> Tensor:
    """Rows of different lengths as ``[r, most]``, filled with zeros, which are never read."""
    found = torch.zeros(len(rows), most, dtype=torch.int32)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found
