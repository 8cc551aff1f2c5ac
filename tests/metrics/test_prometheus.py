"""Expressions of the dashboard and the rules over the connector's own metrics, in a real
Prometheus. What others export (vLLM, the proxy, DCGM) is made up here; ``tests/vllm`` has it from a
real server."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import panels
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from real_prometheus import Prometheus, of_dashboard, of_rules, panels_of, prometheus, until

from ucm.integration.vllm.connector import UCMConnector
from ucm.pd.proxy import Metrics

#: What one step of an engine reports.
STEP = {
    "asked": 4,
    "hit": 2,
    "loaded": 2,
    "asked_requests": 1,
    "hit_requests": 1,
    "missed.absent": 2,
    "published": 2,
    "evicted": 1,
    "loaded_bytes": 1000,
    "published_bytes": 1000,
    "saved_prefill_seconds": 0.5,
    "requests.success": 1,
    "block_hit_rate": 0.5,
    "prefix_hit_rate": 1.0,
    "load_gbps": 1.0,
    "dump_gbps": 1.0,
    "load_seconds": [0.01],
    "dump_seconds": [0.02],
    "lookup_seconds": [0.001],
    "tier.bytes_read.posix": 1000,
    "tier.bytes_written.posix": 1000,
    "tier_now.used_bytes.posix.0": 10,
    "tier_now.capacity_bytes.posix.0": 100,
    "tier_now.healthy.posix.0": 1,
    "tier_now.writable.posix.0": 1,
    "memory_now.gpu.scheduler": 1,
    "memory_now.cpu.0": 2,
    "memory_now.external.0": 10,
    "info.1.0|abc|segment|posix|read-only": 1,
    "sparse.blocks_seen": 10,
    "sparse.blocks_kept": 3,
    "sparse_ratio": 0.3,
}
#: Those with a value of their own.
EXPECTED = {
    "Hit Rate since Start": {0.5, 1.0},
    "Memory Distribution": {1.0, 2.0, 10.0},
    "Used Share of Capacity": {0.1},
    "Cache Hit Rate": {0.5},
    "Store in Use": {1.0},
    "GPU": {50.0},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Any]]:
    """Prometheus over a registry, and what reports another step into it."""
    registry = CollectorRegistry()
    labels = {"model_name": "m", "engine": "0"}
    types: Any = {kind: functools.partial(kind, registry=registry) for kind in KINDS}
    extra = {"storage_path": "/d", "ucm_sparse_config": {"ESA": {}}}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
    )
    metrics = UCMConnector.build_prom_metrics(
        config, types, list(labels), {0: list(labels.values())}
    )
    assert metrics is not None
    times = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    measured = [
        Histogram(f"vllm:{name}", name, list(labels), registry=registry).labels(**labels)
        for name in times
    ]
    counted = [
        Counter(f"vllm:{name}", name, list(labels), registry=registry).labels(**labels)
        for name in ("prompt_tokens", "generation_tokens")
    ]
    for name in ("num_requests_running", "num_requests_waiting"):
        Gauge(f"vllm:{name}", name, list(labels), registry=registry).labels(**labels).set(1)
    proxy = Metrics([])
    registry.register(proxy.registry)  # type: ignore[arg-type]
    Gauge("DCGM_FI_DEV_GPU_UTIL", "as DCGM's exporter", ["gpu"], registry=registry).labels("0").set(
        50
    )

    def step() -> None:
        metrics.observe(STEP, 0)
        for one in measured:
            one.observe(0.1)
        for one in counted:
            one.inc()
        proxy.first_byte_seconds.observe(0.1)

    server, thread = start_http_server(0, "127.0.0.1", registry)
    step()
    target = f"127.0.0.1:{server.server_port}"
    with prometheus(tmp_path_factory.mktemp("prometheus"), target) as running:
        yield running, step
    server.shutdown()
    server.server_close()
    thread.join()


KINDS = (Counter, Gauge, Histogram)


def test_every_expression_of_the_dashboard_returns_a_series(
    site: tuple[Prometheus, Any],
) -> None:
    running, step = site
    expressions = {expression: panel for panel, expression in of_dashboard()}
    running.wait_for(expressions, step)
    for expression, panel in expressions.items():
        if panel in EXPECTED:
            shows(running, expression, EXPECTED[panel])


def shows(running: Prometheus, expression: str, values: set[float]) -> None:
    """Wait until an expression has these values."""
    until(
        lambda: {round(value, 3) for value in running.values(expression)} == values,
        f"{expression} has the values {values}",
    )


def test_every_rule_is_evaluated_and_returns_a_series(site: tuple[Prometheus, Any]) -> None:
    running, step = site
    running.wait_for({name: rule for rule, name in of_rules()}, step)

    def rules() -> list[Any]:
        return [rule for group in running.get("rules")["groups"] for rule in group["rules"]]

    assert len(rules()) == len(of_rules())
    until(lambda: {rule["health"] for rule in rules()} == {"ok"}, "every rule is evaluated")
    shows(running, "ucm:tier_used:ratio", {0.1})
    alerts = {rule["name"]: rule["state"] for rule in rules() if rule["type"] == "alerting"}
    assert set(alerts.values()) == {"inactive"}, alerts


def test_the_tool_draws_every_panel_from_the_answers(
    site: tuple[Prometheus, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running, step = site
    running.wait_for({expression: panel for panel, expression in of_dashboard()}, step)
    path = tmp_path / "panels.svg"

    def draws() -> bool:
        assert panels.main([running.url, str(path), "--minutes", "0.2"]) == 0
        return capsys.readouterr().out == f"{path}: 23 panels, without data: none\n"

    until(draws, "every panel has data")
    drawn = panels_of(path)
    lines = {panel for panel, text in drawn.items() if 'stroke-width="1.5"' in text}
    values = {
        "Cache Hit Rate": (">50 %<",),
        "Hit Rate since Start": (">block<", ">50 %<", ">prefix<", ">100 %<"),
        "Memory Distribution": (">gpu<", ">1 B<", ">cpu<", ">2 B<", ">external<", ">10 B<"),
        "Store in Use": (">segment<", ">posix<", ">abc<"),
        "Saved Prefill": (" %<",),
    }
    assert set(drawn) == lines | set(values)
    for panel, texts in values.items():
        assert [text for text in texts if text not in drawn[panel]] == [], panel
    assert ">absent<" in drawn["Misses by Reason"]
    assert ">posix takes blocks<" in drawn["Breaker"]


def test_the_tool_names_the_panel_that_prometheus_refuses(
    site: tuple[Prometheus, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = json.loads(panels.OVERVIEW.read_text())
    board["panels"][1]["targets"][0]["expr"] = "sum("
    path = tmp_path / "board.json"
    path.write_text(json.dumps(board))
    words = [site[0].url, str(tmp_path / "panels.svg"), "--dashboard", str(path)]
    assert panels.main(words) == 1
    assert "Hit Rate since Start: " in capsys.readouterr().err
    assert not (tmp_path / "panels.svg").exists()
