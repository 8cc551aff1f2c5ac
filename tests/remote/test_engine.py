"""Engines of vLLM over servers: what one stored another one finds, through a pipeline too; a server that is killed
costs time and never a token; and what it kept is found again.

``make test`` starts one engine for each kind of store, ``make test-long`` (``UCM_TEST_LONG``) those of the other tests
too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import STORED
from checks import ask_until_reused, assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import over_device
from remote_columns import MOTO, REDIS_AOF, S3S_FS, Column, started
from specs import EngineSpec, Result, StoreSpec

from servers import KEYS, Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

long = pytest.mark.skipif(not os.environ.get("UCM_TEST_LONG"), reason="several engines: make test-long")

ASKED = ("short", "middle", "shared_a", "exact")
#: A server that is gone is tried again soon.
SOON = {"breaker": {"threshold": 3, "cool_down_s": 0.5}}


@dataclass(frozen=True)
class Over:
    """A kind of store, the runner of its engines, and what stands above it in the second one."""

    column: Column
    runner: str
    above: tuple[str, ...]


#: Each over a server that keeps what it has.
KEPT = (Over(REDIS_AOF, "v1", ("cache",)), Over(S3S_FS, "v2", ("cache", "posix")))
#: Of one engine each: one that keeps what it has, and one that forgets it.
ALONE = (Over(REDIS_AOF, "v2", ()), Over(MOTO, "v1", ()))


def name_of(over: Over) -> str:
    return f"{over.column.name}-{over.runner}".replace(", ", "-")


def spec(over: Over, model: Path, at: str, work: Path, pipeline: bool) -> EngineSpec:
    """An engine whose store is on this server, alone or below what stands above."""
    keys: dict[str, Any] = {**over.column.keys(at), **over_device()}
    store = StoreSpec(work, over.column.store, options=keys)
    if pipeline:
        place = keys.pop("storage_backends")
        word = over.column.store.removeprefix("Ucm").removesuffix("Store").lower()
        directory = {"type": "posix", "path": str(work / f"above-{word}")}
        above = [directory if stage == "posix" else {"type": stage} for stage in over.above]
        stages = [*above, {"type": word, "path": place, **keys}]
        options = {"store_pipeline": stages, "cache_size": "64MiB", "storage_backends": []}
        store = StoreSpec(work, "UcmPipelineStore", options=options)
    label = f"{name_of(over)}{'-below' if pipeline else ''}"
    return EngineSpec(model, over.runner, store, label=label, extra_config=SOON, env=KEYS)


def asked(engine: Engine) -> dict[str, Result]:
    """The answers, from an empty cache of vLLM's."""
    answers = {}
    for name in ASKED:
        answers[name] = engine.generate(STORED[name].ask())[0]
        engine.wait_idle()
    engine.reset()
    return answers


@pytest.fixture
def over(request: pytest.FixtureRequest) -> Over:
    found: Over = request.param
    return found


@pytest.fixture
def server(over: Over, tmp_path: Path) -> Iterator[Server]:
    with started(over.column, tmp_path / "server") as server:
        yield server


@long
@pytest.mark.parametrize("over", KEPT, ids=name_of, indirect=True)
def test_what_one_engine_stored_another_finds_and_a_killed_server_costs_no_token(
    over: Over, server: Server, tmp_path: Path, host: EngineHost, model: Path
) -> None:
    cold = host.get(spec(over, model, server.at, tmp_path, pipeline=False))
    computed = asked(cold)
    assert all(answer.cached == 0 for answer in computed.values())
    for name in ASKED:
        # What was stored by another rank of the world is seen with the next look.
        ask_until_reused(cold, STORED[name], computed[name])
    cold.wait_idle()
    cold.reset()

    server.kill()
    for name in ASKED:
        answer = cold.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        cold.wait_idle()
    cold.reset()
    server.start()
    for name in ASKED:
        ask_until_reused(cold, STORED[name], computed[name])
    host.stop()

    warm = host.get(spec(over, model, server.at, tmp_path, pipeline=True))
    for name in ASKED:
        answer = warm.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        assert_reused(answer, STORED[name])
        warm.wait_idle()
    loaded = warm.metrics()["ucm_loaded_blocks_total"]
    assert loaded > 0
    warm.reset()
    server.kill()
    for name in ASKED:
        answer = warm.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        assert_reused(answer, STORED[name])  # they were brought up
    assert warm.metrics()["ucm_loaded_blocks_total"] > loaded
    host.stop()


@pytest.mark.parametrize("over", ALONE, ids=name_of, indirect=True)
def test_cold_warm_and_after_a_restart_of_the_server(
    over: Over, server: Server, tmp_path: Path, host: EngineHost, model: Path
) -> None:
    engine = host.get(spec(over, model, server.at, tmp_path, pipeline=False))
    computed = asked(engine)
    for name in ASKED:
        ask_until_reused(engine, STORED[name], computed[name])
    engine.wait_idle()
    engine.reset()
    stored = engine.metrics()["ucm_published_blocks_total"]
    server.restart()
    for name in ASKED:
        answer = engine.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        engine.wait_idle()
    engine.reset()
    for name in ASKED:
        ask_until_reused(engine, STORED[name], computed[name])
    # What a server forgot is stored again, what it kept is not.
    again = engine.metrics()["ucm_published_blocks_total"] - stored
    assert (again == 0) == over.column.keeps, again
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in engine.log_text()
    host.stop()


@long
@pytest.mark.parametrize("over", KEPT[:1], ids=name_of, indirect=True)
def test_a_server_that_falls_silent_costs_a_deadline(
    over: Over, server: Server, tmp_path: Path, host: EngineHost, model: Path
) -> None:
    short = {"lookup_ms": 200, "load_min_ms": 500, "load_max_s": 2.0, "load_unknown_s": 2.0, "dump_s": 3.0}
    made = spec(over, model, server.at, tmp_path, pipeline=False)
    engine = host.get(made.but(extra_config={**SOON, "deadlines": short}, label=f"{made.label}-silent"))
    computed = asked(engine)
    ask_until_reused(engine, STORED["middle"], computed["middle"])
    engine.wait_idle()
    engine.reset()
    server.freeze()
    try:
        for name in ASKED:
            assert_same(engine.generate(STORED[name].ask())[0], computed[name])
            engine.wait_idle()
    finally:
        server.thaw()
    ask_until_reused(engine, STORED["middle"], computed["middle"])
    wait_until(engine.alive, "it runs")
    host.stop()
