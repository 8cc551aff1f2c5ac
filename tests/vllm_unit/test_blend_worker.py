"""Blend's worker side over real models of vLLM in this process, their CPU attention and pages:
chunks of stored prompts become the KV of another prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sparse_parts import sparse_engine
from torch import Tensor

from ucm.integration.vllm import plugin
from ucm.integration.vllm.connector.metadata import Blend, Blended, BlendHit
from ucm.integration.vllm.connector.worker import blend as subject
from ucm.integration.vllm.connector.worker.blend import BlendWorker, pieces_of_rows

RECALL = Path(__file__).parents[2] / "benches" / "quality" / "weights"
SIZE, BLOCKS, ROWS, BUDGET = 32, 64, 4, 64
#: Blocks of the reference, of stored prompts, and of the blended request.
DENSE, STORED, OWN = range(1, 17), range(17, 33), [*range(40, 34, -1), *range(41, 51)]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not the one for CPUs")
    plugin.register()
    at = tmp_path_factory.mktemp("ranks") / "meet"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{at}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def llama(directory: Path, config: dict[str, Any]) -> None:
    """A Llama of random weights, whose attention is far from uniform."""
    width, wide, head = config["hidden_size"], config["intermediate_size"], 32
    kv = config["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    weights = {"model.norm.weight": torch.ones(width)}
    for name in ("model.embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = random(config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{base}{name}.weight"] = torch.ones(width)
        for name, rows in {"q": width, "k": kv, "v": kv, "o": width}.items():
            weights[f"{base}self_attn.{name}_proj.weight"] = random(rows, width)
        for name in ("gate", "up"):
            weights[f"{base}mlp.{name}_proj.weight"] = random(wide, width)
        weights[f"{base}mlp.down_proj.weight"] = random(width, wide)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, str(directory / "model.safetensors"))


def settings(**given: Any) -> Any:
    defaults: dict[str, Any] = {"select": "union", "ratio": 0.15, "head_tokens": 2}
    defaults |= {"compute_meta": {}, "criterion": "k_l1", "hkvd_threshold": None}
    return SimpleNamespace(**(defaults | given))


@dataclass
class Rig:
    """A model with its KV cache, and its worker."""

    config: Any
    kv_cache: Any
    model: Any
    caches: dict[str, Tensor]
    dense: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def worker(self, **given: Any) -> BlendWorker:
        worker = BlendWorker(settings(**given), self.config, self.kv_cache)
        worker.register_kv_caches(self.caches)
        assert worker.why_not == ""
        return worker

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], table: Sequence[int], known: int = 0) -> Tensor:
        """vLLM's own forward pass of a prompt whose first tokens are known; logits of the rest."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        first = self.config.compilation_config.static_forward_context[next(iter(self.caches))]
        spec = self.kv_cache.kv_cache_groups[0].kv_cache_spec
        spec = getattr(spec, "kv_cache_specs", {next(iter(self.caches)): spec})
        backend = first.get_attn_backend()
        builder = backend.get_builder_cls()(
            spec[next(iter(self.caches))], list(self.caches), self.config, torch.device("cpu")
        )
        count, places = len(tokens) - known, torch.arange(known, len(tokens))
        blocks = torch.tensor(list(table), dtype=torch.int64)
        slots = blocks[places // SIZE] * SIZE + places % SIZE
        starts, lens = torch.tensor([0, count]).int(), torch.tensor([len(tokens)]).int()
        metadata = builder.build(
            0,
            CommonAttentionMetadata(
                starts, starts, lens, 1, count, count, len(tokens), blocks[None].int(), slots
            ),
        )
        with set_forward_context(
            dict.fromkeys(self.caches, metadata),
            self.config,
            num_tokens=count,
            slot_mapping=dict.fromkeys(self.caches, slots),
        ):
            hidden = self.model(torch.tensor(list(tokens))[known:], places)
            logits: Tensor = self.model.compute_logits(hidden)
        return logits

    def kv(self, table: Sequence[int], tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a prompt, by layer."""
        parts = subject.parts_of(self.config, self.kv_cache, self.caches)
        places = torch.arange(tokens)
        slots = torch.tensor(list(table))[places // SIZE] * SIZE + places % SIZE
        return [parts.pages.read(layer.attention.kv_cache, slots) for layer in parts.layers]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def rig(request: Any, tmp_path_factory: pytest.TempPathFactory, engines: Any) -> Iterator[Rig]:
    """A tiny model of random weights, or the recall model."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    work, model = tmp_path_factory.mktemp("blend"), RECALL
    if request.param == "llama":
        model = work / "llama"
        llama(model, engines.LLAMA | {"num_hidden_layers": 3})
    config = sparse_engine(
        engines,
        model,
        work,
        {"dtype": "float32", "max_num_seqs": ROWS},
        blend={"min_hit_blocks": 1},
    )
    with set_current_vllm_config(config):
        loaded = get_model(vllm_config=config)
    layers = config.compilation_config.static_forward_context
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    specs = {n: layers[n].get_attn_backend().customize_spec(spec) for n, spec in specs.items()}
    _, (kv_cache,) = engines.kv_configs(config, [specs])
    caches = {}
    for name, layer in layers.items():
        layer.kv_cache = torch.zeros(BLOCKS, layer.num_kv_heads, SIZE, 2 * layer.head_size)
        caches[name] = layer.kv_cache
    yield Rig(config, kv_cache, loaded, caches)


def test_it_is_made(rig: Rig) -> None:
    rig.worker()
