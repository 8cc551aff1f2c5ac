"""When blocks are chosen, and from which step on a choice is used: at once, or a fixed number of
steps later.

A request chooses in steps 1, 1+stride, 1+2·stride, ... A choice made from the query of step ``s``
is used from step ``s + lag`` on, and until the next one. The first choice of a request is always
waited for. With a lag the choice is computed beside the model by threads, and waited for in its
step. Only the bound of that wait depends on the clock, so ranks, batches and runs agree on every
step that is not late; a late one is dense, which is exact, and is counted. A late request starts no
further choice until it has its answer, and one that is late often is not waited for. While the
threads hang (steps are late and no choice is made at all) nothing is waited for and no choice is
started.

A launch on a device returns before the kernel has run, and every thread has a stream of its own.
The results of one thread's stream may be read in another only once they are written
(:class:`Mark`). On a CPU a call has done its work when it returns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ucm.sparse.base import SparseStats
from ucm.sparse.policy import Policy

_log = logging.getLogger("ucm.sparse")

#: After this many late steps in a row a choice is used when it is there, and not waited for.
PATIENCE = 3

_streams = threading.local()


class Mark:
    """The work that the calling thread has given to its stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._event = module.Event()
            self._event.record(module.current_stream(device))

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        """A stream of the calling thread, whose work runs after the mark; it has run at the end."""
        if self._event is None:
            yield
            return
        module = torch.get_device_module(self._device)
        stream = _stream_of(self._device)
        with module.stream(stream):
            stream.wait_event(self._event)
            try:
                yield
            finally:
                stream.synchronize()


def _stream_of(device: torch.device) -> Any:
    """The stream of this thread, made at the first call."""
    made = vars(_streams).setdefault("of", {})
    if device not in made:
        made[device] = torch.get_device_module(device).Stream(device=device)
    return made[device]


def take_over(tensor: Tensor) -> None:
    """The calling thread's stream reads a tensor of another one from here on: its memory is not
    reused before that has run."""
    if not tensor.is_cpu:
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


#: Blocks chosen between the windows, one ascending tensor for each head (one for a shared choice).
Middle = list[Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """Decode rows of a layer in one step."""

    request_ids: Sequence[str]
    #: Number of each row's decode step, from 1.
    steps: Sequence[int]
    #: Blocks of each request.
    blocks: Sequence[int]
    #: Latest queries, ``[r, w, heads, d]``, the newest last; the first ones of a row that has had
    #: fewer are zero.
    query: Tensor
    #: Number of queries of each row.
    queries: Sequence[int]
    #: Rows of the representations, ``[r, most]``, of which each row's first ``blocks`` count.
    table: Tensor

    def pick(self, places: list[int]) -> Rows:
        """Copies of some of these rows."""
        at = torch.tensor(places, device=self.query.device)
        return Rows(
            [self.request_ids[i] for i in places],
            [self.steps[i] for i in places],
            [self.blocks[i] for i in places],
            self.query.index_select(0, at),
            [self.queries[i] for i in places],
            self.table.index_select(0, at.to(self.table.device)),
        )


#: Computes the choices of some rows of a layer.
Find = Callable[[int, Rows], list[Middle]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of blocks."""

    middle: Middle
    #: Blocks of the request at that time.
    blocks: int
    #: The step of the query.
    step: int


class Slot:
    """One result: written once by one thread, read by another without a lock."""

    __slots__ = ("_written", "value")

    def __init__(self) -> None:
        self.value: list[Middle] | None = None
        self._written = threading.Event()

    def write(self, value: list[Middle] | None) -> None:
        """Set the result; None: the choice failed."""
        self.value = value  # one reference, which the interpreter replaces atomically
        self._written.set()

    def written(self, seconds: float) -> bool:
        """Whether the result is there, after a wait of at most ``seconds``."""
        return self._written.is_set() or self._written.wait(max(0.0, seconds))


@dataclass(slots=True)
class _Track:
    """Choices of one request in one layer."""

    active: Choice | None = None
    #: (step of the query, blocks then, the slot of its batch, its place in it), the oldest first.
    pending: deque[tuple[int, int, Slot, int]] = field(default_factory=deque)
    #: Late steps since the last choice that was in time.
    late: int = 0


class Retriever:
    """Keeps each request's choices, by layer, and makes new ones when due. For one thread."""

    def __init__(
        self,
        policy: Policy,
        find: Find,
        stats: SparseStats,
        *,
        executor: Executor | None = None,
        bound_s: float = 0.2,
    ) -> None:
        """``executor`` runs ``find`` where the policy has a lag; ``bound_s`` bounds all waits of
        one step, in seconds."""
        self._policy = policy
        self._find = find
        self._stats = stats
        self._executor = executor
        self._bound_s = bound_s
        self._deadline = time.monotonic() + bound_s
        self._tracks: dict[str, dict[int, _Track]] = {}
        self._logged = False
        self._late = False  # whether this step is
        self._late_steps = 0  # in a row, during which the threads finished nothing
        self._finished = False  # whether they have since

    def begin_step(self) -> None:
        """A step begins: its waits share one bound."""
        self._deadline = time.monotonic() + self._bound_s
        if self._finished:
            self._finished, self._late_steps = False, 0
        self._late_steps += self._late
        self._late = False

    @property
    def _hangs(self) -> bool:
        return self._late_steps >= PATIENCE and not self._finished

    def step(self, layer: int, rows: Rows) -> list[Choice | None]:
        """The choice that each row uses in this step; None: late, so the row is dense."""
        tracks = [
            self._tracks.setdefault(n, {}).setdefault(layer, _Track()) for n in rows.request_ids
        ]
        every = list(zip(tracks, rows.steps, strict=True))
        due = [i for i, (track, step) in enumerate(every) if self._is_due(track, step)]
        if due and not self._hangs:
            self._retrieve(layer, rows, tracks, due)
        return [self._current(track, step) for track, step in every]

    def upcoming(self, request_id: str, layer: int, step: int, ahead: int) -> list[int]:
        """Blocks of a request's choices that are made, and used in one of the ``ahead`` steps after
        ``step``."""
        track = self._tracks.get(request_id, {}).get(layer)
        found: dict[int, None] = {}
        for at, _, slot, place in () if track is None else track.pending:
            soon = at + self._policy.lag <= step + ahead
            if soon and slot.written(0) and slot.value is not None:
                blocks = (block for head in slot.value[place] for block in head.tolist())
                found.update(dict.fromkeys(blocks))
        return list(found)

    def forget(self, request_id: str) -> None:
        """A request has ended, or computes its prompt again."""
        self._tracks.pop(request_id, None)

    def close(self) -> None:
        """Stop the threads, without waiting. Rows without a choice are dense from here on."""
        if isinstance(self._executor, ThreadPoolExecutor):
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._tracks.clear()

    def _is_due(self, track: _Track, step: int) -> bool:
        if track.active is None and not track.pending:
            return True
        # pending choices while none is late
        most = -(-self._policy.lag // self._policy.stride)
        return (step - 1) % self._policy.stride == 0 and len(track.pending) <= most

    def _retrieve(self, layer: int, rows: Rows, tracks: list[_Track], due: list[int]) -> None:
        slot, picked = Slot(), rows.pick(due)
        for place, i in enumerate(due):
            tracks[i].pending.append((rows.steps[i], rows.blocks[i], slot, place))
        if self._executor is None:
            self._run(slot, layer, picked)
        else:
            # Queries and representations may still be computed in the stream of the step.
            self._executor.submit(self._run, slot, layer, picked, Mark(picked.query.device))

    def _run(self, slot: Slot, layer: int, rows: Rows, mark: Mark | None = None) -> None:
        """With a mark in another thread: after the step's work before it; written once it has
        run."""
        found = None
        try:
            with mark.after() if mark is not None else nullcontext():
                found = self._find(layer, rows)
        except Exception:
            self._stats.add(failed=1)
            if not self._logged:
                self._logged = True
                _log.exception("choosing blocks failed in layer %d; such steps are dense", layer)
        finally:
            slot.write(found)
            self._finished = True

    def _current(self, track: _Track, step: int) -> Choice | None:
        while track.pending:
            at, blocks, slot, place = track.pending[0]
            if track.active is not None and at + self._policy.lag > step:
                break
            patient = track.late < PATIENCE and not self._hangs
            if not slot.written(self._deadline - time.monotonic() if patient else 0):
                self._stats.add(late=1)
                track.late += 1
                self._late = True
                return None
            track.pending.popleft()
            track.late = 0
            if slot.value is None:
                track.active = None
                continue
            self._activate(track, Choice(slot.value[place], blocks, at))
        if track.active is None and self._hangs:
            self._stats.add(late=1)
            self._late = True
        if track.active is not None:
            self._stats.add(steps_waited=step - track.active.step, choices_used=1)
        return track.active

    def _activate(self, track: _Track, choice: Choice) -> None:
        for ids in choice.middle:
            take_over(ids)
        before, chosen = track.active, sum(map(len, choice.middle))
        if before is not None:
            pairs = zip(choice.middle, before.middle, strict=True)
            same = sum(int(torch.isin(new, old).sum()) for new, old in pairs)
            self._stats.add(blocks_new=chosen - same, blocks_chosen=chosen)
        track.active = choice


def make_retriever(
    policy: Policy, find: Find, stats: SparseStats, *, threads: int = 2, bound_s: float = 0.2
) -> Retriever:
    """Synchronous for a policy without lag, else beside the model on ``threads`` threads."""
    executor = ThreadPoolExecutor(threads, "ucm-retrieve") if policy.lag else None
    return Retriever(policy, find, stats, executor=executor, bound_s=bound_s)
