"""vLLM's KV on an accelerator: cold, warm and damaged over the software driver, in one engine of
each model runner."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import CROWD, STORED, output_blocks
from checks import ask_until_reused, assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk
from specs import EngineSpec, Result

pytestmark = pytest.mark.one_runner

#: Calls that every dump and load needs: the event of the model's stream, small pieces by kernels,
#: and the bus.
FUNCTIONS = ("cuEventQuery", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")


@pytest.fixture(scope="module")
def disk(runner: str, work: Path) -> Disk:
    if not os.path.exists(os.environ.get("UCM_TEST_DRIVER", "")):
        pytest.skip("UCM_TEST_DRIVER names no software driver; make test-py builds one")
    return new_disk(work, f"accelerated-{runner}")


@pytest.fixture
def engine(runner: str, host: EngineHost, model: Path, disk: Disk) -> Iterator[Engine]:
    """The one engine, with vLLM's own cache empty."""
    store = disk.store()
    # The driver interprets its kernels, so they are never the cheapest method.
    store = replace(store, options={**store.options, "transfer": "staging"})
    engine = host.get(
        EngineSpec(model, runner, store, accelerated=True, label=f"accelerated-{runner}")
    )
    engine.wait_idle()
    engine.reset()
    return engine


def calls(engine: Engine) -> list[int]:
    """Calls of the driver so far, in the worker's process."""
    (said,) = engine.rpc("probe_worker_eval", f"__import__('software_driver').calls(*{FUNCTIONS})")
    return list(ast.literal_eval(said))


def added(engine: Engine, before: list[int]) -> dict[str, int]:
    """Calls of each function since then."""
    return {
        name: now - then for name, now, then in zip(FUNCTIONS, calls(engine), before, strict=True)
    }


def test_cold_warm_and_damaged(engine: Engine, disk: Disk, reference: dict[str, Result]) -> None:
    cold = engine.generate(STORED["long"].ask())[0]
    assert_same(cold, reference["long"])
    assert cold.cached == 0
    engine.wait_idle()
    before = calls(engine)
    engine.reset()
    warm = engine.generate(STORED["long"].ask())[0]
    assert_same(warm, reference["long"])
    assert_reused(warm, STORED["long"])
    assert added(engine, before)["cuMemcpyHtoDAsync_v2"] > 0, "nothing was loaded by the driver"
    assert added(engine, before)["cuLaunchKernel"] > 0, "nothing was loaded by a kernel"

    for file in disk.files():
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
    engine.wait_idle()
    engine.reset()
    damaged = engine.generate(STORED["long"].ask())[0]
    assert_same(damaged, reference["long"])
    assert damaged.cached == 0
    ask_until_reused(engine, STORED["long"], reference["long"])


def test_a_dump_waits_for_the_model(
    engine: Engine, disk: Disk, reference: dict[str, Result]
) -> None:
    """The model's stream is held: no byte is copied before it has written the blocks."""
    files, before = disk.files(), calls(engine)
    engine.rpc("probe_worker_eval", "__import__('accelerated').hold(True)")
    try:
        assert_same(engine.generate(STORED["middle"].ask())[0], reference["middle"])
        wait_until(lambda: added(engine, before)["cuEventQuery"] > 10, "a dump queries the event")
        assert added(engine, before) | {"cuEventQuery": 0} == dict.fromkeys(FUNCTIONS, 0)
    finally:
        engine.rpc("probe_worker_eval", "__import__('accelerated').hold(False)")
    engine.wait_idle()
    assert len(disk.files()) - len(files) == output_blocks(STORED["middle"])
    assert added(engine, before)["cuMemcpyDtoHAsync_v2"] > 0


def test_many_at_once(engine: Engine, reference: dict[str, Result]) -> None:
    """Concurrent dumps, loads and model steps."""
    for _ in range(2):
        answers = engine.generate(*(case.ask() for case in CROWD.values()))
        for name, answer in zip(CROWD, answers, strict=True):
            assert_same(answer, reference[name])
        engine.wait_idle()
        engine.reset()
    for (name, case), answer in zip(
        CROWD.items(), engine.generate(*(c.ask() for c in CROWD.values())), strict=True
    ):
        assert_same(answer, reference[name])
        assert_reused(answer, case)
