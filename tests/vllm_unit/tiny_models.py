"""Tiny models of random weights, loaded by vLLM into this process, with a KV cache around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

#: Tokens of a block, and blocks of a cache.
SIZE, BLOCKS = 32, 64

#: Beside Llama's.
KEYS = {
    "llama": {"num_hidden_layers": 3},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "head_dim": 32,
    },
}
KEYS["qwen3_moe"] = KEYS["qwen3"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
KEYS["qwen2_moe"] = {name: key for name, key in KEYS["qwen3_moe"].items() if name != "head_dim"} | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 256,
}
KEYS["mixtral"] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """A model of random weights, whose attention is far from uniform."""
    width, wide, head = config["hidden_size"], config["intermediate_size"], 32
    kv = config["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    kind = config["model_type"]
    mlp, gate, up, down = "mlp.", "gate_proj", "up_proj", "down_proj"
    if kind == "mixtral":
        mlp, gate, up, down = "block_sparse_moe.", "w1", "w3", "w2"
    weights = {"model.norm.weight": torch.ones(width)}
    for name in ("model.embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = random(config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{base}{name}.weight"] = torch.ones(width)
        for name, rows in {"q": width, "k": kv, "v": kv, "o": width}.items():
            weights[f"{base}self_attn.{name}_proj.weight"] = random(rows, width)
        if "head_dim" in config:
            for name in ("q_norm", "k_norm"):
                weights[f"{base}self_attn.{name}.weight"] = torch.full((head,), 1.5)
        count = config.get("num_experts", config.get("num_local_experts", 0))
        experts = [f"experts.{number}." for number in range(count)]
        if experts:
            weights[f"{base}{mlp}gate.weight"] = random(count, width)
        if kind == "qwen2_moe":
            weights |= {f"{base}self_attn.{name}_proj.bias": random(width) for name in "q"}
            weights |= {f"{base}self_attn.{name}_proj.bias": random(kv) for name in "kv"}
            weights[f"{base}mlp.shared_expert_gate.weight"] = random(1, width)
            experts.append("shared_expert.")
        for part in experts or [""]:
            for name in (gate, up):
                weights[f"{base}{mlp}{part}{name}.weight"] = random(wide, width)
            weights[f"{base}{mlp}{part}{down}.weight"] = random(width, wide)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, str(directory / "model.safetensors"))
    return directory


@dataclass
class Loaded:
    """A model of vLLM with its KV cache."""

    config: Any
    kv_cache: Any
    model: Any
    caches: dict[str, Tensor]

    def metadata(self, first: int, end: int, table: Sequence[int]) -> tuple[Any, Tensor]:
        """vLLM's attention metadata of a step with the tokens ``[first, end)`` of a prompt, and
        their slots."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        name = next(iter(self.caches))
        spec = self.kv_cache.kv_cache_groups[0].kv_cache_spec
        spec = getattr(spec, "kv_cache_specs", {name: spec})[name]
        backend = self.config.compilation_config.static_forward_context[name].get_attn_backend()
        builder = backend.get_builder_cls()(
            spec, list(self.caches), self.config, torch.device("cpu")
        )
        count, places = end - first, torch.arange(first, end)
        blocks = torch.tensor(list(table), dtype=torch.int64)
        slots = blocks[places // SIZE] * SIZE + places % SIZE
        starts, lens = torch.tensor([0, count]).int(), torch.tensor([end]).int()
        rows = starts, starts, lens, 1, count, count, end, blocks[None].int(), slots
        return builder.build(0, CommonAttentionMetadata(*rows)), slots

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], table: Sequence[int], known: int = 0) -> Tensor:
        """vLLM's own forward pass of a prompt whose first tokens are known; logits of the rest."""
        from vllm.forward_context import set_forward_context

        metadata, slots = self.metadata(known, len(tokens), table)
        with set_forward_context(
            dict.fromkeys(self.caches, metadata),
            self.config,
            num_tokens=len(tokens) - known,
            slot_mapping=dict.fromkeys(self.caches, slots),
        ):
            places = torch.arange(known, len(tokens))
            hidden = self.model(torch.tensor(list(tokens))[known:], places)
            logits: Tensor = self.model.compute_logits(hidden)
        return logits


Kind = TypeVar("Kind", bound=Loaded)


def load_model(engines: Any, config: Any, kind: type[Kind]) -> Kind:
    """The model of an engine. ``engines``: helpers of ``engine_free.py``."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()  # of an engine with another configuration
    with set_current_vllm_config(config):
        loaded = get_model(vllm_config=config)
    _cached_get_attn_backend.cache_clear()
    modules = config.compilation_config.static_forward_context.items()
    layers = {name: each for name, each in modules if hasattr(each, "get_kv_cache_spec")}
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    specs = {n: layers[n].get_attn_backend().customize_spec(spec) for n, spec in specs.items()}
    _, (kv_cache,) = engines.kv_configs(config, [specs])
    caches = {}
    for name, layer in layers.items():
        layer.kv_cache = torch.zeros(BLOCKS, layer.num_kv_heads, SIZE, 2 * layer.head_size)
        caches[name] = layer.kv_cache
    return kind(config, kv_cache, loaded, caches)
