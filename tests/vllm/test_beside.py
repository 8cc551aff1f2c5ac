"""Beside vLLM's ExampleConnector and a replacement of Nixl in a MultiConnector, first on one runner
and last on the other: the sides connect, each cache serves its blocks, and blocks that another
connector never filled, or failed to fill, are not stored by ours.

ExampleConnector stores the whole prompt of a request's first step, right or wrong: prompts here fit
into one step, and its blocks of a failed step are removed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import ALL, Case
from checks import assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk, store_under_test
from siblings import LOADING, SIBLING, load_of_sibling, several
from specs import EngineSpec, Result

pytestmark = pytest.mark.one_runner

#: The connectors of each runner's engine, in order.
ORDERS = {"v1": ("ours", "example", "sibling"), "v2": ("sibling", "example", "ours")}


@dataclass(frozen=True)
class Beside:
    """The engine, and the contents of its two caches."""

    engine: Engine
    disk: Disk
    example: Path

    def forget(self) -> None:
        """Empties vLLM's own cache and ExampleConnector's."""
        self.engine.wait_idle()
        self.engine.reset()
        shutil.rmtree(self.example)
        self.example.mkdir()

    def ask(self, case: Case, **options: Any) -> Result:
        return self.engine.generate(case.ask(**options))[0]

    def loaded(self) -> int:
        """Blocks that ours has loaded so far."""
        return int(self.engine.metrics()["ucm_loaded_blocks_total"])


def transfer(spec: EngineSpec, example: Path, order: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of vLLM's KVTransferConfig for our connector and the others."""
    ours = spec.kv_transfer()
    assert ours is not None
    children = {
        "ours": ours,
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(example)},
        },
        "sibling": SIBLING,
    }
    return several(*(children[name] for name in order), kv_load_failure_policy="recompute")


@pytest.fixture
def beside(
    runner: str, work: Path, host: EngineHost, model: Path, reference: dict[str, Result]
) -> Beside:
    name = f"beside-{runner}"
    disk = Disk(work / name) if (work / name).exists() else new_disk(work, name)
    example = work / f"{name}-example"
    example.mkdir(exist_ok=True)
    spec = EngineSpec(model, runner, disk.store(), label=name)
    beside = Beside(
        host.get(spec.but(transfer=transfer(spec, example, ORDERS[runner]))), disk, example
    )
    beside.forget()
    return beside


def test_each_serves_what_it_has(beside: Beside, runner: str, reference: dict[str, Result]) -> None:
    """The first one with a prompt loads it; ours stores its loaded blocks one step later."""
    case, right, before = ALL["last"], reference["last"], beside.loaded()
    assert_same(beside.ask(case), right)
    beside.engine.wait_idle()
    beside.engine.reset()
    again = beside.ask(case)
    assert_same(again, right)
    assert_reused(again, case)
    assert beside.loaded() - before == (case.full_blocks if runner == "v1" else 0)

    beside.engine.wait_idle()
    stored = len(beside.disk.files())
    beside.engine.reset()
    salted = beside.ask(case, salt="ours distinguishes it, theirs does not")
    assert_same(salted, right)
    assert_reused(salted, case)
    beside.engine.wait_idle()
    assert len(beside.disk.files()) == stored + case.full_blocks, (
        "blocks loaded by the other are stored"
    )
    beside.forget()
    before = beside.loaded()
    assert_same(beside.ask(case, salt="ours distinguishes it, theirs does not"), right)
    assert beside.loaded() - before == case.full_blocks, "only ours has it now"


def test_a_damaged_block_fails_no_request(beside: Beside, reference: dict[str, Result]) -> None:
    case, right, before = ALL["exact"], reference["exact"], set(beside.disk.files())
    assert_same(beside.ask(case), right)
    beside.forget()
    for path in set(beside.disk.files()) - before:
        whole = path.read_bytes()
        place = len(whole) // 2
        damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        path.write_bytes(whole[:place] if store_under_test() == "plain" else damaged)
    loaded, failed = beside.loaded(), beside.engine.metrics()["ucm_missed_blocks_total"]
    assert_same(beside.ask(case), right)
    assert beside.loaded() == loaded
    wait_until(
        lambda: beside.engine.metrics()["ucm_missed_blocks_total"] > failed, "the damage was met"
    )
    beside.forget()
    assert_same(beside.ask(case), right)


def test_blocks_that_another_was_to_fill_are_not_stored(
    beside: Beside, reference: dict[str, Result]
) -> None:
    """The client disconnects while the other connector loads: vLLM counts those tokens as computed,
    but they were never written."""
    beside.engine.wait_idle()  # what the test before dumped is there
    case, right, before = ALL["crowd_1"], reference["crowd_1"], len(beside.disk.files())
    stalled = beside.engine.submit(case.ask(extra_args=load_of_sibling("stall")))
    wait_until(lambda: beside.engine.scheduler_eval(LOADING) == "True", "the other connector loads")
    beside.engine.abort(*stalled)
    beside.engine.collect(stalled)
    beside.engine.wait_idle()
    assert len(beside.disk.files()) == before
    beside.engine.reset()
    answer = beside.ask(case)
    assert_same(answer, right)
    assert answer.cached == 0


def test_nothing_computed_on_a_failed_load_is_stored(
    beside: Beside, runner: str, reference: dict[str, Result]
) -> None:
    """vLLM computes the blocks again. Its V2 runner does so in the wrong place (vllm#49250): then
    results are wrong until its own cache is emptied, and none of these blocks may be found
    afterwards."""
    beside.engine.wait_idle()  # what the test before dumped is there
    case, right, before = ALL["crowd_2"], reference["crowd_2"], len(beside.disk.files())
    answer = beside.ask(case, extra_args=load_of_sibling("fail"))
    assert answer.finish == "length"
    if runner == "v1":
        assert_same(answer, right)
    beside.forget()
    assert len(beside.disk.files()) == before
    answer = beside.ask(case)
    assert_same(answer, right)
    assert answer.cached == 0
    beside.forget()
    again = beside.ask(case)
    assert_same(again, right)
    assert_reused(again, case)
