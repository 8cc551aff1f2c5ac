"""What the core is told of a stage of memory."""

from __future__ import annotations

from typing import Any

from ucm.config.sizes import Capacity


def cache_stage(size: int | Capacity, policy: str, processes: int, scheduler_elsewhere: bool) -> dict[str, Any]:
    """A stage of ``size`` bytes in each process, or of that share of the machine in all ``processes`` together.

    ``scheduler_elsewhere``: the scheduler half may run on another host, so what is kept here has to be told to it.
    """
    share = size if isinstance(size, Capacity) else Capacity(bytes=size)
    return {
        "kind": "cache",
        "capacity_bytes": share.bytes,
        "capacity_percent": share.percent,
        "policy": policy,
        "processes": processes,
        "scheduler_elsewhere": scheduler_elsewhere,
    }
