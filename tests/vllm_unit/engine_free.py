"""Real vLLM configurations of a tiny model, made without starting an engine.

Run as a program it prints the identity's text of the model at a path, so that a test can compare
processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def safetensors_bytes(content: bytes) -> bytes:
    """A safetensors file with one tensor of bytes, written by hand."""
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + content


def make_model(path: Path, content: bytes = b"weights" * 100, **config: Any) -> Path:
    """A model directory: config.json and two files of weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | config))
    (path / "model-00001-of-00002.safetensors").write_bytes(safetensors_bytes(content))
    (path / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes(content[::-1]))
    return path


def engine_config(model: Path | str, **args: Any) -> Any:
    """The VllmConfig of an engine for this model."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": 32,
    }
    return EngineArgs(model=str(model), **(defaults | args)).create_engine_config()


def layer_specs(config: Any, layers: range | None = None) -> dict[str, Any]:
    """The KV cache specs of this model's attention layers, by layer name."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    model, cache = config.model_config, config.cache_config
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
        kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
    )
    layers = range(model.hf_text_config.num_hidden_layers) if layers is None else layers
    return {f"model.layers.{index}.self_attn.attn": spec for index in layers}


def kv_configs(
    config: Any, specs: list[dict[str, Any]] | None = None, memory: int = 64 << 20
) -> tuple[Any, list[Any]]:
    """vLLM's KV cache configuration as the scheduler sees it, and as each worker does."""
    from vllm.v1.core import kv_cache_utils

    if specs is None:
        specs = [layer_specs(config)] * config.parallel_config.world_size
    config.cache_config.kv_cache_layout = "LBHNC"
    available = [memory] * len(specs)
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        workers = kv_cache_utils.get_kv_cache_configs(config, specs, available)
    else:  # vLLM 0.33
        from vllm.v1.core import kv_cache_planning

        groups = kv_cache_planning.get_global_kv_cache_groups(config, specs)
        workers = kv_cache_planning.get_kv_cache_configs(config, specs, available, groups)
    for worker in workers:
        worker.kv_cache_layout = "LBHNC"
    return kv_cache_utils.generate_scheduler_kv_cache_config(workers), workers


def identity_of(model: Path | str, weights: str = "", **args: Any) -> dict[str, Any]:
    """The identity of an engine for this model, as its scheduler side computes it."""
    from ucm.integration.vllm.connector.identity.engine_identity import engine_identity

    config = engine_config(model, **args)
    return engine_identity(config, kv_configs(config)[0], weights)


if __name__ == "__main__":
    from ucm.integration.vllm.connector.identity.engine_identity import identity_text

    print(identity_text(identity_of(sys.argv[1], "sha256:00")))
