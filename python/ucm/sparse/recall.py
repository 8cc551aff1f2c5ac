"""How much of the true attention mass the kept blocks hold: measured against all keys, where that
is switched on.

It keeps every key a second time and scores every block exactly, so it is for finding out, not for
serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ucm.sparse.open_blocks import WritePlan
from ucm.sparse.selector import Geometry
from ucm.sparse.selectors.oracle import Oracle


class RecallProbe:
    """All keys of the layers that select, by physical block."""

    def __init__(
        self,
        geometry: Geometry,
        layers: Sequence[int],
        num_blocks: int,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        self._oracle = Oracle(geometry)
        shape = (num_blocks, geometry.block_size, geometry.kv_heads, geometry.head_dim)
        self._keys = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}

    def write(self, layer: int, keys: Tensor, plan: WritePlan) -> None:
        """Take the keys ``[t, h, d]`` that a step writes."""
        kept = self._keys[layer]
        kept[plan.blocks.to(kept.device), plan.places.to(kept.device)] = keys[
            plan.tokens.to(keys.device)
        ].to(kept)

    def mass(self, layer: int, query: Tensor, table: Tensor, tokens: int) -> Tensor:
        """Attention mass ``[h, n]`` of each block of ``table [n]`` for one query ``[heads, d]``
        over ``tokens`` tokens."""
        return self._oracle.mass(
            query[None], self._keys[layer].index_select(0, table.long()), tokens
        )
