"""What vLLM on a CPU is told about processor cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

#: Processors that vLLM keeps free of computing on a CPU, and where its threads compute: what the user sets for both.
_RESERVED, _BOUND = "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"
#: Ranks share the processors of one memory node, which vLLM has for tests.
_SHARED = "VLLM_CPU_SIM_MULTI_NUMA"


def keep_a_core(cores: int, environ: MutableMapping[str, str]) -> None:
    """On two cores, have vLLM keep the one free of computing that it keeps without a connector.

    It would keep two as soon as any connector is configured, and none where that leaves none to compute on: it would
    compute on both, and engines beside each other were several times slower than without ucm. It takes the number from
    its environment when it starts the ranks, some time after it has looked at the connector's class, which is when
    this is called. What the user wrote stays.
    """
    if cores == 2 and not environ.keys() & {_RESERVED, _BOUND, _SHARED}:
        environ[_RESERVED] = "1"


def cores_here() -> int:
    """Cores that this process may run on, each counted once however many threads it has; 0 if that is not known."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})
    except OSError:
        return 0


def why_slower(ranks: int, cores: int, environ: Mapping[str, str]) -> str:
    """Why an engine on a CPU may be slower with a connector than without, as a sentence; empty where it is not.

    ``cores`` are those it may use. vLLM keeps one for each rank free of computing, two as soon as any connector is
    configured, and none at all where nothing would be left to compute on.
    """
    if _RESERVED in environ or environ.get(_BOUND, "auto") != "auto" or not ranks < cores <= 2 * ranks:
        return ""
    return (
        f"with a connector vLLM computes on all {cores} cores here and keeps none for its scheduler, which makes "
        f"engines beside each other several times slower; {_RESERVED}={ranks} has it keep what it keeps without one"
    )
