"""Tiny models with random weights, written as any checkpoint is: config.json and safetensors.

The weights are large on purpose: attention then decides the output, so wrong KV bytes give wrong
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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

#: A matrix of random numbers, by its rows, its columns and a gain.
Matrix = Callable[..., torch.Tensor]


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


def llama4_config() -> dict[str, Any]:
    """A small Llama 4 without experts: layers that see a chunk, and one that sees everything."""
    return llama_config(4) | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": INTERMEDIATE,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": 64,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def lfm2_config() -> dict[str, Any]:
    """A small LFM2: layers with a short convolution, whose state vLLM keeps as Mamba's, beside full
    attention."""
    return llama_config(4) | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": HIDDEN,
        "block_dim": HIDDEN,
        "block_multiple_of": 64,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "tie_embedding": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def gpt_oss_config() -> dict[str, Any]:
    """A small gpt-oss: sinks in every layer, every other one with a window, and experts."""
    return llama_config(4) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_LEN // 2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    }


#: The models, by their names in tools/matrix.py.
CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": lambda: llama_config(3),
    "gemma3": gemma3_config,
    "gpt_oss": gpt_oss_config,
    "mistral": mistral_config,
    "llama4": llama4_config,
    "lfm2": lfm2_config,
}
#: vLLM makes a group for chunks only with it.
CHUNKS = {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}
#: Those with states, which vLLM keeps only at some ends of blocks.
STATES = {"lfm2"}
#: Their KV groups, as vLLM makes them.
GROUPS = {"llama": 1, "gemma3": 3, "gpt_oss": 2, "mistral": 1, "llama4": 4, "lfm2": 2}


def write_model(directory: Path, config: dict[str, Any], seed: int = 7) -> Path:
    """Writes a model of that config with weights that depend on the seed alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    make = {"lfm2": _lfm2_weights, "gpt_oss": _gpt_oss_weights}
    weights = make.get(config["model_type"], _llama_weights)(config, matrix)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _llama_weights(config: dict[str, Any], matrix: Matrix) -> dict[str, torch.Tensor]:
    gemma = config["model_type"].startswith("gemma")
    mlp = "feed_forward" if config["model_type"] == "llama4_text" else "mlp"
    norm = torch.zeros if gemma else torch.ones
    # Gemma's model scales them itself, and the last layer has the same
    scale = 1.0 if gemma else HIDDEN**0.5
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, scale)}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        weights |= _attention(base, matrix, "o_proj") | {
            base + f"{mlp}.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            base + f"{mlp}.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            base + f"{mlp}.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
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
    return weights


def _lfm2_weights(config: dict[str, Any], matrix: Matrix) -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 1.0),
        "model.embedding_norm.weight": torch.ones(HIDDEN),
    }
    for layer, kind in enumerate(config["layer_types"]):
        base = f"model.layers.{layer}."
        if kind == "conv":
            weights |= {
                base + "conv.in_proj.weight": matrix(3 * HIDDEN, HIDDEN, 2.0),
                base + "conv.conv.weight": matrix(HIDDEN, 3, 3.0).unsqueeze(1),
                base + "conv.out_proj.weight": matrix(HIDDEN, HIDDEN, 2.0),
            }
        else:
            weights |= _attention(base, matrix, "out_proj") | {
                base + "self_attn.q_layernorm.weight": torch.ones(HEAD_SIZE),
                base + "self_attn.k_layernorm.weight": torch.ones(HEAD_SIZE),
            }
        weights |= {
            base + "feed_forward.w1.weight": matrix(INTERMEDIATE, HIDDEN),
            base + "feed_forward.w3.weight": matrix(INTERMEDIATE, HIDDEN),
            base + "feed_forward.w2.weight": matrix(HIDDEN, INTERMEDIATE),
            base + "operator_norm.weight": torch.ones(HIDDEN),
            base + "ffn_norm.weight": torch.ones(HIDDEN),
        }
    return weights


def _gpt_oss_weights(config: dict[str, Any], matrix: Matrix) -> dict[str, torch.Tensor]:
    experts, heads = config["num_local_experts"], HEADS * HEAD_SIZE
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        weights |= _attention(base, matrix, "o_proj") | {
            base + "self_attn.q_proj.bias": matrix(heads, 1)[:, 0],
            base + "self_attn.k_proj.bias": matrix(KV_HEADS * HEAD_SIZE, 1)[:, 0],
            base + "self_attn.v_proj.bias": matrix(KV_HEADS * HEAD_SIZE, 1)[:, 0],
            base + "self_attn.o_proj.bias": matrix(HIDDEN, 1)[:, 0],
            base + "self_attn.sinks": matrix(HEADS, 1)[:, 0],
            base + "mlp.router.weight": matrix(experts, HIDDEN),
            base + "mlp.router.bias": matrix(experts, 1)[:, 0],
            base + "mlp.experts.gate_up_proj": torch.stack(
                [matrix(HIDDEN, 2 * INTERMEDIATE) for _ in range(experts)]
            ),
            base + "mlp.experts.gate_up_proj_bias": matrix(experts, 2 * INTERMEDIATE),
            base + "mlp.experts.down_proj": torch.stack(
                [matrix(INTERMEDIATE, HIDDEN) for _ in range(experts)]
            ),
            base + "mlp.experts.down_proj_bias": matrix(experts, HIDDEN),
            base + "input_layernorm.weight": torch.ones(HIDDEN),
            base + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights


def _attention(base: str, matrix: Matrix, last: str) -> dict[str, torch.Tensor]:
    base += "self_attn."
    return {
        base + "q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN, 2.0),
        base + "k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN, 2.0),
        base + "v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN, 3.0),
        base + f"{last}.weight": matrix(HIDDEN, HEADS * HEAD_SIZE, 3.0),
    }


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
