"""``/metrics`` on a port of its own: without vLLM, and beside vLLM's."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from blocks import PATIENT
from ports import free_port
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from real_prometheus import until

from ucm.config import parse
from ucm.metrics import UCMMetrics
from ucm.metrics.names import rows
from ucm.metrics.serving import REGISTRY, port_of, serve
from ucm.store import UcmConnectorFactoryV1

SIZE = 4096
SHAPE = {"tensor_size": SIZE, "shard_size": SIZE, "block_size": SIZE, "identity": "x"}


@pytest.fixture
def port() -> int:
    """A port that is free."""
    return free_port()


def samples(port: int, path: str = "/metrics") -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of an endpoint by name."""
    text = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).raise_for_status().text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append((one.labels, one.value))
    return found


def test_a_program_without_vllm_has_the_counters_of_its_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setenv("UCM_METRICS_PORT", str(port))
    block = np.arange(SIZE, dtype=np.uint8).reshape(1, SIZE)
    config = SHAPE | {"storage_backends": str(tmp_path), "layout": "file", "deadlines": PATIENT}
    with UcmConnectorFactoryV1.create_connector("UcmPosixStore", config) as store:
        store.wait(store.dump_data([bytes(16)], [0], [[block.ctypes.data]]))
        assert store.lookup([bytes(16), b"1" * 16]) == [True, False]
        store.wait(store.load_data([bytes(16)], [0], [[block.ctypes.data]]))
        counted = "ucm_load_seconds_count"  # when the load has ended and its caller goes on
        until(lambda: samples(port)[counted][0][1] == 1, "the time of the load is counted")
        found = samples(port, "/any/path")
        ((labels, loaded),) = found["ucm_loaded_blocks_total"]
        number = {"store": labels["store"]}
        assert loaded == 1
        ((_, size),) = found["ucm_published_bytes_total"]
        assert size >= SIZE, "those of a whole record"
        assert found[counted] == [(number, 1)]
        buckets = [value for _, value in found["ucm_load_seconds_bucket"]]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 1
        tier = number | {"tier": "posix"}
        assert found["ucm_tier_written_blocks_total"] == [(tier, 1)]
        assert found["ucm_tier_healthy"] == [(tier, 1)]
        listed = {row.name for _, all_rows in rows() for row in all_rows}
        ends = ("_bucket", "_sum", "_count")
        for name in found:
            if name.startswith("ucm_") and not name.endswith("_created"):
                bare = name.rpartition("_")[0] if name.endswith(ends) else name
                assert bare in listed, name
    del store
    assert not samples(port).get("ucm_tier_healthy"), "a closed store has no state"


def test_what_a_program_records_is_served(port: int) -> None:
    UCMMetrics.record_load(0.5, 10**9)
    UCMMetrics.record_load(0.0, 1)
    UCMMetrics.record_dump(0.25, 10**9)
    UCMMetrics.record_hit_rate(3, 4, "prefix")
    UCMMetrics.record_hit_rate(0, 0, "block")
    UCMMetrics.requests_total.labels("success").inc()
    assert serve(port)
    assert serve(port), "it is served already"
    found = samples(port)
    speeds = {labels["operation"]: value for labels, value in found["ucm_io_throughput_gbps"]}
    assert speeds == {"load": 2.0, "dump": 4.0}
    rates = {labels["cache_type"]: value for labels, value in found["ucm_cache_hit_rate"]}
    assert rates == {"prefix": 0.75, "block": 0.0}
    assert found["ucm_requests_total"] == [({"status": "success"}, 1)]
    counts = {labels["operation"]: value for labels, value in found["ucm_io_latency_seconds_count"]}
    assert counts == {"load": 2, "dump": 1}


def test_a_taken_port_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with caplog.at_level(logging.WARNING, "ucm.metrics"):
            assert not serve(port, CollectorRegistry())
    assert f"metrics are not served on port {port}: Address already in use" in caplog.text
    assert not serve(None)


def test_the_port_is_the_configured_one_else_that_of_the_metrics_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics_configs.yaml"
    path.write_text("prometheus: {scrape_interval: 15s, metrics_path: /metrics, port: 9191}")
    named = {"storage_path": "/d", "metrics_config_path": str(path)}
    config = parse(named, {"UCM_METRICS_PORT": "9192"})
    assert config.warnings == ()
    metrics = config.metrics
    assert port_of(metrics.port, metrics.config_path) == 9192
    assert port_of(None, metrics.config_path) == 9191
    assert port_of(None, None) is None
    path.write_text("prometheus: {port: 0}")
    with caplog.at_level(logging.WARNING, "ucm.metrics"):
        assert port_of(None, str(path)) is None
    assert "prometheus.port" in caplog.text


def test_an_engine_without_an_api_server_has_a_port_too(tmp_path: Path, port: int) -> None:
    pytest.importorskip("vllm")
    from prometheus_client import Counter, Gauge, Histogram

    from ucm.integration.vllm.connector import UCMConnector

    path = tmp_path / "metrics_configs.yaml"
    path.write_text(f"prometheus: {{port: {port}}}")
    extra = {"storage_path": "/d", "metrics_config_path": str(path)}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
    )
    kinds: Any = {kind: kind for kind in (Counter, Gauge, Histogram)}
    made = UCMConnector.build_prom_metrics(
        config, kinds, ["model_name", "engine"], {0: ["ported", "0"]}
    )
    assert made is not None
    made.observe({"asked": 3}, 0)
    labels = {"model_name": "ported", "engine": "0"}
    assert (labels, 3) in samples(port)["ucm_asked_blocks_total"]


def test_the_registry_of_programs_is_not_vllms() -> None:
    """The names are the same, the labels are not."""
    from prometheus_client import REGISTRY as DEFAULT

    assert REGISTRY is not DEFAULT
    with pytest.raises(AttributeError, match="Metrics"):
        __import__("ucm.metrics").metrics.Metrics  # noqa: B018
