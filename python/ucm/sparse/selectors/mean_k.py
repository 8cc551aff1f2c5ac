"""ESA and GSA: a block is the mean of its keys, and scores by its dot product with the query.

``r_b = mean_t K[t]``, ``s_b = sum_h q̄_h · r_{b,h}`` with ``q̄_h`` the mean of the query heads of KV head ``h``: no
scale and no softmax, neither of which would change an order. Other ways to pool (``max`` by channel; ``norm``: mean of
keys of length 1), to score (``dot_max``: the best query head; ``l2``: minus the distance; ``key_max``: the best single
key, which keeps all of them) and to keep (bf16, fp16, int8 with a scale for each head of a block) are options.

Source: the original's ESA and GSA; book 8.1.2, 9.2.1, 7.3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ucm.sparse.selector import BlockSelector, Combine, Geometry

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
#: Bytes of the scale behind a vector of int8.
_SCALE = 4


class MeanK(BlockSelector):
    """Pooled keys against the query."""

    name = "mean_k"

    def __init__(
        self, geometry: Geometry, *, pool: str = "mean", score: str = "dot_mean", rep_dtype: str = "bf16"
    ) -> None:
        """``pool`` is mean, max or norm; ``score`` dot_mean, dot_max, l2 or key_max; ``rep_dtype`` bf16, fp16 or
        int8."""
        super().__init__(geometry)
        self.pool, self.how, self.rep_dtype = pool, score, rep_dtype
        self.combine: Combine = "max" if score == "dot_max" else "sum"
        self.token_wise = score == "key_max"

    def settings(self) -> dict[str, Any]:
        """What shapes the bytes: with ``key_max`` nothing is pooled."""
        return {"pool": "none" if self.token_wise else self.pool, "dtype": self.rep_dtype}

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[h, d]``, with ``key_max`` ``[b, h, d]``; int8 has the scale's bytes behind each vector."""
        g = self.geometry
        width = g.head_dim + (_SCALE if self.rep_dtype == "int8" else 0)
        tokens = (g.block_size,) if self.token_wise else ()
        return (*tokens, g.kv_heads, width), _TYPES[self.rep_dtype]

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Pool over the tokens of each block."""
        del layer
        wide = keys.float()
        if self.token_wise:
            return self._narrow(wide)
        if self.pool == "max":
            return self._narrow(wide.amax(dim=1))
        if self.pool == "norm":
            wide = torch.nn.functional.normalize(wide, dim=-1)
        return self._narrow(wide.mean(dim=1))

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """One value for each KV head and block."""
        del layer
        q, r = self.grouped(query[-1:])[0], self._wide(reps)  # [h, g, d], [n, (b,) h, d]
        if self.how == "dot_max":
            return (q.transpose(0, 1)[None] * r[:, None]).sum(dim=-1).amax(dim=1).T
        mean = q.mean(dim=1)
        if self.how == "l2":
            return -(r - mean).square().sum(dim=-1).sqrt().T
        # Multiplied and added up by row, not by a matrix product: equal blocks get equal scores, wherever they stand.
        dots = (r * mean).sum(dim=-1)
        return (dots.amax(dim=1) if self.token_wise else dots).T

    def _narrow(self, wide: Tensor) -> Tensor:
        if self.rep_dtype != "int8":
            return wide.to(_TYPES[self.rep_dtype])
        scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return torch.cat([(wide / scale).round().to(torch.int8), scale.contiguous().view(torch.int8)], dim=-1)

    def _wide(self, reps: Tensor) -> Tensor:
        if self.rep_dtype != "int8":
            return reps.float()
        return reps[..., :-_SCALE].float() * reps[..., -_SCALE:].contiguous().view(torch.float32)
