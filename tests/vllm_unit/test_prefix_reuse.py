"""Engines whose requests may not continue from stored blocks: which these are, and that ucm stores
nothing for them."""

from __future__ import annotations

import ast
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ucm.config import parse
from ucm.integration.vllm.connector import UCMConnector, factory
from ucm.integration.vllm.connector.factory import why_not_reusable, why_off
from ucm.reasons import MissReason

#: Every place at which vLLM 0.32 sets the flag outside its benchmarks, and the cause that finds it.
ASSIGNMENTS = Counter(
    {
        # The default of the option, and a processor (RISC-V) on which chunked prefill is switched
        # off with it.
        "engine/arg_utils.py: EngineArgs._set_default_chunked_prefill_and_prefix_caching_args": 2,
        # The option itself.
        "engine/arg_utils.py: EngineArgs.create_engine_config": 1,
        "engine/arg_utils.py: EngineArgs": 1,
        "config/cache.py: CacheConfig": 1,
        # An instance that runs the multimodal encoder alone has no KV group, so no group is
        # supported.
        "config/vllm.py: VllmConfig.__post_init__": 1,
        # Unlimited-OCR: its KV is of kind RSWASpec, which is not supported.
        "model_executor/models/config.py: UnlimitedOCRForCausalLMConfig.verify_and_update_config": (
            1
        ),
        # MLA on a CPU without AMX: chunked prefill is switched off with it.
        "platforms/cpu.py: CpuPlatform.check_and_update_config": 1,
        # Layers that attend to later tokens: their specs say so.
        "v1/engine/core.py: EngineCore._initialize_kv_caches": 1,
        # The batch-invariant mode, in a worker while it builds its layers: by the backend and by
        # the worker's flag.
        "model_executor/layers/attention/attention.py: Attention.__init__": 1,
        "model_executor/layers/attention/mla_attention.py: MLAAttention.__init__": 1,
    }
)
FLAG = "enable_prefix_caching"


def assignments(node: ast.AST, place: str = "") -> Iterator[str]:
    """Where a module sets the flag: as an attribute, a field of a class, or an argument of a
    call."""
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{place}.{child.name}" if place else child.name
        names: list[Any] = []
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            names = [child.attr]
        elif isinstance(child, ast.AnnAssign) and isinstance(node, ast.ClassDef):
            names = [getattr(child.target, "id", None)]
        elif isinstance(child, ast.Call):
            names = [keyword.arg for keyword in child.keywords]
            if getattr(child.func, "id", None) == "setattr":
                names += [getattr(argument, "value", None) for argument in child.args[1:2]]
        yield from (inner for name in names if name == FLAG)
        yield from assignments(child, inner)


def test_every_place_where_vllm_sets_the_flag_is_known() -> None:
    """A place that a new release adds may need a cause of its own in ``why_not_reusable``."""
    root = Path(vllm.__file__).parent
    found: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        if FLAG in text and not name.startswith("benchmarks/"):
            found.update(f"{name}: {place}" for place in assignments(ast.parse(text)))
    assert found == ASSIGNMENTS


def pooling(kind: str) -> dict[str, Any]:
    """Arguments of an embedding engine."""
    from vllm.config import PoolerConfig

    return {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": PoolerConfig(pooling_type=kind),
    }


LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}


def why(engines: Any, model: Path, **args: Any) -> str:
    config = engines.engine_config(model, **args)
    return why_not_reusable(config, engines.kv_configs(config)[0])


@pytest.mark.parametrize(
    "args",
    [{}, {"enable_prefix_caching": False}, {"enable_chunked_prefill": False}, pooling("LAST")],
)
def test_a_users_choice_and_pooling_of_the_last_token_are_served(
    engines: Any, tiny: Path, args: dict[str, Any]
) -> None:
    assert why(engines, tiny, **args) == ""


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
@pytest.mark.parametrize("forced", [None, True])
def test_pooling_that_needs_the_whole_prompt(
    engines: Any, tiny: Path, kind: str, forced: bool | None
) -> None:
    said = why(engines, tiny, enable_prefix_caching=forced, **pooling(kind))
    assert f"pooling {kind}" in said


def test_latent_attention_on_a_cpu_without_amx(
    engines: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own configuration of such a model; with AMX it caches prefixes."""
    import torch

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    config = engines.engine_config(engines.make_model(tmp_path / "latent", **LATENT))
    assert config.model_config.use_mla
    assert not config.cache_config.enable_prefix_caching
    assert "MLA on a CPU without AMX" in why_not_reusable(config, engines.kv_configs(config)[0])


def test_layers_that_attend_to_later_tokens(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    group = scheduler.kv_cache_groups[0]
    causal, group.kv_cache_spec = group.kv_cache_spec, replace(group.kv_cache_spec, non_causal=True)
    assert "later tokens" in why_not_reusable(config, scheduler)
    group.kv_cache_spec = causal
    assert why_not_reusable(config, scheduler) == ""
    config.model_config.hf_config.is_causal = False
    assert "later tokens" in why_not_reusable(config, scheduler)


@pytest.mark.parametrize(
    ("backend", "named"),
    [("TRITON_MLA", True), ("FLASHINFER", True), ("CPU_ATTN", False), ("FLASH_ATTN", False)],
)
@pytest.mark.parametrize("invariant", [True, False])
def test_the_batch_invariant_mode_with_a_backend_that_vllm_names(
    engines: Any,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    named: bool,
    invariant: bool,
) -> None:

    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    monkeypatch.setattr(factory, "attention_backends", lambda config, groups: [[backend]])
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", invariant, raising=False)
    said = why_not_reusable(config, scheduler)
    assert (backend in said) == (named and invariant)
    assert bool(said) == (named and invariant)


def test_a_workers_flag_counts_where_the_schedulers_is_true(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    assert "a worker" in why_not_reusable(config, scheduler, False)
    config.cache_config.enable_prefix_caching = False  # a user's choice, which workers have as well
    assert why_not_reusable(config, scheduler, False) == ""


def test_the_scheduler_side_logs_it_once_and_stores_nothing(
    engines: Any, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = engines.engine_config(
        tiny,
        **pooling("MEAN"),
        kv_transfer_config={
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"storage_backends": str(tmp_path / "root")},
        },
    )
    scheduler, _ = engines.kv_configs(config)
    off = why_off(parse(config.kv_transfer_config.kv_connector_extra_config), config, scheduler)
    assert off is not None
    assert off[0] == MissReason.UNSUPPORTED
    with caplog.at_level(logging.INFO, "ucm"):
        side = UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler)
    said = [
        record.getMessage()
        for record in caplog.records
        if "the cache is off" in record.getMessage()
    ]
    assert said == [f"the cache is off: {off[1]}"]
    assert side._scheduler is None
    assert not (tmp_path / "root").exists()


def test_a_worker_reports_to_the_scheduler_side_that_it_switched_the_flag_off(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does while it builds its layers, in a process of its own: by the handshake of its first
    step."""
    import torch
    from vllm.distributed import parallel_state
    from vllm.v1.outputs import KVConnectorOutput

    from ucm.integration.vllm.connector import factory

    keys = {"storage_backends": str(tmp_path / "root"), "identity": {"weights": "declared:tests"}}
    transfer = {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": keys,
    }
    config, changed = (engines.engine_config(tiny, kv_transfer_config=transfer) for _ in range(2))
    scheduler, workers = engines.kv_configs(config)
    engines.kv_configs(changed)
    changed.cache_config.enable_prefix_caching = False
    one = SimpleNamespace(rank_in_group=0, world_size=1)
    for group in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(parallel_state, group, lambda: one)
    monkeypatch.setattr(factory, "ModelMemory", lambda *_: None)
    side = UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler)
    worker = UCMConnector(changed, KVConnectorRole.WORKER, workers[0])
    worker.register_kv_caches(
        {
            name: torch.empty(workers[0].num_blocks, 2, 32, 64)
            for name in engines.layer_specs(config)
        }
    )
    assert side._scheduler is not None
    assert side._scheduler.readiness.phase == "pending"
    side.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
    )
    assert side._scheduler.readiness.reason == MissReason.UNSUPPORTED
    assert side._scheduler.readiness.phase == "off"
    assert "a worker switched prefix caching off" in side._scheduler.readiness.why_off
    assert not side.has_pending_push_work()
    side.shutdown()
    worker.shutdown()
