"""Where a tensor lies, for anything that has ``data_ptr()`` and for NumPy arrays; torch itself is
never imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from ucm.errors import InvalidInputError


def address_of(tensor: Any, **where: int) -> int:
    """The address of a contiguous tensor; ``where`` (row, column) goes into the error about one
    that is not."""
    if hasattr(tensor, "data_ptr"):
        contiguous, address = tensor.is_contiguous(), tensor.data_ptr()
    elif isinstance(tensor, np.ndarray):
        contiguous, address = tensor.flags.c_contiguous, tensor.ctypes.data
    else:
        raise InvalidInputError(
            "a tensor is a torch tensor or a NumPy array",
            context={**where, "type": type(tensor).__name__},
        )
    if not contiguous:
        raise InvalidInputError("a tensor must be contiguous", context=dict(where))
    return int(address)


def bytes_of(tensor: Any) -> int:
    """The size of a tensor in bytes."""
    return int(
        tensor.nbytes if isinstance(tensor, np.ndarray) else tensor.numel() * tensor.element_size()
    )


def on_host(tensor: Any) -> bool:
    """Whether a tensor lies in memory that this process can read itself."""
    device = getattr(tensor, "device", None)
    return getattr(device, "type", "cpu") == "cpu"
