"""The identity of an engine: every fact that shapes the bytes of its KV blocks, and its digest.

Two engines share blocks exactly when the JSON texts of their identities are equal. The scheduler
side computes it, each worker computes its own without the weights, and :func:`differences` names
the parts that differ. Nothing in it depends on the environment as such, on paths, on object
addresses, on the process or on the order of a dictionary; a setting that may matter is part of the
identity: a needless miss is a recomputation, a wrong hit is a wrong answer.

How KV bytes are laid out (dtype, attention backend, packing, layout, groups) is computed from the
configuration alone, because the scheduler side has no layers when the ranks are other processes.
Where layers are in reach, their own backend is used; a difference is found in the handshake. An
attention backend or a KV cache spec from outside vLLM counts as another one, since its packing is
not known. A class that stores the very bytes of the one it is derived from says so in its own body,
``ucm_packs_like = <that class>``, and is described as that class; the claim is not inherited.

:class:`LiveIdentity` is the identity of what an engine computes now. As long as memory holds what
was loaded, the weights are named by their files. When vLLM was ordered to read other files since
then, these name the weights. Weights that were written by other means have no name that another
process could know: their KV is stored under a random one, for this process alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import importlib
import inspect
import json
import math
import os
import platform
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ucm.errors import InvalidInputError, UcmError
from ucm.integration.vllm.attention import rerope
from ucm.integration.vllm.compat.versions import installed, kv_replicas
from ucm.integration.vllm.connector.guard import info_once, logger
from ucm.integration.vllm.connector.identity.weights import (
    DECLARED,
    WeightsDigest,
    WeightSource,
    WeightsReport,
    WeightsState,
    draft_model,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


# Configuration as JSON whose text is the same in every process
# --------------------------------------------------------------------------------------------------

#: Objects nested deeper than this are taken for a cycle.
MAX_DEPTH = 32

#: Characters of a value shown in a difference.
_SHOWN = 120


def text_of(value: Any) -> str:
    """The one JSON text of a plain value: no spaces, ASCII only, keys in their order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON values, nested dictionaries sorted by key. Raises
    :class:`~ucm.errors.InvalidInputError` for an object that has no stable description."""
    if depth > MAX_DEPTH:
        limit = {"limit": MAX_DEPTH}
        wrong = "a configuration value is nested too deeply to describe"
        raise InvalidInputError(wrong, context=limit)
    if isinstance(value, enum.Enum):  # before int and str: many enums are both
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        described = {_key(key): plain(item, depth + 1) for key, item in value.items()}
        return dict(sorted(described.items()))
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth + 1) for item in value), key=text_of)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _described(value, depth)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two plain values differ: one sentence each, with the dotted path and both values, that
    of ``a`` ("here") and that of ``b`` ("there")."""
    where = path or "the value"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[str] = []
        for key in list(a) + [key for key in b if key not in a]:
            step = f"{path}.{key}" if path else key
            if key not in a or key not in b:
                found.append(f"{step} is {_shown(a, key)} here and {_shown(b, key)} there")
            else:
                found += differences(a[key], b[key], step)
        return found
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return [f"{where} has {len(a)} items here and {len(b)} there"]
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{where}[{i}]")]
    # 1, 1.0 and true are equal in Python, but not as JSON texts, which are what is hashed.
    if text_of(a) == text_of(b):
        return []
    return [f"{where} is {_short(a)} here and {_short(b)} there"]


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(plain(key))


def _described(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    for method in ("to_dict", "model_dump"):
        describe: Callable[[], Any] | None = getattr(value, method, None)
        if callable(describe):
            return plain(describe(), depth + 1)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields, depth + 1)
    # what a callable object does is not in its attributes
    if hasattr(value, "__dict__") and not callable(value):
        return plain({"": kind.__qualname__, **vars(value)}, depth + 1)
    raise InvalidInputError(
        "a configuration value has no stable description, so no identity can be made from it",
        context={"type": f"{kind.__module__}.{kind.__qualname__}"},
    )


def _name(value: Any) -> str:
    name = f"{value.__module__}.{value.__qualname__}"
    if "<" in name:  # a lambda or a local function: its name does not say what it does
        raise InvalidInputError(
            "a nameless function stands in the configuration, so no identity can be made from it",
            context={"function": name},
        )
    return name


def _shown(mapping: Mapping[str, Any], key: str) -> str:
    return _short(mapping[key]) if key in mapping else "absent"


def _short(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# How KV bytes are laid out
# --------------------------------------------------------------------------------------------------

#: Attribute by which a class claims the packing of one that it is derived from.
CLAIM = "ucm_packs_like"

#: Features of a processor by which packing may differ within one instruction set (not on x86).
_FEATURES = ("bf16", "i8mm", "sve", "sve2", "v", "zvl128b", "zvl256b")


def transferable_groups(kv_cache_config: Any) -> list[Any]:
    """The KV groups whose blocks hold lasting state, in vLLM's order."""
    groups = kv_cache_config.kv_cache_groups
    return [group for group in groups if getattr(group, "enable_kv_transfer", True)]


def layer_specs(spec: Any) -> list[Any]:
    """The specs of a group's spec: one per layer where vLLM keeps them apart, else the spec
    itself."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


def packed_as(kind: type) -> type:
    """The class whose bytes this backend or spec stores: itself, unless it claims those of a base.
    Raises :class:`~ucm.errors.InvalidInputError` for a claim to pack like something else."""
    while (base := vars(kind).get(CLAIM)) is not None:
        if not (isinstance(base, type) and base is not kind and issubclass(kind, base)):
            raise InvalidInputError(
                f"{CLAIM} names a class that this one is derived from",
                context={"class": f"{kind.__module__}.{kind.__qualname__}", CLAIM: repr(base)},
            )
        kind = base
    return kind


def spec_kind(spec: Any) -> str:
    """Name of a spec's kind: that of the class whose pages it has."""
    return packed_as(type(spec)).__name__


def _spec(group: Any) -> Any:
    # vLLM's scheduler sees only the first spec of a group that keeps one per layer. It describes
    # the group here; the block strides of kv_groups() distinguish the layers.
    return layer_specs(group.kv_cache_spec)[0]


def kv_dtype(vllm_config: VllmConfig, groups: Sequence[Any]) -> dict[str, Any]:
    """What one number of the cache is: vLLM's name for it, its storage and how it is quantised."""
    cache, model_dtype = vllm_config.cache_config, plain(vllm_config.model_config.dtype)
    specs = [_spec(group) for group in groups]
    # A backend may choose the name in the worker only; the spec carries that to the scheduler.
    names = {getattr(spec, "cache_dtype_str", None) or cache.cache_dtype for spec in specs}
    described: dict[str, Any] = {
        "names": sorted(model_dtype if name == "auto" else name for name in names),
        "quantised": [plain(getattr(spec, "kv_quant_mode", None)) for spec in specs],
        "skip_layers": sorted(getattr(cache, "kv_cache_dtype_skip_layers", None) or []),
        "storage": [plain(getattr(spec, "dtype", None)) for spec in specs],
    }
    indexer = getattr(getattr(vllm_config, "attention_config", None), "indexer_kv_dtype", "auto")
    if indexer != "auto":
        described["indexer"] = indexer
    return described


def attention_backends(vllm_config: VllmConfig, groups: Sequence[Any]) -> list[list[str]]:
    """Names of the attention backends of each group, sorted."""
    every = ((_actual(vllm_config, group), group) for group in groups)
    return [sorted(names or {_expected(vllm_config, group)}) for names, group in every]


def _actual(vllm_config: Any, group: Any) -> set[str]:
    layers = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    names = set()
    for name in group.layer_names:
        get_backend = getattr(layers.get(name), "get_attn_backend", None)
        if not callable(get_backend):
            return set()
        names.add(_backend_name(get_backend()))
    return names


def _expected(vllm_config: Any, group: Any) -> str:
    """vLLM's own selection for this group, without its layers."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend, get_mamba_attn_backend

    spec, model = _spec(group), vllm_config.model_config
    if spec_kind(spec) == "MambaSpec":
        return _backend_name(get_mamba_attn_backend(spec.mamba_type))
    cache_dtype = getattr(spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype
    wanted = {
        "head_size": getattr(spec, "head_size", None),
        "dtype": model.dtype,
        "kv_cache_dtype": cache_dtype,
        "use_mla": bool(getattr(model, "use_mla", False)),
        "use_sparse": hasattr(model.hf_text_config, "index_topk"),
        "use_mm_prefix": bool(getattr(model, "is_mm_prefix_lm", False)),
        "has_sliding_window": getattr(spec, "sliding_window", None) is not None,
        "num_heads": model.get_num_attention_heads(vllm_config.parallel_config),
    }
    try:
        with set_current_vllm_config(vllm_config):
            return _backend_name(get_attn_backend(**_accepted(get_attn_backend, wanted)))
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        # The engine runs, so the workers know better; the handshake names the difference.
        return f"not known to the scheduler ({type(error).__name__})"


def _accepted(function: Callable[..., Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that this version's function has."""
    known = inspect.signature(function).parameters
    return {key: value for key, value in wanted.items() if key in known}


def _backend_name(backend: Any) -> str:
    # A backend from outside vLLM may have the name of the one it replaces and pack differently.
    # vLLM makes one for chunked attention, with only a builder of metadata: it packs as its base.
    backend = packed_as(backend)
    own = {name for name in vars(backend) if not name.startswith("_")}
    if own == {"get_builder_cls"} and backend.get_builder_cls().__module__.startswith("vllm."):
        backend = packed_as(backend.__base__)
    name = str(backend.get_name())
    if backend.__module__.startswith("vllm."):
        return name
    return f"{name} ({backend.__module__}.{backend.__qualname__})"


def kv_packing(vllm_config: VllmConfig, groups: Sequence[Any]) -> dict[str, Any]:
    """How a backend arranges the numbers inside one block, which no shape shows."""
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    described: dict[str, Any] = {
        # Any build may mend a model or change a kernel without a change of shape.
        "engine": f"vllm {installed()}",
        "groups": [_group_packing(vllm_config, group, on_cpu) for group in groups],
        "platform": plain(getattr(current_platform, "_enum", None)) or current_platform.device_type,
    }
    modes = {plain(getattr(_spec(group), "kv_quant_mode", None)) for group in groups}
    if modes - {None, "NONE"}:
        with contextlib.suppress(AttributeError, NotImplementedError):
            described["fp8"] = plain(current_platform.fp8_dtype())
    return described


def _group_packing(vllm_config: Any, group: Any, on_cpu: bool) -> dict[str, Any]:
    spec = _spec(group)
    described: dict[str, Any] = {
        "heads": _number(spec, "num_heads"),
        "page_bytes": spec.page_size_bytes,
        "state_bytes": _number(spec, "state_content_size_bytes"),
        "states": _number(spec, "num_states"),
    }
    if on_cpu:
        described.update(_cpu_packing(vllm_config, spec))
    return described


def _cpu_packing(vllm_config: Any, spec: Any) -> dict[str, Any]:
    """The CPU backend packs keys by instruction set: which one it takes, as it decides itself."""
    machine = platform.machine()
    described: dict[str, Any] = {"machine": machine}
    if machine not in ("x86_64", "AMD64"):
        described["features"] = _processor_features()
    if hasattr(spec, "head_size"):
        from vllm.v1.attention.backends import cpu_attn

        choose = getattr(cpu_attn, "_get_attn_isa", None)
        wanted = {
            "dtype": vllm_config.model_config.dtype,
            "block_size": spec.block_size,
            "head_size": spec.head_size,
            "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        }
        try:
            described["isa"] = choose(**_accepted(choose, wanted)) if choose else ""
        except NotImplementedError as error:
            described["isa"] = f"unsupported: {error}"
    return described


def _processor_features() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            words = set(file.read().replace(":", " ").replace("_", " ").split())
    except OSError:
        return []
    return [feature for feature in _FEATURES if feature in words]


def _number(spec: Any, name: str) -> int | None:
    try:
        value = getattr(spec, name, None)
    except NotImplementedError:
        return None
    return int(value) if value is not None else None


def kv_layout(kv_cache_config: Any, cache_config: Any) -> str:
    """The physical order of the axes, as vLLM names it; empty for versions that have none."""
    own = getattr(kv_cache_config, "kv_cache_layout", None)
    layout = own or getattr(cache_config, "kv_cache_layout", None)
    return str(plain(layout)) if layout else ""


def kv_groups(
    vllm_config: VllmConfig, kv_cache_config: Any, groups: Sequence[Any]
) -> list[dict[str, Any]]:
    """Every KV group: kind, fields of its spec, and its layers in order with the bytes between two
    blocks of each. With several pipeline ranks the scheduler side sees the layers of the first
    only: they are left out, and ``pipeline_parallel.layers`` says which rank has how many."""
    one_rank = vllm_config.parallel_config.pipeline_parallel_size == 1
    strides = _block_strides(kv_cache_config)
    described = []
    for group in groups:
        spec = _spec(group)
        fields = {name: value for name, value in _fields(spec).items() if name != "block_size"}
        entry: dict[str, Any] = {
            "block_tokens": spec.block_size,
            "draft": bool(getattr(group, "is_eagle_group", False)),
            "kind": spec_kind(spec),
            "spec": plain(fields),
        }
        if one_rank:
            entry["layers"] = list(group.layer_names)
            entry["strides"] = [strides.get(name) for name in group.layer_names]
        described.append(entry)
    return described


def _fields(spec: Any) -> dict[str, Any]:
    names = getattr(packed_as(type(spec)), "__dataclass_fields__", None)
    return {name: getattr(spec, name) for name in names} if names else dict(vars(spec))


def _block_strides(kv_cache_config: Any) -> dict[str, int | None]:
    """Bytes from one block of a layer to its next; sizes and offsets depend on the number of
    blocks."""
    found: dict[str, int | None] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in getattr(tensor, "layers", None) or getattr(tensor, "shared_by", []):
            found[name] = getattr(tensor, "block_stride", None)
    return found


# The identity
# --------------------------------------------------------------------------------------------------

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

#: Keys of a model's configuration that say where it is from or how it is run, never what its KV
#: is. Those that start with an underscore are left out too.
_NOT_OF_THE_MODEL = frozenset(
    {"dtype", "id2label", "label2id", "name_or_path", "torch_dtype", "transformers_version"}
    | {"use_cache"}
)

#: Rope types whose rotation does not depend on the engine's own limit of the context.
_ROPE_OF_CONFIG_ONLY = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})

#: Start of the names of model types whose attention depends on the engine's limit of the context.
_LIMIT_SENSITIVE = ("llama4", "mllama4")

#: Settings of multimodal input that change what the model is fed; the items are in the keys.
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
    ``weights`` is the text of :class:`~.weights.WeightsDigest`, or ``""`` in a worker. Raises
    :class:`~ucm.errors.InvalidInputError` when a part of the configuration has no stable
    description."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = transferable_groups(kv_cache_config)
    identity: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "architecture": _architecture(model),
        "world_size": parallel.world_size,
        "dtype": plain(model.dtype),
        "weights": weights,
        "model_config": _model_config(vllm_config),
        "position": _position(model) | rerope.described(vllm_config),
        "kv_dtype": kv_dtype(vllm_config, groups),
        "attention_backend": attention_backends(vllm_config, groups),
        "kv_packing": kv_packing(vllm_config, groups),
        "kv_layout": kv_layout(kv_cache_config, vllm_config.cache_config),
        "kv_groups": kv_groups(vllm_config, kv_cache_config, groups),
        "block_tokens": block_tokens(vllm_config, kv_cache_config),
        "tensor_parallel": {
            "kv_replicas": kv_replicas(kv_cache_config),
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
    """Name of the directory of this identity below a root: 32 hex digits of its digest."""
    return identity_digest(identity).hex()[:32]


def with_weights(identity: dict[str, Any], weights: str) -> dict[str, Any]:
    """The same identity with its weights filled in, once they are known."""
    return {name: weights if name == "weights" else identity[name] for name in FIELDS}


def identity_without_weights(identity: dict[str, Any]) -> dict[str, Any]:
    """The part that every process of an engine can compute, for comparing the sides."""
    return {name: value for name, value in identity.items() if name != "weights"}


def unidentifiable(vllm_config: VllmConfig) -> str:
    """Why blocks of this engine cannot be named by the blocks before them, as a sentence; else
    empty."""
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
    """Tokens of one block of the store: those of a vLLM block, over all ranks that share a
    context."""
    parallel = vllm_config.parallel_config
    ranks = getattr(parallel, "decode_context_parallel_size", 1)
    sizes = []
    for group in transferable_groups(kv_cache_config):
        spec = group.kv_cache_spec
        sharded = ranks > 1 and getattr(spec, "dcp_sharded", True)
        sizes.append(spec.block_size * (ranks if sharded else 1))
    return math.lcm(*sizes) if sizes else vllm_config.cache_config.block_size


def _architecture(model: Any) -> str:
    named = getattr(model, "architecture", None) or getattr(model, "_architecture", None)
    return str(named or (getattr(model.hf_config, "architectures", None) or ["unknown"])[0])


def _model_config(vllm_config: Any) -> dict[str, Any]:
    """The effective configuration, after every override, and other settings that change the
    computation."""
    model = vllm_config.model_config
    described: dict[str, Any] = {
        "hf": _hf(model.hf_config),
        "quantization": getattr(model, "quantization", None),
        "sliding_window": model.get_sliding_window(),
    }
    if model.hf_text_config is not model.hf_config:
        described["hf_text"] = _hf(model.hf_text_config)
    # Named only where they differ from the default: a setting that vLLM adds empties no store.
    implementation = getattr(model, "model_impl", "auto")
    optional = {
        "additional": getattr(vllm_config, "additional_config", None),
        "class_overrides": getattr(model, "model_class_overrides", None),
        "disable_sliding_window": getattr(model, "disable_sliding_window", False),
        "implementation": None if implementation == "auto" else implementation,
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
        optional["multimodal_items"] = "by content"  # earlier versions had vLLM's names in the keys
        optional["image_processor"] = _hf(getattr(model, "hf_image_processor_config", None) or {})
    described.update({name: value for name, value in optional.items() if value})
    return described


def _transformers(model: Any) -> str | None:
    """The version of transformers, where its code computes the model."""
    used = getattr(model, "using_transformers_backend", None)
    if not (callable(used) and used()):
        return None
    return str(importlib.import_module("transformers").__version__)


def _hf(config: Any) -> Any:
    described = plain(config)
    if not isinstance(described, dict):
        return described
    kept = {key: value for key, value in described.items() if key not in _NOT_OF_THE_MODEL}
    return _without_names(kept)


def _without_names(value: Any) -> Any:
    """Without keys, at any depth, that name the source of a configuration or a library's
    version."""
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
    """How an adapter is applied; empty where that follows from the adapter and the model's
    dtype."""
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
    """How positions enter the keys, with the engine's own limit of the context where it matters."""
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
    pair = ["rope_scaling", "rope_theta"]
    names += ["rope_parameters"] if hasattr(text, "rope_parameters") else pair
    described = {name: value for name in names if (value := getattr(text, name, None)) is not None}
    limited = str(getattr(text, "model_type", "")).startswith(_LIMIT_SENSITIVE)
    if limited or not _rope_types(described) <= _ROPE_OF_CONFIG_ONLY:
        described["max_model_len"] = model.max_model_len
    return described


def _rope_types(value: Any) -> set[str]:
    """Every rope type named at any depth: models with several attention kinds nest their
    parameters."""
    found: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("rope_type", "type") and isinstance(item, str):
                found.add(item)
            else:
                found |= _rope_types(item)
    return found


def _layers_per_rank(vllm_config: Any) -> list[int]:
    """How many layers each pipeline rank holds."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    total = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    if size == 1 or not isinstance(total, int):
        return []
    split = importlib.import_module("vllm.distributed.utils").get_pp_indices
    bounds = [split(total, rank, size) for rank in range(size)]
    return [end - start for start, end in bounds]


# The identity of now
# --------------------------------------------------------------------------------------------------

#: The random words in the text of an identity.
_RANDOM = re.compile(r" reset:[0-9a-f]{32}|(?<=\"private:)[0-9a-f]{32}")


def lasting(text: str) -> str:
    """The text of an identity without its random words."""
    return _RANDOM.sub("", text)


class UnknowableError(UcmError):
    """The weights in memory cannot be named, so neither can their KV."""

    kind = "unkeyable"


class LiveIdentity:
    """The identity of what one engine computes now; kept by its scheduler side."""

    def __init__(
        self, own: dict[str, Any], source: WeightSource, mode: str, root: str | None
    ) -> None:
        """``own`` is without weights; ``mode`` and ``root`` as of :class:`WeightsDigest`."""
        self._own, self._mode, self._root = own, mode, root
        self._weights = WeightsDigest(source, mode, root)
        self._renewed = False
        self._private = ""
        self._word = ""  # joins the weights once stored blocks are to be forgotten
        self._forgotten = False  # since the last comparison of the weights

    def wait(self) -> WeightsState:
        """The state of the weights' digest, after some seconds of waiting for it."""
        return self._weights.wait()

    def text(self) -> str | None:
        """As JSON; None while pending. Raises :class:`UnknowableError` when it cannot be known."""
        weights = self._private or self._named()
        if weights is None:
            return None
        if self._word:
            weights = f"{weights} {self._word}"
        whole = with_weights(self._own, weights)
        text = identity_text(whole)
        logger.info(
            "identity of this engine's KV: %s, weights %s", identity_digest(whole).hex(), weights
        )
        logger.debug("identity spelled out: %s", text)
        return text

    def _named(self) -> str | None:
        state = self._weights.state
        if state.kind == "pending":
            return None
        if state.kind == "known":
            return state.text
        if not self._renewed:
            raise UnknowableError(state.reason)
        return self._make_private(state.reason)

    def _make_private(self, why: str) -> str:
        self._private = f"private:{secrets.token_hex(16)}"
        text = "the weights in memory have no name (%s): their KV is kept for this process alone"
        info_once(text, why)
        return self._private

    def why_invalid(self) -> str:
        """Why the identity no longer holds, empty while it does; compares the files without
        waiting."""
        if self._private:
            return ""
        state = self._weights.recheck(0.0)
        return "" if state.kind in ("known", "pending") else state.reason

    def forget(self) -> None:
        """Give this engine's KV a random name from the next :meth:`update` on, for the life of this
        process: nothing stored before is found."""
        self._word, self._forgotten = f"reset:{secrets.token_hex(16)}", True

    def update(self, reports: list[WeightsReport]) -> bool:
        """Every rank has compared the weights in its memory: whether the identity has changed."""
        forgotten, self._forgotten = self._forgotten, False
        return self._compared(reports) or forgotten

    def _compared(self, reports: list[WeightsReport]) -> bool:
        if all(report.unchanged for report in reports):
            state = self._weights.state
            if self._private or state.kind in ("known", "pending"):
                return False
            if state.kind == "unknown":  # the files changed, memory did not
                self._make_private(state.reason)
            return True
        named = {report.named for report in reports}
        self._weights.close()
        self._renewed, self._private = True, ""
        files = named.pop() if len(named) == 1 else None
        if files is None or self._mode.startswith(DECLARED):
            self._make_private("they were replaced, and not from files that vLLM names")
        else:
            since_ns = min(report.since_ns for report in reports)
            self._weights = WeightsDigest(files, self._mode, self._root, since_ns=since_ns)
        return True

    def close(self) -> None:
        """End the threads."""
        self._weights.close()
