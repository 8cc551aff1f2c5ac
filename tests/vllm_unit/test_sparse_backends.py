"""The backends behind vLLM's names: which there are and what they say of themselves, and what they
hand to kernels of grouped attention.

FlashAttention and Triton do not run on a CPU: vLLM's implementations of them run here with torch in
the place of their kernels, so what is proven is what a kernel is given.
"""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matrix
import pytest
import torch
from sparse_parts import (
    BLOCK,
    HEADS,
    KV_HEADS,
    NAME,
    QUEST,
    SIZE,
    Layer,
    Rows,
    context_of,
    paged,
    sparse_engine,
    windows,
)
from torch import Tensor

from ucm.errors import ConfigError
from ucm.integration.vllm.attention import backends, registering
from ucm.integration.vllm.attention.backends import derive_impl
from ucm.integration.vllm.attention.host import SparseHost, served_layers, set_active_host
from ucm.integration.vllm.attention.plan import SparsePlan
from ucm.integration.vllm.attention.setup import refuse_unsupported, sparse_config
from ucm.integration.vllm.connector.identity.engine_identity import engine_identity, identity_text
from ucm.sparse.base import SparseRow
from ucm.sparse.selector import Geometry

pytestmark = pytest.mark.timeout(300)

#: Fields that vLLM 0.30 and 0.31 have: no prefix that rows share is attended to once.
NO_CASCADE: dict[str, Any] = {
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
}


@pytest.fixture(autouse=True)
def _no_host() -> Iterator[None]:
    yield
    set_active_host(None)


# Which backend an engine gets
# ----------------------------------------------------------------------------------------


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
        registering.FLASHINFER  # noqa: B018


def test_rows_that_select_share_no_prefix(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """Each has a block table of its own. vLLM 0.30 and 0.31 ask, where a user wants it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    with set_current_vllm_config(sparse_engine(engines, tiny, tmp_path, **QUEST)):
        builder: Any = object.__new__(AttentionBackendEnum.FLASH_ATTN.get_class().get_builder_cls())
    rows = {"query_lens": [1] * 64, "num_query_heads": 32, "num_kv_heads": 8}
    plain = {"use_alibi": False, "use_sliding_window": False, "use_local_attention": False}
    many = {"num_sms": 64, "dcp_world_size": 1, "common_prefix_len": 4096}
    assert builder.use_cascade_attention(**rows, **plain, **many) is False


def test_the_entry_imports_only_the_standard_library(tmp_path: Path) -> None:
    """It is imported in every process of vLLM, whatever the state of ucm's own package."""
    program = f"""
import sys
before = set(sys.modules)
import {registering.__name__}
new = set(sys.modules) - before
print(sorted(name for name in new if name.partition(".")[0] not in sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=110
    )
    assert set(ast.literal_eval(done.stdout)) == {
        "ucm",
        "ucm.errors",
        "ucm.integration",
        "ucm.integration.vllm",
        "ucm.integration.vllm.attention",
        "ucm.integration.vllm.attention.registering",
        "ucm.integration.vllm.early",
        "ucm.refused",
    }


def test_the_entry_knows_every_word_of_the_configuration() -> None:
    from ucm.config.loading import FILE_KEYS
    from ucm.config.sparse import BUILT_IN
    from ucm.config.words import ENVIRONMENT

    assert set(BUILT_IN) == registering.ALGORITHMS
    assert set(registering._FILES) == set(FILE_KEYS)
    enabling = ("sparse.type", "sparse.enabled", "rerope.enabled")
    variables = {name for name, key in ENVIRONMENT.items() if key in enabling}
    assert {key for key in ENVIRONMENT.values() if key.startswith("sparse.")} <= {*enabling}
    assert set(registering._SPARSE_VARIABLES) == variables


@pytest.mark.parametrize(
    ("extra", "environment", "loaded"),
    [
        ({"storage_backends": "/x"}, {}, False),
        ({"storage_backends": "/x"}, {"UCM_SPARSE_TYPE": "Quest"}, True),
        ({"storage_backends": "/x"}, {"UCM_CONFIG_FILE": "/x.yaml"}, True),
        ({"ucm_config_path": "/x.yaml"}, {}, True),
        ({"sparse": {"type": "Quest"}}, {}, True),
        ({"sparse.type": "Quest"}, {}, True),
        ({"vllm": {"GSA-On-Device": {}}}, {}, True),
        ({"ucm_connectors": [{"ucm_connector_config": {"KVStar": {}}}]}, {}, True),
        (QUEST, {}, True),
        (QUEST, {"UCM_DISABLE": "Yes"}, False),
        (QUEST, {"UCM_DISABLE": "0"}, True),
    ],
)
def test_the_configuration_is_read_only_where_it_may_be_sparse(
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    environment: dict[str, str],
    loaded: bool,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours = SimpleNamespace(kv_connector="UCMConnector", kv_connector_extra_config=extra)
    theirs = SimpleNamespace(kv_connector="ExampleConnector", kv_connector_extra_config=extra)
    child = {"kv_connector": "UCMDirectConnector", "kv_connector_extra_config": extra}
    outer = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [1, child]},
    }
    several = SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [outer]}
    )
    for transfer, wanted in ((ours, loaded), (several, loaded), (theirs, False), (None, False)):
        assert registering._may_be_sparse(SimpleNamespace(kv_transfer_config=transfer)) is wanted
    assert registering._may_be_sparse(None) is False


def test_any_other_error_gives_vllms_class_and_one_warning(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connector's constructor reports it. A wrong configuration ends the start before
    (``test_early.py``)."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    monkeypatch.setattr(registering, "_warned", False)
    monkeypatch.setattr(logging.getLogger("ucm"), "propagate", True)
    config = sparse_engine(engines, tiny, tmp_path, sparse_type="Quest")

    def fails(*_: Any) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(backends, "backend_for", fails)
    with set_current_vllm_config(config):
        assert registering.CPU_ATTN is registering.CPU_ATTN is CPUAttentionBackend
    said = [record.getMessage() for record in caplog.records if record.name == "ucm.vllm"]
    assert len(said) == 1
    assert "no such backend" in said[0]


def test_another_plugins_override_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(
        registry, "_ATTN_OVERRIDES", {registry.AttentionBackendEnum.CPU_ATTN: "theirs.Backend"}
    )
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
            backend = registering.CPU_ATTN if sparse else CPUAttentionBackend
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c, k: setattr(c, "speculative_config", object()), "speculative decoding"),
        (
            lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2),
            "decode context parallelism",
        ),
        (
            lambda c, k: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
            "prefill context parallelism",
        ),
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


def test_the_configuration_is_found_inside_a_connector_of_several(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    inner = sparse_engine(engines, tiny, tmp_path, **QUEST).kv_transfer_config
    transfer = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={
            "connectors": [
                {"kv_connector": "Other"},
                {
                    "kv_connector": "UCMConnector",
                    "kv_connector_extra_config": inner.kv_connector_extra_config,
                },
            ]
        },
    )
    found = sparse_config(SimpleNamespace(kv_transfer_config=transfer))
    assert found is not None
    assert found.sparse.type == "Quest"
    assert sparse_config(SimpleNamespace(kv_transfer_config=None)) is None


def test_layers_that_weigh_keys_by_position_stay_dense() -> None:
    def layer(**changed: Any) -> Any:
        impl = SimpleNamespace(
            alibi_slopes=changed.pop("alibi_slopes", None), attn_type=changed.pop("kind", "decoder")
        )
        return SimpleNamespace(
            **(
                {"sliding_window": None, "kv_sharing_target_layer_name": None, "impl": impl}
                | changed
            )
        )

    layers = {
        "a": layer(),
        "windowed": layer(sliding_window=64),
        "in chunks": layer(attention_chunk_size=64),
        "alibi": layer(alibi_slopes=[1.0]),
        "shared": layer(kv_sharing_target_layer_name="a"),
        "encoder": layer(kind="encoder_only"),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert list(served_layers(config, [*layers, "unknown"])) == ["a"]


def test_a_model_with_windows_alone_is_not_selected_from(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mistral. Its blocks before a window are no longer the request's, so its spec stays vLLM's,
    with vLLM's manager, and the engine does not start."""
    from vllm.distributed import parallel_state
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from ucm.integration.vllm.attention.spec import customize_spec
    from ucm.integration.vllm.connector.worker.sparse import SparseWorker

    config = sparse_engine(engines, tiny, tmp_path, **QUEST)
    spec = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    assert customize_spec(spec, config) is spec
    layers = dict.fromkeys(engines.layer_specs(config), spec)
    scheduler, (known,) = engines.kv_configs(config, [layers])
    refuse_unsupported(config, scheduler)
    impl = SimpleNamespace(alibi_slopes=None, attn_type="decoder")
    layer = SimpleNamespace(impl=impl, sliding_window=64, kv_sharing_target_layer_name=None)
    config.compilation_config.static_forward_context = dict.fromkeys(layers, layer)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    worker = SparseWorker(sparse_config(config), config, known)
    with pytest.raises(ConfigError, match=re.escape(matrix.WINDOWS_SPARSE.refused)):
        worker.register_kv_caches({})


# What kernels are handed
# ---------------------------------------------------------------------------------------------


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
        pages.view(-1, KV_HEADS, 2 * SIZE)[slots] = torch.cat(
            [rows.keys[row], rows.values[row]], dim=-1
        )
    return pages.transpose(1, 2)


class Kernel:
    """Stands for a kernel: computes by torch and records its arguments."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, **given: Any) -> None:
        self.given = given
        pages = torch.cat([given["k"], given["v"]], dim=-1)
        lens, starts, table = given["seqused_k"], given["cu_seqlens_q"], given["block_table"]
        assert int(lens.max()) <= given["max_seqlen_k"]
        given["out"].copy_(
            paged(given["q"], pages, starts, table, lens, SIZE, given["softmax_scale"])
        )


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_grouped_kernels_are_given_the_kept_blocks(
    engines: Any, tiny: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn, triton_attn

    rows = Rows.of([300, 40, 200, 161], [1, 1, 7, 1])
    kernel = Kernel()
    with set_current_vllm_config(engines.engine_config(tiny)):
        base = (
            flash_attn.FlashAttentionImpl
            if name == "FLASH_ATTN"
            else triton_attn.TritonAttentionImpl
        )
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
    fields = {field.name for field in dataclasses.fields(kind)}
    extra |= {field: value for field, value in NO_CASCADE.items() if field in fields}
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
        assert kernel.given["scheduler_metadata"] is None, (
            "it was computed ahead from other lengths"
        )
    assert all(value is before[field] for field, value in vars(metadata).items())
