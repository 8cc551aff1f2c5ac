"""Quest: a block is the least and the greatest value of each channel, which bound every dot product
with its keys.

``s_{b,h} = sum_c max(q̄_{h,c} * lo_{b,c}, q̄_{h,c} * hi_{b,c}) >= q̄_h · K[t,h]`` for every token
of the block, with ``q̄_h`` the mean of the query heads of KV head ``h``; the heads are added up.
Bounds are rounded outwards, so they hold in bf16.

Source: Quest (Tang et al., ICML 2024).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ucm.sparse.selector import BlockSelector, register_selector


class Quest(BlockSelector):
    """Bounds by channel."""

    name = "quest"

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[2, h, d]``: least and greatest."""
        return (2, self.geometry.kv_heads, self.geometry.head_dim), torch.bfloat16

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Bounds over the tokens of each block."""
        del layer
        wide = keys.float()
        return torch.stack(
            [_outwards(wide.amin(dim=1), -torch.inf), _outwards(wide.amax(dim=1), torch.inf)], dim=1
        )

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """The bound of each block."""
        del layer
        r, q = reps.float(), self.grouped(query[-1:])[0].mean(dim=1)  # [n, 2, h, d], [h, d]
        return torch.maximum(q * r[:, 0], q * r[:, 1]).sum(dim=-1).T

    def kernel_scores(self, kernels: ModuleType, *tensors: Tensor, **how: Any) -> Tensor:
        """The bounds."""
        found: Tensor = kernels.quest_scores(*tensors, **how)
        return found

    def weights(self, scores: Tensor) -> Tensor:
        """Softmax of the bounds at attention's scale."""
        return super().weights(scores * self.geometry.softmax_scale)


def _outwards(values: Tensor, towards: float) -> Tensor:
    """In bf16, no nearer to zero's other side than the value: at most one step of bf16 further
    out."""
    narrow = values.to(torch.bfloat16)
    inside = narrow.float() > values if towards < 0 else narrow.float() < values
    return torch.where(inside, torch.nextafter(narrow, torch.full_like(narrow, towards)), narrow)


register_selector("Quest", Quest)
