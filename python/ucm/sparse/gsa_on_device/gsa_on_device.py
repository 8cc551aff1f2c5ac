"""GSA On-Device: codes of single keys choose the blocks where they lie, on the device or on the
CPU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.positional import PositionalMethod
from ucm.sparse.selectors.hash import Hash


class GSAOnDevice(PositionalMethod):
    """Hash codes."""

    algorithm: ClassVar[str] = "GSAOnDevice"

    def hash_code(
        self,
        nope: Tensor | None = None,
        rope: Tensor | None = None,
        reduction_head_num: int = 1,
        query: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Codes (uint8) of queries ``query [t, heads, d]``, one for each KV head; with latent
        attention of ``nope [t, heads, rank]`` and ``rope [t, heads, size]``, two, each of the means
        of ``reduction_head_num`` heads."""
        if not isinstance(getattr(self, "selector", None), Hash):
            raise InvalidInputError(
                "call setup or register_kv_caches first: codes depend on the shape of the keys"
            )
        selector = self.selector
        assert isinstance(selector, Hash)
        if not selector.geometry.rope_dim:
            if query is None:
                raise InvalidInputError(
                    "models without latent attention have one query: pass query="
                )
            return selector.encode(layer, selector.grouped(query).mean(dim=2))
        if nope is None or rope is None:
            raise InvalidInputError(
                "latent attention has a query of two parts: pass nope= and rope="
            )
        both = torch.cat([nope, rope], dim=-1).float()
        if reduction_head_num > 1:
            both = both.view(both.shape[0], reduction_head_num, -1, both.shape[-1]).mean(dim=1)
        codes = selector.encode(layer, both)
        split = selector.parts[0][1] // 8
        return codes[..., :split], codes[..., split:]
