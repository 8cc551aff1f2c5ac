"""The kernel of ReRoPE computes the same as the rule in torch; ``tests/kernels/test_triton.py``
compiles it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from ucm.errors import InvalidInputError  # noqa: E402
from ucm.sparse.rerope.rule import RotationTable, Rule, attention  # noqa: E402
from ucm.sparse.rerope.triton_unified_attention_rerope import unified_attention_rerope  # noqa: E402

BLOCK = 16


def test_an_engines_attention_is_that_of_the_rule() -> None:
    """Of the backend over vLLM's Triton backend: pages ``[n, h, b, 2 d]``, as its layers give."""
    pytest.importorskip("vllm")
    from ucm.integration.vllm.attention.rerope import _OnGpu

    heads, dim, length = 2, 32, 40
    query = torch.randn(length, 2 * heads, dim)
    key, value = torch.randn(2, length, heads, dim)
    ids = torch.tensor([[3, 1, 5]], dtype=torch.int32)
    cache = torch.full((6, heads, BLOCK, 2 * dim), math.nan)
    for place in range(length):
        page = cache[ids[0, place // BLOCK], :, place % BLOCK]
        page[:, :dim], page[:, dim:] = key[place], value[place]
    impl: Any = _OnGpu()
    impl.rule, impl.rotation, impl.scale = Rule(10, 20, True), rotation(64, dim), dim**-0.5
    metadata = SimpleNamespace(
        num_actual_tokens=length,
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        max_query_len=length,
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=ids,
    )
    found = impl.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    right = attention(query, key, value, impl.rotation, impl.rule, impl.scale)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)


def rotation(places: int, dim: int) -> RotationTable:
    rates = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(places, dtype=torch.float64)[:, None] * rates
    return RotationTable(torch.cat([angles.cos(), angles.sin()], dim=-1) * 1.1)


@pytest.mark.parametrize("window", [1, 7, 16, 100])
@pytest.mark.parametrize(
    ("dtype", "heads", "group", "dim"),
    [
        (torch.float32, 2, 3, 32),
        (torch.bfloat16, 1, 4, 64),
        (torch.float16, 2, 1, 24),
    ],
)
def test_results_are_those_of_the_rule(
    window: int, dtype: torch.dtype, heads: int, group: int, dim: int
) -> None:
    """Rows of a step: a prompt, the rest of one, single tokens; pages of vLLM's Triton backend."""
    lengths, counts = [70, 133, 90, 1], [70, 40, 1, 1]
    generator = torch.Generator().manual_seed(window)
    rule, table = Rule(window, 40, log_scale=window > 1), rotation(256, dim)
    ids = torch.randperm(64, generator=generator)[:36].view(4, 9).int()
    # [n, h, b, 2 * d], seen as [n, b, h, 2 * d]
    cache = torch.full((64, heads, BLOCK, 2 * dim), math.nan, dtype=dtype)
    keys, values = cache.transpose(1, 2).split(dim, dim=-1)
    rows: list[Tensor] = []
    right: list[Tensor] = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        query = torch.randn(count, heads * group, dim, generator=generator).to(dtype)
        key, value = (
            torch.randn(length, heads, dim, generator=generator).to(dtype) for _ in range(2)
        )
        places = torch.arange(length)
        blocks = ids[row, places // BLOCK].long()
        keys[blocks, places % BLOCK], values[blocks, places % BLOCK] = key, value
        rows.append(query)
        right.append(attention(query, key, value, table, rule, dim**-0.5))
    query = torch.cat(rows)
    out = torch.zeros_like(query)
    unified_attention_rerope(
        query,
        keys,
        values,
        out,
        torch.tensor([0, *counts]).cumsum(0).int(),
        max(counts),
        torch.tensor(lengths, dtype=torch.int32),
        dim**-0.5,
        window,
        ids,
        table.table,
        training_length=40 if rule.log_scale else None,
    )
    near = {torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 4e-2)
    assert (out.double() - torch.cat(right).double()).abs().max() <= near


def test_what_does_not_fit_is_refused() -> None:
    query, cache = torch.zeros(1, 2, 32), torch.zeros(4, BLOCK, 1, 32)
    rows = (torch.tensor([0, 1]), 1, torch.tensor([1]), 1.0, 8, torch.zeros(1, 1).int())
    with pytest.raises(InvalidInputError, match="do not fit"):
        unified_attention_rerope(query, cache, cache, query, *rows, rotation(8, 64).table)
