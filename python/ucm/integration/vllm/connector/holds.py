"""Blocks of requests that have ended, kept until it is known whether they may be offered.

What a request with an adapter computed is offered only when the adapter's files were looked at afterwards. A request
may end before that is answered: its last blocks stay referenced in vLLM's block pool meanwhile, for
:data:`~ucm.integration.vllm.connector.adapters.RECHECK_S` at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.adapters import RECHECK_S
from ucm.integration.vllm.connector.dumps import DumpPlanner
from ucm.integration.vllm.connector.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import Dump
from ucm.integration.vllm.connector.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True, eq=False)
class _Hold:
    tracked: Tracked
    blocks: list[KVCacheBlock]  # of the request, from its first
    pinned: list[KVCacheBlock]
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
        pinned = mine[tracked.cursor :]
        if self._dumps.offers(tracked, len(mine)):
            self._dumps.pin(pinned)
            self._holds.append(_Hold(tracked, mine, pinned, now))

    def take(self, keys: KeyMaker, now: float) -> Iterator[tuple[Tracked, list[Dump]]]:
        """Offer what is confirmed by now, one request after the other; what is refused or late is let go."""
        for hold in list(self._holds):
            answer = keys.current(hold.tracked.request, hold.since)
            if answer is None and now - hold.since < RECHECK_S:
                continue
            self._holds.remove(hold)
            try:
                if answer:
                    plans = self._dumps.plan(hold.tracked, len(hold.blocks), hold.blocks, self._dumps.room())
                    yield hold.tracked, plans
            finally:
                self._dumps.unpin(hold.pinned)

    def drop(self) -> None:
        """Let everything go, offered or not."""
        holds, self._holds = self._holds, []
        for hold in holds:
            self._dumps.unpin(hold.pinned)
