"""The versions of vLLM that ucm serves: one table, read where a connector is built."""

from __future__ import annotations

import re
from typing import Any

#: Major and minor version of the releases that ucm was tested with, from the oldest.
SERVED: tuple[tuple[int, int], ...] = ((0, 30), (0, 31), (0, 32), (0, 33))


def installed() -> str:
    """The version of vLLM in this process, its local part included."""
    import vllm

    return str(vllm.__version__)


def why_unserved(version: str) -> str:
    """Why the cache stays off under this version, as a sentence; empty where it may be used."""
    found = _release(version)
    if found is None or found >= SERVED[0]:
        return ""
    return (
        f"ucm serves vLLM {_text(SERVED[0])} to {_text(SERVED[-1])}, and this is vLLM {version}:"
        " update vLLM"
    )


def why_untested(version: str) -> str:
    """What to know of a version that is served and not in the table, as a sentence; empty where it
    is."""
    if why_unserved(version) or _release(version) in SERVED:
        return ""
    return (
        f"vLLM {version} is not among the versions that ucm was tested with "
        f"({_text(SERVED[0])} to {_text(SERVED[-1])}); the cache is used all the same"
    )


def announces_sleep() -> bool:
    """Whether vLLM calls a connector before it unmaps the KV for a sleep; since 0.33."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def names_replicas(kv_cache_config: Any) -> bool:
    """Whether vLLM says which tensor ranks hold the same KV; since 0.31."""
    return hasattr(kv_cache_config, "kv_tp_replicas")


def kv_replicas(kv_cache_config: Any) -> int:
    """Consecutive tensor ranks that hold the same KV; 1 where vLLM does not say it."""
    return max(1, getattr(kv_cache_config, "kv_tp_replicas", 1))


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor version; None of a build that does not know its release.

    Such a build says "dev", or where its sources had no tags "0.1.dev…" or "0.0.0"."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None or re.match(r"v?0\.(1\.dev|0\.0(?!\d))", version):
        return None
    return int(found[1]), int(found[2])


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
