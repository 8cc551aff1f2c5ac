"""Hash codes by the names of the book: the encoder, and the functions it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.kernels import kernels_for
from ucm.sparse.selectors.codes import code, made_code
from ucm.sparse.selectors.haar import directions


class HashEncoder:
    """Vectors to codes of sign bits, eight in a byte. The same for the same sizes and seed, in
    every process."""

    def __init__(
        self,
        input_dim: int,
        hash_bits: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        *,
        seed: int = 0,
        layer: int = 0,
    ) -> None:
        """``hash_bits`` is a multiple of 8; ``dtype`` is that of the directions."""
        if input_dim < 1 or hash_bits < 8 or hash_bits % 8:
            raise InvalidInputError(
                "an encoder needs channels, and bits that fill bytes",
                context={"input_dim": input_dim, "bits": hash_bits},
            )
        self.input_dim, self.hash_bits, self.hash_numbers = input_dim, hash_bits, hash_bits // 8
        self.dtype, self.device = dtype, torch.device(device)
        made = directions(input_dim, hash_bits, seed=seed, layer=layer).astype(np.float32)
        self.hash_weights = torch.from_numpy(made).to(self.device, dtype)
        self.bit_masks = torch.tensor(
            [1 << bit for bit in range(8)], dtype=torch.uint8, device=self.device
        )

    def compute_hash(self, x: Tensor) -> Tensor:
        """Codes ``[..., bits/8]`` (uint8) of ``x [..., input_dim]``. Raises
        :class:`~ucm.errors.InvalidInputError`."""
        if x.shape[-1] != self.input_dim:
            raise InvalidInputError(
                f"vectors of {self.input_dim} channels are encoded, got {x.shape[-1]}"
            )
        encode = triton_hash_code if x.device.type == "cuda" else torch_hash_code
        return encode(x.reshape(-1, self.input_dim), self.hash_weights, self.bit_masks).view(
            *x.shape[:-1], -1
        )


def torch_hash_code(x: Tensor, hash_weights: Tensor, bit_masks: Tensor | None = None) -> Tensor:
    """Codes ``[n, bits/8]`` of ``x [n, d]`` by directions ``[d, bits]``, little-endian;
    ``bit_masks`` are the powers of 2."""
    del bit_masks
    return code(x, hash_weights)


def triton_hash_code(x: Tensor, hash_weights: Tensor, bit_masks: Tensor | None = None) -> Tensor:
    """:func:`torch_hash_code` by the kernel of the device where ``x`` lies: Triton's on a GPU, that
    of the CPU there, torch where neither runs. The same bits, but where ``x·W`` is as small as its
    rounding."""
    del bit_masks
    return made_code(x[:, None], hash_weights)[:, 0]


def reshape_and_cache_khash_triton(
    k_hash_compute: Tensor, slot_mapping: Tensor, k_hash: Tensor, block_size: int = 128
) -> Tensor:
    """Write codes ``[t, h, bytes]`` into the slots ``slot_mapping [t]`` of ``k_hash [blocks, b, h,
    bytes]``, in place; slots that are negative or beyond the cache are left out. Returns
    ``k_hash``. By Triton on a GPU, else by torch."""
    if k_hash.shape[1] != block_size:
        raise InvalidInputError(
            f"the cache has blocks of {k_hash.shape[1]} tokens, not {block_size}"
        )
    if k_hash.is_cuda and (kernels := kernels_for(k_hash, k_hash_compute)) is not None:
        kernels.scatter_codes(k_hash_compute, slot_mapping, k_hash)
        return k_hash
    there = (slot_mapping >= 0) & (slot_mapping < k_hash.shape[0] * block_size)
    slots = slot_mapping[there].long()
    k_hash[slots // block_size, slots % block_size] = k_hash_compute[there]
    return k_hash
