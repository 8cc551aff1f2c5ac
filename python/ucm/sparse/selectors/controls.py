"""What other methods are held against: blocks by lot, the windows alone, and the true attention
mass of each block."""

from __future__ import annotations

import torch
from torch import Tensor

from ucm.sparse.selector import BlockSelector, Combine, Geometry
from ucm.sparse.selectors.periodic import Periodic


class Windows(Periodic):
    """No block but the windows: the policy that comes with it has no budget, so scores do not
    matter."""

    name = "windows"


class Random(Periodic):
    """Blocks by lot, drawn anew for each query: the same for the same query, layer and seed."""

    name = "random"
    exact = False
    combine: Combine = "sum"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry)
        self.seed = seed

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """Uniform numbers."""
        bits = query[-1].float().contiguous().view(torch.int32).long()
        mixed = int(
            (bits * torch.arange(1, bits.numel() + 1, device=bits.device).view(bits.shape)).sum()
        )
        generator = torch.Generator().manual_seed(
            (mixed * 1_000_003 + layer * 8191 + self.seed) % 2**63
        )
        return (
            torch.rand(1, reps.shape[0], generator=generator)
            .to(reps.device)
            .expand(self.geometry.kv_heads, -1)
        )


class Oracle(BlockSelector):
    """All keys, and the attention that they get: what a selection can reach at best."""

    name = "oracle"
    token_wise = True

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[b, h, d]``: the keys."""
        g = self.geometry
        return (g.block_size, g.kv_heads, g.head_dim), torch.float32

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """The keys."""
        del layer
        return keys.float()

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """Attention mass among the candidates, added up over the query heads of each KV head."""
        del layer
        return self.mass(query[-1:], reps, reps.shape[0] * self.geometry.block_size)

    def mass(self, query: Tensor, keys: Tensor, tokens: int) -> Tensor:
        """Attention mass ``[h, n]`` of blocks ``keys [n, b, h, d]``, of which the first ``tokens``
        tokens count, for ``query [1, heads, d]``; it adds up to the number of query heads."""
        q, k = self.grouped(query)[0], keys.float()  # [h, g, d], [n, b, h, d]
        n, b = k.shape[:2]
        there = torch.arange(n * b, device=k.device).view(n, b, 1) < tokens
        found = torch.zeros(k.shape[2], n, device=k.device)
        for one in q.unbind(dim=1):
            logits = (k * one).sum(dim=-1) * self.geometry.softmax_scale  # [n, b, h]
            logits = torch.where(there, logits, -torch.inf)
            found += torch.softmax(logits.view(n * b, -1), dim=0).view(n, b, -1).sum(dim=1).T
        return found

    def weights(self, scores: Tensor) -> Tensor:
        """Scores are attention mass."""
        return scores.double()
