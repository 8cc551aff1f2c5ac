"""The dashboard and the rules over a real engine, with two API servers in the long form, scraped by
a real Prometheus: after some requests every expression returns a series. Those of sparse attention,
of the proxy and of DCGM are in ``tests/metrics``."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import panels
import pytest
from harness import EngineHost, machine_lock, wait_until
from lives import LAYERS, new_disk
from models import llama_config, write_model
from served import (
    NAME,
    PATIENCE,
    Server,
    vllm_server,
    write_tokenizer,
)
from specs import BLOCK, EngineSpec, prompt

# real_prometheus, and required_servers
sys.path += [str(Path(__file__).parents[1] / name) for name in ("metrics", "store")]
from real_prometheus import Prometheus, of_dashboard, of_rules, panels_of, prometheus

pytestmark = pytest.mark.one_runner
#: Of one engine.
API_SERVERS = 2 if os.environ.get("UCM_TEST_LONG") else 1
#: Panels of what this engine does not have.
WITHOUT = {"Sparse Ratio", "Prefill and Decode", "GPU"}
#: Prompts that do not fit on the device together.
PROMPTS, LONG, POOL = 6, 24 * BLOCK + 1, 80
#: New prompts of some minutes fill it.
CAPACITY = "256MiB"
#: Panels that are above 0 while requests come.
BUSY = {
    *("Cache Hit Rate", "Hit Rate since Start", "Saved Prefill", "Store in Use", "I/O Throughput"),
    *("Breaker", "Time to First Token", "Throughput", "Load and Dump Latency"),
}


@pytest.fixture(scope="module")
def site(work: Path, host: EngineHost) -> Iterator[tuple[Server, Prometheus, Path]]:
    """The server, Prometheus, and the root of its store."""
    model = write_model(work / "metrics-model", llama_config(LAYERS))
    write_tokenizer(model)
    disk = new_disk(work, "metrics")
    store = disk.store()
    store = replace(store, options={**store.options, "storage_capacity": CAPACITY})
    spec = EngineSpec(model, "v1", store, blocks=POOL, extra_config={"min_hit_tokens": 1})
    host.stop()
    with machine_lock():
        count = f"--api-server-count={API_SERVERS}"
        server = vllm_server(spec, work / "metrics.log", count)
        try:
            wait_until(server.started, f"{server.log} starts", PATIENCE)
            # An answer that is late is a gap in every series.
            at = server.at.removeprefix("http://")
            with prometheus(work / "prometheus", at, every="2s") as running:
                yield server, running, disk.root
        finally:
            server.close()


def send(server: Server, seed: int) -> None:
    """One request, with the prompt of this number."""
    body = {"model": NAME, "prompt": prompt(seed, LONG), "max_tokens": 4, "ignore_eos": True}
    server.client.post("/v1/completions", json=body).raise_for_status()


def test_every_expression_returns_a_series_and_gauges_are_not_summed(
    site: tuple[Server, Prometheus, Path],
) -> None:
    server, running, root = site
    turns = itertools.count()

    def work() -> None:
        """One of the prompts, which the device has evicted since, and now and then a new one."""
        turn = next(turns)
        send(server, turn if turn % 4 == 3 else turn % PROMPTS)

    boards = {text: panel for panel, text in of_dashboard() if panel not in WITHOUT}

    def saved() -> bool:
        work()
        return server.metric("ucm_saved_prefill_seconds_total") > 0

    wait_until(saved, "loaded blocks of which the speed of computing is known")
    # A series may be there before two answers differ in it.
    above = {f"({text}) > 0": panel for text, panel in boards.items() if panel in BUSY}
    running.wait_for(boards | above | {name: rule for rule, name in of_rules()}, work, PATIENCE)
    # One engine has one value, whichever of the servers got it.
    text = server.client.get("/metrics").text
    for series in ("ucm_info{", 'ucm_cache_hit_rate{cache_type="block"', "ucm_kv_cache_hit_rate{"):
        found = [line for line in text.splitlines() if line.startswith(series)]
        assert len(found) == 1, found
    wait_until(lambda: server.metric("ucm_memory_usage_bytes", location="gpu") == 0, "it is idle")
    asked, hit = (server.metric(f"ucm_{name}_blocks_total") for name in ("asked", "hit"))
    missed, loaded = (server.metric(f"ucm_{name}_blocks_total") for name in ("missed", "loaded"))
    assert asked == missed + loaded
    assert server.metric("ucm_kv_cache_hit_rate") == pytest.approx(hit / asked)
    assert server.metric("ucm_requests_total", status="success") == next(turns)
    assert server.metric("ucm_requests_total", status="error") == 0
    assert server.metric("ucm_info", layout="file", tiers="posix") == 1
    (namespace,) = [path.name for path in root.iterdir() if path.is_dir() and len(path.name) == 32]
    assert server.metric("ucm_info", identity=namespace) == 1
    assert "ucm_sparse" not in text


def test_the_picture_shows_every_panel_of_this_engine(
    site: tuple[Server, Prometheus, Path], tmp_path: Path
) -> None:
    """``make picture`` gives it minutes, and keeps the picture for docs/monitor.md."""
    server, running, _ = site
    minutes = float(os.environ.get("UCM_PICTURE_MINUTES", "0.1"))
    picture = Path(os.environ.get("UCM_PICTURE") or tmp_path / "dashboard.svg")
    begin, turns = time.monotonic(), itertools.count(1000)

    def client(late: float) -> None:
        """New prompts in the first fifth of the time, then one in four."""
        Event().wait(60 * minutes * late)
        while (share := (time.monotonic() - begin) / (60 * minutes)) < 1:
            turn = next(turns)
            send(server, turn if share < 0.2 or turn % 4 == 3 else turn % PROMPTS)

    with ThreadPoolExecutor(2) as clients:
        # The second starts at three fifths of the time.
        for done in [clients.submit(client, late) for late in (0.0, 0.6)]:
            done.result()

    def drawn() -> bool:
        assert panels.main([running.url, str(picture), "--minutes", str(minutes)]) == 0
        empty = {panel for panel, text in panels_of(picture).items() if ">No data<" in text}
        return empty == WITHOUT

    wait_until(drawn, "a picture in which the panels of others alone are empty")
