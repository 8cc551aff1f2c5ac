"""KVStar: a block is its keys with few channels and neighbours merged, and scores by the attention
that these would get.

Of each KV head the channels with the largest mean ``|K|`` are kept (``prune_ratio`` of them), and
``merge`` tokens in a row become their mean: ``R [b/merge, d']``. For each query ``x`` of the group
and each of its heads ``H`` ``s_b = sum_x sum_H sum_j softmax_{(b,j)}(scale * q_{x,H} · R_{b,j})``,
the softmax over all candidates. With one query, all channels and nothing merged this is the true
attention mass of a block among the candidates.

Two departures from the original. Each block has channels of its own, kept beside its keys: the
original picks them from a whole prompt, so that a block shared by two prompts would need two
representations. And the scale is 1/sqrt(d') unless ``score_scale`` says otherwise; the original has
none, which makes the softmax too sharp.

Source: the original's KVStar MultiStep; book 11.1 to 11.3.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from ucm.config.fields import Count, Flag, Number, no_flag
from ucm.config.sparse import AlgorithmConfig, Share
from ucm.errors import ConfigError
from ucm.sparse.selector import BlockSelector, Geometry, register_selector

#: From this share of the channels on all are kept.
ALL = 0.98


class KVStar(BlockSelector):
    """Pruned and merged keys, by estimated attention."""

    name = "kvstar"

    class Keys(AlgorithmConfig):
        """How keys are pruned, merged and scored."""

        init_blocks: Number = 2
        local_blocks: Count = 4
        stride: Count = 8
        prune_ratio: Share = 0.5
        merge: Annotated[Count, Field(le=4096)] = 4
        group: Annotated[Count, Field(le=64)] = 1
        average_heads: Flag = False
        score_scale: (
            Annotated[float, BeforeValidator(no_flag), Field(gt=0, allow_inf_nan=False)] | None
        ) = None

    def __init__(
        self,
        geometry: Geometry,
        *,
        prune_ratio: float = 0.5,
        merge: int = 4,
        group: int = 1,
        score_scale: float | None = None,
        average_heads: bool = False,
    ) -> None:
        """``prune_ratio`` of the channels are kept, ``merge`` tokens become one, ``group`` queries
        score together; ``average_heads``: the mean of the query heads of a KV head scores instead
        of each (for fewer operations)."""
        super().__init__(geometry)
        if geometry.block_size % merge:
            raise ConfigError(
                f"merge ({merge}) must divide the block size of {geometry.block_size} tokens"
            )
        self.queries, self.merge, self.average = group, merge, average_heads
        self.channels = geometry.head_dim
        if prune_ratio < ALL:
            self.channels = max(1, round(geometry.head_dim * prune_ratio))
        self.scale = self.channels**-0.5 if score_scale is None else score_scale

    def settings(self) -> dict[str, Any]:
        """Channels and tokens that are kept."""
        return {"channels": self.channels, "merge": self.merge}

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[b/merge, h, d']``, and one more row with the channels' numbers where some were left
        out. fp16, which holds whole numbers up to 2048."""
        g = self.geometry
        rows = g.block_size // self.merge + (self.channels < g.head_dim)
        return (rows, g.kv_heads, self.channels), torch.float16

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Prune, then merge."""
        del layer
        wide = keys.float()
        m, b, h, d = wide.shape
        if self.channels == d:
            return wide.view(m, b // self.merge, self.merge, h, d).mean(dim=2).half()
        order = torch.sort(wide.abs().mean(dim=1), dim=-1, descending=True, stable=True).indices
        kept = torch.sort(order[..., : self.channels], dim=-1).values  # [m, h, d']
        wide = wide.gather(3, kept[:, None].expand(-1, b, -1, -1))
        merged = wide.view(m, b // self.merge, self.merge, h, self.channels).mean(dim=2)
        return torch.cat([merged, kept[:, None].float()], dim=1).half()

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """Attention mass of each block, added up over the queries and the query heads of each KV
        head."""
        del layer
        q, r = self.grouped(query), reps.float()  # [w, h, g, d], [n, j, h, d']
        if self.average:
            q = q.mean(dim=2, keepdim=True)
        channels = None
        if self.channels < self.geometry.head_dim:
            r, channels = r[:, :-1], r[:, -1].long()  # [n, h, d']
        n, j, h, _ = r.shape
        found = torch.zeros(h, n, device=r.device)
        # one query head at a time, to bound memory
        for x in q.transpose(1, 2).reshape(-1, h, q.shape[-1]):
            # [n, h, d']
            seen = x[None] if channels is None else x.expand(n, -1, -1).gather(2, channels)
            logits = (r * seen[:, None]).sum(dim=-1) * self.scale  # [n, j, h]
            found += torch.softmax(logits.view(n * j, h), dim=0).view(n, j, h).sum(dim=1).T
        return found

    def weights(self, scores: Tensor) -> Tensor:
        """Scores are attention mass."""
        return scores.double()


register_selector("KVStarMultiStep", KVStar)
