"""Requests whose middle blocks are in the store, and of which the device holds those that are chosen.

A request that decodes keeps the blocks of its windows where vLLM put them. The others have left the device; it was
given *hot* blocks for them, and in each layer a hot block holds the KV of whichever block was chosen there. What
is chosen and not there is loaded, this layer alone, and waited for within the step's bound. A block that still is not
there is left out of the step and counted: nothing is ever read that was not loaded.

The representations of blocks that leave are kept in rows behind those of the device, so choosing reads no KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ucm.errors import DeadlineError, TaskError
from ucm.integration.vllm.attention.rows import OffloadChange
from ucm.integration.vllm.connector.guard import throttle
from ucm.sparse.batch import SparseRow
from ucm.sparse.method import BlockSparse
from ucm.sparse.predictor import Predictor
from ucm.sparse.residency import Residency
from ucm.sparse.selection import Selection

#: Rows for representations of blocks that left, for each block of the device.
SPARE = 4


def spare_rows(num_blocks: int) -> int:
    """How many blocks may have left a device of so many: the scheduler half and the workers must agree."""
    return SPARE * num_blocks


@dataclass(slots=True)
class _Request:
    """One request, some of whose blocks have left."""

    begin: int  # logical: the first that has left
    ids: list[bytes] = field(default_factory=list)  # record ids of those that have, in their order
    rows: list[int] = field(default_factory=list)  # where their representations are
    hot: list[int] = field(default_factory=list)  # device blocks
    layers: dict[int, Residency] = field(default_factory=dict)
    predictors: dict[int, Predictor] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The first behind them, which is where vLLM put it."""
        return self.begin + len(self.ids)


@dataclass(slots=True)
class _Loading:
    """A load that was not waited for to its end."""

    task: Any
    store: Any
    wanted: list[tuple[Residency, int]]


class Offload:
    """Those of one worker."""

    def __init__(
        self,
        method: BlockSparse,
        places: Mapping[int, int],
        store: Callable[[], Any],
        record_ids: Callable[[bytes], Sequence[bytes]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``places``: number of a layer -> its place among those of this rank; ``store`` gives the store by layers,
        None while it is not open; ``record_ids`` makes the ids of joined keys on this rank."""
        self._method = method
        self._places = dict(places)
        self._store = store
        self._record_ids = record_ids
        self._clock = clock
        self._bound_s = method.settings.retrieval_ms / 1000
        self._deadline = 0.0
        self._requests: dict[str, _Request] = {}
        self._late: list[_Loading] = []

    # Steps ------------------------------------------------------------------------------------------------------

    def begin_step(self, changes: Sequence[OffloadChange], ended: Sequence[str]) -> None:
        """Blocks have left, or are about to be written to by others: before anything of the step is computed."""
        for request_id in ended:
            if self._requests.pop(request_id, None) is not None:
                self._method.request_finished_in_worker(request_id)
        for change in changes:
            self._change(change)
        self._deadline = self._clock() + self._bound_s
        self._late = [each for each in self._late if not self._settle(each, 0.0)]

    def _change(self, change: OffloadChange) -> None:
        request = self._requests.setdefault(change.request, _Request(change.begin))
        if len(change.blocks):
            request.ids += self._record_ids(change.keys)
            request.rows += self._method.store.adopt(change.blocks)
            # The first window is never scored, so it does not matter what stands there.
            self._method.set_rep_rows(change.request, [0] * request.begin + request.rows)
        request.hot += change.hot
        for residency in request.layers.values():
            residency.capacity = len(request.hot)

    def has_any(self, rows: Sequence[SparseRow]) -> bool:
        """Whether blocks of any of these have left."""
        return bool(self._requests) and any(row.request_id in self._requests for row in rows)

    # Layers -----------------------------------------------------------------------------------------------------

    def place(
        self,
        layer: int,
        rows: Sequence[SparseRow],
        selection: Selection | None,
        original: Tensor,
        table: Tensor,
        lens: Tensor,
    ) -> None:
        """Write into ``table`` and ``lens``, which are the caller's own, what rows attend to whose blocks have left.

        ``selection``: what was chosen of their blocks; a row that is not in it keeps its windows and what is there.
        ``original [rows, N]`` is vLLM's block table, which is right outside of what has left.
        """
        size = self._method.selector.geometry.block_size
        chosen = {} if selection is None else {int(row): i for i, row in enumerate(selection.rows.tolist())}
        wanted: dict[int, list[int]] = {}
        for place, row in enumerate(rows[: len(original)]):
            request = self._requests.get(row.request_id)
            if request is None:
                continue
            blocks = -(-row.tokens // size)
            number = chosen.get(place)
            if number is None or selection is None:
                kept = [*range(request.begin), *self._resident(request, layer).resident, *range(request.end, blocks)]
            else:
                kept = selection.kept(number).tolist()
            wanted[place] = sorted(kept)
        self._bring(layer, rows, wanted)
        for place, kept in wanted.items():
            found = self._found(layer, rows[place], kept, original[place])
            table[place, : len(found)] = found
            lens[place] = (len(found) - 1) * size + (rows[place].tokens - 1) % size + 1

    def _resident(self, request: _Request, layer: int) -> Residency:
        if layer not in request.layers:
            settings = self._method.settings
            request.layers[layer] = Residency(len(request.hot), eviction=settings.eviction, stats=self._method.stats)
            request.predictors[layer] = Predictor(stats=self._method.stats)
        return request.layers[layer]

    def _bring(self, layer: int, rows: Sequence[SparseRow], wanted: Mapping[int, list[int]]) -> None:
        """Load what is wanted and not there, of all rows at once, and wait for it."""
        ids: list[bytes] = []
        targets: list[int] = []
        loads: list[tuple[Residency, int]] = []
        for place, kept in wanted.items():
            request = self._requests[rows[place].request_id]
            middle = [block for block in kept if request.begin <= block < request.end]
            residency = self._resident(request, layer)
            request.predictors[layer].record(middle)
            for block, slot in residency.want(middle):
                ids.append(request.ids[block - request.begin])
                targets.append(request.hot[slot])
                loads.append((residency, block))
        if not loads:
            return
        store = self._store()
        try:
            task = store.load_layer(self._places[layer], ids, np.array(targets, dtype=np.int64), self._bound_s)
        except Exception as error:
            throttle.warning("hot blocks", "blocks could not be loaded, and are left out: %r", error)
            for residency, block in loads:
                residency.failed(block)
            return
        loading = _Loading(task, store, loads)
        if not self._settle(loading, max(0.0, self._deadline - self._clock())):
            self._late.append(loading)
        self._foresee(store, layer, rows, wanted)

    def _settle(self, loading: _Loading, seconds: float) -> bool:
        """Wait so long for a load, and note what it brought; False: it has not ended."""
        failed: set[int] = set()
        try:
            if seconds <= 0 and not loading.store.check(loading.task):
                return False
            loading.store.wait(loading.task, max(seconds, 0.001))
        except DeadlineError:
            return False
        except TaskError as error:
            failed = set(error.failures) or set(range(len(loading.wanted)))
        except Exception as error:
            throttle.warning("hot blocks", "blocks could not be loaded, and are left out: %r", error)
            failed = set(range(len(loading.wanted)))
        for row, (residency, block) in enumerate(loading.wanted):
            if row in failed:
                residency.failed(block)
            else:
                residency.arrived(block)
        return True

    def _foresee(self, store: Any, layer: int, rows: Sequence[SparseRow], wanted: Mapping[int, list[int]]) -> None:
        """Have the store bring up what will likely be chosen next: a hint."""
        if not self._method.settings.prefetch_enabled:
            return
        for place in wanted:
            request = self._requests[rows[place].request_id]
            there = request.layers[layer].resident
            likely = [block for block in request.predictors[layer].predict() if block not in there]
            if likely:
                try:
                    store.prefetch([request.ids[block - request.begin] for block in likely], "next_batch")
                except Exception as error:
                    throttle.warning("hints", "the store could not be told what will be used: %r", error)

    def _found(self, layer: int, row: SparseRow, kept: list[int], table: Tensor) -> Tensor:
        """Device blocks of what is kept and there, in the order of the tokens."""
        request = self._requests[row.request_id]
        residency = request.layers[layer]
        there = residency.resident
        usable = residency.usable([block for block in kept if request.begin <= block < request.end])
        before = [block for block in kept if block < request.begin]
        behind = [block for block in kept if block >= request.end]
        hot = torch.tensor([request.hot[there[block]] for block in usable], dtype=table.dtype, device=table.device)
        return torch.cat([table[before], hot, table[behind]])

    def held(self) -> dict[str, int]:
        """Hot blocks of each request."""
        return {name: len(request.hot) for name, request in self._requests.items()}
