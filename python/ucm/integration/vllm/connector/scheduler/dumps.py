"""Plans dumps: jobs in chain order, within the room of the workers, followed to their end on every
rank.

A job goes to every rank and is kept until every rank reported its end. A dump holds no reference to
vLLM's blocks: their content stays until a step writes it, and the connector sees every step before
it runs. While the request lives, the blocks are its own; later they may be free, or shared by
requests that use the same content. When vLLM hands one out to be written while some rank may still
have to read it, the job is *flushed*: the ranks read it before that step begins. That is a copy in
memory, which has usually been done by then. So a stopped engine, a reset of the prefix cache or a
pause never waits for a dump, and no step is run just for its report.

:class:`DeferredDumps` keeps the blocks that leave their request before they were dumped. Blocks
computed with an adapter are offered only after the adapter's files were checked again. One step may
compute more blocks than staging holds; the rest is offered when ranks report free slots. A request
may end before either, or go on without them: of windows, chunks and states vLLM frees blocks that
nothing sees any more. They belong to vLLM again then, and are offered later, unless vLLM hands them
out to be written first: for a check within :data:`~..identity.keys.RECHECK_S`, for staging within
the deadline of a dump. Before vLLM would hand some out, they are moved behind the other free
blocks. Where there are too few others for a new request, it waits for blocks of running ones: a
bounded number of the waiting blocks has a reference for the rest of that ``schedule()``. Between
two steps there is none, since a reset of vLLM's prefix cache fails while a block is in use, and
vLLM calls no connector before it. So a pause or a sleep finds none either, and no request that runs
waits for one.

:class:`OtherConnectors` keeps wrong blocks out of the store when other connectors of a
MultiConnector load into the same request. vLLM counts tokens as computed when another connector is
about to fill their blocks: an asynchronous load does so before the request runs, a synchronous one
in the very step that computes on them. vLLM reports after the step which blocks were not filled
(``invalid_block_ids``), and the results computed from these are wrong as well. So a request offers
nothing before it has run since it was last admitted; with synchronous loads it offers only tokens
of steps whose output is known; and a block reported invalid is never offered, nor any block after
it. Our own loads are asynchronous: without another connector this delays nothing.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.integration.vllm.connector.groups import Group
from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.identity.keys import RECHECK_S, KeyMaker
from ucm.integration.vllm.connector.metadata import Dump, DumpResult, RankReport, join_keys
from ucm.integration.vllm.connector.scheduler.lookup import BlockTracker
from ucm.integration.vllm.connector.scheduler.readiness import RankHealth
from ucm.integration.vllm.connector.scheduler.requests import FAR, Chain, RequestTracker
from ucm.metrics.names import ENDED, OVERWRITTEN

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

#: The blocks of a request, one table for each of vLLM's KV groups.
Tables = Sequence[Sequence["KVCacheBlock"]]
#: Returns the numbers of the device blocks in any request's table.
InTables = Callable[[], set[int]]


# Blocks of other connectors
# --------------------------------------------------------------------------------------------------


class OtherConnectors:
    """Follows the requests of one engine from their admission to the tokens known to be right."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._waiting: set[str] = set()  # admitted, and in no step with tokens since
        # device block -> its hash in vLLM's prefix cache when it was reported
        self._invalid: dict[int, Any] = {}
        #: Some step had a synchronous load. From then on a step is judged by its output.
        self.load_in_steps = False

    def admitted(self, tracker: RequestTracker, tables: Tables) -> None:
        """Blocks were given to a request; those from vLLM's prefix cache may be known to be wrong.
        ``tables``: its tables in vLLM, one for each KV group."""
        self._waiting.add(tracker.request.request_id)
        tracker.ran_from = None
        if not tracker.request.num_computed_tokens:  # else it has had them since before its load
            tracker.wrong_from = FAR
        for chain in tracker.chains if self._invalid else ():
            table = chain.group.device_blocks(tables[chain.group.table])
            wrong = (at for at, block in enumerate(table) if self._is_invalid(block))
            tracker.wrong_from = min(tracker.wrong_from, next(wrong, FAR))

    def finished(self, request: str) -> None:
        """A request has ended."""
        self._waiting.discard(request)

    def planned(self, output: SchedulerOutput, live: Mapping[str, RequestTracker]) -> None:
        """A step begins."""
        self.load_in_steps = self.load_in_steps or output.has_sync_kv_loads
        for name in self._waiting & output.num_scheduled_tokens.keys():
            self._waiting.discard(name)
            if tracker := live.get(name):
                tracker.ran_from = tracker.request.num_computed_tokens

    @staticmethod
    def computed(tracker: RequestTracker) -> int:
        """Tokens of a request at the end of the last step whose output is known: none until such a
        step had some of it since it was admitted."""
        request = tracker.request
        seen: int = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        return seen if tracker.ran_from is not None and seen > tracker.ran_from else 0

    def reported(
        self, invalid: Collection[int], live: Iterable[RequestTracker], manager: Any
    ) -> None:
        """A step's output names device blocks that a load did not fill.

        Those of an asynchronous load, ours too, are computed before anything is computed from them.
        Of a request that was computed on them, nothing is right from there on: vLLM computes the
        block again, but results of the step before and of requests that share the block stay in its
        prefix cache, and its V2 runner computes it in the wrong place (vllm#49250).
        """
        if not (invalid and self.load_in_steps and manager is not None):
            return
        for tracker in live:
            tables = manager.get_blocks(tracker.request.request_id).blocks
            table = tables[tracker.chains[0].group.table]  # with several groups none is reported
            ran = tracker.ran_from is not None
            held = table[: len(table) if ran else tracker.local // self._block_tokens]
            at = next((at for at, block in enumerate(held) if block.block_id in invalid), None)
            if at is None:
                continue
            tracker.wrong_from = min(tracker.wrong_from, at)
            wrong = [block for block in table[at:] if block.block_hash is not None]
            self._invalid |= {block.block_id: block.block_hash for block in wrong}
            throttle.warning(
                "others", "another connector's load failed in a step: what it left is not stored"
            )

    def _is_invalid(self, block: KVCacheBlock) -> bool:
        known = block.block_hash
        return known is not None and self._invalid.get(block.block_id) == known


# Jobs
# --------------------------------------------------------------------------------------------------

#: Most blocks in one job.
JOB_BLOCKS = 64
#: Most blocks being dumped at once.
FLIGHT_BLOCKS = 4096
#: Pauses in seconds: of a store without room, of one that failed (doubled up to the last).
BUSY_PAUSE_S, FAIL_PAUSE_S, FAIL_PAUSE_MAX_S = 0.02, 1.0, 30.0
#: Seconds for which the ranks' last report of their room counts: an idle engine gets no other, and
#: jobs under way have ended by then. A rank without room refuses at once.
KNOWN_S = 1.0


@dataclass(slots=True)
class _Job:
    number: int
    keys: list[bytes]  # of the blocks that are written
    first: int
    blocks: list[KVCacheBlock]  # until every rank has read them
    unread: list[KVCacheBlock]  # those of a job that a rank refused, but for handed out ones
    hashes: list[object]  # vLLM's, of the blocks
    chain: Chain
    owner: RequestTracker
    preemptions: int  # of the owner
    generation: int
    staged: set[int] = field(default_factory=set)
    done: dict[int, DumpResult] = field(default_factory=dict)


#: A request, and blocks of it in one group that every rank has published: their keys by ordinal.
Written = tuple[RequestTracker, Group, dict[int, bytes]]


class DumpPlanner:
    """Plans dump jobs and follows them to their end on every rank."""

    def __init__(
        self,
        block_tracker: BlockTracker,
        health: RankHealth,
        clock: Callable[[], float] = time.monotonic,
        tables: Callable[[RequestTracker], Tables] = lambda _tracker: (),
    ) -> None:
        """``tables``: the tables of a live request in vLLM, one for each KV group."""
        self._tables = tables
        self._block_tracker, self._health = block_tracker, health
        self._clock = clock
        self._numbers = itertools.count(1)
        #: Counts the resets of vLLM's caches; keys of before name no hits.
        self.generation = 0
        self.pool: BlockPool | None = None  # of the blocks that are dumped
        self._ranks: frozenset[int] = frozenset()
        self._free: dict[int, int | None] = {}
        self._seen: dict[int, int] = {}
        self._jobs: dict[int, _Job] = {}
        self._unread = 0  # blocks that not every rank has staged
        self._hold_until = self._failing_until = 0.0
        self._fail_pause = FAIL_PAUSE_S
        self._reported_at = self._planned_at = float("-inf")
        self.published_at = float("-inf")
        self.published_blocks = 0
        self.failed_blocks = 0
        self.busy_blocks = 0  # refused by a rank without a free slot
        self._refused: list[_Job] = []  # for that, with blocks that may have left their request

    def bind(self, pool: BlockPool) -> None:
        """The pool whose blocks are dumped."""
        self.pool = pool

    def open(self, ranks: Iterable[int]) -> None:
        """Every rank's store is open; jobs end when each of these has reported."""
        self._ranks = frozenset(ranks)

    @property
    def under_way(self) -> int:
        """Jobs that have not ended on every rank."""
        return len(self._jobs)

    def room(self) -> int:
        """Blocks that may be planned now: none while some rank could not store its part."""
        now, pool = self._clock(), self.pool
        held = now < self._hold_until or not self._health.all_healthy
        if pool is None or not self._ranks or held:
            return 0
        known = now - max(self._reported_at, self._planned_at) < KNOWN_S
        self._planned_at = now
        room: int = min(FLIGHT_BLOCKS, max(1, pool.num_gpu_blocks // 2))
        if known:
            room -= self._unread
            for rank in self._ranks:
                if (free := self._free.get(rank)) is not None:
                    seen = self._seen.get(rank, 0)
                    unseen = (len(job.keys) for job in self._jobs.values() if job.number > seen)
                    room = min(room, free - sum(unseen))
        return max(room, 0)

    def plan(
        self,
        tracker: RequestTracker,
        chain: Chain,
        upto: int,
        blocks: Sequence[KVCacheBlock],
        room: int,
        dumps: list[Dump],
        preemptions: int | None = None,
    ) -> int:
        """Offer the first ``upto`` blocks of a request in one group, at most ``room`` of them;
        advances its cursor. ``preemptions``: of the request when it had the blocks, None if it has
        them now. The jobs are added to ``dumps`` one by one, so that each is sent or dropped
        whatever raises after it. Returns the number of blocks offered."""
        offered, at, group = 0, chain.cursor, chain.group
        upto = min(upto, len(blocks))
        while at < upto:
            # A block that has left the device was stored before it did, or nothing sees it any
            # more, or it is lost. Blocks behind it are still of use: another request that begins
            # alike stores a lost one, and they are hits then.
            purpose = self._purpose(tracker, chain, at)
            if not purpose or not lasts(group, blocks[at]):
                at += 1
                continue
            compare = purpose == "compare"
            most = JOB_BLOCKS if compare else min(JOB_BLOCKS, room - offered)
            if most < 1:
                break  # no room left: the chain stops here
            end = at + 1
            while end < upto and end - at < most and lasts(group, blocks[end]):
                if self._purpose(tracker, chain, end) != purpose:
                    break
                end += 1
            dumps.append(self._job(tracker, chain, at, end, blocks, compare, preemptions))
            if compare:
                chain.compared = range(end, chain.compared.stop)  # each block once
            else:
                offered += end - at
            at = end
        chain.cursor = at
        return offered

    def offers(self, tracker: RequestTracker, chain: Chain, upto: int) -> bool:
        """Whether :meth:`plan` would offer any of its first ``upto`` blocks."""
        return any(self._purpose(tracker, chain, at) for at in range(chain.cursor, upto))

    def _purpose(self, tracker: RequestTracker, chain: Chain, at: int) -> str:
        """What to offer a block for: "store", "compare" or, not at all, nothing."""
        known, key = self._block_tracker, chain.keys[at]
        if known.offerable(key) and not self._held_back(tracker.tenant, chain, at):
            return "store"
        return "compare" if at in chain.compared and known.is_stored(key) else ""

    def _held_back(self, tenant: bytes, chain: Chain, at: int) -> bool:
        """Whether the block belongs to a chain that was evicted from a store which is too small.
        One draw decides for the chain, from its first evicted block on: blocks behind an absent one
        are of no use."""
        turnover = self._block_tracker.turnover
        if not turnover.exceeded(tenant):
            return False
        if chain.offered_below is None and self._block_tracker.is_evicted(chain.keys[at]):
            chain.offered_below = turnover.offered_below(tenant)
        return chain.offered_below is not None and at >= chain.offered_below

    def _job(
        self,
        tracker: RequestTracker,
        chain: Chain,
        start: int,
        end: int,
        blocks: Sequence[KVCacheBlock],
        compare: bool,
        preemptions: int | None,
    ) -> Dump:
        keys, sources = chain.keys[start:end], list(blocks[start:end])
        hashes = [block.block_hash for block in sources]
        if preemptions is None:
            preemptions = tracker.request.num_preemptions
        number, generation = next(self._numbers), self.generation
        writes = [] if compare else keys
        job = _Job(
            number, writes, start, sources, [], hashes, chain, tracker, preemptions, generation
        )
        known = self._block_tracker
        dump = Dump(
            job=job.number,
            request=tracker.request.request_id,
            first=start,
            parent=chain.keys[start - 1] if start else b"",
            keys=join_keys(keys),
            blocks=np.array([block.block_id for block in sources], dtype=np.int64),
            refused=tuple(row for row, key in enumerate(keys) if known.is_refused(key)),
            tenant=tracker.tenant,
            group=chain.group.number,
            compare=compare,
        )
        self._unread += len(sources)
        self._jobs[job.number] = job
        known.writing(writes, job.number)
        return dump

    def report(self, rank: RankReport, live: Iterable[RequestTracker]) -> list[Written]:
        """A rank's news: releases blocks that every rank has staged, ends jobs that every rank has
        ended. Returns the published blocks of these jobs."""
        written: list[Written] = []
        self._reported_at = self._clock()
        self._free[rank.rank] = rank.free_slots
        self._seen[rank.rank] = max(self._seen.get(rank.rank, 0), rank.last_job)
        for result in rank.done:
            if result.busy and (job := self._jobs.get(result.job)):
                job.unread = job.unread or job.blocks
        for number in (*rank.staged, *(result.job for result in rank.done)):
            if job := self._jobs.get(number):
                job.staged.add(rank.rank)
                if job.staged >= self._ranks:
                    self._read(job)
        for result in rank.done:
            if job := self._jobs.get(result.job):
                job.done[rank.rank] = result
                if job.done.keys() >= self._ranks:
                    del self._jobs[job.number]
                    published = self._finish(job, live)
                    if job.generation == self.generation:
                        written.append((job.owner, job.chain.group, published))
        return written

    def jobs_to_flush(self, live: Mapping[str, RequestTracker]) -> list[int]:
        """The jobs whose blocks vLLM has handed to others in the planned step, and some rank may
        not have read. Refused blocks that it has handed out are not offered again."""
        taken: list[int] = []
        for job in self._jobs.values():
            if not (job.blocks or job.unread):
                continue
            owner = job.owner.request
            lives = live.get(owner.request_id) is job.owner
            lives = lives and owner.num_preemptions == job.preemptions
            if lives and not job.chain.group.frees_early:
                continue
            kept = self._kept(job, lives)
            if all(kept):
                continue
            if job.blocks:
                taken.append(job.number)
                self._read(job)
            if self.pool is not None and job.unread:
                refused, null = zip(job.unread, kept, strict=True), self.pool.null_block
                job.unread = [block if same else null for block, same in refused]
        return taken

    def _kept(self, job: _Job, lives: bool) -> list[bool]:
        """Whether each block of a job was not handed out since it was planned. Of a request that
        still runs vLLM frees blocks that nothing sees any more, perhaps in the same step."""
        blocks = job.blocks or job.unread
        table = self.held(job.owner, job.chain.group)[job.first :] if lives else ()
        held = itertools.chain(table[: len(blocks)], itertools.repeat(None))
        return [
            own is block or untouched(block, was)
            for own, block, was in zip(held, blocks, job.hashes, strict=False)
        ]

    def take_refused(self) -> list[_Job]:
        """Jobs refused for want of room since the last call, in groups that free early."""
        refused, self._refused = self._refused, []
        return refused

    def is_writing(self, key: bytes) -> bool:
        """Whether a block is on its way to the store."""
        return self._block_tracker.is_expected(key) and not self._block_tracker.is_stored(key)

    def held(self, tracker: RequestTracker, group: Group) -> Sequence[KVCacheBlock]:
        """What a live request holds in one group, by ordinal."""
        return group.device_blocks(self._tables(tracker)[group.table])

    def drop(self, dumps: Iterable[Dump]) -> None:
        """Jobs that were planned and never sent, and never will be."""
        for dump in dumps:
            if job := self._jobs.pop(dump.job, None):
                self._read(job)
                for key in job.keys:
                    self._block_tracker.not_written(key, refuse=False)

    def forget(self) -> None:
        """Follow no job any more; the ranks end what they have begun."""
        self._jobs.clear()
        self._unread = 0

    def _read(self, job: _Job) -> None:
        self._unread -= len(job.blocks)
        job.blocks = []

    def _finish(self, job: _Job, live: Iterable[RequestTracker]) -> dict[int, bytes]:
        published: dict[int, bytes] = {}
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
                published[job.first + row] = key
        failed -= left_alone
        refused -= left_alone
        self.published_blocks += len(job.keys) - len(failed) - len(left_alone)
        self.published_at = self._clock() if published else self.published_at
        self.failed_blocks += len(refused) + len(left_alone)
        self.busy_blocks += len(failed) - len(refused)
        if not failed:
            self._fail_pause = FAIL_PAUSE_S
            return published
        now = self._clock()
        if refused and now >= self._failing_until:  # jobs planned before the pause say nothing new
            self._failing_until = now + self._fail_pause
            self._fail_pause = min(self._fail_pause * 2, FAIL_PAUSE_MAX_S)
        pause = now + BUSY_PAUSE_S if busy else 0.0
        self._hold_until = max(self._hold_until, self._failing_until, pause)
        if job.unread and job.chain.group.frees_early and job.generation == self.generation:
            self._refused.append(job)
        at = job.first + min(failed)
        key = job.keys[min(failed)]
        for tracker in live:  # requests that hold the block offer it again
            chain = tracker.chains[job.chain.group.number]
            if chain.cursor > at and at < len(chain.keys) and chain.keys[at] == key:
                chain.cursor = at
        return published


def lasts(group: Group, block: KVCacheBlock) -> bool:
    """Whether a full block of a request's table is to be stored."""
    return not block.is_null and not (group.only_cached and block.block_hash is None)


def untouched(block: KVCacheBlock, was: object) -> bool:
    """Whether a block that had this hash of vLLM's is free, or in use for its content: a block that
    is handed out to be written loses its hash, and later gets another object, even for the same."""
    return block.ref_cnt == 0 or (was is not None and block.block_hash is was)


# Blocks that leave their request
# --------------------------------------------------------------------------------------------------

#: Most blocks that wait at a time. Each is compared in every step.
MOST_BLOCKS = 4096
#: Seconds without room after which an idle engine takes no more steps for such blocks.
ROOM_S = 1.0


@dataclass(slots=True, eq=False)
class _Deferred:
    tracker: RequestTracker
    chain: Chain
    blocks: list[KVCacheBlock]  # of the request, from its first
    hashes: list[object]  # vLLM's, of the blocks
    since: float  # the request's end, or when the first of them left it
    offered: float  # when one was last offered for the first time, or since when they wait for room
    furthest: int  # ordinal behind the blocks that were offered
    preemptions: int = -1  # of the request if it runs, -1 for one that has ended
    first: int = 0  # ordinal of the first block that waits or may do so again
    #: Tokens of the request at the end of the step that computes the blocks with an adapter: a
    #: check counts if it begins after that. 0 where ``since`` is later.
    settles: int = 0
    #: Whether vLLM may still hold blocks of the ended request, until a step that runs has ended.
    fenced: bool = True

    def waiting(self) -> Iterator[bytes]:
        """The keys of the blocks that wait."""
        first, group = self.chain.cursor, self.chain.group
        pairs = zip(self.chain.keys[first:], self.blocks[first:], strict=False)
        return (key for key, block in pairs if lasts(group, block))

    def cut(self, held: Sequence[KVCacheBlock], dumps: DumpPlanner, in_tables: InTables) -> int:
        """Drop the blocks that vLLM handed out, and those behind the first where these are of no
        use without it. Offered ones are compared, too, while some rank may refuse them: they are
        offered again then. ``held``: the blocks that the request has now, none if it ended. Returns
        the number of dropped blocks that were not offered."""
        assert dumps.pool is not None  # blocks wait
        null = dumps.pool.null_block
        cursor, keys = self.chain.cursor, self.chain.keys
        self.first = min(self.first, cursor)
        while self.first < cursor and not dumps.is_writing(keys[self.first]):
            self.blocks[self.first] = null
            self.first += 1
        lost, fenced = 0, self.fenced and not held
        self.fenced = bool(held)
        for at in range(self.first, len(self.blocks)):
            block, was = self.blocks[at], self.hashes[at]
            if block.is_null or untouched(block, was) or (at < len(held) and held[at] is block):
                continue
            if fenced and block.block_id not in in_tables():
                self.fenced = True
                continue
            if at >= cursor and not self.chain.group.frees_early:
                lost = len(self.blocks) - at
                del self.blocks[at:], self.hashes[at:]
                break
            self.blocks[at], lost = null, lost + (at >= cursor)
        return lost


class DeferredDumps:
    """The blocks that wait; used on the scheduler's thread alone."""

    def __init__(self, dumps: DumpPlanner, most_s: float, in_tables: InTables) -> None:
        """``most_s``: seconds that blocks wait for room, at most."""
        self._dumps, self._most_s, self._in_tables = dumps, most_s, in_tables
        self._deferred: list[_Deferred] = []
        self._waiting: set[int] = set()  # the ids of their blocks, and of some offered ones
        self._pinned: list[KVCacheBlock] = []  # those with a reference, until this schedule() ends
        self._lost: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._deferred)

    def wants_steps(self, now: float) -> bool:
        """Whether an engine without requests should step: there may soon be room, or an answer."""
        moved = max((hold.offered for hold in self._deferred), default=float("-inf"))
        return bool(self._deferred) and now - max(moved, self._dumps.published_at) < ROOM_S

    @property
    def trackers(self) -> list[RequestTracker]:
        """The ended requests whose blocks wait."""
        return [hold.tracker for hold in self._deferred]

    def keys_of(self, tracker: RequestTracker) -> set[bytes]:
        """The keys of a request's blocks that wait."""
        holds = [hold for hold in self._deferred if hold.tracker is tracker]
        return {key for hold in holds for key in hold.waiting()}

    def add(
        self,
        tracker: RequestTracker,
        chain: Chain,
        upto: int,
        blocks: Sequence[KVCacheBlock],
        now: float,
    ) -> None:
        """Keep those of the first ``upto`` blocks of a request in a group that were not offered."""
        upto = min(upto, len(blocks))
        if not self._dumps.offers(tracker, chain, upto):
            return
        end = min(upto, chain.cursor + self._room())
        self._lost[ENDED] += sum(lasts(chain.group, block) for block in blocks[end:upto])
        if end > chain.cursor:
            mine = list(blocks[:end])
            hashes = [block.block_hash for block in mine]
            self._deferred.append(_Deferred(tracker, chain, mine, hashes, now, now, chain.cursor))
            self._waiting.update(block.block_id for block in mine[chain.cursor :])

    def leaving(
        self,
        tracker: RequestTracker,
        chain: Chain,
        upto: int,
        blocks: Sequence[KVCacheBlock],
        now: float,
        settles: int,
    ) -> None:
        """Keep those of the first ``upto`` blocks of a running request that were not offered yet:
        vLLM takes them away in its next step, or later. The request offers them no more.
        ``settles``: its tokens after the step that is planned, where that computes some of the
        blocks with an adapter, else 0."""
        first = chain.cursor
        mine = list(blocks[first:upto])
        if any(lasts(chain.group, block) for block in mine):
            hashes = [block.block_hash for block in mine]
            preemptions = tracker.request.num_preemptions
            self._keep(tracker, chain, first, mine, hashes, now, preemptions, settles)
        chain.cursor = max(first, upto)

    def again(self, job: _Job, now: float) -> None:
        """The blocks of a job that a rank refused for want of room may have left their request."""
        refused = job.unread, job.hashes
        self._keep(job.owner, job.chain, job.first, *refused, now, job.preemptions)

    def _keep(
        self,
        tracker: RequestTracker,
        chain: Chain,
        first: int,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[object],
        now: float,
        preemptions: int,
        settles: int = 0,
    ) -> None:
        """Keep blocks of a group that frees early, from ``first`` on, with vLLM's hashes.
        ``preemptions``: of the request when it had them."""
        pool = self._dumps.pool
        there = [at for at, block in enumerate(blocks) if lasts(chain.group, block)]
        kept = there[: self._room()]
        self._lost[ENDED] += len(there) - len(kept)
        if pool is None or not kept:
            return
        blocks, hashes = blocks[: kept[-1] + 1], hashes[: kept[-1] + 1]
        for hold in self._deferred:
            mine = hold.tracker is tracker and hold.preemptions == preemptions
            if mine and hold.chain.group is chain.group and not settles and not hold.settles:
                break
        else:
            hold = _Deferred(tracker, Chain(chain.group), [], [], now, now, first, preemptions)
            hold.settles = settles
            hold.chain.cursor = first
            self._deferred.append(hold)
        hold.chain.keys, hold.chain.cursor = chain.keys, min(hold.chain.cursor, first)
        missing = first - len(hold.blocks)
        hold.blocks += [pool.null_block] * missing
        hold.hashes += [None] * missing
        end = first + len(blocks)
        hold.blocks[first:end], hold.hashes[first:end] = blocks, hashes
        self._waiting.update(blocks[at].block_id for at in kept)

    def _room(self) -> int:
        """How many more blocks may wait."""
        return max(0, MOST_BLOCKS - len(self._waiting))

    def spare(self, blocks: int, pins: int) -> None:
        """vLLM is about to hand out ``blocks`` blocks, or fewer. Move the waiting blocks that are
        among these behind the other free ones. If there are too few others, keep ``pins`` of the
        waiting ones from it, until :meth:`unpin`."""
        pool = self._dumps.pool
        if pool is None or not self._deferred:
            return
        ahead, last, others = list[Any](), list[Any](), 0
        for block in free_blocks(pool):
            if block.block_id in self._waiting:
                last.append(block)
                continue
            ahead += last
            last, others = [], others + 1
            if others >= blocks:
                break
        if ahead:  # not freed anew: vLLM hands out first what it freed last without a hash
            for block in ahead + last:
                pool.free_block_queue.remove(block)
            pool.free_block_queue.append_n(ahead + last)
        if others < blocks:
            free = (block for block in self._blocks() if not block.ref_cnt)
            mine = list(itertools.islice(free, max(pins - len(self._pinned), 0)))
            pool.touch(mine)
            self._pinned += mine

    def unpin(self) -> None:
        """vLLM has handed out the blocks of a step, or will hand out none."""
        pool, pinned = self._dumps.pool, self._pinned
        if pool is not None and pinned:
            self._pinned = []
            pool.free_blocks(pinned[::-1])

    def take(
        self,
        keys: KeyMaker,
        now: float,
        dumps: list[Dump],
        live: Mapping[str, RequestTracker],
    ) -> Iterator[tuple[RequestTracker, int]]:
        """Offer confirmed blocks that have room, one request after the other: the jobs are added to
        ``dumps``. Drop blocks that are refused, late or used by others than the ``live`` requests
        that had them. Yields each request with the number of its blocks that were offered. To be
        called with every plan: a block that another request got and gave back looks unused."""
        count, moved = len(self._deferred), False
        in_tables = functools.cache(self._in_tables)
        for hold in list(self._deferred):
            tracker, chain = hold.tracker, hold.chain
            held = self._dumps.held(tracker, chain.group) if _runs(hold, live) else ()
            self._lost[OVERWRITTEN] += hold.cut(held, self._dumps, in_tables)
            if not self._dumps.offers(tracker, chain, len(hold.blocks)):
                self._deferred.remove(hold)
                continue
            if hold.settles and not self._settled(hold, now, live):
                continue
            answer = keys.current(tracker.request, hold.since)
            if answer is None and now - hold.since < RECHECK_S:
                hold.offered = now
                continue
            if not answer:
                self._deferred.remove(hold)
                continue
            blocks, room, before = hold.blocks, self._dumps.room(), hold.preemptions
            offered = self._dumps.plan(tracker, chain, len(blocks), blocks, room, dumps, before)
            if offered:
                moved = True
                if chain.cursor > hold.furthest:
                    hold.furthest, hold.offered = chain.cursor, now
                yield tracker, offered
            if not self._dumps.offers(tracker, chain, len(hold.blocks)):
                self._deferred.remove(hold)
            elif now - hold.since >= self._most_s:
                self._lost[ENDED] += sum(1 for _ in hold.waiting())
                self._deferred.remove(hold)
        if moved or len(self._deferred) < count:
            self._waiting = {block.block_id for block in self._blocks()}

    def _settled(self, hold: _Deferred, now: float, live: Mapping[str, RequestTracker]) -> bool:
        """Whether the step that computed the blocks has ended. Nothing reports that once the
        request has ended or is preempted, whatever tokens it has later: they are dropped then."""
        request = hold.tracker.request
        ended = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        if ended >= hold.settles and request.num_preemptions == hold.preemptions:
            hold.since, hold.settles = now, 0
        elif not _runs(hold, live):
            self._deferred.remove(hold)
        return not hold.settles

    def _blocks(self) -> Iterator[KVCacheBlock]:
        """The blocks that wait, each request's from its first."""
        every = (block for hold in self._deferred for block in hold.blocks[hold.chain.cursor :])
        return (block for block in every if not block.is_null)

    def take_lost(self) -> Mapping[str, int]:
        """Blocks that were not stored since the last call, by reason."""
        lost, self._lost = self._lost, Counter()
        return lost

    def drop(self) -> None:
        """Drop all."""
        self.unpin()
        self._deferred, self._waiting = [], set()


def _runs(hold: _Deferred, live: Mapping[str, RequestTracker]) -> bool:
    """Whether the request runs on since it had the blocks."""
    request = hold.tracker.request
    lives = live.get(request.request_id) is hold.tracker
    return lives and request.num_preemptions == hold.preemptions


def free_blocks(pool: BlockPool) -> Iterator[KVCacheBlock]:
    """vLLM's free blocks, in the order in which it hands them out."""
    queue = pool.free_block_queue
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail:
        yield block
        block = block.next_free_block
