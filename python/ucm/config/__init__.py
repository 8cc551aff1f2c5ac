"""One typed configuration for all of ucm: YAML file, inline dictionary, environment; the later one wins.

:func:`load` reads, checks and returns it; :func:`parse` does the same without asking whether what is named is built
yet. ``docs/configuration.md`` lists every key, with its unit, default, other spellings and environment name.
"""

from __future__ import annotations

from ucm.config.loading import load, parse, warn_once
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
from ucm.config.sizes import Capacity, parse_capacity, parse_flag, parse_paths, parse_size

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
    "UcmConfig",
    "load",
    "parse",
    "parse_capacity",
    "parse_flag",
    "parse_paths",
    "parse_size",
    "warn_once",
]
