"""A name of the original; see :mod:`ucm.store.presets`."""

from ucm.store.presets import UcmDs3fsStore

__all__ = ["UcmDs3fsStore"]
