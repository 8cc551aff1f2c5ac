"""Blocks of requests that have ended, remembered until it is known whether they may be offered.

What a request with an adapter computed is offered only when the adapter's files were looked at afterwards. A request
may end before that is answered. Its last blocks are free meanwhile, and what is in them stays there until vLLM hands
them to others: every step is planned here before, and what it would overwrite is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.adapters import RECHECK_S
from ucm.integration.vllm.connector.dumps import DumpPlanner, untouched
from ucm.integration.vllm.connector.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import Dump
from ucm.integration.vllm.connector.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True, eq=False)
class _Hold:
    tracked: Tracked
    blocks: list[KVCacheBlock]  # of the request, from its first
    hashes: list[object]  # vLLM's, of the blocks
    first: int  # of those that were not offered
    since: float

    def still(self) -> int:
        """Blocks whose content is theirs yet; what lies before the first that was not offered is not read."""
        for at in range(self.first, len(self.blocks)):
            if not untouched(self.blocks[at], self.hashes[at]):
                return at
        return len(self.blocks)


class Holds:
    """The blocks held back; used on the scheduler's thread alone."""

    def __init__(self, dumps: DumpPlanner) -> None:
        self._dumps = dumps
        self._holds: list[_Hold] = []

    def __bool__(self) -> bool:
        return bool(self._holds)

    def add(self, tracked: Tracked, upto: int, blocks: Sequence[KVCacheBlock], now: float) -> None:
        """Remember what ``tracked`` has of its first ``upto`` blocks and has not offered yet; all were computed."""
        mine = list(blocks[: min(upto, tracked.cursor + self._dumps.room())])
        if self._dumps.offers(tracked, len(mine)):
            self._holds.append(_Hold(tracked, mine, [block.block_hash for block in mine], tracked.cursor, now))

    def take(self, keys: KeyMaker, now: float) -> Iterator[tuple[Tracked, list[Dump]]]:
        """Offer what is confirmed by now, one request after the other; what is refused or late is forgotten.

        Ask in every step that is planned, when vLLM has allocated its blocks.
        """
        for hold in list(self._holds):
            del hold.blocks[hold.still() :]
            answer = keys.current(hold.tracked.request, hold.since) if len(hold.blocks) > hold.first else False
            if answer is None and now - hold.since < RECHECK_S:
                continue
            self._holds.remove(hold)
            if answer:
                yield (
                    hold.tracked,
                    self._dumps.plan(hold.tracked, len(hold.blocks), hold.blocks, self._dumps.room()),
                )

    def drop(self) -> None:
        """Forget everything."""
        self._holds.clear()
