"""ReRoPE in an engine: whether it is configured, and the attention backends that compute by it.

Keys stay unrotated in vLLM's cache, so the model must not rotate them: the classes of
:mod:`.rerope_models` leave that out and pass their rotation on to the attention of their layers
(:func:`serve`). Backends are derived from vLLM's for a CPU and from its Triton backend, with the
same pages, spec and metadata. On a CPU pages are packed as for "vec" on every processor, since only
ucm's code reads them. They claim no other backend's packing, and the rule is part of the engine's
identity (:func:`described`), so no engine without it meets these blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ucm.config import parse
from ucm.errors import ConfigError
from ucm.integration.vllm.compat.versions import installed, why_unserved
from ucm.integration.vllm.early import UNROTATED, extra_config
from ucm.sparse.rerope.rule import RotationTable, Rule, paged_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

#: Names of the backends that are derived from.
SERVED = ("CPU_ATTN", "TRITON_ATTN")
#: Classes of vLLM whose rotation has constant rates, all channels of a head.
_ROTATIONS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)

#: Speculative methods without keys of their own.
_WITHOUT_KEYS = ("ngram", "ngram_gpu", "suffix")

#: Our section that was read last, and the rule in it.
_last: tuple[Any, Rule | None] = (None, None)


def rule_of(vllm_config: Any) -> Rule | None:
    """The rule of an engine; None where ReRoPE is not configured, or ucm is switched off. Raises
    :class:`~ucm.errors.ConfigError` where the configuration is wrong."""
    global _last
    found = extra_config(vllm_config)
    if found is None:
        return None
    if _last[0] is not found:
        config = parse(found)
        rule = Rule(config.rerope.window, config.rerope.training_length, config.rerope.log_scale)
        _last = found, rule if config.enabled and config.rerope.enabled else None
    return _last[1]


def described(vllm_config: Any) -> dict[str, Any]:
    """The part of an engine's identity that ReRoPE adds; empty without it."""
    rule = rule_of(vllm_config)
    if rule is None:
        return {}
    keys = {"window": rule.window, "training_length": rule.training_length}
    return {"rule": "rerope", "keys": "unrotated", "log_scale": rule.log_scale, **keys}


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises :class:`~ucm.errors.ConfigError`, with what to change, where an engine with a rule
    cannot compute by it."""
    (architecture,) = list(vllm_config.model_config.hf_config.architectures or ["none"])[:1]
    parallel, dtype = vllm_config.parallel_config, vllm_config.cache_config.cache_dtype
    speculative = vllm_config.speculative_config
    problem = ""
    if architecture in UNROTATED:
        problem = (
            f"{architecture} rotates its keys: start vLLM with --hf-overrides"
            f' \'{{"architectures": ["{UNROTATED[architecture]}"]}}\', which `ucm vllm-args` writes'
        )
    elif architecture not in UNROTATED.values():
        problem = f"{architecture} is not served, only {', '.join(UNROTATED)}"
    elif text := why_unserved(installed()):
        problem = text
    elif getattr(parallel, "decode_context_parallel_size", 1) > 1:
        problem = "decode context parallelism splits a block's tokens over ranks"
    elif dtype not in ("auto", "float16", "bfloat16", "float32"):
        problem = f'the KV cache is quantised (kv_cache_dtype "{dtype}")'
    elif speculative is not None and speculative.method not in _WITHOUT_KEYS:
        problem = f'a draft model rotates its keys (speculative method "{speculative.method}")'
    if problem:
        raise ConfigError(f"rerope: {problem}; change that, or leave out rerope")


def serve(attention: Any, rotary: Any, rotations: dict[int, RotationTable], config: Any) -> bool:
    """Pass a layer's rotation to its attention. False where ucm is switched off, so that the model
    rotates as it was trained. ``rotations`` are those made before, by the identity of vLLM's
    module; ``config`` is vLLM's. Raises :class:`~ucm.errors.ConfigError` where attention cannot
    compute by the rule."""
    rule = rule_of(config)
    if rule is None:
        ours = extra_config(config)
        if ours is not None and not parse(ours).enabled:
            return False
        raise ConfigError(
            "this architecture is computed by ReRoPE, which is not configured: add rerope to the"
            " configuration of UCMConnector, or leave out --hf-overrides"
        )
    whole = rotary.rotary_dim == rotary.head_size and rotary.is_neox_style
    if type(rotary).__name__ not in _ROTATIONS or not whole:
        kind = f"{type(rotary).__name__} of {rotary.rotary_dim} of {rotary.head_size} channels"
        kind += "" if rotary.is_neox_style else " in pairs of neighbours"
        raise ConfigError(f"rerope: the rotation of this model is not served: {kind}")
    impl = attention.impl
    if not isinstance(impl, _ReRope):
        raise ConfigError(
            f"rerope: the attention backend {attention.get_attn_backend().get_name()} is not"
            f" served; choose one of {', '.join(SERVED)} (--attention-backend)"
        )
    if getattr(attention, "sliding_window", None) is not None:
        raise ConfigError("rerope: layers with a sliding window are not served; leave out rerope")
    if id(rotary) not in rotations:
        cos_sin = rotary._compute_cos_sin_cache()[:2]
        made = RotationTable.like(cos_sin, config.model_config.max_model_len)
        made.move(cos_sin.device)  # before vLLM measures what memory is left
        rotations[id(rotary)] = made
    impl.rule, impl.rotation = rule, rotations[id(rotary)]
    return True


def derive(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend over one of :data:`SERVED`."""
    from vllm.v1.attention.backend import AttentionCGSupport

    kind = _OnCpu if base.get_name() == "CPU_ATTN" else _OnGpu
    impl_base, builder_base = base.get_impl_cls(), base.get_builder_cls()
    impl = type(f"ReRope{impl_base.__name__}", (kind, impl_base), {"__module__": __name__})

    class Builder(builder_base):  # type: ignore[misc, valid-type]
        """Marks the metadata as the original does; no full graph is captured around attention."""

        _cudagraph_support = AttentionCGSupport.NEVER

        @classmethod
        def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
            return AttentionCGSupport.NEVER

        def build(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(*args, **kwargs)
            metadata.use_rerope = True
            return metadata

    made: type[AttentionBackend] = type(
        f"ReRope{base.__name__}",
        (base,),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} over unrotated keys.",
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: Builder),
        },
    )
    return made


class _ReRope:
    """Attention of a layer by the rule that :func:`serve` set."""

    rule: Rule
    rotation: RotationTable

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """The output is not quantised here."""
        del quant_key
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer, into ``output [t, heads, d]``."""
        if attn_metadata is None:  # a profiling run
            given = (layer, query, key, value, kv_cache, None, output)
            found: Tensor = super().forward(*given, *args, **kwargs)  # type: ignore[misc]
            return found
        count = attn_metadata.num_actual_tokens
        self._attend(query[:count], kv_cache, attn_metadata, output[:count])
        return output

    @abstractmethod
    def _attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        """Attention of queries ``[t, heads, d]`` over a layer's pages."""


class _OnCpu(_ReRope):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write unrotated keys, and values, packed as :func:`paged_attention` reads them."""
        whole = key.shape[-1] % 32 == 0 and kv_cache.shape[2] % 32 == 0
        scales = {"_k_scale_float": layer._k_scale_float, "_v_scale_float": layer._v_scale_float}
        packed = SimpleNamespace(isa="vec" if whole else "vec16", **scales)
        write = super().do_kv_cache_update  # type: ignore[misc]
        write(packed, key, value, kv_cache, slot_mapping)

    def _attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        rows = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        scale = float(self.scale)  # type: ignore[attr-defined]
        paged_attention(query, kv_cache, *rows, self.rotation, self.rule, scale, output)


class _OnGpu(_ReRope):
    def _attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        from ucm.sparse.rerope.triton_unified_attention_rerope import unified_attention_rerope

        if self.rotation.table.device != query.device:  # once, for all layers
            self.rotation.move(query.device)
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        unified_attention_rerope(
            query,
            keys,
            values,
            output,
            metadata.query_start_loc,
            metadata.max_query_len,
            metadata.seq_lens,
            float(self.scale),  # type: ignore[attr-defined]
            self.rule.window,
            metadata.block_table,
            self.rotation.table,
            training_length=self.rule.training_length if self.rule.log_scale else None,
        )
