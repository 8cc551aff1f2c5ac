"""Blocks of requests that have ended, kept until it is known whether they may be offered.

What a request with an adapter computed is offered only when the adapter's files were looked at afterwards. A request
may end before that is answered, for :data:`~..identity.adapters.RECHECK_S` at most: its last blocks
are then vLLM's again, and are offered if nobody got them to write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.identity.adapters import RECHECK_S
from ucm.integration.vllm.connector.identity.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import Dump
from ucm.integration.vllm.connector.scheduler.dump_planner import DumpPlanner, untouched
from ucm.integration.vllm.connector.scheduler.request_tracker import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True, eq=False)
class _Hold:
    tracked: Tracked
    blocks: list[KVCacheBlock]  # of the request, from its first
    hashes: list[object]  # vLLM's, of the blocks
    since: float


class Holds:
    """The blocks held back; used on the scheduler's thread alone."""

    def __init__(self, dumps: DumpPlanner) -> None:
        self._dumps = dumps
        self._holds: list[_Hold] = []

    def __bool__(self) -> bool:
        return bool(self._holds)

    def add(self, tracked: Tracked, upto: int, blocks: Sequence[KVCacheBlock], now: float) -> None:
        """Keep what ``tracked`` has of its first ``upto`` blocks and has not offered yet; all were computed before."""
        mine = list(blocks[: min(upto, tracked.cursor + self._dumps.room())])
        if self._dumps.offers(tracked, len(mine)):
            self._holds.append(_Hold(tracked, mine, [block.block_hash for block in mine], now))

    def take(self, keys: KeyMaker, now: float) -> Iterator[tuple[Tracked, list[Dump]]]:
        """Offer what is confirmed by now, one request after the other; what is refused, late or others have is let go.

        With every plan: a block that others got is known by that only until they give it back.
        """
        for hold in list(self._holds):
            first = hold.tracked.cursor
            if not all(map(untouched, hold.blocks[first:], hold.hashes[first:])):
                self._holds.remove(hold)
                continue
            answer = keys.current(hold.tracked.request, hold.since)
            if answer is None and now - hold.since < RECHECK_S:
                continue
            self._holds.remove(hold)
            if answer:
                plans = self._dumps.plan(hold.tracked, len(hold.blocks), hold.blocks, self._dumps.room())
                yield hold.tracked, plans

    def drop(self) -> None:
        """Let everything go."""
        self._holds = []
