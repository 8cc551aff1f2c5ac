"""Fixtures for tests through a real vLLM: the models, the stores, the engines, and the right
tokens.

Engines are costly to start, so they are shared: per model runner one that computes and stores
(``cold``), and one in a new process that finds it (``warm``). Other directories share the host that
starts them (``../conftest.py``).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# the modules beside this one, here and in the engines' processes
sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("vllm") is None:  # the wheel does not need vLLM; these tests do
    collect_ignore_glob = ["test_*.py"]
else:
    from cases import CROWD, FRESH, PRESSURE, REPLACED, SALTED, STORED, next_turn
    from harness import Engine, EngineHost
    from lives import Life, new_disk
    from specs import EngineSpec, Result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a common engine run together: by runner, then by their effect on it."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    for place, item in zip(
        places, sorted((items[place] for place in places), key=_turn), strict=True
    ):
        item.add_marker("vllm")
        item.add_marker(pytest.mark.timeout(1800))
        items[place] = item


def _turn(item: pytest.Item) -> tuple[str, int]:
    call = getattr(item, "callspec", None)
    runner = str(call.params.get("runner", "")) if call is not None else ""
    order = [
        "test_sparse",  # its last tests use the warm engine, with which test_reuse continues
        "test_reuse",
        "test_policies",
        "test_faults",
        "test_shutdown",
        "test_ranks",
        "test_isolation",
        "test_admission",
        "test_generations",
    ]
    return runner, order.index(item.path.stem) if item.path.stem in order else len(order)


@pytest.fixture(scope="session")
def reference(work: Path, host: EngineHost, model: Path, other_model: Path) -> dict[str, Result]:
    """The right answers: every case alone on an empty cache, in an engine with ``UCM_DISABLE=1``.

    ``"disabled"`` is one case sent a second time after vLLM's own cache was emptied; those of
    ``REPLACED`` are answers after the weights were replaced.
    """
    disk = new_disk(work, "disabled")
    spec = EngineSpec(model, store=disk.store(), env={"UCM_DISABLE": "1"}, label="disabled")
    engine = host.get(spec)
    answers = {}
    for name, case in (STORED | CROWD | FRESH | PRESSURE | {"salted": SALTED}).items():
        engine.reset()
        answers[name] = engine.generate(case.ask())[0]
    engine.reset()
    answers["next_turn"] = engine.generate(next_turn(answers["turn"]).ask())[0]
    engine.reset()
    answers["disabled"] = engine.generate(STORED["long"].ask())[0]
    engine.rpc("reload_weights", weights_path=str(other_model))
    for name, replaced in REPLACED.items():
        engine.reset()
        answers[replaced] = engine.generate(STORED[name].ask())[0]
    assert not disk.files(), "an engine with UCM_DISABLE=1 stored blocks"
    return answers


@pytest.fixture(scope="session")
def cold(
    runner: str, work: Path, host: EngineHost, model: Path, reference: dict[str, Result]
) -> Life:
    """The first life: all of ``STORED`` and ``CROWD`` are sent, then the engine is ended at once.
    On the first runner its processes are spawned and may compile, like those of users on a CPU."""
    life = Life(runner, model, new_disk(work, f"blocks-{runner}"), {}, "", "")
    as_users = {"fork": False, "env": {"TORCHDYNAMO_DISABLE": "0"}}
    engine = host.get(life.cold_spec.but(**as_users if runner == "v1" else {}))
    policy, module = engine.scheduler()["kv_load_failure_policy"], engine.rpc("probe_runner")[0]
    answers = dict(
        zip(CROWD, engine.generate(*(case.ask() for case in CROWD.values())), strict=True)
    )
    answers["salted"] = engine.generate(SALTED.ask(salt="red"))[0]
    for name, case in STORED.items():
        answers[name] = engine.generate(case.ask())[0]
    host.stop()
    return Life(runner, model, life.disk, answers, module, policy, len(life.disk.files()))


@pytest.fixture
def warm(cold: Life, host: EngineHost) -> Iterator[Engine]:
    """The second life, with vLLM's own cache empty and no fault active."""
    cold.disk.faults.clear()
    engine = host.get(cold.warm_spec)
    engine.reset()
    yield engine
    cold.disk.faults.clear()
