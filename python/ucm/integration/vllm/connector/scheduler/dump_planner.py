"""Plans dumps: jobs in chain order, within what the workers can take, followed to their end on
every rank.

A job goes to every rank and is kept until every rank reported how it ended. A dump holds no
reference to vLLM's blocks: their content stays until a step writes it, and the connector sees every
step before it runs. While the request lives, the blocks are its own; later they may be free, or
shared by requests that use the same content. When vLLM hands one out to be written while some rank
may still have to read it, the job is *flushed*: the ranks read it before that step begins. That is
a copy in memory which has usually been done by then. So a stopped engine, a reset of the prefix
cache or a pause never meets a block that a dump keeps, and no step is taken just to learn how a
dump ended: the steps of the next request report it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucm.integration.vllm.connector.metadata import Dump, DumpResult, RankReport, join_keys
from ucm.integration.vllm.connector.scheduler.block_tracker import BlockTracker
from ucm.integration.vllm.connector.scheduler.rank_health import RankHealth
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: Most blocks in one job.
JOB_BLOCKS = 64
#: Most blocks being dumped at once, whatever the workers say.
FLIGHT_BLOCKS = 4096
#: Pauses after a store refused for want of room, and after it failed (doubled each time up to the
#: last), in seconds.
BUSY_PAUSE_S, FAIL_PAUSE_S, FAIL_PAUSE_MAX_S = 0.02, 1.0, 30.0
#: How long the ranks' last report of their room counts in an idle engine, in seconds: no further
#: report arrives, and what was on its way has long been written. A rank that has no room after all
#: refuses at once.
KNOWN_S = 1.0


@dataclass(slots=True)
class _Job:
    number: int
    keys: list[bytes]
    first: int
    blocks: list[KVCacheBlock]  # until every rank has read them
    hashes: list[object]  # vLLM's, of the blocks
    owner: RequestTracker
    preemptions: int  # of the owner
    staged: set[int] = field(default_factory=set)
    done: dict[int, DumpResult] = field(default_factory=dict)


class DumpPlanner:
    """Plans dump jobs and follows them to their end on every rank."""

    def __init__(
        self,
        block_tracker: BlockTracker,
        health: RankHealth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_tracker, self._health = block_tracker, health
        self._clock = clock
        self._numbers = itertools.count(1)
        self._pool: BlockPool | None = None
        self._ranks: frozenset[int] = frozenset()
        self._free: dict[int, int | None] = {}
        self._seen: dict[int, int] = {}
        self._jobs: dict[int, _Job] = {}
        self._unread = 0  # blocks that not every rank has staged
        self._hold_until = self._failing_until = 0.0
        self._fail_pause = FAIL_PAUSE_S
        self._heard = self._asked = float("-inf")
        self.published_blocks = 0
        self.failed_blocks = 0
        self.busy_blocks = 0  # refused by a rank without a free slot

    def bind(self, pool: BlockPool) -> None:
        """The pool whose blocks are dumped."""
        self._pool = pool

    def open(self, ranks: Iterable[int]) -> None:
        """Every rank's store is open; jobs need an answer from each of these."""
        self._ranks = frozenset(ranks)

    @property
    def under_way(self) -> int:
        """Jobs that have not ended on every rank, as far as was heard."""
        return len(self._jobs)

    def room(self) -> int:
        """Blocks that may be planned now: none while some rank could not store its part."""
        if (
            self._pool is None
            or not self._ranks
            or self._clock() < self._hold_until
            or not self._health.all_healthy
        ):
            return 0
        now = self._clock()
        known, self._asked = now - max(self._heard, self._asked) < KNOWN_S, now
        room: int = min(FLIGHT_BLOCKS, max(1, self._pool.num_gpu_blocks // 2)) - (
            self._unread if known else 0
        )
        for rank in self._ranks:
            free = self._free.get(rank)
            if free is not None and known:
                seen = self._seen.get(rank, 0)
                room = min(
                    room, free - sum(len(j.keys) for j in self._jobs.values() if j.number > seen)
                )
        return max(room, 0)

    def plan(
        self,
        tracker: RequestTracker,
        upto: int,
        blocks: Sequence[KVCacheBlock],
        room: int,
        dumps: list[Dump],
    ) -> int:
        """Offer what ``tracker`` holds of its first ``upto`` blocks, at most ``room`` of them;
        advances its cursor. The jobs are added to ``dumps`` one by one, so that each is sent or
        dropped whatever raises after it. Returns the number of blocks offered."""
        offered, at = 0, tracker.cursor
        upto = min(upto, len(blocks))
        while at < upto:
            # A block that has left the device was stored before it did. Where that is not so any
            # more, there is nothing here to store, and what follows is still of use to its request.
            if blocks[at].is_null or not self._offerable(tracker, at):
                at += 1
                continue
            end = at
            most = min(JOB_BLOCKS, room - offered)
            while end < upto and end - at < most and self._offerable(tracker, end):
                if blocks[end].is_null:
                    break
                end += 1
            if end == at:
                break  # no room left: the chain stops here
            dumps.append(self._job(tracker, at, end, blocks))
            offered += end - at
            at = end
        tracker.cursor = at
        return offered

    def offers(self, tracker: RequestTracker, upto: int) -> bool:
        """Whether :meth:`plan` would offer any of its first ``upto`` blocks."""
        return any(self._offerable(tracker, at) for at in range(tracker.cursor, upto))

    def _offerable(self, tracker: RequestTracker, at: int) -> bool:
        key = tracker.keys[at]
        if at in tracker.audit:
            return not self._block_tracker.is_writing(key)
        return self._block_tracker.offerable(key) and not self._held_back(tracker, at)

    def _held_back(self, tracker: RequestTracker, at: int) -> bool:
        """Whether the block belongs to a chain that was evicted from a store which is too small.

        One draw decides for the chain, from its first evicted block on: what follows an absent
        block is of no use."""
        turnover = self._block_tracker.turnover
        if not turnover.exceeded(tracker.tenant):
            return False
        if tracker.offered_below is None and self._block_tracker.is_evicted(tracker.keys[at]):
            tracker.offered_below = turnover.offered_below(tracker.tenant)
        return tracker.offered_below is not None and at >= tracker.offered_below

    def _job(
        self, tracker: RequestTracker, start: int, end: int, blocks: Sequence[KVCacheBlock]
    ) -> Dump:
        keys, sources = tracker.keys[start:end], list(blocks[start:end])
        hashes = [block.block_hash for block in sources]
        preemptions = tracker.request.num_preemptions
        job = _Job(next(self._numbers), keys, start, sources, hashes, tracker, preemptions)
        dump = Dump(
            job=job.number,
            request=tracker.request.request_id,
            first=start,
            parent=tracker.keys[start - 1] if start else b"",
            keys=join_keys(keys),
            blocks=np.fromiter(
                (block.block_id for block in sources), dtype=np.int64, count=len(sources)
            ),
            audit=start < tracker.audit.stop and end > tracker.audit.start,
            refused=tuple(
                row for row, key in enumerate(keys) if self._block_tracker.is_refused(key)
            ),
            tenant=tracker.tenant,
        )
        self._unread += len(sources)
        self._jobs[job.number] = job
        self._block_tracker.writing(keys, job.number)
        return dump

    def report(self, rank: RankReport, live: Iterable[RequestTracker]) -> None:
        """A rank's news: releases what every rank has staged, settles what every rank has ended."""
        self._heard = self._clock()
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
                    self._finish(job, live)

    def jobs_to_flush(self, live: Mapping[str, RequestTracker]) -> list[int]:
        """A step was planned: the jobs whose blocks vLLM has handed to others, which some rank may
        not have read."""
        taken: list[int] = []
        if not self._unread:
            return taken
        for job in self._jobs.values():
            owner = job.owner.request
            lives = (
                live.get(owner.request_id) is job.owner and owner.num_preemptions == job.preemptions
            )
            if job.blocks and not lives and not all(map(untouched, job.blocks, job.hashes)):
                taken.append(job.number)
                self._read(job)
        return taken

    def drop(self, dumps: Iterable[Dump]) -> None:
        """Jobs that were planned and never sent, and never will be."""
        for dump in dumps:
            if job := self._jobs.pop(dump.job, None):
                self._read(job)
                for key in job.keys:
                    self._block_tracker.not_written(key, refuse=False)

    def forget(self) -> None:
        """No job is followed any more; the ranks end what they have begun."""
        self._jobs.clear()
        self._unread = 0

    def _release(self, job: _Job) -> None:
        if job.staged >= self._ranks:
            self._read(job)

    def _read(self, job: _Job) -> None:
        self._unread -= len(job.blocks)
        job.blocks = []

    def _finish(self, job: _Job, live: Iterable[RequestTracker]) -> None:
        busy = any(result.busy for result in job.done.values())
        failed = {row for result in job.done.values() for row in result.failed}
        refused = {row for result in job.done.values() if not result.busy for row in result.failed}
        left_alone = {row for result in job.done.values() for row in result.left_alone}
        for row, key in enumerate(job.keys):
            if row in left_alone:
                self._block_tracker.mark_newer(key)
            elif row in failed:
                self._block_tracker.not_written(key, refuse=row in refused)
            else:
                self._block_tracker.written(key, self._clock())
        failed -= left_alone
        refused -= left_alone
        self.published_blocks += len(job.keys) - len(failed) - len(left_alone)
        self.failed_blocks += len(refused) + len(left_alone)
        self.busy_blocks += len(failed) - len(refused)
        if not failed:
            self._fail_pause = FAIL_PAUSE_S
            return
        now = self._clock()
        if refused and now >= self._failing_until:  # jobs planned before the pause say nothing new
            self._failing_until = now + self._fail_pause
            self._fail_pause = min(self._fail_pause * 2, FAIL_PAUSE_MAX_S)
        self._hold_until = max(
            self._hold_until, self._failing_until, now + BUSY_PAUSE_S if busy else 0.0
        )
        at = job.first + min(failed)
        key = job.keys[min(failed)]
        for tracker in live:  # requests that hold the block offer it again
            if tracker.cursor > at and at < len(tracker.keys) and tracker.keys[at] == key:
                tracker.cursor = at


def untouched(block: KVCacheBlock, was: object) -> bool:
    """Whether a block that had this hash of vLLM's is free, or in use for what is in it: a block
    that is handed out to be written loses its hash, and gets another object for one, be it the same
    text."""
    return block.ref_cnt == 0 or (was is not None and block.block_hash is was)
