"""Keeps a working set above the store's limit from rewriting the store for ever.

Where more blocks are asked for again and again than the store holds, each is evicted before it is
asked for: everything is written in every round, and nothing is hit. :class:`Turnover` compares, for
as many blocks as the store holds, how many of those stored before were hits and how many were
evicted. While more than half were evicted, a chain that was evicted is stored again only now and
then, and only its beginning, so that what is stored stays long enough to be a hit.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.metadata import StoreRoom

#: An evicted chain is stored again with this probability.
CHANCE = 1 / 16
#: It is stored again up to this share of the store's limit, counted from its first block.
SHARE = 2
#: Most blocks over which hits and evictions are compared.
WINDOW = 1 << 17
#: What sets the limit of a tier, by its name; of all others the key ``storage_capacity``.
LIMIT_KEYS = {
    "memory": "cache_size",
    "redis": "maxmemory of the server",
    "mooncake": "global_segment_size",
}


@dataclass(frozen=True)
class StoreLimit:
    """How much a store holds: the limit of its largest tier."""

    tier: str
    key: str  # sets it
    blocks: int
    block_bytes: int  # of all parts of a block, on the medium
    full: bool  # at least half of it is in use


def limit_of(rooms: Collection[StoreRoom], parts: int) -> StoreLimit | None:
    """The limit for blocks of ``parts`` parts. Each rank that writes one reports its room; None
    until all have reported. Memory holds the parts of its rank, any other tier those of all."""
    if len(rooms) < max(parts, 1):
        return None
    least = min(rooms, key=lambda room: room.capacity // room.record)
    name, block_bytes = least.tier.rstrip("0123456789"), sum(room.record for room in rooms)
    return StoreLimit(
        tier=least.tier,
        key=LIMIT_KEYS.get(name, "storage_capacity"),
        blocks=least.capacity // (least.record if name == "memory" else block_bytes),
        block_bytes=block_bytes,
        full=any(2 * room.used >= room.capacity for room in rooms),
    )


class Turnover:
    """What became of the blocks of one engine that were stored before and are asked for again."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """``chance`` draws a number from [0, 1)."""
        self._chance = chance
        self._limit: StoreLimit | None = None
        self._outcomes: deque[tuple[int, bool]] = deque()  # blocks, whether they were evicted
        self._total = self._evicted = 0  # blocks in the outcomes
        self._warned = 0  # the limit in blocks of the last warning
        self.exceeded = False  # the working set is above the limit

    def limited(self, limit: StoreLimit | None) -> None:
        """The store's limit and use are these now."""
        self._limit = limit
        self._judge()

    def asked_again(self, hits: int, evicted: int) -> None:
        """A request asked for blocks that were stored before: ``hits`` are there, ``evicted`` are
        absent.

        Absent blocks of a store with room were removed for another reason, and count for
        nothing."""
        if self._limit is None:
            return
        for blocks, absent in ((hits, False), (evicted if self._limit.full else 0, True)):
            if blocks:
                self._outcomes.append((blocks, absent))
                self._total += blocks
                self._evicted += blocks * absent
        self._judge()

    def offered_below(self) -> int:
        """Draws, for an evicted chain, the number of its first blocks that may be stored again."""
        if self._limit is None or self._chance() >= CHANCE:
            return 0
        return self._limit.blocks // SHARE

    def _judge(self) -> None:
        limit = self._limit
        if limit is None:
            self.exceeded = False
            return
        window = min(limit.blocks, WINDOW)
        while self._total > window:
            self._drop(self._total - window)
        self.exceeded = limit.full and 2 * self._evicted > self._total >= window > 0
        if self.exceeded and self._warned != limit.blocks:
            self._warned = limit.blocks
            self._warn(limit)

    def _warn(self, limit: StoreLimit) -> None:
        logger.warning(
            "the working set is larger than the store: of the last %d blocks that were stored"
            " before and asked for again, %d had been evicted. Tier %s holds %d blocks of %d bytes"
            " each. While that is so, an evicted prompt is stored again in one of %d cases, and at"
            " most %d blocks of it; raise %s to store all",
            self._total,
            self._evicted,
            limit.tier,
            limit.blocks,
            limit.block_bytes,
            round(1 / CHANCE),
            limit.blocks // SHARE,
            limit.key,
        )

    def _drop(self, most: int) -> None:
        """Forget the oldest outcome, or ``most`` blocks of it."""
        blocks, absent = self._outcomes.popleft()
        if blocks > most:
            self._outcomes.appendleft((blocks - most, absent))
            blocks = most
        self._total -= blocks
        self._evicted -= blocks * absent
