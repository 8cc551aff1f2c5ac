"""The backends behind vLLM's names: which there are and what they say of themselves, and what they hand to kernels.

FlashAttention, Triton and FlashMLA do not run on a CPU, AMX_MLA not on every one: vLLM's implementations of them run
here with torch in the place of their kernels, so what is proven is what a kernel is given. The latent attention of
vLLM's CPU backend runs with its own kernel.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_parts import BLOCK, HEADS, KV_HEADS, SIZE, Layer, Rows, context_of, paged
from torch import Tensor

from ucm.config.sparse import GsaOnDeviceConfig, QuestConfig, WindowsConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.attention import backends, registering
from ucm.integration.vllm.attention.configured import refuse_unsupported, sparse_config
from ucm.integration.vllm.attention.host import SparseHost, served_layers, set_active_host
from ucm.integration.vllm.attention.impls import derive_impl
from ucm.integration.vllm.attention.pages import key_reader
from ucm.integration.vllm.attention.rows import SparsePlan
from ucm.integration.vllm.connector.identity.engine_identity import engine_identity, identity_text
from ucm.sparse.base import UcmSparseBase, UcmSparseRole
from ucm.sparse.batch import SparseRow
from ucm.sparse.gsa_on_device.gsa_on_device import GSAOnDevice
from ucm.sparse.methods import Quest, Windows
from ucm.sparse.selector import Geometry

pytestmark = pytest.mark.timeout(300)

NAME = "model.layers.0.self_attn.attn"
QUEST = {"sparse_type": "Quest", "ucm_sparse_config": {"Quest": {"ratio": 0.2}}}
OFFLOAD: dict[str, Any] = {"ratio": 0.3, "min_tokens": 0, "offload": True}


@pytest.fixture(autouse=True)
def _no_host() -> Iterator[None]:
    yield
    set_active_host(None)


def sparse_engine(engines: Any, tiny: Path, tmp_path: Path, **extra: Any) -> Any:
    """vLLM's configuration with our connector in it."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="UCMConnector",
        kv_role="kv_both",
        kv_connector_module_path="ucm.integration.vllm.connector",
        kv_connector_extra_config={"storage_path": str(tmp_path), **extra},
    )
    return engines.engine_config(tiny, kv_transfer_config=transfer)


# Which backend an engine gets ----------------------------------------------------------------------------------------


def test_a_name_leads_to_vllms_class_unless_sparse_attention_is_configured(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    registering.register()
    registering.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    with set_current_vllm_config(sparse_engine(engines, tiny, tmp_path)):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    config = sparse_engine(engines, tiny, tmp_path, **QUEST)
    with set_current_vllm_config(config):
        found = AttentionBackendEnum.CPU_ATTN.get_class()
    assert found is not CPUAttentionBackend
    assert issubclass(found, CPUAttentionBackend)
    assert found.get_name() == "CPU_ATTN"
    assert issubclass(found.get_impl_cls(), CPUAttentionBackend.get_impl_cls())
    assert found.get_builder_cls().get_cudagraph_support(config, None) == AttentionCGSupport.NEVER
    with pytest.raises(AttributeError):
        backends.FLASHINFER  # noqa: B018


def test_another_plugins_override_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {registry.AttentionBackendEnum.CPU_ATTN: "theirs.Backend"})
    registering.register()
    overrides = registry._ATTN_OVERRIDES
    assert overrides[registry.AttentionBackendEnum.CPU_ATTN] == "theirs.Backend"
    assert {backend.name for backend in overrides} == set(registering.OVERRIDDEN)


def test_one_identity_with_and_without_selection(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """Backends, specs and what lies beside the KV: none of it is in the bytes of a page."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = sparse_engine(engines, tiny, tmp_path, **QUEST)
    texts = []
    for sparse in (False, True):
        specs = engines.layer_specs(config)
        with set_current_vllm_config(config):
            backend = backends.CPU_ATTN if sparse else CPUAttentionBackend
        specs = {name: backend.customize_spec(spec) for name, spec in specs.items()}
        layer = SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        config.compilation_config.static_forward_context = dict.fromkeys(specs, layer)
        scheduler, _ = engines.kv_configs(config, [specs])
        texts.append(identity_text(engine_identity(config, scheduler, "w")))
        if sparse:
            spec = next(iter(specs.values()))
            dense = next(iter(engines.layer_specs(config).values()))
            assert spec.page_size_bytes == dense.page_size_bytes
            beside = spec.max_memory_usage_bytes(config) - dense.max_memory_usage_bytes(config)
            assert beside == 1024 // spec.block_size * spec.beside_bytes > 0
    assert texts[0] == texts[1]


class Managed:
    """vLLM's KV cache manager of an engine with sparse attention."""

    def __init__(self, engines: Any, tiny: Path, tmp_path: Path, **keys: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import init_none_hash

        from ucm.integration.vllm.attention.spec import SparseManager

        self.config = sparse_engine(engines, tiny, tmp_path, **keys)
        with set_current_vllm_config(self.config):
            backend = backends.CPU_ATTN
        specs = {name: backend.customize_spec(spec) for name, spec in engines.layer_specs(self.config).items()}
        self.kv_cache, _ = engines.kv_configs(self.config, [specs])
        self.manager = KVCacheManager(
            self.kv_cache,
            max_model_len=1024,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=2048,
        )
        (self.single,) = self.manager.coordinator.single_type_managers
        assert isinstance(self.single, SparseManager)
        self.hash = _sha256()
        init_none_hash(self.hash)

    def request(self, tokens: list[int], name: str) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        hasher = get_request_block_hasher(BLOCK, self.hash)
        return Request(name, tokens, SamplingParams(max_tokens=100), None, block_hasher=hasher)


def _sha256() -> Any:
    try:
        from vllm.utils.hashing import sha256
    except ImportError:
        from vllm.utils import sha256  # type: ignore[no-redef]
    return sha256


def test_the_manager_caches_exact_blocks_alone(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """A request of 100 tokens of prompt whose first decode step selects: its output is no prefix for anybody."""
    from ucm.integration.vllm.attention.exactness import ExactTokens

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager, request = managed.manager, managed.request

    class Method(Windows):
        def exact_tokens(self, prefill_tokens: int) -> int:
            return max(prefill_tokens, 40)

    exact = ExactTokens(Method(None, UcmSparseRole.SCHEDULER, WindowsConfig(min_tokens=0)))
    managed.single.exact_tokens = exact
    prompt = list(range(3, 103))
    first = request(prompt, "a")
    assert manager.allocate_slots(first, 100) is not None
    first.num_computed_tokens = 100
    for token in range(60):
        first.append_output_token_ids(token)
        assert manager.allocate_slots(first, 1) is not None
        first.num_computed_tokens += 1
    again = request(list(first.all_token_ids), "b")
    assert manager.get_computed_blocks(again)[1] == 96
    # Preempted and computed again: what was output before is a prompt now.
    manager.free(first)
    first.num_preemptions += 1
    first.num_computed_tokens = 0
    blocks, found, _ = manager.get_computed_blocks(first)
    assert manager.allocate_slots(first, 160 - found, found, blocks) is not None
    assert exact.prefill_tokens(first) == 160
    assert manager.get_computed_blocks(again)[1] == 128


def test_the_manager_keeps_blocks_that_others_hold_too(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """Two requests with one prompt: neither's blocks leave, which would free none; those of the last one do."""
    from ucm.integration.vllm.attention.exactness import ExactTokens
    from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager, free = managed.manager, managed.manager.block_pool.get_num_free_blocks()
    method, requests = Quest(managed.config, UcmSparseRole.SCHEDULER, QuestConfig(**OFFLOAD)), {}
    exact = ExactTokens(method)
    planner = managed.single.offload = OffloadPlanner(method, requests, exact, BLOCK, 1000)
    planner.stored = lambda _request: [bytes(16)] * 28
    for name in "ab":
        request = requests[name] = managed.request(list(range(30 * BLOCK + 1)), name)
        exact.prefill_tokens(request)
        found, hit, *_ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 30 * BLOCK + 1 - hit, hit, found) is not None
        request.num_computed_tokens = 30 * BLOCK + 1

    def step(name: str) -> bool:
        request = requests[name]
        request.append_output_token_ids(1)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        return any(block.is_null for block in manager.get_blocks(name).blocks[0])

    assert not step("a") and not step("b")
    assert free - manager.block_pool.get_num_free_blocks() == 32
    manager.free(requests.pop("a"))
    assert any(step("b") for _ in range(BLOCK + 1))
    assert free - manager.block_pool.get_num_free_blocks() < 16


def test_the_manager_has_no_room_for_a_request_that_is_to_begin_anew(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """vLLM preempts it; admitted again, it is given all of its blocks."""
    from ucm.integration.vllm.attention.exactness import ExactTokens
    from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager = managed.manager
    method, requests = Quest(managed.config, UcmSparseRole.SCHEDULER, QuestConfig(**OFFLOAD)), {}
    exact = ExactTokens(method)
    planner = managed.single.offload = OffloadPlanner(method, requests, exact, BLOCK, 1000)
    planner.stored = lambda _request: [bytes(16)] * 30
    request = requests["a"] = managed.request(list(range(30 * BLOCK)), "a")
    exact.prefill_tokens(request)
    assert manager.allocate_slots(request, 30 * BLOCK) is not None
    request.num_computed_tokens = 30 * BLOCK
    request.append_output_token_ids(1)
    assert manager.allocate_slots(request, 1) is not None
    assert any(block.is_null for block in manager.get_blocks("a").blocks[0])
    request.num_computed_tokens += 1
    request.append_output_token_ids(1)
    planner.lost(request)
    assert manager.allocate_slots(request, 1) is None
    manager.free(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    exact.prefill_tokens(request)
    assert manager.allocate_slots(request, 30 * BLOCK + 2) is not None
    request.num_computed_tokens = 30 * BLOCK + 2
    request.append_output_token_ids(1)
    assert manager.allocate_slots(request, 1) is not None
    assert not any(block.is_null for block in manager.get_blocks("a").blocks[0])


def test_vllms_scheduler_computes_a_request_anew_that_has_lost_a_block(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    """And those admitted after it, whose blocks it finds in its prefix cache; one admitted before goes on."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from ucm.integration.vllm.attention.exactness import ExactTokens
    from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    managed.config.kv_transfer_config = None
    managed.config.cache_config.num_gpu_blocks = managed.kv_cache.num_blocks
    unused: Any = SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda _: False)
    scheduler = Scheduler(managed.config, managed.kv_cache, unused, BLOCK, hash_block_size=BLOCK)
    manager = scheduler.kv_cache_manager
    exact = ExactTokens(method := Quest(managed.config, UcmSparseRole.SCHEDULER, QuestConfig(**OFFLOAD)))
    planner = OffloadPlanner(method, scheduler.requests, exact, BLOCK, 1000)
    manager.coordinator.single_type_managers[0].offload = planner
    planner.stored = lambda _request: [bytes(16)] * 28
    for number, name in enumerate("abc"):
        scheduler.add_request(managed.request([(7 * number + at) % 500 for at in range(20 * BLOCK)], name))

    def step() -> dict[str, int]:
        for request in scheduler.requests.values():
            exact.prefill_tokens(request)
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        done = [scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens for name in names]
        places = {name: at for at, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, places, [[5] if each else [] for each in done]))
        return dict(output.num_scheduled_tokens)

    def away(name: str) -> bool:
        return any(block.is_null for block in manager.get_blocks(name).blocks[0])

    for _ in range(6):
        step()
    assert all(away(name) for name in "abc")
    planner.lost(scheduler.requests["b"])
    tokens = scheduler.requests["b"].num_tokens
    for _ in range(8):
        step()
    assert [scheduler.requests[name].num_preemptions for name in "abc"] == [0, 1, 1]
    assert scheduler.requests["b"].num_tokens > tokens
    assert away("a") and not away("b") and away("c")


def test_the_manager_gives_a_prompt_that_is_not_read_its_windows_and_hot_blocks(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    """While its load goes on, when it decodes, and when the load has failed and it is loaded whole."""
    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager, single = managed.manager, managed.single
    free = manager.block_pool.get_num_free_blocks()
    given: list[int] = []
    plan = SimpleNamespace(
        unread=lambda _: range(1, 28),
        hot=lambda *_: 5,
        given=lambda _, blocks: given.extend(blocks),
        leaving=lambda *_: range(0),
        gave_back=lambda _: None,
        begins_anew=lambda _: False,
    )
    single.offload = plan
    first = managed.request(list(range(30 * BLOCK + 5)), "a")
    manager.block_pool.get_new_blocks(free - 9)  # there is no room for all of it
    assert manager.allocate_slots(
        first, 0, num_external_computed_tokens=30 * BLOCK, delay_cache_blocks=True, full_sequence_must_fit=True
    )
    table = manager.get_blocks("a").blocks[0]
    assert [at for at, block in enumerate(table) if not block.is_null] == [0, 28, 29]
    assert len(given) == 5 and manager.block_pool.get_num_free_blocks() == 1
    first.num_computed_tokens = 30 * BLOCK
    plan.unread = lambda _: range(0)  # it is admitted
    manager.cache_blocks(first, first.num_computed_tokens)
    assert manager.get_computed_blocks(managed.request(list(range(30 * BLOCK + 5)), "b"))[1] == 0
    assert manager.allocate_slots(first, 5)
    assert len(manager.get_blocks("a").blocks[0]) == 31 and manager.block_pool.get_num_free_blocks() == 0
    manager.free(first)
    assert manager.block_pool.get_num_free_blocks() == 9
    first.num_computed_tokens = 0
    assert manager.allocate_slots(first, 0, num_external_computed_tokens=30 * BLOCK, delay_cache_blocks=True) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c, k: setattr(c, "speculative_config", object()), "speculative decoding"),
        (lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2), "decode context parallelism"),
        (lambda c, k: setattr(c.parallel_config, "prefill_context_parallel_size", 2), "prefill context parallelism"),
        (lambda c, k: k.kv_cache_groups.append(k.kv_cache_groups[0]), "2 KV cache groups"),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_sentence(
    engines: Any, tiny: Path, tmp_path: Path, change: Any, said: str
) -> None:
    config = sparse_engine(engines, tiny, tmp_path, **QUEST)
    kv, _ = engines.kv_configs(config)
    refuse_unsupported(config, kv)
    change(config, kv)
    with pytest.raises(ConfigError, match=said):
        refuse_unsupported(config, kv)


def test_the_configuration_is_found_inside_a_connector_of_several(engines: Any, tiny: Path, tmp_path: Path) -> None:
    inner = sparse_engine(engines, tiny, tmp_path, **QUEST).kv_transfer_config
    transfer = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={
            "connectors": [
                {"kv_connector": "Other"},
                {"kv_connector": "UCMConnector", "kv_connector_extra_config": inner.kv_connector_extra_config},
            ]
        },
    )
    found = sparse_config(SimpleNamespace(kv_transfer_config=transfer))
    assert found is not None
    assert found.sparse.type == "Quest"
    assert sparse_config(SimpleNamespace(kv_transfer_config=None)) is None


def test_layers_that_weigh_keys_by_their_place_are_left_alone() -> None:
    def layer(**changed: Any) -> Any:
        impl = SimpleNamespace(alibi_slopes=changed.pop("alibi_slopes", None), attn_type=changed.pop("kind", "decoder"))
        return SimpleNamespace(
            **({"sliding_window": None, "kv_sharing_target_layer_name": None, "impl": impl} | changed)
        )

    layers = {
        "a": layer(),
        "windowed": layer(sliding_window=64),
        "alibi": layer(alibi_slopes=[1.0]),
        "shared": layer(kv_sharing_target_layer_name="a"),
        "encoder": layer(kind="encoder_only"),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert list(served_layers(config, [*layers, "unknown"])) == ["a"]


# What kernels are handed ---------------------------------------------------------------------------------------------


def windows(geometry: Geometry, blocks: int) -> Windows:
    """The first block and the last two."""
    method = Windows(None, UcmSparseRole.WORKER, WindowsConfig(min_tokens=0))
    method.setup(geometry, [NAME], blocks)
    return method


def plan_of(rows: Rows, block: int = BLOCK) -> SparsePlan:
    """The step of these rows; those of several queries compute a prompt."""
    plan = SparsePlan(block, 0)
    for row, (tokens, count) in enumerate(zip(rows.lengths, rows.counts, strict=True)):
        prefill = tokens - 1 if count == 1 else tokens
        plan.rows.append(SparseRow(f"r{row}", tokens, prefill, prefill, count))
        plan.last_blocks.append(int(rows.table[row, (tokens - 1) // block]))
    return plan


def write(rows: Rows) -> Tensor:
    """Pages ``[blocks, heads, b, keys and values]`` with all of these sequences."""
    pages = torch.zeros(rows.blocks, BLOCK, KV_HEADS, 2 * SIZE)
    for row in range(len(rows.lengths)):
        slots = rows.slots(row)
        pages.view(-1, KV_HEADS, 2 * SIZE)[slots] = torch.cat([rows.keys[row], rows.values[row]], dim=-1)
    return pages.transpose(1, 2)


class Kernel:
    """Stands for a kernel: computes by torch what it is told to, and notes that down."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, **given: Any) -> None:
        self.given = given
        pages = torch.cat([given["k"], given["v"]], dim=-1)
        lens, starts, table = given["seqused_k"], given["cu_seqlens_q"], given["block_table"]
        assert int(lens.max()) <= given["max_seqlen_k"]
        given["out"].copy_(paged(given["q"], pages, starts, table, lens, SIZE, given["softmax_scale"]))


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_grouped_kernels_are_given_the_kept_blocks(
    engines: Any, tiny: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn, triton_attn

    rows = Rows.of([300, 40, 200, 161], [1, 1, 7, 1])
    kernel = Kernel()
    with set_current_vllm_config(engines.engine_config(tiny)):
        base = flash_attn.FlashAttentionImpl if name == "FLASH_ATTN" else triton_attn.TritonAttentionImpl
        arguments = (HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        impl = derive_impl(base, latent=False)(*arguments)
    if name == "FLASH_ATTN":
        impl.vllm_flash_attn_version = 3
        monkeypatch.setattr(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL", kernel)
        kind, extra = flash_attn.FlashAttentionMetadata, {"scheduler_metadata": torch.zeros(8)}
    else:
        monkeypatch.setattr(triton_attn, "unified_attention", kernel)
        kind, empty = triton_attn.TritonAttentionMetadata, torch.empty(0)
        extra = {
            "seq_threshold_3D": 0,
            "num_par_softmax_segments": 16,
            "softmax_segm_output": empty,
            "softmax_segm_max": empty,
            "softmax_segm_expsum": empty,
            "causal": True,
        }
    query, keys, values, slots = rows.step()
    metadata = kind(
        num_actual_tokens=len(query),
        max_query_len=7,
        query_start_loc=rows.starts(),
        max_seq_len=300,
        seq_lens=torch.tensor(rows.lengths, dtype=torch.int32),
        block_table=rows.table,
        slot_mapping=slots,
        **extra,
    )
    layer = Layer(NAME, impl, write(rows))
    host = SparseHost(windows(Geometry(BLOCK, KV_HEADS, SIZE), rows.blocks), {NAME: layer})
    host.blocks.store.mark_ready(range(rows.blocks))  # type: ignore[union-attr]
    output = torch.zeros_like(query)
    impl.forward(layer, query, keys, values, layer.kv_cache, metadata, output)
    assert torch.allclose(output, rows.attended([None] * 4), atol=1e-5)
    before = dict(vars(metadata))
    set_active_host(host)
    host.begin_step(plan_of(rows), context_of({NAME: layer}, metadata))
    impl.forward(layer, query, keys, values, layer.kv_cache, metadata, output)
    host.end_step()
    assert torch.allclose(output, rows.attended([[0, 8, 9], None, None, [0, 4, 5]]), atol=1e-5)
    assert kernel.given["max_seqlen_k"] == 200, "the longest row is a prompt"
    if name == "FLASH_ATTN":
        assert kernel.given["scheduler_metadata"] is None, "it was computed ahead from other lengths"
    assert all(value is before[field] for field, value in vars(metadata).items())


RANK, ROPE = 512, 64
LATENT_BLOCK = 16


class LatentRows:
    """Sequences of latent keys; the last token of each is computed."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.keys = [torch.randn(length, RANK + ROPE, generator=generator) / 4 for length in lengths]
        self.query = torch.randn(len(lengths), HEADS, RANK + ROPE, generator=generator)
        blocks = [-(-length // LATENT_BLOCK) for length in lengths]
        ids = (1 + torch.randperm(sum(blocks), generator=generator)).int().split(blocks)
        self.table = torch.stack([torch.nn.functional.pad(row, (0, max(blocks) - len(row))) for row in ids])
        self.blocks = sum(blocks) + 1

    def slots(self, row: int) -> Tensor:
        """Where the tokens of a row are."""
        places = torch.arange(self.lengths[row])
        return self.table[row].long()[places // LATENT_BLOCK] * LATENT_BLOCK + places % LATENT_BLOCK

    def attended(self, kept: list[list[int] | None], scale: float) -> Tensor:
        """What the queries get from the blocks that their rows keep."""
        outputs = []
        for keys, query, blocks in zip(self.keys, self.query, kept, strict=True):
            if blocks is not None:
                keys = keys[torch.isin(torch.arange(len(keys)) // LATENT_BLOCK, torch.tensor(blocks))]
            outputs.append(torch.softmax(query @ keys.T * scale, dim=-1) @ keys[:, :RANK])
        return torch.stack(outputs)


def latent_kernel(query: Tensor, pages: Tensor, table: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Latent attention of one token a row, by torch; ``pages [blocks, b, rank and rope]``."""
    outputs = []
    for row, length in enumerate(lens.tolist()):
        keys = pages[table[row].long()].flatten(0, 1)[:length]
        outputs.append(torch.softmax(query[row] @ keys.T * scale, dim=-1) @ keys[:, :RANK])
    return torch.stack(outputs)


LATENT = ["CPU_MLA", "AMX_MLA", "TRITON_MLA", "FLASHMLA"]
PROMPT = 5  # tokens of a prompt behind the rows of one token, in block 0, which nobody else has


class LatentRig:
    """vLLM's implementation of a latent backend with torch in the place of its kernels, and a step of these rows."""

    def __init__(self, name: str, rows: LatentRows, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.attention.backends.mla import amx_mla, cpu_mla, flashmla, triton_mla

        self.name, self.rows, self.prompt = name, rows, prompt
        self.scale = (RANK + ROPE) ** -0.5
        self.base = {
            "CPU_MLA": cpu_mla.CPUMLAImpl,
            "AMX_MLA": amx_mla.AMXMLAImpl,
            "TRITON_MLA": triton_mla.TritonMLAImpl,
            "FLASHMLA": flashmla.FlashMLAImpl,
        }[name]
        kind = derive_impl(self.base, latent=True)
        self.impl = kind.__new__(kind)
        vars(self.impl).update(
            num_heads=HEADS,
            head_size=RANK + ROPE,
            kv_lora_rank=RANK,
            scale=self.scale,
            kv_cache_dtype="auto",
            dcp_world_size=1,
            _sm_count=1,
        )
        self.planned: list[Tensor] = []  # by FlashMLA, again
        self.prompts: list[Any] = []  # what was asked of forward_mha
        self._put_torch_in_place(monkeypatch)
        if name != "CPU_MLA":
            monkeypatch.setattr(self.base, "do_kv_cache_update", cpu_mla.CPUMLAImpl.do_kv_cache_update)
        self.metadata = self._metadata()
        self.cache = torch.zeros(rows.blocks, LATENT_BLOCK, RANK + ROPE)
        self.layer: Any = SimpleNamespace(layer_name=NAME, impl=self.impl, _k_scale=torch.ones(()), kv_lora_rank=RANK)
        self.layer.dtype = torch.float32

    def _put_torch_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.attention.backends.mla import amx_mla, flashmla, triton_mla
        from vllm.v1.attention.ops import flashmla as flashmla_ops

        scale, planned = self.scale, self.planned

        def mha(impl: Any, q: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, metadata: Any, k_scale: Tensor,
                output: Tensor) -> None:  # fmt: skip
            self.prompts.append((q.clone(), latent.clone(), rope.clone(), metadata))
            output.copy_(q.flatten(1)[:, : output.shape[1]])

        def decode(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, lens: Tensor, *rest: Any,
                   **named: Any) -> None:  # fmt: skip
            out.copy_(latent_kernel(q, k[:, :, 0], table, lens, scale))

        def amx(q: Tensor, cache: Tensor, _v: Tensor, out: Tensor, *rest: Any) -> None:
            slots, rows, lens = rest[4:7]
            assert rows.tolist() == list(range(len(slots)))
            out.copy_(latent_kernel(q, cache, slots, lens, scale))

        def plan(lens: Tensor, heads: int, kv_heads: int, *, is_fp8_kvcache: bool) -> Any:
            planned.append(lens)
            return SimpleNamespace(lens=lens, heads=heads), None

        def flash(q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor,
                  tile_scheduler_metadata: Any, **rest: Any) -> Any:  # fmt: skip
            assert torch.equal(tile_scheduler_metadata.lens, cache_seqlens)
            assert tile_scheduler_metadata.heads == HEADS
            return latent_kernel(q[:, 0], k_cache[:, :, 0], block_table, cache_seqlens, scale)[:, None], None

        monkeypatch.setattr(self.base, "forward_mha", mha)
        monkeypatch.setattr(triton_mla, "decode_attention_fwd", decode)
        monkeypatch.setattr(triton_mla, "_compute_num_kv_splits", lambda *_: 1)
        monkeypatch.setattr(amx_mla.ops, "cpu_mla_decode", amx, raising=False)
        monkeypatch.setattr(flashmla_ops, "get_mla_metadata", plan, raising=False)
        monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", flash, raising=False)

    def _metadata(self) -> Any:
        from vllm.model_executor.layers.attention.mla_attention import (
            MLACommonDecodeMetadata,
            MLACommonMetadata,
            MLACommonPrefillMetadata,
        )
        from vllm.v1.attention.backends.mla import amx_mla, flashmla

        rows, count = self.rows, len(self.rows.lengths)
        lens = torch.tensor(rows.lengths, dtype=torch.int32)
        kind: type = MLACommonDecodeMetadata
        fields: dict[str, Any] = {}
        if self.name == "FLASHMLA":
            kind = flashmla.FlashMLADecodeMetadata
            fields = {"scheduler_metadata": SimpleNamespace(lens=lens, heads=HEADS)}
        decode = kind(block_table=rows.table, seq_lens=lens, dcp_tot_seq_lens=None, **fields)
        if self.name == "AMX_MLA":  # as its builder does
            decode.req_to_token = amx_mla._expand_block_table(rows.table, LATENT_BLOCK)  # type: ignore[attr-defined]
            decode.seq_lens_i64 = lens.long()  # type: ignore[attr-defined]
            decode.req_pool_indices = torch.arange(count)  # type: ignore[attr-defined]
            decode.num_kv_splits = 1  # type: ignore[attr-defined]
        else:
            decode.noted = "what an implementation noted down of these lengths"  # type: ignore[attr-defined]
        table = torch.zeros(1, 1, dtype=torch.int32)
        self.prefill = MLACommonPrefillMetadata(table, torch.tensor([0, self.prompt]), self.prompt)
        last = [rows.slots(row)[-1] for row in range(count)]
        starts = [*range(count + 1), *([count + self.prompt] if self.prompt else [])]
        return MLACommonMetadata(
            num_reqs=len(starts) - 1,
            max_query_len=max(1, self.prompt),
            max_seq_len=max(rows.lengths),
            num_actual_tokens=starts[-1],
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=torch.cat([torch.stack(last), torch.arange(self.prompt)]),
            num_decodes=count,
            num_decode_tokens=count,
            num_prefills=int(self.prompt > 0),
            decode=decode,
            prefill=self.prefill if self.prompt else None,
        )

    def host(self, method: Any) -> SparseHost:
        """The host of a method, active, with everything before the step in the cache."""
        host, rows = SparseHost(method, {NAME: self.layer}), self.rows
        set_active_host(host)
        slots, keys = torch.cat([rows.slots(row) for row in range(len(rows.lengths))]), torch.cat(rows.keys)
        host.begin_step(SparsePlan(LATENT_BLOCK, 0), self.context())
        self.write(keys, slots)
        host.end_step()
        return host

    def context(self) -> Any:
        return context_of({NAME: self.layer}, self.metadata)

    def plan(self) -> SparsePlan:
        plan, rows = SparsePlan(LATENT_BLOCK, 0), self.rows
        for row, tokens in enumerate(rows.lengths):
            plan.rows.append(SparseRow(f"r{row}", tokens, tokens - 1, tokens - 1))
            plan.last_blocks.append(int(rows.table[row, (tokens - 1) // LATENT_BLOCK]))
        if self.prompt:
            plan.rows.append(SparseRow("p", self.prompt, self.prompt, self.prompt, self.prompt))
            plan.last_blocks.append(0)
        return plan

    def write(self, keys: Tensor, slots: Tensor) -> None:
        """As vLLM's layer does before attention; ``keys`` are not written to."""
        latent, rope = keys[:, :RANK].clone(), keys[:, None, RANK:].clone()
        self.impl.do_kv_cache_update(latent, rope, self.cache, slots, "auto", self.layer._k_scale)
        self.step_keys = latent, rope

    def decode(self) -> Tensor:
        """The rows of one token."""
        asked = (self.rows.query[..., :RANK].clone(), self.rows.query[..., RANK:].clone())
        found: Tensor = self.impl.forward_mqa(asked, self.cache, self.metadata, self.layer)[0]
        return found.view(-1, HEADS, RANK)


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_latent_kernels_are_given_the_kept_blocks(name: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rows of one token, which come first and have metadata of their own; also with a prompt behind."""
    rows = LatentRows([150, 20, 90])
    rig = LatentRig(name, rows, prompt, monkeypatch)
    host = rig.host(windows(Geometry(LATENT_BLOCK, 1, RANK + ROPE, ROPE), rows.blocks))
    decode = rig.metadata.decode
    before = dict(vars(decode))
    assert host.blocks.store.ready(rows.table[0, :9])  # type: ignore[union-attr]
    read = key_reader(rig.layer, name, rig.cache, LATENT_BLOCK)
    assert torch.equal(read(rig.cache, rows.table[0, :9].long()).flatten(0, 2), rows.keys[0][: 9 * LATENT_BLOCK])
    assert torch.allclose(rig.decode(), rows.attended([None] * 3, rig.scale), atol=1e-4)
    host.begin_step(rig.plan(), rig.context())
    found = rig.decode()
    host.end_step()
    assert torch.allclose(found, rows.attended([[0, 8, 9], None, [0, 4, 5]], rig.scale), atol=1e-4)
    assert rig.metadata.decode is decode
    assert all(value is before[field] for field, value in vars(decode).items())
    assert len(rig.planned) == (name == "FLASHMLA")


class ChangesLatent(UcmSparseBase):
    """A user's method that changes all that it is handed, some of it in place, and notes what that was."""

    def __init__(self) -> None:
        super().__init__(None, UcmSparseRole.WORKER)
        self.given: dict[str, Any] = {}
        self.finished: dict[str, Any] = {}
        self.out: dict[str, Tensor] = {}

    def attention_begin(
        self, query: Any, key: Any, value: Any, layer_name: Any, forward_context: Any, output: Any = None,
        phase: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self.given[phase] = [tuple(each.shape) for each in (query, key, value, output)], kwargs["k_hash"]
        metadata = forward_context.attn_metadata[layer_name]
        if phase == "decode":
            table = metadata.decode.block_table
            table[0, :2] = table[0, 8:10].clone()
            metadata.decode.seq_lens[0] -= 8 * LATENT_BLOCK
            kwargs["decode_q_pe"].mul_(-1)
        else:
            metadata.prefill.block_table += 7
        value.mul_(-2)
        self.out[phase] = torch.full_like(output, torch.nan)
        return 2 * query, 3 * key, value, self.out[phase]

    def attention_finished(
        self, query: Any, key: Any, value: Any, attn_output: Any, layer_name: Any, forward_context: Any,
        phase: Any = None,
    ) -> None:  # fmt: skip
        self.finished[phase] = query, key, value, attn_output


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_a_users_changes_take_effect_with_latent_attention(
    name: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query, keys, values, output and the copy of the metadata, of rows of one token and of prompts."""
    rows = LatentRows([150, 20, 90])
    rig = LatentRig(name, rows, prompt, monkeypatch)
    method = ChangesLatent()
    host = rig.host(method)
    keys = torch.cat([*(keys[-1:] for keys in rows.keys), torch.randn(prompt, RANK + ROPE) / 4])
    host.begin_step(rig.plan(), rig.context())
    rig.write(keys, rig.metadata.slot_mapping)
    latent, rope = rig.step_keys
    if prompt:
        asked, output = torch.randn(prompt, HEADS, 24), torch.zeros(prompt, HEADS * 16)
        tensors = asked.clone(), latent[3:], rope[3:], rig.cache, rig.metadata, rig.layer._k_scale
        rig.impl.forward_mha(*tensors, output=output)
        ((q, k, v, metadata),) = rig.prompts
        assert torch.equal(q, 2 * asked)
        assert torch.equal(k, 3 * keys[3:, :RANK])
        assert torch.equal(v[:, 0], -2 * keys[3:, RANK:])
        assert metadata.prefill.block_table.tolist() == [[7]]
        assert rig.prefill.block_table.tolist() == [[0]]
        assert torch.equal(output, 2 * asked.flatten(1)[:, : HEADS * 16])
        assert torch.equal(output, method.out["prefill"])
        assert method.given["prefill"] == (
            [(prompt, HEADS, 24), (prompt, RANK), (prompt, 1, ROPE), (prompt, HEADS * 16)],
            None,
        )
    before = dict(vars(rig.metadata.decode))
    lens, table = rows.lengths, rows.table.clone()
    found = rig.decode()
    host.end_step()
    assert rig.metadata.decode.seq_lens.tolist() == lens
    assert torch.equal(rig.metadata.decode.block_table, table)
    assert all(value is before[field] for field, value in vars(rig.metadata.decode).items())
    changed = keys * torch.tensor([3.0] * RANK + [-2.0] * ROPE)
    written = rig.cache.view(-1, RANK + ROPE)[rig.metadata.slot_mapping]
    assert torch.equal(written, changed), "later steps read what the hook made of the keys"
    for row, key in zip(rows.keys, changed, strict=False):
        row[-1] = key
    rows.query = rows.query * torch.tensor([2.0] * RANK + [-2.0] * ROPE)
    assert torch.allclose(found, rows.attended([[8, 9], None, None], rig.scale), atol=1e-4)
    assert found.data_ptr() == method.out["decode"].data_ptr()
    assert method.given["decode"] == ([(3, HEADS, RANK + ROPE), (3, RANK), (3, 1, ROPE), (3, HEADS, RANK)], None)
    query, key, value, attended = method.finished["decode"]
    assert torch.equal(query, rows.query)
    assert torch.equal(key, changed[:3, :RANK])
    assert torch.equal(value[:, 0], changed[:3, RANK:])
    assert attended.data_ptr() == found.data_ptr()


def test_codes_follow_latent_keys_that_a_hook_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of a method of ours is handed the codes of a layer, and chooses among what the cache holds."""

    class Method(GSAOnDevice):
        def attention_begin(
            self, query: Any, key: Any, value: Any, layer_name: Any, forward_context: Any, output: Any = None,
            phase: Any = None, **kwargs: Any,
        ) -> Any:  # fmt: skip
            self.codes = kwargs["k_hash"]
            found = super().attention_begin(query, key, value, layer_name, forward_context, output, phase, **kwargs)
            return found[0], -key, found[2], found[3]

    rows = LatentRows([160, 20, 90])
    rig = LatentRig("CPU_MLA", rows, PROMPT, monkeypatch)
    settings = GsaOnDeviceConfig(min_tokens=0, topk_tokens=64, init_tokens=16, local_tokens=32)
    method = Method(None, UcmSparseRole.WORKER, settings)
    method.setup(Geometry(LATENT_BLOCK, 1, RANK + ROPE, ROPE), [NAME], rows.blocks)
    host = rig.host(method)
    keys = torch.cat([*(keys[-1:] for keys in rows.keys), torch.randn(PROMPT, RANK + ROPE)])
    host.begin_step(rig.plan(), rig.context())
    rig.write(keys, rig.metadata.slot_mapping)
    latent, rope = rig.step_keys
    output = torch.zeros(PROMPT, HEADS * 16)
    asked = torch.randn(PROMPT, HEADS, 24)
    rig.impl.forward_mha(asked, latent[3:], rope[3:], rig.cache, rig.metadata, rig.layer._k_scale, output=output)
    assert len(rig.prompts) == 1, "a prompt has no blocks to choose from"
    assert torch.equal(rig.prompts[0][1], -keys[3:, :RANK]), "and the hook is used all the same"
    rig.decode()
    host.end_step()
    assert method.codes is not None and method.codes.dtype == torch.uint8
    assert len(method.codes) == rows.blocks
    expected = method.selector.encode(0, (keys * torch.tensor([-1.0] * RANK + [1.0] * ROPE))[:, None, None])[:, 0]
    assert torch.equal(method.codes.flatten(0, 1)[rig.metadata.slot_mapping], expected)
    assert host.blocks is method and method.store.ready(rows.table[0, :10])


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("how", ["raises", "table", "lens", "returns"])
def test_what_a_hook_leaves_that_no_latent_kernel_can_read_changes_nothing(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(UcmSparseBase):
        def attention_begin(
            self, query: Any, key: Any, value: Any, layer_name: Any, forward_context: Any, output: Any = None,
            phase: Any = None, **kwargs: Any,
        ) -> Any:  # fmt: skip
            decode = forward_context.attn_metadata[layer_name].decode
            if how == "table":
                decode.block_table = decode.block_table[:1]
            elif how == "lens":
                decode.seq_lens = [1, 1, 1]
            else:
                decode.seq_lens[:] = 1
            if how == "raises":
                raise RuntimeError("half done")
            return (2 * query, key) if how == "returns" else (query, key, value, output)

    rows = LatentRows([150, 20, 90])
    rig = LatentRig(name, rows, 0, monkeypatch)
    logging.getLogger("ucm").propagate = True
    host = rig.host(Wrong(None, UcmSparseRole.WORKER))
    host.begin_step(rig.plan(), rig.context())
    rig.write(torch.cat([keys[-1:] for keys in rows.keys]), rig.metadata.slot_mapping)
    assert torch.allclose(rig.decode(), rows.attended([None] * 3, rig.scale), atol=1e-4)
    host.end_step()
    said = {"raises": "half done", "returns": "did not return query"}
    assert said.get(how, "could not be used") in caplog.text


def test_prompts_of_latent_attention_are_left_to_vllm_unless_a_method_asks() -> None:
    """The hook of a user's method sees prompts, too; ours has nothing to choose there."""
    seen: list[Any] = []

    class Base:
        def forward_mha(self, q: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, metadata: Any, scale: Tensor,
                        output: Tensor) -> None:  # fmt: skip
            output.copy_(q * 2)

    class Method(Windows):
        def attention_begin(self, query: Any, key: Any, value: Any, layer_name: Any, forward_context: Any,
                            output: Any = None, phase: Any = None, **kwargs: Any) -> Any:  # fmt: skip
            seen.append((layer_name, phase, forward_context.attn_metadata[layer_name] is not metadata))
            return query + 1, key, value, output

    impl = derive_impl(Base, latent=True)()
    layer: Any = SimpleNamespace(layer_name=NAME, impl=impl)
    metadata = types.SimpleNamespace(decode=None, query_start_loc=torch.tensor([0, 1]), slot_mapping=torch.zeros(1))
    metadata.num_decode_tokens = 0
    query, cache = torch.ones(1, HEADS, SIZE), torch.zeros(1)
    outputs = []
    for kind in (Windows, Method):
        method = kind(None, UcmSparseRole.WORKER, WindowsConfig(min_tokens=0))
        method.setup(Geometry(LATENT_BLOCK, 1, RANK + ROPE, ROPE), [NAME], 4)
        host = SparseHost(method, {NAME: layer})
        set_active_host(host)
        host.begin_step(SparsePlan(LATENT_BLOCK, 0), context_of({NAME: layer}, metadata))
        output = torch.zeros_like(query)
        impl.forward_mha(query, cache, cache, cache, metadata, cache, output)
        outputs.append(float(output[0, 0, 0]))
    assert outputs == [2.0, 4.0]
    assert seen == [(NAME, "prefill", True)]
