"""Blocks of ended requests that were not dumped yet: they wait for a check, or for staging.

Blocks computed with an adapter are offered only after the adapter's files were checked again. One
step may compute more blocks than staging holds; the rest is offered when ranks report free slots.
A request may end before either, and its blocks belong to vLLM again. They are offered later, unless
vLLM hands them out to be written first: for a check within :data:`~..identity.adapters.RECHECK_S`,
for staging until :data:`ROOM_S` pass in which none is offered for the first time: there is no free
slot, or what is offered is refused again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.identity.adapters import RECHECK_S
from ucm.integration.vllm.connector.identity.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import Dump
from ucm.integration.vllm.connector.miss_stats import ENDED, OVERWRITTEN
from ucm.integration.vllm.connector.scheduler.dump_planner import DumpPlanner, untouched
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: Most blocks that wait at a time. Each is compared in every step.
MOST_BLOCKS = 4096
#: Seconds without room after which the blocks of an ended request are given up.
ROOM_S = 1.0


@dataclass(slots=True, eq=False)
class _Deferred:
    tracker: RequestTracker
    blocks: list[KVCacheBlock]  # of the request, from its first
    hashes: list[object]  # vLLM's, of the blocks
    since: float
    offered: float  # when one of them was offered for the first time last, or since when they wait
    furthest: int  # ordinal behind those that were offered, were they refused or not

    def cut(self) -> int:
        """Drop blocks from the first that vLLM handed out on. Returns how many those are."""
        first = self.tracker.cursor
        kept = zip(self.blocks[first:], self.hashes[first:], strict=True)
        for at, (block, was) in enumerate(kept, first):
            if not untouched(block, was):
                cut = len(self.blocks) - at
                del self.blocks[at:], self.hashes[at:]
                return cut
        return 0


class DeferredDumps:
    """The blocks held back; used on the scheduler's thread alone."""

    def __init__(self, dumps: DumpPlanner) -> None:
        self._dumps = dumps
        self._deferred: list[_Deferred] = []
        self._lost: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._deferred)

    @property
    def trackers(self) -> list[RequestTracker]:
        """The ended requests whose blocks wait."""
        return [hold.tracker for hold in self._deferred]

    def add(
        self, tracker: RequestTracker, upto: int, blocks: Sequence[KVCacheBlock], now: float
    ) -> None:
        """Keep what ``tracker`` has of its first ``upto`` blocks and has not offered yet; all were
        computed before."""
        if not self._dumps.offers(tracker, min(upto, len(blocks))):
            return
        waiting = sum(len(hold.blocks) - hold.tracker.cursor for hold in self._deferred)
        end = min(upto, len(blocks), tracker.cursor + max(0, MOST_BLOCKS - waiting))
        self._lost[ENDED] += min(upto, len(blocks)) - end
        if end > tracker.cursor:
            mine = list(blocks[:end])
            hashes = [block.block_hash for block in mine]
            self._deferred.append(_Deferred(tracker, mine, hashes, now, now, tracker.cursor))

    def take(
        self, keys: KeyMaker, now: float, dumps: list[Dump]
    ) -> Iterator[tuple[RequestTracker, int]]:
        """Offer what is confirmed and has room, one request after the other: the jobs are added to
        ``dumps``. Drop what is refused, late or used by others. Yields each request with the number
        of its blocks that were offered.

        With every plan: a block that others got is known by that only until they give it back.
        """
        for hold in list(self._deferred):
            self._lost[OVERWRITTEN] += hold.cut()
            if not self._dumps.offers(hold.tracker, len(hold.blocks)):
                self._deferred.remove(hold)
                continue
            answer = keys.current(hold.tracker.request, hold.since)
            if answer is None and now - hold.since < RECHECK_S:
                continue
            if not answer:
                self._deferred.remove(hold)
                continue
            room = self._dumps.room()
            offered = self._dumps.plan(hold.tracker, len(hold.blocks), hold.blocks, room, dumps)
            if offered:
                if hold.tracker.cursor > hold.furthest:
                    hold.furthest, hold.offered = hold.tracker.cursor, now
                yield hold.tracker, offered
            if not self._dumps.offers(hold.tracker, len(hold.blocks)):
                self._deferred.remove(hold)
            elif now - hold.offered >= ROOM_S:
                self._lost[ENDED] += len(hold.blocks) - hold.tracker.cursor
                self._deferred.remove(hold)

    def take_lost(self) -> Mapping[str, int]:
        """Blocks that were not stored after all since the last call, by reason."""
        lost, self._lost = self._lost, Counter()
        return lost

    def drop(self) -> None:
        """Let everything go."""
        self._deferred = []
