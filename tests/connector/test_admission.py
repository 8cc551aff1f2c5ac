"""Single decisions: what is declined, why, and what is done with it; fits and outliers of the load
rate."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Clock, Rig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from ucm.config import parse
from ucm.integration.vllm.connector import factory
from ucm.integration.vllm.connector.admission.admission import (
    BEGUN,
    FIRST_S,
    LEARNING,
    TIERS,
    UNKNOWN_LOAD_S,
    UNLEARNT,
    Admission,
    Cut,
    Verdict,
)
from ucm.integration.vllm.connector.admission.rates import ComputeRate, LoadRate
from ucm.integration.vllm.connector.groups import Group, Reach
from ucm.integration.vllm.connector.metadata import LoadFailure, LoadServed, RankReport
from ucm.store import part_mask, record_ids


class Engine:
    """An admission over an engine that computes a token in 1 ms, with loads as a test says."""

    def __init__(self, mode: str = "measured", share: float = 0.8) -> None:
        self.clock = Clock()
        self.admission = Admission(mode, share, ComputeRate(0.2, 30.0), self.clock)

    def computes(self) -> None:
        """Two steps of 1000 tokens; the first is not believed."""
        for _ in range(2):
            self.admission.compute_rate.planned({"r": 1000}, 1000, self.clock.now)
            self.clock.now += 1.0
            self.admission.step_ended()
        self.clock.now += 10.0  # idle

    def load(
        self, size: int, seconds: float, name: str = "r", tier: int = 0, late: bool = False
    ) -> None:
        """A load of ``size`` bytes that takes ``seconds``."""
        self.loads(whole(size, tier), seconds, name, late=late)

    def loads(
        self,
        cut: Cut,
        seconds: float,
        name: str = "r",
        served: tuple[int, ...] = (),
        late: bool = False,
    ) -> None:
        """A load that may come from several tiers; ``served``: what the rank reports of that."""
        self.admission.began(name, cut, 1)
        self.clock.now += seconds
        self.admission.step_ended()  # what is seen next ended since
        if late:
            self.admission.failed(name, True)
        self.admission.served(name, served)
        self.admission.ended(name)

    def decide(self, tokens: int, tier: int = 0) -> Verdict:
        """A hit of which each token is a byte."""
        return self.admission.decide([whole(tokens, tier)], 1)[1]

    def cut(self, above: int, below: int) -> tuple[int, Verdict]:
        """A hit of which ``above`` bytes are in the upper tier and ``below`` after them in the
        lower one: how many of its tokens are loaded."""
        both = Cut(above + below, {0: above, 1: below})
        taken, verdict = self.admission.decide(
            [whole(above), both] if above else [whole(below, 1)], 1
        )
        return 0 if taken is None else taken.tokens, verdict


def whole(tokens: int, tier: int = 0) -> Cut:
    """A hit in one tier of which each token is a byte."""
    return Cut(tokens, {tier: tokens})


def test_unknown_speeds_accept_a_hit() -> None:
    engine = Engine()
    assert engine.decide(100) == Verdict.LOAD  # neither is
    engine.load(100, 0.9)
    assert engine.decide(100) == Verdict.LOAD  # how fast this engine computes is not
    engine = Engine()
    engine.computes()
    assert engine.decide(100) == Verdict.LOAD  # the tier is not


@pytest.mark.parametrize("mode", ["measured", "always"])
def test_a_load_has_one_second_while_the_speed_of_computing_is_unknown(mode: str) -> None:
    engine = Engine(mode)
    assert engine.admission.began("r", whole(1000), 1) == UNKNOWN_LOAD_S == 1.0
    engine.admission.ended("r")
    engine.computes()
    seconds = engine.admission.began("r", whole(1000), 1)
    assert seconds == pytest.approx(2.0)  # twice what computing takes


def test_a_deadline_that_was_configured_holds_for_first_loads() -> None:
    """And the default of the key, which is that of a plain store, does not."""
    scheduler = SimpleNamespace(max_num_batched_tokens=100)
    vllm_config: Any = SimpleNamespace(scheduler_config=scheduler, max_concurrent_batches=1)
    cases = [({}, 1.0), ({"load_unknown_s": 5}, 5.0), ({"load_unknown_s": 0.3}, 0.3)]
    for deadlines, seconds in cases:
        engine = parse({"storage_backends": "/nowhere", "deadlines": deadlines})
        admission = factory._admission(engine, vllm_config)
        assert admission.began("r", whole(1000), 1) == seconds


@pytest.mark.parametrize(
    ("share", "seconds", "verdict"),
    [(0.8, 0.79, "load"), (0.8, 0.81, "decline"), (0.5, 0.6, "decline")],
)
def test_a_load_may_take_a_share_of_the_compute_time(
    share: float, seconds: float, verdict: str
) -> None:
    engine = Engine(share=share)
    engine.computes()
    engine.load(1000, seconds)
    assert engine.decide(1000).value == verdict
    assert engine.decide(500).value == verdict  # nothing shows a fixed part: both are half


def test_the_modes_that_do_not_measure() -> None:
    for mode, verdict in (("always", Verdict.LOAD), ("never", Verdict.DECLINE)):
        engine = Engine(mode)
        assert engine.decide(10) == verdict
        engine.computes()
        engine.load(1000, 100.0)
        assert engine.decide(1000) == verdict


def test_loads_that_wait_count() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.3)
    assert engine.decide(1000) == Verdict.LOAD
    engine.admission.began("a", whole(1000), 1)
    assert engine.decide(1000) == Verdict.LOAD
    engine.admission.began("b", whole(1000), 1)
    assert engine.decide(1000) == Verdict.DECLINE  # 0.9 s with the two ahead of it
    engine.admission.failed("a", False)
    engine.admission.ended("a")
    assert engine.decide(1000) == Verdict.LOAD


def test_a_late_load_counts_before_it_ends() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1)
    engine.admission.began("slow", whole(1000), 1)
    for _ in range(BEGUN):
        engine.admission.step_ended()
    engine.clock.now += 0.9
    engine.admission.step_ended()
    assert engine.decide(1000) == Verdict.DECLINE


def decodes(engine: Engine, seconds: float = 0.01) -> None:
    """A step with one token."""
    engine.admission.compute_rate.planned({"d": 1}, 1, engine.clock.now)
    engine.clock.now += seconds
    engine.admission.step_ended()


def test_while_the_speed_of_computing_is_unknown_only_very_slow_loads_are_declined() -> None:
    """Here 1000 tokens are computed in 10 s at the very most, one token a step."""
    engine = Engine()
    decodes(engine)
    for seconds in (0.1, 3.0, 9.0, 9.0):
        engine.load(1000, seconds)
        assert {engine.decide(tokens) for tokens in (64, 1000, 5000) * 20} == {Verdict.LOAD}
    for _ in range(2):
        engine.load(1000, 25.0)
    assert engine.decide(1000) == Verdict.DECLINE
    assert engine.decide(5000) == Verdict.LOAD  # which may take no longer, and then it would pay
    engine.computes()
    assert engine.decide(1000) == Verdict.DECLINE  # 1 s, as is known now


def test_a_load_slower_than_any_computing_is_enough_while_computing_is_not_known() -> None:
    engine = Engine()
    engine.admission.began("before", whole(1000), 1)
    engine.admission.began("slow", whole(1000), 1)
    for _ in range(BEGUN + 1):
        engine.admission.step_ended()
    engine.clock.now += 9.5
    assert engine.decide(1000) == Verdict.LOAD
    engine.admission.ended("before")
    engine.clock.now += 9.5  # of these it was first in line
    assert engine.cut(500, 500) == (1000, Verdict.LOAD)
    engine.clock.now += 1.0
    assert engine.decide(1000) == Verdict.DECLINE
    assert engine.decide(1000, tier=1) == Verdict.LOAD  # which is another


def test_tiers_have_rates_of_their_own_and_are_bounded() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 10.0, tier=1)
    engine.load(1000, 0.01, tier=0)
    assert engine.decide(1000, 1) == Verdict.DECLINE
    assert engine.decide(1000, 0) == Verdict.LOAD
    for number in range(3 * TIERS):
        engine.decide(1000, number)
    assert len(engine.admission._tiers) == TIERS


def test_a_declined_hit_is_tried_now_and_then_within_the_saved_time() -> None:
    engine = Engine()
    engine.computes()
    engine.load(400, 0.6)  # 0.2 s were lost, so 0.3 s are left
    learnt = []
    for number in range(400):
        verdict = engine.decide(400)
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
    engine.admission.began("r", whole(400), 1, learns=True)
    assert {engine.decide(400) for _ in range(3 * UNLEARNT)} == {Verdict.DECLINE}


def test_a_fast_trial_load_changes_the_rate() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 5.0)
    assert engine.decide(1000) == Verdict.DECLINE
    engine.admission.began("r", whole(1000), 1, learns=True)
    engine.clock.now += 0.1
    engine.admission.step_ended()
    engine.admission.ended("r")
    assert engine.decide(1000) == Verdict.LOAD


def test_a_hit_longer_than_all_earlier_ones_is_tried() -> None:
    """Whether it was the latency or the bandwidth that made the short one slow, it alone can
    tell."""
    engine = Engine()
    engine.computes()
    engine.load(100, 0.2)
    assert engine.decide(100) == Verdict.DECLINE
    assert engine.decide(1000) == Verdict.LEARN
    engine.admission.began("r", whole(1000), 1, learns=True)
    engine.clock.now += 0.2
    engine.admission.step_ended()
    engine.admission.ended("r")
    assert engine.decide(1000) == Verdict.LOAD  # it was the latency
    assert engine.decide(100) == Verdict.DECLINE


def test_a_step_under_way_is_waited_for() -> None:
    """Beside requests that decode, a hit that saves less than a step is not worth a load."""
    engine = Engine()
    engine.computes()
    engine.load(100, 0.001)
    assert engine.decide(100) == Verdict.LOAD
    engine.admission.compute_rate.planned({"d": 1}, 1, engine.clock.now)
    engine.clock.now += 0.09
    engine.admission.step_ended()
    assert engine.decide(100) == Verdict.DECLINE
    assert engine.decide(1000) == Verdict.LOAD


# The fit
# --------------------------------------------------------------------------------------------------


def test_fixed_part_and_rate_are_distinguished() -> None:
    rate = LoadRate()
    for size in (10, 1000, 400, 5000):
        rate.add_sample(size, 0.5 + size / 100, 0.5 + size / 100)
    assert rate.fixed == pytest.approx(0.5, rel=0.05)
    assert rate.bytes_per_second == pytest.approx(100, rel=0.05)


def test_an_end_known_only_to_a_step_does_not_change_a_rate_that_fits() -> None:
    rate = LoadRate()
    rate.add_sample(1000, 1.0, 1.0)
    for _ in range(10):
        rate.add_sample(1000, 0.5, 3.0)
    assert rate.seconds(1000) == pytest.approx(1.0)
    rate.add_sample(1000, 1.2, 3.0)
    assert 1.0 < (rate.seconds(1000) or 0) < 1.2


def test_one_slow_load_does_not_change_the_rate_and_two_do() -> None:
    rate = LoadRate()
    for _ in range(8):
        rate.add_sample(1000, 1.0, 1.0)
    rate.add_sample(1000, 50.0, 50.0)
    assert (rate.seconds(1000) or 0) < 1.3
    rate.add_sample(1000, 1.0, 1.0)
    rate.add_sample(1000, 50.0, 50.0)
    assert (rate.seconds(1000) or 0) < 1.5
    rate.add_sample(1000, 50.0, 50.0)
    assert rate.seconds(1000) == pytest.approx(50.0)


def test_abandoned_loads_lower_the_rate() -> None:
    rate = LoadRate()
    for _ in range(4):
        rate.add_sample(1000, 0.1, 0.1)
    rate.add_sample(1000, 2.0, float("inf"), late=True)
    assert rate.given_up == pytest.approx(0.1)
    rate.add_sample(1000, 2.0, float("inf"), late=True)
    assert rate.seconds(1000) == pytest.approx(2.0)


def test_a_restored_rate_is_replaced_after_two_loads_that_differ() -> None:
    before = LoadRate()
    for size in (10, 1000, 400, 5000):
        before.add_sample(size, 0.5 + size / 100, 0.5 + size / 100)
    known = before.known()
    assert known is not None
    rate = LoadRate()
    assert rate.known() is None
    rate.recall(known)
    for size in (10, 1000, 9000):
        assert rate.seconds(size) == pytest.approx(before.seconds(size), rel=0.01)
        assert rate.at_best(size) == pytest.approx(before.at_best(size), rel=0.01)
    for _ in range(2):
        rate.add_sample(1000, 80.0, 80.0)
    assert rate.seconds(1000) == pytest.approx(80.0)
    rate.recall(known)  # too late
    assert rate.seconds(1000) == pytest.approx(80.0)


def test_a_few_loads_outweigh_a_restored_rate() -> None:
    before = LoadRate()
    for _ in range(16):
        before.add_sample(1000, 1.0, 1.0)
    known = before.known()
    assert known is not None
    rate = LoadRate()
    rate.recall(known)
    assert rate.seconds(1000) == pytest.approx(1.0)
    for _ in range(3):
        rate.add_sample(1000, 1.6, 1.6)
    assert rate.seconds(1000) == pytest.approx(1.5, rel=0.05)


# In the scheduler side
# ----------------------------------------------------------------------------------------


def admit(rig: Rig, request: Request) -> int:
    """vLLM calls the lookup and admits; returns the tokens that are to be loaded."""
    rig.later.run()
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens is not None
    rig.scheduler.update_state_after_alloc(
        request, rig.tables.allocate(request, request.num_tokens // BLOCK + 4), tokens
    )
    return tokens


def slow_tier(rig: Rig) -> None:
    """A prompt is computed quickly and a load takes a minute."""
    for number in range(2):
        request = rig.request(f"computed {number}", 20 * BLOCK, seed=90 + number)
        admit(rig, request)
        plan = rig.step(request)
        rig.clock.now += 0.08
        rig.report(rig.ended(plan))
        rig.scheduler.step_ended()
        rig.scheduler.request_finished(request)
        rig.tables.free(request)
    rig.clock.now += 1.0
    request = rig.request("slow", 10 * BLOCK + 1, seed=80)
    rig.stored(request, 10)
    assert admit(rig, request) == 10 * BLOCK
    rig.step()
    rig.clock.now += 60.0
    rig.scheduler.step_ended()
    rig.report(RankReport(0, ready=True), recved={"slow"})


def test_a_declined_hit_is_counted_touched_and_not_offered_again() -> None:
    rig = Rig()
    slow_tier(rig)
    rig.later.run()
    before, touched = dict(rig.scheduler.miss_stats.total.missed), len(rig.store.touched)
    rig.scheduler.miss_stats.take()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    assert admit(rig, request) == 0
    # however often it is asked
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        0,
        False,
    )
    missed = rig.scheduler.miss_stats.total.missed
    assert missed["declined"] - before.get("declined", 0) == 5
    assert missed["absent"] - before.get("absent", 0) == 1
    news = rig.scheduler.miss_stats.take()
    assert news is not None
    assert news["declined_tokens"] == 5 * BLOCK
    assert news["prefill_tokens_per_second"] == pytest.approx(20 * BLOCK / 0.08)
    assert news["load_bytes_per_second"] == pytest.approx(10 / 60)  # blocks of one byte here
    rig.later.run()
    assert len(rig.store.touched) - touched == 5
    plan = rig.step(request)
    assert [(dump.first, len(dump.blocks)) for dump in plan.dumps if dump.request == "a"] == [
        (5, 1)
    ]


def test_with_never_every_hit_is_declined_and_blocks_are_stored() -> None:
    rig = Rig(admission="never")
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    assert admit(rig, request) == 0
    assert rig.scheduler.miss_stats.total.missed == {"declined": 5, "absent": 1}
    assert len(rig.step(request).dumps) == 1


def test_an_abandoned_load_counts_as_slow_and_a_failed_one_does_not_count() -> None:
    rig = Rig()
    for name, reason in (("a", "bad_checksum"), ("b", "timeout")):
        request = rig.request(name, 6 * BLOCK + 1, seed=ord(name))
        rig.stored(request, 6)
        assert admit(rig, request) == 6 * BLOCK
        rig.step()
        rig.clock.now += 2.0
        rig.report(
            RankReport(0, ready=True, load_failures=[LoadFailure(name, 0, b"", (reason,) * 6)]),
            recved={name},
        )
        known = rig.admission._tier(0).rate.seconds(6)
        assert known == (None if name == "a" else pytest.approx(2.0))


def test_a_load_of_an_ended_request_counts() -> None:
    rig = Rig()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 6)
    assert admit(rig, request) == 6 * BLOCK
    rig.scheduler.request_finished(request)
    rig.clock.now += 2.0
    rig.report(RankReport(0, ready=True), recved={"a"})
    assert rig.admission._tier(0).waiting == 0
    assert rig.admission._tier(0).rate.seconds(6) is not None


def two_tiers(rig: Rig, lower: set[bytes]) -> None:
    """The rig's store has two tiers; the lower one alone has these keys."""
    rig.store.tier_names = ("memory", "disk")
    rig.store.lower = lower


def test_a_lookup_returns_the_tier_of_each_block() -> None:
    rig = Rig()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    two_tiers(rig, set(record_ids(rig.keys_of(request)[3:], part_mask(0, 0, 0))))
    assert admit(rig, request) == 5 * BLOCK
    assert {number: tier.waiting for number, tier in rig.admission._tiers.items()} == {0: 3, 1: 2}
    rig.clock.now += 2.0
    rig.scheduler.step_ended()
    served = LoadServed("a", (4, 1))  # one had been promoted by then
    rig.report(RankReport(0, ready=True, served=[served]), recved={"a"})
    assert {
        number: (tier.waiting, tier.moved) for number, tier in rig.admission._tiers.items()
    } == {
        0: (0, 4),
        1: (0, 1),
    }


def test_the_tier_of_a_block_is_the_lowest_of_its_parts() -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 4)
    keys = rig.keys_of(request)
    two_tiers(rig, set(record_ids(keys[2:], part_mask(0, 0, 1))))
    rig.later.run()
    tracker = rig.scheduler._live["a"]
    assert tracker.lookup is not None
    assert tracker.lookup.tiers == bytes([0, 0, 1, 1])


def test_a_hit_is_cut_where_the_slow_tier_begins() -> None:
    rig = Rig()
    slow_tier(rig)
    rig.admission._tiers[1], rig.admission._tiers[0] = (
        rig.admission._tiers[0],
        rig.admission._tier(7),
    )
    rig.admission._tiers[0].rate.add_sample(BLOCK, 1e-6, 1e-6)
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    two_tiers(rig, set(record_ids(rig.keys_of(request)[3:], part_mask(0, 0, 0))))
    missed = rig.scheduler.miss_stats.total.missed
    before = dict(missed)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 10), 3 * BLOCK)
    assert missed["declined"] - before.get("declined", 0) == 2
    assert missed["absent"] - before.get("absent", 0) == 1
    load = rig.scheduler.build_connector_meta(SchedulerOutput.make_empty()).loads[0]
    assert len(load.blocks) == 3
    assert rig.admission._tiers[1].waiting == 0
    rig.report(RankReport(0, ready=True), recved={"a"})
    request.num_computed_tokens = 3 * BLOCK
    plan = rig.step(request)
    assert [(dump.first, len(dump.blocks)) for dump in plan.dumps if dump.request == "a"] == [
        (5, 1)
    ]


@pytest.mark.parametrize(("windows", "taken"), [({2, 4}, 3), ({1, 4}, 2), ({0, 4}, 1), ({4}, 0)])
def test_a_hit_of_several_groups_is_cut_where_each_can_serve_it(
    windows: set[int], taken: int
) -> None:
    """The slow tier begins at the fourth block. A window sees the last block of a hit."""
    rig = Rig(groups=(Group(0, 0, BLOCK), Group(1, 1, BLOCK, reach=Reach("window", BLOCK))))
    for _ in range(2):
        rig.admission.compute_rate.planned({"r": 1000}, 1000, rig.clock.now)
        rig.clock.now += 1.0
        rig.admission.step_ended()
    rig.clock.now += 10.0  # idle
    rig.readiness.group_bytes = [1, 1]
    rig.admission._tier(0).rate.add_sample(BLOCK, 1e-6, 1e-6)
    rig.admission._tier(1).rate.add_sample(BLOCK, 60.0, 60.0)
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    keys = rig.keys_of(request)
    window = record_ids(keys, part_mask(1, 0, 0))
    rig.store.ids.update(window[at] for at in windows)
    two_tiers(rig, {*record_ids(keys[3:], part_mask(0, 0, 0)), window[4]})
    rig.later.run()
    expected = (taken * BLOCK, True) if taken else (0, False)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == expected


def test_blocks_promoted_while_a_request_waits_are_decided_again() -> None:
    rig = Rig()
    slow_tier(rig)
    rig.admission._tiers[1], rig.admission._tiers[0] = (
        rig.admission._tiers[0],
        rig.admission._tier(7),
    )
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    two_tiers(rig, set(record_ids(rig.keys_of(request), part_mask(0, 0, 0))))
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    unlearnt = rig.admission._tiers[1].unlearnt
    rig.store.lower = set()
    tracker = rig.scheduler._live["a"]
    assert tracker.lookup is not None
    rig.scheduler._relocate(tracker.lookup)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (5 * BLOCK, True)
    assert rig.admission._tiers[1].unlearnt == unlearnt  # the same hit, not another one


def test_a_store_that_does_not_know_its_tiers_has_one() -> None:
    rig = Rig()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request) == 4 * BLOCK
    assert rig.admission._tiers[0].waiting == 4


# Tiers
# --------------------------------------------------------------------------------------------------


def test_the_savings_of_the_tiers_are_added() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1, tier=0)
    engine.load(1000, 0.7, tier=1)
    assert engine.cut(500, 500) == (1000, Verdict.LOAD)  # 0.05 + 0.35 s instead of 1 s
    engine.load(1000, 2.0, tier=1)
    engine.load(1000, 2.0, tier=1)
    assert engine.cut(500, 500) == (500, Verdict.LOAD)
    assert engine.cut(0, 500) == (0, Verdict.DECLINE)


def test_a_beginning_too_short_to_pay_is_loaded_with_the_rest() -> None:
    engine = Engine()
    engine.computes()
    for size in (10, 1000):
        engine.load(size, 0.05, tier=0)  # whatever the size
    engine.load(1000, 0.3, tier=1)
    assert engine.cut(20, 0)[0] == 0
    assert engine.cut(20, 1000) == (1020, Verdict.LOAD)


def test_an_unknown_tier_below_a_known_one_is_accepted_and_learnt() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1, tier=0)
    assert engine.cut(500, 500) == (1000, Verdict.LOAD)
    engine.loads(Cut(1000, {0: 500, 1: 500}), 1.05)
    assert engine.admission._tiers[1].rate.seconds(500) == pytest.approx(1.0)
    assert engine.admission._tiers[0].rate.seconds(500) == pytest.approx(0.05)  # not its fault
    assert engine.cut(500, 500) == (500, Verdict.LOAD)


def test_a_load_from_both_that_takes_as_long_as_expected_changes_neither() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1, tier=0)
    engine.load(1000, 1.0, tier=1)
    engine.loads(Cut(1000, {0: 500, 1: 500}), 0.55)
    assert engine.admission._tiers[0].rate.seconds(1000) == pytest.approx(0.1)
    assert engine.admission._tiers[1].rate.seconds(1000) == pytest.approx(1.0)


def test_a_load_counts_for_the_tier_that_served_it() -> None:
    """Blocks are pushed out, and brought up, between the lookup and the load."""
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1, tier=0)
    engine.load(1000, 1.0, tier=1)
    for _ in range(4):
        engine.loads(whole(1000, 0), 1.0, served=(0, 10))
        engine.loads(whole(1000, 1), 0.1, served=(10, 0))
    assert engine.admission._tiers[0].rate.seconds(1000) == pytest.approx(0.1)
    assert engine.admission._tiers[1].rate.seconds(1000) == pytest.approx(1.0)
    assert all(tier.waiting == 0 for tier in engine.admission._tiers.values())
    assert {number: tier.moved for number, tier in engine.admission._tiers.items()} == {
        0: 5000,
        1: 5000,
    }


def test_the_rank_with_most_blocks_from_lower_tiers_counts() -> None:
    engine = Engine()
    engine.computes()
    engine.admission.began("r", whole(100), 1)
    for served in ((10, 0), (8, 2), (9, 1), ()):
        engine.admission.served("r", served)
    engine.admission.ended("r")
    assert {number: tier.moved for number, tier in engine.admission._tiers.items()} == {
        0: 80,
        1: 20,
    }


def test_a_late_load_delays_only_its_own_tier() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 0.1, tier=0)
    engine.load(1000, 0.3, tier=1)
    engine.admission.began("slow", whole(10, 1), 1)
    for _ in range(BEGUN):
        engine.admission.step_ended()
    engine.clock.now += 5.0
    engine.admission.step_ended()
    assert engine.cut(500, 500) == (500, Verdict.LOAD)


def test_time_saved_by_one_tier_allows_no_trial_of_another() -> None:
    engine = Engine()
    engine.computes()
    engine.load(1000, 10.0, tier=1)
    for _ in range(20):
        engine.load(1000, 0.01, tier=0)
    assert engine.admission._tiers[0].ledger > 5.0
    assert engine.admission._tiers[1].ledger < 0
    taken = [engine.cut(500, 500) for _ in range(3 * UNLEARNT)]
    assert set(taken) == {(500, Verdict.LOAD)}
