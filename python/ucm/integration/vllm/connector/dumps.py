"""Offering blocks to the store: jobs in chain order, within what the workers can take, their sources pinned.

A job goes to every rank. Its device blocks are referenced in vLLM's block pool from the moment it is planned until
every rank said *staged*, so neither the end nor the preemption of the request can hand them to someone else; the job
is kept until every rank said how it ended.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucm.integration.vllm.connector.health import RanksHealth
from ucm.integration.vllm.connector.metadata import Dump, DumpResult, RankReport, join_keys
from ucm.integration.vllm.connector.presence import Presence
from ucm.integration.vllm.connector.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: Most blocks in one job.
JOB_BLOCKS = 64
#: Most blocks being dumped at once, whatever the workers say.
FLIGHT_BLOCKS = 4096
#: Pauses after a store refused for want of room, and after it failed (doubled each time up to the last), in seconds.
BUSY_PAUSE_S, FAIL_PAUSE_S, FAIL_PAUSE_MAX_S = 0.02, 1.0, 30.0
#: An idle engine is kept stepping for a dump at most so long, in seconds, while its sources are pinned; and once they
#: are not, for so long to hear that it is published or can be read here. What publishes later (a segment is sealed
#: after a second) is told with the next request's steps: an engine that steps keeps processors busy.
DRAIN_S, NEWS_S = 60.0, 0.05


@dataclass(slots=True)
class _Job:
    number: int
    keys: list[bytes]
    first: int
    blocks: list[KVCacheBlock]
    pinned: bool = True
    staged: set[int] = field(default_factory=set)
    done: dict[int, DumpResult] = field(default_factory=dict)


class DumpPlanner:
    """Plans dump jobs and follows them to their end on every rank."""

    def __init__(self, presence: Presence, health: RanksHealth, clock: Callable[[], float] = time.monotonic) -> None:
        self._presence, self._health = presence, health
        self._clock = clock
        self._numbers = itertools.count(1)
        self._pool: BlockPool | None = None
        self._ranks: frozenset[int] = frozenset()
        self._free: dict[int, int | None] = {}
        self._seen: dict[int, int] = {}
        self._jobs: dict[int, _Job] = {}
        self._pinned = 0
        self._hold_until = self._failing_until = 0.0
        self._fail_pause = FAIL_PAUSE_S
        self._last_planned = 0.0
        self.published_blocks = 0
        self.failed_blocks = 0

    def bind(self, pool: BlockPool) -> None:
        """The pool whose blocks are pinned."""
        self._pool = pool

    def open(self, ranks: Iterable[int]) -> None:
        """Every rank's store is open; jobs need an answer from each of these."""
        self._ranks = frozenset(ranks)

    @property
    def in_flight(self) -> bool:
        """Whether some dump has not ended everywhere and is worth keeping an idle engine awake for."""
        return bool(self._jobs) and self._clock() - self._last_planned < (DRAIN_S if self._pinned else NEWS_S)

    def room(self) -> int:
        """Blocks that may be planned now: none while some rank could not store its part."""
        if self._pool is None or not self._ranks or self._clock() < self._hold_until or not self._health.all_healthy:
            return 0
        room: int = min(FLIGHT_BLOCKS, max(1, self._pool.num_gpu_blocks // 2)) - self._pinned
        for rank in self._ranks:
            free = self._free.get(rank)
            if free is not None:
                seen = self._seen.get(rank, 0)
                room = min(room, free - sum(len(j.keys) for j in self._jobs.values() if j.number > seen))
        return max(room, 0)

    def plan(self, tracked: Tracked, upto: int, blocks: Sequence[KVCacheBlock], room: int) -> list[Dump]:
        """Offer what ``tracked`` holds of its first ``upto`` blocks, at most ``room`` of them; advances its cursor."""
        plans: list[Dump] = []
        at = tracked.cursor
        upto = min(upto, len(blocks))
        while at < upto:
            if not self._offerable(tracked, at):
                at += 1
                continue
            end = at
            while end < upto and end - at < min(JOB_BLOCKS, room) and self._offerable(tracked, end):
                if blocks[end].is_null:
                    break
                end += 1
            if end == at:
                break  # no room left, or not a block of ours: the chain stops here
            plans.append(self._job(tracked, at, end, blocks))
            room -= end - at
            at = end
        tracked.cursor = at
        return plans

    def _offerable(self, tracked: Tracked, at: int) -> bool:
        key = tracked.keys[at]
        return self._presence.offerable(key) or (at in tracked.audit and not self._presence.is_writing(key))

    def _job(self, tracked: Tracked, start: int, end: int, blocks: Sequence[KVCacheBlock]) -> Dump:
        assert self._pool is not None  # room() was above zero
        keys, pinned = tracked.keys[start:end], list(blocks[start:end])
        job = _Job(next(self._numbers), keys, start, pinned)
        self._pool.touch(pinned)
        self._pinned += len(pinned)
        self._jobs[job.number] = job
        self._presence.writing(keys, job.number)
        self._last_planned = self._clock()
        return Dump(
            job=job.number,
            request=tracked.request.request_id,
            first=start,
            parent=tracked.keys[start - 1] if start else b"",
            keys=join_keys(keys),
            blocks=np.fromiter((block.block_id for block in pinned), dtype=np.int64, count=len(pinned)),
            audit=start < tracked.audit.stop and end > tracked.audit.start,
            refused=tuple(row for row, key in enumerate(keys) if self._presence.is_refused(key)),
        )

    def report(self, rank: RankReport, live: Iterable[Tracked]) -> None:
        """A rank's news: releases what every rank has staged, settles what every rank has ended."""
        self._free[rank.rank] = rank.free_slots
        self._seen[rank.rank] = max(self._seen.get(rank.rank, 0), rank.last_job)
        for number in rank.staged:
            if job := self._jobs.get(number):
                job.staged.add(rank.rank)
                self._release(job)
        for result in rank.done:
            if job := self._jobs.get(result.job):
                job.staged.add(rank.rank)
                job.done[rank.rank] = result
                self._release(job)
                if job.done.keys() >= self._ranks:
                    del self._jobs[job.number]
                    self._settle(job, live)

    def _release(self, job: _Job) -> None:
        if job.pinned and job.staged >= self._ranks:
            assert self._pool is not None  # it was pinned there
            job.pinned = False
            self._pinned -= len(job.blocks)
            self._pool.free_blocks(reversed(job.blocks))  # the end of a chain is evicted first
            job.blocks = []

    def _settle(self, job: _Job, live: Iterable[Tracked]) -> None:
        busy = any(result.busy for result in job.done.values())
        failed = {row for result in job.done.values() for row in result.failed}
        refused = {row for result in job.done.values() if not result.busy for row in result.failed}
        for row, key in enumerate(job.keys):
            if row in failed:
                self._presence.not_written(key, refuse=row in refused)
            else:
                self._presence.written(key)
        self.published_blocks += len(job.keys) - len(failed)
        self.failed_blocks += len(refused)
        if not failed:
            self._fail_pause = FAIL_PAUSE_S
            return
        now = self._clock()
        if refused and now >= self._failing_until:  # jobs planned before the pause say nothing new
            self._failing_until = now + self._fail_pause
            self._fail_pause = min(self._fail_pause * 2, FAIL_PAUSE_MAX_S)
        self._hold_until = max(self._hold_until, self._failing_until, now + BUSY_PAUSE_S if busy else 0.0)
        at = job.first + min(failed)
        key = job.keys[min(failed)]
        for tracked in live:  # whoever holds the block offers it again
            if tracked.cursor > at and at < len(tracked.keys) and tracked.keys[at] == key:
                tracked.cursor = at
