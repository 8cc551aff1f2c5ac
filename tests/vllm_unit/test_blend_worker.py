"""Blend's worker side over real models of vLLM in this process, their CPU attention and pages:
chunks of stored prompts become the KV of another prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sparse_parts import sparse_engine
from tiny_models import BLOCKS, KEYS, SIZE, Loaded, load_model, write_model
from torch import Tensor

from ucm.errors import InvalidInputError, UnsupportedError
from ucm.integration.vllm.attention import registering
from ucm.integration.vllm.attention.spec import SparseFullAttentionSpec
from ucm.integration.vllm.connector.metadata import (
    Blend,
    Blended,
    BlendHit,
    UCMConnectorMetadata,
)
from ucm.integration.vllm.connector.worker import blend as subject
from ucm.integration.vllm.connector.worker.blend import BlendWorker, pieces_of_rows

RECALL = Path(__file__).parents[2] / "benches" / "quality" / "weights"
ROWS = 4
#: Blocks of the reference, of stored prompts, and of the blended request.
DENSE, STORED, OWN = range(1, 17), range(17, 33), [*range(40, 34, -1), *range(41, 51)]

pytestmark = pytest.mark.usefixtures("one_rank")


def settings(**given: Any) -> Any:
    defaults: dict[str, Any] = {"select": "union", "ratio": 0.15, "head_tokens": 2}
    defaults |= {"compute_meta": {}, "criterion": "k_l1", "hkvd_threshold": None}
    return SimpleNamespace(**(defaults | given))


class Rig(Loaded):
    """A model with its KV cache, and its worker."""

    @cached_property
    def parts(self) -> subject.Parts:
        return subject.parts_of(self.config, self.kv_cache, self.caches)

    def worker(self, **given: Any) -> BlendWorker:
        worker = BlendWorker(settings(**given), self.config, self.kv_cache)
        worker.use(self.parts)  # as it finds them, in half a second
        return worker

    @cached_property
    def dense(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits of the prompt's suffix, and all keys and values, computed densely."""
        logits = self.prefill(PROMPT_TOKENS, DENSE)[END:]
        return logits, self.kv(DENSE, END)

    def kv(self, table: Sequence[int], tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a prompt, by layer."""
        parts = self.parts
        places = torch.arange(tokens)
        slots = torch.tensor(list(table))[places // SIZE] * SIZE + places % SIZE
        return [parts.pages.read(layer.attention.kv_cache, slots) for layer in parts.layers]

    @cached_property
    def stored(self) -> list[list[Tensor]]:
        """The pages of each chunk in its stored prompt, by layer."""
        found = []
        for number, (start, end, source) in enumerate(CHUNKS):
            before = tokens_of(source, 100 + number)
            self.prefill([*before, *PROMPT_TOKENS[start:end]], STORED)
            blocks = range(source // SIZE, (source + end - start - 1) // SIZE + 1)
            own = [STORED[block] for block in blocks]
            found.append([cache[own] for cache in self.caches.values()])
        return found


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def rig(request: Any, tmp_path_factory: pytest.TempPathFactory, engines: Any) -> Rig:
    """A tiny model of random weights, or the recall model."""
    work, model = tmp_path_factory.mktemp("blend"), RECALL
    if request.param in KEYS:
        model = write_model(work / request.param, engines.LLAMA | KEYS[request.param])
    config = sparse_engine(
        engines,
        model,
        work,
        {"dtype": "float32", "max_num_seqs": ROWS, "max_model_len": 2048},
        blend={"min_hit_blocks": 1},
    )
    return load_model(engines, config, Rig)


# A prompt
# --------------------------------------------------------------------------------------------------

EXACT, END, PROMPT = 32, 320, 352
#: Chunks: place, end, and where they stand in a stored prompt of their own. Between the first two
#: are tokens that no prompt has; the last two lie next to each other.
CHUNKS = ((71, 140, 37), (150, 230, 100), (230, 310, 0))
ALL = {"reused": 229, "missed": 59}


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT_TOKENS = tokens_of(PROMPT, 0)


def load(rig: Rig) -> tuple[BlendHit, ...]:
    """As a load does: the blocks of stored prompts, one after the other behind the exact prefix."""
    for cache in rig.caches.values():
        cache[list(OWN)] = torch.randn(len(OWN), *cache.shape[1:]) * 3  # of an earlier request
    rig.prefill(PROMPT_TOKENS[:EXACT], OWN)
    hits, at = list[BlendHit](), EXACT // SIZE
    for (start, end, source), stored in zip(CHUNKS, rig.stored, strict=True):
        own = tuple(OWN[at : at + len(stored[0])])
        for cache, pages in zip(rig.caches.values(), stored, strict=True):
            cache[list(own)] = pages
        hits.append(BlendHit(start, end, source, own))
        at += len(own)
    return tuple(hits)


def work(hits: tuple[BlendHit, ...], *, asked: int = 12, **changed: Any) -> Blend:
    ids = np.array([*PROMPT_TOKENS[EXACT:END], *PROMPT_TOKENS[PROMPT - asked :]], np.uint32)
    table = tuple(OWN[: END // SIZE])
    return replace(Blend("r", table, EXACT, END, hits, ids, asked, PROMPT - asked), **changed)


@dataclass
class Made:
    """What a blend left."""

    done: Blended
    kv: list[tuple[Tensor, Tensor]]
    logits: Tensor
    dense: list[tuple[Tensor, Tensor]]
    dense_logits: Tensor

    @property
    def error(self) -> float:
        """Relative error of all keys and values."""
        return max(
            _off(a, b)
            for own, right in zip(self.kv, self.dense, strict=True)
            for a, b in zip(own, right, strict=True)
        )

    def is_dense(self) -> None:
        assert self.error <= 1e-5
        assert _off(self.logits, self.dense_logits) <= 1e-5


def _off(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def blended(
    rig: Rig, worker: BlendWorker, error: AbstractContextManager[Any] | None = None, **changed: Any
) -> Made:
    """The prompt blended, and its suffix computed by vLLM; beside it the whole prompt densely."""
    dense_logits, dense = rig.dense
    hits = load(rig)
    blend = work(changed.pop("hits", hits), **changed)
    untouched = [block for block in range(BLOCKS) if block not in OWN[1 : END // SIZE]]
    before = {name: cache[untouched].clone() for name, cache in rig.caches.items()}
    with error or nullcontext():
        (done,) = worker.run([blend])
    for name, cache in rig.caches.items():  # the exact prefix, and blocks of others
        assert torch.equal(cache[untouched], before[name])
    kv = rig.kv(OWN, END)
    return Made(done, kv, rig.prefill(PROMPT_TOKENS, OWN, known=END), dense, dense_logits)


# The tests
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["union", "query", "epic", "hkvd"])
def test_all_tokens_computed_are_the_full_prefill(rig: Rig, select: str) -> None:
    made = blended(rig, rig.worker(select=select, ratio=1.0))
    made.is_dense()
    assert made.done == Blended(0, ALL["reused"], ALL["missed"])


@pytest.mark.parametrize("rig", ["qwen3", "qwen3_moe", "qwen2_moe", "mixtral"], indirect=True)
def test_other_models_are_computed_as_by_vllm(rig: Rig) -> None:
    """Whose keys are normed, or whose layers have experts, of which all tokens may share one."""
    for select in ("union", "hkvd"):
        blended(rig, rig.worker(select=select, ratio=1.0)).is_dense()
    made = blended(rig, rig.worker(ratio=0.3))
    assert 1e-3 < _off(made.logits, made.dense_logits) < 0.9


def test_none_computed_is_pure_reuse(rig: Rig) -> None:
    """Keys of layer 0, which depend on their token alone, are those of the right position."""
    made = blended(rig, rig.worker(ratio=0.0))
    assert made.done == Blended(ALL["reused"], 0, ALL["missed"])
    assert _off(made.kv[0][0], made.dense[0][0]) <= 1e-5
    assert _off(made.kv[0][1], made.dense[0][1]) <= 1e-5
    assert made.error > 1e-2
    last, right = made.kv[-1], made.dense[-1]
    start, end, source = CHUNKS[0]
    rig.prefill([*tokens_of(source, 100), *PROMPT_TOKENS[start:end]], STORED)
    stored = rig.kv(STORED, source + end - start)[-1][1][source:]
    assert torch.equal(last[1][start:end], stored) and not torch.equal(stored, right[1][start:end])


@pytest.mark.parametrize("select", ["union", "query", "hkvd"])
def test_the_error_falls_with_the_share(rig: Rig, select: str) -> None:
    found = [blended(rig, rig.worker(select=select, ratio=r)) for r in (0.0, 0.15, 0.5, 1.0)]
    errors = [_off(made.logits, made.dense_logits) for made in found]
    assert errors[0] > errors[1] > errors[2] > errors[3], errors
    computed = [made.done.computed for made in found]
    assert computed == [0, 34, 114, 229]


def test_few_tokens_at_once_give_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are as small as the engine's settings say; chosen tokens are more rows than it
    computes at once."""
    whole = blended(rig, rig.worker(ratio=0.3))
    monkeypatch.setattr(rig.config.scheduler_config, "max_num_batched_tokens", 7)
    small = blended(rig, rig.worker(ratio=0.3))
    assert small.done == whole.done
    assert _off(small.logits, whole.logits) <= 1e-5


def test_pieces_are_bounded_by_rows_and_tokens() -> None:
    places = torch.tensor([3, 4, 5, 9, 11, 12, 20, 21])
    pieces = [piece.tolist() for piece in pieces_of_rows(places, 2, 4)]
    assert pieces == [[3, 4, 5, 9], [11, 12, 20, 21]]
    assert [p.tolist() for p in pieces_of_rows(places, 1, 2)] == [
        [3, 4], [5], [9], [11, 12], [20, 21],
    ]  # fmt: skip
    assert not list(pieces_of_rows(places[:0], 2, 4))


def test_several_check_layers(rig: Rig) -> None:
    meta = {"model.layers.1.self_attn.attn": {"ratio": 0.4}, "model.layers.2": {"ratio": 0.2}}
    made = blended(rig, rig.worker(select="hkvd", compute_meta=meta))
    assert made.done == Blended(229 - 45, 45, ALL["missed"])
    for layer in (0, 1):  # all tokens were computed in layer 1 from exact ones
        assert _off(made.kv[layer][0], made.dense[layer][0]) <= 1e-5


def test_without_a_question_the_first_tokens_are_computed(rig: Rig) -> None:
    made = blended(rig, rig.worker(), asked=0)
    assert made.done.computed == 34


def test_without_hits_all_tokens_are_computed(rig: Rig) -> None:
    made = blended(rig, rig.worker(), hits=())
    made.is_dense()
    assert made.done == Blended(missed=END - EXACT)


class Planted:
    """An error in the call of this number, of layer 1."""

    def __init__(self, rig: Rig, *calls: int) -> None:
        self.calls, self.seen = calls, 0
        self._layer = rig.model.model.layers[1]

    def __enter__(self) -> Planted:
        self._handle = self._layer.register_forward_pre_hook(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _called(self, *_args: Any) -> None:
        self.seen += 1
        if self.seen - 1 in self.calls:
            raise RuntimeError("planted")


@pytest.mark.parametrize("call", [0, 1, 2, 7])
def test_an_error_in_the_middle_computes_all_tokens(rig: Rig, call: int) -> None:
    """The first call is the question's; then chosen tokens are computed, in pieces."""
    with_error = Planted(rig, call)
    made = blended(rig, rig.worker(ratio=0.3), with_error)
    assert with_error.seen > call + 1
    made.is_dense()
    assert made.done == Blended(0, ALL["reused"], ALL["missed"])


@pytest.mark.parametrize("write", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_while_keys_are_turned_computes_all_tokens(
    rig: Rig, write: int, ranks: int
) -> None:
    worker, writes = rig.worker(), []
    worker._total = (lambda own: own) if ranks == 2 else None

    class Failing:
        def __init__(self, pages: Any) -> None:
            self.read, self._write = pages.read, pages.write

        def write(self, *given: Any) -> None:
            writes.append(1)
            if len(writes) == write + 1:
                raise RuntimeError("planted")
            self._write(*given)

    assert worker._parts is not None
    worker._parts = replace(worker._parts, pages=Failing(worker._parts.pages))  # type: ignore[arg-type]
    made = blended(rig, worker)
    assert len(writes) == write + 1
    made.is_dense()


def test_wrong_hits_compute_all_tokens(rig: Rig) -> None:
    """Of blocks that are not the request's, before the exact end, or in another order."""
    (first, *rest) = load(rig)
    for wrong in (
        replace(first, blocks=(60, *first.blocks[1:])),
        replace(first, blocks=first.blocks[1:]),
        replace(first, start=10),
        replace(first, end=rest[0].start + 1),
        replace(first, source=-1),
    ):
        made = blended(rig, rig.worker(), hits=(wrong, *rest))
        made.is_dense()


def test_a_second_error_ends_the_engine(rig: Rig) -> None:
    with Planted(rig, 0, 1), pytest.raises(RuntimeError, match="planted"):
        rig.worker().run([work(load(rig))])


def test_ranks_that_compute_together_do_not_go_on_alone(rig: Rig) -> None:
    worker = BlendWorker(settings(), rig.config, rig.kv_cache, lambda scores: scores)
    worker.register_kv_caches(rig.caches)
    hits = load(rig)
    with Planted(rig, 0), pytest.raises(RuntimeError, match="planted"):
        worker.run([work(hits)])


def test_if_another_rank_cannot_turn_its_keys_all_compute_all_tokens(rig: Rig) -> None:
    worker = rig.worker()
    worker._total = lambda own: own + 1
    made = blended(rig, worker)
    made.is_dense()
    assert made.done == Blended(0, ALL["reused"], ALL["missed"])


def test_scores_are_those_of_all_ranks(rig: Rig) -> None:
    """A second rank that gives all its attention to the end of a chunk."""
    other = torch.zeros(END, dtype=torch.int64)
    other[196:230] = 1 << 60
    worker = BlendWorker(
        settings(select="query"),
        rig.config,
        rig.kv_cache,
        lambda own: own + other if len(own) == END else own,  # the second one has not failed
    )
    worker.register_kv_caches(rig.caches)
    made = blended(rig, worker)
    alone = blended(rig, rig.worker(select="query"))
    assert made.done == alone.done == Blended(195, 34, ALL["missed"])
    for layer, chosen in ((made.kv[1][1], True), (alone.kv[1][1], False)):
        start, end, source = CHUNKS[1]
        rig.prefill([*tokens_of(source, 101), *PROMPT_TOKENS[start:end]], STORED)
        stored = rig.kv(STORED, source + end - start)[1][1][source:]
        computed = (layer[start:end] != stored).flatten(1).any(dim=1)
        assert (computed.tolist() == [place >= 196 for place in range(start, end)]) == chosen


@pytest.mark.parametrize(
    "wrong",
    [
        {"table": tuple(OWN[: END // SIZE - 1])},
        {"table": (*OWN[: END // SIZE - 1], OWN[3])},
        {"exact": 31},
        {"tokens": np.zeros(7, np.uint32)},
    ],
)
def test_a_request_that_cannot_be_computed_ends_the_engine(rig: Rig, wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        rig.worker().run([work((), **wrong)])


def test_several_requests_of_a_step(rig: Rig) -> None:
    """The second has no exact prefix, and lies where the stored prompts were."""
    worker = rig.worker()
    ids = np.array(PROMPT_TOKENS[:96], np.uint32)
    second = Blend("s", tuple(DENSE[:3]), 0, 96, (), ids, 0, 96)
    alone = blended(rig, worker)
    hits = load(rig)
    done = worker.run([work(hits), second])
    assert done == [alone.done, Blended(missed=96)]
    assert rig.kv(OWN, END)[-1][0].equal(alone.kv[-1][0])
    assert _off(rig.kv(DENSE, 96)[-1][0], alone.dense[-1][0][:96]) <= 1e-5


@pytest.mark.parametrize("rig", ["qwen2"], indirect=True)
def test_it_computes_what_the_harness_does(rig: Rig) -> None:
    """The figures of the page hold for an engine: a prompt of the recall model with chunks of
    stored prompts, its tokens chosen by the same rules, gives the same logits."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "sparse"))
    import blend_harness as harness

    model = harness.Recall()
    case = harness.case_of(model, 3, cut=False, contextual=True)
    end, own = len(case.context), list(range(1, 1 + -(-len(case.tokens) // SIZE)))
    ids = np.array([*case.context, *case.suffix[-harness.QUESTION_TOKENS :]], np.uint32)
    asked = len(ids) - end
    for select, ratio in (("union", 0.15), ("epic", 0.05), ("query", 0.3), ("union", 0.0)):
        hits, first = [], 0
        for hit in case.hits:
            blocks = range(first, first + hit.tokens // SIZE)
            hits.append(BlendHit(hit.start, hit.end, hit.source, tuple(own[b] for b in blocks)))
            first = blocks.stop
        slots = torch.tensor(own)[: end // SIZE, None] * SIZE + torch.arange(SIZE)
        for layer, (keys, values) in zip(rig.parts.layers, case.cached, strict=True):
            rig.parts.pages.write(layer.attention.kv_cache, slots.flatten(), keys, values)
        blend = Blend(
            "r",
            tuple(own[: end // SIZE]),
            0,
            end,
            tuple(hits),
            ids,
            asked,
            len(case.tokens) - asked,
        )
        (done,) = rig.worker(select=select, ratio=ratio).run([blend])
        expected = harness.blend(model, case, select, ratio)
        assert done == Blended(end - len(expected.chosen), len(expected.chosen))
        logits = rig.prefill(case.tokens.tolist(), own, known=end)
        assert _off(logits, expected.logits) <= 1e-4


# The connector
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def connector(rig: Rig) -> Iterator[Any]:
    """The worker side of the engine's connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from ucm.integration.vllm.connector import UCMConnector

    made = UCMConnector(rig.config, KVConnectorRole.WORKER, rig.kv_cache)
    made.register_kv_caches(rig.caches)
    yield made
    made.shutdown()


def test_the_connector_blends_before_the_step_and_reports(rig: Rig, connector: Any) -> None:
    blend = work(load(rig))
    connector.bind_connector_metadata(UCMConnectorMetadata(blends=[blend]))
    connector.start_load_kv(None)
    news = connector.build_connector_worker_meta()
    assert news.ranks[0].handshake.no_blend == ""
    assert news.blended == [Blended(195, 34, ALL["missed"])]
    logits = rig.prefill(PROMPT_TOKENS, OWN, known=END)
    assert 0 < _off(logits, rig.dense[0]) < 0.5
    connector.clear_connector_metadata()
    connector.bind_connector_metadata(UCMConnectorMetadata())
    connector.start_load_kv(None)
    assert connector.build_connector_worker_meta() is None


def test_a_connector_that_is_given_up_blends(rig: Rig, connector: Any) -> None:
    """vLLM would run the request with foreign KV. An error that leaves it so reaches vLLM."""
    plan = UCMConnectorMetadata(given_up="a test", blends=[work(())])
    connector.bind_connector_metadata(plan)
    assert connector.given_up
    connector.start_load_kv(None)
    assert _off(rig.kv(OWN, END)[0][0][EXACT:], rig.dense[1][0][0][EXACT:]) <= 1e-5
    with Planted(rig, 0, 1), pytest.raises(RuntimeError, match="planted"):
        connector.start_load_kv(None)
    connector._blend_worker = None
    with pytest.raises(UnsupportedError):
        connector.start_load_kv(None)


def test_the_backend_computes_as_vllms(rig: Rig) -> None:
    """With its own builder and kernels, and a manager that knows the exact tokens."""
    from vllm.config import set_current_vllm_config

    own = registering.vllms_own("CPU_ATTN")
    found = rig.parts.layers[0].attention.get_attn_backend()
    assert found is not own and found.get_name() == "CPU_ATTN"
    assert found.ucm_packs_like is own and found.get_builder_cls() is own.get_builder_cls()
    spec = rig.kv_cache.kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, SparseFullAttentionSpec) and spec.beside_bytes == 0
    with set_current_vllm_config(rig.config):
        assert registering.CPU_MLA is registering.vllms_own("CPU_MLA")


# What is refused
# --------------------------------------------------------------------------------------------------


def test_other_models_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank logs nothing of it: the scheduler side does, once."""
    from vllm.v1.attention import backend as metadata_of_vllm

    worker = BlendWorker(settings(), rig.config, rig.kv_cache)
    assert worker.why_not

    def refused() -> str:
        worker.register_kv_caches(rig.caches)
        with pytest.raises(UnsupportedError):
            worker.run([work(())])
        return worker.why_not

    with monkeypatch.context() as patch:
        patch.setattr(rig.config, "lora_config", SimpleNamespace())
        assert "enable_lora" in refused()
    attention = rig.model.model.layers[1].self_attn
    with monkeypatch.context() as patch:
        patch.setattr(type(rig.config.model_config), "is_multimodal_model", True)
        assert "multimodal" in refused()
    for name, value in (("logits_soft_cap", 30.0), ("sinks", torch.zeros(4))):
        with monkeypatch.context() as patch:
            patch.setattr(attention.attn.impl, name, value, raising=False)
            assert "sinks, soft cap" in refused()
    spec = rig.kv_cache.kv_cache_groups[0].kv_cache_spec
    for changed, text in (
        (replace(spec, dtype=torch.float8_e5m2), "quantised KV"),
        (replace(spec, block_size=2 * SIZE), "several shapes"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(subject, "layer_specs", lambda _, changed=changed: [spec, changed])
            assert text in refused()
    with monkeypatch.context() as patch:
        own = registering.vllms_own("CPU_ATTN")
        for layer in rig.model.model.layers:
            patch.setattr(layer.self_attn.attn, "get_attn_backend", lambda: own)
        assert "runs the attention backend CPU_ATTN" in refused()
    with monkeypatch.context() as patch:
        patch.setattr(subject, "common_block_size", lambda *_: 16)
        assert "write --block-size 16" in refused()
    with monkeypatch.context() as patch:
        patch.setattr(attention.attn.impl, "alibi_slopes", torch.ones(4))
        assert "all of their context" in refused()
    with monkeypatch.context() as patch:
        patch.setattr(subject, "KNOWN", ("qwen3",))
        assert "not known" in refused()
    with monkeypatch.context() as patch:  # another version of vLLM
        patch.delattr("vllm.forward_context.set_forward_context")
        assert "set_forward_context" in refused()
    with monkeypatch.context() as patch:
        patch.setattr(metadata_of_vllm, "CommonAttentionMetadata", lambda **_: 1 // 0)
        assert "zero" in refused()
    rotary = attention.rotary_emb
    del attention.rotary_emb
    assert "rotary" in refused()
    attention.rotary_emb = rotary
    worker.register_kv_caches(rig.caches)
    assert not worker.why_not
    assert not [each for each in caplog.records if each.name.startswith("ucm")]
