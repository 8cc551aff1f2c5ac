"""A name of the original; see :mod:`ucm.store.presets`."""

from ucm.store.presets import UcmMooncakeStore

__all__ = ["UcmMooncakeStore"]
