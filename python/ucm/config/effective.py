"""Showing the effective configuration: one line per key with its origin, never a secret."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from ucm.config.secret import is_secret
from ucm.config.sizes import HIDDEN, Capacity, show_size, without_login
from ucm.config.stores import TIER_MODES, TIER_SIZES, TIER_UNSET

#: Keys whose numbers are bytes.
SIZES: frozenset[str] = TIER_SIZES | {"staging_capacity"}

#: Keys whose numbers are permission bits.
MODES: frozenset[str] = TIER_MODES

#: Where the sections of sparse algorithms stand, by name, of which nothing is shown that was not
#: written and has no default.
SPARSE_SECTIONS = "sparse.config."

#: What a default of "nothing given" means, for keys where that says more than `null`.
DEFAULT_TEXT: dict[str, str] = {
    **TIER_UNSET,
    "block_size": "vLLM's",
    "staging_capacity": "for two steps of the engine",
    "platform": "the one vLLM runs on",
    "ucm_connector_module_path": "none",
    "sparse.module_path": "none",
    "store_pipeline": "none",
    "metrics.port": "none",
    "metrics.config_path": "none",
    "profile.output": "none",
    "sparse.type": "none",
    "log.file": "none",
    "tenant_key_file": "none",
    "encryption_key_file": "none",
    "tenant_quota": "none",
    "log.format": "built in",
}


def show(name: str, value: Any) -> str:
    """A value as text, with what must not be printed replaced by ``<hidden>``."""
    return json.dumps(_shown(name, value), ensure_ascii=False, default=str)


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, SecretStr) or (value is not None and is_secret(name)):
        return HIDDEN
    if isinstance(value, Capacity):
        return str(value)
    if name in SIZES and isinstance(value, int):
        return show_size(value)
    if name in MODES and isinstance(value, int):
        return f"{value:04o}"
    if isinstance(value, BaseModel):
        # Inside a list (stages): only what was written, the rest is default.
        given = [key for key in type(value).model_fields if key in value.model_fields_set]
        return {key: _shown(key, getattr(value, key)) for key in given}
    if isinstance(value, Mapping):
        return {str(key): _shown(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(name, item) for item in value]
    if isinstance(value, str):
        return without_login(value)
    return value


def flatten(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf, in the order of the model."""
    for key in type(model).model_fields:
        value = getattr(model, key)
        if isinstance(value, BaseModel):
            yield from flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}." == SPARSE_SECTIONS:
            for name, section in value.items():
                yield from flatten(section, f"{SPARSE_SECTIONS}{name}.")
        elif value is not None or not prefix.startswith(SPARSE_SECTIONS):
            yield f"{prefix}{key}", value


def describe_lines(model: BaseModel, origins: Mapping[str, str]) -> list[str]:
    """``key = value  (origin)`` for every leaf."""
    lines = []
    for key, value in flatten(model):
        if key in {"options", "ucm_connector_config"} and isinstance(value, Mapping):
            for name, item in value.items():
                origin = origins.get(f"{key}.{name}", origins.get(key, "default"))
                shown = name if key == "options" else f"{key}.{name}"
                lines.append(f"{shown} = {show(name, item)}  ({origin})")
            continue
        unset = value is None or value == ()
        text = DEFAULT_TEXT[key] if unset and key in DEFAULT_TEXT else show(key, value)
        lines.append(f"{key} = {text}  ({origins.get(key, 'default')})")
    return lines
