"""With how many processor cores vLLM computes on a CPU: vLLM decides, ucm warns of few.

A cache does not choose how many threads a model has, so nothing here changes vLLM's environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: Processors that vLLM keeps free of computing on a CPU, and where its threads compute: what the
#: user sets for both.
_RESERVED, _BOUND = "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"


def cores_here() -> int:
    """Cores that this process may run on, each counted once however many threads it has; 0 if that
    is not known."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})
    except OSError:
        return 0


def why_slower(ranks: int, cores: int, environ: Mapping[str, str]) -> str:
    """Why an engine on a CPU may be slower with a connector than without, as a sentence; empty
    where it is not.

    ``cores`` are those it may use. vLLM keeps one for each rank free of computing, two as soon as
    any connector is configured, and none at all where nothing would be left to compute on.
    """
    if (
        _RESERVED in environ
        or environ.get(_BOUND, "auto") != "auto"
        or not ranks < cores <= 2 * ranks
    ):
        return ""
    return (
        f"with a connector vLLM computes on all {cores} cores here and keeps none for its"
        " scheduler, which makes engines beside each other several times slower;"
        f" {_RESERVED}={ranks} has it keep what it keeps without one"
    )
