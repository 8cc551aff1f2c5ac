"""How long a load may take: from the speed at which this engine computes, within bounds."""

from __future__ import annotations

import pytest
from parts import BLOCK, Rig

from ucm.integration.vllm.connector.pace import MAX_STEP_S, MIN_TOKENS, Pace


def test_unknown_until_a_step_computed_a_prompt() -> None:
    pace = Pace(0.2, 30.0)
    assert pace.allowance(1000) is None
    pace.step(MIN_TOKENS - 1, 0.0)  # decoding says nothing
    pace.step(1000, 1.0)
    assert pace.allowance(1000) is None
    pace.step(1, 2.0)
    assert pace.allowance(1000) == pytest.approx(2.0)  # twice the second it took


def test_within_its_bounds_and_an_idle_engine_says_nothing() -> None:
    pace = Pace(0.2, 30.0)
    pace.step(1000, 0.0)
    pace.step(1000, 1.0)
    assert pace.allowance(1) == pytest.approx(0.2)
    assert pace.allowance(1_000_000) == pytest.approx(30.0)
    pace.step(1, 2.0 + MAX_STEP_S)
    assert pace.allowance(1000) == pytest.approx(2.0)


def test_a_load_is_sent_with_its_time() -> None:
    rig = Rig()
    first = rig.request("a", 20 * BLOCK + 1)
    rig.later.run()
    rig.half.matched(first, 0)
    rig.half.admitted(first, rig.tables.allocate(first, 21), 0)
    rig.step(first)
    rig.clock.now += 4.0
    second = rig.request("b", 3 * BLOCK + 1)
    rig.stored(second, 3)
    rig.later.run()
    rig.step()
    assert rig.half.matched(second, 0) == (3 * BLOCK, True)
    rig.half.admitted(second, rig.tables.allocate(second, 4), 3 * BLOCK)
    (load,) = rig.step().loads
    assert load.timeout == pytest.approx(2 * 3 * BLOCK * 4.0 / (20 * BLOCK + 1))


def test_ancestors_of_what_is_dumped_are_touched_once_a_minute() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK)
    rig.admit(request)
    rig.later.run()
    for seconds in (30, 45, 30):
        request.append_output_token_ids(list(range(BLOCK)))
        rig.clock.now += seconds
        rig.step(request)
        rig.later.run()
    assert len(rig.store.touched) == 3 + 5  # with the first dump, not 45 s later, and again after 75 s
