"""Tiny models with random weights, written as any checkpoint is: config.json and safetensors.

The weights are large on purpose: attention then decides the output, so wrong KV bytes give wrong
tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 512
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 32
INTERMEDIATE = 192
MAX_LEN = 1024


def llama_config(layers: int) -> dict[str, Any]:
    """The config of a Llama of this many layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "dtype": "float32",
        "use_cache": True,
    }


def gemma3_config() -> dict[str, Any]:
    """A small Gemma 3: most layers with a sliding window, so that vLLM makes more than one KV
    group."""
    return llama_config(6) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_SIZE,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }


def mistral_config() -> dict[str, Any]:
    """A small Mistral, all of whose layers have a sliding window: one KV group."""
    return llama_config(3) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 80,
    }


def write_model(directory: Path, config: dict[str, Any], seed: int = 7) -> Path:
    """Writes a model of that config with weights that depend on the seed alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    gemma = config["model_type"].startswith("gemma")
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    norm = torch.zeros if gemma else torch.ones
    # Gemma's model scales them itself, and the last layer has the same
    scale = 1.0 if gemma else HIDDEN**0.5
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, gain=scale)}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        weights |= {
            base + "self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN, gain=2.0),
            base + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN, gain=2.0),
            base + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN, gain=3.0),
            base + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE, gain=3.0),
            base + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            base + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            base + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            base + "input_layernorm.weight": norm(HIDDEN),
            base + "post_attention_layernorm.weight": norm(HIDDEN),
        }
        if gemma:
            weights |= {
                base + "pre_feedforward_layernorm.weight": norm(HIDDEN),
                base + "post_feedforward_layernorm.weight": norm(HIDDEN),
                base + "self_attn.q_norm.weight": norm(HEAD_SIZE),
                base + "self_attn.k_norm.weight": norm(HEAD_SIZE),
            }
    weights["model.norm.weight"] = norm(HIDDEN)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def change_weights(directory: Path) -> None:
    """Changes a few numbers of one layer's weights in place: same path, same size, same shapes."""
    path = directory / "model.safetensors"
    weights = load_file(str(path))
    weights["model.layers.0.self_attn.k_proj.weight"][0, :8] += 0.5
    save_file(weights, str(path), metadata={"format": "pt"})


def write_adapter(directory: Path, layers: int, seed: int) -> Path:
    """Writes a LoRA adapter over the attention of a Llama of this many layers, strong enough to
    change tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = 8
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": 4 * rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                "base_model_name_or_path": "tiny",
            }
        )
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, rows in (
            ("q", HEADS),
            ("k", KV_HEADS),
            ("v", KV_HEADS),
            ("o", HIDDEN // HEAD_SIZE),
        ):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj."
            weights[base + "lora_A.weight"] = (
                torch.randn(rank, HIDDEN, generator=generator) / HIDDEN**0.5
            )
            weights[base + "lora_B.weight"] = (
                torch.randn(rows * HEAD_SIZE, rank, generator=generator) / rank**0.5
            )
    save_file(weights, str(directory / "adapter_model.safetensors"))
    return directory
