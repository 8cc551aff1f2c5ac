"""Windows and budgets: what they come to, and that a wrong one is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.errors import ConfigError
from ucm.sparse.policy import Policy

blocks_of = st.integers(1, 400)
windows_of = st.tuples(st.integers(0, 5), st.integers(1, 5))


@given(blocks_of, windows_of, st.fractions(min_value="1/100", max_value=1))
def test_a_ratio_is_of_the_candidates_and_rounded_up(
    blocks: int, windows: tuple[int, int], ratio: Any
) -> None:
    policy = Policy(init=windows[0], local=windows[1], ratio=float(ratio))
    m = max(0, blocks - sum(windows))
    assert policy.budget(blocks) == math.ceil(ratio.limit_denominator(10**6) * m)


@pytest.mark.parametrize(
    ("ratio", "m", "k"), [(0.1, 30, 3), (0.7, 10, 7), (0.3, 10, 3), (0.3, 11, 4), (1.0, 7, 7)]
)
def test_a_ratio_is_not_rounded_up_for_the_error_of_a_float(ratio: float, m: int, k: int) -> None:
    assert Policy(init=1, local=2, ratio=ratio).budget(m + 3) == k


def test_the_clamp_of_gsa_is_of_all_blocks_with_the_windows_inside() -> None:
    """clamp(ceil(.3 N), 32, 48), windows 1 and 2 inside, as the original has it at 128 tokens."""
    policy = Policy(init=1, local=2, ratio=0.3, k_min=32, k_max=48, windows_inside=True)
    for blocks in (20, 32, 33, 100, 107, 160, 161, 1000):
        total = blocks if blocks <= 32 else min(max(math.ceil(0.3 * blocks), 32), 48)
        assert policy.kept(blocks, blocks) == total


def test_the_least_budget_of_document_002() -> None:
    """k = max(min_blocks, ceil(ratio * m)), windows beside it."""
    policy = Policy(init=1, local=2, ratio=0.3, k_min=4)
    assert [policy.budget(n) for n in (3, 5, 7, 16, 17, 23)] == [0, 2, 4, 4, 5, 6]


@given(blocks_of, windows_of, st.integers(0, 60), st.booleans())
def test_a_number_of_blocks_with_windows_inside_or_beside(
    blocks: int, windows: tuple[int, int], topk: int, inside: bool
) -> None:
    policy = Policy(init=windows[0], local=windows[1], ratio=None, topk=topk, windows_inside=inside)
    m = max(0, blocks - sum(windows))
    assert policy.budget(blocks) == min(m, max(0, topk - sum(windows)) if inside else topk)
    assert policy.kept(blocks, 10**9) <= blocks


@given(blocks_of, st.integers(0, 10), st.integers(0, 10))
def test_a_larger_budget_keeps_at_least_as_much(blocks: int, k_min: int, more: int) -> None:
    for low, high in (
        (Policy(ratio=0.2, k_min=k_min), Policy(ratio=0.2, k_min=k_min + more)),
        (Policy(ratio=0.2), Policy(ratio=0.25)),
        (Policy(ratio=None, topk=k_min), Policy(ratio=None, topk=k_min + more)),
    ):
        assert low.budget(blocks) <= high.budget(blocks) <= max(0, blocks - 3)


def test_short_requests_are_dense() -> None:
    policy = Policy(init=2, local=3, ratio=0.5, min_blocks=8, min_tokens=100)
    assert [policy.is_dense(n, 1000) for n in (5, 7, 8, 9)] == [True, True, False, False]
    assert [policy.is_dense(50, t) for t in (99, 100)] == [True, False]
    assert policy.kept(7, 1000) == 7 and policy.kept(9, 1000) == 7 and policy.kept(50, 99) == 50


@given(blocks_of, windows_of, st.integers(0, 400), st.booleans())
def test_a_budget_for_all_blocks_is_dense(
    blocks: int, windows: tuple[int, int], topk: int, inside: bool
) -> None:
    """Choosing would cost something and leave nothing out."""
    policy = Policy(init=windows[0], local=windows[1], ratio=None, topk=topk, windows_inside=inside)
    keeps = sum(windows) + policy.budget(blocks)
    assert policy.is_dense(blocks, 10**6) == (keeps >= blocks)
    assert Policy(init=1, local=2, ratio=1.0).is_dense(blocks, 10**6)
    by_mass = Policy(init=1, local=2, ratio=None, mass=0.9)
    assert by_mass.is_dense(blocks, 10**6) == (blocks <= 3), (
        "how many it chooses is known after the scores"
    )


def test_a_budget_by_mass_is_bounded_by_the_other_keys() -> None:
    policy = Policy(ratio=None, mass=0.9, k_min=2, k_max=5)
    assert (policy.least(20), policy.budget(20)) == (2, 5)
    inside = Policy(ratio=None, mass=0.9, k_min=5, windows_inside=True)
    assert (inside.least(20), inside.budget(20), inside.budget(4)) == (2, 17, 1)


def test_which_layers_choose() -> None:
    policy = Policy(dense_layers=frozenset({0, 1}), reuse_from={3: 2, 4: 2})
    assert policy.selecting_layers(7) == [2, 5, 6]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.1}, "ratio"),
        ({"ratio": None}, "none of them"),
        ({"topk": 3}, "ratio, topk"),
        ({"ratio": None, "topk": -1}, "topk"),
        ({"ratio": None, "mass": 1.5}, "mass"),
        ({"init": -1}, "init"),
        ({"local": 0}, "local"),
        ({"stride": 0}, "stride"),
        ({"lag": -1}, "lag"),
        ({"k_min": 5, "k_max": 4}, "k_max"),
        ({"min_concurrency": 0}, "min_concurrency"),
        ({"dense_layers": frozenset({-1})}, "dense_layers"),
        ({"reuse_from": {2: 2}}, "reuse_from"),
        ({"reuse_from": {3: 2, 2: 1}}, "layer 2"),
        ({"reuse_from": {3: 2}, "dense_layers": frozenset({2})}, "layer 2"),
        ({"reuse_from": {3: 2}, "dense_layers": frozenset({3})}, "layer 3"),
    ],
)
def test_an_error_names_the_wrong_key(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Policy(**wrong)
