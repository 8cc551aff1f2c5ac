"""A tiny but deep Llama with random weights, written as a Hugging Face checkpoint. As a hybrid, the
same weights with a window in three layers of four, which vLLM keeps in groups of their own.

Deep, because every layer costs compute when a prompt is read and only a few bytes when its cache is
loaded: this is the ratio that makes reuse pay, and a shallow toy would not show it. The weights
come from a fixed seed, so that every run of the demo has the same model.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

LAYERS = 32
HIDDEN = 256
INTERMEDIATE = 768
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
VOCABULARY = 2048
MAX_TOKENS = 8192

#: Standard deviation of the weights; queries and keys get the larger one, so that attention really
#: chooses between tokens and a wrong cache changes the output. Larger still, and rounding alone
#: would change it, too.
SPREAD = 0.08
SPREAD_QK = 0.1
SEED = 20

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
#: Tokens that layers with a window see.
WINDOW = 512
HYBRID = {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    * (LAYERS // 4),
    "sliding_window": WINDOW,
}
#: A window in every layer.
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": WINDOW,
}
KINDS: dict[str, dict[str, object]] = {"llama": {}, "hybrid": HYBRID, "mistral": MISTRAL}
#: The models of the demo, by the KV groups that vLLM makes of them: one of full attention, the
#: others with windows.
GROUPS = {"llama": 1, "hybrid": 4}


def write(directory: pathlib.Path, kind: str = "llama") -> int:
    """Write the checkpoint unless it is there already; returns the size of the weights in bytes."""
    weights = directory / "model.safetensors"
    config = json.dumps(CONFIG | KINDS[kind], indent=2) + "\n"
    if not (weights.exists() and (directory / "config.json").read_text() == config):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(_weights(), weights, metadata={"format": "pt"})
        (directory / "config.json").write_text(config)  # last: it says that the weights are whole
    return weights.stat().st_size


def prompt(length: int) -> list[int]:
    """A prompt of ``length`` token ids, the same in every run; ids 0 and 1 are left to begin and
    end of text."""
    return [
        int(token) for token in np.random.default_rng(SEED + 1).integers(2, VOCABULARY, size=length)
    ]


def _weights() -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int, spread: float = SPREAD) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.post_attention_layernorm.weight": ones,
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, SPREAD_QK),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, SPREAD_QK),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors
