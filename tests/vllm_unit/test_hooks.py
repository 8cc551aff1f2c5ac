"""Every method that vLLM calls may raise, on either side, at any time: all requests end, with the
right tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, LateStore, ToyEngine, expected

from ucm.integration.vllm.connector.scheduler import dumps

PROMPTS = {
    "long": [(7 * at) % 400 + 3 for at in range(6 * BLOCK + 5)],
    "shared": [(7 * at) % 400 + 3 for at in range(4 * BLOCK)] + [11] * 20,
    "other": [(5 * at) % 390 + 9 for at in range(5 * BLOCK + 1)],
}
FRESH = {"fresh": [(3 * at) % 380 + 5 for at in range(3 * BLOCK + 9)]}
COUNT = 5


@pytest.fixture
def life(
    engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ToyEngine]]:
    """Makes engines, one after the other over the same store."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})

    def make(sparse: bool = False) -> ToyEngine:
        made.append(ToyEngine(engines, tiny, monkeypatch, sparse))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def right(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: expected(tokens, COUNT) for name, tokens in prompts.items()}


def test_the_toy_engine_stores_and_loads(life: Callable[[], ToyEngine]) -> None:
    first = life()
    assert first.generate(PROMPTS, COUNT) == right(PROMPTS)
    first.until(lambda: len(LateStore.blocks) >= 11)
    first.until(first.idle)
    second = life()
    assert second.generate(PROMPTS | FRESH, COUNT) == right(PROMPTS | FRESH)
    assert {"long", "shared", "other"} <= set(second.reported)
    assert sorted(second.reported) == sorted(second.loads)
    second.until(second.idle)


#: Methods of the two sides that the connector calls for vLLM, by side.
HOOKS = {
    "scheduler": [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "step_ended",
        "has_pending_push_work",
        "take_tiers",
    ],
    "worker": [
        "bind_connector_metadata",
        "start_load_kv",
        "start_dumps",
        "take_ended_loads",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "take_bytes",
        "take_tiers",
    ],
}
#: Of these, those that vLLM calls at most twice for a request: many requests are needed to give a
#: side up.
RARE = {
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
}


class PlantedError(RuntimeError):
    """What the methods of these tests raise."""


def plant(
    monkeypatch: pytest.MonkeyPatch, side: Any, name: str, first: int, last: int | None = None
) -> list[int]:
    """Has a method raise from its ``first`` call on, to the ``last``; its calls so far are counted
    in the list."""
    calls = [0]

    def raises() -> None:
        calls[0] += 1
        if calls[0] >= first and (last is None or calls[0] <= last):
            raise PlantedError(name)

    real = getattr(type(side), name)
    if isinstance(real, property):

        def value(self: Any) -> Any:
            if self is side:
                raises()
            return real.fget(self)  # type: ignore[misc]

        monkeypatch.setattr(type(side), name, property(value))
    else:

        def method(*args: Any) -> Any:
            raises()
            return real(side, *args)

        monkeypatch.setattr(side, name, method)
    return calls


def sides_of(engine: ToyEngine) -> dict[str, Any]:
    return {"scheduler": engine.connector._scheduler, "worker": engine.worker._worker}


@pytest.fixture(scope="module")
def blocks() -> dict[bytes, bytes]:
    """What a first life stores of ``PROMPTS``, once it has."""
    return {}


@pytest.fixture
def stored(life: Callable[[], ToyEngine], blocks: dict[bytes, bytes]) -> None:
    """A first life has stored all of ``PROMPTS``."""
    if not blocks:
        engine = life()
        assert engine.generate(PROMPTS, COUNT) == right(PROMPTS)
        engine.until(lambda: len(LateStore.blocks) >= 11)
        engine.until(engine.idle)
        blocks.update(LateStore.blocks)
    LateStore.blocks.update(blocks)


def run(engine: ToyEngine) -> None:
    """Requests with loads and without, then others in their blocks: all right, and nothing is left
    over."""
    assert engine.generate(PROMPTS | FRESH, COUNT) == right(PROMPTS | FRESH)
    again = {f"{name} again": [token + 1 for token in tokens] for name, tokens in PROMPTS.items()}
    assert engine.generate(again, COUNT) == right(again)
    assert sorted(engine.reported) == sorted(engine.loads), "each load is reported exactly once"
    engine.until(engine.idle)


@pytest.mark.parametrize("first", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("side", "name"), [(side, name) for side in HOOKS for name in HOOKS[side]])
def test_a_method_that_raises_in_every_call_after_the_first_ones(
    life: Callable[[], ToyEngine],
    stored: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    side: str,
    name: str,
    first: int,
) -> None:
    engine = life()
    with monkeypatch.context() as planted:
        plant(planted, sides_of(engine)[side], name, first)
        run(engine)
        if name not in RARE:
            engine.until(lambda: engine.off)
            assert not engine.connector.has_pending_push_work()
            engine.generate({"late": FRESH["fresh"]}, COUNT)
            assert not engine.connector._scheduler._live
    said = [record for record in caplog.records if "PlantedError" in record.getMessage()]
    assert len(said) <= 4, "no message repeats without end"
    # What this life has stored is right.
    after = life()
    run(after)
    assert not after.off


@pytest.mark.parametrize("call", [2, 4])
@pytest.mark.parametrize(("side", "name"), [(side, name) for side in HOOKS for name in HOOKS[side]])
def test_a_method_that_raises_once(
    life: Callable[[], ToyEngine],
    stored: None,
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    name: str,
    call: int,
) -> None:
    engine = life()
    with monkeypatch.context() as planted:
        plant(planted, sides_of(engine)[side], name, call, call)
        run(engine)
    run(life())


#: What the connector calls of sparse attention, by side.
SPARSE_HOOKS = {
    "scheduler": [
        "on_new_request",
        "found_on_device",
        "update_state_after_alloc",
        "plan",
        "measured",
        "measuring",
        "request_finished",
    ],
    "worker": ["begin_step", "end_step", "take_measured", "take_lost", "take_counts"],
}


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize(
    ("side", "name"), [(side, name) for side in SPARSE_HOOKS for name in SPARSE_HOOKS[side]]
)
def test_a_method_of_sparse_attention_that_raises_from_some_call_on(
    life: Callable[..., ToyEngine],
    stored: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    side: str,
    name: str,
    first: int,
) -> None:
    """Loads and dumps go on beside it."""
    engine = life(sparse=True)
    sides = {
        "scheduler": engine.connector._sparse_scheduler,
        "worker": engine.worker._sparse_worker,
    }
    with monkeypatch.context() as planted:
        calls = plant(planted, sides[side], name, first)
        run(engine)
        engine.until(lambda: calls[0] >= first)
        assert {"long", "shared", "other"} <= set(engine.reported)
        assert not engine.off
    said = [record for record in caplog.records if "PlantedError" in record.getMessage()]
    assert len(said) <= 1, "no message repeats without end"


#: One block, and eight, with the output.
ENDED = {
    "short": [(7 * at) % 400 + 3 for at in range(BLOCK - COUNT + 1)],
    "ended": [(9 * at) % 400 + 4 for at in range(8 * BLOCK - COUNT + 1)],
}


def end_two(engine: ToyEngine, patch: pytest.MonkeyPatch, held: bool) -> None:
    """Two requests end that nothing was offered of before, while all other blocks are in use. What
    is to be stored of the second is sent with the next step, or of both ``held`` back for want of
    room."""
    side = engine.connector._scheduler
    patch.setattr(side, "_plan_dumps", lambda output, dumps: None)
    if held:
        patch.setattr(side.dumps, "room", lambda: 0)
    holder = engine.add("holder", [(11 * at) % 370 + 2 for at in range(14 * BLOCK)], 30)
    engine.until(lambda: len(holder.output_token_ids) > 0)
    for name, tokens in ENDED.items():
        request = engine.add(name, tokens, COUNT)
        while not side._live[name].lookup.done:  # each step brings the holder closer to its end
            engine.pause()
        engine.until(request.is_finished)
    assert not holder.is_finished()
    assert [len(side._late_dumps), len(side._deferred.trackers)] == ([0, 2] if held else [1, 0])


@pytest.mark.parametrize(
    ("held", "where"),
    [
        (held, where)
        for held in (False, True)
        for where in ("", "build_connector_meta", "_plan", "jobs_to_flush")
    ]
    + [(False, "take"), (True, "offers")],
)
def test_a_step_that_reuses_blocks_and_is_not_planned_stores_no_bytes_of_others(
    life: Callable[[], ToyEngine], monkeypatch: pytest.MonkeyPatch, held: bool, where: str
) -> None:
    """Blocks of ended requests are still to be stored, and vLLM gives them to others in the step
    that fails."""
    engine = life()
    engine.generate({"first": [3] * BLOCK}, 1)
    engine.until(lambda: not engine.connector._scheduler.readiness.busy())
    side = engine.connector._scheduler
    owners = {"jobs_to_flush": side.dumps, "take": side._rank_hints, "offers": side.dumps}
    monkeypatch.setattr(dumps, "ROOM_S", 60.0)
    with monkeypatch.context() as planted:
        end_two(engine, planted, held)
        other = engine.add("other", FRESH["fresh"], 1)
        while not side._live["other"].lookup.done:
            engine.pause()
        calls = plant(planted, owners.get(where, side), where, 1, 1) if where else [1]
        engine.step()
        assert calls[0] > 0 and other.is_finished()
    engine.until(engine.idle)
    # Another life loads what was computed.
    prompts = ENDED | FRESH
    assert life().generate(prompts, COUNT) == right(prompts)
