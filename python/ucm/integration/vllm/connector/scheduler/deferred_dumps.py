"""Blocks of ended requests that wait for a check before they may be dumped.

Blocks computed with an adapter are offered only after the adapter's files were looked at again. A request may end
before that. Its last blocks belong to vLLM again then; they wait :data:`~..identity.adapters.RECHECK_S` at most for the
answer, and are offered unless vLLM handed them out to be written meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.identity.adapters import RECHECK_S
from ucm.integration.vllm.connector.identity.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import Dump
from ucm.integration.vllm.connector.scheduler.dump_planner import DumpPlanner, untouched
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True, eq=False)
class _Deferred:
    tracker: RequestTracker
    blocks: list[KVCacheBlock]  # of the request, from its first
    hashes: list[object]  # vLLM's, of the blocks
    since: float


class DeferredDumps:
    """The blocks held back; used on the scheduler's thread alone."""

    def __init__(self, dumps: DumpPlanner) -> None:
        self._dumps = dumps
        self._deferred: list[_Deferred] = []

    def __bool__(self) -> bool:
        return bool(self._deferred)

    def add(self, tracker: RequestTracker, upto: int, blocks: Sequence[KVCacheBlock], now: float) -> None:
        """Keep what ``tracker`` has of its first ``upto`` blocks and has not offered yet; all were computed before."""
        mine = list(blocks[: min(upto, tracker.cursor + self._dumps.room())])
        if self._dumps.offers(tracker, len(mine)):
            self._deferred.append(_Deferred(tracker, mine, [block.block_hash for block in mine], now))

    def take(self, keys: KeyMaker, now: float) -> Iterator[tuple[RequestTracker, list[Dump]]]:
        """Offer what is confirmed by now, one request after the other; what is refused, late or others have is let go.

        With every plan: a block that others got is known by that only until they give it back.
        """
        for hold in list(self._deferred):
            first = hold.tracker.cursor
            if not all(map(untouched, hold.blocks[first:], hold.hashes[first:])):
                self._deferred.remove(hold)
                continue
            answer = keys.current(hold.tracker.request, hold.since)
            if answer is None and now - hold.since < RECHECK_S:
                continue
            self._deferred.remove(hold)
            if answer:
                plans = self._dumps.plan(hold.tracker, len(hold.blocks), hold.blocks, self._dumps.room())
                yield hold.tracker, plans

    def drop(self) -> None:
        """Let everything go."""
        self._deferred = []
