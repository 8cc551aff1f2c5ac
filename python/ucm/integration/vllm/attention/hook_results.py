"""What a hook returns in the place of what it was given, before it goes to vLLM's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def fits(found: Any, given: Sequence[Any]) -> bool:
    """Whether a hook returned as many values as it was given, and tensors of the same shape and
    kind for tensors. Anything else fails in code that is not the hook's."""
    return (
        isinstance(found, tuple | list)
        and len(found) == len(given)
        and all(map(_alike, found, given))
    )


def _alike(found: Any, given: Any) -> bool:
    if found is given:
        return True
    if not isinstance(given, Tensor):
        return found is None or isinstance(found, Tensor)
    if not isinstance(found, Tensor):
        return False
    return (found.shape, found.dtype, found.device) == (given.shape, given.dtype, given.device)
