"""The identity of an engine: every fact that shapes the bytes of its KV blocks, spelled out, and
its digest.

Two engines share blocks exactly when the JSON texts of their identities are equal. The scheduler
side computes it, each worker computes its own without the weights, and :func:`difference` names
what is not the same. Nothing in it depends on the environment as such, on paths, on the process or
on the order of a dictionary; where a setting is in doubt it stands in the identity: a needless miss
is a recomputation, a wrong hit is a wrong answer.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.identity import packing
from ucm.integration.vllm.connector.identity.canonical import differences, plain, text_of
from ucm.integration.vllm.connector.identity.weight_files import draft_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Changes whenever a field is added, removed or means something else.
FORMAT_VERSION = 1

#: The fields, in the order of the JSON text.
FIELDS = (
    "format_version",
    "architecture",
    "world_size",
    "dtype",
    "weights",
    "model_config",
    "position",
    "kv_dtype",
    "attention_backend",
    "kv_packing",
    "kv_layout",
    "kv_groups",
    "block_tokens",
    "tensor_parallel",
    "pipeline_parallel",
    "decode_context_parallel",
)

#: Keys of a model's configuration that say where it came from or how it is run, never what its KV
#: is. Those that start with an underscore are left out too (names, commit hashes, implementation
#: choices of transformers).
_NOT_OF_THE_MODEL = frozenset(
    {
        "dtype",
        "id2label",
        "label2id",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

#: Rope types whose rotation does not look at the engine's own limit of the context.
_ROPE_OF_CONFIG_ONLY = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})

#: Start of the names of model types that change their attention with the engine's limit of the
#: context.
_LIMIT_SENSITIVE = ("llama4", "mllama4")

#: Settings of multimodal input that change what the language model is fed; the items themselves are
#: in the keys.
_MULTIMODAL = (
    "language_model_only",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)


def engine_identity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights: str
) -> dict[str, Any]:
    """The identity, its fields in the order of :data:`FIELDS`, nested objects sorted by key.

    ``weights`` is what :class:`~.weights.WeightsDigest` says, or ``""`` in a worker.
    Raises :class:`~ucm.errors.InvalidInputError` when a part of the configuration has no stable
    description.
    """
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    groups = packing.transferable_groups(kv_cache_config)
    identity: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "architecture": _architecture(model),
        "world_size": parallel.world_size,
        "dtype": plain(model.dtype),
        "weights": weights,
        "model_config": _model_config(vllm_config),
        "position": _position(model),
        "kv_dtype": packing.kv_dtype(vllm_config, groups),
        "attention_backend": packing.attention_backends(vllm_config, groups),
        "kv_packing": packing.kv_packing(vllm_config, groups),
        "kv_layout": packing.kv_layout(kv_cache_config, cache),
        "kv_groups": packing.kv_groups(vllm_config, kv_cache_config, groups),
        "block_tokens": block_tokens(vllm_config, kv_cache_config),
        "tensor_parallel": {
            "kv_replicas": getattr(kv_cache_config, "kv_tp_replicas", 1),
            "size": parallel.tensor_parallel_size,
        },
        "pipeline_parallel": {
            "layers": _layers_per_rank(vllm_config),
            "size": parallel.pipeline_parallel_size,
        },
        "decode_context_parallel": {
            "interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
            "prefill_size": getattr(parallel, "prefill_context_parallel_size", 1),
            "size": getattr(parallel, "decode_context_parallel_size", 1),
        },
    }
    return {name: plain(identity[name]) for name in FIELDS}


def identity_text(identity: dict[str, Any]) -> str:
    """The JSON text that is hashed and written into a manifest."""
    return text_of({name: identity[name] for name in FIELDS})


def identity_digest(identity: dict[str, Any]) -> bytes:
    """SHA-256 of :func:`identity_text`, 32 bytes."""
    return hashlib.sha256(identity_text(identity).encode("ascii")).digest()


def namespace(identity: dict[str, Any]) -> str:
    """Name of the directory of this identity below a root: the first 32 hex digits of its
    digest."""
    return identity_digest(identity).hex()[:32]


def with_weights(identity: dict[str, Any], weights: str) -> dict[str, Any]:
    """The same identity with its weights filled in, once they are known."""
    return {name: weights if name == "weights" else identity[name] for name in FIELDS}


def identity_without_weights(identity: dict[str, Any]) -> dict[str, Any]:
    """What every process of an engine can compute on its own, for comparing the sides."""
    return {name: value for name, value in identity.items() if name != "weights"}


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The fields in which two identities differ, in words; empty when they are the same.

    Every line names a dotted path, the value of ``a`` ("here") and that of ``b`` ("there").
    """
    return differences(a, b)


def unidentifiable(vllm_config: VllmConfig) -> str:
    """Why blocks of this engine cannot be named by what came before them, as a sentence; empty when
    they can."""
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return (
            "this model rewrites tokens it has already computed, so blocks have no lasting content"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return (
            "calculate_kv_scales takes the KV scales from the first request, so no other process"
            " has the same"
        )
    return ""


def block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block of the store: those of a vLLM block, over all ranks that share the tokens
    of a context."""
    parallel = vllm_config.parallel_config
    ranks = getattr(parallel, "decode_context_parallel_size", 1)
    sizes = []
    for group in packing.transferable_groups(kv_cache_config):
        spec = group.kv_cache_spec
        sharded = ranks > 1 and getattr(spec, "dcp_sharded", True)
        sizes.append(spec.block_size * (ranks if sharded else 1))
    return math.lcm(*sizes) if sizes else vllm_config.cache_config.block_size


def _architecture(model: Any) -> str:
    named = getattr(model, "architecture", None) or getattr(model, "_architecture", None)
    if named:
        return str(named)
    return str((getattr(model.hf_config, "architectures", None) or ["unknown"])[0])


def _model_config(vllm_config: Any) -> dict[str, Any]:
    """The effective configuration, after every override, and what else of the settings changes the
    computation."""
    model = vllm_config.model_config
    described: dict[str, Any] = {
        "hf": _hf(model.hf_config),
        "quantization": getattr(model, "quantization", None),
        "sliding_window": model.get_sliding_window(),
    }
    if model.hf_text_config is not model.hf_config:
        described["hf_text"] = _hf(model.hf_text_config)
    # Named only where they differ from the default, so that a setting vLLM adds later does not
    # empty every store.
    optional = {
        "additional": getattr(vllm_config, "additional_config", None),
        "class_overrides": getattr(model, "model_class_overrides", None),
        "disable_sliding_window": getattr(model, "disable_sliding_window", False),
        "implementation": _unless(getattr(model, "model_impl", "auto"), "auto"),
        "lora": _lora(vllm_config),
        "quantization_settings": getattr(model, "quantization_config", None),
        "transformers": _transformers(model),
    }
    draft = draft_model(vllm_config)
    if draft is not None:
        optional["draft"] = {
            "hf": _hf(draft.hf_config),
            "method": vllm_config.speculative_config.method,
            "quantization": getattr(draft, "quantization", None),
            "transformers": _transformers(draft),
        }
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        optional["multimodal"] = {name: getattr(multimodal, name, None) for name in _MULTIMODAL}
        optional["multimodal_items"] = (
            "by content"  # in the keys; earlier versions had vLLM's names there
        )
        optional["image_processor"] = _hf(getattr(model, "hf_image_processor_config", None) or {})
    described.update({name: value for name, value in optional.items() if value})
    return described


def _transformers(model: Any) -> str | None:
    """The version of transformers, where its code computes the model."""
    ask = getattr(model, "using_transformers_backend", None)
    return (
        str(importlib.import_module("transformers").__version__)
        if callable(ask) and ask()
        else None
    )


def _hf(config: Any) -> Any:
    described = plain(config)
    if not isinstance(described, dict):
        return described
    return _without_names(
        {key: value for key, value in described.items() if key not in _NOT_OF_THE_MODEL}
    )


def _without_names(value: Any) -> Any:
    """Drops, at any depth, what says where a configuration was read from or by which version of a
    library."""
    if isinstance(value, list):
        return [_without_names(item) for item in value]
    if isinstance(value, dict):
        return {
            key: _without_names(item)
            for key, item in value.items()
            if not key.startswith("_") and key != "transformers_version"
        }
    return value


def _lora(vllm_config: Any) -> dict[str, Any]:
    """What decides how an adapter is applied; empty where that follows from the adapter and the
    model's dtype."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return {}
    described: dict[str, Any] = {}
    dtype = plain(getattr(lora, "lora_dtype", None))
    if dtype not in (None, "auto", plain(vllm_config.model_config.dtype)):
        described["dtype"] = dtype
    targets = getattr(lora, "target_modules", None)
    if targets:
        described["target_modules"] = sorted(targets)
    for flag in ("enable_tower_connector_lora", "enable_mixed_moe_lora_format"):
        if getattr(lora, flag, False):
            described[flag] = True
    return described


def _position(model: Any) -> dict[str, Any]:
    """How positions enter the keys, and the engine's own limit of the context where the rule looks
    at it."""
    text = model.hf_text_config
    names = [
        "alibi",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "position_embedding_type",
        "rope_local_base_freq",
        "rotary_pct",
    ]
    # transformers 5 has one, with the others as aliases of it; 4 has the others only.
    names += (
        ["rope_parameters"] if hasattr(text, "rope_parameters") else ["rope_scaling", "rope_theta"]
    )
    described = {name: value for name in names if (value := getattr(text, name, None)) is not None}
    model_type = str(getattr(text, "model_type", ""))
    if not _rope_types(described) <= _ROPE_OF_CONFIG_ONLY or model_type.startswith(
        _LIMIT_SENSITIVE
    ):
        described["max_model_len"] = model.max_model_len
    return described


def _rope_types(value: Any) -> set[str]:
    """Every rope type named at any depth (models with several attention kinds nest their
    parameters)."""
    found: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("rope_type", "type") and isinstance(item, str):
                found.add(item)
            else:
                found |= _rope_types(item)
    return found


def _layers_per_rank(vllm_config: Any) -> list[int]:
    """How many layers each pipeline rank holds: with the same count another split may hold other
    layers."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    total = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    if size == 1 or not isinstance(total, int):
        return []
    split = importlib.import_module("vllm.distributed.utils").get_pp_indices
    bounds = [split(total, rank, size) for rank in range(size)]
    return [end - start for start, end in bounds]


def _unless(value: Any, default: Any) -> Any:
    return None if value == default else value
