"""Helpers for operators: the effective configuration, how much room KV blocks need, where the C
header lies."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from ucm.config import UcmConfig, load
from ucm.errors import InvalidInputError

#: A store keeps this many times what runs at once, so that history is found again.
HISTORY_FACTOR = 10
#: Host memory for what runs at once, with room for transfers.
MEMORY_FACTOR = 1.5

_GIB = 1 << 30
_DTYPE_BYTES = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16", "auto"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1),
}

# Layers, KV heads, head size of published dense models with grouped queries, by billions of
# parameters: used only when nothing but the size of a model is known.
_TYPICAL: tuple[tuple[float, int, int, int], ...] = (
    (0.6, 28, 8, 128),
    (1.0, 16, 8, 64),
    (1.7, 28, 8, 128),
    (3.0, 28, 8, 128),
    (4.0, 36, 8, 128),
    (8.0, 32, 8, 128),
    (14.0, 40, 8, 128),
    (32.0, 64, 8, 128),
    (70.0, 80, 8, 128),
    (123.0, 88, 8, 128),
    (405.0, 126, 8, 128),
)


def include_dir() -> str:
    """The directory of ``ucm_store.h``, for a C compiler's ``-I``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def validate_config(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> UcmConfig:
    """Check a configuration as the connector would, and return it; ``print()`` of it shows every
    value's origin.

    ``config`` is a dictionary as in ``kv_connector_extra_config``, or the path of a YAML file;
    without it, what the environment alone says. Raises :class:`~ucm.errors.ConfigError` with what
    is wrong.
    """
    if isinstance(config, str | os.PathLike):
        return load({"ucm_config_path": os.fspath(config)})
    return load(config)


def estimate_storage_requirements(
    model_size_b: float | Mapping[str, Any] | Any,
    max_seq_len: int,
    max_concurrent_requests: int,
    block_size: int = 16,
    *,
    kv_dtype: str = "auto",
) -> dict[str, float]:
    """How much room the KV cache of a model takes, in GiB (the ``_gb`` of the names is kept for its
    users).

    ``model_size_b`` is best the model's configuration (a Hugging Face ``config.json`` as a
    dictionary or object): its real number of layers, KV heads and head size decide. A plain number
    means billions of parameters, and the shape of the published model nearest to it is assumed.
    ``max_seq_len`` is in tokens, rounded up to whole blocks of ``block_size`` tokens. ``kv_dtype``
    is vLLM's ``kv_cache_dtype``; ``auto`` is the type in which vLLM's ``--dtype auto`` serves the
    model: its own, of a float32 model bfloat16.

    Returns ``kv_cache_size_gb`` (everything running at once), ``recommended_storage_gb`` (ten times
    that, for history), ``recommended_memory_gb`` (one and a half times), and
    ``kv_bytes_per_token``.
    """
    numbers: dict[str, object] = {
        "max_seq_len": max_seq_len,
        "max_concurrent_requests": max_concurrent_requests,
        "block_size": block_size,
    }
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidInputError(f"{name} is a whole number of at least 1, got {number!r}")
    per_token = kv_bytes_per_token(model_size_b, kv_dtype)
    tokens = math.ceil(max_seq_len / block_size) * block_size
    size = per_token * tokens * max_concurrent_requests / _GIB
    return {
        "kv_bytes_per_token": per_token,
        "kv_cache_size_gb": size,
        "recommended_storage_gb": size * HISTORY_FACTOR,
        "recommended_memory_gb": size * MEMORY_FACTOR,
    }


def kv_bytes_per_token(model: float | Mapping[str, Any] | Any, kv_dtype: str = "auto") -> int:
    """Bytes of KV of one token over all layers, unsplit by tensor parallelism."""
    if isinstance(model, bool):
        raise InvalidInputError(
            "a model is its configuration or its size in billions of parameters, got a flag"
        )
    if isinstance(model, int | float):
        layers, elements = _typical(float(model))
        return layers * elements * _dtype_bytes(kv_dtype, None)
    text = _get(model, "text_config")
    config = text if text is not None and _get(text, "num_hidden_layers") is not None else model
    layers = _required(config, "num_hidden_layers", "n_layer", "num_layers")
    width = _dtype_bytes(kv_dtype, _get(config, "dtype", "torch_dtype"))
    latent = _get(config, "kv_lora_rank")
    if latent is not None:
        # Multi-head latent attention: one latent vector and one rotary key per token and layer, for
        # all heads.
        return layers * (int(latent) + int(_get(config, "qk_rope_head_dim") or 0)) * width
    heads = _required(config, "num_attention_heads", "n_head")
    kv_heads = int(_get(config, "num_key_value_heads", "num_kv_heads") or heads)
    head_dim = _get(config, "head_dim")
    if head_dim is None:
        head_dim = _required(config, "hidden_size", "n_embd") // heads
    return layers * 2 * kv_heads * int(head_dim) * width


def _typical(billions: float) -> tuple[int, int]:
    if not math.isfinite(billions) or billions <= 0:
        raise InvalidInputError(
            f"a model's size is a positive number of billions of parameters, got {billions!r}"
        )
    _, layers, kv_heads, head_dim = min(_TYPICAL, key=lambda row: abs(math.log(row[0] / billions)))
    return layers, 2 * kv_heads * head_dim


def _get(config: Any, *names: str) -> Any:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


def _required(config: Any, *names: str) -> int:
    value = _get(config, *names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(
            f"the model's configuration has no usable {names[0]}, got {value!r}"
        )
    return value


def _dtype_bytes(kv_dtype: str, model_dtype: Any) -> int:
    name = str(
        model_dtype if kv_dtype == "auto" and model_dtype is not None else kv_dtype
    ).removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise InvalidInputError(
            f"unknown KV dtype {name!r}; known are {', '.join(sorted(_DTYPE_BYTES))}"
        )
    width = _DTYPE_BYTES[name]
    # vLLM serves a float32 model in 16 bits unless --dtype says otherwise.
    return min(width, 2) if kv_dtype == "auto" else width
