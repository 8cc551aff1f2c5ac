"""One typed configuration for all of ucm: YAML file, inline dictionary, environment; the later one
wins.

:func:`load` reads, checks and returns it; :func:`parse` does the same without asking whether what
is named is built yet. ``docs/configuration.md`` names the pages of all keys, with unit, default,
other spellings and environment name.

The names are imported when they are first used: a part of ucm that the configuration reads may use
:mod:`ucm.config.fields`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucm.config.fields import Capacity, parse_capacity, parse_flag, parse_paths, parse_size
    from ucm.config.loading import UCMConfig, load, parse, warn_once
    from ucm.config.model import (
        DEADLINE_KEYS,
        Deadlines,
        IdentityConfig,
        LogConfig,
        MetricsConfig,
        ProfileConfig,
        ReropeConfig,
        SparseConfig,
        Stage,
        UcmConfig,
    )

__all__ = [
    "DEADLINE_KEYS",
    "Capacity",
    "Deadlines",
    "IdentityConfig",
    "LogConfig",
    "MetricsConfig",
    "ProfileConfig",
    "ReropeConfig",
    "SparseConfig",
    "Stage",
    "UCMConfig",
    "UcmConfig",
    "load",
    "parse",
    "parse_capacity",
    "parse_flag",
    "parse_paths",
    "parse_size",
    "warn_once",
]

_FIELDS = frozenset({"Capacity", "parse_capacity", "parse_flag", "parse_paths", "parse_size"})
_LOADING = frozenset({"UCMConfig", "load", "parse", "warn_once"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "fields" if name in _FIELDS else "loading" if name in _LOADING else "model"
    found = getattr(importlib.import_module(f"ucm.config.{module}"), name)
    globals()[name] = found  # once only
    return found
