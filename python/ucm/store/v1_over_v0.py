"""Name of the original; see :mod:`ucm.store.v0`."""

from ucm.store.v0 import V1OverV0

__all__ = ["V1OverV0"]
