"""Requests whose middle blocks are in the store, and of which the device holds those that are
chosen.

A request that decodes keeps the blocks of its windows where vLLM put them. The others have left the
device, or were never loaded (a prompt that was stored before). It was given *hot* blocks for them,
and in each layer a hot block holds the KV of whichever block was chosen there. What is chosen and
not there is loaded, this layer alone, and waited for within the step's bound. A block that still is
not there is left out of the step and counted: nothing is ever read that was not loaded.

The representations of blocks that leave are kept in rows behind those of the device, so choosing
reads no KV. What the next steps will likely choose is brought into the store's upper tiers
besides, by a :class:`~ucm.sparse.residency.PrefetchEngine`.
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
from ucm.reasons import is_transient
from ucm.sparse.base import SparseRow
from ucm.sparse.method import BlockSparse
from ucm.sparse.residency import Predictor, PrefetchEngine, PrefetchPriority, Residency
from ucm.sparse.selection import Selection

#: Rows for representations of blocks that left, for each block of the device.
SPARE = 4


def spare_rows(num_blocks: int) -> int:
    """How many blocks may have left a device of ``num_blocks``: the scheduler side and the workers
    must agree."""
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
class _Wanted:
    """What a row of the step is to attend to in one layer."""

    place: int  # in the batch
    request: _Request
    row: SparseRow
    residency: Residency
    kept: list[int]  # logical blocks, ascending
    chosen: bool  # for this row, and not merely there
    last_tokens: int  # of the last one

    @property
    def middle(self) -> list[int]:
        """Those that have left."""
        return [block for block in self.kept if self.request.begin <= block < self.request.end]

    def found(self, table: Tensor) -> Tensor:
        """Device blocks of what is kept and there, in the order of the tokens; ``table`` is the
        row's of vLLM."""
        request, there = self.request, self.residency.resident
        usable = self.residency.usable(self.middle)
        before = [block for block in self.kept if block < request.begin]
        behind = [block for block in self.kept if block >= request.end]
        hot = torch.tensor(
            [request.hot[there[block]] for block in usable], dtype=table.dtype, device=table.device
        )
        return torch.cat([table[before], hot, table[behind]])


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
        """``places``: number of a layer -> its place among those of this rank; ``store`` gives the
        store by layers, None while it is not open; ``record_ids`` makes the ids of joined keys on
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
        self._prefetch = (
            PrefetchEngine(settings, self._bring_up) if settings.prefetch_enabled else None
        )
        #: Ids of blocks that will likely be chosen soon, the likeliest of each layer first, by
        #: request in the order of the step's rows.
        self._foreseen: dict[str, dict[bytes, None]] = {}

    # Steps
    # ----------------------------------------------------------------------------------------------

    def begin_step(self, changes: Sequence[OffloadChange], ended: Sequence[str]) -> None:
        """Blocks have left, or are about to be written to by others: before anything of the step is
        computed."""
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
        """The model has run: have brought up what the next steps will likely choose, of the first
        rows first."""
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
        """Whether a late load has ended. Where it writes into blocks that are given to others in
        this step it is waited for: its time is over, so no more than a copy can be under way."""
        if not any(id(residency) in given_back for residency, _ in loading.wanted):
            return self._settle(loading, 0.0)
        if self._settle(loading, self._bound_s):
            return True
        throttle.warning(
            "late", "a load did not end in its time, and its blocks are given to other requests"
        )
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
            # The first window is never scored, so it does not matter what stands there.
            self._method.set_rep_rows(change.request, [0] * request.begin + request.rows)
            self._check_representations(change.request, request, len(change.blocks))
        request.hot += change.hot
        for residency in request.layers.values():
            residency.capacity = len(request.hot)

    def _check_representations(self, name: str, request: _Request, new: int) -> None:
        """Of the ``new`` last blocks that have left: one without a representation can never be
        chosen, so it is as good as lost (it was filled by another connector, or could not be
        encoded), and its request is to compute it."""
        rows = request.rows[-new:]
        missing = set(self._method.store.missing(rows))
        if missing:
            first = next(place for place, row in enumerate(rows) if row in missing)
            self._lost[name, request.end - new + first] = None
            throttle.warning(
                "unselectable",
                "%d blocks left without a representation: computed again",
                len(missing),
            )

    def rows_of(self, request_id: str) -> Sequence[int]:
        """Where the representations of a request's blocks are that are not on the device, in their
        order."""
        request = self._requests.get(request_id)
        return () if request is None else request.rows

    @property
    def holds_any(self) -> bool:
        """Whether blocks of any request have left."""
        return bool(self._requests)

    def has_any(self, rows: Sequence[SparseRow | None]) -> bool:
        """Whether blocks of any of these have left."""
        return bool(self._requests) and any(
            row is not None and row.request_id in self._requests for row in rows
        )

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
        """Write into ``table`` and ``lens``, which are the caller's own, what rows attend to whose
        blocks have left.

        ``selection``: what was chosen of their blocks; a row that is not in it, or that it has keep
        all (its choice is late), keeps its windows and what is there. ``rows``: None for one that
        no request is known of. ``original [rows, N]`` is vLLM's block table, which is right outside
        of what has left.
        """
        size = self._method.selector.geometry.block_size
        numbers = (
            {}
            if selection is None
            else {int(row): i for i, row in enumerate(selection.rows.tolist())}
        )
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
                kept = sorted(
                    [*range(request.begin), *residency.resident, *range(request.end, blocks)]
                )
            wanted.append(
                _Wanted(place, request, row, residency, kept, chosen, (row.tokens - 1) % size + 1)
            )
        self._bring(layer, wanted)
        for each in wanted:
            self._foresee(layer, each)
            found = each.found(original[each.place])
            table[each.place, : len(found)] = found
            lens[each.place] = (len(found) - 1) * size + each.last_tokens

    def _resident(self, request: _Request, layer: int) -> Residency:
        if layer not in request.layers:
            settings = self._method.settings
            request.layers[layer] = Residency(
                len(request.hot), eviction=settings.eviction, stats=self._method.stats
            )
            request.predictors[layer] = Predictor(stats=self._method.stats)
        return request.layers[layer]

    def _bring(self, layer: int, wanted: Sequence[_Wanted]) -> None:
        """Load what is wanted and not there, of all rows at once, and wait for it. What does not
        come before the step's time is over is left out, and so is what had no time at all."""
        ids: list[bytes] = []
        targets: list[int] = []
        loads: list[tuple[Residency, int]] = []
        for each in wanted:
            request, predictor = each.request, each.request.predictors[layer]
            # What was chosen says nothing of its scores: how much a block matters is how often it
            # was chosen.
            middle = predictor.by_use(each.middle)
            if each.chosen:
                predictor.record(middle)
            for block, slot in each.residency.want(middle):
                ids.append(request.ids[block - request.begin])
                targets.append(request.hot[slot])
                loads.append((each.residency, block))
        if not loads:
            return
        store, left = self._store(), self._deadline - self._clock()
        task = None
        if store is not None and left > 0:
            try:
                task = store.load_layer(
                    self._places[layer], ids, np.array(targets, dtype=np.int64), left
                )
            except Exception as error:
                throttle.warning(
                    "hot blocks", "blocks could not be loaded, and are left out: %r", error
                )
        if task is None:
            for residency, block in loads:
                residency.failed(block)
            return
        loading = _Loading(task, store, loads)
        if not self._settle(loading, left):
            self._late.append(loading)

    def _settle(self, loading: _Loading, seconds: float) -> bool:
        """Wait so long for a load, and note what it brought; False: it has not ended."""
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
            throttle.warning(
                "hot blocks", "blocks could not be loaded, and are left out: %r", error
            )
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
        """Note what a request will likely choose next in a layer, and has not there: the choices
        that are made and wait for their step, where there is a lag, else what its predictor
        says."""
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
        """Have the store bring blocks into its upper tiers, on a thread of the prefetch engine; how
        many it does."""
        store = self._store()
        taken = 0 if store is None or not ids else store.prefetch(list(ids), "next_batch") or 0
        self._method.stats.add(blocks_prefetched=taken)
        return int(taken)

    def _note_lost(self, residency: Residency, block: int) -> None:
        """The record of a block is missing or damaged: trying again is of no use, and its request
        is to compute it."""
        for name, request in self._requests.items():
            if any(each is residency for each in request.layers.values()):
                self._lost[name, block] = None

    def take_lost(self) -> list[tuple[str, int]]:
        """The blocks, by request and logical number, of which that was noticed since the last
        call."""
        lost, self._lost = list(self._lost), {}
        return lost

    def held(self) -> dict[str, int]:
        """Hot blocks of each request."""
        return {name: len(request.hot) for name, request in self._requests.items()}
