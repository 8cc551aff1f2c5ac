"""A name of the original; see :mod:`ucm.store.presets`."""

from ucm.store.presets import UcmFakeStore

__all__ = ["UcmFakeStore"]
