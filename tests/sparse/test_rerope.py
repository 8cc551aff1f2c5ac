"""The rule of ReRoPE against its literal formula, in torch, over whole tensors and over pages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.rerope.rule import RotationTable, Rule, attention, paged_attention

HEADS, GROUP, DIM, BLOCK = 2, 3, 32, 16
SCALE = DIM**-0.5


def rotation(places: int, amplitude: float = 1.0, dim: int = DIM) -> RotationTable:
    rates = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(places, dtype=torch.float64)[:, None] * rates
    return RotationTable(torch.cat([angles.cos(), angles.sin()], dim=-1) * amplitude)


def matrix(distance: int, dim: int = DIM) -> Tensor:
    """R(distance), channel c with channel c + d / 2."""
    half = dim // 2
    rates = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    cos, sin = torch.diag((distance * rates).cos()), torch.diag((distance * rates).sin())
    turned = torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)])
    assert turned.shape == (2 * half, 2 * half)
    return turned


def literal(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, amplitude: float = 1.0
) -> Tensor:
    """Pair by pair, in double precision: (R(min(i - j, w)) q) · k."""
    count, length = query.shape[0], key.shape[0]
    turns = torch.stack([matrix(min(n, rule.window)) for n in range(length)])
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i in range(count):
        place = length - count + i
        distances = place - torch.arange(place + 1)
        turned = torch.einsum("nab,hb->nha", turns[distances], query[i].double())
        keys = key[: place + 1].double().repeat_interleave(GROUP, dim=1)
        logits = (turned * keys).sum(-1) * SCALE * amplitude**2
        if rule.log_scale:
            logits = logits * max(1.0, math.log(place + 1) / math.log(rule.training_length))
        values = value[: place + 1].double().repeat_interleave(GROUP, dim=1)
        out[i] = (logits.softmax(0)[..., None] * values).sum(0)
    return out


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(count, HEADS * GROUP, DIM, generator=generator)
    return query, *(torch.randn(count, HEADS, DIM, generator=generator) for _ in "kv")


def far(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).abs().max())


@pytest.mark.parametrize("window", [1, 7, 16, 100])
@pytest.mark.parametrize("log_scale", [False, True])
def test_results_are_those_of_the_formula(window: int, log_scale: bool) -> None:
    rule = Rule(window, 50, log_scale)
    query, key, value = tokens(300)
    found = attention(query, key, value, rotation(300), rule, SCALE)
    assert far(found, literal(query, key, value, rule)) <= 1e-5


def test_an_amplitude_counts_twice_on_both_sides_of_the_window() -> None:
    rule = Rule(20, 50)
    query, key, value = tokens(90)
    found = attention(query, key, value, rotation(90, 1.3), rule, SCALE)
    assert far(found, literal(query, key, value, rule, 1.3)) <= 1e-5


@pytest.mark.parametrize("window", [200, 201, 32768])
def test_a_window_that_nothing_reaches_is_rope(window: int) -> None:
    query, key, value = tokens(200)
    table = rotation(200)
    places = torch.arange(200)
    q = table.queries(query.transpose(0, 1), places)
    k = table.queries(key.transpose(0, 1), places)
    v = value.transpose(0, 1)
    rope = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    found = attention(query, key, value, table, Rule(window, 100), SCALE)
    assert far(found, rope.transpose(0, 1)) <= 2e-6


@pytest.mark.parametrize("window", [1, 7, 16, 100])
def test_a_prompt_is_the_same_at_once_in_chunks_and_token_by_token(window: int) -> None:
    rule, table = Rule(window, 64, log_scale=True), rotation(150)
    query, key, value = tokens(150)
    at_once = attention(query, key, value, table, rule, SCALE)
    for step in (1, 7, 64):
        parts = [
            attention(
                query[at : at + step], key[: at + step], value[: at + step], table, rule, SCALE
            )
            for at in range(0, 150, step)
        ]
        assert far(torch.cat(parts), at_once) <= 1e-5


def test_positions_within_the_trained_length_are_not_scaled() -> None:
    scales = Rule(8, 100, log_scale=True).scales(torch.arange(200))
    assert torch.equal(scales[:100], torch.ones(100)) and (scales[100:] > 1).all()
    assert torch.equal(Rule(8, 100).scales(torch.arange(200)), torch.ones(200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_hold_the_same_keys_and_values(dtype: torch.dtype) -> None:
    """Rows of a step: two prompts, one with stored tokens before it, a decode, and no query."""
    rule, table = Rule(24, 40, log_scale=True), rotation(128)
    lengths, counts = [80, 37, 61, 16], [80, 5, 1, 0]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(40, generator=generator)[: 4 * 5].view(4, 5).int()
    cache = torch.full((40, HEADS, BLOCK, 2 * DIM), math.nan, dtype=dtype)
    keys = cache.view(40, HEADS, 2, DIM, BLOCK)[:, :, 0]
    values = cache.view(40, HEADS, 2, BLOCK, DIM)[:, :, 1]
    parts, rows = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        query, key, value = (x.to(dtype) for x in tokens(length, seed=row))
        for place in range(length):
            block, slot = int(ids[row, place // BLOCK]), place % BLOCK
            keys[block, :, :, slot], values[block, :, slot] = key[place], value[place]
        rows.append(query[length - count :])
        parts.append(attention(query[length - count :], key, value, table, rule, SCALE))
    query = torch.cat(rows)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out = torch.zeros_like(query)
    paged_attention(query, cache, ids, starts, torch.tensor(lengths), table, rule, SCALE, out)
    assert far(out, torch.cat(parts)) <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_long_rows_are_computed_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, table = Rule(24, 40), rotation(64)
    query, key, value = tokens(64)
    cache = torch.cat(
        [
            key.view(4, BLOCK, HEADS, DIM).permute(0, 2, 3, 1).reshape(4, HEADS, -1),
            value.view(4, BLOCK, HEADS, DIM).permute(0, 2, 1, 3).reshape(4, HEADS, -1),
        ],
        dim=-1,
    ).view(4, HEADS, BLOCK, 2 * DIM)
    right = attention(query, key, value, table, rule, SCALE)
    monkeypatch.setattr("ucm.sparse.rerope.rule._ROWS", 7)
    out = torch.zeros_like(query)
    rows = torch.arange(4)[None], torch.tensor([0, 64]), torch.tensor([64])
    paged_attention(query, cache, *rows, table, rule, SCALE, out)
    assert far(out, right) <= 1e-5


def test_a_row_longer_than_the_rotation_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_position_embeddings"):
        attention(*tokens(33), rotation(32), Rule(8, 16), SCALE)
