"""Whether a request of this engine may continue from blocks that another request computed.

vLLM sets ``enable_prefix_caching`` to false where it may not, over the user's own setting and in
several places: while it makes the configuration, before it makes the scheduler, and in a worker
while it builds the layers. The flag alone does not tell these from a user who switched vLLM's own
cache off, whom ucm serves. :func:`why_not_reusable` is the one place that decides;
``tests/vllm_unit/test_prefix_reuse.py`` lists vLLM's assignments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.identity import packing

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Backends whose results depend, in vLLM's batch-invariant mode, on where a prompt begins.
_NOT_BATCH_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})


def why_not_reusable(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    workers_cache_prefixes: bool = True,
) -> str:
    """Why nothing may be loaded, and storing is of no use, as a sentence; empty where a request may
    continue.

    ``workers_cache_prefixes``: whether ``enable_prefix_caching`` is still true in every worker, by
    their handshakes.
    """
    model = vllm_config.model_config
    if not _is_causal(vllm_config, kv_cache_config):
        return (
            "this model attends to later tokens, so a block depends on more than the tokens"
            " before it"
        )
    if not getattr(model, "is_prefix_caching_supported", True):
        return (
            f"vLLM computes each prompt of this engine whole ({_kind(model)}) and supports no"
            " prefix caching for it: nothing is claimed or stored"
        )
    if backends := _varying_backends(vllm_config, kv_cache_config):
        return (
            f"with VLLM_BATCH_INVARIANT the attention backend {', '.join(backends)} gives other"
            " values when a prompt continues from stored blocks: nothing is claimed or stored;"
            " choose another --attention-backend"
        )
    if caches_prefixes(vllm_config):
        if workers_cache_prefixes:
            return ""
        return (
            "a worker switched prefix caching off while it built the model, so its layers cannot"
            " continue from stored blocks: nothing is claimed or stored"
        )
    if not getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True):
        return (
            "prefix caching and chunked prefill are both off, as vLLM has it where a prompt must be"
            " computed whole (MLA on a CPU without AMX): nothing is claimed or stored; if you"
            " switched both off, leave one of them on"
        )
    return ""


def caches_prefixes(vllm_config: VllmConfig) -> bool:
    """What ``enable_prefix_caching`` is now, in this process."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def _is_causal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    if getattr(getattr(vllm_config, "attention_config", None), "use_non_causal", False):
        return False
    if not getattr(vllm_config.model_config.hf_config, "is_causal", True):
        return False
    return not any(
        getattr(spec, "non_causal", False)
        for group in kv_cache_config.kv_cache_groups
        for spec in packing.layer_specs(group.kv_cache_spec)
    )


def _kind(model: Any) -> str:
    """What of a model vLLM goes by when it says that prefixes cannot be cached."""
    attention = str(getattr(model, "attn_type", "unknown"))
    pooler = getattr(model, "pooler_config", None)
    if pooler is None:
        return f"attention {attention}"
    kinds = (getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type"))
    return (
        f"attention {attention}, pooling"
        f" {'/'.join(str(kind) for kind in kinds if kind) or 'by default'}"
    )


def _varying_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    import vllm.envs

    if not getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False):
        return []
    groups = packing.transferable_groups(kv_cache_config)
    used = {name for names in packing.attention_backends(vllm_config, groups) for name in names}
    return sorted(used & _NOT_BATCH_INVARIANT)
