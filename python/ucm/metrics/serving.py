"""``/metrics`` on a port of its own: of stores that a program opens without vLLM, and of what the
program records itself. In vLLM it is a second address of vLLM's registry.

``UCM_METRICS_PORT`` or the port of the metrics file says where. It needs the extra ``metrics``.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ucm.errors import ConfigError
from ucm.metrics import file, names

if TYPE_CHECKING:
    from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

logger = logging.getLogger("ucm.metrics")

#: Of a program without vLLM.
REGISTRY = CollectorRegistry()

_serving: set[int] = set()
_lock = threading.Lock()


def port_of(port: int | None, config_path: str | None) -> int | None:
    """The port that a configuration names, else its metrics file; None for none."""
    if port is None and config_path:
        try:
            return file.read(config_path).prometheus.port
        except ConfigError as error:
            logger.warning("metrics are not served on a port: %s", error.message)
    return port


def serve(port: int | None, registry: CollectorRegistry = REGISTRY) -> bool:
    """Serve a registry on a port of every interface, once in a process; any path answers. False
    where there is no port, or it is taken."""
    with _lock:
        if port is None or port in _serving:
            return port is not None
        try:
            start_http_server(port, registry=registry)
        except OSError as error:
            logger.warning("metrics are not served on port %d: %s", port, error.strerror or error)
            return False
        _serving.add(port)
    logger.info("metrics are served on port %d", port)
    return True


# Of a program's own
# --------------------------------------------------------------------------------------------------


class UCMMetrics:
    """What a program without vLLM records, in :data:`REGISTRY`."""

    requests_total = Counter(*names.REQUESTS_TOTAL, ["status"], registry=REGISTRY)
    cache_hit_rate = Gauge(*names.CACHE_HIT_RATE, ["cache_type"], registry=REGISTRY)
    io_latency = Histogram(
        *names.IO_LATENCY, ["operation"], buckets=names.LATENCY_BUCKETS, registry=REGISTRY
    )
    io_throughput = Gauge(*names.IO_THROUGHPUT, ["operation"], registry=REGISTRY)
    memory_usage = Gauge(*names.MEMORY_USAGE, ["location"], registry=REGISTRY)

    @classmethod
    def record_load(cls, duration: float, size: int) -> None:
        """A load of ``size`` bytes took ``duration`` seconds."""
        cls._record("load", duration, size)

    @classmethod
    def record_dump(cls, duration: float, size: int) -> None:
        """A dump of ``size`` bytes took ``duration`` seconds."""
        cls._record("dump", duration, size)

    @classmethod
    def record_hit_rate(cls, hits: int, total: int, cache_type: str) -> None:
        """The share of hits, 0 where nothing was asked for; ``cache_type``: prefix, block."""
        cls.cache_hit_rate.labels(cache_type).set(hits / total if total > 0 else 0)

    @classmethod
    def _record(cls, operation: str, duration: float, size: int) -> None:
        cls.io_latency.labels(operation).observe(duration)
        if duration > 0:
            cls.io_throughput.labels(operation).set(size / duration / 1e9)


# Of stores
# --------------------------------------------------------------------------------------------------

#: Series -> counter of a store's ``stats()``.
_COUNTED = {
    names.LOADED: "blocks_loaded",
    names.PUBLISHED: "blocks_published",
    names.UNPUBLISHED: "blocks_failed",
    names.LOADED_BYTES: "bytes_loaded",
    names.PUBLISHED_BYTES: "bytes_published",
}
_TIMED = {
    names.LOOKUP_SECONDS: "lookup_latency",
    names.LOAD_SECONDS: "load_latency",
    names.DUMP_SECONDS: "dump_latency",
}


class StoreCollector:
    """The counters of open stores, read when they are scraped, by the number of the store."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        self._stores: weakref.WeakKeyDictionary[UcmKVStoreBaseV1, str]
        self._stores = weakref.WeakKeyDictionary()

    def watch(self, store: UcmKVStoreBaseV1) -> None:
        """Have a store's counters in the registry, as long as it is open."""
        self._stores[store] = str(next(self._numbers))

    def describe(self) -> list[Metric]:
        """None before they are scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The series of every store."""
        found: dict[str, Mapping[str, Any]] = {}
        for store, number in list(self._stores.items()):
            try:
                found[number] = store.stats()
            except Exception:  # closed, or a store of the user's own
                logger.debug("store %s has no counters", number, exc_info=True)
        for key, counter in _COUNTED.items():
            made = CounterMetricFamily(*names.COUNTERS[key], labels=["store"])
            for number, stats in found.items():
                if counter in stats:
                    made.add_metric([number], stats[counter])
            yield made
        missed = CounterMetricFamily(*names.MISSED_BLOCKS, labels=["store", "reason"])
        for number, stats in found.items():
            for reason, count in stats.get("misses", {}).items():
                missed.add_metric([number, reason], count)
        yield missed
        for key, histogram in _TIMED.items():
            timed = HistogramMetricFamily(*names.HISTOGRAMS[key], labels=["store"])
            for number, stats in found.items():
                if one := stats.get(histogram):
                    bounds = [*map(str, one["bounds"]), "+Inf"]
                    sums = itertools.accumulate(one["buckets"])
                    buckets = list(zip(bounds, sums, strict=True))
                    timed.add_metric([number], buckets, sum_value=one["sum_seconds"])
            yield timed
        for kind, table in (
            (CounterMetricFamily, names.TIER_COUNTERS),
            (GaugeMetricFamily, names.TIER_GAUGES),
        ):
            for key, series in table.items():
                family = kind(*series, labels=["store", "tier"])
                for number, stats in found.items():
                    for tier in stats.get("tiers", ()):
                        family.add_metric([number, tier["name"]], int(tier[key]))
                yield family


_collector = StoreCollector()
REGISTRY.register(_collector)


def watch(store: UcmKVStoreBaseV1, environ: Mapping[str, str] = os.environ) -> None:
    """Serve the counters of a store where ``UCM_METRICS_PORT`` is set."""
    _collector.watch(store)
    try:
        port = int(environ["UCM_METRICS_PORT"])
    except ValueError:
        logger.warning("UCM_METRICS_PORT is no number: metrics are not served")
        return
    serve(port)
