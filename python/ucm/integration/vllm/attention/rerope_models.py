"""Models of vLLM that leave their keys unrotated, for ReRoPE, under names of their own.

vLLM loads one where ``--hf-overrides`` names it. Layers, weights and everything else are vLLM's;
only the rotation of a layer's queries and keys moves into its attention (:mod:`.rerope`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from ucm.integration.vllm.attention.rerope import serve
from ucm.sparse.rerope.rule import RotationTable


class Unrotated(nn.Module):
    """The rotation of a layer that attention rotates for: none."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as they are."""
        del positions
        return query, key


class _LeavesUnrotated:
    """Makes the model, then takes the rotation out of its layers. Raises
    :class:`~ucm.errors.ConfigError` where ReRoPE is not configured or cannot be computed."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        rotations: dict[int, RotationTable] = {}
        for layer in self.modules():  # type: ignore[attr-defined]
            rotary, attention = getattr(layer, "rotary_emb", None), getattr(layer, "attn", None)
            if rotary is None or attention is None:
                continue
            if serve(attention, rotary, rotations, vllm_config):
                layer.rotary_emb = Unrotated()
            else:  # ucm is off: vLLM names the graphs that it compiles by this configuration
                vllm_config.model_config.hf_config.update({"ucm_rotates": True})


class UcmReRopeLlamaForCausalLM(_LeavesUnrotated, LlamaForCausalLM):
    """Llama."""


class UcmReRopeQwen2ForCausalLM(_LeavesUnrotated, Qwen2ForCausalLM):
    """Qwen2."""


class UcmReRopeQwen3ForCausalLM(_LeavesUnrotated, Qwen3ForCausalLM):
    """Qwen3."""


class UcmReRopeQwen3MoeForCausalLM(_LeavesUnrotated, Qwen3MoeForCausalLM):
    """Qwen3-MoE."""
