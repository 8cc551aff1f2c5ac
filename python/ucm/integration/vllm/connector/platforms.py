"""The platforms of the core for vLLM, how the work of each is waited for, and with how many
processor cores a model computes on a CPU.

A dump may read a block once the model has written it. On an accelerator that is later than the
return of the call, so a rank records an event on the model's stream and passes its handle to the
store, which waits for it. A cache does not choose how many threads a model has: vLLM decides, and
ucm warns of few.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ucm.config.words import PLATFORM_ROWS, PlatformRow

#: The handle of an event, 0 where there is none, and what keeps it alive.
Mark = tuple[int, Any]


@dataclass(frozen=True)
class Platform:
    """One platform."""

    #: ``platform`` of a configuration, and the kind of device of the core.
    word: str
    #: ``device_name`` of its platform in vLLM.
    names: tuple[str, ...]
    #: torch's type of the device that the KV lies on.
    device: str
    #: Marks the work that was given to the device so far.
    mark: Callable[[torch.device], Mark]


def nothing(device: torch.device) -> Mark:
    """No event: a processor's work is done when the call returns."""
    del device
    return 0, None


def event(handle: str) -> Callable[[torch.device], Mark]:
    """An event of torch on the stream that the model runs on; ``handle`` is its attribute with the
    handle of the device's runtime."""

    def mark(device: torch.device) -> Mark:
        module = torch.get_device_module(device)
        made = module.Event()
        made.record(module.current_stream(device))
        return int(getattr(made, handle)), made

    return mark


def _platform(row: PlatformRow) -> Platform:
    # torch names the handle of an event after its device; not verified for MUSA.
    mark = nothing if row.in_torch == "cpu" else event(f"{row.in_torch}_event")
    return Platform(row.name, tuple(row.in_vllm), row.in_torch, mark)


PLATFORMS: list[Platform] = [_platform(row) for row in PLATFORM_ROWS]


def platform_of(wanted: str | None, running: Any) -> Platform | str:
    """The platform of an engine, or why ucm does not serve it, as a sentence. ``running`` is vLLM's
    ``current_platform``; ``wanted`` is ``platform`` of our configuration, which can choose among
    platforms with the same name in vLLM, and never turns one into another."""
    try:
        named = getattr(running, "device_name", "") or getattr(running, "device_type", "")
        name = named or type(running).__name__
    except Exception as error:
        return f"vLLM does not say what it runs on ({error!r}): nothing is claimed or stored"
    served = [platform for platform in PLATFORMS if name in platform.names]
    if not served:
        return f"vLLM runs on {name}, for which ucm has no device: nothing is claimed or stored"
    for platform in served:
        if wanted in (None, platform.word):
            return platform
    words = " or ".join(platform.word for platform in served)
    return (
        f"platform {wanted} is configured, but vLLM runs on {name}, so nothing is claimed or"
        f" stored; write {words}, or unset PLATFORM"
    )


#: The user's settings of the processors that vLLM keeps free of computing, and of those that its
#: threads compute on.
_RESERVED, _BOUND = "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"


def cores_here() -> int:
    """Physical cores that this process may run on; 0 if that is not known."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})
    except OSError:
        return 0


def why_slower(ranks: int, cores: int, environ: Mapping[str, str]) -> str:
    """Why an engine on a CPU may be slower with a connector than without, as a sentence; else
    empty. ``cores`` are those it may use. vLLM keeps one for each rank free of computing, two as
    soon as any connector is configured, and none where no core would be left to compute on."""
    chosen = _RESERVED in environ or environ.get(_BOUND, "auto") != "auto"
    if chosen or not ranks < cores <= 2 * ranks:
        return ""
    return (
        f"with a connector vLLM computes on all {cores} cores here and keeps none for its"
        " scheduler, which makes engines beside each other several times slower;"
        f" {_RESERVED}={ranks} has it keep what it keeps without one"
    )
