"""``ucm stats``: a live engine by its ``/metrics``, and a root."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from ports import free_port
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ucm.cli import main
from ucm.store import UcmConnectorFactoryV1

#: What an engine has reported.
NEWS = {
    "asked": 8,
    "hit": 6,
    "loaded": 6,
    "missed.absent": 1,
    "missed.last_token": 1,
    "published": 3,
    "unpublished": 1,
    "loaded_bytes": 3 << 20,
    "saved_prefill_seconds": 2.5,
    "requests.success": 4,
    "load_gbps": 2.0,
    "prefill_tokens_per_second": 1000.0,
    "load_seconds": [0.01, 0.03],
    "tier.bytes_read.posix": 3 << 20,
    "tier.hits.posix": 6,
    "tier_now.used_bytes.posix.0": 1 << 20,
    "tier_now.used_bytes.posix.scheduler": 2 << 20,
    "tier_now.capacity_bytes.posix.0": 4 << 20,
    "tier_now.healthy.posix.0": 1,
    "tier_now.healthy.posix.scheduler": 1,
    "tier_now.writable.posix.0": 0,
    "tier_now.writable.posix.scheduler": 1,
    "info.1.0|abc|segment|posix|read-only": 1,
}


@pytest.fixture
def engine() -> Iterator[tuple[str, Any]]:
    """Address of a server with the metrics of an engine, and these."""
    pytest.importorskip("vllm")
    from ucm.integration.vllm.connector import UCMConnector

    registry = CollectorRegistry()
    kinds: Any = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"storage_path": "/d"})
    )
    metrics = UCMConnector.build_prom_metrics(
        config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]}
    )
    assert metrics is not None
    metrics.observe(NEWS, 0)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}", metrics
    server.shutdown()
    server.server_close()
    thread.join()


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["stats", *words], catch_exceptions=False)


def test_an_engine_is_shown_by_its_metrics(engine: tuple[str, Any]) -> None:
    address, _ = engine
    done = run("--url", address, "--json")
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.stdout)["engines"]
    assert (shown["model"], shown["engine"]) == ("tiny", "0")
    assert shown["store"] == {
        "version": "1.0",
        "identity": "abc",
        "layout": "segment",
        "tiers": "posix",
        "mode": "read-only",
    }
    assert (shown["asked_blocks"], shown["hit_blocks"], shown["loaded_blocks"]) == (8, 6, 6)
    missed = {reason: count for reason, count in shown["missed_blocks"].items() if count}
    assert missed == {"absent": 1, "last_token": 1}
    assert shown["requests"] == {"success": 4, "error": 0}
    assert (shown["load_seconds"], shown["lookup_seconds"]) == (0.02, None)
    assert shown["io_latency_seconds"] == {"load": 0.02}
    assert shown["tier_used_bytes"] == {"posix": 2 << 20}, "the largest of its sides"
    assert shown["tier_capacity_bytes"] == {"posix": 4 << 20}
    assert shown["tier_writable"] == {"posix": 0}, "the least"
    text = run("--url", address).stdout
    for line in (
        "engine 0 of tiny: posix segment",
        "mode      read-only",
        "8 blocks, 6 hit, 75%",
        "1 absent, 1 last_token",
        "2.5 s of computing",
        "load 2 GB/s",
        "load 20.0 ms",
        "posix  only read  2.0 MiB  4.0 MiB",
    ):
        assert line in text


def test_a_watched_engine_has_changes_a_second(
    engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, metrics = engine
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        metrics.observe({"asked": 6, "loaded_bytes": 4096}, 0)

    monkeypatch.setattr(
        "ucm.cli.running.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    )
    words = ("--url", address, "--watch", "--interval", "2", "--times", "2")
    first, second = run(*words, "--json").stdout.split("\n}\n", 1)
    assert "per_second" not in json.loads(first + "}")
    rates = json.loads(second)["per_second"]
    assert (rates["asked_blocks"], rates["loaded_bytes"], rates["hit_blocks"]) == (3.0, 2048.0, 0.0)
    assert "a second: asked_blocks 3.0, loaded_bytes 2.0 KiB" in run(*words).stdout


def test_the_user_ends_the_watch(engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ucm.cli.running.time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    done = run("--url", engine[0], "--watch")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "engine 0 of tiny" in done.stdout


def test_an_address_without_an_engine_is_one_sentence() -> None:
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    done = run("--url", f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()
    assert (done.exit_code, "has no metrics of ucm" in done.stderr) == (2, True)
    done = run("--url", f"127.0.0.1:{free_port()}")
    assert (done.exit_code, "Connection refused" in done.stderr) == (2, True)
    assert run("--url", "a", "--root", "b").exit_code == 2
    assert run("--times", "2").exit_code == 2


def test_a_root_is_shown_by_its_records(tmp_path: Path) -> None:
    size = 4096
    shape = {"tensor_size": size, "shard_size": size, "block_size": size, "identity": "x"}
    block = np.zeros((1, size), dtype=np.uint8)
    config = shape | {"storage_backends": str(tmp_path), "layout": "file"}
    with UcmConnectorFactoryV1.create_connector("UcmPosixStore", config) as store:
        ids = [bytes([number]) * 16 for number in range(3)]
        store.wait(store.dump_data(ids, [0] * 3, [[block.ctypes.data]] * 3))
    document = json.loads(run("--root", str(tmp_path), "--json").stdout)
    assert document["records"] == 3
    assert [space["records"] for space in document["namespaces"]] == [3]
    assert document["used_bytes"] >= 3 * size
    text = run("--root", str(tmp_path), "--watch", "--times", "2", "--interval", "0.1").stdout
    assert text.count("3 records") == 2
    assert "a second: no change" in text
