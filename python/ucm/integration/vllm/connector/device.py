"""Which devices ucm serves, and what vLLM is told about processor cores.

ucm copies with the processor, so the KV has to lie in the host's memory: only vLLM on a CPU is served.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

#: Processors that vLLM keeps free of computing on a CPU, and where its threads compute: what the user sets for both.
_RESERVED, _BOUND = "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"
#: Ranks share the processors of one memory node, which vLLM has for tests.
_SHARED = "VLLM_CPU_SIM_MULTI_NUMA"


def why_not_here(wanted: str | None, running: Any) -> str:
    """Why ucm leaves an engine on this device alone, as a sentence; empty on a CPU.

    ``running`` is vLLM's ``current_platform``, which alone says what the engine runs on. ``wanted`` is ``platform`` of
    our configuration: it can name a device that is not built yet, never turn one into another.
    """
    if wanted not in (None, "host"):
        return (
            f"platform {wanted} is configured, which is not built yet, so nothing is claimed or stored; on vLLM for a "
            "CPU write host, or unset PLATFORM"
        )
    try:
        if running.is_cpu():
            return ""
        name = getattr(running, "device_type", "") or type(running).__name__
    except Exception as error:
        return f"vLLM does not say what it runs on ({error!r}): nothing is claimed or stored"
    return f"vLLM runs on {name}, which is not built yet, only a CPU is: nothing is claimed or stored"


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
