"""Which devices ucm runs on: its engine copies with the processor, so the KV has to lie in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Processors that vLLM keeps free of computing on a CPU, and where its threads compute: the user's word for both.
_RESERVED, _BOUND = "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"


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
