"""Representations of blocks, one row for each physical block of the device, beside the KV and never
in its pages.

Because rows are physical ids, prefix hits, forks and preemption need no code: a block's
representation is where the block is, for every request that uses it. A row that is not
:meth:`RepStore.ready` belongs to a block whose tokens were not all encoded here, and is never
scored.

Spare rows behind those of the device hold the representations of blocks that are not on the device
at all (offload).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ucm.errors import BusyError, ConfigError
from ucm.sparse.open_blocks import FilledBlocks, OpenBlocks, WritePlan
from ucm.sparse.selector import Selector, rep_bytes


class RepStore:
    """Representations ``[rows, *rep]`` for each layer that selects."""

    def __init__(
        self,
        selector: Selector,
        layers: Sequence[int],
        num_blocks: int,
        *,
        device: str | torch.device = "cpu",
        spare: int = 0,
        open_blocks: int = 512,
        key_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``layers`` are those that select, ``num_blocks`` the device's blocks, ``spare`` further
        rows.

        ``open_blocks`` bounds how many partly written blocks are held as keys of ``key_dtype``
        until they are full, and must be at least the number of sequences that run at once;
        selectors that encode token by token need none.
        """
        if num_blocks < 1 or spare < 0:
            raise ConfigError(
                f"a store of representations needs blocks, got {num_blocks} and {spare} spare ones"
            )
        shape, dtype = selector.rep_shape()
        self.selector = selector
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self._reps = {
            layer: zeros((num_blocks + spare, *shape), dtype, self.device) for layer in layers
        }
        #: The layers that have representations.
        self.layers = list(self._reps)
        geometry = selector.geometry
        self._open = (
            FilledBlocks(geometry.block_size, self.device)
            if selector.token_wise
            else OpenBlocks(geometry, layers, num_blocks, open_blocks, key_dtype, self.device)
        )
        self._ready = np.zeros(num_blocks + spare, dtype=np.bool_)
        self._free = list(range(num_blocks + spare - 1, num_blocks - 1, -1))

    # Size
    # ----------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Memory of the representations and of the blocks being written, in bytes."""
        return sum(int(reps.nbytes) for reps in self._reps.values()) + self._open.nbytes

    def share(self, kv_bytes: int) -> float:
        """:attr:`nbytes` as a share of the KV they stand for, ``kv_bytes`` for all blocks and
        layers."""
        return self.nbytes / kv_bytes

    # Writing
    # ----------------------------------------------------------------------------------------------

    def plan_write(self, slots: Any) -> WritePlan:
        """What a step writes: ``slots [t]`` (tensor on the host, array or list) is the slot of each
        token, block times block size plus place; negative ones are padding. Made once a step and
        used for every layer. From here on the blocks begun in this step are not ready, those it
        completes are."""
        return self._open.plan(np.asarray(slots, dtype=np.int64).reshape(-1), self._ready)

    def write(self, layer: int, keys: Tensor, plan: WritePlan) -> None:
        """Take the keys ``[t, h, d]`` of a step into a layer."""
        reps = self._reps[layer]
        if isinstance(self._open, FilledBlocks):
            if plan.tokens.numel():
                some = keys if plan.all_count else keys[plan.tokens.to(keys.device)]
                self.selector.encode_tokens(layer, some, reps, plan.slots)
            return
        for ids, whole in self._open.completed(layer, keys, plan):
            reps[ids.to(self.device)] = self.selector.encode(layer, whole).to(self.device)

    def update(self, layer: int, keys: Tensor, block_ids: Any) -> None:
        """Encode whole blocks whose keys ``[m, b, h, d]`` are at hand: loaded ones, or those of a
        cache that can be read. They are ready once :meth:`mark_ready` is called, after all
        layers."""
        self.put(layer, block_ids, self.selector.encode(layer, keys))

    def put(self, layer: int, block_ids: Any, reps: Tensor) -> None:
        """Take representations ``[m, *rep]`` that were made before (with the same
        :meth:`Selector.signature`)."""
        ids = torch.as_tensor(block_ids, dtype=torch.int64, device=self.device)
        self._reps[layer][ids] = reps.to(self.device)

    def get(self, layer: int, block_ids: Any) -> Tensor:
        """The representations ``[m, *rep]`` of these rows, a copy, in this order."""
        ids = torch.as_tensor(block_ids, dtype=torch.int64, device=self.device)
        return self._reps[layer].index_select(0, ids)

    def all(self, layer: int) -> Tensor:
        """The representations of a layer, ``[rows, *rep]``, for kernels. Not a copy."""
        return self._reps[layer]

    # Whose bytes
    # ----------------------------------------------------------------------------------------------

    def mark_ready(self, block_ids: Any) -> None:
        """All layers of these rows hold the representation of the block that lies there now."""
        self._ready[np.asarray(block_ids, dtype=np.int64)] = True

    def invalidate(self, block_ids: Any) -> None:
        """These blocks hold something else from now on: call it for blocks that a load is about to
        fill."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        self._ready[ids] = False
        self._open.forget(ids)

    @contextmanager
    def as_if_ready(self, block_ids: Any) -> Iterator[None]:
        """Score these rows whatever they hold, to measure how long that takes; then all is as it
        was."""
        ids = np.asarray(block_ids, dtype=np.int64)
        before = self._ready[ids].copy()
        self._ready[ids] = True
        try:
            yield
        finally:
            self._ready[ids] = before

    def ready(self, block_ids: Any) -> bool:
        """Whether all of these rows may be scored."""
        return bool(self._ready[np.asarray(block_ids, dtype=np.int64)].all())

    def missing(self, block_ids: Any) -> list[int]:
        """Those of these rows that may not be scored, in their order."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        return [int(block) for block in ids[~self._ready[ids]]]

    # Spare rows
    # ----------------------------------------------------------------------------------------------

    def adopt(self, block_ids: Any) -> list[int]:
        """Copy the representations of blocks that leave the device into spare rows, and say which.
        They stay as they are until :meth:`release`. Raises :class:`~ucm.errors.BusyError` when
        there are too few, and then copies nothing."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        rows = self.reserve(len(ids))
        source, target = (
            torch.as_tensor(ids, device=self.device),
            torch.as_tensor(rows, device=self.device),
        )
        for reps in self._reps.values():
            reps[target] = reps[source]
        self._ready[rows] = self._ready[ids]
        return rows

    def reserve(self, count: int) -> list[int]:
        """So many spare rows for representations of blocks that were never on the device. Raises
        :class:`~ucm.errors.BusyError` when there are too few."""
        if count > len(self._free):
            raise BusyError(
                "too few spare rows for the representations of blocks that are not on the device",
                context={"needed": count, "free": len(self._free)},
            )
        return [self._free.pop() for _ in range(count)]

    def release(self, rows: Sequence[int]) -> None:
        """Give spare rows back."""
        self._ready[list(rows)] = False
        self._free.extend(rows)


#: Bytes of a huge page; smaller tensors need none.
HUGE_PAGE = 2 << 20


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that are read in whole from end to end in every step: on the host in huge pages where
    the system has some, since walking page tables takes as long as reading there."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(tuple(shape))


def bytes_per_block(selector: Selector, layers: int) -> int:
    """Bytes that one block of the device costs beside its KV, for ``layers`` layers that select:
    what a KV cache spec adds to its ``max_memory_usage_bytes`` for each block, and never to its
    page size."""
    return rep_bytes(selector) * layers
