"""Which devices ucm runs on: its engine copies with the processor, so the KV has to lie in the host's memory."""

from __future__ import annotations

from typing import Any


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
