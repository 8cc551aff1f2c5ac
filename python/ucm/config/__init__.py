"""One typed configuration for all of ucm: YAML file, inline dictionary, environment; the later one
wins.

:func:`load` reads, checks and returns it; :func:`parse` does the same without asking whether what
is named is built yet. ``docs/configuration.md`` names the pages of all keys, with unit, default,
other spellings and environment name.

The names are imported when they are first used: a part of ucm that the configuration reads may use
:mod:`ucm.config.fields`.
"""

from typing import TYPE_CHECKING

from ucm.lazy import lazy

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

_FIELDS = ("Capacity", "parse_capacity", "parse_flag", "parse_paths", "parse_size")
_LOADING = ("UCMConfig", "load", "parse", "warn_once")
_WHERE = dict.fromkeys(__all__, "ucm.config.model")
_WHERE |= dict.fromkeys(_FIELDS, "ucm.config.fields")
_WHERE |= dict.fromkeys(_LOADING, "ucm.config.loading")
__getattr__ = lazy(__name__, _WHERE)
