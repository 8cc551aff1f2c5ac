"""Requests whose middle blocks are in the store, and of which the device holds the chosen ones.

A request that decodes keeps the blocks of its windows where vLLM put them. The others have left the
device, or were never loaded (a stored prompt). It has *hot* blocks instead, each of which holds in
each layer the KV of some chosen block. A chosen block that is not there is loaded, this layer
alone, and waited for within the step's bound. A late block is left out of the step and counted:
only loaded blocks are read.

The representations of blocks that leave are kept in rows behind those of the device, so choosing
reads no KV. Blocks that the next steps will likely choose are brought into the store's upper tiers
too, by a :class:`~ucm.sparse.residency.PrefetchEngine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ucm.errors import BusyError, DeadlineError, TaskError
from ucm.integration.vllm.attention.plan import OffloadChange
from ucm.integration.vllm.connector.guard import throttle
from ucm.profiling import stages, step
from ucm.reasons import is_transient
from ucm.sparse.base import SparseRow
from ucm.sparse.method import BlockSparse
from ucm.sparse.residency import Predictor, PrefetchEngine, PrefetchPriority, Residency
from ucm.sparse.selection import Selection

#: Rows for representations of blocks that left, for each block of the device.
SPARE = 4


def spare_rows(num_blocks: int) -> int:
    """How many blocks may have left a device of ``num_blocks``; the same on both sides."""
    return SPARE * num_blocks


@dataclass(slots=True)
class _Request:
    """One request, some of whose blocks have left."""

    begin: int  # logical: the first that has left
    ids: list[bytes] = field(default_factory=list)  # record ids of those that have left, in order
    rows: list[int] = field(default_factory=list)  # of their representations
    hot: list[int] = field(default_factory=list)  # device blocks
    layers: dict[int, Residency] = field(default_factory=dict)
    predictors: dict[int, Predictor] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The first block behind them."""
        return self.begin + len(self.ids)


@dataclass(slots=True)
class _Wanted:
    """The blocks that a row of the step attends to in one layer."""

    place: int  # in the batch
    request: _Request
    row: SparseRow
    residency: Residency
    kept: list[int]  # logical blocks, ascending
    chosen: bool  # for this row; else they are all resident ones
    last_tokens: int  # of the last one

    @property
    def middle(self) -> list[int]:
        """Those that have left."""
        return [block for block in self.kept if self.request.begin <= block < self.request.end]

    def found(self, table: Tensor) -> Tensor:
        """Device blocks of the kept and resident ones, in the order of the tokens; ``table`` is
        the row's of vLLM."""
        request, there = self.request, self.residency.resident
        before = [block for block in self.kept if block < request.begin]
        behind = [block for block in self.kept if block >= request.end]
        hot = [request.hot[there[block]] for block in self.residency.usable(self.middle)]
        middle = torch.tensor(hot, dtype=table.dtype, device=table.device)
        return torch.cat([table[before], middle, table[behind]])


@dataclass(slots=True)
class _Loading:
    """A load that did not end in its step."""

    task: Any
    store: Any
    wanted: list[tuple[Residency, int]]


class Offload:
    """The offload of one worker."""

    def __init__(
        self,
        method: BlockSparse,
        places: Mapping[int, int],
        store: Callable[[], Any],
        record_ids: Callable[[bytes], Sequence[bytes]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``places``: number of a layer -> its place among those of this rank; ``store`` returns
        the store by layers, None before it is open; ``record_ids`` makes the ids of joined keys on
        this rank."""
        self._method = method
        self._places = dict(places)
        self._store = store
        self._record_ids = record_ids
        self._clock = clock
        self._bound_s = method.settings.retrieval_ms / 1000
        self._deadline = 0.0
        self._requests: dict[str, _Request] = {}
        self._late: list[_Loading] = []
        self._lost: dict[tuple[str, int], None] = {}
        settings = method.settings
        prefetches = settings.prefetch_enabled
        self._prefetch = PrefetchEngine(settings, self._bring_up) if prefetches else None
        #: Ids of blocks that will likely be chosen soon, the likeliest of each layer first, by
        #: request in the order of the step's rows.
        self._foreseen: dict[str, dict[bytes, None]] = {}

    # Steps
    # ----------------------------------------------------------------------------------------------

    def begin_step(self, changes: Sequence[OffloadChange], ended: Sequence[str]) -> None:
        """Process blocks that have left, or will be written by others, before the step."""
        given_back: set[int] = set()  # layers of requests that have ended, by identity
        for request_id in ended:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._method.request_finished_in_worker(request_id)
                given_back.update(map(id, request.layers.values()))
                if self._prefetch is not None:
                    self._prefetch.cancel(request_id)
        self._deadline = self._clock() + self._bound_s
        self._late = [each for each in self._late if not self._ended(each, given_back)]
        for change in changes:
            self._change(change)

    def end_step(self) -> None:
        """The model has run: prefetch the likely choices of the next steps, those of the first rows
        first."""
        foreseen, self._foreseen = self._foreseen, {}
        if self._prefetch is None:
            return
        most = self._method.settings.prefetch_cache_size
        for position, (request_id, ids) in enumerate(foreseen.items()):
            priority = PrefetchPriority.compute_priority(None, 0, position)
            self._prefetch.submit_prefetch(request_id, list(ids)[:most], priority)

    def close(self) -> None:
        """The engine ends."""
        if self._prefetch is not None:
            self._prefetch.shutdown()

    def _ended(self, loading: _Loading, given_back: set[int]) -> bool:
        """Whether a late load has ended. One that writes into blocks that are given to others in
        this step is waited for: its time is over, so at most a copy is under way."""
        if not any(id(residency) in given_back for residency, _ in loading.wanted):
            return self._settle(loading, 0.0)
        if self._settle(loading, self._bound_s):
            return True
        text = "a load did not end in its time, and its blocks are given to other requests"
        throttle.warning("late", text)
        return False

    def _change(self, change: OffloadChange) -> None:
        request = self._requests.setdefault(change.request, _Request(change.begin))
        if change.unread:
            request.ids += self._record_ids(change.unread)
            request.rows += self._method.store.reserve(len(request.ids))
            self._method.set_rep_rows(change.request, [0] * request.begin + request.rows)
        if len(change.blocks):
            request.ids += self._record_ids(change.keys)
            request.rows += self._method.store.adopt(change.blocks)
            # The first window is never scored, so any row will do for it.
            self._method.set_rep_rows(change.request, [0] * request.begin + request.rows)
            self._check_representations(change.request, request, len(change.blocks))
        request.hot += change.hot
        for residency in request.layers.values():
            residency.capacity = len(request.hot)

    def _check_representations(self, name: str, request: _Request, new: int) -> None:
        """Of the ``new`` last blocks that have left, one without a representation can never be
        chosen: it counts as lost (it was filled by another connector, or could not be encoded), and
        its request computes it again."""
        rows = request.rows[-new:]
        missing = set(self._method.store.missing(rows))
        if missing:
            first = next(place for place, row in enumerate(rows) if row in missing)
            self._lost[name, request.end - new + first] = None
            text = "%d blocks left without a representation: computed again"
            throttle.warning("unselectable", text, len(missing))

    def rows_of(self, request_id: str) -> Sequence[int]:
        """The rows, in order, of representations of a request's blocks beyond the device."""
        request = self._requests.get(request_id)
        return () if request is None else request.rows

    @property
    def holds_any(self) -> bool:
        """Whether blocks of any request have left."""
        return bool(self._requests)

    def has_any(self, rows: Sequence[SparseRow | None]) -> bool:
        """Whether blocks of any of these have left."""
        names = (row.request_id for row in rows if row is not None)
        return bool(self._requests) and any(name in self._requests for name in names)

    # Layers
    # ----------------------------------------------------------------------------------------------

    def place(
        self,
        layer: int,
        rows: Sequence[SparseRow | None],
        selection: Selection | None,
        original: Tensor,
        table: Tensor,
        lens: Tensor,
    ) -> None:
        """Write the blocks of rows with offloaded blocks into ``table`` and ``lens``, which are the
        caller's own.

        ``selection``: the choice for these rows; a row that is not in it, or whose choice is late,
        keeps its windows and its resident blocks. ``rows``: None for an unknown request. ``original
        [rows, N]`` is vLLM's block table, which is right outside of the offloaded blocks.
        """
        size = self._method.selector.geometry.block_size
        chose = [] if selection is None else selection.rows.tolist()
        numbers = {int(row): number for number, row in enumerate(chose)}
        wanted: list[_Wanted] = []
        for place, row in enumerate(rows[: len(original)]):
            request = None if row is None else self._requests.get(row.request_id)
            if row is None or request is None:
                continue
            blocks = -(-row.tokens // size)
            residency = self._resident(request, layer)
            number = numbers.get(place)
            kept = [] if number is None or selection is None else selection.kept(number).tolist()
            chosen = 0 < len(kept) < blocks
            if not chosen:
                outside = [*range(request.begin), *range(request.end, blocks)]
                kept = sorted([*outside, *residency.resident])
            tokens = (row.tokens - 1) % size + 1
            wanted.append(_Wanted(place, request, row, residency, kept, chosen, tokens))
        self._bring(layer, wanted)
        for each in wanted:
            self._foresee(layer, each)
            found = each.found(original[each.place])
            table[each.place, : len(found)] = found
            lens[each.place] = (len(found) - 1) * size + each.last_tokens

    def _resident(self, request: _Request, layer: int) -> Residency:
        if layer not in request.layers:
            eviction, stats = self._method.settings.eviction, self._method.stats
            request.layers[layer] = Residency(len(request.hot), eviction=eviction, stats=stats)
            request.predictors[layer] = Predictor(stats=stats)
        return request.layers[layer]

    def _bring(self, layer: int, wanted: Sequence[_Wanted]) -> None:
        """Load wanted blocks that are not resident, of all rows at once, and wait for them. Blocks
        that are not loaded in the step's time are left out."""
        ids: list[bytes] = []
        targets: list[int] = []
        loads: list[tuple[Residency, int]] = []
        for each in wanted:
            request, predictor = each.request, each.request.predictors[layer]
            # A choice says nothing of its scores: a block's weight is how often it was chosen.
            middle = predictor.by_use(each.middle)
            if each.chosen:
                predictor.record(middle)
            for block, slot in each.residency.want(middle):
                ids.append(request.ids[block - request.begin])
                targets.append(request.hot[slot])
                loads.append((each.residency, block))
        if not loads:
            return
        began = self._clock()
        store, left = self._store(), self._deadline - began
        task = None
        if store is not None and left > 0:
            place, slots = self._places[layer], np.array(targets, dtype=np.int64)
            try:
                task = store.load_layer(place, ids, slots, left)
            except Exception as error:
                text = "blocks could not be loaded, and are left out: %r"
                throttle.warning("hot blocks", text, error)
        if task is None:
            for residency, block in loads:
                residency.failed(block)
            return
        loading = _Loading(task, store, loads)
        if not self._settle(loading, left):
            self._late.append(loading)
        step("load layer", began, self._clock(), layer=layer, blocks=len(loads))
        stages("layer", store, task, began, layer=layer, blocks=len(loads))

    def _settle(self, loading: _Loading, seconds: float) -> bool:
        """Wait up to ``seconds`` for a load, and process its result; False: it has not ended."""
        failed: set[int] = set()
        lost: set[int] = set()
        try:
            if seconds <= 0 and not loading.store.check(loading.task):
                return False
            loading.store.wait(loading.task, max(seconds, 0.001))
        except TaskError as error:
            failed = set(error.failures) or set(range(len(loading.wanted)))
            lost = {row for row, why in error.failures.items() if not is_transient(why)}
        except (DeadlineError, BusyError):  # it has not ended
            return False
        except Exception as error:
            text = "blocks could not be loaded, and are left out: %r"
            throttle.warning("hot blocks", text, error)
            failed = set(range(len(loading.wanted)))
        for row, (residency, block) in enumerate(loading.wanted):
            if row in failed:
                residency.failed(block)
                if row in lost:
                    self._note_lost(residency, block)
            else:
                residency.arrived(block)
        return True

    def _foresee(self, layer: int, each: _Wanted) -> None:
        """Note the likely next choices of a request in a layer that are not resident: with a lag
        those already made for later steps, else the prediction."""
        if self._prefetch is None:
            return
        request, row, there = each.request, each.row, each.residency.resident
        ahead = self._method.settings.prefetch_ahead
        likely = self._method.retriever.upcoming(row.request_id, layer, row.step, ahead)
        found = self._foreseen.setdefault(row.request_id, {})
        for block in likely or request.predictors[layer].predict():
            if request.begin <= block < request.end and block not in there:
                found[request.ids[block - request.begin]] = None

    def _bring_up(self, ids: Sequence[bytes | str]) -> int:
        """Have the store prefetch blocks, on a thread of the prefetch engine; returns their
        number."""
        store = self._store()
        taken = 0 if store is None or not ids else store.prefetch(list(ids), "next_batch") or 0
        self._method.stats.add(blocks_prefetched=taken)
        return int(taken)

    def _note_lost(self, residency: Residency, block: int) -> None:
        """The record of a block is missing or damaged: its request computes it again."""
        for name, request in self._requests.items():
            if any(each is residency for each in request.layers.values()):
                self._lost[name, block] = None

    def take_lost(self) -> list[tuple[str, int]]:
        """The blocks found lost since the last call, by request and logical number."""
        lost, self._lost = list(self._lost), {}
        return lost

    def held(self) -> dict[str, int]:
        """Hot blocks of each request."""
        return {name: len(request.hot) for name, request in self._requests.items()}
