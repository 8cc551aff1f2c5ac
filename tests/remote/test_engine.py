"""Engines of vLLM over servers, a pool of Mooncake and 3FS: blocks of one engine are found by
another, also through a pipeline; a killed server costs time and never a token; and its kept blocks
are found again.

``make test`` starts one engine for each kind of store, ``make test-long`` (``UCM_TEST_LONG``) also
those of the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import STORED
from checks import ask_until_reused, assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import over_device
from remote_columns import (
    DS3FS,
    MOONCAKE,
    MOTO,
    REDIS_AOF,
    S3S_FS,
    SOFT3FS,
    Column,
    Medium,
    redis_says,
    started,
)
from specs import ROOM, EngineSpec, Result, StoreSpec

from servers import KEYS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

long = pytest.mark.skipif(
    not os.environ.get("UCM_TEST_LONG"), reason="several engines: make test-long"
)

ASKED = ("short", "middle", "shared_a", "exact")
#: A failed server is tried again soon.
SOON = {"breaker": {"threshold": 3, "cool_down_s": 0.5}}


@dataclass(frozen=True)
class Over:
    """A kind of store, the runner of its engines, and the upper tier in the second one."""

    column: Column
    runner: str
    above: tuple[str, ...]


#: Of several engines each.
SEVERAL = (
    Over(REDIS_AOF, "v1", ("cache",)),
    Over(S3S_FS, "v2", ("cache", "posix")),
    Over(MOONCAKE, "v2", ("cache",)),
    Over(DS3FS, "v1", ("cache",)),
)
#: With one engine each: some keep their data over a restart, and some lose it.
ALONE = (
    Over(REDIS_AOF, "v2", ()),
    Over(MOTO, "v1", ()),
    Over(MOONCAKE, "v1", ()),
    Over(DS3FS, "v2", ()),
)
#: Those that can hang with open connections or rings.
SILENT = (SEVERAL[0], SEVERAL[3])


def name_of(over: Over) -> str:
    return f"{over.column.name}-{over.runner}".replace(", ", "-")


def spec(over: Over, model: Path, at: str, work: Path, pipeline: bool) -> EngineSpec:
    """An engine whose store is on this server, alone or below an upper tier."""
    keys: dict[str, Any] = {**over.column.keys(at), **over_device()}
    store = StoreSpec(work, over.column.store, options=keys)
    if pipeline:
        place = keys.pop("storage_backends")
        word = over.column.store.removeprefix("Ucm").removesuffix("Store").lower()
        directory = {"type": "posix", "path": str(work / f"above-{word}"), **ROOM}
        above = [directory if stage == "posix" else {"type": stage} for stage in over.above]
        stages = [*above, {"type": word, "path": place, **keys}]
        options = {"store_pipeline": stages, "cache_size": "64MiB", "storage_backends": None}
        store = StoreSpec(work, "UcmPipelineStore", options=options)
    label = f"{name_of(over)}{'-below' if pipeline else ''}"
    path = over.column.pythonpath
    return EngineSpec(
        model, over.runner, store, label=label, extra_config=SOON, env=KEYS, pythonpath=path
    )


def of_3fs(engine: Engine, call: str) -> str:
    """The result of a call of 3FS's software library, in the process that loads and stores."""
    (answer,) = engine.rpc("probe_worker_eval", f"__import__('ctypes').CDLL({SOFT3FS!r}).{call}")
    return str(answer)


def asked(engine: Engine) -> dict[str, Result]:
    """The answers, from an empty cache of vLLM's."""
    answers = {}
    for name in ASKED:
        answers[name] = engine.generate(STORED[name].ask())[0]
        engine.wait_idle()
    engine.reset()
    return answers


def ask_until_stored(engine: Engine, computed: dict[str, Result]) -> None:
    """Sends the prompts until a round stores nothing more: on a busy machine a first dump may be
    refused and is made with a later request."""

    def nothing_more() -> bool:
        before = engine.metrics()["ucm_published_blocks_total"]
        for name in ASKED:
            ask_until_reused(engine, STORED[name], computed[name])
        engine.wait_idle()
        return engine.metrics()["ucm_published_blocks_total"] == before

    wait_until(nothing_more, "every block of the prompts is stored")


@contextmanager
def silent(over: Over, server: Any, engine: Engine) -> Iterator[None]:
    """No replies during this: a server is stopped, and 3FS's daemon begins no operation of its
    rings."""
    if over.column is DS3FS:
        of_3fs(engine, "soft3fs_hold(True)")
    else:
        server.freeze()
    try:
        yield
    finally:
        if over.column is DS3FS:
            of_3fs(engine, "soft3fs_hold(False)")
        else:
            server.thaw()


@pytest.fixture
def over(request: pytest.FixtureRequest) -> Over:
    found: Over = request.param
    return found


@pytest.fixture
def server(over: Over, tmp_path: Path) -> Iterator[Medium]:
    with started(over.column, tmp_path / "server") as server:
        yield server


@long
@pytest.mark.parametrize("over", SEVERAL, ids=name_of, indirect=True)
def test_what_one_engine_stored_another_finds_and_a_killed_server_costs_no_token(
    over: Over, server: Medium, tmp_path: Path, host: EngineHost, model: Path
) -> None:
    cold = host.get(spec(over, model, server.at, tmp_path, pipeline=False))
    computed = asked(cold)
    assert all(answer.cached == 0 for answer in computed.values())
    for name in ASKED:
        # Blocks stored by another rank are found with the next listing.
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
        assert_reused(answer, STORED[name])  # they were promoted
    assert warm.metrics()["ucm_loaded_blocks_total"] > loaded
    host.stop()


@pytest.mark.parametrize("over", ALONE, ids=name_of, indirect=True)
def test_cold_warm_and_after_a_restart_of_the_server(
    over: Over, server: Medium, tmp_path: Path, host: EngineHost, model: Path
) -> None:
    engine = host.get(spec(over, model, server.at, tmp_path, pipeline=False))
    computed = asked(engine)
    ask_until_stored(engine, computed)
    engine.wait_idle()
    engine.reset()
    if over.column is DS3FS:
        assert (
            of_3fs(engine, "soft3fs_calls(b'write')")
            != "0"
            != of_3fs(engine, "soft3fs_calls(b'read')")
        )
    before = engine.metrics()
    server.restart()
    for name in ASKED:
        answer = engine.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        engine.wait_idle()
    after = engine.metrics()
    if over.column is MOTO:
        # Its index still had the lost blocks: claimed hits that were then computed.
        assert after["ucm_hit_blocks_total"] > before["ucm_hit_blocks_total"]
        assert after["ucm_loaded_blocks_total"] == before["ucm_loaded_blocks_total"]
    engine.reset()
    for name in ASKED:
        ask_until_reused(engine, STORED[name], computed[name])
    # Lost blocks are stored again, kept ones are not.
    again = engine.metrics()["ucm_published_blocks_total"] - before["ucm_published_blocks_total"]
    assert (again == 0) == over.column.keeps, again
    if over.column is REDIS_AOF:
        # A block seen a moment ago counts as stored without a query.
        engine.wait_idle()
        engine.reset()
        redis_says(server, "FLUSHALL")
        for name in ASKED:
            assert_same(engine.generate(STORED[name].ask())[0], computed[name])
            engine.wait_idle()
        engine.reset()
        ask_until_reused(engine, STORED["middle"], computed["middle"])
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in engine.log_text()
    host.stop()


@long
@pytest.mark.parametrize("over", SILENT, ids=name_of, indirect=True)
def test_a_server_that_falls_silent_costs_a_deadline(
    over: Over, server: Medium, tmp_path: Path, host: EngineHost, model: Path
) -> None:
    short = {
        "lookup_ms": 200,
        "load_min_ms": 500,
        "load_max_s": 2.0,
        "load_unknown_s": 2.0,
        "dump_s": 3.0,
    }
    made = spec(over, model, server.at, tmp_path, pipeline=False)
    engine = host.get(
        made.but(extra_config={**SOON, "deadlines": short}, label=f"{made.label}-silent")
    )
    computed = asked(engine)
    ask_until_reused(engine, STORED["middle"], computed["middle"])
    engine.wait_idle()
    engine.reset()
    with silent(over, server, engine):
        for name in ASKED:
            assert_same(engine.generate(STORED[name].ask())[0], computed[name])
            engine.wait_idle()
    ask_until_reused(engine, STORED["middle"], computed["middle"])
    wait_until(engine.alive, "it runs")
    host.stop()
