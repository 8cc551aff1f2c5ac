"""From scores to blocks and to the table that attention reads."""

from __future__ import annotations

import pytest
import torch
from formulas import BLOCK, DIM, HEADS, keys, masked_attention, paged_attention, query
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.sparse.policy import Policy
from ucm.sparse.selection import (
    NO_BLOCK,
    Selection,
    choose,
    compact,
    compact_rows,
    select,
    with_windows,
)

FEW = settings(max_examples=60, deadline=None)

#: Scores with many equal ones.
scores_of = st.lists(
    st.integers(-3, 3).map(float) | st.floats(-5, 5, width=32, allow_subnormal=False),
    min_size=1,
    max_size=40,
)
policies = st.builds(
    lambda init, local, ratio: Policy(init=init, local=local, ratio=ratio),
    st.integers(0, 4),
    st.integers(1, 4),
    st.floats(0.01, 1),
)


def chosen(policy: Policy, scores: list[float], tokens: int | None = None) -> list[int]:
    blocks = len(scores)
    ids = select(policy, torch.tensor([scores]), blocks, tokens or blocks)[0]
    return ids.tolist()


@FEW
@given(policies, scores_of)
def test_windows_and_budget_exactly(policy: Policy, scores: list[float]) -> None:
    n, found = len(scores), chosen(policy, scores)
    windows = {*range(min(policy.init, n)), *range(max(0, n - policy.local), n)}
    assert found == sorted(set(found))
    assert windows <= set(found)
    assert len(found) == min(n, len(windows) + policy.budget(n))
    left = [scores[i] for i in range(n) if i not in found]
    taken = [scores[i] for i in set(found) - windows]
    assert not left or not taken or min(taken) >= max(left)


@FEW
@given(policies, scores_of)
def test_of_equal_scores_the_lower_id_wins(policy: Policy, scores: list[float]) -> None:
    n, found = len(scores), set(chosen(policy, scores))
    middle = range(policy.init, n - policy.local)
    for i in middle:
        for j in middle:
            if i < j and scores[i] == scores[j]:
                assert i in found or j not in found


@FEW
@given(scores_of, st.floats(0.01, 0.5), st.floats(0, 0.5))
def test_a_larger_budget_keeps_the_same_blocks_and_more(
    scores: list[float], ratio: float, more: float
) -> None:
    less, greater = Policy(ratio=ratio), Policy(ratio=ratio + more)
    assert set(chosen(less, scores)) <= set(chosen(greater, scores))
    n, row = len(scores), torch.tensor([scores])
    by_mass = [
        set(select(Policy(ratio=None, mass=share), row, n, n, row.exp())[0].tolist())
        for share in (ratio, ratio + more)
    ]
    assert by_mass[0] <= by_mass[1]


@FEW
@given(scores_of, st.integers(1, 10))
def test_scores_beyond_the_blocks_or_in_the_windows_are_never_read(
    scores: list[float], beyond: int
) -> None:
    policy, n = Policy(init=2, local=2, ratio=0.4), len(scores)
    poisoned = torch.tensor([scores + [torch.inf] * beyond])
    poisoned[0, : min(2, n)] = torch.nan
    poisoned[0, max(0, n - 2) : n] = torch.nan
    assert select(policy, poisoned, n, n)[0].tolist() == chosen(policy, scores)


def test_scores_that_are_no_numbers_come_last() -> None:
    policy = Policy(init=0, local=1, ratio=None, topk=2)
    assert chosen(policy, [float("nan"), 1.0, float("-inf"), 2.0, 0.0]) == [1, 3, 4]
    assert chosen(policy, [float("nan"), float("nan"), float("inf"), 0.0]) == [0, 2, 3]


@FEW
@given(st.lists(st.floats(0.001, 1), min_size=4, max_size=30), st.floats(0.05, 1))
def test_a_budget_by_mass_is_the_fewest_blocks_that_hold_it(
    weights: list[float], share: float
) -> None:
    policy, n = Policy(init=1, local=1, ratio=None, mass=share), len(weights)
    found = select(policy, torch.tensor([weights]), n, n, torch.tensor([weights]))[0].tolist()[1:-1]
    middle = torch.tensor(weights[1:-1]).double()
    held = sum(float(middle[i - 1]) for i in found)
    total = float(middle.sum())
    assert held >= share * total * (1 - 1e-9)
    assert len(found) == 1 or held - min(float(middle[i - 1]) for i in found) < share * total * (
        1 + 1e-9
    )


def test_a_budget_by_mass_keeps_its_bounds_and_takes_all_where_there_is_no_mass() -> None:
    weights = torch.tensor([[0.0, 0.97, 0.01, 0.01, 0.01, 0.0]])
    for k_min, k_max, count in ((0, None, 1), (3, None, 3), (0, None, 1)):
        policy = Policy(init=1, local=1, ratio=None, mass=0.9, k_min=k_min, k_max=k_max)
        assert len(choose(policy, weights[:, 1:5], 6, weights[:, 1:5])[0]) == count
    nothing = Policy(init=1, local=1, ratio=None, mass=0.9, k_max=2)
    assert len(choose(nothing, torch.zeros(1, 4), 6, torch.zeros(1, 4))[0]) == 1
    assert len(choose(nothing, torch.zeros(1, 4), 6, torch.full((1, 4), torch.nan))[0]) == 1


def test_each_head_may_have_a_choice_of_its_own() -> None:
    policy = Policy(init=1, local=1, ratio=None, topk=1)
    found = select(policy, torch.tensor([[0.0, 1, 2, 3, 0], [0.0, 9, 2, 3, 0]]), 5, 20)
    assert [ids.tolist() for ids in found] == [[0, 3, 4], [0, 1, 4]]


def test_blocks_that_were_no_candidates_are_kept_until_the_next_choice() -> None:
    """A choice of 10 blocks, used when there are 13: the window of then and all later ones are
    kept."""
    policy = Policy(init=1, local=2, ratio=0.3)
    assert with_windows(policy, torch.tensor([4, 6]), 10, 13).tolist() == [
        0,
        4,
        6,
        8,
        9,
        10,
        11,
        12,
    ]


# The table --------------------------------------------------


@FEW
@given(st.integers(1, 60), st.integers(0, 2**31), st.floats(0.05, 1))
def test_a_paged_kernel_with_the_short_table_is_masked_attention(
    tokens: int, seed: int, ratio: float
) -> None:
    """o = softmax over the kept tokens of (q·k/sqrt d) v, whatever the ids and wherever the last
    block ends."""
    generator = torch.Generator().manual_seed(seed)
    n = -(-tokens // BLOCK)
    physical = torch.randperm(64, generator=generator)[:n].int()
    cache = torch.full((2, 64, BLOCK, HEADS, DIM), torch.nan)
    k, v = keys(n, seed).flatten(0, 1), keys(n, seed + 1).flatten(0, 1)
    for part, values in zip(cache, (k, v), strict=True):
        for t in range(tokens):  # what lies beyond the last token is not a number
            part[physical[t // BLOCK], t % BLOCK] = values[t]
    policy, q = Policy(ratio=ratio), query(seed + 2)[0]
    kept = select(policy, torch.rand(1, n, generator=generator), n, tokens)
    selection = Selection.of([kept], [n])
    table, lens = compact(
        selection, physical[None], torch.tensor([tokens], dtype=torch.int32), BLOCK
    )
    mask = torch.isin(torch.arange(tokens) // BLOCK, kept[0])
    expected = masked_attention(q, k[:tokens], v[:tokens], mask)
    got = paged_attention(q, cache, table[0], int(lens[0]))
    torch.testing.assert_close(got, expected)
    assert table.dtype == torch.int32 and lens.dtype == torch.int32
    assert int(lens[0]) == int(mask.sum())


@FEW
@given(st.integers(1, 3000), st.integers(1, 40), st.sampled_from([16, 128]))
def test_the_length_drops_whole_blocks(tokens: int, kept: int, size: int) -> None:
    """seq_len' = T - ceil(max(0, T - topk)/b) * b, the rule of the original's kernels."""
    n = -(-tokens // size)
    policy = Policy(init=0, local=1, ratio=None, topk=kept, windows_inside=True)
    ids = select(policy, torch.zeros(1, n), n, tokens)
    _, lens = compact(Selection.of([ids], [n]), torch.arange(n)[None], torch.tensor([tokens]), size)
    assert int(lens[0]) == tokens - -(-max(0, tokens - kept * size) // size) * size


def test_rows_of_different_lengths_and_heads() -> None:
    rows = [
        [torch.tensor([0, 2]), torch.tensor([1, 2])],
        [torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3])],
    ]
    selection = Selection.of(rows, [3, 4])
    table, lens = compact(
        selection, torch.tensor([[5, 6, 7, 0], [8, 9, 1, 2]]), torch.tensor([10, 16]), BLOCK
    )
    assert selection.ids.tolist()[0][0] == [0, 2, NO_BLOCK, NO_BLOCK]
    assert table.tolist() == [[[5, 7, 7, 7], [6, 7, 7, 7]], [[8, 9, 1, 2], [8, 2, 2, 2]]]
    assert lens.tolist() == [[6, 6], [16, 8]]
    assert selection.kept(1, 1).tolist() == [0, 3] and selection.rows.tolist() == [0, 1]


def test_other_rows_of_the_batch_stay_as_they_are() -> None:
    table, lens = (
        torch.arange(15, dtype=torch.int32).view(3, 5),
        torch.tensor([20, 18, 7], dtype=torch.int32),
    )
    shared = Selection.of([[torch.tensor([0, 4])]], [5], torch.tensor([1]))
    wide, lengths = compact_rows(shared, table, lens, BLOCK)
    assert wide[0].tolist() == table[0].tolist() and wide[2].tolist() == table[2].tolist()
    assert wide[1].tolist()[:2] == [5, 9] and lengths.tolist() == [20, 6, 7]
    apart = Selection.of([[torch.tensor([0, 4]), torch.tensor([1, 3, 4])]], [5], torch.tensor([1]))
    wide, lengths = compact_rows(apart, table, lens, BLOCK)
    assert wide.shape == (3, 2, 5) and wide[0].tolist() == [table[0].tolist()] * 2
    assert wide[1, 1, :3].tolist() == [6, 8, 9] and lengths.tolist() == [[20, 20], [6, 10], [7, 7]]
    assert table.tolist() == torch.arange(15).view(3, 5).tolist() and lens.tolist() == [20, 18, 7]


def test_arguments_are_not_written_to() -> None:
    table, lens = (
        torch.arange(12, dtype=torch.int32).view(1, 12),
        torch.tensor([45], dtype=torch.int32),
    )
    before = table.clone(), lens.clone()
    ids = select(Policy(ratio=0.2), torch.rand(1, 12), 12, 45)
    compact(Selection.of([ids], [12]), table, lens, BLOCK)
    assert torch.equal(table, before[0]) and torch.equal(lens, before[1])


def test_a_selection_of_everything_says_so() -> None:
    assert Selection.of([[torch.arange(3)], [torch.arange(5)]], [3, 5]).dense
    assert not Selection.of([[torch.arange(3)], [torch.arange(4)]], [3, 5]).dense


def test_a_budget_by_mass_without_weights_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="weights"):
        choose(Policy(ratio=None, mass=0.5), torch.zeros(1, 4), 7)
