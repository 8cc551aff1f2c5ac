"""Codes of sign bits: making and comparing them. Little-endian: bit ``j`` of byte ``i`` is
direction ``8i + j``."""

from __future__ import annotations

import torch
from torch import Tensor

from ucm.sparse.kernels import kernels_for


def made_code(x: Tensor, weights: Tensor) -> Tensor:
    """:func:`code` by a kernel, where there is one: the same bits, but where ``x·W`` is as small as
    its rounding."""
    kernels = kernels_for(x, weights)
    if kernels is None or x.dim() < 2 or not x.numel():
        return code(x, weights)
    made: Tensor = kernels.hash_encode(x.reshape(-1, *x.shape[-2:]), weights).view(
        *x.shape[:-1], -1
    )
    return made


def code(x: Tensor, weights: Tensor) -> Tensor:
    """Codes ``[..., bits/8]`` of vectors ``x [..., d]`` by directions ``weights [d, bits]``: uint8,
    packed little-endian."""
    # On a CPU in float64: rounding depends on how many vectors are encoded together, and must not
    # turn a bit.
    wide = torch.float64 if x.device.type == "cpu" else torch.float32
    bits = (x.to(wide) @ weights.to(wide) > 0).view(*x.shape[:-1], weights.shape[1] // 8, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return (bits * powers).sum(dim=-1, dtype=torch.int32).to(torch.uint8)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Bits in which codes differ, over the last dimension; the others are broadcast. int32."""
    x = a ^ b
    x = x - ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return ((x + (x >> 4)) & 0x0F).sum(dim=-1, dtype=torch.int32)
