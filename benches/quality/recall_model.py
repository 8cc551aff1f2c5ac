"""The recall model: a ``Qwen2ForCausalLM`` of half a million parameters, whose attention does
lookups.

Three layers of width 128, 4 query and 2 KV heads of size 32, feed-forward 256, 512 tokens, tied
embeddings: small enough to be trained in minutes on one core, and to be committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

LAYERS, HEADS, KV_HEADS, SIZE, THETA = 3, 4, 2, 32, 10_000.0
#: The committed weights, by the tokens of the longest sequences that they were trained with.
TRAINED = {
    length: Path(__file__).parent / name
    for length, name in [(1024, "weights"), (2048, "weights-2048")]
}
WEIGHTS = TRAINED[1024]


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """``x [..., t, heads, d]`` turned by the angles of the places ``[t]``."""
    rates = THETA ** (-torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)
    angles = places.float()[:, None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def projected(layer: Any, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[batch, t, heads, d]`` of a layer for tokens at these places."""
    attention, x = layer.self_attn, layer.input_layernorm(x)
    shape = (*x.shape[:-1], -1, SIZE)
    q, k, v = (
        proj(x).view(shape) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return rotated(q, places), rotated(k, places), v


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of a whole prompt, ``[batch, t, heads * d]``."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def after_attention(layer: Any, x: Tensor, found: Tensor) -> Tensor:
    """The output of a layer from its input and the output of attention."""
    x = x + layer.self_attn.o_proj(found)
    y: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return y


class Recall:
    """The model in float32, in parts, for a suite with its own attention."""

    def __init__(self, directory: Path = WEIGHTS) -> None:
        model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(directory)).float()
        weights = load_file(str(directory / "model.safetensors"))
        missing, unknown = model.load_state_dict(weights, strict=False)
        assert missing in ([], ["lm_head.weight"]) and not unknown, (missing, unknown)
        model.eval().requires_grad_(False)
        self.embed_tokens, self.layers, self._norm = (
            model.model.embed_tokens,
            model.model.layers,
            model.model.norm,
        )

    def logits(self, x: Tensor) -> Tensor:
        """From the last layer's output."""
        return nn.functional.linear(self._norm(x), self.embed_tokens.weight)
