"""The host in an engine: what is kept, and that nothing but the request itself decides it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formulas import BLOCK, DIM, GEOMETRY, GROUP, HEADS, Engine, masked_attention
from torch import Tensor

from ucm.errors import ConfigError, InvalidInputError
from ucm.sparse.base import INVALID_SLOT, SparseBatch, SparseRow, UcmSparseRole
from ucm.sparse.factory import UcmSparseFactory
from ucm.sparse.method import BlockSparse
from ucm.sparse.selection import Reduce, Selection, compact_rows
from ucm.sparse.selector import Combine, Geometry

#: Keys of each algorithm with which a prompt of ten blocks is sparse.
SETTINGS: dict[str, dict[str, Any]] = {
    "ESA": {"stride": 1, "min_blocks": 0},
    "GSA": {"init_blocks": 1, "local_blocks": 2, "min_blocks": 1},
    "GSAOnDevice": {"init_blocks": 1, "local_blocks": 2, "topk_blocks": 6},
    "KVStarMultiStep": {"init_blocks": 1, "local_blocks": 2, "stride": 1, "merge": 2, "group": 2},
    "Quest": {},
    "InfLLM": {},
    "Periodic": {},
    "Random": {},
    "Windows": {},
    "Oracle": {},
}
SELECTIVE = [name for name in SETTINGS if name not in ("Windows", "Periodic")]
PROMPT, STEPS = 10 * BLOCK + 1, 7


def method_of(algorithm: str, **given: Any) -> BlockSparse:
    made = UcmSparseFactory.create_sparse_method(
        algorithm, UcmSparseRole.WORKER, {**SETTINGS[algorithm], **given}
    )
    assert isinstance(made, BlockSparse)
    return made


def engine_of(algorithm: str, **given: Any) -> Engine:
    return Engine(method_of(algorithm, **given))


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for u, v in zip(a, b, strict=True) for x, y in zip(u, v, strict=True)
    )


@pytest.fixture(params=list(SETTINGS))
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# What is kept
# --------------------------------------------------------------------------------------------------


def test_the_output_is_attention_over_the_kept_blocks(algorithm: str) -> None:
    engine = engine_of(algorithm)
    found = engine.run("a", PROMPT, STEPS, chunk=7)
    kept_less = 0
    for step, outputs in enumerate(found, 1):
        tokens = PROMPT + step
        for layer, output in enumerate(outputs):
            kept = engine.kept["a", step, layer]
            kept_less += len(kept) < -(-tokens // BLOCK)
            q, k, v = (
                torch.stack(x)
                for x in zip(*(engine.qkv("text", p, layer) for p in range(tokens)), strict=True)
            )
            mask = torch.isin(torch.arange(tokens) // BLOCK, torch.tensor(kept))
            torch.testing.assert_close(output, masked_attention(q[-1], k, v, mask))
            assert {0, len(range(0, tokens, BLOCK)) - 1, len(range(0, tokens, BLOCK)) - 2} <= set(
                kept
            )
    assert kept_less == 2 * STEPS
    assert engine.method is not None
    assert not {"failed", "late"} & {
        name for name, value in engine.method.stats.snapshot().items() if value
    }


@pytest.mark.parametrize(
    "name", ["ESA", "GSA", "KVStarMultiStep", "Quest", "InfLLM", "Random", "Oracle"]
)
@pytest.mark.parametrize(
    "budget", [{"ratio": 1.0}, {"topk_blocks": 1000}, {"score_mass": 1.0, "k_min": 1000}]
)
def test_a_ratio_of_one_is_dense_attention_bit_by_bit(name: str, budget: dict[str, Any]) -> None:
    assert same(
        engine_of(name, **budget).run("a", PROMPT, STEPS), Engine(None).run("a", PROMPT, STEPS)
    )


def test_a_short_request_is_dense_bit_by_bit(algorithm: str) -> None:
    for given in ({"min_tokens": 1000}, {"init_blocks": 12}):
        assert same(
            engine_of(algorithm, **given).run("a", PROMPT, STEPS),
            Engine(None).run("a", PROMPT, STEPS),
        )


def test_the_metadata_is_unchanged_if_all_blocks_are_kept() -> None:
    method = method_of("Quest", ratio=1.0)
    engine = Engine(method)
    engine.run("a", PROMPT, 1)
    table, lens = torch.zeros(1, 11, dtype=torch.int32), torch.tensor([PROMPT + 2])
    metadata = SimpleNamespace(block_table=table, seq_lens=lens)
    method.bind_sparse_metadata(SparseBatch([SparseRow("a", PROMPT + 2, PROMPT, PROMPT)]))
    q = torch.zeros(1, HEADS * GROUP, DIM)
    method.attention_begin(
        q, q, q, engine.names[0], SimpleNamespace(attn_metadata={engine.names[0]: metadata})
    )
    assert metadata.block_table is table and metadata.seq_lens is lens


def test_the_tensors_of_the_metadata_are_never_written_to() -> None:
    method = method_of("Quest")
    engine = Engine(method)
    engine.run("a", PROMPT, 1)
    table = torch.tensor([engine.requests["a"].table], dtype=torch.int32)
    lens = torch.tensor([PROMPT + 2], dtype=torch.int32)
    before = table.clone(), lens.clone()
    metadata = SimpleNamespace(block_table=table, seq_lens=lens)
    method.bind_sparse_metadata(SparseBatch([SparseRow("a", PROMPT + 2, PROMPT, PROMPT)]))
    q = torch.ones(1, HEADS * GROUP, DIM)
    method.attention_begin(
        q, q, q, engine.names[0], SimpleNamespace(attn_metadata={engine.names[0]: metadata})
    )
    assert metadata.block_table is not table and int(metadata.seq_lens[0]) < PROMPT
    assert torch.equal(table, before[0]) and torch.equal(lens, before[1])


# What decides
# --------------------------------------------------------------------------------------------------


def test_a_request_in_a_batch_keeps_what_it_keeps_alone(algorithm: str) -> None:
    alone = engine_of(algorithm)
    expected = alone.run("a", PROMPT, STEPS)
    batch = engine_of(algorithm)
    batch.run("long", 17 * BLOCK + 2, 1)
    batch.run("short", BLOCK, 1)
    batch.add("a", PROMPT)
    batch.step({"long": 1, "a": PROMPT, "short": 1})
    found = []
    for step in range(STEPS):  # other rows before it and behind it, in another order each time
        counts = {"long": 1, "a": 1, "short": 1} if step % 2 else {"short": 1, "a": 1}
        found.append(batch.step(counts)["a"])
    assert {key: kept for key, kept in batch.kept.items() if key[0] == "a" and key[1] > 0} == {
        key: kept for key, kept in alone.kept.items() if key[1] > 0
    }
    assert same(found, expected)


def test_the_physical_blocks_do_not_matter(algorithm: str) -> None:
    first, second = engine_of(algorithm), engine_of(algorithm)
    expected = first.run("a", PROMPT, STEPS)
    found = second.run("a", PROMPT, STEPS, physical=[40, 3, 17, 9, 62, 33, 4, 21, 20, 19, 50])
    assert first.kept == second.kept and same(found, expected)


def test_the_chunks_of_a_prefill_do_not_matter(algorithm: str) -> None:
    first, second = engine_of(algorithm), engine_of(algorithm)
    expected = first.run("a", PROMPT, STEPS)
    for chunk in (1, 3, BLOCK, 11):
        assert same(engine_of(algorithm).run("a", PROMPT, STEPS, chunk=chunk), expected)
    del second


def test_a_prefix_hit_keeps_what_a_cold_request_keeps(algorithm: str) -> None:
    """The blocks of another request are used as they are; so are their representations."""
    cold, warm = engine_of(algorithm), engine_of(algorithm)
    expected = cold.run("a", PROMPT, STEPS)
    warm.run("first", PROMPT, 2)
    shared = warm.requests["first"].table[:9]
    found = warm.run("a", PROMPT, STEPS, shared=shared)
    assert {key: value for key, value in warm.kept.items() if key[0] == "a" and key[1] > 0} == {
        key: value for key, value in cold.kept.items() if key[1] > 0
    }
    assert same(found, expected)


@pytest.mark.parametrize("name", [name for name in SELECTIVE if name != "Random"])
def test_a_request_that_was_preempted_goes_on_as_if_it_had_not(name: str) -> None:
    """Its blocks went to another request; prompt and output are computed densely again, in other
    blocks."""
    whole, cut = engine_of(name), engine_of(name)
    expected = whole.run("a", PROMPT, 8)
    cut.run("a", PROMPT, 4)
    cut.end("a")
    cut.run("other", 13 * BLOCK, 1)
    cut.add("a", PROMPT)
    cut.requests["a"].prefill = PROMPT + 4
    cut.step({"a": PROMPT + 4})
    found = [cut.step({"a": 1})["a"] for _ in range(4)]
    assert [cut.kept["a", step, 1] for step in range(5, 9)] == [
        whole.kept["a", step, 1] for step in range(5, 9)
    ]
    assert same(found, expected[4:])


def test_prompts_and_decoding_rows_share_a_batch() -> None:
    engine, alone = engine_of("Quest"), engine_of("Quest")
    expected = alone.run("a", PROMPT, 3)
    engine.run("a", PROMPT, 1)
    engine.add("b", PROMPT)
    found = [engine.step({"b": 5, "a": 1})["a"], engine.step({"a": 1, "b": 5})["a"]]
    assert same(found, expected[1:])
    assert engine.kept["b", 5 - PROMPT, 0] == [0, 1]  # all there is


def test_a_prompt_of_one_token_left_is_no_decode_step() -> None:
    engine = engine_of("Windows")
    engine.add("a", PROMPT)
    engine.step({"a": PROMPT - 1})
    engine.step({"a": 1})
    assert len(engine.kept["a", 0, 0]) == 11
    engine.step({"a": 1})
    assert len(engine.kept["a", 1, 0]) == 3


def test_a_request_whose_representations_are_missing_is_dense_until_they_are_there() -> None:
    engine = engine_of("Quest")
    engine.run("a", PROMPT, 2)
    assert engine.method is not None
    blocks = engine.requests["a"].table[3:5]
    before = [engine.method.store.get(layer, blocks) for layer in range(2)]
    engine.method.store.invalidate(blocks)  # as for blocks that a load is about to fill
    engine.step({"a": 1})
    assert len(engine.kept["a", 3, 0]) == 11
    assert engine.method.stats.snapshot()["rows_unready"] == 1
    for layer in range(2):
        engine.method.store.put(layer, blocks, before[layer])
    engine.method.store.mark_ready(blocks)
    engine.step({"a": 1})
    assert len(engine.kept["a", 4, 0]) < 11


def test_a_request_with_the_name_of_one_that_ended_starts_anew() -> None:
    engine, fresh = engine_of("KVStarMultiStep", stride=50), engine_of("KVStarMultiStep", stride=50)
    engine.run("a", PROMPT + 8, 5)
    engine.end("a")
    expected = fresh.run("a", PROMPT, 3)
    assert same(engine.run("a", PROMPT, 3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ESA", {"rep_dtype": "bf16"}),
        ("ESA", {"rep_dtype": "int8"}),
        ("ESA", {"score": "key_max", "rep_dtype": "int8"}),
        ("GSA", {"score": "l2", "rep_dtype": "fp16"}),
        ("GSA", {"score": "key_max"}),
        ("GSAOnDevice", {}),
        ("Quest", {}),
        ("InfLLM", {}),
    ],
)
def test_kernels_choose_what_torch_chooses(
    name: str, given: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths, each KV head or all of them; equal scores aside, which rounding may
    order otherwise."""
    geometry = Geometry(block_size=16, kv_heads=4, head_dim=64)
    generator = torch.Generator().manual_seed(4)
    lengths = [16 * 20 + 3, 16 * 6, 16 * 33 + 16]
    keys = torch.randn(sum(lengths), 4, 64, generator=generator).to(dtype)
    q = torch.randn(len(lengths), 8, 64, generator=generator).to(dtype)
    table = torch.randperm(120, generator=generator)[: 3 * 34].int().view(3, 34)
    slots = torch.cat(
        [
            (row[: -(-n // 16)].long()[:, None] * 16 + torch.arange(16)).flatten()[:n]
            for row, n in zip(table, lengths, strict=True)
        ]
    )
    for heads in ("shared", "kv"):
        found = []
        for kernels in (True, False):
            method = method_of(name, heads=heads, topk_blocks=5, **given)
            method.setup(geometry, ["layers.0"], 120, per_head=True)
            method.bind_sparse_metadata(
                SparseBatch([SparseRow(str(n), n, n - 1, n - 1) for n in lengths])
            )
            method.write_keys("layers.0", keys, slots)
            if not kernels:
                for fused in ("fused_scores", "fused_select"):
                    monkeypatch.setattr(method.selector, fused, lambda *args, **kwargs: None)
            selection = method.select_rows("layers.0", q, table)
            assert selection is not None
            torch_alone = given.get("score") == "key_max" and given.get("rep_dtype") == "int8"
            assert (selection.table is not None) == (kernels and not torch_alone)
            found.append(selection)
        assert found[0].counts.tolist() == found[1].counts.tolist()
        for row in range(len(found[0].blocks)):
            for head in range(found[0].ids.shape[1]):
                assert found[0].kept(row, head).tolist() == found[1].kept(row, head).tolist()
        lens = torch.tensor(lengths, dtype=torch.int32)
        for a, b in zip(
            compact_rows(found[0], table, lens, 16),
            compact_rows(found[1], table, lens, 16),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_layers_may_get_their_slots_as_tensors_of_their_own() -> None:
    """And two parts of a batch may be written in turns, layer by layer."""
    method, engine = method_of("Quest"), Engine(None)
    method.setup(GEOMETRY, engine.names, 64)
    halves = [list(range(2 * BLOCK)), list(range(5 * BLOCK, 6 * BLOCK + 1))]
    for extra in (0, 1):
        method.bind_sparse_metadata(SparseBatch())
        for layer, name in enumerate(engine.names):
            for half in halves:
                slots = torch.tensor(half if not extra else [half[-1] + 1])
                method.write_keys(name, torch.full((len(slots), HEADS, DIM), layer + 1.0), slots)
        method.clear_sparse_metadata()
    for place in (2, 3):
        method.bind_sparse_metadata(SparseBatch())
        for layer, name in enumerate(engine.names):
            method.write_keys(
                name, torch.full((1, HEADS, DIM), layer + 1.0), torch.tensor([6 * BLOCK + place])
            )
    assert method.store.missing([0, 1, 5, 6]) == []
    for layer in range(2):
        assert bool((method.store.get(layer, [0, 1, 5, 6]) == layer + 1).all())


def test_generated_blocks_become_candidates() -> None:
    """After a long answer as many blocks are kept as the budget says, and of the generated ones not
    all."""
    engine = engine_of("Oracle", topk_blocks=4)
    engine.run("a", PROMPT, 60)
    generated = set(range(-(-PROMPT // BLOCK), -(-(PROMPT + 60) // BLOCK)))
    kept = [set(engine.kept["a", step, 0]) for step in range(40, 61)]
    assert {len(ids) for ids in kept} == {7}
    assert all(generated - ids for ids in kept)
    assert set.union(*(ids & generated for ids in kept)) > {max(generated), max(generated) - 1}


# Rhythm
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_between_choices_the_kept_blocks_stay_and_new_ones_are_added(lag: int) -> None:
    engine = engine_of("Oracle", stride=4, lag=lag, **({"retrieval_ms": 60_000} if lag else {}))
    engine.run("a", PROMPT, 12)
    chosen = {step: set(engine.kept["a", step, 0]) for step in range(1, 13)}
    for step in range(2, 13):
        made_at = max([1, *(s for s in (1, 5, 9) if s + lag <= step)])
        before = max([1, *(s for s in (1, 5, 9) if s + lag <= step - 1)])
        if made_at == before:
            assert chosen[step - 1] <= chosen[step]
        blocks, then = -(-(PROMPT + step) // BLOCK), -(-(PROMPT + made_at) // BLOCK)
        assert set(range(then - 2, blocks)) <= chosen[step]
    assert engine.method is not None
    engine.method.close()


def test_with_a_lag_the_choice_of_an_earlier_step_is_used() -> None:
    now, later = engine_of("Oracle"), engine_of("Oracle", lag=1, retrieval_ms=60_000)
    now.run("a", PROMPT, 4)
    later.run("a", PROMPT, 4)
    for step in (2, 3):  # no block begins in between
        assert set(now.kept["a", step - 1, 1]) <= set(later.kept["a", step, 1])
    assert later.method is not None
    later.method.close()


# Layers
# --------------------------------------------------------------------------------------------------


def test_dense_layers_and_layers_that_reuse_a_choice() -> None:
    engine = Engine(method_of("Oracle", dense_layers=[0], reuse_from={3: 1}), layers=4)
    engine.run("a", PROMPT, 3)
    assert engine.method is not None
    assert engine.method.store.layers == [1, 2]
    for step in range(1, 4):
        assert len(engine.kept["a", step, 0]) == -(-(PROMPT + step) // BLOCK)
        assert engine.kept["a", step, 3] == engine.kept["a", step, 1]
    assert any(engine.kept["a", step, 1] != engine.kept["a", step, 2] for step in range(1, 4))


def test_a_layer_that_the_method_does_not_select_is_dense() -> None:
    method = method_of("Oracle")
    Engine(method).run("a", PROMPT, 1)
    method.bind_sparse_metadata(SparseBatch([SparseRow("a", PROMPT + 2, PROMPT, PROMPT)]))
    assert (
        method.select_rows(
            "encoder.0", torch.zeros(1, 4, DIM), torch.zeros(1, 11, dtype=torch.int32)
        )
        is None
    )
    method.write_keys("encoder.0", torch.zeros(1, HEADS, DIM), torch.tensor([5]))


def test_layers_are_numbered_by_their_names() -> None:
    """A stage of a pipeline begins in the middle; settings count from the model's first layer."""
    method = method_of("Oracle", dense_layers="8-9", reuse_from={11: 10})
    method.setup(GEOMETRY, [f"model.layers.{n}.self_attn.attn" for n in range(8, 12)], 16)
    assert method.store.layers == [10]


def test_attentions_of_one_layer_are_distinguished() -> None:
    """Their representations, and what they choose, are their own."""
    method = method_of("Oracle")
    names = [
        f"model.layers.{layer}.self_attn.{part}.attn" for layer in range(2) for part in range(2)
    ]
    method.setup(GEOMETRY, names, 16)
    assert method.store.layers == [method.layer_number(name) for name in names] == [0, 1, 2, 3]
    slots = torch.arange(BLOCK)
    method.bind_sparse_metadata(SparseBatch([SparseRow("a", BLOCK, BLOCK, BLOCK, queries=BLOCK)]))
    for number, name in enumerate(names):
        method.write_keys(name, torch.full((BLOCK, HEADS, DIM), float(number)), slots)
    assert [float(method.store.get(layer, [0]).float().max()) for layer in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["ESA", "GSAOnDevice"])
def test_a_selector_that_fails_leaves_its_blocks_without_representation(name: str) -> None:
    """Whole blocks, and one that is written in two steps: they are not scored, and get none
    later."""
    method = method_of(name)
    method.setup(GEOMETRY, ["layers.0", "layers.1"], 16)
    hook = "encode_tokens" if method.selector.token_wise else "encode"
    encode = getattr(method.selector, hook)

    def fails(layer: int, *args: Any) -> Any:
        if layer:
            raise RuntimeError("a user's mistake")
        return encode(layer, *args)

    def write(first: int, end: int) -> None:
        method.bind_sparse_metadata(
            SparseBatch([SparseRow("a", end, end, end, queries=end - first)])
        )
        for layer in ("layers.0", "layers.1"):
            try:
                method.write_keys(
                    layer, torch.ones(end - first, HEADS, DIM), torch.arange(first, end)
                )
            except RuntimeError:
                assert layer == "layers.1"

    write(0, BLOCK)
    assert method.store.ready([0])
    setattr(method.selector, hook, fails)
    write(BLOCK, 3 * BLOCK + BLOCK // 2)
    assert method.store.missing(range(4)) == [1, 2, 3]
    if method.selector.token_wise:  # half of the last block is missing all the same
        setattr(method.selector, hook, encode)
    write(3 * BLOCK + BLOCK // 2, 4 * BLOCK)
    assert method.store.missing(range(4)) == [1, 2, 3]


# Heads and ranks
# --------------------------------------------------------------------------------------------------


def test_a_choice_for_each_head_is_that_of_the_head_alone() -> None:
    with pytest.raises(ConfigError, match="heads: kv"):
        Engine(method_of("Oracle", heads="kv"))
    method = method_of("Oracle", heads="kv", topk_blocks=2)
    engine = Engine(None)
    method.setup(GEOMETRY, engine.names, 64, per_head=True)
    single = [method_of("Oracle", topk_blocks=2) for _ in range(HEADS)]
    for one in single:
        one.setup(Geometry(BLOCK, 1, DIM), engine.names, 64)
    tokens = PROMPT + 1
    q, k, _ = (
        torch.stack(x) for x in zip(*(engine.qkv("text", p, 0) for p in range(tokens)), strict=True)
    )
    table = torch.arange(1, 13, dtype=torch.int32)[None]
    slots = torch.arange(tokens) + BLOCK
    batch = SparseBatch([SparseRow("a", tokens, PROMPT, PROMPT)])
    for one in (method, *single):
        one.bind_sparse_metadata(batch)
    method.write_keys(engine.names[0], k, slots)
    chosen = method.select_rows(engine.names[0], q[-1:], table)
    assert chosen is not None and chosen.ids.shape[:2] == (1, HEADS)
    for head, one in enumerate(single):
        one.write_keys(engine.names[0], k[:, head : head + 1], slots)
        alone = one.select_rows(engine.names[0], q[-1:, head * GROUP : (head + 1) * GROUP], table)
        assert alone is not None and torch.equal(alone.ids[0, 0], chosen.ids[0, head])


class Ranks:
    """Tensor ranks as threads: each hands over its scores, and gets what they come to."""

    def __init__(self, count: int) -> None:
        self.given: list[Tensor] = [torch.empty(0)] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def reduce(self, rank: int, scores: Tensor, combine: Combine) -> Tensor:
        assert scores.dtype == torch.int64
        self.given[rank] = scores
        self.barrier.wait()
        both = torch.stack(self.given)
        self.barrier.wait()
        return both.amax(0) if combine == "max" else both.sum(0)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.given)) as pool:
            return list(pool.map(work, range(len(self.given))))


@pytest.mark.parametrize(
    "name", ["ESA", "GSAOnDevice", "Quest", "KVStarMultiStep", "InfLLM", "Oracle"]
)
def test_ranks_that_share_a_selection_choose_what_one_rank_chooses(name: str) -> None:
    """Two ranks with one KV head each add up integer scores; one rank with both heads has the same
    sums."""
    names = [f"layers.{layer}" for layer in range(2)]
    engine, tokens = Engine(None), PROMPT + 3
    table = torch.arange(1, 13, dtype=torch.int32)[None]
    ranks = Ranks(HEADS)

    def chosen(rank: int, heads: slice, reduce: Reduce | None) -> list[Selection | None]:
        method = method_of(name, shared_selection=True)
        method.setup(Geometry(BLOCK, heads.stop - heads.start, DIM), names, 64, reduce=reduce)
        method.bind_sparse_metadata(SparseBatch([SparseRow("a", tokens, PROMPT, PROMPT)]))
        found = []
        for layer in range(2):
            q, k, _ = (
                torch.stack(x)
                for x in zip(*(engine.qkv("text", p, layer) for p in range(tokens)), strict=True)
            )
            method.write_keys(names[layer], k[:, heads], torch.arange(tokens) + BLOCK)
            asked = q[-1:, heads.start * GROUP : heads.stop * GROUP]
            found.append(method.select_rows(names[layer], asked, table))
        return found

    whole = chosen(0, slice(0, HEADS), None)
    parts = ranks.run(lambda rank: chosen(rank, slice(rank, rank + 1), partial(ranks.reduce, rank)))
    for layer in range(2):
        for part in parts:
            assert whole[layer] is not None and part[layer] is not None
            assert torch.equal(part[layer].ids, whole[layer].ids)
            assert part[layer].ids.shape[2] < 11


def test_where_one_rank_lacks_representations_all_are_dense() -> None:
    names, tokens, ranks = ["layers.0"], PROMPT + 3, Ranks(2)

    def chosen(rank: int) -> Selection | None:
        method = method_of("Quest", shared_selection=True)
        method.setup(Geometry(BLOCK, 1, DIM), names, 64, reduce=partial(ranks.reduce, rank))
        method.bind_sparse_metadata(SparseBatch([SparseRow("a", tokens, PROMPT, PROMPT)]))
        method.write_keys(names[0], torch.zeros(tokens, 1, DIM), torch.arange(tokens) + BLOCK)
        if rank == 1:
            method.store.invalidate([5])
        return method.select_rows(
            names[0], torch.zeros(1, GROUP, DIM), torch.arange(1, 13, dtype=torch.int32)[None]
        )

    assert ranks.run(chosen) == [None, None]


def test_ranks_by_default_choose_for_their_own_heads() -> None:
    method = method_of("Oracle")
    assert method.settings.shared_selection is False
    with pytest.raises(ConfigError, match="exclude each other"):
        method_of("Oracle", heads="kv", shared_selection=True).setup(
            GEOMETRY, ["layers.0"], 8, per_head=True
        )


# Latent attention
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GSAOnDevice", "ESA", "Quest", "Oracle"])
def test_latent_attention_is_selected_by_its_absorbed_query(name: str) -> None:
    geometry = Geometry(block_size=BLOCK, kv_heads=1, head_dim=24, rope_dim=8)
    method = method_of(name, **({"topk_blocks": 4} if name == "GSAOnDevice" else {"ratio": 0.2}))
    method.setup(geometry, ["layers.0"], 64)
    k = torch.randn(tokens := PROMPT + 1, 1, 24, generator=torch.Generator().manual_seed(2)) * 0.1
    k[5 * BLOCK + 2] = 3.0  # the best key of every query head
    q = torch.ones(3, 6, 24)
    table = torch.arange(1, 13, dtype=torch.int32)[None]
    decode = SimpleNamespace(block_table=table, seq_lens=torch.tensor([tokens]))
    metadata = SimpleNamespace(decode=decode)
    # Decode rows come first; the second row computes a prompt, and has no part in what is decoded.
    rows = [SparseRow("a", tokens, PROMPT, PROMPT), SparseRow("b", 2, 2, 2, queries=2)]
    method.bind_sparse_metadata(SparseBatch(rows))
    method.write_keys("layers.0", k, torch.arange(tokens) + BLOCK)
    method.attention_begin(
        q,
        q,
        q,
        "layers.0",
        SimpleNamespace(attn_metadata={"layers.0": metadata}),
        decode_ql_nope=q[:1, :, :16],
        decode_q_pe=q[:1, :, 16:],
    )
    kept = decode.block_table[0, : -(-int(decode.seq_lens[0]) // BLOCK)].tolist()
    assert 6 in kept and len(kept) < 11


def test_latent_attention_with_more_heads_than_a_cpus_kernel_takes() -> None:
    method = method_of("GSAOnDevice", topk_blocks=4)
    method.setup(Geometry(block_size=BLOCK, kv_heads=1, head_dim=24, rope_dim=8), ["layers.0"], 64)
    k = torch.randn(tokens := PROMPT + 1, 1, 24, generator=torch.Generator().manual_seed(2)) * 0.1
    k[5 * BLOCK + 2] = 3.0
    method.bind_sparse_metadata(SparseBatch([SparseRow("a", tokens, PROMPT, PROMPT)]))
    method.write_keys("layers.0", k, torch.arange(tokens) + BLOCK)
    table = torch.arange(1, 13, dtype=torch.int32)[None]
    found = method.select_rows("layers.0", torch.ones(1, 128, 24), table)
    few = method.select_rows("layers.0", torch.ones(1, 8, 24), table)
    assert found is not None and few is not None
    assert 5 in found.kept(0).tolist() and len(found.kept(0)) < 11
    assert torch.equal(found.kept(0), few.kept(0)), "all heads ask for the same here"


# Offload
# --------------------------------------------------------------------------------------------------


def test_representations_of_blocks_that_left_the_device_are_found() -> None:
    """Middle blocks leave; their rows are kept aside, and the selection is that of a request that
    kept all."""
    whole, other = engine_of("Quest"), Engine(None)
    whole.run("a", PROMPT, 4)
    method = method_of("Quest")
    method.setup(GEOMETRY, other.names, 64, spare_blocks=8)
    tokens = PROMPT + 4
    batch = SparseBatch([SparseRow("a", tokens, PROMPT, PROMPT)])
    method.bind_sparse_metadata(batch)
    slots = torch.arange(tokens) + BLOCK
    for layer, name in enumerate(other.names):
        method.write_keys(
            name, torch.stack([other.qkv("text", p, layer)[1] for p in range(tokens)]), slots
        )
    physical = list(range(1, 13))
    rows = method.store.adopt(physical[1:8])
    method.store.invalidate(physical[1:8])  # others write there
    method.set_rep_rows("a", [physical[0], *rows])
    for layer, name in enumerate(other.names):
        q = other.qkv("text", tokens - 1, layer)[0][None]
        table = torch.tensor([[1] + [0] * 7 + physical[8:]], dtype=torch.int32)
        found = method.select_rows(name, q, table)
        assert found is not None
        assert found.ids[0, 0].tolist() == whole.kept["a", 4, layer]
    method.request_finished_in_worker("a")
    assert len(method.store.adopt(range(8))) == 8  # all rows are free again


@pytest.mark.parametrize(("tokens", "outputs"), [(400, 1), (401, 1), (415, 3), (32, 1), (400, 0)])
def test_slots_of_an_offloaded_request(tokens: int, outputs: int) -> None:
    """I + ceil(.3 m) + W blocks, the last as full as it is; before the first output token there is
    no answer."""
    vllm = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16), model_config=SimpleNamespace(model="m")
    )
    method = UcmSparseFactory.method_class("ESA")(
        vllm, UcmSparseRole.SCHEDULER, {"offload": True, "ratio": 0.3}
    )  # type: ignore[call-arg]
    request = SimpleNamespace(num_tokens=tokens, num_output_tokens=outputs)
    found = method.estimate_num_slots_sparsed(request)
    blocks = -(-tokens // 16)
    if outputs == 0 or blocks <= 3:
        assert found == INVALID_SLOT
    else:
        kept = 3 + -(-3 * (blocks - 3) // 10)
        assert found == (kept - 1) * 16 + (tokens - 1) % 16 + 1
    resident = UcmSparseFactory.method_class("ESA")(vllm, UcmSparseRole.SCHEDULER, {})  # type: ignore[call-arg]
    assert resident.estimate_num_slots_sparsed(request) == INVALID_SLOT


# Measures
# --------------------------------------------------------------------------------------------------


def test_recall_is_measured_against_all_keys() -> None:
    found = {}
    for name in ("Oracle", "Quest", "Random", "Windows"):
        engine = engine_of(name, measure_recall=True)
        engine.run("a", 16 * BLOCK, 8)
        assert engine.method is not None
        found[name] = engine.method.stats.snapshot()["recall"]
    assert 1 > found["Oracle"] >= found["Quest"] > found["Windows"]
    assert found["Oracle"] > found["Random"] > found["Windows"] > 0


def test_density_is_the_share_of_kept_blocks() -> None:
    engine = engine_of("Quest")
    engine.run("a", PROMPT, STEPS)
    assert engine.method is not None
    kept = sum(len(ids) for key, ids in engine.kept.items() if key[1] > 0)
    there = sum(2 * -(-(PROMPT + step) // BLOCK) for step in range(1, STEPS + 1))
    assert engine.method.stats.snapshot()["density"] == pytest.approx(kept / there)


def test_a_request_shorter_than_the_measured_break_even_is_dense() -> None:
    engine = engine_of("Quest")
    assert engine.method is not None
    engine.method.break_even_tokens = PROMPT + 3
    engine.run("a", PROMPT, 4)
    assert [len(engine.kept["a", step, 0]) for step in (1, 2, 3)] == [11, 11, 6]
    said = engine_of("Quest", min_tokens=1)
    assert said.method is not None
    said.method.break_even_tokens = 10**6  # the user knows better
    said.run("a", PROMPT, 1)
    assert len(said.kept["a", 1, 0]) < 11


def test_few_long_requests_are_dense_where_the_user_says_so() -> None:
    engine = engine_of("Quest", min_concurrency=2)
    engine.run("a", PROMPT, 1)
    engine.run("b", PROMPT, 1)
    assert len(engine.kept["a", 1, 0]) == len(engine.kept["b", 1, 0]) == 11
    engine.step({"a": 1, "b": 1})
    assert len(engine.kept["a", 2, 0]) < 11 and len(engine.kept["b", 2, 0]) < 11


def test_steps_without_rows_or_with_foreign_metadata_choose_nothing() -> None:
    engine = engine_of("Quest")
    engine.run("a", PROMPT, 1)
    assert engine.method is not None
    for metadata in (None, SparseBatch()):
        engine.method.bind_sparse_metadata(metadata)
        assert (
            engine.method.select_rows(
                engine.names[0], torch.zeros(1, 4, DIM), torch.zeros(1, 11).int()
            )
            is None
        )


def test_fewer_queries_than_tokens_is_an_error_that_says_so() -> None:
    engine = engine_of("Quest")
    engine.run("a", PROMPT, 1)
    assert engine.method is not None
    engine.method.bind_sparse_metadata(SparseBatch([SparseRow("a", PROMPT + 2, PROMPT, PROMPT)]))
    with pytest.raises(InvalidInputError, match="fewer queries"):
        engine.method.select_rows(engine.names[0], torch.zeros(0, 4, DIM), torch.zeros(1, 11).int())
