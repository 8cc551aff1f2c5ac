"""What the seeds' documents build by name works, in the forms they show."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formulas import BLOCK, DIM, GROUP, HEADS, Engine, keys, masked_attention
from torch import Tensor

from ucm.errors import (
    BusyError,
    ConfigError,
    InvalidInputError,
    UnknownConnectorError,
    UnsupportedError,
)
from ucm.sparse.base import UcmSparseBase, UcmSparseRole
from ucm.sparse.esa.esa import ESA, BlockReprPool, ESARetrievalEngine, ESASparse
from ucm.sparse.factory import UcmSparseFactory
from ucm.sparse.gsa.gsa import (
    GSA,
    GSAReqStat,
    GSASparseKernel,
    compute_block_scores,
    compute_topk_len,
    select_topk_blocks,
)
from ucm.sparse.gsa.prefetch.prefetch_engine import GSAPrefetchEngineC, PrefetchEngine
from ucm.sparse.gsa_on_device.gsa_on_device import GSAOnDevice
from ucm.sparse.gsa_on_device.hamming_topk import (
    cuda_hamming_topk,
    hamming_distance,
    update_seq_lens,
)
from ucm.sparse.gsa_on_device.hash_encoder import (
    HashEncoder,
    reshape_and_cache_khash_triton,
    torch_hash_code,
    triton_hash_code,
)
from ucm.sparse.kvstar.multistep import KVStarMultiStep, ReqMeta, ReqStage
from ucm.sparse.selector import Geometry

WORKER = UcmSparseRole.WORKER


# Document 002: positional forms
# --------------------------------------------------------------------------------------


def test_the_example_of_document_002() -> None:
    """create_sparse_method, register_kv_caches, attention_begin(layer_idx, q, k, v, metadata),
    attention_finished."""
    gsa = UcmSparseFactory.create_sparse_method(
        "GSA",
        WORKER,
        {
            "sparse_ratio": 0.3,
            "init_window_sz": 1,
            "local_window_sz": 2,
            "min_blocks": 1,
            "prefetch_workers": 4,
        },
    )
    reference = Engine(None, layers=2)
    tokens = 10 * BLOCK + 2
    reference.run("a", tokens, 0)
    reference.run("b", 2 * BLOCK, 0)
    gsa.register_kv_caches({f"layer{i}": cache for i, cache in enumerate(reference.caches)})
    for step in (1, 2):
        reference.step({"a": 1, "b": 1})
        tables = [reference.requests[name].table for name in "ab"]
        width = max(map(len, tables))
        table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
        lens = torch.tensor([tokens + step, 2 * BLOCK + step], dtype=torch.int32)
        for layer in range(2):
            rows = [reference.qkv("text", int(length) - 1, layer) for length in lens]
            query, key, value = (torch.stack(x) for x in zip(*rows, strict=True))
            metadata = SimpleNamespace(block_table=table, seq_lens=lens)
            q, k, v, output = gsa.attention_begin(layer, query, key, value, metadata)  # type: ignore[arg-type]
            assert q is query and k is key and v is value and output is None
            count = -(-int(metadata.seq_lens[0]) // BLOCK)
            assert count == 3 + math.ceil(0.3 * (-(-(tokens + step) // BLOCK) - 3))
            assert (
                torch.equal(metadata.block_table[1, :3], table[1, :3])
                and metadata.seq_lens[1] == lens[1]
            )
            means = (
                torch.stack([reference.caches[layer][0, b].mean(0) for b in tables[0][1:-2]])
                .bfloat16()
                .float()
            )
            scores = torch.einsum("hd,nhd->n", query[0].view(HEADS, GROUP, DIM).mean(1), means)
            best = {tables[0][1 + int(i)] for i in scores.topk(count - 3).indices}
            assert set(metadata.block_table[0, :count].tolist()) == best | {
                tables[0][0],
                *tables[0][-2:],
            }
            kept = torch.zeros(1)
            assert gsa.attention_finished(layer, kept) is kept  # type: ignore[call-arg, func-returns-value]


def test_both_orders_of_the_constructor() -> None:
    for made in (GSA(WORKER, {"sparse_ratio": 0.4}), GSA({"sparse_ratio": 0.4}, WORKER)):
        assert made.role is WORKER and made.settings.ratio == 0.4
    assert ESASparse(None, WORKER, store="s").kv_store == "s"
    assert isinstance(ESASparse(None, WORKER), ESA)


def test_another_request_of_the_same_place_starts_anew() -> None:
    gsa = GSA(WORKER, {"init_window_sz": 1, "local_window_sz": 1, "ratio": 0.2, "stride": 100})
    cache = torch.stack([keys(32), keys(32)])
    gsa.register_kv_caches({"layer": cache})
    first: dict[int, list[int]] = {}
    for length in (60, 61, 44, 45):
        metadata = SimpleNamespace(
            block_table=torch.arange(16)[None], seq_lens=torch.tensor([length])
        )
        q = torch.full((1, HEADS * GROUP, DIM), 1.0 if length > 50 else -1.0)
        gsa.attention_begin(0, q, q, q, metadata)
        first[length] = metadata.block_table[0, : -(-int(metadata.seq_lens[0]) // BLOCK)].tolist()
    assert first[44][:-1] == first[45][:-2] or first[44] == first[45][: len(first[44])]
    assert set(first[44]) - set(first[61]) - {10}  # chosen anew, by the other query


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda gsa: gsa.attention_begin(0, torch.zeros(1, 4, 8), None, None, None),
            "register_kv_caches",
        ),
        (
            lambda gsa: gsa.register_kv_caches({"a": torch.zeros(3, 3)}),
            "blocks, tokens, heads, size",
        ),
    ],
)
def test_errors_name_what_is_missing(make: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        make(GSA(WORKER, {}))


def test_wrong_calls_of_the_positional_form_are_refused_with_a_reason() -> None:
    gsa = GSA(WORKER, {})
    gsa.register_kv_caches({"layer": keys(4)})
    metadata = SimpleNamespace(block_table=torch.zeros(1, 2).int(), seq_lens=torch.tensor([5]))
    with pytest.raises(InvalidInputError, match="layers 0 to 0, got 3"):
        gsa.attention_begin(3, torch.zeros(1, 4, DIM), None, None, metadata)
    with pytest.raises(InvalidInputError, match="one query for each row"):
        gsa.attention_begin(0, torch.zeros(2, 4, DIM), None, None, metadata)


# The factory
# --------------------------------------------------------------------------------------------------


class OwnMethod(UcmSparseBase):
    """A method that a user registers."""


def test_a_users_method_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import ucm.sparse.factory as factory

    monkeypatch.setattr(factory, "_METHODS", dict(factory._METHODS))
    UcmSparseFactory.register_sparse_method("Own", __name__, "OwnMethod")
    UcmSparseFactory.register_sparse_method("Own", __name__, "OwnMethod")
    assert type(UcmSparseFactory.create_sparse_method("Own", WORKER, {})).__name__ == "OwnMethod"
    with pytest.raises(ConfigError, match="registered already"):
        UcmSparseFactory.register_sparse_method("ESA", __name__, "OwnMethod")
    UcmSparseFactory.register_sparse_method("Not", "ucm.sparse.base", "INVALID_SLOT")
    with pytest.raises(ConfigError, match="no subclass"):
        UcmSparseFactory.create_sparse_method("Not", WORKER)


def test_an_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(UnknownConnectorError, match='did you mean "GSAOnDevice"'):
        UcmSparseFactory.create_sparse_method("GSAOnDevise", WORKER)


def vllm_config(**extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"storage_path": "/d", **extra}
        ),
        model_config=SimpleNamespace(model="Qwen/Qwen3-4B"),
    )


def test_the_form_of_the_original_takes_the_engines_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("UCM_SPARSE_TYPE", "ENABLE_SPARSE", "UCM_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    made = UcmSparseFactory.create_sparse_method(
        vllm_config(ucm_sparse_config={"KVStar": {"stride": 4}}), WORKER
    )
    assert (
        isinstance(made, KVStarMultiStep)
        and made.settings.stride == 4
        and made.model == "Qwen/Qwen3-4B"
    )
    assert isinstance(made, UcmSparseBase)
    with pytest.raises(ConfigError, match="names no sparse method"):
        UcmSparseFactory.create_sparse_method(vllm_config(), WORKER)
    mixed = vllm_config(sparse_type="KVStar", KVStar={"stride": 4}, GSA={"stride": 9})
    assert GSA(mixed, WORKER).settings.stride == 9  # its own section, whichever was chosen
    assert ESA(mixed, WORKER).settings.stride == 16
    monkeypatch.setenv("UCM_SPARSE_TYPE", "esa")
    assert isinstance(UcmSparseFactory.create_configured(vllm_config(), WORKER), ESA)
    monkeypatch.setenv("ENABLE_SPARSE", "0")
    assert UcmSparseFactory.create_configured(vllm_config(), WORKER) is None


# ESA
# --------------------------------------------------------------------------------------------------


def test_the_pool_of_vectors() -> None:
    pool = BlockReprPool(2, 4, "cpu")
    pool.set_repr(7, torch.arange(4))
    assert pool.get_repr(7).tolist() == [0, 1, 2, 3] and pool.get_repr(7).dtype == torch.float16
    assert pool.allocate(7) == pool.allocate(7) != pool.allocate(8)
    with pytest.raises(BusyError, match="max_blocks=2"):
        pool.allocate(9)
    pool.free(7)
    assert pool.allocate(9) is not None
    for call in (pool.get_repr, pool.free):
        with pytest.raises(InvalidInputError, match="block 7 has no place"):
            call(7)


def test_the_retrieval_engine_calls_back(caplog: pytest.LogCaptureFixture) -> None:
    results: queue.Queue[tuple[str, list[int]]] = queue.Queue()
    engine = ESARetrievalEngine(SimpleNamespace(topk=2), threads=2)
    reprs = torch.tensor([[1.0, 0], [3, 0], [2, 0], [3, 0]])
    engine.submit_retrieval(
        "a", torch.tensor([1.0, 0]), reprs, lambda name, found: results.put((name, found))
    )
    engine.submit_retrieval(
        "b", torch.tensor([-1.0, 0]), reprs, lambda name, found: results.put((name, found))
    )
    assert dict(results.get(timeout=60) for _ in range(2)) == {"a": [1, 3], "b": [0, 2]}
    engine.submit_retrieval("c", torch.zeros(2), reprs, lambda name, found: results.put(1 / 0))  # type: ignore[func-returns-value]
    assert engine.pending_tasks["c"].result(timeout=60) == [0, 1]  # of equal ones the earlier
    assert "the callback of a retrieval failed" in caplog.text
    engine.close()
    assert ESARetrievalEngine({"topk": 9}).retrieve(torch.zeros(2), reprs) == [0, 1, 2, 3]
    with pytest.raises(InvalidInputError, match="topk"):
        ESARetrievalEngine({})


# GSA
# --------------------------------------------------------------------------------------------------


def test_scores_of_the_book() -> None:
    q, r = torch.randn(3, 5), torch.randn(7, 3, 5)
    torch.testing.assert_close(
        compute_block_scores(q, r, 16), -torch.norm(q[None] - r, dim=-1).sum(-1)
    )
    dots = torch.einsum("hd,nhd->nh", q, r)
    torch.testing.assert_close(compute_block_scores(q, r, method="mean"), dots.mean(1))
    torch.testing.assert_close(compute_block_scores(q, r, method="max"), dots.amax(1))
    with pytest.raises(InvalidInputError):
        compute_block_scores(q, r, method="median")


def test_selection_of_the_book() -> None:
    scores = torch.tensor([9.0, 0, 5, 1, 5, 2, 9])
    assert select_topk_blocks(scores, 7, 1, 1, 2).tolist() == [0, 2, 4, 6]
    assert select_topk_blocks(scores, 7, 4, 4, 2).tolist() == list(range(7))
    assert select_topk_blocks(scores, 7, 1, 1, 99).tolist() == list(range(7))
    assert compute_topk_len(112) == 12 + 30
    assert compute_topk_len(10) == 10
    assert compute_topk_len(103, {"init_window_sz": 1, "local_window_sz": 2, "ratio": 0.1}) == 13


@pytest.mark.parametrize("heads", [2, 4])
def test_the_kernel_of_document_002_is_attention_over_the_chosen_blocks(heads: int) -> None:
    batch, blocks, seq = 2, 6, 3
    k, v = torch.randn(2, batch, blocks, BLOCK, 2, DIM)
    q = torch.randn(batch, heads, seq, DIM)
    chosen = torch.tensor([[0, 3, 5], [1, 2, 5]])
    mask = torch.rand(batch, seq, blocks * BLOCK) < 0.7
    mask[:, :, 5 * BLOCK] = True
    found = GSASparseKernel({"head_dim": DIM}).forward(q, k, v, chosen, mask)
    for b in range(batch):
        for t in range(seq):
            kept = torch.isin(torch.arange(blocks * BLOCK) // BLOCK, chosen[b]) & mask[b, t]
            expected = masked_attention(q[b, :, t], k[b].flatten(0, 1), v[b].flatten(0, 1), kept)
            torch.testing.assert_close(found[b, :, t], expected)
    assert GSASparseKernel().head_dim == 128


def test_the_state_of_a_request_knows_its_prefetch() -> None:
    stat = GSAReqStat("a", 3)
    assert stat.prefetch_ready and stat.selected_blocks == []
    engine = PrefetchEngine({"prefetch_workers": 1}, load=list)
    stat.prefetch_task = engine.submit_prefetch("a", ["00" * 16])
    assert stat.prefetch_task.wait(60) and stat.prefetch_ready
    # nowhere to load from
    stat.prefetch_task = PrefetchEngine({}).submit_prefetch("a", ["00" * 16])
    assert not stat.prefetch_ready
    engine.shutdown()


def test_the_batch_form_of_the_prefetch_engine() -> None:
    """Two requests, one layer, four blocks of the device each: hits keep theirs, misses take those
    of the unwanted."""
    blocks, there, count = (
        torch.zeros(1, 2, 4).int(),
        torch.zeros(1, 2, 4).int(),
        torch.zeros(1, 2).int(),
    )
    engine = GSAPrefetchEngineC(blocks, there, count, torch.tensor([[4, 4]]), [128, 8, 64])
    table = torch.tensor([[[10, 11, 12, 13], [20, 21, 22, 23]]])
    wanted = torch.tensor([[[0, 9, 3, 7], [0, 1, 2, 3]]])
    engine.set_blocks_table_info(table, torch.tensor([[4, 4]]), wanted, 1)
    engine.run_async_prefetch_bs([70, 71], [4, 4], [0, 1], None, 0)
    assert engine.obtain_miss_idxs() == [9, 7]
    assert sorted(engine.obtain_load_blocks()) == [11, 12]
    assert count.tolist() == [[4, 4]] and blocks[0, 1].tolist() == [20, 21, 22, 23]
    assert there.tolist() == [[[1, 1, 0, 0], [1, 1, 1, 1]]]  # logical 0, 3, 7, 9
    assert blocks[0, 0, [0, 1]].tolist() == [10, 13] and set(blocks[0, 0].tolist()) == {
        10,
        11,
        12,
        13,
    }
    engine.run_async_prefetch_bs([70], [4], [0], None, 0)  # all of it is on its way or there
    assert engine.obtain_miss_idxs() == [] and there[0, 0].tolist() == [1, 1, 1, 1]
    engine.finish_request(70)
    engine.run_async_prefetch_bs([70], [4], [0], None, 0)
    assert engine.obtain_miss_idxs() == [9, 7]
    with pytest.raises(UnsupportedError, match="is_python_load=True"):
        GSAPrefetchEngineC(blocks, there, count, count, [], is_python_load=False)


# GSA On-Device
# --------------------------------------------------------------------------------------------------


def test_the_encoder_of_the_book() -> None:
    encoder = HashEncoder(
        input_dim=16, hash_bits=32, dtype=torch.float32, device=torch.device("cpu")
    )
    x = torch.randn(3, 5, 16)
    codes = encoder.compute_hash(x)
    assert (codes.shape, codes.dtype, encoder.hash_numbers) == ((3, 5, 4), torch.uint8, 4)
    bits = (x @ encoder.hash_weights > 0).view(3, 5, 4, 8)
    assert torch.equal(codes, (bits * encoder.bit_masks).sum(-1).to(torch.uint8))
    for function in (torch_hash_code, triton_hash_code):
        assert torch.equal(
            function(x.view(15, 16), encoder.hash_weights, encoder.bit_masks), codes.view(15, 4)
        )
    assert torch.equal(HashEncoder(16, 32).hash_weights, encoder.hash_weights)
    with pytest.raises(InvalidInputError, match="16 channels"):
        encoder.compute_hash(torch.zeros(1, 8))
    with pytest.raises(InvalidInputError, match="bits=12"):
        HashEncoder(16, 12)


def test_codes_go_to_their_slots_and_those_without_one_nowhere() -> None:
    cache = torch.zeros(3, 4, 2, 5, dtype=torch.uint8)
    codes = torch.randint(1, 256, (4, 2, 5), dtype=torch.uint8)
    found = reshape_and_cache_khash_triton(codes, torch.tensor([5, -1, 12, 0]), cache, block_size=4)
    assert found is cache
    assert torch.equal(cache[1, 1], codes[0]) and torch.equal(cache[0, 0], codes[3])
    assert int((cache > 0).sum()) == 20
    with pytest.raises(InvalidInputError, match="blocks of 4 tokens, not 128"):
        reshape_and_cache_khash_triton(codes, torch.tensor([0, 1, 2, 3]), cache)


def hamming(a: Tensor, b: Tensor) -> int:
    return sum(
        bin(int(x) ^ int(y)).count("1") for x, y in zip(a.flatten(), b.flatten(), strict=True)
    )


def test_distances_of_the_book() -> None:
    a, b = (
        torch.randint(0, 256, (3, 4), dtype=torch.uint8),
        torch.randint(0, 256, (6, 4), dtype=torch.uint8),
    )
    assert hamming_distance(a, b).tolist() == [[hamming(x, y) for y in b] for x in a]


@pytest.mark.parametrize("latent", [False, True])
def test_top_k_by_distance_of_the_book(latent: bool) -> None:
    size, heads = 4, 1 if latent else 2
    generator = torch.Generator().manual_seed(5)
    cache = torch.randint(0, 256, (32, size, heads, 4), dtype=torch.uint8, generator=generator)
    asked = torch.randint(
        0, 256, (2, 1, 3 if latent else heads, 4), dtype=torch.uint8, generator=generator
    )
    table = torch.randperm(32, generator=generator)[:20].int().view(2, 10)
    lens = torch.tensor([38, 14], dtype=torch.int32)
    found = cuda_hamming_topk(
        asked, cache, table, lens, 20, sink_token=4, recent_token=5, is_mla=latent
    )
    assert update_seq_lens(lens, 20, size).tolist() == [18, 14]
    near = []
    for block in table[0].tolist():
        per_token = []
        for token in cache[block]:
            pairs = (
                [hamming(q, token[0]) for q in asked[0, 0]]
                if latent
                else list(map(hamming, asked[0, 0], token))
            )
            per_token.append(sum(pairs) if latent else min(pairs))
        near.append(min(per_token))
    best = sorted(range(1, 8), key=lambda i: (near[i], i))[:2]  # 5 blocks, of which 3 are windows
    assert found[0, :5].tolist() == [table[0, i].item() for i in (0, *sorted(best), 8, 9)]
    assert found[1, :4].tolist() == table[1, :4].tolist()  # short: as it is
    with pytest.raises(InvalidInputError, match="uint8"):
        cuda_hamming_topk(asked.float(), cache, table, lens, 20)


@pytest.mark.parametrize(
    ("length", "topk", "new"),
    [(100, 64, 52), (64, 64, 64), (10, 64, 10), (97, 64, 49), (112, 64, 64), (65, 64, 49)],
)
def test_lengths_are_shortened_by_whole_blocks(length: int, topk: int, new: int) -> None:
    """Not min(T, topk), as the book has it: the last block stays as full as it was."""
    assert update_seq_lens(torch.tensor([length]), topk, 16).tolist() == [new]


def test_codes_of_queries() -> None:
    method = GSAOnDevice(WORKER, {"hash_bits": 32})
    with pytest.raises(InvalidInputError, match="setup"):
        method.hash_code(query=torch.zeros(1, 4, DIM))
    method.setup(Geometry(BLOCK, HEADS, DIM), ["layers.0"], 8)
    q = torch.randn(3, HEADS * GROUP, DIM)
    codes = method.hash_code(query=q)
    assert isinstance(codes, Tensor) and codes.shape == (3, HEADS, 4)
    assert torch.equal(codes, method.selector.encode(0, q.view(3, HEADS, GROUP, DIM).mean(2)))
    with pytest.raises(InvalidInputError, match="query="):
        method.hash_code(nope=q, rope=q)
    latent = GSAOnDevice(WORKER, {})
    latent.setup(Geometry(BLOCK, 1, 24, rope_dim=8), ["layers.0"], 8)
    nope, rope = torch.randn(3, 6, 16), torch.randn(3, 6, 8)
    both = latent.hash_code(nope=nope, rope=rope, reduction_head_num=2)
    assert isinstance(both, tuple)
    assert (both[0].shape, both[1].shape) == ((3, 3, 2), (3, 3, 1))
    mean = torch.cat([nope, rope], -1).view(3, 2, 3, 24).mean(1)  # heads h and h + 3
    assert torch.equal(torch.cat(both, -1), latent.selector.encode(0, mean))
    with pytest.raises(InvalidInputError, match="nope= and rope="):
        latent.hash_code(query=q)


# KVStar
# --------------------------------------------------------------------------------------------------


def test_the_state_of_a_request_of_kvstar() -> None:
    assert ReqMeta("a").stage is ReqStage.PREFILL
    decoding = ReqMeta("a", num_output_tokens=3)
    assert (decoding.step, decoding.stage) == (3, ReqStage.DECODE)
