"""Whether an engine is configured for sparse attention, and what rules that out."""

from __future__ import annotations

from typing import Any

from ucm.config import UcmConfig, load
from ucm.errors import ConfigError
from ucm.integration.vllm.attention.registering import extra_config
from ucm.integration.vllm.compat.versions import installed, why_unserved

#: What was found for the configuration that was asked about last; every layer of a model asks about
#: the same one.
_last: tuple[Any, UcmConfig | None] = (None, None)


def sparse_config(vllm_config: Any) -> UcmConfig | None:
    """Our configuration where it asks for sparse attention and this version of vLLM is served, else
    None. Raises :class:`~ucm.errors.ConfigError` where it is wrong."""
    global _last
    found = extra_config(vllm_config)
    if found is None:
        return None
    if _last[0] is not found:
        config = load(found)
        wanted = config.enabled and config.sparse.enabled and not why_unserved(installed())
        _last = found, config if wanted else None
    return _last[1]


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises :class:`~ucm.errors.ConfigError`, which says what to change, where sparse attention
    cannot be right."""
    parallel = vllm_config.parallel_config
    groups = [
        group
        for group in kv_cache_config.kv_cache_groups
        if getattr(group, "enable_kv_transfer", True)
    ]
    problem = ""
    if vllm_config.speculative_config is not None:
        problem = (
            "speculative decoding computes several tokens a step, of which some are taken back"
        )
    elif getattr(parallel, "decode_context_parallel_size", 1) > 1:
        problem = "decode context parallelism splits a block's tokens over ranks"
    elif getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        problem = "prefill context parallelism splits a request's tokens over ranks"
    elif getattr(parallel, "enable_dbo", False) or (getattr(parallel, "num_ubatches", 1) or 1) > 1:
        problem = "microbatches (enable_dbo) split the rows of a step"
    elif len(groups) != 1:
        problem = f"this model has {len(groups)} KV cache groups, and blocks are chosen in one"
    elif any(getattr(spec, "kv_quant_mode", 0) for spec in _specs(groups[0].kv_cache_spec)):
        problem = (
            f'the KV cache is quantised (kv_cache_dtype "{vllm_config.cache_config.cache_dtype}")'
        )
    if problem:
        raise ConfigError(
            f"sparse attention: {problem}: not supported; change that, or set ENABLE_SPARSE=false"
        )


def _specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]
