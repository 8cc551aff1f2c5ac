"""The tiles of AMX, which Linux grants to a process that asks for them; an instruction of theirs
ends one that did not.

torch and vLLM's kernels ask when they first need them. What ucm runs by itself asks before.
"""

from __future__ import annotations

import torch

from ucm.errors import UnsupportedError


def ask_for_tiles() -> None:
    """Ask for the tiles, for all threads of this process; nothing on a processor without AMX.

    Raises :class:`~ucm.errors.UnsupportedError` where the system refuses them.
    """
    cpu = torch.cpu
    if cpu._is_amx_tile_supported() and not cpu._init_amx():
        raise UnsupportedError(
            "the system refuses this process the tiles of AMX, which this processor has"
        )
