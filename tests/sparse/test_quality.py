"""What selectors are worth, on the recall model and prompts that are committed with it: every
answer needs one block among 66, and all of its query is decoded. Nothing here is left to chance:
weights, tokens and choices are the same in every run. ``make bench-quality`` has the whole
table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "quality"))

from recall_model import Recall
from recall_suite import BUDGETS, METHODS, Filled, Outcome, fill, outcome, prompts
from recall_task import LINKS, SECOND, chain

#: Three answers of each kind for each prompt.
PROMPTS, CHAINS = 48, 16
CHOSEN = BUDGETS[0.156]


@pytest.fixture(scope="module")
def model() -> Recall:
    return Recall()


@pytest.fixture(scope="module")
def records(model: Recall) -> Filled:
    return fill(model, prompts(PROMPTS))


@pytest.fixture(scope="module")
def chains(model: Recall) -> Filled:
    return fill(model, [chain(seed, 1024) for seed in range(CHAINS)])


@pytest.fixture(scope="module")
def dense(model: Recall, records: Filled) -> Outcome:
    return outcome(model, records, None)


def under(model: Recall, filled: Filled, name: str, **given: Any) -> Outcome:
    algorithm, keys = METHODS[name]
    return outcome(model, filled, algorithm, **{**keys, "topk_blocks": CHOSEN, **given})


def test_dense_attention_answers(dense: Outcome) -> None:
    assert dense.count() == 9 * PROMPTS
    assert dense.share() >= 0.98


@pytest.mark.parametrize("name", ["gsa_on_device", "quest", "esa"])
def test_all_blocks_are_dense_attention_bit_by_bit(
    model: Recall, records: Filled, dense: Outcome, name: str
) -> None:
    found = under(model, records, name, topk_blocks=None, ratio=1.0, windows_inside=False)
    assert "density" not in found.stats, "where all blocks are kept nothing is chosen"
    assert torch.equal(found.logits, dense.logits)


@pytest.mark.parametrize(
    ("name", "least"), [("gsa_on_device", 0.97), ("quest", 0.88), ("oracle", 0.97)]
)
def test_chosen_blocks_answer(model: Recall, records: Filled, name: str, least: float) -> None:
    found = under(model, records, name)
    assert found.stats["density"] <= 0.156
    assert found.share() >= least


def test_random_blocks_do_not_answer(model: Recall, records: Filled) -> None:
    """Otherwise the share of the others would prove nothing."""
    found = under(model, records, "random")
    assert found.stats["density"] <= 0.156
    assert found.share() <= 0.25
    assert found.share(SECOND) <= 0.25


def test_a_choice_for_the_token_before_answers_little_but_follows_chains(
    model: Recall, records: Filled, chains: Filled
) -> None:
    """A lag costs what is new for each token, and less of what stays in place: both are seen."""
    late = {"lag": 1, "retrieval_ms": 600_000}
    stale, slow = under(model, records, "oracle", **late), under(model, chains, "oracle", **late)
    assert slow.count() == CHAINS * LINKS
    assert stale.share() <= 0.6
    assert slow.share() >= stale.share() + 0.2
