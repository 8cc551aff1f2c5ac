"""The package :mod:`ucm.trans` under the name that the original has."""

from __future__ import annotations

from ucm.trans import (
    Buffer,
    Device,
    Memory,
    PlatformAbstraction,
    Stream,
    build_type,
    commit_id,
    project,
    version,
)

__all__ = [
    "Buffer",
    "Device",
    "Memory",
    "PlatformAbstraction",
    "Stream",
    "build_type",
    "commit_id",
    "project",
    "version",
]
