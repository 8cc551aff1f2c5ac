"""A user's method from the configuration to the end of an engine, between vLLM's own scheduler and
vLLM's own glue of a worker: every hook of :class:`~ucm.sparse.base.UcmSparseBase` is called, in the
order and with what is written there, and others get only what the method calls exact."""

from __future__ import annotations

import inspect
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_parts import BLOCK, HEADS, KV_HEADS, NAMES, SIZE, Rig, Rows, SparseEngine
from torch import Tensor

from ucm.config import sparse as sections
from ucm.errors import ConfigError
from ucm.integration.vllm.attention import setup
from ucm.integration.vllm.attention.host import SparseHost, active_host, set_active_host
from ucm.integration.vllm.connector import factory
from ucm.integration.vllm.connector.connector import UCMConnector
from ucm.integration.vllm.connector.identity.weights import WeightsReport
from ucm.integration.vllm.connector.scheduler.readiness import OFF, OPEN
from ucm.integration.vllm.connector.worker import sparse as worker_sparse
from ucm.sparse import selector
from ucm.sparse.base import (
    ALL_TOKENS,
    INVALID_SLOT,
    UcmSparseBase,
    UcmSparseMetadata,
    UcmSparseRole,
)
from ucm.sparse.method import BlockSparse, method_for
from ucm.sparse.selector import BlockSelector, register_selector
from ucm.sparse.state import get_ucm_sparse, has_ucm_sparse, set_ucm_sparse

Quest = method_for("Quest")

pytestmark = pytest.mark.timeout(300)

#: What a method may override.
HOOKS = tuple(
    name
    for name, member in vars(UcmSparseBase).items()
    if inspect.isfunction(member) and not name.startswith("_") and name != "overrides"
)
#: Calls of a worker's side in each layer, and around them.
LAYER = (
    "layer_begin",
    "attention_begin",
    "attention_finished",
    "ffn_begin",
    "ffn_finished",
    "layer_finished",
)
BEGIN, END = (
    ("bind_sparse_metadata", "execute_begin"),
    ("execute_finished", "clear_sparse_metadata"),
)


@dataclass
class Planned(UcmSparseMetadata):
    """What the scheduler side sends to the worker side."""

    step: int
    requests: list[str]


class Looking(UcmSparseBase):
    """A user's method that changes nothing."""

    def __init__(self, vllm_config: Any, role: UcmSparseRole) -> None:
        super().__init__(vllm_config, role)
        #: Every call of a hook: its name, its arguments by their names, and what was bound then.
        self.calls: list[tuple[str, dict[str, Any], UcmSparseMetadata | None]] = []

    def build_sparse_meta(
        self,
        scheduler_output: Any,
        requests: Any,
        input_batch: Any = None,
        attn_metadata: Any = None,
    ) -> Planned:
        """The number of the step, and the live requests."""
        return Planned(self.names().count("build_sparse_meta"), list(requests))

    def exact_tokens(self, prefill_tokens: int) -> int:
        """It changes nothing."""
        return ALL_TOKENS

    def names(self) -> list[str]:
        """Hooks in the order of their calls; how often vLLM reads the exact tokens is vLLM's
        affair."""
        return [name for name, _, _ in self.calls if name != "exact_tokens"]

    def given(self, hook: str) -> list[dict[str, Any]]:
        """The arguments of each call of a hook."""
        return [arguments for name, arguments, _ in self.calls if name == hook]


def recorded(kind: type[UcmSparseBase], hook: str) -> Callable[..., Any]:
    """A hook as it is, and a record of its calls."""
    real: Callable[..., Any] = getattr(kind, hook)
    signature = inspect.signature(real)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        self.calls.append((hook, given, self._get_sparse_metadata()))
        return real(self, *args, **kwargs)

    return call


#: Named in the configuration, as this module is: it has every hook of its own, and none of another
#: one's.
Recording = type("Recording", (Looking,), {hook: recorded(Looking, hook) for hook in HOOKS})


class Slots(Quest):
    """A user's method over one of ours, which says by itself how much of a request stays on the
    device."""

    answer = INVALID_SLOT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[Any] = []

    def estimate_num_slots_sparsed(self, request: Any) -> int:
        """What the test sets."""
        self.asked.append(request)
        return self.answer


class Writing(UcmSparseBase):
    """A user's method that writes into what attention gave, of which the KV of the next layer is
    made."""

    def attention_finished(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_output: Any,
        layer_name: Any,
        forward_context: Any,
        phase: Any = None,
    ) -> None:
        """Twice as much."""
        attn_output *= 2


class WritingAnswers(Writing):
    """One that says that it leaves prompts alone."""

    def exact_tokens(self, prefill_tokens: int) -> int:
        """Those of the prompt."""
        return prefill_tokens


class Watching(Writing):
    """One that declares that it changes nothing."""

    def exact_tokens(self, prefill_tokens: int) -> int:
        """All."""
        return ALL_TOKENS


class Norm(torch.nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, residual


class Decoder(torch.nn.Module):
    """A layer of the usual form."""

    def __init__(self, attend: Callable[[], None]) -> None:
        super().__init__()
        self.attend = attend
        self.post_attention_layernorm = Norm()

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self.attend()
        found: tuple[Tensor, Tensor] = self.post_attention_layernorm(hidden, residual)
        return found


class Model(torch.nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers: list[Decoder]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, positions: Tensor) -> None:
        hidden = residual = torch.zeros(len(positions), 1)
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)


class Unchanged:
    """The weights of a model that has none, in the place of :class:`.weights.ModelMemory`."""

    def __init__(self, *args: Any) -> None:
        pass

    def remember(self) -> None:
        pass

    def compare(self, generation: int) -> WeightsReport:
        return WeightsReport(generation, True, None, 1)


#: A store in the directory of the test, whatever else lies on its disk and however busy the machine
#: is.
STORING = {
    "enable_prefix_cache": True,
    "identity": {"weights": "declared:none"},
    "storage_capacity": "1GiB",
    "free_space_floor": 0,
    "deadlines": {"lookup_ms": 60_000, "probe_s": 60.0, "dump_s": 120.0, "shutdown_s": 15.0},
}


class Engine(SparseEngine):
    """Our connector's halves in an engine of vLLM's that runs one request at a time; its model is
    attention. Without keys of a store nothing is stored, and only what is of sparse attention is
    there."""

    def __init__(
        self,
        engines: Any,
        tiny: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        method: str,
        **keys: Any,
    ) -> None:
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler

        super().__init__(
            engines,
            tiny,
            tmp_path,
            ucm_sparse_module_path=__name__,
            ucm_sparse_method=method,
            **({"enable_prefix_cache": False} | keys),
        )
        one = SimpleNamespace(rank_in_group=0, world_size=1)
        for group in ("get_tp_group", "get_pp_group"):
            monkeypatch.setattr(parallel_state, group, lambda: one)
        monkeypatch.setattr(factory, "ModelMemory", Unchanged)
        self.kept = Rows.of([31 * BLOCK], [1])
        self.rig = Rig(self.config, None, self.kept)
        self.layers: dict[str, Any] = self.rig.layers
        for layer in self.layers.values():
            layer.get_attn_backend = lambda: self.backend
        self.config.compilation_config.static_forward_context = dict(self.layers)
        self.worker_kv_cache.num_blocks = self.rig.rows.blocks  # as many as its tensors have
        # In the order in which vLLM makes them where both are in one process.
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.worker_kv_cache
        )
        assert isinstance(self.worker, UCMConnector)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.worker)
        self.worker.register_kv_caches(
            {name: layer.kv_cache for name, layer in self.layers.items()}
        )
        self.config.cache_config.num_gpu_blocks = self.kv_cache.num_blocks
        unused: Any = SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda _: False)
        self.scheduler = Scheduler(self.config, self.kv_cache, unused, BLOCK, hash_block_size=BLOCK)
        self.connector: UCMConnector = self.scheduler.connector
        self.model = Model(
            [Decoder(lambda layer=layer: self._attend(layer)) for layer in self.layers.values()]
        )
        self.outputs: list[Tensor] = []  # of the attention of each layer, of the last step

    @property
    def methods(self) -> tuple[Any, Any]:
        """The method on the scheduler's side, and on the worker's."""
        scheduler, worker = self.connector._sparse_scheduler, self.worker._sparse_worker
        assert scheduler is not None
        assert worker is not None
        return scheduler.method, worker.method

    def step(self) -> Any:
        """Plan a step, compute it in the other process, and take its token."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        output = self.scheduler.schedule()
        sent = pickle.loads(pickle.dumps(output))  # noqa: S301 - made here
        names = list(sent.num_scheduled_tokens)
        metadata = None
        for name in names:
            self.rig.rows = self._rows(name, sent.num_scheduled_tokens[name])
            self.rig.metadata = self.rig._metadata()
            metadata = dict.fromkeys(self.layers, self.rig.metadata)
        self.outputs = []
        glue = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(sent)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(metadata, self.config),
            glue as news,
        ):
            if names:
                self.model(torch.zeros(sum(self.rig.rows.counts)))
        self.ended(output, news)
        return output

    def step_until(self, so: Callable[[], bool], what: str) -> None:
        """Steps, of which one without requests lets others work."""
        end = time.monotonic() + 120
        while not so():
            assert time.monotonic() < end, f"never: {what}"
            self.step()

    def ended(self, output: Any, news: Any = None) -> None:
        """A step was computed, and gave each of its requests a token."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, [[5] for _ in names]
        )
        made.kv_connector_output = news
        self.scheduler.update_from_output(output, made)

    def _rows(self, name: str, count: int) -> Rows:
        """A request's tokens so far, of which the last ones are computed now."""
        tokens, kept = self.scheduler.requests[name].num_computed_tokens, self.kept
        table = torch.tensor(
            self.scheduler.kv_cache_manager.get_block_ids(name)[0], dtype=torch.int32
        )
        queries = torch.randn(count, HEADS, SIZE, generator=torch.Generator().manual_seed(tokens))
        return Rows([kept.keys[0][:tokens]], [kept.values[0][:tokens]], [queries], table[None])

    def _attend(self, layer: Any) -> None:
        query, keys, values, slots = self.rig.rows.step()
        output = torch.zeros_like(query)
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        layer.impl.forward(layer, query, keys, values, layer.kv_cache, self.rig.metadata, output)
        self.outputs.append(output)

    def shutdown(self) -> None:
        """As vLLM ends an engine."""
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def start(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Makes an engine with a method of this module, which ends with the test."""
    made: list[Engine] = []

    def make(method: str, **keys: Any) -> Engine:
        made.append(Engine(engines, tiny, tmp_path, monkeypatch, method, **keys))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
    set_active_host(None)
    set_ucm_sparse(None)


def test_every_hook_is_called_in_its_order(start: Callable[..., Engine]) -> None:
    """A prompt, two tokens, the end of the request and of the engine. One hook is asked of methods
    that keep blocks elsewhere alone: it is the next test's."""
    engine = start("Recording")
    scheduler, worker = engine.methods
    assert (scheduler.role, worker.role) == (UcmSparseRole.SCHEDULER, UcmSparseRole.WORKER)
    assert scheduler._vllm_config is worker._vllm_config is engine.config
    assert get_ucm_sparse() is worker
    prompt = list(range(3, 73))
    request = engine.request(prompt, "a", max_tokens=3)
    engine.scheduler.add_request(request)
    outputs = [engine.step() for _ in range(3)]
    assert not engine.scheduler.requests
    outputs.append(engine.step())
    engine.shutdown()
    before = list(worker.calls)
    engine.model(torch.zeros(1))
    assert worker.calls == before, "hooks still hang in the model"
    planned = ["build_sparse_meta"]
    begins = ["request_begin", "update_state_after_alloc"]
    assert scheduler.names() == [
        *begins,
        *3 * planned,
        "request_finished_in_scheduler",
        *planned,
        "close",
    ]
    step = [*BEGIN, *len(NAMES) * LAYER, *END]
    told = ["register_kv_caches", *3 * step, "request_finished_in_worker", *BEGIN, *END]
    assert worker.names()[: len(told)] == told
    assert set(worker.names()[len(told) :]) == {"close"}
    assert scheduler.given("exact_tokens")
    assert {name for name, _, _ in scheduler.calls + worker.calls} == {*HOOKS} - {
        "estimate_num_slots_sparsed"
    }
    # On the scheduler's side.
    assert [list(given["prompt_token_ids"]) for given in scheduler.given("request_begin")] == [
        prompt
    ]
    (given,) = scheduler.given("update_state_after_alloc")
    assert given["request"] is request
    assert given["num_blocks"] == 3
    assert [given["scheduler_output"] for given in scheduler.given("build_sparse_meta")] == outputs
    for hook in ("request_begin", "request_finished_in_scheduler"):
        assert [given["request_id"] for given in scheduler.given(hook)] == ["a"]
    assert not has_ucm_sparse()
    assert active_host() is None


def test_hooks_of_a_worker_get_their_arguments(start: Callable[..., Engine]) -> None:
    engine = start("Recording")
    _, worker = engine.methods
    engine.scheduler.add_request(engine.request(list(range(3, 73)), "a", max_tokens=2))
    (given,) = worker.given("register_kv_caches")
    assert {name: cache.data_ptr() for name, cache in given["kv_caches"].items()} == {
        name: layer.kv_cache.data_ptr() for name, layer in engine.layers.items()
    }
    for number, (tokens, phase) in enumerate([(70, "prefill"), (1, "decode")], start=1):
        worker.calls.clear()
        output = engine.step()
        told = Planned(number, ["a"])
        assert [given["metadata"] for given in worker.given("bind_sparse_metadata")] == [told]
        assert all(
            bound == told for name, _, bound in worker.calls if name != "bind_sparse_metadata"
        )
        (given,) = worker.given("execute_begin")
        assert (
            given["scheduler_output"].num_scheduled_tokens
            == output.num_scheduled_tokens
            == {"a": tokens}
        )
        assert given["scheduler_output"].total_num_scheduled_tokens == tokens
        query, keys, values, _ = engine.rig.rows.step()
        expected = engine.rig.rows.attended([None])
        for hook in ("attention_begin", "attention_finished"):
            assert [given["layer_name"] for given in worker.given(hook)] == list(NAMES)
            for given in worker.given(hook):
                assert given["phase"] == phase
                assert given["query"].shape == (tokens, HEADS, SIZE) and torch.equal(
                    given["query"], query
                )
                assert given["key"].shape == (tokens, KV_HEADS, SIZE) and torch.equal(
                    given["key"], keys
                )
                assert torch.equal(given["value"], values)
                metadata = given["forward_context"].attn_metadata[given["layer_name"]]
                assert metadata is not engine.rig.metadata
                assert torch.equal(metadata.block_table, engine.rig.metadata.block_table)
        for given, output in zip(worker.given("attention_finished"), engine.outputs, strict=True):
            assert torch.allclose(given["attn_output"], expected, atol=1e-5)
            assert torch.equal(given["attn_output"], output)
    assert worker._get_sparse_metadata() is None
    worker.calls.clear()
    engine.step()
    assert [given["request_id"] for given in worker.given("request_finished_in_worker")] == ["a"]
    assert [given["metadata"] for given in worker.given("bind_sparse_metadata")] == [Planned(3, [])]


@pytest.mark.parametrize(("answer", "leave"), [(7 * BLOCK, 21 - 4), (INVALID_SLOT, 0)])
def test_with_offload_a_users_method_decides_how_much_stays_on_the_device(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, answer: int, leave: int
) -> None:
    """By vLLM's manager, through the planner that our connector gives it, once its prompt is
    computed."""
    monkeypatch.setattr(Slots, "answer", answer)
    engine = start(
        "Slots", ucm_sparse_config={"Quest": {"ratio": 0.3, "min_tokens": 0, "offload": True}}
    )
    method, _ = engine.methods
    sparse = engine.connector._sparse_scheduler
    assert sparse is not None
    assert sparse.offload is not None
    sparse.offload.stored = lambda _request: [bytes(16)] * 28  # what the half that stores says
    request = engine.request([at % 500 for at in range(20 * BLOCK)], "a")
    engine.scheduler.add_request(request)
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 20 * BLOCK}
    assert not method.asked
    engine.ended(output)
    plan = engine.scheduler.schedule().kv_connector_metadata.sparse
    assert method.asked == [request]
    assert sum(len(change.blocks) for change in plan.offloaded) == leave


def test_a_method_that_is_no_more_the_one_of_its_process_is_closed_by_its_host() -> None:
    method = Recording(None, UcmSparseRole.WORKER)
    SparseHost(method, {}).close()
    assert method.names() == ["close"]


@pytest.mark.parametrize(
    ("method", "blocks"), [("Writing", 0), ("WritingAnswers", 2), ("Watching", 4)]
)
def test_other_connectors_get_the_exact_tokens_of_a_users_method(
    start: Callable[..., Engine], method: str, blocks: int
) -> None:
    """From the store and from vLLM's prefix cache: of one that has a hook of its own and says
    nothing, nothing. The request has two full blocks of its prompt, and two more with its
    answer."""
    engine = start(method, **STORING)
    half = engine.connector._scheduler
    assert half is not None
    engine.step_until(lambda: half.readiness.phase in (OPEN, OFF), "the store is open")
    assert half.readiness.phase == OPEN, half.readiness.why_off
    request = engine.request(list(range(3, 73)), "a", max_tokens=70)
    engine.scheduler.add_request(request)
    engine.step_until(lambda: not engine.scheduler.requests, "the request has ended")
    assert (request.num_tokens - 1) // BLOCK == 4
    engine.step_until(
        lambda: not (half.has_pending_push_work or half.dumps.under_way),
        "what is offered is stored",
    )
    assert half.stats()["published_blocks"] == blocks
    again = engine.request([*request.all_token_ids, 1, 2, 3], "b")
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == blocks * BLOCK


def watched(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., int]) -> list[str]:
    """What a worker tries out or measures, and the layers that vLLM computes, in order."""
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(worker_sparse, "measure", noted("measured", measure))
    monkeypatch.setattr(worker_sparse, "key_reader", noted("pages", worker_sparse.key_reader))
    monkeypatch.setattr(worker_sparse, "ask_for_tiles", noted("tiles", lambda: None), raising=False)
    monkeypatch.setattr(Engine, "_attend", noted("layer", Engine._attend))
    return calls


def test_nothing_is_tried_out_or_measured_before_vllm_has_computed_a_step(
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels end the process where they cannot run: those of a processor whose tiles nothing
    has asked for, or of an instruction set that a page is not packed for. An idle engine is not
    kept stepping for it either."""
    calls = watched(monkeypatch, lambda *_, **__: 700)
    engine = start("Slots", ucm_sparse_config={"Quest": {"ratio": 0.3}})
    sparse = engine.connector._sparse_scheduler
    assert sparse is not None
    for _ in range(2):
        engine.step()
        assert not engine.connector.has_pending_push_work()
    assert calls == []
    engine.scheduler.add_request(engine.request([at % 500 for at in range(4 * BLOCK)], "a"))
    engine.step()
    assert calls == ["layer"] * len(engine.layers) + ["tiles", "pages", "measured"]
    assert not engine.connector.has_pending_push_work()
    engine.step()
    assert calls[-len(engine.layers) :] == ["layer"] * len(engine.layers), "once"
    engine.step()
    assert sparse.break_even.tokens == 700


def test_a_measurement_that_fails_leaves_requests_dense_and_is_not_remembered(
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = watched(monkeypatch, lambda *_, **__: 1 // 0)
    engine = start("Slots", ucm_sparse_config={"Quest": {"ratio": 0.3}})
    engine.scheduler.add_request(engine.request([at % 500 for at in range(4 * BLOCK)], "a"))
    with caplog.at_level(logging.WARNING, "ucm"):
        for _ in range(4):
            engine.step()
    assert calls.count("measured") == 1
    assert caplog.text.count("so requests stay dense: ZeroDivisionError") == 1
    sparse = engine.connector._sparse_scheduler
    assert sparse is not None
    assert sparse.break_even.tokens >= setup.NEVER
    assert sparse.break_even.known() == {}
    assert not engine.connector.has_pending_push_work()


# A selector of the user's own
# --------------------------------------------------------------------------------------------------


class LastKeys(BlockSelector):
    """Registered under the name of its class, in the module that the configuration names."""

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.geometry.kv_heads, self.geometry.head_dim), torch.float32


def test_a_registered_selector_of_the_configured_module_is_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucm.config import load
    from ucm.integration.vllm.attention.setup import make_method, method_class

    for module, name in (
        (sections, "_SECTIONS"),
        (sections, "_SPELLINGS"),
        (selector, "_SELECTORS"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    register_selector("LastKeys", LastKeys)
    extra = {"storage_path": str(tmp_path), "ucm_sparse_module_path": __name__}
    config = load(extra | {"ucm_sparse_config": {"LastKeys": {"ratio": 0.2}}}, {})
    method = make_method(config, None, UcmSparseRole.WORKER)
    assert isinstance(method, BlockSparse)
    assert (method.algorithm, method.settings.ratio) == ("LastKeys", 0.2)
    with pytest.raises(ConfigError, match="has no class FirstKeys"):
        method_class(load(extra | {"ucm_sparse_method": "FirstKeys"}, {}))
