"""Which tokens of reused chunks are computed again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ucm.config import parse
from ucm.config.sparse import BlendConfig, BlendLayer
from ucm.errors import ConfigError, InvalidInputError
from ucm.sparse.blend.chunks import Hit
from ucm.sparse.blend.hkvd import HKVDCalculator
from ucm.sparse.blend.tokens import (
    RATIO,
    Check,
    Question,
    budget,
    checks_of,
    choose,
    deviation,
    positions_of,
)

ATTN = "model.layers.{}.self_attn.attn"


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[Hit], int]:
    """Hits with gaps between them, and the tokens of their prompt."""
    hits, at = list[Hit](), 0
    for _ in range(draw(st.integers(1, 5))):
        start = at + draw(st.integers(0, 3))
        at = start + draw(st.integers(1, 30))
        hits.append(Hit(start, at, draw(st.sampled_from([0, 7, start]))))
    return hits, at + draw(st.integers(0, 3))


@settings(deadline=None)
@given(prompts(), st.floats(0, 1), st.integers(0, 6), st.data())
def test_union_takes_heads_then_the_best_of_the_rest(
    prompt: tuple[list[Hit], int], ratio: float, heads: int, data: st.DataObject
) -> None:
    hits, length = prompt
    scores = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=length, max_size=length)))
    tokens = positions_of(hits)[0].tolist()
    room = budget(hits, ratio)
    chosen = choose("union", hits, ratio, head_tokens=heads, scores=scores).tolist()
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(tokens)
    assert len(chosen) == room
    first = [
        hit.start + at
        for at in range(heads)
        for hit in hits
        if at < hit.tokens and (hit.start or hit.source)
    ][:room]
    rest = sorted((t for t in tokens if t not in first), key=lambda t: (-int(scores[t]), t))
    assert chosen == sorted(first + rest[: room - len(first)])
    by_score = choose("query", hits, ratio, scores=scores).tolist()
    assert by_score == sorted(sorted(tokens, key=lambda t: (-int(scores[t]), t))[:room])


def test_epic_spreads_its_share_over_the_heads_of_chunks() -> None:
    hits = [Hit(0, 10, 0), Hit(10, 30, 0), Hit(33, 40, 5)]
    assert choose("epic", hits, 5 / 37).tolist() == [10, 11, 12, 33, 34]
    # The first chunk follows nothing, so it is as it was computed.
    assert choose("epic", hits, 1.0).tolist() == [*range(10, 30), *range(33, 40)]
    assert choose("epic", hits, 0.0).tolist() == []


def test_a_share_is_rounded_down_as_written() -> None:
    assert budget([Hit(0, 100, 0)], 0.29) == 29, "0.29 * 100 lies below 29 in floating point"
    assert budget([Hit(0, 100, 0), Hit(100, 107, 3)], RATIO) == 16
    for ratio in (-0.1, 1.1):
        with pytest.raises(InvalidInputError, match="from 0 to 1"):
            budget([], ratio)


def test_a_rule_needs_its_scores() -> None:
    for select in ("union", "query", "hkvd", "random"):
        with pytest.raises(InvalidInputError, match="chosen by one of union, hkvd, epic, query"):
            choose(select, [Hit(0, 4, 0)], 0.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="up to the last hit"):
        choose("union", [Hit(0, 4, 0)], 0.5, scores=torch.zeros(3, dtype=torch.int64))


# The question
# --------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probabilities(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Of the last ``len(query)`` of these tokens, ``[heads, q, t]``."""
    group = query.shape[1] // keys.shape[1]
    logits = torch.einsum("qhd,thd->hqt", query, keys.repeat_interleave(group, 1)) * scale
    places = torch.arange(len(keys) - len(query), len(keys))
    hidden = torch.arange(len(keys))[None] > places[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize(("layers", "first"), [(3, 1), (32, 10), (1, 0)])
def test_a_score_is_the_mean_attention_of_the_last_two_thirds(layers: int, first: int) -> None:
    tokens, asked, heads, kv_heads, size = 20, 5, 6, 2, 8
    question, expected = Question(layers, tokens), torch.zeros(tokens, dtype=torch.float64)
    for layer in range(layers):
        query = random(asked, heads, size, seed=layer)
        keys = random(tokens + asked, kv_heads, size, seed=100 + layer)
        values = random(tokens + asked, kv_heads, 4, seed=200 + layer)
        found = question.attend(
            layer,
            query,
            (keys[:tokens], keys[tokens:]),
            (values[:tokens], values[tokens:]),
            0.3,
        )
        weights = probabilities(query, keys, 0.3)
        whole = torch.einsum("hqt,thd->qhd", weights, values.repeat_interleave(3, 1))
        assert torch.allclose(found, whole, atol=1e-6)
        if layer >= first:
            expected += weights[..., :tokens].double().mean(dim=(0, 1))
    assert torch.allclose(question.scores().double() / 2**40, expected, atol=1e-6)


def test_tokens_without_kv_are_not_seen() -> None:
    keys, values, query = random(9, 1, 8), random(9, 1, 8, seed=1), random(2, 4, 8, seed=2)
    known = torch.tensor([True, False, True, True, False, True, True])
    keys[:7][~known], values[:7][~known] = torch.inf, torch.nan  # of a request before
    question, without = Question(1, 7), Question(1, 5)
    seen = question.attend(0, query, (keys[:7], keys[7:]), (values[:7], values[7:]), 1.0, known)
    alone = without.attend(
        0, query, (keys[:7][known], keys[7:]), (values[:7][known], values[7:]), 1.0
    )
    assert torch.allclose(seen, alone, atol=1e-6)
    assert question.scores()[~known].tolist() == [0, 0]
    off = question.scores()[known] - without.scores()
    assert off.abs().max() <= 2**20, "by the rounding of float32"


def test_ranks_choose_the_same_tokens() -> None:
    """Each has some heads, and only the sums are shared."""
    tokens, asked, heads, kv_heads = 40, 3, 8, 4
    query, keys = random(asked, heads, 8), random(tokens + asked, kv_heads, 8, seed=1)

    def ask(which: slice) -> Question:
        question, group = Question(1, tokens), heads // kv_heads
        part = keys[:, which]
        queries = query.view(asked, kv_heads, group, 8)[:, which].flatten(1, 2)
        both = part[:tokens], part[tokens:]
        question.attend(0, queries, both, both, 1.0)
        return question

    ranks = [ask(slice(0, 2)), ask(slice(2, 4))]
    total = ranks[0].scores() + ranks[1].scores()
    seen = [rank.scores(lambda _own: total) for rank in ranks]
    hits = [Hit(0, 15, 0), Hit(15, 40, 3)]
    chosen = [choose("union", hits, 0.3, scores=scores) for scores in seen]
    assert torch.equal(chosen[0], chosen[1])
    whole = ask(slice(0, 4)).scores()
    assert (total - 2 * whole).abs().max() <= 2**20, "by the rounding of float32"


# HKVD
# --------------------------------------------------------------------------------------------------


def test_layer_1_checks_by_default_and_both_spellings_are_layers() -> None:
    assert checks_of({}, 4) == {1: Check(RATIO)}
    assert checks_of({}, 4, hkvd_threshold=0.1) == {1: Check(threshold=0.1)}
    meta = {
        "model.layers.2.self_attn": {"ratio": 0.1},
        ATTN.format(1): BlendLayer(hkvd_threshold=0.3),
        ATTN.format(3): {},
    }
    found = checks_of(meta, 4, ratio=0.4)
    assert found == {1: Check(threshold=0.3), 2: Check(0.1), 3: Check(0.4)}
    assert list(found) == [1, 2, 3]
    assert checks_of({ATTN.format(2): {}}, 4, ratio=0.4, hkvd_threshold=0.2) == {
        2: Check(threshold=0.2)
    }


def test_the_sample_of_the_book(caplog: pytest.LogCaptureFixture) -> None:
    """It names layer 0, where a turned key differs by rounding alone."""
    sample = {
        "sparse_type": "Blend",
        "Blend": {
            "compute_meta": {
                "model.layers.0.self_attn": {"ratio": 0.1},
                "model.layers.15.self_attn": {"ratio": 0.05},
            }
        },
    }
    config = parse({"storage_path": "/data", "ucm_sparse_config": sample}, {})
    settings = config.sparse.settings
    assert isinstance(settings, BlendConfig)
    with caplog.at_level(logging.WARNING, "ucm.sparse"):
        calculator = HKVDCalculator(32, compute_meta=settings.compute_meta)
    assert calculator.checks == {1: Check(0.1), 15: Check(0.05)}
    (message,) = caplog.messages
    assert message.endswith("deviate by rounding alone: layer 1 checks in its place")
    both = {ATTN.format(0): {"ratio": 0.3}, ATTN.format(1): {"ratio": 0.1}}
    assert checks_of(both, 4) == {1: Check(0.1)}


@pytest.mark.parametrize(
    ("meta", "layers", "match"),
    [
        ({ATTN.format(4): {}}, 4, "layers of the model, 0 to 3"),
        ({"model.norm": {}}, 4, "layers of the model"),
        ({ATTN.format(1): {}, "layers.1": {}}, 4, "layer 1 twice"),
        ({ATTN.format(1): {"ratio": 0.1, "hkvd_threshold": 1}}, 4, "not both"),
        ({}, 1, "select: union"),
    ],
)
def test_checks_that_cannot_be_made(meta: dict[str, Any], layers: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HKVDCalculator(layers, compute_meta=meta)


def test_each_layer_filters_what_the_one_before_has_left() -> None:
    key, cached = random(100, 2, 8), random(100, 2, 8)
    off = torch.rand(100, generator=torch.Generator().manual_seed(3))
    cached = key + off[:, None, None]
    meta = {ATTN.format(1): {"ratio": 0.2}, ATTN.format(3): {"ratio": 0.05}}
    calculator = HKVDCalculator(4, compute_meta=meta)
    value = torch.zeros_like(key)
    first = calculator.compute_attention_mask(ATTN.format(1), key, key, value, cached, value)
    assert first is not None
    assert set(first.nonzero()[:, 0].tolist()) == set(off.topk(20).indices.tolist())
    assert calculator.compute_attention_mask(ATTN.format(2), key, key, value, cached, value) is None
    left = first.nonzero()[:, 0]
    second = calculator.compute_attention_mask(
        "model.layers.3.self_attn",
        key[left],
        key[left],
        value[left],
        cached[left].flip(0),
        value[left],
        candidates=100,
    )
    assert second is not None
    assert int(second.sum()) == 5, "a share of all hits"
    assert len(second) == 20


def test_equal_deviations_are_chosen_by_position() -> None:
    key, value = torch.zeros(8, 1, 4), torch.zeros(8, 1, 4)
    mask = HKVDCalculator(2, ratio=0.5).compute_attention_mask(
        ATTN.format(1), key, key, value, key + 1, value
    )
    assert mask is not None
    assert mask.tolist() == [True] * 4 + [False] * 4


def test_a_threshold_is_a_share_of_the_size_of_keys() -> None:
    cached = torch.full((4, 2, 8), 2.0)
    key = cached + torch.tensor([0.0, 0.19, 0.21, 2.0])[:, None, None]
    value = torch.zeros_like(key)
    for criterion in ("k_l1", "k_l2", "k+v"):
        calculator = HKVDCalculator(2, 0.1, criterion=criterion)  # type: ignore[arg-type]
        mask = calculator.compute_attention_mask(ATTN.format(1), key, key, value, cached, value)
        assert mask is not None
        assert mask.tolist() == [False, False, True, True]
        doubled = HKVDCalculator(2, 0.1, criterion=criterion, total=lambda x: 2 * x)  # type: ignore[arg-type]
        of_ranks = doubled.compute_attention_mask(ATTN.format(1), key, key, value, cached, value)
        assert torch.equal(mask, of_ranks if of_ranks is not None else mask[:0])


def test_criteria() -> None:
    key, value = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    other_key = torch.tensor([[1.0, 1, 1, 1], [3, 0, 0, 0], [0, 0, 0, 0]])[:, None]
    other_value = torch.tensor([[0.0] * 4, [0.0] * 4, [9.0] * 4])[:, None]

    def scores(criterion: Any) -> list[float]:
        found = deviation(criterion, (key, value), (other_key, other_value))
        return [float(score) / 2**40 for score in found]

    assert scores("k_l1") == [1.0, 0.75, 0.0]
    assert scores("k_l2") == [1.0, 2.25, 0.0]
    assert scores("k+v") == [1.0, 0.75, 9.0]
    with pytest.raises(InvalidInputError, match="k_l1, k_l2, k"):
        scores("v")


def test_a_key_that_is_no_number_is_computed_again() -> None:
    key = torch.zeros(4, 1, 4)
    cached = key.clone()
    cached[2] = torch.nan
    cached[1] = 100.0
    scores = deviation("k_l1", (key, key), (cached, key))
    assert scores.argmax() == 2
