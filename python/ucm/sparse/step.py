"""What holds for every layer of a step: which of its rows choose blocks, and where their representations are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ucm.sparse.batch import SparseBatch, SparseRow
from ucm.sparse.policy import Policy
from ucm.sparse.rep_store import RepStore


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
        """``block_table [rows, N]`` has the physical blocks of the rows; ``rep_rows`` the rows of ``store`` of requests
        whose representations are not where their blocks are; requests below ``break_even_tokens`` are dense; ``agree``
        is told for each long row whether its representations are there, and answers whether they are on every rank that
        has to choose the same."""
        geometry = store.selector.geometry
        # With latent attention the table is that of the rows of one token alone, which come first.
        self.rows: list[SparseRow] = list(batch.rows[: block_table.shape[0]])
        #: How many blocks each row has, and all of them.
        self.blocks = [-(-row.tokens // geometry.block_size) for row in self.rows]
        self.whole = [torch.arange(blocks) for blocks in self.blocks]
        #: Where the queries of each row end, among those of the step.
        self.ends: list[int] = []
        for row in self.rows:
            self.ends.append(row.queries + (self.ends[-1] if self.ends else 0))
        long = [
            i
            for i, row in enumerate(self.rows)
            if row.decodes and row.tokens >= break_even_tokens and not policy.is_dense(self.blocks[i], row.tokens)
        ]
        if len(long) < policy.min_concurrency:
            long = []
        tables = {
            i: self._table(self.rows[i], block_table[i], self.blocks[i], rep_rows)[
                policy.init : self.blocks[i] - policy.local
            ]
            for i in long
        }
        #: Places of the rows that choose, and how many there are besides of which representations are missing.
        there = [store.ready(tables[i].numpy()) for i in long]
        if agree is not None and long:
            there = agree(there)
        self.sparse = [i for i, ready in zip(long, there, strict=True) if ready]
        self.unready = len(long) - len(self.sparse)
        #: Rows of the store for the candidates of those, ``[r, most]``, and the place of the last query of each.
        self.table = _stacked([tables[i] for i in self.sparse])
        self.last = torch.tensor([self.ends[i] - 1 for i in self.sparse], dtype=torch.int64)

    @staticmethod
    def _table(row: SparseRow, table: Tensor, blocks: int, rep_rows: Mapping[str, Tensor]) -> Tensor:
        found = table[:blocks].long().cpu()
        known = rep_rows.get(row.request_id)
        if known is not None:
            found[: len(known)] = known[:blocks]
        return found


def _stacked(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths as ``[r, longest]``, filled with zeros, which are never read."""
    found = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found
