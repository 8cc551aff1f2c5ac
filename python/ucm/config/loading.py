"""The two ways in: :func:`load` for a caller that wants to run, :func:`parse` for one that wants to
look.

Order: YAML file, inline dictionary, environment; the later one wins, key by key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ucm.config.alternatives import with_alternatives
from ucm.config.assemble import assemble
from ucm.config.model import UcmConfig
from ucm.config.sources import (
    INLINE,
    disabled,
    file_named,
    read_environment,
    read_file,
    read_inline,
)
from ucm.errors import ConfigError

_log = logging.getLogger("ucm.config")
_said: set[str] = set()


def load(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> UcmConfig:
    """The effective configuration, ready to run.

    ``extra_config`` is vLLM's ``kv_connector_extra_config``: keys of ucm themselves, or
    ``ucm_config_path`` (also ``UCM_CONFIG_FILE``) naming a YAML file, or both. ``environ`` is the
    environment (None: this process's).

    Logs every warning once per process. Raises :class:`~ucm.errors.ConfigError` for whatever is
    wrong, unknown, contradictory, missing, or not built yet. With ``UCM_DISABLE=1`` nothing is read
    and ``enabled`` is false.
    """
    config = parse(extra_config, environ)
    for warning in config.warnings:
        warn_once(warning)
    config.require_built()
    return config


def parse(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> UcmConfig:
    """As :func:`load`, but silent, and what is not built yet ends up in ``problems`` instead of
    raising."""
    env = os.environ if environ is None else environ
    inline = {} if extra_config is None else extra_config
    if not isinstance(inline, Mapping):
        raise ConfigError(f"{INLINE} is a dictionary, got {type(inline).__name__}")
    if disabled(env):
        return UcmConfig(enabled=False).with_findings(
            origins={"enabled": "environment UCM_DISABLE"}
        )
    first, entries = _one(inline, env, 0)
    others = [_one(inline, env, choice)[0] for choice in range(1, entries)]
    return with_alternatives(first, others) if others else first


def _one(inline: Mapping[str, Any], env: Mapping[str, str], choice: int) -> tuple[UcmConfig, int]:
    """The configuration with this entry of ``ucm_connectors``, and how many entries there are."""
    named = file_named(inline, env)
    layers = [read_file(*named, choice)] if named is not None else []
    layers += [read_inline(inline, choice), read_environment(env)]
    return assemble(layers), max(layer.entries for layer in layers)


def warn_once(message: str) -> None:
    """Log a warning unless this process has said it before: both sides of a connector read the
    configuration."""
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
