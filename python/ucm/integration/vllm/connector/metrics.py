"""The connector's counters and times in vLLM's log line and Prometheus registry, through vLLM's
hooks for statistics.

Each half hands vLLM what happened since vLLM last asked, as one flat dictionary: counts are whole
numbers, times are short lists of seconds. vLLM adds up ranks and sides and carries the result to
the process that logs and exports. Nothing here raises into vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client import Histogram as PrometheusHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ucm.integration.vllm.connector import miss_stats as miss_stats
from ucm.integration.vllm.connector import sparse_counts
from ucm.integration.vllm.connector.guard import harmless
from ucm.integration.vllm.connector.tier_counts import COUNTER, GAUGE, TIER_COUNTERS, TIER_GAUGES
from ucm.reasons import MissReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Counters of the worker sides, in bytes on their rank.
LOADED_BYTES, PUBLISHED_BYTES = "loaded_bytes", "published_bytes"
#: Times of the worker sides, in seconds.
LOAD_SECONDS, DUMP_SECONDS = "load_seconds", "dump_seconds"

#: Counter -> (name in Prometheus without ``_total``, what it counts).
COUNTERS = {
    miss_stats.ASKED: (
        "ucm_asked_blocks",
        "Full blocks of admitted requests that vLLM's own cache did not hold.",
    ),
    miss_stats.HIT: ("ucm_hit_blocks", "Blocks found in the store and claimed."),
    miss_stats.LOADED: (
        "ucm_loaded_blocks",
        "Blocks loaded from the store by every rank instead of being computed.",
    ),
    miss_stats.PUBLISHED: ("ucm_published_blocks", "Blocks stored by every rank."),
    miss_stats.UNPUBLISHED: ("ucm_unpublished_blocks", "Blocks that some rank failed to store."),
    LOADED_BYTES: ("ucm_loaded_bytes", "Bytes of KV loaded from the store, of all ranks."),
    PUBLISHED_BYTES: ("ucm_published_bytes", "Bytes of KV stored, of all ranks."),
    miss_stats.DECLINED_TOKENS: (
        "ucm_declined_tokens",
        "Tokens computed because loading them would have been slower.",
    ),
    **{
        sparse_counts.COUNTER + name: texts for name, texts in sparse_counts.SPARSE_COUNTERS.items()
    },
}
MISSED_BLOCKS = ("ucm_missed_blocks", "Blocks asked for that were computed after all, by reason.")
UNSTORED_BLOCKS = ("ucm_unstored_blocks", "Blocks not stored for want of staging, by reason.")

#: Speeds as the scheduler side knows them -> (name in Prometheus, what is measured). The newest
#: counts.
GAUGES = {
    "prefill_tokens_per_second": (
        "ucm_prefill_tokens_per_second",
        "Tokens of prompts that a second computes.",
    ),
    "load_bytes_per_second": (
        "ucm_load_bytes_per_second",
        "Bytes that a second loads, of all ranks.",
    ),
    "load_fixed_seconds": ("ucm_load_fixed_seconds", "What a load takes however short it is."),
}

#: Times -> (name in Prometheus, what is measured).
HISTOGRAMS = {
    miss_stats.LOOKUP_SECONDS: (
        "ucm_lookup_seconds",
        "From a request's arrival to the store's answer, hashing included.",
    ),
    LOAD_SECONDS: (
        "ucm_load_seconds",
        "From the beginning of a load to the step that saw its end, on each rank.",
    ),
    DUMP_SECONDS: (
        "ucm_dump_seconds",
        "From the beginning of a dump to the step that saw it stored, on each rank.",
    ),
}
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Times of each kind kept between two of vLLM's log lines.
_LOGGED = 4 * miss_stats.TIMES


class UcmStats(KVConnectorStats):
    """Counts and times of one interval and the speeds at its end, by name."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    @harmless(None)
    def _add(self, other: Mapping[str, Any]) -> None:
        for name, news in other.items():
            if name in HISTOGRAMS:
                self.data[name] = [*self.data.get(name, ()), *news][:_LOGGED]
            elif name in GAUGES or name.startswith(GAUGE):
                self.data[name] = news
            else:
                self.data[name] = self.data.get(name, 0) + news

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These and those of another rank, half or interval."""
        self._add(other.data)
        return self

    @harmless(dict)
    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs: every count that is not zero, those of the misses by reason last; means
        of the times."""
        order = [*COUNTERS, *sorted(set(self.data) - set(COUNTERS) - set(HISTOGRAMS) - set(GAUGES))]
        order = [name for name in order if not name.startswith(GAUGE)]
        told = {
            f"ucm {name.replace('.', ' ')}": self.data[name]
            for name in order
            if self.data.get(name)
        }
        for name in HISTOGRAMS:
            if times := self.data.get(name):
                told[f"ucm mean {name}"] = round(sum(times) / len(times), 4)
        for name in GAUGES:
            if name in self.data:
                told[f"ucm {name}"] = float(f"{self.data[name]:.4g}")
        return told

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(value or name.startswith(GAUGE) for name, value in self.data.items())


class UcmPromMetrics(KVConnectorPromMetrics):
    """The counters and histograms in Prometheus, by vLLM's own labels; the misses by reason too."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = functools.partial(_metric, metric_types[PrometheusCounter])
        show = functools.partial(
            _metric, metric_types[PrometheusGauge], multiprocess_mode="mostrecent"
        )
        measure = functools.partial(_metric, metric_types[PrometheusHistogram], buckets=BUCKETS)
        missed = make(*MISSED_BLOCKS, (*labelnames, "reason"))
        unstored = make(*UNSTORED_BLOCKS, (*labelnames, "reason"))
        self._tier_counters = {
            key: make(*texts, (*labelnames, "tier")) for key, texts in TIER_COUNTERS.items()
        }
        self._tier_gauges = {
            key: show(*texts, (*labelnames, "tier", "half")) for key, texts in TIER_GAUGES.items()
        }
        self._values = per_engine_labelvalues
        self._counters: dict[int, dict[str, Any]] = {}
        self._histograms: dict[int, dict[str, Any]] = {}
        self._gauges: dict[int, dict[str, Any]] = {}
        for engine, values in per_engine_labelvalues.items():
            counters = {
                key: make(*texts, tuple(labelnames)).labels(*values)
                for key, texts in COUNTERS.items()
            }
            for reason in MissReason:
                counters[miss_stats.MISSED + reason] = missed.labels(*values, str(reason))
            for why in (miss_stats.BUSY, miss_stats.ENDED, miss_stats.OVERWRITTEN):
                counters[miss_stats.UNSTORED + why] = unstored.labels(*values, why)
            self._counters[engine] = counters
            self._gauges[engine] = {
                key: show(*texts, tuple(labelnames)).labels(*values)
                for key, texts in GAUGES.items()
            }
            self._histograms[engine] = {
                key: measure(*texts, tuple(labelnames)).labels(*values)
                for key, texts in HISTOGRAMS.items()
            }

    @harmless(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted and measured."""
        counters, histograms = (
            self._counters.get(engine_idx, {}),
            self._histograms.get(engine_idx, {}),
        )
        gauges = self._gauges.get(engine_idx, {})
        for name, news in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(news)
            elif name in gauges:
                gauges[name].set(news)
            elif name in histograms:
                for seconds in news:
                    histograms[name].observe(seconds)
            elif engine_idx in self._values:
                self._observe_tier(name, news, self._values[engine_idx])

    def _observe_tier(self, name: str, news: Any, values: list[object]) -> None:
        if name.startswith(COUNTER):
            key, _, tier = name.removeprefix(COUNTER).partition(".")
            if key in self._tier_counters:
                self._tier_counters[key].labels(*values, tier).inc(news)
        elif name.startswith(GAUGE):
            key, _, rest = name.removeprefix(GAUGE).partition(".")
            tier, _, half = rest.rpartition(".")
            if key in self._tier_gauges:
                self._tier_gauges[key].labels(*values, tier, half).set(news)


@functools.cache
def _metric(kind: Any, name: str, text: str, labels: tuple[str, ...], **more: Any) -> Any:
    """A metric, made once per process: a second engine in it adds to the same ones."""
    return kind(name=name, documentation=text, labelnames=list(labels), **more)
