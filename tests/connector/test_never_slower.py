"""Never slower than recomputing: an engine with the cache beside the same engine without it, in
virtual time.

What is promised is the long run: the mean time to the first token with the cache is at most 1.02 of
that without it, at every speed of the tier, and also while the speed changes. What comes before the
long run is bounded too: loads that began while nothing was known cost their deadline each, and the
ledger's first seconds may be lost once.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from parts import BLOCK
from simulation import (
    BLOCK_BYTES,
    UNKNOWN_S,
    Arrival,
    Engine,
    Simulation,
    Tier,
    compare,
    spread,
    steady,
    traffic,
)

from ucm.integration.vllm.connector.admission.admission import FIRST_S
from ucm.integration.vllm.connector.admission.rates import FLOOR

#: It computes for a while, and longer beside a busy machine.
pytestmark = pytest.mark.timeout(900)

PROMISE = 1.02
#: Requests before the long run.
WARM_UP = 50
MIB = float(1 << 20)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of loads are given up here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def combined(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One value of each factor in all combinations with ``UCM_TEST_LONG``, else in every second
    one: of three factors every pair of values is still among them."""
    places = product(*(range(len(factor)) for factor in factors))
    return [
        tuple(factor[place] for factor, place in zip(factors, chosen, strict=True))
        for chosen in places
        if os.environ.get("UCM_TEST_LONG") or sum(chosen) % 2 == 0
    ]


SPEEDS = combined((0.5, 0.2), (0.0, 0.05, 0.5), (10, 300, 1000, 100_000))


@pytest.mark.parametrize(("gap", "latency", "bandwidth"), SPEEDS)
def test_at_every_speed_of_the_tier(gap: float, latency: float, bandwidth: float) -> None:
    """``bandwidth`` in MiB/s: computing a block takes 1.6 ms here, so about 600 MiB/s are as
    fast."""
    arrivals = traffic(600, gap)
    measured, without = compare(Engine(), lambda: steady(latency, bandwidth * MIB), arrivals)
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    if gap == 0.5:  # where requests queue, which of them is in the middle says little
        assert statistics.median(measured.first) <= PROMISE * statistics.median(without.first)
    start = measured.unknown * UNKNOWN_S + FIRST_S
    # others queue behind
    assert sum(measured.first) <= PROMISE * sum(without.first) + start * (1 if gap == 0.5 else 3)


@pytest.mark.parametrize("gap", [0.5, 0.2], ids=["quiet", "busy"])
def test_a_fast_tier_is_used(gap: float) -> None:
    """The promise alone would be kept by declining everything."""
    arrivals = traffic(400, gap)
    measured, without = compare(Engine(noise=0.2), lambda: steady(0.001, 1e5 * MIB), arrivals)
    always = Simulation(Engine(noise=0.2), steady(0.001, 1e5 * MIB), arrivals, "always").run()
    assert measured.mean() < 0.6 * without.mean()
    assert measured.mean() < 1.05 * always.mean()
    assert measured.loaded > 0.95 * always.loaded


def test_a_slow_tier_is_slower_than_computing_if_every_hit_is_loaded() -> None:
    arrivals = traffic(200, 0.5)
    without = Simulation(Engine(), steady(0.05, 100 * MIB), arrivals, "never").run()
    always = Simulation(Engine(), steady(0.05, 100 * MIB), arrivals, "always").run()
    assert always.mean(WARM_UP) > 1.5 * without.mean(WARM_UP)


def test_long_hits_are_loaded_where_short_ones_are_not() -> None:
    """A tier with a high latency and a high bandwidth: one rule declines the short hits."""
    arrivals = traffic(600, 0.5)
    measured, without = compare(Engine(), lambda: steady(0.05, 1e5 * MIB), arrivals)
    assert measured.mean(WARM_UP) < 0.8 * without.mean(WARM_UP)
    assert measured.declined > 0
    assert measured.loaded > measured.declined


@pytest.mark.parametrize("bandwidth", [300, 600, 3000])
def test_beside_requests_that_decode(bandwidth: float) -> None:
    """A load is not seen to end before a step does, in which others produce their tokens."""
    arrivals = traffic(500, 0.5, output=60)
    measured, without = compare(Engine(noise=0.2), lambda: steady(0.1, bandwidth * MIB), arrivals)
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)


def _even(engine: Engine) -> float:
    """Bytes a second at which loading a block takes as long as computing it in full steps."""
    return BLOCK_BYTES / (
        BLOCK * (engine.cost + engine.overhead / engine.budget) * (1 + engine.noise / 2)
    )


def uneven(speed: float, sigma: float) -> Callable[[], Tier]:
    """A tier whose loads each have a speed of their own, with ``speed`` in the middle."""

    def tier() -> Tier:
        source = random.Random(7)
        return Tier(lambda now: 0.001, lambda now: speed * source.lognormvariate(0.0, sigma))

    return tier


@pytest.mark.parametrize(
    ("swings", "factor"),
    combined(("steady", "uneven", "wild", "by turns"), (0.5, 0.8, 1.0, 1.25, 2.0, 4.0)),
)
def test_around_the_speed_at_which_both_take_as_long(swings: str, factor: float) -> None:
    """Where it is hardest to tell, with rates that differ from load to load or from minute to
    minute."""
    engine = Engine(noise=0.3)
    speed = factor * _even(engine)
    tiers = {
        "steady": lambda: steady(0.001, speed),
        "uneven": uneven(speed, 0.3),
        "wild": uneven(speed, 0.8),
        "by turns": switching(40.0, 2 * speed / MIB, speed / 2 / MIB),
    }
    measured, without = compare(engine, tiers[swings], traffic(600, 0.5))
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    if factor == 4.0:
        assert measured.mean(WARM_UP) < 0.9 * without.mean(WARM_UP)


def switching(period: float, fast: float, slow: float) -> Callable[[], Tier]:
    """A tier that changes its bandwidth (MiB/s) every ``period`` seconds, fast at first."""
    return lambda: Tier(
        lambda now: 0.001, lambda now: MIB * (slow if int(now / period) % 2 else fast)
    )


@pytest.mark.parametrize(
    ("period", "slow"), [(50.0, 20.0), (50.0, 300.0), (200.0, 1.0), (10.0, 100.0)]
)
def test_while_the_speed_changes(period: float, slow: float) -> None:
    arrivals = traffic(1200, 0.5)
    measured, without = compare(Engine(noise=0.2), switching(period, 10_000.0, slow), arrivals)
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    assert measured.loaded > 0


def test_a_tier_that_becomes_fast_is_found() -> None:
    arrivals = traffic(1500, 0.5)
    fast_from = 200.0

    def tier() -> Tier:
        return Tier(lambda now: 0.001, lambda now: MIB * (10_000.0 if now > fast_from else 50.0))

    measured, without = compare(Engine(), tier, arrivals)
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    assert measured.mean(1000) < 0.7 * without.mean(1000)


@pytest.mark.parametrize("stalls", [0.02, 0.1, 0.3])
def test_a_tier_that_stalls_now_and_then(stalls: float) -> None:
    """Some loads take 20 times as long; whether that still pays is for the measured cost to say."""
    arrivals = traffic(1000, 0.5)

    def tier() -> Tier:
        source = random.Random(5)
        return Tier(lambda now: 1.0 if source.random() < stalls else 0.02, lambda now: 2000 * MIB)

    measured, without = compare(Engine(noise=0.2), tier, arrivals)
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)


def test_a_tier_that_hangs() -> None:
    """From a moment on nothing ends by itself: each load is given up, and soon none is begun."""
    arrivals = traffic(1000, 0.5)

    def tier() -> Tier:
        return Tier(lambda now: 0.001 if now < 200 else 1e6, lambda now: 10_000 * MIB)

    measured, without = compare(Engine(), tier, arrivals)
    late = [a for a in arrivals if a.at > 110]
    assert measured.mean(len(arrivals) - len(late)) <= PROMISE * without.mean(
        len(arrivals) - len(late)
    )


def test_slow_first_steps_do_not_make_slow_loads_acceptable() -> None:
    """Kernels are compiled in the first steps: afterwards the engine is believed to be as fast as
    it is."""
    arrivals = traffic(800, 0.5)
    engine = Engine(first_steps=3.0, cold_steps=4)
    measured, without = compare(engine, lambda: steady(0.3, 300 * MIB), arrivals)
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)


def test_a_burst_at_the_start_costs_its_deadline_once() -> None:
    arrivals = [Arrival(0.0, 60, 54) for _ in range(8)] + [
        Arrival(30 + a.at, *_rest(a)) for a in traffic(800, 0.5)
    ]
    measured, without = compare(Engine(), lambda: steady(0.0, 1.0 * MIB), arrivals)
    assert max(measured.first[:8]) <= UNKNOWN_S + max(without.first[:8]) + 0.1
    assert measured.mean(8 + WARM_UP) <= PROMISE * without.mean(8 + WARM_UP)


# Restart: a fresh engine over a full store
# -------------------------------------------------------------------


def all_stored(order: int = 0, gap: float = 3.0) -> list[Arrival]:
    """Prompts of which the store has every full block, in this order."""
    sizes = [12, 31, 62] * 133
    random.Random(order).shuffle(sizes)
    return [Arrival(gap * number, size, size, 4) for number, size in enumerate(sizes)]


def earlier(engine: Engine, make_tier: Callable[[], Tier]) -> Any:
    """The memory of an engine that ran before this one."""
    life = Simulation(engine, make_tier(), traffic(200, 0.5))
    life.run()
    return life.rig.admission.known()


@pytest.mark.parametrize(
    ("factor", "order", "memory"), combined((4.0, 100.0), range(3), (True, False))
)
def test_restart_reuses_every_full_block_whatever_the_order(
    factor: float, order: int, memory: bool
) -> None:
    engine, arrivals = Engine(), all_stored(order)

    def tier() -> Tier:
        return steady(0.001, factor * _even(engine))

    known = earlier(engine, tier) if memory else (None, {})
    measured, without = compare(engine, tier, arrivals, known=known)
    assert measured.loaded == sum(arrival.stored for arrival in arrivals)
    assert measured.declined == measured.learning == 0
    assert measured.mean() < 0.6 * without.mean()
    if not memory:
        assert measured.unknown == len(arrivals)  # nothing was computed to learn the speed


def test_restart_of_a_queue_without_memory() -> None:
    """All arrive at once. Their loads wait for each other longer than one prompt takes to
    compute."""
    engine, arrivals = Engine(), all_stored(gap=0.0)[:60]
    measured, without = compare(engine, lambda: steady(0.001, 4 * _even(engine)), arrivals)
    assert measured.loaded == sum(arrival.stored for arrival in arrivals)
    assert measured.mean() < 0.6 * without.mean()


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.5, 0.8, 1.0, 1.25])
def test_restart_with_memory_over_a_slow_store(factor: float) -> None:
    """No prompt is ever computed because it had to be, yet the first declined hit is declined at
    once."""
    engine = Engine()

    def tier() -> Tier:
        return steady(0.001, factor * _even(engine))

    measured, without = compare(engine, tier, all_stored(), known=earlier(engine, tier))
    assert sum(measured.first) <= PROMISE * sum(without.first) + FIRST_S


@pytest.mark.parametrize("factor", [0.001, 0.01, 0.03])
def test_restart_without_memory_over_a_store_slower_than_any_computing(factor: float) -> None:
    """A prompt takes 0.44 ms a token in full steps here: below 0.04 of the speed at which both take
    as long, a load brings fewer than 100 tokens a second."""
    engine = Engine()
    measured, without = compare(engine, lambda: steady(0.001, factor * _even(engine)), all_stored())
    # So short are these prompts that the ledger's first seconds last beyond the warm-up.
    assert sum(measured.first[WARM_UP:]) <= PROMISE * sum(without.first[WARM_UP:]) + FIRST_S
    assert measured.unknown <= 4


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0])
def test_restart_without_memory_until_a_prompt_is_computed(factor: float) -> None:
    """What no bound can tell is learnt by the first prompts that have something new, and the
    promise holds from then on; before, loads are no slower than the bound says."""
    engine = Engine()
    stored, new = all_stored()[:30], traffic(600, 0.5)
    arrivals = [*stored, *(replace(each, at=120 + each.at) for each in new)]
    measured, without = compare(engine, lambda: steady(0.001, factor * _even(engine)), arrivals)
    for took, arrival in zip(measured.first[: len(stored)], stored, strict=True):
        assert took <= 2 * engine.overhead + arrival.stored * BLOCK / FLOOR
    since = len(stored) + WARM_UP
    assert measured.mean(since) <= PROMISE * without.mean(since)


@pytest.mark.parametrize("now", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("before", [0.1, 1.0, 4.0])
def test_restart_over_a_store_that_has_changed(before: float, now: float) -> None:
    engine = Engine(noise=0.2)
    known = earlier(engine, lambda: steady(0.001, before * _even(engine)))
    measured, without = compare(
        engine, lambda: steady(0.001, now * _even(engine)), traffic(600, 0.5), known=known
    )
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    if now == 4.0:
        assert measured.mean(WARM_UP) < 0.8 * without.mean(WARM_UP)


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("other", [0.2, 5.0], ids=["was faster", "was slower"])
def test_restart_of_an_engine_that_has_changed(other: float, factor: float) -> None:
    """As on a machine of the same name that has another neighbour."""
    engine = Engine(noise=0.2)
    past = replace(engine, overhead=other * engine.overhead, cost=other * engine.cost)
    known = earlier(past, lambda: steady(0.001, factor * _even(engine)))
    measured, without = compare(
        engine, lambda: steady(0.001, factor * _even(engine)), traffic(600, 0.5), known=known
    )
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    if factor == 3.0:
        assert measured.mean(WARM_UP) < 0.8 * without.mean(WARM_UP)


# Memory above something slower
# ------------------------------------------------------------------------------


def memory() -> Tier:
    """Loads that take next to nothing."""
    return steady(0.001, 1e5 * MIB)


@pytest.mark.parametrize(("gap", "latency", "bandwidth"), SPEEDS)
def test_memory_above_a_tier_of_every_speed(gap: float, latency: float, bandwidth: float) -> None:
    arrivals = spread(traffic(600, gap))
    measured, without = compare(
        Engine(), memory, arrivals, make_lower=lambda: steady(latency, bandwidth * MIB)
    )
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    start = measured.unknown * UNKNOWN_S + 2 * FIRST_S
    assert sum(measured.first) <= PROMISE * sum(without.first) + start * (1 if gap == 0.5 else 3)


@pytest.mark.parametrize("bandwidth", [10, 100, 300])
def test_hits_in_memory_are_taken_and_those_on_a_slow_disk_declined(bandwidth: float) -> None:
    """As if the store had nothing but what is in memory."""
    arrivals = spread(traffic(600, 0.5))
    measured, without = compare(
        Engine(), memory, arrivals, make_lower=lambda: steady(0.01, bandwidth * MIB)
    )
    above = [
        replace(arrival, stored=arrival.stored - arrival.below, below=0) for arrival in arrivals
    ]
    alone = Simulation(Engine(), memory(), above).run()
    assert measured.mean(WARM_UP) <= 1.03 * alone.mean(WARM_UP) < 0.8 * without.mean(WARM_UP)
    in_memory, on_disk = alone.loaded, sum(arrival.below for arrival in arrivals)
    # The loads from both that began before anything was known were given up, and their part in
    # memory with them.
    assert 0.99 * in_memory <= measured.loaded <= in_memory + 0.1 * on_disk
    assert measured.declined >= 0.9 * on_disk


def test_a_disk_that_is_quick_enough_is_used_beside_memory() -> None:
    arrivals = spread(traffic(400, 0.5))
    measured, _ = compare(Engine(), memory, arrivals, make_lower=lambda: steady(0.005, 5000 * MIB))
    always = Simulation(
        Engine(), memory(), arrivals, "always", lower=steady(0.005, 5000 * MIB)
    ).run()
    assert measured.mean() < 1.05 * always.mean()
    assert measured.loaded > 0.9 * always.loaded


def test_a_disk_below_memory_that_turns_slow_and_mends() -> None:
    arrivals = spread(traffic(1500, 0.4))
    measured, without = compare(Engine(), memory, arrivals, make_lower=switching(150.0, 5000, 50))
    assert measured.mean(WARM_UP) <= PROMISE * without.mean(WARM_UP)
    disk = sum(arrival.below for arrival in arrivals)
    assert measured.loaded - sum(a.stored - a.below for a in arrivals) > 0.15 * disk


def _rest(arrival: Arrival) -> tuple[int, int, int]:
    return arrival.blocks, arrival.stored, arrival.output


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    gap=st.floats(0.25, 2.0),
    latency=st.floats(0.0, 0.3),
    bandwidths=st.lists(st.floats(1.0, 5.0), min_size=1, max_size=3),
    cost=st.sampled_from([0.0001, 0.0004]),
    budget=st.sampled_from([128, 256, 2048]),
)
def test_random_engines_tiers_and_traffic(
    seed: int, gap: float, latency: float, bandwidths: list[float], cost: float, budget: int
) -> None:
    """Bandwidths are powers of ten in MiB/s, one after the other in equal parts of the run."""
    arrivals = traffic(600, gap, seed)
    part = arrivals[-1].at / len(bandwidths) + 1

    def tier() -> Tier:
        return Tier(
            lambda now: latency,
            lambda now: MIB * 10 ** bandwidths[min(int(now / part), len(bandwidths) - 1)],
        )

    engine = Engine(cost=cost, budget=budget, noise=0.3)
    measured, without = compare(engine, tier, arrivals, seed=seed)
    assert measured.mean(2 * WARM_UP) <= PROMISE * without.mean(2 * WARM_UP)
