"""Keeps a working set above the store's limit from rewriting the store for ever.

Where more blocks are asked for again and again than the store holds, each is evicted before it is
asked for: everything is written in every round, and nothing is hit. :class:`Turnover` compares, for
about as many blocks as the store holds, how many of those stored before were hits and how many were
evicted. While more than half were evicted, a chain that was evicted is stored again only now and
then, and only its beginning, so that what is stored stays long enough to be a hit. Where tenants
have a quota, the same is compared for each tenant, with as many blocks as its quota holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.metadata import StoreRoom

#: An evicted chain is stored again with this probability.
CHANCE = 1 / 16
#: It is stored again up to this share of the limit, counted from its first block.
SHARE = 2
#: Most blocks over which hits and evictions are compared.
WINDOW = 1 << 17
#: Most tenants whose hits and evictions are counted; the one that asked longest ago is forgotten.
MOST_TENANTS = 4096
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
    quota: int | None = None  # blocks of one tenant, where that is less
    quota_removed: int = 0  # blocks above a quota that were removed since the store was opened
    expire_after: float | None = None  # seconds without use after which a block is removed


def limit_of(rooms: Collection[StoreRoom], parts: int) -> StoreLimit | None:
    """The limit for blocks of ``parts`` parts. Each rank that writes one reports its room; None
    until all have reported. Memory holds the parts of its rank, any other tier those of all."""
    if len(rooms) < max(parts, 1):
        return None
    least = min(rooms, key=lambda room: room.capacity // room.record)
    name, block_bytes = least.tier.rstrip("0123456789"), sum(room.record for room in rooms)
    blocks = least.capacity // (least.record if name == "memory" else block_bytes)
    quota = None if least.quota is None else least.quota // block_bytes
    return StoreLimit(
        tier=least.tier,
        key=LIMIT_KEYS.get(name, "storage_capacity"),
        blocks=blocks,
        block_bytes=block_bytes,
        full=any(2 * room.used >= room.capacity for room in rooms),
        quota=quota if quota is not None and quota < blocks else None,
        quota_removed=sum(room.quota_removed for room in rooms) // len(rooms),
        expire_after=least.expire_after,
    )


@dataclass(slots=True)
class _Counts:
    """Of the last blocks that were stored before and asked for again."""

    total: float = 0.0
    evicted: float = 0.0

    def add(self, blocks: int, evicted: bool, window: int) -> None:
        """Count blocks; those before count less, so that the total stays within ``window``."""
        blocks = min(blocks, window)
        if self.total + blocks > window:
            self.evicted *= (window - blocks) / self.total
            self.total = window - blocks
        self.total += blocks
        self.evicted += blocks * evicted


class Turnover:
    """What became of the blocks of one engine that were stored before and are asked for again."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """``chance`` draws a number from [0, 1)."""
        self._chance = chance
        self._limit: StoreLimit | None = None
        self._counts: dict[bytes, _Counts] = {}  # by tenant; empty for all that share the store
        self._unexplained = 0  # blocks removed above a quota that were not counted as evicted yet
        self._warned: set[int] = set()  # the limits in blocks of which a warning was logged

    def limited(self, limit: StoreLimit | None) -> None:
        """The store's limit and use are these now."""
        if limit is not None:
            before = 0 if self._limit is None else self._limit.quota_removed
            self._unexplained += max(limit.quota_removed - before, 0)
        self._limit = limit

    @property
    def expire_after(self) -> float | None:
        """Seconds without use after which the store removes a block, None for never."""
        return None if self._limit is None else self._limit.expire_after

    def asked_again(self, hits: int, evicted: int, tenant: bytes = b"") -> None:
        """A request asked for blocks that were stored before: ``hits`` are there, ``evicted`` are
        absent.

        Absent blocks of a store with room were removed for another reason. They count for nothing
        beyond the number of those that were removed because their tenant was above its quota."""
        limit = self._limit
        if limit is None or not hits + evicted:
            return
        capacity, tenant = self._capacity(limit, tenant)
        if not limit.full:
            evicted = 0 if not tenant else min(evicted, self._unexplained)
        if tenant:
            self._unexplained -= min(evicted, self._unexplained)
        counts = self._counts.pop(tenant) if tenant in self._counts else _Counts()
        self._counts[tenant] = counts
        if len(self._counts) > MOST_TENANTS:
            del self._counts[next(iter(self._counts))]
        window = min(capacity, WINDOW)
        counts.add(hits, False, window)
        counts.add(evicted, True, window)
        if self.exceeded(tenant) and capacity not in self._warned:
            self._warned.add(capacity)
            self._warn(limit, capacity, counts)

    def exceeded(self, tenant: bytes = b"") -> bool:
        """Whether the working set of this tenant is above what the store holds of it."""
        if self._limit is None:
            return False
        capacity, tenant = self._capacity(self._limit, tenant)
        counts, window = self._counts.get(tenant), min(capacity, WINDOW)
        if counts is None or not (tenant or self._limit.full):
            return False
        return 2 * counts.evicted > counts.total >= window > 0

    def offered_below(self, tenant: bytes = b"") -> int:
        """Draws, for an evicted chain, the number of its first blocks that may be stored again."""
        if self._limit is None or self._chance() >= CHANCE:
            return 0
        return self._capacity(self._limit, tenant)[0] // SHARE

    @staticmethod
    def _capacity(limit: StoreLimit, tenant: bytes) -> tuple[int, bytes]:
        """The blocks that are kept of a tenant, and under which tenant it is counted: blocks
        without a tag have no quota, and without a quota all tenants share the store."""
        if tenant and limit.quota is not None:
            return limit.quota, tenant
        return limit.blocks, b""

    @staticmethod
    def _warn(limit: StoreLimit, capacity: int, counts: _Counts) -> None:
        of_tenant = capacity != limit.blocks
        logger.warning(
            "the working set%s is larger than %s: of the last %d blocks that were stored"
            " before and asked for again, %d had been evicted. %s %s holds %d blocks of %d bytes"
            " each. While that is so, an evicted prompt is stored again in one of %d cases, and at"
            " most %d blocks of it; raise %s to store all",
            " of a tenant" if of_tenant else "",
            "its quota" if of_tenant else "the store",
            round(counts.total),
            round(counts.evicted),
            "The quota of each tenant in tier" if of_tenant else "Tier",
            limit.tier,
            capacity,
            limit.block_bytes,
            round(1 / CHANCE),
            capacity // SHARE,
            "tenant_quota" if of_tenant else limit.key,
        )
