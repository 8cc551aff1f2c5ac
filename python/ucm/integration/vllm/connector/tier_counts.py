"""Statistics of a store's tiers for vLLM: counters as differences, sizes and health as current
values.

A name in the statistics is ``tier.<counter>.<tier>`` or ``tier_now.<gauge>.<tier>.<half>``: flat,
like everything that vLLM carries from the sides to the process that exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

COUNTER, GAUGE = "tier.", "tier_now."

#: Counter of a tier -> (name in Prometheus without ``_total``, what it counts).
TIER_COUNTERS = {
    "hits": ("ucm_tier_hit_blocks", "Blocks found by lookups, by the tier that had them."),
    "blocks_read": ("ucm_tier_read_blocks", "Blocks read, by tier."),
    "bytes_read": ("ucm_tier_read_bytes", "Bytes read, by tier."),
    "blocks_written": ("ucm_tier_written_blocks", "Blocks written, by tier; promoted ones too."),
    "bytes_written": ("ucm_tier_written_bytes", "Bytes written, by tier."),
    "failures": (
        "ucm_tier_failed_operations",
        "Operations that a tier failed or did not end in time.",
    ),
    "copies_refused": (
        "ucm_tier_refused_blocks",
        "Copies that were not what they should be, by tier.",
    ),
    "promotions": (
        "ucm_tier_promoted_blocks",
        "Blocks brought up from below, by the tier they came to.",
    ),
    "demotions": (
        "ucm_tier_demoted_blocks",
        "Blocks given up by the tier above, by the tier they came to.",
    ),
    "copies_dropped": (
        "ucm_tier_dropped_blocks",
        "Copies that were not made because the tier was busy or not well.",
    ),
    "quota_removed": (
        "ucm_tier_quota_removed_blocks",
        "Blocks removed because their tenant had more than its quota.",
    ),
}

#: What a tier is now -> (name in Prometheus, what it is).
TIER_GAUGES = {
    "used_bytes": (
        "ucm_tier_used_bytes",
        "Bytes that a tier holds, as each half of the connector sees it.",
    ),
    "capacity_bytes": (
        "ucm_tier_capacity_bytes",
        "Bytes that a tier may hold, as each half sees it.",
    ),
    "healthy": ("ucm_tier_healthy", "Whether a tier is used now (1) or switched off (0), by half."),
    "writable": (
        "ucm_tier_writable",
        "Whether a tier takes blocks now (1) or is at most read (0), by half.",
    ),
}

#: Seconds between two looks: a store answers at once, but a step is short.
EVERY = 1.0


class TierCounts:
    """Tells what is new of one store's tiers."""

    def __init__(self, clock: Callable[[], float], half: str) -> None:
        """``half``: who tells it, ``scheduler`` or the number of the rank."""
        self._clock, self._half = clock, half
        self._next = clock()
        self._told: dict[str, int] = {}
        self._silent = False

    def take(self, store: UcmKVStoreBaseV1 | None) -> dict[str, Any]:
        """What is new since the last call that told something; mostly nothing, as it looks once in
        a while only."""
        now = self._clock()
        if store is None or self._silent or now < self._next:
            return {}
        self._next = now + EVERY
        tiers = store.stats().get("tiers")
        if not isinstance(tiers, list):
            self._silent = True  # a store without tiers has none later
            return {}
        return {name: value for tier in tiers for name, value in self._news(tier)}

    def _news(self, tier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for counter in TIER_COUNTERS:
            name, count = f"{COUNTER}{counter}.{tier['name']}", int(tier[counter])
            before = self._told.get(name, 0)
            self._told[name] = count
            if count > before:
                yield name, count - before
        for gauge in TIER_GAUGES:
            name, value = f"{GAUGE}{gauge}.{tier['name']}.{self._half}", int(tier[gauge])
            if self._told.get(name) != value:
                self._told[name] = value
                yield name, value
