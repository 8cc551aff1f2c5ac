"""Copies between a device and the host by address, with streams and buffers: for programs that move
memory themselves.

``Device().setup(0)`` opens a device of this machine, ``make_stream()`` gives a stream that uses its
copy engine, ``make_sm_stream()`` one that uses ucm's kernels, ``make_buffer()`` makes memory on
both sides. The names of the original (``Setup``, ``MakeStream``, ``DeviceToHost`` ...) mean the
same. The whole is also the package ``ucmtrans``.
"""

from __future__ import annotations

import atexit

from ucm import _core
from ucm._core import TransMemory as Memory
from ucm.trans.buffer import Buffer
from ucm.trans.device import Device
from ucm.trans.stream import Stream

#: The names of a platform abstraction (``allocate_memory``, ``h2d_transfer`` ...) are methods of
#: every device.
PlatformAbstraction = Device

project = "ucm"
version = _core.__version__
commit_id = _core.__commit_id__
build_type = _core.__build_type__

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

# A stream's thread that came into an interpreter that ends would never leave it.
atexit.register(_core.end_callbacks)
