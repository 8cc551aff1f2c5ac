"""The kernels load and store the computed number of bytes: nothing large is read twice.

Counted in the interpreter, at the sizes of docs/sparse.md: blocks of 128 tokens, 8 KV heads of 128
channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from ucm.sparse.kernels import encode, gpu  # noqa: E402

BLOCK, HEADS, DIM, GROUP, WIDTH = 128, 8, 128, 4, 16
N = 24


class Traffic:
    """Bytes of every tensor that kernels load and store."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()

    def watch(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            start = tensor.untyped_storage().data_ptr()
            self.places[name] = (start, start + tensor.untyped_storage().nbytes())

    def count(self, to: Counter[str], pointers: Any, mask: Any) -> None:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        named = 0
        for name, (start, end) in self.places.items():
            found = int(((at >= start) & (at < end)).sum())
            to[name] += found * size
            named += found
        to["the rest"] += (at.size - named) * size


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    seen = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.count(seen.loaded, pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.count(seen.stored, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    return seen


def near(counted: int, arithmetic: int) -> bool:
    return abs(counted - arithmetic) <= 0.05 * arithmetic


def rows() -> tuple[Tensor, Tensor]:
    return torch.randperm(2 * N)[:N].int()[None], torch.tensor([N], dtype=torch.int32)


def test_codes_are_read_once(traffic: Traffic) -> None:
    """16 bytes a token and head, of the blocks between the windows; all else together is less than
    5 %."""
    table, blocks = rows()
    codes = torch.zeros((2 * N, BLOCK, HEADS, WIDTH), dtype=torch.uint8)
    traffic.watch(codes=codes)
    gpu.hamming_scores(
        torch.zeros((1, HEADS, WIDTH), dtype=torch.uint8),
        codes,
        table,
        blocks * BLOCK,
        init=1,
        local=3,
    )
    assert traffic.loaded["codes"] == (N - 4) * BLOCK * HEADS * WIDTH
    assert near(traffic.loaded.total() + traffic.stored.total(), (N - 4) * BLOCK * HEADS * WIDTH)


def test_codes_of_a_latent_are_read_once_for_all_heads(traffic: Traffic) -> None:
    """72 bytes a token, whether 1 or 128 heads ask."""
    blocks = 6
    codes, table = (
        torch.zeros((8, BLOCK, 1, 72), dtype=torch.uint8),
        torch.randperm(8)[:blocks].int()[None],
    )
    traffic.watch(codes=codes)
    tokens = torch.tensor([blocks * BLOCK])
    gpu.hamming_scores(torch.zeros((1, 1, 128, 72), dtype=torch.uint8), codes, table, tokens)
    assert traffic.loaded["codes"] == blocks * BLOCK * 72


@pytest.mark.parametrize(("vectors", "each"), [(1, 2048), (2, 4096)])
def test_representations_of_blocks_are_read_once(traffic: Traffic, vectors: int, each: int) -> None:
    """Means 2 KiB a block, Quest's bounds 4 KiB; the queries are read again by every program, from
    a cache."""
    table, blocks = rows()
    reps = torch.zeros((2 * N, vectors, HEADS, DIM), dtype=torch.bfloat16)
    query = torch.zeros((1, HEADS * GROUP, DIM), dtype=torch.bfloat16)
    traffic.watch(reps=reps, query=query)
    (gpu.dot_scores if vectors == 1 else gpu.quest_scores)(
        query, reps, table, blocks, init=1, local=1
    )
    assert traffic.loaded["reps"] == (N - 2) * each
    assert near(
        traffic.loaded["reps"] + traffic.loaded["the rest"] + traffic.stored.total(), (N - 2) * each
    )


def test_keys_are_read_once_and_codes_written_once(traffic: Traffic) -> None:
    """256 bytes a token and head in, 16 out; directions once a program, of which there are few."""
    tokens, heads = 4 * 32 + 5, 2
    keys = torch.zeros((tokens, heads, DIM), dtype=torch.bfloat16)
    codes, slots = torch.zeros((4, BLOCK, heads, WIDTH), dtype=torch.uint8), torch.arange(tokens)
    weights = torch.zeros(DIM, 8 * WIDTH)
    traffic.watch(keys=keys, codes=codes, weights=weights)
    gpu.hash_encode(keys, weights, codes, slots)
    assert traffic.loaded["keys"] == tokens * heads * DIM * 2
    assert traffic.stored["codes"] == tokens * heads * WIDTH
    assert near(traffic.loaded["keys"] + traffic.loaded["the rest"], tokens * heads * (DIM * 2 + 8))
    assert traffic.loaded["weights"] <= encode.PROGRAMS * weights.nbytes


@pytest.mark.parametrize(("spread", "passes"), [(128, 3), (30_000, 4)])
def test_scores_are_read_once_for_each_digit_and_twice_besides(
    traffic: Traffic, spread: int, passes: int
) -> None:
    """Distances of 128 bits have one digit: least and greatest, one histogram, and what is kept."""
    places = 1500
    scores = torch.randint(-spread, 1, (1, 1, places), dtype=torch.int32)
    scores[0, 0, 1:3] = torch.tensor([0, -spread])
    table = torch.arange(places, dtype=torch.int32)[None]
    traffic.watch(scores=scores, table=table)
    gpu.select_blocks(scores, table, torch.tensor([places * 8]), 8, [100], init=1, local=2)
    assert traffic.loaded["scores"] == passes * 4 * (places - 3)
    assert near(traffic.loaded["table"], 4 * places)
    assert near(traffic.stored.total(), 103 * 8)
