"""The statistics of a store's tiers that vLLM gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from ucm.integration.vllm.connector import UCMConnector
from ucm.integration.vllm.connector.stats import EVERY, TierCounts, UcmStats
from ucm.metrics.names import TIER_COUNTERS, TIER_GAUGES

TYPES: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


class Store:
    """Counts its calls and returns what the test sets."""

    def __init__(self, *tiers: dict[str, Any]) -> None:
        self.tiers, self.asked = tiers, 0

    def stats(self) -> dict[str, Any]:
        """As a store of the core."""
        self.asked += 1
        return {"tiers": list(self.tiers)} if self.tiers else {"hits": 3}


def tier(name: str, **told: Any) -> dict[str, Any]:
    """A tier's part of a store's stats."""
    return dict.fromkeys((*TIER_COUNTERS, *TIER_GAUGES), 0) | {"name": name, "healthy": True} | told


def test_new_counts_are_reported_once_and_rarely_read() -> None:
    now = 0.0
    counts = TierCounts(lambda: now, "3")
    memory, posix = tier("memory", hits=2, memory=True), tier("posix", used_bytes=10)
    store: Any = Store(memory, posix)
    assert counts.take(None) == {}
    told = counts.take(store)
    assert {name: value for name, value in told.items() if value} == {
        "tier.hits.memory": 2,
        "tier_now.healthy.memory.3": 1,
        "tier_now.healthy.posix.3": 1,
        "tier_now.used_bytes.posix.3": 10,
    }
    memory["hits"], posix["healthy"] = 5, False
    assert counts.take(store) == {}
    assert store.asked == 1, "not in every step"
    now += EVERY
    assert counts.take(store) == {"tier.hits.memory": 3, "tier_now.healthy.posix.3": 0}
    now += EVERY
    assert counts.take(store) == {}


def test_a_store_without_tiers_is_read_once() -> None:
    now = 0.0
    counts, store = TierCounts(lambda: now, "0"), Store()
    for _ in range(3):
        assert counts.take(store) == {}  # type: ignore[arg-type]
        now += EVERY
    assert store.asked == 1


def test_counts_reach_prometheus_with_their_tier() -> None:
    ranks = [
        UcmStats(data={"tier.hits.memory": n, f"tier_now.used_bytes.memory.{n}": 7 * n})
        for n in (1, 2)
    ]
    stats = (
        ranks[0].aggregate(ranks[1]).aggregate(UcmStats(data={"tier_now.used_bytes.memory.2": 9}))
    )
    assert not stats.is_empty()
    assert stats.data == {  # type: ignore[attr-defined]
        "tier.hits.memory": 3,
        "tier_now.used_bytes.memory.1": 7,
        "tier_now.used_bytes.memory.2": 9,
    }
    assert stats.reduce() == {"ucm tier hits memory": 3}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = UCMConnector.build_prom_metrics(
        config, TYPES, ["model_name", "engine"], {0: ["tiered", "0"]}
    )  # type: ignore[arg-type]
    assert metrics is not None
    metrics.observe({"tier_now.healthy.posix.0": 1}, 0)
    begun = {"model_name": "tiered", "engine": "0", "tier": "posix"}
    assert REGISTRY.get_sample_value("ucm_tier_refused_blocks_total", begun) == 0
    metrics.observe(stats.data | {"tier.newer.memory": 1, "tier_now.newer.memory.1": 1}, 0)  # type: ignore[attr-defined]
    labels = {"model_name": "tiered", "engine": "0", "tier": "memory"}
    assert REGISTRY.get_sample_value("ucm_tier_hit_blocks_total", labels) == 3
    assert REGISTRY.get_sample_value("ucm_tier_used_bytes", labels | {"side": "2"}) == 9


def test_bytes_by_location_are_counted_once() -> None:
    """By each rank in its memory, by the first rank below it, and by the scheduler side not."""
    memory = tier("memory", used_bytes=3, memory=True)
    store: Any = Store(memory, tier("posix", used_bytes=10), tier("redis", used_bytes=5))
    told: dict[str, Any] = {}
    for side in ("scheduler", "0", "1"):
        news = TierCounts(lambda: 0.0, side).take(store)
        told |= {name: value for name, value in news.items() if name.startswith("memory_now.")}
    assert told == {"memory_now.cpu.0": 3, "memory_now.external.0": 15, "memory_now.cpu.1": 3}
    now = 0.0
    counts = TierCounts(lambda: now, "0")
    counts.take(store)
    memory["used_bytes"], now = 4, EVERY
    assert counts.take(store) == {"tier_now.used_bytes.memory.0": 4, "memory_now.cpu.0": 4}


def test_the_scheduler_side_reports_no_bytes_of_tiers() -> None:
    """Its store is for lookups alone and counts none: 0 would be wrong."""
    store: Any = Store(tier("posix", used_bytes=0, capacity_bytes=0, writable=True))
    news = TierCounts(lambda: 0.0, "scheduler").take(store)
    gauges = {name: value for name, value in news.items() if name.startswith("tier_now.")}
    assert gauges == {
        "tier_now.healthy.posix.scheduler": 1,
        "tier_now.writable.posix.scheduler": 1,
    }


@pytest.mark.parametrize(
    "name", [name for name, _ in (*TIER_COUNTERS.values(), *TIER_GAUGES.values())]
)
def test_names_have_our_prefix_and_a_unit(name: str) -> None:
    assert name.startswith("ucm_tier_")
    assert name.endswith(("_blocks", "_bytes", "_operations", "_healthy", "_writable"))
