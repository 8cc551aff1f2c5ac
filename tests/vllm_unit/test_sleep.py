"""Sleep mode: vLLM unmaps the KV and maps it again, with any content, around two calls.

vLLM has no sleep mode on a CPU. Its scheduler, its configuration and its connectors run here; the
steps of a sleep are those of its worker and engine core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_engine import BLOCK, LateStore, ToyEngine, expected

from ucm.integration.vllm.compat.versions import announces_sleep
from ucm.integration.vllm.connector import UCMConnector

PROMPT = [(7 * at) % 400 + 3 for at in range(6 * BLOCK + 5)]
OTHER = [(5 * at) % 390 + 9 for at in range(4 * BLOCK + 1)]
COUNT = 5
#: A state that no token has, so that tokens computed from it are wrong.
GARBAGE = -1.0


@pytest.fixture
def life(
    engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], ToyEngine]]:
    """Makes engines, one after the other over the same store."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})

    def make() -> ToyEngine:
        made.append(ToyEngine(engines, tiny, monkeypatch))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def opened(engine: ToyEngine) -> None:
    """The store is open and has nothing to do."""
    engine.generate({"opens the store": OTHER}, 1)
    engine.until(lambda: len(LateStore.blocks) >= 4 and under_way(engine) == (0, 0))
    engine.until(engine.idle)


def fall_asleep(engine: ToyEngine) -> None:
    """What engine core and worker do: running requests lose their blocks, then the KV goes away."""
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.worker.unregister_kv_caches()
    for cache in engine.caches.values():
        cache.fill_(GARBAGE)


def under_way(engine: ToyEngine) -> tuple[int, int]:
    """Loads and dumps whose blocks the store still accesses, on the worker."""
    side: Any = engine.worker._worker
    dumps = [running for running in side.dumps._running if running.task.rows]
    tasks = [running.task for loading in side.loads._running for running in loading.tasks]
    return sum(bool(task.rows) for task in tasks), len(dumps)


def test_dumps_under_way_are_read_before_the_kv_goes_away(life: Callable[[], ToyEngine]) -> None:
    engine = life()
    opened(engine)
    request = engine.add("first", PROMPT, 40)
    engine.until(lambda: under_way(engine)[1] > 0)
    fall_asleep(engine)
    assert under_way(engine) == (0, 0)
    engine.worker.restore_kv_caches()
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, 40)
    # what was stored before the sleep
    other = life()
    assert other.generate({"second": PROMPT}, COUNT) == {"second": expected(PROMPT, COUNT)}
    assert other.reported == ["second"], "the stored prompt was not loaded"


def test_a_sleep_while_a_request_decodes(life: Callable[[], ToyEngine]) -> None:
    engine = life()
    request = engine.add("kept", PROMPT, 40)
    engine.until(lambda: len(request.output_token_ids) > 2)
    fall_asleep(engine)
    engine.worker.restore_kv_caches()
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, 40)
    engine.until(engine.idle)


def test_a_load_under_way_is_lost(life: Callable[[], ToyEngine]) -> None:
    """The store writes nothing afterwards, and the request computes what it had claimed."""
    first = life()
    first.generate({"first": PROMPT}, COUNT)
    first.until(lambda: len(LateStore.blocks) >= 6)
    engine = life()
    opened(engine)
    request = engine.add("loads", PROMPT, COUNT)
    engine.until(lambda: under_way(engine)[0] > 0)
    engine.worker.unregister_kv_caches()
    assert under_way(engine)[0] == 0
    for cache in engine.caches.values():
        cache.fill_(GARBAGE)
    engine.worker.restore_kv_caches()
    # vLLM empties its cache before a sleep; here it would fail while a request loads
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT)
    assert engine.reported == ["loads"]
    engine.until(engine.idle)


def test_nothing_is_transferred_during_a_sleep(life: Callable[[], ToyEngine]) -> None:
    """Both calls may be repeated."""
    engine = life()
    opened(engine)
    stored = dict(LateStore.blocks)
    for _ in range(2):
        engine.worker.unregister_kv_caches()
    assert engine.generate({"asleep": PROMPT}, COUNT) == {"asleep": expected(PROMPT, COUNT)}
    assert LateStore.blocks == stored
    for _ in range(2):
        engine.worker.restore_kv_caches()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate({"awake": PROMPT}, COUNT) == {"awake": expected(PROMPT, COUNT)}
    engine.until(lambda: len(LateStore.blocks) >= len(stored) + 6)


def test_the_side_that_is_given_up_is_drained_too(life: Callable[[], ToyEngine]) -> None:
    engine = life()
    opened(engine)
    engine.add("first", PROMPT, 40)
    engine.until(lambda: under_way(engine)[1] > 0)
    side: Any = engine.worker._worker
    side.failures.why = "given up"  # without its end of work, as after an exception there
    engine.worker.unregister_kv_caches()
    assert under_way(engine) == (0, 0)


@pytest.mark.skipif(not announces_sleep(), reason="this version of vLLM has no such calls")
def test_vllm_calls_these_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and for each connector of a MultiConnector."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    for name in ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"):
        assert name in vars(KVConnectorBase_V1)
        assert name in vars(UCMConnector)
    ours = {
        "kv_connector": "UCMConnector",
        "kv_connector_module_path": "ucm.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"storage_backends": "/nowhere"},
    }
    extra = {"connectors": [ours]}
    both = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    assert MultiConnector.supports_sleep_mode(both)
    called: list[str] = []
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.setattr(UCMConnector, name, lambda _, name=name: called.append(name))
    group: Any = SimpleNamespace(_connectors=[object.__new__(UCMConnector)])
    MultiConnector.unregister_kv_caches(group)
    MultiConnector.restore_kv_caches(group)
    assert called == ["unregister_kv_caches", "restore_kv_caches"]
