"""How the running engine lays KV bytes out: dtype, attention backend, packing, layout and groups of
the identity.

Both sides of the connector compute these from the configuration alone, because the scheduler side
has no layers when the ranks are processes of their own. Where layers are in reach, their own
backend is asked; a worker whose layers differ from what the scheduler side expected shows up as a
difference in the handshake.

An attention backend or a KV cache spec from outside vLLM counts as another one, for no one knows
how it packs. A class that stores the very bytes of the one it is derived from says so in its own
body, ``ucm_packs_like = <that class>``, and is described as that class; what it computes beside the
KV is no part of a page and of no identity. The claim is not inherited: a class derived from it has
to make it again.
"""

from __future__ import annotations

import contextlib
import inspect
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ucm.errors import InvalidInputError
from ucm.integration.vllm.compat.versions import installed
from ucm.integration.vllm.connector.identity.canonical import plain

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Attribute by which a class claims the packing of one that it is derived from.
CLAIM = "ucm_packs_like"

#: Features of a processor by which packing may differ within one instruction set's name (not on
#: x86).
_FEATURES = ("bf16", "i8mm", "sve", "sve2", "v", "zvl128b", "zvl256b")


def transferable_groups(kv_cache_config: Any) -> list[Any]:
    """The KV groups whose blocks hold lasting state, in vLLM's order."""
    return [
        group
        for group in kv_cache_config.kv_cache_groups
        if getattr(group, "enable_kv_transfer", True)
    ]


def layer_specs(spec: Any) -> list[Any]:
    """The specs a group's spec stands for: one per layer where vLLM keeps them apart, else the spec
    itself."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


def packed_as(kind: type) -> type:
    """The class whose bytes this backend or spec stores: itself, unless it claims those of one it
    is derived from.

    Raises :class:`~ucm.errors.InvalidInputError` for a claim to pack like something else.
    """
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
    # vLLM's scheduler sees only the first spec of a group that keeps one per layer, so that one
    # describes it here; the block strides of kv_groups() tell the layers apart.
    return layer_specs(group.kv_cache_spec)[0]


def kv_dtype(vllm_config: VllmConfig, groups: Sequence[Any]) -> dict[str, Any]:
    """What one number of the cache is: the name by which vLLM chose it, its storage and how it is
    quantised."""
    cache, model_dtype = vllm_config.cache_config, plain(vllm_config.model_config.dtype)
    # A backend may settle the name in the worker only; the spec carries that to the scheduler.
    names = {
        getattr(_spec(group), "cache_dtype_str", None) or cache.cache_dtype for group in groups
    }
    described: dict[str, Any] = {
        "names": sorted(model_dtype if name == "auto" else name for name in names),
        "quantised": [plain(getattr(_spec(group), "kv_quant_mode", None)) for group in groups],
        "skip_layers": sorted(getattr(cache, "kv_cache_dtype_skip_layers", None) or []),
        "storage": [plain(getattr(_spec(group), "dtype", None)) for group in groups],
    }
    indexer = getattr(getattr(vllm_config, "attention_config", None), "indexer_kv_dtype", "auto")
    if indexer != "auto":
        described["indexer"] = indexer
    return described


def attention_backends(vllm_config: VllmConfig, groups: Sequence[Any]) -> list[list[str]]:
    """Names of the attention backends of each group, sorted."""
    return [
        sorted(_actual(vllm_config, group) or {_expected(vllm_config, group)}) for group in groups
    ]


def _actual(vllm_config: Any, group: Any) -> set[str]:
    layers = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    names = set()
    for name in group.layer_names:
        ask = getattr(layers.get(name), "get_attn_backend", None)
        if not callable(ask):
            return set()
        names.add(_backend_name(ask()))
    return names


def _expected(vllm_config: Any, group: Any) -> str:
    """What vLLM's own selection gives for this group, without its layers."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    spec, model = _spec(group), vllm_config.model_config
    wanted = {
        "head_size": getattr(spec, "head_size", None),
        "dtype": model.dtype,
        "kv_cache_dtype": (
            getattr(spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype
        ),
        "use_mla": bool(getattr(model, "use_mla", False)),
        "use_sparse": hasattr(model.hf_text_config, "index_topk"),
        "use_mm_prefix": bool(getattr(model, "is_mm_prefix_lm", False)),
        "has_sliding_window": getattr(spec, "sliding_window", None) is not None,
        "num_heads": model.get_num_attention_heads(vllm_config.parallel_config),
    }
    known = inspect.signature(get_attn_backend).parameters
    try:
        with set_current_vllm_config(vllm_config):
            return _backend_name(
                get_attn_backend(**{key: value for key, value in wanted.items() if key in known})
            )
    except (
        AssertionError,
        ImportError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # The engine runs, so the workers know better; their answer will differ from this one and be
        # named.
        return f"not known to the scheduler ({type(error).__name__})"


def _backend_name(backend: Any) -> str:
    # A backend from outside vLLM may keep the name of the one it replaces, and still pack
    # differently.
    backend = packed_as(backend)
    name = str(backend.get_name())
    return (
        name
        if backend.__module__.startswith("vllm.")
        else f"{name} ({backend.__module__}.{backend.__qualname__})"
    )


def kv_packing(vllm_config: VllmConfig, groups: Sequence[Any]) -> dict[str, Any]:
    """How a backend arranges the numbers inside one block, which no shape tells."""
    from vllm.platforms import current_platform

    described: dict[str, Any] = {
        # Any build may mend a model or change a kernel without a change of shape.
        "engine": f"vllm {installed()}",
        "groups": [
            _group_packing(vllm_config, group, bool(current_platform.is_cpu())) for group in groups
        ],
        "platform": plain(getattr(current_platform, "_enum", None)) or current_platform.device_type,
    }
    if any(
        plain(getattr(_spec(group), "kv_quant_mode", None)) not in (None, "NONE")
        for group in groups
    ):
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
        known = inspect.signature(choose).parameters if choose is not None else {}
        wanted = {
            "dtype": vllm_config.model_config.dtype,
            "block_size": spec.block_size,
            "head_size": spec.head_size,
            "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        }
        try:
            described["isa"] = (
                choose(**{key: value for key, value in wanted.items() if key in known})
                if choose
                else ""
            )
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
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        cache_config, "kv_cache_layout", None
    )
    return str(plain(layout)) if layout else ""


def kv_groups(
    vllm_config: VllmConfig, kv_cache_config: Any, groups: Sequence[Any]
) -> list[dict[str, Any]]:
    """Every KV group: kind, fields of its spec, and its layers in order with the bytes between two
    blocks of each.

    With several pipeline ranks the scheduler side sees the layers of the first rank only; the
    layers of a group are then left out, and ``pipeline_parallel.layers`` says who holds which.
    """
    one_rank = vllm_config.parallel_config.pipeline_parallel_size == 1
    strides = _block_strides(kv_cache_config)
    described = []
    for group in groups:
        spec = _spec(group)
        entry: dict[str, Any] = {
            "block_tokens": spec.block_size,
            "draft": bool(getattr(group, "is_eagle_group", False)),
            "kind": spec_kind(spec),
            "spec": plain(
                {name: value for name, value in _fields(spec).items() if name != "block_size"}
            ),
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
    """Bytes from one block of a layer to its next, which unlike sizes and offsets do not depend on
    their number."""
    found: dict[str, int | None] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in getattr(tensor, "layers", None) or getattr(tensor, "shared_by", []):
            found[name] = getattr(tensor, "block_stride", None)
    return found
