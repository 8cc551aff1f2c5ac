"""The arms of the comparison: one line for each measured variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """One arm: its class, its options and its environment."""

    name: str
    module: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: One of ucm's own.
    own: bool = False
    #: Runs in the environment for CPython 3.12.
    python312: bool = False
    #: A program with the protocol of ``child.py``, called with ``kind``, instead of a class.
    program: str = ""


#: Blocks are published when nothing more is being written: a round ends when all of its blocks are
#: published.
_SEGMENTS = {"layout": "segment"}

#: ucm's arms; the first is the reference. Files and segments, in this order, for both ends of a
#: load: in the caller's memory, and in the verified slot.
ARMS = (
    Arm("ucm, files", "peer_ucm", "Ucm", {"config": {"layout": "file"}}, own=True),
    Arm("ucm, segments", "peer_ucm", "Ucm", {"config": _SEGMENTS}, own=True),
    Arm(
        "ucm, files, to the slot", "peer_ucm", "UcmToSlot", {"config": {"layout": "file"}}, own=True
    ),
    Arm("ucm, segments, to the slot", "peer_ucm", "UcmToSlot", {"config": _SEGMENTS}, own=True),
    Arm("vLLM fs tier", "peer_vllm", "VllmFs"),
    Arm("LMCache fs", "peer_lmcache", "LMCacheL2", {"type": "fs"}),
    Arm("LMCache fs_native", "peer_lmcache", "LMCacheL2", {"type": "fs_native"}),
    Arm("UCM 0.8.1 psync", "peer_upstream", "Upstream", {"engine": "psync"}, python312=True),
    Arm("UCM 0.8.1 aio", "peer_upstream", "Upstream", {"engine": "aio"}, python312=True),
)
