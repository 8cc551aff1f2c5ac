"""InfLLM: a block is a few of its keys, and scores by the sum of their dot products with the query.

``s_b = sum_h sum_j q̄_h · K[t_j]`` over the representative tokens ``t_j`` of each head. The paper
picks those that the queries near the block attend to most; here, where blocks are encoded without
queries, those whose keys are longest.

Source: InfLLM (Xiao et al., NeurIPS 2024).
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ucm.config.fields import Count
from ucm.config.sparse import AlgorithmConfig
from ucm.sparse.selector import BlockSelector, Geometry, register_selector


class InfLLM(BlockSelector):
    """Representative keys."""

    name = "infllm"

    class Keys(AlgorithmConfig):
        """How many keys stand for a block."""

        rep_tokens: Annotated[Count, Field(le=256)] = 4

    def __init__(self, geometry: Geometry, *, rep_tokens: int = 4) -> None:
        """``rep_tokens`` keys stand for a block, all where it has fewer."""
        super().__init__(geometry)
        self.rep_tokens = min(rep_tokens, geometry.block_size)

    def settings(self) -> dict[str, Any]:
        """How many keys are kept."""
        return {"tokens": self.rep_tokens}

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[tokens, h, d]``."""
        return (self.rep_tokens, self.geometry.kv_heads, self.geometry.head_dim), torch.bfloat16

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """The longest keys of each head, of equal ones the earlier."""
        del layer
        lengths = keys.float().square().sum(dim=-1)
        order = torch.sort(lengths, dim=1, descending=True, stable=True).indices
        kept = torch.sort(order[:, : self.rep_tokens], dim=1).values  # [m, tokens, h]
        return keys.gather(1, kept[..., None].expand(-1, -1, -1, keys.shape[-1])).to(torch.bfloat16)

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """The sum over the representative keys."""
        del layer
        mean = self.grouped(query[-1:])[0].mean(dim=1)  # [h, d]
        return (reps.float().sum(dim=1) * mean).sum(dim=-1).T

    def kernel_scores(self, kernels: ModuleType, *tensors: Tensor, **how: Any) -> Tensor:
        """Dot products, added up."""
        found: Tensor = kernels.dot_scores(*tensors, over_reps="sum", **how)
        return found

    def weights(self, scores: Tensor) -> Tensor:
        """Softmax of the mean dot product at attention's scale."""
        return super().weights(scores * (self.geometry.softmax_scale / self.rep_tokens))


register_selector("InfLLM", InfLLM)
