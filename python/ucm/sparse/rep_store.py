"""Representations of blocks, one row for each physical block of the device, beside the KV and never
in its pages.

Because rows are physical ids, prefix hits, forks and preemption need no code: a block's
representation is where the block is, for every request that uses it. A row that is not
:meth:`RepStore.ready` belongs to a block whose tokens were not all encoded here, and is never
scored. Spare rows behind those of the device hold the representations of offloaded blocks.

A representation is always made from all keys of a block at once, so it is the same whether the
block was computed in one chunk of a prefill, in several, or token by token. Keys of a block that is
being written are held until it is full (:class:`OpenBlocks`), because a cache cannot always be read
back: on a CPU its pages are packed for the instruction set. Where tokens are encoded one by one
(:class:`FilledBlocks`) no keys are held.
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ucm.errors import BusyError, ConfigError
from ucm.sparse.selector import BlockSelector, Geometry, rep_bytes

#: Bytes of a huge page; smaller tensors need none.
HUGE_PAGE = 2 << 20

Ids = npt.NDArray[np.int64]


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The writes of one step, the same for every layer. All but the slots are int64 tensors on the
    host."""

    #: Every token that counts: its index in the step, its slot (on the representations' device),
    #: that slot's block and place there; and whether all tokens of the step count.
    tokens: Tensor
    slots: Tensor
    blocks: Tensor
    places: Tensor
    all_count: bool
    #: Blocks that begin and end in this step, ``[m]``, and the tokens of each, ``[m, b]``. These
    #: and the following are empty where tokens are encoded one by one.
    whole: Tensor = field(default_factory=_none)
    whole_tokens: Tensor = field(default_factory=_none)
    #: Tokens of other blocks: index in the step, row and place in the held keys.
    held_tokens: Tensor = field(default_factory=_none)
    held_rows: Tensor = field(default_factory=_none)
    held_places: Tensor = field(default_factory=_none)
    #: Held blocks that are full now, and their rows.
    full: Tensor = field(default_factory=_none)
    full_rows: Tensor = field(default_factory=_none)


class FilledBlocks:
    """The tokens written to each block, for selectors that encode token by token."""

    #: Memory of held keys, in bytes.
    nbytes = 0

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._size, self._device = block_size, device
        #: Tokens that are there, of blocks that were begun here and are not full.
        self._filled: dict[int, int] = {}

    def forget(self, blocks: Ids) -> None:
        """These blocks have other content now."""
        for block in blocks.tolist():
            self._filled.pop(block, None)

    def plan(self, slots: Ids, ready: npt.NDArray[np.bool_]) -> WritePlan:
        """The plan of a step that writes these slots, those of a block in the order of its tokens;
        sets complete blocks in ``ready``."""
        tokens = np.flatnonzero(slots >= 0)
        counted = slots[tokens]
        blocks, places = np.divmod(counted, self._size)
        filled = self._filled
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            if place == 0:  # a new block
                filled[block], ready[block] = 0, False
            # Any other token but the next one is written again with the same value (the last token
            # of a prompt that was hit), or first tokens are missing and the block is never full.
            if filled.get(block) == place:
                filled[block] = place + 1
                if place + 1 == self._size:
                    del filled[block]
                    ready[block] = True
        return WritePlan(
            torch.from_numpy(tokens),
            torch.from_numpy(counted).to(self._device),
            torch.from_numpy(blocks),
            torch.from_numpy(places),
            len(tokens) == len(slots),
        )


class OpenBlocks:
    """Keys of partly written blocks, ``[rows, b, h, d]`` for each layer, and which of them are
    there."""

    def __init__(
        self,
        geometry: Geometry,
        layers: Sequence[int],
        num_blocks: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = geometry.block_size
        self._size, self._device = size, device
        rows = min(rows, num_blocks)
        shape = (rows, size, geometry.kv_heads, geometry.head_dim)
        self._keys = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}
        self._there = np.zeros((rows, size), dtype=np.bool_)
        self._rows: OrderedDict[int, int] = OrderedDict()  # block -> row, the longest unused first
        self._free = list(range(rows - 1, -1, -1))
        self._leaving: list[int] = []

    @property
    def nbytes(self) -> int:
        """Memory of the held keys, in bytes."""
        return sum(keys.nbytes for keys in self._keys.values())

    def forget(self, blocks: Ids) -> None:
        """These blocks have other content now."""
        for block in blocks.tolist():
            row = self._rows.pop(block, None)
            if row is not None:
                self._free.append(row)

    def plan(self, slots: Ids, ready: npt.NDArray[np.bool_]) -> WritePlan:
        """The plan of a step that writes these slots; sets complete blocks in ``ready``."""
        self.forget(np.array(self._leaving, dtype=np.int64))
        self._leaving = []
        tokens = np.flatnonzero(slots >= 0)
        blocks, places = np.divmod(slots[tokens], self._size)
        unique, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        # A block whose first token is written is a new one.
        begun = np.zeros(len(unique), dtype=np.bool_)
        begun[inverse[places == 0]] = True
        self.forget(unique[begun])
        ready[unique[begun]] = False
        whole = begun & (counts == self._size)
        whole_tokens = np.empty((int(whole.sum()), self._size), dtype=np.int64)
        rank = np.cumsum(whole) - 1
        of_whole = whole[inverse]
        whole_tokens[rank[inverse[of_whole]], places[of_whole]] = tokens[of_whole]
        ready[unique[whole]] = True
        # A token of a ready block is written again with the same value (the last one of a prompt
        # that was hit), and a block whose first tokens are not held is never full.
        open_now = np.fromiter(self._rows, dtype=np.int64, count=len(self._rows))
        known = begun | np.isin(unique, open_now)
        held = ~of_whole & ~ready[blocks] & known[inverse]
        rows, full = self._hold(blocks[held], places[held])
        held[held] = rows >= 0
        rows = rows[rows >= 0]
        ready[full] = True
        self._leaving = full
        full_rows = [self._rows[block] for block in full]
        return WritePlan(
            torch.from_numpy(tokens),
            torch.from_numpy(slots[tokens]).to(self._device),
            torch.from_numpy(blocks),
            torch.from_numpy(places),
            len(tokens) == len(slots),
            *map(torch.from_numpy, (unique[whole], whole_tokens)),
            *map(torch.from_numpy, (tokens[held], rows, places[held])),
            *(torch.tensor(ids, dtype=torch.int64) for ids in (full, full_rows)),
        )

    def _hold(self, blocks: Ids, places: Ids) -> tuple[Ids, list[int]]:
        """Rows for these tokens, -1 without one, and the blocks that are full with them."""
        rows = np.full(len(blocks), -1, dtype=np.int64)
        full: list[int] = []
        now = dict.fromkeys(blocks.tolist())
        for block in now:
            if (row := self._row(block, now)) is None:
                continue
            mine = blocks == block
            rows[mine] = row
            self._there[row, places[mine]] = True
            if self._there[row].all():
                full.append(block)
        return rows, full

    def _row(self, block: int, now: Container[int]) -> int | None:
        """The row of a block, perhaps taken from another; None where this step uses all."""
        if (row := self._rows.get(block)) is not None:
            self._rows.move_to_end(block)
            return row
        if self._free:
            row = self._free.pop()
        else:
            # The least recently used row belongs to a sequence that has ended; if not, its block is
            # never ready, and the sequence attends to every block.
            oldest = next((known for known in self._rows if known not in now), None)
            if oldest is None:
                return None
            row = self._rows.pop(oldest)
        self._rows[block] = row
        self._there[row] = False
        return row

    def completed(
        self, layer: int, keys: Tensor, plan: WritePlan
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks that are complete with this step, and their keys ``[m, b, h, d]``; keeps those of
        the others."""
        if plan.whole.numel():
            yield plan.whole, keys[plan.whole_tokens.to(keys.device)]
        if plan.held_tokens.numel():
            held, new = self._keys[layer], keys[plan.held_tokens.to(keys.device)]
            held[plan.held_rows.to(held.device), plan.held_places.to(held.device)] = new.to(held)
            if plan.full.numel():
                yield plan.full, held[plan.full_rows.to(held.device)]


class RepStore:
    """Representations ``[rows, *rep]`` for each layer that selects."""

    def __init__(
        self,
        selector: BlockSelector,
        layers: Sequence[int],
        num_blocks: int,
        *,
        device: str | torch.device = "cpu",
        spare: int = 0,
        open_blocks: int = 512,
        key_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``layers`` are those that select, ``num_blocks`` the device's blocks, ``spare`` further
        rows. ``open_blocks`` bounds the partly written blocks that are held as keys of
        ``key_dtype``, and must be at least the number of sequences that run at once; selectors that
        encode token by token need none."""
        if num_blocks < 1 or spare < 0:
            raise ConfigError(
                f"a store of representations needs blocks, got {num_blocks} and {spare} spare ones"
            )
        shape, dtype = selector.rep_shape()
        self.selector = selector
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        rows = (num_blocks + spare, *shape)
        self._reps = {layer: zeros(rows, dtype, self.device) for layer in layers}
        #: The layers that have representations.
        self.layers = list(self._reps)
        geometry = selector.geometry
        self._open: FilledBlocks | OpenBlocks
        if selector.token_wise:
            self._open = FilledBlocks(geometry.block_size, self.device)
        else:
            keys = (open_blocks, key_dtype, self.device)
            self._open = OpenBlocks(geometry, layers, num_blocks, *keys)
        self._ready = np.zeros(num_blocks + spare, dtype=np.bool_)
        self._free = list(range(num_blocks + spare - 1, num_blocks - 1, -1))

    # Size
    # ----------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Memory of the representations and of the blocks being written, in bytes."""
        return sum(int(reps.nbytes) for reps in self._reps.values()) + self._open.nbytes

    def share(self, kv_bytes: int) -> float:
        """:attr:`nbytes` as a share of their KV, ``kv_bytes`` for all blocks and layers."""
        return self.nbytes / kv_bytes

    # Writing
    # ----------------------------------------------------------------------------------------------

    def plan_write(self, slots: Any) -> WritePlan:
        """The writes of a step: ``slots [t]`` (tensor on the host, array or list) is the slot of
        each token, block times block size plus place; negative ones are padding. Made once a step
        for all layers. From here on the blocks begun in this step are not ready, those it completes
        are."""
        return self._open.plan(np.asarray(slots, dtype=np.int64).reshape(-1), self._ready)

    def write(self, layer: int, keys: Tensor, plan: WritePlan) -> None:
        """Encode the keys ``[t, h, d]`` of a step in a layer."""
        reps = self._reps[layer]
        if isinstance(self._open, FilledBlocks):
            if plan.tokens.numel():
                some = keys if plan.all_count else keys[plan.tokens.to(keys.device)]
                self.selector.encode_tokens(layer, some, reps, plan.slots)
            return
        for ids, whole in self._open.completed(layer, keys, plan):
            reps[ids.to(self.device)] = self.selector.encode(layer, whole).to(self.device)

    def update(self, layer: int, keys: Tensor, block_ids: Any) -> None:
        """Encode whole blocks with these keys ``[m, b, h, d]``: loaded ones, or those of a readable
        cache. They are ready once :meth:`mark_ready` is called, after all layers."""
        self.put(layer, block_ids, self.selector.encode(layer, keys))

    def put(self, layer: int, block_ids: Any, reps: Tensor) -> None:
        """Store representations ``[m, *rep]`` that were made before (with the same
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

    # Validity
    # ----------------------------------------------------------------------------------------------

    def mark_ready(self, block_ids: Any) -> None:
        """All layers of these rows hold the representation of the block's present content."""
        self._ready[np.asarray(block_ids, dtype=np.int64)] = True

    def invalidate(self, block_ids: Any) -> None:
        """These blocks get other content: to be called for blocks that a load is about to fill."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        self._ready[ids] = False
        self._open.forget(ids)

    @contextmanager
    def as_if_ready(self, block_ids: Any) -> Iterator[None]:
        """Score these rows whatever they hold, to measure how long that takes."""
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
        """Those of these rows that may not be scored, in order."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        return [int(block) for block in ids[~self._ready[ids]]]

    # Spare rows
    # ----------------------------------------------------------------------------------------------

    def adopt(self, block_ids: Any) -> list[int]:
        """Copy the representations of blocks that leave the device into spare rows until
        :meth:`release`; returns these. Raises :class:`~ucm.errors.BusyError` when there are too
        few, and then copies nothing."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        rows = self.reserve(len(ids))
        source, target = (torch.as_tensor(each, device=self.device) for each in (ids, rows))
        for reps in self._reps.values():
            reps[target] = reps[source]
        self._ready[rows] = self._ready[ids]
        return rows

    def reserve(self, count: int) -> list[int]:
        """``count`` spare rows for blocks that were never on the device. Raises
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


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that are read as a whole in every step: on the host in huge pages where possible, since
    walking page tables takes as long as reading there."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(tuple(shape))


def bytes_per_block(selector: BlockSelector, layers: int) -> int:
    """Bytes of one device block beside its KV, for ``layers`` layers that select: the addition of a
    KV cache spec to its ``max_memory_usage_bytes`` for each block, and never to its page size."""
    return rep_bytes(selector) * layers
