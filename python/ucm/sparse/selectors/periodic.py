"""Periodic sampling: blocks at equal distances, whatever is asked. A static pattern, and a control
for the others.

Blocks come in the order of their bit-reversed number (0, 16, 8, 24, 4, ... of 32), so any budget
takes a sample that is as even as it can be, and a larger one holds the smaller.

Source: book 7.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ucm.sparse.selector import BlockSelector, Combine

_BITS = 24


class Periodic(BlockSelector):
    """Evenly spread blocks."""

    name = "periodic"
    exact = True
    token_wise = True
    combine: Combine = "max"

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Nothing."""
        return (self.geometry.block_size, 0), torch.uint8

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Nothing."""
        del layer
        return torch.empty((*keys.shape[:2], 0), dtype=torch.uint8, device=keys.device)

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """Minus the bit-reversed number of the block."""
        del layer, query
        number = torch.arange(reps.shape[0], device=reps.device)
        reverse = torch.zeros_like(number)
        for bit in range(_BITS):
            reverse |= ((number >> bit) & 1) << (_BITS - 1 - bit)
        return -reverse.to(torch.int32).expand(self.geometry.kv_heads, -1)
