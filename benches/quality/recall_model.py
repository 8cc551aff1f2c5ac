"""The recall model: a ``Qwen2ForCausalLM`` of half a million parameters, whose attention looks
things up.

Three layers of width 128, 4 query and 2 KV heads of size 32, feed-forward 256, 512 tokens, tied
embeddings. It is small enough to be trained in minutes on one core, and to be committed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from recall_task import VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, INNER = 3, 128, 4, 2, 32, 256
THETA, EPS = 10_000.0, 1e-6
#: Where the weights that the project uses lie.
WEIGHTS = Path(__file__).parent / "weights"


def config(dtype: str) -> dict[str, Any]:
    """What ``config.json`` says of it."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": dtype,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
    }


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """``x [..., t, heads, d]`` turned by the angles of the places ``[t]``."""
    rates = THETA ** (-torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)
    angles = places.float()[:, None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Norm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * self.weight).to(
            x.dtype
        )


class Attention(nn.Module):
    """Projections of attention; what attends stands in :meth:`forward` for training, and in the
    suite for decoding."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * SIZE)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * SIZE)
        self.o_proj = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def projected(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[..., t, heads, d]`` of tokens at these places."""
        shape = (*x.shape[:-1], -1, SIZE)
        q, k, v = (proj(x).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return rotated(q, places), rotated(k, places), v

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention of ``x [batch, t, width]``."""
        batch, length, _ = x.shape
        q, k, v = (y.transpose(1, 2) for y in self.projected(x, torch.arange(length)))
        if length > 256:
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        else:  # for short sequences the fused kernel's backward pass is many times slower on a CPU
            grouped = q.reshape(batch, KV_HEADS, -1, SIZE)  # [batch, kv heads, group * t, d]
            scores = (grouped @ k.transpose(-1, -2)).float() * SIZE**-0.5
            hidden = (
                torch.ones(length, length, dtype=torch.bool).triu(1).repeat(HEADS // KV_HEADS, 1)
            )
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
            out = (weights.to(v.dtype) @ v).view(batch, HEADS, length, SIZE)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer, with the names that the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm()
        self.mlp = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Recall(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, t, vocabulary]`` of ``tokens [batch, t]``."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """From the last layer's output."""
        return nn.functional.linear(self.norm(x), self.embed_tokens.weight)

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a checkpoint that vLLM and transformers read."""
        directory.mkdir(parents=True, exist_ok=True)
        weights = {
            f"model.{name}": value.detach().to(dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        save_file(weights, str(directory / "model.safetensors"), {"format": "pt"})
        (directory / "config.json").write_text(
            json.dumps(config(str(dtype).removeprefix("torch.")), indent=2) + "\n"
        )

    @classmethod
    def load(cls, directory: Path = WEIGHTS) -> Recall:
        """Read a checkpoint, in float32."""
        model = cls()
        weights = load_file(str(directory / "model.safetensors"))
        model.load_state_dict(
            {name.removeprefix("model."): value.float() for name, value in weights.items()}
        )
        model.eval().requires_grad_(False)
        return model
