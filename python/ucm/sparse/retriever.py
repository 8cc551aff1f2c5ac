"""When blocks are chosen, and from which step on a choice is used: at once, or a stated number of
steps later.

A request chooses in steps 1, 1+stride, 1+2·stride, ... A choice made from the query of step ``s``
is used from step ``s + lag`` on, and until the next one. The first choice of a request is always
waited for, so there is never a step without one. With a lag the choice is computed beside the model
by threads; when its step has come it is waited for. Nothing is taken from the clock but the bound
of that wait, so ranks, batches and runs agree on every step that is not late; a late one is dense,
which is exact, and is counted. A request that is late starts no further choice until it is
answered, and one that is late often is waited for no longer. While the threads hang (steps are late
and no choice comes at all) nothing is waited for and nothing is given to them, whatever requests
come.

A launch on a device returns before the kernel has run, and every thread has a stream of its own.
What the stream of one thread makes may be read in that of another only once it has got there
(:class:`Mark`). On a CPU a call has done its work when it returns, and nothing is waited for."""

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

#: After this many late steps in a row a choice is taken when it is there, and not waited for.
PATIENCE = 3

_streams = threading.local()


class Mark:
    """All that the calling thread has given to its stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._event = module.Event()
            self._event.record(module.current_stream(device))

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        """A stream of the calling thread, in which everything runs after the mark; at the end it
        has run."""
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
    """The stream of this thread, made when it is first asked for."""
    made = vars(_streams).setdefault("of", {})
    if device not in made:
        made[device] = torch.get_device_module(device).Stream(device=device)
    return made[device]


def take_over(tensor: Tensor) -> None:
    """The calling thread's stream reads a tensor of another one from here on: its memory is not
    given to others before that has run."""
    if not tensor.is_cpu:
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


#: Blocks chosen between the windows, one ascending tensor for each head (one where the heads share
#: a choice).
Middle = list[Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """Decode rows of a layer in one step."""

    request_ids: Sequence[str]
    #: Number of each row's decode step, from 1.
    steps: Sequence[int]
    #: How many blocks each request has.
    blocks: Sequence[int]
    #: Latest queries, ``[r, w, heads, d]``, the newest last; the first ones of a row that has had
    #: fewer are zero.
    query: Tensor
    #: How many of them each row has had.
    queries: Sequence[int]
    #: Rows of the representations, ``[r, most]``, of which each row's first ``blocks`` count.
    table: Tensor

    def pick(self, places: list[int]) -> Rows:
        """Some of these rows, in copies that stay as they are."""
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
    """What was chosen, and from what."""

    middle: Middle
    #: How many blocks there were.
    blocks: int
    #: The step of the query.
    step: int


class Slot:
    """A place for one result: written once by one thread, read by another without a lock."""

    __slots__ = ("_written", "value")

    def __init__(self) -> None:
        self.value: list[Middle] | None = None
        self._written = threading.Event()

    def write(self, value: list[Middle] | None) -> None:
        """Leave the result; None: there is none, it failed."""
        self.value = value  # one reference, which the interpreter replaces in one piece
        self._written.set()

    def written(self, seconds: float) -> bool:
        """Whether the result is there, waiting for it at most so long."""
        return self._written.is_set() or self._written.wait(max(0.0, seconds))


@dataclass(slots=True)
class _Track:
    """Choices of one request in one layer."""

    active: Choice | None = None
    #: (step of the query, number of blocks then, the slot of its batch, its place in that batch),
    #: the oldest first.
    pending: deque[tuple[int, int, Slot, int]] = field(default_factory=deque)
    #: Late steps since the last choice that was in time.
    late: int = 0


class Retriever:
    """Keeps each request's choices, by layer, and makes new ones when they are due. Used by one
    thread."""

    def __init__(
        self,
        policy: Policy,
        find: Find,
        stats: SparseStats,
        *,
        executor: Executor | None = None,
        bound_s: float = 0.2,
    ) -> None:
        """``executor`` runs ``find`` where the policy has a lag; ``bound_s`` is how long the waits
        of one step may take together."""
        self._policy = policy
        self._find = find
        self._stats = stats
        self._executor = executor
        self._bound_s = bound_s
        self._deadline = time.monotonic() + bound_s
        self._tracks: dict[str, dict[int, _Track]] = {}
        self._told = False
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
        """The choice that each row uses in this step; None: none is there in time, so the row is
        dense."""
        tracks = [
            self._tracks.setdefault(name, {}).setdefault(layer, _Track())
            for name in rows.request_ids
        ]
        due = [
            i
            for i, track in enumerate(tracks)
            if not self._hangs and self._is_due(track, rows.steps[i])
        ]
        if due:
            self._retrieve(layer, rows, tracks, due)
        return [self._current(track, step) for track, step in zip(tracks, rows.steps, strict=True)]

    def upcoming(self, request_id: str, layer: int, step: int, ahead: int) -> list[int]:
        """Blocks of the choices of a request that are made, and used in one of the ``ahead`` steps
        after ``step``."""
        track = self._tracks.get(request_id, {}).get(layer)
        found: dict[int, None] = {}
        for asked, _, slot, place in () if track is None else track.pending:
            if (
                asked + self._policy.lag <= step + ahead
                and slot.written(0)
                and slot.value is not None
            ):
                found.update(
                    dict.fromkeys(block for head in slot.value[place] for block in head.tolist())
                )
        return list(found)

    def forget(self, request_id: str) -> None:
        """A request has ended, or computes its prompt again."""
        self._tracks.pop(request_id, None)

    def close(self) -> None:
        """Stop the threads, without waiting for what they are at. Rows are dense from here on,
        where they had no choice."""
        if isinstance(self._executor, ThreadPoolExecutor):
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._tracks.clear()

    def _is_due(self, track: _Track, step: int) -> bool:
        if track.active is None and not track.pending:
            return True
        # of those asked before, while none is late
        most = -(-self._policy.lag // self._policy.stride)
        return (step - 1) % self._policy.stride == 0 and len(track.pending) <= most

    def _retrieve(self, layer: int, rows: Rows, tracks: list[_Track], due: list[int]) -> None:
        slot, picked = Slot(), rows.pick(due)
        for place, i in enumerate(due):
            tracks[i].pending.append((rows.steps[i], rows.blocks[i], slot, place))
        if self._executor is None:
            self._run(slot, layer, picked)
        else:
            # Queries and representations may still be on their way in the stream of the step.
            self._executor.submit(self._run, slot, layer, picked, Mark(picked.query.device))

    def _run(self, slot: Slot, layer: int, rows: Rows, mark: Mark | None = None) -> None:
        """With a mark in another thread: after what the step had given to its stream, and written
        once it has run."""
        found = None
        try:
            with mark.after() if mark is not None else nullcontext():
                found = self._find(layer, rows)
        except Exception:
            self._stats.add(failed=1)
            if not self._told:
                self._told = True
                _log.exception("choosing blocks failed in layer %d; such steps are dense", layer)
        finally:
            slot.write(found)
            self._finished = True

    def _current(self, track: _Track, step: int) -> Choice | None:
        while track.pending:
            asked, blocks, slot, place = track.pending[0]
            if track.active is not None and asked + self._policy.lag > step:
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
            self._activate(track, Choice(slot.value[place], blocks, asked))
        if track.active is None and self._hangs:
            self._stats.add(late=1)
            self._late = True
        if track.active is not None:
            self._stats.add(steps_waited=step - track.active.step, choices_used=1)
        return track.active

    def _activate(self, track: _Track, choice: Choice) -> None:
        for ids in choice.middle:
            take_over(ids)
        before = track.active
        chosen = sum(map(len, choice.middle))
        same = 0
        if before is not None:
            same = sum(
                int(torch.isin(new, old).sum())
                for new, old in zip(choice.middle, before.middle, strict=True)
            )
            self._stats.add(blocks_new=chosen - same, blocks_chosen=chosen)
        track.active = choice


def make_retriever(
    policy: Policy, find: Find, stats: SparseStats, *, threads: int = 2, bound_s: float = 0.2
) -> Retriever:
    """Synchronous for a policy without lag, else beside the model on ``threads`` threads."""
    executor = (
        ThreadPoolExecutor(threads, thread_name_prefix="ucm-retrieve") if policy.lag else None
    )
    return Retriever(policy, find, stats, executor=executor, bound_s=bound_s)
