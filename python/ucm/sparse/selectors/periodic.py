"""Periodic sampling, and the controls that do not read keys either: blocks by lot, and the windows
alone.

Periodic blocks lie at equal distances, whatever the query is. They are ordered by their
bit-reversed number (0, 16, 8, 24, 4, ... of 32), so any budget takes a sample that is as even as it
can be, and a larger one contains the smaller.

Source: book 7.3.2.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ucm.config.fields import Number
from ucm.config.sparse import AlgorithmConfig
from ucm.sparse.selector import BlockSelector, Combine, Geometry, register_selector

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


class Windows(Periodic):
    """No block but the windows: it has no budget, so scores do not matter."""

    name = "windows"

    class Keys(AlgorithmConfig):
        """No budget."""

        default_budget: ClassVar[tuple[str, Any]] = ("topk_blocks", 0)


class Random(Periodic):
    """Blocks by lot, drawn for each query: the same for the same query, layer and seed."""

    name = "random"
    exact = False
    combine: Combine = "sum"

    class Keys(AlgorithmConfig):
        """What they are drawn by."""

        seed: Annotated[Number, Field(le=2**63 - 1)] = 0

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry)
        self.seed = seed

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """Uniform numbers."""
        bits = query[-1].float().contiguous().view(torch.int32).long()
        places = torch.arange(1, bits.numel() + 1, device=bits.device).view(bits.shape)
        mixed = int((bits * places).sum()) * 1_000_003 + layer * 8191 + self.seed
        generator = torch.Generator().manual_seed(mixed % 2**63)
        drawn = torch.rand(1, reps.shape[0], generator=generator).to(reps.device)
        return drawn.expand(self.geometry.kv_heads, -1)


register_selector("Periodic", Periodic)
register_selector("Windows", Windows)
register_selector("Random", Random)
