"""ESA and GSA: a block is the mean of its keys, and scores by its dot product with the query.

``r_b = mean_t K[t]``, ``s_b = sum_h q̄_h · r_{b,h}`` with ``q̄_h`` the mean of the query heads of
KV head ``h``: no scale and no softmax, neither of which would change an order. Other ways to pool
(``max`` by channel; ``norm``: mean of keys of length 1), to score (``dot_max``: the best query
head; ``l2``: minus the distance; ``key_max``: the best single key, which keeps all of them) and to
keep (bf16, fp16, int8 with a scale for each head of a block) are options.

Source: the original's ESA and GSA; book 8.1.2, 9.2.1, 7.3.3.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from ucm.config.fields import Count, Number, word
from ucm.config.sparse import AlgorithmConfig
from ucm.sparse.selector import BlockSelector, Combine, Geometry, register_selector

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
#: Bytes of the scale behind a vector of int8.
_SCALE = 4


class MeanK(BlockSelector):
    """Pooled keys against the query."""

    name = "mean_k"

    class Keys(AlgorithmConfig):
        """ESA: a new choice every 16 steps."""

        stride: Count = 16
        min_blocks: Number = 4
        pool: Annotated[Literal["mean", "max", "norm"], BeforeValidator(word)] = "mean"
        score: Annotated[Literal["dot_mean", "dot_max", "key_max", "l2"], BeforeValidator(word)] = (
            "dot_mean"
        )
        rep_dtype: Annotated[Literal["bf16", "fp16", "int8"], BeforeValidator(word)] = "bf16"

    def __init__(
        self,
        geometry: Geometry,
        *,
        pool: str = "mean",
        score: str = "dot_mean",
        rep_dtype: str = "bf16",
    ) -> None:
        """``pool`` is mean, max or norm; ``score`` dot_mean, dot_max, l2 or key_max; ``rep_dtype``
        bf16, fp16 or int8."""
        super().__init__(geometry)
        self.pool, self.how, self.rep_dtype = pool, score, rep_dtype
        self.combine: Combine = "max" if score == "dot_max" else "sum"
        self.token_wise = score == "key_max"

    def settings(self) -> dict[str, Any]:
        """What shapes the bytes: with ``key_max`` nothing is pooled."""
        return {"pool": "none" if self.token_wise else self.pool, "dtype": self.rep_dtype}

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[h, d]``, with ``key_max`` ``[b, h, d]``; in int8 ``[h * d + h * 4]`` (of each token),
        the heads' scales, as float32, behind their vectors."""
        g = self.geometry
        tokens = (g.block_size,) if self.token_wise else ()
        if self.rep_dtype == "int8":
            return (*tokens, g.kv_heads * (g.head_dim + _SCALE)), torch.int8
        return (*tokens, g.kv_heads, g.head_dim), _TYPES[self.rep_dtype]

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
        # Multiplied and added up by row, not by a matrix product: equal blocks get equal scores,
        # wherever they stand.
        dots = (r * mean).sum(dim=-1)
        return (dots.amax(dim=1) if self.token_wise else dots).T

    def kernel_scores(
        self,
        kernels: ModuleType,
        query: Tensor,
        reps: Tensor,
        table: Tensor,
        blocks: Tensor,
        **how: Any,
    ) -> Tensor | None:
        """Dot products or distances, for all but ``dot_max``, and int8 keys of single tokens."""
        scales = None
        if self.how == "dot_max":
            return None
        if self.rep_dtype == "int8":
            if self.token_wise or self.geometry.head_dim % _SCALE:
                return None
            reps, scales = self._parts(reps)
        metric = "l2" if self.how == "l2" else "dot"
        found: Tensor = kernels.dot_scores(
            query, reps, table, blocks, scales=scales, metric=metric, **how
        )
        return found

    def _narrow(self, wide: Tensor) -> Tensor:
        if self.rep_dtype != "int8":
            return wide.to(_TYPES[self.rep_dtype])
        least = torch.finfo(torch.float32).tiny
        scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=least) / 127
        vectors = (wide / scale).round().to(torch.int8).flatten(-2)
        return torch.cat([vectors, scale[..., 0].contiguous().view(torch.int8)], dim=-1)

    def _wide(self, reps: Tensor) -> Tensor:
        if self.rep_dtype != "int8":
            return reps.float()
        vectors, scales = self._parts(reps.contiguous())
        return vectors.float() * scales[..., None]

    def _parts(self, reps: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors ``[..., h, d]`` and scales ``[..., h]`` of int8 representations."""
        g = self.geometry
        split = g.kv_heads * g.head_dim
        if g.head_dim % _SCALE:  # the scales do not begin at whole floats
            scales = reps[..., split:].contiguous().view(torch.float32)
        else:
            scales = reps.view(torch.float32)[..., split // _SCALE :]
        return reps[..., :split].unflatten(-1, (g.kv_heads, g.head_dim)), scales


class GsaKeys(MeanK.Keys):
    """GSA: larger windows, a new choice in every step."""

    min_blocks_is_budget = True  # as document 002 has it

    init_blocks: Number = 4
    local_blocks: Count = 8
    stride: Count = 1


register_selector("ESA", MeanK)
register_selector("GSA", MeanK, keys=GsaKeys)
