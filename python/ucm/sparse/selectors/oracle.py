"""The true attention mass of each block: what other methods are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from ucm.sparse.selector import BlockSelector, register_selector


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


register_selector("Oracle", Oracle)
