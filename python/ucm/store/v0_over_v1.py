"""Names of the original; see :mod:`ucm.store.v0`."""

from ucm.store.v0 import FORGOTTEN_S, V0OverV1

__all__ = ["FORGOTTEN_S", "V0OverV1"]
