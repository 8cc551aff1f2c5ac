"""Blocks that are being written: which tokens of them are there, and their keys until a block is
full.

A representation is always made from all keys of a block at once, so it is the same whether the
block came in one chunk of a prefill, in several, or token by token. Keys are held here because a
cache cannot always be read back: on a CPU its pages are packed for the instruction set. Where
tokens are encoded one by one (:class:`FilledBlocks`) no keys are held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ucm.sparse.selector import Geometry

Ids = npt.NDArray[np.int64]


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What one step writes, the same for every layer. All are int64 tensors on the host, but the
    slots."""

    #: Every token that counts: its index in the step, its slot (on the device of the
    #: representations), and that slot's block and place there; and whether they are all tokens of
    #: the step.
    tokens: Tensor
    slots: Tensor
    blocks: Tensor
    places: Tensor
    all_count: bool
    #: Blocks that begin and end in this step, ``[m]``, and the tokens of each, ``[m, b]``. This and
    #: what follows is empty where tokens are encoded one by one.
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
    """How far each block is written, for what encodes token by token. A step of a decode has few
    tokens, so that each is looked at alone."""

    #: Memory of held keys, in bytes.
    nbytes = 0

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._size, self._device = block_size, device
        #: Tokens that are there, of blocks whose first ones were written here and which are not
        #: full.
        self._filled: dict[int, int] = {}

    def forget(self, blocks: Ids) -> None:
        """These blocks hold something else now."""
        for block in blocks.tolist():
            self._filled.pop(block, None)

    def plan(self, slots: Ids, ready: npt.NDArray[np.bool_]) -> WritePlan:
        """The plan of a step that writes these slots, those of a block in the order of its tokens;
        says in ``ready`` which blocks are complete."""
        tokens = np.flatnonzero(slots >= 0)
        counted = slots[tokens]
        blocks, places = np.divmod(counted, self._size)
        filled = self._filled
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            if place == 0:  # a new block, whatever lay there before
                filled[block], ready[block] = 0, False
            # Not the next one: it was there before and has the value it had (the last token of a
            # prompt that was hit), or first tokens are missing, so that the block can never be
            # full.
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
    """Keys of partly written blocks, ``[rows, b, h, d]`` for each layer, and what of them is
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
        """These blocks hold something else now."""
        for block in blocks.tolist():
            row = self._rows.pop(block, None)
            if row is not None:
                self._free.append(row)

    def plan(self, slots: Ids, ready: npt.NDArray[np.bool_]) -> WritePlan:
        """The plan of a step that writes these slots; says in ``ready`` which blocks are
        complete."""
        self.forget(np.array(self._leaving, dtype=np.int64))
        self._leaving = []
        tokens = np.flatnonzero(slots >= 0)
        blocks, places = np.divmod(slots[tokens], self._size)
        unique, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        # A block whose first token is written is a new one, whatever lay there before.
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
        # A token of a block that is ready is written again with the value it had (the last one of a
        # prompt that was hit), and a block whose first tokens are not held can never be full.
        known = begun | np.isin(
            unique, np.fromiter(self._rows, dtype=np.int64, count=len(self._rows))
        )
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
        """Rows for these tokens, -1 where there is none, and the blocks that are full with them."""
        rows = np.full(len(blocks), -1, dtype=np.int64)
        full: list[int] = []
        now = dict.fromkeys(blocks.tolist())
        for block in now:
            row = self._row(block, now)
            if row is None:
                continue
            mine = blocks == block
            rows[mine] = row
            self._there[row, places[mine]] = True
            if self._there[row].all():
                full.append(block)
        return rows, full

    def _row(self, block: int, now: Container[int]) -> int | None:
        """The row of a block, one that was given up for it, or None where all are in use by this
        step."""
        row = self._rows.get(block)
        if row is not None:
            self._rows.move_to_end(block)
            return row
        if self._free:
            row = self._free.pop()
        else:
            # The longest unused row belongs to a sequence that has ended; if not, its block never
            # gets ready, and the sequence attends to every block.
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
            held = self._keys[layer]
            held[plan.held_rows.to(held.device), plan.held_places.to(held.device)] = keys[
                plan.held_tokens.to(keys.device)
            ].to(held)
            if plan.full.numel():
                yield plan.full, held[plan.full_rows.to(held.device)]
