"""Which blocks are on the device: the plan as a pure function, what leaves first, and what is
foreseen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.errors import ConfigError, InvalidInputError
from ucm.sparse.base import SparseStats
from ucm.sparse.residency import (
    HybridEvictionPolicy,
    LRUEvictionPolicy,
    Predictor,
    Residency,
    ScoreBasedEvictionPolicy,
    make_eviction,
    plan_residency,
)

FEW = settings(max_examples=150, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[int, int], list[int], int, list[int], dict[int, float]]:
    capacity = draw(st.integers(1, 8))
    blocks = draw(st.lists(st.integers(0, 15), unique=True, max_size=capacity))
    slots = draw(st.permutations(range(capacity)))
    wanted = draw(st.lists(st.integers(0, 15), max_size=12))
    pinned = draw(st.lists(st.integers(0, 15), unique=True, max_size=capacity))
    scores = {block: draw(st.sampled_from([0.0, 0.5, 1.0])) for block in range(16)}
    return dict(zip(blocks, slots, strict=False)), wanted, capacity, pinned, scores


@FEW
@given(cases())
def test_the_plan_keeps_its_rules(
    case: tuple[dict[int, int], list[int], int, list[int], dict[int, float]],
) -> None:
    resident, wanted, capacity, pinned, scores = case
    before = dict(resident)
    plan = plan_residency(resident, wanted, capacity, pinned=pinned, rank=scores.__getitem__)
    loads = dict(plan.load)
    after = {**plan.keep, **loads}
    assert resident == before  # pure
    assert len(set(after.values())) == len(after) <= capacity  # no slot twice, never too many
    assert not loads.keys() & resident.keys()  # nothing is loaded that is there
    assert all(resident[block] == slot for block, slot in plan.keep.items())  # nothing moves
    assert set(pinned) <= after.keys()  # windows are there
    assert set(pinned) & resident.keys() <= plan.keep.keys()  # and were not evicted
    order = list(dict.fromkeys([*pinned, *wanted]))
    assert [block for block in order if block in after][: len(order) - len(plan.dropped)] == order[
        :capacity
    ]
    assert plan.dropped == order[capacity:]  # the least wanted go without
    if set(order) <= resident.keys():
        assert plan.load == [] and plan.keep == resident  # nothing changes
    gone = resident.keys() - plan.keep.keys()
    spare = set(plan.keep) - set(order[:capacity])
    assert not spare or not gone or max(scores[b] for b in gone) <= min(scores[b] for b in spare)
    assert len(gone) == max(0, len(loads) - (capacity - len(resident)))  # no more than needed
    again = plan_residency(after, wanted, capacity, pinned=pinned, rank=scores.__getitem__)
    assert again.load == [] and again.keep == after


def test_of_equal_ones_the_higher_id_leaves() -> None:
    plan = plan_residency({3: 0, 1: 1, 2: 2}, [9], 3)
    assert plan.keep == {1: 1, 2: 2} and plan.load == [(9, 0)]


def test_loads_are_ordered_by_how_much_they_are_wanted() -> None:
    plan = plan_residency({}, [7, 2, 5], 2, pinned=[0])
    assert plan.load == [(0, 0), (7, 1)] and plan.dropped == [2, 5]


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="shrink the windows"):
        plan_residency({}, [], 1, pinned=[0, 1])
    for resident in ({1: 0, 2: 0}, {1: 5}, {1: -1}):
        with pytest.raises(InvalidInputError, match="slots of their own"):
            plan_residency(resident, [], 2)


# One layer of one request
# --------------------------------------------------------------------------------------------


def test_a_step_uses_what_has_arrived_and_counts_the_rest() -> None:
    stats = SparseStats()
    residency = Residency(3, stats=stats)
    assert residency.want([5, 6], pinned=[0]) == [(0, 0), (5, 1), (6, 2)]
    residency.arrived(0)
    residency.arrived(6)
    assert residency.usable([0, 5, 6]) == [0, 6]
    assert stats.snapshot()["blocks_absent"] == 1
    residency.arrived(5)
    assert residency.usable([0, 5, 6]) == [0, 5, 6]
    assert residency.want([5, 6], pinned=[0]) == []


def test_a_slot_that_is_being_written_to_is_given_to_no_other_block() -> None:
    residency = Residency(2)
    assert residency.want([5, 6]) == [(5, 0), (6, 1)]
    assert residency.want([7, 8]) == []  # both slots still have a load under way
    residency.arrived(5)
    assert residency.want([7, 8]) == [(7, 0)]
    residency.failed(6)
    assert residency.usable([6]) == []
    assert residency.want([7, 8]) == [(8, 1)]
    assert residency.resident == {} and residency.loading == {7: 0, 8: 1}


@FEW
@given(
    st.lists(
        st.tuples(st.sampled_from(["want", "arrived", "failed"]), st.integers(0, 9)), max_size=40
    ),
    st.sampled_from(["lru", "score", "hybrid"]),
)
def test_whatever_happens_slots_are_not_shared(
    events: list[tuple[str, int]], eviction: str
) -> None:
    residency = Residency(4, eviction=eviction)
    for event, number in events:
        if event == "want":
            loads = residency.want([(number * k) % 10 for k in (1, 3, 7)], pinned=[0])
            assert len(loads) <= 4
        elif residency.loading:
            block = sorted(residency.loading)[number % len(residency.loading)]
            getattr(residency, event)(block)
        held = [*residency.resident.values(), *residency.loading.values()]
        assert len(set(held)) == len(held) <= 4
        assert not residency.resident.keys() & residency.loading.keys()


def test_blocks_that_are_there_at_the_start() -> None:
    residency = Residency(3)
    for slot, block in enumerate((0, 8, 9)):
        residency.place(block, slot)
    assert residency.want([8, 4], pinned=[0]) == [(4, 2)]
    assert residency.resident == {0: 0, 8: 1}


# What leaves first
# --------------------------------------------------------------------------------------------------


def test_the_longest_unused_leaves_first() -> None:
    policy = LRUEvictionPolicy(capacity=3)
    for block in (1, 2, 3, 1):
        policy.access(block)
    assert policy.evict() == 2
    policy.access(4)
    policy.access(5)  # a fourth one: the longest unused is forgotten
    assert [policy.evict() for _ in range(3)] == [1, 4, 5]


def test_the_least_important_leaves_first() -> None:
    policy = ScoreBasedEvictionPolicy()
    for block, score in ((1, 0.5), (2, 0.1), (3, 0.1)):
        policy.update_score(block, score)
    policy.update_score(1, 0.05)
    assert [policy.evict() for _ in range(3)] == [1, 3, 2]  # of equal ones the higher id
    with pytest.raises(InvalidInputError):
        policy.evict()


def test_hybrid_is_the_formula_with_ages_in_steps() -> None:
    """.7 * score + .3 / (age + 1), lowest goes."""
    policy = HybridEvictionPolicy()
    policy.access(1, 0.6)
    policy.tick()
    policy.access(2, 0.3)
    policy.tick()
    policy.tick()
    policy.access(3, 0.2)
    assert policy.compute_priority(1) == pytest.approx(0.7 * 0.6 + 0.3 / 4)
    assert policy.compute_priority(2) == pytest.approx(0.7 * 0.3 + 0.3 / 3)
    assert policy.compute_priority(3) == pytest.approx(0.7 * 0.2 + 0.3 / 1)
    assert [policy.evict() for _ in range(3)] == [2, 3, 1]


def test_a_block_that_was_never_used_leaves_before_all_others() -> None:
    for name in ("lru", "score", "hybrid"):
        policy = make_eviction(name)
        policy.access(1, 0.0)
        assert policy.rank(2) < policy.rank(1)
        policy.forget(1)
        assert len(policy) == 0
    with pytest.raises(ConfigError, match="lru, score, hybrid"):
        make_eviction("fifo")


# What is foreseen
# --------------------------------------------------------------------------------------------------


def test_the_last_choice_and_the_most_used_blocks_are_predicted() -> None:
    predictor = Predictor(extra=2)
    for chosen in ([1, 2], [3, 1], [4, 1], [5, 6]):
        predictor.record(chosen)
    assert predictor.predict() == [5, 6, 1, 2]  # of equally often used ones the lower id
    assert predictor.predict(3) == [5, 6, 1]


def test_blocks_chosen_most_often_come_first() -> None:
    predictor = Predictor()
    for chosen in ([5, 7], [7, 9], [2]):
        predictor.record(chosen)
    assert predictor.by_use([2, 4, 5, 7, 9]) == [7, 2, 5, 9, 4]


def test_a_prediction_visits_each_block_a_few_times() -> None:
    """It is done in every layer of every step: twice as many blocks take twice as long, not four
    times."""
    looks = 0

    class Block(int):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return int(self)

    blocks = [Block(number) for number in range(400)]
    predictor = Predictor()
    for begin in (0, 200, 0):
        predictor.record(blocks[begin : begin + 200])
        assert predictor.predict()[:200] == blocks[begin : begin + 200]
    assert looks < 40 * len(blocks)


def test_the_hit_rate_counts_chosen_blocks() -> None:
    stats = SparseStats()
    predictor = Predictor(extra=1, stats=stats)
    assert predictor.hit_rate == 0.0
    predictor.record([1, 2, 3])
    predictor.record([3, 4])  # 3 was foreseen
    predictor.record([3, 1, 9])  # 3 as chosen last, 1 as used most of the others
    assert predictor.hit_rate == pytest.approx(3 / 5) == stats.snapshot()["hit_rate"]
