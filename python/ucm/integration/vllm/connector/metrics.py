"""The connector's counters in vLLM's own log line and Prometheus registry, through its hooks for statistics.

Both halves hand vLLM what was counted since its last question, as one flat dictionary of whole numbers; vLLM adds them
up over ranks and halves and brings them to the process that logs and exports. Nothing here raises into vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ucm.integration.vllm.connector import account
from ucm.integration.vllm.connector.guard import harmless
from ucm.reasons import MissReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Counters of the worker halves, in bytes on their rank.
LOADED_BYTES, PUBLISHED_BYTES = "loaded_bytes", "published_bytes"

#: Counter -> (name in Prometheus without ``_total``, what it counts).
COUNTERS = {
    account.ASKED: ("ucm_asked_blocks", "Full blocks of admitted requests that vLLM's own cache did not hold."),
    account.HIT: ("ucm_hit_blocks", "Blocks found in the store and claimed."),
    account.LOADED: ("ucm_loaded_blocks", "Blocks loaded from the store by every rank instead of being computed."),
    account.PUBLISHED: ("ucm_published_blocks", "Blocks stored by every rank."),
    account.UNPUBLISHED: ("ucm_unpublished_blocks", "Blocks that some rank failed to store."),
    LOADED_BYTES: ("ucm_loaded_bytes", "Bytes of KV loaded from the store, of all ranks."),
    PUBLISHED_BYTES: ("ucm_published_bytes", "Bytes of KV stored, of all ranks."),
}
MISSED_BLOCKS = ("ucm_missed_blocks", "Blocks asked for that were computed after all, by reason.")


class UcmStats(KVConnectorStats):
    """Counts of one interval, by name."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    @harmless(None)
    def _add(self, other: Mapping[str, int]) -> None:
        for name, count in other.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These and those of another rank, half or interval."""
        self._add(other.data)
        return self

    @harmless(dict)
    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs: every count that is not zero, those of the misses by reason last."""
        order = [*COUNTERS, *sorted(set(self.data) - set(COUNTERS))]
        return {f"ucm {name.replace('.', ' ')}": self.data[name] for name in order if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class UcmPromMetrics(KVConnectorPromMetrics):
    """The counters in Prometheus, by vLLM's own labels; the misses by reason too."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = functools.partial(_counter, metric_types[PrometheusCounter])
        missed = make(*MISSED_BLOCKS, (*labelnames, "reason"))
        self._counters: dict[int, dict[str, Any]] = {}
        for engine, values in per_engine_labelvalues.items():
            counters = {key: make(*texts, tuple(labelnames)).labels(*values) for key, texts in COUNTERS.items()}
            for reason in MissReason:
                counters[account.MISSED + reason] = missed.labels(*values, str(reason))
            self._counters[engine] = counters

    @harmless(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted."""
        counters = self._counters.get(engine_idx, {})
        for name, count in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(count)


@functools.cache
def _counter(kind: Any, name: str, text: str, labels: tuple[str, ...]) -> Any:
    """A counter, made once per process: a second engine in it adds to the same ones."""
    return kind(name=name, documentation=text, labelnames=list(labels))
