"""The statistics of sparse attention that vLLM gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from ucm.integration.vllm.connector import UCMConnector
from ucm.integration.vllm.connector.stats import EVERY, SparseCounts, UcmStats
from ucm.metrics.names import AT
from ucm.sparse.base import SparseStats

TYPES: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def test_new_counts_are_reported_once_and_rarely() -> None:
    now = 0.0
    counts, stats = SparseCounts(lambda: now), SparseStats()
    assert counts.take(stats) == {}
    now += EVERY
    stats.add(rows_sparse=4, blocks_kept=2.5, selection_s=0.25, mass_seen=1.0)
    told = {"sparse.rows_sparse": 4, "sparse.blocks_kept": 2.5, "sparse.selection_s": 0.25}
    assert "sparse_ratio" not in told, "nothing was seen"
    assert counts.take(stats) == told
    stats.add(rows_sparse=1)
    assert counts.take(stats) == {}, "not in every step"
    now += EVERY
    assert counts.take(stats) == {"sparse.rows_sparse": 1}
    stats.add(blocks_seen=10, blocks_kept=2.5)
    now += EVERY
    assert counts.take(stats)["sparse_ratio"] == 0.5, "of all since the start"
    now += EVERY
    stats.clear()  # what was measured before the first request
    assert counts.take(stats) == {}
    now += EVERY
    stats.add(rows_sparse=2)
    assert counts.take(stats) == {"sparse.rows_sparse": 2}


def test_sparse_counts_reach_prometheus_and_the_log() -> None:
    stats = UcmStats(data={"sparse.blocks_new": 3}).aggregate(
        UcmStats(data={"sparse.blocks_new": 2})
    )
    assert stats.reduce() == {"ucm sparse blocks_new": 5}
    extra = {"storage_path": "/d", "ucm_sparse_config": {"ESA": {}}}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
    )
    labels = {"model_name": "sparse", "engine": "0"}
    metrics = UCMConnector.build_prom_metrics(
        config, TYPES, list(labels), {0: list(labels.values())}
    )  # type: ignore[arg-type]
    assert metrics is not None
    metrics.observe(stats.data, 0)  # type: ignore[attr-defined]
    assert REGISTRY.get_sample_value("ucm_sparse_new_blocks_total", labels) == 5


def test_the_worker_side_reports_sparse_counts() -> None:
    made = UCMConnector.__new__(UCMConnector)
    made._scheduler = made._worker = made._miss_stats = None
    made._exports_metrics = True
    made._sparse_worker = SimpleNamespace(take_counts=lambda: {"sparse.blocks_absent": 1})  # type: ignore[assignment]
    stats = made.get_kv_connector_stats()
    assert stats is not None and stats.data | {AT: 0} == {"sparse.blocks_absent": 1, AT: 0}
