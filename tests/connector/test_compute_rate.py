"""How fast the engine computes and so how long a load may take: what counts, what does not, within
which bounds."""

from __future__ import annotations

import pytest
from parts import BLOCK, Rig

from ucm.integration.vllm.connector.admission.rates import (
    FLOOR,
    MIN_TOKENS,
    SKIPPED,
    STEPS,
    ComputeRate,
    ComputeSpeed,
)


class Steps:
    """Steps one after the other."""

    def __init__(self, step_tokens: int = 0) -> None:
        self.compute_rate = ComputeRate(0.2, 30.0, step_tokens)
        self.now = 0.0

    def run(self, seconds: float, *tokens: int) -> None:
        """A step of requests with these numbers of tokens."""
        self.compute_rate.planned({f"r{i}": n for i, n in enumerate(tokens)}, sum(tokens), self.now)
        self.now += seconds
        self.compute_rate.ended(self.now)


def test_unknown_until_a_step_computed_a_prompt() -> None:
    steps = Steps()
    assert steps.compute_rate.allowance(1000) is None
    for _ in range(2 * STEPS):
        steps.run(0.1, *[1] * 500)  # decoding says nothing
        steps.run(0.1, MIN_TOKENS - 1)
    assert steps.compute_rate.allowance(1000) is None
    assert steps.compute_rate.tokens_per_second is None


def test_the_allowance_is_twice_the_measured_time_within_bounds() -> None:
    steps = Steps()
    for _ in range(SKIPPED):
        steps.run(9.0, 1000)  # compiled and cold
    steps.run(1.0, 1000)
    assert steps.compute_rate.allowance(1000) == pytest.approx(2.0)
    assert steps.compute_rate.allowance(1) == pytest.approx(0.2)
    assert steps.compute_rate.allowance(1_000_000) == pytest.approx(30.0)
    assert steps.compute_rate.tokens_per_second == pytest.approx(1000)


def test_idle_time_and_loads_are_not_measured() -> None:
    steps = Steps()
    for _ in range(SKIPPED + 1):
        steps.run(1.0, 1000)
        steps.now += 3600.0
    for _ in range(100):
        steps.run(0.5)
    assert steps.compute_rate.seconds(1000) == pytest.approx(1.0)
    assert steps.compute_rate.step_under_way(steps.now) == 0.0


def test_the_overhead_of_a_step_is_not_saved() -> None:
    """What a hit saves is the part of its tokens, and a step only where it saves a whole one."""
    steps = Steps(step_tokens=1000)
    for _ in range(8):
        steps.run(0.5, 1, 1, 1)
        steps.run(1.5, 1000)
    assert steps.compute_rate.seconds(900, rest=100) == pytest.approx(0.9)
    assert steps.compute_rate.seconds(1000, rest=100) == pytest.approx(1.0 + 0.5)
    assert steps.compute_rate.seconds(2000, rest=1) == pytest.approx(2.0 + 2 * 0.5)
    assert steps.compute_rate.tokens_per_second == pytest.approx(1000 / 1.5)
    assert steps.compute_rate.step_under_way(steps.now) == pytest.approx(0.5)


def test_chunks_beside_requests_that_decode() -> None:
    steps = Steps()
    for _ in range(8):
        steps.run(0.5, *[1] * 40)
        steps.run(1.5, 1000, *[1] * 40)
        steps.run(0.9, 70, *[1] * 200)  # hardly a prompt
    assert steps.compute_rate.seconds(1000) == pytest.approx(1.0)


@pytest.mark.parametrize("slow", [1, STEPS // 2])
def test_slow_first_steps_do_not_change_the_rate(slow: int) -> None:
    steps = Steps()
    for number in range(STEPS):
        steps.run(60.0 if number < slow else 1.0, 1000)
    assert steps.compute_rate.seconds(1000) == pytest.approx(1.0)


def test_another_speed_is_learnt() -> None:
    steps = Steps()
    for _ in range(STEPS):
        steps.run(1.0, 1000)
    for _ in range(STEPS):
        steps.run(3.0, 1000)
    assert steps.compute_rate.seconds(1000) == pytest.approx(3.0)


def test_an_upper_bound_of_the_time_of_computing() -> None:
    steps = Steps()
    assert steps.compute_rate.at_most(1000) == pytest.approx(1000 / FLOOR)
    steps.run(9.0, 1)  # cold
    steps.run(0.02, 1)
    assert steps.compute_rate.at_most(1000) == pytest.approx(1000 / FLOOR)
    for _ in range(5):
        steps.run(0.04, *[1] * 20)
    assert steps.compute_rate.at_most(1000) == pytest.approx(2.0)
    steps.run(0.001, *[1] * 20)  # its end was seen late, that of the next in time
    assert steps.compute_rate.at_most(1000) == pytest.approx(2.0)
    assert steps.compute_rate.seconds(1000) is None


def remembered(overhead: float, cost: float) -> ComputeRate:
    """A pace that starts with what an earlier process knew, by steps of 1000 tokens."""
    before = Steps(step_tokens=1000)
    for _ in range(8):
        before.run(overhead, 1)
        before.run(overhead + 1000 * cost, 1000)
    known = before.compute_rate.known()
    assert known is not None
    pace = ComputeRate(0.2, 30.0, 1000)
    assert pace.known() is None
    pace.recall(known)
    return pace


def test_a_remembered_speed_is_used_until_it_is_measured() -> None:
    steps = Steps()
    steps.compute_rate = remembered(0.5, 0.001)
    assert steps.compute_rate.seconds(900, rest=100) == pytest.approx(0.9)
    assert steps.compute_rate.seconds(1000, rest=100) == pytest.approx(1.5)
    assert steps.compute_rate.allowance(900, rest=100) == pytest.approx(1.8)
    for _ in range(SKIPPED + 4):  # it was twice as fast then
        steps.run(1.0, 1)
        steps.run(3.0, 1000)
    assert steps.compute_rate.seconds(900, rest=100) == pytest.approx(1.8)


def test_a_speed_that_was_remembered_as_lower_is_forgotten_at_the_first_step() -> None:
    steps = Steps()
    steps.compute_rate = remembered(0.0, 0.004)
    for _ in range(SKIPPED + 1):
        steps.run(1.0, 1000)
    assert steps.compute_rate.seconds(900, rest=100) == pytest.approx(0.9)


def test_a_measured_speed_is_not_replaced_by_a_restored_one() -> None:
    steps = Steps()
    for _ in range(SKIPPED + 1):
        steps.run(1.0, 1000)
    steps.compute_rate.recall(ComputeSpeed(0.1, 1.0, 1000))
    assert steps.compute_rate.seconds(1000) == pytest.approx(1.0)


def test_steps_that_overlap_share_their_time() -> None:
    """As with asynchronous scheduling: the next step is planned before the one under way has
    ended."""
    pace = ComputeRate(0.2, 30.0, overlap=2)
    for number in range(4):
        pace.planned({"r": 1000}, 1000, float(number))
        if number:
            pace.ended(number + 0.9)
    assert pace.seconds(1000) == pytest.approx(1.0)


def test_a_step_that_never_ended_does_not_shift_the_others() -> None:
    steps = Steps()
    steps.compute_rate.planned({"lost": 500}, 500, 0.0)
    for _ in range(SKIPPED + 1):
        steps.run(1.0, 1000)
        steps.run(0.1, 1)
    assert steps.compute_rate.seconds(1000) == pytest.approx(0.9)


def test_a_load_is_sent_with_its_time() -> None:
    rig = Rig()
    for name, seconds in (("cold", 9.0), ("a", 4.0)):
        first = rig.request(name, 20 * BLOCK + 1, seed=ord(name[0]))
        rig.later.run()
        rig.scheduler.get_num_new_matched_tokens(first, 0)
        rig.scheduler.update_state_after_alloc(first, rig.tables.allocate(first, 21), 0)
        rig.step(first)
        rig.clock.now += seconds
        rig.scheduler.step_ended()
    second = rig.request("b", 3 * BLOCK + 1)
    rig.stored(second, 3)
    rig.later.run()
    rig.step()
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (3 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(second, rig.tables.allocate(second, 4), 3 * BLOCK)
    (load,) = rig.step().loads
    assert load.timeout == pytest.approx(2 * 3 * BLOCK * 4.0 / (20 * BLOCK + 1))


def test_ancestors_of_dumped_blocks_are_touched_once_a_minute() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK)
    rig.admit(request)
    rig.later.run()
    for seconds in (30, 45, 30):
        request.append_output_token_ids(list(range(BLOCK)))
        rig.clock.now += seconds
        rig.step(request)
        rig.later.run()
    # with the first dump, not 45 s later, and again after 75 s
    assert len(rig.store.touched) == 3 + 5
