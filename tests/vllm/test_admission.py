"""Hits of a too slow tier are declined, the answers stay right, and a recovered tier is used again.

Decisions and counts only, no speeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import STORED
from checks import assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk, over_device, store_under_test
from specs import BLOCK, PATIENT, ROOM, Ask, EngineSpec, Result, StoreSpec, prompt
from throttled import Throttle

from ucm.integration.vllm.connector.admission.admission import UNLEARNT

pytestmark = [
    pytest.mark.one_runner,
    pytest.mark.skipif(store_under_test() != "posix", reason="the throttled tier is a POSIX store"),
]

#: A load may take 8 s here, independent of the computing speed: enough for one that is not held,
#: and longer than computing the prompt on a busy machine, also with interpreted kernels.
DEADLINES = PATIENT | {"load_min_ms": 8000, "load_max_s": 10.0, "load_unknown_s": 10.0}
CASE = STORED["long"]


@pytest.fixture
def disk(runner: str, work: Path) -> Disk:
    """An empty directory."""
    return new_disk(work, f"admission-{runner}")


@pytest.fixture
def throttle(disk: Disk) -> Throttle:
    """The speed of the tier."""
    return Throttle(disk.faults.control)


@pytest.fixture
def engine(runner: str, disk: Disk, host: EngineHost, model: Path) -> Iterator[Engine]:
    """An engine with measured admission over the throttled tier."""
    options = {"control": str(disk.faults.control), "layout": "file", **ROOM, **over_device()}
    store = StoreSpec(disk.root, "ThrottledStore", "throttled", options)
    extra = {"admission": "measured", "deadlines": DEADLINES}
    return host.get(
        EngineSpec(model, runner, store, extra_config=extra, label=f"throttled-{runner}")
    )


def again(engine: Engine, right: Result) -> Result:
    """The same prompt once more with vLLM's own cache empty; the answer is right."""
    engine.wait_idle()
    engine.reset()
    answer = engine.generate(CASE.ask())[0]
    assert_same(answer, right)
    return answer


def count(engine: Engine, name: str) -> int:
    """A counter of the scheduler side."""
    return int(engine.scheduler_eval(f"connector._scheduler.{name}"))


def missed(engine: Engine, reason: str) -> int:
    """Blocks missed for a reason."""
    return count(engine, f"stats()['missed_blocks'].get('{reason}', 0)")


@pytest.fixture
def segments(runner: str, work: Path, host: EngineHost, model: Path) -> Engine:
    """An engine with measured admission over segments."""
    store = replace(
        new_disk(work, f"segments-{runner}").store(), options={"layout": "segment", **ROOM}
    )
    extra = {"admission": "measured", "deadlines": PATIENT}
    return host.get(
        EngineSpec(model, runner, store, extra_config=extra, label=f"segments-{runner}")
    )


def test_no_request_loses_a_step_and_no_idle_engine_takes_one(segments: Engine) -> None:
    asks = [case.ask() for case in STORED.values()]
    right = segments.generate(*asks)  # the first waits for the opening
    before = count(segments, "put_off")
    # With vLLM's own cache there is nothing to gain; the rest is looked up when the request
    # arrives.
    for _ in range(3):
        for answer, expected in zip(segments.generate(*asks), right, strict=True):
            assert_same(answer, expected)
    assert segments.scheduler_eval("connector._scheduler.stats()['phase']").strip("'") == "open"
    assert count(segments, "put_off") == before
    # Publishing a segment takes a second, without steps.
    segments.wait_idle()
    wait_until(lambda: not count(segments, "has_pending_push_work.__int__()"), "the engine rests")
    # A lookup-only store does not know the capacity: a rank reports it with its dumps.
    seeds = itertools.count(100)

    def limited() -> bool:
        segments.generate(Ask(prompt(next(seeds), 2 * BLOCK), 1))
        return (
            segments.scheduler_eval("connector._scheduler._turnover._limit is not None") == "True"
        )

    wait_until(limited, "a rank has reported the limit of its store")


def test_a_tier_that_is_too_slow_and_mends(engine: Engine, disk: Disk, throttle: Throttle) -> None:
    right = engine.generate(CASE.ask())[0]
    engine.wait_idle()
    stored = disk.files()
    assert len(stored) >= CASE.full_blocks

    # The tier's speed is unknown: the hit is loaded, cancelled at the deadline of the estimate, and
    # computed.
    throttle.set(1.0)
    again(engine, right)
    assert missed(engine, "timeout") == CASE.full_blocks
    assert len(throttle.events.events("load")) == 1
    assert missed(engine, "declined") == 0

    # Now it is known: hits are declined without a read, touched, and not written again.
    for number in range(1, 4):
        assert again(engine, right).cached == 0
        assert missed(engine, "declined") == number * CASE.full_blocks
    assert len(throttle.events.events("load")) == 1
    hit = set(throttle.events.events("load")[0]["ids"])

    def touched() -> bool:  # by a thread of its own
        events = throttle.events.events("touch")
        return {block for event in events for block in event["ids"]} >= hit

    wait_until(touched, "the declined blocks are touched")
    assert disk.files() == stored
    tokens = 3 * CASE.full_blocks * BLOCK
    wait_until(
        lambda: engine.metrics()["ucm_declined_tokens_total"] == tokens,
        "the declined tokens are exported",
    )
    wait_until(
        lambda: engine.metrics()["ucm_prefill_tokens_per_second"] > 0,
        "the speed of computing is exported",
    )

    # The tier recovers. At times a declined hit is loaded to measure it, within the budget.
    throttle.clear()
    engine.scheduler_eval("setattr(connector._scheduler.admission._tier(0), 'ledger', 100.0)")
    answers = [again(engine, right) for _ in range(UNLEARNT)]
    # on a busy machine the first one measures a slow tier
    assert count(engine, "admission.learning_loads") >= 1
    assert max(answer.cached_blocks for answer in answers) == CASE.full_blocks
    assert count(engine, "stats()['loaded_blocks']") >= CASE.full_blocks
    assert disk.files() == stored
