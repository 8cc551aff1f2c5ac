"""From the queries of a layer to the blocks that its rows choose: scores, heads and ranks joined,
the best taken.

Every choice is a function of its row alone. Kernels do it for all rows at once
(:meth:`Chooser.now`, and the scores of :meth:`Chooser.find`); torch does it row by row where there
is none, and is what they are held against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ucm.sparse.policy import Policy
from ucm.sparse.rep_store import RepStore
from ucm.sparse.retriever import Middle, Rows
from ucm.sparse.selection import Selection, choose
from ucm.sparse.selector import Combine, Selector
from ucm.sparse.step import Step

#: Adds up (or takes the greatest of) int64 scores over the tensor ranks; every rank gets the
#: result.
Reduce = Callable[[Tensor, Combine], Tensor]

#: What a score is multiplied by before it becomes an integer that ranks add up.
FIXED_POINT = 1 << 20


class Chooser:
    """Chooses by one selector and policy from one store of representations."""

    def __init__(
        self, policy: Policy, selector: Selector, store: RepStore, reduce: Reduce | None
    ) -> None:
        """``reduce`` joins the scores of tensor ranks, where they share a choice and there are
        several."""
        self._policy, self._selector, self._store, self._reduce = policy, selector, store, reduce
        #: Whether kernels keep the heads apart: each has a choice of its own, or its scores become
        #: integers first.
        self._apart = policy.heads == "kv" or (policy.shared_ranks and not selector.exact)
        #: Whether all of a choice can be made by kernels.
        self.fixed = policy.mass is None and not policy.shared_ranks and selector.queries == 1

    def now(self, layer: int, step: Step, query: Tensor) -> Selection | None:
        """The blocks that the choosing rows of a step keep, for their queries ``[s, heads, d]``;
        None: no kernel does it for these tensors, or for this policy."""
        if not self.fixed:
            return None
        policy, of = self._policy, step.candidates
        heads = self._selector.geometry.kv_heads if self._apart else 1
        kept = self._selector.fused_select(
            layer,
            query,
            self._store.all(layer),
            of,
            init=policy.init,
            local=policy.local,
            apart=self._apart,
            into=step.room(heads),
        )
        if kept is None:
            return None
        return Selection(step.places, kept.logical, kept.counts, of.blocks, kept.table, kept.tokens)

    def find(self, layer: int, rows: Rows) -> list[Middle]:
        """What each row chooses between its windows."""
        init, local = self._policy.init, self._policy.local
        fused = None
        if self._selector.queries == 1:
            fused = self._fused(
                layer,
                rows.query[:, -1],
                rows.table,
                torch.tensor(rows.blocks, dtype=torch.int32, device=rows.table.device),
            )
        scores = []
        for i, n in enumerate(rows.blocks):
            if fused is not None:
                scores.append(self._joined(fused[i, :, init : n - local]))
                continue
            reps = self._store.get(layer, rows.table[i, init : n - local])
            asked = rows.query[i, rows.query.shape[1] - rows.queries[i] :]
            scores.append(self._joined(self._selector.score(layer, asked, reps)))
        if self._policy.shared_ranks and self._reduce is not None:
            counts = [row.shape[1] for row in scores]
            scores = list(
                self._reduce(torch.cat(scores, dim=1), self._selector.combine).split(counts, dim=1)
            )
        return [
            choose(
                self._policy, row, n, self._weights(row) if self._policy.mass is not None else None
            )
            for row, n in zip(scores, rows.blocks, strict=True)
        ]

    def _fused(self, layer: int, query: Tensor, table: Tensor, blocks: Tensor) -> Tensor | None:
        policy = self._policy
        return self._selector.fused_scores(
            layer,
            query,
            self._store.all(layer),
            table,
            blocks,
            init=policy.init,
            local=policy.local,
            apart=self._apart,
        )

    def _joined(self, scores: Tensor) -> Tensor:
        """One score for all heads ``[1, n]``, unless each has its own; integers where ranks add
        them up."""
        if self._policy.shared_ranks and not self._selector.exact:
            scores = torch.nan_to_num(scores.double() * FIXED_POINT, nan=-(2.0**52)).clamp(
                -(2.0**52), 2.0**52
            )
            scores = scores.round().long()
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
