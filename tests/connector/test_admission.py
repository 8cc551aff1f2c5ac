"""Single decisions: what is declined, why, and what is done with it; fits and outliers of the load rate."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Clock, Rig
from vllm.v1.request import Request

from ucm.errors import UcmError
from ucm.integration.vllm.connector.admission import BEGUN, FIRST_S, LEARNING, TIERS, UNLEARNT, Admission, Verdict
from ucm.integration.vllm.connector.load_rate import LoadRate
from ucm.integration.vllm.connector.metadata import LoadFailure, RankReport
from ucm.integration.vllm.connector.pace import Pace


class Engine:
    """An admission over an engine that computes a token in 1 ms, with loads as a test says."""

    def __init__(self, mode: str = "measured", share: float = 0.8) -> None:
        self.clock = Clock()
        self.admission = Admission(mode, share, Pace(0.2, 30.0), self.clock)

    def computes(self) -> None:
        """Two steps of 1000 tokens; the first is not believed."""
        for _ in range(2):
            self.admission.pace.planned({"r": 1000}, 1000, self.clock.now)
            self.clock.now += 1.0
            self.admission.step_ended()
        self.clock.now += 10.0  # idle

    def load(self, size: int, seconds: float, name: str = "r", tier: str = "", late: bool = False) -> None:
        """A load of so many bytes that takes so long."""
        self.admission.began(name, size, 1, size, tier)
        self.clock.now += seconds
        self.admission.step_ended()  # what is seen next ended since
        if late:
            self.admission.failed(name, True)
        self.admission.ended(name)

    def judge(self, tokens: int, tier: str = "") -> Verdict:
        """A hit of which each token is a byte."""
        return self.admission.judge(tokens, 1, tokens, tier)


def test_what_is_not_known_accepts() -> None:
    engine = Engine()
    assert engine.judge(100) == Verdict.LOAD  # neither is
    engine.load(100, 50.0)
    assert engine.judge(100) == Verdict.LOAD  # how fast this engine computes is not
    engine = Engine()
    engine.computes()
    assert engine.judge(100) == Verdict.LOAD  # the tier is not


@pytest.mark.parametrize(
    ("share", "seconds", "verdict"), [(0.8, 0.79, "load"), (0.8, 0.81, "decline"), (0.5, 0.6, "decline")]
)
def test_a_share_of_what_computing_takes(share: float, seconds: float, verdict: str) -> None:
    engine = Engine(share=share)
    engine.computes()
    engine.load(1000, seconds)
    assert engine.judge(1000).value == verdict
    assert engine.judge(500).value == verdict  # nothing tells a fixed part: both are half


def test_the_modes_that_do_not_measure() -> None:
    for mode, verdict in (("always", Verdict.LOAD), ("never", Verdict.DECLINE)):
        engine = Engine(mode)
        assert engine.judge(10) == verdict
        engine.computes()
        engine.load(1000, 100.0)
        assert engine.judge(1000) == verdict


def test_loads_that_wait_count() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.3)
    assert engine.judge(1000) == Verdict.LOAD
    engine.admission.began("a", 1000, 1, 1000)
    assert engine.judge(1000) == Verdict.LOAD
    engine.admission.began("b", 1000, 1, 1000)
    assert engine.judge(1000) == Verdict.DECLINE  # 0.9 s with the two ahead of it
    engine.admission.failed("a", False)
    engine.admission.ended("a")
    assert engine.judge(1000) == Verdict.LOAD


def test_a_load_that_is_behind_says_so_before_it_ends() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1)
    engine.admission.began("slow", 1000, 1, 1000)
    for _ in range(BEGUN):
        engine.admission.step_ended()
    engine.clock.now += 0.9
    engine.admission.step_ended()
    assert engine.judge(1000) == Verdict.DECLINE


def test_before_anything_is_known_one_load_that_is_behind_is_enough() -> None:
    engine = Engine()
    engine.admission.began("slow", 1000, 1, 1000)
    for _ in range(BEGUN):
        engine.admission.step_ended()
    engine.clock.now += 0.1
    engine.admission.step_ended()
    assert engine.judge(1000) == Verdict.LOAD
    engine.clock.now += 0.2
    engine.admission.step_ended()
    assert engine.judge(1000) == Verdict.DECLINE


def test_tiers_have_rates_of_their_own_and_are_bounded() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 10.0, tier="disk")
    engine.load(1000, 0.01, tier="memory")
    assert engine.judge(1000, "disk") == Verdict.DECLINE
    assert engine.judge(1000, "memory") == Verdict.LOAD
    for number in range(3 * TIERS):
        engine.judge(1000, f"tier {number}")
    assert len(engine.admission._tiers) == TIERS


def test_one_declined_hit_in_a_while_is_taken_if_the_ledger_can_pay() -> None:
    engine = Engine()
    engine.computes()
    engine.load(400, 0.6)  # 0.2 s were lost, so 0.3 s are left
    learnt = []
    for number in range(400):
        verdict = engine.judge(400)
        assert verdict != Verdict.LOAD
        if verdict == Verdict.LEARN:
            learnt.append(number)
            engine.load(400, 0.6)
    assert learnt[0] == UNLEARNT - 1
    assert all(later - earlier >= UNLEARNT for earlier, later in pairwise(learnt))
    spent, earned = 0.2 * len(learnt), FIRST_S - 0.2 + 400 * LEARNING * 0.401
    assert 0.5 * earned < spent <= earned


def test_nothing_is_learnt_beside_loads_that_wait() -> None:
    engine = Engine()
    engine.computes()
    engine.load(400, 0.6)
    engine.admission.began("r", 400, 1, 400, learns=True)
    assert {engine.judge(400) for _ in range(3 * UNLEARNT)} == {Verdict.DECLINE}


def test_a_learning_load_that_was_quick_is_believed() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 5.0)
    assert engine.judge(1000) == Verdict.DECLINE
    engine.admission.began("r", 1000, 1, 1000, learns=True)
    engine.clock.now += 0.1
    engine.admission.step_ended()
    engine.admission.ended("r")
    assert engine.judge(1000) == Verdict.LOAD


def test_a_longer_hit_than_all_seen_is_worth_a_try() -> None:
    """Whether it was the latency or the bandwidth that made the short one slow, it alone can tell."""
    engine = Engine()
    engine.computes()
    engine.load(100, 0.2)
    assert engine.judge(100) == Verdict.DECLINE
    assert engine.judge(1000) == Verdict.LEARN
    engine.admission.began("r", 1000, 1, 1000, learns=True)
    engine.clock.now += 0.2
    engine.admission.step_ended()
    engine.admission.ended("r")
    assert engine.judge(1000) == Verdict.LOAD  # it was the latency
    assert engine.judge(100) == Verdict.DECLINE


def test_a_step_under_way_is_waited_for() -> None:
    """Beside requests that decode, a hit that saves less than a step is not worth a load."""
    engine = Engine()
    engine.computes()
    engine.load(100, 0.001)
    assert engine.judge(100) == Verdict.LOAD
    engine.admission.pace.planned({"d": 1}, 1, engine.clock.now)
    engine.clock.now += 0.09
    engine.admission.step_ended()
    assert engine.judge(100) == Verdict.DECLINE
    assert engine.judge(1000) == Verdict.LOAD


# The fit ------------------------------------------------------------------------------------------------------


def test_fixed_part_and_rate_are_told_apart() -> None:
    rate = LoadRate()
    for size in (10, 1000, 400, 5000):
        rate.learn(size, 0.5 + size / 100, 0.5 + size / 100)
    assert rate.fixed == pytest.approx(0.5, rel=0.05)
    assert rate.bytes_per_second == pytest.approx(100, rel=0.05)


def test_an_end_that_is_known_up_to_a_step_changes_nothing_if_it_agrees() -> None:
    rate = LoadRate()
    rate.learn(1000, 1.0, 1.0)
    for _ in range(10):
        rate.learn(1000, 0.5, 3.0)
    assert rate.seconds(1000) == pytest.approx(1.0)
    rate.learn(1000, 1.2, 3.0)
    assert 1.0 < (rate.seconds(1000) or 0) < 1.2


def test_one_accident_is_not_a_change_and_two_are() -> None:
    rate = LoadRate()
    for _ in range(8):
        rate.learn(1000, 1.0, 1.0)
    rate.learn(1000, 50.0, 50.0)
    assert (rate.seconds(1000) or 0) < 1.3
    rate.learn(1000, 1.0, 1.0)
    rate.learn(1000, 50.0, 50.0)
    assert (rate.seconds(1000) or 0) < 1.5
    rate.learn(1000, 50.0, 50.0)
    assert rate.seconds(1000) == pytest.approx(50.0)


def test_loads_given_up_now_and_then_weigh_on_the_others() -> None:
    rate = LoadRate()
    for _ in range(4):
        rate.learn(1000, 0.1, 0.1)
    rate.learn(1000, 2.0, float("inf"), late=True)
    assert rate.given_up == pytest.approx(0.1)
    rate.learn(1000, 2.0, float("inf"), late=True)
    assert rate.seconds(1000) == pytest.approx(2.0)


# In the scheduler half ----------------------------------------------------------------------------------------


def admit(rig: Rig, request: Request) -> int:
    """vLLM asks and admits; the tokens that are to be loaded."""
    rig.later.run()
    tokens, _ = rig.half.matched(request, 0)
    assert tokens is not None
    rig.half.admitted(request, rig.tables.allocate(request, request.num_tokens // BLOCK + 4), tokens)
    return tokens


def slow_tier(rig: Rig) -> None:
    """A prompt is computed quickly and a load takes a minute."""
    for number in range(2):
        request = rig.request(f"computed {number}", 20 * BLOCK, seed=90 + number)
        admit(rig, request)
        plan = rig.step(request)
        rig.clock.now += 0.08
        rig.report(rig.ended(plan))
        rig.half.step_ended()
        rig.half.finished(request)
        rig.tables.free(request)
    rig.clock.now += 1.0
    request = rig.request("slow", 10 * BLOCK + 1, seed=80)
    rig.stored(request, 10)
    assert admit(rig, request) == 10 * BLOCK
    rig.step()
    rig.clock.now += 60.0
    rig.half.step_ended()
    rig.report(RankReport(0, ready=True), recved={"slow"})


def test_a_declined_hit_is_counted_touched_and_not_offered_again() -> None:
    rig = Rig()
    slow_tier(rig)
    rig.later.run()
    before, touched = dict(rig.half.account.total.missed), len(rig.store.touched)
    rig.half.account.take()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    assert admit(rig, request) == 0
    assert rig.half.matched(request, 0) == (0, False)  # however often it is asked
    missed = rig.half.account.total.missed
    assert missed["declined"] - before.get("declined", 0) == 5
    assert missed["absent"] - before.get("absent", 0) == 1
    news = rig.half.account.take()
    assert news is not None
    assert news["declined_tokens"] == 5 * BLOCK
    assert news["prefill_tokens_per_second"] == pytest.approx(20 * BLOCK / 0.08)
    assert news["load_bytes_per_second"] == pytest.approx(10 / 60)  # blocks of one byte here
    rig.later.run()
    assert len(rig.store.touched) - touched == 5
    plan = rig.step(request)
    assert [(dump.first, len(dump.blocks)) for dump in plan.dumps if dump.request == "a"] == [(5, 1)]


def test_with_never_every_hit_is_declined_and_blocks_are_stored() -> None:
    rig = Rig(admission="never")
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    assert admit(rig, request) == 0
    assert rig.half.account.total.missed == {"declined": 5, "absent": 1}
    assert len(rig.step(request).dumps) == 1


def test_a_load_given_up_is_a_slow_one_and_one_that_failed_otherwise_says_nothing() -> None:
    rig = Rig()
    for name, reason in (("a", "bad_checksum"), ("b", "timeout")):
        request = rig.request(name, 6 * BLOCK + 1, seed=ord(name))
        rig.stored(request, 6)
        assert admit(rig, request) == 6 * BLOCK
        rig.step()
        rig.clock.now += 2.0
        rig.report(RankReport(0, ready=True, load_failures=[LoadFailure(name, 0, b"", (reason,) * 6)]), recved={name})
        known = rig.admission._tier("").rate.seconds(6)
        assert known == (None if name == "a" else pytest.approx(2.0))


def test_a_load_of_a_request_that_is_gone_counts() -> None:
    rig = Rig()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 6)
    assert admit(rig, request) == 6 * BLOCK
    rig.half.finished(request)
    rig.clock.now += 2.0
    rig.report(RankReport(0, ready=True), recved={"a"})
    assert rig.admission._tier("").waiting == 0
    assert rig.admission._tier("").rate.seconds(6) is not None


def test_the_store_says_which_tier_a_hit_comes_from() -> None:
    rig = Rig()
    asked: list[int] = []

    def slowest(ids: object) -> str:
        asked.append(len(ids))  # type: ignore[arg-type]
        return "disk"

    rig.store.slowest_tier = slowest  # type: ignore[method-assign]
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request) == 4 * BLOCK
    assert asked == [4]
    assert rig.admission._tiers["disk"].waiting == 4
    admit(rig, rig.request("nothing stored", 6 * BLOCK + 1, seed=3))
    assert asked == [4]


def test_a_store_that_does_not_know_its_tiers_has_one() -> None:
    rig = Rig()

    def fails(ids: object) -> str:
        raise UcmError("a bug of the store")

    rig.store.slowest_tier = fails  # type: ignore[method-assign]
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request) == 4 * BLOCK
